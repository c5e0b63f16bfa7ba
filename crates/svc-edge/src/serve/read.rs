//! Answers to GET and HEAD.

use super::{EVERYWHERE, Edge, Snapshot, Source, unix_millis, value};
use crate::address::Address;
use crate::body::{ObjectBody, Stored, at_hand};
use crate::cache::{CACHE_STATUS, CacheStatus, StoredHead};
use crate::cas::{Described, Form, Object, ReadError, slice};
use crate::semantics::{Available, Coding, Decision, Piece, REPR_DIGEST, Variant, decide, repr_digest};
use bytes::{Bytes, BytesMut};
use http::header::{
    ACCEPT_RANGES, AGE, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG,
    EXPIRES, HeaderMap, HeaderValue, LAST_MODIFIED, VARY,
};
use http::request::Parts;
use http::{Method, Response, StatusCode, Version};
use ron_kernel::admission::deadline::Budget;
use ron_kernel::date::http_date;
use ron_kernel::http::{Body, FileBody, Written};
use ron_kernel::problem::Rejection;
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use std::fmt::Display;
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;

/// What is stored under an address never changes.
pub(super) const FOREVER: &str = "public, max-age=31536000, immutable";
/// An answer of at most this many bytes must be taken as a whole within its request's budget.
pub(super) const SHORT: u64 = 1 << 20;

/// What is common to all representations of what was asked for.
pub(super) struct Resource<'a> {
    pub(super) variants: &'a [(Variant, Object)],
    pub(super) content_type: &'a str,
    pub(super) modified: u64,
    /// It has several encodings, or may have.
    pub(super) negotiated: bool,
    pub(super) immutable: bool,
    pub(super) source: Source,
    pub(super) status: CacheStatus<'a>,
    /// What its origin said of it, and how many seconds old it is.
    pub(super) origin: Option<(&'a StoredHead, u64)>,
}

impl Edge {
    pub(super) async fn read_object(
        &self,
        request: &Parts,
        address: Address,
        snapshot: &Snapshot,
        budget: Budget,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        let known = self.cas.object(&address);
        let (object, source) = match known {
            Some(object) if !self.is_replaceable(&object) => (object, Source::Hit),
            known => match (Box::pin(self.withdraw(address, snapshot, budget)).await, known) {
                (Ok(object), _) => (object, Source::Fill),
                // Whoever asks is told that what is here is bad.
                (Err(_), Some(bad)) => (bad, Source::Hit),
                (Err(rejection), None) => return Err(rejection),
            },
        };
        let modified = object.stored;
        let variant = Variant { coding: Coding::Identity, address, len: object.len };
        let resource = Resource {
            variants: &[(variant, object)],
            content_type: "application/octet-stream",
            modified,
            negotiated: false,
            immutable: true,
            source,
            status: source.status(),
            origin: None,
        };
        self.read(request, &resource, snapshot, budget, permit).await
    }

