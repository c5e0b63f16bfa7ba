//! What is spoken to upstreams, which of their servers is asked, and what passes through.

use ron_testkit::{Client, Node, Origin, Script, get, request};
use std::io::{Read as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// A gateway in front of these servers; `gateway` goes into its table, `keys` into the upstream's.
fn config(servers: &[String], gateway: &str, keys: &str) -> String {
    crate::config("X", gateway, "").replace("servers = [\"X\"]", &format!("servers = {servers:?}\n{keys}"))
}

fn start(servers: &[String], gateway: &str, keys: &str) -> Node {
    Node::start(&["gateway"], &config(servers, gateway, keys))
}

/// Development certificates, and a node that serves an origin over TLS with them.
fn tls_node(origin: &Origin, more: &str) -> (tempfile::TempDir, Node) {
    let dir = tempfile::tempdir().unwrap();
    ron_testkit::ron(&["init", "certs", "--tls"], dir.path());
    let at = dir.path().join("certs/tls").display().to_string();
    let more = more.replace("AT", &at);
    let table = format!(
        "tls = {{ listen = \"127.0.0.1:0\", cert = \"{at}/server.pem\", key = \"{at}/server.key\"{more} }}"
    );
    let node = start(&[origin.url()], &table, "");
    (dir, node)
}

#[test]
fn https_upstreams_are_verified_and_spoken_to_in_http2() {
    let origin = Origin::start(|path| match path {
        "/upgrade" => Script::Upgrade,
        _ => Script::Echo,
    });
    let (dir, back) = tls_node(&origin, "");
    let server = [format!("https://{}", back.address("gateway", "https"))];
    let at = dir.path().join("certs/tls").display().to_string();
    let front = start(&server, "", &format!("tls = {{ ca = \"{at}/ca.pem\" }}"));
    let answer = request(&front.gateway(), "POST", "/x", &[("X-A", "1")], b"body").unwrap();
    let text = answer.text();
    assert_eq!(answer.status, 200, "{text} {}", front.log());
    // The second gateway was asked in HTTP/2 and says so.
    assert!(text.contains("via: 1.1 ron, 2 ron\r\n") && text.contains("x-a: 1\r\n"), "{text}");
    assert!(text.contains("content-length: 4\r\n") && text.ends_with("body"), "{text}");
    for _ in 0..20 {
        assert_eq!(get(&front.gateway(), "/").status, 200);
    }
    assert_eq!(back.metric("connections_open{service=\"gateway\"}"), 1.0, "one connection carries them all");
    // What changes the protocol goes over HTTP/1.1.
    let mut client = Client::connect(&front.gateway()).unwrap();
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "echo")];
    assert_eq!(client.request("GET", "/upgrade", &upgrade, b"").unwrap().status, 101);
    assert_eq!(client.read_exact(5).unwrap(), b"hello");
    let distrustful = start(&server, "", "");
    let refused = get(&distrustful.gateway(), "/");
    assert_eq!(
        (refused.status, refused.reason()),
        (502, "upstream_error"),
        "the system does not know this CA"
    );
    assert!(distrustful.log().contains("UnknownIssuer"), "{}", distrustful.log());
    let system = [("SSL_CERT_FILE", &*format!("{at}/ca.pem"))];
    let trusting = Node::start_with(&["gateway"], &config(&server, "", ""), &system);
    assert_eq!(get(&trusting.gateway(), "/").status, 200, "now it does");
    let misnamed =
        start(&server, "", &format!("tls = {{ ca = \"{at}/ca.pem\", server_name = \"other.test\" }}"));
    assert_eq!(get(&misnamed.gateway(), "/").status, 502, "the certificate is for another name");
}

