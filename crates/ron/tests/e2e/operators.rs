//! What an operator asks a running gateway: status, routes, and what would become of a request.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, request, ron, ron_with};
use serde_json::{Value, json};
use std::process::Output;
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

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

/// A client command against a node's own file.
fn ask(node: &Node, args: &[&str]) -> Output {
    ron(&[&["gateway"], args, &["--config", "ron.toml"]].concat(), node.dir.path())
}

#[test]
fn the_commands_print_aligned_tables_and_json() {
    let origin = Origin::start(|_| Script::Echo);
    let node = Node::start(&["gateway"], &config(&origin.url(), TENANTS, ""));
    let status = ask(&node, &["status"]);
    let shown = text(&status);
    assert_eq!(code(&status), 0, "{shown}");
    assert!(shown.starts_with("waiting    0 of 512\nin flight  0 of 512\ndegraded   no\n"), "{shown}");
    assert!(
        shown.contains("UPSTREAM  BREAKER  IN FLIGHT  RETRIES LEFT\no         closed   0 of 256   10\n"),
        "{shown}"
    );
    assert!(shown.contains(&format!("o         {}  healthy\n", origin.url())), "{shown}");
    assert!(
        shown.contains("TENANT  CLASS   QUANTUM  WAITING  SHARE\nacme    authed  3        0        512\n"),
        "{shown}"
    );
    let routes = text(&ask(&node, &["routes"]));
    assert!(
        routes.contains("/*    *      *        o         30s      optional  -      1048576   1\n"),
        "{routes}"
    );
    let explained = text(&ask(&node, &["explain", "GET", "http://a.org/x", "-H", "X-Api-Key: k1"]));
    assert!(explained.starts_with("admitted  yes\nroute     /* (gateway.routes[0])\n"), "{explained}");
    assert!(
        explained.contains("tenant    acme\n") && explained.contains("quota     tenant: 5.0 per second"),
        "{explained}"
    );
    let refused = ask(&node, &["explain", "GET", "/x", "-H", "X-Api-Key: k2", "--client", "192.0.2.1"]);
    assert_eq!(code(&refused), 0, "an explanation of a refusal is an answer");
    assert!(
        text(&refused).starts_with("admitted  no: 401 token_invalid, the API key is not known\n"),
        "{}",
        text(&refused)
    );
    assert!(text(&refused).contains("client    192.0.2.1\n"));
    for (args, member) in [
        (&["status"][..], "queue"),
        (&["routes"], "routes"),
        (&["explain", "GET", "/"], "admitted"),
        (&["reload"], "changed"),
    ] {
        let output = ask(&node, &[args, &["--json"]].concat());
        let value: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(!value[member].is_null(), "{args:?}: {value}");
    }
}

#[test]
fn the_reload_command_names_what_changed_or_every_problem() {
    let origin = Origin::start(|_| Script::Echo);
    let first = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &first);
    let said = text(&ask(&node, &["reload"]));
    assert!(said.starts_with("nothing changed\n\nTENANT  CLASS"), "{said}");
    let tenant =
        |id: &str, quantum: u32| format!("[[gateway.tenants]]\nid = \"{id}\"\nquantum = {quantum}\n");
    node.write_config(&format!("{first}{}{}", tenant("a", 1), tenant("b", 3)));
    let said = text(&ask(&node, &["reload"]));
    // The watcher may have been first; the shares are those from now on in any case.
    for shown in ["\nTENANT  CLASS   QUANTUM  WAITING  SHARE\n", "\nb       authed  3        0        "] {
        assert!(said.contains(shown), "{shown} is missing: {said}");
    }
    node.write_config(&format!("{first}nonsense = 1\nmore = 2\n"));
    let refused = ask(&node, &["reload"]);
    assert_eq!(code(&refused), 1);
    let shown = text(&refused);
    assert!(shown.contains("was not reloaded") && shown.contains("nonsense: unknown key"), "{shown}");
    assert!(shown.contains("more: unknown key"), "{shown}");
    let json = ask(&node, &["reload", "--json"]);
    assert_eq!(code(&json), 1);
    let problems: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!(problems["problems"].as_array().unwrap().len(), 2);
}

