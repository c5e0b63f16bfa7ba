//! Who becomes a peer, and how sessions begin and end.

use super::{Raw, connected, connects, node, open, peer, peers, reject, text};
use oap::control::Control;
use oap::frame::{APP_CONTROL, APP_GOSSIP, Flags, Frame};
use ron_testkit::{Node, ron};
use std::io::Read as _;

#[test]
fn nodes_prove_their_keys_and_only_listed_ones_are_admitted() {
    let a = node("advertise = \"a.example:9500\"", "");
    let b = node(&peers(&[&a]), "");
    let refused = "session_close_total{reason=\"policy\"}";
    a.eventually("the stranger is turned away", |a| {
        a.metric("handshake_failures_total{reason=\"policy\"}") >= 1.0
    });
    a.eventually("the log names it", |a| a.log().contains(&b.address("overlay", "node")));
    assert!(connected(&a).is_empty());
    // The stranger is told so, and tries less and less often.
    let waits = |b: &Node| b.admin_get("/overlay/peers").json()["peers"][0].clone();
    b.eventually("it knows why", |b| {
        let peer = waits(b);
        let why = peer["error"].as_str().unwrap_or_default();
        why.contains("does not admit this node") && peer["failures"].as_u64() >= Some(3)
    });
    assert!(b.metric("session_close_total{reason=\"unwelcome\"}") >= 3.0);
    // Listed by a reload, it gets in; struck off, it is shown out.
    let listed = |keys: &str| text("127.0.0.1:0", keys, "");
    a.write_config(&listed(&peers(&[&b])));
    assert_eq!(a.admin_post("/admin/reload", "").status, 200);
    connects(&a, 1);
    connects(&b, 1);
    assert!(a.metric("config_update_total") >= 1.0);
    let shown = &connected(&b)[0];
    assert_eq!(shown["node"], a.address("overlay", "node").as_str());
    assert_eq!((&shown["tls"], &shown["post_quantum"]), (&true.into(), &true.into()));
    assert_eq!(a.metric("sessions_active"), 1.0);
    assert!(a.metric("session_open_total") >= 1.0);
    let closed = a.metric(refused);
    a.write_config(&listed("advertise = \"b.example:1\""));
    assert_eq!(a.admin_post("/admin/reload", "").status, 200);
    a.eventually("it is shown out", |a| a.metric(refused) > closed && a.metric("sessions_active") == 0.0);
    let own = a.admin_get("/overlay/peers").json();
    assert_eq!(own["self"]["address"], "b.example:1");
}

#[test]
fn two_nodes_that_dial_each_other_have_one_session() {
    let a = node("", "");
    let b = node(&peers(&[&a]), "");
    a.write_config(&text("127.0.0.1:0", &peers(&[&b]), ""));
    assert_eq!(a.admin_post("/admin/reload", "").status, 200);
    for node in [&a, &b] {
        connects(node, 1);
    }
    a.eventually("both count one session", |a| {
        a.metric("sessions_active") == 1.0 && b.metric("sessions_active") == 1.0
    });
}

#[test]
fn bare_keys_and_post_quantum_are_negotiated_or_refused_aloud() {
    let raw = "[overlay.tls]\nidentity = \"rpk\"\n";
    let a = node("admit = \"any\"", raw);
    let b = node(&peers(&[&a]), raw);
    connects(&b, 1);
    assert_eq!(connected(&b)[0]["raw_key"], true);
    // One that shows certificates is met with a certificate.
    let c = node(&peers(&[&a]), "");
    connects(&c, 1);
    assert_eq!(connected(&c)[0]["raw_key"], false);
    let strict = node("admit = \"any\"", "[overlay.tls]\npq = \"required\"\n");
    let old = node(&peers(&[&strict]), "[overlay.tls]\npq = \"off\"\n");
    strict.eventually("the old one is refused", |node| {
        node.metric("handshake_failures_total{reason=\"pq\"}") >= 1.0
    });
    strict.eventually("the log says so", |node| node.log().contains("post-quantum"));
    old.eventually("the old one hears of it", |old| {
        old.admin_get("/overlay/peers").json()["peers"][0]["error"].is_string()
    });
    assert!(connected(&old).is_empty());
    // The strict one may also be who dials.
    let old = node("admit = \"any\"", "[overlay.tls]\npq = \"off\"\n");
    let strict = node(&peers(&[&old]), "[overlay.tls]\npq = \"required\"\n");
    strict.eventually("it says what the other lacks", |strict| {
        let error = strict.admin_get("/overlay/peers").json()["peers"][0]["error"].clone();
        error.as_str().is_some_and(|error| error.contains("post-quantum"))
    });
    assert!(strict.metric("handshake_failures_total{reason=\"pq\"}") >= 1.0);
}

