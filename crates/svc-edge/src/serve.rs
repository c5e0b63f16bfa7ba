//! The life of a request: rate, room, path, then a look into the store, a change of it, or a question to an origin.

mod depot;
mod index;
mod live;
mod packs;
mod preview;
mod read;
mod site;
mod write;

use crate::address::Address;
use crate::cache::{CacheStatus, Reason as Why};
use crate::cas::Cas;
use crate::config::EdgeSettings;
use crate::depot::Depot;
use crate::fill::{Fill, Origins, host_of};
use crate::packs::Packs;
use crate::semantics::decode_path;
use arc_swap::ArcSwap;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ALLOW,
    AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, ORIGIN, REFERRER_POLICY, STRICT_TRANSPORT_SECURITY,
    VARY, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS,
};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use ron_kernel::admission::bucket::{Rate, Single, Verdict};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::{Body, ConnInfo, Handler, requests_family};
use ron_kernel::inventory::LockSpec;
use ron_kernel::kernel::Service;
use ron_kernel::metrics::{Counter, Family, Histogram};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID};
use ron_kernel::reason::{Reason, Rejections};
use ron_kernel::sync::{Permit, Permits};
use ron_kernel::token::{Verifier, Wish};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

pub(crate) static COUNTERS: LockSpec =
    LockSpec { service: "edge", name: "counters", rank: 30, guards: "the token bucket of the rate limit" };

/// Fields of every answer that is not a site's.
const EVERYWHERE: [(HeaderName, HeaderValue); 2] = [
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
];

const READS: &str = "GET, HEAD, OPTIONS";

/// Everything that follows from one version of the configuration.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pub(crate) settings: EdgeSettings,
    /// Who may be asked for what is not stored.
    pub(crate) origins: Origins,
    /// Whose capabilities are believed.
    verifier: Verifier,
}

/// The handler behind the edge's listeners.
#[derive(Debug)]
pub(crate) struct Edge {
    snapshot: ArcSwap<Snapshot>,
    cas: Arc<Cas>,
    fill: Arc<Fill>,
    packs: Arc<Packs>,
    /// The object store behind the local one.
    depot: Option<Arc<Depot>>,
    inflight: Arc<Permits>,
    rate: Single,
    rejections: Rejections,
    requests: Arc<Family<Counter, 4>>,
    latency: Arc<Family<Histogram, 3>>,
    /// Of both, what counts a good answer to GET, by route.
    usual: [(&'static str, Counter, Histogram); 3],
    /// Answers by where they came from, in the order of [`Source::ALL`].
    cache: [Counter; Source::ALL.len()],
    busy: Arc<Family<Counter, 3>>,
    /// Of those, where a job found no place.
    busy_assets: Counter,
    busy_sites: Counter,
    read_timeouts: Counter,
}

/// Where an answer came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    /// It was stored.
    Hit,
    /// It was not, and is not now.
    Miss,
    /// It was fetched for this request.
    Fill,
    /// It was stored, and is older than it should be.
    Stale,
    /// It was fetched for another request, which this one waited with.
    Collapsed,
}

impl Source {
    const ALL: [Source; 5] = [Source::Hit, Source::Miss, Source::Fill, Source::Stale, Source::Collapsed];

    /// As `edge_cache_total` calls it.
    fn label(self) -> &'static str {
        match self {
            Source::Hit => "hit",
            Source::Miss => "miss",
            Source::Fill => "fill",
            Source::Stale => "stale",
            Source::Collapsed => "collapsed",
        }
    }

    /// As `Cache-Status` says it: `fwd` is for requests that went on to an origin; one that did not says so in `detail`.
    fn status(self) -> CacheStatus<'static> {
        let bare = CacheStatus { cache: "ron-edge", ..CacheStatus::default() };
        match self {
            Source::Hit => CacheStatus { hit: true, ..bare },
            Source::Miss => CacheStatus { detail: Some("miss"), ..bare },
            Source::Fill => CacheStatus { forwarded: Some(Why::UriMiss), stored: true, ..bare },
            Source::Stale => CacheStatus { hit: true, detail: Some("stale"), ..bare },
            Source::Collapsed => CacheStatus { forwarded: Some(Why::UriMiss), collapsed: true, ..bare },
        }
    }
}

