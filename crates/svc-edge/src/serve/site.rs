//! Sites: a whole host through the cache, as a reverse proxy.

use super::{Edge, Snapshot, Source, unix_millis, value};
use crate::body;
use crate::cache::{
    self, Answer, CACHE_STATUS, CacheStatus, Forward, Freshness, Pending, Reuse, StoredHead, UnixMillis,
    Verdict, answer, freshen_by_head, invalidated, judge_post,
};
use crate::cas::{self, Epoch, Names, ReadError};
use crate::config::Mode;
use crate::fill::{
    Ask, Asked, Begun, Claim, Exchanged, Failure, Fill, Flight, FlightBody, Job, NAME_MAX, News, Origin,
    Passed, Pilot, SiteWork, Storable, Work, cleaned, via,
};
use crate::semantics::Preconditions;
use http::header::{
    AUTHORIZATION, CACHE_CONTROL, CONTENT_LENGTH, EXPECT, FORWARDED, HOST, HeaderMap, HeaderName,
    HeaderValue, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, MAX_FORWARDS,
    PRAGMA, RANGE, UPGRADE, VIA,
};
use http::request::Parts;
use http::{Method, Response, StatusCode, Uri, Version};
use ron_kernel::admission::deadline::{Budget, REQUEST_TIMEOUT};
use ron_kernel::http::client::{Payload, retain};
use ron_kernel::http::{Body, ConnInfo, Interim, Tunnel, last_hop, max_forwards, upgrade_of};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID};
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use std::sync::Arc;
use std::time::Instant;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Times that a request begins anew, see the assets.
const ATTEMPTS: usize = 4;

/// A request to a site.
pub(super) struct Visit<'a> {
    pub(super) origin: &'a Arc<Origin>,
    pub(super) host: &'a str,
    pub(super) snapshot: &'a Arc<Snapshot>,
    pub(super) conn: &'a ConnInfo,
    pub(super) corr: &'a CorrId,
    pub(super) budget: Budget,
}

impl Visit<'_> {
    /// Under which its responses are stored: what is asked for, and of whom.
    fn key(&self, target: &str) -> String {
        let scheme = if self.conn.secure { "https" } else { "http" };
        format!("{target}\0{scheme}://{}", self.host)
    }

    /// The client's fields with what the origin makes of them in mind: who gets what is stored is decided by nothing
    /// that the origin does not see.
    fn relevant(&self, headers: HeaderMap) -> HeaderMap {
        let mut headers = cleaned(headers);
        for name in [CONTENT_LENGTH, EXPECT, FORWARDED, REQUEST_TIMEOUT] {
            headers.remove(name);
        }
        // What a client says of other hops is no more than its word, and no response is told apart by it.
        retain(&mut headers, |name| {
            let plain = name.as_str().replace('_', "-");
            !plain.starts_with("x-forwarded-") && plain != "x-real-ip"
        });
        let address = if self.conn.address.is_empty() { "unknown" } else { &self.conn.address };
        headers.insert(X_FORWARDED_FOR, value(address));
        headers.insert(X_FORWARDED_HOST, value(self.host));
        headers.insert(X_FORWARDED_PROTO, value(if self.conn.secure { "https" } else { "http" }));
        headers
    }

    /// The same as the origin gets them.
    fn forwarded(&self, request: &Parts) -> HeaderMap {
        let mut headers = request.headers.clone();
        headers.remove(HOST);
        headers.append(VIA, via(request.version));
        headers.insert(X_CORR_ID, self.corr.value().clone());
        let left = self.budget.remaining(Instant::now()).as_millis();
        headers.insert(REQUEST_TIMEOUT, value(format!("{left}ms")));
        headers
    }

    fn until(&self) -> Instant {
        let deadline = Instant::now() + self.snapshot.settings.fill.deadline.0;
        self.budget.until.min(deadline)
    }
}

/// Why there is no answer yet.
enum Retry {
    Again(Rejection),
    Never(Rejection),
}

impl From<Rejection> for Retry {
    fn from(rejection: Rejection) -> Retry {
        Retry::Never(rejection)
    }
}

