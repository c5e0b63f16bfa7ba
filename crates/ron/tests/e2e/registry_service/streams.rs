//! Streams: resume, pruned, forked, lagging; over server-sent events and WebSocket.

use super::{OPEN, Registry};
use crate::http2::{DATA, END_HEADERS, END_STREAM, HEADERS, SETTINGS, WINDOW_UPDATE, frame, read_frame};
use ron_testkit::get;
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

/// A stream as it comes over the wire.
struct Stream {
    socket: TcpStream,
    text: String,
}

impl Stream {
    fn open(registry: &Registry, last: Option<&str>) -> Stream {
        let mut socket = TcpStream::connect(registry.address()).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let last = last.map_or(String::new(), |id| format!("Last-Event-ID: {id}\r\n"));
        write!(socket, "GET /registry/stream HTTP/1.1\r\nHost: a\r\n{last}\r\n").unwrap();
        let mut stream = Stream { socket, text: String::new() };
        stream.until(|text| text.contains("\r\n\r\n"));
        assert!(stream.text.contains("text/event-stream"), "{}", stream.text);
        stream
    }

    fn until(&mut self, holds: impl Fn(&str) -> bool) {
        let mut piece = [0; 65536];
        while !holds(&self.text) {
            let read = self.socket.read(&mut piece).expect("the stream goes on");
            assert!(read > 0, "the stream ended: {}", self.text);
            self.text += &String::from_utf8_lossy(&piece[..read]);
        }
    }

    /// Waits for so many events and gives their names, ids and data.
    fn events(&mut self, count: usize) -> Vec<(String, String, Value)> {
        let parsed = |text: &str| -> Vec<(String, String, Value)> {
            let mut found = Vec::new();
            for block in text.split("event: ").skip(1) {
                let Some((event, _)) = block.split_once("\n\n") else { continue };
                let mut lines = event.lines();
                let name = lines.next().unwrap().to_owned();
                let field =
                    |prefix: &str| event.lines().find_map(|line| line.strip_prefix(prefix)).unwrap_or("");
                found.push((name, field("id: ").to_owned(), serde_json::from_str(field("data: ")).unwrap()));
            }
            found
        };
        self.until(|text| parsed(text).len() >= count);
        parsed(&self.text)
    }
}

fn id(registry: &Registry, version: u64) -> String {
    let hash = registry.get(&format!("/registry/{version}")).json()["hash"].as_str().unwrap().to_owned();
    format!("{version}-{}", &hash[3..11])
}

#[test]
fn a_reader_misses_nothing_and_goes_on_where_it_was() {
    let mut registry = Registry::start(&format!(
        "{OPEN}stream = {{ heartbeat = \"200ms\", max_clients = 3, stall = \"5s\", buffer = 64 }}"
    ));
    let mut live = Stream::open(&registry, None);
    registry.committed(40);
    let seen = live.events(40);
    let versions: Vec<u64> = seen.iter().map(|(_, _, data)| data["version"].as_u64().unwrap()).collect();
    assert_eq!(versions, (1..=40).collect::<Vec<_>>());
    assert!(seen.iter().all(|(name, _, _)| name == "registry.update"));
    assert_eq!(seen[6].1, id(&registry, 7));
    let mut resumed = Stream::open(&registry, Some(&seen[6].1));
    assert_eq!(resumed.events(33)[0].2["version"], 8);
    live.until(|text| text.ends_with(":\n\n\r\n"));
    let _third = Stream::open(&registry, None);
    assert_eq!(registry.metric("stream_clients"), 3.0);
    assert_eq!(get(&registry.address(), "/registry/stream").reason(), "busy");
    drop((live, resumed));
    // After a restart the log is the same, and so are the ids.
    registry.restart("TERM");
    assert_eq!(Stream::open(&registry, Some("0-00000000")).events(1)[0].0, "registry.forked");
    let zero = id(&registry, 0);
    assert_eq!(Stream::open(&registry, Some(&zero)).events(40).len(), 40);
    let forked = Stream::open(&registry, Some("7-01234567")).events(1).remove(0);
    assert_eq!((forked.0.as_str(), &forked.2["version"]), ("registry.forked", &json!(7)));
    assert_eq!(Stream::open(&registry, Some("99-01234567")).events(1)[0].2["version"], 40);
    let bad = ron_testkit::request(
        &registry.address(),
        "GET",
        "/registry/stream",
        &[("Last-Event-ID", "seven")],
        b"",
    );
    assert_eq!(bad.unwrap().reason(), "malformed");
}

