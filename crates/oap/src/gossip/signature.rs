//! Who published a message: signatures, each of one message or of several that were published together.
//!
//! To sign and to check cost more than all else that is done for a message. An origin that has several at hand makes a
//! tree of their hashes and signs its root once; each message carries the hashes beside its way to the root. Whoever has
//! checked one of them need not check the signature for the others.

use super::message::{Envelope, MessageId};
use crate::node::NodeId;
use aws_lc_rs::signature::Ed25519KeyPair;
use bytes::{Buf, BufMut as _};
use ed25519_dalek::{SigningKey, VerifyingKey};
use ron_ed25519::Key;
use std::collections::{BTreeMap, VecDeque};

/// Messages that are signed together at most, and the hashes that each then carries.
pub const TOGETHER_MAX: usize = 1 << PATH_MAX;
const PATH_MAX: usize = 6;
/// Bytes of a signature in an envelope at most.
pub(super) const BYTES_MAX: usize = 1 + 64 + 2 + PATH_MAX * 32;

/// What is signed begins with this, so that no signature of the same key for something else will do.
const ALONE: &[u8] = b"oap/1 gossip\n";
const TOGETHER: &[u8] = b"oap/1 gossip together\n";

/// The id and the time of a message.
pub(super) type Leaf = [u8; 40];
type Hash = [u8; 32];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    pub bytes: [u8; 64],
    /// The message's place among those signed together.
    pub place: u8,
    /// The hashes beside its way to the root, from below; none if it was signed alone.
    pub path: Vec<Hash>,
}

impl Signature {
    /// Signs messages: one alone, more together.
    pub(super) fn all(leaves: &[Leaf], sign: impl Fn(&[u8]) -> [u8; 64]) -> Vec<Signature> {
        if let [leaf] = leaves {
            return vec![Signature { bytes: sign(&[ALONE, leaf].concat()), place: 0, path: Vec::new() }];
        }
        let mut signed = Vec::with_capacity(leaves.len());
        for leaves in leaves.chunks(TOGETHER_MAX) {
            let levels = levels(leaves);
            let root = levels.last().and_then(|root| root.first()).copied().unwrap_or_default();
            let bytes = sign(&[TOGETHER, &root].concat());
            let path = |place: usize| {
                let beside = |(level, hashes): (usize, &Vec<Hash>)| hashes[(place >> level) ^ 1];
                levels[..levels.len() - 1].iter().enumerate().map(beside).collect()
            };
            signed.extend((0..leaves.len()).map(|at| Signature { bytes, place: at as u8, path: path(at) }));
        }
        signed
    }

    /// What the signature is of, if it is of several messages.
    fn root(&self, leaf: &Leaf) -> Option<Hash> {
        let up = |(hash, place): (Hash, u8), beside: &Hash| match place & 1 {
            0 => (above(&hash, beside), place >> 1),
            _ => (above(beside, &hash), place >> 1),
        };
        let root = self.path.iter().fold((blake3::hash(leaf).into(), self.place), up).0;
        (!self.path.is_empty()).then_some(root)
    }

    /// Reads what an envelope ends with after the byte that says how it is signed; the inner `None` is a message that is
    /// not.
    pub(super) fn read(kind: u8, bytes: &mut impl Buf) -> Option<Option<Signature>> {
        if kind == 0 {
            return Some(None);
        }
        let mut signature = Signature { bytes: [0; 64], place: 0, path: Vec::new() };
        bytes.try_copy_to_slice(&mut signature.bytes).ok()?;
        if kind == 2 {
            signature.place = bytes.try_get_u8().ok()?;
            let length = usize::from(bytes.try_get_u8().ok()?);
            if !(1..=PATH_MAX).contains(&length) || signature.place >> length != 0 {
                return None;
            }
            signature.path = vec![[0; 32]; length];
            for hash in &mut signature.path {
                bytes.try_copy_to_slice(hash).ok()?;
            }
        }
        (kind <= 2).then_some(Some(signature))
    }

    /// Writes what an envelope ends with; `form` is added to its first byte.
    pub(super) fn write(signature: Option<&Signature>, form: u8, out: &mut Vec<u8>) {
        let Some(Signature { bytes, place, path }) = signature else { return out.put_u8(form) };
        out.put_u8(form | if path.is_empty() { 1 } else { 2 });
        out.put_slice(bytes);
        if !path.is_empty() {
            out.put_u8(*place);
            // At most six.
            out.put_u8(path.len() as u8);
            path.iter().for_each(|hash| out.put_slice(hash));
        }
    }
}

