//! Who counts, and when enough do.

use crate::fixture::{
    approve, checked, commit, ed_key, hybrid_sig, key, ml_key, ml_sig, propose, put, roots, set, signer,
};
use ron_log::approval::Sig;
use ron_log::key::{MlDsa44Key, SigningKeys};
use ron_log::{
    Approval, ApprovalError, CommitError, ConflictRule, Proposal, Reason, Role, Signer, SignerSet, State,
    TrustRoots, Unchecked, check_all, reachable,
};

const NOW: u64 = 1_000_000;

fn fails(state: &State, proposal: &Proposal, seeds: &[u8]) -> Reason {
    let approvals = checked(state, proposal, seeds);
    state.commit(proposal, &approvals, NOW, ConflictRule::Touched).expect_err("no quorum").reason()
}

#[test]
fn a_forged_or_foreign_approval_is_named() {
    let state = State::genesis(&roots());
    let proposal = propose(&state, vec![put("x-note", "a", "1")]);
    let other = propose(&state, vec![put("x-note", "a", "2")]);
    let check = |approval: Approval| approval.check(proposal.b3(), state.signers(), None).map(|_| ());
    assert_eq!(check(approve(1, proposal.b3())), Ok(()));
    assert_eq!(check(approve(1, other.b3())), Err(ApprovalError::InvalidSig));
    assert_eq!(check(approve(9, proposal.b3())), Err(ApprovalError::RevokedKey));
    assert_eq!(check(Approval::sign("s1", &key(2), proposal.b3(), 0)), Err(ApprovalError::InvalidSig));
    let mut ml = approve(1, proposal.b3());
    ml.sig = Sig::MlDsa44(ml_sig(1, proposal.b3()));
    assert_eq!(check(ml), Err(ApprovalError::InvalidSig), "not the algorithm of its key");
    let text = approve(1, proposal.b3()).canonical();
    assert_eq!(Approval::parse(text.as_bytes()).expect("canonical"), approve(1, proposal.b3()));
    assert!(Approval::parse(text.replace("==", "").as_bytes()).is_err(), "padding is part of the form");
    assert!(Approval::parse(text.replace("ed25519", "ed448").as_bytes()).is_err());
}

#[test]
fn two_of_three_must_approve_and_nobody_counts_twice() {
    let state = State::genesis(&roots());
    let proposal = propose(&state, vec![put("x-note", "a", "1")]);
    assert_eq!(fails(&state, &proposal, &[]), Reason::QuorumFailed);
    assert_eq!(fails(&state, &proposal, &[1]), Reason::QuorumFailed);
    assert_eq!(fails(&state, &proposal, &[1, 1]), Reason::DuplicateApproval);
    let approvals = checked(&state, &proposal, &[3, 1]);
    let entry = state.commit(&proposal, &approvals, NOW, ConflictRule::Touched).expect("a quorum");
    let names: Vec<&str> = entry.record().approvals.iter().map(|approval| &*approval.signer).collect();
    assert_eq!(names, ["s1", "s3"]);
    let other = propose(&state, vec![put("x-note", "a", "2")]);
    let replayed = state.commit(&other, &approvals, NOW, ConflictRule::Touched).expect_err("another payload");
    assert_eq!(replayed.reason(), Reason::QuorumFailed);
}

#[test]
fn a_set_that_cannot_decide_or_counts_a_key_twice_is_refused() {
    let bad = |threshold, signers: Vec<Signer>| {
        SignerSet::new(threshold, false, signers).expect_err("a bad set").to_string()
    };
    let three = || [1, 2, 3].map(signer).to_vec();
    assert!(bad(0, three()).starts_with("threshold"));
    assert!(bad(4, three()).starts_with("threshold"));
    assert_eq!(bad(1, three()), "threshold: must be a majority of the approvers");
    SignerSet::new(1, true, three()).expect("a minority is allowed by the set itself");
    assert_eq!(bad(2, vec![signer(1), signer(1), signer(2)]), "signers: must name a signer once");
    let twin = Signer { id: "twin".into(), ..signer(1) };
    assert_eq!(bad(2, vec![signer(1), twin, signer(2)]), "keys: must not belong to two signers");
    let two = Signer { keys: vec![ed_key(1), ed_key(2)], ..signer(1) };
    assert_eq!(bad(1, vec![two]), "keys: must be one key, or one of each algorithm");
    let watcher = Signer { roles: vec![Role::Propose], ..signer(3) };
    assert!(bad(3, vec![signer(1), signer(2), watcher]).starts_with("threshold"), "it may not approve");
    let heavy: Vec<Signer> =
        (1..=17).map(|seed| Signer { keys: vec![ml_key(seed)], ..signer(seed) }).collect();
    assert_eq!(bad(9, heavy), "threshold: must be low enough for a record to hold the quorum");
}

