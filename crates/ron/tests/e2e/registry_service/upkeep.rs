//! What goes on beside: retention, configuration, limits, amnesia.

use super::{OPEN, Registry, log_key, now, settings, trust_roots};
use ron_log::{Note, PruneManifest};
use ron_testkit::{Client, Node, get, request};
use serde_json::json;
use std::io::{BufRead as _, BufReader};

#[test]
fn what_a_checkpoint_covers_is_let_go_and_can_still_be_proved() {
    let mut registry = Registry::start(&format!(
        "{OPEN}checkpoint = {{ interval = \"100ms\", entries = 10 }}\n\
         retention = {{ policy = \"count\", max_count = 20, max_age = \"1d\", target_bytes = \"1MiB\" }}\n"
    ));
    registry.committed(290);
    registry.node.eventually("it is pruned", |_| {
        registry.commit("more", &json!(1));
        registry.get("/registry/retention").json()["min_version"].as_u64().unwrap() > 0
    });
    let page = registry.get("/registry/retention").json();
    let min = page["min_version"].as_u64().unwrap();
    let newest = page["manifests"].as_array().unwrap().last().unwrap().as_str().unwrap().to_owned();
    let manifest =
        PruneManifest::verify(&Note::parse(newest.as_bytes()).unwrap(), &log_key(&registry)).unwrap();
    assert!(manifest.min_version <= min && manifest.size > manifest.min_version);
    let gone = registry.get("/registry/3");
    assert_eq!((gone.status, gone.reason()), (410, "pruned"));
    assert!(gone.json()["checkpoint"]["note"].as_str().unwrap().contains("test.example/log"));
    assert_eq!(registry.get("/registry/log?from=1").status, 410);
    assert_eq!(registry.get("/registry/items?at=3").status, 410);
    assert_eq!(registry.get("/tile/entries/000.p/8").status, 410);
    assert_eq!(min, 256, "whole bundles go");
    let kept = registry.get("/tile/entries/001.p/20");
    let first = get(&registry.address(), "/registry/256").json()["payload_b3"].clone();
    assert!(kept.status == 200 && kept.text().contains(first.as_str().unwrap()), "{}", kept.status);
    assert_eq!(registry.get("/tile/0/000.p/8").status, 200, "hash tiles stay");
    assert_eq!(registry.get("/registry/proof/inclusion?version=3").status, 200);
    let stream =
        request(&registry.address(), "GET", "/registry/stream", &[("Last-Event-ID", "1-00000000")], b"");
    assert!(stream.unwrap().text().contains("registry.pruned"));
    std::fs::write(registry.node.dir.path().join("pruned.export"), registry.get("/registry/export").body)
        .unwrap();
    let args = ["registry", "verify", "--export", "pruned.export"];
    let verified = ron_testkit::ron(&args, registry.node.dir.path());
    assert_eq!(verified.status.code(), Some(0), "{verified:?}");
    let said = format!(
        "before version {} the hashes alone",
        registry.get("/registry/retention").json()["min_version"]
    );
    assert!(String::from_utf8_lossy(&verified.stdout).contains(&said), "{verified:?}");
    let head = registry.get("/registry/head").json()["version"].clone();
    registry.restart("TERM");
    assert_eq!(registry.get("/registry/head").json()["version"], head);
    registry.node.eventually("a pruned log is found good", |node| {
        node.metric("registry_verified_version") == head.as_f64().unwrap()
    });
    assert_eq!(registry.ready("write").status, 200);
}

