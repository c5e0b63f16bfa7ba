//! Assets: what is stored and good, else what the origin has.

use super::read::{Resource, pass_freshness};
use super::{Edge, Snapshot, Source, unix_millis, value};
use crate::cache::{self, CACHE_STATUS, CacheStatus, StoredHead, UnixMillis, Verdict};
use crate::cas::{Epoch, Found, Object};
use crate::config::Mode;
use crate::fill::{
    AssetWork, Begun, Digests, FIELDS, Failure, Flight, FlightBody, Job, Landed, News, Origin, Pilot, Work,
};
use crate::semantics::{Coding, REPR_DIGEST, Variant, repr_digest, type_of};
use http::header::{
    ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_TYPE, ETAG, HeaderMap, HeaderValue, IF_MATCH, IF_UNMODIFIED_SINCE,
    LAST_MODIFIED, TE, TRAILER, VARY,
};
use http::request::Parts;
use http::{Method, Response, Version};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::http::Body;
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// Times that a request begins anew because the fetch it waited for was lost, or what it brought is gone already.
const ATTEMPTS: usize = 4;

/// What is to be done about an asset.
enum Plan {
    Serve {
        source: Source,
        revalidate: bool,
    },
    /// The origin is asked; if it fails, what is stored may stand in.
    Fetch {
        stands_in: bool,
    },
}

/// An asset that is asked for.
struct Wanted<'a> {
    request: &'a Parts,
    /// The name under which it is stored: its path, and behind a character that no path has its query.
    key: String,
    /// Who is asked, for which path and query; nobody if that is not allowed now.
    origin: Option<(&'a Arc<Origin>, String)>,
    /// That of the origin it comes from, whether it is asked or not.
    policy: cache::Policy,
    snapshot: &'a Arc<Snapshot>,
    budget: Budget,
    /// When it was asked for.
    since: Epoch,
}

impl Edge {
    pub(super) async fn read_asset(
        &self,
        request: &Parts,
        name: String,
        snapshot: &Arc<Snapshot>,
        budget: Budget,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        let query = request.uri.query();
        let stands_for = snapshot.origins.of_asset(&name);
        let policy = stands_for.as_ref().map(|(origin, _)| origin.policy.clone()).unwrap_or_default();
        let wanted = Wanted {
            request,
            key: self.asset_key(name, query),
            origin: stands_for.filter(|_| is_live(snapshot)).map(|(origin, path)| match query {
                Some(query) => (origin, format!("{path}?{query}")),
                None => (origin, path),
            }),
            policy,
            snapshot,
            budget,
            since: self.cas.epoch(),
        };
        let mut permit = Some(permit);
        for attempt in 1..=ATTEMPTS {
            let permit = permit.take().map_or_else(|| self.place("/edge/assets"), Ok)?;
            match self.try_asset(&wanted, permit).await {
                // What it waited for is lost, or what was stored has just been found bad: begin anew.
                Err(Retry::Again(_)) if attempt < ATTEMPTS && !budget.is_over(Instant::now()) => {}
                Err(Retry::Again(rejection) | Retry::Never(rejection)) => return Err(rejection),
                Ok(response) => return Ok(response),
            }
        }
        Err(Failure::Lost.rejection())
    }

    /// The name under which an asset is stored. A query means something only to an origin, not to what was put here.
    pub(super) fn asset_key(&self, name: String, query: Option<&str>) -> String {
        let put_here = |name: &str| self.cas.asset(name).is_some_and(|found| found.asset.head.is_none());
        match query {
            Some(query) if !put_here(&name) => format!("{name}\0{query}"),
            _ => name,
        }
    }