impl Source {
    /// The field of an answer; the commonest of all is not put together anew.
    fn field(self, status: CacheStatus<'_>) -> HeaderValue {
        if self == Source::Hit && status == self.status() {
            return HeaderValue::from_static("ron-edge; hit");
        }
        status.value()
    }
}

/// What a path means.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    Asset(String),
    /// What is stored under names.
    Assets,
    Object(Address),
    /// Where objects are put whose address is not known beforehand.
    Objects,
    Purge,
    Pack(packs::Target),
}

impl Target {
    /// `None`: there is nothing of that kind.
    fn of(path: &str) -> Result<Option<Target>, Rejection> {
        let Some(rest) = path.strip_prefix("/edge/") else { return Ok(None) };
        let decoded = decode_path(rest).map_err(|bad| Rejection::new(Reason::Malformed, bad.detail()))?;
        Ok(match decoded.split_once('/') {
            None if decoded == "assets" => Some(Target::Assets),
            None if decoded == "cas" => Some(Target::Objects),
            None if decoded == "purge" => Some(Target::Purge),
            Some(("assets", name)) if !name.is_empty() => Some(Target::Asset(name.to_owned())),
            Some(("cas", address)) => {
                let bad = || Rejection::new(Reason::Malformed, "expected b3: and 64 digits in lower case");
                Some(Target::Object(Address::parse(address).ok_or_else(bad)?))
            }
            _ => packs::Target::of(&decoded).map(Target::Pack),
        })
    }

    /// As metrics call it.
    fn label(&self) -> &'static str {
        match self {
            Target::Asset(_) | Target::Assets => "/edge/assets",
            Target::Object(_) | Target::Objects => "/edge/cas",
            Target::Purge => "/edge/purge",
            Target::Pack(target) => target.label(),
        }
    }

    fn allows(&self) -> &'static str {
        match self {
            Target::Asset(_) => "GET, HEAD, PUT, DELETE, OPTIONS",
            Target::Object(_) => "GET, HEAD, PUT, OPTIONS",
            Target::Objects => "PUT, OPTIONS",
            Target::Purge => "POST, OPTIONS",
            Target::Assets | Target::Pack(_) => READS,
        }
    }
}

/// Where answers come from.
#[derive(Debug)]
pub(crate) struct Stores {
    pub(crate) fill: Arc<Fill>,
    pub(crate) packs: Arc<Packs>,
    pub(crate) depot: Option<Arc<Depot>>,
}

impl Edge {
    pub(crate) fn new(
        service: &Service,
        settings: &EdgeSettings,
        stores: Stores,
        origins: Origins,
        verifier: Verifier,
    ) -> Edge {
        let Stores { fill, packs, depot } = stores;
        let cas = fill.cas.clone();
        let rejections = Rejections::new(service);
        let inflight = Permits::new(settings.ingress.max_inflight);
        expose(service, &cas, &rejections, &inflight);
        let busy: Arc<Family<Counter, 3>> = service.metrics().family(
            "busy_rejections_total",
            "Requests refused or displaced by a full queue.",
            ["service", "endpoint", "queue"],
        );
        let cache: Arc<Family<Counter, 1>> =
            service.metrics().family("edge_cache_total", "Answers by where they came from.", ["result"]);
        origins.put_to_use();
        let requests = requests_family(service);
        let latency: Arc<Family<Histogram, 3>> = service.metrics().family(
            "request_latency_seconds",
            "Time from a request's head to its response's head.",
            ["service", "route", "method"],
        );
        let usual = ["/edge/assets", "/edge/cas", "/edge/packs"].map(|route| {
            (route, requests.with(["edge", route, "GET", "200"]), latency.with(["edge", route, "GET"]))
        });
        Edge {
            snapshot: ArcSwap::from_pointee(Snapshot { settings: settings.clone(), origins, verifier }),
            cas,
            fill,
            packs,
            depot,
            inflight,
            rate: Single::new(service.inventory(), &COUNTERS),
            rejections,
            requests,
            latency,
            usual,
            cache: Source::ALL.map(|source| cache.with([source.label()])),
            busy_assets: busy.with(["edge", "/edge/assets", "work"]),
            busy_sites: busy.with(["edge", "site", "work"]),
            busy,
            read_timeouts: service.io_timeout("read"),
        }
    }

