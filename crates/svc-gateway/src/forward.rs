//! Headers on their way through: what must not pass, and what a proxy adds.

use crate::routes::plain;
use crate::upstream::Progress;
use bytes::BytesMut;
use http::header::{
    CONNECTION, CONTENT_LENGTH, COOKIE, FORWARDED, HOST, HeaderMap, HeaderName, HeaderValue, MAX_FORWARDS,
    TE, TRANSFER_ENCODING, UPGRADE, VIA,
};
use http::request::Parts;
use http::uri::Authority;
use http::{Method, Request, StatusCode, Uri, Version};
use ron_kernel::admission::deadline::{GRPC_TIMEOUT, REQUEST_TIMEOUT};
use ron_kernel::http::client::{Outgoing, retain};
use ron_kernel::http::h1::head::Values;
use ron_kernel::http::{Body, ConnInfo, Fields, Lines, Written, max_forwards};
use ron_kernel::problem::{CorrId, X_CORR_ID, X_REASON};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// Room for the fields of a response of the usual size.
const RESPONSE_ROOM: usize = 512;

/// Fields that concern one connection only, however they are written.
fn is_hop_by_hop(name: &[u8]) -> bool {
    // By their first letters most fields are known not to be meant.
    let meant: &[&str] = match name.first().map(u8::to_ascii_lowercase) {
        Some(b'c') => &["connection"],
        Some(b'k') => &["keep-alive"],
        Some(b'p') => &["proxy-connection", "proxy-authenticate", "proxy-authorization"],
        Some(b't') => &["te", "trailer", "transfer-encoding"],
        Some(b'u') => &["upgrade"],
        _ => &[],
    };
    meant.iter().any(|meant| name.eq_ignore_ascii_case(meant.as_bytes()))
}

/// The words of `Connection`.
fn words(headers: &impl Values) -> impl Iterator<Item = &[u8]> {
    let values = headers.values(&CONNECTION);
    values.flat_map(|value| value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii))
}

/// Fields that `Connection` names as concerning this connection only.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    words(headers).filter_map(|word| HeaderName::from_bytes(word).ok()).collect()
}

/// Removes from a response what is not for the client, before our own fields are added.
pub(crate) fn clean_response(headers: &mut HeaderMap) {
    for name in named_by_connection(headers) {
        headers.remove(name);
    }
    retain(headers, |name| !is_hop_by_hop(name.as_str().as_bytes()));
}

/// The fields of a response for the client: what is not for it left out, ours added.
pub(crate) fn response_map(fields: Fields, status: StatusCode, version: Version, corr: &CorrId) -> HeaderMap {
    let mut headers = fields.into_map();
    clean_response(&mut headers);
    if status == StatusCode::NO_CONTENT {
        headers.remove(CONTENT_LENGTH);
    }
    headers.remove(X_REASON);
    headers.append(VIA, HeaderValue::from_static(via(version)));
    headers.insert(X_CORR_ID, corr.value().clone());
    headers
}

/// The same for a client of HTTP/1.1, written in one go: what is not for it left out, ours added.
pub(crate) fn write_response(lines: &Lines, status: StatusCode, version: Version, corr: &CorrId) -> Written {
    // The word that is usually there names a field that does not pass anyway.
    let named: Vec<&[u8]> = words(lines).filter(|word| !word.eq_ignore_ascii_case(b"keep-alive")).collect();
    let ours = |name: &[u8]| match name.len() {
        8 => name.eq_ignore_ascii_case(b"x-reason"),
        9 => name.eq_ignore_ascii_case(b"x-corr-id"),
        14 => status == StatusCode::NO_CONTENT && name.eq_ignore_ascii_case(b"content-length"),
        _ => false,
    };
    let mut written = Written::with_capacity(RESPONSE_ROOM);
    for (name, value) in lines.iter() {
        if !is_hop_by_hop(name) && !ours(name) && !named.iter().any(|named| named.eq_ignore_ascii_case(name))
        {
            written.push(name, value);
        }
    }
    written.push(b"via", via(version).as_bytes());
    written.push(b"x-corr-id", corr.value().as_bytes());
    written
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
    !is_hop_by_hop(text.as_bytes()) && !kept_out.contains(&text) && !text.starts_with("x-forwarded-")
}

