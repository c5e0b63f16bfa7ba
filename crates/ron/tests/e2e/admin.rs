//! The admin plane.

use crate::config;
use ron_testkit::{Node, Origin, Script, get, request};

fn node(extra: &str) -> (Node, Origin) {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = Node::start(&["gateway"], &config(&origin.url(), "", extra));
    (node, origin)
}

#[test]
fn health_readiness_version_and_metrics_are_served() {
    let (node, _origin) = node("");
    let admin = node.admin();
    assert_eq!(get(&admin, "/healthz").json(), serde_json::json!({"alive": true}));
    let ready = get(&admin, "/readyz");
    assert_eq!(
        ready.json(),
        serde_json::json!({"ready": true, "degraded": false, "missing": [], "services": {"gateway": "ready"}})
    );
    for query in ["?scope=read", "?service=gateway", "?service=gateway&scope=write"] {
        assert_eq!(get(&admin, &format!("/readyz{query}")).status, 200);
    }
    assert_eq!(get(&admin, "/readyz?service=edge").status, 404);
    assert_eq!(get(&admin, "/readyz?scope=sideways").reason(), "malformed");
    let version = get(&admin, "/version").json();
    assert_eq!((&version["name"], version["features"].is_array()), (&"ron".into(), true));
    let metrics = get(&admin, "/metrics");
    assert!(metrics.header("content-type").unwrap().starts_with("text/plain; version=0.0.4"));
    assert!(metrics.text().contains("ready{service=\"gateway\",scope=\"write\"} 1"));
    let head = request(&admin, "HEAD", "/healthz", &[], b"").unwrap();
    assert_eq!((head.status, head.body.len()), (200, 0));
    assert_eq!(get(&admin, "/nothing").reason(), "not_found");
    let wrong = request(&admin, "POST", "/healthz", &[], b"").unwrap();
    assert_eq!((wrong.status, wrong.header("allow"), wrong.reason()), (405, Some("GET"), "method"));
}

#[test]
fn the_inventory_lists_channels_and_tasks() {
    let (node, _origin) = node("");
    let channels = get(&node.admin(), "/debug/channels").json();
    let row = |name: &str| {
        let rows = channels["channels"].as_array().unwrap();
        rows.iter().find(|row| row["service"] == "gateway" && row["name"] == name).unwrap().clone()
    };
    assert_eq!((&row("events")["capacity"], &row("events")["kind"]), (&1024.into(), &"broadcast".into()));
    assert_eq!((&row("shutdown")["capacity"], &row("shutdown")["policy"]), (&1.into(), &"latest".into()));
    assert_eq!(row("config")["kind"], "watch");
    let tasks = get(&node.admin(), "/debug/tasks").json();
    let listener = tasks["tasks"]
        .as_array()
        .unwrap()
        .iter()
        .find(|task| task["kind"] == "listener" && task["service"] == "gateway");
    assert_eq!(listener.unwrap()["state"], "running");
}

#[test]
fn commands_need_the_token() {
    let (mut node, _origin) = node("");
    for path in ["/admin/shutdown", "/admin/reload"] {
        let refused = request(&node.admin(), "POST", path, &[], b"").unwrap();
        assert_eq!(
            (refused.status, refused.reason(), refused.header("www-authenticate")),
            (401, "unauth", Some("Bearer"))
        );
        let wrong = request(&node.admin(), "POST", path, &[("Authorization", "Bearer nope")], b"").unwrap();
        assert_eq!(wrong.status, 401);
    }
    let reload = node.admin_post("/admin/reload", "");
    assert_eq!((reload.status, reload.json()), (200, serde_json::json!({"changed": []})));
    assert_eq!(node.admin_post("/admin/shutdown", "").status, 202);
    assert_eq!(node.wait(), 0);
}

#[test]
fn a_token_can_come_from_the_environment_or_another_file() {
    let origin = Origin::start(|_| Script::Echo);
    let token = "0123456789abcdef0123";
    let node = Node::start_with(&["gateway"], &config(&origin.url(), "", ""), &[("RON_ADMIN__TOKEN", token)]);
    let bearer = format!("Bearer {token}");
    let reload = request(&node.admin(), "POST", "/admin/reload", &[("Authorization", &bearer)], b"").unwrap();
    assert_eq!(reload.status, 200);
    assert!(!node.dir.path().join("admin.token").exists());
    assert!(!node.log().contains(token), "no secret in the log");
    let text = config(&origin.url(), "", "")
        .replace("[admin]", "[node]\nkey_file = \"my.key\"\n[admin]\ntoken_file = \"my.token\"");
    let other = Node::start(&["gateway"], &text);
    assert!(other.dir.path().join("my.token").exists() && other.dir.path().join("my.key").exists());
}

#[test]
fn the_kill_hook_needs_token_and_danger_ok_and_tasks_come_back() {
    let (safe, _origin) = node("");
    let body = r#"{"service":"gateway","kind":"listener","fraction":1.0}"#;
    assert_eq!(safe.admin_post("/debug/tasks/kill", body).status, 404);
    let (node, _origin) = node("[node]\ndanger_ok = true");
    assert_eq!(
        request(&node.admin(), "POST", "/debug/tasks/kill", &[], body.as_bytes()).unwrap().status,
        404
    );
    assert_eq!(node.admin_post("/debug/tasks/kill", body).json(), serde_json::json!({"killed": 1}));
    node.eventually("the listener is missed", |node| {
        node.metric("service_restarts_total{service=\"gateway\"}") == 1.0
    });
    node.eventually("the gateway serves again", |node| {
        get(&node.admin(), "/readyz").status == 200 && get(&node.gateway(), "/x").status == 200
    });
    assert_eq!(node.metric("tasks_panicked_total{service=\"gateway\",kind=\"listener\"}"), 1.0);
    assert_eq!(node.admin_post("/debug/tasks/kill", "{}").reason(), "malformed");
}

#[test]
fn the_sixth_kill_fails_the_service_closed() {
    let body = r#"{"service":"gateway","kind":"housekeeping","fraction":1.0}"#;
    let kill_six = |node: &Node| {
        for restarts in 1..=6 {
            node.eventually("the task runs again", |node| {
                node.admin_post("/debug/tasks/kill", body).json()["killed"] == 1
            });
            if restarts < 6 {
                node.eventually("it is restarted", |node| {
                    node.metric("service_restarts_total{service=\"gateway\"}") >= f64::from(restarts)
                });
            }
        }
    };
    let (degraded, _origin) = node("[node]\ndanger_ok = true\non_fatal = \"degrade\"");
    kill_six(&degraded);
    degraded.eventually("it has failed", |node| {
        let ready = get(&node.admin(), "/readyz?scope=read");
        ready.status == 503
            && ready.json()["services"]["gateway"] == "failed"
            && ready.header("retry-after").is_some()
    });
    assert!(degraded.log().contains("failed 6 times"), "{}", degraded.log());
    let (mut exits, _origin) = node("[node]\ndanger_ok = true");
    kill_six(&exits);
    assert_eq!(exits.wait(), 1);
}
