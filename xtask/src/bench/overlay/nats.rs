//! NATS to compare with: its server, and clients that do the least a client can.

use super::field::{STAMP, TOPIC, payload, unix_nanos};
use crate::bench::process::Cpu;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The server; it ends with this.
pub(super) struct Nats {
    child: Child,
    address: String,
}

impl Nats {
    pub(super) fn start() -> Option<Nats> {
        let port = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr()).ok()?.port();
        let mut command = Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &port.to_string()]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()?;
        let nats = Nats { child, address: format!("127.0.0.1:{port}") };
        let begun = Instant::now();
        while TcpStream::connect(&nats.address).is_err() {
            if begun.elapsed() > Duration::from_secs(10) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(nats)
    }

    /// Processor time of the server and of its clients, which are ours.
    pub(super) fn cpu(&self) -> f64 {
        Cpu::own(self.child.id()) + Cpu::own(std::process::id())
    }

    /// A connection on which what is written first has been done.
    fn connect(&self, first: &str) -> Option<(TcpStream, BufReader<TcpStream>)> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_nodelay(true).ok()?;
        let hello = format!("CONNECT {{\"verbose\":false,\"pedantic\":false}}\r\n{first}PING\r\n");
        stream.write_all(hello.as_bytes()).ok()?;
        let mut lines = BufReader::with_capacity(64 << 10, stream.try_clone().ok()?);
        let mut line = String::new();
        while line != "PONG\r\n" {
            line.clear();
            lines.read_line(&mut line).ok().filter(|read| *read > 0)?;
        }
        Some((stream, lines))
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A subscriber that counts, and notes latencies.
pub(super) struct Subscriber {
    received: Arc<AtomicU64>,
    seen: Arc<Mutex<Vec<f64>>>,
}

impl Subscriber {
    /// `timed` keeps each message's latency.
    pub(super) fn start(nats: &Nats, timed: bool) -> Option<Subscriber> {
        let (stream, mut lines) = nats.connect(&format!("SUB {TOPIC} 1\r\n"))?;
        let subscriber = Subscriber { received: Arc::default(), seen: Arc::default() };
        let (received, seen) = (subscriber.received.clone(), subscriber.seen.clone());
        std::thread::spawn(move || {
            // The connection lives as long as its reader.
            let _stream = stream;
            let mut line = Vec::new();
            loop {
                // A message is a line that names it and a line that is it: payloads have no line feeds.
                line.clear();
                if !matches!(lines.read_until(b'\n', &mut line), Ok(read) if read > 0) {
                    return;
                }
                if !line.starts_with(b"MSG ") {
                    continue;
                }
                line.clear();
                if !matches!(lines.read_until(b'\n', &mut line), Ok(read) if read > 0) {
                    return;
                }
                received.fetch_add(1, Ordering::Relaxed);
                let due = std::str::from_utf8(&line[..STAMP.min(line.len())]);
                if let Some(due) =
                    due.ok().filter(|_| timed).and_then(|due| u64::from_str_radix(due, 16).ok())
                {
                    let took = unix_nanos().saturating_sub(due) as f64 / 1e6;
                    seen.lock().unwrap_or_else(PoisonError::into_inner).push(took);
                }
            }
        });
        Some(subscriber)
    }

    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }

    pub(super) fn took(&self) -> Vec<f64> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Publishes at a rate, or as fast as the server takes it; says how many.
pub(super) fn publish(nats: &Nats, rate: Option<f64>, length: Duration, size: usize) -> Option<u64> {
    let (mut stream, _lines) = nats.connect("")?;
    let head = format!("PUB {TOPIC} {size}\r\n");
    let (begun, clock, mut sent) = (unix_nanos(), Instant::now(), 0u64);
    while clock.elapsed() < length {
        let due = rate.map_or(sent + 64, |rate| (clock.elapsed().as_secs_f64() * rate) as u64 + 1);
        let stamp =
            |number: u64| rate.map_or_else(unix_nanos, |rate| begun + (number as f64 * 1e9 / rate) as u64);
        let mut batch = String::with_capacity((due - sent) as usize * (head.len() + size + 2));
        for number in sent..due {
            batch.push_str(&head);
            payload(&mut batch, stamp(number), size);
            batch.push_str("\r\n");
        }
        sent = due;
        stream.write_all(batch.as_bytes()).ok()?;
        if let Some(rate) = rate {
            std::thread::sleep(Duration::from_micros(200).max(Duration::from_secs_f64(0.5 / rate)));
        }
    }
    Some(sent)
}
