//! Everything that makes an overlay's metrics move, for the test that lists them all.

use super::{Follower, Raw, connects, peers, publish};
use ron_testkit::Node;

/// `moved` waits until each of these metrics has another value than at the start.
pub(crate) fn use_overlay(node: &Node, moved: &dyn Fn(&[&str])) {
    {
        let other = super::node(&peers(&[node]), "[overlay.tls]\nmode = \"off\"\n");
        connects(node, 1);
        let follower = Follower::start(node, "news");
        publish(&other, "news", "hello");
        assert_eq!(follower.payloads(1), ["hello"]);
        moved(&["session_open_total", "sessions_active", "gossip_frames_total", "gossip_messages_total"]);
        moved(&["delivery_hops", "delivery_seconds"]);
    }
    moved(&["session_close_total"]);
    let mut twice = Raw::hello(node, 3);
    let message = twice.message("news", b"twice");
    twice.send(&message);
    twice.send(&message);
    moved(&["gossip_duplicate_ratio"]);
    twice.send_bytes(&[0xff; 64]);
    moved(&["frame_reject_total"]);
    drop(twice);
    let silent = Raw::connect(node, 4);
    moved(&["handshake_timeouts_total"]);
    drop(silent);
    // The only peer reads nothing; who is ready to wait for room waits in vain.
    connects(node, 0);
    let frozen = Raw::hello(node, 7);
    connects(node, 1);
    let large = "x".repeat(100_000);
    let mut statuses = (0..1000).map(|_| node.admin_post("/overlay/topics/news", &large).status);
    assert_eq!(statuses.find(|status| *status != 202), Some(429));
    let args = ["overlay", "pub", "news", "x", "--wait", "200ms", "--config", "ron.toml"];
    assert_eq!(ron_testkit::ron(&args, node.dir.path()).status.code(), Some(1));
    moved(&["backpressure_events_total"]);
    drop(frozen);
    let many: Vec<Raw> = (10..40).map(|key| Raw::connect(node, key)).collect();
    moved(&["handshake_failures_total"]);
    drop(many);
}
