//! Whose fault it is when a call fails, and what is done about it: counted, left out, sent again or not sent at all.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, request};
use std::time::{Duration, Instant};

/// A gateway in front of these servers; `keys` goes into the upstream's table, `route` into the route's.
fn start(servers: &[&Origin], keys: &str, route: &str) -> Node {
    let urls: Vec<String> = servers.iter().map(|origin| origin.url()).collect();
    let text = config("X", "", route).replace("servers = [\"X\"]", &format!("servers = {urls:?}\n{keys}"));
    Node::start(&["gateway"], &text)
}

fn count(origin: &Origin, path: &str) -> usize {
    let line = format!(" {path} HTTP/");
    origin.seen.lock().unwrap().iter().filter(|head| head.contains(&line)).count()
}

const LEFT_OUT: &str = "is left out for a while";

#[test]
fn a_clients_own_deadline_is_not_held_against_the_upstream_and_the_routes_is() {
    let silent = [Origin::start(|_| Script::Silence), Origin::start(|_| Script::Silence)];
    let keys = "balance = \"round_robin\"\nbreaker = { failures = 3 }";
    let node = start(&[&silent[0], &silent[1]], keys, "timeout = \"1s\"");
    let breaker = |node: &Node| node.metric("breaker_state{upstream=\"o\"}");
    let mut client = Client::connect(&node.gateway()).unwrap();
    // More than twenty that reach a server, so that the rate of failures would have its say as well.
    while silent.iter().map(|origin| count(origin, "/")).sum::<usize>() < 24 {
        let late = client.request("GET", "/", &[("Request-Timeout", "100ms")], b"").unwrap();
        assert_eq!((late.status, late.reason()), (504, "deadline"));
    }
    assert_eq!(breaker(&node), 0.0);
    assert!(!node.log().contains(LEFT_OUT), "{}", node.log());
    for _ in 0..3 {
        assert_eq!(client.request("GET", "/", &[], b"").unwrap().reason(), "deadline");
    }
    assert_eq!(client.request("GET", "/", &[], b"").unwrap().reason(), "breaker_open");
    assert_eq!(breaker(&node), 2.0);
}

#[test]
fn a_server_that_hangs_is_left_out_like_one_that_fails() {
    let (silent, good) =
        (Origin::start(|_| Script::Silence), Origin::start(|_| Script::Body(b"good".to_vec())));
    // In turn, so that the good one keeps the breaker shut.
    let keys = "balance = \"round_robin\"\nbreaker = { failures = 3, error_rate = 1.0, open = \"20s\" }";
    let node = start(&[&silent, &good], keys, "timeout = \"200ms\"");
    let mut client = Client::connect(&node.gateway()).unwrap();
    node.eventually("it is left out", |node| {
        let _either = client.request("GET", "/", &[], b"").unwrap();
        node.log().contains(LEFT_OUT)
    });
    assert_eq!(count(&silent, "/"), 3);
    for _ in 0..20 {
        assert_eq!(client.request("GET", "/", &[], b"").unwrap().text(), "good");
    }
    assert_eq!(count(&silent, "/"), 3);
}

#[test]
fn the_breaker_opens_on_the_rate_of_failures_within_its_window() {
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let origin = Origin::start(move |_| {
        // Two of five fail, never two in a row.
        match calls.fetch_add(1, std::sync::atomic::Ordering::SeqCst) % 5 {
            1 | 3 => Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec()),
            _ => Script::Body(b"hi".to_vec()),
        }
    });
    let failing = |keys: &str| {
        let node = start(&[&origin], &format!("retry = {{ tries = 1 }}\n{keys}"), "");
        let mut client = Client::connect(&node.gateway()).unwrap();
        let mut ask = || client.request("GET", "/", &[], b"").unwrap().reason() == "breaker_open";
        let answers = (0..60).take_while(|_| !ask()).count();
        (answers, node.metric("breaker_state{upstream=\"o\"}"))
    };
    let (answers, state) = failing("breaker = { failures = 2, error_rate = 0.4, window = \"30s\" }");
    assert!((20..=22).contains(&answers) && state == 2.0, "{answers} answers are a rate: {state}");
    assert_eq!(failing("breaker = { failures = 2, error_rate = 0.5, window = \"30s\" }"), (60, 0.0));
    // No window of ten milliseconds sees twenty answers of a server that takes one for each.
    let slow = Origin::start(|_| {
        std::thread::sleep(Duration::from_millis(1));
        Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec())
    });
    let node = start(&[&slow], "retry = { tries = 1 }\nbreaker = { failures = 1000, window = \"10ms\" }", "");
    for _ in 0..60 {
        assert_eq!(get(&node.gateway(), "/").status, 500);
    }
}

