//! What is fuzzed: everything that reads bytes or text from a client, an upstream or a file.
//!
//! A target is a function that must not panic; several also check that two ways of reading agree.

mod cache;
mod edge;
mod log;
mod oap;
mod pack;
mod registry;

use bytes::BytesMut;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode};
use ron_kernel::admission::client_ip::TrustedProxies;
use ron_kernel::admission::deadline::{Budget, DEADLINE, GRPC_TIMEOUT, REQUEST_TIMEOUT};
use ron_kernel::admission::decode::{Coding, DecodeGuard, DecodeLimits};
use ron_kernel::config::Setting as _;
use ron_kernel::http::Body;
use ron_kernel::http::h1::chunked::{ChunkDecoder, Piece};
use ron_kernel::http::h1::head::{Framing, HeadLimits, HeadReader};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use svc_gateway::config::{GatewaySettings, RouteSettings};
use svc_gateway::fair_queue::{Entry, FairQueue, Pushed, Shape, Tenant};
use svc_gateway::routes::{Found, Routes, plain};

pub type Target = fn(&[u8]);

pub const TARGETS: &[(&str, Target)] = &[
    ("request_head", request_head),
    ("response_head", response_head),
    ("chunked", chunked),
    ("proxy_header", proxy_header),
    ("gzip", |data| decode(Coding::Gzip, data)),
    ("deflate", |data| decode(Coding::Deflate, data)),
    ("brotli", |data| decode(Coding::Brotli, data)),
    ("zstd", |data| decode(Coding::Zstd, data)),
    ("deadline", deadline),
    ("client_ip", client_ip),
    ("routes", routes),
    ("config", config),
    ("token", token),
    ("jwt", jwt),
    ("jwks", |data| assert!(!svc_gateway::fuzzing::jwt(data, "e30.e30."))),
    ("upstream_head", upstream_head),
    ("clean_response", clean_response),
    ("rate_limit", rate_limit),
    ("fair_queue", fair_queue),
    ("edge_range", edge::range),
    ("edge_decision", edge::decision),
    ("edge_path", edge::path),
    ("edge_digest", edge::digest),
    ("edge_origin", edge::origin),
    ("http_date", http_date),
    ("cache_date", cache::date),
    ("cache_directives", cache::directives),
    ("cache_dictionary", cache::dictionary),
    ("cache_vary", cache::vary),
    ("cache_validators", cache::validators),
    ("cache_range", cache::range),
    ("cache_location", cache::location),
    ("cache_exchange", cache::exchange),
    ("cache_stored_head", cache::stored_head),
    ("log_json", log::json),
    ("log_payload", log::payload),
    ("log_approval", log::approval),
    ("log_record", log::record),
    ("log_state", log::state),
    ("log_note", log::note),
    ("log_tile", log::tile),
    ("log_bundle", log::bundle),
    ("log_proof", log::proof),
    ("log_export", log::export),
    ("log_verifier", log::verifier),
    ("oap_frames", oap::frames),
    ("oap_inflate", oap::inflate),
    ("oap_session", oap::session),
    ("oap_gossip", oap::gossip),
    ("oap_engine", oap::engine),
    ("oap_lanes", oap::lanes),
    ("pack_header", pack::header),
    ("pack_varint", pack::number),
    ("pack_directory", pack::directory),
    ("pack_metadata", pack::metadata),
    ("pack_rows", pack::mbtiles_rows),
    ("pack_archive", pack::archive),
    ("registry_cbor", registry::cbor),
];

const LIMITS: HeadLimits = HeadLimits { headers_max: 20, bytes_max: 2048 };

