//! Bodies on their way in: whole or not at all, and paid for as they come.

use crate::config;
use crate::fairness::tenants;
use crate::http2::{
    DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, SETTINGS, WINDOW_UPDATE, frame, read_frame,
};
use ron_testkit::{Client, Node, Origin, Script, request};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;
use std::time::{Duration, Instant};

#[test]
fn an_upload_in_many_pieces_arrives_whole_and_in_order() {
    let origin = Origin::start(|_| Script::Echo);
    let back = Node::start(&["gateway"], &config(&origin.url(), "", ""));
    let front = Node::start(&["gateway"], &config(&format!("h2c://{}", back.gateway()), "", ""));
    let pieces: Vec<String> = (0..200).map(|n| format!("{n};").repeat(1 + n * 7 % 300)).collect();
    let whole = pieces.concat();
    for node in [&back, &front] {
        for chunked in [true, false] {
            let mut client = Client::connect(&node.gateway()).unwrap();
            let framing = if chunked {
                "Transfer-Encoding: chunked".to_owned()
            } else {
                format!("Content-Length: {}", whole.len())
            };
            client.send(format!("POST /up HTTP/1.1\r\nHost: a\r\n{framing}\r\n\r\n").as_bytes()).unwrap();
            for (n, piece) in pieces.iter().enumerate() {
                let text = if chunked { format!("{:x}\r\n{piece}\r\n", piece.len()) } else { piece.clone() };
                // A piece is cut in two, in the middle of a chunk's size if need be.
                let (first, second) = text.as_bytes().split_at(text.len().min(n % 5));
                client.send(first).unwrap();
                if n % 20 == 0 {
                    std::thread::sleep(Duration::from_millis(5));
                }
                client.send(second).unwrap();
            }
            client.send(if chunked { b"0\r\n\r\n" } else { b"" }).unwrap();
            let answer = client.read_answer("POST").unwrap();
            assert!(answer.text().ends_with(&format!("\r\n\r\n{whole}")), "chunked: {chunked}");
            // The connection is good for another.
            assert_eq!(client.request("GET", "/", &[], b"").unwrap().status, 200);
        }
    }
}

#[test]
fn a_server_that_answers_before_the_upload_ends_is_heard() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let node =
        Node::start(&["gateway"], &config(&format!("http://{}", listener.local_addr().unwrap()), "", ""));
    let mut client = Client::connect(&node.gateway()).unwrap();
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n").unwrap();
    let (mut server, _) = listener.accept().unwrap();
    server.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    let mut got = Vec::new();
    while !got.ends_with(b"3\r\nabc") {
        let mut piece = [0; 4096];
        let read = server.read(&mut piece).unwrap();
        assert!(read > 0);
        got.extend_from_slice(&piece[..read]);
    }
    server.write_all(b"HTTP/1.1 403 No\r\nContent-Length: 2\r\n\r\nno").unwrap();
    let answer = client.read_answer("POST").unwrap();
    assert_eq!(
        (answer.status, answer.text(), answer.header("connection")),
        (403, "no".into(), Some("close"))
    );
    // It may go on for a little while without being reset.
    client.send(b"3\r\ndef\r\n").unwrap();
    client.send(b"0\r\n\r\n").unwrap();
    assert_eq!(client.read_to_end().unwrap(), b"");
    // Pieces that came before the gateway was done with the answer are passed on; the end only behind all of them.
    let mut rest = Vec::new();
    server.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let _closed_or_kept = server.read_to_end(&mut rest);
    let whole = b"\r\n3\r\ndef\r\n0\r\n\r\n";
    assert!(whole.starts_with(&rest), "{}", String::from_utf8_lossy(&rest));
}