/// The host a request is for, in lower case and without its port.
pub(crate) fn host_of(request: &Request<Body>) -> String {
    let authority = request.uri().authority().map(|authority| authority.as_str());
    let host = request.headers().get(HOST).and_then(|value| value.to_str().ok());
    host_name(authority.or(host).unwrap_or(""))
}

/// The name in a `Host` field or an authority.
pub(crate) fn host_name(text: &str) -> String {
    let name = match text.rfind(':') {
        Some(colon) if !text[colon..].contains(']') => &text[..colon],
        _ => text,
    };
    name.to_ascii_lowercase()
}

/// A request on its way to the upstream: the client's own fields, and what a proxy adds.
pub(crate) struct Forward<'a> {
    pub(crate) request: &'a Parts,
    pub(crate) conn: &'a ConnInfo,
    /// The peer is a trusted proxy, so what it says of earlier hops stays.
    pub(crate) trusted: bool,
    pub(crate) corr: &'a CorrId,
    /// By when it must answer, as far as it is told.
    pub(crate) told: Option<Instant>,
    pub(crate) strip_prefix: &'a str,
    /// `None`: not known beforehand.
    pub(crate) body_len: Option<u64>,
    /// The protocol that the client asks to change to.
    pub(crate) upgrade: Option<HeaderValue>,
    /// How the body is getting on, if there is one.
    pub(crate) upload: Option<Arc<Progress>>,
    /// How often it may still be tried again together with others; none if only the upstream limits that.
    pub(crate) retries: Option<&'a AtomicUsize>,
}

impl Outgoing for Forward<'_> {
    fn method(&self) -> &Method {
        &self.request.method
    }

    fn write_http1(&self, out: &mut BytesMut) {
        out.extend_from_slice(self.request.method.as_str().as_bytes());
        out.extend_from_slice(b" ");
        self.push_target(out);
        out.extend_from_slice(b" HTTP/1.1\r\n");
        out.put(&HOST, &[self.host()]);
        self.put_fields(out);
        if let Some(protocol) = &self.upgrade {
            out.put(&CONNECTION, &[b"upgrade"]);
            out.put(&UPGRADE, &[protocol.as_bytes()]);
        }
        if self.body_len.is_none() {
            out.put(&TRANSFER_ENCODING, &[b"chunked"]);
        }
        out.extend_from_slice(b"\r\n");
    }

    fn http2(&self, scheme: &str, authority: &str) -> Request<()> {
        let mut target = BytesMut::new();
        self.push_target(&mut target);
        // A host that HTTP/1.1 lets pass and HTTP/2 cannot say must not cost the request its path.
        let host = Authority::try_from(self.host()).ok();
        let uri = Uri::builder().scheme(scheme).path_and_query(&target[..]);
        let uri = match host {
            Some(host) => uri.authority(host),
            None => uri.authority(authority),
        };
        let mut request = Request::new(());
        *request.method_mut() = self.request.method.clone();
        *request.uri_mut() = uri.build().unwrap_or_default();
        self.put_fields(request.headers_mut());
        request
    }

    fn upgrades(&self) -> bool {
        self.upgrade.is_some()
    }

    fn chunked(&self) -> bool {
        self.body_len.is_none()
    }

    fn interim(&self, status: StatusCode, mut headers: HeaderMap) {
        // 100 was for us: the client's own expectation is met by its connection.
        if let Some(interim) = &self.conn.interim
            && status != StatusCode::CONTINUE
            && self.request.version == Version::HTTP_11
        {
            clean_response(&mut headers);
            interim.send(status, &headers);
        }
    }

    fn trailers(&self) -> fn(&HeaderName) -> bool {
        may_trail
    }
}