#[test]
fn a_node_is_found_by_its_url_its_file_or_beside_the_working_directory() {
    let origin = Origin::start(|_| Script::Echo);
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("ron-data")).unwrap();
    let file = config(
        &origin.url(),
        "",
        "[edge]\nenabled = false\n[overlay]\nenabled = false\n[registry]\nenabled = false\n",
    );
    std::fs::write(dir.path().join("ron-data/ron.toml"), file).unwrap();
    let mut node = Node::spawn(dir, &["up"], &[]);
    let beside = ron(&["gateway", "status"], node.dir.path());
    assert_eq!(code(&beside), 0, "{}", text(&beside));
    let elsewhere = tempfile::tempdir().unwrap();
    let file = node.dir.path().join("ron-data/ron.toml");
    let by_file = ron(&["gateway", "status", "--config", file.to_str().unwrap()], elsewhere.path());
    assert_eq!(code(&by_file), 0, "{}", text(&by_file));
    let url = format!("http://{}/", node.admin());
    let token = std::fs::read_to_string(node.dir.path().join("ron-data/admin.token")).unwrap();
    for variable in ["RON_TOKEN", "RON_ADMIN__TOKEN"] {
        let by_url = ron_with(&["gateway", "status", "--url", &url], elsewhere.path(), &[(variable, &token)]);
        assert_eq!(code(&by_url), 0, "{variable}: {}", text(&by_url));
    }
    // What goes wrong says what to do.
    let nowhere = ron(&["gateway", "status"], elsewhere.path());
    assert_eq!(code(&nowhere), 64);
    assert!(text(&nowhere).contains("--config FILE or --url URL"), "{}", text(&nowhere));
    let no_file = ron(&["gateway", "status", "--config", "none.toml"], elsewhere.path());
    assert_eq!(code(&no_file), 64);
    assert!(text(&no_file).contains("none.toml: cannot be read"), "{}", text(&no_file));
    let no_token = ron(&["gateway", "status", "--url", &url], node.dir.path());
    assert_eq!(code(&no_token), 1);
    assert!(
        text(&no_token).contains("wants its admin token") && text(&no_token).contains("--token T"),
        "{}",
        text(&no_token)
    );
    let wrong = ron(&["gateway", "status", "--token", "0123456789abcdef"], node.dir.path());
    assert_eq!((code(&wrong), text(&wrong).contains("does not take this admin token")), (1, true));
    for bad in ["https://127.0.0.1:1", "127.0.0.1:1", "http://127.0.0.1:1/path"] {
        let output = ron(&["gateway", "status", "--url", bad], elsewhere.path());
        assert_eq!(
            (code(&output), text(&output).contains("expected the admin listener's URL")),
            (64, true),
            "{bad}"
        );
    }
    let header = ron(&["gateway", "explain", "GET", "/", "-H", "nonsense"], node.dir.path());
    assert_eq!((code(&header), text(&header).contains("'Name: value'")), (64, true));
    let other = ron(
        &["gateway", "status", "--token", "t", "--url", &format!("http://{}", origin.address)],
        elsewhere.path(),
    );
    assert_eq!(code(&other), 1);
    assert!(text(&other).contains("is no admin plane"), "{}", text(&other));
    node.stop();
    let gone = ron(&["gateway", "status"], node.dir.path());
    assert_eq!(code(&gone), 1);
    assert!(text(&gone).contains("no node runs in") && text(&gone).contains("ron up"), "{}", text(&gone));
    let silent = ron(&["gateway", "status", "--url", &url], node.dir.path());
    assert_eq!((code(&silent), text(&silent).contains("no node answers at")), (1, true), "{}", text(&silent));
}
