//! What passes through the gateway, and how.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, request};
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn requests_and_answers_pass_with_their_bodies_and_ids() {
    let origin =
        Origin::start(|path| if path == "/x" { Script::Body(b"hello".to_vec()) } else { Script::Echo });
    let node = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    let answer = request(&node.gateway(), "GET", "/x", &[("X-Corr-ID", "abc-1")], b"").unwrap();
    assert_eq!(
        (answer.status, answer.text(), answer.header("x-corr-id")),
        (200, "hello".into(), Some("abc-1"))
    );
    assert_eq!(answer.header("via"), Some("1.1 ron"));
    assert!(origin.last().contains("x-corr-id: abc-1\r\n") && origin.last().contains("request-timeout: "));
    let echoed = request(&node.gateway(), "POST", "/e", &[("Expect", "100-continue")], b"body").unwrap();
    assert!(echoed.text().ends_with("\r\n\r\nbody"), "{}", echoed.text());
    assert!(!echoed.text().to_ascii_lowercase().contains("expect"), "an expectation ends at the gateway");
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"POST /e HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n").unwrap();
    assert!(client.read_answer("POST").unwrap().text().ends_with("abcde"));
    assert_eq!(client.request("HEAD", "/x", &[], b"").unwrap().header("content-length"), Some("5"));
    assert_eq!(
        node.metric("http_requests_total{service=\"gateway\",route=\"/*\",method=\"GET\",status=\"200\"}"),
        1.0
    );
}

#[test]
fn streams_flow_as_they_come_and_connections_are_kept() {
    let chunks = vec![b"tick\n".to_vec(); 5];
    let origin = Origin::start(move |path| match path {
        "/ticks" => Script::Chunks(chunks.clone(), Duration::from_millis(100)),
        _ => Script::Body(vec![b'z'; 3 << 20]),
    });
    let node = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    let begun = Instant::now();
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"GET /ticks HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    let answer = client.read_answer("GET").unwrap();
    assert_eq!(answer.text(), "tick\n".repeat(5));
    assert!(begun.elapsed() >= Duration::from_millis(400));
    for _ in 0..20 {
        assert_eq!(client.request("GET", "/big", &[], b"").unwrap().body.len(), 3 << 20);
    }
    assert_eq!(
        origin.connections.load(std::sync::atomic::Ordering::SeqCst),
        1,
        "one kept connection served all"
    );
}

