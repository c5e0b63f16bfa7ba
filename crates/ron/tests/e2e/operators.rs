//! What an operator asks a running gateway: status, routes, and what would become of a request.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, request};
use serde_json::{Value, json};
use std::time::Duration;

/// Tenant `acme` has the key `k1`.
const TENANTS: &str = "auth = { mode = \"api_key\" }\n\
    [[gateway.tenants]]\nid = \"acme\"\nquantum = 3\nrps = 5\n\
    keys = [\"sha256:6ab9f1eb8f7d3388f4f9d586f66e99fd54080df2c446f0e58668b09c08a16dd0\"]";

fn explain(node: &Node, question: &Value) -> Value {
    let answer = node.admin_post("/gateway/explain", &question.to_string());
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

#[test]
fn the_local_api_needs_the_token_and_the_right_method() {
    let origin = Origin::start(|_| Script::Echo);
    let node = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    for (method, path) in
        [("GET", "/gateway/status"), ("GET", "/gateway/routes"), ("POST", "/gateway/explain")]
    {
        let refused = request(&node.admin(), method, path, &[], b"").unwrap();
        assert_eq!((refused.status, refused.reason()), (401, "unauth"), "{path}");
        let other = if method == "GET" { "POST" } else { "GET" };
        let wrong = request(&node.admin(), other, path, &[], b"").unwrap();
        assert_eq!((wrong.status, wrong.header("allow")), (405, Some(method)), "{path}");
    }
    assert_eq!(node.admin_get("/gateway/status").status, 200);
    assert_eq!(node.admin_get("/gateway/else").status, 404);
    let series =
        "http_requests_total{service=\"kernel\",route=\"/gateway/status\",method=\"GET\",status=\"200\"}";
    assert_eq!(node.metric(series), 1.0);
    for bad in
        ["", "[]", r#"{"method":"GET"}"#, r#"{"method":"G T","url":"/"}"#, r#"{"method":"GET","url":"a b"}"#]
    {
        let answer = node.admin_post("/gateway/explain", bad);
        assert_eq!((answer.status, answer.reason()), (400, "malformed"), "{bad}");
    }
    let large = node.admin_post("/gateway/explain", &"x".repeat(100 << 10));
    assert_eq!((large.status, large.reason()), (413, "body_cap"));
}

#[test]
fn status_shows_upstreams_tenants_and_the_queue_as_they_are() {
    let origin = Origin::start(|path| {
        if path == "/fail" {
            Script::Raw(b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n".to_vec())
        } else {
            Script::After(Duration::from_secs(3))
        }
    });
    let gateway = format!("max_inflight = 1\n{TENANTS}");
    let node = Node::start(
        &["gateway"],
        &config(&origin.url(), &gateway, "")
            .replace("[[gateway.routes]]", "breaker = { failures = 2, open = \"1m\" }\n[[gateway.routes]]"),
    );
    let status = || node.admin_get("/gateway/status").json();
    let calm = status();
    assert_eq!(calm["queue"], json!({"depth": 0, "capacity": 512}));
    assert_eq!(calm["upstreams"][0]["name"], "o");
    let server =
        json!({"address": origin.url(), "healthy": true, "ejected": false, "inflight": 0, "latency_ms": 0.0});
    assert_eq!(calm["upstreams"][0]["servers"], json!([server]));
    assert_eq!(
        (&calm["upstreams"][0]["breaker"], &calm["upstreams"][0]["inflight"]),
        (&"closed".into(), &0.into())
    );
    assert_eq!(
        calm["tenants"][0],
        json!({"id": "acme", "class": "authed", "quantum": 3, "queued": 0, "share": 512})
    );
    assert_eq!((&calm["tenants"][1]["id"], &calm["tenants"][1]["class"]), (&"other".into(), &"anon".into()));
    for _ in 0..2 {
        assert_eq!(get(&node.gateway(), "/fail").status, 500);
    }
    assert_eq!(status()["upstreams"][0]["breaker"], "open");
    let slow = Node::start(&["gateway"], &config(&origin.url(), &gateway, ""));
    let mut held: Vec<Client> = (0..3).map(|_| Client::connect(&slow.gateway()).unwrap()).collect();
    for client in &mut held {
        client.send(b"GET / HTTP/1.1\r\nHost: a\r\nX-Api-Key: k1\r\n\r\n").unwrap();
    }
    slow.eventually("one runs and two wait", |node| {
        let status = node.admin_get("/gateway/status").json();
        status["queue"]["depth"] == 2
            && status["tenants"][0]["queued"] == 2
            && status["upstreams"][0]["inflight"] == 1
            && status["inflight"] == 1
    });
}

#[test]
fn routes_are_shown_with_what_they_inherit() {
    let origin = Origin::start(|_| Script::Echo);
    let rest = "[[gateway.routes]]\npath = \"/a\"\nhosts = [\"a.org\"]\nmethods = [\"GET\"]\nupstream = \"o\"\ntimeout = \"2s\"";
    let node = Node::start(&["gateway"], &config(&origin.url(), "request_timeout = \"7s\"", rest));
    let routes = node.admin_get("/gateway/routes").json();
    let rows = routes["routes"].as_array().unwrap();
    assert_eq!((&rows[0]["path"], &rows[0]["timeout"]), (&"/*".into(), &"7s".into()));
    assert_eq!((&rows[1]["hosts"], &rows[1]["timeout"]), (&json!(["a.org"]), &"2s".into()));
    assert_eq!((&rows[1]["max_body_bytes"], &rows[1]["auth"]), (&(1 << 20).into(), &"optional".into()));
}

#[test]
fn an_explanation_is_what_then_happens_and_costs_nothing() {
    let origin = Origin::start(|_| Script::Echo);
    let gateway = format!("quotas = {{ per_ip_rps = 1, global_rps = 100, burst_factor = 5 }}\n{TENANTS}");
    let rest = "methods = [\"GET\", \"POST\"]\nmax_body_bytes = \"1KiB\"\ncost = 2\ntimeout = \"4s\"\n\
        [[gateway.routes]]\npath = \"/members/*\"\nupstream = \"o\"\nauth = \"required\"\ndecode = true";
    let node = Node::start(&["gateway"], &config(&origin.url(), &gateway, rest));
    let ask = |method: &str, url: &str, headers: Value| {
        explain(&node, &json!({"method": method, "url": url, "headers": headers}))
    };
    let plain = ask("GET", "http://a.org/x?y=1", json!({}));
    assert_eq!((&plain["admitted"], &plain["upstream"]), (&true.into(), &"o".into()), "{plain}");
    assert_eq!(plain["route"], json!({"index": 0, "path": "/*"}));
    assert_eq!((&plain["class"], &plain["tenant"]), (&"anon".into(), &"other".into()));
    assert_eq!((&plain["deadline_ms"], &plain["max_body_bytes"]), (&4000.into(), &1024.into()));
    assert_eq!((&plain["cost"], &plain["client"]), (&8192.into(), &"127.0.0.1".into()));
    let known =
        ask("POST", "/x", json!({"X-Api-Key": "k1", "Content-Length": "10", "Request-Timeout": "1500ms"}));
    assert_eq!((&known["class"], &known["tenant"]), (&"authed".into(), &"acme".into()), "{known}");
    assert_eq!((&known["deadline_ms"], &known["cost"]), (&1500.into(), &(2 * (4096 + 10)).into()));
    let names: Vec<&str> =
        known["quotas"].as_array().unwrap().iter().map(|q| q["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["ip", "global", "tenant"]);
    assert_eq!(
        known["quotas"][2],
        json!({"name": "tenant", "reason": "quota_tenant", "per_second": 5.0, "burst": 25.0})
    );
    assert_eq!(origin.connections.load(std::sync::atomic::Ordering::SeqCst), 0, "nobody was called");
    // Each refusal is foretold with status, reason and detail; what was known until then is there too.
    let cases = [
        ("PUT", "/x", json!({}), 405, "method"),
        ("GET", "/a/../b", json!({}), 400, "malformed"),
        ("POST", "/x", json!({"Content-Length": "2000"}), 413, "body_cap"),
        ("GET", "/x", json!({"Request-Timeout": "soon"}), 400, "malformed"),
        ("GET", "/members/1", json!({}), 401, "unauth"),
        ("GET", "/members/1", json!({"X-Api-Key": ["nonsense"]}), 401, "token_invalid"),
        ("POST", "/members/1", json!({"Content-Encoding": "lzma"}), 415, "unsupported_encoding"),
    ];
    for (method, url, headers, status, reason) in cases {
        let answer = ask(method, url, headers);
        assert_eq!(
            (&answer["admitted"], &answer["status"], &answer["reason"]),
            (&false.into(), &status.into(), &reason.into()),
            "{method} {url}: {answer}"
        );
        assert!(answer["detail"].is_string());
    }
    assert_eq!(ask("GET", "/members/1", json!({}))["route"]["path"], "/members/*");
    // A burst of five is left to the client whatever was asked meanwhile, and what was foretold happens.
    let made = [("GET", "/x"), ("PUT", "/x"), ("GET", "/a/../b"), ("GET", "/members/1"), ("GET", "/x")];
    let statuses =
        made.map(|(method, path)| request(&node.gateway(), method, path, &[], b"").unwrap().status);
    assert_eq!(statuses, [200, 405, 400, 401, 200]);
}

#[test]
fn an_explanation_believes_a_tenant_header_of_trusted_proxies_only() {
    let origin = Origin::start(|_| Script::Echo);
    let gateway = "trusted_proxies = [\"192.0.2.0/24\"]\n\
        [[gateway.tenants]]\nid = \"beta\"\nmatch = { header = \"x-tenant=beta\" }";
    let node = Node::start(&["gateway"], &config(&origin.url(), gateway, ""));
    let ask = |client: &str| {
        let headers = json!({"X-Tenant": "beta", "X-Forwarded-For": "203.0.113.9"});
        explain(&node, &json!({"method": "GET", "url": "/", "headers": headers, "client": client}))
    };
    let trusted = ask("192.0.2.7");
    assert_eq!((&trusted["tenant"], &trusted["client"]), (&"beta".into(), &"203.0.113.9".into()));
    let stranger = ask("198.51.100.1");
    assert_eq!((&stranger["tenant"], &stranger["client"]), (&"other".into(), &"198.51.100.1".into()));
}
