//! Nodes of a benchmark, each a process; what publishes to them, what follows them, and what they cost.

use super::nodes::{Arrival, Nodes, Published};
use crate::bench::Bench;
use ron_testkit::Node;
use serde::Deserialize;
use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(super) const NODES: usize = 8;
/// The topic that everything is published to.
pub(super) const TOPIC: &str = "bench";
/// Hexadecimal digits of the instant that a payload begins with.
pub(super) const STAMP: usize = 16;
/// Messages of one request, which is as many as one may have, and on their way at once, flat out.
const REQUEST: usize = 128;
const WINDOW: usize = 8 * REQUEST;

/// Nodes of ron.
pub(super) struct Field {
    pub(super) nodes: Vec<Node>,
    followers: BTreeMap<usize, Follower>,
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
        let field = Field { nodes, followers: BTreeMap::new() };
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

    fn total(&self, series: &str) -> f64 {
        self.nodes.iter().map(|node| node.metric(series)).sum()
    }
}

impl Nodes for Field {
    fn pids(&self) -> Vec<u32> {
        self.nodes.iter().map(Node::pid).collect()
    }

    fn delivered(&mut self) -> f64 {
        self.total("gossip_messages_total{result=\"delivered\"}")
    }

    fn duplicates(&mut self) -> f64 {
        self.total("gossip_messages_total{result=\"duplicate\"}")
    }

    fn follow(&mut self, node: usize) -> Option<()> {
        self.followers.insert(node, Follower::start(&self.nodes[node])?);
        Some(())
    }

    fn arrivals(&mut self, node: usize, from: u64, to: u64) -> Option<Vec<Arrival>> {
        Some(self.followers.get(&node)?.between(from, to))
    }

    fn pace(&mut self, rate: f64, length: Duration, size: usize) -> Option<Published> {
        let mut publisher = Publisher::start(&self.nodes[0], false)?;
        let (from, to) = publisher.pace(rate, length, size)?;
        publisher.finish(from, to)
    }