#[test]
fn limits_refuse_what_is_too_much() {
    let limits = |rps: u32| {
        format!(
            "{OPEN}limits = {{ rps = {rps}, inflight = 2, pending_max = 2, proposal_ttl = \"1h\", max_conns = 64, \
             max_conns_per_ip = 60, read_timeout = \"400ms\", write_timeout = \"5s\", idle_timeout = \"600ms\" }}\n\
             stream = {{ max_clients = 1 }}\n"
        )
    };
    let registry = Registry::start(&limits(0));
    for n in 0..2 {
        assert_eq!(
            registry.post("/registry/proposals", &registry.payload(&format!("{n}"), &json!(n))).status,
            202
        );
    }
    assert_eq!(registry.metric("registry_pending_proposals"), 2.0);
    let third = registry.post("/registry/proposals", &registry.payload("3", &json!(3)));
    assert_eq!((third.status, third.reason()), (429, "busy"), "only so many may be pending");
    let begun = now();
    let expires = registry.get("/registry/proposals").json()["proposals"][0]["expires_at"].as_u64().unwrap();
    assert!(expires <= begun + 3_600_000, "the time to live bounds what it asks for");
    let address = registry.address();
    let inflight = "inflight_requests{service=\"registry\"}";
    let waits = address.clone();
    let waiting = std::thread::spawn(move || get(&waits, "/registry/head?wait=20s&after=0").status);
    registry.node.eventually("one waits", |node| node.metric("stream_clients") == 1.0);
    assert_eq!(registry.metric(inflight), 0.0, "whoever waits keeps nobody from being answered");
    assert_eq!(registry.get("/registry/head?wait=1s").reason(), "busy", "only so many may wait");
    let bodies: Vec<_> =
        (0..2).map(|n| registry.approved(&registry.payload(&n.to_string(), &json!(n)))).collect();
    registry.node.admin_post("/debug/registry/stall", r#"{"task":"storage","for":"1s"}"#);
    std::thread::scope(|scope| {
        let commit = |body| registry.post("/registry/proposals?commit=true", body).status;
        let [first, second] = [&bodies[0], &bodies[1]].map(|body| scope.spawn(move || commit(body)));
        registry.node.eventually("two are being answered", |node| node.metric(inflight) == 2.0);
        assert_eq!(registry.get("/registry/head").reason(), "busy");
        assert_eq!((first.join().unwrap(), second.join().unwrap()), (201, 201));
    });
    assert_eq!(waiting.join().unwrap(), 200);
    let late = request(&address, "GET", "/registry/1", &[("Deadline", "1")], b"").unwrap();
    assert_eq!((late.status, late.reason()), (504, "timeout"), "a read has a deadline too");
    let mut slow = Client::connect(&address).unwrap();
    slow.send(b"POST /registry/proposals HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nab").unwrap();
    assert_eq!(slow.read_answer("POST").unwrap().reason(), "read_timeout");
    let mut idle = Client::connect(&address).unwrap();
    idle.request("GET", "/registry/head", &[], b"").unwrap();
    assert!(idle.read_to_end().is_ok(), "an idle connection is closed");
    // One a second, so that no machine is too slow to ask for more.
    registry.node.write_config(&settings(&limits(1)));
    assert_eq!(registry.node.admin_post("/admin/reload", "").status, 200);
    registry
        .node
        .eventually("the rate is limited", |_| registry.get("/registry/head").reason() == "quota_global");
}

#[test]
fn a_new_configuration_is_taken_over_or_refused_as_a_whole() {
    let registry = Registry::start(&format!("{OPEN}fsync = true\n"));
    registry.node.write_config(&settings("auth = \"capability\"\nfsync = true\n"));
    assert_eq!(registry.node.admin_post("/admin/reload", "").status, 200);
    assert_eq!(registry.commit("a", &json!(1)).reason(), "unauth");
    registry.node.eventually("it is counted", |node| {
        node.metric("registry_reload_success_total{source=\"config\"}") == 1.0
    });
    let refused = settings(
        "channels = { proposals = 3, approvals = 4, committed = 5, events = 1024 }\nfsync = false\n",
    );
    registry.node.write_config(&refused);
    let answer = registry.node.admin_post("/admin/reload", "");
    assert_eq!(answer.status, 422);
    assert!(registry.metric("registry_reload_fail_total{reason=\"refused\"}") >= 1.0);
    for key in ["channels.proposals", "channels.approvals", "channels.committed", "registry.fsync"] {
        assert!(answer.text().contains(key), "{}", answer.text());
    }
    let check = |text: &str, problems: &[&str]| {
        std::fs::write(registry.node.dir.path().join("other.toml"), text).unwrap();
        let checked = ron_testkit::ron(&["config", "check", "other.toml"], registry.node.dir.path());
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(64), "{said}");
        assert!(problems.iter().all(|problem| said.contains(problem)), "{said}");
    };
    check(
        "[registry]\nlisten = \"0.0.0.0:8082\"\nauth = \"open\"\nfsync = false\ntrust_roots_b3 = \"b3:12\"\n\
         [registry.witness]\nurls = [\"ftp:x\", \"http://127.0.0.1:1\"]\nquorum = 3\n[registry.channels]\nevents = 7\n",
        &[
            "registry.auth",
            "registry.fsync",
            "registry.trust_roots_b3",
            "registry.witness.urls[0]",
            "lacks the witness's key",
            "registry.witness.quorum",
            "registry.channels.events",
        ],
    );
    check("[node]\namnesia = true\n[registry]\ndir = \"x\"\n", &["registry.dir"]);
    check(
        "[registry]\nauth = \"open\"\n[registry.tls]\nlisten = \"0.0.0.0:8443\"\ncert = \"c\"\nkey = \"k\"\n",
        &["registry.auth"],
    );
    check("[registry]\nread_timeout = \"5s\"\n", &["registry.limits.read_timeout"]);
}