/// A server that has so much room, answers as soon as it has something, and takes more when told to. What it got of
/// the upload, and whether that was said to be all.
fn hasty(mut stream: TcpStream, room: u8, more: &mpsc::Receiver<()>) -> (Vec<u8>, bool) {
    let mut preface = [0; 24];
    stream.read_exact(&mut preface).unwrap();
    stream.write_all(&frame(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, room])).unwrap();
    // `:status: 200`, and nothing else.
    let ok = |id| frame(HEADERS, END_HEADERS | END_STREAM, id, b"\x88");
    let mut got = Vec::new();
    while let Some((kind, flags, id, payload)) = read_frame(&mut stream) {
        match kind {
            SETTINGS if flags == 0 => stream.write_all(&frame(SETTINGS, 1, 0, b"")).unwrap(),
            HEADERS if flags & END_STREAM != 0 => stream.write_all(&ok(id)).unwrap(),
            RST_STREAM => break,
            DATA => {
                let first = got.is_empty();
                got.extend(payload);
                if flags & END_STREAM != 0 {
                    return (got, true);
                }
                if first {
                    stream.write_all(&ok(id)).unwrap();
                    more.recv().unwrap();
                    stream.write_all(&frame(WINDOW_UPDATE, 0, id, &1000u32.to_be_bytes())).unwrap();
                }
            }
            _ => {}
        }
    }
    (got, false)
}

#[test]
fn an_upload_whose_answer_is_there_is_broken_off_and_never_loses_a_piece() {
    // What the upload waits for when the answer comes, and even with little room not always the same: room, or a piece.
    for room in [4, 4, 4, 4, 200] {
        answered_early(room);
    }
}

fn answered_early(room: u8) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let origin = format!("h2c://{}", listener.local_addr().unwrap());
    let node = Node::start(&["gateway"], &config(&origin, "", ""));
    let (more, told) = mpsc::sync_channel(1);
    let server = std::thread::spawn(move || hasty(listener.accept().unwrap().0, room, &told));
    let mut client = Client::connect(&node.gateway()).unwrap();
    // From here on the gateway knows how little room there is.
    assert_eq!(client.request("GET", "/", &[], b"").unwrap().status, 200);
    client.send(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nfour\r\n").unwrap();
    assert_eq!(client.read_answer("POST").unwrap().status, 200);
    // The gateway throws this away: its client has been answered. Should it be late, only less is shown by this test.
    client.send(b"4\r\nlost\r\n").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    more.send(()).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let _gone = client.send(b"3\r\nend\r\n0\r\n\r\n");
    let told = Instant::now();
    let (got, whole) = server.join().unwrap();
    assert!(told.elapsed() < Duration::from_secs(2), "it waits for a piece that nobody will give it");
    // A piece that came before the gateway was done with the answer may have been passed on.
    let all = b"fourlostend";
    assert!(all.starts_with(&got) && (!whole || got == all), "{} {whole}", String::from_utf8_lossy(&got));
}

#[test]
fn a_body_that_did_not_come_is_not_owed() {
    let origin = Origin::start(|_| Script::Echo);
    let rest = "decode = true\n".to_owned() + &tenants(&[("a", "bps = 20000")]);
    let gateway = "quotas = { burst_factor = 1.0 }";
    let node = Node::start(&["gateway"], &config(&origin.url(), gateway, &rest));
    let small = || request(&node.gateway(), "POST", "/", &[("X-Api-Key", "a")], b"x").unwrap().status;
    let send = |more: &str, body: &[u8]| {
        let mut client = Client::connect(&node.gateway()).unwrap();
        let head =
            format!("POST /up HTTP/1.1\r\nHost: a\r\nX-Api-Key: a\r\nContent-Length: 900000\r\n{more}\r\n");
        client.send(head.as_bytes()).unwrap();
        client.send(body).unwrap();
        client
    };
    let running = |node: &Node| node.metric("inflight_requests{service=\"gateway\"}");
    // Announced, begun, and given up.
    let left = send("", &[b'x'; 100]);
    node.eventually("it is under way", |node| running(node) == 1.0);
    drop(left);
    node.eventually("it is over", |node| running(node) == 0.0);
    assert_eq!(small(), 200, "a hundred bytes came");
    // Refused in the middle: ten million zeros in ten thousand bytes.
    let script = "import gzip,sys; sys.stdout.buffer.write(gzip.compress(bytes(10000000)))";
    let bomb = std::process::Command::new("python3").args(["-c", script]).output().unwrap().stdout;
    assert!((5_000..15_000).contains(&bomb.len()), "{}", bomb.len());
    let refused = send("Content-Encoding: gzip\r\n", &bomb).read_answer("POST").unwrap();
    assert_eq!(refused.reason(), "decoded_ratio");
    assert_eq!(small(), 200, "ten thousand bytes came");
}
