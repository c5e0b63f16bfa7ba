//! HTTP/2 clients that attack, frame by frame.

use crate::config;
use ron_testkit::{Node, Origin, Script, get};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
pub(crate) const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
/// `GET / HTTP/2` for host `a`, in HPACK.
const GET: &[u8] = b"\x82\x86\x84\x41\x01a";

pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The next frame's kind, flags, stream and payload; `None` at the end of the connection, however it ends.
pub(crate) fn read_frame(stream: &mut TcpStream) -> Option<(u8, u8, u32, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).ok()?;
    let [a, b, c, kind, flags, id @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    stream.read_exact(&mut payload).ok()?;
    Some((kind, flags, u32::from_be_bytes(id), payload))
}

/// A connection that has said hello.
fn connect(node: &Node) -> TcpStream {
    let mut stream = TcpStream::connect(node.gateway()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
    stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, b"")).unwrap();
    stream
}

/// Reads to the end of the connection; the error code of the GOAWAY, if one came.
fn farewell(mut stream: TcpStream) -> Option<u32> {
    let mut code = None;
    while let Some((kind, _, _, payload)) = read_frame(&mut stream) {
        if kind == GOAWAY && payload.len() >= 8 {
            code = Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        }
    }
    code
}

fn start(origin: &Origin) -> Node {
    Node::start(&["gateway"], &config(&origin.url(), "", ""))
}

/// The connection is gone, nothing is left of it, and others are served.
fn assert_well(node: &Node) {
    node.eventually("the connection is gone", |node| {
        node.metric("connections_open{service=\"gateway\"}") == 0.0
            && node.metric("inflight_requests{service=\"gateway\"}") == 0.0
    });
    assert_eq!(get(&node.gateway(), "/").status, 200);
}

#[test]
fn requests_taken_back_at_once_end_the_connection_before_they_do_harm() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = start(&origin);
    let mut stream = connect(&node);
    let mut sent = 0;
    for number in 0..20_000u32 {
        let id = number * 2 + 1;
        let pair = [
            frame(HEADERS, END_STREAM | END_HEADERS, id, GET),
            frame(RST_STREAM, 0, id, &8u32.to_be_bytes()),
        ];
        if stream.write_all(&pair.concat()).is_err() {
            break;
        }
        sent += 1;
    }
    assert!(sent < 20_000, "nobody stopped it");
    farewell(stream);
    assert!(origin.seen.lock().unwrap().len() < 1000, "{}", origin.seen.lock().unwrap().len());
    assert_well(&node);
}

#[test]
fn a_head_that_never_ends_is_cut_off() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = start(&origin);
    let before = node.rss_mib();
    let mut stream = connect(&node);
    // Each field is small and new; the section goes on and on.
    let field = |number: usize| {
        [b"\x40\x08".to_vec(), format!("x-{number:06}").into_bytes(), b"\x01v".to_vec()].concat()
    };
    let piece = |from: usize| (from..from + 1000).flat_map(field).collect::<Vec<u8>>();
    stream.write_all(&frame(HEADERS, END_STREAM, 1, GET)).unwrap();
    let mut sent = 0;
    while sent < 5000 && stream.write_all(&frame(CONTINUATION, 0, 1, &piece(sent * 1000))).is_ok() {
        sent += 1;
    }
    assert!(sent < 5000, "nobody stopped it");
    farewell(stream);
    assert_eq!(origin.seen.lock().unwrap().len(), 0);
    assert!(node.rss_mib() < before + 20.0, "{before} MiB before, {} after", node.rss_mib());
    assert_well(&node);
}

#[test]
fn frames_that_break_the_protocol_end_the_connection() {
    let origin = Origin::start(|_| Script::Body(b"hi".to_vec()));
    let node = start(&origin);
    let upgrade = [GET, b"\x40\x0aconnection\x07upgrade"].concat();
    let attacks: [(&str, Vec<u8>); 4] = [
        ("DATA on a stream that does not exist", frame(0, 0, 5, b"x")),
        ("a frame larger than allowed", frame(HEADERS, END_HEADERS, 1, &[0; 20_000])),
        ("an even stream", frame(HEADERS, END_STREAM | END_HEADERS, 2, GET)),
        ("a CONTINUATION of nothing", frame(CONTINUATION, END_HEADERS, 1, GET)),
    ];
    for (what, bytes) in attacks {
        let mut stream = connect(&node);
        stream.write_all(&bytes).unwrap();
        let code = farewell(stream);
        assert!(code.is_some_and(|code| code != 0), "{what}: {code:?}");
    }
    // A field of another protocol is the stream's fault alone.
    let mut stream = connect(&node);
    stream.write_all(&frame(HEADERS, END_STREAM | END_HEADERS, 1, &upgrade)).unwrap();
    stream.write_all(&frame(HEADERS, END_STREAM | END_HEADERS, 3, GET)).unwrap();
    node.eventually("the other stream is served", |_| origin.seen.lock().unwrap().len() == 1);
    drop(stream);
    assert_well(&node);
}

#[test]
fn a_client_that_takes_its_request_back_is_counted_as_left() {
    let origin = Origin::start(|_| Script::Silence);
    let node = start(&origin);
    let mut stream = connect(&node);
    stream.write_all(&frame(HEADERS, END_STREAM | END_HEADERS, 1, GET)).unwrap();
    node.eventually("the origin is asked", |_| !origin.seen.lock().unwrap().is_empty());
    let left = "http_requests_total{service=\"gateway\",route=\"none\",method=\"none\",status=\"499\"}";
    assert_eq!(node.metric(left), 0.0);
    stream.write_all(&frame(RST_STREAM, 0, 1, &8u32.to_be_bytes())).unwrap();
    node.eventually("it is counted", |node| node.metric(left) == 1.0);
}