#[test]
fn the_same_comes_over_websocket() {
    let registry = Registry::start(OPEN);
    registry.committed(2);
    let mut socket = TcpStream::connect(registry.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let resume = id(&registry, 1);
    write!(
        socket,
        "GET /registry/ws?last_event_id={resume} HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    )
    .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        socket.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap().to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101") && head.contains("s3pplmbitxaq9kygzzhzrbk+xoo="), "{head}");
    let message = |socket: &mut TcpStream| {
        let mut start = [0; 2];
        socket.read_exact(&mut start).unwrap();
        let mut length = usize::from(start[1]);
        if length == 126 {
            let mut long = [0; 2];
            socket.read_exact(&mut long).unwrap();
            length = usize::from(u16::from_be_bytes(long));
        }
        let mut payload = vec![0; length];
        socket.read_exact(&mut payload).unwrap();
        (start[0] & 15, payload)
    };
    let update = |(opcode, payload): (u8, Vec<u8>)| {
        assert_eq!(opcode, 1);
        serde_json::from_slice::<Value>(&payload).unwrap()
    };
    let first = update(message(&mut socket));
    assert_eq!((&first["event"], &first["data"]["version"]), (&json!("registry.update"), &json!(2)));
    assert_eq!(first["id"], id(&registry, 2).as_str());
    registry.committed(1);
    assert_eq!(update(message(&mut socket))["data"]["version"], 3);
    socket.write_all(&[0x89, 0x82, 1, 2, 3, 4, b'h' ^ 1, b'i' ^ 2]).unwrap();
    assert_eq!(message(&mut socket), (10, b"hi".to_vec()), "a ping is answered");
    socket.write_all(&[0x88, 0x80, 0, 0, 0, 0]).unwrap();
    assert_eq!(message(&mut socket).0, 8, "and a close");
    assert_eq!(get(&registry.address(), "/registry/ws").reason(), "malformed");
}

#[test]
fn a_reader_that_takes_nothing_for_too_long_is_told_what_it_missed() {
    let registry = Registry::start(&format!(
        "{OPEN}stream = {{ stall = \"300ms\", buffer = 4 }}\nlimits = {{ write_timeout = \"60s\" }}"
    ));
    let mut socket = TcpStream::connect(registry.address()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    socket.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    // It takes 300 bytes, which is more than one event, and then no more.
    let window = 300usize;
    socket
        .write_all(&frame(SETTINGS, 0, 0, &[&[0, 4][..], &(window as u32).to_be_bytes()].concat()))
        .unwrap();
    let path = "/registry/stream";
    let get = [&b"\x82\x86\x04"[..], &[path.len() as u8], path.as_bytes(), b"\x41\x01a"].concat();
    socket.write_all(&frame(HEADERS, END_STREAM | END_HEADERS, 1, &get)).unwrap();
    let mut text = String::new();
    let mut until = |socket: &mut TcpStream, holds: &dyn Fn(&str) -> bool| {
        while !holds(&text) {
            let (kind, flags, _, payload) = read_frame(socket).expect("the stream goes on");
            match kind {
                DATA => text += std::str::from_utf8(&payload).unwrap(),
                SETTINGS if flags == 0 => socket.write_all(&frame(SETTINGS, 1, 0, b"")).unwrap(),
                _ => {}
            }
        }
        text.clone()
    };
    registry.node.eventually("the stream is open", |_| registry.metric("stream_clients") == 1.0);
    registry.committed(40);
    let taken = until(&mut socket, &|text| text.len() == window);
    assert!(taken.contains("\"version\":1}") || taken.contains("\"version\":1,"), "{taken}");
    assert_eq!(registry.metric("stream_lagged_total"), 0.0);
    // What it is handed next has waited for it longer than the stall.
    std::thread::sleep(Duration::from_millis(400));
    socket.write_all(&frame(WINDOW_UPDATE, 0, 1, &1_000_000u32.to_be_bytes())).unwrap();
    let rest = until(&mut socket, &|text| text.contains("\"version\":40"));
    let (before, lagged) = rest.split_once("event: registry.lagged\ndata: ").expect("it is told");
    let told = before.matches("event: registry.update").count() as u64;
    let lagged: Value = serde_json::from_str(lagged.lines().next().unwrap()).unwrap();
    assert_eq!(lagged, json!({"from": told + 1, "to": 39}), "and goes on with HEAD");
    assert_eq!(registry.metric("stream_lagged_total"), 1.0);
}