/// The tree over messages, each level up to the root. Places that are left over are zeros.
fn levels(leaves: &[Leaf]) -> Vec<Vec<Hash>> {
    let mut level: Vec<Hash> = leaves.iter().map(|leaf| blake3::hash(leaf).into()).collect();
    level.resize(leaves.len().next_power_of_two().max(2), [0; 32]);
    let mut levels = vec![level];
    while let Some(level) = levels.last().filter(|level| level.len() > 1) {
        let next = level.chunks_exact(2).map(|pair| above(&pair[0], &pair[1])).collect();
        levels.push(next);
    }
    levels
}

/// Of 64 bytes, where a message's own hash is of 40.
fn above(left: &Hash, right: &Hash) -> Hash {
    blake3::Hasher::new().update(left).update(right).finalize().into()
}

/// Who publishes here: the key, ready to sign. This library signs in half the time of the one that checks.
#[derive(Debug)]
pub(super) struct Author(Ed25519KeyPair);

impl Author {
    pub(super) fn new(key: &SigningKey) -> Author {
        let pair = Ed25519KeyPair::from_seed_and_public_key(key.as_bytes(), key.verifying_key().as_bytes());
        Author(pair.expect("a public key belongs to the seed that it is made of"))
    }

    /// A signature for each message.
    pub(super) fn sign(&self, leaves: &[Leaf]) -> Vec<Signature> {
        Signature::all(leaves, |message| {
            self.0.sign(message).as_ref().try_into().expect("a signature has 64 bytes")
        })
    }
}

/// Origins whose keys are kept as points of the curve.
const ORIGINS_MAX: usize = 1024;
/// Of them, those that are prepared for many checks, which takes memory.
const PREPARED_MAX: usize = 32;
const _: () = assert!(PREPARED_MAX * ron_ed25519::TABLE_BYTES <= 8 << 20);
/// Roots that are known to be signed.
const ROOTS_MAX: usize = 1024;

/// Keys as signatures are checked with, and what they have signed: to make a point of a key's bytes costs a seventh of a
/// check, and of a key that signs often more is kept.
#[derive(Debug, Default)]
pub(super) struct Origins {
    keys: BTreeMap<NodeId, Key>,
    prepared: usize,
    roots: BTreeMap<Hash, (NodeId, [u8; 64])>,
    /// The same, the oldest first.
    order: VecDeque<Hash>,
}

impl Origins {
    /// Whether a message's origin signed it.
    pub(super) fn signed(&mut self, envelope: &Envelope, id: MessageId) -> bool {
        let Some(signature) = &envelope.signature else { return false };
        let leaf = envelope.leaf(id);
        let Some(root) = signature.root(&leaf) else {
            return self.is_by(envelope.origin, &[ALONE, &leaf].concat(), &signature.bytes);
        };
        // The signature too: whoever gets the message from here has to find it good.
        if self.roots.get(&root) == Some(&(envelope.origin, signature.bytes)) {
            return true;
        }
        let signed = self.is_by(envelope.origin, &[TOGETHER, &root].concat(), &signature.bytes);
        if signed {
            self.remember(root, envelope.origin, signature.bytes);
        }
        signed
    }

