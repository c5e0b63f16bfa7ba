//! Upstreams: which of their servers takes a call, how they have been doing, and what is tried again.

mod body;
mod prober;
mod server;
mod status;

pub(crate) use body::{Charges, Progress, Upload, metered};
pub(crate) use prober::probe;
pub(crate) use server::{Loaded, Server};

use crate::breaker::{self, Admitted, Breaker};
use crate::config::{Balance, HealthSettings, RetrySettings, UpstreamSettings};
use crate::ledger::Ledger;
use ron_kernel::http::Body;
use ron_kernel::http::client::{Address, Answer, CallError, CallLimits, Outgoing, Remote};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::lock::Lock;
use ron_kernel::metrics::{Counter, Family, Histogram};
use ron_kernel::sync::Permits;
use ron_kernel::tls::TlsClient;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub(crate) static IDLE: LockSpec = LockSpec {
    service: "gateway",
    name: "upstream_idle",
    rank: 40,
    guards: "the connections kept to one server; taken alone, for a push or a pop",
};

pub(crate) static BREAKER: LockSpec = LockSpec {
    service: "gateway",
    name: "breaker",
    rank: 41,
    guards: "one upstream's circuit breaker; taken alone, once a request while it is closed",
};

/// What all upstreams are made with.
pub(crate) struct Shared {
    pub(crate) service: Service,
    pub(crate) connect_timeouts: Counter,
    pub(crate) latency: Arc<Family<Histogram, 1>>,
    pub(crate) served: Arc<Family<Counter, 1>>,
    /// `view_parts_total`.
    pub(crate) parts: Arc<Family<Counter, 3>>,
    pub(crate) ledger: Arc<Ledger>,
}

/// A named set of servers.
#[derive(Debug)]
pub(crate) struct Upstream {
    pub(crate) servers: Vec<Arc<Server>>,
    balance: Balance,
    next: AtomicUsize,
    connect_timeout: Duration,
    connect_timeouts: Counter,
    latency: Histogram,
    /// Requests it may be working on.
    pub(crate) permits: Arc<Permits>,
    /// Its scheduler in the fair queue; kept over reloads.
    pub(crate) lane: usize,
    pub(crate) retry: RetrySettings,
    pub(crate) health: Option<HealthSettings>,
    limits: breaker::Limits,
    /// Kept over reloads.
    record: Arc<Record>,
}

/// How an upstream has been doing.
#[derive(Debug)]
struct Record {
    breaker: Lock<Breaker>,
    /// The breaker's level, beside its lock so that a scrape takes none.
    level: AtomicU8,
    /// Retries that may be made now, in thousandths.
    retries: AtomicI64,
}

/// Retries that may be saved up, in thousandths.
const RETRIES_MAX: i64 = 10_000;

/// Why an upstream gave no answer.
#[derive(Debug)]
pub(crate) enum Failure {
    /// None of its servers can be used now.
    NoServer,
    Call(CallError),
}

/// A request under the breaker's eye.
#[derive(Debug)]
pub(crate) struct Watched<'a> {
    upstream: &'a Upstream,
    admitted: Admitted,
    /// Whether it went well; `None` if nothing can be said.
    pub(crate) good: Option<bool>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.upstream
            .tell_breaker(|breaker, limits, now| breaker.record(self.admitted, self.good, limits, now));
    }
}