#[test]
fn a_client_certificate_is_shown_to_upstreams_that_ask_for_one() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let (dir, back) = tls_node(&origin, ", client_ca = \"AT/ca.pem\"");
    let server = [format!("https://{}", back.address("gateway", "https"))];
    let at = dir.path().join("certs/tls").display().to_string();
    let with =
        format!("tls = {{ ca = \"{at}/ca.pem\", cert = \"{at}/client.pem\", key = \"{at}/client.key\" }}");
    assert_eq!(get(&start(&server, "", &with).gateway(), "/").text(), "hi");
    assert_eq!(
        get(&start(&server, "", &format!("tls = {{ ca = \"{at}/ca.pem\" }}")).gateway(), "/").status,
        502
    );
    let dir = tempfile::tempdir().unwrap();
    for (keys, expected) in [
        ("tls = { ca = \"none.pem\" }", "none.pem"),
        ("tls = { cert = \"only.pem\" }", "cert and key must both be given"),
    ] {
        std::fs::write(dir.path().join("c.toml"), config(&server, "", keys)).unwrap();
        let output = ron_testkit::ron(&["config", "check", "c.toml"], dir.path());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("gateway.upstreams[0].tls") && said.contains(expected), "{said}");
    }
}

#[test]
fn trailers_pass_in_both_directions_over_http1_and_http2() {
    let origin = Origin::start(|path| match path {
        "/grpc" => Script::Raw(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/grpc\r\nTransfer-Encoding: chunked\r\n\r\n\
              2\r\nhi\r\n0\r\ngrpc-status: 0\r\nx-forwarded-for: 6.6.6.6\r\n\r\n"
                .to_vec(),
        ),
        _ => Script::Echo,
    });
    let back = start(&[origin.url()], "", "");
    let front = start(&[format!("h2c://{}", back.gateway())], "", "");
    for node in [&back, &front] {
        let mut client = Client::connect(&node.gateway()).unwrap();
        client.send(b"GET /grpc HTTP/1.1\r\nHost: a\r\nTE: trailers\r\ngrpc-timeout: 5S\r\nConnection: close\r\n\r\n").unwrap();
        let text = String::from_utf8(client.read_to_end().unwrap()).unwrap();
        assert!(text.ends_with("0\r\ngrpc-status: 0\r\n\r\n"), "{text}");
    }
    let seen = origin.last();
    assert!(
        seen.contains("te: trailers\r\n") && seen.contains("grpc-timeout: 4") && seen.contains("m\r\n"),
        "{seen}"
    );
    let chunks = b"POST /up HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n5\r\nhello\r\n0\r\nx-sum: 9\r\n\r\n";
    let mut client = Client::connect(&front.gateway()).unwrap();
    client.send(chunks).unwrap();
    assert_eq!(client.read_answer("POST").unwrap().status, 200);
    assert_eq!(origin.bodies.lock().unwrap().last().unwrap(), b"hello");
    assert_eq!(*origin.trailers.lock().unwrap(), ["x-sum: 9"]);
    let curl = std::process::Command::new("curl")
        .args(["-sv", "--http2-prior-knowledge", &format!("http://{}/grpc", front.gateway())])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&curl.stderr);
    assert!(said.contains("grpc-status: 0"), "{said}");
    assert!(said.contains("via: 1.1 ron") && said.contains("via: 2 ron"), "each says what it got: {said}");
}

#[test]
fn many_calls_share_few_http2_connections_and_bodies_are_capped() {
    let origin = Origin::start(|path| match path {
        "/slow" => Script::After(Duration::from_millis(300)),
        _ => Script::Body(b"hi".to_vec()),
    });
    let back = start(&[origin.url()], "", "");
    let front = start(&[format!("h2c://{}", back.gateway())], "limits = { max_body_bytes = \"10KiB\" }", "");
    assert_eq!(get(&front.gateway(), "/").status, 200);
    let address = front.gateway();
    let slow: Vec<_> = (0..150)
        .map(|_| {
            let address = address.clone();
            std::thread::spawn(move || get(&address, "/slow").status)
        })
        .collect();
    front.eventually("they are under way", |front| {
        front.metric("inflight_requests{service=\"gateway\"}") > 100.0
    });
    let open = back.metric("connections_open{service=\"gateway\"}");
    assert!((1.0..=8.0).contains(&open), "{open}");
    for thread in slow {
        assert_eq!(thread.join().unwrap(), 200);
    }
    // A body that turns out to be too long is the client's fault, whatever is spoken behind.
    let mut client = Client::connect(&front.gateway()).unwrap();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n").unwrap();
    let chunk = [b"1000\r\n".to_vec(), vec![b'x'; 0x1000], b"\r\n".to_vec()].concat();
    for _ in 0..4 {
        client.send(&chunk).unwrap();
    }
    let refused = client.read_answer("POST").unwrap();
    assert_eq!((refused.status, refused.reason()), (413, "body_cap"));
    // A server that goes away takes its connection with it; the next call makes another.
    drop(back);
    assert_eq!(get(&front.gateway(), "/").status, 502);
}

