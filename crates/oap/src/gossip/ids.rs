//! The ids of many messages at a time, side by side where that takes less time.

use super::message::{Envelope, MessageId, TOPIC_MAX, Topic};
use crate::node::NodeId;
use blake3::{CHUNK_LEN, Hasher};
use ron_blake3::{GAINS, Input, hash_all};

/// Messages whose ids are made together.
const TOGETHER: usize = 16;
/// Before a payload: origin, sequence, the topic's length and its name.
const HEAD_MAX: usize = 32 + 8 + 1 + TOPIC_MAX;

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
        let (mut chunks, mut places, mut count) = ([[0; CHUNK_LEN]; TOGETHER], [0; TOGETHER], 0);
        for (place, message) in messages.iter().enumerate() {
            if !GAINS.contains(&message.len()) {
                ids[place] = message.id();
                continue;
            }
            let chunk = &mut chunks[count];
            let head = message.head(chunk);
            chunk[head..].copy_from_slice(&message.payload[..CHUNK_LEN - head]);
            places[count] = place;
            count += 1;
            if count == TOGETHER {
                together(messages, &chunks, &places, &mut ids);
                count = 0;
            }
        }
        together(messages, &chunks[..count], &places[..count], &mut ids);
        ids
    }
}

/// The ids of messages whose first chunks these are.
fn together(messages: &[Named<'_>], chunks: &[[u8; CHUNK_LEN]], places: &[usize], ids: &mut [MessageId]) {
    let input = |(chunk, place): (_, &usize)| {
        let message = &messages[*place];
        Input { chunk, rest: &message.payload[message.payload.len() - (message.len() - CHUNK_LEN)..] }
    };
    let inputs: Vec<Input<'_>> = chunks.iter().zip(places).map(input).collect();
    for (place, hash) in places.iter().zip(hash_all(&inputs)) {
        ids[*place] = MessageId(hash);
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
