//! Open-loop load: a request leaves when it is due, whatever became of those before it.

use crate::random::Random;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

/// A connection that rested longer is not used again: the server may be about to close it.
const KEPT_MAX: Duration = Duration::from_secs(20);
/// A client that leaves does so within this time.
const LEAVES_WITHIN: f64 = 0.03;

/// Requests of one kind, one in each interval of 1/`rate` seconds, at a random moment of it.
#[derive(Clone, Debug)]
pub struct Flow {
    /// Head and body as they go over the wire.
    pub request: Arc<[u8]>,
    pub rate: f64,
    /// The share of requests whose client closes the connection before long.
    pub leaves: f64,
}

/// How a request ended, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A whole answer.
    Answered(u16),
    /// The head of an answer, then the end of the connection.
    Cut(u16),
    /// The end of the connection, and no answer.
    Ended,
    /// The client left.
    Left,
    /// Neither an answer nor an end within the load's patience.
    Hung,
    /// There was no connection to send it on.
    Unsent,
}

#[derive(Clone, Copy, Debug)]
pub struct Sample {
    /// Index of its flow.
    pub flow: usize,
    pub outcome: Outcome,
    /// When it was due, from the load's beginning.
    pub due: Duration,
    /// From when the request was due.
    pub latency: Duration,
    /// How long after it was due the request left: the client's own fault.
    pub late: Duration,
}

/// Clients of one server, sharing kept connections.
#[derive(Debug)]
pub struct Load {
    server: String,
    patience: Duration,
    seed: u64,
    kept: Mutex<Vec<Conn>>,
    samples: Mutex<Vec<Sample>>,
}

impl Load {
    pub fn new(server: &str, patience: Duration, seed: u64) -> Arc<Load> {
        let (kept, samples) = (Mutex::default(), Mutex::default());
        Arc::new(Load { server: server.to_owned(), patience, seed, kept, samples })
    }

    /// Sends every flow for so long and waits for the last outcome.
    pub async fn run(self: &Arc<Load>, flows: &[Flow], length: Duration) {
        let mut senders = JoinSet::new();
        for (index, flow) in flows.iter().enumerate() {
            senders.spawn(self.clone().send(index, flow.clone(), length));
        }
        senders.join_all().await;
    }

    /// What has been recorded since the last time.
    pub fn take(&self) -> Vec<Sample> {
        std::mem::take(&mut *locked(&self.samples))
    }

    /// Closes the kept connections.
    pub fn close(&self) {
        locked(&self.kept).clear();
    }

    async fn send(self: Arc<Load>, index: usize, flow: Flow, length: Duration) {
        let begun = Instant::now();
        let mut random = Random::new(self.seed.wrapping_add(index as u64));
        let mut requests = JoinSet::new();
        for n in 0u32.. {
            let due = begun + Duration::from_secs_f64((f64::from(n) + random.unit()) / flow.rate);
            if due >= begun + length {
                break;
            }
            if due > Instant::now() {
                sleep_until(due).await;
            } else {
                tokio::task::yield_now().await;
            }
            let leaves = random.unit() < flow.leaves;
            let leave = leaves.then(|| Duration::from_secs_f64(random.unit() * LEAVES_WITHIN));
            requests.spawn(self.clone().one(index, flow.request.clone(), begun, due, leave));
            while requests.try_join_next().is_some() {}
        }
        requests.join_all().await;
    }

    async fn one(
        self: Arc<Load>,
        flow: usize,
        request: Arc<[u8]>,
        begun: Instant,
        due: Instant,
        leave: Option<Duration>,
    ) {
        let late = due.elapsed();
        let outcome = self.exchange(&request, leave).await;
        let (latency, due) = (due.elapsed(), due - begun);
        locked(&self.samples).push(Sample { flow, outcome, due, latency, late });
    }

    async fn exchange(&self, request: &[u8], leave: Option<Duration>) -> Outcome {
        let kept = locked(&self.kept).pop().filter(|conn| conn.since.elapsed() < KEPT_MAX);
        let mut conn = match kept {
            Some(conn) => conn,
            None => match timeout(self.patience, TcpStream::connect(&self.server)).await {
                Ok(Ok(stream)) => Conn::new(stream),
                _ => return Outcome::Unsent,
            },
        };
        match timeout(leave.unwrap_or(self.patience), conn.ask(request)).await {
            Ok((outcome, keep)) => {
                if keep {
                    conn.since = Instant::now();
                    locked(&self.kept).push(conn);
                }
                outcome
            }
            Err(_) if leave.is_some() => Outcome::Left,
            Err(_) => Outcome::Hung,
        }
    }
}

/// The value below which this share of the durations lies; sorts them.
pub fn percentile(durations: &mut [Duration], share: f64) -> Duration {
    durations.sort_unstable();
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index of a list")]
    let index = (durations.len() as f64 * share) as usize;
    durations.get(index.min(durations.len().saturating_sub(1))).copied().unwrap_or_default()
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Debug)]
struct Conn {
    stream: TcpStream,
    buffer: Vec<u8>,
    since: Instant,
}

impl Conn {
    fn new(stream: TcpStream) -> Conn {
        // Without this a small request would wait for an acknowledgement; if it fails, it only waits.
        let _ = stream.set_nodelay(true);
        Conn { stream, buffer: Vec::with_capacity(4096), since: Instant::now() }
    }

    /// Sends a request and reads its answer; true if the connection can be used again.
    async fn ask(&mut self, request: &[u8]) -> (Outcome, bool) {
        if self.stream.write_all(request).await.is_err() {
            return (Outcome::Ended, false);
        }
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|window| window == b"\r\n\r\n") {
                break at + 4;
            }
            if !self.fill().await {
                return (Outcome::Ended, false);
            }
        };
        let head = String::from_utf8_lossy(&self.buffer[..end]).to_ascii_lowercase();
        let field = |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        // Every answer that these loads can get states its length.
        let Some(length) = field("content-length:").and_then(|length| length.parse::<usize>().ok()) else {
            return (Outcome::Cut(status), false);
        };
        let close = field("connection:") == Some("close");
        while self.buffer.len() < end + length {
            if !self.fill().await {
                return (Outcome::Cut(status), false);
            }
        }
        self.buffer.drain(..end + length);
        (Outcome::Answered(status), !close)
    }

    async fn fill(&mut self) -> bool {
        self.stream.read_buf(&mut self.buffer).await.is_ok_and(|read| read > 0)
    }
}
