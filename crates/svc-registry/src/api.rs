//! HTTP: who is let in, what a request asks for, and how it is answered.

mod answer;
mod export;
mod openapi;
mod proofs;
mod read;
mod routes;
mod stream;
#[cfg(test)]
mod tests;
mod websocket;
mod write;

use crate::checks::Ahead;
use crate::config::{Auth, RegistrySettings};
use crate::job::Job;
use crate::shared::Shared;
use crate::store::{Reader, StoreError};
use answer::{Format, Query};
use arc_swap::ArcSwap;
use http::header::{
    ALLOW, AUTHORIZATION, CACHE_CONTROL, ETAG, HOST, HeaderMap, HeaderValue, ORIGIN, WWW_AUTHENTICATE,
};
use http::request::Parts;
use http::{Request, Response};
use ron_kernel::admission::bucket::{Rate, Single, Verdict};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::channel::Sender;
use ron_kernel::http::{Body, ConnInfo, Handler, requests_family};
use ron_kernel::inventory::LockSpec;
use ron_kernel::metrics::{Counter, Family, Histogram};
use ron_kernel::problem::{CorrId, Rejection};
use ron_kernel::reason::{Reason, Rejections};
use ron_kernel::sync::{Permit, Permits};
use ron_kernel::token::{Verifier, Wish};
use routes::{Endpoint, Found, Route};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

pub(crate) use proofs::consistency_path;

/// A request's budget, if the client asks for nothing else.
const BUDGET: Duration = Duration::from_secs(30);
/// States of the past being worked out at one time, and exports under way: each reads much of the log.
const REPLAYS_MAX: usize = 4;
const EXPORTS_MAX: usize = 4;
/// Longest wait of a long-poll.
const WAIT_MAX: Duration = Duration::from_secs(300);

pub(crate) static COUNTERS: LockSpec = LockSpec {
    service: "registry",
    name: "counters",
    rank: 30,
    guards: "the token bucket of the rate limit",
};

/// The handler behind the registry's listeners.
pub(crate) struct Api {
    shared: Arc<Shared>,
    proposals: Sender<Job>,
    approvals: Sender<Job>,
    ahead: Ahead,
    tokens: ArcSwap<Verifier>,
    rate: Single,
    inflight: Arc<Permits>,
    /// Streams, and requests that wait for something to happen.
    streams: Arc<Permits>,
    replays: Arc<Permits>,
    exports: Arc<Permits>,
    rejections: Rejections,
    requests: Arc<Family<Counter, 4>>,
    latency: Arc<Family<Histogram, 3>>,
    busy: Arc<Family<Counter, 3>>,
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

/// A request that was let in.
struct Asked<'a> {
    head: Parts,
    conn: &'a ConnInfo,
    corr: &'a CorrId,
    parts: Vec<String>,
    query: Query,
    format: Format,
    budget: Budget,
    /// Its place among those being answered; none while it waits.
    inflight: Option<Permit>,
    /// Its place among those that wait.
    place: Option<Permit>,
}

impl Asked<'_> {
    fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    fn part(&self, index: usize) -> &str {
        self.parts.get(index).map_or("", String::as_str)
    }
}

impl Api {
    pub(crate) fn new(
        shared: &Arc<Shared>,
        proposals: Sender<Job>,
        approvals: Sender<Job>,
        ahead: Ahead,
        tokens: Verifier,
    ) -> Api {
        let service = &shared.service;
        let settings = shared.settings.load();
        let (inflight, streams) =
            (Permits::new(settings.limits.inflight), Permits::new(settings.stream.max_clients));
        let (seen, open) = (inflight.clone(), streams.clone());
        let name = service.name();
        service.metrics().computed("inflight_requests", "Requests being answered.", "gauge", move |rows| {
            rows.row(&[("service", name)], seen.used());
        });
        let help = "Streams open, and requests that wait for something to happen.";
        service.metrics().computed("stream_clients", help, "gauge", move |rows| {
            rows.row(&[], open.used());
        });
        Api {
            shared: shared.clone(),
            proposals,
            approvals,
            ahead,
            tokens: ArcSwap::from_pointee(tokens),
            rate: Single::new(service.inventory(), &COUNTERS),
            inflight,
            streams,
            replays: Permits::new(REPLAYS_MAX),
            exports: Permits::new(EXPORTS_MAX),
            rejections: Rejections::new(service),
            requests: requests_family(service),
            latency: service.metrics().family(
                "request_latency_seconds",
                "Time from a request's head to its response's head.",
                ["service", "route", "method"],
            ),
            busy: service.metrics().family(
                "busy_rejections_total",
                "Requests refused or displaced by a full queue.",
                ["service", "endpoint", "queue"],
            ),
        }
    }

