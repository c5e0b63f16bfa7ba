//! Messages and gossip frames: their vectors, and that no byte of a signed message can be changed.

use crate::document::{block, unhex};
use bytes::Bytes;
use ed25519_dalek::SigningKey;
use oap::frame::{FRAME_MAX, Frame};
use oap::gossip::bundle;
use oap::gossip::message::{Envelope, MessageId, Topic};
use oap::gossip::signature::Signature;
use oap::gossip::wire::{Gossip, Window};
use oap::{Decoded, Decoder, NodeId};
use proptest::prelude::*;

/// A message as the document has it.
fn signed(payload: &'static [u8]) -> (Envelope, MessageId) {
    let key = SigningKey::from_bytes(&[7; 32]);
    let origin = NodeId(key.verifying_key().to_bytes());
    let topic = Topic::parse("ron.test/a-1").expect("a topic");
    let mut envelope =
        Envelope { origin, seq: 5, time: 1_700_000_000_000, topic, bundle: false, signature: None };
    let id = envelope.id(payload);
    envelope.sign(id, &key);
    (envelope, id)
}

/// The frame as it stands on the wire, read back.
fn frame(gossip: &Gossip) -> Frame {
    let mut decoder = Decoder::new(FRAME_MAX);
    decoder.push(&gossip.encode(FRAME_MAX).expect("a frame").to_vec());
    let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() else { panic!("{gossip:?}") };
    frame
}

/// How the document says what a payload is.
fn told(payload: &Bytes) -> String {
    let Some(gossip) = Gossip::parse(payload) else { return "unreadable".into() };
    let corr = frame(&gossip).corr;
    let proof = |envelope: &Envelope, id| match &envelope.signature {
        None => "unsigned",
        Some(Signature { path, .. }) if envelope.is_signed(id) && !path.is_empty() => "signed-together",
        Some(_) if envelope.is_signed(id) => "signed",
        Some(_) => "forged",
    };
    let envelope = |it: &Envelope| format!("seq={} time={} topic={}", it.seq, it.time, it.topic);
    let text = match &gossip {
        Gossip::Message { hops, envelope: it, payload } => {
            let id = it.id(payload);
            let bundle = match (it.bundle, bundle::count(payload, FRAME_MAX as usize)) {
                (false, _) => String::new(),
                (true, None) => " bundle=bad".to_owned(),
                (true, Some(_)) => {
                    let messages = bundle::Messages::new(it.seq, payload.clone());
                    let each = messages
                        .map(|(seq, payload)| (seq, MessageId::of(it.origin, seq, &it.topic, &payload)));
                    format!(" bundle={:?}", each.collect::<Vec<_>>())
                }
            };
            format!(
                "MESSAGE hops={hops} {} {} id={id} payload={}{bundle}",
                envelope(it),
                proof(it, id),
                payload.len()
            )
        }
        Gossip::Manifest { hops, id, size, chunk, envelope: it } => {
            format!(
                "MANIFEST hops={hops} {} {} id={id} size={size} chunk={chunk}",
                envelope(it),
                proof(it, *id)
            )
        }
        Gossip::Chunk { id, index, bytes } => format!("CHUNK {id} index={index} bytes={}", bytes.len()),
        Gossip::IHave { history, topic, entries } => {
            format!("IHAVE history={history} topic={topic} {entries:?}")
        }
        Gossip::IWant { ids } => format!("IWANT {ids:?}"),
        Gossip::Graft { topic, ids } => format!("GRAFT topic={topic} {ids:?}"),
        Gossip::Prune { topic } => format!("PRUNE topic={topic}"),
        Gossip::Topics(topics) => format!("TOPICS {topics:?}"),
        Gossip::Digest { round, topic, window, count, .. } => {
            format!("DIGEST round={round} topic={topic} {}..={} count={count}", window.since, window.until)
        }
        Gossip::WantChunks { id, first, count } => format!("WANTCHUNKS {id} first={first} count={count}"),
    };
    format!("{text} corr={corr}")
}

#[test]
fn the_gossip_of_the_document_reads_as_it_says() {
    let lines = block("oap-gossip");
    for vector in lines.chunks(3) {
        let [name, hex, what] = vector else { panic!("{vector:?}") };
        let payload = Bytes::from(unhex(hex));
        assert_eq!(format!("= {}", told(&payload)), *what, "{name}");
        if name.starts_with('+') {
            assert_eq!(frame(&Gossip::parse(&payload).expect(name)).payload, payload, "{name}");
        }
    }
    let (envelope, _) = signed(b"hello");
    let made = frame(&Gossip::Message { hops: 0, envelope, payload: Bytes::from_static(b"hello") });
    assert_eq!(Bytes::from(unhex(lines[1])), made.payload, "the first vector is by that key");
    let (envelope, _) = signed_together(b"hello");
    let made = frame(&Gossip::Message { hops: 0, envelope, payload: Bytes::from_static(b"hello") });
    let hex: String = made.payload.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(lines.contains(&hex.as_str()), "a message signed together: {hex}");
    let (envelope, payload) = bundled();
    let made = frame(&Gossip::Message { hops: 0, envelope, payload });
    let hex: String = made.payload.iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(lines.contains(&hex.as_str()), "a bundle: {hex} {}", told(&made.payload));
}

