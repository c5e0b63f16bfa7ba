//! What ten thousand idle sessions cost a node, and as many headers that claim a mebibyte each.

use super::field::admits_all;
use crate::bench::process::rss_mib;
use crate::bench::{Bench, table};
use ed25519_dalek::SigningKey;
use ron_log::key::PublicKey;
use ron_testkit::Node;
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

const SESSIONS: u32 = 10_000;
/// Of an OAP/1 frame.
const HEADER: usize = 38;
const REQUEST: u8 = 1;
const EVENT: u8 = 4;

/// A frame's header; the payload is somebody else's affair.
fn header(len: u32, kind: u8, app: u16, corr: u64) -> Vec<u8> {
    let mut bytes = [&len.to_be_bytes()[..], &[0, 1, 0, kind, 0, 0], &app.to_be_bytes()].concat();
    bytes.resize(HEADER - 8, 0);
    bytes.extend(corr.to_be_bytes());
    bytes
}

fn control(corr: u64, body: &str) -> Vec<u8> {
    let mut frame = header((HEADER + body.len()) as u32, REQUEST, 0, corr);
    frame.extend(body.as_bytes());
    frame
}

/// Reads frames until the answer with this number.
fn answered(stream: &mut TcpStream, corr: u64) -> Option<()> {
    loop {
        let mut head = [0; HEADER];
        stream.read_exact(&mut head).ok()?;
        let len = u32::from_be_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let mut body = vec![0; len.checked_sub(HEADER)?];
        stream.read_exact(&mut body).ok()?;
        if head[HEADER - 8..] == corr.to_be_bytes() && head[9] == 200 && head[8] == 0 {
            return Some(());
        }
    }
}

/// A session of a node of its own.
fn open(address: &str, number: u32) -> Option<TcpStream> {
    let mut seed = [9; 32];
    seed[..4].copy_from_slice(&number.to_be_bytes());
    let key = PublicKey::Ed25519(SigningKey::from_bytes(&seed).verifying_key().into());
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).ok()?;
    stream.write_all(&control(1, &format!("{{\"node\":\"{key}\"}}"))).ok()?;
    answered(&mut stream, 1)?;
    Some(stream)
}

pub(in crate::bench) fn run(bench: &Bench) -> Option<Value> {
    let keys = format!(
        "max_conns = {}\n[overlay.tls]\nmode = \"off\"\n[overlay.timeouts]\nread = \"10m\"\nidle = \"20m\"\n",
        SESSIONS + 100
    );
    let node = Node::start_binary(&bench.binary, &["overlay"], &admits_all(&[], &keys));
    let (address, before, begun) = (node.address("overlay", "oap"), rss_mib(node.pid()), Instant::now());
    let mut held = (0..SESSIONS).map(|number| open(&address, number)).collect::<Option<Vec<_>>>()?;
    let took = begun.elapsed().as_secs_f64();
    let active = node.metric("sessions_active");
    if active < f64::from(SESSIONS) {
        println!("only {active:.0} sessions are open");
        return None;
    }
    let idle = rss_mib(node.pid());
    // A PING goes before, so that its answer says that what came with it was read.
    let claim = [control(9, "{\"t\":\"ping\",\"n\":9}"), header(1 << 20, EVENT, 0x0100, 1)].concat();
    for stream in &mut held {
        stream.write_all(&claim).ok()?;
    }
    for stream in &mut held {
        answered(stream, 9)?;
    }
    let claimed = rss_mib(node.pid());
    let each = |more: f64| more * 1024.0 / f64::from(SESSIONS);
    let line =
        |name: &str, rss: f64, each: f64| vec![name.to_owned(), format!("{rss:.1}"), format!("{each:.1}")];
    let rows = [
        table::row(&["", "RSS MiB", "KiB each"]),
        line("before", before, 0.0),
        line("idle sessions (goal: 500 MiB)", idle, each(idle - before)),
        line("headers of 1 MiB (goal: 20 KiB)", claimed, each(claimed - idle)),
    ];
    table::print(&format!("sessions: 10,000 plain ones of as many nodes, opened in {took:.1} s"), &rows);
    Some(json!({"rss_before_mib": before, "rss_idle_mib": idle, "kib_per_session": each(idle - before),
        "rss_claimed_mib": claimed, "kib_per_header": each(claimed - idle), "open_seconds": took}))
}