    pub(super) async fn read(
        &self,
        request: &Parts,
        resource: &Resource<'_>,
        snapshot: &Snapshot,
        budget: Budget,
        permit: Permit,
    ) -> Result<Response<Body>, Rejection> {
        let variants: Vec<Variant> = resource.variants.iter().map(|(variant, _)| *variant).collect();
        let available = Available {
            variants: &variants,
            content_type: resource.content_type,
            modified: Some(resource.modified),
        };
        let several = snapshot.settings.http.multi_range;
        let decision = decide(&request.method, &request.headers, available, several, unix_millis() / 1000);
        let chosen = decision.variant;
        let object =
            resource.variants.iter().find(|(variant, _)| Some(*variant) == chosen).map(|(_, object)| object);
        self.count_cache(resource.source);
        let written = written(request, resource, &decision, object);
        let headers = match written {
            Some(_) => origins_fields(resource),
            None => fields(resource, &decision, object),
        };
        let (Some(variant), Some(object)) = (chosen, object) else {
            return Err(refusal(Reason::NotAcceptable, "no stored encoding is acceptable", headers));
        };
        object.condition.frequency.note();
        let mut response = Response::new(Body::default());
        *response.status_mut() = decision.status;
        match decision.status {
            StatusCode::PRECONDITION_FAILED => {
                return Err(refusal(Reason::Precondition, "a condition of the request is not met", headers));
            }
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(refusal(Reason::InvalidRange, "the range cannot be satisfied", headers));
            }
            StatusCode::NOT_MODIFIED => {}
            _ if request.method == Method::HEAD => {}
            _ => {
                let until = if decision.content_length <= SHORT { Some(budget.until) } else { budget.client };
                let body = match self.at_hand(object, &decision, permit) {
                    Ok(body) => body,
                    // Boxed: what is at hand shall not pay for the room that this takes.
                    Err(permit) => {
                        let opened = self.open(variant.address, object.clone(), decision, budget, permit);
                        Box::pin(opened).await?
                    }
                }
                .ending_by(until);
                *response.body_mut() = match written {
                    Some(written) => body.behind(written),
                    None => body,
                };
            }
        }
        *response.headers_mut() = headers;
        Ok(response)
    }

    /// The body, if nothing has to be read for it; else the permit is given back.
    fn at_hand(&self, object: &Object, decision: &Decision, permit: Permit) -> Result<Body, Permit> {
        match (&decision.pieces[..], first(decision)) {
            (_, None) => Ok(Body::default()),
            ([_], Some(range)) => at_hand(&self.cas, object, &range, permit),
            (pieces, _) => match self.cas.held(object) {
                Some(held) => Ok(Body::full(assembled(&held, pieces))),
                None => Err(permit),
            },
        }
    }

    /// The body, of which the first bytes are read and checked before the answer begins.
    async fn open(
        &self,
        address: Address,
        object: Object,
        decision: Decision,
        budget: Budget,
        permit: Permit,
    ) -> Result<Body, Rejection> {
        let Some(first) = first(&decision) else { return Ok(Body::default()) };
        let whole = decision.pieces.len() == 1;
        let seen = object.clone();
        let (cas, range) = (self.cas.clone(), first.clone());
        let opened = tokio::task::spawn_blocking(move || {
            let mut reader = cas.reader(address, &object)?;
            let bytes = reader.read(&range)?;
            Ok::<_, ReadError>((reader, bytes))
        });
        let Ok(opened) = tokio::time::timeout_at(budget.until.into(), opened).await else {
            self.read_timeouts.inc();
            return Err(Rejection::new(Reason::Timeout, "the object could not be read in time"));
        };
        let opened = opened.map_err(|lost| {
            tracing::error!(error = %lost, "a read was lost");
            Rejection::new(Reason::Internal, "the object could not be read")
        })?;
        let (reader, bytes) = opened.map_err(|error| self.unreadable(&address, &error))?;
        if bytes.len() as u64 == seen.len {
            self.cas.hold(&seen, &bytes);
        }
        if let Some(file) = reader.unchecked() {
            self.cas.hold_file(&seen, file);
        }
        if bytes.len() as u64 == decision.content_length {
            return Ok(Body::full(bytes));
        }
        if let Some(file) = reader.unchecked().filter(|_| whole) {
            return Ok(Body::file(FileBody::new(file.clone(), first, Some(permit))));
        }
        let left = decision.content_length;
        let reader = Stored(self.cas.clone(), reader);
        Ok(Body::stream(ObjectBody::new(reader, bytes, decision.pieces, left, permit)))
    }

    pub(super) fn unreadable(&self, object: &dyn Display, error: &ReadError) -> Rejection {
        match error {
            ReadError::Corrupt => {
                self.cas.note_bad();
                Rejection::new(Reason::DigestStored, "the stored bytes are not those of the object")
            }
            // It went between the look and the opening.
            ReadError::Gone => Rejection::new(Reason::NotFound, "it is not stored any more"),
            ReadError::Io(error) if error.kind() == ErrorKind::TimedOut => {
                self.read_timeouts.inc();
                Rejection::new(Reason::Timeout, "the object could not be read in time")
            }
            ReadError::Io(error) => {
                tracing::error!(%object, %error, "an object cannot be read");
                Rejection::new(Reason::Internal, "the object could not be read")
            }
        }
    }
}

/// The bytes of an object that go out first, if any do.
fn first(decision: &Decision) -> Option<Range<u64>> {
    let mut ranges = decision.pieces.iter().filter_map(|piece| match piece {
        Piece::Bytes(range) => Some(range.clone()),
        Piece::Text(_) => None,
    });
    ranges.next().filter(|range| !range.is_empty())
}