#[test]
fn a_drain_ends_idle_http2_connections_to_upstreams() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let back = start(&[origin.url()], "", "");
    let mut front = start(&[format!("h2c://{}", back.gateway())], "", "");
    assert_eq!(get(&front.gateway(), "/").status, 200);
    let begun = Instant::now();
    assert_eq!(front.stop(), 0);
    assert!(
        begun.elapsed() < Duration::from_secs(2) && front.log().contains("\"stragglers\":0"),
        "{}",
        front.log()
    );
}

#[test]
fn upgraded_connections_are_tunnels_until_they_fall_silent() {
    let origin = Origin::start(|path| match path {
        "/upgrade" => Script::Upgrade,
        _ => Script::Echo,
    });
    let node = start(&[origin.url()], "idle_timeout = \"1s\"", "");
    let mut client = Client::connect(&node.gateway()).unwrap();
    // Bytes sent before the answer are the tunnel's.
    client
        .send(b"GET /upgrade HTTP/1.1\r\nHost: a\r\nConnection: keep-alive, Upgrade\r\nUpgrade: echo\r\n\r\nahead")
        .unwrap();
    let answer = client.read_answer("GET").unwrap();
    assert_eq!((answer.status, answer.header("upgrade")), (101, Some("echo")));
    assert_eq!(answer.header("connection"), Some("upgrade"));
    assert_eq!(client.read_exact(10).unwrap(), b"helloahead");
    let long = vec![b'z'; 300_000];
    client.send(&long).unwrap();
    assert_eq!(client.read_exact(long.len()).unwrap(), long);
    assert_eq!(node.metric("inflight_requests{service=\"gateway\"}"), 0.0, "a tunnel is no request");
    let begun = Instant::now();
    assert_eq!(client.read_to_end().unwrap(), b"", "silence ends it");
    assert!((900..3000).contains(&begun.elapsed().as_millis()), "{:?}", begun.elapsed());
    assert!(origin.last().contains("connection: upgrade\r\nupgrade: echo\r\n"), "{}", origin.last());
    // HTTP by another name does not slip past the gateway's rules, and nobody switches unasked.
    let sneaky = [("Connection", "Upgrade, HTTP2-Settings"), ("Upgrade", "h2c"), ("HTTP2-Settings", "AAAA")];
    let text = request(&node.gateway(), "GET", "/x", &sneaky, b"").unwrap().text();
    assert!(!text.contains("h2c") && !text.contains("http2-settings"), "{text}");
    assert_eq!(get(&node.gateway(), "/upgrade").status, 502);
}

#[test]
fn a_tunnel_whose_reader_sleeps_is_cut_and_a_drain_ends_the_others() {
    let origin = Origin::start(|_| Script::Upgrade);
    let mut node = start(&[origin.url()], "write_timeout = \"500ms\"", "");
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "echo")];
    let mut idle = Client::connect(&node.gateway()).unwrap();
    assert_eq!(idle.request("GET", "/", &upgrade, b"").unwrap().status, 101);
    let mut client = Client::connect(&node.gateway()).unwrap();
    assert_eq!(client.request("GET", "/", &upgrade, b"").unwrap().status, 101);
    // Whatever is sent comes back and is not read: at some point the way back is full.
    while client.send(&[0; 65536]).is_ok() {}
    let cut = "io_timeouts_total{service=\"gateway\",op=\"write\"}";
    node.eventually("the tunnel is cut", |node| node.metric(cut) == 1.0);
    assert_eq!(node.metric("connections_open{service=\"gateway\"}"), 1.0);
    assert_eq!(node.stop(), 0);
    assert!(idle.read_to_end().unwrap() == b"hello");
}