impl Upstream {
    /// Relative socket paths are relative to `base`. What is known of the same servers from before is kept.
    pub(crate) fn new(
        settings: &UpstreamSettings,
        base: &Path,
        tls: Option<&TlsClient>,
        former: Option<&Upstream>,
        lane: usize,
        shared: &Shared,
    ) -> Upstream {
        let permits =
            former.map_or_else(|| Permits::new(settings.max_inflight), |former| former.permits.clone());
        permits.set_limit(settings.max_inflight);
        let make = |text: &String| {
            let address = match text.parse().ok()? {
                Address::Unix(path) => Address::Unix(base.join(path)),
                tcp => tcp,
            };
            let known = former.and_then(|former| {
                former.servers.iter().find(|server| server.remote.address == address).cloned()
            });
            let server =
                known.unwrap_or_else(|| Arc::new(Server::new(Remote::new(&shared.service, &IDLE, address))));
            server.remote.set_tls(tls.cloned());
            if settings.health.is_none() {
                server.forget_checks();
            }
            Some(server)
        };
        let fresh_record = || {
            Arc::new(Record {
                breaker: Lock::new(shared.service.inventory(), &BREAKER, Breaker::new(Instant::now())),
                level: AtomicU8::new(0),
                retries: AtomicI64::new(RETRIES_MAX),
            })
        };
        Upstream {
            servers: settings.servers.iter().filter_map(make).collect(),
            balance: settings.balance,
            next: AtomicUsize::new(0),
            connect_timeout: settings.connect_timeout.0,
            connect_timeouts: shared.connect_timeouts.clone(),
            latency: shared.latency.with([&settings.name]),
            permits,
            lane,
            retry: settings.retry.clone(),
            health: settings.health.clone(),
            limits: breaker::Limits {
                failures: settings.breaker.failures,
                error_rate: settings.breaker.error_rate,
                window: settings.breaker.window.0,
                open: settings.breaker.open.0,
            },
            record: former.map_or_else(fresh_record, |former| former.record.clone()),
        }
    }

