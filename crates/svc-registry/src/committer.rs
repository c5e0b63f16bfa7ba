//! The Committer's task: gathers what waits while a batch is being written, and writes at once when idle.

use crate::core::Core;
use crate::hand::Hand;
use crate::job::{Job, Refusal};
use crate::shared::{Shared, Trouble};
use ron_kernel::channel::Receiver;
use ron_kernel::reason::Reason;
use ron_kernel::shutdown::Phase;
use ron_kernel::task::TaskResult;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Jobs of one batch.
const BATCH_MAX: usize = 512;
/// A write that takes longer sheds writes until it is over.
const SLOW: Duration = Duration::from_secs(1);
/// How often proposals that have ended are looked for, and whether the disk has room again.
const TICK: Duration = Duration::from_secs(1);
/// How often it is seen, while draining, whether anybody is left who could ask.
const LOOK: Duration = Duration::from_millis(20);

/// Where jobs come from.
#[derive(Clone, Debug)]
pub(crate) struct Intake {
    pub(crate) proposals: Arc<Receiver<Job>>,
    pub(crate) approvals: Arc<Receiver<Job>>,
}

impl Intake {
    fn gather(&self, first: Job) -> Vec<Job> {
        let mut jobs = vec![first];
        while jobs.len() < BATCH_MAX
            && let Some(job) = self.approvals.try_recv().or_else(|| self.proposals.try_recv())
        {
            jobs.push(job);
        }
        jobs
    }
}

/// Runs until nobody can ask any more.
pub(crate) async fn commit(shared: Arc<Shared>, intake: Intake) -> TaskResult {
    let hand = Hand::new("committer")?;
    let mut core = restore(&shared, &hand, "start").await;
    let (service, mut draining) = (shared.service.clone(), false);
    let mut tick = tokio::time::interval(TICK);
    tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let first = tokio::select! {
            biased;
            job = intake.approvals.recv() => job,
            job = intake.proposals.recv() => job,
            () = service.shutdown().draining(), if !draining => { draining = true; None }
            () = tokio::time::sleep(LOOK), if draining => None,
            _ = tick.tick() => {
                core = match core {
                    Some(core) => blocking(&shared, &hand, core, 0, |core| core.tick()).await,
                    None => restore(&shared, &hand, "storage").await,
                };
                None
            }
        };
        let Some(first) = first else {
            let over = service.shutdown().phase() >= Phase::Aborting;
            if draining && (over || service.tasks().live_scoped() == 0) {
                drop(core);
                let store = shared.store.clone();
                return Ok(hand.run(move || store.close()).await?);
            }
            continue;
        };
        let jobs = intake.gather(first);
        core = match core {
            Some(core) if shared.damage().is_none() && !shared.holds.any() => {
                blocking(&shared, &hand, core, jobs.len(), |core| core.run(jobs)).await
            }
            core => {
                refuse(&shared, jobs);
                core
            }
        };
    }
}

fn refuse(shared: &Shared, jobs: Vec<Job>) {
    let refusal = match (shared.damage(), shared.holds.said()) {
        (Some(damage), _) => Refusal::new(Reason::Storage, (*damage).clone()),
        (None, Some(said)) => Refusal::new(Reason::NotReady, said),
        (None, None) if shared.store.disk().flush_failed() => {
            Refusal::new(Reason::Storage, "a flush failed: nothing is written before a restart")
        }
        (None, None) => Refusal::new(Reason::Storage, "the storage cannot be read now"),
    };
    for job in jobs.into_iter().filter(|job| job.claim.take()) {
        let _ = job.reply.send(Err(refusal.clone()));
    }
}

/// Does a piece of work on the Committer's thread. What failed is read anew.
async fn blocking(
    shared: &Arc<Shared>,
    hand: &Hand,
    mut core: Core,
    jobs: usize,
    work: impl FnOnce(&mut Core) -> Result<(), crate::store::StoreError> + Send + 'static,
) -> Option<Core> {
    shared.writing.store(jobs, Ordering::Relaxed);
    let mut running = pin!(hand.run(move || {
        let done = work(&mut core);
        (core, done)
    }));
    let done = match tokio::time::timeout(SLOW, &mut running).await {
        Ok(done) => done,
        Err(_slow) => {
            shared.troubles.set(Trouble::Slow, true);
            let done = running.await;
            shared.troubles.set(Trouble::Slow, false);
            done
        }
    };
    shared.writing.store(0, Ordering::Relaxed);
    match done {
        Ok((core, Ok(()))) => return Some(core),
        Ok((core, Err(error))) => {
            tracing::error!(%error, "a batch of the registry could not be written");
            drop(core);
        }
        Err(panic) => shared.panicked("the committer's work", &panic),
    }
    restore(shared, hand, "storage").await
}

