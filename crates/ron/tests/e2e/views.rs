//! Hydration: one call of a client, several behind it, one answer.

use crate::config;
use ron_testkit::{Answer, Client, Node, Origin, Script, api_key, get, request};
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Two upstreams behind a view of a profile; `more` goes into the view, `posts` is the path of its second part.
fn profile(user: &Origin, feed: &Origin, more: &str, posts: &str) -> String {
    // Long enough for a machine with much else to do, unless the test is about it.
    let patience = if more.contains("timeout") { "" } else { "timeout = \"20s\"\n" };
    let view = format!(
        "[[gateway.upstreams]]\nname = \"feed\"\nservers = [\"{}\"]\nretry = {{ base = \"1ms\" }}\nbreaker = {{ failures = 100 }}\n\
         [[gateway.views]]\npath = \"/v1/view/profile/{{id}}\"\n{patience}{more}\n\
         parts = [ {{ name = \"user\", upstream = \"o\", path = \"/users/{{id}}\", required = true }}, \
         {{ name = \"posts\", upstream = \"feed\", path = \"{posts}\" }} ]\n",
        feed.url()
    );
    config(&user.url(), "", &view)
}

fn parts(node: &Node, part: &str, result: &str) -> f64 {
    let view = "/v1/view/profile/{id}";
    node.metric(&format!("view_parts_total{{view=\"{view}\",part=\"{part}\",result=\"{result}\"}}"))
}

fn users() -> Origin {
    Origin::start(|path| match path {
        "/users/gone" => Script::Raw(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\n\r\n".to_vec()),
        "/users/slow" => Script::Silence,
        "/users/text" => Script::Body(b"hello".to_vec()),
        "/users/huge" => Script::Body(format!("\"{}\"", "x".repeat(100_000)).into_bytes()),
        "/users/big" => Script::Body(format!("\"{}\"", "x".repeat(3000)).into_bytes()),
        path => Script::Body(json!({"path": path}).to_string().into_bytes()),
    })
}

fn feed() -> Origin {
    Origin::start(|path| match path {
        path if path.contains("silent") => Script::Silence,
        path if path.contains("failing") => {
            Script::Raw(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n".to_vec())
        }
        path if path.contains("half") => Script::Body(b"{\"a\":".to_vec()),
        path if path.contains("packed") => {
            Script::Raw(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}".to_vec())
        }
        path if path.contains("large") => {
            Script::Chunks(vec![b"\"".to_vec(), vec![b'y'; 3000], b"\"".to_vec()], Duration::ZERO)
        }
        _ => Script::Chunks(vec![b" [1,".to_vec(), b"2] ".to_vec()], Duration::ZERO),
    })
}

fn view(node: &Node, id: &str) -> Answer {
    get(&node.gateway(), &format!("/v1/view/profile/{id}"))
}

#[test]
fn a_view_is_one_answer_made_of_its_parts() {
    let (users, feed) = (users(), feed());
    let node = Node::start(&["gateway"], &profile(&users, &feed, "", "/posts?u={id}"));
    let whole = view(&node, "7");
    assert_eq!((whole.status, whole.header("content-type")), (200, Some("application/json")));
    assert_eq!(whole.text(), "{\"user\":{\"path\":\"/users/7\"},\"posts\":[1,2],\"errors\":[]}");
    assert!(whole.header("x-corr-id").is_some());
    let fields =
        [("Accept-Encoding", "gzip"), ("If-None-Match", "\"x\""), ("X-Mine", "passes"), ("X-Corr-ID", "c1")];
    let body = b"a body of its own";
    let tricky = request(&node.gateway(), "GET", "/v1/view/profile/a%26b=c%2Fd", &fields, body).unwrap();
    assert_eq!(tricky.json()["user"]["path"], "/users/a%26b%3Dc%2Fd");
    let seen = feed.last().to_lowercase();
    assert!(seen.starts_with("get /posts?u=a%26b%3dc%2fd http/1.1\r\n"), "a value stays one: {seen}");
    for wanted in [
        "accept: application/json",
        "accept-encoding: identity",
        "x-mine: passes",
        "x-corr-id: c1",
        "via: ",
        "request-timeout: ",
    ] {
        assert!(seen.contains(wanted), "{wanted}: {seen}");
    }
    assert!(!seen.contains("if-none-match") && !seen.contains("content-length"), "{seen}");
    let head = request(&node.gateway(), "HEAD", "/v1/view/profile/7", &[], b"").unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
    let posted = request(&node.gateway(), "POST", "/v1/view/profile/7", &[], b"").unwrap();
    assert_eq!((posted.status, posted.reason(), posted.header("allow")), (405, "method", Some("GET, HEAD")));
    let below = get(&node.gateway(), "/v1/view/profile/7/more");
    assert_eq!(below.json()["path"], "/v1/view/profile/7/more", "the route takes what is no view");
    assert_eq!((parts(&node, "user", "ok"), parts(&node, "posts", "missing")), (3.0, 0.0));
    let rows = node.admin_get("/gateway/routes").json();
    let row = rows["routes"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&row["path"], &row["upstream"]), (&"/v1/view/profile/{id}".into(), &"o+feed".into()));
    let explained =
        node.admin_post("/gateway/explain", "{\"method\":\"GET\",\"url\":\"/v1/view/profile/7\"}").json();
    assert_eq!(explained["parts"], json!(["user", "posts"]), "{explained}");
    let tag = whole.header("etag").unwrap();
    let again = |id: &str, known: &str| {
        let path = format!("/v1/view/profile/{id}");
        request(&node.gateway(), "GET", &path, &[("If-None-Match", known)], b"").unwrap()
    };
    let same = again("7", &format!("\"other\", W/{tag}"));
    assert_eq!((same.status, same.header("etag"), same.body.len()), (304, Some(tag), 0));
    let other = again("8", tag);
    assert!(other.status == 200 && other.header("etag") != Some(tag), "another answer has another tag");
    let large = view(&node, "huge");
    assert_eq!(again("huge", large.header("etag").unwrap()).status, 304);
}

#[test]
fn an_optional_part_that_is_missing_is_null_and_named() {
    let (users, feed) = (users(), feed());
    let check = |posts: &str, more: &str, expected: Value| {
        let node = Node::start(&["gateway"], &profile(&users, &feed, more, posts));
        let answer = view(&node, "7");
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.json(), json!({"user": {"path": "/users/7"}, "posts": null, "errors": [expected]}));
        assert_eq!((parts(&node, "user", "ok"), parts(&node, "posts", "missing")), (1.0, 1.0));
    };
    check("/silent", "timeout = \"4s\"", json!({"part": "posts", "status": 504, "code": "deadline"}));
    check("/failing", "", json!({"part": "posts", "status": 503, "code": "upstream_error"}));
    check("/half", "", json!({"part": "posts", "status": 502, "code": "not_json"}));
    check("/packed", "", json!({"part": "posts", "status": 502, "code": "not_json"}));
    check("/large", "max_bytes = \"1KiB\"", json!({"part": "posts", "status": 502, "code": "too_large"}));
}

