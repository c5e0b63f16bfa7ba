//! A follower believes what it has checked, goes on where it was, and never goes back or aside.

use crate::fixture::{Log, commit, delete, log_key, log_note_key, log_of, put, roots, set};
use proptest::prelude::*;
use ron_log::follow::{FollowError, Jump, KeptError, ROOTS_MAX, SEEN_MAX, Told};
use ron_log::tree::consistency;
use ron_log::{B3, Checkpoint, Evidence, FaultKind, Follower, Head, Note, Snapshot, State, Tree};

type Pair = (Vec<u8>, Vec<u8>);

fn pairs(log: &Log) -> Vec<Pair> {
    log.changes.iter().map(|(entry, proposal)| (entry.bytes().to_vec(), proposal.bytes().to_vec())).collect()
}

fn signed(log: &Log) -> Note {
    log.checkpoint().sign(&log_key())
}

fn follower() -> Follower {
    let mut follower = Follower::new(roots());
    follower.trust_log(&log_note_key()).expect("the roots name it");
    follower
}

/// The same beginning, then another history; how many entries they share, and how many the other has after them.
fn fork_of(shared: u8, more: u8) -> Log {
    let (mut log, mut state) = log_of(shared);
    let signers: Vec<u8> =
        state.signers().signers().iter().map(|signer| signer.id[1..].parse().expect("a seed")).collect();
    for number in 0..more {
        let op = put("x-other", &format!("n{number}"), "1");
        log.push(commit(&mut state, vec![op], &signers[1..]));
    }
    log
}

