//! Crashes, slow and damaged storage, stalled tasks.

use super::{OPEN, Registry, flip, payload};
use ron_testkit::{Answer, Client, Random, SmallDisk, command};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Kills of the short edition; `REGISTRY_KILLS=200` for the long one.
const KILLS: u64 = 6;

#[test]
fn every_acknowledged_commit_survives_being_killed_at_any_moment() {
    let kills = std::env::var("REGISTRY_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(KILLS);
    let mut registry = Registry::start(&format!("{OPEN}checkpoint = {{ interval = \"50ms\", entries = 5 }}"));
    let acknowledged: Arc<Mutex<BTreeMap<u64, String>>> = Arc::default();
    let mut random = Random::new(17);
    for round in 0..kills {
        let address = registry.address();
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (registry, address, acknowledged) = (&registry, address.clone(), acknowledged.clone());
                scope.spawn(move || {
                    write_until_it_dies(registry, &address, &format!("{round}-{worker}"), &acknowledged)
                });
            }
            std::thread::sleep(Duration::from_secs_f64(0.05 + 0.25 * random.unit()));
            registry.node.signal("KILL");
        });
        registry.restart("KILL");
        let head = registry.get("/registry/head").json()["version"].as_u64().unwrap();
        let known = acknowledged.lock().unwrap().clone();
        if let Some((last, _)) = known.last_key_value() {
            assert!(*last <= head, "version {last} was acknowledged, and HEAD is {head}");
        }
        let kept = chain(&registry, head);
        for (version, hash) in &known {
            assert_eq!(kept[*version as usize], *hash, "version {version} after kill {round}");
        }
    }
    assert!(!acknowledged.lock().unwrap().is_empty(), "something was written");
    std::fs::write(registry.node.dir.path().join("all.export"), registry.get("/registry/export").body)
        .unwrap();
    let verified =
        ron_testkit::ron(&["registry", "verify", "--export", "all.export"], registry.node.dir.path());
    assert_eq!(verified.status.code(), Some(0), "{verified:?}");
}

/// The hashes of all entries, each of which must name the one before.
fn chain(registry: &Registry, head: u64) -> Vec<String> {
    let mut hashes: Vec<String> = Vec::new();
    while hashes.len() as u64 <= head {
        let page = registry.get(&format!("/registry/log?from={}&limit=1000", hashes.len())).json();
        for entry in page["entries"].as_array().unwrap() {
            assert_eq!(entry["version"], hashes.len(), "no version is missing or there twice");
            let before = hashes.last();
            assert!(
                before.is_none_or(|before| entry["prev"] == before.as_str()),
                "the chain breaks at {}",
                hashes.len()
            );
            hashes.push(entry["hash"].as_str().unwrap().to_owned());
        }
    }
    hashes
}

fn write_until_it_dies(
    registry: &Registry,
    address: &str,
    name: &str,
    acknowledged: &Mutex<BTreeMap<u64, String>>,
) {
    let Ok(mut client) = Client::connect(address) else { return };
    for n in 0.. {
        let Ok(head) = client.request("GET", "/registry/head", &[], b"") else { return };
        let body = registry.approved(&payload(&head.json(), &format!("{name}-{n}"), &json!(n))).to_string();
        let path = "/registry/proposals?commit=true";
        let json = [("Content-Type", "application/json")];
        let Ok(answer) = client.request("POST", path, &json, body.as_bytes()) else { return };
        if answer.status == 201 {
            let done = answer.json();
            let (version, hash) =
                (done["version"].as_u64().unwrap(), done["hash"].as_str().unwrap().to_owned());
            let former = acknowledged.lock().unwrap().insert(version, hash.clone());
            assert!(former.is_none_or(|former| former == hash), "version {version} was given twice");
        }
    }
}

