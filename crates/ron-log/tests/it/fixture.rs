//! Signers with known keys, and proposals by them.

use ed25519_dalek::SigningKey;
use fips204::ml_dsa_44;
use fips204::traits::{KeyGen as _, SerDes as _, Signer as _};
use ron_log::approval::{Sig, approval_message};
use ron_log::key::PublicKey;
use ron_log::proof::Inclusion;
use ron_log::tile::Tile;
use ron_log::tree::{inclusion, leaf_hash};
use ron_log::{
    Approval, B3, CheckedApproval, Checkpoint, Entry, Key, NoteKey, Op, Payload, Proposal, Role, Signer,
    SignerSet, State, Tree, TrustRoots,
};
use std::collections::BTreeMap;

/// The key whose seed is this byte, 32 times.
pub(crate) fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

pub(crate) fn ml_dsa(seed: u8) -> (ml_dsa_44::PublicKey, ml_dsa_44::PrivateKey) {
    ml_dsa_44::KG::keygen_from_seed(&[seed; 32])
}

pub(crate) fn ed_key(seed: u8) -> PublicKey {
    PublicKey::Ed25519(key(seed).verifying_key().into())
}

pub(crate) fn ml_key(seed: u8) -> PublicKey {
    let bytes = ml_dsa(seed).0.into_bytes();
    PublicKey::MlDsa44(Box::new(ml_dsa_44::PublicKey::try_from_bytes(bytes).expect("a key")))
}

/// A signer with every role, named after its key's seed.
pub(crate) fn signer(seed: u8) -> Signer {
    let roles = vec![Role::Propose, Role::Approve, Role::Commit];
    Signer { id: format!("s{seed}"), keys: vec![ed_key(seed)], roles, not_after: None }
}

pub(crate) fn set(threshold: u64, seeds: &[u8]) -> SignerSet {
    SignerSet::new(threshold, false, seeds.iter().map(|seed| signer(*seed)).collect()).expect("a good set")
}

pub(crate) fn roots() -> TrustRoots {
    TrustRoots { log: "registry.example/log".into(), signers: set(2, &[1, 2, 3]) }
}

pub(crate) fn put(kind: &str, id: &str, body: &str) -> Op {
    Op { key: Key::new(kind, id).expect("a good key"), body: Some(body.into()) }
}

pub(crate) fn delete(kind: &str, id: &str) -> Op {
    Op { key: Key::new(kind, id).expect("a good key"), body: None }
}

/// A proposal on top of a state.
pub(crate) fn propose(state: &State, ops: Vec<Op>) -> Proposal {
    Proposal::new(payload(state, ops)).expect("a good payload")
}

pub(crate) fn payload(state: &State, ops: Vec<Op>) -> Payload {
    Payload {
        base_version: state.head().version,
        signers_version: state.signers_version(),
        nonce: [7; 16],
        ops,
        note: "test".into(),
        expires_at: 2_000_000,
    }
}

pub(crate) fn approve(seed: u8, payload_b3: B3) -> Approval {
    Approval::sign(&format!("s{seed}"), &key(seed), payload_b3, 1_000)
}

pub(crate) fn ml_sig(seed: u8, payload_b3: B3) -> Box<[u8; ml_dsa_44::SIG_LEN]> {
    let message = approval_message(payload_b3);
    Box::new(ml_dsa(seed).1.try_sign_with_seed(&[0; 32], message.as_bytes(), &[]).expect("a signature"))
}

pub(crate) fn hybrid_sig(seed: u8, payload_b3: B3) -> Sig {
    let Sig::Ed25519(a) = approve(seed, payload_b3).sig else { unreachable!("an Ed25519 key signs so") };
    Sig::Hybrid(a, ml_sig(seed, payload_b3))
}

/// Approvals checked against the sets that matter for the proposal.
pub(crate) fn checked(state: &State, proposal: &Proposal, seeds: &[u8]) -> Vec<CheckedApproval> {
    let proposed = State::proposed_signers(proposal.payload()).expect("a good set");
    let check =
        |seed: &u8| approve(*seed, proposal.b3()).check(proposal.b3(), state.signers(), proposed.as_ref());
    seeds.iter().map(|seed| check(seed).expect("a good approval")).collect()
}

/// Commits a proposal that these signers approve, and moves on.
pub(crate) fn commit(state: &mut State, ops: Vec<Op>, seeds: &[u8]) -> (Entry, Proposal) {
    let proposal = propose(state, ops);
    let approvals = checked(state, &proposal, seeds);
    let entry =
        state.commit(&proposal, &approvals, 1_000_000, ron_log::ConflictRule::Touched).expect("a commit");
    state.apply(&entry, proposal.payload()).expect("the next entry");
    (entry, proposal)
}

/// The log's own key.
pub(crate) fn log_key() -> SigningKey {
    key(200)
}

pub(crate) fn log_note_key() -> NoteKey {
    NoteKey::ed25519(&roots().log, log_key().verifying_key())
}

/// A log as a node would keep it.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) changes: Vec<(Entry, Proposal)>,
    pub(crate) tree: Tree,
    pub(crate) hashes: BTreeMap<(u8, u64), Vec<u8>>,
}

impl Log {
    pub(crate) fn push(&mut self, change: (Entry, Proposal)) {
        let hashes = &mut self.hashes;
        self.tree.append(leaf_hash(change.0.bytes()), |level, place, hash| {
            hashes.entry((level, place / 256)).or_default().extend_from_slice(hash);
        });
        self.changes.push(change);
    }

    pub(crate) fn tile(&self, tile: Tile) -> Result<Vec<u8>, std::convert::Infallible> {
        Ok(self.hashes[&(tile.level, tile.index)][..usize::from(tile.width) * 32].to_vec())
    }

    pub(crate) fn checkpoint(&self) -> Checkpoint {
        Checkpoint { origin: roots().log, size: self.tree.size(), root: self.tree.root() }
    }

    /// A change with its path to the present root.
    pub(crate) fn inclusion(&self, version: u64) -> Inclusion {
        let path = inclusion(version, self.tree.size(), |tile| self.tile(tile)).expect("a path");
        let (entry, proposal) = self.changes[version as usize].clone();
        Inclusion { entry, proposal, path }
    }
}

/// A log of so many changes after its genesis; every fourth changes the signer set.
pub(crate) fn log_of(count: u8) -> (Log, State) {
    let mut log = Log::default();
    let mut state = State::genesis(&roots());
    log.push(roots().genesis());
    let mut seeds = [1, 2, 3];
    for number in 1..=count {
        if number % 4 == 0 {
            let next = [seeds[1], seeds[2], seeds[2] + 1];
            let ops = vec![put("signers", "main", &set(2, &next).canonical())];
            log.push(commit(&mut state, ops, &[seeds[1], seeds[2]]));
            seeds = next;
        } else {
            let ops = vec![put("x-note", &format!("n{}", number % 5), &format!(r#"{{"n":{number}}}"#))];
            log.push(commit(&mut state, ops, &seeds[1..]));
        }
    }
    (log, state)
}