#[test]
fn a_ca_can_vouch_for_keys() {
    // The CA of a development set signs for nobody else: any node of ours is a stranger to it.
    let dir = tempfile::tempdir().unwrap();
    assert!(ron(&["init", "x", "--tls"], dir.path()).status.success());
    let ca = dir.path().join("x/tls/ca.pem");
    let rest = format!("[overlay.tls]\nca = \"{0}\"\ncert = \"{0}\"\n", ca.display());
    std::fs::write(dir.path().join("ron.toml"), text("127.0.0.1:0", "", &rest)).unwrap();
    let run = ron(&["run", "overlay", "--config", "ron.toml"], dir.path());
    assert_eq!(run.status.code(), Some(1));
    let said = String::from_utf8_lossy(&run.stderr).into_owned() + &String::from_utf8_lossy(&run.stdout);
    assert!(said.contains("another key than this node's"), "{said}");
}

#[test]
fn what_cannot_be_is_named_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let check = |listen: &str, keys: &str, rest: &str, expected: &[&str]| {
        std::fs::write(dir.path().join("ron.toml"), text(listen, keys, rest)).unwrap();
        let checked = ron(&["config", "check", "ron.toml"], dir.path());
        let said = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert_eq!(checked.status.code(), Some(64), "{said}");
        for words in expected {
            assert!(said.contains(words), "{words} is not in {said}");
        }
    };
    let off = "[overlay.tls]\nmode = \"off\"\n";
    let key = "ed25519:6kpsY-KcUgq-9VB7Ey7F-ZVHdq6-vnuSQh7qaRRG0iw";
    check("0.0.0.0:9500", "", off, &["overlay.listen", "danger_ok"]);
    check("127.0.0.1:0", &format!("peers = [\"{key}@10.0.0.2:9500\"]"), off, &["overlay.peers[0]"]);
    check("127.0.0.1:9500", "peers = [\"nobody\"]", "", &["ed25519:…@host:port"]);
    #[cfg(not(feature = "quic"))]
    check("quic:127.0.0.1:9500", "", "", &["QUIC is not part"]);
    check(
        "127.0.0.1:0",
        "max_conns = 0\nqueue_bytes = \"1B\"",
        "[overlay.gossip]\nhop_limit = 0\nmax_frame_bytes = \"2MiB\"\n[overlay.peer]\ninflight_frames = 513\n\
         [overlay.tls]\nca = \"ca.pem\"\n",
        &[
            "overlay.max_conns",
            "overlay.queue_bytes",
            "hop_limit",
            "max_frame_bytes",
            "inflight_frames",
            "tls.cert",
        ],
    );
    check("127.0.0.1:0", "", "[overlay.transport]\nmax_conns = 3\n", &["overlay.max_conns"]);
    let allowed = text("0.0.0.0:0", "", &format!("{off}[node]\ndanger_ok = true\n"));
    std::fs::write(dir.path().join("ron.toml"), allowed).unwrap();
    assert!(ron(&["config", "check", "ron.toml"], dir.path()).status.success());
}