#[test]
fn an_upstream_that_falls_silent_within_its_answer_is_cut() {
    let origin = Origin::start(|_| Script::Chunks(vec![b"abc".to_vec(); 2], Duration::from_secs(20)));
    let back = start(&[&origin], "", "");
    let text = |server: &str| config(server, "idle_timeout = \"500ms\"", "");
    for server in [origin.url(), format!("h2c://{}", back.gateway())] {
        let node = Node::start(&["gateway"], &text(&server));
        let mut client = Client::connect(&node.gateway()).unwrap();
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        let begun = Instant::now();
        let got = client.read_to_end().unwrap();
        assert!(got.ends_with(b"3\r\nabc\r\n"), "cut, not ended: {}", String::from_utf8_lossy(&got));
        assert!((450..5000).contains(&begun.elapsed().as_millis()), "{server}: {:?}", begun.elapsed());
    }
}

#[test]
fn a_request_that_makes_its_server_close_is_sent_twice_at_most() {
    let origin = Origin::start(|path| match path {
        "/poison" => Script::HangUp,
        _ => Script::After(Duration::from_millis(300)),
    });
    let node = start(&[&origin], "retry = { tries = 1 }\nbreaker = { failures = 100 }", "");
    let keep = || {
        let mut asked: Vec<Client> = (0..6).map(|_| Client::connect(&node.gateway()).unwrap()).collect();
        for client in &mut asked {
            client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
        }
        for client in &mut asked {
            assert_eq!(client.read_answer("GET").unwrap().status, 200);
        }
    };
    keep();
    assert!(origin.connections.load(std::sync::atomic::Ordering::SeqCst) > 2, "several are kept");
    assert_eq!(get(&node.gateway(), "/poison").reason(), "upstream_error");
    assert_eq!(
        count(&origin, "/poison"),
        2,
        "once on a kept connection, which may have been stale, once on a new one"
    );
    keep();
    let once = request(&node.gateway(), "POST", "/poison", &[], b"x").unwrap();
    assert_eq!(
        (once.reason(), count(&origin, "/poison")),
        ("upstream_error", 3),
        "a POST may have been executed"
    );
}

#[test]
fn nothing_is_sent_after_its_deadline() {
    let origin = Origin::start(|path| match path {
        "/flaky" => Script::Raw(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n".to_vec()),
        _ => Script::After(Duration::from_millis(300)),
    });
    let node = start(&[&origin], "retry = { tries = 3, base = \"1s\", cap = \"1s\" }", "");
    let mut warm: Vec<Client> = (0..3).map(|_| Client::connect(&node.gateway()).unwrap()).collect();
    for client in &mut warm {
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    }
    for client in &mut warm {
        assert_eq!(client.read_answer("GET").unwrap().status, 200);
    }
    let begun = Instant::now();
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"GET /flaky HTTP/1.1\r\nHost: a\r\nRequest-Timeout: 2500ms\r\n\r\n").unwrap();
    node.eventually("it is to be tried again", |node| {
        node.metric("backoff_retries_total{service=\"gateway\",op=\"rpc\"}") == 1.0
    });
    // The machine sleeps past the deadline; when it wakes, the time for the second try has come as well.
    node.signal("STOP");
    std::thread::sleep(Duration::from_millis(2700).saturating_sub(begun.elapsed()));
    node.signal("CONT");
    assert_eq!(client.read_answer("GET").unwrap().reason(), "deadline");
    assert_eq!(get(&node.gateway(), "/").status, 200);
    assert_eq!(count(&origin, "/flaky"), 1);
}

#[test]
fn what_waits_for_a_connection_past_its_deadline_is_never_sent() {
    // A listener whose backlog is full accepts no more: connects to it hang until somebody accepts.
    let full = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = full.local_addr().unwrap();
    let connect = || std::net::TcpStream::connect_timeout(&address, Duration::from_millis(50));
    let fillers: Vec<_> = std::iter::from_fn(|| connect().ok()).take(10_000).collect();
    let text = config(&format!("http://{address}"), "", "");
    let node = Node::start(
        &["gateway"],
        &text.replace("name = \"o\"\n", "name = \"o\"\nconnect_timeout = \"10s\"\n"),
    );
    let late = request(&node.gateway(), "GET", "/late", &[("Request-Timeout", "400ms")], b"").unwrap();
    assert_eq!((late.status, late.reason()), (504, "deadline"));
    assert_eq!(node.metric("breaker_state{upstream=\"o\"}"), 0.0);
    // There is room now: this one gets through, behind whatever was on its way.
    drop(fillers);
    let mut next = Client::connect(&node.gateway()).unwrap();
    next.send(b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n").unwrap();
    full.set_nonblocking(true).unwrap();
    let mut said = Vec::new();
    node.eventually("the next request comes", |_| {
        while let Ok((mut stream, _)) = full.accept() {
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
            let mut piece = [0; 4096];
            let read = std::io::Read::read(&mut stream, &mut piece).unwrap_or(0);
            said.extend_from_slice(&piece[..read]);
        }
        said.windows(5).any(|window| window == b"/next")
    });
    assert!(!said.windows(5).any(|window| window == b"/late"));
}
