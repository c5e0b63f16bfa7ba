//! Asking the origin about what is stored (RFC 9111 section 4.3), and what its answer changes.

use super::date::UnixMillis;
use super::head::{Body, Exchange, Policy, StoredHead, clean};
use super::invalidate::purge_keys;
use super::range::{Change, ContentRange, Parts, number};
use super::store::{body_of, permits};
use super::validators::{Sameness, Validators};
use super::vary::Selecting;
use http::header::{
    AGE, AUTHORIZATION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, DATE, ETAG, HeaderName, HeaderValue,
    IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_RANGE, IF_UNMODIFIED_SINCE, LAST_MODIFIED, RANGE,
};
use http::{HeaderMap, StatusCode};
use std::ops::Range;

const CONTENT_MD5: HeaderName = HeaderName::from_static("content-md5");

/// Turns a client's request into one that validates a stored response: its conditions are kept for later, when
/// the stored response is there to judge them by, and ours take their place (section 4.3.1).
pub fn make_conditional(request: &mut HeaderMap, head: &StoredHead) {
    for name in [IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE] {
        request.remove(name);
    }
    let validators = head.validators();
    let mut copy = |to: HeaderName, from: HeaderName, exists: bool| {
        if let Some(value) = head.headers().get(from).filter(|_| exists) {
            request.insert(to, value.clone());
        }
    };
    copy(IF_NONE_MATCH, ETAG, validators.etag.is_some());
    copy(IF_MODIFIED_SINCE, LAST_MODIFIED, validators.modified.is_some());
}

/// The fields of a request that validates a stored response on nobody's behalf (section 4.3.1).
pub fn revalidation(head: &StoredHead) -> HeaderMap {
    let fields = head.selecting().fields().iter();
    let mut request: HeaderMap =
        fields.filter_map(|(name, value)| Some((name.clone(), value.clone()?))).collect();
    make_conditional(&mut request, head);
    request
}

/// Turns a client's request into one for what is missing of stored parts (section 3.4).
pub fn make_completion(request: &mut HeaderMap, head: &StoredHead, missing: &Range<u64>) {
    for name in [IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE, IF_RANGE] {
        request.remove(name);
    }
    let to_the_end = missing.end == u64::MAX || head.complete_len() == Some(missing.end);
    let last = if to_the_end { String::new() } else { missing.end.saturating_sub(1).to_string() };
    let range = HeaderValue::try_from(format!("bytes={}-{last}", missing.start));
    request.insert(RANGE, range.expect("digits are a value"));
    let validator = if head.validators().etag.is_some() { ETAG } else { LAST_MODIFIED };
    if let Some(value) = head.headers().get(validator) {
        request.insert(IF_RANGE, value.clone());
    }
}

/// What the origin's answer to a conditional request means (section 4.3.3).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Validated {
    /// 304: these stored responses are good, and to be updated with [`freshen`].
    Confirmed(Vec<usize>),
    /// 304, but not of anything that is stored: ask again, without a condition.
    Unrelated,
    /// The response is the answer, and to be judged for storing like any other.
    Answer,
    /// The origin failed, and this stored response stands in.
    StandIn(usize),
}

/// Reads the answer to a request for which `sent` had [`make_conditional`] applied. `stored` is what there is
/// for the URI, `validate` and `on_error` are the verdict's, `policy` is that of the origin.
pub fn validated(
    (status, response): (StatusCode, &HeaderMap),
    sent: &HeaderMap,
    stored: &[&StoredHead],
    (validate, on_error): (Option<usize>, Option<usize>),
    policy: &Policy,
    now: UnixMillis,
) -> Validated {
    if status == StatusCode::NOT_MODIFIED {
        let Some(asked) = validate else { return Validated::Answer };
        let mut found = confirmed(response, sent, stored, asked, now);
        let accepted = policy.accept_changed_tag && changes_tag(response, stored[asked], now);
        if accepted && found.is_empty() {
            found.push(asked);
        }
        return if found.is_empty() { Validated::Unrelated } else { Validated::Confirmed(found) };
    }
    match on_error {
        // RFC 5861 section 4.
        Some(stands_in) if matches!(status.as_u16(), 500 | 502 | 503 | 504) => Validated::StandIn(stands_in),
        _ => Validated::Answer,
    }
}

/// The stored responses that a 304 is about (section 4.3.4).
fn confirmed(
    response: &HeaderMap,
    sent: &HeaderMap,
    stored: &[&StoredHead],
    asked: usize,
    now: UnixMillis,
) -> Vec<usize> {
    let new = Validators::of(response, now);
    if !new.exist() {
        // One tag or date was sent, so it is the one that still holds.
        return vec![asked];
    }
    let candidates = (0..stored.len()).filter(|at| stored[*at].selecting().matches(sent));
    let alike = |at: &usize| stored[*at].validators().sameness(&new);
    let (strong, weak): (Vec<_>, Vec<_>) =
        candidates.filter(|at| alike(at) != Sameness::Unknown).partition(|at| alike(at) == Sameness::Strong);
    // How much a date proves depends on the stored response's age too; a strong tag speaks for itself.
    if !strong.is_empty() || new.etag.is_some_and(|etag| !etag.weak) {
        return strong;
    }
    weak.into_iter().max_by_key(|at| (stored[*at].date(), stored[*at].received())).into_iter().collect()
}

