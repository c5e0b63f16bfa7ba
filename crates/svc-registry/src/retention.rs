//! Retention: lets go of records and payloads, strictly under a signed checkpoint, and signs what it did.

use crate::config::Policy;
use crate::hand::Hand;
use crate::shared::{Shared, now_millis};
use crate::store::{Keeping, Replay, RestoreError, StoreError, Whole};
use ron_kernel::channel::Receiver;
use ron_kernel::task::TaskResult;
use ron_log::entry::entry_hash;
use ron_log::snapshot::PruneDigest;
use ron_log::tile::TILE_WIDTH;
use ron_log::{B3, Entry, PruneManifest, Snapshot};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Entries and bytes of one batch, and the rest between two: the Committer comes first.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 4 << 20;
const REST: Duration = Duration::from_millis(20);
/// How soon after a look there is another, however short the interval of checkpoints is.
const LOOK: Duration = Duration::from_secs(1);
/// Entries looked at to find where a cycle ends.
const CYCLE_MAX: u64 = 100_000;

pub(crate) async fn retain(shared: Arc<Shared>, commands: Arc<Receiver<()>>) -> TaskResult {
    let hand = Hand::new("retention")?;
    // What a manifest let go before a crash is removed now.
    remove(&shared, &hand).await?;
    loop {
        let interval = shared.settings.load().checkpoint.interval.0;
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            command = commands.recv() => if command.is_none() { return Ok(()) },
            // Entries grow old also while none are added.
            () = tokio::time::sleep(interval.max(LOOK)) => {}
        }
        if shared.damage().is_some() || shared.holds.any() || shared.store.disk().flush_failed() {
            continue;
        }
        let working = shared.clone();
        match hand.run(move || decide(&working)).await {
            Ok(Ok(false)) => {}
            Ok(Ok(true)) => remove(&shared, &hand).await?,
            Ok(Err(RestoreError::Damaged { version, what })) => shared.damaged(version, &what),
            Err(panic) => shared.panicked("retention", &panic),
            Ok(Err(error)) => tracing::warn!(%error, "nothing could be pruned; once more later"),
        }
    }
}

/// Removes what is below the first version kept, in small batches.
async fn remove(shared: &Arc<Shared>, hand: &Hand) -> TaskResult {
    loop {
        let writer = shared.store.note_writer();
        let removed = hand.run(move || writer.prune(BATCH)).await;
        match removed {
            Ok(Ok(0)) => return Ok(()),
            Ok(Ok(_)) => {}
            Err(panic) => {
                shared.panicked("retention", &panic);
                return Ok(());
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, "pruned entries could not be removed; once more later");
                return Ok(());
            }
        }
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(REST) => {}
        }
    }
}

/// Decides where the log is to begin, and writes the manifest; true if something is to be removed.
pub(crate) fn decide(shared: &Shared) -> Result<bool, RestoreError> {
    let min = shared.min_version();
    let Some(signed) = shared.checkpoint.load_full() else { return Ok(false) };
    let wanted = wanted(shared, min)?;
    // Strictly below the checkpoint, and never HEAD; and where a bundle begins, so that every entry that is kept stands
    // in a bundle that can be served.
    let keep = wanted.min(signed.size.saturating_sub(1)).min(shared.head().version);
    let keep = keep - keep % TILE_WIDTH;
    if keep <= min {
        return Ok(false);
    }
    let mut digest = PruneDigest::default();
    let mut at = min;
    while at < keep {
        let reader = shared.store.reader()?;
        let count = usize::try_from(keep - at).unwrap_or(BATCH).min(BATCH);
        let pairs = reader.pairs(at, count, BATCH_BYTES)?;
        if pairs.first().is_none_or(|(version, _, _)| *version != at) {
            let what = "the entry or its payload is missing".to_owned();
            return Err(RestoreError::Damaged { version: at, what });
        }
        for (version, record, payload) in pairs {
            digest.push(entry_hash(&record), B3::of(&payload));
            at = version + 1;
        }
    }
    let reader = shared.store.reader()?;
    let mut replay = Replay::before(&reader, keep, &shared.roots, &shared.log_key)?;
    replay.run(&reader, keep - 1)?;
    drop(reader);
    let log = shared.roots.log.clone();
    let head = replay.head();
    let sign = |state_b3: B3| {
        let log = shared.roots.log.clone();
        Snapshot { log, version: head.version, hash: head.hash, state_b3 }.sign(&shared.signing).to_string()
    };
    let manifest = PruneManifest {
        log,
        min_version: keep,
        size: signed.size,
        root: signed.root,
        digest: digest.finish(),
        pruned_at: now_millis(),
    };
    let note = manifest.sign(&shared.signing).to_string();
    let keeping = Keeping { state: Whole::State(&replay.state), sign: &sign };
    shared.store.note_writer().manifest(keep, &note, keeping)?;
    shared.min_version.store(keep, Ordering::Release);
    tracing::info!(from = min, to = keep, "the registry lets go of its oldest entries");
    Ok(true)
}