/// A piece of an answer whose length nobody knew.
fn chunk(client: &mut Client) -> String {
    let mut line = String::new();
    while !line.ends_with("\r\n") {
        line.push(char::from(client.read_exact(1).expect("the answer goes on")[0]));
    }
    let size = usize::from_str_radix(line.trim(), 16).unwrap();
    String::from_utf8(client.read_exact(size + 2).unwrap()[..size].to_vec()).unwrap()
}

#[test]
fn a_view_without_a_tag_is_sent_as_its_parts_come() {
    let users = users();
    let open = Arc::new(AtomicBool::new(false));
    let gate = open.clone();
    let feed = Origin::start(move |path| {
        while path.contains("gated") && !gate.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        if path.contains("silent") { Script::Silence } else { Script::Body(b" [1,2] ".to_vec()) }
    });
    let config = profile(&users, &feed, "etag = false", "/gated?u={id}");
    let node = Node::start(&["gateway"], &config);
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"GET /v1/view/profile/7 HTTP/1.1\r\nHost: x\r\nIf-None-Match: *\r\n\r\n").unwrap();
    let head = client.read_head().unwrap().to_lowercase();
    assert!(head.starts_with("http/1.1 200") && !head.contains("etag"), "{head}");
    assert!(head.contains("content-type: application/json"), "{head}");
    let mut text = String::new();
    while !text.ends_with('}') {
        text += &chunk(&mut client);
    }
    assert_eq!(text, "{\"user\":{\"path\":\"/users/7\"}", "what is there is sent");
    assert_eq!(
        node.metric("view_parts_total{view=\"/v1/view/profile/{id}\",part=\"posts\",result=\"ok\"}"),
        0.0
    );
    open.store(true, Ordering::SeqCst);
    loop {
        let piece = chunk(&mut client);
        if piece.is_empty() {
            break;
        }
        text += &piece;
    }
    assert_eq!(text, "{\"user\":{\"path\":\"/users/7\"},\"posts\":[1,2],\"errors\":[]}");
    assert_eq!((parts(&node, "user", "ok"), parts(&node, "posts", "ok")), (1.0, 1.0));
    // The status is that of the parts that are required, as ever.
    let gone = view(&node, "gone");
    assert_eq!((gone.status, gone.reason(), &gone.json()["part"]), (502, "upstream_error", &"user".into()));
    let head = request(&node.gateway(), "HEAD", "/v1/view/profile/7", &[], b"").unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
    // Whoever does not come in time is named at the end.
    let node =
        Node::start(&["gateway"], &profile(&users, &feed, "etag = false\ntimeout = \"4s\"", "/silent"));
    let errors = json!([{"part": "posts", "status": 504, "code": "deadline"}]);
    assert_eq!(
        view(&node, "7").json(),
        json!({"user": {"path": "/users/7"}, "posts": null, "errors": errors})
    );
}