#[test]
fn early_hints_pass_to_clients_that_know_them() {
    let origin = Origin::start(|_| {
        Script::Raw(
            b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\nConnection: x-b\r\nX-B: 1\r\n\r\n\
              HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                .to_vec(),
        )
    });
    let node = start(&[origin.url()], "", "");
    let ask = |version: &str| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        client
            .send(format!("GET / HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n").as_bytes())
            .unwrap();
        String::from_utf8(client.read_to_end().unwrap()).unwrap()
    };
    let text = ask("1.1");
    let hints = "HTTP/1.1 103 Early Hints\r\nlink: </a.css>; rel=preload\r\n\r\nHTTP/1.1 200 OK\r\n";
    assert!(text.starts_with(hints) && text.ends_with("ok"), "{text}");
    assert!(ask("1.0").starts_with("HTTP/1.1 200 OK\r\n"), "HTTP/1.0 has none");
    let curl = std::process::Command::new("curl")
        .args(["-sS", "--http2-prior-knowledge", &format!("http://{}/", node.gateway())])
        .output()
        .unwrap();
    assert_eq!(curl.stdout, b"ok");
}

#[test]
fn what_is_for_the_gateway_itself_is_answered_by_it() {
    let origin = Origin::start(|_| Script::Echo);
    let node = start(&[origin.url()], "", "");
    let named = [("X-Corr-ID", "star-1")];
    let whole = request(&node.gateway(), "OPTIONS", "*", &named, b"").unwrap();
    assert_eq!((whole.status, whole.header("x-corr-id")), (204, Some("star-1")));
    assert!(whole.header("allow").unwrap().contains("GET"));
    let ask = |method: &str, hops: &str| {
        request(&node.gateway(), method, "/x", &[("Max-Forwards", hops)], b"").unwrap()
    };
    let (options, trace) = (ask("OPTIONS", "0"), ask("TRACE", "0"));
    assert_eq!((options.status, options.header("x-corr-id").is_some()), (204, true));
    assert_eq!(
        (trace.status, trace.reason(), trace.json()["code"].as_str()),
        (405, "method", Some("method"))
    );
    assert_eq!(trace.header("content-type"), Some("application/problem+json"));
    assert_eq!((trace.header("allow"), trace.header("x-corr-id").is_some()), (whole.header("allow"), true));
    assert_eq!(origin.seen.lock().unwrap().len(), 0);
    assert!(ask("OPTIONS", "3").text().contains("max-forwards: 2\r\n"));
    assert!(!ask("GET", "0").text().contains("max-forwards"), "it is for OPTIONS and TRACE only");
}

/// Two origins, each of which can be made ill.
fn pair() -> (Vec<Origin>, Vec<Arc<AtomicBool>>) {
    (0..2)
        .map(|number| {
            let ill = Arc::new(AtomicBool::new(false));
            let state = ill.clone();
            let origin = Origin::start(move |_| {
                if state.load(Ordering::SeqCst) {
                    Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec())
                } else {
                    Script::Body(vec![b'0' + number])
                }
            });
            (origin, ill)
        })
        .unzip()
}

fn urls(origins: &[Origin]) -> Vec<String> {
    origins.iter().map(Origin::url).collect()
}