    /// Swaps in a new configuration; requests under way keep the one they began with.
    pub(crate) fn apply(&self, settings: &EdgeSettings, origins: Origins, verifier: Verifier) {
        self.inflight.set_limit(settings.ingress.max_inflight);
        origins.put_to_use();
        self.snapshot.store(Arc::new(Snapshot { settings: settings.clone(), origins, verifier }));
    }

    pub(crate) fn snapshot(&self) -> Arc<Snapshot> {
        self.snapshot.load_full()
    }

    async fn answer(
        &self,
        request: Request<Body>,
        snapshot: &Arc<Snapshot>,
        (conn, corr): (&ConnInfo, &CorrId),
        begun: Instant,
        route: &mut &'static str,
    ) -> Result<Response<Body>, Rejection> {
        if let Some(rate) = Rate::new(snapshot.settings.ingress.rps_limit, 1.0)
            && let Verdict::Empty { wait } = self.rate.take(1.0, rate, begun)
        {
            let seconds = wait.as_secs() + 1;
            return Err(
                Rejection::new(Reason::RateLimit, "too many requests; slow down").retry_after(seconds)
            );
        }
        let (request, body) = request.into_parts();
        let path = request.uri.path();
        if path != "/edge"
            && !path.starts_with("/edge/")
            && let Some(host) = host_of(&request)
            && let Some(origin) = snapshot.origins.of_host(&host)
        {
            *route = "site";
            let (permit, budget) = self.admit(&request, (*route, snapshot), begun)?;
            let visit = site::Visit { origin, host: &host, snapshot, conn, corr, budget };
            return Box::pin(self.visit(request, body, &visit, permit)).await;
        }
        let target = Target::of(path)?;
        if let Some(target) = &target {
            *route = target.label();
        }
        let allow = HeaderValue::from_static(target.as_ref().map_or(READS, Target::allows));
        if request.method == Method::OPTIONS {
            let mut response = Response::new(Body::default());
            *response.status_mut() = StatusCode::NO_CONTENT;
            response.headers_mut().insert(ALLOW, allow);
            return Ok(response);
        }
        let target =
            target.ok_or_else(|| Rejection::new(Reason::NotFound, "nothing of that kind is served"))?;
        let (permit, budget) = self.admit(&request, (*route, snapshot), begun)?;
        match (request.method.clone(), target) {
            (Method::GET | Method::HEAD, Target::Asset(name)) => {
                self.read_asset(&request, name, snapshot, budget, permit).await
            }
            (Method::GET | Method::HEAD, Target::Assets) => {
                Box::pin(self.list(&request, snapshot, budget)).await
            }
            (Method::GET | Method::HEAD, Target::Object(address)) => {
                self.read_object(&request, address, snapshot, budget, permit).await
            }
            (Method::GET | Method::HEAD, Target::Pack(target)) => {
                let asked = packs::Asked { request: &request, secure: conn.secure, snapshot, budget };
                self.read_pack(&asked, target, permit).await
            }
            (Method::PUT, Target::Asset(name)) => {
                Box::pin(self.put_asset(&request, body, name, snapshot, budget)).await
            }
            (Method::PUT, Target::Object(address)) => {
                Box::pin(self.put_object(&request, body, Some(address), snapshot, budget)).await
            }
            (Method::PUT, Target::Objects) => {
                Box::pin(self.put_object(&request, body, None, snapshot, budget)).await
            }
            (Method::DELETE, Target::Asset(name)) => {
                Box::pin(self.delete(&request, name, snapshot, budget)).await
            }
            (Method::POST, Target::Purge) => Box::pin(self.purge(&request, body, snapshot, budget)).await,
            _ => Err(Rejection::new(Reason::Method, "the method is not allowed here").header(ALLOW, allow)),
        }
    }