#[test]
fn an_upstream_that_fails_is_answered_for() {
    let origin = Origin::start(|path| match path {
        "/garbage" => Script::Raw(b"not http at all\r\n\r\n".to_vec()),
        "/both" => Script::Raw(
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\nx".to_vec(),
        ),
        "/nothing" => Script::Raw(Vec::new()),
        "/switch" => Script::Raw(b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\n\r\n".to_vec()),
        "/reason" => Script::Raw(
            b"HTTP/1.1 503 Busy\r\nX-Reason: mine\r\nRetry-After: 9\r\nContent-Length: 0\r\n\r\n".to_vec(),
        ),
        "/short" => Script::Raw(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc".to_vec()),
        _ => Script::Silence,
    });
    let gone = "[[gateway.upstreams]]\nname = \"gone\"\nservers = [\"http://127.0.0.1:1\"]\nconnect_timeout = \"300ms\"\n[[gateway.routes]]\npath = \"/gone\"\nupstream = \"gone\"";
    let patient = "name = \"o\"\nretry = { tries = 1 }\nbreaker = { failures = 100 }\n";
    let node = Node::start(&["gateway"], &config(&origin.url(), "", gone).replace("name = \"o\"\n", patient));
    for path in ["/garbage", "/both", "/nothing", "/gone", "/switch"] {
        let answer = get(&node.gateway(), path);
        assert_eq!((answer.status, answer.reason()), (502, "upstream_error"), "{path}");
        assert!(!answer.text().contains("127.0.0.1"), "nothing internal leaks: {}", answer.text());
    }
    let passed = get(&node.gateway(), "/reason");
    assert_eq!((passed.status, passed.reason(), passed.header("retry-after")), (503, "", Some("9")));
    assert!(
        request(&node.gateway(), "GET", "/short", &[], b"").is_err(),
        "a broken body is cut, not completed"
    );
    assert_eq!(node.metric("rejected_total{service=\"gateway\",reason=\"upstream_error\"}"), 5.0);
}

#[test]
fn a_server_that_is_down_costs_no_request_while_another_is_up() {
    let origin = Origin::start(|_| Script::Body(b"up".to_vec()));
    let servers = format!("http://127.0.0.1:1\", \"{}", origin.url());
    let node = Node::start(&["gateway"], &config(&servers, "", ""));
    for _ in 0..10 {
        assert_eq!(get(&node.gateway(), "/x").text(), "up");
    }
}

#[test]
fn a_connect_that_hangs_ends_at_its_timeout() {
    // A listener whose backlog is full accepts no more: connects to it hang.
    let full = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = full.local_addr().unwrap();
    let connect = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50));
    let _fillers: Vec<_> = std::iter::from_fn(|| connect().ok()).take(10_000).collect();
    let upstream = format!(
        "[[gateway.upstreams]]\nname = \"full\"\nservers = [\"http://{address}\"]\nconnect_timeout = \"200ms\"\nretry = {{ tries = 1 }}\n[[gateway.routes]]\npath = \"/full\"\nupstream = \"full\""
    );
    let origin = Origin::start(|_| Script::Echo);
    let node = Node::start(&["gateway"], &config(&origin.url(), "", &upstream));
    let begun = Instant::now();
    assert_eq!(get(&node.gateway(), "/full").reason(), "upstream_error");
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert_eq!(node.metric("io_timeouts_total{service=\"gateway\",op=\"connect\"}"), 1.0);
}

#[test]
fn deadlines_are_kept_and_passed_on() {
    let origin = Origin::start(|_| Script::After(Duration::from_secs(3)));
    let routes = "timeout = \"700ms\"\n[[gateway.routes]]\npath = \"/default\"\nupstream = \"o\"";
    let node = Node::start(&["gateway"], &config(&origin.url(), "request_timeout = \"900ms\"", routes));
    let timed = |path: &str, headers: &[(&str, &str)], expected: u64| {
        let begun = Instant::now();
        let answer = request(&node.gateway(), "GET", path, headers, b"").unwrap();
        assert_eq!((answer.status, answer.reason()), (504, "deadline"), "{path}");
        let elapsed = begun.elapsed().as_millis();
        let range = u128::from(expected)..u128::from(expected + expected / 20 + 120);
        assert!(range.contains(&elapsed), "{path}: {elapsed} ms, expected {expected}");
    };
    timed("/route", &[], 700);
    timed("/default", &[], 900);
    timed("/route", &[("Request-Timeout", "300ms")], 300);
    timed("/route", &[("grpc-timeout", "250m")], 250);
    let soon = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() + 400;
    timed("/route", &[("Deadline", &soon.to_string())], 380);
    let told: Vec<u64> = origin
        .seen
        .lock()
        .unwrap()
        .iter()
        .filter_map(|head| {
            head.lines()
                .find_map(|line| line.strip_prefix("request-timeout: ")?.strip_suffix("ms")?.parse().ok())
        })
        .collect();
    assert!(told[2] <= 300 && told[2] > 250, "{told:?}");
    assert_eq!(
        request(&node.gateway(), "GET", "/x", &[("Request-Timeout", "soon")], b"").unwrap().reason(),
        "malformed"
    );
    assert_eq!(node.metric("io_timeouts_total{service=\"gateway\",op=\"rpc\"}"), 5.0);
}

