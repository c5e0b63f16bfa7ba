//! The store of the edge from outside: killed, damaged, full, and with an object larger than memory should hold.

use crate::edge::{Edge, config};
use ron_testkit::{Client, Node, SmallDisk, get, ron, ron_with};
use std::collections::HashMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes that can be told from those of any other number.
fn bytes(number: u64, len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn object_file(edge: &Edge, address: &str) -> PathBuf {
    let hex = address.strip_prefix("b3:").unwrap();
    edge.node.dir.path().join("cas/b3").join(&hex[..2]).join(&hex[2..4]).join(hex)
}

fn flip(path: &Path, at: usize) {
    let mut data = std::fs::read(path).unwrap();
    data[at] ^= 0x10;
    std::fs::write(path, data).unwrap();
}

/// Puts objects until the node is gone; notes what was acknowledged.
fn put_until_killed(
    address: &str,
    token: &str,
    from: u64,
    acknowledged: &Mutex<HashMap<u64, (String, usize)>>,
    stop: &AtomicBool,
) {
    for number in from.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        let len = if number % 3 == 0 { 200_000 } else { 3000 };
        let body = bytes(number, len);
        let bearer = format!("Bearer {token}");
        let path = format!("/edge/assets/o/{number}.json");
        let sent = Client::connect(address)
            .and_then(|mut client| client.request("PUT", &path, &[("Authorization", &bearer)], &body));
        match sent {
            Ok(answer) if matches!(answer.status, 200 | 201) => {
                let b3 = answer.json()["b3"].as_str().unwrap().to_owned();
                acknowledged.lock().unwrap().insert(number, (b3, len));
            }
            Ok(answer) => panic!("{}: {}", answer.status, answer.text()),
            Err(_gone) => return,
        }
    }
}

