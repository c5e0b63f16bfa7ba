//! What the Committer does with a batch.

use super::*;
use crate::checks::Given;
use crate::config::RegistrySettings;
use crate::fixture::{Fixture, approval, change, job, put, roots, signer};
use ron_log::{Key, Op};
use std::time::Duration;

fn fixture() -> Fixture {
    Fixture::new(RegistrySettings::default())
}

fn reason(reply: Reply) -> Reason {
    reply.unwrap_err().reason
}

fn propose(proposal: &Arc<Proposal>) -> Ask {
    Ask::Propose { proposal: proposal.clone(), approvals: Given::new(proposal, Vec::new()), commit: false }
}

#[test]
fn a_change_is_proposed_approved_and_committed_once() {
    let mut registry = fixture();
    let proposal = put(0, "a", 1);
    let id = proposal.b3();
    for _ in 0..2 {
        assert!(matches!(registry.ask(propose(&proposal)), Ok(Done::Proposed { .. })), "idempotent");
    }
    assert_eq!(reason(registry.ask(Ask::Commit { id })), Reason::QuorumFailed);
    let first = Ask::Approve { id, approval: approval(1, id) };
    assert!(matches!(registry.ask(first), Ok(Done::Approved { have: 1, need: 2, of: 3, met: false, .. })));
    let again = Ask::Approve { id, approval: approval(1, id) };
    assert!(matches!(registry.ask(again), Ok(Done::Approved { have: 1, .. })), "the same approval again");
    let forged = Approval { signer: "s2".into(), ..approval(3, id) };
    assert_eq!(reason(registry.ask(Ask::Approve { id, approval: forged.clone() })), Reason::InvalidSig);
    let second = Approval { signer: "s1".into(), ..forged };
    assert_eq!(reason(registry.ask(Ask::Approve { id, approval: second })), Reason::DuplicateApproval);
    let stranger = Approval { signer: "s7".into(), ..approval(7, id) };
    assert_eq!(reason(registry.ask(Ask::Approve { id, approval: stranger })), Reason::RevokedKey);
    let last = Ask::Approve { id, approval: approval(3, id) };
    assert!(matches!(registry.ask(last), Ok(Done::Approved { have: 2, met: true, committed: None, .. })));
    let Ok(Done::Committed(done)) = registry.ask(Ask::Commit { id }) else { panic!("committed") };
    assert_eq!((done.version, done.payload_b3), (1, id));
    for ask in [
        Ask::Commit { id },
        Ask::Propose { proposal: proposal.clone(), approvals: Given::new(&proposal, vec![]), commit: true },
    ] {
        assert_eq!(registry.ask(ask), Ok(Done::Committed(done)), "its own version, also when repeated");
    }
    assert_eq!(registry.shared.head(), done);
    assert_eq!(registry.committed.try_recv().unwrap(), done.head());
    assert!(registry.committed.try_recv().is_err(), "told once");
    let again = Ask::Approve { id, approval: approval(3, id) };
    let Ok(Done::Approved { have: 2, need: 2, of: 3, met: true, committed, .. }) = registry.ask(again) else {
        panic!("who did not hear the answer asks again")
    };
    assert_eq!(committed, Some(done));
    let late = Ask::Approve { id, approval: approval(2, id) };
    assert_eq!(reason(registry.ask(late)), Reason::Expired);
    assert_eq!(reason(registry.ask(Ask::Commit { id: B3::ZERO })), Reason::NotFound);
}

