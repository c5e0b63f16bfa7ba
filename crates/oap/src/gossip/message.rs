//! A message: who published it, where, when, and the proof of it.

use super::ids::Named;
use super::signature::{self, Leaf, Origins, Signature};
use crate::node::NodeId;
use bytes::{Buf, BufMut as _};
use ed25519_dalek::{Signer as _, SigningKey};
use std::borrow::Borrow;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

/// Bytes of a topic at most.
pub const TOPIC_MAX: usize = 128;
/// Bytes of an envelope at most.
pub const ENVELOPE_MAX: usize = 32 + 8 + 8 + 1 + TOPIC_MAX + signature::BYTES_MAX;

/// What the ids of bundles are derived with, so that none is that of a message.
const BUNDLE: &str = "oap/1 gossip bundle";
/// Added to the byte that says how a message is signed.
const BUNDLED: u8 = 0x80;

/// A topic's name: 1 to 128 of `a-z 0-9 . _ / -`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Topic(Arc<str>);

impl Topic {
    pub fn parse(text: &str) -> Option<Topic> {
        let good = |byte: u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'.' | b'_' | b'/' | b'-');
        let whole = (1..=TOPIC_MAX).contains(&text.len()) && text.bytes().all(good);
        whole.then(|| Topic(text.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads a length and a name.
    pub(super) fn read(bytes: &mut impl Buf) -> Option<Topic> {
        let len = usize::from(bytes.try_get_u8().ok()?);
        let mut name = [0; TOPIC_MAX];
        bytes.try_copy_to_slice(name.get_mut(..len)?).ok()?;
        Topic::parse(std::str::from_utf8(&name[..len]).ok()?)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        // A name has at most 128 bytes.
        out.put_u8(self.0.len() as u8);
        out.put_slice(self.0.as_bytes());
    }
}

impl Borrow<str> for Topic {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Topic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// BLAKE3 of origin, sequence, topic and payload.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct MessageId(pub [u8; 32]);

impl Hash for MessageId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.corr());
    }
}

/// How tables find messages: ids are hashes already, and a secret number keeps a publisher from choosing ids that all
/// fall into one place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mixing(pub(super) u64);

impl BuildHasher for Mixing {
    type Hasher = Mixed;

    fn build_hasher(&self) -> Mixed {
        Mixed { secret: self.0 | 1, mixed: 0 }
    }
}

#[derive(Debug)]
pub(super) struct Mixed {
    secret: u64,
    mixed: u64,
}

impl Hasher for Mixed {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        let product = u128::from(self.mixed ^ number) * u128::from(self.secret);
        // The halves of a product together depend on every bit of both.
        self.mixed = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.mixed
    }
}

impl MessageId {
    /// The id of a message.
    pub fn of(origin: NodeId, seq: u64, topic: &Topic, payload: &[u8]) -> MessageId {
        Named { origin, seq, topic, payload }.id()
    }

    /// The number of the frames that carry the message, by which a peer refuses them.
    pub fn corr(&self) -> u64 {
        let (first, _) = self.0.split_at(8);
        first.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    /// The lowest id with a number.
    pub(super) fn first_of(corr: u64) -> MessageId {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&corr.to_be_bytes());
        MessageId(id)
    }

    pub(super) fn read(bytes: &mut impl Buf) -> Option<MessageId> {
        let mut id = [0; 32];
        bytes.try_copy_to_slice(&mut id).ok()?;
        Some(MessageId(id))
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Whoever publishes or follows has one of these written for each message.
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 64];
        for (two, byte) in text.chunks_exact_mut(2).zip(self.0) {
            two.copy_from_slice(&[DIGITS[usize::from(byte >> 4)], DIGITS[usize::from(byte & 15)]]);
        }
        f.write_str(std::str::from_utf8(&text).unwrap_or_default())
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.corr())
    }
}

/// Everything of a message but its payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    pub origin: NodeId,
    /// Grows with every message of the origin, past its restarts.
    pub seq: u64,
    /// When it was published, in Unix milliseconds.
    pub time: u64,
    pub topic: Topic,
    /// Whether the payload is a bundle of messages.
    pub bundle: bool,
    pub signature: Option<Signature>,
}

impl Envelope {
    pub fn id(&self, payload: &[u8]) -> MessageId {
        match self.bundle {
            false => Named::of(self, payload).id(),
            // A hash over the payload by itself is made of many pieces at a time; behind a head it would not be.
            true => {
                let payload = blake3::hash(payload);
                Named::of(self, payload.as_bytes()).hashed(blake3::Hasher::new_derive_key(BUNDLE))
            }
        }
    }

    pub fn sign(&mut self, id: MessageId, key: &SigningKey) {
        self.signature = Signature::all(&[self.leaf(id)], |message| key.sign(message).to_bytes()).pop();
    }

    /// Signs several messages together.
    pub fn sign_all(messages: &mut [(Envelope, MessageId)], key: &SigningKey) {
        let leaves: Vec<Leaf> = messages.iter().map(|(envelope, id)| envelope.leaf(*id)).collect();
        let signed = Signature::all(&leaves, |message| key.sign(message).to_bytes());
        for ((envelope, _), signature) in messages.iter_mut().zip(signed) {
            envelope.signature = Some(signature);
        }
    }

    /// Whether the origin signed this message at this time.
    pub fn is_signed(&self, id: MessageId) -> bool {
        Origins::default().signed(self, id)
    }

    /// What a signature is for.
    pub(super) fn leaf(&self, id: MessageId) -> Leaf {
        let mut leaf = [0; 40];
        leaf[..32].copy_from_slice(&id.0);
        leaf[32..].copy_from_slice(&self.time.to_be_bytes());
        leaf
    }

    pub(super) fn read(bytes: &mut impl Buf) -> Option<Envelope> {
        let MessageId(origin) = MessageId::read(bytes)?;
        let (seq, time) = (bytes.try_get_u64().ok()?, bytes.try_get_u64().ok()?);
        let topic = Topic::read(bytes)?;
        let form = bytes.try_get_u8().ok()?;
        let signature = Signature::read(form & !BUNDLED, bytes)?;
        Some(Envelope { origin: NodeId(origin), seq, time, topic, bundle: form & BUNDLED != 0, signature })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.put_slice(&self.origin.0);
        out.put_u64(self.seq);
        out.put_u64(self.time);
        self.topic.write(out);
        let bundled = if self.bundle { BUNDLED } else { 0 };
        Signature::write(self.signature.as_ref(), bundled, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_two_engines_put_the_same_message_into_different_places() {
        let id = MessageId([9; 32]);
        assert_eq!(Mixing(5).hash_one(id), Mixing(5).hash_one(id));
        assert_ne!(Mixing(5).hash_one(id), Mixing(77).hash_one(id));
    }
}
