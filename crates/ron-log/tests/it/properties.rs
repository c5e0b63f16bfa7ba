//! Quorum and rotation under any order of proposals, approvals, replays and races.

use crate::fixture::{approve, ed_key, put, roots, signer};
use proptest::prelude::*;
use ron_log::{
    Approval, CheckedApproval, ConflictRule, Entry, Payload, Proposal, Role, Signatures, Signer, SignerSet,
    State, TrustRoots, Verifier,
};
use std::collections::BTreeSet;

const NOW: u64 = 1_000_000;

/// A signer by number: whether it may approve, and whether its time is over.
fn signers(shape: &[(u8, bool, bool)]) -> Vec<Signer> {
    let mut seen = BTreeSet::new();
    let one = |(seed, may, over): &(u8, bool, bool)| {
        let roles = if *may { vec![Role::Approve] } else { vec![Role::Propose] };
        Signer { roles, not_after: over.then_some(NOW - 1), ..signer(*seed) }
    };
    shape.iter().filter(|(seed, ..)| seen.insert(*seed)).map(one).collect()
}

fn shape() -> impl Strategy<Value = Vec<(u8, bool, bool)>> {
    prop::collection::vec((1u8..8, prop::bool::weighted(0.8), prop::bool::weighted(0.2)), 1..6)
}

/// How many of these names count, by the definition alone.
fn count(signers: &[Signer], approving: &BTreeSet<u8>) -> u64 {
    let counts = |signer: &&Signer| {
        signer.roles.contains(&Role::Approve)
            && signer.not_after.is_none()
            && approving.iter().any(|seed| signer.keys == [ed_key(*seed)])
    };
    signers.iter().filter(counts).count() as u64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_commit_passes_exactly_with_the_quorum_of_every_set_concerned(
        old in shape(),
        new in prop::option::of(shape()),
        thresholds in (1u64..4, 1u64..4),
        approving in prop::collection::btree_set(1u8..10, 0..8),
    ) {
        let (old, new) = (signers(&old), new.map(|shape| signers(&shape)));
        let set = |threshold, signers: &[Signer]| SignerSet::new(threshold, true, signers.to_vec());
        let Ok(old_set) = set(thresholds.0, &old) else { return Ok(()) };
        let new_set = match new.as_deref().map(|signers| set(thresholds.1, signers)) {
            Some(Err(_)) => return Ok(()),
            Some(Ok(set)) => Some(set),
            None => None,
        };
        let state = State::genesis(&TrustRoots { signers: old_set, ..roots() });
        let op = match &new_set {
            Some(set) => put("signers", "main", &set.canonical()),
            None => put("x-note", "a", "1"),
        };
        let proposal = crate::fixture::propose(&state, vec![op]);
        let check = |seed: &u8| {
            approve(*seed, proposal.b3()).check(proposal.b3(), state.signers(), new_set.as_ref()).ok()
        };
        let approvals: Vec<CheckedApproval> = approving.iter().filter_map(check).collect();
        let enough = count(&old, &approving) >= thresholds.0
            && new.as_deref().is_none_or(|new| count(new, &approving) >= thresholds.1);
        let made = state.commit(&proposal, &approvals, NOW, ConflictRule::Touched);
        prop_assert_eq!(made.is_ok(), enough, "{:?}", made);
    }

    /// Proposals are written early and committed late, in any order, with approvals made at any time: what is
    /// committed is one chain that a verifier finds good, and none of it was made under a set no longer in force.
    #[test]
    fn whatever_races_the_log_stays_one_verified_chain(
        steps in prop::collection::vec((0u8..8, any::<prop::sample::Index>(), 1u8..32, 0u8..3), 1..60),
    ) {
        let mut state = State::genesis(&roots());
        let mut log: Vec<(Entry, Proposal)> = vec![roots().genesis()];
        let mut pending: Vec<(Proposal, Vec<Approval>)> = Vec::new();
        for (what, which, mask, item) in steps {
            let seeds = (1u8..=5).filter(|seed| mask >> (seed - 1) & 1 == 1);
            if what < 2 || pending.is_empty() {
                let seed = mask % 5 + 1;
                let op = match what {
                    1 => {
                        let next = crate::fixture::set(2, &[seed, seed % 5 + 1, (seed + 1) % 5 + 1]);
                        put("signers", "main", &next.canonical())
                    }
                    _ => put("x-note", &format!("n{item}"), &seed.to_string()),
                };
                pending.push((Proposal::new(payload(&state, vec![op], pending.len())).expect("good"), vec![]));
                continue;
            }
            // One of the last few, or few would ever be committed.
            let from = pending.len().saturating_sub(3);
            let (proposal, approvals) = which.get_mut(&mut pending[from..]);
            if what < 5 {
                // Some sign another payload in its place.
                let signed = if item == 0 && what == 2 { state.head().hash } else { proposal.b3() };
                *approvals = seeds.map(|seed| approve(seed, signed)).collect();
                continue;
            }
            let proposed = State::proposed_signers(proposal.payload()).expect("a set");
            let check = |it: &Approval| it.clone().check(proposal.b3(), state.signers(), proposed.as_ref()).ok();
            let good: Vec<CheckedApproval> = approvals.iter().filter_map(check).collect();
            if let Ok(entry) = state.commit(proposal, &good, NOW, ConflictRule::Touched) {
                prop_assert!(state.never_had(proposal.payload()), "it is new");
                prop_assert_eq!(entry.record().signers_version, state.signers_version());
                state.apply(&entry, proposal.payload()).expect("the next entry");
                prop_assert!(state.commit(proposal, &good, NOW, ConflictRule::Touched).is_err(), "twice");
                log.push((entry, proposal.clone()));
            }
        }
        prop_assert!(log[1..].iter().all(|(_, proposal)| !state.never_had(proposal.payload())));
        let mut verifier = Verifier::new(roots(), None, Signatures::Check);
        log.iter().for_each(|(entry, proposal)| verifier.entry(entry.bytes(), proposal.bytes()));
        prop_assert_eq!(verifier.state(), Some(&state));
        prop_assert_eq!(verifier.finish(), vec![]);
    }
}

fn payload(state: &State, ops: Vec<ron_log::Op>, number: usize) -> Payload {
    Payload { nonce: (number as u128).to_be_bytes(), ..crate::fixture::payload(state, ops) }
}
