//! One server of an upstream: its load, how fast it answers, and whether it is fit to be asked.

use ron_kernel::http::client::Remote;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Checks in a row that change what is thought of a server.
const CHECKS_TO_FALL: u32 = 2;
const CHECKS_TO_RISE: u32 = 2;
/// Ejections that make the next one longer.
const EJECTIONS_MAX: u32 = 10;

/// See the module. Everything is an atomic: it is read for every request and written after.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) remote: Arc<Remote>,
    made: Instant,
    /// Requests it is working on.
    load: AtomicUsize,
    /// How long it takes to answer, smoothed, in microseconds; 0 while unknown.
    latency_us: AtomicU64,
    /// Failures in a row.
    failures: AtomicU32,
    /// Until when it is left out, in milliseconds since `made`.
    ejected_until: AtomicU64,
    ejections: AtomicU32,
    /// What active checks say.
    healthy: AtomicBool,
    /// Checks in a row that said otherwise.
    contrary: AtomicU32,
}

impl Server {
    pub(crate) fn new(remote: Arc<Remote>) -> Server {
        Server {
            remote,
            made: Instant::now(),
            load: AtomicUsize::new(0),
            latency_us: AtomicU64::new(0),
            failures: AtomicU32::new(0),
            ejected_until: AtomicU64::new(0),
            ejections: AtomicU32::new(0),
            healthy: AtomicBool::new(true),
            contrary: AtomicU32::new(0),
        }
    }

    pub(crate) fn load(&self) -> usize {
        self.load.load(Ordering::Relaxed)
    }

    /// How long it takes to answer, smoothed; zero while unknown.
    pub(crate) fn latency(&self) -> Duration {
        Duration::from_micros(self.latency_us.load(Ordering::Relaxed))
    }

    /// Less to do for the time it takes; where a time is unknown, less to do, and then the one that was never asked.
    pub(crate) fn is_better_than(&self, other: &Server) -> bool {
        let known = |server: &Server| server.latency_us.load(Ordering::Relaxed);
        let cost = |server: &Server, latency: u64| (server.load() as u64 + 1).saturating_mul(latency);
        let was_asked =
            |server: &Server, latency: u64| latency > 0 || server.failures.load(Ordering::Relaxed) > 0;
        match (known(self), known(other)) {
            (mine @ 1.., theirs @ 1..) => cost(self, mine) <= cost(other, theirs),
            (mine, theirs) => {
                (self.load(), was_asked(self, mine)) <= (other.load(), was_asked(other, theirs))
            }
        }
    }

    pub(crate) fn note_success(&self, took: Duration) {
        let took = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
        let smoothed = match self.latency_us.load(Ordering::Relaxed) {
            0 => took,
            // Slowness is believed sooner than speed.
            before if took > before => before + (took - before) / 4,
            before => before - (before - took) / 16,
        };
        self.latency_us.store(smoothed.max(1), Ordering::Relaxed);
        for count in [&self.failures, &self.ejections] {
            // Read first: a line that many cores read is not to be written without need.
            if count.load(Ordering::Relaxed) > 0 {
                count.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Notes a failure; true if the server is left out from now on, each time for longer.
    pub(crate) fn note_failure(&self, most: u64, base: Duration, may_eject: bool, now: Instant) -> bool {
        // What was under way when it was left out says nothing new.
        if self.is_ejected(now) {
            return false;
        }
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if most == 0 || u64::from(failures) < most || !may_eject {
            return false;
        }
        self.failures.store(0, Ordering::Relaxed);
        let times = self.ejections.fetch_add(1, Ordering::Relaxed).min(EJECTIONS_MAX) + 1;
        self.ejected_until.store(self.clock(now + base * times), Ordering::Relaxed);
        true
    }

    pub(crate) fn is_ejected(&self, now: Instant) -> bool {
        let until = self.ejected_until.load(Ordering::Relaxed);
        until > 0 && until > self.clock(now)
    }

    fn clock(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.made).as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Notes what an active check found; true if that changes what is thought of the server.
    pub(super) fn checked(&self, good: bool) -> bool {
        let healthy = self.is_healthy();
        if good == healthy {
            self.contrary.store(0, Ordering::Relaxed);
            return false;
        }
        let contrary = self.contrary.fetch_add(1, Ordering::Relaxed) + 1;
        let changes = contrary >= if healthy { CHECKS_TO_FALL } else { CHECKS_TO_RISE };
        if changes {
            self.contrary.store(0, Ordering::Relaxed);
            self.healthy.store(good, Ordering::Relaxed);
        }
        changes
    }

    /// It is not checked any more: what checks said is void.
    pub(super) fn forget_checks(&self) {
        self.healthy.store(true, Ordering::Relaxed);
        self.contrary.store(0, Ordering::Relaxed);
    }
}

/// A request that counts towards its server's load until it is over.
#[derive(Debug)]
pub(crate) struct Loaded(Arc<Server>);

impl Loaded {
    pub(crate) fn new(server: &Arc<Server>) -> Loaded {
        server.load.fetch_add(1, Ordering::Relaxed);
        Loaded(server.clone())
    }

    pub(crate) fn server(&self) -> &Server {
        &self.0
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        self.0.load.fetch_sub(1, Ordering::Relaxed);
    }
}
