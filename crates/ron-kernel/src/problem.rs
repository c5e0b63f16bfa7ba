//! Errors as clients see them: `application/problem+json`, a reason, a correlation id, and nothing internal.

use crate::coarse;
use crate::http::{Body, BodyError, WritePatience};
use crate::reason::Reason;
use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use http::{Response, StatusCode};
use http_body::Body as HttpBody;
use serde::Serialize;
use std::borrow::Cow;
use std::fmt::Write as _;

pub const X_CORR_ID: HeaderName = HeaderName::from_static("x-corr-id");
pub const X_REASON: HeaderName = HeaderName::from_static("x-reason");

/// The id that ties a request to its log lines: the caller's if it is sane, else a new UUIDv7.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorrId(HeaderValue);

impl CorrId {
    pub fn from_headers(headers: &HeaderMap) -> CorrId {
        CorrId::of(headers.get(X_CORR_ID))
    }

    /// The one that was sent, or a new one.
    pub fn of(sent: Option<&HeaderValue>) -> CorrId {
        match sent {
            Some(value) if is_sane(value.as_bytes()) => CorrId(value.clone()),
            _ => CorrId::new(),
        }
    }

    #[expect(clippy::new_without_default, reason = "each one is different")]
    pub fn new() -> CorrId {
        CorrId(uuid_v7(coarse::unix_millis(), crate::random::u64(), crate::random::u64()))
    }

    pub fn value(&self) -> &HeaderValue {
        &self.0
    }

    pub fn as_str(&self) -> &str {
        self.0.to_str().unwrap_or("")
    }
}

fn is_sane(value: &[u8]) -> bool {
    (1..=128).contains(&value.len()) && value.iter().all(u8::is_ascii_graphic)
}

fn uuid_v7(millis: u64, high: u64, low: u64) -> HeaderValue {
    let high = (millis << 16) | 0x7000 | (high & 0xfff);
    let low = (0b10 << 62) | (low >> 2);
    let mut text = [b'-'; 36];
    let mut at = 0;
    for byte in high.to_be_bytes().into_iter().chain(low.to_be_bytes()) {
        if matches!(at, 8 | 13 | 18 | 23) {
            at += 1;
        }
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        text[at] = DIGITS[usize::from(byte >> 4)];
        text[at + 1] = DIGITS[usize::from(byte & 15)];
        at += 2;
    }
    HeaderValue::from_bytes(&text).expect("hex digits and dashes are a valid header value")
}

/// A refusal on its way to the client.
#[derive(Debug)]
pub struct Rejection {
    pub reason: Reason,
    /// What went wrong in this case, for the client: no path, address or panic of ours.
    pub detail: Cow<'static, str>,
    /// Seconds; every 429 and 503 carries one, 1 if nothing better is known.
    pub retry_after: Option<u64>,
    /// Fields beside those that every problem has.
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// A member of the body beside those that every problem has.
    pub member: Option<(&'static str, String)>,
}

impl Rejection {
    pub fn new(reason: Reason, detail: impl Into<Cow<'static, str>>) -> Rejection {
        Rejection { reason, detail: detail.into(), retry_after: None, headers: Vec::new(), member: None }
    }

    #[must_use]
    pub fn retry_after(mut self, seconds: u64) -> Rejection {
        self.retry_after = Some(seconds);
        self
    }

    #[must_use]
    pub fn header(mut self, name: HeaderName, value: HeaderValue) -> Rejection {
        self.headers.push((name, value));
        self
    }

    #[must_use]
    pub fn member(mut self, name: &'static str, value: impl Into<String>) -> Rejection {
        self.member = Some((name, value.into()));
        self
    }

    fn seconds(&self) -> Option<u64> {
        let owed = matches!(self.reason.status(), 429 | 503);
        self.retry_after.or(owed.then_some(1))
    }