/// A head reads alike whole or byte by byte, and never passes its limits.
fn request_head(data: &[u8]) {
    let mut whole = BytesMut::from(data);
    let at_once = HeadReader::default().request(&mut whole, LIMITS);
    let (mut reader, mut buffer, mut dribbled) = (HeadReader::default(), BytesMut::new(), Ok(None));
    for byte in data {
        buffer.extend_from_slice(&[*byte]);
        dribbled = reader.request(&mut buffer, LIMITS);
        if !matches!(dribbled, Ok(None)) {
            break;
        }
    }
    if let (Ok(Some(a)), Ok(Some(b))) = (&at_once, &dribbled) {
        assert_eq!((&a.method, &a.uri, a.framing, &a.headers), (&b.method, &b.uri, b.framing, &b.headers));
        assert!(a.headers.len() <= LIMITS.headers_max);
        assert!(a.framing != Framing::UntilClose, "a request's body has a known end");
    } else {
        assert_eq!(matches!(at_once, Ok(Some(_))), matches!(dribbled, Ok(Some(_))));
    }
}

/// A date that can be read is written as one that reads the same.
fn http_date(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    if let Some(at) = ron_kernel::date::parse_http_date(&text, 2_000_000_000) {
        assert_eq!(ron_kernel::date::parse_http_date(&ron_kernel::date::http_date(at), 0), Some(at));
    }
}

fn response_head(data: &[u8]) {
    for method in [Method::GET, Method::HEAD] {
        let _ = HeadReader::default().response(&mut BytesMut::from(data), LIMITS, &method);
    }
}

/// A chunked body reads alike whole or byte by byte.
fn chunked(data: &[u8]) {
    let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let (mut decoder, mut buffer, mut out) = (ChunkDecoder::default(), BytesMut::new(), Vec::new());
        for piece in pieces {
            buffer.extend_from_slice(piece);
            loop {
                match decoder.decode(&mut buffer) {
                    Ok(Piece::Data(data)) => out.extend_from_slice(&data),
                    Ok(Piece::More) => break,
                    Ok(Piece::End(trailers)) => return Ok(Some((out, trailers))),
                    Err(bad) => return Err(bad),
                }
            }
        }
        Ok(None)
    };
    let whole = read(&mut std::iter::once(data));
    let dribbled = read(&mut data.chunks(1));
    match (&whole, &dribbled) {
        (Ok(Some(a)), Ok(Some(b))) => assert_eq!(a, b),
        _ => assert_eq!(matches!(whole, Ok(Some(_))), matches!(dribbled, Ok(Some(_)))),
    }
}

fn proxy_header(data: &[u8]) {
    if let Ok(Some((length, _))) = ron_kernel::http::parse_proxy_header(data) {
        assert!(length <= data.len());
    }
}

/// No body decodes past its limits, whole or in pieces.
fn decode(coding: Coding, data: &[u8]) {
    let limits = DecodeLimits { ratio_max: 10, bytes_max: 64 << 10 };
    for chunk in [data.len().max(1), 3] {
        let mut guard = DecodeGuard::new(&[coding], limits);
        let mut out = 0u64;
        for piece in data.chunks(chunk) {
            if guard.push(piece, &mut |bytes| out += bytes.len() as u64).is_err() {
                break;
            }
        }
        assert!(out <= limits.bytes_max);
        let _ = guard.finish();
    }
}

/// The input as up to three header values.
fn headers(data: &[u8], names: [HeaderName; 3]) -> HeaderMap {
    let values = data.splitn(3, |byte| *byte == b'\n');
    names
        .into_iter()
        .zip(values)
        .filter_map(|(name, value)| Some((name, HeaderValue::from_bytes(value).ok()?)))
        .collect()
}

fn deadline(data: &[u8]) {
    let (now, route) = (Instant::now(), Duration::from_secs(30));
    if let Ok(budget) =
        Budget::of(&headers(data, [REQUEST_TIMEOUT, GRPC_TIMEOUT, DEADLINE]), route, now, || {
            1_700_000_000_000
        })
    {
        assert!(budget.remaining(now) <= route);
    }
}

