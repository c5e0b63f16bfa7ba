//! Which stored response answers a request, and whether the origin must be asked first (RFC 9111 section 4).

use super::date::UnixMillis;
use super::directives::{RequestRules, Scope};
use super::head::{Body, Freshness, Policy, StoredHead};
use super::range::{ByteRange, Placed, Wanted};
use http::header::{IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE};
use http::{HeaderMap, Method};
use std::ops::Range;

/// What to do about a request. Numbers are places in the list of stored responses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// A stored response answers it.
    Reuse(Reuse),
    /// The origin is asked.
    Forward(Forward),
    /// The client wants nothing that is not stored, and nothing is: 504 (section 5.2.1.7).
    NotCached,
}

/// A stored response that answers a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reuse {
    pub stored: usize,
    pub freshness: Freshness,
    /// It is stale, and to be validated behind the answer's back (RFC 5861 section 3).
    pub revalidate: bool,
}

/// How the origin is asked, and what for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    pub reason: Reason,
    /// The stored response whose validators the request should carry.
    pub validate: Option<usize>,
    /// The stored parts to complete, and the range that is missing, to be asked for with `If-Range`. It ends at
    /// `u64::MAX` where nobody knows how much there is.
    pub complete: Option<(usize, Range<u64>)>,
    /// The stored response that may stand in if the origin fails (RFC 5861 section 4).
    pub on_error: Option<usize>,
}

/// Why a request goes on, in the words of RFC 9211 section 2.2.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The cache is not asked for such requests.
    Bypass,
    /// Its method is none that a cache answers.
    Method,
    /// There is nothing for its URI.
    UriMiss,
    /// There is, but for requests with other fields.
    VaryMiss,
    /// What there is, is stale.
    Stale,
    /// It asks for it.
    Request,
    /// Parts are missing.
    Partial,
}

impl Reason {
    pub fn token(self) -> &'static str {
        match self {
            Self::Bypass => "bypass",
            Self::Method => "method",
            Self::UriMiss => "uri-miss",
            Self::VaryMiss => "vary-miss",
            Self::Stale => "stale",
            Self::Request => "request",
            Self::Partial => "partial",
        }
    }
}

/// Whether a cache answers such requests at all.
pub fn is_cacheable(method: &Method) -> bool {
    *method == Method::GET || *method == Method::HEAD
}

/// Decides about a request, given everything that is stored for its URI.
pub fn decide(
    (method, request): (&Method, &HeaderMap),
    stored: &[&StoredHead],
    policy: &Policy,
    now: UnixMillis,
) -> Verdict {
    if !is_cacheable(method) {
        return forward(Reason::Method);
    }
    let wishes = if policy.client_directives { RequestRules::of(request) } else { RequestRules::default() };
    let verdict = match select(request, stored) {
        None => forward(if stored.is_empty() { Reason::UriMiss } else { Reason::VaryMiss }),
        // Conditions on which only the origin can decide (section 4.3.2).
        Some(_) if request.contains_key(IF_MATCH) || request.contains_key(IF_UNMODIFIED_SINCE) => {
            forward(Reason::Request)
        }
        Some(chosen) => weigh((method, request), (chosen, stored[chosen]), &wishes, policy, now),
    };
    match verdict {
        Verdict::Forward(_) if wishes.only_if_cached => Verdict::NotCached,
        verdict => verdict,
    }
}

fn forward(reason: Reason) -> Verdict {
    Verdict::Forward(Forward { reason, validate: None, complete: None, on_error: None })
}

/// The stored response that a request selects: of those that match, one that says what it varies by rather than
/// one that does not, and of several the newest (section 4.1).
pub fn select(request: &HeaderMap, stored: &[&StoredHead]) -> Option<usize> {
    let matching = (0..stored.len()).filter(|at| stored[*at].selecting().matches(request));
    matching.max_by_key(|at| {
        let head = stored[*at];
        (!head.selecting().is_empty(), head.date(), head.received())
    })
}