fn evidence(refused: Result<(), FollowError>) -> Evidence {
    match refused {
        Err(FollowError::Fork(evidence) | FollowError::Inconsistent(evidence)) => *evidence,
        other => panic!("no evidence: {other:?}"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn a_log_in_any_pieces_with_any_restarts_leads_to_its_state(
        cuts in prop::collection::vec((1usize..6, any::<bool>(), any::<bool>()), 1..12),
    ) {
        let (log, state) = log_of(21);
        let pairs = pairs(&log);
        let (mut follower, mut at) = (follower(), 1);
        for (count, restart, check) in cuts.into_iter().chain([(21, false, true)]) {
            let until = (at + count).min(pairs.len());
            follower.extend(&pairs[at..until]).expect("a good log");
            at = until;
            if check {
                follower.checkpoint(&signed(&log)).expect("its own");
            }
            if restart {
                let kept = Follower::parse(&follower.text(), &roots()).expect("what was kept");
                prop_assert_eq!(&kept, &follower);
                follower = kept;
            }
        }
        prop_assert_eq!((follower.state(), follower.tree()), (&state, &log.tree));
        for (_, version, _) in state.items().filter(|(_, version, _)| *version > 0) {
            let by: Vec<&str> = follower.approvers(version).expect("it was checked here").iter().map(String::as_str).collect();
            let said = &log.changes[version as usize].0.record().approvals;
            prop_assert_eq!(by, said.iter().map(|approval| approval.signer.as_str()).collect::<Vec<_>>());
        }
    }

    #[test]
    fn whatever_is_changed_lost_or_swapped_is_refused_and_changes_nothing(
        from in 1usize..9,
        at in 0usize..9,
        byte in any::<prop::sample::Index>(),
        bit in 0u8..8,
        how in 0u8..4,
    ) {
        let (log, _) = log_of(12);
        let mut pairs = pairs(&log);
        let mut follower = follower();
        follower.extend(&pairs[1..from]).expect("a good log");
        let before = follower.clone();
        // Of the last record nothing but its checkpoint is known, so the one before it is the last to be changed.
        let at = from + at % (pairs.len() - 1 - from);
        match how {
            0 => {
                let byte = byte.index(pairs[at].0.len());
                pairs[at].0[byte] ^= 1 << bit;
            }
            1 => {
                let byte = byte.index(pairs[at].1.len());
                pairs[at].1[byte] ^= 1 << bit;
            }
            2 => drop(pairs.remove(at)),
            _ => pairs.swap(at, at + 1),
        }
        prop_assert!(follower.extend(&pairs[from..]).is_err());
        prop_assert_eq!(&follower, &before);
    }

    #[test]
    fn a_kept_position_with_a_changed_byte_is_not_taken_up(byte in any::<prop::sample::Index>(), bit in 0u8..8) {
        let (log, _) = log_of(5);
        let mut follower = follower();
        follower.extend(&pairs(&log)[1..]).expect("a good log");
        let mut text = follower.text().into_bytes();
        let byte = byte.index(text.len());
        text[byte] ^= 1 << bit;
        if let Ok(text) = String::from_utf8(text) {
            prop_assert_eq!(Follower::parse(&text, &roots()), Err(KeptError::Damaged));
        }
    }
}

#[test]
fn an_older_or_other_head_is_told_apart_from_a_newer_one() {
    let (log, state) = log_of(6);
    let mut follower = follower();
    follower.extend(&pairs(&log)[1..]).expect("a good log");
    let Head { version, hash } = state.head();
    let check = |version, hash, expected| assert_eq!(follower.told(Head { version, hash }), expected);
    check(version + 1, B3::ZERO, Told::Ahead);
    check(version, hash, Told::Same);
    check(version, B3::ZERO, Told::Other);
    check(version - 1, log.changes[5].0.hash(), Told::Behind);
    // What was seen is not taken again, and neither is what others would have there.
    let refused = follower.extend(&pairs(&log)[5..]);
    assert!(matches!(refused, Err(FollowError::Entry(_))), "{refused:?}");
    let other = pairs(&fork_of(5, 3));
    let refused = follower.extend(&other[7..]);
    let chain = matches!(&refused, Err(FollowError::Entry(fault)) if fault.version == 7 && fault.kind == FaultKind::Chain);
    assert!(chain, "{refused:?}");
}

#[test]
fn a_revoked_signer_cannot_approve_even_if_the_log_lets_it() {
    let (mut log, mut state) = (Log::default(), State::genesis(&roots()));
    log.push(roots().genesis());
    log.push(commit(&mut state, vec![put("signers", "main", &set(2, &[2, 3, 4]).canonical())], &[2, 3, 4]));
    // Made under the former set, as a log in league with signer 1 would: chained well, and signed by two.
    let mut before = State::genesis(&roots());
    let (entry, proposal) = commit(&mut before, vec![put("x-note", "a", "1")], &[1, 2]);
    let mut record = entry.record().clone();
    (record.version, record.prev) = (2, state.head().hash);
    let entry = ron_log::Entry::new(record).expect("a record");
    let mut follower = follower();
    follower.extend(&pairs(&log)[1..]).expect("a good log");
    let refused = follower.extend(&[(entry.bytes().to_vec(), proposal.bytes().to_vec())]);
    let policy = matches!(&refused, Err(FollowError::Entry(fault)) if fault.kind == FaultKind::Policy);
    assert!(policy, "{refused:?}");
}

#[test]
fn two_checkpoints_of_one_size_are_evidence_whichever_comes_first() {
    let (log, _) = log_of(6);
    let other = fork_of(5, 1);
    let mut ahead = follower();
    ahead.checkpoint(&signed(&log)).expect("nothing contradicts it yet");
    let found = evidence(ahead.checkpoint(&signed(&other)));
    assert!(found.is_proof(), "{found}");
    assert_eq!(
        found.notes().map(|note| &note.text).collect::<Vec<_>>(),
        [&signed(&log).text, &signed(&other).text]
    );
    // Entries are held against a checkpoint that came before them.
    let found = evidence(ahead.extend(&pairs(&other)[1..]));
    assert!(!found.is_proof() && ahead.head().version == 0, "{found}");
    // And a checkpoint against the entries.
    let mut behind = follower();
    behind.extend(&pairs(&log)[1..]).expect("a good log");
    let found = evidence(behind.checkpoint(&signed(&other)));
    assert_eq!((found.before, found.now.text), (None, signed(&other).text));
    // A restart forgets none of it.
    behind.checkpoint(&signed(&log)).expect("its own");
    let mut kept = Follower::parse(&behind.text(), &roots()).expect("what was kept");
    assert!(evidence(kept.checkpoint(&signed(&other))).is_proof());
}

#[test]
fn a_checkpoint_that_does_not_continue_what_was_followed_is_evidence() {
    let (log, _) = log_of(6);
    let mut follower = follower();
    follower.extend(&pairs(&log)[1..]).expect("a good log");
    follower.checkpoint(&signed(&log)).expect("its own");
    let path = |log: &Log| consistency(7, log.tree.size(), |tile| log.tile(tile)).expect("a proof");
    let (good, _) = log_of(9);
    assert_eq!(follower.continued(&signed(&good), &path(&good)), Ok(()));
    let other = fork_of(5, 4);
    let found = evidence(follower.continued(&signed(&other), &path(&other)));
    assert!(!found.is_proof());
    assert_eq!(found.to_string(), "the log signed a history of size 10 that does not go with that of size 7");
}

#[test]
fn only_the_log_is_believed_and_always_by_the_same_key() {
    let (log, _) = log_of(3);
    let mut follower = Follower::new(roots());
    assert!(matches!(follower.checkpoint(&signed(&log)), Err(FollowError::Note(_))), "no key is known");
    let other = crate::fixture::key(77);
    let other_key = ron_log::NoteKey::ed25519(&roots().log, other.verifying_key());
    let elsewhere = ron_log::NoteKey::ed25519("elsewhere", log_key().verifying_key());
    assert_eq!(follower.trust_log(&elsewhere), Err(FollowError::OtherKey));
    follower.trust_log(&log_note_key()).expect("the first");
    assert_eq!(follower.trust_log(&other_key), Err(FollowError::OtherKey));
    assert!(matches!(follower.checkpoint(&log.checkpoint().sign(&other)), Err(FollowError::Note(_))));
    assert_eq!(follower.newest(), None);
    let text = Follower::new(roots()).text();
    let mut others = roots();
    others.signers = set(2, &[2, 3, 4]);
    assert_eq!(Follower::parse(&text, &others), Err(KeptError::OtherRoots));
}

#[test]
fn what_is_remembered_is_bounded() {
    let (log, _) = log_of(1);
    let mut follower = follower();
    for size in 100..100 + 2 * SEEN_MAX as u64 {
        let checkpoint = Checkpoint { size, ..log.checkpoint() };
        follower.checkpoint(&checkpoint.sign(&log_key())).expect("nothing contradicts it");
    }
    let seen = follower.text().matches(&roots().log).count();
    // Each note names the log twice, and the key once.
    assert_eq!(seen, 2 * SEEN_MAX + 1);
    let (mut log, mut state) = (Log::default(), State::genesis(&roots()));
    log.push(roots().genesis());
    for _ in 0..ROOTS_MAX + 10 {
        log.push(commit(&mut state, vec![put("x-note", "a", "1")], &[1, 2]));
    }
    log.push(commit(&mut state, vec![delete("x-note", "a")], &[1, 2]));
    let mut follower = Follower::new(roots());
    follower.extend(&pairs(&log)[1..]).expect("a good log");
    let text = follower.text();
    assert_eq!(text.matches("\"root\":").count(), ROOTS_MAX);
    assert!(text.contains("\"approved\":[]"), "of what is gone nobody needs to know who approved it");
}

#[test]
fn a_pruned_log_is_taken_up_from_its_snapshot_if_it_is_the_same_log() {
    let (_, state) = log_of(9);
    let text = state.canonical();
    let snapshot =
        Snapshot { log: roots().log, version: 9, hash: state.head().hash, state_b3: B3::of(text.as_bytes()) };
    let (more, _) = log_of(13);
    let (checkpoint, snapshot) = (signed(&more), snapshot.sign(&log_key()));
    let path = |from: u64| consistency(from, 14, |tile| more.tile(tile)).expect("a proof");
    let tree = Tree::from_tiles(10, |tile| more.tile(tile)).expect("a tree");
    for begun in [1, 4] {
        let (from_own, from_snapshot) = (path(begun), path(10));
        let jump = Jump {
            checkpoint: &checkpoint,
            snapshot: &snapshot,
            state: text.as_bytes(),
            tree: tree.clone(),
            from_own: &from_own,
            from_snapshot: &from_snapshot,
        };
        let mut follower = follower();
        follower.extend(&pairs(&more)[1..begun as usize]).expect("a good log");
        follower.jump(jump.clone()).expect("the same log");
        assert_eq!(follower.state(), &state);
        assert_eq!(follower.approvers(9), None, "who approved it cannot be known");
        follower.extend(&pairs(&more)[10..]).expect("the rest");
        assert_eq!(follower.head().version, 13);
        // Not back, nor with anything else in its place.
        assert!(matches!(follower.jump(jump.clone()), Err(FollowError::Inconsistent(_))));
        let mut fresh = Follower::new(roots());
        assert!(fresh.jump(jump.clone()).is_err(), "whose snapshot it is must be known");
        fresh.trust_log(&log_note_key()).expect("the first");
        let other = State::genesis(&roots()).canonical();
        assert!(fresh.jump(Jump { state: other.as_bytes(), ..jump.clone() }).is_err());
        assert!(fresh.jump(Jump { from_snapshot: &[], ..jump.clone() }).is_err());
        assert!(fresh.jump(Jump { from_own: &[[0; 32]], ..jump }).is_err());
        assert_eq!(fresh.head().version, 0);
    }
}