#[test]
fn slow_storage_sheds_writes_first_and_an_open_outcome_is_never_a_guess() {
    let registry =
        Registry::start(&format!("{OPEN}channels = {{ proposals = 1, approvals = 1, committed = 16 }}"));
    let stall = |task: &str| {
        let answer = registry
            .node
            .admin_post("/debug/registry/stall", &json!({"task": task, "for": "3s"}).to_string());
        assert_eq!(answer.status, 200, "{}", answer.text());
    };
    let bodies: Vec<Value> =
        (0..4).map(|n| registry.approved(&registry.payload(&n.to_string(), &json!(n)))).collect();
    stall("storage");
    let path = "/registry/proposals?commit=true";
    let send = |body: &Value, timeout: &str| {
        registry.post_with(path, &[("Request-Timeout", timeout)], body.to_string().as_bytes())
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| send(&bodies[0], "1"));
        registry.node.eventually("writes are shed", |_| registry.ready("write").status == 503);
        assert!(registry.ready("write").text().contains("registry.storage_slow"));
        assert_eq!(registry.ready("read").status, 200);
        assert_eq!(registry.get("/registry/head").status, 200, "reads go on");
        let queued = scope.spawn(|| send(&bodies[1], "300ms"));
        registry.node.eventually("one waits", |node| {
            node.metric("queue_depth{service=\"registry\",queue=\"proposals\"}") == 1.0
        });
        let busy = send(&bodies[2], "300ms");
        assert_eq!((busy.status, busy.reason()), (429, "busy"));
        let endpoint = "busy_rejections_total{service=\"registry\",endpoint=\"propose\",queue=\"proposals\"}";
        assert_eq!(registry.metric(endpoint), 1.0);
        assert_eq!(registry.metric("queue_dropped_total{service=\"registry\",queue=\"proposals\"}"), 1.0);
        let queued = queued.join().unwrap();
        assert_eq!((queued.status, queued.reason()), (504, "timeout"), "it was not begun");
        let open = first.join().unwrap();
        assert_eq!((open.status, open.reason()), (504, "commit_unknown"));
        let status = open.header("location").unwrap().to_owned();
        let seen = registry.get(&status);
        assert_eq!(seen.status, 200, "an open outcome is a state: {}", seen.text());
        registry.node.eventually("it is decided", |_| registry.get(&status).json()["state"] == "committed");
    });
    registry.node.eventually("writes are taken again", |_| registry.ready("write").status == 200);
    assert_eq!(
        registry.get("/registry/head").json()["version"],
        1,
        "what timed out in the queue was not done"
    );
    assert!(registry.metric("io_timeouts_total{service=\"registry\",op=\"commit\"}") >= 2.0);
    // Nobody waits for the publisher.
    stall("publisher");
    let begun = Instant::now();
    registry.committed(40);
    assert!(begun.elapsed() < Duration::from_secs(3), "commits do not wait for the publisher");
    registry.node.eventually("it is told what it missed", |node| {
        node.metric("bus_lagged_total{service=\"registry\",consumer=\"publisher\"}") > 0.0
    });
}

#[test]
fn the_committer_is_restarted_and_nothing_is_lost() {
    let registry = Registry::start(OPEN);
    registry.committed(3);
    for task in ["committer", "checkpointor", "publisher", "deep_verifier", "retention", "config_reloader"] {
        let body = json!({"service": "registry", "kind": task, "fraction": 1.0}).to_string();
        assert_eq!(registry.node.admin_post("/debug/tasks/kill", &body).json()["killed"], 1, "{task}");
    }
    registry.node.eventually("it serves again", |_| registry.ready("write").status == 200);
    registry.committed(3);
    assert_eq!(registry.get("/registry/head").json()["version"], 6);
    assert!(registry.metric("registry_recoveries_total{kind=\"start\"}") >= 2.0);
}