/// A bundle of three messages.
fn bundled() -> (Envelope, Bytes) {
    let (alone, _) = signed(b"");
    let payload = bundle::encode([(5, &b"one"[..]), (6, b""), (9, b"three")].into_iter());
    let mut envelope = Envelope { bundle: true, signature: None, ..alone };
    envelope.sign(envelope.id(&payload), &SigningKey::from_bytes(&[7; 32]));
    (envelope, payload)
}

/// The second of three messages that were signed together.
fn signed_together(payload: &'static [u8]) -> (Envelope, MessageId) {
    let (first, _) = signed(payload);
    let mut messages: Vec<(Envelope, MessageId)> = (0..3)
        .map(|number| {
            let envelope = Envelope { seq: first.seq + number, ..first.clone() };
            let id = envelope.id(payload);
            (envelope, id)
        })
        .collect();
    Envelope::sign_all(&mut messages, &SigningKey::from_bytes(&[7; 32]));
    messages.swap_remove(1)
}

#[test]
fn no_byte_of_a_signed_message_can_be_changed() {
    let payload = Bytes::from_static(b"a payload");
    for (envelope, _) in [signed(b"a payload"), signed_together(b"a payload")] {
        check_every_bit(envelope, payload.clone());
    }
    let (envelope, payload) = bundled();
    check_every_bit(envelope, payload);
}

fn check_every_bit(envelope: Envelope, payload: Bytes) {
    assert!(envelope.is_signed(envelope.id(&payload)));
    let payload = frame(&Gossip::Message { hops: 3, envelope, payload }).payload;
    // Kind and hops are each relay's own affair.
    for at in 2..payload.len() {
        for bit in 0..8 {
            let mut bytes = payload.to_vec();
            bytes[at] ^= 1 << bit;
            if let Some(Gossip::Message { envelope, payload, .. }) = Gossip::parse(&bytes.into()) {
                assert!(!envelope.is_signed(envelope.id(&payload)), "byte {at} bit {bit}");
            }
        }
    }
}

#[test]
fn a_topic_is_what_it_may_be() {
    for good in ["a", "ron.registry.head", "x/y-z_0", &"t".repeat(128)] {
        assert_eq!(Topic::parse(good).expect(good).as_str(), good);
    }
    for bad in ["", "A", "a b", "ü", "a\n", &"t".repeat(129)] {
        assert_eq!(Topic::parse(bad), None, "{bad:?}");
    }
}

fn ids(max: usize) -> impl Strategy<Value = Vec<MessageId>> {
    prop::collection::vec(any::<[u8; 32]>().prop_map(MessageId), 0..max)
}

fn topics() -> impl Strategy<Value = Topic> {
    "[a-z0-9._/-]{1,128}".prop_map(|name| Topic::parse(&name).expect("a topic"))
}

fn envelopes() -> impl Strategy<Value = Envelope> {
    let path = prop::collection::vec(any::<[u8; 32]>(), 0..=6);
    let signature = prop::option::of((prop::collection::vec(any::<u8>(), 64), any::<u8>(), path));
    (any::<[u8; 32]>(), any::<u64>(), any::<u64>(), topics(), any::<bool>(), signature).prop_map(
        |(origin, seq, time, topic, bundle, signature)| {
            let signature = signature.map(|(bytes, place, path)| {
                let place = place & ((1_u8 << path.len()) - 1);
                Signature { bytes: bytes.try_into().expect("64"), place, path }
            });
            Envelope { origin: NodeId(origin), seq, time, topic, bundle, signature }
        },
    )
}

fn gossips() -> impl Strategy<Value = Gossip> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from);
    let id = || any::<[u8; 32]>().prop_map(MessageId);
    prop_oneof![
        (any::<u8>(), envelopes(), bytes()).prop_map(|(hops, envelope, payload)| Gossip::Message {
            hops,
            envelope,
            payload
        }),
        (any::<u8>(), id(), any::<u32>(), 4096u32.., envelopes()).prop_map(
            |(hops, id, size, chunk, envelope)| Gossip::Manifest { hops, id, size, chunk, envelope }
        ),
        (id(), any::<u16>(), bytes()).prop_map(|(id, index, bytes)| Gossip::Chunk { id, index, bytes }),
        (any::<bool>(), topics(), prop::collection::vec((id(), any::<u32>()), 0..9))
            .prop_map(|(history, topic, entries)| Gossip::IHave { history, topic, entries }),
        ids(9).prop_map(|ids| Gossip::IWant { ids }),
        (topics(), ids(9)).prop_map(|(topic, ids)| Gossip::Graft { topic, ids }),
        topics().prop_map(|topic| Gossip::Prune { topic }),
        prop::collection::vec((any::<bool>(), topics()), 0..9).prop_map(Gossip::Topics),
        (any::<u8>(), topics(), any::<(u64, u64)>(), any::<u32>(), any::<[u8; 32]>()).prop_map(
            |(round, topic, (since, until), count, hash)| {
                Gossip::Digest { round, topic, window: Window { since, until }, count, hash }
            }
        ),
        (id(), any::<u16>(), any::<u16>()).prop_map(|(id, first, count)| Gossip::WantChunks {
            id,
            first,
            count
        }),
    ]
}

proptest! {
    #[test]
    fn gossip_reads_back_and_what_reads_has_one_form(gossip in gossips(), cut: prop::sample::Index) {
        let payload = frame(&gossip).payload;
        prop_assert_eq!(Gossip::parse(&payload), Some(gossip.clone()));
        let part = payload.slice(..cut.index(payload.len()));
        if let Some(read) = Gossip::parse(&part) {
            prop_assert_eq!(frame(&read).payload, part);
        }
    }
}