impl Edge {
    pub(super) async fn visit(
        &self,
        mut request: Parts,
        body: Body,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        let bare = body.exact_len() == Some(0);
        let upgrade = upgrade_of(&request.headers).filter(|_| bare && request.version == Version::HTTP_11);
        request.headers = visit.relevant(request.headers);
        if let Some(answer) = count_hops(&mut request) {
            return answer;
        }
        if request.method == Method::CONNECT {
            let detail = "CONNECT asks for a tunnel, which is not made here";
            return Err(Rejection::new(Reason::MethodUnknown, detail));
        }
        let target = request.uri.path_and_query().map_or("/", |it| it.as_str()).to_owned();
        let reads = matches!(request.method, Method::GET | Method::HEAD) && bare && upgrade.is_none();
        if !reads || target.len() > NAME_MAX {
            return self.pass(&request, &target, body, upgrade, visit, permit).await;
        }
        let mut permit = Some(permit);
        for attempt in 1..=ATTEMPTS {
            let permit = permit.take().map_or_else(|| self.place("site"), Ok)?;
            match self.try_visit(&request, &target, visit, permit).await {
                Err(Retry::Again(_)) if attempt < ATTEMPTS && !visit.budget.is_over(Instant::now()) => {}
                Err(Retry::Again(rejection) | Retry::Never(rejection)) => return Err(rejection),
                Ok(response) => return Ok(response),
            }
        }
        Err(Failure::Lost.rejection())
    }

    async fn try_visit(
        &self,
        request: &Parts,
        target: &str,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let key = visit.key(target);
        let since = self.cas.epoch();
        let stored = self.cas.responses(&key);
        let heads = heads(&stored);
        let now = UnixMillis(unix_millis());
        let forward =
            match cache::decide((&request.method, &request.headers), &heads, &visit.origin.policy, now) {
                Verdict::Reuse(reuse) => {
                    let found = &stored[reuse.stored];
                    let source = if reuse.freshness.is_fresh() { Source::Hit } else { Source::Stale };
                    let status = CacheStatus { ttl: Some(reuse.freshness.ttl_secs()), hit: true, ..bare() };
                    let response = self
                        .serve_stored(request, found, reuse.freshness, (source, status), visit, permit)
                        .await?;
                    if reuse.revalidate && visit.snapshot.settings.mode == Mode::Live {
                        self.refresh(request, target, (key, since), stored, reuse.stored, visit);
                    }
                    return Ok(response);
                }
                Verdict::NotCached => {
                    self.count_cache(Source::Miss);
                    let detail = "only what is stored was asked for, and nothing is";
                    let status = CacheStatus { detail: Some("only-if-cached"), ..bare() };
                    return Err(Rejection::new(Reason::Timeout, detail)
                        .header(CACHE_STATUS, status.value())
                        .into());
                }
                Verdict::Forward(forward) => forward,
            };
        if visit.snapshot.settings.mode == Mode::Offline {
            return self.visit_offline(request, &stored, visit, permit).await;
        }
        if request.method == Method::HEAD {
            return self.forward_head(request, target, &stored, forward.reason, visit, permit).await;
        }
        let early = visit.conn.interim.as_ref().filter(|_| request.version == Version::HTTP_11);
        let work = Arc::new(SiteWork {
            origin: visit.origin.clone(),
            key,
            target: target.to_owned(),
            client: request.headers.clone(),
            request: visit.forwarded(request),
            stored,
            since,
            forward,
            interim: early.map(Interim::sender),
        });
        match collapses(request, &work.forward) {
            true => self.go_together(request, work, visit, permit).await,
            false => self.go_alone(request, work, visit, permit).await,
        }
    }

    /// Asks the origin once for everybody who wants the same at this moment.
    async fn go_together(
        &self,
        request: &Parts,
        work: Arc<SiteWork>,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let (flight, leads) = self.fill.flights.join(&cas::response_name(&work.key, ""));
        let _claim = leads.then(|| Claim(flight.clone()));
        if leads {
            let pilot = Pilot::new(flight.clone(), Some(self.fill.flights.clone()));
            // Somebody may have brought it in between the look and the flight.
            let names =
                |found: &[cas::Response]| found.iter().map(|it| Arc::as_ptr(&it.asset)).collect::<Vec<_>>();
            if names(&self.cas.responses(&work.key)) != names(&work.stored) {
                return Err(Retry::Again(Failure::Lost.rejection()));
            }
            let until = Instant::now() + visit.snapshot.settings.fill.deadline.0;
            self.submit_site(Job {
                pilot,
                work: Work::Site(work.clone()),
                snapshot: visit.snapshot.clone(),
                until,
            });
        }
        self.watch_visit(request, work, &flight, leads, visit, permit).await
    }