#[test]
fn of_two_that_touch_the_same_the_second_is_too_late_also_within_a_batch() {
    let mut registry = fixture();
    let (a, b, c) = (put(0, "a", 1), put(0, "a", 2), put(0, "b", 3));
    let whole = |proposal: &Arc<Proposal>| Ask::Propose {
        proposal: proposal.clone(),
        approvals: Given::new(proposal, vec![approval(1, proposal.b3()), approval(2, proposal.b3())]),
        commit: true,
    };
    let replies = registry.batch(vec![whole(&a), whole(&b), whole(&c), whole(&a)]);
    let versions: Vec<_> =
        replies.iter().map(|reply| reply.as_ref().map_err(|refusal| refusal.reason)).collect();
    assert!(matches!(versions[0], Ok(Done::Committed(HeadInfo { version: 1, .. }))));
    assert_eq!(versions[1], Err(Reason::ChainMismatch));
    assert!(matches!(versions[2], Ok(Done::Committed(HeadInfo { version: 2, .. }))));
    assert_eq!(versions[3], versions[0]);
    assert_eq!(registry.shared.numbers.cas_failed.value(), 1);
    let strict = RegistrySettings { strict_head: true, ..RegistrySettings::default() };
    let mut registry = Fixture::new(strict);
    assert!(registry.commit(&a).is_ok());
    assert_eq!(reason(registry.commit(&c)), Reason::ChainMismatch);
}

#[test]
fn a_new_signer_set_needs_both_quorums_and_ends_what_was_proposed_under_the_old() {
    let mut registry = fixture();
    let set = SignerSet::new(2, false, [signer(1), signer(4), signer(5)].into()).unwrap();
    let op = Op { key: Key::signers(), body: Some(set.canonical()) };
    let rotation = change(0, 0, op, 1);
    let (id, old) = (rotation.b3(), put(0, "a", 2));
    assert!(registry.ask(propose(&rotation)).is_ok() && registry.ask(propose(&old)).is_ok());
    for seed in [1, 2] {
        assert!(registry.ask(Ask::Approve { id, approval: approval(seed, id) }).is_ok());
    }
    assert_eq!(reason(registry.ask(Ask::Commit { id })), Reason::QuorumFailed);
    assert!(registry.ask(Ask::Approve { id, approval: approval(4, id) }).is_ok());
    let Ok(Done::Committed(done)) = registry.ask(Ask::Commit { id }) else { panic!("committed") };
    assert_eq!(done.signers_version, 1);
    let late = Ask::Approve { id: old.b3(), approval: approval(1, old.b3()) };
    assert_eq!(reason(registry.ask(late)), Reason::PolicyChanged);
    assert_eq!(reason(registry.ask(propose(&put(1, "b", 3)))), Reason::PolicyChanged);
    let op = Op { key: Key::new("x-n", "c").unwrap(), body: Some("1".into()) };
    let revoked = change(1, 1, op, 4);
    assert_eq!(
        reason(registry.commit(&revoked)),
        Reason::RevokedKey,
        "the second signer is in the set no more"
    );
}

#[test]
fn a_signer_set_that_could_never_take_over_is_refused_with_what_to_do() {
    let mut registry = fixture();
    let renamed = |seed: u8, name: u8| ron_log::Signer { id: format!("s{name}"), ..signer(seed) };
    let mut asked = |signers: Vec<ron_log::Signer>, nonce: u8| {
        let set = SignerSet::new(2, false, signers).unwrap();
        let op = Op { key: Key::signers(), body: Some(set.canonical()) };
        registry.ask(propose(&change(0, 0, op, nonce)))
    };
    // One of three may have a new key under its name, for the two others approve in both sets; not all of them.
    assert!(asked(vec![renamed(4, 1), signer(2), signer(3)], 1).is_ok());
    let refused = asked(vec![renamed(4, 1), renamed(5, 2), renamed(6, 3)], 2).unwrap_err();
    assert_eq!(refused.reason, Reason::Malformed);
    assert!(refused.detail.contains("s1, s2, s3 would have other keys"), "{}", refused.detail);
    assert!(refused.detail.contains("give each new key a new name"), "{}", refused.detail);
    assert!(asked(vec![signer(4), signer(5), signer(6)], 3).is_ok(), "as it says");
    let idle = ron_log::Signer { roles: vec![ron_log::Role::Propose], ..signer(6) };
    let refused = asked(vec![signer(1), signer(2), idle], 4).unwrap_err();
    assert!(refused.detail.contains("s6 may not approve"), "{}", refused.detail);
}

