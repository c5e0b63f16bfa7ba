//! Upstreams: their servers, the connections kept to them, and one call.

mod conn;

pub(crate) use conn::{Call, CallError};

use crate::breaker::{self, Admitted, Breaker};
use crate::config::{RetrySettings, UpstreamSettings};
use bytes::BytesMut;
use conn::ClientConn;
use http::{Method, Response};
use ron_kernel::http::{Body, Io};
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use ron_kernel::metrics::{Counter, Family};
use ron_kernel::sync::Permits;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU8, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::{TcpStream, UnixStream};

/// Idle connections kept per server.
const IDLE_MAX: usize = 64;
/// Age at which an idle connection is not used again: most servers close theirs after a minute or more.
const IDLE_AGE: Duration = Duration::from_secs(30);

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
    guards: "one upstream's circuit breaker; taken alone, twice a request",
};

/// What all upstreams are made with.
pub(crate) struct Shared<'a> {
    pub(crate) inventory: &'a Inventory,
    pub(crate) connect_timeouts: &'a Counter,
    pub(crate) served: &'a Family<Counter, 1>,
}

/// How long a looked-up name is believed.
const DNS_AGE: Duration = Duration::from_secs(10);

/// The addresses a name had, and when.
type Resolved = Option<(Instant, Arc<[SocketAddr]>)>;

/// Where a server is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// `host:port`
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Address, String> {
        if let Some(path) = text.strip_prefix("unix:").filter(|path| !path.is_empty()) {
            return Ok(Address::Unix(PathBuf::from(path)));
        }
        let authority = text.strip_prefix("http://").map(|rest| rest.strip_suffix('/').unwrap_or(rest));
        let authority = authority.and_then(|text| text.parse::<http::uri::Authority>().ok());
        let authority = authority.filter(|authority| !authority.as_str().contains('@'));
        let wrong = || format!("{text:?} is no server: write http://host:port or unix:path");
        let authority = authority.ok_or_else(wrong)?;
        // Read from the text: the parsed authority forgets a port that is out of range.
        let port =
            match authority.as_str().strip_prefix(authority.host()).and_then(|rest| rest.strip_prefix(':')) {
                Some(port) => port.parse::<u16>().ok().filter(|port| *port > 0).ok_or_else(wrong)?,
                None => 80,
            };
        if authority.host().is_empty() {
            return Err(wrong());
        }
        Ok(Address::Tcp(format!("{}:{port}", authority.host())))
    }
}

/// A named set of servers.
#[derive(Debug)]
pub(crate) struct Upstream {
    servers: Vec<Arc<Server>>,
    next: AtomicUsize,
    connect_timeout: Duration,
    connect_timeouts: Counter,
    /// Requests it may be working on.
    pub(crate) permits: Arc<Permits>,
    /// Its scheduler in the fair queue; kept over reloads.
    pub(crate) lane: usize,
    pub(crate) retry: RetrySettings,
    limits: breaker::Limits,
    /// Kept over reloads.
    health: Arc<Health>,
}

/// How an upstream has been doing.
#[derive(Debug)]
pub(crate) struct Health {
    breaker: Lock<Breaker>,
    /// The breaker's level, beside its lock so that a scrape takes none.
    level: AtomicU8,
    /// Retries that may be made now, in thousandths.
    retries: AtomicI64,
}

/// Retries that may be saved up, in thousandths.
const RETRIES_MAX: i64 = 10_000;

