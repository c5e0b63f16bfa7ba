//! A line for each request answered.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, request, ron};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const FILE: &str = "access_log = { enabled = true, format = \"json\", file = \"access.log\" }";

/// Tenant `acme` has the key `k1`.
const TENANT: &str = "auth = { mode = \"api_key\" }\n[[gateway.tenants]]\nid = \"acme\"\n\
    keys = [\"sha256:6ab9f1eb8f7d3388f4f9d586f66e99fd54080df2c446f0e58668b09c08a16dd0\"]";

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.lines().filter(|line| line.ends_with('}'));
    whole.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"))).collect()
}

/// Waits for the line of the request with this id.
fn line(node: &Node, corr: &str) -> Value {
    let mut found = Value::Null;
    node.eventually(&format!("there is a line for {corr}"), |node| {
        let all = lines(&node.dir.path().join("access.log"));
        found = all.into_iter().find(|line| line["corr_id"] == corr).unwrap_or_default();
        !found.is_null()
    });
    found
}

#[test]
fn a_line_has_everything_but_the_query() {
    let origin = Origin::start(|path| {
        if path.starts_with("/chunks") {
            Script::Chunks(vec![vec![b'x'; 700]; 3], Duration::from_millis(20))
        } else {
            Script::Body(b"hello".to_vec())
        }
    });
    let node = Node::start(&["gateway"], &config(&origin.url(), &format!("{FILE}\n{TENANT}"), ""));
    let headers = [("X-Corr-ID", "post-1"), ("X-Api-Key", "k1")];
    request(&node.gateway(), "POST", "/a/b?secret=1", &headers, b"abcdef").unwrap();
    let posted = line(&node, "post-1");
    for (key, value) in [
        ("client", json!("127.0.0.1")),
        ("method", json!("POST")),
        ("host", json!("test")),
        ("path", json!("/a/b")),
        ("route", json!("/*")),
        ("tenant", json!("acme")),
        ("class", json!("authed")),
        ("status", json!(200)),
        ("reason", Value::Null),
        ("bytes_in", json!(6)),
        ("bytes_out", json!(5)),
        ("upstream", json!("o")),
        ("protocol", json!("HTTP/1.1")),
        ("tls", json!(false)),
        ("complete", json!(true)),
    ] {
        assert_eq!(posted[key], value, "{key} in {posted}");
    }
    let [queue, upstream, total] =
        ["queue_ms", "upstream_ms", "total_ms"].map(|key| posted[key].as_f64().unwrap());
    assert!(queue + upstream <= total + 0.01 && upstream > 0.0, "{posted}");
    assert!(
        posted["time"].as_str().unwrap().starts_with("20") && posted["time"].as_str().unwrap().ends_with('Z')
    );
    request(&node.gateway(), "GET", "/chunks", &[("X-Corr-ID", "chunks-1")], b"").unwrap();
    let streamed = line(&node, "chunks-1");
    assert_eq!((&streamed["bytes_out"], &streamed["complete"]), (&2100.into(), &true.into()));
    assert!(streamed["total_ms"].as_f64().unwrap() >= 50.0, "to the last byte: {streamed}");
    assert!(!std::fs::read_to_string(node.dir.path().join("access.log")).unwrap().contains("secret"));
    let mode = std::os::unix::fs::PermissionsExt::mode(
        &std::fs::metadata(node.dir.path().join("access.log")).unwrap().permissions(),
    );
    assert_eq!(mode & 0o007, 0, "not for everybody");
}

#[test]
fn refusals_and_clients_that_leave_have_lines_too() {
    let origin = Origin::start(|path| if path == "/slow" { Script::Silence } else { Script::HangUp });
    let gateway = format!("{FILE}\nlimits = {{ max_body_bytes = \"1KiB\", max_headers = 20 }}");
    let node = Node::start(&["gateway"], &config(&origin.url(), &gateway, "").replace("\"/*\"", "\"/slow\""));
    request(&node.gateway(), "GET", "/nowhere", &[("X-Corr-ID", "r-404")], b"").unwrap();
    let refused = line(&node, "r-404");
    assert_eq!((&refused["status"], &refused["reason"]), (&404.into(), &"no_route".into()));
    assert_eq!(
        (&refused["route"], &refused["upstream"], &refused["complete"]),
        (&Value::Null, &Value::Null, &true.into())
    );
    request(&node.gateway(), "POST", "/slow", &[("X-Corr-ID", "r-413")], &[b'a'; 2000]).unwrap();
    assert_eq!(
        (&line(&node, "r-413")["reason"], &line(&node, "r-413")["route"]),
        (&"body_cap".into(), &"/slow".into())
    );
    let mut rude = Client::connect(&node.gateway()).unwrap();
    rude.send(b"NONSENSE\r\n\r\n").unwrap();
    let corr = rude.read_answer("GET").unwrap().header("x-corr-id").unwrap().to_owned();
    let unread = line(&node, &corr);
    assert_eq!((&unread["status"], &unread["reason"]), (&400.into(), &"malformed".into()));
    assert_eq!(
        (&unread["method"], &unread["path"], &unread["client"]),
        (&Value::Null, &Value::Null, &"127.0.0.1".into())
    );
    let mut leaver = Client::connect(&node.gateway()).unwrap();
    leaver.send(b"GET /slow HTTP/1.1\r\nHost: a\r\nX-Corr-ID: left-1\r\n\r\n").unwrap();
    node.eventually("it is under way", |node| node.metric("inflight_requests{service=\"gateway\"}") == 1.0);
    drop(leaver);
    let left = line(&node, "left-1");
    assert_eq!(
        (&left["status"], &left["complete"], &left["path"]),
        (&499.into(), &false.into(), &"/slow".into())
    );
}

