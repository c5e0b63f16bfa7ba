//! What is fuzzed: everything that reads bytes or text from a client, an upstream or a file.
//!
//! A target is a function that must not panic; several also check that two ways of reading agree.

use bytes::BytesMut;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use ron_kernel::admission::client_ip::TrustedProxies;
use ron_kernel::admission::deadline::{Budget, DEADLINE, GRPC_TIMEOUT, REQUEST_TIMEOUT};
use ron_kernel::admission::decode::{Coding, DecodeGuard, DecodeLimits};
use ron_kernel::config::Setting as _;
use ron_kernel::http::h1::chunked::{ChunkDecoder, Piece};
use ron_kernel::http::h1::head::{Framing, HeadLimits, HeadReader};
use std::time::{Duration, Instant};
use svc_gateway::config::{GatewaySettings, RouteSettings};
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