fn client_ip(data: &[u8]) {
    let names = [
        http::header::FORWARDED,
        HeaderName::from_static("x-forwarded-for"),
        HeaderName::from_static("x-other"),
    ];
    let headers = headers(data, names);
    let peer = "10.0.0.1".parse().expect("an address");
    assert_eq!(TrustedProxies::default().client(peer, &headers), peer, "nobody is trusted");
    TrustedProxies(vec!["10.0.0.0/8".parse().expect("a block")]).client(peer, &headers);
}

/// A catch-all route takes everything; whatever else is found is a route that exists.
fn routes(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let mut lines = text.lines();
    let (path, host) = (lines.next().unwrap_or(""), lines.next().unwrap_or(""));
    let mut settings: Vec<RouteSettings> = lines
        .take(8)
        .map(|line| RouteSettings { path: line.to_owned(), ..RouteSettings::default() })
        .collect();
    settings.push(RouteSettings { path: "/*".to_owned(), ..RouteSettings::default() });
    let Some(path) = plain(path) else { return };
    let path = &*path;
    assert_eq!(plain(path).as_deref(), Some(path), "undone once, undone for good");
    let found = Routes::new(&settings).find(host, path, &Method::GET);
    match found {
        Found::Route(index) => assert!(index < settings.len()),
        Found::Method(_) => panic!("no route names a method"),
        Found::Host => panic!("the catch-all is for every host"),
        Found::Nothing => assert!(!path.starts_with('/'), "{path:?} escaped the catch-all"),
    }
}

/// A file either reads, and can be shown, or every problem has a line.
fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Some(settings) = read(text) {
        let mut shown = Vec::new();
        settings.flatten("", &mut shown);
        assert!(!shown.is_empty());
    }
}

fn read(text: &str) -> Option<GatewaySettings> {
    use ron_kernel::config::{Problems, Sources, Validate, load};
    ron_kernel::settings! {
        /// The file.
        pub struct File {
            /// The gateway.
            gateway: GatewaySettings = GatewaySettings::default() => Hot;
        }
    }
    impl Validate for File {
        fn validate_files(&self, _: Option<&std::path::Path>, _: &mut Problems) {}

        fn validate(&self, problems: &mut Problems) {
            self.gateway.validate(problems);
        }
    }
    let sources = Sources { file: Some(("fuzz.toml".into(), text.to_owned())), ..Sources::default() };
    match load::<File>(&sources) {
        Ok(loaded) => Some(loaded.value.gateway),
        Err(problems) => {
            assert!(!problems.lines().is_empty());
            None
        }
    }
}

fn token(data: &[u8]) {
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = ron_kernel::token::inspect(text);
    }
}

/// Nobody signs for the fuzzer, so nothing passes.
fn jwt(data: &[u8]) {
    let set =
        br#"{"keys":[{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}"#;
    if let Ok(text) = std::str::from_utf8(data) {
        assert!(!svc_gateway::fuzzing::jwt(set, text));
    }
}

/// Fields of one connection, and what `Connection` names besides, but for what a gateway writes itself.
fn is_of_the_hop(name: &str, value: &[u8]) -> bool {
    let hop = ["connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization"];
    let rest = ["trailer", "upgrade"];
    hop.contains(&name) || rest.contains(&name) || (name == "te" && value != b"trailers")
}