#[test]
fn errors_and_slow_requests_are_logged_whatever_the_sample() {
    let origin = Origin::start(|path| {
        if path == "/slow" { Script::After(Duration::from_millis(300)) } else { Script::Body(b"hi".to_vec()) }
    });
    let log = "access_log = { enabled = true, format = \"json\", file = \"access.log\", sample = 0.0, \
        always_status = 404, always_slow = \"200ms\" }";
    let rest = "methods = [\"GET\"]";
    let node = Node::start(&["gateway"], &config(&origin.url(), log, rest));
    let ask = |method: &str, path: &str, corr: &str| {
        request(&node.gateway(), method, path, &[("X-Corr-ID", corr)], b"").unwrap();
    };
    ask("GET", "/", "good");
    ask("GET", "/slow", "slow");
    ask("POST", "/", "error");
    assert_eq!((&line(&node, "slow")["status"], &line(&node, "error")["status"]), (&200.into(), &405.into()));
    assert_eq!(lines(&node.dir.path().join("access.log")).len(), 2, "the good and quick one is not told");
}

#[test]
fn without_a_file_lines_go_to_the_nodes_log_and_by_default_nowhere() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = Node::start(&["gateway"], &config(&origin.url(), "access_log = { enabled = true }", ""));
    request(&node.gateway(), "GET", "/x", &[("X-Corr-ID", "stream-1")], b"").unwrap();
    node.eventually("the log has it", |node| node.log().contains("stream-1"));
    let log = node.log();
    let told: Value =
        serde_json::from_str(log.lines().find(|line| line.contains("stream-1")).unwrap()).unwrap();
    assert_eq!(
        (&told["message"], &told["path"], &told["status"]),
        (&"access".into(), &"/x".into(), &200.into())
    );
    let quiet = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    request(&quiet.gateway(), "GET", "/x", &[("X-Corr-ID", "quiet-1")], b"").unwrap();
    // Turned on without a restart; then the next line is the first.
    quiet.write_config(&config(&origin.url(), "access_log = { enabled = true, file = \"text.log\" }", ""));
    assert_eq!(quiet.admin_post("/admin/reload", "").status, 200);
    get(&quiet.gateway(), "/y");
    request(&quiet.gateway(), "GET", "/z", &[("X-Corr-ID", "a\"b")], b"").unwrap();
    let path = quiet.dir.path().join("text.log");
    quiet.eventually("both are written", |_| {
        std::fs::read_to_string(&path).unwrap_or_default().lines().count() == 2
    });
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(
        text.lines()
            .next()
            .unwrap()
            .contains(" path=/y route=/* tenant=other class=anon status=200 reason=- "),
        "{text}"
    );
    assert!(text.contains("corr_id=\"a\\\"b\"") && !quiet.log().contains("quiet-1"), "{text}");
}

#[test]
fn a_reload_lets_go_of_a_file_that_was_moved_away() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = Node::start(&["gateway"], &config(&origin.url(), FILE, ""));
    let (path, old) = (node.dir.path().join("access.log"), node.dir.path().join("access.log.1"));
    request(&node.gateway(), "GET", "/", &[("X-Corr-ID", "before")], b"").unwrap();
    line(&node, "before");
    std::fs::rename(&path, &old).unwrap();
    node.signal("HUP");
    node.eventually("there is a new file", |_| path.exists());
    request(&node.gateway(), "GET", "/", &[("X-Corr-ID", "after")], b"").unwrap();
    assert_eq!(line(&node, "after")["status"], 200);
    assert!(!std::fs::read_to_string(&old).unwrap().contains("after"));
}