#[test]
fn routes_choose_by_host_path_and_method() {
    let (first, second) =
        (Origin::start(|_| Script::Echo), Origin::start(|_| Script::Body(b"second".to_vec())));
    let rest = format!(
        "[[gateway.upstreams]]\nname = \"s\"\nservers = [\"{}\"]\n\
         [[gateway.routes]]\npath = \"/api/*\"\nhosts = [\"b.org\"]\nupstream = \"s\"\n\
         [[gateway.routes]]\npath = \"/only/*\"\nmethods = [\"POST\"]\nupstream = \"s\"\nstrip_prefix = \"/only\"",
        second.url()
    );
    let node = Node::start(&["gateway"], &config(&first.url(), "", &rest));
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"GET /api/x HTTP/1.1\r\nHost: B.org:99\r\n\r\n").unwrap();
    assert_eq!(client.read_answer("GET").unwrap().text(), "second");
    assert!(get(&node.gateway(), "/api/x").text().starts_with("GET /api/x "));
    let refused = get(&node.gateway(), "/only/x");
    assert_eq!((refused.status, refused.reason(), refused.header("allow")), (405, "method", Some("POST")));
    request(&node.gateway(), "POST", "/only/x?q=1", &[], b"").unwrap();
    assert!(second.last().starts_with("POST /x?q=1 "), "{}", second.last());
    request(&node.gateway(), "POST", "/%6fnly/%78%2F?q=%31", &[], b"").unwrap();
    assert!(
        second.last().starts_with("POST /x%2F?q=%31 "),
        "a prefix is one in any spelling: {}",
        second.last()
    );
    assert_eq!(get(&node.gateway(), "/a/../b").reason(), "malformed");
    assert_eq!(request(&node.gateway(), "CONNECT", "/x", &[], b"").unwrap().status, 501);
    let none =
        Node::start(&["gateway"], &config(&first.url(), "", "").replace("path = \"/*\"", "path = \"/a\""));
    assert_eq!((get(&none.gateway(), "/b").status, get(&none.gateway(), "/b").reason()), (404, "no_route"));
}

#[test]
fn forwarding_headers_are_rebuilt_and_trusted_proxies_believed() {
    let origin = Origin::start(|_| Script::Echo);
    let forged = [("X-Forwarded-For", "6.6.6.6"), ("Connection", "X-Hop"), ("X-Hop", "1")];
    let node = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    let seen = request(&node.gateway(), "GET", "/", &forged, b"").unwrap().text();
    assert!(seen.contains("x-forwarded-for: 127.0.0.1\r\n") && !seen.contains("x-hop"), "{seen}");
    let node = Node::start(
        &["gateway"],
        &config(&origin.url(), "trusted_proxies = [\"127.0.0.0/8\"]\nproxy_protocol = true", ""),
    );
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"PROXY TCP4 192.0.2.9 1.1.1.1 4000 80\r\nGET / HTTP/1.1\r\nHost: a\r\nX-Forwarded-For: 6.6.6.6\r\n\r\n").unwrap();
    let seen = client.read_answer("GET").unwrap().text();
    assert!(seen.contains("192.0.2.9"), "{seen}");
}

#[test]
fn unix_sockets_serve_and_check_the_user() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let ask = |node: &Node| {
        let path = node.dir.path().join("g.sock");
        let output = Command::new("curl")
            .args(["-s", "-w", "%{http_code}", "--unix-socket"])
            .arg(path)
            .arg("http://x/")
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let node = Node::start(&["gateway"], &config(&origin.url(), "uds = { path = \"g.sock\" }", ""));
    assert_eq!(ask(&node), "hi200");
    let strict = Node::start(
        &["gateway"],
        &config(&origin.url(), "uds = { path = \"g.sock\", allow_uids = [4242] }", ""),
    );
    assert!(ask(&strict).ends_with("403"), "{}", ask(&strict));
    assert!(strict.metric("rejected_total{service=\"gateway\",reason=\"forbidden\"}") >= 1.0);
    let chained = config(&format!("unix:{}", node.dir.path().join("g.sock").display()), "", "");
    let second = Node::start(&["gateway"], &chained);
    assert_eq!(get(&second.gateway(), "/").text(), "hi", "an upstream can be a socket");
}