    /// Swaps in a new configuration.
    pub(crate) fn apply(&self, settings: &RegistrySettings, tokens: Verifier) {
        self.inflight.set_limit(settings.limits.inflight);
        self.streams.set_limit(settings.stream.max_clients);
        self.tokens.store(Arc::new(tokens));
        self.shared.settings.store(Arc::new(settings.clone()));
    }

    async fn answer(
        &self,
        request: Request<Body>,
        conn: &ConnInfo,
        corr: &CorrId,
        found: Found,
    ) -> Result<Response<Body>, Rejection> {
        let begun = Instant::now();
        let settings = self.shared.settings.load_full();
        if let Some(rate) = Rate::new(settings.limits.rps, 2.0)
            && let Verdict::Empty { wait } = self.rate.take(1.0, rate, begun)
        {
            let refused = Rejection::new(Reason::QuotaGlobal, "the registry takes no more requests a second");
            return Err(refused.retry_after(wait.as_secs() + 1));
        }
        let (route, parts) = match found {
            Found::Route(route, parts) => (route, parts),
            Found::OtherMethod(allow) => {
                let allow = HeaderValue::from_str(&allow).expect("methods are plain text");
                return Err(
                    Rejection::new(Reason::Method, "another method is needed here").header(ALLOW, allow)
                );
            }
            Found::Nothing => return Err(answer::not_found("see /registry/openapi.json")),
        };
        let query = Query::parse(request.uri().query(), route.query)?;
        let unix = || crate::shared::now_millis();
        let budget = Budget::of(request.headers(), self.allowance(route, &query)?, begun, unix)
            .map_err(|bad| answer::malformed(bad.to_string()))?;
        let format = Format::wanted(request.headers());
        let (head, body) = request.into_parts();
        let mut asked = Asked { head, conn, corr, parts, query, format, budget, inflight: None, place: None };
        if route.scope.is_some() || route.endpoint == Endpoint::WebSocket {
            same_site(&asked)?;
        }
        if let Some(scope) = route.scope {
            self.authorize(&asked, scope, &settings)?;
        }
        let label = endpoint_label(route.endpoint);
        if waits(route.endpoint, &asked.query) {
            asked.place =
                Some(self.take(&self.streams, label, "too many streams are open, or requests wait")?);
        }
        match route.endpoint {
            Endpoint::Stream | Endpoint::WebSocket => return self.stream(route.endpoint, asked),
            Endpoint::Head if asked.place.is_some() => return self.head(asked).await,
            _ => {}
        }
        asked.inflight = Some(self.take(&self.inflight, label, "too many requests are being answered")?);
        match route.endpoint {
            Endpoint::Propose => self.propose(asked, body).await,
            Endpoint::Approve => self.approve(asked, body).await,
            Endpoint::Commit => self.commit(asked, body).await,
            Endpoint::Withdraw => self.withdraw(asked).await,
            Endpoint::Supersede => self.supersede(asked, body).await,
            Endpoint::Export => self.export(asked).await,
            _ => {
                let permit = asked.inflight.take();
                Ok(answer::held(self.read_only(route.endpoint, asked).await?, permit))
            }
        }
    }