/// Whatever head was read from a client, what the upstream gets is one head with one meaning.
fn upstream_head(data: &[u8]) {
    let Some((choice, data)) = data.split_first() else { return };
    let Ok(Some(read)) = HeadReader::default().request(&mut BytesMut::from(data), LIMITS) else { return };
    if read.method == Method::CONNECT || !read.uri.path().starts_with('/') {
        return;
    }
    let mut request = Request::new(Body::default());
    (*request.method_mut(), *request.uri_mut()) = (read.method.clone(), read.uri.clone());
    *request.headers_mut() = read.headers.clone();
    let body_len = match read.framing {
        Framing::Length(length) => Some(length),
        Framing::Chunked | Framing::UntilClose => None,
    };
    let peer = if choice & 2 == 0 { "192.0.2.1:9" } else { "[2001:db8::1]:9" };
    let trusted = choice & 1 == 1;
    let peer = peer.parse().expect("an address");
    let mut written = svc_gateway::fuzzing::upstream_head(request, peer, trusted, body_len);
    let lines = written.windows(2).filter(|pair| pair == b"\r\n").count();
    let limits = HeadLimits { headers_max: 100, bytes_max: 16 << 10 };
    let again = match HeadReader::default().request(&mut written, limits) {
        Ok(Some(again)) => again,
        other => panic!("our own parser reads {other:?} from what we wrote of {read:?}"),
    };
    assert!(written.is_empty(), "one head, and nothing behind it");
    assert_eq!(lines, again.headers.len() + 2, "a line a field");
    assert_eq!((&again.method, again.uri.query()), (&read.method, read.uri.query()));
    assert_eq!(again.headers.get_all("host").iter().count(), 1);
    let expected = body_len.map_or(Framing::Chunked, Framing::Length);
    assert_eq!(again.framing, expected, "{read:?}");
    for (name, value) in &again.headers {
        assert!(!is_of_the_hop(name.as_str(), value.as_bytes()), "{name} leaks: {read:?}");
    }
    let claimed = |name: &HeaderName| name.as_str().starts_with("x-forwarded-");
    if !trusted {
        let ours = ["x-forwarded-for", "x-forwarded-proto", "x-forwarded-host"];
        assert!(again.headers.keys().filter(|name| claimed(name)).all(|name| ours.contains(&name.as_str())));
        assert_eq!(again.headers["x-forwarded-for"], peer.ip().to_string());
    }
}

/// Nothing of the upstream's connection reaches the client, and nothing else is lost.
fn clean_response(data: &[u8]) {
    let read = HeadReader::default().response(&mut BytesMut::from(data), LIMITS, &Method::GET);
    let Ok(Some(read)) = read else { return };
    let (headers, written) = svc_gateway::fuzzing::client_fields(&read.fields, read.status, read.version);
    let sent = read.fields.to_map();
    let named: Vec<Vec<u8>> = sent
        .get_all("connection")
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(|word| word.trim_ascii().to_ascii_lowercase())
        .collect();
    for (name, value) in &sent {
        let text = name.as_str();
        let replaced = ["via", "x-corr-id", "x-reason"].contains(&text)
            || text == "content-length" && read.status == StatusCode::NO_CONTENT;
        let of_hop = is_of_the_hop(text, value.as_bytes())
            || ["te", "transfer-encoding"].contains(&text)
            || named.iter().any(|word| *word == text.as_bytes());
        assert!(replaced || headers.contains_key(name) != of_hop, "{name} in {read:?}");
    }
    // As lines they say the same, and our own parser reads them.
    let mut text = BytesMut::from(&b"HTTP/1.1 200 OK\r\n"[..]);
    text.extend_from_slice(written.lines());
    text.extend_from_slice(b"\r\n");
    let limits = HeadLimits { headers_max: 100, bytes_max: 16 << 10 };
    let again = HeadReader::default().response(&mut text, limits, &Method::HEAD);
    let again = again.expect("well formed").expect("whole").fields.to_map();
    let sorted = |headers: &HeaderMap| {
        let mut all: Vec<_> = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
        all.sort_by(|a, b| (a.0.as_str(), a.1.as_bytes()).cmp(&(b.0.as_str(), b.1.as_bytes())));
        all
    };
    assert_eq!(sorted(&headers), sorted(&again), "{read:?}");
}