#[test]
fn a_drain_finishes_what_it_was_given() {
    let mut registry = Registry::start(OPEN);
    let body = registry.approved(&registry.payload("a", &json!(1))).to_string();
    registry.node.admin_post("/debug/registry/stall", r#"{"task":"storage","for":"1s"}"#);
    let address = registry.address();
    let sent = std::thread::spawn(move || {
        let json = [("Content-Type", "application/json")];
        ron_testkit::request(&address, "POST", "/registry/proposals?commit=true", &json, body.as_bytes())
            .unwrap()
    });
    registry.node.eventually("it is being answered", |node| {
        node.metric("inflight_requests{service=\"registry\"}") == 1.0
    });
    assert_eq!(registry.node.stop(), 0);
    assert_eq!(sent.join().unwrap().status, 201);
}

/// What a change is answered while whose commit the node is asked to end.
fn ended_while(registry: &mut Registry, path: &'static str, meanwhile: &str) -> Answer {
    let body = registry.approved(&registry.payload("a", &json!(1))).to_string();
    let address = registry.address();
    let sent = std::thread::spawn(move || {
        let json = [("Content-Type", "application/json")];
        ron_testkit::request(&address, "POST", path, &json, body.as_bytes()).unwrap()
    });
    registry.node.eventually(meanwhile, |node| {
        let [waiting, answering] = ["stream_clients", "inflight_requests{service=\"registry\"}"];
        let head = registry.get("/registry/head").json()["version"] == 1;
        node.metric(answering) == 1.0 || (node.metric(waiting) == 1.0 && head)
    });
    registry.node.signal("TERM");
    registry.node.wait();
    sent.join().unwrap()
}

#[test]
fn a_commit_that_the_end_of_a_drain_cuts_off_is_said_to_be_open() {
    let mut registry = Registry::start(OPEN);
    registry.node.admin_post("/debug/registry/stall", r#"{"task":"storage","for":"8s"}"#);
    let open = ended_while(&mut registry, "/registry/proposals?commit=true", "it is being written");
    assert_eq!((open.status, open.reason()), (504, "commit_unknown"), "{}", open.text());
    assert!(open.header("location").unwrap().starts_with("/registry/proposals/b3:"));
}

#[test]
fn who_waits_for_witnesses_when_the_node_ends_is_told_at_once_that_it_is_committed() {
    let key = ron_log::NoteKey::cosignature(
        "dead",
        ed25519_dalek::SigningKey::from_bytes(&[5; 32]).verifying_key(),
    );
    let witness = format!("{OPEN}witness = {{ urls = [\"http://127.0.0.1:1 {key}\"] }}");
    let mut registry = Registry::start(&witness);
    registry.node.eventually("a dead witness holds up nobody", |_| registry.ready("write").status == 200);
    let path = "/registry/proposals?commit=true&wait=witnessed:1";
    let committed = ended_while(&mut registry, path, "it waits for its witness");
    assert_eq!((committed.status, committed.reason()), (504, "timeout"), "{}", committed.text());
    assert!(committed.text().contains("committed as version 1"), "{}", committed.text());
    assert!(committed.header("location").unwrap().starts_with("/registry/proposals/b3:"));
}

/// Changes a byte of every place in the database's file that has this text.
fn flip_text(registry: &Registry, text: &str) {
    let file = registry.node.dir.path().join("reg/registry.redb");
    let bytes = std::fs::read(&file).unwrap();
    let places: Vec<usize> = bytes
        .windows(text.len())
        .enumerate()
        .filter(|(_, found)| *found == text.as_bytes())
        .map(|(at, _)| at)
        .collect();
    assert!(!places.is_empty(), "it lies in the file");
    for place in &places {
        flip(&file, place + 10);
    }
}

/// A registry of 31 entries under a checkpoint that was killed.
fn killed() -> Registry {
    let mut registry =
        Registry::start(&format!("{OPEN}checkpoint = {{ interval = \"100ms\", entries = 1 }}"));
    registry.committed(30);
    registry.node.eventually("a checkpoint covers it", |_| {
        registry.get("/registry/head").json()["checkpoint"]["size"] == 31
    });
    registry.node.signal("KILL");
    registry.node.wait();
    registry
}

/// What is said of the folder of a node that does not run.
fn verified(registry: &Registry) -> (Option<i32>, String) {
    let verify = ["registry", "verify", "--dir", "reg", "--trust-roots", "trust-roots.json"];
    let verified = ron_testkit::ron(&verify, registry.node.dir.path());
    (verified.status.code(), String::from_utf8_lossy(&verified.stdout).into_owned())
}

#[test]
fn a_changed_byte_is_found_and_named_after_a_crash_too() {
    let mut registry = killed();
    flip_text(&registry, r#""version":17}"#);
    let (code, said) = verified(&registry);
    assert!(code == Some(1) && said.contains("version 17"), "{said}");
    registry.start_again();
    registry.node.eventually("the damage is named", |_| {
        registry.ready("write").text().contains("registry.corrupt_version_17")
    });
    assert_eq!((registry.ready("read").status, registry.get("/registry/16").status), (200, 200));
}

#[test]
fn a_changed_byte_of_the_newest_checkpoint_is_found_after_a_crash_too() {
    let registry = killed();
    let (code, said) = verified(&registry);
    assert!(code == Some(0) && said.contains("signed up to 31 of 31"), "{said}");
    let signed = std::fs::read_to_string(registry.node.dir.path().join("reg.signed")).unwrap();
    let line = signed.lines().find(|line| line.starts_with('\u{2014}')).unwrap();
    flip_text(&registry, &line[line.len() - 40..]);
    let (code, said) = verified(&registry);
    assert!(code == Some(1) && said.contains("version 30"), "{said}");
}

#[test]
fn a_changed_byte_on_disk_is_found_and_named() {
    let mut registry =
        Registry::start(&format!("{OPEN}checkpoint = {{ interval = \"1h\", entries = 100000 }}"));
    registry.committed(30);
    let prev = registry.get("/registry/17").json()["prev"].as_str().unwrap().to_owned();
    registry.node.stop();
    flip_text(&registry, &prev);
    registry.start_again();
    registry.node.eventually("the damage is named", |_| {
        registry.ready("write").text().contains("registry.corrupt_version_17")
    });
    assert_eq!((registry.ready("write").status, registry.ready("read").status), (503, 200));
    let refused = registry.commit("x", &json!(1));
    assert_eq!((refused.status, refused.reason()), (503, "storage"), "{}", refused.text());
    let read = registry.get("/registry/16");
    assert_eq!(
        (read.status, read.header("cache-control"), read.header("etag")),
        (200, Some("no-store"), None)
    );
    // What it has signed can be had, and is not taken for all there was.
    let (dir, url) = (registry.node.dir.path(), format!("http://{}", registry.address()));
    let ron = |args: &[&str]| {
        let output = command(&[&["registry"], args].concat(), dir).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (code, said) = ron(&["export", "all", "--url", &url]);
    assert!(code == Some(1) && said.contains("version 17 is damaged, says the node"), "{said}");
    assert!(said.contains("all.part is what came") && !dir.join("all").exists(), "{said}");
    let (code, said) = ron(&["verify", "--export", "all.part", "--trust-roots", "trust-roots.json"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = ron(&["verify", "--url", &url]);
    assert!(code == Some(1) && said.contains("version 17 is damaged, says the node"), "{said}");
}

#[test]
fn what_takes_much_memory_again_and_again_has_a_thread_of_its_own() {
    let registry = Registry::start("");
    registry.node.eventually("there is a checkpoint", |_| registry.get("/checkpoint").status == 200);
    let tasks = std::fs::read_dir(format!("/proc/{}/task", registry.node.pid())).unwrap();
    let names = tasks.map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap());
    let names: Vec<String> = names.map(|name| name.trim().to_owned()).collect();
    for own in ["committer", "checkpointor", "retention", "verifier"] {
        assert!(names.iter().any(|name| name == own), "{own} in {names:?}");
    }
}

/// A process that ends with the test.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A node on a disk that has no room for `addresses.json`, and what it said when it was ready.
fn on_a_full_disk(dir: &std::path::Path) -> (Ending, Value) {
    let mut command = command(&["run", "registry", "--config", "ron.toml"], dir);
    let mut child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let ready = lines.find_map(|line| {
        let line: Value =
            serde_json::from_str(&line).ok().filter(|line: &Value| line["message"] == "ready")?;
        serde_json::from_str(line["addresses"].as_str()?).ok()
    });
    // What it says from then on is read, so that it does not wait for it.
    std::thread::spawn(move || lines.count());
    (Ending(child), ready.expect("it became ready"))
}

#[test]
fn a_start_on_a_full_disk_serves_what_the_journal_has() {
    let Some(disk) = SmallDisk::mount("24m") else {
        eprintln!("not run: mounting a small file system needs root");
        return;
    };
    let mut registry = Registry::start_in(tempfile::tempdir_in(disk.path()).unwrap(), OPEN);
    // So large that the database must grow to take in what the journal has.
    for n in 0..30 {
        assert_eq!(registry.commit(&format!("{n}"), &json!("x".repeat(40_000))).status, 201);
    }
    registry.node.signal("KILL");
    registry.node.wait();
    let ballast = disk.fill();
    let (ending, addresses) = on_a_full_disk(registry.node.dir.path());
    registry.node.addresses = addresses;
    assert_eq!(registry.get("/registry/head").json()["version"], 30);
    assert_eq!(registry.get("/registry/items/x-demo/29").status, 200);
    registry.node.eventually("writes are not ready", |_| registry.ready("write").status == 503);
    assert_eq!(registry.ready("read").status, 200);
    assert!(registry.ready("write").text().contains("registry.storage_full"));
    let refused = registry.commit("y", &json!(1));
    assert_eq!((refused.status, refused.reason()), (503, "storage"), "{}", refused.text());
    std::fs::remove_file(ballast).unwrap();
    registry.node.eventually("with room again, so are writes", |_| registry.ready("write").status == 200);
    assert_eq!(registry.commit("y", &json!(1)).status, 201);
    assert_eq!(registry.get("/registry/head").json()["version"], 31);
    drop(ending);
    registry.start_again();
    assert_eq!(registry.get("/registry/head").json()["version"], 31);
}
