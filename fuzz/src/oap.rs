//! What reads bytes of peers: frames, sessions, gossip and the engine behind it.

use bytes::Bytes;
use ed25519_dalek::SigningKey;
use oap::control::Hello;
use oap::frame::{APP_GOSSIP, FRAME_MAX, FRAME_MIN_MAX, Frame};
use oap::gossip::bundle;
use oap::gossip::wire::Gossip;
use oap::gossip::{
    Action, Ceiling, Config, Egress, EgressLimits, Engine, Envelope, Incoming, Ingress, Lane, MessageId, Now,
    PeerId, SharedEgress, Topic, WhenFull,
};
use oap::session::{Event, Role, Session, SessionConfig};
use oap::{Decoded, Decoder, Encoded, Flags, FrameError, NodeId};
use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::Duration;

const START: u64 = 1_700_000_000_000;

/// Frames read alike whole or byte by byte, and are written as they were read.
pub(crate) fn frames(data: &[u8]) {
    for checksum in [false, true] {
        let read = |pieces: &mut dyn Iterator<Item = &[u8]>| {
            let mut decoder = Decoder::new(FRAME_MIN_MAX);
            decoder.agree(FRAME_MIN_MAX, checksum);
            let mut found: Vec<Result<Decoded, FrameError>> = Vec::new();
            for piece in pieces {
                decoder.push(piece);
                loop {
                    match decoder.next_frame() {
                        Ok(Some(decoded)) => found.push(Ok(decoded)),
                        Ok(None) => break,
                        Err(error) => {
                            assert!(error.is_fatal());
                            found.push(Err(error));
                            return found;
                        }
                    }
                }
            }
            found
        };
        let whole = read(&mut std::iter::once(data));
        assert_eq!(whole, read(&mut data.chunks(1)));
        let mut rest = data;
        for decoded in whole {
            let Ok(Decoded::Frame(frame) | Decoded::Refused { frame, .. }) = &decoded else { break };
            let (bytes, after) = rest.split_at(frame.len());
            rest = &after[if checksum { 4 } else { 0 }..];
            if let Ok(Decoded::Frame(frame)) = decoded {
                let encoded = frame.encode(FRAME_MIN_MAX).expect("what reads is written");
                assert_eq!(encoded.to_vec(), bytes);
            }
        }
    }
}

/// Nothing inflates past its limits.
pub(crate) fn inflate(data: &[u8]) {
    let frame = Frame { flags: Flags::REQ | Flags::COMP, payload: data.to_vec().into(), ..Frame::default() };
    if let Ok(inflated) = frame.inflate() {
        assert!(inflated.payload.len() <= (1 << 20).min(data.len() * 10));
    }
    let plain = Frame::request(1, 1, data.to_vec());
    assert_eq!(plain.clone().deflate().inflate(), Ok(plain));
}

/// A session does the same whole or in pieces, ends once, and keeps no more than it may.
pub(crate) fn session(data: &[u8]) {
    let run = |pieces: &mut dyn Iterator<Item = &[u8]>| {
        let config = SessionConfig {
            role: Role::Listener,
            hello: Hello { max_inflight: 3, ..Hello::default() },
            proved: None,
            apps: vec![0x0200],
            handshake_timeout: Duration::from_secs(3),
            read_timeout: Duration::from_secs(5),
            idle_timeout: Duration::from_secs(15),
        };
        let mut session = Session::new(config, Duration::ZERO);
        // Half of the inputs begin after HELLO, which chance alone would seldom put together.
        if data.first().is_some_and(|byte| byte % 2 == 0) {
            session.push(&Frame::request(0, 1, "{}").encode(FRAME_MAX).expect("a frame").to_vec());
        }
        let mut events = Vec::new();
        for piece in std::iter::once(&[][..]).chain(pieces) {
            session.push(piece);
            while let Some(event) = session.poll(Duration::ZERO) {
                events.push(event);
            }
            assert!(session.open() <= 3);
        }
        events
    };
    let data = data.get(1..).unwrap_or(&[]);
    let whole = run(&mut std::iter::once(data));
    let closed = whole.iter().filter(|event| matches!(event, Event::Closed(_))).count();
    assert!(closed <= 1);
    assert_eq!(whole, run(&mut data.chunks(7)));
}