    async fn read_only(&self, endpoint: Endpoint, asked: Asked<'_>) -> Result<Response<Body>, Rejection> {
        match endpoint {
            Endpoint::Head => self.head(asked).await,
            Endpoint::Log => self.log(asked).await,
            Endpoint::Entry => self.entry(asked).await,
            Endpoint::Items => self.items(asked).await,
            Endpoint::Item => self.item(asked).await,
            Endpoint::Proposals => self.list_proposals(asked).await,
            Endpoint::Proposal => self.one_proposal(asked).await,
            Endpoint::Inclusion => self.inclusion(asked).await,
            Endpoint::Consistency => self.consistency(asked).await,
            Endpoint::Retention => self.retention(asked).await,
            Endpoint::Snapshot => self.snapshot(asked).await,
            Endpoint::Checkpoint => self.checkpoint(&asked),
            Endpoint::Tile => self.tile(asked).await,
            Endpoint::LogKey => {
                Ok(answer::raw(200, format!("{}\n", self.shared.log_key), answer::TEXT, asked.corr))
            }
            _ => Ok(answer::value(200, &openapi::page(), asked.format, asked.corr)),
        }
    }

    fn take(
        &self,
        permits: &Arc<Permits>,
        endpoint: &'static str,
        detail: &'static str,
    ) -> Result<Permit, Rejection> {
        permits.try_take().ok_or_else(|| {
            self.busy.with(["registry", endpoint, ""]).inc();
            Rejection::new(Reason::Busy, detail).retry_after(1)
        })
    }

    /// Reads the store for a request, as long as its client waits.
    async fn read<T: Send + 'static>(
        &self,
        asked: &Asked<'_>,
        op: &'static str,
        read: impl Fn(&Reader) -> Result<T, StoreError> + Send + Sync + 'static,
    ) -> Result<T, Rejection> {
        in_time(asked, self.shared.read(op, read)).await?.map_err(|error| unreadable(&self.shared, &error))
    }

    /// A request's budget; what it asks to wait for comes on top.
    fn allowance(&self, route: &Route, query: &Query) -> Result<Duration, Rejection> {
        match (route.endpoint, query.text("wait")) {
            (Endpoint::Head, Some(wait)) => {
                let wait = wait.parse::<ron_kernel::units::Span>().map_err(answer::malformed)?;
                Ok(BUDGET + wait.0.min(WAIT_MAX))
            }
            (_, Some(wait)) if wait != "durable" => {
                Ok(BUDGET + self.shared.settings.load().checkpoint.interval.0.min(WAIT_MAX))
            }
            _ => Ok(BUDGET),
        }
    }

    fn authorize(
        &self,
        asked: &Asked<'_>,
        scope: &str,
        settings: &RegistrySettings,
    ) -> Result<(), Rejection> {
        if settings.auth == Auth::Open {
            return Ok(());
        }
        let challenge =
            |rejection: Rejection| rejection.header(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        let sent = asked.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let bearer = sent.and_then(|value| value.split_once(' '));
        let Some((_, token)) = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")) else {
            let detail = format!("send a capability with the scope {scope} as Authorization: Bearer");
            return Err(challenge(Rejection::new(Reason::Unauth, detail)));
        };
        let (method, path) = (asked.head.method.as_str(), asked.head.uri.path());
        let wish = Wish { scope, method, path, audience: "registry" };
        match self.tokens.load().authorize(token.trim(), wish, SystemTime::now()) {
            Ok(_bearer) => Ok(()),
            Err(reason) => {
                let detail = match reason {
                    Reason::TokenExpired => "the capability has expired".to_owned(),
                    Reason::TokenInvalid => {
                        "the capability is not of a key that is trusted here, or was changed".to_owned()
                    }
                    Reason::TokenAudience => {
                        "the capability is for another audience than registry".to_owned()
                    }
                    _ => format!("the capability must allow {scope} here"),
                };
                let refused = Rejection::new(reason, detail);
                Err(if reason.status() == 401 { challenge(refused) } else { refused })
            }
        }
    }
}