#[test]
fn unhealthy_servers_get_no_requests_and_come_back() {
    let (origins, ill) = pair();
    let keys = "health = { path = \"/healthz\", interval = \"100ms\" }\nbalance = \"round_robin\"";
    let node = start(&urls(&origins), "", keys);
    let answers = |count: usize| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        (0..count).map(|_| client.request("GET", "/", &[], b"").unwrap()).collect::<Vec<_>>()
    };
    let told: String = answers(10).iter().map(ron_testkit::Answer::text).collect();
    assert!(told == "0101010101" || told == "1010101010", "{told}");
    node.eventually("they are checked", |_| {
        origins[0].seen.lock().unwrap().iter().any(|head| head.starts_with("GET /healthz "))
    });
    ill[0].store(true, Ordering::SeqCst);
    node.eventually("the ill one is out", |node| node.log().contains("fails its health checks"));
    assert!(answers(10).iter().all(|answer| answer.text() == "1"));
    let ready = get(&node.admin(), "/readyz");
    assert!(!ready.text().contains("upstream"), "the other one is enough: {}", ready.text());
    ill[1].store(true, Ordering::SeqCst);
    node.eventually("readiness says so", |node| {
        get(&node.admin(), "/readyz").text().contains("gateway.upstream.o")
    });
    let ready = get(&node.admin(), "/readyz");
    assert_eq!((ready.status, ready.json()["degraded"].as_bool()), (200, Some(true)));
    let refused = get(&node.gateway(), "/");
    assert_eq!((refused.status, refused.reason()), (503, "no_upstream"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(node.metric("rejected_total{service=\"gateway\",reason=\"no_upstream\"}"), 1.0);
    for state in &ill {
        state.store(false, Ordering::SeqCst);
    }
    node.eventually("all is well", |node| !get(&node.admin(), "/readyz").text().contains("upstream"));
    assert_eq!(get(&node.gateway(), "/").status, 200);
}

#[test]
fn a_server_that_keeps_failing_is_left_out_without_any_check() {
    let (origins, ill) = pair();
    ill[0].store(true, Ordering::SeqCst);
    let keys = "balance = \"p2c\"\nretry = { tries = 1 }\nbreaker = { failures = 5, error_rate = 1.0, open = \"2s\" }";
    let node = start(&urls(&origins), "", keys);
    let mut client = Client::connect(&node.gateway()).unwrap();
    node.eventually("it is left out", |node| {
        let _either = client.request("GET", "/", &[], b"").unwrap();
        node.log().contains("is left out for a while")
    });
    let before = origins[0].seen.lock().unwrap().len();
    for _ in 0..20 {
        assert_eq!(client.request("GET", "/", &[], b"").unwrap().text(), "1");
    }
    assert_eq!(origins[0].seen.lock().unwrap().len(), before);
    ill[0].store(false, Ordering::SeqCst);
    node.eventually("it is asked again", |_| client.request("GET", "/", &[], b"").unwrap().text() == "0");
}

#[test]
fn the_faster_server_gets_more_and_the_metric_tells_how_fast() {
    // So slow that no hiccup of the machine makes the other one look alike.
    let slow = Origin::start(|_| Script::After(Duration::from_millis(400)));
    let fast = Origin::start(|_| Script::Body(b"fast".to_vec()));
    let node = start(&[slow.url(), fast.url()], "", "");
    let mut client = Client::connect(&node.gateway()).unwrap();
    for _ in 0..60 {
        client.request("GET", "/", &[], b"").unwrap();
    }
    let seen = (slow.seen.lock().unwrap().len(), fast.seen.lock().unwrap().len());
    assert!(seen.0 <= 3 && seen.1 >= 57, "{seen:?}");
    assert_eq!(node.metric("downstream_latency_seconds_count{upstream=\"o\"}"), 60.0);
}

#[test]
fn a_streamed_failure_is_tried_again_on_another_server() {
    let calls = Arc::new(AtomicUsize::new(0));
    let count = calls.clone();
    let failing = Origin::start(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Script::Raw(b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n".to_vec())
    });
    let good = Origin::start(|_| Script::Body(b"yes".to_vec()));
    let node =
        start(&[failing.url(), good.url()], "", "balance = \"round_robin\"\nbreaker = { failures = 100 }");
    for _ in 0..6 {
        assert_eq!(get(&node.gateway(), "/").text(), "yes");
    }
    let tried = calls.load(Ordering::SeqCst);
    assert!(tried > 0, "the failing one was never asked");
    let retries = node.metric("backoff_retries_total{service=\"gateway\",op=\"rpc\"}");
    #[expect(clippy::cast_precision_loss, reason = "a handful")]
    let expected = tried as f64;
    assert_eq!(retries, expected);
}

#[test]
fn a_slow_upload_is_not_held_against_the_upstream() {
    let origin = Origin::start(|_| Script::Body(b"yes".to_vec()));
    let node = Node::start(
        &["gateway"],
        &format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nlisten = \"127.0.0.1:0\"\n\
             [[gateway.upstreams]]\nname = \"u\"\nservers = [\"{}\"]\nbreaker = {{ failures = 2 }}\n[[gateway.routes]]\npath = \"/\"\nupstream = \"u\"\ntimeout = \"200ms\"\n",
            origin.url()
        ),
    );
    for framing in ["Content-Length: 10", "Transfer-Encoding: chunked"].repeat(2) {
        let mut slow = Client::connect(&node.gateway()).unwrap();
        slow.send(format!("POST / HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n5\r\nab").as_bytes()).unwrap();
        let answer = slow.read_answer("POST").unwrap();
        assert_eq!((answer.status, answer.reason()), (504, "deadline"));
        assert!(answer.text().contains("body did not arrive"), "{}", answer.text());
    }
    assert_eq!(node.metric("breaker_state{upstream=\"u\"}"), 0.0);
    assert_eq!(get(&node.gateway(), "/").text(), "yes");
}