#[test]
fn every_reason_to_refuse_a_frame_is_answered_and_counted() {
    let node = open("handshakes_per_ip = 0", "");
    let ends = |bytes: &[u8], code: u16, reason: &str| {
        let before = reject(&node, reason);
        let mut raw = Raw::connect(&node, 1);
        raw.send_bytes(bytes);
        let answer = raw.answer().unwrap();
        assert_eq!((answer.code, answer.corr), (code, 0), "{reason}");
        assert_eq!(raw.goaway().as_deref(), Some("protocol"), "{reason}");
        node.eventually(reason, |node| reject(node, reason) == before + 1.0);
    };
    let good = Frame::request(APP_CONTROL, 2, "{}").encode(1 << 20).unwrap().to_vec();
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    ends(&with(1, 0x20), 413, "frame_too_large");
    ends(&[0, 0, 0, 10], 400, "malformed");
    ends(&with(5, 2), 400, "bad_version");
    ends(&with(6, 1), 400, "bad_flags");
    let mut early = Raw::connect(&node, 1);
    early.send(&Frame::event(APP_GOSSIP, 3, "x"));
    assert_eq!(early.answer().unwrap().code, 400);
    assert_eq!(early.goaway().as_deref(), Some("protocol"));
    node.eventually("counted before HELLO", |node| reject(node, "sequence") == 1.0);
    // Whoever is not known yet is not told what is spoken here either.
    let mut early = Raw::connect(&node, 1);
    early.send(&Frame::request(0x0300, 4, "x"));
    assert_eq!(early.answer().unwrap().code, 400);
    node.eventually("counted before HELLO", |node| reject(node, "sequence") == 2.0);
    let mut early = Raw::connect(&node, 1);
    let capped =
        Frame { flags: Flags::REQ | Flags::START, cap: "cap".into(), ..Frame::request(APP_CONTROL, 1, "") };
    let mut bytes = capped.encode(1 << 20).unwrap().to_vec();
    bytes[7] = 1;
    early.send_bytes(&bytes);
    assert_eq!(early.answer().unwrap().code, 400);
    assert_eq!(early.goaway().as_deref(), Some("protocol"));
    node.eventually("counted before HELLO", |node| reject(node, "cap_on_non_start") == 1.0);
    let mut raw = Raw::hello(&node, 1);
    let mut goes_on = |frame: Frame, code: u16, reason: &str| {
        let before = reject(&node, reason);
        let bytes = frame.encode(1 << 20).unwrap().to_vec();
        raw.send_bytes(&bytes);
        assert_eq!(raw.answer().unwrap().code, code, "{reason}");
        node.eventually(reason, |node| reject(node, reason) == before + 1.0);
    };
    goes_on(Frame::request(0x0300, 4, "x"), 404, "unknown_app");
    goes_on(Frame { flags: Flags::REQ | Flags::END, ..Frame::request(APP_GOSSIP, 5, "") }, 400, "sequence");
    goes_on(Frame::request(APP_GOSSIP, 6, ""), 400, "malformed");
    let mut raw = Raw::hello(&node, 2);
    let mut bytes =
        Frame { flags: Flags::REQ | Flags::START, cap: "cap".into(), ..Frame::request(APP_GOSSIP, 7, "") }
            .encode(1 << 20)
            .unwrap()
            .to_vec();
    bytes[7] = 1;
    raw.send_bytes(&bytes);
    assert_eq!(raw.answer().unwrap().code, 400);
    node.eventually("counted", |node| reject(node, "cap_on_non_start") == 2.0);
    // The session has gone on.
    raw.send(&Frame::request(APP_CONTROL, 9, Control::Ping(5).payload()));
    let pong = loop {
        let answer = raw.answer().unwrap();
        if answer.corr == 9 {
            break answer;
        }
    };
    assert_eq!((pong.code, Control::parse(&pong.payload)), (200, Ok(Control::Pong(5))));
}

#[test]
fn handshakes_frames_and_silence_have_their_times() {
    let times = "[overlay.timeouts]\nread = \"300ms\"\nidle = \"1s\"\nwrite = \"5s\"\n";
    let node = open("handshake_timeout = \"300ms\"\nhandshakes_per_ip = 0", times);
    let mut silent = Raw::connect(&node, 1);
    assert_eq!(silent.stream.read(&mut [0; 16]).unwrap_or(0), 0);
    node.eventually("counted", |node| {
        node.metric("handshake_timeouts_total") == 1.0
            && node.metric("io_timeouts_total{service=\"overlay\",op=\"handshake\"}") == 1.0
    });
    let mut half = Raw::hello(&node, 1);
    half.send_bytes(&[0, 0]);
    assert_eq!(half.goaway().as_deref(), Some("limit"));
    node.eventually("counted", |node| {
        node.metric("io_timeouts_total{service=\"overlay\",op=\"read\"}") == 1.0
            && node.metric("session_close_total{reason=\"read_timeout\"}") == 1.0
    });
    // Whoever does so again and again is not talked to for a while.
    let greylisted = || node.admin_get("/overlay/peers").json()["greylisted"].clone();
    for _ in 0..20 {
        if greylisted() == serde_json::json!([]) {
            let mut half = Raw::hello(&node, 1);
            half.send_bytes(&[0, 0]);
            assert_eq!(half.goaway().as_deref(), Some("limit"));
        }
    }
    assert_eq!(greylisted()[0]["offence"], "invalid");
    let mut mute = Raw::hello(&node, 2);
    assert_eq!(mute.goaway().as_deref(), Some("idle"));
    node.eventually("counted", |node| node.metric("session_close_total{reason=\"idle\"}") == 1.0);
}