/// However slow the bucket and long the wait, `Retry-After` and the rate-limit fields are whole, valid and enough.
fn rate_limit(data: &[u8]) {
    let mut numbers = data.chunks(8).map(|bytes| {
        let mut number = [0; 8];
        number[..bytes.len()].copy_from_slice(bytes);
        u64::from_le_bytes(number)
    });
    let mut next = || numbers.next().unwrap_or(1);
    let (rate, burst, wait) =
        (next(), f64::from_bits(next()), Duration::new(next(), next() as u32 % 1_000_000_000));
    let Some(response) = svc_gateway::fuzzing::refusal(rate, burst, wait) else { return };
    let text = |name: &str| response.headers()[name].to_str().expect("visible ASCII").to_owned();
    let after: u64 = text("retry-after").parse().expect("whole seconds");
    assert!(
        after >= 1 && Duration::from_secs(after) >= wait.min(Duration::from_secs(u64::MAX)),
        "{after} {wait:?}"
    );
    assert!(
        text("ratelimit-policy").starts_with("\"tenant\";q=") && text("ratelimit-policy").ends_with(";w=1")
    );
    assert_eq!(text("ratelimit"), format!("\"tenant\";r=0;t={after}"));
}

/// Any sequence of operations: the bound holds, each job leaves once, and in the end nothing is kept.
fn fair_queue(data: &[u8]) {
    let shape = Shape { capacity: 8, quantum_bytes: 1000, weights: [1, 5, 10] };
    let mut queue: FairQueue<u64> = FairQueue::new(shape.clone(), 2);
    let now = Instant::now();
    let (mut inside, mut running) = (BTreeMap::new(), Vec::new());
    for (job, bytes) in (0u64..).zip(data.chunks_exact(3)) {
        let (lane, tenant) =
            (usize::from(bytes[0] & 1), Tenant { class: bytes[0] >> 1 & 1, id: u32::from(bytes[1] & 3) });
        let size = u64::from(bytes[2]) << (bytes[1] >> 4);
        match bytes[0] >> 5 {
            0..=3 => {
                let deadline = now + Duration::from_secs(1);
                let quantum = u64::from(bytes[1] >> 2 & 3) + 1;
                let pushed = queue.push(Entry { lane, tenant, quantum, cost: size, deadline, job }, now);
                if let Pushed::Queued(number) | Pushed::Displaced(number, ..) = &pushed {
                    inside.insert(job, (lane, tenant, *number));
                }
                if let Pushed::Displaced(_, other, full) = &pushed {
                    assert!(full.share >= 1 && *other != job && inside.remove(other).is_some());
                }
            }
            4 | 5 => match queue.pop(lane, now) {
                Some(popped) => {
                    assert_eq!(
                        inside.remove(&popped.job).map(|(lane, tenant, _)| (lane, tenant)),
                        Some((lane, popped.tenant))
                    );
                    running.push((lane, popped.tenant, popped.cost));
                }
                None => {
                    assert!(inside.values().all(|(other, ..)| *other != lane), "a lane with jobs gives one")
                }
            },
            6 => {
                if let Some((lane, tenant, cost)) = running.pop() {
                    queue.finish(lane, tenant, cost, size);
                }
            }
            _ if bytes[2] == 0 => {
                queue.reshape(Shape { quantum_bytes: u64::from(bytes[1]) + 1, ..shape.clone() }, 2)
            }
            _ => {
                if let Some((job, (lane, tenant, number))) = inside.pop_first() {
                    assert_eq!(queue.remove(lane, tenant, number), Some(job));
                }
            }
        }
        assert!(queue.len() <= shape.capacity && queue.len() == inside.len());
    }
    for lane in 0..2 {
        while let Some(popped) = queue.pop(lane, now) {
            assert!(inside.remove(&popped.job).is_some());
            running.push((lane, popped.tenant, popped.cost));
        }
    }
    assert!(inside.is_empty());
    for (lane, tenant, cost) in running {
        queue.finish(lane, tenant, cost, cost);
    }
    assert_eq!(queue.tokens(), [0; 3], "nobody is left to owe or be owed anything");
}