    /// A place among the requests that are being answered, and how long this one may take.
    fn admit(
        &self,
        request: &Parts,
        (endpoint, snapshot): (&'static str, &Snapshot),
        begun: Instant,
    ) -> Result<(Permit, Budget), Rejection> {
        let permit = self.place(endpoint)?;
        let timeout = snapshot.settings.ingress.timeout.0;
        let budget = Budget::of(&request.headers, timeout, begun, unix_millis)
            .map_err(|bad| Rejection::new(Reason::Malformed, bad.to_string()))?;
        if budget.is_over(Instant::now()) {
            return Err(Rejection::new(Reason::Timeout, "the deadline has passed"));
        }
        Ok((permit, budget))
    }

    fn place(&self, endpoint: &'static str) -> Result<Permit, Rejection> {
        self.inflight.try_take().ok_or_else(|| {
            self.busy.with(["edge", endpoint, ""]).inc();
            Rejection::new(Reason::Busy, "too many requests are being answered").retry_after(1)
        })
    }

    /// Lets in whoever has a capability for this.
    fn authorize(&self, request: &Parts, scope: &str, snapshot: &Snapshot) -> Result<(), Rejection> {
        let refuse = |reason, challenge| {
            Rejection::new(reason, format!("this needs a capability for {scope}"))
                .header(WWW_AUTHENTICATE, HeaderValue::from_static(challenge))
        };
        let sent = request.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let bearer = sent
            .and_then(|value| value.split_once(' '))
            .filter(|(kind, _)| kind.eq_ignore_ascii_case("bearer"));
        let Some((_, token)) = bearer else { return Err(refuse(Reason::Unauth, "Bearer")) };
        let wish =
            Wish { scope, method: request.method.as_str(), path: request.uri.path(), audience: "edge" };
        match snapshot.verifier.authorize(token.trim(), wish, SystemTime::now()) {
            Ok(_) => Ok(()),
            Err(Reason::Forbidden) => {
                Err(Rejection::new(Reason::Forbidden, format!("the capability does not allow {scope} here")))
            }
            Err(reason) => Err(refuse(reason, "Bearer error=\"invalid_token\"")),
        }
    }

    fn count(&self, route: &'static str, method: &'static str, status: StatusCode, elapsed: Duration) {
        let is_usual = status == StatusCode::OK && method == "GET";
        let usual = self.usual.iter().find(|(known, ..)| is_usual && *known == route);
        if let Some((_, requests, latency)) = usual {
            requests.inc();
            latency.observe(elapsed);
        } else {
            self.requests.with(["edge", route, method, status.as_str()]).inc();
            self.latency.with(["edge", route, method]).observe(elapsed);
        }
    }

    fn count_cache(&self, source: Source) {
        self.cache[source as usize].inc();
    }
}

impl Handler for Edge {
    async fn call(&self, request: Request<Body>, conn: &ConnInfo) -> Response<Body> {
        let begun = Instant::now();
        let corr = CorrId::from_headers(request.headers());
        let snapshot = self.snapshot.load_full();
        let method = match request.method().as_str() {
            "GET" => "GET",
            "HEAD" => "HEAD",
            "POST" => "POST",
            "PUT" => "PUT",
            "DELETE" => "DELETE",
            "OPTIONS" => "OPTIONS",
            _ => "other",
        };
        let preflight = request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        let origin = request.headers().get(ORIGIN).cloned();
        let mut route = "none";
        // Boxed: a future of this size would make that of every connection as large. What is rare is boxed once more
        // within it, so that what is common takes little room.
        let answered = Box::pin(self.answer(request, &snapshot, (conn, &corr), begun, &mut route)).await;
        let mut response = answered.unwrap_or_else(|rejection| {
            self.rejections.count(rejection.reason);
            rejection.into_response(&corr)
        });
        // Those have [`EVERYWHERE`] among them.
        let written = response.body().is_behind();
        let headers = response.headers_mut();
        headers.insert(X_CORR_ID, corr.value().clone());
        // What comes from a site is the site's.
        if route != "site" {
            if !written {
                headers.extend(EVERYWHERE);
            }
            if conn.secure {
                headers.insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static("max-age=31536000"));
            }
            share(headers, &snapshot.settings.cors.allow_origins, origin, preflight && method == "OPTIONS");
        }
        let status = response.status();
        let elapsed = begun.elapsed();
        self.count(route, method, status, elapsed);
        tracing::debug!(
            corr_id = corr.as_str(),
            route,
            method,
            status = status.as_u16(),
            ?elapsed,
            "request"
        );
        response
    }
}

