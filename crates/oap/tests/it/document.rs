//! The vectors in `docs/oap-1.md`, read from the page itself.

use bytes::Bytes;
use oap::control::Hello;
use oap::frame::{FRAME_MAX, Frame};
use oap::session::{Closed, Event, Role, Session, SessionConfig};
use oap::{Decoded, Decoder, Encoded, Flags};
use std::time::Duration;

const PAGE: &str = include_str!("../../../../docs/oap-1.md");

/// The lines of a fenced block.
pub(crate) fn block(name: &str) -> Vec<&'static str> {
    let (_, rest) = PAGE.split_once(&format!("```{name}\n")).expect(name);
    rest.split_once("\n```").expect("a fence").0.lines().collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    assert!(text.len().is_multiple_of(2), "{text}");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).expect(text)).collect()
}

fn decoder(name: &str) -> Decoder {
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.agree(FRAME_MAX, name.contains("with crc32c"));
    decoder
}

/// What comes of these bytes: a mark and how it reads.
fn read(name: &str, bytes: &[u8]) -> (char, String) {
    let mut decoder = decoder(name);
    decoder.push(bytes);
    let found = decoder.next_frame();
    match found {
        Err(error) => {
            assert!(error.is_fatal());
            ('!', error.code().to_owned())
        }
        Ok(Some(Decoded::Refused { error, .. })) => ('-', error.code().to_owned()),
        Ok(Some(Decoded::Frame(frame))) => match frame.clone().inflate() {
            Err(error) => ('-', error.code().to_owned()),
            Ok(_) => {
                assert!(!decoder.is_partial(), "{name} leaves something");
                ('+', format!("{frame:?}"))
            }
        },
        Ok(None) => ('?', "nothing yet".to_owned()),
    }
}

#[test]
fn the_frames_of_the_document_read_as_it_says() {
    let lines = block("oap-frames");
    let vectors: Vec<_> = lines.chunks(3).collect();
    assert!(vectors.len() >= 30, "{}", vectors.len());
    for vector in vectors {
        let [name, hex, what] = vector else { panic!("{vector:?}") };
        let bytes = unhex(hex);
        let expected = (name.chars().next().expect("a mark"), what.trim_start_matches("= ").to_owned());
        assert_eq!(read(name, &bytes), expected, "{name}");
        if expected.0 == '+' {
            let mut decoder = decoder(name);
            decoder.push(&bytes);
            let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else {
                unreachable!("it read before")
            };
            let encoded = frame.encode(FRAME_MAX).expect("what reads is written");
            assert_eq!(encoded.to_vec(), bytes[..frame.len()], "{name}");
            if bytes.len() > frame.len() {
                assert_eq!(encoded.checksum(), bytes[frame.len()..], "{name}");
            }
        }
    }
}

/// A listener as the document has it, and whatever it says before it is asked anything.
fn listener(open: bool) -> Session {
    let hello =
        Hello { ua: "ron".into(), max_inflight: 2, features: vec!["crc32c".into()], ..Hello::default() };
    let config = SessionConfig {
        role: Role::Listener,
        hello,
        proved: None,
        apps: vec![0x0200],
        handshake_timeout: Duration::from_secs(3),
        read_timeout: Duration::from_secs(5),
        idle_timeout: Duration::from_secs(15),
    };
    let mut session = Session::new(config, Duration::ZERO);
    if open {
        session.push(&Frame::request(0, 1, "{}").encode(FRAME_MAX).expect("a frame").to_vec());
        while session.poll(Duration::ZERO).is_some() {}
    }
    session
}

/// `FLAGS[:code] app corr text`.
fn frame(line: &str) -> Frame {
    let mut words = line.splitn(4, ' ');
    let mut word = || words.next().unwrap_or("");
    let (flags, code) = word().split_once(':').unwrap_or((line.split(' ').next().unwrap_or(""), "0"));
    let bits = ["REQ", "RESP", "EVENT", "START", "END"];
    let bit = |name: &str| 1 << bits.iter().position(|known| *known == name).expect(line);
    let flags = Flags::from_bits(flags.split('|').map(bit).sum()).expect(line);
    let app = u16::from_str_radix(word().trim_start_matches("0x"), 16).expect(line);
    let corr = word().parse().expect(line);
    let payload = Bytes::from(word().to_owned());
    Frame { flags, code: code.parse().expect(line), app, corr, payload, ..Frame::default() }
}

fn said(encoded: &Encoded) -> String {
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.push(&encoded.to_vec());
    let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { panic!("{encoded:?}") };
    let text = String::from_utf8(frame.payload.to_vec()).expect("text");
    let problem = text.split_once("\"code\":\"").filter(|_| frame.code >= 400);
    let text = problem.map_or(&*text, |(_, rest)| rest.split('"').next().expect("a code"));
    let code = if frame.code == 0 { String::new() } else { format!(":{}", frame.code) };
    format!("> {}{code} {:#06x} {} {text}", frame.flags, frame.app, frame.corr)
}

fn told(event: Event) -> Option<String> {
    Some(match event {
        Event::Send(outgoing) => said(&outgoing.frame),
        Event::Frame(frame, place) => {
            let text = String::from_utf8_lossy(&frame.payload).into_owned();
            format!("= {place:?} {} {} {text}", frame.flags, frame.corr)
        }
        Event::Broken(_, corr) => format!("= Broken {corr}"),
        Event::Stray(frame) => format!("= Stray {}", frame.corr),
        Event::Goaway(reason) => format!("= Goaway {}", reason.name()),
        Event::Closed(Closed::Protocol(_)) => "x Protocol".to_owned(),
        Event::Closed(other) => format!("x {other:?}"),
        Event::Open(_) | Event::Rtt(_) | Event::Rejected(_) => return None,
    })
}

#[test]
fn the_sessions_of_the_document_go_as_it_says() {
    let mut session = listener(true);
    let (mut name, mut expected, mut happened) = ("", Vec::new(), Vec::new());
    let mut count = 0;
    for line in block("oap-session").into_iter().chain(["# the end"]) {
        let (mark, rest) = line.split_at(2);
        match mark {
            "# " => {
                assert_eq!(happened, expected, "{name}");
                (name, expected, happened) = (rest, Vec::new(), Vec::new());
                session = listener(!name.starts_with("before HELLO"));
                count += 1;
            }
            "< " => {
                session.push(&frame(rest).encode(FRAME_MAX).expect(line).to_vec());
                while let Some(event) = session.poll(Duration::ZERO) {
                    happened.extend(told(event));
                }
            }
            "^ " => drop(session.send(&frame(rest)).expect(line)),
            _ => expected.push(line.to_owned()),
        }
    }
    assert!(count > 20, "{count}");
}