    fn submit_site(&self, job: Job) {
        if let Err(Failure::Busy) = self.fill.submit(job) {
            self.busy_sites.inc();
        }
    }

    /// Without an origin: what is stored, however old unless that is forbidden, or nothing.
    async fn visit_offline(
        &self,
        request: &Parts,
        stored: &[cas::Response],
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let heads = heads(stored);
        if let Some(at) = cache::select(&request.headers, &heads) {
            let freshness = freshness(&stored[at], visit);
            if heads[at].needs_origin(freshness) {
                self.count_cache(Source::Miss);
                let detail = "what is stored must be confirmed first, and origins are not asked now";
                let status = CacheStatus { detail: Some("offline"), ..bare() };
                return Err(Rejection::new(Reason::Timeout, detail)
                    .header(CACHE_STATUS, status.value())
                    .into());
            }
            let status = CacheStatus { hit: true, detail: Some("offline"), ..bare() };
            return self
                .serve_stored(request, &stored[at], freshness, (Source::Stale, status), visit, permit)
                .await;
        }
        self.count_cache(Source::Miss);
        let rejection = Rejection::new(Reason::NotFound, "it is not stored");
        Err(rejection.header(CACHE_STATUS, Source::Miss.status().value()).into())
    }

    /// Has a stored response confirmed, while it is being used (RFC 5861 section 3).
    fn refresh(
        &self,
        request: &Parts,
        target: &str,
        (key, since): (String, Epoch),
        stored: Vec<cas::Response>,
        which: usize,
        visit: &Visit<'_>,
    ) {
        let (flight, leads) = self.fill.flights.join(&cas::response_name(&key, ""));
        if !leads {
            return;
        }
        flight.disclaim();
        let pilot = Pilot::new(flight, Some(self.fill.flights.clone()));
        let mut headers = visit.forwarded(request);
        let conditions = [
            IF_MATCH,
            IF_NONE_MATCH,
            IF_MODIFIED_SINCE,
            IF_UNMODIFIED_SINCE,
            IF_RANGE,
            RANGE,
            CACHE_CONTROL,
            PRAGMA,
        ];
        for name in conditions.into_iter().chain([REQUEST_TIMEOUT]) {
            headers.remove(name);
        }
        let validates = stored[which].asset.head.as_ref().is_some_and(|head| head.validators().exist());
        let forward = Forward {
            reason: cache::Reason::Stale,
            validate: validates.then_some(which),
            complete: None,
            on_error: None,
        };
        let work = SiteWork {
            origin: visit.origin.clone(),
            key,
            target: target.to_owned(),
            client: request.headers.clone(),
            request: headers,
            stored,
            since,
            forward,
            interim: None,
        };
        let until = Instant::now() + visit.snapshot.settings.fill.deadline.0;
        self.submit_site(Job {
            pilot,
            work: Work::Site(Arc::new(work)),
            snapshot: visit.snapshot.clone(),
            until,
        });
    }