/// Reads the state from the store; none if that fails, and then it is tried again later.
async fn restore(shared: &Arc<Shared>, hand: &Hand, why: &'static str) -> Option<Core> {
    // After a failed flush what is read may not be on the disk: nobody is shown it before a restart has decided.
    if shared.damage().is_some() || shared.store.disk().flush_failed() {
        return None;
    }
    loop {
        let reading = shared.clone();
        match hand.run(move || Core::restore(&reading)).await {
            Ok(Ok(Some(core))) => {
                shared.numbers.recoveries.with([why]).inc();
                shared.troubles.set(Trouble::Lost, false);
                shared.forget_all_open();
                return Some(core);
            }
            // A thread of before is still at work with the writer.
            Ok(Ok(None)) => tokio::time::sleep(LOOK).await,
            Ok(Err(crate::store::RestoreError::Damaged { version, what })) => {
                shared.damaged(version, &what);
                return None;
            }
            Ok(Err(error)) => {
                tracing::error!(%error, "the registry's store cannot be read");
                break;
            }
            Err(panic) => {
                shared.panicked("reading the store", &panic);
                return None;
            }
        }
    }
    shared.troubles.set(Trouble::Lost, true);
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::Given;
    use crate::config::RegistrySettings;
    use crate::fixture::{Fixture, approval, job, put, roots};
    use crate::job::Ask;
    use crate::job::Done;
    use crate::store::{Disk, Faulty, Store};

    #[tokio::test]
    async fn a_panic_over_the_store_is_damage_and_ends_writing_but_not_reading() {
        let media = Faulty::default();
        let store = Store::over(Disk::over(media.clone()), &roots()).unwrap();
        let Fixture { shared, core, .. } = Fixture::over(store, RegistrySettings::default());
        media.panic_on_write();
        let proposal = put(0, "a", 1);
        let approvals = vec![approval(1, proposal.b3()), approval(2, proposal.b3())];
        let approvals = Given::new(&proposal, approvals);
        let (given, mut reply) = job(Ask::Propose { proposal, approvals, commit: true });
        let hand = Hand::new("committer").unwrap();
        assert!(blocking(&shared, &hand, core, 1, |core| core.run(vec![given])).await.is_none());
        assert!(reply.try_recv().is_err(), "nobody knows what became of it");
        assert!(hand.run(|| 1).await == Ok(1), "the thread goes on");
        assert!(shared.store.reader().unwrap().entry(0).unwrap().is_some(), "what was there is read");
        let (later, mut refused) = job(Ask::Supersede);
        refuse(&shared, vec![later]);
        let refused = refused.try_recv().unwrap().unwrap_err();
        assert_eq!(refused.reason, Reason::Storage);
        assert!(refused.detail.contains("damaged"), "{}", refused.detail);
        shared.service.ready();
        let health = shared.service.kernel().health();
        let write = health.readiness(Some("registry"), ron_kernel::health::Scope::Write).unwrap();
        assert!(!write.ready && write.missing == ["registry.corrupt_store"], "{:?}", write.missing);
        assert!(health.readiness(Some("registry"), ron_kernel::health::Scope::Read).unwrap().ready);
    }

    #[tokio::test]
    async fn what_a_failed_flush_left_open_is_shown_to_nobody() {
        let media = Faulty::default();
        let store = Store::over(Disk::over(media.clone()), &roots()).unwrap();
        let mut registry = Fixture::over(store, RegistrySettings::default());
        let Ok(Done::Committed(head)) = registry.commit(&put(0, "a", 1)) else { panic!("committed") };
        media.fail_flushes(true);
        let proposal = put(1, "b", 2);
        let (open, open_id) = (registry.commit(&proposal).unwrap_err(), proposal.b3());
        assert_eq!(open.reason, Reason::CommitUnknown);
        assert_eq!(registry.shared.open(put(1, "b", 3).b3()), None, "another proposal");
        assert_eq!(registry.shared.open(open_id), Some("unknown"));
        media.fail_flushes(false);
        let refused = registry.commit(&put(1, "c", 3)).unwrap_err();
        assert_eq!(refused.reason, Reason::Storage, "nothing was begun");
        let Fixture { shared, core, .. } = registry;
        drop(core);
        assert!(restore(&shared, &Hand::new("committer").unwrap(), "storage").await.is_none());
        assert_eq!(shared.head(), head);
        shared.service.ready();
        let health = shared.service.kernel().health();
        let write = health.readiness(Some("registry"), ron_kernel::health::Scope::Write).unwrap();
        assert!(write.missing.contains(&"registry.storage_stopped".to_owned()), "{:?}", write.missing);
    }
}
