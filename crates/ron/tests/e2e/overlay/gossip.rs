//! Messages among real processes.

use super::{Follower, Raw, connected, connects, node, open, peer, peers, publish, text};
use ron_testkit::{Client, Node, command, get, request, ron};
use std::io::Write as _;
use std::process::Stdio;

#[test]
fn a_message_reaches_every_node_of_a_line_and_commands_show_it() {
    let a = node("admit = \"any\"", "");
    let b = node(&format!("admit = \"any\"\n{}", peers(&[&a])), "");
    let c = node(&peers(&[&b]), "");
    connects(&b, 2);
    let (near, far) = (Follower::start(&a, "news/x"), Follower::start(&c, "news/x"));
    let said = ron(&["overlay", "pub", "news/x", "hello", "--config", "ron.toml"], a.dir.path());
    assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
    let (here, there) = (near.next(), far.next());
    assert!(String::from_utf8_lossy(&said.stdout).contains(here["id"].as_str().unwrap()));
    assert_eq!((&here["payload"], &here["hops"]), (&"hello".into(), &0.into()));
    assert_eq!((&there["payload"], &there["hops"], &there["id"]), (&"hello".into(), &2.into(), &here["id"]));
    assert_eq!(there["origin"], a.address("overlay", "node").as_str());
    // Bytes that are no text, from standard input.
    let args = ["overlay", "pub", "news/x", "-", "--json", "--config", "ron.toml"];
    let mut child =
        command(&args, c.dir.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&[0xff, 0]).unwrap();
    let output = child.wait_with_output().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&answer["queued"], &answer["refused"]), (&1.into(), &0.into()));
    assert_eq!(near.next()["payload_base64"], "/wA=");
    let shown = ron(&["overlay", "peers", "--config", "ron.toml"], b.dir.path());
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    for word in [peer(&b), a.address("overlay", "node"), c.address("overlay", "node"), "open".to_owned()] {
        assert!(shown.contains(&word), "{word} is not in {shown}");
    }
    c.eventually("all of it is counted", |c| {
        c.metric("gossip_messages_total{result=\"delivered\"}") == 1.0
            && c.metric("delivery_hops_bucket{le=\"1\"}") < c.metric("delivery_hops_bucket{le=\"2\"}")
            && c.metric("delivery_seconds_count") >= 1.0
            && c.metric("gossip_frames_total{dir=\"rx\"}") >= 1.0
            && c.metric("gossip_frames_total{dir=\"tx\"}") >= 1.0
    });
    assert!(c.metric("gossip_duplicate_ratio") <= 1.0);
}

#[test]
fn several_messages_in_one_request_are_published_in_order() {
    let a = node("admit = \"any\"", "");
    let b = node(&peers(&[&a]), "");
    connects(&b, 1);
    let follower = Follower::start(&b, "many");
    // More than one request may have, so that there are two.
    let lines: Vec<String> = (0..130).map(|number| format!("message {number}")).collect();
    let args = ["overlay", "pub", "many", "-", "--lines", "--config", "ron.toml"];
    let mut child =
        command(&args, a.dir.path()).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "130 messages are published\n");
    let mut sorted = lines;
    sorted.sort();
    assert_eq!(follower.payloads(130), sorted);
    // As bundles, which are few frames.
    b.eventually("all of them are counted", |b| {
        b.metric("gossip_messages_total{result=\"delivered\"}") == 130.0
    });
    assert!(a.metric("gossip_frames_total{dir=\"tx\"}") < 20.0);
    let token = std::fs::read_to_string(a.dir.path().join("admin.token")).unwrap();
    let fields =
        [("Authorization", &*format!("Bearer {}", token.trim())), ("Content-Type", "application/x-ndjson")];
    let post = |body: &[u8]| request(&a.admin(), "POST", "/overlay/topics/many", &fields, body).unwrap();
    let answer = post(b"{\"payload\":\"x\"}\n{\"payload_base64\":\"/w==\"}\n");
    assert_eq!(answer.status, 202, "{}", answer.text());
    let body = answer.json();
    assert_eq!((&body["accepted"], &body["messages"][1]["refused"]), (&2.into(), &0.into()));
    let came = [follower.next(), follower.next()];
    for (number, key, payload) in [(0, "payload", "x"), (1, "payload_base64", "/w==")] {
        assert_eq!(came[number][key], payload);
        assert_eq!(came[number]["id"], body["messages"][number]["id"]);
    }
    assert_eq!(post(b"no JSON").reason(), "malformed");
    assert_eq!(post("{\"payload\":\"\"}\n".repeat(129).as_bytes()).reason(), "body_cap");
}