#[test]
fn killed_fifty_times_while_storing_it_keeps_what_it_acknowledged_and_serves_nothing_false() {
    let text = config("ingress = { rps_limit = 0 }", "[edge.cas]\nverify = \"always\"\nfsync = \"always\"");
    let mut edge = Edge::of(Node::start(&["edge"], &text));
    let acknowledged = Mutex::new(HashMap::new());
    for round in 0..50u64 {
        let (address, token, stop) = (edge.address(), edge.token.clone(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (acknowledged, stop) = (&acknowledged, &stop);
            for writer in 0..2u64 {
                let (address, token) = (&address, &token);
                let from = round * 10_000 + writer * 5000;
                scope.spawn(move || put_until_killed(address, token, from, acknowledged, stop));
            }
            let before = acknowledged.lock().unwrap().len();
            // Another moment in each round, and never before something was stored in it.
            let target = before + 1 + usize::try_from(round % 7).unwrap();
            while acknowledged.lock().unwrap().len() < target {
                std::thread::sleep(Duration::from_micros(200 + 37 * round));
            }
            edge.node.signal("KILL");
            edge.node.wait();
            stop.store(true, Ordering::SeqCst);
        });
        let dir = std::mem::replace(&mut edge.node.dir, tempfile::tempdir().unwrap());
        let _ = std::fs::remove_file(dir.path().join("addresses.json"));
        edge.node = Node::spawn(dir, &["run", "edge", "--config", "ron.toml"], &[]);
    }
    let acknowledged = acknowledged.into_inner().unwrap();
    assert!(acknowledged.len() >= 50, "{}", acknowledged.len());
    let mut client = Client::connect(&edge.address()).unwrap();
    for (number, (b3, len)) in &acknowledged {
        for path in [format!("/edge/assets/o/{number}.json"), format!("/edge/cas/{b3}")] {
            let answer = client.request("GET", &path, &[], b"").unwrap();
            assert_eq!(answer.status, 200, "{path} was acknowledged");
            assert!(answer.body == bytes(*number, *len), "{path} has other bytes");
        }
    }
    // Whatever lies in its place is whole, acknowledged or not.
    let scrubbed = ron(&["edge", "scrub", "--config", "ron.toml", "--json"], edge.node.dir.path());
    let seen: serde_json::Value = serde_json::from_slice(&scrubbed.stdout).unwrap();
    assert_eq!((scrubbed.status.code(), seen["bad"].as_u64()), (Some(0), Some(0)), "{seen}");
    assert!(seen["objects"].as_u64().unwrap() >= acknowledged.len() as u64);
    let all =
        edge.send("POST", "/edge/purge", &[], br#"{"prefix":"o/"}"#).json()["removed"].as_u64().unwrap();
    assert!(all >= acknowledged.len() as u64);
}

#[test]
fn a_flipped_bit_never_reaches_a_client_as_good_content() {
    let edge = Edge::start("", "[edge.cas]\nverify = \"always\"");
    let body = bytes(1, 1_000_000);
    let address = edge.put("/edge/assets/a.bin", &body).json()["b3"].as_str().unwrap().to_owned();
    assert_eq!(edge.get("/edge/assets/a.bin", &[]).body, body);
    let file = object_file(&edge, &address);
    // In a later group the answer has begun: it breaks off and is no whole answer.
    flip(&file, 700_000);
    let cut = ron_testkit::request(&edge.address(), "GET", "/edge/assets/a.bin", &[], b"");
    assert!(cut.is_err(), "the stream is cut: {:?}", cut.map(|answer| answer.body.len()));
    let before = edge.get("/edge/assets/a.bin", &[("Range", "bytes=0-99999")]);
    assert!(before.status == 206 && before.body == body[..100_000], "what is good can still be had");
    let hit = edge.get("/edge/assets/a.bin", &[("Range", "bytes=700000-700001")]);
    assert_eq!((hit.status, hit.reason()), (502, "digest_mismatch"));
    assert!(edge.node.metric("edge_rejects_total{reason=\"digest_mismatch\"}") >= 1.0);
    edge.node.eventually("readiness says so", |node| {
        let ready = get(&node.admin(), "/readyz").json();
        ready["ready"] == true && ready["missing"][0] == "edge.corruption"
    });
    assert_eq!(edge.put("/edge/cas", &body).status, 200, "storing it again mends it");
    assert_eq!(edge.get("/edge/assets/a.bin", &[]).body, body);
    edge.node.eventually("readiness is whole again", |node| {
        get(&node.admin(), "/readyz").json()["degraded"] == false
    });
    // In the first group it is told before anything is sent.
    flip(&file, 5);
    let first = edge.get("/edge/assets/a.bin", &[]);
    assert_eq!((first.status, first.reason()), (502, "digest_mismatch"));
    // A small object has no tree and is checked all the same.
    let small = edge.put("/edge/cas", b"small").json()["b3"].as_str().unwrap().to_owned();
    flip(&object_file(&edge, &small), 2);
    assert_eq!(edge.get(&format!("/edge/cas/{small}"), &[]).status, 502);
}

#[test]
fn the_scrub_finds_what_nobody_asked_for() {
    let edge = Edge::start("", "[edge.cas]\nverify = \"never\"\nfsync = \"never\"\nscrub_interval = \"1s\"");
    let address = edge.put("/edge/cas", &bytes(1, 300_000)).json()["b3"].as_str().unwrap().to_owned();
    flip(&object_file(&edge, &address), 250_000);
    assert_eq!(edge.get(&format!("/edge/cas/{address}"), &[]).status, 200, "reads are not checked");
    edge.node.eventually("the scrub has found it", |node| {
        let ready = get(&node.admin(), "/readyz").json();
        ready["missing"][0] == "edge.corruption" && node.metric("edge_scrub_ratio") > 0.999
    });
    let asked = ron(&["edge", "scrub", "--config", "ron.toml"], edge.node.dir.path());
    assert_eq!(asked.status.code(), Some(1), "a bad object is a failure");
    assert_eq!(String::from_utf8_lossy(&asked.stdout).trim(), "1 objects read, 1 of them bad");
}

#[test]
fn a_full_disk_is_told_and_nothing_half_stored_remains() {
    let Some(disk) = SmallDisk::mount("6m") else {
        eprintln!("not run: mounting a small file system needs root");
        return;
    };
    let folder = disk.path().join("cas");
    let edge = Edge::start("", &format!("[edge.cas]\ndir = \"{}\"", folder.display()));
    let body = bytes(1, 1 << 20);
    assert_eq!(edge.put("/edge/assets/kept", &body).status, 201);
    let full = edge.put("/edge/cas", &bytes(2, 8 << 20));
    assert_eq!((full.status, full.reason()), (507, "storage"), "{}", full.text());
    assert!(edge.node.metric("edge_rejects_total{reason=\"storage\"}") >= 1.0);
    assert_eq!(std::fs::read_dir(folder.join("tmp")).unwrap().count(), 0);
    assert_eq!(edge.get("/edge/assets/kept", &[]).body, body, "what was stored is served");
    // Fill what is left, so that the disk stays full.
    let ballast = disk.fill();
    assert_eq!(edge.put("/edge/assets/more", &bytes(3, 500_000)).status, 507);
    edge.node.eventually("writes are not ready, reads are", |node| {
        let write = get(&node.admin(), "/readyz");
        write.status == 503
            && write.json()["missing"][0] == "edge.storage"
            && get(&node.admin(), "/readyz?scope=read").status == 200
    });
    std::fs::remove_file(&ballast).unwrap();
    edge.node
        .eventually("with room again, so are writes", |node| get(&node.admin(), "/readyz").status == 200);
    assert_eq!(edge.put("/edge/assets/more", &bytes(3, 500_000)).status, 201);
    drop(edge);
}

#[test]
fn memory_is_flat_whatever_the_size_of_an_object() {
    const LEN: usize = 300 << 20;
    let edge = Edge::start("ingress = { rps_limit = 0 }", "[edge.cas]\nverify = \"always\"");
    assert_eq!(edge.put("/edge/assets/warm.bin", &bytes(9, 4 << 20)).status, 201);
    assert_eq!(edge.get("/edge/assets/warm.bin", &[]).status, 200);
    let idle = edge.node.rss_mib();
    let file = edge.node.dir.path().join("large");
    std::fs::write(&file, bytes(5, LEN)).unwrap();
    let most = Mutex::new(0.0f64);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                let now = edge.node.rss_mib();
                let mut most = most.lock().unwrap();
                *most = most.max(now);
                drop(most);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let put = ron(
            &["edge", "put", "large", "--name", "big/a b.bin", "--config", "ron.toml"],
            edge.node.dir.path(),
        );
        assert_eq!(put.status.code(), Some(0), "{}", String::from_utf8_lossy(&put.stderr));
        let got =
            ron(&["edge", "get", "big/a b.bin", "-o", "back", "--config", "ron.toml"], edge.node.dir.path());
        assert_eq!(got.status.code(), Some(0), "{}", String::from_utf8_lossy(&got.stderr));
        stop.store(true, Ordering::SeqCst);
    });
    let same =
        Command::new("cmp").args(["large", "back"]).current_dir(edge.node.dir.path()).status().unwrap();
    assert!(same.success());
    let grown = *most.lock().unwrap() - idle;
    assert!(grown < 32.0, "{grown} MiB more than at rest for an object of 300 MiB");
}