#[test]
fn a_proposal_can_be_withdrawn_and_ends_by_itself() {
    let settings = RegistrySettings {
        limits: crate::config::LimitSettings {
            proposal_ttl: ron_kernel::units::Span::millis(1),
            pending_max: 1,
            ..Default::default()
        },
        ..RegistrySettings::default()
    };
    let mut registry = Fixture::new(settings);
    let (first, second) = (put(0, "a", 1), put(0, "b", 2));
    let replies = registry.batch(vec![propose(&first), propose(&second)]);
    assert!(replies[0].is_ok());
    assert_eq!(replies[1].as_ref().unwrap_err().reason, Reason::Busy, "only so many may wait");
    let id = first.b3();
    let ended = now_millis() + 2;
    while now_millis() < ended {}
    let late = Ask::Approve { id, approval: approval(1, id) };
    assert_eq!(reason(registry.ask(late)), Reason::Expired, "before anybody has looked");
    // It has ended after a millisecond, or ends now.
    while registry.core.pending.len() > 0 {
        registry.core.tick().unwrap();
    }
    assert_eq!(registry.shared.store.reader().unwrap().gone(id).unwrap().unwrap().0, Gone::Expired);
    assert_eq!(reason(registry.ask(Ask::Commit { id })), Reason::Expired);
    assert!(registry.ask(propose(&first)).is_ok());
    let ended = now_millis() + 2;
    while now_millis() < ended {}
    assert!(registry.ask(propose(&second)).is_ok(), "what has ended takes no place");
    let mut registry = fixture();
    assert!(registry.ask(propose(&first)).is_ok());
    assert_eq!(registry.ask(Ask::Withdraw { id }), Ok(Done::Withdrawn));
    assert_eq!(registry.ask(Ask::Withdraw { id }), Ok(Done::Withdrawn), "once more is the same");
    assert_eq!(reason(registry.ask(Ask::Commit { id })), Reason::Expired);
    assert!(registry.ask(propose(&first)).is_ok(), "it may be proposed again");
    assert!(registry.shared.store.reader().unwrap().gone(id).unwrap().is_none());
    assert_eq!(registry.ask(Ask::Withdraw { id }), Ok(Done::Withdrawn));
    assert!(registry.commit(&first).is_ok(), "or committed at once");
    let refused = registry.ask(Ask::Withdraw { id }).unwrap_err();
    assert!(refused.reason == Reason::Expired && refused.detail.contains("version 1"), "{refused:?}");
}

#[test]
fn head_is_undone_by_a_proposal_like_any_other() {
    let mut registry = fixture();
    assert_eq!(reason(registry.ask(Ask::Supersede)), Reason::NotFound);
    registry.commit(&put(0, "a", 1)).unwrap();
    registry.commit(&put(1, "a", 2)).unwrap();
    let Ok(Done::Proposed { proposal, .. }) = registry.ask(Ask::Supersede) else { panic!("proposed") };
    registry.commit(&proposal).unwrap();
    let view = registry.shared.view.load();
    assert_eq!(view.state.item(&Key::new("x-n", "a").unwrap()), Some((3, &"{\"n\":1}".into())));
}

#[test]
fn with_auto_commit_the_last_approval_commits() {
    let mut registry = Fixture::new(RegistrySettings { auto_commit: true, ..RegistrySettings::default() });
    let proposal = put(0, "a", 1);
    let id = proposal.b3();
    registry.ask(propose(&proposal)).unwrap();
    registry.ask(Ask::Approve { id, approval: approval(2, id) }).unwrap();
    let last = registry.ask(Ask::Approve { id, approval: approval(3, id) });
    assert!(
        matches!(last, Ok(Done::Approved { committed: Some(HeadInfo { version: 1, .. }), .. })),
        "{last:?}"
    );
}

