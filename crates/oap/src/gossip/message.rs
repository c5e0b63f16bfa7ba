//! A message: who published it, where, when, and the proof of it.

use crate::node::NodeId;
use aws_lc_rs::signature::Ed25519KeyPair;
use bytes::{Buf, BufMut as _};
use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use ron_ed25519::Key;
use std::borrow::Borrow;
use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

/// What is signed begins with this, so that no signature of the same key for something else will do.
const SIGNED: &[u8] = b"oap/1 gossip\n";
/// Bytes of a topic at most.
pub const TOPIC_MAX: usize = 128;
/// Bytes of an envelope at most.
pub const ENVELOPE_MAX: usize = 32 + 8 + 8 + 1 + TOPIC_MAX + 1 + 64;

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

/// Who publishes here: the key, ready to sign. Half of a publication's work is its signature, which this library makes in
/// half the time of the one that checks them.
#[derive(Debug)]
pub(super) struct Author(Ed25519KeyPair);

impl Author {
    pub(super) fn new(key: &SigningKey) -> Author {
        let pair = Ed25519KeyPair::from_seed_and_public_key(key.as_bytes(), key.verifying_key().as_bytes());
        Author(pair.expect("a public key belongs to the seed that it is made of"))
    }

    pub(super) fn sign(&self, envelope: &mut Envelope, id: MessageId) {
        envelope.signature = self.0.sign(&envelope.signed(id)).as_ref().try_into().ok();
    }
}

/// Origins whose keys are kept as points of the curve.
const ORIGINS_MAX: usize = 1024;

/// Of them, those that are prepared for many checks.
const PREPARED_MAX: usize = 32;

/// Keys as signatures are checked with: to make a point of a key's bytes costs a seventh of a check, and of a key that
/// signs often more is kept.
#[derive(Debug, Default)]
pub(super) struct Origins {
    keys: BTreeMap<NodeId, Key>,
    prepared: usize,
}

impl Origins {
    /// Whether a message's origin signed it. Only an origin that did is remembered, so that forgeries displace nobody.
    pub(super) fn signed(&mut self, envelope: &Envelope, id: MessageId) -> bool {
        if let Some(key) = self.keys.get(&envelope.origin) {
            let was_prepared = key.is_prepared();
            let signed = envelope.is_signed_by(key, id);
            if !was_prepared && key.is_prepared() {
                self.prepared += 1;
                if self.prepared > PREPARED_MAX {
                    self.forget();
                }
            }
            return signed;
        }
        let Ok(key) = VerifyingKey::from_bytes(&envelope.origin.0).map(Key::from) else { return false };
        let signed = envelope.is_signed_by(&key, id);
        if signed {
            if self.keys.len() >= ORIGINS_MAX {
                self.forget();
            }
            self.keys.insert(envelope.origin, key);
        }
        signed
    }

    /// Whoever signs more is remembered again.
    fn forget(&mut self) {
        *self = Origins::default();
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
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
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
    pub signature: Option<[u8; 64]>,
}

impl Envelope {
    pub fn id(&self, payload: &[u8]) -> MessageId {
        let mut head = Vec::with_capacity(41 + TOPIC_MAX);
        head.put_slice(&self.origin.0);
        head.put_u64(self.seq);
        self.topic.write(&mut head);
        let mut hasher = blake3::Hasher::new();
        hasher.update(&head).update(payload);
        MessageId(hasher.finalize().into())
    }

    pub fn sign(&mut self, id: MessageId, key: &SigningKey) {
        self.signature = Some(key.sign(&self.signed(id)).to_bytes());
    }

    /// Whether the origin signed this message at this time.
    pub fn is_signed(&self, id: MessageId) -> bool {
        VerifyingKey::from_bytes(&self.origin.0).is_ok_and(|key| self.is_signed_by(&key.into(), id))
    }

    fn is_signed_by(&self, origin: &Key, id: MessageId) -> bool {
        self.signature.is_some_and(|signature| origin.verify(&self.signed(id), &signature))
    }

    fn signed(&self, id: MessageId) -> [u8; SIGNED.len() + 40] {
        let mut bytes = [0; SIGNED.len() + 40];
        let (context, rest) = bytes.split_at_mut(SIGNED.len());
        context.copy_from_slice(SIGNED);
        rest[..32].copy_from_slice(&id.0);
        rest[32..].copy_from_slice(&self.time.to_be_bytes());
        bytes
    }

    pub(super) fn read(bytes: &mut impl Buf) -> Option<Envelope> {
        let MessageId(origin) = MessageId::read(bytes)?;
        let (seq, time) = (bytes.try_get_u64().ok()?, bytes.try_get_u64().ok()?);
        let topic = Topic::read(bytes)?;
        let signature = match bytes.try_get_u8().ok()? {
            0 => None,
            1 => {
                let mut signature = [0; 64];
                bytes.try_copy_to_slice(&mut signature).ok()?;
                Some(signature)
            }
            _ => return None,
        };
        Some(Envelope { origin: NodeId(origin), seq, time, topic, signature })
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.put_slice(&self.origin.0);
        out.put_u64(self.seq);
        out.put_u64(self.time);
        self.topic.write(out);
        out.put_u8(u8::from(self.signature.is_some()));
        out.put_slice(self.signature.as_ref().map_or(&[], |signature| &signature[..]));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_author_signs_as_the_key_itself_would() {
        let key = SigningKey::from_bytes(&[7; 32]);
        let origin = NodeId(key.verifying_key().to_bytes());
        let topic = Topic::parse("t").unwrap();
        let mut envelope = Envelope { origin, seq: 1, time: 2, topic, signature: None };
        let id = envelope.id(b"payload");
        Author::new(&key).sign(&mut envelope, id);
        assert!(envelope.is_signed(id) && Origins::default().signed(&envelope, id));
        let by_author = envelope.signature;
        envelope.sign(id, &key);
        assert_eq!(by_author, envelope.signature);
    }

    #[test]
    fn keys_that_sign_often_are_prepared_and_only_so_many_of_them() {
        let mut origins = Origins::default();
        for seed in 0..=PREPARED_MAX as u8 {
            assert_eq!(origins.prepared, usize::from(seed));
            let key = SigningKey::from_bytes(&[seed; 32]);
            let origin = NodeId(key.verifying_key().to_bytes());
            let topic = Topic::parse("t").unwrap();
            let mut envelope = Envelope { origin, seq: 1, time: 2, topic, signature: None };
            let id = envelope.id(b"payload");
            envelope.sign(id, &key);
            for _ in 0..33 {
                assert!(origins.signed(&envelope, id));
            }
            envelope.time += 1;
            assert!(!origins.signed(&envelope, id), "prepared or not, what is signed is what counts");
        }
        assert_eq!((origins.prepared, origins.keys.len()), (0, 0), "one too many");
    }

    #[test]
    fn tables_of_two_engines_put_the_same_message_into_different_places() {
        let id = MessageId([9; 32]);
        assert_eq!(Mixing(5).hash_one(id), Mixing(5).hash_one(id));
        assert_ne!(Mixing(5).hash_one(id), Mixing(77).hash_one(id));
    }
}