    /// Waits for a flight and makes an answer of what it brings, if that is for this client.
    async fn watch_visit(
        &self,
        request: &Parts,
        work: Arc<SiteWork>,
        flight: &Arc<Flight>,
        leads: bool,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let source = if leads { Source::Fill } else { Source::Collapsed };
        let status = CacheStatus { forwarded: Some(work.forward.reason), collapsed: !leads, ..bare() };
        let news = tokio::time::timeout_at(visit.budget.until.into(), flight.news()).await;
        let failure = match news {
            Ok(News::Begun(begun)) => {
                // Whoever did not ask gets it only if the store may give it to everybody: else it may be another's own.
                let reusable = |head: &StoredHead| reuse(request, &[head], visit).is_some();
                if leads || begun.head.as_ref().is_some_and(reusable) {
                    let status = CacheStatus { stored: leads, ..status };
                    settle(flight, &begun, visit.budget).await;
                    return Ok(self.stream(request, flight, &begun, (source, status), visit, permit));
                }
                return self.go_alone(request, work, visit, permit).await;
            }
            Ok(News::Confirmed(found)) if leads => {
                let status = CacheStatus { forwarded_status: Some(StatusCode::NOT_MODIFIED), ..status };
                let freshness = freshness(&found, visit);
                return self.serve_stored(request, &found, freshness, (source, status), visit, permit).await;
            }
            Ok(News::Confirmed(_) | News::Changed) => {
                // That was said to another client, and counts for this one as far as it made something fresh.
                let stored = self.cas.responses(&work.key);
                if let Some(Reuse { stored: at, freshness, .. }) = reuse(request, &heads(&stored), visit) {
                    let status = CacheStatus { forwarded_status: Some(StatusCode::NOT_MODIFIED), ..status };
                    return self
                        .serve_stored(request, &stored[at], freshness, (source, status), visit, permit)
                        .await;
                }
                return self.go_alone(request, work, visit, permit).await;
            }
            Ok(News::Alone) => match leads.then(|| flight.take_alone()).flatten() {
                Some(passed) => return Ok(self.hand_over(request, passed, status, visit, permit)),
                None => return self.go_alone(request, work, visit, permit).await,
            },
            Ok(News::Failed(failure)) => failure,
            Err(_late) => {
                self.fill.counters.timeouts.inc();
                Failure::Timeout
            }
        };
        self.stand_in(request, &work, failure, visit, permit).await
    }

    /// Asks the origin for this client alone.
    async fn go_alone(
        &self,
        request: &Parts,
        work: Arc<SiteWork>,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let status = CacheStatus { forwarded: Some(work.forward.reason), ..bare() };
        let exchange = self.fill.exchange(&work, visit.snapshot, visit.until());
        let exchanged = tokio::time::timeout_at(visit.until().into(), exchange).await;
        match exchanged.unwrap_or(Err(Failure::Timeout)) {
            Err(failure) => self.stand_in(request, &work, failure, visit, permit).await,
            Ok(Exchanged::StandIn) => {
                let failure = Failure::Upstream("it answered with an error".to_owned());
                self.stand_in(request, &work, failure, visit, permit).await
            }
            Ok(Exchanged::Confirmed(found)) => {
                let freshness = freshness(&found, visit);
                self.serve_stored(request, &found, freshness, (Source::Fill, status), visit, permit).await
            }
            Ok(Exchanged::Passed(passed)) => Ok(self.hand_over(request, *passed, status, visit, permit)),
            Ok(Exchanged::Storable(storable)) => {
                self.store_alone(request, work, *storable, status, visit, permit).await
            }
        }
    }

    /// Hands an answer to the one client that asked for it while it is being stored.
    async fn store_alone(
        &self,
        request: &Parts,
        work: Arc<SiteWork>,
        storable: Storable,
        status: CacheStatus<'_>,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let flight = Flight::new(String::new());
        let pilot = Pilot::new(flight.clone(), None);
        let (fill, snapshot) = (self.fill.clone(), visit.snapshot.clone());
        let target = work.target.clone();
        self.fill.service.scoped("fill", move || target.clone(), async move {
            let bringing = fill.bring_storable(&pilot.flight, &work, storable, Fill::caps(&snapshot));
            pilot.flight.announced(bringing).await;
        });
        let News::Begun(begun) = flight.news().await else {
            return Err(Retry::Again(Failure::Lost.rejection()));
        };
        let status = CacheStatus { stored: true, ..status };
        settle(&flight, &begun, visit.budget).await;
        Ok(self.stream(request, &flight, &begun, (Source::Fill, status), visit, permit))
    }

    /// What is stored in the place of an error, if it may be (RFC 5861 section 4).
    async fn stand_in(
        &self,
        request: &Parts,
        work: &SiteWork,
        failure: Failure,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let standing = work.forward.on_error.filter(|_| failure.is_error_of_origin());
        if let Some(found) = standing.and_then(|at| work.stored.get(at))
            && let Some(head) = &found.asset.head
        {
            let freshness = head.freshness(&visit.origin.policy, UnixMillis(unix_millis()));
            let status = CacheStatus {
                hit: true,
                ttl: Some(freshness.ttl_secs()),
                detail: Some("stale-if-error"),
                ..bare()
            };
            return self
                .serve_stored(request, found, freshness, (Source::Stale, status), visit, permit)
                .await;
        }
        self.count_cache(Source::Miss);
        let status = CacheStatus { forwarded: Some(work.forward.reason), ..bare() };
        let rejection = failure.rejection().header(CACHE_STATUS, status.value());
        Err(if failure == Failure::Lost { Retry::Again(rejection) } else { Retry::Never(rejection) })
    }