    async fn try_asset(&self, wanted: &Wanted<'_>, permit: Permit) -> Result<Response<Body>, Retry> {
        let found = self.cas.asset(&wanted.key).filter(|found| !found.variants.is_empty());
        let stands_in = match plan(found.as_ref(), wanted) {
            Plan::Serve { source, revalidate } => {
                let Some(found) = &found else { return Err(Retry::Never(self.missing(wanted))) };
                if revalidate {
                    self.refresh_asset(wanted, found);
                }
                let status = source.status();
                return self.serve_asset(wanted, found, source, status, permit).await;
            }
            Plan::Fetch { stands_in } => found.as_ref().filter(|_| stands_in),
        };
        let Some((origin, target)) = &wanted.origin else { return Err(Retry::Never(self.missing(wanted))) };
        if let Some(gone) = self.fill.negative.at(&wanted.key, Instant::now()) {
            self.count_cache(Source::Hit);
            let rejection = Failure::Missing { gone }.rejection();
            return Err(Retry::Never(rejection.header(CACHE_STATUS, Source::Hit.status().value())));
        }
        let (flight, leads) = self.fill.flights.join(&wanted.key);
        if leads {
            let pilot = Pilot::new(flight.clone(), Some(self.fill.flights.clone()));
            // Somebody may have brought it in between the look and the flight.
            let now = self.cas.asset(&wanted.key);
            if now.as_ref().map(|now| Arc::as_ptr(&now.asset))
                != found.as_ref().map(|it| Arc::as_ptr(&it.asset))
            {
                return Err(Retry::Again(Failure::Lost.rejection()));
            }
            self.submit_asset(pilot, wanted, (origin, target), found.as_ref());
        }
        let source = if leads { Source::Fill } else { Source::Collapsed };
        let failure = match Box::pin(self.watch_asset(wanted, &flight, source, permit)).await {
            Ok(response) => return Ok(response),
            Err(Fate::Retry(retry)) => return Err(retry),
            Err(Fate::Failed(failure)) => failure,
        };
        if let Some(found) = stands_in.filter(|_| failure.is_error_of_origin()) {
            let status = Source::Stale.status();
            return self
                .serve_asset(
                    wanted,
                    found,
                    Source::Stale,
                    status,
                    self.place("/edge/assets").map_err(Retry::Never)?,
                )
                .await;
        }
        self.count_cache(Source::Miss);
        let status = CacheStatus { stored: false, ..Source::Fill.status() };
        let rejection = failure.rejection().header(CACHE_STATUS, status.value());
        Err(if failure == Failure::Lost { Retry::Again(rejection) } else { Retry::Never(rejection) })
    }

    fn submit_asset(
        &self,
        pilot: Pilot,
        wanted: &Wanted<'_>,
        (origin, target): (&Arc<Origin>, &str),
        found: Option<&Found>,
    ) {
        let bad = found.is_some_and(is_bad);
        let work = AssetWork {
            origin: origin.clone(),
            target: target.to_owned(),
            name: wanted.key.clone(),
            stored: found.filter(|_| !bad).map(|found| found.asset.clone()),
            since: wanted.since,
        };
        let until = Instant::now() + wanted.snapshot.settings.fill.deadline.0;
        let job = Job { pilot, work: Work::Asset(Box::new(work)), snapshot: wanted.snapshot.clone(), until };
        if let Err(Failure::Busy) = self.fill.submit(job) {
            self.busy_assets.inc();
        }
    }

    /// Has what is stored confirmed, while it is being used.
    fn refresh_asset(&self, wanted: &Wanted<'_>, found: &Found) {
        let Some((origin, target)) = &wanted.origin else { return };
        let (flight, leads) = self.fill.flights.join(&wanted.key);
        if leads {
            let pilot = Pilot::new(flight, Some(self.fill.flights.clone()));
            self.submit_asset(pilot, wanted, (origin, target), Some(found));
        }
    }