/// Tells a browser which pages may read the answer.
fn share(headers: &mut HeaderMap, allowed: &[String], origin: Option<HeaderValue>, preflight: bool) {
    if allowed.is_empty() {
        return;
    }
    let everybody = allowed.iter().any(|known| known == "*");
    if !everybody {
        headers.append(VARY, HeaderValue::from_static("Origin"));
    }
    // Everybody is told so, whoever asks: a cache may keep the answer for somebody else.
    let origin = if everybody { Some(HeaderValue::from_static("*")) } else { origin };
    let known =
        |origin: &HeaderValue| everybody || allowed.iter().any(|known| known.as_bytes() == origin.as_bytes());
    let Some(origin) = origin.filter(known) else { return };
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    let fixed = |text| HeaderValue::from_static(text);
    let seen = "ETag, Content-Range, Accept-Ranges, Repr-Digest, Cache-Status, Location, X-Corr-ID, X-Reason";
    headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, fixed(seen));
    if preflight {
        let sent = "Authorization, Content-Digest, Content-Type, If-Match, If-Modified-Since, If-None-Match, \
                    If-Range, If-Unmodified-Since, Range, Surrogate-Key, X-Corr-ID";
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, fixed("GET, HEAD, PUT, POST, DELETE"));
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, fixed(sent));
        headers.insert(ACCESS_CONTROL_MAX_AGE, fixed("600"));
    }
}

/// Gauges, and the seed's name for what `rejected_total` counts.
fn expose(service: &Service, cas: &Arc<Cas>, rejections: &Rejections, inflight: &Arc<Permits>) {
    let (metrics, name) = (service.metrics(), service.name());
    let seen = inflight.clone();
    metrics.computed("inflight_requests", "Requests being answered.", "gauge", move |rows| {
        rows.row(&[("service", name)], seen.used());
    });
    let seen = cas.clone();
    metrics.computed("edge_cas_bytes", "Bytes of all stored objects.", "gauge", move |rows| {
        rows.row(&[], seen.bytes());
    });
    let seen = cas.clone();
    let help = "Part of the stored bytes that the current or last scrub has read.";
    metrics.computed("edge_scrub_ratio", help, "gauge", move |rows| rows.row(&[], seen.progress().ratio()));
    let seen = rejections.clone();
    metrics.computed("edge_rejects_total", "Requests refused, by reason.", "counter", move |rows| {
        let mut written: Vec<&str> = Vec::new();
        for (reason, count) in seen.counts() {
            // Two reasons may have one code, and then one count.
            if !written.contains(&reason.code()) {
                written.push(reason.code());
                rows.row(&[("reason", reason.code())], count);
            }
        }
    });
}

pub(crate) fn unix_millis() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

/// A field's value of characters that are known to be allowed in one.
fn value(text: impl TryInto<HeaderValue>) -> HeaderValue {
    text.try_into().unwrap_or_else(|_not_a_value| HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_means_one_thing_or_nothing() {
        let of = |path: &str| Target::of(path).map_err(|rejection| rejection.reason);
        let asset = |name: &str| Ok(Some(Target::Asset(name.to_owned())));
        assert_eq!(of("/edge/assets/a/b.png"), asset("a/b.png"));
        assert_eq!(of("/edge/assets%2Fa"), asset("a"), "decoded once, then taken apart");
        assert_eq!(
            (of("/edge/cas"), of("/edge/purge")),
            (Ok(Some(Target::Objects)), Ok(Some(Target::Purge)))
        );
        assert_eq!(of("/edge/assets"), Ok(Some(Target::Assets)));
        let address = Address([7; 32]);
        assert_eq!(of(&format!("/edge/cas/{address}")), Ok(Some(Target::Object(address))));
        for nothing in ["/", "/edge", "/edge/assets/", "/edge/other/x", "/edge/purge/x", "/assets/x"] {
            assert_eq!(of(nothing), Ok(None), "{nothing}");
        }
        for bad in ["/edge/assets/../x", "/edge/assets/%00", "/edge/cas/b3:12", "/edge/", "/edge/assets/%zz"]
        {
            assert_eq!(of(bad), Err(Reason::Malformed), "{bad}");
        }
    }
}
