//! Whether a response may be stored (RFC 9111 section 3), and what becomes of it when its content is there.

use super::directives::{RequestRules, ResponseRules, Scope};
use super::head::{Body, Exchange, Policy, StoredHead, is_heuristically_cacheable};
use super::invalidate::{path_of, purge_keys, same_origin};
use super::range::{ContentRange, Parts, number};
use super::vary::Selecting;
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_LOCATION, CONTENT_RANGE};
use http::{HeaderMap, Method, StatusCode, Uri};

/// Why a response is not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotStored {
    /// Only responses to GET are, and those to POST that stand for one.
    Method,
    /// The client said `no-store`.
    Request,
    /// It belongs to this one request or connection, or is not understood.
    Status,
    NoStore,
    Private,
    /// The request had credentials, and nothing allows a shared cache to keep the response.
    Authorization,
    /// `Vary: *`.
    Vary,
    /// A 206 whose place is not known.
    Range,
    /// Nothing says that it may be, or it could never be used.
    Freshness,
    /// It could not be purged by all of its surrogate keys.
    Keys,
}

impl NotStored {
    /// As `Cache-Status` calls it in `detail`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Method => "method",
            Self::Request => "request-no-store",
            Self::Status => "status",
            Self::NoStore => "no-store",
            Self::Private => "private",
            Self::Authorization => "authorization",
            Self::Vary => "vary",
            Self::Range => "range",
            Self::Freshness => "no-freshness",
            Self::Keys => "surrogate-keys",
        }
    }
}

/// A response that will be stored once its content is there.
#[derive(Debug, Clone, PartialEq)]
pub struct Pending {
    head: StoredHead,
    /// Where the content begins, and how long the whole is, as far as the head says.
    range: Option<ContentRange>,
    stated_len: Option<u64>,
}

/// Decides by the heads of an exchange. `policy` is that of the origin.
pub fn judge(
    (method, request): (&Method, &HeaderMap),
    (status, response): (StatusCode, &HeaderMap),
    exchange: Exchange,
    policy: &Policy,
) -> Result<Pending, NotStored> {
    if *method != Method::GET {
        return Err(NotStored::Method);
    }
    if policy.client_directives && RequestRules::of(request).no_store {
        return Err(NotStored::Request);
    }
    let selecting = Selecting::of(response, request).ok_or(NotStored::Vary)?;
    if purge_keys(response).is_none() {
        return Err(NotStored::Keys);
    }
    let partial = status == StatusCode::PARTIAL_CONTENT;
    let range = partial.then(|| ContentRange::of(response).ok_or(NotStored::Range)).transpose()?;
    // Parts are kept as parts of the whole (section 3.3).
    let kept_status = if partial { StatusCode::OK } else { status };
    let stated_len = response.get(CONTENT_LENGTH).and_then(|value| number(value.as_bytes()));
    let mut headers = response.clone();
    if partial {
        headers.remove(CONTENT_RANGE);
    }
    let head = StoredHead::new(kept_status, headers, selecting, exchange, Body::Whole { len: 0 });
    permits(status, head.rules(), request.contains_key(AUTHORIZATION))?;
    if !is_of_use(&head, policy) {
        return Err(NotStored::Freshness);
    }
    Ok(Pending { head, range, stated_len })
}

/// Decides about the answer to a POST, which is stored for those who GET its target if it says that it is what they
/// would get, and for how long (RFC 9110 section 9.3.3). `target` is absolute.
pub fn judge_post(
    (target, request): (&Uri, &HeaderMap),
    (status, response): (StatusCode, &HeaderMap),
    exchange: Exchange,
    policy: &Policy,
) -> Result<Pending, NotStored> {
    let mut places = response.get_all(CONTENT_LOCATION).iter();
    let place = places.next().filter(|_| places.next().is_none()).and_then(|place| place.to_str().ok());
    let own = place.and_then(|place| same_origin(target, place)) == Some(path_of(target));
    if !own || status != StatusCode::OK {
        return Err(NotStored::Method);
    }
    let pending = judge((&Method::GET, request), (status, response), exchange, policy)?;
    let rules = pending.head.rules();
    let explicit = rules.max_age.is_some() || rules.s_maxage.is_some() || rules.expires.is_some();
    if explicit { Ok(pending) } else { Err(NotStored::Freshness) }
}