    /// Waits for a flight and makes an answer of what it brings.
    async fn watch_asset(
        &self,
        wanted: &Wanted<'_>,
        flight: &Arc<Flight>,
        source: Source,
        permit: Permit,
    ) -> Result<Response<Body>, Fate> {
        let until = wanted.budget.until.into();
        let late = |_late| {
            self.fill.counters.timeouts.inc();
            Fate::Failed(Failure::Timeout)
        };
        let begun = match tokio::time::timeout_at(until, flight.news()).await.map_err(late)? {
            News::Begun(begun) => begun,
            News::Changed | News::Confirmed(_) | News::Alone => {
                let found = self.cas.asset(&wanted.key).filter(|found| !found.variants.is_empty());
                let found = found.ok_or(Fate::Failed(Failure::Lost))?;
                let status = CacheStatus { forwarded: Some(cache::Reason::Stale), ..source.status() };
                return self.serve_asset(wanted, &found, source, status, permit).await.map_err(Fate::Retry);
            }
            News::Failed(failure) => return Err(Fate::Failed(failure)),
        };
        let headers = &wanted.request.headers;
        // These are about the whole object, whose tag is known only at its end.
        let conditional = headers.contains_key(IF_MATCH) || headers.contains_key(IF_UNMODIFIED_SINCE);
        let buffer = wanted.snapshot.settings.fill.buffer_bytes.0;
        let storing = begun.head.is_some() && source == Source::Fill;
        if !conditional && begun.len.is_some_and(|len| len > buffer) {
            return Ok(self.stream_asset(wanted, flight, &begun, (source, storing), permit));
        }
        let len_max = if conditional { u64::MAX } else { buffer };
        match tokio::time::timeout_at(until, flight.landed(len_max)).await.map_err(late)? {
            None => Ok(self.stream_asset(wanted, flight, &begun, (source, storing), permit)),
            Some(Err(failure)) => Err(Fate::Failed(failure)),
            // The store failed, so nobody knows its tag.
            Some(Ok(Landed { digests: None, .. })) if conditional => Err(Fate::Failed(Failure::NoRoom)),
            Some(Ok(Landed { digests: None, .. })) => {
                Ok(self.stream_asset(wanted, flight, &begun, (source, false), permit))
            }
            Some(Ok(Landed { digests: Some(digests), len, stored })) => {
                let landed = (digests, len);
                let found = self.cas.asset(&wanted.key).filter(|found| stored && holds(found, &digests));
                let stored = stored && source == Source::Fill;
                let status = CacheStatus { stored, ..source.status() };
                if let Some(found) = found {
                    return self
                        .serve_asset(wanted, &found, source, status, permit)
                        .await
                        .map_err(Fate::Retry);
                }
                match flight.bytes() {
                    Some(bytes) => {
                        self.serve_unstored(wanted, &begun, landed, bytes, (source, status), permit).await
                    }
                    None => Ok(self.stream_asset(wanted, flight, &begun, (source, stored), permit)),
                }
            }
        }
    }

    async fn serve_asset(
        &self,
        wanted: &Wanted<'_>,
        found: &Found,
        source: Source,
        status: CacheStatus<'_>,
        permit: Permit,
    ) -> Result<Response<Body>, Retry> {
        let age = |head: &StoredHead| head.freshness(&wanted.policy, UnixMillis(unix_millis())).age_ms / 1000;
        let resource = Resource {
            variants: &found.variants,
            content_type: &found.asset.content_type,
            modified: found.asset.modified,
            negotiated: true,
            immutable: false,
            source,
            status,
            origin: found.asset.head.as_ref().map(|head| (head, age(head))),
        };
        let from_origin = found.asset.head.is_some() && wanted.origin.is_some();
        let read = self.read(wanted.request, &resource, wanted.snapshot, wanted.budget, permit).await;
        read.map_err(|rejection| match rejection.reason {
            // The origin has it still.
            Reason::DigestStored | Reason::NotFound if from_origin => Retry::Again(rejection),
            _ => Retry::Never(rejection),
        })
    }