/// A gossip frame has one form, and its lane and topic are seen without reading it.
pub(crate) fn gossip(data: &[u8]) {
    let payload = Bytes::copy_from_slice(data);
    let mut ingress = Ingress::new(1, 1 << 20, Ceiling::new(1 << 20));
    let pushed = ingress.push(Incoming { peer: PeerId(1), corr: 0, payload: payload.clone() });
    assert!(pushed.is_ok_and(|displaced| displaced.is_empty()));
    if let Some(read) = Gossip::parse(&payload) {
        let encoded = read.encode(FRAME_MAX).expect("what reads is written");
        let [head, tail] = encoded.parts();
        assert_eq!([&head[38..], &tail[..]].concat(), data);
    }
}

fn key(number: u8) -> SigningKey {
    SigningKey::from_bytes(&[number; 32])
}

/// Messages that are good, so that what is behind the signature is reached too.
static MESSAGES: LazyLock<Vec<(Bytes, MessageId)>> = LazyLock::new(|| {
    (0..8u8)
        .map(|number| {
            let key = key(100 + number % 3);
            let payload = Bytes::from(vec![number; usize::from(number) * 3000]);
            let topic = Topic::parse(if number % 2 == 0 { "a" } else { "b" }).expect("a topic");
            let origin = NodeId(key.verifying_key().to_bytes());
            let (seq, time) = (u64::from(number), START + u64::from(number));
            let bundle = number % 4 == 3;
            let parts = [(seq, &[number; 10][..]), (seq + 100, &payload[..])];
            let payload = if bundle { bundle::encode(parts.into_iter()) } else { payload };
            let mut envelope = Envelope { origin, seq, time, topic, bundle, signature: None };
            let id = envelope.id(&payload);
            envelope.sign(id, &key);
            let message = Gossip::Message { hops: number % 4, envelope, payload };
            let encoded = message.encode(FRAME_MAX).expect("a frame");
            let [head, tail] = encoded.parts();
            (Bytes::from([&head[38..], &tail[..]].concat()), id)
        })
        .collect()
});

fn drain(egress: &SharedEgress) -> Vec<Encoded> {
    let mut batch = Vec::new();
    egress.lock().take(usize::MAX, usize::MAX, &mut batch);
    egress.lock().written(&batch);
    batch
}

