//! The ids of many messages at a time.
//!
//! A hash of one KiB is a chain of sixteen steps, each of which waits for the one before. The chains of several messages go
//! side by side, as many as the processor has room for: there a message costs a third of what it does alone.

use super::message::{Envelope, MessageId, TOPIC_MAX, Topic};
use crate::node::NodeId;
use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_root};
use blake3::platform::Platform;
use blake3::{CHUNK_LEN, Hasher, IncrementCounter};

/// As many as the widest processors hash side by side.
const LANES: usize = 16;
/// Before a payload: origin, sequence, the topic's length and its name.
const HEAD_MAX: usize = 32 + 8 + 1 + TOPIC_MAX;

/// BLAKE3's first words, and the marks of a chunk's first and last blocks.
const IV: [u32; 8] =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];
const CHUNK_START: u8 = 1;
const CHUNK_END: u8 = 2;

/// What an id is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named<'a> {
    pub(super) origin: NodeId,
    pub(super) seq: u64,
    pub(super) topic: &'a Topic,
    pub(super) payload: &'a [u8],
}

impl<'a> Named<'a> {
    pub(super) fn of(envelope: &'a Envelope, payload: &'a [u8]) -> Named<'a> {
        Named { origin: envelope.origin, seq: envelope.seq, topic: &envelope.topic, payload }
    }

    /// Writes what comes before the payload, and says how long it is.
    fn head(&self, out: &mut [u8]) -> usize {
        let name = self.topic.as_str().as_bytes();
        let len = 41 + name.len();
        out[..32].copy_from_slice(&self.origin.0);
        out[32..40].copy_from_slice(&self.seq.to_be_bytes());
        // A name has at most 128 bytes.
        out[40] = name.len() as u8;
        out[41..len].copy_from_slice(name);
        len
    }

    fn len(&self) -> usize {
        41 + self.topic.as_str().len() + self.payload.len()
    }

    pub(super) fn hashed(&self, mut hasher: Hasher) -> MessageId {
        let mut head = [0; HEAD_MAX];
        let len = self.head(&mut head);
        MessageId(hasher.update(&head[..len]).update(self.payload).finalize().into())
    }

    pub(super) fn id(&self) -> MessageId {
        self.hashed(Hasher::new())
    }

    /// The ids of all, in their order.
    pub(super) fn ids(messages: &[Named<'_>]) -> Vec<MessageId> {
        let mut ids = vec![MessageId([0; 32]); messages.len()];
        // One whole chunk and a rest. Longer ones have chunks enough of their own, and in shorter ones no chunk is whole.
        let pair = |message: &Named<'_>| (CHUNK_LEN + 1..=2 * CHUNK_LEN).contains(&message.len());
        let (mut lanes, mut places, mut count) = ([[0; CHUNK_LEN]; LANES], [0; LANES], 0);
        for (place, message) in messages.iter().enumerate() {
            if !pair(message) {
                ids[place] = message.id();
                continue;
            }
            let lane = &mut lanes[count];
            let head = message.head(lane);
            lane[head..].copy_from_slice(&message.payload[..CHUNK_LEN - head]);
            places[count] = place;
            count += 1;
            if count == LANES {
                pairs(messages, &lanes, &places, &mut ids);
                count = 0;
            }
        }
        pairs(messages, &lanes[..count], &places[..count], &mut ids);
        ids
    }
}

/// The ids of messages whose first chunks these are.
fn pairs(messages: &[Named<'_>], lanes: &[[u8; CHUNK_LEN]], places: &[usize], ids: &mut [MessageId]) {
    let (mut first, mut inputs) = ([0; 32 * LANES], [&[0; CHUNK_LEN]; LANES]);
    inputs.iter_mut().zip(lanes).for_each(|(input, lane)| *input = lane);
    // Not for the public, but there is no other way to hash different beginnings together. Tests compare.
    Platform::detect().hash_many(
        &inputs[..lanes.len()],
        &IV,
        0,
        IncrementCounter::No,
        0,
        CHUNK_START,
        CHUNK_END,
        &mut first,
    );
    let (first, _) = first.as_chunks::<32>();
    for (left, place) in first.iter().zip(places) {
        let message = &messages[*place];
        let rest = &message.payload[message.payload.len() - (message.len() - CHUNK_LEN)..];
        let right = Hasher::new().set_input_offset(CHUNK_LEN as u64).update(rest).finalize_non_root();
        ids[*place] = MessageId(merge_subtrees_root(left, &right, Mode::Hash).into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn together_they_have_the_ids_that_they_have_alone(
            sizes in proptest::collection::vec(prop_oneof![900usize..1100, 1900usize..2100, 0usize..5000], 0..50),
            topic in "[a-z]{1,128}",
            seed in any::<u8>(),
        ) {
            let topic = Topic::parse(&topic).unwrap();
            let bytes: Vec<u8> = (0..5000u32).map(|at| (at * 31) as u8 ^ seed).collect();
            let messages: Vec<Named> = sizes
                .iter()
                .zip(1..)
                .map(|(size, seq)| Named { origin: NodeId([seed; 32]), seq, topic: &topic, payload: &bytes[..*size] })
                .collect();
            let alone: Vec<MessageId> = messages.iter().map(Named::id).collect();
            prop_assert_eq!(Named::ids(&messages), alone);
        }
    }
}
