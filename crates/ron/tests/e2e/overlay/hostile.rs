//! Peers that do not read, that talk nonsense, and that talk too much.

use super::raw::id_of;
use super::{Follower, Raw, connects, node, open, peers, publish, text};
use oap::frame::{APP_GOSSIP, Frame};
use ron_testkit::{Node, get};

/// The series of the queue to a peer.
const DROPPED: &str = "queue_dropped_total{service=\"overlay\",queue=\"gossip_egress\"}";

#[test]
fn a_peer_that_never_reads_costs_only_itself() {
    let rates = "[overlay.peer]\nmax_rps = 0\negress_bytes = \"2MiB\"\n[overlay.timeouts]\nwrite = \"2s\"\n";
    let a = open("queue_bytes = \"64MiB\"", rates);
    let b = node(&peers(&[&a]), &format!("[overlay.tls]\nmode = \"off\"\n{rates}"));
    connects(&b, 1);
    let _frozen = Raw::hello(&a, 7);
    connects(&a, 2);
    let follower = Follower::start(&b, "t");
    let before = a.rss_mib();
    let mut sent: Vec<String> = (0..400).map(|number| format!("{number:04}{}", "x".repeat(30_000))).collect();
    for payload in &sent {
        publish(&a, "t", payload);
    }
    sent.sort();
    assert!(follower.payloads(400) == sent);
    // The messages themselves are kept as history; what the frozen peer has cost is its queue.
    let kept = 400.0 * 30_000.0 / 1048576.0;
    let grown = a.rss_mib() - before;
    assert!(grown < kept + 64.0, "{grown:.0} MiB for {kept:.0} MiB of history and a queue of 2 MiB");
    a.eventually("it is said", |a| {
        a.metric(DROPPED) > 0.0
            && a.metric("gossip_shed_total{queue=\"gossip_egress\",lane=\"normal\",cause=\"full\"}") > 0.0
            && a.log().contains("does not keep up")
    });
    a.eventually("it is given up", |a| {
        a.metric("session_close_total{reason=\"write_timeout\"}") == 1.0
            && a.metric("io_timeouts_total{service=\"overlay\",op=\"write\"}") == 1.0
    });
    assert_eq!(get(&a.admin(), "/readyz").status, 200);
}

#[test]
fn a_node_whose_only_peer_does_not_read_is_under_pressure_and_says_so() {
    let a = open(
        "",
        "[overlay.peer]\nmax_rps = 0\negress_bytes = \"1200KiB\"\ninflight_frames = 8\n[overlay.timeouts]\nwrite = \"60s\"\n",
    );
    let frozen = Raw::hello(&a, 7);
    connects(&a, 1);
    // The system takes some megabytes before it takes no more.
    let large = "x".repeat(100_000);
    let mut statuses = (0..1000).map(|_| a.admin_post("/overlay/topics/t", &large).status);
    assert_eq!(statuses.find(|status| *status != 202), Some(429));
    a.eventually("it is not ready to be written to", |a| {
        let ready = get(&a.admin(), "/readyz");
        ready.status == 503 && ready.json()["missing"] == serde_json::json!(["overlay.pressure"])
    });
    assert_eq!(get(&a.admin(), "/readyz?scope=read").status, 200);
    let refused = a.admin_post("/overlay/topics/t", "small");
    assert_eq!((refused.status, refused.reason()), (429, "busy"));
    assert!(a.metric("rejected_total{service=\"overlay\",reason=\"busy\"}") >= 1.0);
    // One who is ready to wait is told that it waited in vain.
    let args = ["overlay", "pub", "t", "x", "--wait", "200ms", "--config", "ron.toml"];
    let calls =
        || a.metric("busy_rejections_total{service=\"overlay\",endpoint=\"\",queue=\"gossip_calls\"}");
    let before = calls();
    let waited = ron_testkit::ron(&args, a.dir.path());
    assert_eq!((waited.status.code(), calls() - before), (Some(1), 1.0), "one that waits is counted once");
    let said = String::from_utf8_lossy(&waited.stderr).into_owned();
    assert!(said.contains("until the deadline"), "{said}");
    let counted =
        (0..16).map(|digit| a.metric(&format!("backpressure_events_total{{peer_bucket=\"{digit:x}\"}}")));
    assert_eq!(counted.sum::<f64>(), 1.0);
    drop(frozen);
    a.eventually("it is ready again", |a| get(&a.admin(), "/readyz").status == 200);
    publish(&a, "t", "room again");
}

#[test]
fn the_oldest_make_room_where_that_is_wanted() {
    let a = open(
        "",
        "[overlay.peer]\nmax_rps = 0\negress_bytes = \"1200KiB\"\n[overlay.gossip]\negress_full = \"drop_oldest\"\n\
         [overlay.timeouts]\nwrite = \"60s\"\n",
    );
    // With two others that read, pressure does not last, and everything is taken in the end.
    let readers = [8, 9].map(|key| Raw::hello(&a, key).stream);
    for mut stream in readers.iter().map(|stream| stream.try_clone().unwrap()) {
        std::thread::spawn(move || std::io::copy(&mut stream, &mut std::io::sink()));
    }
    let _frozen = Raw::hello(&a, 7);
    connects(&a, 3);
    for _ in 0..30 {
        assert_eq!(publish(&a, "t", &"x".repeat(500_000))["queued"], 3);
    }
    a.eventually("what was dropped is counted", |a| a.metric(DROPPED) >= 5.0);
    let channels = get(&a.admin(), "/debug/channels").json();
    let rows = channels["channels"].as_array().unwrap();
    let row = rows.iter().find(|row| row["name"] == "gossip_egress").unwrap();
    assert_eq!((&row["policy"], &row["instances"]), (&"drop_oldest".into(), &3.into()));
    assert!(row["depth"].as_u64().unwrap() > 0);
    drop(readers);
}