    fn remember(&mut self, root: Hash, origin: NodeId, signature: [u8; 64]) {
        if self.roots.insert(root, (origin, signature)).is_none() {
            self.order.push_back(root);
        }
        if self.order.len() > ROOTS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.roots.remove(&oldest);
        }
    }

    /// Only an origin that did sign is remembered, so that forgeries displace nobody.
    fn is_by(&mut self, origin: NodeId, message: &[u8], signature: &[u8; 64]) -> bool {
        if let Some(key) = self.keys.get(&origin) {
            let was_prepared = key.is_prepared();
            let signed = key.verify(message, signature);
            if !was_prepared && key.is_prepared() {
                self.prepared += 1;
                if self.prepared > PREPARED_MAX {
                    self.forget();
                }
            }
            return signed;
        }
        let Ok(key) = VerifyingKey::from_bytes(&origin.0).map(Key::from) else { return false };
        let signed = key.verify(message, signature);
        if signed {
            if self.keys.len() >= ORIGINS_MAX {
                self.forget();
            }
            self.keys.insert(origin, key);
        }
        signed
    }

    /// Whoever signs more is remembered again.
    fn forget(&mut self) {
        (self.keys, self.prepared) = (BTreeMap::new(), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::Topic;
    use super::*;
    use proptest::prelude::*;

    fn key() -> SigningKey {
        SigningKey::from_bytes(&[7; 32])
    }

    /// So many messages of one origin, signed together.
    fn messages(count: u64, key: &SigningKey) -> Vec<(Envelope, MessageId)> {
        let origin = NodeId(key.verifying_key().to_bytes());
        let mut made: Vec<(Envelope, MessageId)> = (0..count)
            .map(|seq| {
                let topic = Topic::parse("t").unwrap();
                let envelope = Envelope { origin, seq, time: 2, topic, bundle: false, signature: None };
                let id = envelope.id(b"payload");
                (envelope, id)
            })
            .collect();
        let leaves: Vec<Leaf> = made.iter().map(|(envelope, id)| envelope.leaf(*id)).collect();
        let signed = Author::new(key).sign(&leaves);
        assert_eq!(signed.len(), made.len());
        for ((envelope, _), signature) in made.iter_mut().zip(signed) {
            envelope.signature = Some(signature);
        }
        made
    }

    #[test]
    fn an_author_signs_as_the_key_itself_would() {
        let (mut envelope, id) = messages(1, &key()).remove(0);
        assert!(envelope.is_signed(id) && Origins::default().signed(&envelope, id));
        let by_author = envelope.signature.clone();
        envelope.sign(id, &key());
        assert_eq!(by_author, envelope.signature);
    }

    #[test]
    fn keys_that_sign_often_are_prepared_and_only_so_many_of_them() {
        let mut origins = Origins::default();
        for seed in 0..=PREPARED_MAX as u8 {
            assert_eq!(origins.prepared, usize::from(seed));
            let (mut envelope, id) = messages(1, &SigningKey::from_bytes(&[seed; 32])).remove(0);
            for _ in 0..33 {
                assert!(origins.signed(&envelope, id));
            }
            envelope.time += 1;
            assert!(!origins.signed(&envelope, id), "prepared or not, what is signed is what counts");
        }
        assert_eq!((origins.prepared, origins.keys.len()), (0, 0), "one too many");
    }

    #[test]
    fn a_root_is_checked_once_and_only_so_many_are_remembered() {
        let mut origins = Origins::default();
        let group = messages(5, &key());
        for (envelope, id) in &group {
            assert!(origins.signed(envelope, *id));
            assert_eq!((origins.roots.len(), origins.order.len()), (1, 1));
        }
        // Known or not, with a signature that others would find forged it goes no further.
        let (mut envelope, id) = group[0].clone();
        envelope.signature.as_mut().unwrap().bytes[9] ^= 1;
        assert!(!origins.signed(&envelope, id));
        let (mut envelope, id) = group[1].clone();
        envelope.origin = NodeId(SigningKey::from_bytes(&[8; 32]).verifying_key().to_bytes());
        assert!(!origins.signed(&envelope, id), "nor as somebody else's");
        for number in 0..2 * ROOTS_MAX as u64 {
            origins.remember(*blake3::hash(&number.to_be_bytes()).as_bytes(), envelope.origin, [0; 64]);
        }
        assert_eq!((origins.roots.len(), origins.order.len()), (ROOTS_MAX, ROOTS_MAX));
        assert!(origins.signed(&group[2].0, group[2].1), "one that was forgotten is checked again");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn however_many_are_signed_each_holds_by_itself_and_for_nothing_else(count in 1_u64..=130, other: u16) {
            let group = messages(count, &key());
            let signatures: std::collections::BTreeSet<_> =
                group.iter().map(|(envelope, _)| envelope.signature.as_ref().unwrap().bytes).collect();
            prop_assert_eq!(signatures.len(), (count as usize).div_ceil(TOGETHER_MAX));
            let mut origins = Origins::default();
            let (_, other) = &group[usize::from(other) % group.len()];
            for (envelope, id) in &group {
                prop_assert!(envelope.is_signed(*id) && origins.signed(envelope, *id));
                prop_assert!(other == id || !envelope.is_signed(*other) && !origins.signed(envelope, *other));
                let mut written = Vec::new();
                Signature::write(envelope.signature.as_ref(), 0, &mut written);
                prop_assert!(written.len() <= BYTES_MAX);
                prop_assert_eq!(Signature::read(written[0], &mut &written[1..]), Some(envelope.signature.clone()));
            }
        }
    }
}
