//! Live fill: assets from origins, each fetched once, whatever the origin does.

use crate::edge::{Edge, config, lasting};
use crate::http2::{DATA, END_HEADERS, END_STREAM, HEADERS, SETTINGS, WINDOW_UPDATE, frame, read_frame};
use ron_testkit::{Answer, Client, Gate, Node, Origin, Script, SmallDisk, request};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use sha2::{Digest as _, Sha256};
use std::io::Write as _;
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A folder with certificates for localhost.
pub(crate) fn certificates() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let made = ron_testkit::ron(&["init", "certs", "--tls"], dir.path());
    assert!(made.status.success());
    let mut folders = vec![dir.path().join("certs")];
    while let Some(folder) = folders.pop() {
        if folder.join("ca.pem").exists() {
            return (dir, folder);
        }
        folders.extend(
            std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).filter(|it| it.is_dir()),
        );
    }
    panic!("no certificates");
}

/// An origin over TLS, with the certificate of a folder.
pub(crate) fn start_tls(certs: &Path, choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Origin {
    let chain = CertificateDer::pem_file_iter(certs.join("server.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(certs.join("server.key")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain.map(Result::unwrap).collect(), key)
        .unwrap();
    let config = Arc::new(config);
    Origin::start_over(choose, move |stream| {
        let session = ServerConnection::new(config.clone()).unwrap();
        Box::new(StreamOwned::new(session, stream))
    })
}

/// An edge with one origin over TLS for `/img/`.
struct Filled {
    edge: Edge,
    origin: Origin,
    _certs: tempfile::TempDir,
}

impl Filled {
    fn start(tables: &str, keys: &str, choose: impl Fn(&str) -> Script + Send + Sync + 'static) -> Filled {
        let (certs, folder) = certificates();
        let origin = start_tls(&folder, choose);
        // Patient unless a test is about that: the machine may be slow.
        let patience = |table: &str, key: &str| match tables.contains(table) {
            true => String::new(),
            false => format!("{table}\n{key} = \"30s\"\n"),
        };
        let patience = patience("[edge.fill]", "deadline") + &patience("[edge.ingress]", "timeout");
        let config = config("", &format!("{tables}\n{patience}{}", table(&origin, &folder, keys)));
        let edge = Edge::of(Node::start(&["edge"], &config));
        Filled { edge, origin, _certs: certs }
    }

    fn get(&self, path: &str) -> Answer {
        self.edge.get(path, &[])
    }

    fn cached(&self, result: &str) -> f64 {
        self.edge.node.metric(&format!("edge_cache_total{{result=\"{result}\"}}"))
    }
}

fn table(origin: &Origin, certs: &Path, keys: &str) -> String {
    format!(
        "[[edge.origins]]\nprefix = \"/img/\"\nurl = \"https://localhost:{}/\"\nca_file = {:?}\n{keys}\n",
        port(origin),
        certs.join("ca.pem"),
    )
}

fn port(origin: &Origin) -> &str {
    origin.address.rsplit(':').next().unwrap()
}

const PRIVATE: &str = "allow_private = true";

fn ok(fields: &str, body: &[u8]) -> Script {
    Script::Answer(format!("200 OK\r\n{fields}"), body.to_vec())
}

#[test]
fn what_is_not_stored_is_fetched_once_and_served_like_any_asset() {
    let filled = Filled::start("", PRIVATE, |path| match path {
        "/a.txt?x=1" => ok("Content-Type: text/plain\r\nSurrogate-Key: one two\r\n", b"with a query"),
        "/a.txt" => {
            ok("Content-Type: text/plain\r\nCache-Control: max-age=60\r\n", "line\n".repeat(500).as_bytes())
        }
        _ => Script::Answer("404 Not Found\r\n".to_owned(), Vec::new()),
    });
    let first = filled.get("/edge/assets/img/a.txt");
    assert_eq!((first.status, first.body.len()), (200, 2500));
    assert_eq!(first.header("cache-status"), Some("ron-edge; fwd=uri-miss; stored"));
    assert_eq!(first.header("content-type"), Some("text/plain"));
    assert_eq!(first.header("cache-control"), Some("max-age=60"));
    let address = format!("\"b3:{}\"", blake3(&first.body));
    assert_eq!(first.header("etag"), Some(address.as_str()), "known before the answer begins");
    assert!(first.header("repr-digest").is_some());
    let again = filled.get("/edge/assets/img/a.txt");
    assert_eq!(
        (again.header("cache-status"), again.header("etag")),
        (Some("ron-edge; hit"), Some(address.as_str()))
    );
    assert!(again.header("age").is_some());
    let head = filled.edge.send("HEAD", "/edge/assets/img/a.txt", &[], b"");
    assert_eq!((lasting(&again), again.header("cache-control")), (lasting(&head), Some("max-age=60")));
    let part = filled.edge.get("/edge/assets/img/a.txt", &[("Range", "bytes=5-9")]);
    assert_eq!((part.status, part.text().as_str()), (206, "line\n"));
    assert_eq!(filled.edge.get("/edge/assets/img/a.txt", &[("If-None-Match", &address)]).status, 304);
    filled.edge.node.eventually("encodings are made", |_| {
        filled.edge.get("/edge/assets/img/a.txt", &[("Accept-Encoding", "gzip")]).header("content-encoding")
            == Some("gzip")
    });
    assert_eq!(filled.origin.count("/a.txt"), 1);
    let asked = filled.origin.last().to_lowercase();
    assert!(asked.contains("accept-encoding: identity") && asked.contains("via: 1.1 ron"), "{asked}");
    assert!(asked.contains(&format!("host: localhost:{}", port(&filled.origin))), "{asked}");
    assert_eq!(filled.get("/edge/assets/img/a.txt?x=1").text(), "with a query");
    assert_eq!(filled.get("/edge/assets/img/a.txt?x=1").header("cache-status"), Some("ron-edge; hit"));
    assert_eq!((filled.cached("fill"), filled.cached("miss")), (2.0, 0.0));
    // Purged by key, by path with every query.
    let purge =
        |body: &str| filled.edge.send("POST", "/edge/purge", &[], body.as_bytes()).json()["removed"].clone();
    assert_eq!((purge(r#"{"key":"two"}"#), purge(r#"{"key":"two"}"#)), (1.into(), 0.into()));
    filled.get("/edge/assets/img/a.txt?x=1");
    assert_eq!(purge(r#"{"path":"/edge/assets/img/a.txt"}"#), 2);
    assert_eq!(filled.get("/edge/assets/img/a.txt").status, 200);
    assert_eq!(filled.origin.count("/a.txt"), 2);
}

#[test]
fn what_finds_no_room_is_passed_on_and_not_called_stored() {
    let Some(disk) = SmallDisk::mount("6m") else {
        eprintln!("not run: mounting a small file system needs root");
        return;
    };
    let folder = disk.path().join("cas");
    let cas = format!("[edge.cas]\ndir = \"{}\"", folder.display());
    let filled = Filled::start(&cas, PRIVATE, |_| ok("Cache-Control: max-age=60\r\n", &[b'x'; 30_000]));
    let ballast = disk.fill();
    for count in 1..=2 {
        let answer = filled.get("/edge/assets/img/a");
        assert_eq!((answer.status, answer.body.len()), (200, 30_000));
        assert_eq!(answer.header("cache-status"), Some("ron-edge; fwd=uri-miss"));
        assert_eq!(filled.origin.count("/a"), count);
    }
    std::fs::remove_file(ballast).unwrap();
    let status = |answer: Answer| answer.header("cache-status").unwrap_or_default().to_owned();
    assert_eq!(status(filled.get("/edge/assets/img/a")), "ron-edge; fwd=uri-miss; stored");
    assert_eq!(status(filled.get("/edge/assets/img/a")), "ron-edge; hit");
}

#[test]
fn an_asset_that_varies_by_what_we_ask_with_is_a_hit() {
    let filled = Filled::start("", PRIVATE, |_| {
        ok("Cache-Control: max-age=60\r\nVary: Accept-Encoding, Accept\r\n", b"the same")
    });
    assert_eq!(filled.get("/edge/assets/img/x").text(), "the same");
    let again = filled.edge.get("/edge/assets/img/x", &[("Accept-Encoding", "br"), ("Accept", "image/png")]);
    assert_eq!((again.text().as_str(), again.header("cache-status")), ("the same", Some("ron-edge; hit")));
    assert_eq!(filled.origin.count("/x"), 1);
}

#[test]
fn an_asset_with_a_very_long_query_is_fetched_and_not_kept() {
    let filled = Filled::start("", PRIVATE, |_| ok("Cache-Control: max-age=60\r\n", b"long"));
    let path = format!("/edge/assets/img/x?{}", "q".repeat(5000));
    for asked in 1..3 {
        assert_eq!(filled.get(&path).text(), "long");
        assert_eq!(filled.origin.seen.lock().unwrap().len(), asked);
    }
    assert_eq!(filled.edge.node.metric("edge_cas_bytes"), 0.0);
}

#[test]
fn a_body_that_does_not_end_holds_up_no_other_fetch() {
    let settings = "[edge.fill]\nworkers = 1\nstall_timeout = \"60s\"\ndeadline = \"30s\"";
    let filled = Filled::start(settings, PRIVATE, |path| match path {
        "/endless" => Script::Stall(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\nhalf".to_vec()),
        _ => ok("", b"quick"),
    });
    let mut client = Client::connect(&filled.edge.address()).unwrap();
    client.send(b"GET /edge/assets/img/endless HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    filled.edge.node.eventually("it has begun", |_| filled.origin.count("/endless") == 1);
    assert_eq!(filled.get("/edge/assets/img/other").text(), "quick");
}

#[test]
fn origins_that_do_not_answer_hold_up_no_other_fetch() {
    let settings =
        "[edge.fill]\nworkers = 2\ndeadline = \"60s\"\n[edge.ingress]\ntimeout = \"60s\"\nrps_limit = 0";
    let (certs, folder) = certificates();
    let dead = start_tls(&folder, |_| Script::Silence);
    let origin = start_tls(&folder, |_| ok("", b"quick"));
    let hung: String =
        (0..64).map(|n| table(&dead, &folder, PRIVATE).replace("/img/", &format!("/dead{n}/"))).collect();
    let tables = format!("{settings}\n{}{hung}", table(&origin, &folder, PRIVATE));
    let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
    let mut waiting: Vec<Client> = (0..64).map(|_| Client::connect(&edge.address()).unwrap()).collect();
    for (n, client) in waiting.iter_mut().enumerate() {
        client.send(format!("GET /edge/assets/dead{n}/x HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).unwrap();
    }
    edge.node.eventually("all of them have been asked", |_| dead.seen.lock().unwrap().len() == 64);
    assert_eq!(edge.get("/edge/assets/img/x", &[]).text(), "quick");
    assert_eq!(edge.node.metric("queue_depth{service=\"edge\",queue=\"work\"}"), 0.0);
    drop((waiting, certs));
}

#[test]
fn what_was_filled_is_there_after_a_kill_and_never_torn() {
    let body: Vec<u8> = (0..3_000_000u32).map(|n| (n / 7) as u8).collect();
    let sent = body.clone();
    let mut filled = Filled::start("", PRIVATE, move |path| match path {
        "/kept" => ok("Cache-Control: max-age=600\r\n", b"small and kept"),
        _ => Script::Chunks(sent.chunks(100_000).map(<[u8]>::to_vec).collect(), Duration::from_millis(2)),
    });
    assert_eq!(filled.get("/edge/assets/img/kept").status, 200);
    for round in 0..4 {
        let mut client = Client::connect(&filled.edge.address()).unwrap();
        client
            .send(format!("GET /edge/assets/img/large{round} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes())
            .unwrap();
        filled
            .edge
            .node
            .eventually("the fill is under way", |_| filled.origin.count(&format!("/large{round}")) == 1);
        filled.edge.node.signal("KILL");
        filled.edge.node.wait();
        let dir = std::mem::replace(&mut filled.edge.node.dir, tempfile::tempdir().unwrap());
        let _ = std::fs::remove_file(dir.path().join("addresses.json"));
        filled.edge.node = Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[]);
        let kept = filled.get("/edge/assets/img/kept");
        assert_eq!(
            (kept.text().as_str(), kept.header("cache-status")),
            ("small and kept", Some("ron-edge; hit"))
        );
        let whole = filled.get(&format!("/edge/assets/img/large{round}"));
        assert!(whole.status == 200 && whole.body == body, "whole or not at all");
    }
    assert_eq!(filled.origin.count("/kept"), 1);
}

#[test]
fn a_thousand_clients_on_a_cold_object_ask_the_origin_once() {
    let (certs, folder) = certificates();
    let body: Vec<u8> = (0..2_000_000u32).map(|n| ((n * 31) >> 5) as u8).collect();
    let sent = body.clone();
    let gates = [Gate::default(), Gate::default()];
    let [small, large] = gates.clone();
    let origin = start_tls(&folder, move |path| match path {
        "/small" => {
            small.pass();
            ok("", &sent[..9000])
        }
        _ => {
            large.pass();
            Script::Chunks(sent.chunks(50_000).map(<[u8]>::to_vec).collect(), Duration::from_millis(5))
        }
    });
    let limits = "[edge.ingress]\nmax_inflight = 2000\nmax_conns_per_ip = 2000\nrps_limit = 0\ntimeout = \"60s\"\n\
                  [edge.fill]\ndeadline = \"60s\"";
    let config = config("", &format!("{limits}\n{}", table(&origin, &folder, PRIVATE)));
    let edge = Edge::of(Node::start(&["edge"], &config));
    let [small, large] = &gates;
    for (path, gate, clients, expected) in
        [("small", small, 1000, &body[..9000]), ("large", large, 100, &body[..])]
    {
        let mut connected: Vec<Client> =
            (0..clients).map(|_| Client::connect(&edge.address()).unwrap()).collect();
        for client in &mut connected {
            client
                .send(format!("GET /edge/assets/img/{path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes())
                .unwrap();
        }
        edge.node.eventually("all are in", |node| {
            node.metric("inflight_requests{service=\"edge\"}") as usize >= clients
        });
        gate.open();
        let mut tags = std::collections::HashMap::new();
        for client in &mut connected {
            let answer = client.read_answer("GET").unwrap();
            assert!(
                answer.status == 200 && answer.body == expected,
                "{} {}",
                answer.status,
                answer.body.len()
            );
            let status = answer.header("cache-status").unwrap().to_owned();
            *tags.entry(status).or_insert(0) += 1;
        }
        assert_eq!(origin.count(&format!("/{path}")), 1, "{path}: {tags:?}");
        assert_eq!(tags["ron-edge; fwd=uri-miss; stored"], 1, "{tags:?}");
        assert!(tags["ron-edge; fwd=uri-miss; collapsed"] > clients / 4, "{tags:?}");
    }
    drop(certs);
}

#[test]
fn a_fill_goes_on_when_the_client_that_began_it_leaves() {
    let filled = Filled::start("", PRIVATE, |_| {
        Script::Chunks((0..30).map(|n| vec![n; 100_000]).collect(), Duration::from_millis(10))
    });
    let mut first = Client::connect(&filled.edge.address()).unwrap();
    first.send(b"GET /edge/assets/img/x HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    filled.edge.node.eventually("it has begun", |_| filled.origin.count("/x") == 1);
    drop(first);
    let second = filled.get("/edge/assets/img/x");
    assert_eq!((second.status, second.body.len()), (200, 3_000_000));
    assert!(
        second.body.chunks(100_000).enumerate().all(|(n, part)| part.iter().all(|byte| *byte as usize == n))
    );
    assert_eq!(filled.origin.count("/x"), 1);
}

/// Asks for a path in HTTP/2; how long the body is, and the block of fields behind it.
fn over_http2(edge: &Edge, path: &str) -> (usize, Vec<u8>) {
    let mut stream = TcpStream::connect(edge.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    // GET over http of host `a`, the path as it is; and room for all of the body.
    let block =
        [b"\x82\x86\x41\x01a\x04", &[u8::try_from(path.len()).unwrap()][..], path.as_bytes()].concat();
    let room = (1u32 << 20).to_be_bytes();
    for frame in [
        frame(SETTINGS, 0, 0, &[&[0, 4][..], &room].concat()),
        frame(WINDOW_UPDATE, 0, 0, &room),
        frame(HEADERS, END_STREAM | END_HEADERS, 1, &block),
    ] {
        stream.write_all(&frame).unwrap();
    }
    let mut body = 0;
    while let Some((kind, flags, _, payload)) = read_frame(&mut stream) {
        match kind {
            DATA => body += payload.len(),
            HEADERS if flags & END_STREAM != 0 => return (body, payload),
            _ => {}
        }
    }
    panic!("nothing follows the body");
}

/// A tag as HPACK writes it (RFC 7541 appendix B).
fn huffman(tag: &str) -> Vec<u8> {
    let code = |byte: char| match byte {
        '"' => "1111111001",
        ':' => "1011100",
        '0' => "00000",
        '1' => "00001",
        '2' => "00010",
        'a' => "00011",
        'c' => "00100",
        'e' => "00101",
        '3' => "011001",
        '4' => "011010",
        '5' => "011011",
        '6' => "011100",
        '7' => "011101",
        '8' => "011110",
        '9' => "011111",
        'b' => "100011",
        'd' => "100100",
        'f' => "100101",
        other => panic!("{other} is in no tag"),
    };
    let mut bits: Vec<u8> = tag.chars().flat_map(|byte| code(byte).bytes()).collect();
    bits.resize(bits.len().next_multiple_of(8), b'1');
    bits.chunks(8).map(|byte| byte.iter().fold(0, |sum, bit| sum << 1 | (bit - b'0'))).collect()
}

#[test]
fn a_large_object_is_streamed_and_its_tag_follows_it() {
    let filled = Filled::start("[edge.fill]\nbuffer_bytes = \"64KiB\"\ndeadline = \"30s\"", PRIVATE, |_| {
        ok("Content-Type: image/png\r\n", &[7; 200_000])
    });
    let mut client = Client::connect(&filled.edge.address()).unwrap();
    client
        .send(b"GET /edge/assets/img/a HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nRange: bytes=0-1\r\n\r\n")
        .unwrap();
    let answer = client.read_answer("GET").unwrap();
    assert_eq!((answer.status, answer.body.len(), answer.header("etag")), (200, 200_000, None));
    assert_eq!(answer.header("trailer"), Some("ETag, Repr-Digest"));
    let warm = filled.get("/edge/assets/img/a");
    let tag = format!("\"b3:{}\"", blake3(&warm.body));
    assert_eq!(warm.header("etag").unwrap(), tag);
    // What follows the body, in either version of HTTP, is what the head of a hit says.
    let digest = warm.header("repr-digest").unwrap();
    let mut client = Client::connect(&filled.edge.address()).unwrap();
    client
        .send(b"GET /edge/assets/img/d HTTP/1.1\r\nHost: a\r\nTE: trailers\r\nConnection: close\r\n\r\n")
        .unwrap();
    let text = String::from_utf8_lossy(&client.read_to_end().unwrap()).into_owned();
    let (_, trailers) = text.rsplit_once("\r\n0\r\n").unwrap();
    assert!(trailers.contains(&format!("etag: {tag}\r\n")), "{trailers}");
    assert!(trailers.contains(&format!("repr-digest: {digest}\r\n")), "{trailers}");
    let (body, trailers) = over_http2(&filled.edge, "/edge/assets/img/e");
    assert_eq!(body, 200_000);
    let coded = huffman(&tag);
    assert!(trailers.windows(coded.len()).any(|part| part == coded), "{trailers:?}");
    // A condition on the whole object waits for it.
    let failed = filled.edge.get("/edge/assets/img/b", &[("If-Match", "\"x\"")]);
    assert_eq!((failed.status, failed.reason()), (412, "precondition"));
    let plain = filled.get("/edge/assets/img/c");
    assert_eq!((plain.header("content-length"), plain.header("trailer")), (Some("200000"), None));
}

/// Every misdeed of an origin, by path.
fn misdeeds() -> impl Fn(&str) -> Script + Send + Sync + 'static {
    let bomb = gzip(&vec![0; 40 << 20]);
    let digest = "sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:";
    let seen = AtomicUsize::new(0);
    let raw = |head: &str, body: &[u8]| {
        Script::Raw([format!("HTTP/1.1 200 OK\r\n{head}\r\n").as_bytes(), body].concat())
    };
    move |path| match path {
        "/missing" => Script::Answer("404 Not Found\r\n".to_owned(), b"no".to_vec()),
        "/gone" => Script::Answer("410 Gone\r\n".to_owned(), b"no".to_vec()),
        "/error" => Script::Answer("500 Error\r\n".to_owned(), b"no".to_vec()),
        "/flaky" if seen.fetch_add(1, Ordering::SeqCst) < 2 => {
            Script::Answer("503 Busy\r\n".to_owned(), Vec::new())
        }
        "/flaky" => ok("", b"third time"),
        "/always503" => Script::Answer("503 Busy\r\n".to_owned(), Vec::new()),
        "/hangup" => Script::HangUp,
        "/silent" => Script::Silence,
        "/stalls" => Script::Stall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf".to_vec()),
        "/short" => raw("Content-Length: 100\r\n", b"not a hundred"),
        "/chunked" => raw("Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n"),
        "/large" => ok("", &vec![1; (1 << 20) + 1]),
        "/large-chunked" => Script::Chunks(vec![vec![1; 700_000]; 2], Duration::ZERO),
        "/bomb" => ok("Content-Encoding: gzip\r\n", &bomb),
        "/gzip" => ok("Content-Encoding: gzip\r\nContent-Type: text/plain\r\n", &gzip(b"plain enough")),
        "/broken" => ok("Content-Encoding: gzip\r\n", b"not gzip at all"),
        "/nowhere" => Script::Answer("302 Found\r\nLocation: #here\r\n".to_owned(), Vec::new()),
        "/strange" => ok("Content-Encoding: sdch\r\n", b"?"),
        "/digest" => ok(&format!("Repr-Digest: {digest}\r\n"), b"other bytes"),
        "/tag" => ok(&format!("ETag: \"b3:{}\"\r\n", "0".repeat(64)), b"other bytes"),
        "/inside" => {
            Script::Answer("302 Found\r\nLocation: https://127.0.0.1/secret\r\n".to_owned(), Vec::new())
        }
        "/plain" => Script::Answer("302 Found\r\nLocation: http://localhost/x\r\n".to_owned(), Vec::new()),
        "/loop" => Script::Answer("302 Found\r\nLocation: /loop\r\n".to_owned(), Vec::new()),
        "/moved" => Script::Answer("301 Moved\r\nLocation: to?it=1\r\n".to_owned(), Vec::new()),
        "/to?it=1" => ok("", b"moved here"),
        "/teapot" => Script::Raw(b"gibberish\r\n\r\n".to_vec()),
        path => panic!("nobody asks for {path}"),
    }
}

#[test]
fn every_way_an_origin_can_fail_has_its_answer_and_leaves_nothing() {
    let filled = Filled::start(
        "[edge.fill]\nmax_object_bytes = \"1MiB\"\ndeadline = \"6s\"\nstall_timeout = \"2s\"\nnegative_ttl = \"1h\"\n\
         [edge.retry]\nbase = \"20ms\"\nmax = \"100ms\"\ntries = 3\njitter = true\n\
         [edge.ingress]\ntimeout = \"20s\"\ndecompress_max_ratio = 10\ndecompress_abs_bytes = \"10MiB\"",
        PRIVATE,
        misdeeds(),
    );
    for (path, status, reason) in [
        ("missing", 404, "not_found"),
        ("gone", 410, "not_found"),
        ("error", 502, "upstream"),
        ("always503", 502, "upstream"),
        ("hangup", 502, "upstream"),
        ("silent", 504, "timeout"),
        ("stalls", 502, "upstream"),
        ("short", 502, "upstream"),
        ("chunked", 502, "upstream"),
        ("large", 502, "upstream"),
        ("large-chunked", 502, "upstream"),
        ("bomb", 502, "decompress_cap"),
        ("broken", 502, "upstream"),
        ("nowhere", 502, "upstream"),
        ("strange", 502, "upstream"),
        ("digest", 502, "etag_invalid"),
        ("tag", 502, "etag_invalid"),
        ("inside", 403, "not_allowed"),
        ("plain", 403, "not_allowed"),
        ("loop", 502, "upstream"),
        ("teapot", 502, "upstream"),
    ] {
        let before = filled.edge.refusals(reason);
        let begun = Instant::now();
        let answer = filled.get(&format!("/edge/assets/img/{path}"));
        assert_eq!((answer.status, answer.reason()), (status, reason), "{path}: {}", answer.text());
        assert!(begun.elapsed() < Duration::from_secs(20), "{path}");
        assert!(filled.edge.refusals(reason) >= before + 1.0, "{path} is counted");
        assert!(answer.header("cache-status").unwrap().starts_with("ron-edge"), "{path}");
    }
    assert_eq!(filled.edge.node.metric("edge_cas_bytes"), 0.0, "nothing is left of any of them");
    assert_eq!(filled.get("/edge/assets/img/flaky").text(), "third time");
    assert_eq!(filled.get("/edge/assets/img/moved").text(), "moved here");
    assert_eq!(filled.get("/edge/assets/img/moved").header("cache-status"), Some("ron-edge; hit"));
    let decoded = filled.get("/edge/assets/img/gzip");
    assert_eq!((decoded.text().as_str(), decoded.header("content-encoding")), ("plain enough", None));
    assert_eq!((filled.origin.count("/always503"), filled.origin.count("/flaky")), (3, 3));
    assert_eq!(filled.origin.count("/loop"), 4, "three redirects and no more");
    assert!(filled.edge.node.metric("backoff_retries_total{service=\"edge\",op=\"live_fill\"}") >= 4.0);
    assert!(filled.edge.node.metric("io_timeouts_total{service=\"edge\",op=\"fill\"}") >= 2.0);
    // That there is nothing is remembered, until somebody purges.
    assert_eq!((filled.get("/edge/assets/img/missing").status, filled.origin.count("/missing")), (404, 1));
    filled.edge.send("POST", "/edge/purge", &[], br#"{"path":"img/missing"}"#);
    assert_eq!((filled.get("/edge/assets/img/missing").status, filled.origin.count("/missing")), (404, 2));
}

#[test]
fn an_origin_that_changes_in_the_midst_of_an_object_is_never_mixed() {
    let seen = Arc::new(AtomicUsize::new(0));
    let counted = seen.clone();
    let filled = Filled::start("", PRIVATE, move |_| match counted.fetch_add(1, Ordering::SeqCst) {
        0 => Script::Raw(b"HTTP/1.1 200 OK\r\nETag: \"1\"\r\nContent-Length: 10\r\n\r\n11111".to_vec()),
        _ => ok("ETag: \"2\"\r\n", b"2222222222"),
    });
    let broken = filled.get("/edge/assets/img/x");
    assert_eq!((broken.status, broken.reason()), (502, "upstream"));
    assert!(!filled.origin.last().to_lowercase().contains("range:"), "nothing was kept to go on from");
    let whole = filled.get("/edge/assets/img/x");
    assert_eq!((whole.status, whole.text().as_str()), (200, "2222222222"));
    assert_eq!(seen.load(Ordering::SeqCst), 2);
}

#[test]
fn what_the_store_cannot_take_of_an_asset_reaches_its_client_all_the_same() {
    let filled = Filled::start("", PRIVATE, |path| match path {
        "/long" => Script::Chunks((0..40).map(|n| vec![n; 100_000]).collect(), Duration::ZERO),
        _ => ok("", b"short"),
    });
    // A store that cannot be written to.
    std::fs::remove_dir_all(filled.edge.node.dir.path().join("cas/tmp")).unwrap();
    for asked in 1..=2 {
        let short = filled.get("/edge/assets/img/short");
        assert_eq!((short.status, short.text().as_str(), short.header("etag")), (200, "short", None));
        let long = filled.get("/edge/assets/img/long");
        assert_eq!((long.status, long.body.len()), (200, 4_000_000));
        let right = |(n, piece): (usize, &[u8])| piece.iter().all(|byte| usize::from(*byte) == n);
        assert!(long.body.chunks(100_000).enumerate().all(right));
        assert_eq!((filled.origin.count("/short"), filled.origin.count("/long")), (asked, asked));
    }
    let failed = filled.edge.get("/edge/assets/img/short", &[("If-Match", "\"x\"")]);
    assert_eq!((failed.status, failed.reason()), (507, "storage"), "nobody knows its tag");
}

#[test]
fn a_deadline_that_the_client_sends_is_kept() {
    let filled = Filled::start("", PRIVATE, |_| Script::Silence);
    let before = filled.edge.node.metric("io_timeouts_total{service=\"edge\",op=\"fill\"}");
    let begun = Instant::now();
    let answer = filled.edge.get("/edge/assets/img/x", &[("Request-Timeout", "300ms")]);
    assert_eq!((answer.status, answer.reason()), (504, "timeout"));
    assert!(begun.elapsed() >= Duration::from_millis(300), "not before its time");
    assert!(begun.elapsed() < Duration::from_secs(20), "nor when the origin is given up");
    assert!(filled.edge.node.metric("io_timeouts_total{service=\"edge\",op=\"fill\"}") > before);
    let past = filled.edge.get("/edge/assets/img/y", &[("Deadline", "1")]);
    assert_eq!((past.status, filled.origin.count("/y")), (504, 0));
}

#[test]
fn no_address_of_this_machine_is_asked_unless_it_is_allowed() {
    let (certs, folder) = certificates();
    let origin = start_tls(&folder, |_| ok("", b"secret"));
    let tables = table(&origin, &folder, "");
    let literal = tables.replace("/img/", "/ip/").replace("localhost", "127.0.0.1");
    let patient = "[edge.fill]\ndeadline = \"30s\"\n[edge.ingress]\ntimeout = \"30s\"\n";
    let edge = Edge::of(Node::start(&["edge"], &config("", &format!("{patient}{tables}{literal}"))));
    for path in ["img", "ip"] {
        let answer = edge.get(&format!("/edge/assets/{path}/x"), &[]);
        assert_eq!((answer.status, answer.reason()), (403, "not_allowed"), "{path}");
    }
    assert_eq!(edge.get("/edge/assets/other/x", &[]).reason(), "not_allowed", "no origin stands for it");
    assert_eq!(origin.connections.load(Ordering::SeqCst), 0, "not even a connection was made");
    // With a CA of its own only; another's certificate is not believed.
    let (_other, strangers) = certificates();
    edge.node.write_config(&config("", &format!("{patient}{}", table(&origin, &strangers, PRIVATE))));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    assert_eq!(edge.get("/edge/assets/img/x", &[]).reason(), "upstream");
    edge.node.write_config(&config("", &format!("{patient}{}", table(&origin, &folder, PRIVATE))));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    assert_eq!(edge.get("/edge/assets/img/x", &[]).text(), "secret");
    drop(certs);
}

#[test]
fn offline_never_dials_and_serves_what_it_has() {
    let (certs, folder) = certificates();
    let origin = start_tls(&folder, |_| ok("Cache-Control: max-age=0\r\nETag: \"1\"\r\n", b"kept"));
    let tables = table(&origin, &folder, PRIVATE);
    let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
    assert_eq!(edge.get("/edge/assets/img/x", &[]).text(), "kept");
    edge.node.write_config(&config("mode = \"offline\"", &tables));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    let stale = edge.get("/edge/assets/img/x", &[]);
    assert_eq!(
        (stale.text().as_str(), stale.header("cache-status")),
        ("kept", Some("ron-edge; hit; detail=stale"))
    );
    assert_eq!(edge.get("/edge/assets/img/y", &[]).reason(), "not_found");
    assert_eq!(origin.count("/x") + origin.count("/y"), 1);
    assert_eq!(edge.node.metric("edge_cache_total{result=\"stale\"}"), 1.0);
    drop(certs);
}

#[test]
fn each_query_is_an_object_of_its_own_offline_and_when_deleted() {
    let (certs, folder) = certificates();
    let origin = start_tls(&folder, |path| ok("", path.as_bytes()));
    let tables = table(&origin, &folder, &format!("{PRIVATE}\nttl = \"1h\""));
    let edge = Edge::of(Node::start(&["edge"], &config("", &tables)));
    let get = |path: &str| edge.get(&format!("/edge/assets/img/{path}"), &[]);
    let put = edge.send("PUT", "/edge/assets/img/own", &[], b"put here");
    assert_eq!(put.status, 201);
    for path in ["x", "x?1", "x?2", "y?1"] {
        assert_eq!(get(path).text(), format!("/{path}"));
    }
    let delete = |path: &str| edge.send("DELETE", &format!("/edge/assets/img/{path}"), &[], b"").status;
    assert_eq!((delete("x?2"), delete("x?2"), delete("y")), (204, 404, 404));
    edge.node.write_config(&config("mode = \"offline\"", &tables));
    assert_eq!(edge.node.admin_post("/admin/reload", "").status, 200);
    for path in ["x", "x?1", "y?1"] {
        let kept = get(path);
        assert_eq!(kept.text(), format!("/{path}"));
        assert_eq!(kept.header("cache-status"), Some("ron-edge; hit"), "{path}: its origin's ttl holds");
    }
    assert_eq!((get("x?2").status, get("x?3").status, get("y").status), (404, 404, 404));
    assert_eq!(get("own?anything").text(), "put here", "a query means nothing to what was put");
    drop(certs);
}

#[test]
fn the_clients_deadline_holds_while_an_origin_pauses() {
    let filled = Filled::start("[edge.fill]\nstall_timeout = \"60s\"\ndeadline = \"60s\"", PRIVATE, |_| {
        Script::Stall([&b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n"[..], &[7; 2 << 20]].concat())
    });
    let mut client = Client::connect(&filled.edge.address()).unwrap();
    let begun = Instant::now();
    client.send(b"GET /edge/assets/img/x HTTP/1.1\r\nHost: a\r\nRequest-Timeout: 2\r\n\r\n").unwrap();
    assert!(client.read_answer("GET").is_err(), "it is cut");
    assert!((1..20).contains(&begun.elapsed().as_secs()), "{:?}", begun.elapsed());
}

#[test]
fn what_is_stale_is_confirmed_or_replaced_and_stands_in_for_an_error() {
    let version = Arc::new(AtomicUsize::new(1));
    let now = version.clone();
    let filled =
        Filled::start("[edge.retry]\ntries = 1\n", &format!("{PRIVATE}\nttl = \"1h\""), move |path| {
            let version = now.load(Ordering::SeqCst);
            let fields = format!("ETag: \"{version}\"\r\nCache-Control: max-age=0, stale-if-error=60\r\n");
            match (path, version) {
                ("/plain", _) => ok("", b"good for an hour"),
                ("/swr", _) => ok(
                    "Cache-Control: max-age=0, stale-while-revalidate=600\r\n",
                    version.to_string().as_bytes(),
                ),
                ("/nostore", _) => ok("Cache-Control: no-store\r\n", version.to_string().as_bytes()),
                (_, 2) => Script::Answer(
                    format!("304 Not Modified\r\n{fields}").replace("\"2\"", "\"1\""),
                    Vec::new(),
                ),
                (_, 4) => Script::Answer("503 Busy\r\n".to_owned(), Vec::new()),
                _ => Script::Answer(format!("200 OK\r\n{fields}"), version.to_string().into_bytes()),
            }
        });
    let get = |path: &str| filled.get(&format!("/edge/assets/img/{path}")).text();
    assert_eq!(
        (get("x"), get("plain"), get("swr"), get("nostore")),
        ("1".into(), "good for an hour".into(), "1".into(), "1".into())
    );
    version.store(2, Ordering::SeqCst);
    assert_eq!(get("x"), "1", "confirmed");
    assert!(filled.origin.last().to_lowercase().contains("if-none-match: \"1\""));
    assert_eq!(get("nostore"), "2");
    assert_eq!(get("swr"), "1", "stale, and replaced behind the client's back");
    filled.edge.node.eventually("it was replaced", |_| get("swr") == "2");
    version.store(3, Ordering::SeqCst);
    assert_eq!(get("x"), "3", "replaced");
    version.store(4, Ordering::SeqCst);
    let stale = filled.get("/edge/assets/img/x");
    assert_eq!(
        (stale.text().as_str(), stale.header("cache-status")),
        ("3", Some("ron-edge; hit; detail=stale"))
    );
    assert_eq!((get("plain"), filled.origin.count("/plain")), ("good for an hour".to_owned(), 1));
    assert_eq!(filled.edge.get("/edge/cas/b3:".to_owned().as_str(), &[]).status, 400);
}

#[test]
fn a_full_queue_sheds_and_says_so_and_lost_workers_lose_no_request() {
    let (certs, folder) = certificates();
    let origin = start_tls(&folder, |path| match path.strip_prefix("/slow") {
        Some(_) => Script::Late(Duration::from_millis(400), "200 OK\r\n".to_owned(), b"slow".to_vec()),
        None => ok("", b"quick"),
    });
    let settings = "[edge.fill]\nworkers = 2\nwork_capacity = 4\ndeadline = \"30s\"\n\
                    [edge.ingress]\ntimeout = \"30s\"\nrps_limit = 0\n[node]\ndanger_ok = true";
    let config = config("", &format!("{settings}\n{}", table(&origin, &folder, PRIVATE)));
    let edge = Edge::of(Node::start(&["edge"], &config));
    let ask = |path: String| {
        let address = edge.address();
        std::thread::spawn(move || {
            request(&address, "GET", &format!("/edge/assets/img/{path}"), &[], b"").unwrap()
        })
    };
    let (stop, number) = (AtomicBool::new(false), AtomicUsize::new(0));
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asking = || {
            let mut answers = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let path = format!("/edge/assets/img/slow{}", number.fetch_add(1, Ordering::SeqCst));
                answers.push(request(&edge.address(), "GET", &path, &[], b"").unwrap());
            }
            answers
        };
        let mut asked = Vec::new();
        for _ in 0..12 {
            asked.push(scope.spawn(asking));
        }
        edge.node.eventually("it says that it sheds", |node| {
            let ready = ron_testkit::get(&node.admin(), "/readyz?service=edge");
            ready.status == 503 && ready.text().contains("edge.fill")
        });
        stop.store(true, Ordering::SeqCst);
        asked.into_iter().flat_map(|it| it.join().unwrap()).collect()
    });
    let shed = answers.iter().filter(|answer| (answer.status, answer.reason()) == (429, "busy")).count();
    let served = answers.iter().filter(|answer| answer.text() == "slow").count();
    assert!(shed >= 1 && served >= 1 && shed + served == answers.len(), "{shed} and {served}");
    assert!(answers.iter().filter(|it| it.status == 429).all(|it| it.header("retry-after").is_some()));
    let busy =
        edge.node.metric("busy_rejections_total{service=\"edge\",endpoint=\"/edge/assets\",queue=\"work\"}");
    let dropped = edge.node.metric("queue_dropped_total{service=\"edge\",queue=\"work\"}");
    assert!(busy >= 1.0 && (busy - dropped).abs() < 0.5, "{busy} and {dropped}");
    edge.node.eventually("it is well again", |node| {
        ron_testkit::get(&node.admin(), "/readyz?service=edge").status == 200
    });
    // Killed in the midst of a fetch, they come back, and who waited gets the object all the same.
    let asked: Vec<_> = (0..3).map(|n| ask(format!("slow-again{n}"))).collect();
    edge.node
        .eventually("they are at work", |_| origin.count("/slow-again0") + origin.count("/slow-again1") >= 1);
    let killed =
        edge.node.admin_post("/debug/tasks/kill", r#"{"service":"edge","kind":"worker","fraction":1.0}"#);
    assert_eq!(killed.status, 200, "{}", killed.text());
    for answer in asked {
        let answer = answer.join().unwrap();
        assert!(answer.text() == "slow", "{} {}", answer.status, answer.text());
    }
    edge.node.eventually("all are back", |node| {
        ron_testkit::get(&node.admin(), "/readyz?service=edge").status == 200
    });
    drop(certs);
}

#[test]
fn half_of_the_workers_killed_under_load_is_seen_and_passes() {
    let settings = "[edge.fill]\nworkers = 8\ndeadline = \"30s\"\n[edge.ingress]\ntimeout = \"30s\"\nrps_limit = 0\n\
                    [node]\ndanger_ok = true";
    let filled = Filled::start(settings, PRIVATE, |path| ok("", path.as_bytes()));
    let (stop, number) = (AtomicBool::new(false), AtomicUsize::new(0));
    let ready = |node: &Node| ron_testkit::get(&node.admin(), "/readyz?service=edge");
    let answers: Vec<Answer> = std::thread::scope(|scope| {
        let asking = || {
            let mut answers = Vec::new();
            while !stop.load(Ordering::SeqCst) {
                let number = number.fetch_add(1, Ordering::SeqCst);
                answers.push(filled.get(&format!("/edge/assets/img/{number}")));
            }
            answers
        };
        let mut asked = Vec::new();
        for _ in 0..4 {
            asked.push(scope.spawn(asking));
        }
        filled.edge.node.eventually("there is load", |_| number.load(Ordering::SeqCst) > 20);
        // They come back after a tenth of a second or more, and later each time: one of these moments is seen.
        let seen = (0..4).any(|_| {
            let kill = r#"{"service":"edge","kind":"worker","fraction":0.5}"#;
            assert_eq!(filled.edge.node.admin_post("/debug/tasks/kill", kill).status, 200);
            (0..40).any(|_| {
                let ready = ready(&filled.edge.node);
                ready.status == 503 && ready.text().contains("edge.worker")
            })
        });
        assert!(seen, "it says that workers are missing");
        filled.edge.node.eventually("all are back", |node| ready(node).status == 200);
        stop.store(true, Ordering::SeqCst);
        asked.into_iter().flat_map(|it| it.join().unwrap()).collect()
    });
    assert!(answers.iter().all(|it| it.status == 200), "no request noticed");
    assert!(filled.edge.node.metric("service_restarts_total{service=\"edge\"}") >= 1.0);
}

#[test]
fn an_origin_is_asked_no_more_often_and_no_more_at_once_than_it_bears() {
    let busy = Arc::new((AtomicUsize::new(0), AtomicUsize::new(0)));
    let seen = busy.clone();
    let filled = Filled::start("", &format!("{PRIVATE}\nmax_inflight = 2"), move |_| {
        let now = seen.0.fetch_add(1, Ordering::SeqCst) + 1;
        seen.1.fetch_max(now, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(60));
        seen.0.fetch_sub(1, Ordering::SeqCst);
        ok("", b"x")
    });
    let address = filled.edge.address();
    let mut asked = Vec::new();
    for n in 0..8 {
        let address = address.clone();
        asked.push(std::thread::spawn(move || {
            request(&address, "GET", &format!("/edge/assets/img/{n}"), &[], b"").unwrap().status
        }));
    }
    assert!(asked.into_iter().all(|it| it.join().unwrap() == 200));
    assert!(busy.1.load(Ordering::SeqCst) <= 2);
    let limited = Filled::start("", &format!("{PRIVATE}\nrps = 1"), |_| ok("", b"x"));
    // So many at once that not all of them can have their turn before they are given up.
    let mut clients: Vec<Client> =
        (0..60).map(|_| Client::connect(&limited.edge.address()).unwrap()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.send(format!("GET /edge/assets/img/{n} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes()).unwrap();
    }
    let statuses: Vec<u16> =
        clients.iter_mut().map(|client| client.read_answer("GET").unwrap().status).collect();
    assert!(statuses.contains(&200) && statuses.contains(&429), "{statuses:?}");
    assert!(limited.edge.refusals("rate_limit") >= 1.0);
}

#[test]
fn objects_are_filled_into_memory_and_larger_ones_refused() {
    let (certs, folder) = certificates();
    let origin = start_tls(&folder, |path| match path {
        "/small" => ok("", b"small"),
        "/chunked" => Script::Chunks(vec![vec![1; 100_000]; 3], Duration::ZERO),
        _ => ok("", &vec![1; 300_000]),
    });
    let tables = format!(
        "[edge.cas]\nbackend = \"memory\"\nmemory_bytes = \"200KiB\"\n{}",
        table(&origin, &folder, PRIVATE)
    );
    let node = Node::start(&["edge"], &config("", &tables));
    let get = |path: &str| request(&node.address("edge", "http"), "GET", path, &[], b"").unwrap();
    assert_eq!(get("/edge/assets/img/small").text(), "small");
    assert_eq!(get("/edge/assets/img/small").header("cache-status"), Some("ron-edge; hit"));
    // Known by its length, or only when it comes.
    for path in ["large", "chunked"] {
        let large = get(&format!("/edge/assets/img/{path}"));
        assert_eq!((large.status, large.reason()), (503, "amnesia"), "{path}");
    }
    assert!(node.metric("edge_rejects_total{reason=\"amnesia\"}") >= 2.0);
    assert_eq!(get("/edge/assets/img/small").text(), "small", "what was there still is");
    drop(certs);
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};
    let mut child = Command::new("gzip")
        .arg("-c")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("gzip is everywhere");
    let (mut input, bytes) = (child.stdin.take().unwrap(), bytes.to_vec());
    let writing = std::thread::spawn(move || input.write_all(&bytes));
    let mut out = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    writing.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success());
    out
}

/// The hash that an address is made of.
fn blake3(bytes: &[u8]) -> String {
    ::blake3::hash(bytes).to_hex().to_string()
}

#[test]
fn digests_of_filled_objects_are_right() {
    let filled = Filled::start("", PRIVATE, |_| ok("", b"bytes"));
    let answer = filled.get("/edge/assets/img/x");
    let digest: [u8; 32] = Sha256::digest(b"bytes").into();
    let stated = answer.header("repr-digest").unwrap().to_owned();
    use base64::Engine as _;
    assert_eq!(stated, format!("sha-256=:{}:", base64::engine::general_purpose::STANDARD.encode(digest)));
}