#[test]
fn a_peer_that_talks_nonsense_is_greylisted_for_a_while() {
    let a = open("handshakes_per_ip = 0", "[overlay.peer]\ngreylist = \"5s\"\n");
    let b = node(&peers(&[&a]), "[overlay.tls]\nmode = \"off\"\n");
    connects(&b, 1);
    let mut raw = Raw::hello(&a, 7);
    raw.send(&Frame::event(APP_GOSSIP, 0, "nonsense"));
    a.eventually("it is counted", |a| a.metric("gossip_messages_total{result=\"invalid\"}") >= 1.0);
    let listed = |a: &Node| a.admin_get("/overlay/peers").json()["greylisted"][0].clone();
    let begun = std::time::Instant::now();
    let shown = loop {
        raw.send_bytes(&[0; 38]);
        raw.goaway();
        let shown = listed(&a);
        if shown.is_object() {
            break shown;
        }
        assert!(begun.elapsed().as_secs() < 60, "it is never greylisted: {}", a.log());
        raw = Raw::hello(&a, 7);
    };
    assert_eq!((&shown["node"], &shown["offence"]), (&id_of(7).to_string().into(), &"invalid".into()));
    assert!(a.log().contains("a node is greylisted"), "{}", a.log());
    let mut raw = Raw::hello(&a, 7);
    assert_eq!(raw.goaway().as_deref(), Some("policy"));
    a.eventually("counted", |a| a.metric("handshake_failures_total{reason=\"greylisted\"}") >= 1.0);
    // The honest peer has noticed nothing, and the other is given a new chance.
    let follower = Follower::start(&b, "t");
    publish(&a, "t", "as ever");
    assert_eq!(follower.payloads(1), ["as ever"]);
    a.eventually("it may come again", |a| {
        drop(Raw::hello(a, 7));
        a.metric("session_close_total{reason=\"peer\"}") >= 1.0
    });
}

#[test]
fn a_flood_is_answered_429_and_others_are_heard() {
    let a = open(
        "",
        "[overlay.peer]\nmax_rps = 20\n[overlay.gossip]\nburst_budget_frames = 4\nrelay_fanout = 2\n",
    );
    let b = node(&peers(&[&a]), "[overlay.tls]\nmode = \"off\"\n");
    connects(&b, 1);
    let follower = Follower::start(&b, "t");
    let mut flood = Raw::hello(&a, 7);
    let frames: Vec<Frame> =
        (0..3000u32).map(|number| flood.message("flood", &number.to_be_bytes())).collect();
    let mut reader = flood.stream.try_clone().unwrap();
    // It reads what it is told, or its own session would be given up.
    let drain = std::thread::spawn(move || std::io::copy(&mut reader, &mut std::io::sink()));
    for frame in &frames {
        let bytes = frame.encode(1 << 20).unwrap().to_vec();
        if std::io::Write::write_all(&mut flood.stream, &bytes).is_err() {
            break;
        }
    }
    publish(&a, "t", "heard");
    assert_eq!(follower.payloads(1), ["heard"]);
    a.eventually("it is told and greylisted", |a| {
        a.metric("gossip_messages_total{result=\"shed\"}") > 0.0
            && a.metric("frame_reject_total{reason=\"busy\"}") > 0.0
            && a.metric("session_close_total{reason=\"greylisted\"}") == 1.0
    });
    drop(flood);
    let _ = drain.join();
}

#[test]
fn a_peer_cut_off_within_a_frame_comes_back() {
    let keys = tempfile::tempdir().unwrap();
    let named =
        format!("[node]\nkey_file = \"{}/b.key\"\n[overlay.gossip]\nhop_limit = 4\n", keys.path().display());
    let a = open("", "[overlay.peer]\nmax_rps = 0\n");
    let config = text("127.0.0.1:0", &peers(&[&a]), &format!("[overlay.tls]\nmode = \"off\"\n{named}"));
    let b = Node::start(&["overlay"], &config);
    connects(&a, 1);
    // Large messages are on their way both ways when it dies.
    for _ in 0..8 {
        publish(&a, "t", &"x".repeat(900_000));
    }
    b.signal("KILL");
    a.eventually("its session is over", |a| a.metric("sessions_active") == 0.0);
    assert_eq!(a.metric("tasks_panicked_total{service=\"overlay\",kind=\"writer\"}"), 0.0);
    let again = Node::start(&["overlay"], &config);
    connects(&again, 1);
    let follower = Follower::start(&again, "u");
    publish(&a, "u", "back");
    assert_eq!(follower.payloads(1), ["back"]);
}