    /// An object that may not be stored, for those who waited for it.
    async fn serve_unstored(
        &self,
        wanted: &Wanted<'_>,
        begun: &Begun,
        (digests, len): (Digests, u64),
        bytes: bytes::Bytes,
        (source, status): (Source, CacheStatus<'_>),
        permit: Permit,
    ) -> Result<Response<Body>, Fate> {
        let now = unix_millis() / 1000;
        let object = Object {
            len,
            sha256: Some(digests.sha256),
            direct: false,
            stored: now,
            bytes: Some(bytes),
            condition: Arc::default(),
        };
        let variant = Variant { coding: Coding::Identity, address: digests.address, len };
        let resource = Resource {
            variants: &[(variant, object)],
            content_type: content_type(begun, &wanted.key),
            modified: now,
            negotiated: true,
            immutable: false,
            source,
            status,
            origin: None,
        };
        let read = self.read(wanted.request, &resource, wanted.snapshot, wanted.budget, permit).await;
        let mut response = read.map_err(|rejection| Fate::Retry(Retry::Never(rejection)))?;
        pass_freshness(&begun.headers, response.headers_mut());
        Ok(response)
    }

    /// A large object while it arrives: its tag follows it, if the client wants to know.
    fn stream_asset(
        &self,
        wanted: &Wanted<'_>,
        flight: &Arc<Flight>,
        begun: &Begun,
        (source, stored): (Source, bool),
        permit: Permit,
    ) -> Response<Body> {
        self.count_cache(source);
        let request = wanted.request;
        let te = request.headers.get_all(TE).iter().filter_map(|value| value.to_str().ok());
        let asked =
            te.flat_map(|value| value.split(',')).any(|word| word.trim().eq_ignore_ascii_case("trailers"));
        let http2 = request.version == Version::HTTP_2;
        let trails = asked || http2;
        let mut headers = HeaderMap::new();
        headers.insert(CACHE_STATUS, CacheStatus { stored, ..source.status() }.value());
        headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.insert(CONTENT_TYPE, value(content_type(begun, &wanted.key)));
        if let Some(modified) = begun.headers.get(LAST_MODIFIED) {
            headers.insert(LAST_MODIFIED, modified.clone());
        }
        pass_freshness(&begun.headers, &mut headers);
        // Over HTTP/1.1 nothing can follow a body whose length is stated.
        let len = begun.len.filter(|_| !trails || http2);
        if let Some(len) = len {
            headers.insert(CONTENT_LENGTH, len.into());
        }
        if trails {
            headers.insert(TRAILER, HeaderValue::from_static("ETag, Repr-Digest"));
        }
        let trailers = trails.then_some(trailers as fn(&Digests) -> HeaderMap);
        let body = match request.method {
            Method::HEAD => Body::default(),
            _ => Body::stream(FlightBody::new(flight.clone(), len, trailers, permit))
                .ending_by(wanted.budget.client),
        };
        let mut response = Response::new(body);
        *response.headers_mut() = headers;
        response
    }

    /// What is said where nothing is stored and nobody can be asked.
    fn missing(&self, wanted: &Wanted<'_>) -> Rejection {
        self.count_cache(Source::Miss);
        let rejection = match is_live(wanted.snapshot) {
            true => Rejection::new(Reason::NotAllowed, "it is not stored, and no origin stands for it"),
            false => Rejection::new(Reason::NotFound, "it is not stored"),
        };
        rejection.header(CACHE_STATUS, Source::Miss.status().value())
    }
}

/// Why there is no answer yet.
enum Retry {
    /// It is worth beginning anew.
    Again(Rejection),
    Never(Rejection),
}

enum Fate {
    Retry(Retry),
    Failed(Failure),
}

fn is_live(snapshot: &Snapshot) -> bool {
    snapshot.settings.mode == Mode::Live
}

fn is_bad(found: &Found) -> bool {
    found.variants.first().is_some_and(|(_, object)| object.condition.bad.load(Ordering::Relaxed))
}

fn holds(found: &Found, digests: &Digests) -> bool {
    found.variants.first().is_some_and(|(variant, _)| variant.address == digests.address)
}

fn plan(found: Option<&Found>, wanted: &Wanted<'_>) -> Plan {
    let Some(found) = found else { return Plan::Fetch { stands_in: false } };
    let hit = Plan::Serve { source: Source::Hit, revalidate: false };
    // What was put here is good until it is put again.
    let Some(head) = &found.asset.head else { return hit };
    let now = UnixMillis(unix_millis());
    if wanted.origin.is_none() {
        // Nobody can be asked.
        let fresh = head.freshness(&wanted.policy, now).is_fresh();
        return if fresh { hit } else { Plan::Serve { source: Source::Stale, revalidate: false } };
    }
    if is_bad(found) {
        return Plan::Fetch { stands_in: false };
    }
    match cache::decide((&Method::GET, &FIELDS), &[head], &wanted.policy, now) {
        Verdict::Reuse(reuse) if reuse.freshness.is_fresh() => hit,
        Verdict::Reuse(reuse) => Plan::Serve { source: Source::Stale, revalidate: reuse.revalidate },
        Verdict::Forward(forward) => Plan::Fetch { stands_in: forward.on_error.is_some() },
        Verdict::NotCached => Plan::Fetch { stands_in: false },
    }
}

fn content_type<'a>(begun: &'a Begun, key: &str) -> &'a str {
    let sent = begun.headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    sent.unwrap_or_else(|| type_of(key.split('\0').next().unwrap_or_default()))
}

fn trailers(digests: &Digests) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert(ETAG, value(digests.address.etag()));
    trailers.insert(REPR_DIGEST, value(repr_digest(&digests.sha256)));
    trailers
}
