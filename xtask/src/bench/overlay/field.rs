//! Nodes of a benchmark, each a process; what publishes to them, what follows them, and what they cost.

use crate::bench::Bench;
use crate::bench::process::{Cpu, rss_mib};
use ron_testkit::Node;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(super) const NODES: usize = 8;
/// The topic that everything is published to.
pub(super) const TOPIC: &str = "bench";
/// Hexadecimal digits of the instant that a payload begins with.
pub(super) const STAMP: usize = 16;
/// How long what was published may take to arrive everywhere.
const SETTLE: Duration = Duration::from_secs(5);

pub(super) struct Field {
    pub(super) nodes: Vec<Node>,
}

impl Field {
    /// Starts nodes of which the later dial the earlier, where `linked` says so, and waits for their sessions.
    pub(super) fn start(bench: &Bench, keys: &str, linked: impl Fn(usize, usize) -> bool) -> Option<Field> {
        let mut nodes: Vec<Node> = Vec::new();
        for number in 0..NODES {
            let peers: Vec<String> = nodes
                .iter()
                .enumerate()
                .filter(|(other, _)| linked(*other, number))
                .map(|(_, node)| {
                    format!("\"{}@{}\"", node.address("overlay", "node"), node.address("overlay", "oap"))
                })
                .collect();
            nodes.push(Node::start_binary(&bench.binary, &["overlay"], &admits_all(&peers, keys)));
        }
        let links = |number: usize| {
            (0..NODES)
                .filter(|other| linked(*other.min(&number), *other.max(&number)) && *other != number)
                .count()
        };
        let begun = Instant::now();
        let field = Field { nodes };
        while !(0..NODES).all(|number| field.nodes[number].metric("sessions_active") == links(number) as f64)
        {
            if begun.elapsed() > Duration::from_secs(20) {
                println!("the nodes do not find each other");
                return None;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Some(field)
    }

    /// Processor time of all nodes and of the load.
    pub(super) fn cpu(&self) -> f64 {
        let own = Cpu::own(std::process::id());
        self.nodes.iter().map(|node| Cpu::own(node.pid())).fold(own, |sum, of| sum + of)
    }

    pub(super) fn rss(&self) -> Vec<f64> {
        self.nodes.iter().map(|node| rss_mib(node.pid())).collect()
    }

    /// Messages that have come to nodes that did not publish them, as each counts them.
    pub(super) fn delivered(&self) -> f64 {
        self.total("gossip_messages_total{result=\"delivered\"}")
    }

    pub(super) fn total(&self, series: &str) -> f64 {
        self.nodes.iter().map(|node| node.metric(series)).sum()
    }

    /// Waits until so many were delivered since, or nothing more comes; says how many were.
    pub(super) fn settle(&self, before: f64, expected: f64) -> f64 {
        let begun = Instant::now();
        loop {
            let delivered = self.delivered() - before;
            if delivered >= expected || begun.elapsed() > SETTLE {
                return delivered;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// The configuration of a node that takes whoever comes, as fast as they come. One thread is a node's share, and more,
/// of two cores that eight of them have together.
pub(super) fn admits_all(peers: &[String], keys: &str) -> String {
    format!(
        "[node]\nworker_threads = 1\n[log]\nlevel = \"error\"\n[admin]\nlisten = \"127.0.0.1:0\"\n[overlay.peer]\nmax_rps = 0\n\
         [overlay]\nlisten = \"127.0.0.1:0\"\nadmit = \"any\"\nhandshakes_per_ip = 0\npeers = [{}]\n{keys}",
        peers.join(", ")
    )
}

/// Now, in nanoseconds of the Unix clock, which all processes of a machine share.
pub(super) fn unix_nanos() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// A payload of so many bytes that says when it was due.
pub(super) fn payload(due: u64, size: usize) -> String {
    format!("{due:0STAMP$x}{}", "x".repeat(size.saturating_sub(STAMP)))
}

/// When a payload was due, if one is in this line of a stream.
fn stamp(line: &[u8]) -> Option<u64> {
    const BEFORE: &[u8] = b"\"payload\":\"";
    let head = &line[..line.len().min(512)];
    let at = head.windows(BEFORE.len()).position(|part| part == BEFORE)? + BEFORE.len();
    u64::from_str_radix(std::str::from_utf8(line.get(at..at + STAMP)?).ok()?, 16).ok()
}

/// A local user of a node that follows the topic, and the latencies it saw.
pub(super) struct Follower {
    /// The instant a message was due and how long it took, both in nanoseconds.
    seen: Arc<Mutex<Vec<(u64, u64)>>>,
}

impl Follower {
    pub(super) fn start(node: &Node) -> Option<Follower> {
        let mut stream = TcpStream::connect(node.admin()).ok()?;
        let token = std::fs::read_to_string(node.dir.path().join("admin.token")).ok()?;
        let head = format!(
            "GET /overlay/topics/{TOPIC} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).ok()?;
        let mut lines = BufReader::with_capacity(64 << 10, stream);
        let mut line = Vec::new();
        // The first piece says that whatever is published from now on will come.
        while !line.starts_with(b": following") {
            line.clear();
            lines.read_until(b'\n', &mut line).ok().filter(|read| *read > 0)?;
        }
        let seen: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
        let own = seen.clone();
        std::thread::spawn(move || {
            loop {
                line.clear();
                if !matches!(lines.read_until(b'\n', &mut line), Ok(read) if read > 0) {
                    return;
                }
                if let Some(due) = stamp(&line) {
                    let took = unix_nanos().saturating_sub(due);
                    own.lock().unwrap_or_else(PoisonError::into_inner).push((due, took));
                }
            }
        });
        Some(Follower { seen })
    }

    /// What was due within these instants, in milliseconds and in order.
    pub(super) fn between(&self, from: u64, to: u64) -> Vec<f64> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let within = seen.iter().filter(|(due, _)| (from..to).contains(due));
        let mut took: Vec<f64> = within.map(|(_, took)| *took as f64 / 1e6).collect();
        took.sort_by(f64::total_cmp);
        took
    }
}

/// Median and 99th percentile of sorted times.
pub(super) fn quantiles(sorted: &[f64]) -> (f64, f64) {
    let at = |share: f64| sorted.get((sorted.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    (at(0.5), at(0.99))
}

/// What became of publications.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Told {
    pub(super) accepted: u64,
    /// Refused with 429.
    pub(super) refused: u64,
    /// Peers that could not be given an accepted message, as the answers say.
    pub(super) peers_refused: u64,
}

/// One connection over which messages are published, whose answers are read apart.
pub(super) struct Publisher {
    stream: TcpStream,
    head: String,
    sent: u64,
    answered: Arc<AtomicU64>,
    reader: JoinHandle<Told>,
    over: Arc<AtomicBool>,
}

impl Publisher {
    /// `wait` makes each request wait for room.
    pub(super) fn start(node: &Node, size: usize, wait: bool) -> Option<Publisher> {
        let stream = TcpStream::connect(node.admin()).ok()?;
        stream.set_nodelay(true).ok()?;
        let token = std::fs::read_to_string(node.dir.path().join("admin.token")).ok()?;
        let wait = if wait { "Request-Timeout: 5\r\n" } else { "" };
        let head = format!(
            "POST /overlay/topics/{TOPIC} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n{wait}\
             Content-Length: {size}\r\n\r\n"
        );
        let (answered, over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (count, ends, answers) = (answered.clone(), over.clone(), stream.try_clone().ok()?);
        let reader = std::thread::spawn(move || read_answers(answers, &count, &ends));
        Some(Publisher { stream, head, sent: 0, answered, reader, over })
    }

    /// Publishes at a rate, each message at its instant; says from when to when.
    pub(super) fn pace(&mut self, rate: f64, length: Duration, size: usize) -> Option<(u64, u64)> {
        let (begun, clock) = (unix_nanos(), Instant::now());
        let count = (rate * length.as_secs_f64()) as u64;
        let mut next = 0;
        while next < count {
            let due = ((clock.elapsed().as_secs_f64() * rate) as u64 + 1).min(count);
            let mut batch = String::new();
            for number in next..due {
                batch.push_str(&self.head);
                batch.push_str(&payload(begun + (number as f64 * 1e9 / rate) as u64, size));
            }
            self.sent += due - next;
            next = due;
            self.stream.write_all(batch.as_bytes()).ok()?;
            std::thread::sleep(Duration::from_micros(200).max(Duration::from_secs_f64(0.5 / rate)));
        }
        Some((begun, unix_nanos()))
    }

    /// Publishes as fast as answers come, with so many on their way.
    pub(super) fn flat_out(&mut self, length: Duration, size: usize, window: u64) -> Option<()> {
        let clock = Instant::now();
        while clock.elapsed() < length {
            let room = window.saturating_sub(self.sent - self.answered.load(Ordering::Relaxed));
            if room < window / 2 {
                std::thread::sleep(Duration::from_micros(50));
                continue;
            }
            let due = unix_nanos();
            let batch: String = (0..room).map(|_| self.head.clone() + &payload(due, size)).collect();
            self.sent += room;
            self.stream.write_all(batch.as_bytes()).ok()?;
        }
        Some(())
    }

    /// Waits for the last answer.
    pub(super) fn finish(self) -> Option<Told> {
        let begun = Instant::now();
        while self.answered.load(Ordering::Relaxed) < self.sent {
            if begun.elapsed() > Duration::from_secs(10) {
                println!(
                    "{} of {} publications are not answered",
                    self.sent - self.answered.load(Ordering::Relaxed),
                    self.sent
                );
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.over.store(true, Ordering::Relaxed);
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.reader.join().ok()
    }
}

/// Counts answers by their statuses until the connection ends.
fn read_answers(stream: TcpStream, count: &AtomicU64, over: &AtomicBool) -> Told {
    let (mut told, mut lines) = (Told::default(), BufReader::with_capacity(64 << 10, stream));
    let mut line = String::new();
    loop {
        let (mut accepted, mut length) = (false, 0);
        loop {
            line.clear();
            if !matches!(lines.read_line(&mut line), Ok(read) if read > 0) || over.load(Ordering::Relaxed) {
                return told;
            }
            let lower = line.to_ascii_lowercase();
            if let Some(status) = lower.strip_prefix("http/1.1 ") {
                accepted = status.starts_with("202");
            } else if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            } else if line == "\r\n" {
                break;
            }
        }
        let mut body = vec![0; length];
        if lines.read_exact(&mut body).is_err() {
            return told;
        }
        if accepted {
            told.accepted += 1;
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap_or_default();
            told.peers_refused += body["refused"].as_u64().unwrap_or(0);
        } else {
            told.refused += 1;
        }
        count.fetch_add(1, Ordering::Relaxed);
    }
}