#[test]
fn nobody_is_answered_before_it_is_durable_and_pending_ones_survive_too() {
    let dir = tempfile::tempdir().unwrap();
    let store = crate::store::Store::open(dir.path(), &roots(), true).unwrap();
    let mut registry = Fixture::over(store, RegistrySettings::default());
    let (pending, done) = (put(0, "p", 1), put(0, "a", 2));
    let id = pending.b3();
    registry.ask(propose(&pending)).unwrap();
    registry.ask(Ask::Approve { id, approval: approval(1, id) }).unwrap();
    let Ok(Done::Committed(head)) = registry.commit(&done) else { panic!("committed") };
    let (core, shared) = (registry.core, registry.shared);
    assert!(Core::restore(&shared).unwrap().is_none(), "there is one writer");
    drop((core, shared, registry.committed));
    let store = crate::store::Store::open(dir.path(), &roots(), true).unwrap();
    let mut registry = Fixture::over(store, RegistrySettings::default());
    assert_eq!(registry.shared.head(), head);
    let last = registry.ask(Ask::Approve { id, approval: approval(2, id) });
    assert!(matches!(last, Ok(Done::Approved { have: 2, met: true, .. })), "{last:?}");
    let Ok(Done::Committed(next)) = registry.ask(Ask::Commit { id }) else { panic!("committed") };
    assert_eq!(next.version, 2);
}

#[test]
fn a_full_disk_is_told_to_readiness_until_there_is_room_again() {
    let media = crate::store::Faulty::default();
    let store = crate::store::Store::over(crate::store::Disk::over(media.clone()), &roots()).unwrap();
    let mut registry = Fixture::over(store, RegistrySettings::default());
    registry.shared.service.ready();
    let missing = |registry: &Fixture| {
        let health = registry.shared.service.kernel().health();
        health.readiness(Some("registry"), ron_kernel::health::Scope::Write).unwrap().missing
    };
    media.fill(true);
    assert_eq!(reason(registry.commit(&put(0, "a", 1))), Reason::Storage);
    assert_eq!(missing(&registry), ["registry.storage_full"]);
    media.fill(false);
    let Fixture { shared, core, committed } = registry;
    drop(core);
    // What was not written is forgotten, and the state read anew.
    let core = Core::restore(&shared).unwrap().unwrap();
    let mut registry = Fixture { shared, committed, core };
    registry.core.tick().unwrap();
    assert!(missing(&registry).is_empty());
    assert!(registry.commit(&put(0, "a", 2)).is_ok());
}

#[test]
fn a_job_whose_caller_gave_up_or_is_late_is_not_begun() {
    let mut registry = fixture();
    let proposal = put(0, "a", 1);
    let (given_up, mut none) = job(propose(&proposal));
    assert!(given_up.claim.give_up());
    let (mut late, mut told) = job(propose(&proposal));
    late.deadline = Instant::now() - Duration::from_secs(1);
    let late_claim = late.claim.clone();
    registry.core.run(vec![given_up, late]).unwrap();
    assert!(none.try_recv().is_err());
    assert_eq!(told.try_recv().unwrap().unwrap_err().reason, Reason::Timeout);
    assert!(!late_claim.give_up(), "whoever gives up after the start knows that the outcome is open");
    assert!(registry.shared.store.reader().unwrap().proposals().unwrap().is_empty());
}

#[test]
fn what_is_withdrawn_and_proposed_again_in_one_batch_is_pending_also_after_a_restart() {
    let mut registry = fixture();
    let proposal = put(0, "a", 1);
    let id = proposal.b3();
    registry.ask(propose(&proposal)).unwrap();
    registry.ask(Ask::Approve { id, approval: approval(1, id) }).unwrap();
    for reply in registry.batch(vec![Ask::Withdraw { id }, propose(&proposal)]) {
        reply.unwrap();
    }
    let kept = |registry: &Fixture| registry.shared.store.reader().unwrap().proposal(id).unwrap();
    let again = kept(&registry).expect("acknowledged, so it is kept");
    assert!(again.approvals.is_empty(), "the approval went with the withdrawal");
    assert_eq!(registry.shared.store.reader().unwrap().gone(id).unwrap(), None);
    let asks = vec![Ask::Withdraw { id }, propose(&proposal), Ask::Withdraw { id }];
    for reply in registry.batch(asks) {
        reply.unwrap();
    }
    assert!(kept(&registry).is_none(), "what ended last has ended");
}

