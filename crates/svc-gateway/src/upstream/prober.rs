//! Looking after upstreams in the background: active health checks, probes behind an open breaker, and what
//! readiness says of them.

use super::{Server, Upstream};
use crate::config::HealthSettings;
use crate::proxy::Proxy;
use bytes::BytesMut;
use http::{Method, Request, Uri};
use ron_kernel::health::Severity;
use ron_kernel::http::client::{CallLimits, Outgoing};
use ron_kernel::kernel::Service;
use ron_kernel::task::TaskResult;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often it is looked whether something is due.
const LOOK: Duration = Duration::from_millis(100);
/// Longest wait for a check.
const CHECK_MAX: Duration = Duration::from_secs(5);

const USER_AGENT: &str = concat!("ron/", env!("CARGO_PKG_VERSION"), " health check");

/// Runs until the drain.
pub(crate) async fn probe(service: Service, proxy: Arc<Proxy>) -> TaskResult {
    let mut down = Down { service: service.clone(), names: HashSet::new() };
    // By upstream and address: what is due survives a reload, and ends with its server.
    let mut due: HashMap<(String, String), Instant> = HashMap::new();
    loop {
        tokio::select! {
            biased;
            () = service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(LOOK) => {}
        }
        let upstreams = proxy.upstreams();
        let now = Instant::now();
        let mut next = HashMap::new();
        for (name, upstream) in &upstreams {
            for server in &upstream.servers {
                server.remote.tidy(now);
            }
            if let Some(health) = &upstream.health {
                for server in &upstream.servers {
                    let key = (name.clone(), server.remote.address.to_string());
                    let at = due.get(&key).copied().unwrap_or(now);
                    next.insert(key, if at <= now { now + health.interval.0 } else { at });
                    if at <= now {
                        start_check(&service, server.clone(), health.clone(), upstream.connect_timeout);
                    }
                }
            }
            if upstream.tell_breaker(|breaker, _, now| breaker.begin_probe(now)) {
                start_probe(&service, name.clone(), upstream.clone());
            }
        }
        due = next;
        down.note(
            upstreams
                .iter()
                .filter(|(_, upstream)| upstream.is_down())
                .map(|(name, _)| name.clone())
                .collect(),
        );
    }
}

fn start_check(service: &Service, server: Arc<Server>, health: HealthSettings, connect_timeout: Duration) {
    let name = server.remote.address.to_string();
    service.scoped("health_check", move || name.clone(), async move {
        let good = check(&server, &health, connect_timeout).await;
        if server.checked(good) {
            let address = &server.remote.address;
            if good {
                tracing::info!(server = %address, "server is healthy again");
            } else {
                tracing::warn!(server = %address, path = health.path, "server fails its health checks");
            }
        }
    });
}

/// Whether a server answers its health path with 2xx or 3xx in time.
async fn check(server: &Arc<Server>, health: &HealthSettings, connect_timeout: Duration) -> bool {
    let limits = CallLimits { connect_timeout, silence: CHECK_MAX };
    let head = Check { path: &health.path, host: server.remote.address.authority() };
    let mut body = None;
    let call = server.remote.call(&head, &mut body, limits);
    let answered = tokio::time::timeout(health.interval.0.min(CHECK_MAX), call).await;
    matches!(answered, Ok(Ok(answer)) if (200..400).contains(&answer.status.as_u16()))
}

/// Sees whether anybody is there behind an open breaker: by the health path, or by connecting.
fn start_probe(service: &Service, name: String, upstream: Arc<Upstream>) {
    service.scoped("breaker_probe", move || name.clone(), async move {
        // If this ends without an answer, nobody was found.
        let mut found = Found { upstream: upstream.clone(), good: false };
        found.good = upstream.answers().await;
    });
}

impl Upstream {
    /// Whether any of its servers is there: by the health path, or by connecting.
    pub(crate) async fn answers(&self) -> bool {
        for server in &self.servers {
            let good = match &self.health {
                Some(health) => check(server, health, self.connect_timeout).await,
                None => {
                    let reached = tokio::time::timeout(self.connect_timeout, server.remote.reach()).await;
                    matches!(reached, Ok(Ok(())))
                }
            };
            if good {
                return true;
            }
        }
        false
    }
}

struct Found {
    upstream: Arc<Upstream>,
    good: bool,
}

impl Drop for Found {
    fn drop(&mut self) {
        self.upstream.tell_breaker(|breaker, limits, now| breaker.probed(self.good, limits, now));
    }
}

/// The upstreams that readiness calls missing; none once this is gone.
struct Down {
    service: Service,
    names: HashSet<String>,
}

impl Down {
    fn note(&mut self, names: HashSet<String>) {
        for name in self.names.difference(&names) {
            self.service.restore(&format!("upstream.{name}"));
        }
        for name in names.difference(&self.names) {
            self.service.lose(&format!("upstream.{name}"), Severity::Degraded);
        }
        self.names = names;
    }
}

impl Drop for Down {
    fn drop(&mut self) {
        self.note(HashSet::new());
    }
}

/// The request of a health check.
struct Check<'a> {
    path: &'a str,
    host: &'a str,
}

impl Outgoing for Check<'_> {
    fn method(&self) -> &Method {
        &Method::GET
    }

    fn write_http1(&self, out: &mut BytesMut) {
        let (path, host) = (self.path, self.host);
        let head =
            format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nuser-agent: {USER_AGENT}\r\naccept: */*\r\n\r\n");
        out.extend_from_slice(head.as_bytes());
    }

    fn http2(&self, scheme: &str, authority: &str) -> Request<()> {
        let mut request = Request::new(());
        let uri = Uri::builder().scheme(scheme).authority(authority).path_and_query(self.path);
        *request.uri_mut() = uri.build().unwrap_or_default();
        request.headers_mut().insert(http::header::USER_AGENT, http::HeaderValue::from_static(USER_AGENT));
        request
    }
}