#[test]
fn a_publisher_that_waits_for_room_loses_nothing_however_fast_it_is() {
    let keys = "[overlay.peer]\nmax_rps = 0\negress_bytes = \"1200KiB\"\n";
    let a = node("admit = \"any\"", keys);
    let b = node(&peers(&[&a]), keys);
    connects(&a, 1);
    let token = std::fs::read_to_string(a.dir.path().join("admin.token")).unwrap();
    let body = format!("{{\"payload\":\"{}\"}}\n", "x".repeat(2000)).repeat(128);
    let request = format!(
        "POST /overlay/topics/t HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nRequest-Timeout: 20\r\n\
         Content-Type: application/x-ndjson\r\nContent-Length: {}\r\n\r\n{body}",
        token.trim(),
        body.len()
    );
    let mut client = Client::connect(&a.admin()).unwrap();
    let mut sender = client.sender().unwrap();
    // None waits for the answer to another.
    let sent =
        std::thread::spawn(move || (0..80).for_each(|_| sender.write_all(request.as_bytes()).unwrap()));
    for _ in 0..80 {
        let answer = client.read_answer("POST").unwrap();
        assert_eq!((answer.status, &answer.json()["accepted"]), (202, &128.into()), "{}", answer.text());
        let told = answer.json();
        let told = told["messages"].as_array().unwrap();
        assert!(told.iter().all(|it| it["queued"] == 1), "{:?}", told[0]);
    }
    sent.join().unwrap();
    b.eventually("it has all", |b| b.metric("gossip_messages_total{result=\"delivered\"}") == 80.0 * 128.0);
    assert_eq!(get(&a.admin(), "/readyz").status, 200, "nobody was pressed");
}

#[test]
fn a_burst_of_bundles_is_followed_without_a_gap() {
    let a = node("admit = \"any\"", "[overlay.peer]\nmax_rps = 0\n");
    let b = node(&peers(&[&a]), "");
    connects(&b, 1);
    let follower = Follower::start(&b, "t");
    let token = std::fs::read_to_string(a.dir.path().join("admin.token")).unwrap();
    let mut requests = String::new();
    for first in (0..2500).step_by(125) {
        let lines: String = (first..first + 125).map(|it| format!("{{\"payload\":\"{it:06}\"}}\n")).collect();
        requests += &format!(
            "POST /overlay/topics/t HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {}\r\nRequest-Timeout: 20\r\n\
             Content-Type: application/x-ndjson\r\nContent-Length: {}\r\n\r\n{lines}",
            token.trim(),
            lines.len()
        );
    }
    // More than a follower's queue holds, at once.
    let mut client = Client::connect(&a.admin()).unwrap();
    client.send(requests.as_bytes()).unwrap();
    for _ in 0..20 {
        assert_eq!(client.read_answer("POST").unwrap().json()["accepted"], 125);
    }
    for number in 0..2500 {
        assert_eq!(follower.next()["payload"], format!("{number:06}"), "each in its turn");
    }
    assert_eq!(b.metric("subscriber_lagged_total"), 0.0);
}

