//! Headers on their way through: what must not pass, and what a proxy adds.

use bytes::BytesMut;
use http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, EXPECT, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::{Request, Uri};
use ron_kernel::admission::deadline::{DEADLINE, GRPC_TIMEOUT, REQUEST_TIMEOUT, request_timeout_value};
use ron_kernel::http::{Body, ConnInfo};
use ron_kernel::problem::{CorrId, X_CORR_ID};
use std::net::IpAddr;
use std::time::Duration;

const KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
const PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");
const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Fields that concern one connection only.
fn is_hop_by_hop(name: &HeaderName) -> bool {
    [
        CONNECTION,
        KEEP_ALIVE,
        PROXY_CONNECTION,
        PROXY_AUTHENTICATE,
        PROXY_AUTHORIZATION,
        TE,
        TRAILER,
        TRANSFER_ENCODING,
        UPGRADE,
    ]
    .contains(name)
}

/// Fields that `Connection` names as concerning this connection only.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    let values = headers.get_all(CONNECTION).iter().filter_map(|value| value.to_str().ok());
    let words = values.flat_map(|value| value.split(',')).map(str::trim);
    words.filter_map(|word| HeaderName::from_bytes(word.as_bytes()).ok()).collect()
}

/// Removes from a response what is not for the client, before our own fields are added.
pub(crate) fn clean_response(headers: &mut HeaderMap) {
    for name in named_by_connection(headers) {
        headers.remove(name);
    }
    let hop_by_hop: Vec<HeaderName> = headers.keys().filter(|name| is_hop_by_hop(name)).cloned().collect();
    for name in hop_by_hop {
        headers.remove(name);
    }
}

/// Whether a field may come behind a body: not what frames, routes or vouches for the message (RFC 9110, 6.5.1).
pub(crate) fn may_trail(name: &HeaderName) -> bool {
    let text = name.as_str();
    let kept_out = [
        "authorization",
        "cache-control",
        "content-encoding",
        "content-length",
        "content-range",
        "content-type",
        "cookie",
        "expect",
        "forwarded",
        "host",
        "if-match",
        "if-none-match",
        "max-forwards",
        "range",
        "set-cookie",
        "via",
        "x-corr-id",
    ];
    !is_hop_by_hop(name) && !kept_out.contains(&text) && !text.starts_with("x-forwarded-")
}

/// The host a request is for, in lower case and without its port.
pub(crate) fn host_of(request: &Request<Body>) -> String {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let host = request.headers().get(HOST).and_then(|value| value.to_str().ok());
    let text = authority.or(host).unwrap_or("");
    let name = match text.rfind(':') {
        Some(colon) if !text[colon..].contains(']') => &text[..colon],
        _ => text,
    };
    name.to_ascii_lowercase()
}

/// What the upstream is told beside the client's own fields.
pub(crate) struct Forward<'a> {
    pub(crate) conn: &'a ConnInfo,
    pub(crate) client: Option<IpAddr>,
    /// The peer is a trusted proxy, so what it says of earlier hops stays.
    pub(crate) trusted: bool,
    pub(crate) corr: &'a CorrId,
    pub(crate) remaining: Duration,
    pub(crate) strip_prefix: &'a str,
    /// `None`: chunked.
    pub(crate) body_len: Option<u64>,
    pub(crate) has_body: bool,
}

