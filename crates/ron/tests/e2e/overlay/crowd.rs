//! Many connections at once: what they cost, and what those notice that were there before.

use super::{Follower, Raw, connects, node, open, peers, publish};
use oap::control::Control;
use oap::frame::{APP_CONTROL, APP_GOSSIP, FRAME_MAX, Frame, HEADER};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::net::TcpStream;

/// A bench has ten thousand of them.
const SESSIONS: usize = 1000;
/// Files that they take on either side, and those of other tests.
const FILES: u64 = 8192;

/// Lets this process, and the nodes it starts, have as many files as this takes; where it may not, what is missing shows.
fn room_for_files() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|files| files < FILES) {
        let current = Some(limit.maximum.map_or(FILES, |most| most.min(FILES)));
        let _ = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
    }
}

#[test]
fn a_thousand_idle_sessions_fit_and_headers_that_claim_a_mebibyte_cost_little() {
    room_for_files();
    let node = open(
        "handshakes_per_ip = 0\nmax_conns = 1200",
        "[overlay.timeouts]\nread = \"60s\"\nidle = \"120s\"\n",
    );
    let seed = |number: usize| {
        let mut seed = [9; 32];
        seed[..8].copy_from_slice(&(number as u64).to_le_bytes());
        seed
    };
    let _first = Raw::hello_with(&node, seed(0), &[]);
    let before = node.rss_mib();
    let mut held: Vec<Raw> = (1..=SESSIONS).map(|number| Raw::hello_with(&node, seed(number), &[])).collect();
    node.eventually("all are open", |node| node.metric("sessions_active") == (SESSIONS + 1) as f64);
    let idle = node.rss_mib();
    let each = (idle - before) * 1024.0 / SESSIONS as f64;
    assert!(each < 50.0, "{each:.1} KiB for each idle session");
    let large = Frame::event(APP_GOSSIP, 1, vec![0; FRAME_MAX as usize - HEADER]);
    let header = large.encode(FRAME_MAX).unwrap().to_vec()[..HEADER].to_vec();
    let ping = Frame::request(APP_CONTROL, 9, Control::Ping(9).payload()).encode(FRAME_MAX).unwrap();
    let both = [ping.to_vec(), header].concat();
    for raw in &mut held {
        raw.send_bytes(&both);
        // What came with the PING was read with it.
        while raw.answer().expect("it is answered").corr != 9 {}
    }
    let each = (node.rss_mib() - idle) * 1024.0 / SESSIONS as f64;
    assert!(each < 20.0, "{each:.1} KiB for each header");
    assert_eq!(node.metric("sessions_active"), (SESSIONS + 1) as f64);
    drop(held);
    node.eventually("they are all gone", |node| node.metric("sessions_active") == 1.0);
}

#[test]
fn a_flood_of_handshakes_does_not_stop_sessions_that_are_open() {
    room_for_files();
    let a = open("handshakes_per_ip = 0\nhandshake_timeout = \"60s\"\nmax_conns = 2000", "");
    let b = node(&peers(&[&a]), "[overlay.tls]\nmode = \"off\"\n");
    connects(&a, 1);
    let follower = Follower::start(&b, "t");
    // As many as may be in their handshake, as many as may wait for that, and some more.
    let address = a.address("overlay", "oap");
    let flood: Vec<TcpStream> = (0..900).map(|_| TcpStream::connect(&address).unwrap()).collect();
    a.eventually("no more are taken", |a| {
        a.metric("handshake_failures_total{reason=\"busy\"}") > 0.0
            && a.metric("busy_rejections_total{service=\"overlay\",endpoint=\"\",queue=\"ingress_work\"}")
                > 0.0
    });
    let mut sent: Vec<String> = (0..50).map(|number| format!("{number:02}")).collect();
    for payload in &sent {
        publish(&a, "t", payload);
    }
    sent.sort();
    assert_eq!(follower.payloads(50), sent);
    assert_eq!((a.metric("sessions_active"), a.metric("session_open_total")), (1.0, 1.0));
    drop(flood);
    // And newcomers are welcome again, once it is seen that those who waited are gone.
    a.eventually("nobody waits", |a| {
        a.metric("queue_depth{service=\"overlay\",queue=\"ingress_work\"}") == 0.0
    });
    drop(Raw::hello(&a, 3));
}