/// The first version that the policy keeps.
fn wanted(shared: &Shared, min: u64) -> Result<u64, StoreError> {
    let settings = shared.settings.load();
    let retention = &settings.retention;
    let head = shared.head().version;
    match retention.policy {
        Policy::None => Ok(0),
        Policy::Count => Ok((head + 1).saturating_sub(retention.max_count)),
        Policy::Age => {
            let age = u64::try_from(retention.max_age.0.as_millis()).unwrap_or(u64::MAX);
            let before = now_millis().saturating_sub(age);
            walk(shared, min, |record, _| record.committed_at < before)
        }
        Policy::Size => {
            let mut over = shared.store.reader()?.kept_bytes()?.saturating_sub(retention.target_bytes.0);
            walk(shared, min, |_, bytes| {
                let goes = over > 0;
                over = over.saturating_sub(bytes);
                goes
            })
        }
    }
}

/// The first version from the oldest on that does not go.
fn walk(
    shared: &Shared,
    min: u64,
    mut goes: impl FnMut(&ron_log::EntryRecord, u64) -> bool,
) -> Result<u64, StoreError> {
    let mut at = min;
    while at < min + CYCLE_MAX {
        let pairs = shared.store.reader()?.pairs(at, BATCH, BATCH_BYTES)?;
        if pairs.is_empty() {
            break;
        }
        for (version, record, payload) in pairs {
            let bytes = (record.len() + payload.len()) as u64;
            let entry = Entry::parse(record);
            let entry = entry.map_err(|bad| StoreError::Damaged(format!("version {version}: {bad}")))?;
            if !goes(entry.record(), bytes) {
                return Ok(version);
            }
            at = version + 1;
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpointor::make;
    use crate::config::{RegistrySettings, RetentionSettings};
    use crate::fixture::{Fixture, log_key, roots};
    use crate::guard::{Hold, Seer};
    use crate::store::{Disk, Faulty, Store};
    use ron_kernel::units::{Size, Span};
    use ron_log::Note;

    fn registry(retention: RetentionSettings) -> Fixture {
        let mut registry = Fixture::new(RegistrySettings { retention, ..RegistrySettings::default() });
        registry.grow(300);
        assert!(!decide(&registry.shared).unwrap(), "nothing goes before a checkpoint covers it");
        let (signed, _) = make(&registry.shared, None).unwrap();
        registry.shared.publish_checkpoint(signed);
        registry.grow(5);
        registry
    }

    fn settings(policy: Policy) -> RetentionSettings {
        RetentionSettings { policy, max_age: Span::millis(10), max_count: 3, target_bytes: Size(1) }
    }

    #[test]
    fn each_policy_prunes_under_the_checkpoint_alone_and_signs_it() {
        for policy in [Policy::Age, Policy::Count, Policy::Size] {
            let registry = registry(settings(policy));
            let begun = now_millis();
            while now_millis() < begun + 20 {
                std::thread::yield_now();
            }
            assert!(decide(&registry.shared).unwrap());
            assert!(!decide(&registry.shared).unwrap(), "no part of a bundle goes");
            let store = &registry.shared.store;
            assert_eq!(registry.shared.min_version(), 256, "{policy:?}: the last bundle below size 301");
            let manifests = store.reader().unwrap().manifests().unwrap();
            let manifest = PruneManifest::verify(&Note::parse(&manifests[0]).unwrap(), &log_key()).unwrap();
            assert_eq!((manifest.min_version, manifest.size), (256, 301));
            assert_eq!(store.note_writer().prune(7).unwrap(), 7);
            assert_eq!(store.note_writer().prune(1000).unwrap(), 249);
            let reader = store.reader().unwrap();
            assert!(reader.pair(255).unwrap().is_none() && reader.pair(256).unwrap().is_some());
            let restored = store.restore(&roots(), &log_key()).unwrap();
            assert_eq!(restored.state.head(), registry.shared.head().head());
            assert_eq!(restored.tree.root(), registry.shared.view.load().tree.root());
            assert!(store.state_at(255, &roots(), &log_key()).is_ok(), "the snapshot it begins with");
        }
        assert!(!decide(&registry(settings(Policy::None)).shared).unwrap());
    }

    #[test]
    fn a_state_of_the_past_is_right_or_said_to_be_gone_while_it_is_being_pruned() {
        let registry = registry(settings(Policy::Count));
        let store = registry.shared.store.clone();
        let versions = [0, 3, 254, 255, 256, 300, 305];
        let state = |version| store.state_at(version, &roots(), &log_key());
        let before: Vec<_> = versions.iter().map(|version| state(*version).unwrap()).collect();
        std::thread::scope(|scope| {
            let pruned = scope.spawn(|| {
                assert!(decide(&registry.shared).unwrap());
                while store.note_writer().prune(7).unwrap() > 0 {}
            });
            let mut once_more = true;
            while once_more {
                once_more = !pruned.is_finished();
                for (version, known) in versions.iter().zip(&before) {
                    match state(*version) {
                        Ok(found) => assert_eq!(found, *known),
                        Err(RestoreError::Pruned { min_version: 256 }) => assert!(*version < 255),
                        Err(error) => panic!("version {version}: {error}"),
                    }
                }
            }
        });
        assert!(matches!(state(254), Err(RestoreError::Pruned { .. })) && state(255).is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn what_grows_old_is_let_go_though_nothing_is_added() {
        let registry = registry(settings(Policy::Age));
        let (_command, commands) = crate::fixture::commands(&registry.shared);
        let shared = registry.shared.clone();
        tokio::select! {
            ended = retain(shared.clone(), commands) => panic!("it ends: {ended:?}"),
            () = crate::fixture::until(|| shared.min_version() == 256) => {}
        }
    }

    #[tokio::test]
    async fn while_the_log_is_held_up_nothing_is_let_go() {
        let registry = registry(settings(Policy::Age));
        let shared = registry.shared.clone();
        let seen = Hold::Behind { who: Seer::Own, seen: 400, has: 306 };
        shared.holds.set(&Seer::Own, Some(seen));
        let (command, commands) = crate::fixture::commands(&shared);
        let held = async {
            // Once the second is taken, the first is done with.
            for _ in 0..2 {
                assert!(command.try_send(()).is_ok());
                crate::fixture::until(|| command.depth() == 0).await;
            }
            assert!(shared.store.reader().unwrap().manifests().unwrap().is_empty());
            shared.holds.set(&Seer::Own, None);
            assert!(command.try_send(()).is_ok());
            crate::fixture::until(|| shared.min_version() == 256).await;
        };
        tokio::select! {
            ended = retain(shared.clone(), commands) => panic!("it ends: {ended:?}"),
            () = held => {}
        }
    }

    #[tokio::test]
    async fn a_panic_under_retention_is_damage_and_not_a_failed_service() {
        let media = Faulty::default();
        let store = Store::over(Disk::over(media.clone()), &roots()).unwrap();
        let retention = settings(Policy::Count);
        let mut registry =
            Fixture::over(store, RegistrySettings { retention, ..RegistrySettings::default() });
        registry.grow(300);
        registry.shared.publish_checkpoint(make(&registry.shared, None).unwrap().0);
        media.panic_on_write();
        let (command, commands) = crate::fixture::commands(&registry.shared);
        let shared = registry.shared.clone();
        assert!(command.try_send(()).is_ok());
        tokio::select! {
            ended = retain(shared.clone(), commands) => panic!("it ends: {ended:?}"),
            () = crate::fixture::until(|| shared.damage().is_some()) => {}
        }
        assert!(shared.damage().unwrap().contains("retention failed"), "{:?}", shared.damage());
    }
}