#[test]
fn a_new_node_joins_whom_it_is_told_to() {
    let a = node("admit = \"any\"", "");
    let dir = tempfile::tempdir().unwrap();
    let wrong = ron(&["init", "x", "--join", "nobody"], dir.path());
    assert_eq!(wrong.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("ed25519:…@host:port"));
    let made = ron(&["init", ".", "--join", &peer(&a)], dir.path());
    let key = ron(&["key", "show", "node.key"], dir.path()).stdout;
    let entry = format!("\"{}@HOST:PORT\"", String::from_utf8_lossy(&key).trim());
    let said = String::from_utf8_lossy(&made.stdout).into_owned();
    assert!(made.status.success() && said.contains(&entry), "{said}");
    let free = ["admin", "overlay"].map(|service| format!("{service}.listen=127.0.0.1:0"));
    let args = ["run", "overlay", "--config", "ron.toml", "--set", &free[0], "--set", &free[1]];
    let b = Node::spawn(dir, &args, &[]);
    connects(&b, 1);
    connects(&a, 1);
}

#[test]
fn what_is_no_topic_no_method_or_too_large_is_refused() {
    let node = open("", "[overlay.gossip]\nmax_message_bytes = \"64KiB\"\n");
    assert_eq!(node.admin_post("/overlay/topics/Bad", "x").reason(), "malformed");
    assert_eq!(node.admin_get("/overlay/nothing").reason(), "not_found");
    assert_eq!(node.admin_post("/overlay/peers", "").reason(), "method");
    assert_eq!(node.admin_post("/overlay/topics/a", &"x".repeat(64 << 10)).status, 202);
    assert_eq!(node.admin_post("/overlay/topics/a", &"x".repeat((64 << 10) + 1)).reason(), "body_cap");
    assert_eq!(get(&node.admin(), "/overlay/peers").reason(), "unauth");
    assert_eq!(get(&node.admin(), "/overlay/topics/a").reason(), "unauth");
    for bad in ["Bad", "", "a b", "a HTTP/1.1\r\nX-A: b", "a?b", &"a".repeat(129)] {
        for args in [&["overlay", "pub", bad, "x"][..], &["overlay", "sub", bad]] {
            let said = ron(&[args, &["--config", "ron.toml"]].concat(), node.dir.path());
            let why = String::from_utf8_lossy(&said.stderr).into_owned();
            assert!(said.status.code() == Some(64) && why.contains("is no topic"), "{args:?}: {why}");
        }
    }
}

#[test]
fn messages_larger_than_a_frame_come_in_chunks() {
    let gossip = "[overlay.gossip]\nmax_frame_bytes = \"64KiB\"\nchunk_bytes = \"16KiB\"\n";
    let a = node("admit = \"any\"", gossip);
    let b = node(&peers(&[&a]), gossip);
    connects(&b, 1);
    let follower = Follower::start(&b, "large");
    let large = "0123456789abcdef".repeat(20_000);
    let answer = publish(&a, "large", &large);
    assert_eq!((&answer["queued"], &answer["lazy"]), (&0.into(), &1.into()));
    assert!(follower.next()["payload"] == large.as_str());
}

#[test]
fn a_node_that_was_killed_comes_back_and_catches_up() {
    let keys = tempfile::tempdir().unwrap();
    let named = |name: &str| format!("[node]\nkey_file = \"{}/{name}\"\n", keys.path().display());
    let history = "[overlay.gossip]\nseen_max = 1000\nskew = \"1m\"\nhistory = { count = 100, bytes = \"1MiB\", age = \"5m\" }\n";
    let a = node("admit = \"any\"", history);
    let config = text("127.0.0.1:0", &peers(&[&a]), &format!("{history}{}", named("b.key")));
    let b = Node::start(&["overlay"], &config);
    connects(&a, 1);
    b.signal("KILL");
    a.eventually("it is missed", |a| a.metric("sessions_active") == 0.0);
    for number in 0..20 {
        publish(&a, "t", &number.to_string());
    }
    let again = Node::start(&["overlay"], &config);
    assert_eq!(again.address("overlay", "node"), b.address("overlay", "node"));
    again.eventually("it has caught up", |b| b.metric("gossip_messages_total{result=\"delivered\"}") == 20.0);
    // A publisher that is killed is dialled again where it was.
    let follower = Follower::start(&again, "t");
    publish(&a, "t", "after");
    assert_eq!(follower.payloads(1), ["after"]);
}

