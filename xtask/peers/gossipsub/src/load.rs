//! What is published and when, and what was seen of it.

use std::fmt::Write as _;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;

/// Messages published in one go before the connections get their turn.
const BATCH: u64 = 32;
/// How long after its last instant a load is given up: whoever is that far behind does not bear it.
const LATE: Duration = Duration::from_secs(5);
/// Hexadecimal digits of the instant that a payload begins with.
const STAMP: usize = 16;

/// Messages at a rate, each at its instant, or as many as are taken.
pub struct Load {
    /// The number of the next message.
    pub next: u64,
    size: usize,
    begun: u64,
    /// When it ends, whatever became of it.
    until: Instant,
    accepted: u64,
    refused: u64,
    pace: Pace,
}

enum Pace {
    /// A thread says what is due: timers of the runtime know milliseconds only.
    Even { rate: f64, count: u64, due: u64, clock: mpsc::UnboundedReceiver<u64> },
    /// `full` says that the last message was not taken.
    Flat { full: bool },
}

impl Load {
    pub fn paced(rate: f64, millis: u64, size: usize) -> Load {
        let count = (rate * millis as f64 / 1e3) as u64;
        let (due, clock) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let (begun, mut sent) = (Instant::now(), 0);
            while sent < count {
                sent = ((begun.elapsed().as_secs_f64() * rate) as u64 + 1).min(count);
                if due.send(sent).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_micros(200).max(Duration::from_secs_f64(0.5 / rate)));
            }
        });
        Load::new(Duration::from_millis(millis) + LATE, size, Pace::Even { rate, count, due: 0, clock })
    }

    pub fn flat(millis: u64, size: usize) -> Load {
        Load::new(Duration::from_millis(millis), size, Pace::Flat { full: false })
    }

    fn new(length: Duration, size: usize, pace: Pace) -> Load {
        let until = Instant::now() + length;
        Load { next: 0, size, begun: unix_nanos(), until, accepted: 0, refused: 0, pace }
    }

    /// Waits until something is due; says up to which message.
    pub async fn due(&mut self) -> u64 {
        match &mut self.pace {
            Pace::Even { clock, count, due, .. } => {
                while let Ok(now) = clock.try_recv() {
                    *due = now;
                }
                if self.next < *due {
                    tokio::task::yield_now().await;
                } else {
                    *due = clock.recv().await.unwrap_or(*count);
                }
                (*due).min(self.next + BATCH)
            }
            Pace::Flat { full } => {
                // Where nothing was taken the connections get some time, else only their turn.
                if *full {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                } else {
                    tokio::task::yield_now().await;
                }
                self.next + BATCH
            }
        }
    }

    /// The next message, with the instant that it was due.
    pub fn payload(&self) -> Vec<u8> {
        let due = match self.pace {
            Pace::Even { rate, .. } => self.begun + (self.next as f64 * 1e9 / rate) as u64,
            Pace::Flat { .. } => unix_nanos(),
        };
        let mut payload = format!("{due:0STAMP$x}").into_bytes();
        payload.resize(self.size.max(STAMP), b'x');
        payload
    }

    /// What became of it.
    pub fn told(&mut self, taken: bool) {
        if let Pace::Flat { full } = &mut self.pace {
            *full = !taken;
        }
        self.next += 1;
        if taken {
            self.accepted += 1;
        } else {
            self.refused += 1;
        }
    }

    /// Whether whoever is refused tries again later, instead of losing what was due.
    pub fn waits(&self) -> bool {
        matches!(self.pace, Pace::Flat { .. })
    }

    pub fn over(&self) -> bool {
        let all = matches!(self.pace, Pace::Even { count, .. } if self.next >= count);
        all || Instant::now() >= self.until
    }

    /// When it began and ended, what was taken and what was not; what was not even tried is of the latter.
    pub fn report(&self) -> String {
        let untried = if let Pace::Even { count, .. } = self.pace { count - self.next } else { 0 };
        let (begun, refused) = (self.begun, self.refused + untried);
        format!("published {begun} {} {} {refused}", unix_nanos(), self.accepted)
    }
}

/// What came, and, if somebody wants to know, when.
#[derive(Default)]
pub struct Seen {
    pub keeps: bool,
    pub count: u64,
    /// When a message was due, and how long it took, in nanoseconds.
    took: Vec<(u64, u64)>,
}

impl Seen {
    pub fn note(&mut self, payload: &[u8]) {
        self.count += 1;
        let due = payload.get(..STAMP).and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(due) = due.filter(|_| self.keeps).and_then(|due| u64::from_str_radix(due, 16).ok()) {
            self.took.push((due, unix_nanos().saturating_sub(due)));
        }
    }

    /// Of what was due within these instants: when, and how many nanoseconds it took, each with a space before it.
    pub fn between(&self, from: u64, to: u64) -> String {
        let mut out = String::new();
        for (due, took) in self.took.iter().filter(|(due, _)| (from..to).contains(due)) {
            // Writing to a string cannot fail.
            let _ = write!(out, " {due} {took}");
        }
        out
    }
}

fn unix_nanos() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
