//! Two sessions that talk.

use bytes::Bytes;
use oap::control::{Goaway, Hello};
use oap::frame::FRAME_MAX;
use oap::session::{Agreed, Closed, Event, Place, Role, SendError, Session, SessionConfig};
use oap::{Flags, Frame, FrameError, NodeId};
use proptest::prelude::*;
use std::time::Duration;

const ZERO: Duration = Duration::ZERO;
const APP: u16 = 0x0200;

fn config(role: Role) -> SessionConfig {
    SessionConfig {
        role,
        hello: Hello { ua: "test".into(), max_inflight: 4, ..Hello::default() },
        proved: None,
        apps: vec![APP],
        handshake_timeout: Duration::from_secs(3),
        read_timeout: Duration::from_secs(5),
        idle_timeout: Duration::from_secs(15),
    }
}

/// Bytes that a session wants written, and what else it says.
fn drain(session: &mut Session, now: Duration) -> (Vec<u8>, Vec<Event>) {
    let (mut bytes, mut events) = (Vec::new(), Vec::new());
    while let Some(event) = session.poll(now) {
        match event {
            Event::Send(outgoing) => {
                bytes.extend(outgoing.frame.to_vec());
                if outgoing.checked {
                    bytes.extend(outgoing.frame.checksum());
                }
            }
            other => events.push(other),
        }
    }
    (bytes, events)
}

/// Passes bytes on until nobody has anything to say.
fn settle(a: &mut Session, b: &mut Session, now: Duration) -> [Vec<Event>; 2] {
    let mut said = [Vec::new(), Vec::new()];
    loop {
        let (to_b, events) = drain(a, now);
        said[0].extend(events);
        b.push(&to_b);
        let (to_a, events) = drain(b, now);
        said[1].extend(events);
        a.push(&to_a);
        if to_a.is_empty() && to_b.is_empty() {
            return said;
        }
    }
}

fn pair(dialer: SessionConfig, listener: SessionConfig) -> (Session, Session, [Vec<Event>; 2]) {
    let (mut a, mut b) = (Session::new(dialer, ZERO), Session::new(listener, ZERO));
    let said = settle(&mut a, &mut b, ZERO);
    (a, b, said)
}

fn opened(events: &[Event]) -> Option<&Agreed> {
    events.iter().find_map(|event| match event {
        Event::Open(agreed) => Some(agreed),
        _ => None,
    })
}

fn closed(events: &[Event]) -> Option<Closed> {
    events.iter().find_map(|event| match event {
        Event::Closed(why) => Some(*why),
        _ => None,
    })
}

#[test]
fn two_hellos_agree_on_the_less_of_both() {
    let mut dialer = config(Role::Dialer);
    dialer.hello.max_frame = 100_000;
    dialer.hello.features = vec!["crc32c".into(), "x".into()];
    let mut listener = config(Role::Listener);
    listener.hello.features = vec!["y".into(), "crc32c".into()];
    listener.hello.max_inflight = 9;
    let (mut a, mut b, said) = pair(dialer, listener);
    let (a_agreed, b_agreed) = (opened(&said[0]).expect("open"), opened(&said[1]).expect("open"));
    assert_eq!((a_agreed.max_frame, a_agreed.max_inflight, a_agreed.crc32c), (100_000, 9, true));
    assert_eq!((b_agreed.max_frame, b_agreed.max_inflight, b_agreed.crc32c), (100_000, 4, true));
    // From here on every frame has its checksum, and one that is wrong ends the session.
    let ping = a.send(&Frame::request(APP, 9, "x")).expect("open");
    assert!(ping.checked);
    let mut bytes = [ping.frame.to_vec(), ping.frame.checksum().to_vec()].concat();
    b.push(&bytes);
    assert!(matches!(drain(&mut b, ZERO).1[..], [Event::Frame(..)]));
    bytes[40 - 2] ^= 1;
    b.push(&bytes);
    assert_eq!(closed(&drain(&mut b, ZERO).1), Some(Closed::Protocol(FrameError::Checksum)));
    let large = Frame::request(APP, 10, vec![0; 100_000]);
    assert!(matches!(a.send(&large), Err(SendError::Frame(FrameError::TooLarge { max: 100_000, .. }))));
}

#[test]
fn a_node_that_is_not_who_it_says_is_sent_away() {
    let (one, other) = (NodeId([1; 32]), NodeId([2; 32]));
    let mut dialer = config(Role::Dialer);
    dialer.hello.node = Some(one);
    let mut listener = config(Role::Listener);
    listener.proved = Some(other);
    let (.., said) = pair(dialer.clone(), listener.clone());
    assert_eq!((closed(&said[0]), closed(&said[1])), (Some(Closed::Refused(403)), Some(Closed::Policy)));
    listener.proved = Some(one);
    let (.., said) = pair(dialer.clone(), listener.clone());
    assert_eq!(opened(&said[1]).expect("open").node, Some(one));
    listener.hello.node = Some(other);
    dialer.proved = Some(one);
    let (.., said) = pair(dialer, listener);
    assert_eq!(closed(&said[0]), Some(Closed::Policy), "a listener may lie too");
    assert!(said[1].contains(&Event::Goaway(Goaway::Policy)));
}