/// Passes connections on to `target`; those open when it is told to freeze stay open and pass nothing any more.
fn freezable(target: String) -> (String, Arc<AtomicBool>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, freeze) = (listener.local_addr().unwrap().to_string(), Arc::new(AtomicBool::new(false)));
    let told = freeze.clone();
    std::thread::spawn(move || {
        for inward in listener.incoming().flatten() {
            let outward = std::net::TcpStream::connect(&target).unwrap();
            let late = told.load(Ordering::SeqCst);
            let pairs = [(inward.try_clone().unwrap(), outward.try_clone().unwrap()), (outward, inward)];
            for (mut from, mut to) in pairs {
                let told = told.clone();
                std::thread::spawn(move || {
                    let mut buffer = [0; 4096];
                    while let Ok(read @ 1..) = from.read(&mut buffer) {
                        while told.load(Ordering::SeqCst) && !late {
                            std::thread::sleep(Duration::from_millis(20));
                        }
                        if to.write_all(&buffer[..read]).is_err() {
                            break;
                        }
                    }
                });
            }
        }
    });
    (address, freeze)
}

#[test]
fn a_dead_http2_connection_is_not_used_again_after_one_request_found_it_silent() {
    let origin = Origin::start(|_| Script::Body(b"yes".to_vec()));
    let back = start(&[origin.url()], "", "");
    let (relay, freeze) = freezable(back.gateway());
    let front = start(&[format!("h2c://{relay}")], "", "");
    assert_eq!(get(&front.gateway(), "/").text(), "yes");
    freeze.store(true, Ordering::SeqCst);
    let mut client = Client::connect(&front.gateway()).unwrap();
    let timeout = [("Request-Timeout", "1200ms")];
    assert_eq!(client.request("GET", "/", &timeout, b"").unwrap().reason(), "deadline");
    assert_eq!(client.request("GET", "/", &timeout, b"").unwrap().text(), "yes", "over a new connection");
}

#[test]
fn a_host_that_http2_cannot_say_costs_a_request_neither_path_nor_query() {
    let origin = Origin::start(|_| Script::Echo);
    let back = start(&[origin.url()], "", "");
    let front = start(&[format!("h2c://{}", back.gateway())], "", "");
    for host in ["a%41.example", "100%", "a.example:80", ""] {
        let mut client = Client::connect(&front.gateway()).unwrap();
        let head = format!("GET /p/q?x=1&y=%2F HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n");
        client.send(head.as_bytes()).unwrap();
        let answer = client.read_answer("GET").unwrap();
        assert_eq!(answer.status, 200, "{host:?}: {}", answer.text());
        assert!(answer.text().starts_with("GET /p/q?x=1&y=%2F HTTP/1.1\r\n"), "{host:?}: {}", answer.text());
    }
}

/// A busy machine may need long for a handshake, and one more connection would be counted.
const PATIENT: &str = "connect_timeout = \"10s\"";