/// Writes the head of the upstream request.
pub(crate) fn request_head(request: &Request<Body>, forward: &Forward<'_>) -> BytesMut {
    let headers = request.headers();
    let mut out = BytesMut::with_capacity(1024);
    out.extend_from_slice(request.method().as_str().as_bytes());
    out.extend_from_slice(b" ");
    push_target(&mut out, request.uri(), forward.strip_prefix);
    out.extend_from_slice(b" HTTP/1.1\r\n");
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let host = authority.or_else(|| headers.get(HOST).map(HeaderValue::as_bytes)).unwrap_or(b"");
    push(&mut out, &HOST, host);
    let named = named_by_connection(headers);
    for (name, value) in headers {
        let ours = *name == HOST
            || *name == CONTENT_LENGTH
            || *name == EXPECT
            || *name == X_CORR_ID
            || *name == VIA
            || *name == COOKIE
            || [REQUEST_TIMEOUT, DEADLINE, GRPC_TIMEOUT].contains(name);
        let earlier = [FORWARDED, X_FORWARDED_FOR, X_FORWARDED_HOST, X_FORWARDED_PROTO].contains(name);
        // Others of that family are a proxy's to send, never a client's.
        let claimed = !forward.trusted && name.as_str().starts_with("x-forwarded-");
        if !ours && !earlier && !claimed && !is_hop_by_hop(name) && !named.contains(name) {
            push(&mut out, name, value.as_bytes());
        }
    }
    push_cookies(&mut out, headers);
    if headers.get(TE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"trailers")) {
        push(&mut out, &TE, b"trailers");
    }
    push_forwarded(&mut out, headers, host, forward);
    push_list(&mut out, headers, &VIA, b"1.1 ron");
    push(&mut out, &X_CORR_ID, forward.corr.value().as_bytes());
    push(&mut out, &REQUEST_TIMEOUT, request_timeout_value(forward.remaining).as_bytes());
    match forward.body_len {
        Some(length) if forward.has_body || length > 0 => {
            push(&mut out, &CONTENT_LENGTH, length.to_string().as_bytes())
        }
        None => push(&mut out, &TRANSFER_ENCODING, b"chunked"),
        Some(_) => {}
    }
    out.extend_from_slice(b"\r\n");
    out
}

/// HTTP/2 clients may split cookies over several fields; HTTP/1.1 has one (RFC 9113, 8.2.3).
fn push_cookies(out: &mut BytesMut, headers: &HeaderMap) {
    let crumbs: Vec<&[u8]> = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes).collect();
    if !crumbs.is_empty() {
        push(out, &COOKIE, &crumbs.join(&b"; "[..]));
    }
}

fn push_target(out: &mut BytesMut, uri: &Uri, strip_prefix: &str) {
    let path = uri.path();
    let rest = path.strip_prefix(strip_prefix.trim_end_matches('/')).unwrap_or(path);
    if !rest.starts_with('/') {
        out.extend_from_slice(b"/");
    }
    out.extend_from_slice(rest.as_bytes());
    if let Some(query) = uri.query() {
        out.extend_from_slice(b"?");
        out.extend_from_slice(query.as_bytes());
    }
}

/// `Forwarded` and its older cousins, rebuilt: only a trusted proxy's account of earlier hops is kept.
fn push_forwarded(out: &mut BytesMut, headers: &HeaderMap, host: &[u8], forward: &Forward<'_>) {
    let proto: &[u8] = if forward.conn.secure { b"https" } else { b"http" };
    let none = HeaderMap::new();
    let earlier = if forward.trusted { headers } else { &none };
    let peer = forward.conn.peer.ip().or(forward.client);
    let (address, element) = match peer {
        Some(IpAddr::V6(ip)) => (ip.to_string(), format!("for=\"[{ip}]\"")),
        Some(IpAddr::V4(ip)) => (ip.to_string(), format!("for={ip}")),
        None => ("unknown".to_owned(), "for=unknown".to_owned()),
    };
    let proto_text = if forward.conn.secure { "https" } else { "http" };
    let quoted: String = String::from_utf8_lossy(host).chars().filter(|c| !matches!(c, '"' | '\\')).collect();
    let element = format!("{element};proto={proto_text};host=\"{quoted}\"");
    push_list(out, earlier, &FORWARDED, element.as_bytes());
    push_list(out, earlier, &X_FORWARDED_FOR, address.as_bytes());
    let said = |name: &HeaderName| earlier.get(name).map(HeaderValue::as_bytes);
    push(out, &X_FORWARDED_PROTO, said(&X_FORWARDED_PROTO).unwrap_or(proto));
    push(out, &X_FORWARDED_HOST, said(&X_FORWARDED_HOST).unwrap_or(host));
}