/// Whether a request is there to wait, and not to be answered at once.
fn waits(endpoint: Endpoint, query: &Query) -> bool {
    match (endpoint, query.text("wait")) {
        (Endpoint::Stream | Endpoint::WebSocket, _) | (Endpoint::Head, Some(_)) => true,
        (_, Some(level)) => level != "durable",
        (_, None) => false,
    }
}

/// A page of another site may not write through the browser of somebody who can, nor listen over WebSocket. What came
/// unencrypted may have been encrypted until shortly before, so its scheme says nothing; what came encrypted cannot
/// be meant by a page that was not.
fn same_site(asked: &Asked<'_>) -> Result<(), Rejection> {
    let Some(origin) = asked.headers().get(ORIGIN) else { return Ok(()) };
    let host = asked.headers().get(HOST).and_then(|host| host.to_str().ok());
    let host = asked.head.uri.authority().map(|authority| authority.as_str()).or(host);
    let same = is_site(origin.to_str().unwrap_or(""), host.unwrap_or(""), asked.conn.secure);
    if same { Ok(()) } else { Err(Rejection::new(Reason::Forbidden, "the Origin is another site's")) }
}

/// Whether an origin is the site of a host. Either may name the port that its scheme means anyway.
fn is_site(origin: &str, host: &str, secure: bool) -> bool {
    let http = origin.strip_prefix("http://").filter(|_| !secure).map(|site| (site, ":80"));
    let site = http.or_else(|| Some((origin.strip_prefix("https://")?, ":443")));
    site.is_some_and(|(site, port)| {
        let bare = |name: &str| name.strip_suffix(port).unwrap_or(name).to_ascii_lowercase();
        !host.is_empty() && bare(site) == bare(host)
    })
}

/// Waits for what a request needs until its deadline.
async fn in_time<T>(asked: &Asked<'_>, work: impl Future<Output = T>) -> Result<T, Rejection> {
    let late = || Rejection::new(Reason::Timeout, "the deadline passed before it was read");
    if asked.budget.until <= Instant::now() {
        return Err(late());
    }
    tokio::time::timeout_at(asked.budget.until.into(), work).await.map_err(|_elapsed| late())
}

/// What `busy_rejections_total` calls an endpoint.
fn endpoint_label(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Propose | Endpoint::Withdraw | Endpoint::Supersede => "propose",
        Endpoint::Approve => "approve",
        Endpoint::Commit => "commit",
        _ => "read",
    }
}

/// What a client is told of a store that cannot be read.
fn unreadable(shared: &Shared, error: &StoreError) -> Rejection {
    if let StoreError::DamagedEntry { version, what } = error {
        shared.damaged(*version, what);
        return Rejection::new(Reason::Storage, format!("version {version} is damaged"));
    }
    tracing::warn!(%error, "the registry's store could not be read");
    Rejection::new(Reason::Storage, "the storage cannot be read now")
}

impl Handler for Api {
    async fn call(&self, request: Request<Body>, conn: &ConnInfo) -> Response<Body> {
        let begun = Instant::now();
        let corr = CorrId::from_headers(request.headers());
        let found = routes::find(request.method().as_str(), request.uri().path());
        let (route, method) = match &found {
            Found::Route(route, _) => (route.path, route.method),
            _ => ("none", "none"),
        };
        let mut response = match Box::pin(self.answer(request, conn, &corr, found)).await {
            Ok(response) => response,
            Err(rejection) => {
                self.rejections.count(rejection.reason);
                rejection.into_response(&corr)
            }
        };
        if self.shared.damage().is_some() {
            // It may be what is damaged: nobody shall keep it as what was committed.
            response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
            response.headers_mut().remove(ETAG);
        }
        self.requests.with(["registry", route, method, response.status().as_str()]).inc();
        self.latency.with(["registry", route, method]).observe(begun.elapsed());
        response
    }
}