#[test]
fn connections_have_a_rate_and_a_number() {
    let rated = open("handshakes_per_ip = 3\nmax_conns = 4", "");
    let _held: Vec<Raw> = (0..8).map(|key| Raw::connect(&rated, key)).collect();
    rated.eventually("some are turned away", |node| {
        node.metric("handshake_failures_total{reason=\"rate\"}") >= 1.0
    });
    let full = open("handshakes_per_ip = 0\nmax_conns = 2", "");
    let (first, second) = (Raw::hello(&full, 1), Raw::hello(&full, 2));
    full.eventually("both are open", |node| node.metric("sessions_active") == 2.0);
    full.eventually("nobody else is let in", |node| node.metric("accepts_paused_total") == 1.0);
    // The third waits until one of them is gone.
    let third = std::thread::scope(|scope| {
        let third = scope.spawn(|| Raw::hello(&full, 3));
        drop(first);
        third.join().unwrap()
    });
    full.eventually("two are open", |node| node.metric("sessions_active") == 2.0);
    drop((second, third));
}

#[test]
fn connections_that_send_a_header_only_cost_little() {
    const CONNECTIONS: usize = 400;
    let node = open("handshakes_per_ip = 0\nhandshake_timeout = \"60s\"\nmax_conns = 2000", "");
    let header = Frame::request(APP_CONTROL, 1, vec![0; 16_000]).encode(1 << 20).unwrap().to_vec();
    let mut held = vec![Raw::connect(&node, 1)];
    held[0].send_bytes(&header[..38]);
    let before = node.rss_mib();
    for _ in 0..CONNECTIONS {
        let mut raw = Raw::connect(&node, 1);
        raw.send_bytes(&header[..38]);
        held.push(raw);
    }
    node.eventually("they are all held", |node| node.fds() >= CONNECTIONS);
    let each = (node.rss_mib() - before) * 1024.0 / CONNECTIONS as f64;
    assert!(each < 20.0, "{each:.1} KiB for each connection");
    drop(held);
    // And it is as good as new.
    drop(Raw::hello(&node, 2));
}

#[test]
fn unix_sockets_carry_sessions_too() {
    let dir = tempfile::tempdir().unwrap();
    let socket = format!("unix:{}/oap.sock", dir.path().display());
    let config = text(&socket, "admit = \"any\"", "");
    let a = Node::start(&["overlay"], &config);
    assert_eq!(a.address("overlay", "oap"), socket);
    let b = node(&peers(&[&a]), "");
    connects(&b, 1);
    assert_eq!(connected(&b)[0]["tls"], false);
    assert!(peer(&a).contains("unix:"));
}

#[cfg(feature = "quic")]
#[test]
fn nodes_meet_over_quic_and_one_that_listens_by_tcp_dials_them_too() {
    let hub = Node::start(&["overlay"], &text("quic:127.0.0.1:0", "admit = \"any\"", ""));
    assert!(
        hub.address("overlay", "oap").starts_with("quic:127.0.0.1:"),
        "{}",
        hub.address("overlay", "oap")
    );
    let mut near = Node::start(&["overlay"], &text("quic:127.0.0.1:0", &peers(&[&hub]), ""));
    let far = node(&peers(&[&hub]), "[overlay.tls]\npq = \"required\"\n");
    connects(&hub, 2);
    connects(&near, 1);
    connects(&far, 1);
    let shown = &connected(&near)[0];
    assert_eq!(shown["node"], hub.address("overlay", "node").as_str());
    assert_eq!(
        (&shown["tls"], &shown["post_quantum"]),
        (&true.into(), &serde_json::Value::Null),
        "not known"
    );
    assert_eq!(connected(&far)[0]["post_quantum"], true);
    let follower = super::Follower::start(&near, "news");
    super::publish(&far, "news", "over the hub");
    assert_eq!(follower.next()["payload"], "over the hub");
    // A message of many frames, larger than the window.
    let large = "x".repeat(5 << 20);
    super::publish(&far, "news", &large);
    assert_eq!(follower.next()["payload"], large.as_str());
    // One who stops says so.
    assert_eq!(near.stop(), 0);
    hub.eventually("it is seen to be gone", |hub| connected(hub).len() == 1);
    // Another key than the one dialled is not taken for it, and plain QUIC there is none.
    let wrong = peer(&hub).replace(&hub.address("overlay", "node"), &far.address("overlay", "node"));
    let other = node(&format!("peers = [\"{wrong}\"]"), "");
    other.eventually("it is told whom it has met", |other| {
        other.metric("handshake_failures_total{reason=\"other_key\"}") >= 1.0
    });
    let plain = text("quic:127.0.0.1:0", "", "[overlay.tls]\nmode = \"off\"\n");
    std::fs::write(other.dir.path().join("plain.toml"), plain).unwrap();
    let refused = ron(&["config", "check", "plain.toml"], other.dir.path());
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("overlay.listen") && said.contains("always encrypted"), "{said}");
}
