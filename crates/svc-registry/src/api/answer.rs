//! Answers in the form the client asks for.

use bytes::Bytes;
use http::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, ETAG, HeaderMap, HeaderValue, IF_NONE_MATCH, VARY};
use http::{Response, StatusCode};
use http_body::{Body as HttpBody, Frame, SizeHint};
use ron_kernel::http::{Body, BodyError};
use ron_kernel::problem::{CorrId, Rejection, X_CORR_ID};
use ron_kernel::reason::Reason;
use ron_kernel::sync::Permit;
use serde_json::Value;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

pub(super) const JSON: &str = "application/json";
pub(super) const CBOR: &str = "application/cbor";
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const BYTES: &str = "application/octet-stream";

/// Bytes that are handed on at a time of an answer that is larger.
const PIECE: usize = 64 << 10;

const FOR_EVER: &str = "public, max-age=31536000, immutable";

/// What an answer is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Json,
    Cbor,
}

impl Format {
    /// What the client likes better; JSON if it likes both as well, or neither.
    pub(super) fn wanted(headers: &HeaderMap) -> Format {
        let (mut json, mut cbor) = (Liking::default(), Liking::default());
        for value in headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok()) {
            for range in value.split(',') {
                json.consider(range, JSON);
                cbor.consider(range, CBOR);
            }
        }
        let better = (cbor.quality, cbor.closeness) > (json.quality, json.closeness);
        if better && cbor.quality > 0 { Format::Cbor } else { Format::Json }
    }
}

/// How well a client likes a type, by the range of `Accept` that names it most closely.
#[derive(Debug, Default)]
struct Liking {
    /// In thousandths.
    quality: u32,
    /// 3 for the type itself, 2 and 1 for ranges with one and two stars, 0 for none.
    closeness: u8,
}

impl Liking {
    fn consider(&mut self, range: &str, kind: &str) {
        let mut parts = range.split(';').map(str::trim);
        let named = parts.next().unwrap_or("").to_ascii_lowercase();
        let closeness = match named.as_str() {
            "*/*" => 1,
            "application/*" => 2,
            named if named == kind => 3,
            _ => return,
        };
        let q = parts.find_map(|part| part.strip_prefix("q=").or(part.strip_prefix("Q=")));
        let quality = q.map_or(Some(1.0), |q| q.parse::<f64>().ok().filter(|q| (0.0..=1.0).contains(q)));
        if closeness >= self.closeness
            && let Some(quality) = quality
        {
            *self = Liking { quality: (quality * 1000.0).round() as u32, closeness };
        }
    }
}

/// A value in the form asked for.
pub(super) fn value(status: u16, value: &Value, format: Format, corr: &CorrId) -> Response<Body> {
    let (bytes, kind) = match format {
        Format::Json => (Bytes::from(value.to_string()), JSON),
        Format::Cbor => (Bytes::from(crate::cbor::encode(value)), CBOR),
    };
    raw(status, bytes, kind, corr)
}

/// An object with a payload as its last member, as it was hashed: written anew, a number may look otherwise.
pub(super) fn with_payload(rest: &Value, payload: &[u8]) -> String {
    let mut text = rest.to_string();
    text.pop();
    text + ",\"payload\":" + &String::from_utf8_lossy(payload) + "}"
}

/// JSON text in the form asked for.
pub(super) fn json(status: u16, text: impl Into<Bytes>, format: Format, corr: &CorrId) -> Response<Body> {
    let text = text.into();
    match format {
        Format::Json => raw(status, text, JSON, corr),
        Format::Cbor => {
            let parsed = serde_json::from_slice(&text).expect("what is kept is JSON");
            value(status, &parsed, format, corr)
        }
    }
}

pub(super) fn raw(status: u16, bytes: impl Into<Bytes>, kind: &'static str, corr: &CorrId) -> Response<Body> {
    let mut response = Response::new(Body::full(bytes));
    *response.status_mut() = StatusCode::from_u16(status).expect("a status of our own");
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(X_CORR_ID, corr.value().clone());
    if kind == JSON || kind == CBOR {
        response.headers_mut().insert(VARY, HeaderValue::from_static("Accept"));
    }
    response
}

/// What never changes may be kept for ever.
pub(super) fn immutable(mut response: Response<Body>, etag: &str, asked: &HeaderMap) -> Response<Body> {
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static(FOR_EVER));
    tagged(response, etag, asked)
}

/// Says which version of the page it is, or only that the client has it. The tag is strong, so the same page in CBOR
/// has another.
pub(super) fn tagged(mut response: Response<Body>, etag: &str, asked: &HeaderMap) -> Response<Body> {
    let is_cbor = response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind == CBOR);
    let etag = if is_cbor { format!("{}-cbor\"", etag.trim_end_matches('"')) } else { etag.to_owned() };
    if let Ok(etag) = HeaderValue::from_str(&etag) {
        response.headers_mut().insert(ETAG, etag);
    }
    let known = asked.get_all(IF_NONE_MATCH).iter().filter_map(|value| value.to_str().ok());
    let same = |tag: &str| tag.trim().trim_start_matches("W/") == etag || tag.trim() == "*";
    if known.flat_map(|value| value.split(',')).any(same) {
        *response.status_mut() = StatusCode::NOT_MODIFIED;
        *response.body_mut() = Body::default();
        response.headers_mut().remove(CONTENT_TYPE);
    }
    response
}