#[test]
fn a_pipe_is_put_to_its_end_and_what_is_no_file_or_header_is_told() {
    let edge = Edge::start("", "");
    let dir = edge.node.dir.path();
    let put = ["edge", "put", "/dev/stdin", "--name", "p", "--config", "ron.toml"];
    let mut piped = ron_testkit::command(&put, dir).stdin(Stdio::piped()).spawn().unwrap();
    piped.stdin.take().unwrap().write_all(b"hello").unwrap();
    assert!(piped.wait().unwrap().success());
    assert_eq!(edge.get("/edge/assets/p", &[]).text(), "hello");
    std::fs::write(dir.join("empty"), "").unwrap();
    let run = |args: &[&str]| ron(&[&["edge", "put"], args, &["--config", "ron.toml"]].concat(), dir);
    assert!(run(&["empty", "--name", "e"]).status.success());
    assert_eq!(edge.get("/edge/assets/e", &[]).body.len(), 0);
    let folder = run(&["."]);
    assert!(String::from_utf8_lossy(&folder.stderr).contains("is a folder"), "{folder:?}");
    let injected = run(&["empty", "--name", "x", "--type", "text/plain\r\nSurrogate-Key: k"]);
    assert_eq!(injected.status.code(), Some(64), "{injected:?}");
    assert_eq!(edge.get("/edge/assets/x", &[]).status, 403, "nothing was sent");
}