    /// Lets a request try, or says how long the breaker stays open.
    pub(crate) fn watch(&self) -> Result<Watched<'_>, Duration> {
        // Closed, as it nearly always is, it has nothing to say: its lock is taken once a request, at the end.
        let admitted = match self.breaker_level() {
            0 => Admitted::Normally,
            _ => self.tell_breaker(|breaker, _, now| breaker.admit(now))?,
        };
        Ok(Watched { upstream: self, admitted, good: None })
    }

    fn tell_breaker<T>(&self, tell: impl FnOnce(&mut Breaker, breaker::Limits, Instant) -> T) -> T {
        let mut breaker = self.record.breaker.lock();
        let told = tell(&mut breaker, self.limits, Instant::now());
        self.record.level.store(breaker.level(), Ordering::Relaxed);
        told
    }

    /// 0 closed, 1 half-open, 2 open.
    pub(crate) fn breaker_level(&self) -> u8 {
        self.record.level.load(Ordering::Relaxed)
    }

    /// Whether a request sent now would be refused for want of a server.
    pub(crate) fn is_down(&self) -> bool {
        let none = !self.is_bridge() && self.servers.iter().all(|server| !server.is_healthy());
        self.breaker_level() == 2 || none
    }

    /// Whether it stands for the overlay, which is no server.
    pub(crate) fn is_bridge(&self) -> bool {
        self.servers.is_empty()
    }

    /// Every request earns a part of a retry.
    pub(crate) fn earn_retry(&self) {
        #[expect(clippy::cast_possible_truncation, reason = "between 0 and 1000")]
        let part = (self.retry.budget * 1000.0) as i64;
        if self.record.retries.load(Ordering::Relaxed) < RETRIES_MAX {
            let earn = |saved: i64| Some((saved + part).min(RETRIES_MAX));
            let _ = self.record.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, earn);
        }
    }

    /// Spends a retry, if one is left.
    pub(crate) fn spend_retry(&self) -> bool {
        let spend = |saved: i64| (saved >= 1000).then_some(saved - 1000);
        self.retry.budget > 0.0
            && self.record.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok()
    }

    /// Sends a request to one of the servers and returns the answer once its head is there.
    ///
    /// A server that cannot be reached has taken nothing, so the next one is asked at once. Those in `tried` are
    /// asked only if there is no other.
    pub(crate) async fn call(
        &self,
        head: &dyn Outgoing,
        body: &mut Option<Body>,
        silence: Duration,
        tried: &mut Vec<usize>,
    ) -> Result<(Answer, Loaded), Failure> {
        let limits = CallLimits { connect_timeout: self.connect_timeout, silence };
        let mut failure = Failure::NoServer;
        for _ in 0..self.servers.len() {
            let Some(index) = self.pick(tried) else { return Err(failure) };
            tried.push(index);
            let loaded = Loaded::new(&self.servers[index]);
            let begun = Instant::now();
            match loaded.server().remote.call(head, body, limits).await {
                Ok(answer) => {
                    let elapsed = begun.elapsed();
                    self.latency.observe(elapsed);
                    if answer.status.is_server_error() {
                        self.note_failure(loaded.server());
                    } else {
                        loaded.server().note_success(elapsed);
                    }
                    return Ok((answer, loaded));
                }
                Err(error) => {
                    if !is_excused(&error, head) {
                        self.note_failure(loaded.server());
                    }
                    let unreached = match &error {
                        CallError::ConnectTimeout => {
                            self.connect_timeouts.inc();
                            true
                        }
                        error => matches!(error, CallError::Connect(_)),
                    };
                    failure = Failure::Call(error);
                    if !unreached || body.is_none() {
                        return Err(failure);
                    }
                }
            }
        }
        Err(failure)
    }

    /// A server did not answer in time.
    pub(crate) fn note_silence(&self, index: Option<&usize>) {
        if let Some(server) = index.and_then(|index| self.servers.get(*index)) {
            self.note_failure(server);
        }
    }

    /// A server that keeps failing is left out for a while, unless half of them are already.
    ///
    /// Its failures are not held against the others: the breaker judges anew those that are left.
    fn note_failure(&self, server: &Server) {
        let now = Instant::now();
        let out = self.servers.iter().filter(|server| server.is_ejected(now)).count();
        let may_eject = (out + 1) * 2 <= self.servers.len();
        if server.note_failure(self.limits.failures, self.limits.open, may_eject, now) {
            tracing::warn!(server = %server.remote.address, "server keeps failing and is left out for a while");
            self.tell_breaker(|breaker, _, now| breaker.forget(now));
        }
    }

    /// The server to ask next; `None` if none is fit.
    fn pick(&self, tried: &mut Vec<usize>) -> Option<usize> {
        if let [server] = &self.servers[..] {
            return server.is_healthy().then_some(0);
        }
        let now = Instant::now();
        let fit = |index: usize| self.servers[index].is_healthy() && !self.servers[index].is_ejected(now);
        // Two at random are nearly always fit; only then is everybody looked at.
        if let (Balance::P2c, true) = (self.balance, tried.is_empty()) {
            let (a, b) = two_of(self.servers.len());
            if fit(a) && fit(b) {
                return Some(self.better(a, b));
            }
        }
        let all = || 0..self.servers.len();
        let mut choice: Vec<usize> = all().filter(|index| fit(*index) && !tried.contains(index)).collect();
        if choice.is_empty() {
            tried.clear();
            choice = all().filter(|index| fit(*index)).collect();
        }
        if choice.is_empty() {
            // Better one that failed of late than none.
            choice = all().filter(|index| self.servers[*index].is_healthy()).collect();
        }
        match (choice.len(), self.balance) {
            (0, _) => None,
            (1, _) => Some(choice[0]),
            (count, Balance::RoundRobin) => Some(choice[self.next.fetch_add(1, Ordering::Relaxed) % count]),
            (count, Balance::P2c) => {
                let (a, b) = two_of(count);
                Some(self.better(choice[a], choice[b]))
            }
        }
    }

    fn better(&self, a: usize, b: usize) -> usize {
        if self.servers[a].is_better_than(&self.servers[b]) { a } else { b }
    }
}

/// Whether a failure is not the server's: the client broke off, or asks for a protocol that the server does not know.
pub(crate) fn is_excused(error: &CallError, head: &dyn Outgoing) -> bool {
    match error {
        CallError::RequestBody(_) => true,
        CallError::Connect(_) => head.upgrades(),
        _ => false,
    }
}

/// Two different numbers below `count`, which is at least 2.
fn two_of(count: usize) -> (usize, usize) {
    let random = ron_kernel::random::u64();
    #[expect(clippy::cast_possible_truncation, reason = "any bits will do")]
    let (low, high) = (random as u32 as usize, (random >> 32) as usize);
    let a = low % count;
    (a, (a + 1 + high % (count - 1)) % count)
}

#[cfg(test)]
mod tests;