#[test]
fn a_file_that_cannot_be_written_is_a_problem_that_is_named() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let dir = tempfile::tempdir().unwrap();
    let bad = "[gateway]\naccess_log = { enabled = true, file = \"no/such/folder.log\", sample = 1.5 }\n[node]\namnesia = true\n";
    std::fs::write(dir.path().join("c.toml"), bad).unwrap();
    let output = ron(&["config", "check", "c.toml"], dir.path());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(64));
    assert!(
        text.contains("access_log.sample: must be between 0 and 1") && text.contains("node.amnesia is on"),
        "{text}"
    );
    std::fs::write(dir.path().join("c.toml"), bad.replace("true\n", "false\n")).unwrap();
    let output = ron(&["config", "check", "c.toml"], dir.path());
    assert!(String::from_utf8_lossy(&output.stderr).contains("there is no folder"), "{output:?}");
    let good = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &good);
    std::fs::create_dir(node.dir.path().join("folder")).unwrap();
    node.write_config(&config(&origin.url(), "access_log = { enabled = true, file = \"folder\" }", ""));
    let refused = node.admin_post("/admin/reload", "");
    assert_eq!(refused.status, 422);
    assert!(refused.text().contains("cannot be opened"), "{}", refused.text());
    node.write_config(&config(&origin.url(), "access_log = { enabled = true, file = \"/dev/full\" }", ""));
    assert_eq!(node.admin_post("/admin/reload", "").status, 200);
    for _ in 0..3 {
        assert_eq!(get(&node.gateway(), "/").status, 200);
    }
    node.eventually("it is said once", |node| node.log().contains("the access log cannot be written"));
}

#[test]
fn what_is_answered_during_a_drain_is_still_logged() {
    let origin = Origin::start(|_| Script::After(Duration::from_millis(400)));
    let mut node = Node::start(&["gateway"], &config(&origin.url(), FILE, ""));
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"GET /late HTTP/1.1\r\nHost: a\r\nX-Corr-ID: drain-1\r\n\r\n").unwrap();
    node.eventually("it is under way", |node| node.metric("inflight_requests{service=\"gateway\"}") == 1.0);
    node.signal("TERM");
    assert_eq!(client.read_answer("GET").unwrap().status, 200);
    assert_eq!(node.wait(), 0);
    let all = lines(&node.dir.path().join("access.log"));
    assert!(all.iter().any(|line| line["corr_id"] == "drain-1" && line["status"] == 200), "{all:?}");
    assert!(!node.log().contains("aborted at the drain deadline"), "{}", node.log());
}

#[test]
fn what_is_cut_at_the_drain_deadline_is_logged_as_that() {
    let origin = Origin::start(|path| match path {
        "/begun" => Script::Chunks(vec![b"abc".to_vec(); 100], Duration::from_millis(100)),
        _ => Script::Silence,
    });
    let rest = "[node]\ndrain_deadline = \"1s\"";
    let mut node = Node::start(&["gateway"], &config(&origin.url(), FILE, rest));
    let ask = |path: &str| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        let head = format!("GET /{path} HTTP/1.1\r\nHost: a\r\nX-Corr-ID: {path}-1\r\n\r\n");
        client.send(head.as_bytes()).unwrap();
        client
    };
    let (mut stuck, mut begun) = (ask("stuck"), ask("begun"));
    let url = format!("http://{}/stream", node.gateway());
    let curl = std::process::Command::new("curl")
        .args(["-s", "-o", "/dev/null", "--http2-prior-knowledge", "-H", "X-Corr-ID: stream-1", &url])
        .spawn();
    node.eventually("all are under way", |_| origin.seen.lock().unwrap().len() == 3);
    begun.read_exact(200).unwrap();
    assert_eq!(node.stop(), 0);
    curl.unwrap().wait().unwrap();
    assert_eq!(stuck.read_answer("GET").unwrap().reason(), "draining");
    for (corr, status, reason) in [
        ("stuck-1", 503, json!("draining")),
        ("stream-1", 503, json!("draining")),
        ("begun-1", 200, Value::Null),
    ] {
        let told = line(&node, corr);
        assert_eq!((&told["status"], &told["reason"]), (&status.into(), &reason), "{told}");
        assert_eq!((&told["complete"], &told["upstream"]), (&false.into(), &"o".into()), "{told}");
    }
}

#[test]
fn a_stuck_file_holds_up_neither_requests_nor_the_end() {
    let origin = Origin::start(|_| Script::Echo);
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("access.log");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let route = "path = \"/only\"";
    let text = config(&origin.url(), FILE, "[node]\ndrain_deadline = \"1s\"").replace("path = \"/*\"", route);
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    // Somebody opens the pipe and reads nothing.
    let reader = std::thread::spawn(move || std::fs::File::open(pipe).unwrap());
    let mut node = Node::spawn(dir, &["run", "gateway", "--config", "ron.toml"], &[]);
    let _held = reader.join().unwrap();
    let mut client = Client::connect(&node.gateway()).unwrap();
    let one = b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n";
    for _ in 0..70 {
        client.send(&one.repeat(100)).unwrap();
        for _ in 0..100 {
            assert_eq!(client.read_answer("GET").unwrap().status, 404);
        }
    }
    let dropped = node.metric("queue_dropped_total{service=\"gateway\",queue=\"access_log\"}");
    assert!(dropped > 0.0, "7000 lines did not fill the pipe and the queue");
    assert!(node.metric("queue_depth{service=\"gateway\",queue=\"access_log\"}") <= 4096.0);
    drop(client);
    assert_eq!(node.stop(), 0);
    assert!(node.log().contains("gateway access_log #0"), "it is named as a straggler: {}", node.log());
}