#[test]
fn the_commands_store_find_and_forget() {
    let edge = Edge::start("", "");
    let dir = edge.node.dir.path();
    let run = |args: &[&str]| {
        let output = ron(&[&["edge"], args, &["--config", "ron.toml"]].concat(), dir);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    std::fs::write(dir.join("f.txt"), "a file").unwrap();
    let (code, address, _) = run(&["put", "f.txt"]);
    assert_eq!((code, address.len()), (0, 67), "{address}");
    assert_eq!(run(&["put", "f.txt", "--name", "/t/ä.txt", "--key", "k", "--type", "text/x-own"]).1, address);
    assert_eq!(run(&["get", &address]).1, "a file");
    assert_eq!(run(&["get", "t/ä.txt", "-o", "g.txt"]).0, 0);
    assert_eq!(std::fs::read_to_string(dir.join("g.txt")).unwrap(), "a file");
    let (code, text, _) = run(&["stat", "t/ä.txt", "--json"]);
    let stat: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (code, &stat["b3"], &stat["size"], &stat["type"]),
        (0, &address.as_str().into(), &6.into(), &"text/x-own".into())
    );
    assert!(run(&["stat", &address]).1.starts_with(&address));
    assert_eq!(run(&["scrub"]).1, "1 objects read, 0 of them bad");
    assert_eq!(run(&["purge", "--key", "k"]).1, "removed 1");
    assert_eq!(run(&["purge", "--path", "t/ä.txt", "--json"]).1, r#"{"removed":0}"#);
    let (code, _, error) = run(&["get", "t/ä.txt"]);
    assert!(code == 1 && error.contains("403 not_allowed"), "{error}");
    let (code, _, said) = run(&["stat", "t/ä.txt"]);
    assert_eq!((code, said.contains("is not stored")), (1, true), "{said}");
    assert_eq!((run(&["purge"]).0, run(&["put", "nowhere"]).0), (64, 1));
    // By its URL alone, without and with a capability.
    let url = format!("http://{}", edge.address());
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::write(elsewhere.path().join("f"), "x").unwrap();
    let refused = ron(&["edge", "put", "f", "--url", &url], elsewhere.path());
    assert_eq!(refused.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("401 unauth"));
    let token = [("RON_TOKEN", edge.token.as_str())];
    assert_eq!(
        ron_with(&["edge", "put", "f", "--url", &url], elsewhere.path(), &token).status.code(),
        Some(0)
    );
    assert_eq!(ron(&["edge", "put", "f", "--url", "ftp://x"], elsewhere.path()).status.code(), Some(64));
    assert_eq!(ron(&["edge", "put", "f"], elsewhere.path()).status.code(), Some(64), "there is no node here");
}

#[test]
fn a_small_object_is_served_from_memory_and_replaced_with_its_file() {
    let edge = Edge::start("", "[edge.cas]\nverify = \"always\"");
    let address = edge.put("/edge/assets/a", b"a small one").json()["b3"].as_str().unwrap().to_owned();
    let file = object_file(&edge, &address);
    assert_eq!(edge.get("/edge/assets/a", &[]).text(), "a small one");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(edge.get("/edge/assets/a", &[]).text(), "a small one", "no file was needed for it");
    assert_eq!(edge.get("/edge/assets/a", &[("Range", "bytes=2-6")]).text(), "small");
    let several = edge.get("/edge/assets/a", &[("Range", "bytes=0-0,8-10")]);
    assert!(several.status == 206 && several.text().contains("\r\n\r\none\r\n--"), "{}", several.text());
    assert_eq!(edge.put("/edge/assets/a", b"a small one").status, 200);
    assert_eq!(std::fs::read(&file).unwrap(), b"a small one", "what comes again is written again");
    flip(&file, 3);
    assert_eq!(edge.get("/edge/assets/a", &[]).status, 502, "and read again");
}

#[test]
fn a_killed_keeper_comes_back_and_no_upload_is_lost() {
    let edge = Edge::of(Node::start(
        &["edge"],
        &format!("[node]\ndanger_ok = true\n{}", config("ingress = { rps_limit = 0 }", "")),
    ));
    let (stop, stored) = (AtomicBool::new(false), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0u64.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let answer = edge.put(&format!("/edge/assets/k/{number}"), &bytes(number, 5000));
                assert_eq!(answer.status, 201, "{}", answer.text());
                stored.lock().unwrap().push(number);
            }
        });
        for round in 1..=3 {
            let before = stored.lock().unwrap().len();
            while stored.lock().unwrap().len() < before + 5 {
                std::thread::sleep(Duration::from_millis(1));
            }
            let kill = r#"{"service":"edge","kind":"keeper","fraction":1.0}"#;
            assert_eq!(edge.node.admin_post("/debug/tasks/kill", kill).status, 200);
            edge.node.eventually("it was restarted", |node| {
                node.metric("service_restarts_total{service=\"edge\"}") >= f64::from(round)
            });
            edge.node.eventually("and is ready", |node| get(&node.admin(), "/readyz").status == 200);
        }
        stop.store(true, Ordering::SeqCst);
    });
    for number in stored.into_inner().unwrap() {
        assert!(edge.get(&format!("/edge/assets/k/{number}"), &[]).body == bytes(number, 5000));
    }
}