/// Whether a newer head has another tag than a stored response, and not just a weak edition of the same.
fn changes_tag(response: &HeaderMap, head: &StoredHead, now: UnixMillis) -> bool {
    let tags = (Validators::of(response, now).etag, head.validators().etag);
    matches!(tags, (Some(new), Some(kept)) if new != kept && !(new.weak && new.matches_weakly(&kept)))
}

/// A stored response with the fields of a newer head (section 3.2).
#[derive(Debug, Clone, PartialEq)]
pub struct Freshened {
    pub head: StoredHead,
    /// Whether it may still be kept after this answer.
    pub keep: bool,
}

/// Updates a stored response by a 304 (section 4.3.4) or by a HEAD that matches it (section 4.3.5), or by a new
/// part of it (section 3.4). `request` is what the origin was asked with.
pub fn freshen(
    head: &StoredHead,
    request: &HeaderMap,
    response: &HeaderMap,
    exchange: Exchange,
) -> Freshened {
    let mut update = response.clone();
    clean(&mut update);
    // The stored bytes are in the coding in which they came, as many as they were, and have the hash they had.
    for name in [CONTENT_ENCODING, CONTENT_RANGE, CONTENT_MD5] {
        update.remove(name);
    }
    // And the tag with which they came: another one may be that of other bytes.
    if changes_tag(response, head, exchange.received) {
        update.remove(ETAG);
    }
    let mut headers = head.headers().clone();
    // Age and date are the new one's, also where it does not state them.
    headers.remove(DATE);
    for name in update.keys() {
        headers.remove(name);
    }
    for (name, value) in &update {
        headers.append(name, value.clone());
    }
    for age in response.get_all(AGE) {
        headers.append(AGE, age.clone());
    }
    let selecting = Selecting::of(&headers, request);
    let kept = selecting.clone().unwrap_or_else(|| head.selecting().clone());
    let head = StoredHead::new(head.status(), headers, kept, exchange, head.body().clone());
    let permitted = permits(head.status(), head.rules(), request.contains_key(AUTHORIZATION)).is_ok();
    let keep = permitted && selecting.is_some() && purge_keys(head.headers()).is_some();
    Freshened { keep, head }
}

/// What a response to HEAD says about a stored response that its request could have selected (section 4.3.5):
/// the updated one, or the same, which must now be validated.
pub fn freshen_by_head(
    head: &StoredHead,
    request: &HeaderMap,
    response: &HeaderMap,
    exchange: Exchange,
) -> Freshened {
    let same =
        |name: HeaderName| response.get(&name).is_none_or(|value| head.headers().get(&name) == Some(value));
    let length = response.get(CONTENT_LENGTH).map(|value| number(value.as_bytes()));
    let same_length = length.is_none_or(|length| length.is_some() && length == head.complete_len());
    let same_coding = response.get(CONTENT_ENCODING) == head.headers().get(CONTENT_ENCODING);
    if same(ETAG) && same(LAST_MODIFIED) && same_length && same_coding {
        return freshen(head, request, response, exchange);
    }
    let mut stale = head.clone();
    stale.invalidate();
    Freshened { head: stale, keep: true }
}

/// Joins a new part to stored ones (section 3.4): the updated response, and what changed among the parts.
/// `None` where they are not known to be of the same bytes, or cannot be joined.
///
/// `response` is the head of a 206, of whose content `len` bytes have come. If it answers a request for what was
/// missing and cannot be joined, nobody asked for it as it is, and the client's own request has to be sent.
pub fn combine(
    head: &StoredHead,
    request: &HeaderMap,
    (response, len): (&HeaderMap, u64),
    exchange: Exchange,
) -> Option<(Freshened, Change)> {
    let new = Validators::of(response, exchange.received);
    let same_coding = response.get(CONTENT_ENCODING) == head.headers().get(CONTENT_ENCODING);
    if head.validators().sameness(&new) != Sameness::Strong || !same_coding {
        return None;
    }
    let stated = ContentRange::of(response)?;
    let came = stated.range.start..stated.range.start.checked_add(len)?;
    if came.end > stated.range.end {
        return None;
    }
    let mut parts = match head.body() {
        Body::Parts(parts) => parts.clone(),
        // The whole has every part of itself already.
        Body::Whole { len } => Parts::new(0..*len, Some(*len))?,
    };
    let change = parts.add(came, stated.complete)?;
    let mut freshened = freshen(head, request, response, exchange);
    freshened.head.body = body_of(parts);
    Some((freshened, change))
}