#[test]
fn connections_made_under_former_tls_settings_take_no_further_request() {
    let origin = Origin::start(|path| match path {
        "/slow" => Script::After(Duration::from_millis(1500)),
        _ => Script::Body(b"hi".to_vec()),
    });
    let (dir, back) = tls_node(&origin, "");
    ron_testkit::ron(&["init", "other", "--tls"], dir.path());
    let server = [format!("https://{}", back.address("gateway", "https"))];
    let trusting = |ca: &str| {
        let ca = dir.path().join(ca).join("tls/ca.pem");
        config(&server, "", &format!("{PATIENT}\ntls = {{ ca = \"{}\" }}", ca.display()))
    };
    // Asked to change the protocol, the server is spoken to in HTTP/1.1; it does not, and the connection is kept.
    let upgrade = [("Connection", "Upgrade"), ("Upgrade", "echo")];
    for (protocol, headers) in [("HTTP/2", &[][..]), ("HTTP/1.1", &upgrade)] {
        let front = Node::start(&["gateway"], &trusting("certs"));
        let trust = |ca: &str| {
            front.write_config(&trusting(ca));
            assert_eq!(front.admin_post("/admin/reload", "").status, 200);
        };
        let ask = |path: &str| request(&front.gateway(), "GET", path, headers, b"").unwrap();
        let open = |node: &Node| node.metric("connections_open{service=\"gateway\"}");
        assert_eq!(
            (ask("/").status, ask("/").status, open(&back)),
            (200, 200, 1.0),
            "{protocol}: it is kept"
        );
        trust("other");
        assert_eq!(
            ask("/").reason(),
            "upstream_error",
            "{protocol}: the server's CA is not trusted any more"
        );
        trust("certs");
        // One that is busy meanwhile may end what it does, and no more.
        let mut slow = Client::connect(&front.gateway()).unwrap();
        let fields: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        slow.send(format!("GET /slow HTTP/1.1\r\nHost: a\r\n{fields}\r\n").as_bytes()).unwrap();
        front.eventually("it is under way", |_| origin.last().starts_with("GET /slow "));
        trust("other");
        assert_eq!(slow.read_answer("GET").unwrap().text(), "slow");
        assert_eq!(ask("/").reason(), "upstream_error", "{protocol}: it came back after the change");
        front.eventually("none is left", |_| open(&back) == 0.0);
    }
}

#[test]
fn a_reload_that_does_not_concern_tls_keeps_connections() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let (dir, back) = tls_node(&origin, "");
    let server = [format!("https://{}", back.address("gateway", "https"))];
    let ca = dir.path().join("certs/tls/ca.pem");
    let text = |gateway: &str| {
        config(&server, gateway, &format!("{PATIENT}\ntls = {{ ca = \"{}\" }}", ca.display()))
    };
    let front = Node::start(&["gateway"], &text(""));
    for gateway in ["", "max_inflight = 100", "max_inflight = 101"] {
        front.write_config(&text(gateway));
        assert_eq!(front.admin_post("/admin/reload", "").status, 200);
        assert_eq!(get(&front.gateway(), "/").status, 200);
    }
    assert_eq!(back.metric("tasks_spawned_total{service=\"gateway\",kind=\"conn\"}"), 1.0);
    // Another certificate of the same name in the same file is a change.
    ron_testkit::ron(&["init", "other", "--tls"], dir.path());
    std::fs::copy(dir.path().join("other/tls/ca.pem"), &ca).unwrap();
    front.eventually("it is not trusted any more", |front| get(&front.gateway(), "/").status == 502);
}

#[test]
fn clients_that_do_not_read_hold_up_nobody_else_on_their_http2_connection() {
    let origin = Origin::start(|path| match path {
        "/endless" => Script::Body(vec![b'x'; 32 << 20]),
        _ => Script::Body(vec![b'y'; 200_000]),
    });
    let patient = "write_timeout = \"60s\"\nidle_timeout = \"60s\"";
    let back = start(&[origin.url()], patient, "");
    let front = start(&[format!("h2c://{}", back.gateway())], patient, "");
    assert_eq!(get(&front.gateway(), "/").status, 200);
    let sleepers: Vec<Client> = (0..12)
        .map(|_| {
            let mut client = Client::connect(&front.gateway()).unwrap();
            client.send(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
            client
        })
        .collect();
    let received = |node: &Node| node.metric("buffered_bytes{tenant=\"other\"}");
    let mut before = -1.0;
    front.eventually("nothing moves any more", |front| {
        let now = received(front) + received(&back);
        std::thread::sleep(Duration::from_millis(200));
        std::mem::replace(&mut before, now) == now && now > 0.0
    });
    assert_eq!(back.metric("connections_open{service=\"gateway\"}"), 1.0, "they share one connection");
    for _ in 0..10 {
        let begun = Instant::now();
        let answer = request(&front.gateway(), "GET", "/", &[("Request-Timeout", "5s")], b"").unwrap();
        assert_eq!((answer.status, answer.body.len()), (200, 200_000), "after {:?}", begun.elapsed());
    }
    drop(sleepers);
}