#[test]
fn a_listener_that_was_killed_is_dialled_again() {
    let keys = tempfile::tempdir().unwrap();
    let named = format!("[node]\nkey_file = \"{}/a.key\"\n", keys.path().display());
    let first = node("admit = \"any\"", &named);
    let address = first.address("overlay", "oap");
    let b = node(&peers(&[&first]), "");
    connects(&b, 1);
    first.signal("KILL");
    b.eventually("it is missed", |b| b.metric("sessions_active") == 0.0);
    b.eventually("it is dialled in vain", |b| {
        b.metric("backoff_retries_total{service=\"overlay\",op=\"connect\"}") >= 2.0
    });
    let second = Node::start(&["overlay"], &text(&address, "admit = \"any\"", &named));
    connects(&b, 1);
    drop(second);
}

#[test]
fn a_rolling_restart_loses_nothing() {
    let keys = tempfile::tempdir().unwrap();
    let rates = "[overlay.peer]\nmax_rps = 0\n";
    let a = node("admit = \"any\"", rates);
    let start = |name: &str, listen: &str, of: &[&Node]| {
        let rest = format!("{rates}[node]\nkey_file = \"{}/{name}\"\n", keys.path().display());
        Node::start(&["overlay"], &text(listen, &format!("admit = \"any\"\n{}", peers(of)), &rest))
    };
    let b = start("b", "127.0.0.1:0", &[&a]);
    let c = start("c", "127.0.0.1:0", &[&a, &b]);
    let stays = start("d", "127.0.0.1:0", &[&a, &b, &c]);
    connects(&stays, 3);
    connects(&a, 3);
    let follower = Follower::start(&stays, "t");
    let over = std::sync::atomic::AtomicBool::new(false);
    let (sent, again) = std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            let mut sent = Vec::new();
            while !over.load(std::sync::atomic::Ordering::Relaxed) && sent.len() < 900 {
                let payload = format!("{:04}", sent.len());
                publish(&a, "t", &payload);
                sent.push(payload);
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
            sent
        });
        let mut again = Vec::new();
        for (name, mut node, others) in [("b", b, vec![&a]), ("c", c, vec![&a])] {
            let address = node.address("overlay", "oap");
            assert_eq!(node.stop(), 0);
            let new = start(name, &address, &others);
            stays.eventually("it is back", |stays| connected(stays).len() == 3);
            again.push(new);
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        (publisher.join().unwrap(), again)
    });
    assert!(follower.payloads(sent.len()) == sent, "{} messages", sent.len());
    for node in &again {
        node.eventually("it has caught up", |node| {
            node.metric("gossip_messages_total{result=\"delivered\"}") == sent.len() as f64
        });
    }
}

#[test]
fn a_shutdown_writes_what_is_queued_first() {
    let mut a = node("admit = \"any\"", "[overlay.peer]\nmax_rps = 0\n");
    let b = node(&peers(&[&a]), "[overlay.peer]\nmax_rps = 0\n");
    connects(&b, 1);
    let follower = Follower::start(&b, "t");
    let mut sent: Vec<String> = (0..200).map(|number| format!("{number:04}{}", "x".repeat(4000))).collect();
    for payload in &sent {
        publish(&a, "t", payload);
    }
    assert_eq!(a.stop(), 0);
    sent.sort();
    assert!(follower.payloads(200) == sent);
    b.eventually("the session is over", |b| b.metric("sessions_active") == 0.0);
}