/// Several parts of an object that is all there, and what goes between them.
fn assembled(held: &Bytes, pieces: &[Piece]) -> Bytes {
    let mut out = BytesMut::new();
    for piece in pieces {
        match piece {
            Piece::Text(text) => out.extend_from_slice(text),
            Piece::Bytes(range) => out.extend_from_slice(&slice(held, range)),
        }
    }
    out.freeze()
}

/// The fields of an answer that need not be put together again: all those of a whole object that was stored, but for
/// what its origin said of it.
fn written(
    request: &Parts,
    resource: &Resource<'_>,
    decision: &Decision,
    object: Option<&Object>,
) -> Option<Arc<Written>> {
    let plain = request.version < Version::HTTP_2
        && request.method == Method::GET
        && decision.status == StatusCode::OK
        && resource.source == Source::Hit
        && resource.status == Source::Hit.status();
    let object = object.filter(|object| plain && object.sha256.is_some())?;
    let Resource { modified, content_type, negotiated, immutable, .. } = *resource;
    let form = Form { modified, coding: decision.variant?.coding, content_type, negotiated, immutable };
    Some(object.condition.written(form, || {
        let bare = Resource { origin: None, ..*resource };
        once(&fields(&bare, decision, Some(object)))
    }))
}

/// Fields as they are written once and sent many times, with those that every answer has.
pub(super) fn once(fields: &HeaderMap) -> Written {
    let mut written = Written::default();
    for (name, value) in fields.iter().chain(&HeaderMap::from_iter(EVERYWHERE)) {
        written.push(name.as_str().as_bytes(), value.as_bytes());
    }
    written
}

/// What an origin said about how long its answer is good, and how old it is.
fn origins_fields(resource: &Resource<'_>) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some((head, age)) = resource.origin {
        pass_freshness(head.headers(), &mut headers);
        headers.insert(AGE, age.into());
    }
    headers
}

/// The fields of an answer, be it good or not.
fn fields(resource: &Resource<'_>, decision: &Decision, object: Option<&Object>) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(16);
    headers.insert(CACHE_STATUS, resource.source.field(resource.status));
    if resource.negotiated {
        headers.insert(VARY, HeaderValue::from_static("Accept-Encoding"));
    }
    if let Some(range) = &decision.content_range {
        headers.insert(CONTENT_RANGE, value(range.as_str()));
    }
    let (Some(variant), Some(object)) = (decision.variant, object) else { return headers };
    let dated = || (resource.modified, value(http_date(resource.modified)));
    let Described { etag, repr_digest, modified } = object.condition.described(|| Described {
        etag: value(variant.address.etag()),
        repr_digest: object.sha256.as_ref().map(|sha256| value(repr_digest(sha256))),
        modified: dated(),
    });
    headers.insert(ETAG, etag);
    // Two names may lead to one object, each with its own date.
    let modified = if modified.0 == resource.modified { modified } else { dated() };
    headers.insert(LAST_MODIFIED, modified.1);
    if resource.immutable {
        headers.insert(CACHE_CONTROL, HeaderValue::from_static(FOREVER));
    }
    headers.extend(origins_fields(resource));
    if matches!(decision.status, StatusCode::OK | StatusCode::PARTIAL_CONTENT) {
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.insert(CONTENT_TYPE, value(decision.content_type.as_str()));
        headers.insert(CONTENT_LENGTH, decision.content_length.into());
        if variant.coding != Coding::Identity {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(variant.coding.name()));
        }
        if let Some(digest) = repr_digest {
            headers.insert(REPR_DIGEST, digest);
        }
    }
    headers
}

/// What an origin says about how long its answer is good, for caches behind us.
pub(super) fn pass_freshness(from: &HeaderMap, to: &mut HeaderMap) {
    for name in [CACHE_CONTROL, EXPIRES] {
        for value in from.get_all(&name) {
            to.append(&name, value.clone());
        }
    }
}

/// A refusal that still says what it is about. How long that is good does not hold for the refusal.
pub(super) fn refusal(reason: Reason, detail: &'static str, mut headers: HeaderMap) -> Rejection {
    headers.remove(CACHE_CONTROL);
    let mut rejection = Rejection::new(reason, detail);
    rejection.headers = headers.into_iter().filter_map(|(name, value)| Some((name?, value))).collect();
    rejection
}
