//! Configuration that changes while requests flow.

use crate::config;
use ron_testkit::{Client, Node, Origin, Script, get, request};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

fn origin() -> Origin {
    Origin::start(|_| Script::Body(b"hi".to_vec()))
}

#[test]
fn routes_change_on_sighup_and_on_file_change() {
    let origin = origin();
    let first = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &first);
    assert_eq!(get(&node.gateway(), "/x").status, 200);
    node.write_config(&first.replace("path = \"/*\"", "path = \"/only/*\""));
    node.signal("HUP");
    node.eventually("the route is gone", |node| get(&node.gateway(), "/x").status == 404);
    assert_eq!(get(&node.gateway(), "/only/x").status, 200);
    node.write_config(&first);
    node.eventually("the file is watched", |node| get(&node.gateway(), "/x").status == 200);
    assert!(node.metric("config_reload_total{service=\"kernel\",result=\"ok\"}") >= 2.0);
}

#[test]
fn a_bad_file_keeps_the_last_good_configuration_and_says_so() {
    let origin = origin();
    let good = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &good);
    node.write_config(&format!("{good}nonsense = 1\n"));
    let refused = node.admin_post("/admin/reload", "");
    assert_eq!((refused.status, refused.reason()), (422, "invalid"));
    assert!(
        refused.json()["problems"][0].as_str().unwrap().contains("gateway.routes[0].nonsense: unknown key")
    );
    let ready = get(&node.admin(), "/readyz");
    assert_eq!(
        (ready.status, &ready.json()["degraded"], &ready.json()["missing"][0]),
        (200, &true.into(), &"config_reload".into())
    );
    let why = ready.json()["why"]["config_reload"].to_string();
    assert!(why.contains("gateway.routes[0].nonsense: unknown key"), "{why}");
    assert_eq!(get(&node.gateway(), "/x").status, 200);
    assert!(node.metric("config_reload_total{service=\"kernel\",result=\"failed\"}") >= 1.0);
    node.write_config(&good);
    node.eventually("mended", |node| get(&node.admin(), "/readyz").json()["degraded"] == false);
}

#[test]
fn a_change_that_needs_a_restart_is_refused_by_name() {
    let origin = origin();
    let first = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &first);
    node.write_config(&first.replacen(
        "[gateway]\nlisten = \"127.0.0.1:0\"",
        "[gateway]\nlisten = \"127.0.0.1:1\"\nmax_inflight = 3",
        1,
    ));
    let refused = node.admin_post("/admin/reload", "");
    let problem = refused.json()["problems"][0].as_str().unwrap().to_owned();
    assert!(problem.contains("gateway.listen: changed, but takes effect only at a restart"), "{problem}");
    node.write_config(&first.replacen(
        "[gateway]\nlisten = \"127.0.0.1:0\"",
        "[gateway]\nlisten = \"127.0.0.1:1\"\nmax_inflight = 0",
        1,
    ));
    let problems = node.admin_post("/admin/reload", "").json()["problems"].to_string();
    assert!(
        problems.contains("gateway.listen: changed") && problems.contains("max_inflight: must be"),
        "{problems}"
    );
    node.write_config(&first.replace("[gateway]\n", "[gateway]\nmax_inflight = 3\n"));
    node.eventually("what is hot is taken up", |node| {
        let answer = node.admin_post("/admin/reload", "");
        answer.status == 200 && get(&node.admin(), "/readyz").json()["degraded"] == false
    });
}