    /// An answer made of a stored response.
    async fn serve_stored(
        &self,
        request: &Parts,
        found: &cas::Response,
        freshness: Freshness,
        (source, status): (Source, CacheStatus<'_>),
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let now = UnixMillis(unix_millis());
        let head = found.asset.head.as_ref();
        let made = head.and_then(|head| answer((&request.method, &request.headers), head, freshness, now));
        let Some(Answer { status: code, mut headers, content }) = made else {
            return Err(Retry::Again(Failure::Lost.rejection()));
        };
        self.count_cache(source);
        for (_, object) in &found.parts {
            object.condition.frequency.note();
        }
        let body = match content.filter(|range| !range.is_empty()) {
            None => Body::default(),
            Some(range) => {
                let body = body::of_response(&self.cas, found, range, visit.budget.until, permit).await;
                body.map_err(|error| match (self.unreadable(&found.name, &error), error) {
                    (rejection, ReadError::Corrupt | ReadError::Gone) => Retry::Again(rejection),
                    (rejection, ReadError::Io(_)) => Retry::Never(rejection),
                })?
            }
        };
        headers.append(VIA, via(Version::HTTP_11));
        status.append_to(&mut headers);
        let mut response = Response::new(body.ending_by(visit.budget.client));
        *response.status_mut() = code;
        *response.headers_mut() = headers;
        Ok(response)
    }

    /// A response while it arrives.
    fn stream(
        &self,
        request: &Parts,
        flight: &Arc<Flight>,
        begun: &Begun,
        (source, status): (Source, CacheStatus<'_>),
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Response<Body> {
        self.count_cache(source);
        let mut headers = begun.headers.clone();
        headers.append(VIA, via(Version::HTTP_11));
        status.append_to(&mut headers);
        let empty = matches!(begun.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
        let body = if request.method == Method::HEAD || empty {
            Body::default()
        } else if let Some(bytes) = flight.bytes() {
            Body::full(bytes)
        } else {
            Body::stream(FlightBody::new(flight.clone(), begun.len, None, permit))
        };
        let mut response = Response::new(body.ending_by(visit.budget.client));
        *response.status_mut() = begun.status;
        *response.headers_mut() = headers;
        response
    }

    /// An origin's answer that is not stored.
    fn hand_over(
        &self,
        request: &Parts,
        passed: Passed,
        status: CacheStatus<'_>,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Response<Body> {
        self.count_cache(Source::Miss);
        let status = CacheStatus { detail: Some(passed.why.label()), ..status };
        pass_on(request, passed.asked, passed.headers, status, visit, permit)
    }

    /// HEAD goes to the origin, and what it says there of a stored response counts (RFC 9111 section 4.3.5).
    async fn forward_head(
        &self,
        request: &Parts,
        target: &str,
        stored: &[cas::Response],
        reason: cache::Reason,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let mut ask = Ask::get(visit.origin, target.to_owned(), visit.forwarded(request));
        ask.method = Method::HEAD;
        let patience = Fill::patience(visit.snapshot, visit.until());
        let status = CacheStatus { forwarded: Some(reason), ..bare() };
        self.count_cache(Source::Miss);
        let asked = visit.origin.ask(&ask, &patience, &self.fill.counters).await;
        let mut asked = asked.map_err(|failure| failure.rejection().header(CACHE_STATUS, status.value()))?;
        let headers = take_fields(&mut asked);
        let heads = heads(stored);
        if asked.answer.status == StatusCode::OK
            && let Some(at) = cache::select(&request.headers, &heads)
        {
            let freshened = freshen_by_head(heads[at], &request.headers, &headers, asked.exchange);
            let kept = freshened.keep.then_some(freshened.head);
            // What cannot be noted now is noted when it is next confirmed.
            let noting = self.cas.freshen(stored[at].name.clone(), stored[at].asset.clone(), kept);
            let _ = tokio::time::timeout_at(visit.budget.until.into(), noting).await;
        }
        Ok(pass_on(request, asked, headers, status, visit, permit))
    }

    /// Whatever else is asked goes to the origin as it is, and makes stored responses unusable if it succeeds.
    async fn pass(
        &self,
        request: &Parts,
        target: &str,
        body: Body,
        upgrade: Option<HeaderValue>,
        visit: &Visit<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        let reads = matches!(request.method, Method::GET | Method::HEAD);
        let reason = if reads { cache::Reason::Bypass } else { cache::Reason::Method };
        let status = CacheStatus { forwarded: Some(reason), ..bare() };
        if visit.snapshot.settings.mode == Mode::Offline {
            self.count_cache(Source::Miss);
            return Err(Rejection::new(Reason::NotFound, "origins are not asked now"));
        }
        let cap = visit.snapshot.settings.ingress.body_bytes.0;
        let len = body.exact_len();
        if len.is_some_and(|len| len > cap) {
            self.count_cache(Source::Miss);
            return Err(Rejection::new(Reason::BodyCap, "the body is larger than allowed"));
        }
        let has_body = matches!(request.method, Method::POST | Method::PUT | Method::PATCH);
        let mut ask = Ask::get(visit.origin, target.to_owned(), visit.forwarded(request));
        ask.method = request.method.clone();
        ask.body = (has_body || len != Some(0)).then_some(len);
        ask.upgrade = upgrade;
        let patience = Fill::patience(visit.snapshot, visit.until());
        let since = self.cas.epoch();
        let sent = visit.origin.send(&ask, Some(body.capped(cap)), &patience, &self.fill.counters).await;
        let mut asked = sent.map_err(|failure| {
            self.count_cache(Source::Miss);
            failure.rejection().header(CACHE_STATUS, status.value())
        })?;
        let headers = take_fields(&mut asked);
        let base =
            format!("{}://{}{target}", if visit.conn.secure { "https" } else { "http" }, authority(request));
        if let Ok(base) = base.parse::<Uri>() {
            self.forget_changed(request, &base, (asked.answer.status, &headers), visit).await;
            if let Some((work, pending)) = self.stands_for_get(request, &base, &asked, &headers, since, visit)
            {
                let storable = Storable { asked, headers, pending };
                let stored = self.store_alone(request, work, storable, status, visit, permit).await;
                return stored.map_err(|(Retry::Again(rejection) | Retry::Never(rejection))| rejection);
            }
        }
        self.count_cache(Source::Miss);
        Ok(pass_on(request, asked, headers, status, visit, permit))
    }

    /// Forgets what a request has made unusable.
    async fn forget_changed(
        &self,
        request: &Parts,
        base: &Uri,
        answer: (StatusCode, &HeaderMap),
        visit: &Visit<'_>,
    ) {
        for path in invalidated(&request.method, base, answer) {
            let names = Names::Response(visit.key(&path));
            self.fill.flights.part(&names);
            let forgetting = self.cas.forget(names, Preconditions::default());
            // The answer does not wait for longer than its client; it is forgotten all the same.
            match tokio::time::timeout_at(visit.budget.until.into(), forgetting).await {
                Ok(Ok(_)) | Err(_) => {}
                Ok(Err(error)) => tracing::warn!(%error, "a changed resource could not be forgotten"),
            }
        }
    }

    /// What to store of the answer to a POST that is also the answer to a GET; nothing if another request has changed
    /// the resource meanwhile, since nobody knows which came first.
    fn stands_for_get(
        &self,
        request: &Parts,
        base: &Uri,
        asked: &Asked,
        headers: &HeaderMap,
        since: Epoch,
        visit: &Visit<'_>,
    ) -> Option<(Arc<SiteWork>, Pending)> {
        let target = base.path_and_query().map(|it| it.as_str())?;
        if request.method != Method::POST || target.len() > NAME_MAX {
            return None;
        }
        let answer = (asked.answer.status, headers);
        let pending =
            judge_post((base, &request.headers), answer, asked.exchange, &visit.origin.policy).ok()?;
        let key = visit.key(target);
        let since = self.cas.epoch_after_own(&cas::response_name(&key, ""), since)?;
        let forward =
            Forward { reason: cache::Reason::Method, validate: None, complete: None, on_error: None };
        let work = SiteWork {
            origin: visit.origin.clone(),
            key,
            target: target.to_owned(),
            client: request.headers.clone(),
            request: HeaderMap::new(),
            stored: Vec::new(),
            since,
            forward,
            interim: None,
        };
        Some((Arc::new(work), pending))
    }
}

/// Counts down `Max-Forwards`; where no hop is left, what is answered here.
fn count_hops(request: &mut Parts) -> Option<Result<Response<Body>, Rejection>> {
    let hops = max_forwards(&request.method, &request.headers)?;
    let Some(left) = hops.checked_sub(1) else { return Some(last_hop(&request.method)) };
    request.headers.insert(MAX_FORWARDS, HeaderValue::from(left));
    None
}

/// Without content there is no last byte to hold back until the response is stored: the answer as a whole waits.
async fn settle(flight: &Flight, begun: &Begun, budget: Budget) {
    if begun.len == Some(0) {
        // If it takes too long, the client asks again and finds nothing, which is no harm.
        let _ = tokio::time::timeout_at(budget.until.into(), flight.landed(u64::MAX)).await;
    }
}

fn heads(stored: &[cas::Response]) -> Vec<&StoredHead> {
    stored.iter().filter_map(|it| it.asset.head.as_ref()).collect()
}

fn freshness(found: &cas::Response, visit: &Visit<'_>) -> Freshness {
    let now = UnixMillis(unix_millis());
    let none = Freshness { age_ms: 0, lifetime_ms: 0 };
    found.asset.head.as_ref().map_or(none, |head| head.freshness(&visit.origin.policy, now))
}

/// Which of these answers a request without anybody being asked.
fn reuse(request: &Parts, stored: &[&StoredHead], visit: &Visit<'_>) -> Option<Reuse> {
    let now = UnixMillis(unix_millis());
    match cache::decide((&request.method, &request.headers), stored, &visit.origin.policy, now) {
        Verdict::Reuse(reuse) => Some(reuse),
        Verdict::Forward(_) | Verdict::NotCached => None,
    }
}

fn bare() -> CacheStatus<'static> {
    CacheStatus { cache: "ron-edge", ..CacheStatus::default() }
}

/// The host and port that a request names.
fn authority(request: &Parts) -> &str {
    let host = || request.headers.get(HOST).and_then(|value| value.to_str().ok()).unwrap_or_default();
    request.uri.authority().map_or_else(host, |authority| authority.as_str())
}

fn take_fields(asked: &mut Asked) -> HeaderMap {
    std::mem::replace(&mut asked.answer.fields, ron_kernel::http::Fields::Map(HeaderMap::new())).into_map()
}

/// Whether others may wait for the same answer: nothing in the request makes it one for this client.
fn collapses(request: &Parts, forward: &Forward) -> bool {
    let own =
        [AUTHORIZATION, RANGE, IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE, IF_RANGE];
    forward.complete.is_none()
        && forward.reason != cache::Reason::Request
        && !own.iter().any(|name| request.headers.contains_key(name))
}

/// An origin's answer on its way to the client, as it is.
fn pass_on(
    request: &Parts,
    asked: Asked,
    headers: HeaderMap,
    status: CacheStatus<'_>,
    visit: &Visit<'_>,
    permit: Permit,
) -> Response<Body> {
    let Asked { answer, permit: place, .. } = asked;
    let code = answer.status;
    let protocol = headers.get(UPGRADE).filter(|_| code == StatusCode::SWITCHING_PROTOCOLS).cloned();
    let body = match answer.payload {
        // From here on it is a connection and no request: the places are given back, `max_conns` bounds it.
        Payload::Upgraded(io) => {
            Body::tunnel(Tunnel::new(io, visit.snapshot.settings.ingress.idle_timeout.0))
        }
        _ if request.method == Method::HEAD => Body::default(),
        Payload::Whole(bytes) => Body::full(bytes),
        Payload::Stream(stream) => {
            let mut held = Some((permit, place));
            // The places are given back when the body goes.
            Body::stream(stream).map_data(move |piece| {
                let _held = &mut held;
                Ok(piece)
            })
        }
    };
    let mut headers = cleaned(headers);
    headers.extend(protocol.map(|protocol| (UPGRADE, protocol)));
    headers.append(VIA, via(answer.version));
    status.append_to(&mut headers);
    let mut response = Response::new(body.ending_by(visit.budget.client));
    *response.status_mut() = code;
    *response.headers_mut() = headers;
    response
}