#[test]
fn a_listener_that_chooses_what_was_not_offered_is_left() {
    for choice in [
        r#"{"version":2,"max_frame":65536,"features":[]}"#,
        r#"{"version":1,"max_frame":1048577,"features":[]}"#,
        r#"{"version":1,"max_frame":65536,"features":["crc32c"]}"#,
        r#"{"version":1,"max_frame":65536}"#,
        "7",
    ] {
        let mut dialer = Session::new(config(Role::Dialer), ZERO);
        drain(&mut dialer, ZERO);
        let answer = Frame::response(0, 1, 200, format!(r#"{{"choice":{choice}}}"#));
        dialer.push(&answer.encode(FRAME_MAX).expect("a frame").to_vec());
        let (_, events) = drain(&mut dialer, ZERO);
        let fine = choice.ends_with("65536}");
        assert_eq!(opened(&events).is_some(), fine, "{choice}");
        assert_eq!(matches!(closed(&events), Some(Closed::Protocol(_))), !fine, "{choice}");
    }
}

#[test]
fn silence_ends_a_session_at_each_of_its_stages() {
    let at = |seconds: f64| Duration::from_secs_f64(seconds);
    let mut listener = Session::new(config(Role::Listener), ZERO);
    listener.push(&[0, 0, 0]);
    assert!(drain(&mut listener, at(2.9)).1.is_empty());
    assert_eq!(listener.due(), Some(at(3.0)));
    assert_eq!(drain(&mut listener, at(3.0)), (vec![], vec![Event::Closed(Closed::HandshakeTimeout)]));
    assert_eq!((listener.due(), listener.poll(at(9.0))), (None, None));

    let (mut a, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
    assert_eq!(a.due(), Some(at(3.75)), "a ping well before the peer's patience ends");
    let said = settle(&mut a, &mut b, at(10.0));
    assert!(said.iter().all(|events| events.iter().all(|event| matches!(event, Event::Rtt(_)))));
    // Half a frame, and no more of it.
    b.push(&Frame::request(APP, 5, "hello").encode(FRAME_MAX).expect("a frame").to_vec()[..40]);
    assert!(drain(&mut b, at(11.0)).1.is_empty());
    assert_eq!(closed(&drain(&mut b, at(16.0)).1), Some(Closed::ReadTimeout));
    assert!(closed(&drain(&mut a, at(24.9)).1).is_none());
    let (bytes, events) = drain(&mut a, at(25.0));
    assert_eq!(closed(&events), Some(Closed::Idle));
    assert!(String::from_utf8_lossy(&bytes).contains("idle"));
}

#[test]
fn a_round_trip_is_measured() {
    let (mut a, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
    let (ping, _) = drain(&mut a, Duration::from_secs(4));
    b.push(&ping);
    let (pong, _) = drain(&mut b, Duration::from_millis(4001));
    a.push(&pong);
    assert!(drain(&mut a, Duration::from_millis(4007)).1.contains(&Event::Rtt(Duration::from_millis(7))));
}

#[test]
fn a_side_pings_as_soon_as_it_is_asked_to() {
    let (mut a, _b, _) = pair(config(Role::Dialer), config(Role::Listener));
    assert!(drain(&mut a, ZERO).0.is_empty(), "HELLO alone is answered first");
    a.ping();
    assert_eq!(a.due(), Some(ZERO));
    assert!(String::from_utf8_lossy(&drain(&mut a, ZERO).0).contains("ping"));
    assert_eq!(a.due(), Some(Duration::from_millis(3750)));
}

#[test]
fn who_goes_away_finishes_what_is_open() {
    let (mut a, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
    let send = |a: &mut Session, b: &mut Session, frame: Frame| {
        b.push(&a.send(&frame).expect("sent").frame.to_vec());
        settle(a, b, ZERO)
    };
    send(&mut a, &mut b, Frame::request(APP, 7, "x"));
    b.goaway(Goaway::Draining);
    // The peer has not heard it yet.
    let late = a.send(&Frame::request(APP, 8, "y")).expect("sent").frame.to_vec();
    b.push(&late);
    let said = settle(&mut a, &mut b, ZERO);
    assert!(said[0].contains(&Event::Goaway(Goaway::Draining)));
    assert!(said[0].iter().any(|event| matches!(event, Event::Frame(frame, _) if frame.code == 503)));
    assert_eq!(a.send(&Frame::request(APP, 9, "z")), Err(SendError::GoingAway));
    assert_eq!(b.open(), 1);
    let said = send(&mut b, &mut a, Frame::response(APP, 7, 200, "answer"));
    assert!(
        said[1].iter().any(|event| matches!(event, Event::Frame(frame, Place::Whole) if frame.code == 200))
    );
    assert_eq!((a.open(), b.open()), (0, 0));
}

#[test]
fn who_only_causes_errors_is_sent_away() {
    let (_, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
    let bad = Frame::request(0x0999, 5, "x").encode(FRAME_MAX).expect("a frame").to_vec();
    for _ in 0..200 {
        b.push(&bad);
    }
    let (bytes, events) = drain(&mut b, ZERO);
    assert_eq!(closed(&events), Some(Closed::Limit));
    let answered = events.iter().filter(|event| matches!(event, Event::Rejected(_))).count();
    assert!((32..=64).contains(&answered), "{answered}");
    assert!(String::from_utf8_lossy(&bytes).contains("limit"));
}

#[test]
fn remnants_of_refused_messages_are_bounded() {
    let mut patient = config(Role::Listener);
    patient.hello.max_inflight = 2;
    let (_, mut b, _) = pair(config(Role::Dialer), patient);
    for corr in 10..14 {
        let start = Frame { flags: Flags::REQ | Flags::START, ..Frame::request(0x0999, corr, "x") };
        b.push(&start.encode(FRAME_MAX).expect("a frame").to_vec());
    }
    assert_eq!(closed(&drain(&mut b, ZERO).1), Some(Closed::Limit));
}

#[test]
fn an_early_answer_leaves_the_rest_of_the_request_unread() {
    let (mut a, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
    let part = |flags, text: &'static str| Frame { flags, ..Frame::request(APP, 7, text) };
    b.push(&a.send(&part(Flags::REQ | Flags::START, "a")).expect("sent").frame.to_vec());
    settle(&mut a, &mut b, ZERO);
    let last = a.send(&part(Flags::REQ | Flags::END, "b")).expect("sent").frame.to_vec();
    let answer = b.send(&Frame::response(APP, 7, 413, "too much")).expect("sent").frame.to_vec();
    a.push(&answer);
    b.push(&last);
    let said = settle(&mut a, &mut b, ZERO);
    assert!(matches!(&said[0][..], [Event::Frame(frame, Place::Whole)] if frame.code == 413));
    assert_eq!(said[1], vec![], "nobody wants it");
    assert_eq!(b.send(&Frame::response(APP, 7, 200, "late")), Err(SendError::Frame(FrameError::Sequence)));
    assert_eq!((a.open(), b.open()), (0, 0));
}

/// What a session that follows its own rules may send, by number of a step.
fn any_frame(kind: u8, corr: u64, start: bool, end: bool, code: u16) -> Frame {
    let kind = [Flags::REQ, Flags::RESP, Flags::EVENT][usize::from(kind)];
    let flag = |on, flag| if on { flag } else { Flags::default() };
    let flags = kind | flag(start, Flags::START) | flag(end, Flags::END);
    let code = if kind == Flags::RESP { code } else { 0 };
    Frame { flags, code, app: APP, corr, payload: Bytes::from_static(b"p"), ..Frame::default() }
}

proptest! {
    /// Whatever one side may send by its own account, the other finds in sequence; each frame arrives once.
    #[test]
    fn what_a_session_lets_through_its_peer_takes(
        steps in prop::collection::vec((any::<bool>(), 0u8..3, 2u64..6, any::<bool>(), any::<bool>(), prop::sample::select(vec![200u16, 206, 404])), 0..120),
    ) {
        let (mut a, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
        for (first, kind, corr, start, end, code) in steps {
            let (from, to) = if first { (&mut a, &mut b) } else { (&mut b, &mut a) };
            let Ok(outgoing) = from.send(&any_frame(kind, corr, start, end, code)) else { continue };
            to.push(&outgoing.frame.to_vec());
            let said = settle(from, to, ZERO);
            let good = |event: &Event| matches!(event, Event::Frame(..) | Event::Stray(_));
            // The END of a request that was answered early is owed, but nobody wants it.
            let least = if end && !start && kind == 0 { 0 } else { 1 };
            prop_assert!(said[0].is_empty() && (least..=1).contains(&said[1].len()), "{:?}", said);
            prop_assert!(said[1].iter().all(good), "{:?}", said);
        }
    }

    /// Whatever a peer sends, a session answers, ends or goes on, and never keeps more than it may.
    #[test]
    fn nothing_a_peer_sends_breaks_a_session(
        steps in prop::collection::vec((0u8..3, 0u64..6, any::<bool>(), any::<bool>(), any::<u16>(), any::<u16>(), 0u64..100), 0..200),
        garbage in prop::collection::vec(any::<u8>(), 0..80),
    ) {
        let (_, mut b, _) = pair(config(Role::Dialer), config(Role::Listener));
        let mut now = ZERO;
        for (kind, corr, start, end, code, odd, wait) in steps {
            now += Duration::from_millis(wait);
            let mut frame = any_frame(kind, corr, start, end, oap::frame::STATUSES[usize::from(code) % 12]);
            frame.app = [APP, APP, APP, 0, 0x0300][usize::from(odd) % 5];
            b.push(&frame.encode(FRAME_MAX).expect("a frame").to_vec());
            let (_, events) = drain(&mut b, now);
            prop_assert!(b.open() <= 4);
            let over = closed(&events).is_some();
            prop_assert_eq!(b.poll(now), None);
            if over { return Ok(()) }
        }
        b.push(&garbage);
        drain(&mut b, now);
    }
}
