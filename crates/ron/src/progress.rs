//! How far long work has come: a bar on a terminal, a line now and then elsewhere.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

const BAR: usize = 30;

pub(crate) struct Progress {
    total: u64,
    /// What is counted.
    of: &'static str,
    begun: Instant,
    told: Instant,
    every: Duration,
    terminal: bool,
}

impl Progress {
    /// A total of 0 is one that nobody knows.
    pub(crate) fn new(total: u64, of: &'static str) -> Progress {
        let terminal = std::io::stderr().is_terminal();
        let every = if terminal { Duration::from_millis(100) } else { Duration::from_secs(5) };
        let now = Instant::now();
        Progress { total, of, begun: now, told: now, every, terminal }
    }

    /// So many of the total are done.
    pub(crate) fn at(&mut self, done: u64) {
        if self.told.elapsed() < self.every {
            return;
        }
        self.told = Instant::now();
        if self.total == 0 {
            let line = format!("{done} {}", self.of);
            if self.terminal {
                eprint!("\r{line} ");
                let _ = std::io::stderr().flush();
            } else {
                eprintln!("{line}");
            }
            return;
        }
        let (done, total) = (done.min(self.total), self.total.max(1));
        let rate = done as f64 / self.begun.elapsed().as_secs_f64();
        let line = format!("{:3} % of {total} {}, {rate:.0} per second", done * 100 / total, self.of);
        if self.terminal {
            let full = (done * BAR as u64 / total) as usize;
            eprint!("\r[{}{}] {line} ", "#".repeat(full), " ".repeat(BAR - full));
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("{line}");
        }
    }
}

impl Drop for Progress {
    /// What is printed next begins on a clean line.
    fn drop(&mut self) {
        if self.terminal {
            eprint!("\r\x1b[K");
        }
    }
}