/// A list field with our own element behind those that were there.
fn push_list(out: &mut BytesMut, headers: &HeaderMap, name: &HeaderName, element: &[u8]) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    for value in headers.get_all(name) {
        out.extend_from_slice(value.as_bytes());
        out.extend_from_slice(b", ");
    }
    out.extend_from_slice(element);
    out.extend_from_slice(b"\r\n");
}

fn push(out: &mut BytesMut, name: &HeaderName, value: &[u8]) {
    out.extend_from_slice(name.as_str().as_bytes());
    out.extend_from_slice(b": ");
    out.extend_from_slice(value);
    out.extend_from_slice(b"\r\n");
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::http::Peer;

    fn head(trusted: bool, fields: &[(&str, &str)]) -> String {
        let mut request = Request::get("/api/x?y=1");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let conn = ConnInfo { peer: Peer::Tcp("192.0.2.1:99".parse().unwrap()), secure: true };
        let corr = CorrId::new();
        let forward = Forward {
            conn: &conn,
            client: None,
            trusted,
            corr: &corr,
            remaining: Duration::from_millis(1500),
            strip_prefix: "/api",
            body_len: Some(0),
            has_body: false,
        };
        String::from_utf8(request_head(&request.body(Body::default()).unwrap(), &forward).to_vec()).unwrap()
    }

    #[test]
    fn the_upstream_gets_the_clients_fields_and_ours() {
        let text = head(false, &[("host", "a.org"), ("accept", "*/*"), ("via", "1.0 other")]);
        assert!(text.starts_with("GET /x?y=1 HTTP/1.1\r\nhost: a.org\r\naccept: */*\r\n"), "{text}");
        assert!(text.contains("via: 1.0 other, 1.1 ron\r\n"), "{text}");
        assert!(text.contains("request-timeout: 1500ms\r\n"), "{text}");
        assert!(text.contains("forwarded: for=192.0.2.1;proto=https;host=\"a.org\"\r\n"), "{text}");
        assert!(!text.contains("content-length") && !text.contains("chunked"), "{text}");
    }

    #[test]
    fn fields_of_one_hop_do_not_pass() {
        let text = head(
            false,
            &[
                ("host", "a"),
                ("connection", "x-secret, close"),
                ("x-secret", "1"),
                ("te", "gzip"),
                ("upgrade", "h2c"),
                ("keep-alive", "5"),
                ("proxy-authorization", "p"),
                ("transfer-encoding", "chunked"),
                ("expect", "100-continue"),
            ],
        );
        for gone in
            ["secret", "te:", "upgrade", "keep-alive", "proxy-", "transfer-encoding", "connection", "expect"]
        {
            assert!(!text.contains(gone), "{gone} in {text}");
        }
    }

    #[test]
    fn cookies_are_joined_and_claims_of_a_proxy_dropped() {
        let text = head(
            false,
            &[("host", "a"), ("cookie", "a=1"), ("cookie", "b=2"), ("x-forwarded-prefix", "/evil")],
        );
        assert!(text.contains("cookie: a=1; b=2\r\n") && !text.contains("evil"), "{text}");
    }

    #[test]
    fn only_a_trusted_proxy_is_believed_about_earlier_hops() {
        let fields = [("host", "a"), ("x-forwarded-for", "6.6.6.6"), ("x-forwarded-proto", "gopher")];
        let distrusted = head(false, &fields);
        assert!(
            distrusted.contains("x-forwarded-for: 192.0.2.1\r\n")
                && distrusted.contains("x-forwarded-proto: https")
        );
        let trusted = head(true, &fields);
        assert!(
            trusted.contains("x-forwarded-for: 6.6.6.6, 192.0.2.1\r\n")
                && trusted.contains("x-forwarded-proto: gopher")
        );
    }

    #[test]
    fn a_response_is_cleaned_of_its_hop() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("connection", "x-a"), ("x-a", "1"), ("keep-alive", "1"), ("etag", "\"e\"")] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        clean_response(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["etag"]);
    }
}
