//! Several messages of one origin and topic that travel as one.
//!
//! Whatever is done for a message on its way (a frame, a hash, a signature, a place among what was seen and what is kept)
//! is done once for a bundle. To those who follow its topic its messages are what they would be alone.

use super::history::Kept;
use super::ids::Named;
use super::message::{Envelope, MessageId};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// Messages of a bundle at most, and its bytes: sixty-four of a KiB with their heads fit. Sixteen KiB at a time are hashed at
/// once, and what is left over in many small steps, so that the bound is best a little above a multiple of that.
pub const MESSAGES_MAX: usize = 256;
pub const BYTES_MAX: usize = 65 << 10;
/// Larger messages travel alone: nothing is saved that would be worth a copy.
const JOINED_MAX: usize = 16 << 10;
/// Before each message: how far its sequence is beyond the bundle's, and its length.
const HEAD: usize = 4 + 4;

/// The messages of a bundle: each its sequence and its payload.
#[derive(Debug)]
pub struct Messages {
    first: u64,
    rest: Bytes,
}

impl Messages {
    pub fn new(first: u64, payload: Bytes) -> Messages {
        Messages { first, rest: payload }
    }
}

impl Iterator for Messages {
    type Item = (u64, Bytes);

    fn next(&mut self) -> Option<(u64, Bytes)> {
        let (beyond, len) = (self.rest.try_get_u32().ok()?, self.rest.try_get_u32().ok()? as usize);
        let payload = (len <= self.rest.len()).then(|| self.rest.split_to(len))?;
        Some((self.first.saturating_add(u64::from(beyond)), payload))
    }
}

/// How many messages a bundle has, none of them larger than `max`; `None` if the bytes are no bundle.
pub fn count(mut payload: &[u8], max: usize) -> Option<usize> {
    let (mut count, mut last) = (0, None);
    while !payload.is_empty() {
        let (beyond, len) = (payload.try_get_u32().ok()?, payload.try_get_u32().ok()? as usize);
        // The first has the bundle's own sequence, and each one after it a higher one.
        let grows = last.map_or(beyond == 0, |last| beyond > last);
        if !grows || len > max || count == MESSAGES_MAX {
            return None;
        }
        payload = payload.get(len..)?;
        last = Some(beyond);
        count += 1;
    }
    (count > 1).then_some(count)
}

/// The bytes of a bundle; sequences grow, and are less than 2^32 apart.
pub fn encode<'a>(messages: impl Iterator<Item = (u64, &'a [u8])> + Clone) -> Bytes {
    let bytes = messages.clone().map(|(_, payload)| HEAD + payload.len()).sum();
    let mut out = BytesMut::with_capacity(bytes);
    let mut first = None;
    for (seq, payload) in messages {
        // Whoever joins messages sees to it that both fit.
        out.put_u32((seq - *first.get_or_insert(seq)) as u32);
        out.put_u32(payload.len() as u32);
        out.put_slice(payload);
    }
    out.freeze()
}

/// What may go into one bundle.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) messages: usize,
    pub(super) bytes: usize,
}

/// Messages that are about to be sent out, those that may travel together side by side.
#[derive(Debug, Default)]
pub(super) struct Units {
    /// Each with its bytes as a bundle.
    units: Vec<(Vec<Kept>, usize)>,
}

impl Units {
    pub(super) fn len(&self) -> usize {
        self.units.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.units.is_empty()
    }

    /// Messages of all of them.
    pub(super) fn messages(&self) -> usize {
        self.units.iter().map(|(unit, _)| unit.len()).sum()
    }

    /// Puts a message beside the last ones of its topic if there is room; says with which unit it will go.
    pub(super) fn add(&mut self, kept: Kept, room: Room) -> usize {
        let size = HEAD + kept.payload.len();
        let last = self.units.iter().rposition(|(unit, _)| unit[0].envelope.topic == kept.envelope.topic);
        let last = last.filter(|last| {
            let (unit, bytes) = &self.units[*last];
            size <= JOINED_MAX
                && unit[0].payload.len() + HEAD <= JOINED_MAX
                && unit.len() < room.messages
                && bytes + size <= room.bytes
                && u32::try_from(kept.envelope.seq - unit[0].envelope.seq).is_ok()
        });
        let Some(last) = last else {
            self.units.push((vec![kept], size));
            return self.units.len() - 1;
        };
        let (unit, bytes) = &mut self.units[last];
        unit.push(kept);
        *bytes += size;
        last
    }

    /// What is sent out: each unit as one message, or a bundle.
    pub(super) fn seal(self) -> Vec<Kept> {
        self.units.into_iter().map(|(unit, _)| seal(unit)).collect()
    }
}

