//! Signers with known keys, and proposals by them.

use ed25519_dalek::SigningKey;
use fips204::ml_dsa_44;
use fips204::traits::{KeyGen as _, SerDes as _, Signer as _};
use ron_log::approval::{Sig, approval_message};
use ron_log::key::PublicKey;
use ron_log::{
    Approval, B3, CheckedApproval, Entry, Key, Op, Payload, Proposal, Role, Signer, SignerSet, State,
    TrustRoots,
};

/// The key whose seed is this byte, 32 times.
pub(crate) fn key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

pub(crate) fn ml_dsa(seed: u8) -> (ml_dsa_44::PublicKey, ml_dsa_44::PrivateKey) {
    ml_dsa_44::KG::keygen_from_seed(&[seed; 32])
}

pub(crate) fn ed_key(seed: u8) -> PublicKey {
    PublicKey::Ed25519(key(seed).verifying_key())
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