impl Forward<'_> {
    /// Takes leave to try again.
    pub(crate) fn take_retry(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        self.retries.is_none_or(|left| left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok())
    }

    /// The host the client asked for, which the upstream is asked for too.
    fn host(&self) -> &[u8] {
        let authority = self.request.uri.authority().map(|authority| authority.as_str().as_bytes());
        authority.or_else(|| self.request.headers.get(HOST).map(HeaderValue::as_bytes)).unwrap_or(b"")
    }

    fn push_target(&self, out: &mut BytesMut) {
        let (path, prefix) = (self.request.uri.path(), self.strip_prefix.trim_end_matches('/'));
        // The route was found whatever needless escapes the client writes; the prefix is, too.
        let plain = if path.starts_with(prefix) { None } else { plain(path) };
        let path = plain.as_deref().unwrap_or(path);
        let rest = path.strip_prefix(prefix).unwrap_or(path);
        if !rest.starts_with('/') {
            out.extend_from_slice(b"/");
        }
        out.extend_from_slice(rest.as_bytes());
        if let Some(query) = self.request.uri.query() {
            out.extend_from_slice(b"?");
            out.extend_from_slice(query.as_bytes());
        }
    }

    /// Everything but what belongs to one version of HTTP.
    fn put_fields(&self, out: &mut impl Out) {
        let headers = &self.request.headers;
        let named = named_by_connection(headers);
        for (name, value) in headers {
            if !is_ours(name, self.trusted) && !named.contains(name) {
                out.put(name, &[value.as_bytes()]);
            }
        }
        put_cookies(out, headers);
        if headers.get(TE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"trailers")) {
            out.put(&TE, &[b"trailers"]);
        }
        self.put_forwarded(out);
        put_list(out, headers, &VIA, &[via(self.request.version).as_bytes()]);
        out.put(&X_CORR_ID, &[self.corr.value().as_bytes()]);
        let mut digits = [0; 20];
        if let Some(told) = self.told {
            let remaining = told.saturating_duration_since(Instant::now());
            // At most eight digits, as gRPC has it: more than a day.
            let millis = u64::try_from(remaining.as_millis()).unwrap_or(u64::MAX).min(99_999_999);
            out.put(&REQUEST_TIMEOUT, &[decimal(millis, &mut digits), b"ms"]);
            if headers.contains_key(&GRPC_TIMEOUT) {
                out.put(&GRPC_TIMEOUT, &[decimal(millis, &mut digits), b"m"]);
            }
        }
        if let Some(hops) = max_forwards(&self.request.method, headers) {
            out.put(&MAX_FORWARDS, &[decimal(hops.saturating_sub(1), &mut digits)]);
        }
        let has_body = [Method::POST, Method::PUT, Method::PATCH].contains(&self.request.method);
        if let Some(length) = self.body_len.filter(|length| has_body || *length > 0) {
            out.put(&CONTENT_LENGTH, &[decimal(length, &mut digits)]);
        }
    }

    /// `Forwarded` and its older cousins, rebuilt: only a trusted proxy's account of earlier hops is kept.
    fn put_forwarded(&self, out: &mut impl Out) {
        let none = HeaderMap::new();
        let earlier = if self.trusted { &self.request.headers } else { &none };
        let proto: &[u8] = if self.conn.secure { b"https" } else { b"http" };
        let host = self.host();
        let address: &[u8] =
            if self.conn.address.is_empty() { b"unknown" } else { self.conn.address.as_bytes() };
        let [open, close]: [&[u8]; 2] = match self.conn.peer.ip() {
            Some(ip) if ip.is_ipv6() => [b"for=\"[", b"]\";proto="],
            _ => [b"for=", b";proto="],
        };
        put_list(out, earlier, &FORWARDED, &[open, address, close, proto, b";host=\"", host, b"\""]);
        put_list(out, earlier, &X_FORWARDED_FOR, &[address]);
        let said = |name: &HeaderName| earlier.get(name).map(HeaderValue::as_bytes);
        out.put(&X_FORWARDED_PROTO, &[said(&X_FORWARDED_PROTO).unwrap_or(proto)]);
        out.put(&X_FORWARDED_HOST, &[said(&X_FORWARDED_HOST).unwrap_or(host)]);
    }
}

/// Our element of `Via` behind a message that came in this version of HTTP.
pub(crate) fn via(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "1.0 ron",
        Version::HTTP_11 => "1.1 ron",
        _ => "2 ron",
    }
}

/// Where fields are put: the bytes of HTTP/1.1, or the map of HTTP/2.
trait Out {
    /// Adds a field whose value is the pieces one after the other.
    fn put(&mut self, name: &HeaderName, pieces: &[&[u8]]);
}

impl Out for BytesMut {
    fn put(&mut self, name: &HeaderName, pieces: &[&[u8]]) {
        self.extend_from_slice(name.as_str().as_bytes());
        self.extend_from_slice(b": ");
        for piece in pieces {
            self.extend_from_slice(piece);
        }
        self.extend_from_slice(b"\r\n");
    }
}

impl Out for HeaderMap {
    fn put(&mut self, name: &HeaderName, pieces: &[&[u8]]) {
        if let Ok(value) = HeaderValue::from_bytes(&pieces.concat()) {
            self.append(name, value);
        }
    }
}