fn seal(mut unit: Vec<Kept>) -> Kept {
    if unit.len() == 1
        && let Some(alone) = unit.pop()
    {
        return alone;
    }
    let payload = encode(unit.iter().map(|kept| (kept.envelope.seq, &kept.payload[..])));
    let envelope = Envelope { bundle: true, ..unit[0].envelope.clone() };
    Kept { id: envelope.id(&payload), envelope, payload, hops: 0, checked: true, count: unit.len() }
}

impl Kept {
    /// Each message: its id, sequence and payload.
    pub fn messages(&self) -> Vec<(MessageId, u64, Bytes)> {
        let Envelope { origin, seq, ref topic, bundle, .. } = self.envelope;
        if !bundle {
            return vec![(self.id, seq, self.payload.clone())];
        }
        let messages: Vec<(u64, Bytes)> = Messages::new(seq, self.payload.clone()).collect();
        let named: Vec<Named<'_>> =
            messages.iter().map(|(seq, payload)| Named { origin, seq: *seq, topic, payload }).collect();
        let ids = Named::ids(&named);
        ids.into_iter().zip(messages).map(|(id, (seq, payload))| (id, seq, payload)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gossip::Topic;
    use crate::node::NodeId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_joined_comes_apart_again_and_cut_anywhere_it_is_no_bundle(
            messages in proptest::collection::vec((1u32..1000, proptest::collection::vec(any::<u8>(), 0..40)), 2..20),
            at in any::<prop::sample::Index>(),
        ) {
            let mut seq = 7;
            let messages: Vec<(u64, Vec<u8>)> = messages
                .into_iter()
                .map(|(more, payload)| {
                    seq += u64::from(more);
                    (seq, payload)
                })
                .collect();
            let bytes = encode(messages.iter().map(|(seq, payload)| (*seq, &payload[..])));
            prop_assert_eq!(count(&bytes, 40), Some(messages.len()));
            let apart = Messages::new(messages[0].0, bytes.clone()).map(|(seq, payload)| (seq, payload.to_vec()));
            prop_assert_eq!(apart.collect::<Vec<_>>(), messages.clone());
            let cut = at.index(bytes.len());
            let whole = count(&bytes[..cut], 40);
            prop_assert!(whole.is_none_or(|whole| whole < messages.len()));
            let largest = messages.iter().map(|(_, payload)| payload.len()).max().unwrap_or(0);
            prop_assert_eq!(count(&bytes, largest), Some(messages.len()));
            prop_assert_eq!(count(&bytes, largest.wrapping_sub(1)).filter(|_| largest > 0), None);
        }

        #[test]
        fn whatever_the_bytes_are_counting_and_taking_apart_agree(
            bytes in proptest::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..64),
        ) {
            if let Some(count) = count(&bytes, 1 << 20) {
                prop_assert_eq!(Messages::new(1, bytes.into()).count(), count);
            }
        }
    }

    fn kept(topic: &str, seq: u64, size: usize) -> Kept {
        let topic = Topic::parse(topic).unwrap();
        let envelope =
            Envelope { origin: NodeId([1; 32]), seq, time: 1, topic, bundle: false, signature: None };
        let payload = Bytes::from(vec![seq as u8; size]);
        Kept { id: envelope.id(&payload), envelope, payload, hops: 0, checked: true, count: 1 }
    }

    #[test]
    fn small_messages_of_a_topic_go_together_as_far_as_there_is_room() {
        let room = Room { messages: 3, bytes: 200 };
        let mut units = Units::default();
        let given = [
            ("a", 10),
            ("b", 10),
            ("a", 20),
            ("a", 30),
            ("a", 40),
            ("b", 200),
            ("b", 5),
            ("a", 20 << 10),
            ("a", 1),
        ];
        let places: Vec<usize> = given
            .iter()
            .zip(1..)
            .map(|((topic, size), seq)| units.add(kept(topic, seq, *size), room))
            .collect();
        assert_eq!(places, [0, 1, 0, 0, 2, 3, 4, 5, 6], "three of a, then no room, then too large");
        assert_eq!((units.len(), units.messages()), (7, 9));
        let sent = units.seal();
        assert_eq!(sent.iter().map(|kept| kept.count).collect::<Vec<_>>(), [3, 1, 1, 1, 1, 1, 1]);
        let bundle = &sent[0];
        assert!(bundle.envelope.bundle && bundle.envelope.seq == 1);
        assert_eq!(bundle.id, bundle.envelope.id(&bundle.payload));
        let alone = [kept("a", 1, 10), kept("a", 3, 20), kept("a", 4, 30)];
        let expected = alone.map(|kept| (kept.id, kept.envelope.seq, kept.payload));
        assert_eq!(bundle.messages(), expected, "each as it would be alone");
    }

    #[test]
    fn a_bundle_is_named_apart_from_a_message_of_the_same_bytes() {
        let message = kept("a", 1, 10);
        let bundle = Envelope { bundle: true, ..message.envelope.clone() };
        assert_ne!(bundle.id(&message.payload), message.id);
    }
}