fn weigh(
    (method, request): (&Method, &HeaderMap),
    (chosen, head): (usize, &StoredHead),
    wishes: &RequestRules,
    policy: &Policy,
    now: UnixMillis,
) -> Verdict {
    let freshness = head.freshness(policy, now);
    let has_validators = head.validators().exist();
    match coverage((method, request), head, now) {
        Coverage::Enough => {}
        // What is asked of the origin with `If-Range` is validated at the same time.
        Coverage::Missing(range) => {
            // A client with a condition of its own may not want the content at all.
            let conditional =
                [IF_NONE_MATCH, IF_MODIFIED_SINCE].iter().any(|name| request.contains_key(name));
            let worthwhile = *method == Method::GET && !conditional && head.validators().are_strong();
            let complete = range.filter(|_| worthwhile).map(|range| (chosen, range));
            let reason = Reason::Partial;
            return Verdict::Forward(Forward { reason, validate: None, complete, on_error: None });
        }
    }
    let use_now = |revalidate| Verdict::Reuse(Reuse { stored: chosen, freshness, revalidate });
    let must_ask = head.is_invalid() || head.rules().no_cache == Scope::Everything;
    let (asked, accepted) = wanted_freshness(head, wishes, freshness);
    if freshness.is_fresh() && !must_ask && !asked {
        return use_now(false);
    }
    let may_be_stale =
        !must_ask && !asked && !head.rules().forbids_stale() && !head.is_of_unknown_age(policy);
    let within = |secs: u64| freshness.staleness_ms() < secs.saturating_mul(1000);
    if may_be_stale && accepted {
        return use_now(false);
    }
    if may_be_stale && within(head.rules().stale_while_revalidate) {
        return use_now(true);
    }
    // A client that wants it confirmed is better served with what there is than with an error.
    let error_secs = head.rules().stale_if_error.max(wishes.stale_if_error);
    let stands_in = !must_ask && !head.rules().forbids_stale() && within(error_secs);
    Verdict::Forward(Forward {
        reason: if asked { Reason::Request } else { Reason::Stale },
        validate: has_validators.then_some(chosen),
        complete: None,
        on_error: stands_in.then_some(chosen),
    })
}

/// Whether the client asks for more than is here, and whether it would take what is stale (section 5.2.1).
fn wanted_freshness(head: &StoredHead, wishes: &RequestRules, freshness: Freshness) -> (bool, bool) {
    let ms = |secs: u64| secs.saturating_mul(1000);
    // RFC 8246 section 2: what never changes while it is fresh is validated only on a plain demand.
    let unchanging = head.rules().immutable && freshness.is_fresh();
    let too_old = wishes.max_age.is_some_and(|max| freshness.age_ms > ms(max)) && !unchanging;
    let left = freshness.lifetime_ms.saturating_sub(freshness.age_ms);
    let accepted = wishes.max_stale.is_some_and(|max| freshness.staleness_ms() <= ms(max));
    let too_short = left < ms(wishes.min_fresh);
    // A `max-age` also says that nothing stale will do, unless `max-stale` does (section 5.2.1.1).
    let strict = wishes.max_age.is_some() && !freshness.is_fresh() && !accepted;
    (wishes.no_cache || too_old || too_short || strict, accepted)
}

enum Coverage {
    Enough,
    /// Bytes are missing, all of them within this range, if that can be said.
    Missing(Option<Range<u64>>),
}

/// Whether what is stored has the bytes that are asked for (section 3.3).
fn coverage((method, request): (&Method, &HeaderMap), head: &StoredHead, now: UnixMillis) -> Coverage {
    let Body::Parts(parts) = head.body() else { return Coverage::Enough };
    let whole = || match (parts.whole(), parts.complete()) {
        (Some(_), _) => Coverage::Enough,
        (None, Some(len)) => Coverage::Missing(parts.missing(0..len)),
        (None, None) => Coverage::Missing(parts.missing(0..u64::MAX)),
    };
    match Wanted::of(method, request) {
        Wanted::Whole => whole(),
        _ if !head.validators().satisfy_if_range(request, now) => whole(),
        Wanted::Several if parts.whole().is_some() => Coverage::Enough,
        Wanted::Several => Coverage::Missing(None),
        Wanted::One(range) => match range.place(parts.complete()) {
            Placed::At(range) => {
                parts.missing(range).map_or(Coverage::Enough, |it| Coverage::Missing(Some(it)))
            }
            Placed::Unsatisfiable => Coverage::Enough,
            Placed::Unknown => Coverage::Missing(match range {
                ByteRange::From(first, _) => parts.missing(first..u64::MAX),
                ByteRange::Suffix(_) => None,
            }),
        },
    }
}