#[test]
fn http2_and_tls_are_served_to_curl() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let dir = tempfile::tempdir().unwrap();
    ron_testkit::ron(&["init", "certs", "--tls"], dir.path());
    let tls = dir.path().join("certs/tls");
    let table = format!(
        "tls = {{ listen = \"127.0.0.1:0\", cert = \"{0}/server.pem\", key = \"{0}/server.key\", min = \"1.2\", pq = \"hybrid\" }}",
        tls.display()
    );
    let node = Node::start(&["gateway"], &config(&origin.url(), &table, ""));
    let https = node.address("gateway", "https");
    let curl = |args: &[&str]| {
        let ca = tls.join("ca.pem");
        let output = Command::new("curl")
            .args(["-sS", "-w", " %{http_version}", "--cacert"])
            .arg(ca)
            .args(args)
            .output()
            .unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    };
    let url = format!("https://{https}/");
    assert_eq!(curl(&[&url]), "hi 2");
    assert_eq!(curl(&["--http1.1", "--tls-max", "1.2", &url]), "hi 1.1");
    assert_eq!(curl(&["--http2-prior-knowledge", &format!("http://{}/", node.gateway())]), "hi 2");
    let strict = table
        .replace("min = \"1.2\"", "min = \"1.3\"")
        .replace(" }", &format!(", client_ca = \"{}/ca.pem\" }}", tls.display()));
    let known = "[[gateway.tenants]]\nid = \"certified\"\nmatch = { san = \"Client\" }\n";
    let mutual = Node::start(&["gateway"], &format!("{}\n{known}", config(&origin.url(), &strict, "")));
    let url = format!("https://{}/", mutual.address("gateway", "https"));
    assert!(!curl(&[&url]).starts_with("hi"), "no client certificate");
    let (cert, key) = (format!("{}/client.pem", tls.display()), format!("{}/client.key", tls.display()));
    assert_eq!(curl(&["--cert", &cert, "--key", &key, &url]), "hi 2");
    let served = mutual.metric("fq_served_cost_total{tenant=\"certified\"}");
    assert!(served > 0.0, "the name in its certificate says who it is");
    assert!(
        !curl(&["--cert", &cert, "--key", &key, "--tls-max", "1.2", &url]).starts_with("hi"),
        "TLS 1.2 is not spoken"
    );
}

#[test]
fn traces_are_continued_and_sent_to_the_collector() {
    let (origin, collector) =
        (Origin::start(|_| Script::Echo), Origin::start(|_| Script::Body(b"{}".to_vec())));
    let text = format!("[log]\notlp = \"{}\"\n{}", collector.url(), config(&origin.url(), "", ""));
    if !cfg!(feature = "otlp") {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("c.toml"), text).unwrap();
        let output = ron_testkit::ron(&["config", "check", "c.toml"], dir.path());
        assert!(String::from_utf8_lossy(&output.stderr).contains("--features otlp"));
        return;
    }
    let node = Node::start(&["gateway"], &text);
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let traceparent = format!("00-{trace}-{parent}-01");
    let echoed = request(&node.gateway(), "GET", "/t", &[("traceparent", &traceparent)], b"").unwrap().text();
    let passed = echoed.lines().find_map(|line| line.strip_prefix("traceparent: ")).unwrap().to_owned();
    assert!(passed.starts_with(&format!("00-{trace}-")) && !passed.contains(parent), "{passed}");
    node.eventually("the collector has the span", |_| !collector.bodies.lock().unwrap().is_empty());
    let body: serde_json::Value = serde_json::from_slice(&collector.bodies.lock().unwrap()[0]).unwrap();
    let span = &body["resourceSpans"][0]["scopeSpans"][0]["spans"][0];
    assert_eq!((&span["traceId"], &span["parentSpanId"]), (&trace.into(), &parent.into()));
    assert!(passed.contains(span["spanId"].as_str().unwrap()));
    assert!(collector.last().starts_with("POST /v1/traces "));
    assert!(span["attributes"].to_string().contains("/*"), "{span}");
}

