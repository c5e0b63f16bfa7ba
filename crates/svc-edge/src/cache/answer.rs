//! What leaves the cache: answers made of stored responses, and `Cache-Status` (RFC 9211).

use super::date::UnixMillis;
use super::directives::CDN_CACHE_CONTROL;
use super::head::{Body, Freshness, StoredHead};
use super::list::{DELTA_MAX, is_token_byte};
use super::range::{Placed, Wanted};
use super::reuse::Reason;
use http::header::{
    AGE, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE,
    ETAG, EXPIRES, HeaderName, HeaderValue, LAST_MODIFIED,
};
use http::{HeaderMap, Method, StatusCode};
use std::fmt::Write as _;
use std::ops::Range;

pub const CACHE_STATUS: HeaderName = HeaderName::from_static("cache-status");

/// An answer made of a stored response. `Via` and `Cache-Status` are the caller's to add.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// Which bytes of the representation are its content; a HEAD gets none of them.
    pub content: Option<Range<u64>>,
}

/// The answer to a request that a stored response was selected for (RFC 9111 sections 4 and 4.3.2). `None` where
/// bytes are missing, which is never so after a verdict of reuse.
pub fn answer(
    (method, request): (&Method, &HeaderMap),
    head: &StoredHead,
    freshness: Freshness,
    now: UnixMillis,
) -> Option<Answer> {
    let mut headers = head.headers().clone();
    headers.insert(AGE, HeaderValue::from((freshness.age_ms / 1000).min(DELTA_MAX)));
    let validators = head.validators();
    // Conditions are about a representation, which other statuses do not have; ranges are of what a 200 has.
    let plain = head.status() != StatusCode::OK;
    if head.status().is_success() && validators.are_known_to(request, now) {
        if validators.etag.is_some() {
            headers.remove(LAST_MODIFIED);
        }
        for name in [CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE] {
            headers.remove(name);
        }
        return Some(Answer { status: StatusCode::NOT_MODIFIED, headers, content: None });
    }
    let complete = head.complete_len();
    let wanted = match Wanted::of(method, request) {
        Wanted::One(range) if !plain && validators.satisfy_if_range(request, now) => range.place(complete),
        _ => Placed::Unknown,
    };
    let (status, content) = match wanted {
        Placed::At(range) => {
            let total = complete.map_or("*".to_owned(), |len| len.to_string());
            let place = format!("bytes {}-{}/{total}", range.start, range.end.saturating_sub(1));
            headers.insert(CONTENT_RANGE, value(place));
            (StatusCode::PARTIAL_CONTENT, range)
        }
        Placed::Unsatisfiable => return Some(unsatisfiable(headers, complete?)),
        Placed::Unknown => (head.status(), 0..complete?),
    };
    let held = match head.body() {
        Body::Whole { len } => content.end <= *len,
        Body::Parts(parts) => parts.missing(content.clone()).is_none(),
    };
    // RFC 9110 section 8.6: no length where there can be no content.
    if status != StatusCode::NO_CONTENT {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(content.end.saturating_sub(content.start)));
    }
    let content = Some(content).filter(|_| *method != Method::HEAD);
    held.then_some(Answer { status, headers, content })
}

/// A 416, without what was said of the representation, and without leave to store it in its place.
fn unsatisfiable(mut headers: HeaderMap, complete: u64) -> Answer {
    let of_content = [CONTENT_ENCODING, CONTENT_LANGUAGE, CONTENT_TYPE, ETAG, LAST_MODIFIED];
    for name in of_content.iter().chain(&[AGE, CACHE_CONTROL, CDN_CACHE_CONTROL, EXPIRES]) {
        headers.remove(name);
    }
    headers.insert(CONTENT_RANGE, value(format!("bytes */{complete}")));
    headers.insert(CONTENT_LENGTH, HeaderValue::from(0));
    Answer { status: StatusCode::RANGE_NOT_SATISFIABLE, headers, content: None }
}

fn value(text: String) -> HeaderValue {
    HeaderValue::try_from(text).expect("digits and signs are a value")
}

/// What one cache has to say about one request (RFC 9211 section 2).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStatus<'a> {
    /// The name of the cache.
    pub cache: &'a str,
    /// Why the request went on; without a reason it was a hit, or the cache refused to ask.
    pub forwarded: Option<Reason>,
    pub hit: bool,
    /// What the origin said, where the answer has another status.
    pub forwarded_status: Option<StatusCode>,
    pub stored: bool,
    pub collapsed: bool,
    /// Seconds of freshness left.
    pub ttl: Option<i64>,
    pub key: Option<&'a str>,
    pub detail: Option<&'a str>,
}

impl CacheStatus<'_> {
    /// Adds the member to what caches nearer to the origin have said.
    pub fn append_to(&self, headers: &mut HeaderMap) {
        headers.append(CACHE_STATUS, self.value());
    }

    pub fn value(&self) -> HeaderValue {
        let mut out = String::new();
        push_string(&mut out, self.cache);
        if self.hit {
            out.push_str("; hit");
        }
        if let Some(reason) = self.forwarded {
            let _ = write!(out, "; fwd={}", reason.token());
        }
        if let Some(status) = self.forwarded_status {
            let _ = write!(out, "; fwd-status={}", status.as_u16());
        }
        if let Some(ttl) = self.ttl {
            // Fifteen digits are the most that an integer has.
            let _ = write!(out, "; ttl={}", ttl.clamp(-999_999_999_999_999, 999_999_999_999_999));
        }
        for (name, set) in [("stored", self.stored), ("collapsed", self.collapsed)] {
            if set {
                let _ = write!(out, "; {name}");
            }
        }
        for (name, text) in [("key", self.key), ("detail", self.detail)] {
            if let Some(text) = text {
                let _ = write!(out, "; {name}=");
                push_string(&mut out, text);
            }
        }
        value(out)
    }
}

/// A token if it can be one, else a string; what a string cannot hold is left out (RFC 9651 section 3.3.3).
fn push_string(out: &mut String, text: &str) {
    let mut bytes = text.bytes();
    let begins = bytes.next().is_some_and(|byte| byte.is_ascii_alphabetic() || byte == b'*');
    if begins && bytes.all(|byte| is_token_byte(byte) || b":/".contains(&byte)) {
        return out.push_str(text);
    }
    out.push('"');
    for byte in text.bytes().filter(|byte| matches!(byte, 0x20..=0x7e)) {
        if matches!(byte, b'"' | b'\\') {
            out.push('\\');
        }
        out.push(char::from(byte));
    }
    out.push('"');
}