/// A number in decimal, without an allocation.
fn decimal(mut number: u64, out: &mut [u8; 20]) -> &[u8] {
    let mut at = out.len();
    loop {
        at -= 1;
        out[at] = b'0' + u8::try_from(number % 10).expect("a digit");
        number /= 10;
        if number == 0 {
            return &out[at..];
        }
    }
}

/// HTTP/2 clients may split cookies over several fields; HTTP/1.1 has one (RFC 9113, 8.2.3).
fn put_cookies(out: &mut impl Out, headers: &HeaderMap) {
    let mut crumbs = headers.get_all(COOKIE).iter().map(HeaderValue::as_bytes);
    if let Some(first) = crumbs.next() {
        let pieces: Vec<&[u8]> =
            std::iter::once(first).chain(crumbs.flat_map(|crumb| [&b"; "[..], crumb])).collect();
        out.put(&COOKIE, &pieces);
    }
}

/// A list field with our own element behind those that were there.
fn put_list(out: &mut impl Out, headers: &HeaderMap, name: &HeaderName, element: &[&[u8]]) {
    let mut earlier = headers.get_all(name).iter().map(HeaderValue::as_bytes).peekable();
    if earlier.peek().is_none() {
        return out.put(name, element);
    }
    let pieces: Vec<&[u8]> =
        earlier.flat_map(|value| [value, &b", "[..]]).chain(element.iter().copied()).collect();
    out.put(name, &pieces);
}

/// Fields of a request that concern one hop, or that we write ourselves. Claims about earlier hops beyond those that
/// we rebuild are a proxy's to make, never a client's.
fn is_ours(name: &HeaderName, trusted: bool) -> bool {
    is_hop_by_hop(name.as_str().as_bytes())
        || match name.as_str() {
            "host" | "content-length" | "expect" | "x-corr-id" | "via" | "cookie" | "request-timeout"
            | "deadline" | "grpc-timeout" | "max-forwards" | "forwarded" | "x-forwarded-for"
            | "x-forwarded-host" | "x-forwarded-proto" => true,
            name => !trusted && is_claim(name),
        }
}

/// Whether a field claims who is behind a request. Many servers read `_` in a name as `-`.
fn is_claim(name: &str) -> bool {
    let spelled = |plain: &str| {
        let same = |(a, b): (u8, u8)| a == b || (a, b) == (b'_', b'-');
        name.len() >= plain.len() && name.bytes().zip(plain.bytes()).all(same)
    };
    name.starts_with('x') && (spelled("x-forwarded-") || name.len() == 9 && spelled("x-real-ip"))
}