/// A request under the breaker's eye: unless told otherwise, it failed.
#[derive(Debug)]
pub(crate) struct Watched<'a> {
    upstream: &'a Upstream,
    admitted: Admitted,
    /// Whether it went well; `None` if nothing can be said.
    pub(crate) good: Option<bool>,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        // A client that left says nothing about the upstream, but a probe must have an end.
        let good = match (self.good, self.admitted) {
            (Some(good), _) => good,
            (None, Admitted::AsProbe) => false,
            (None, Admitted::Normally) => return,
        };
        let health = &self.upstream.health;
        let mut breaker = health.breaker.lock();
        breaker.record(self.admitted, good, self.upstream.limits, Instant::now());
        health.level.store(breaker.level(), Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Server {
    address: Address,
    idle: Lock<Vec<(Instant, ClientConn)>>,
    /// Held while the name is being looked up.
    resolved: Arc<tokio::sync::Mutex<Resolved>>,
}

impl Server {
    /// The connection used last, if one is fresh and the server has not closed it.
    fn take_idle(&self) -> Option<ClientConn> {
        loop {
            let (since, mut conn) = self.idle.lock().pop()?;
            if since.elapsed() < IDLE_AGE && conn.is_quiet() {
                return Some(conn);
            }
        }
    }

    fn keep(&self, conn: ClientConn) {
        let mut idle = self.idle.lock();
        if idle.len() >= IDLE_MAX {
            idle.remove(0);
        }
        idle.push((Instant::now(), conn));
    }

    /// The addresses of a server's name, looked up at most once at a time and remembered for a while.
    ///
    /// A look-up that hangs holds one thread, however many requests give up waiting for it.
    async fn resolve(&self, name: &str) -> std::io::Result<Arc<[SocketAddr]>> {
        if let Ok(address) = name.parse() {
            return Ok(Arc::new([address]));
        }
        let resolving = self.resolved.clone().lock_owned().await;
        if let Some((at, addresses)) = &*resolving
            && at.elapsed() < DNS_AGE
        {
            return Ok(addresses.clone());
        }
        let name = name.to_owned();
        let looked_up = tokio::task::spawn_blocking(move || {
            let mut resolving = resolving;
            let addresses: Arc<[SocketAddr]> = name.to_socket_addrs()?.collect();
            *resolving = Some((Instant::now(), addresses.clone()));
            Ok(addresses)
        });
        looked_up.await.map_err(std::io::Error::other)?
    }

    async fn connect(&self) -> std::io::Result<ClientConn> {
        let io = match &self.address {
            Address::Tcp(address) => {
                let stream = TcpStream::connect(&self.resolve(address).await?[..]).await?;
                stream.set_nodelay(true)?;
                Io::from(stream)
            }
            Address::Unix(path) => Io::from(UnixStream::connect(path).await?),
        };
        Ok(ClientConn::new(io))
    }
}

impl Upstream {
    /// Relative socket paths are relative to `base`. Connections of a former version to the same servers are kept.
    pub(crate) fn new(
        settings: &UpstreamSettings,
        base: &Path,
        former: Option<&Upstream>,
        lane: usize,
        shared: &Shared<'_>,
    ) -> Upstream {
        let permits =
            former.map_or_else(|| Permits::new(settings.max_inflight), |former| former.permits.clone());
        permits.set_limit(settings.max_inflight);
        let make = |text: &String| {
            let address = match text.parse().ok()? {
                Address::Unix(path) => Address::Unix(base.join(path)),
                tcp => tcp,
            };
            let known =
                former.and_then(|former| former.servers.iter().find(|server| server.address == address));
            let fresh = || {
                Arc::new(Server {
                    address,
                    idle: Lock::new(shared.inventory, &IDLE, Vec::new()),
                    resolved: Arc::default(),
                })
            };
            Some(known.cloned().unwrap_or_else(fresh))
        };
        Upstream {
            servers: settings.servers.iter().filter_map(make).collect(),
            next: AtomicUsize::new(0),
            connect_timeout: settings.connect_timeout.0,
            connect_timeouts: shared.connect_timeouts.clone(),
            permits,
            lane,
            retry: settings.retry.clone(),
            limits: breaker::Limits {
                failures: settings.breaker.failures,
                error_rate: settings.breaker.error_rate,
                window: settings.breaker.window.0,
                open: settings.breaker.open.0,
            },
            health: former.map_or_else(
                || {
                    let breaker = Lock::new(shared.inventory, &BREAKER, Breaker::new(Instant::now()));
                    Arc::new(Health {
                        breaker,
                        level: AtomicU8::new(0),
                        retries: AtomicI64::new(RETRIES_MAX),
                    })
                },
                |former| former.health.clone(),
            ),
        }
    }

    /// Lets a request try, or says how long the breaker stays open.
    pub(crate) fn watch(&self) -> Result<Watched<'_>, Duration> {
        let admitted = {
            let mut breaker = self.health.breaker.lock();
            let admitted = breaker.admit(Instant::now());
            self.health.level.store(breaker.level(), Ordering::Relaxed);
            admitted?
        };
        Ok(Watched { upstream: self, admitted, good: None })
    }

    /// 0 closed, 1 half-open, 2 open.
    pub(crate) fn breaker_level(&self) -> u8 {
        self.health.level.load(Ordering::Relaxed)
    }

    /// Every request earns a part of a retry.
    pub(crate) fn earn_retry(&self) {
        #[expect(clippy::cast_possible_truncation, reason = "between 0 and 1000")]
        let part = (self.retry.budget * 1000.0) as i64;
        let earn = |saved: i64| Some((saved + part).min(RETRIES_MAX));
        let _ = self.health.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, earn);
    }

    /// Spends a retry, if one is left.
    pub(crate) fn spend_retry(&self) -> bool {
        let spend = |saved: i64| (saved >= 1000).then_some(saved - 1000);
        self.retry.budget > 0.0
            && self.health.retries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend).is_ok()
    }

    /// Sends a request and returns the response once its head is there. The body streams.
    pub(crate) async fn call(
        &self,
        head: &BytesMut,
        method: &Method,
        body: Body,
        call: &mut Call,
    ) -> Result<Response<Body>, CallError> {
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let mut body = Some(body);
        let mut failure = CallError::Connect("there is no server".to_owned());
        for turn in 0..self.servers.len() {
            let server = &self.servers[(first + turn) % self.servers.len()];
            while let Some(conn) = server.take_idle() {
                // A kept connection may be closed by the server at any time; what it did not take can go again.
                match conn.exchange(head, method, &mut body, call, server).await {
                    Err(CallError::Stale) => {}
                    outcome => return outcome,
                }
            }
            let connected = tokio::time::timeout(self.connect_timeout, server.connect()).await;
            match connected {
                Ok(Ok(conn)) => return conn.exchange(head, method, &mut body, call, server).await,
                Ok(Err(error)) => failure = CallError::Connect(error.to_string()),
                Err(_elapsed) => {
                    self.connect_timeouts.inc();
                    failure = CallError::Connect("the connection was not made in time".to_owned());
                }
            }
        }
        Err(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_written_as_urls_or_socket_paths() {
        assert_eq!("http://a.org".parse(), Ok(Address::Tcp("a.org:80".into())));
        assert_eq!("http://[::1]:90/".parse(), Ok(Address::Tcp("[::1]:90".into())));
        assert_eq!("unix:x.sock".parse(), Ok(Address::Unix("x.sock".into())));
        for bad in [
            "",
            "a.org:80",
            "https://a.org",
            "http://a.org/path",
            "http://u@a.org",
            "unix:",
            "http://a:99999",
            "http://a:0",
            "http://:80",
        ] {
            assert!(bad.parse::<Address>().unwrap_err().contains("http://host:port"), "{bad}");
        }
    }
}
