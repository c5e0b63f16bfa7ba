//! Proposals, the Committer and the broadcast: no job is committed twice, none is lost, a shutdown is always seen.

use loom::future::block_on;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use models::claim::Claim;
use models::queue::{Limits, Overflow, PushError, Queue};
use std::sync::Arc;

/// A request as the registry queues it: which proposal, who begins it, and whether it was answered.
struct Job {
    proposal: usize,
    claim: Arc<Claim>,
    answered: Arc<AtomicUsize>,
}

/// Commits what comes until the queue is closed; a proposal that was committed is committed no second time.
fn committer(queue: &Queue<Job>, log: &AtomicUsize, broadcast: &AtomicUsize) {
    let mut committed = [false; 2];
    while let Some(job) = block_on(queue.pop()) {
        if !job.claim.take() {
            continue;
        }
        if !std::mem::replace(&mut committed[job.proposal], true) {
            log.fetch_add(1, Ordering::SeqCst);
            // Told after it is in the log, never before.
            broadcast.fetch_add(1, Ordering::SeqCst);
        }
        job.answered.fetch_add(1, Ordering::SeqCst);
    }
}

/// Every interleaving with at most this many preemptions.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn two_that_ask_for_the_same_commit_it_once_and_both_are_answered() {
    check(|| {
        let queue: Arc<Queue<Job>> = Queue::new(Limits::items(2), Overflow::RejectNew);
        let (log, broadcast) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let asking = [0, 1].map(|_| {
            let (queue, answered) = (queue.clone(), Arc::new(AtomicUsize::new(0)));
            thread::spawn(move || {
                let job = Job { proposal: 0, claim: Arc::default(), answered: answered.clone() };
                assert!(queue.push(job, 0).is_ok(), "there is room for both");
                answered
            })
        });
        let (own, own_log, own_broadcast) = (queue.clone(), log.clone(), broadcast.clone());
        let committing = thread::spawn(move || committer(&own, &own_log, &own_broadcast));
        let answers = asking.map(|thread| thread.join().unwrap());
        queue.close();
        committing.join().unwrap();
        assert_eq!((log.load(Ordering::SeqCst), broadcast.load(Ordering::SeqCst)), (1, 1));
        assert!(answers.iter().all(|answered| answered.load(Ordering::SeqCst) == 1));
    });
}

#[test]
fn who_gives_up_knows_whether_it_was_begun_and_a_shutdown_ends_everybody() {
    check(|| {
        let queue: Arc<Queue<Job>> = Queue::new(Limits::items(2), Overflow::RejectNew);
        let (log, broadcast) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (own, own_log, own_broadcast) = (queue.clone(), log.clone(), broadcast.clone());
        let committing = thread::spawn(move || committer(&own, &own_log, &own_broadcast));
        let closing = {
            let queue = queue.clone();
            thread::spawn(move || queue.close())
        };
        let (claim, answered) = (Arc::new(Claim::default()), Arc::new(AtomicUsize::new(0)));
        let job = Job { proposal: 1, claim: claim.clone(), answered: answered.clone() };
        let pushed = match queue.push(job, 0) {
            Ok(_) => true,
            Err(PushError::Closed(_)) => false,
            Err(PushError::Busy(_)) => panic!("there is room"),
        };
        let given_up = claim.give_up();
        closing.join().unwrap();
        committing.join().unwrap();
        let done = log.load(Ordering::SeqCst) == 1;
        assert_eq!(
            done,
            pushed && !given_up,
            "begun and given up exclude each other, and one of them is true"
        );
        assert_eq!(answered.load(Ordering::SeqCst) == 1, done);
    });
}