    fn flat_out(&mut self, length: Duration, size: usize) -> Option<Published> {
        let mut publisher = Publisher::start(&self.nodes[0], true)?;
        let (from, to) = publisher.flat_out(length, size)?;
        publisher.finish(from, to)
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

/// Adds a payload of so many bytes that says when it was due.
pub(super) fn payload(out: &mut String, due: u64, size: usize) {
    const FILLER: &str = match std::str::from_utf8(&[b'x'; 64 << 10]) {
        Ok(filler) => filler,
        Err(_) => "",
    };
    let _ = write!(out, "{due:0STAMP$x}");
    out.push_str(&FILLER[..size.saturating_sub(STAMP)]);
}

/// When a payload was due, if one is in this line of a stream.
fn stamp(line: &[u8]) -> Option<u64> {
    const BEFORE: &[u8] = b"\"payload\":\"";
    let head = &line[..line.len().min(512)];
    let at = head.windows(BEFORE.len()).position(|part| part == BEFORE)? + BEFORE.len();
    u64::from_str_radix(std::str::from_utf8(line.get(at..at + STAMP)?).ok()?, 16).ok()
}

/// A local user of a node that follows the topic, and the latencies it saw.
struct Follower {
    seen: Arc<Mutex<Vec<Arrival>>>,
}

impl Follower {
    fn start(node: &Node) -> Option<Follower> {
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
        let seen: Arc<Mutex<Vec<Arrival>>> = Arc::default();
        let own = seen.clone();
        std::thread::spawn(move || {
            loop {
                line.clear();
                if !matches!(lines.read_until(b'\n', &mut line), Ok(read) if read > 0) {
                    return;
                }
                if let Some(due) = stamp(&line) {
                    let took = unix_nanos().saturating_sub(due) as f64 / 1e6;
                    own.lock().unwrap_or_else(PoisonError::into_inner).push((due, took));
                }
            }
        });
        Some(Follower { seen })
    }

    fn between(&self, from: u64, to: u64) -> Vec<Arrival> {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        seen.iter().filter(|(due, _)| (from..to).contains(due)).copied().collect()
    }
}

/// Median and 99th percentile of sorted times.
pub(super) fn quantiles(sorted: &[f64]) -> (f64, f64) {
    let at = |share: f64| sorted.get((sorted.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
    (at(0.5), at(0.99))
}

/// What the answers to publications say.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    accepted: u64,
    /// Refused with 429.
    refused: u64,
    peers_refused: u64,
}

/// One connection over which messages are published, as many in a request as are due, whose answers are read apart.
struct Publisher {
    stream: TcpStream,
    head: String,
    sent: usize,
    answered: Arc<AtomicUsize>,
    /// How many messages the requests have that are not answered yet.
    asked: Arc<Mutex<VecDeque<usize>>>,
    reader: JoinHandle<Told>,
    over: Arc<AtomicBool>,
}

impl Publisher {
    /// `wait` makes each request wait for room.
    fn start(node: &Node, wait: bool) -> Option<Publisher> {
        let stream = TcpStream::connect(node.admin()).ok()?;
        stream.set_nodelay(true).ok()?;
        let token = std::fs::read_to_string(node.dir.path().join("admin.token")).ok()?;
        let wait = if wait { "Request-Timeout: 5\r\n" } else { "" };
        let head = format!(
            "POST /overlay/topics/{TOPIC} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n{wait}\
             Content-Type: application/x-ndjson\r\nContent-Length: "
        );
        let (answered, over) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let asked: Arc<Mutex<VecDeque<usize>>> = Arc::default();
        let answers = Answers {
            stream: stream.try_clone().ok()?,
            count: answered.clone(),
            asked: asked.clone(),
            over: over.clone(),
        };
        let reader = std::thread::spawn(move || answers.read());
        Some(Publisher { stream, head, sent: 0, answered, asked, reader, over })
    }

    /// Publishes messages of these instants.
    fn send(&mut self, dues: &[u64], size: usize) -> Option<()> {
        let mut batch = String::new();
        for dues in dues.chunks(REQUEST) {
            // A stamp and what fills it up, in the same number of bytes each.
            let length = dues.len() * ("{\"payload\":\"\"}\n".len() + size.max(STAMP));
            write!(batch, "{}{length}\r\n\r\n", self.head).ok()?;
            for due in dues {
                batch.push_str("{\"payload\":\"");
                payload(&mut batch, *due, size);
                batch.push_str("\"}\n");
            }
            self.asked.lock().unwrap_or_else(PoisonError::into_inner).push_back(dues.len());
        }
        self.sent += dues.len();
        self.stream.write_all(batch.as_bytes()).ok()
    }

    /// Publishes at a rate, each message at its instant; says from when to when.
    fn pace(&mut self, rate: f64, length: Duration, size: usize) -> Option<(u64, u64)> {
        let (begun, clock) = (unix_nanos(), Instant::now());
        let count = (rate * length.as_secs_f64()) as u64;
        let mut next = 0;
        while next < count {
            let due = ((clock.elapsed().as_secs_f64() * rate) as u64 + 1).min(count);
            let dues: Vec<u64> =
                (next..due).map(|number| begun + (number as f64 * 1e9 / rate) as u64).collect();
            self.send(&dues, size)?;
            next = due;
            std::thread::sleep(Duration::from_micros(200).max(Duration::from_secs_f64(0.5 / rate)));
        }
        Some((begun, unix_nanos()))
    }

    /// Publishes as fast as answers come; says from when to when.
    fn flat_out(&mut self, length: Duration, size: usize) -> Option<(u64, u64)> {
        let (begun, clock) = (unix_nanos(), Instant::now());
        while clock.elapsed() < length {
            let room = WINDOW.saturating_sub(self.sent - self.answered.load(Ordering::Relaxed));
            if room < REQUEST {
                std::thread::sleep(Duration::from_micros(500));
                continue;
            }
            self.send(&vec![unix_nanos(); room - room % REQUEST], size)?;
        }
        Some((begun, unix_nanos()))
    }

    /// Waits for the last answer.
    fn finish(self, from: u64, to: u64) -> Option<Published> {
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
        let Told { accepted, refused, peers_refused } = self.reader.join().ok()?;
        Some(Published { from, to, accepted, refused, peers_refused })
    }
}

/// What is read of an answer.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Answer {
    accepted: u64,
    messages: Vec<OfOne>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct OfOne {
    refused: u64,
}

/// What comes back to a publisher.
struct Answers {
    stream: TcpStream,
    count: Arc<AtomicUsize>,
    asked: Arc<Mutex<VecDeque<usize>>>,
    over: Arc<AtomicBool>,
}

impl Answers {
    /// Counts messages by what the answers say of them until the connection ends.
    fn read(self) -> Told {
        let Answers { stream, count, asked, over } = self;
        let (mut told, mut lines) = (Told::default(), BufReader::with_capacity(64 << 10, stream));
        let mut line = String::new();
        loop {
            let (mut accepted, mut length) = (false, 0);
            loop {
                line.clear();
                if !matches!(lines.read_line(&mut line), Ok(read) if read > 0) || over.load(Ordering::Relaxed)
                {
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
            let asked = asked.lock().unwrap_or_else(PoisonError::into_inner).pop_front().unwrap_or(0);
            let body: Answer = serde_json::from_slice(&body).unwrap_or_default();
            let taken = if accepted { body.accepted } else { 0 };
            told.accepted += taken;
            told.refused += (asked as u64).saturating_sub(taken);
            told.peers_refused += body.messages.iter().map(|one| one.refused).sum::<u64>();
            count.fetch_add(asked, Ordering::Relaxed);
        }
    }
}