#[test]
fn expired_signers_and_those_without_the_role_do_not_count() {
    let mut signers = [1, 2, 3, 4].map(signer);
    signers[0].not_after = Some(NOW - 1);
    signers[1].roles = vec![Role::Propose, Role::Commit];
    let signers = SignerSet::new(2, false, signers.to_vec()).expect("a set");
    let state = State::genesis(&TrustRoots { signers, ..roots() });
    let proposal = propose(&state, vec![put("x-note", "a", "1")]);
    let approvals = checked(&state, &proposal, &[1, 2, 3]);
    let judged = state.judge(&proposal, &approvals, NOW).expect("a judgement");
    assert_eq!(judged.set_aside, [(0, ApprovalError::Expired), (1, ApprovalError::RoleMissing)]);
    assert_eq!((judged.in_force.have, judged.in_force.need, judged.in_force.of), (1, 2, 3));
    assert!(!judged.met());
    assert!(state.judge(&proposal, &approvals, NOW - 1).expect("a judgement").met(), "its last millisecond");
    let entry = {
        let approvals = checked(&state, &proposal, &[1, 2, 3, 4]);
        state.commit(&proposal, &approvals, NOW, ConflictRule::Touched).expect("two count")
    };
    assert_eq!(entry.record().approvals.len(), 2, "what does not count is not recorded");
}

#[test]
fn a_new_signer_set_needs_the_old_quorum_and_the_new() {
    let mut state = State::genesis(&roots());
    let change = propose(&state, vec![put("signers", "main", &set(2, &[3, 4, 5]).canonical())]);
    assert_eq!(fails(&state, &change, &[1, 2]), Reason::QuorumFailed, "the new set is silent");
    assert_eq!(fails(&state, &change, &[4, 5]), Reason::QuorumFailed, "the old set is silent");
    assert_eq!(fails(&state, &change, &[3, 4]), Reason::QuorumFailed, "one of the old");
    let pending = propose(&state, vec![put("x-note", "a", "1")]);
    let early = checked(&state, &pending, &[1, 2]);
    commit(&mut state, vec![put("signers", "main", &set(2, &[3, 4, 5]).canonical())], &[1, 3, 4]);
    assert_eq!((state.signers_version(), state.signers().threshold()), (1, 2));
    let replayed = state.commit(&pending, &early, NOW, ConflictRule::Touched);
    assert_eq!(replayed, Err(CommitError::PolicyChanged), "approved under another policy");
    let anew = propose(&state, vec![put("x-note", "a", "1")]);
    let revoked = approve(1, anew.b3()).check(anew.b3(), state.signers(), None);
    assert_eq!(revoked, Err(ApprovalError::RevokedKey));
    commit(&mut state, vec![put("x-note", "a", "1")], &[4, 5]);
}

#[test]
fn a_key_is_replaced_under_its_name_only_while_the_others_make_up_both_quorums() {
    let same = |threshold, keys: &[(u8, u8)]| {
        let signers = keys.iter().map(|(name, key)| Signer { keys: vec![ed_key(*key)], ..signer(*name) });
        SignerSet::new(threshold, false, signers.collect()).expect("a set")
    };
    let all =
        |seeds: &[u8]| same(seeds.len() as u64, &seeds.iter().map(|seed| (*seed, *seed)).collect::<Vec<_>>());
    assert_eq!(reachable(&set(2, &[1, 2, 3]), &same(2, &[(1, 9), (2, 2), (3, 3)])), Ok(()));
    let refused =
        reachable(&all(&[1, 2, 3]), &same(3, &[(1, 9), (2, 2), (3, 3)])).expect_err("all must sign");
    assert_eq!(refused.names, ["s1"]);
    let two = same(2, &[(1, 9), (2, 8), (3, 3)]);
    assert_eq!(reachable(&set(2, &[1, 2, 3]), &two), Ok(()), "one approves by the old key, one by the new");
    let three = same(2, &[(1, 9), (2, 8), (3, 7)]);
    let refused = reachable(&set(2, &[1, 2, 3]), &three).expect_err("three names, four approvals");
    assert_eq!(refused.names, ["s1", "s2", "s3"]);
    assert_eq!(reachable(&all(&[1, 2, 3]), &all(&[2, 3, 9])), Ok(()), "under a new name");
    assert_eq!(reachable(&all(&[1]), &all(&[9])), Ok(()));
    // What is said to be reachable is reached: the old key by the old name, the new one by the new.
    let mut state = State::genesis(&TrustRoots { signers: all(&[1, 2, 3]), ..roots() });
    let change = put("signers", "main", &all(&[2, 3, 9]).canonical());
    commit(&mut state, vec![change], &[1, 2, 3, 9]);
    assert_eq!(state.signers(), &all(&[2, 3, 9]).into());
}

#[test]
fn what_every_sort_of_key_signs_is_found_good() {
    let hybrid = Signer { keys: vec![ed_key(1), ml_key(1)], ..signer(1) };
    let quantum = Signer { keys: vec![ml_key(2)], ..signer(2) };
    let signers = SignerSet::new(3, false, vec![hybrid, quantum, signer(3)]).expect("a set");
    let state = State::genesis(&TrustRoots { signers, ..roots() });
    let b3 = propose(&state, vec![put("x-note", "a", "1")]).b3();
    let ml = |seed: u8| MlDsa44Key::from_seed(&[seed; 32]);
    let keys = [
        ("s1", SigningKeys::Hybrid(key(1), ml(1))),
        ("s2", SigningKeys::MlDsa44(ml(2))),
        ("s3", SigningKeys::Ed25519(key(3))),
    ];
    for (name, keys) in &keys {
        let approval = Approval::sign_with(name, keys, b3, 1);
        assert_eq!(approval, Approval::sign_with(name, keys, b3, 1), "the same each time");
        let read = Approval::parse(approval.canonical().as_bytes()).expect("canonical");
        assert!(read.check(b3, state.signers(), None).is_ok(), "{name}");
    }
}