#[test]
fn a_shutdown_with_a_peer_that_does_not_read_ends_in_time_and_says_what_was_not_written() {
    let mut a = open("", "[overlay.peer]\nmax_rps = 0\n[overlay.timeouts]\nwrite = \"60s\"\n");
    let _frozen = Raw::hello(&a, 7);
    connects(&a, 1);
    // The system takes some megabytes before it takes no more.
    let large = "x".repeat(100_000);
    let refused = (0..1000).any(|_| a.admin_post("/overlay/topics/t", &large).status == 429);
    assert!(refused, "its queue is full");
    let begun = std::time::Instant::now();
    assert_eq!(a.stop(), 0);
    assert!(begun.elapsed() < std::time::Duration::from_secs(5), "{:?}", begun.elapsed());
    let log = a.log();
    let said = log.lines().find(|line| line.contains("not written before the drain deadline")).expect(&log);
    let said: serde_json::Value = serde_json::from_str(said).unwrap();
    assert!(said["frames"].as_u64().unwrap() > 10 && said["bytes"].as_u64().unwrap() > 1 << 20, "{said}");
}

#[test]
fn a_shutdown_waits_for_whoever_was_only_told_of_a_message() {
    // More than may be pushed at once, and one that is never pushed.
    let mut a = node("admit = \"any\"", "");
    let b = node(&peers(&[&a]), "");
    connects(&b, 1);
    let follower = Follower::start(&b, "t");
    let mut sent: Vec<String> = (0..100).map(|number| format!("{number:04}")).collect();
    sent.push("x".repeat(2 << 20));
    for payload in &sent {
        publish(&a, "t", payload);
    }
    assert_eq!(a.stop(), 0);
    sent.sort();
    let arrived = follower.payloads(sent.len());
    assert!(arrived == sent, "{} of {}", arrived.len(), sent.len());
}

#[test]
fn an_engine_that_panics_begins_anew_and_the_peers_come_back() {
    let a = node("admit = \"any\"", "[node]\ndanger_ok = true\n");
    let b = node(&peers(&[&a]), "");
    connects(&b, 1);
    let follower = Follower::start(&a, "t");
    let body = r#"{"service":"overlay","kind":"gossip","fraction":1.0}"#;
    assert_eq!(a.admin_post("/debug/tasks/kill", body).json()["killed"], 1);
    a.eventually("it is restarted", |a| a.metric("service_restarts_total{service=\"overlay\"}") >= 1.0);
    a.eventually("the old session is over", |a| a.metric("session_close_total{reason=\"restart\"}") == 1.0);
    connects(&b, 1);
    connects(&a, 1);
    publish(&b, "t", "again");
    assert_eq!(follower.payloads(1), ["again"]);
}

#[test]
fn the_registrys_commits_are_told_to_whoever_follows_them() {
    let dir = tempfile::tempdir().unwrap();
    let off = "[gateway]\nenabled = false\n[edge]\nenabled = false\n[registry]\nlisten = \"127.0.0.1:0\"\nauth = \"open\"\n";
    let config = text("127.0.0.1:0", "enabled = true", off);
    std::fs::write(dir.path().join("ron.toml"), config).unwrap();
    let node = Node::spawn(dir, &["up", "--config", "ron.toml"], &[]);
    let follower = Follower::start(&node, "ron.registry.head");
    std::fs::write(node.dir.path().join("route.json"), r#"{"path":"/a","upstream":"u"}"#).unwrap();
    let url = format!("http://{}", node.address("registry", "http"));
    let run = |args: &[&str]| {
        let output = ron(&[args, &["--url", &url]].concat(), node.dir.path());
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let put = run(&["registry", "put", "route", "r", "route.json", "--yes"]);
    let id = put.trim();
    run(&["registry", "approve", id, "--key", "node.key", "--signer", "node", "--yes"]);
    run(&["registry", "commit", id]);
    let told: serde_json::Value = serde_json::from_str(follower.next()["payload"].as_str().unwrap()).unwrap();
    assert_eq!(told["version"], 1);
}