#[test]
fn a_request_tried_again_on_another_connection_keeps_its_body() {
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let origin = Origin::start(move |path| match path {
        "/again" if calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0 => Script::HangUp,
        _ => Script::Echo,
    });
    let node = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.request("GET", "/first", &[], b"").unwrap();
    client.send(b"PUT /again HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\n").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    client.send(b"hello").unwrap();
    let answer = client.read_answer("PUT").unwrap();
    assert!(answer.status == 200 && answer.text().ends_with("\r\n\r\nhello"), "{}", answer.text());
    assert_eq!(origin.connections.load(std::sync::atomic::Ordering::SeqCst), 2);
    let expired = request(&node.gateway(), "GET", "/late", &[("Deadline", "1")], b"").unwrap();
    assert_eq!(expired.reason(), "deadline");
    assert!(!origin.last().contains("/late"), "what has expired is not executed");
}

#[test]
fn idempotent_requests_are_tried_again_within_their_budget() {
    let calls = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let seen = calls.clone();
    let unavailable = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".to_vec();
    let origin = Origin::start(move |path| match path {
        "/flaky" if seen.fetch_add(1, std::sync::atomic::Ordering::SeqCst) % 3 != 2 => Script::HangUp,
        "/down" => Script::Raw(unavailable.clone()),
        _ => Script::Body(b"hi".to_vec()),
    });
    let text = config(&origin.url(), "", "").replace(
        "name = \"o\"\n",
        "name = \"o\"\nretry = { tries = 3, base = \"10ms\", cap = \"20ms\", budget = 0.1 }\nbreaker = { failures = 1000, error_rate = 1.0, window = \"10s\", open = \"1s\" }\n",
    );
    let node = Node::start(&["gateway"], &text);
    assert_eq!(get(&node.gateway(), "/flaky").status, 200, "the third try");
    assert_eq!(node.metric("backoff_retries_total{service=\"gateway\",op=\"rpc\"}"), 2.0);
    assert_eq!(request(&node.gateway(), "POST", "/flaky", &[], b"x").unwrap().status, 502, "never a POST");
    let before = origin.seen.lock().unwrap().len();
    let mut client = Client::connect(&node.gateway()).unwrap();
    for _ in 0..200 {
        assert_eq!(client.request("GET", "/down", &[], b"").unwrap().status, 503);
    }
    let tries = origin.seen.lock().unwrap().len() - before;
    assert!(
        (200..=200 + 20 + 10).contains(&tries),
        "{tries} calls for 200 requests: a tenth more, and what was saved"
    );
}

#[test]
fn a_failing_upstream_is_left_alone_and_found_again() {
    let ill = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let state = ill.clone();
    let origin = Origin::start(move |_| {
        let ill = state.load(std::sync::atomic::Ordering::SeqCst);
        if ill {
            Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec())
        } else {
            Script::Body(b"hi".to_vec())
        }
    });
    let breaker = "name = \"o\"\nretry = { tries = 1 }\nbreaker = { failures = 3, open = \"500ms\" }\n";
    let node = Node::start(&["gateway"], &config(&origin.url(), "", "").replace("name = \"o\"\n", breaker));
    for _ in 0..3 {
        assert_eq!(get(&node.gateway(), "/").status, 500);
    }
    let spared = get(&node.gateway(), "/");
    assert_eq!(
        (spared.status, spared.reason(), spared.header("retry-after")),
        (503, "breaker_open", Some("1"))
    );
    assert_eq!((node.metric("breaker_state{upstream=\"o\"}"), origin.seen.lock().unwrap().len()), (2.0, 3));
    node.eventually("readiness says so", |node| {
        get(&node.admin(), "/readyz").text().contains("gateway.upstream.o")
    });
    node.eventually("somebody is there", |node| node.metric("breaker_state{upstream=\"o\"}") == 1.0);
    assert_eq!(origin.seen.lock().unwrap().len(), 3, "no request was risked for that");
    assert_eq!(get(&node.gateway(), "/").status, 500, "one goes to see");
    assert_eq!(get(&node.gateway(), "/").reason(), "breaker_open");
    ill.store(false, std::sync::atomic::Ordering::SeqCst);
    node.eventually("it is well again", |node| get(&node.gateway(), "/").status == 200);
    assert_eq!(node.metric("breaker_state{upstream=\"o\"}"), 0.0);
}