#[test]
fn a_required_part_that_is_missing_is_the_refusal_of_all_and_named() {
    let (users, feed) = (users(), feed());
    let config = profile(&users, &feed, "timeout = \"4s\"\nmax_bytes = \"2KiB\"", "/silent");
    let node = Node::start(&["gateway"], &config);
    for (id, status, reason) in [
        ("gone", 502, "upstream_error"),
        ("slow", 504, "deadline"),
        ("text", 502, "upstream_error"),
        ("big", 502, "upstream_error"),
    ] {
        let answer = view(&node, id);
        assert_eq!((answer.status, answer.reason()), (status, reason), "{id}");
        assert_eq!(answer.header("content-type"), Some("application/problem+json"));
        let body = answer.json();
        assert_eq!((&body["part"], &body["code"]), (&"user".into(), &reason.into()), "{body}");
    }
    assert_eq!(node.metric("rejected_total{service=\"gateway\",reason=\"upstream_error\"}"), 3.0);
    let late = node.metric("io_timeouts_total{service=\"gateway\",op=\"rpc\"}");
    assert!(late >= 1.0, "{late}");
}

#[test]
fn retries_of_the_parts_stay_within_the_calls_of_the_view() {
    let (users, feed) = (users(), feed());
    for (calls, tries) in [(2, 1), (3, 2), (8, 3)] {
        feed.seen.lock().unwrap().clear();
        let more = format!("max_calls = {calls}");
        let node = Node::start(&["gateway"], &profile(&users, &feed, &more, "/failing"));
        assert_eq!(view(&node, "7").status, 200);
        assert_eq!(feed.seen.lock().unwrap().len(), tries, "{calls} calls");
    }
}

#[test]
fn a_view_asks_who_is_calling_and_its_parts_wait_their_turn() {
    let (users, feed) = (users(), feed());
    let more = "auth = \"required\"\nscopes = [\"profile\"]\nclass = \"internal\"\ncost = 2";
    let text = profile(&users, &feed, more, "/posts")
        .replace("[gateway]\n", "[gateway]\nmax_inflight = 1\nauth = { mode = \"api_key\" }\n")
        + &format!(
            "[[gateway.tenants]]\nid = \"a\"\nscopes = [\"profile\"]\nkeys = [\"{}\"]\n",
            api_key("a")
        )
        + &format!("[[gateway.tenants]]\nid = \"b\"\nkeys = [\"{}\"]\n", api_key("b"));
    let node = Node::start(&["gateway"], &text);
    let ask = |key: &str| {
        request(&node.gateway(), "GET", "/v1/view/profile/7", &[("X-Api-Key", key)], b"").unwrap()
    };
    assert_eq!(view(&node, "7").reason(), "unauth");
    assert_eq!((ask("b").status, ask("b").reason().to_owned()), (403, "forbidden".to_owned()));
    assert_eq!(feed.connections.load(Ordering::SeqCst), 0, "nobody was called");
    // With one permit for both parts, one waits for the other and neither for itself.
    for _ in 0..5 {
        assert_eq!(ask("a").json()["errors"], json!([]));
    }
    let served = node.metric("fq_served_cost_total{tenant=\"a\"}");
    assert!(served >= 2.0 * 10.0 * 4096.0, "ten calls at twice their cost: {served}");
}