/// The rules of section 3 for a shared cache, other than those about the request.
pub(super) fn permits(
    status: StatusCode,
    rules: &ResponseRules,
    authorized_request: bool,
) -> Result<(), NotStored> {
    // RFC 6585 forbids 428, 429, 431 and 511; 407, 412 and 416 answer fields of their one request; 304 and 1xx are
    // no responses of their own.
    let fleeting = matches!(status.as_u16(), 304 | 407 | 412 | 416 | 428 | 429 | 431 | 511);
    if status.is_informational() || fleeting || rules.must_understand && !is_understood(status) {
        return Err(NotStored::Status);
    }
    // Section 5.2.2.3: whoever understands the status reads must-understand and not the no-store for others.
    if rules.no_store && !rules.must_understand {
        return Err(NotStored::NoStore);
    }
    if rules.private == Scope::Everything {
        return Err(NotStored::Private);
    }
    if authorized_request && !rules.allows_authorized() {
        return Err(NotStored::Authorization);
    }
    let explicit =
        rules.public || rules.max_age.is_some() || rules.s_maxage.is_some() || rules.expires.is_some();
    if explicit || is_heuristically_cacheable(status) { Ok(()) } else { Err(NotStored::Freshness) }
}

/// A response that is stale at once and cannot be validated would only take up room.
fn is_of_use(head: &StoredHead, policy: &Policy) -> bool {
    let rules = head.rules();
    let reusable = rules.no_cache != Scope::Everything;
    let good = head.lifetime_ms(policy) > 0 || rules.stale_while_revalidate > 0 || rules.stale_if_error > 0;
    head.validators().exist() || reusable && good
}

/// The statuses of RFC 9110 and 7538, whose rules for caches are all here.
fn is_understood(status: StatusCode) -> bool {
    matches!(
        status.as_u16(),
        200..=206 | 300..=303 | 305 | 307 | 308 | 400..=417 | 421 | 422 | 426 | 500..=505
    )
}

impl Pending {
    pub fn head(&self) -> &StoredHead {
        &self.head
    }

    /// The message has ended as it should, after so many bytes of content. `None` where its head says otherwise
    /// of them.
    pub fn complete(mut self, len: u64) -> Option<StoredHead> {
        if self.stated_len.is_some_and(|stated| stated != len) {
            return None;
        }
        self.head.body = match self.range {
            None => Body::Whole { len },
            Some(range) if range.range.end - range.range.start != len => return None,
            Some(range) => body_of(Parts::new(range.range, range.complete)?),
        };
        Some(self.head)
    }

    /// The message broke off after so many bytes. What is here is kept if it can be completed, which takes a
    /// strong validator (section 3.4).
    pub fn incomplete(mut self, len: u64) -> Option<StoredHead> {
        let strong = self.head.validators().are_strong();
        if !strong || self.head.status() != StatusCode::OK {
            return None;
        }
        let (start, complete, most) = match &self.range {
            None => (0, self.stated_len, self.stated_len),
            Some(range) => (range.range.start, range.complete, Some(range.range.end - range.range.start)),
        };
        let fits = most.is_none_or(|most| len < most);
        let end = start.checked_add(len).filter(|_| fits)?;
        self.head.body = Body::Parts(Parts::new(start..end, complete)?);
        Some(self.head)
    }
}

/// Parts that are all there are the whole.
pub(super) fn body_of(parts: Parts) -> Body {
    match parts.whole() {
        Some(len) if parts.parts().len() == 1 => Body::Whole { len },
        _ => Body::Parts(parts),
    }
}