/// The protocol that a request asks to change to, if it may.
pub(crate) fn upgrade_of(request: &Request<Body>) -> Option<HeaderValue> {
    let asked = request.version() == Version::HTTP_11 && request.body().exact_len() == Some(0);
    ron_kernel::http::upgrade_of(request.headers()).filter(|_| asked)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ron_kernel::http::Peer;
    use std::time::Duration;

    fn head(trusted: bool, fields: &[(&str, &str)]) -> String {
        told(Some(Duration::from_secs(2)), trusted, fields)
    }

    fn told(within: Option<Duration>, trusted: bool, fields: &[(&str, &str)]) -> String {
        let mut request = Request::get("/api/x?y=1");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let conn = ConnInfo::new(Peer::Tcp("192.0.2.1:99".parse().unwrap()), true);
        let request = request.body(Body::default()).unwrap();
        let (corr, upgrade) = (CorrId::new(), upgrade_of(&request));
        let forward = Forward {
            request: &request.into_parts().0,
            conn: &conn,
            trusted,
            corr: &corr,
            told: within.map(|within| Instant::now() + within),
            strip_prefix: "/api",
            body_len: Some(0),
            upgrade,
            upload: None,
            retries: None,
        };
        let mut out = BytesMut::new();
        forward.write_http1(&mut out);
        // Both forms say the same.
        let multiplexed = forward.http2("http", "x");
        let fields = |headers: &HeaderMap| headers.len();
        let text = String::from_utf8(out.to_vec()).unwrap();
        let own = 2 + text
            .lines()
            .filter(|line| {
                line.starts_with("host:") || line.starts_with("upgrade:") || line.starts_with("connection:")
            })
            .count();
        assert_eq!(text.lines().count() - own, fields(multiplexed.headers()), "{text} {multiplexed:?}");
        text
    }

    #[test]
    fn the_upstream_gets_the_clients_fields_and_ours() {
        let text = head(false, &[("host", "a.org"), ("accept", "*/*"), ("via", "1.0 other")]);
        assert!(text.starts_with("GET /x?y=1 HTTP/1.1\r\nhost: a.org\r\naccept: */*\r\n"), "{text}");
        assert!(text.contains("via: 1.0 other, 1.1 ron\r\n"), "{text}");
        assert!(text.contains("request-timeout: 1") && text.contains("ms\r\n"), "{text}");
        assert!(text.contains("forwarded: for=192.0.2.1;proto=https;host=\"a.org\"\r\n"), "{text}");
        assert!(!text.contains("content-length") && !text.contains("chunked"), "{text}");
    }

    #[test]
    fn an_upstream_that_is_told_no_deadline_gets_none_of_the_clients_either() {
        let text = told(None, false, &[("request-timeout", "7"), ("deadline", "99"), ("x-a", "1")]);
        assert!(!text.contains("request-timeout") && !text.contains("deadline"), "{text}");
        assert!(text.contains("x-a: 1"), "{text}");
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
            &[
                ("host", "a"),
                ("cookie", "a=1"),
                ("cookie", "b=2"),
                ("x-forwarded-prefix", "/evil"),
                ("x_forwarded_for", "evil"),
                ("x-real-ip", "evil"),
                ("x-real_ip", "evil"),
                ("x-real-ipv4", "mine"),
            ],
        );
        assert!(text.contains("cookie: a=1; b=2\r\n") && !text.contains("evil"), "{text}");
        assert!(text.contains("x-real-ipv4: mine\r\n"), "{text}");
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

    /// The fields of a response as a client of HTTP/1.1 gets them, and as any other does.
    fn response(fields: &str, status: StatusCode) -> (Vec<String>, Vec<String>) {
        let text = format!("HTTP/1.1 {} x\r\n{fields}\r\n", status.as_str());
        let mut buffer = BytesMut::from(text.as_bytes());
        let read = ron_kernel::http::h1::head::HeadReader::default();
        let limits = ron_kernel::http::h1::head::HeadLimits { headers_max: 20, bytes_max: 4096 };
        let head = { read }.response(&mut buffer, limits, &Method::GET).unwrap().unwrap();
        let corr = CorrId::new();
        let written = write_response(&head.fields, status, Version::HTTP_11, &corr);
        let map = response_map(Fields::Lines(head.fields), status, Version::HTTP_11, &corr);
        let lines = std::str::from_utf8(written.lines()).unwrap().split_terminator("\r\n");
        let mut lines: Vec<String> = lines
            .map(|line| line.split_once(": ").unwrap())
            .map(|(name, value)| format!("{}: {value}", name.to_ascii_lowercase()))
            .collect();
        let field =
            |(name, value): (&HeaderName, &HeaderValue)| format!("{name}: {}", value.to_str().unwrap());
        let mut mapped: Vec<String> = map.iter().map(field).collect();
        lines.sort();
        mapped.sort();
        (lines, mapped)
    }

    #[test]
    fn every_client_gets_the_same_fields() {
        for fields in [
            "Content-Length: 3\r\nX-A: 1\r\nx-a: 2\r\nVia: 1.0 other\r\nDate: now\r\n",
            "Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\nSet-Cookie: a\r\nset-cookie: b\r\n",
            "CONNECTION: Keep-Alive\r\nTransfer-Encoding: chunked\r\nTrailer: x\r\nETag:\r\n",
            "X-Reason: theirs\r\nX-Corr-ID: theirs\r\nUpgrade: h2c\r\nProxy-Authenticate: x\r\nServer: s\r\n",
        ] {
            for status in [StatusCode::OK, StatusCode::NO_CONTENT] {
                let (lines, mapped) = response(fields, status);
                assert_eq!(lines, mapped, "{fields}");
                assert!(!lines.concat().contains("theirs"), "{lines:?}");
            }
        }
        let (lines, _) =
            response("Connection: x-hop\r\nX-Hop: 1\r\nContent-Length: 0\r\n", StatusCode::NO_CONTENT);
        assert_eq!(lines.len(), 2, "via and x-corr-id: {lines:?}");
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