    /// The problem body.
    pub fn body(&self, corr: &CorrId) -> String {
        let (code, status) = (self.reason.code(), self.reason.status_code());
        let retryable = if self.reason.retryable() { "true" } else { "false" };
        let mut out = String::with_capacity(384);
        // Piece by piece: in an overload this is most of what is written.
        for piece in [
            r#"{"type":"urn:ron:error:"#,
            code,
            r#"","title":""#,
            self.reason.title(),
            r#"","status":"#,
            status.as_str(),
            r#","detail":"#,
        ] {
            out.push_str(piece);
        }
        push_json(&mut out, &self.detail);
        for piece in [r#","code":""#, code, r#"","retryable":"#, retryable, r#","corr_id":"#] {
            out.push_str(piece);
        }
        push_json(&mut out, corr.as_str());
        if let Some(seconds) = self.seconds() {
            let _ = write!(out, r#","retry_after":{seconds}"#);
        }
        if let Some((name, value)) = &self.member {
            let _ = write!(out, r#","{name}":"#);
            push_json(&mut out, value);
        }
        out.push('}');
        out
    }

    pub fn into_response(mut self, corr: &CorrId) -> Response<Body> {
        let body = self.body(corr);
        let mut headers = HeaderMap::with_capacity(self.headers.len() + 4);
        headers.extend(self.headers.drain(..));
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        headers.insert(X_REASON, HeaderValue::from_static(self.reason.code()));
        headers.insert(X_CORR_ID, corr.value().clone());
        if let Some(seconds) = self.seconds() {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        let mut response = Response::new(Body::full(Bytes::from(body)));
        *response.status_mut() = self.reason.status_code();
        *response.headers_mut() = headers;
        response
    }
}

/// Appends a text as JSON writes it.
pub fn push_json(out: &mut String, text: &str) {
    out.push('"');
    if text.bytes().all(|byte| byte >= b' ' && byte != b'"' && byte != b'\\') {
        out.push_str(text);
        out.push('"');
        return;
    }
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

/// A JSON answer that is no problem.
pub fn json_response(status: StatusCode, body: &impl Serialize, corr: &CorrId) -> Response<Body> {
    // What is told is made of texts and numbers, which can always be written to memory.
    let text = serde_json::to_vec(body).unwrap_or_default();
    let mut response = Response::new(Body::full(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response.headers_mut().insert(X_CORR_ID, corr.value().clone());
    response
}

/// Server-sent events. Nobody stores them, and whoever reads slowly is given this long to take something.
pub fn event_stream(
    events: impl HttpBody<Data = Bytes, Error = BodyError> + Send + 'static,
    patience: WritePatience,
    corr: &CorrId,
) -> Response<Body> {
    let mut response = Response::new(Body::stream(events));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(X_CORR_ID, corr.value().clone());
    response.extensions_mut().insert(patience);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_callers_id_is_kept_if_it_is_sane_and_replaced_if_not() {
        let id_of = |value: &[u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(X_CORR_ID, HeaderValue::from_bytes(value).unwrap());
            CorrId::from_headers(&headers).as_str().to_owned()
        };
        assert_eq!(id_of(b"abc-1"), "abc-1");
        for bad in [&b""[..], b"a b", b"\xff", &[b'a'; 129]] {
            assert_eq!(id_of(bad).len(), 36, "{bad:?}");
        }
    }

    #[test]
    fn a_new_id_is_a_uuid_of_version_7() {
        let id = CorrId(uuid_v7(0x0192_3456_789a, u64::MAX, u64::MAX));
        assert_eq!(id.as_str(), "01923456-789a-7fff-bfff-ffffffffffff");
        assert_ne!(CorrId::new(), CorrId::new());
    }

    #[test]
    fn a_problem_is_valid_json_with_every_member() {
        let corr = CorrId(HeaderValue::from_static("a\"b"));
        let rejection = Rejection::new(Reason::Busy, "line\nbreak \"quoted\"").retry_after(7);
        let body: serde_json::Value = serde_json::from_str(&rejection.body(&corr)).unwrap();
        assert_eq!(body["type"], "urn:ron:error:busy");
        assert_eq!(body["detail"], "line\nbreak \"quoted\"");
        assert_eq!(
            (&body["status"], &body["retry_after"], &body["retryable"]),
            (&429.into(), &7.into(), &true.into())
        );
        assert_eq!((&body["code"], &body["corr_id"]), (&"busy".into(), &"a\"b".into()));
        let response = rejection.into_response(&corr);
        assert_eq!(response.headers()["x-reason"], "busy");
        assert_eq!(response.headers()["retry-after"], "7");
    }

    #[test]
    fn every_429_and_503_says_when_to_come_back() {
        for reason in Reason::ALL {
            let response = Rejection::new(*reason, "x").into_response(&CorrId::new());
            let owed = matches!(reason.status(), 429 | 503);
            assert_eq!(response.headers().contains_key("retry-after"), owed, "{}", reason.code());
        }
    }
}