/// A large answer keeps the place of its request until its last piece is asked for: whoever takes it slowly holds
/// its bytes as long.
pub(super) fn held(response: Response<Body>, permit: Option<Permit>) -> Response<Body> {
    let length = response.body().exact_len().filter(|length| *length > PIECE as u64);
    let Some((left, permit)) = length.zip(permit) else { return response };
    let hold = |body| Body::stream(Held { body, rest: Bytes::new(), left, _permit: permit });
    response.map(|body| body.wrapped(hold))
}

struct Held {
    body: Body,
    /// Of the body, what was not yet handed on.
    rest: Bytes,
    left: u64,
    _permit: Permit,
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        if this.rest.is_empty() {
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.rest = data,
                    Err(other) => return Poll::Ready(Some(Ok(other))),
                },
                end => return Poll::Ready(end),
            }
        }
        let piece = this.rest.split_to(this.rest.len().min(PIECE));
        this.left = this.left.saturating_sub(piece.len() as u64);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

/// A problem with members beside the usual ones.
pub(super) fn problem(rejection: Rejection, extra: Value, corr: &CorrId) -> Response<Body> {
    let mut body: Value = serde_json::from_str(&rejection.body(corr)).unwrap_or_default();
    if let (Some(body), Value::Object(extra)) = (body.as_object_mut(), extra) {
        body.extend(extra);
    }
    let mut response = rejection.into_response(corr);
    *response.body_mut() = Body::full(body.to_string());
    response
}

pub(super) fn malformed(detail: impl Into<std::borrow::Cow<'static, str>>) -> Rejection {
    Rejection::new(Reason::Malformed, detail)
}

pub(super) fn not_found(detail: impl Into<std::borrow::Cow<'static, str>>) -> Rejection {
    Rejection::new(Reason::NotFound, detail)
}

/// The members of a query, each at most once and known.
#[derive(Debug)]
pub(super) struct Query(Vec<(String, String)>);

impl Query {
    pub(super) fn parse(text: Option<&str>, known: &[&str]) -> Result<Query, Rejection> {
        let mut members: Vec<(String, String)> = Vec::new();
        for pair in text.unwrap_or("").split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = super::routes::unescape(&value.replace('+', " ")).unwrap_or_default();
            if !known.contains(&name) {
                let may = if known.is_empty() { "nothing".to_owned() } else { known.join(", ") };
                return Err(malformed(format!("the query may not have {name}; it may have: {may}")));
            }
            if members.iter().any(|(other, _)| other == name) {
                return Err(malformed(format!("{name} is given twice")));
            }
            members.push((name.to_owned(), value));
        }
        Ok(Query(members))
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub(super) fn number(&self, name: &str) -> Result<Option<u64>, Rejection> {
        let Some(text) = self.text(name) else { return Ok(None) };
        let plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| plain);
        number.map(Some).ok_or_else(|| malformed(format!("{name} must be a whole number")))
    }

    pub(super) fn flag(&self, name: &str) -> Result<bool, Rejection> {
        match self.text(name) {
            None | Some("false" | "0") => Ok(false),
            Some("true" | "1" | "") => Ok(true),
            Some(_) => Err(malformed(format!("{name} must be true or false"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::sync::Permits;

    #[tokio::test]
    async fn a_large_answer_keeps_its_place_until_its_last_piece() {
        let (permits, corr) = (Permits::new(1), CorrId::from_headers(&HeaderMap::new()));
        let small = held(raw(200, "x", TEXT, &corr), permits.try_take());
        assert_eq!(permits.used(), 0);
        drop(small);
        let bytes: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
        let mut body = held(raw(200, bytes.clone(), BYTES, &corr), permits.try_take()).into_body();
        assert_eq!(body.exact_len(), Some(200_000));
        let mut read = Vec::new();
        while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let piece = frame.unwrap().into_data().unwrap();
            assert!(piece.len() <= PIECE && permits.used() == 1);
            read.extend_from_slice(&piece);
        }
        drop(body);
        assert!(read == bytes && permits.used() == 0);
    }

    #[test]
    fn a_client_gets_what_it_likes_better() {
        let check = |accept: &[&str], expected: Format| {
            let mut headers = HeaderMap::new();
            for value in accept {
                headers.append(ACCEPT, HeaderValue::from_str(value).unwrap());
            }
            assert_eq!(Format::wanted(&headers), expected, "{accept:?}");
        };
        check(&[], Format::Json);
        check(&["*/*"], Format::Json);
        check(&["application/cbor"], Format::Cbor);
        check(&["Application/CBOR; q=0.5, */*;q=0.1"], Format::Cbor);
        check(&["application/cbor, */*"], Format::Cbor);
        check(&["application/json, application/cbor;q=0.9"], Format::Json);
        check(&["application/json;q=0.2", "application/cbor;q=0.9"], Format::Cbor);
        check(&["application/cbor;q=0"], Format::Json);
        check(&["application/cbor;q=0, */*"], Format::Json);
        check(&["application/cborx"], Format::Json);
    }
}