#[test]
fn trust_roots_are_pinned_and_others_refused() {
    let mut registry = Registry::start(OPEN);
    let pin = trust_roots(&registry.keys).b3().to_string();
    registry.node.stop();
    let dir = registry.node.dir.path();
    let run = |text: &str| {
        std::fs::write(dir.join("ron.toml"), settings(text)).unwrap();
        let ended = ron_testkit::ron(&["run", "registry", "--config", "ron.toml"], dir);
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    let other = format!("trust_roots_b3 = \"b3:{}\"\n", "0".repeat(64));
    let (code, said) = run(&other);
    assert!(code == Some(1) && said.contains(&pin), "{said}");
    std::fs::write(dir.join("trust-roots.json"), trust_roots(&registry.keys[..2]).canonical()).unwrap();
    let (code, said) = run("");
    assert!(code == Some(1) && said.contains(&pin), "pinned at the first start: {said}");
    std::fs::remove_file(dir.join("trust-roots.json")).unwrap();
    let (code, said) = run("");
    assert!(code == Some(1) && said.contains("ron registry genesis"), "{said}");
}

#[test]
fn another_node_key_is_no_damage_and_says_what_to_do() {
    let mut registry = Registry::start(OPEN);
    registry.node.eventually("a checkpoint is signed", |_| registry.get("/checkpoint").status == 200);
    registry.node.stop();
    let dir = registry.node.dir.path();
    std::fs::remove_file(dir.join("node.key")).unwrap();
    // The node makes itself another.
    let refused = ron_testkit::ron(&["run", "registry", "--config", "ron.toml"], dir);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(
        said.contains("another key than this node's") && said.contains("put the node.key back"),
        "{said}"
    );
}

#[test]
fn under_amnesia_nothing_is_written_and_everything_works() {
    let dir = tempfile::tempdir().unwrap();
    let text =
        "[node]\namnesia = true\n[admin]\nlisten = \"127.0.0.1:0\"\n[registry]\nlisten = \"127.0.0.1:0\"\n";
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_ron"))
        .args(["run", "registry", "--config", "ron.toml"])
        .current_dir(dir.path())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let addresses: serde_json::Value = serde_json::from_str(&line).unwrap();
    let address = addresses["registry"]["http"].as_str().unwrap().to_owned();
    assert_eq!(get(&address, "/registry/head").json()["version"], 0);
    assert_eq!(get(&address, "/registry/items/signers/main").json()["body"]["threshold"], 1);
    child.kill().unwrap();
    child.wait().unwrap();
    let names: Vec<_> =
        std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["ron.toml"]);
}

#[test]
fn a_tls_listener_stands_beside_the_plain_one() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ron_testkit::ron(&["init", "tls-demo", "--tls"], dir.path()).status.success());
    std::fs::rename(dir.path().join("tls-demo/tls"), dir.path().join("tls")).unwrap();
    let text = "[admin]\nlisten = \"127.0.0.1:0\"\n[gateway]\nenabled = false\n[edge]\nenabled = false\n[overlay]\nenabled = false\n[registry]\nlisten = \"127.0.0.1:0\"\n\
                [registry.tls]\nlisten = \"127.0.0.1:0\"\ncert = \"tls/server.pem\"\nkey = \"tls/server.key\"\n";
    std::fs::write(dir.path().join("ron.toml"), text).unwrap();
    let node = Node::spawn(dir, &["up", "--config", "ron.toml"], &[]);
    let port = node.address("registry", "https").rsplit(':').next().unwrap().to_owned();
    let url = format!("https://localhost:{port}/registry/head");
    let ca = node.dir.path().join("tls/ca.pem");
    let got = std::process::Command::new("curl")
        .args(["-s", "--cacert", ca.to_str().unwrap(), &url])
        .output()
        .unwrap();
    let head: serde_json::Value = serde_json::from_slice(&got.stdout).unwrap();
    assert_eq!(head["version"], 0);
}