/// Whatever peers say, in whatever order and time: no message is delivered twice and no bound is passed.
pub(crate) fn engine(data: &[u8]) {
    let mut config =
        Config { seen_max: 4, missing_max: 6, announce_max: 8, topics_max: 3, ..Config::default() };
    (config.history.count, config.history.bytes) = (5, 40_000);
    (config.egress.frames, config.egress.bytes) = (32, 64 << 10);
    (config.reassembly_bytes, config.chunk_bytes, config.max_message_bytes) = (64 << 10, 4096, 48 << 10);
    let ceiling = Ceiling::new(96 << 10);
    let mut now = Now { mono: Duration::ZERO, unix_ms: START };
    let mut engine = Engine::new(config, key(1), 7, ceiling.clone(), now);
    engine.follow(now, &Topic::parse("a").expect("a topic"));
    let mut peers = Vec::new();
    let mut delivered = BTreeSet::new();
    for step in data.chunks(40) {
        let (what, which, rest) =
            (step[0], usize::from(*step.get(1).unwrap_or(&0)), step.get(2..).unwrap_or(&[]));
        let peer = peers.get(which % 3).map_or(PeerId(0), |(peer, _): &(PeerId, SharedEgress)| *peer);
        let (message, id) = &MESSAGES[which / 4 % 8];
        match what % 10 {
            0 => {
                let node = NodeId(key(2 + which as u8 % 3).verifying_key().to_bytes());
                if let Ok(connected) = engine.connect(now, node, FRAME_MIN_MAX) {
                    peers.push(connected);
                }
            }
            1 => engine.disconnect(now, peer),
            2 | 3 => engine.receive(now, peer, id.corr(), message),
            4 => {
                let entries =
                    vec![(*id, message.len() as u32), (MessageId([what; 32]), u32::from(what) << 8)];
                let topic = Topic::parse("a").expect("a topic");
                let said = Gossip::IHave { history: which % 2 == 0, topic, entries }.encode(FRAME_MAX);
                let [head, _] = said.as_ref().expect("a frame").parts();
                engine.receive(now, peer, 0, &head.slice(38..));
            }
            5 => {
                let said = Gossip::IWant { ids: vec![*id] }.encode(FRAME_MAX);
                engine.receive(now, peer, 0, &said.as_ref().expect("a frame").parts()[0].slice(38..));
            }
            6 => {
                let mut bytes = message.to_vec();
                let at = rest.iter().take(2).fold(0, |at, byte| at * 256 + usize::from(*byte)) % bytes.len();
                bytes[at] ^= rest.get(2).copied().unwrap_or(0);
                engine.receive(now, peer, id.corr(), &bytes.into());
            }
            7 => {
                now.mono += Duration::from_millis(which as u64 * 8);
                now.unix_ms += which as u64 * 8;
                engine.tick(now);
            }
            8 => engine.receive(now, peer, id.corr(), &Bytes::copy_from_slice(rest)),
            _ => {
                let topic = Topic::parse("b").expect("a topic");
                let _ = engine.publish(now, &topic, Bytes::copy_from_slice(rest));
            }
        }
        if which & 8 == 0 {
            peers.iter().for_each(|(_, egress)| drop(drain(egress)));
        }
        while let Some(action) = engine.poll() {
            if let Action::Deliver(delivery) = action {
                assert!(delivered.insert(delivery.id), "delivered twice");
            }
        }
        let (kept, seen, missing) = engine.kept();
        assert!(kept <= 3 * 40_000 && seen <= 4 && missing <= 6);
        assert!(ceiling.used() <= 96 << 10);
    }
    drop((engine, peers));
    assert_eq!(ceiling.used(), 0, "every place was given back");
}

/// Any sequence of pushes and writes keeps a queue within its bounds.
pub(crate) fn lanes(data: &[u8]) {
    let ceiling = Ceiling::new(3000);
    let when_full = if data.first().is_some_and(|byte| byte % 2 == 0) {
        WhenFull::DropOldest
    } else {
        WhenFull::RejectNew
    };
    let mut egress = Egress::new(EgressLimits { frames: 9, bytes: 4000, when_full }, ceiling.clone());
    let mut batch = Vec::new();
    for step in data.chunks_exact(3) {
        match step[0] % 4 {
            0 | 1 => {
                let frame = Frame::event(APP_GOSSIP, 0, vec![0; usize::from(step[2]) * 8]).encode(FRAME_MAX);
                let lane = Lane::ALL[usize::from(step[1] % 3)];
                let _ = egress.push(lane, u64::from(step[1] / 64), frame.expect("a frame"));
            }
            2 => egress.take(usize::from(step[1] % 4), usize::from(step[2]) * 8, &mut batch),
            _ => {
                egress.written(&batch);
                batch.clear();
            }
        }
        assert!(egress.frames() <= 9 && egress.bytes() <= 4000);
        assert_eq!(egress.bytes(), ceiling.used());
    }
    egress.written(&batch);
    batch.clear();
    egress.take(usize::MAX, usize::MAX, &mut batch);
    egress.written(&batch);
    assert_eq!((egress.frames(), ceiling.used()), (0, 0));
}