#[test]
fn what_is_checked_together_is_judged_as_if_it_were_alone() {
    let signer_with = |seed: u8, keys| Signer { keys, ..signer(seed) };
    let in_force = vec![
        signer_with(1, vec![ed_key(1), ml_key(1)]),
        signer_with(2, vec![ml_key(2)]),
        signer(3),
        signer(4),
    ];
    let in_force = SignerSet::new(3, false, in_force).expect("a set");
    // The same name with another key, and a new one.
    let next =
        SignerSet::new(2, false, vec![signer_with(3, vec![ed_key(9)]), signer(4), signer(5)]).expect("a set");
    let state = State::genesis(&roots());
    let [b3, other] = ["1", "2"].map(|body| propose(&state, vec![put("x-note", "a", body)]).b3());
    let with = |seed: u8, sig: Sig| Approval { sig, ..approve(seed, b3) };
    let approvals = [
        approve(3, b3),
        approve(4, b3),
        approve(4, other),
        approve(5, b3),
        approve(6, b3),
        approve(1, b3),
        with(1, hybrid_sig(1, b3)),
        with(2, Sig::MlDsa44(ml_sig(2, b3))),
        with(3, Sig::MlDsa44(ml_sig(3, b3))),
        Approval::sign("s3", &key(9), b3, 0),
        Approval::sign("s4", &key(3), b3, 0),
    ];
    for proposed in [None, Some(&next)] {
        let unchecked: Vec<_> =
            approvals.iter().map(|approval| Unchecked { approval, payload_b3: b3, proposed }).collect();
        let alone: Vec<_> =
            approvals.iter().map(|approval| approval.clone().check(b3, &in_force, proposed)).collect();
        assert_eq!(check_all(&unchecked, &in_force), alone);
        assert_eq!(
            alone.iter().filter(|checked| checked.is_ok()).count(),
            4 + 2 * usize::from(proposed.is_some())
        );
    }
}

#[test]
fn a_hybrid_signer_needs_both_signatures() {
    let hybrid = Signer { keys: vec![ed_key(1), ml_key(1)], ..signer(1) };
    let quantum = Signer { keys: vec![ml_key(2)], ..signer(2) };
    let signers = SignerSet::new(2, false, vec![hybrid, quantum, signer(3)]).expect("a set");
    let state = State::genesis(&TrustRoots { signers, ..roots() });
    let proposal = propose(&state, vec![put("x-note", "a", "1")]);
    let b3 = proposal.b3();
    let with = |seed: u8, sig: Sig| {
        let approval = Approval { sig, ..approve(seed, b3) };
        let read = Approval::parse(approval.canonical().as_bytes()).expect("canonical");
        read.check(b3, state.signers(), None)
    };
    assert_eq!(approve(1, b3).check(b3, state.signers(), None), Err(ApprovalError::InvalidSig), "half");
    assert_eq!(with(1, Sig::MlDsa44(ml_sig(1, b3))), Err(ApprovalError::InvalidSig), "the other half");
    let Sig::Hybrid(a, _) = hybrid_sig(1, b3) else { unreachable!("made so") };
    assert_eq!(with(1, Sig::Hybrid(a, ml_sig(2, b3))), Err(ApprovalError::InvalidSig));
    let approvals =
        [with(1, hybrid_sig(1, b3)).expect("both"), with(2, Sig::MlDsa44(ml_sig(2, b3))).expect("its own")];
    let entry = state.commit(&proposal, &approvals, NOW, ConflictRule::Strict).expect("a quorum");
    assert_eq!(ron_log::Entry::parse(entry.bytes().to_vec()).expect("canonical"), entry);
}

#[test]
fn a_quorum_fits_a_record_even_when_all_approvals_do_not() {
    let heavy: Vec<Signer> =
        (1..=22).map(|seed| Signer { keys: vec![ml_key(seed)], ..signer(seed) }).collect();
    let signers = SignerSet::new(8, true, heavy).expect("a set");
    let state = State::genesis(&TrustRoots { signers, ..roots() });
    let proposal = propose(&state, vec![put("x-note", "a", "1")]);
    let b3 = proposal.b3();
    let check = |seed| {
        Approval { sig: Sig::MlDsa44(ml_sig(seed, b3)), ..approve(seed, b3) }.check(b3, state.signers(), None)
    };
    let approvals: Vec<_> = (1..=22).map(|seed| check(seed).expect("a good approval")).collect();
    let entry = state.commit(&proposal, &approvals, NOW, ConflictRule::Strict).expect("a quorum");
    assert_eq!(entry.record().approvals.len(), 8);
}