#[test]
fn nothing_is_committed_while_the_clock_is_far_behind_the_log() {
    let mut registry = fixture();
    let proposal = put(0, "a", 1);
    let check = |seed| approval(seed, proposal.b3()).check(proposal.b3(), &roots().signers, None).unwrap();
    let approvals = vec![check(1), check(2)];
    let waiting = Waiting { proposal: proposal.clone(), ends_at: u64::MAX, approvals };
    let mut batch = Batch::default();
    registry.core.append(&mut batch, &waiting, now_millis() + CLOCK_BEHIND_MAX + 60_000).unwrap();
    registry.core.finish(batch).unwrap();
    let refused = registry.commit(&put(1, "b", 2)).unwrap_err();
    assert_eq!(refused.reason, Reason::NotReady);
    assert!(refused.detail.contains("the log's time is"), "{}", refused.detail);
    registry.shared.service.ready();
    let health = registry.shared.service.kernel().health();
    let write = || health.readiness(Some("registry"), ron_kernel::health::Scope::Write).unwrap().missing;
    assert_eq!(write(), ["registry.clock_behind"]);
    // As when the clock has come near again.
    registry.core.clock(now_millis() + 60_000).unwrap();
    assert!(write().is_empty());
}

#[test]
fn a_refusal_says_who_lacks_what() {
    let mut registry = fixture();
    let future = registry.ask(propose(&put(7, "a", 1))).unwrap_err();
    assert_eq!(future.reason, Reason::Malformed);
    assert!(future.detail.contains("`base_version` is 7"), "{}", future.detail);
    let proposal = put(0, "a", 1);
    let id = proposal.b3();
    registry.ask(propose(&proposal)).unwrap();
    registry.ask(Ask::Approve { id, approval: approval(1, id) }).unwrap();
    let refused = registry.ask(Ask::Commit { id }).unwrap_err();
    assert_eq!(refused.detail, "the set in force lacks 1 of 2 approvals");
    let strict = RegistrySettings { strict_head: true, auto_commit: true, ..RegistrySettings::default() };
    registry.shared.settings.store(Arc::new(strict));
    registry.commit(&put(0, "b", 2)).unwrap();
    let last = registry.ask(Ask::Approve { id, approval: approval(2, id) });
    let Ok(Done::Approved { met: true, committed: None, not_committed: Some(why), .. }) = last else {
        panic!("{last:?}");
    };
    assert!(why.reason == Reason::ChainMismatch && why.detail.contains("HEAD has moved"), "{}", why.detail);
}

#[test]
fn whose_approval_does_not_count_is_named() {
    let approvals: Vec<_> = (1..=2)
        .map(|seed| approval(seed, B3::ZERO).check(B3::ZERO, &roots().signers, None).unwrap())
        .collect();
    let one = |seed| ron_log::Signer { not_after: Some(5), ..signer(seed) };
    let set = SignerSet::new(2, false, vec![one(1), signer(2), signer(3)]).unwrap();
    let judged = Judgement::of(B3::ZERO, &approvals, &set, Some(&roots().signers), 6).unwrap();
    let said = lacking(&judged, &approvals);
    assert_eq!(said, "the set in force lacks 1 of 2 approvals");
    let judged = Judgement::of(B3::ZERO, &approvals, &set, None, 6).unwrap();
    let said = lacking(&judged, &approvals);
    assert!(
        said.ends_with("; the approval of s1 does not count: the signer's key is past its end"),
        "{said}"
    );
}

#[test]
fn a_pending_proposal_that_was_changed_on_disk_is_left_out() {
    let mut registry = fixture();
    let (bad, good) = (put(0, "a", 1), put(0, "b", 2));
    for proposal in [&bad, &good] {
        registry.ask(propose(proposal)).unwrap();
    }
    registry.shared.store.spoil_proposal(bad.b3());
    let Fixture { shared, core, .. } = registry;
    drop(core);
    let core = Core::restore(&shared).unwrap().unwrap();
    assert!(core.pending.get(bad.b3()).is_none() && core.pending.get(good.b3()).is_some());
    assert!(shared.store.reader().unwrap().proposal(bad.b3()).unwrap_err().is_damage());
}