#[test]
fn no_request_is_lost_while_configuration_and_certificates_change() {
    let origin = origin();
    let dir = tempfile::tempdir().unwrap();
    ron_testkit::ron(&["init", "a", "--tls"], dir.path());
    ron_testkit::ron(&["init", "b", "--tls"], dir.path());
    let tls = "tls = { listen = \"127.0.0.1:0\", cert = \"server.pem\", key = \"server.key\" }";
    let text = config(&origin.url(), tls, "");
    let place = |node_dir: &std::path::Path, from: &str| {
        for name in ["server.pem", "server.key"] {
            let (target, temporary) = (node_dir.join(name), node_dir.join(format!("{name}.new")));
            std::fs::copy(dir.path().join(from).join("tls").join(name), &temporary).unwrap();
            std::fs::rename(temporary, target).unwrap();
        }
    };
    let node_dir = tempfile::tempdir().unwrap();
    place(node_dir.path(), "a");
    std::fs::write(node_dir.path().join("ron.toml"), &text).unwrap();
    let node = Node::spawn(node_dir, &["run", "gateway", "--config", "ron.toml"], &[]);
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let clients: Vec<_> = (0..4)
        .map(|n| {
            let (stop, done, gateway) = (stop.clone(), done.clone(), node.gateway());
            std::thread::spawn(move || {
                let mut client = Client::connect(&gateway).unwrap();
                while !stop.load(Ordering::SeqCst) {
                    // Half keep their connection, half make a new one each time.
                    let answer = if n % 2 == 0 {
                        client.request("GET", "/", &[], b"")
                    } else {
                        request(&gateway, "GET", "/", &[], b"")
                    };
                    assert_eq!(answer.expect("no request is lost").status, 200);
                    done.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let serial = |node: &Node| {
        let script = format!(
            "openssl s_client -connect {} </dev/null 2>/dev/null | openssl x509 -noout -serial",
            node.address("gateway", "https")
        );
        let output = std::process::Command::new("sh").args(["-c", &script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let first = serial(&node);
    assert!(first.starts_with("serial="), "{first}");
    place(node.dir.path(), "b");
    node.eventually("the new certificate is served", |node| serial(node) != first);
    for round in 0..10 {
        let changed = text.replace("[gateway]\n", &format!("[gateway]\nmax_inflight = {}\n", 100 + round));
        node.write_config(&changed);
        assert_eq!(node.admin_post("/admin/reload", "").status, 200);
        std::thread::sleep(Duration::from_millis(30));
    }
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        client.join().unwrap();
    }
    assert!(done.load(Ordering::SeqCst) > 200);
    assert_eq!(node.metric("tasks_panicked_total{service=\"gateway\",kind=\"request\"}"), 0.0);
}

#[test]
fn the_log_level_changes_without_a_restart() {
    let origin = origin();
    let text = config(&origin.url(), "", "");
    let node = Node::start(&["gateway"], &text);
    get(&node.gateway(), "/quiet");
    node.write_config(&format!("[log]\nlevel = \"debug\"\n{text}"));
    node.eventually("debug lines appear", |node| {
        get(&node.gateway(), "/loud");
        node.log().contains("\"DEBUG\"")
    });
}

#[test]
fn a_reload_says_what_it_changed_and_shows_no_secret() {
    let origin = origin();
    let tenant = |key: &str, quantum: u32| {
        let key = ron_testkit::api_key(key);
        let auth = "[gateway.auth]\nmode = \"api_key\"\n";
        format!("[[gateway.tenants]]\nid = \"a\"\nquantum = {quantum}\nkeys = [\"{key}\"]\n{auth}")
    };
    let node = Node::start(&["gateway"], &config(&origin.url(), "", &tenant("old", 1)));
    let share = |node: &Node| node.admin_get("/gateway/status").json()["tenants"][0]["quantum"].clone();
    assert_eq!(share(&node), 1);
    let ask = |key: &str| request(&node.gateway(), "GET", "/x", &[("X-Api-Key", key)], b"").unwrap().status;
    assert_eq!((ask("old"), ask("new")), (200, 401));
    node.write_config(&config(&origin.url(), "max_inflight = 7", &tenant("new", 4)));
    let answer = node.admin_post("/admin/reload", "").json();
    let changed = ["gateway.max_inflight", "gateway.tenants[0].keys", "gateway.tenants[0].quantum"];
    // The watcher may have been first.
    assert!(
        answer["changed"] == serde_json::json!(changed) || answer["changed"] == serde_json::json!([]),
        "{answer}"
    );
    assert_eq!((share(&node), ask("old"), ask("new")), (4.into(), 401, 200), "at once");
    let log = node.log();
    for line in [
        "gateway.max_inflight: 512 -> 7",
        "gateway.tenants[0].quantum: 1 -> 4",
        "gateway.tenants[0].keys: [\\\"secret ",
    ] {
        assert!(log.contains(line) || log.contains(&line.replace('\\', "")), "{line} is not in {log}");
    }
    for key in ["old", "new"] {
        assert!(
            !log.contains(&ron_testkit::api_key(key)[7..]),
            "a hash is as good as its key to whoever can guess"
        );
    }
    let shown = ron_testkit::ron(&["config", "show", "--config", "ron.toml"], node.dir.path());
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("gateway.tenants[0].keys = [\"secret ") && !shown.contains("sha256:"), "{shown}");
}
