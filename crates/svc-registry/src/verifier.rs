//! The Deep Verifier: checks the whole log again and again, a slice at a time, signatures included.

use crate::hand::Hand;
use crate::shared::Shared;
use crate::store::{Reader, StoreError};
use crate::witness::keys;
use ron_kernel::task::TaskResult;
use ron_log::tile::{TILE_WIDTH, Tile};
use ron_log::{B3, Note, Signatures, Snapshot, Verifier};
use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A slice of work, and the rest after it.
const SLICE: Duration = Duration::from_millis(25);
const REST: Duration = Duration::from_millis(100);
/// The rest while commits come in: they need the cores more.
const REST_BUSY: Duration = Duration::from_millis(500);
/// How long after a whole pass the next begins.
const AGAIN: Duration = Duration::from_secs(3600);

/// Why a slice ended before its time.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Stop {
    /// Retention has let go of what was to be checked next.
    #[error("overtaken by retention")]
    Overtaken,
    #[error("{0}")]
    Store(#[from] StoreError),
}

pub(crate) async fn verify(shared: Arc<Shared>) -> TaskResult {
    let mut committed = shared.committed.subscribe();
    let mut pass: Option<Pass> = None;
    let mut head = shared.head().version;
    // Commits, here and elsewhere on the machine, need the cores more.
    let hand = Hand::in_the_background("verifier")?;
    loop {
        let (working, held) = (shared.clone(), pass.take());
        let done = hand.run(move || {
            let mut pass = match held {
                Some(pass) if pass.begun.elapsed() < AGAIN => pass,
                _ => Pass::begin(&working)?,
            };
            let caught_up = pass.slice(&working)?;
            Ok::<_, Stop>((pass, caught_up))
        });
        let rest = match done.await {
            Ok(Ok((held, caught_up))) => {
                pass = Some(held);
                let busy = std::mem::replace(&mut head, shared.head().version) != head;
                if caught_up && !busy { None } else { Some(if busy { REST_BUSY } else { REST }) }
            }
            Ok(Err(Stop::Overtaken)) => Some(REST),
            Ok(Err(Stop::Store(error))) => {
                let version = shared.verified.load(Ordering::Relaxed) + 1;
                if error.is_damage() {
                    shared.damaged(version, &error.to_string());
                }
                tracing::warn!(%error, "the deep verifier could not read on");
                Some(AGAIN / 60)
            }
            // A page that makes no sense may panic below.
            Err(panic) => {
                shared.damaged(shared.verified.load(Ordering::Relaxed) + 1, &panic);
                Some(AGAIN)
            }
        };
        if shared.damage().is_some() {
            shared.service.shutdown().draining().await;
            return Ok(());
        }
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            () = tokio::time::sleep(rest.unwrap_or(AGAIN)) => {}
            _ = committed.recv(), if rest.is_none() => {}
        }
    }
}

/// One way through the log.
#[derive(Debug)]
pub(crate) struct Pass {
    verifier: Verifier,
    begun: Instant,
    told: usize,
    /// The versions of the snapshots that were looked at.
    snapshots: BTreeSet<u64>,
}

impl Pass {
    pub(crate) fn begin(shared: &Shared) -> Result<Pass, Stop> {
        let reader = shared.store.settled()?;
        let witnesses = keys(&shared.settings.load().witness);
        let verifier = Verifier::new(shared.roots.clone(), Some(shared.log_key.clone()), Signatures::Check);
        // Only good cosignatures are ever stored; how many there must be is not a matter of damage.
        let mut verifier = verifier.witnessed_by(witnesses, 0);
        for (_, note) in reader.checkpoints(0..=u64::MAX)? {
            verifier.checkpoint(&note);
        }
        for note in reader.manifests()? {
            verifier.prune_manifest(&note);
        }
        let min = reader.min_version()?;
        let mut leaf = 0;
        while leaf < min {
            let width = (min - leaf).min(TILE_WIDTH) as u16;
            let tile = reader.sure_tile(Tile { level: 0, index: leaf / TILE_WIDTH, width })?;
            for hash in tile.as_chunks::<32>().0 {
                verifier.pruned_leaf(*hash);
            }
            leaf += u64::from(width);
        }
        if min > 0 {
            let found = reader.snapshot(min - 1)?.filter(|(version, _, _)| *version == min - 1);
            let missing = || StoreError::Damaged(format!("the snapshot of version {} is missing", min - 1));
            let (_, note, state) = found.ok_or_else(missing)?;
            verifier.begin(&note, &state);
        }
        let mut pass = Pass { verifier, begun: Instant::now(), told: 0, snapshots: BTreeSet::new() };
        // What the log begins with may be at fault, and then nothing after it may be readable.
        pass.tell(shared);
        Ok(pass)
    }

    /// Tells of the faults that were found since the last time.
    fn tell(&mut self, shared: &Shared) {
        for fault in &self.verifier.faults()[self.told..] {
            shared.damaged(fault.version, &fault.kind.to_string());
        }
        self.told = self.verifier.faults().len();
    }

    /// Checks for a while; true once it has caught up with HEAD.
    pub(crate) fn slice(&mut self, shared: &Shared) -> Result<bool, Stop> {
        let begun = Instant::now();
        // This thread comes last: nobody shall wait for what it would take into the database.
        let durable = shared.head().version;
        let (reader, head) = shared.store.settled_to(durable)?;
        let min = reader.min_version()?;
        let read = |version: u64| match reader.pair(version)? {
            None if version < min => Err(Stop::Overtaken),
            found => Ok(found),
        };
        let tile = |tile: Tile| reader.tile(tile).map_err(Stop::from);
        self.verifier.run(head, read, tile, |_| {
            if begun.elapsed() > SLICE { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        let next = self.verifier.next_version();
        let caught_up = next > durable;
        if caught_up {
            self.check_snapshots(shared, &reader)?;
        }
        self.tell(shared);
        if self.told == 0 {
            shared.verified.fetch_max(next - 1, Ordering::Relaxed);
        }
        Ok(caught_up)
    }

    /// The snapshots are what the log signed; each is looked at once, since all of its state is read.
    fn check_snapshots(&mut self, shared: &Shared, reader: &Reader) -> Result<(), StoreError> {
        let versions = reader.snapshot_versions()?;
        self.snapshots.retain(|known| versions.contains(known));
        for version in versions {
            if !self.snapshots.insert(version) {
                continue;
            }
            let note = reader.snapshot_note(version)?.map(|(_, note)| note).unwrap_or_default();
            match is_signed(shared, version, &note, reader.state_hash(version)?) {
                Err(StoreError::DamagedEntry { version, what }) => shared.damaged(version, what),
                checked => drop(checked?),
            }
        }
        Ok(())
    }
}

/// Whether a snapshot is there, as the log signed it. False if it was let go of while this thread had no turn; an error if it is
/// not what was signed.
pub(crate) fn is_signed(
    shared: &Shared,
    version: u64,
    note: &[u8],
    state: Option<B3>,
) -> Result<bool, StoreError> {
    if state.is_none() && !shared.store.settled()?.snapshot_versions()?.contains(&version) {
        return Ok(false);
    }
    let signed = Note::parse(note).and_then(|note| Snapshot::verify(&note, &shared.log_key));
    if signed.is_ok_and(|signed| signed.version == version && Some(signed.state_b3) == state) {
        return Ok(true);
    }
    Err(StoreError::DamagedEntry { version, what: "the snapshot is not what the log signed" })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpointor::make;
    use crate::config::{Policy, RegistrySettings, RetentionSettings};
    use crate::fixture::Fixture;

    fn whole_pass(registry: &Fixture) {
        let mut pass = Pass::begin(&registry.shared).unwrap();
        while !pass.slice(&registry.shared).unwrap() {}
    }

    #[test]
    fn a_good_log_is_found_good_also_when_it_was_pruned_and_grows() {
        let retention = RetentionSettings { policy: Policy::Count, max_count: 3, ..Default::default() };
        let mut registry = Fixture::new(RegistrySettings { retention, ..RegistrySettings::default() });
        registry.grow(300);
        whole_pass(&registry);
        assert_eq!(registry.shared.verified.load(Ordering::Relaxed), 300);
        for _ in 0..2 {
            registry.shared.publish_checkpoint(make(&registry.shared, None).unwrap().0);
            assert!(crate::retention::decide(&registry.shared).unwrap());
            registry.shared.store.note_writer().prune(1000).unwrap();
            let mut pass = Pass::begin(&registry.shared).unwrap();
            while !pass.slice(&registry.shared).unwrap() {}
            // Over the next full tile.
            registry.grow(300);
            while !pass.slice(&registry.shared).unwrap() {}
            whole_pass(&registry);
        }
        assert_eq!(registry.shared.damage(), None);
        assert_eq!(registry.shared.verified.load(Ordering::Relaxed), 900);
    }

    #[test]
    fn a_damaged_state_that_the_log_begins_with_is_told_at_once() {
        let retention = RetentionSettings { policy: Policy::Count, max_count: 3, ..Default::default() };
        let mut registry = Fixture::new(RegistrySettings { retention, ..RegistrySettings::default() });
        registry.grow(300);
        registry.shared.publish_checkpoint(make(&registry.shared, None).unwrap().0);
        assert!(crate::retention::decide(&registry.shared).unwrap());
        registry.shared.store.spoil_snapshot(registry.shared.min_version() - 1);
        Pass::begin(&registry.shared).unwrap();
        assert!(registry.shared.damage().is_some());
    }

    #[test]
    fn each_new_snapshot_is_looked_at_in_the_same_pass() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(3);
        make(&registry.shared, None).unwrap();
        let mut pass = Pass::begin(&registry.shared).unwrap();
        while !pass.slice(&registry.shared).unwrap() {}
        assert_eq!(
            (pass.snapshots.iter().copied().collect::<Vec<_>>(), registry.shared.damage()),
            (vec![3], None)
        );
        registry.grow(2);
        make(&registry.shared, None).unwrap();
        registry.shared.store.spoil_snapshot(5);
        while !pass.slice(&registry.shared).unwrap() {}
        assert!(registry.shared.damage().unwrap().contains("version 5"), "{:?}", registry.shared.damage());
    }

    #[test]
    fn a_snapshot_that_is_not_the_newest_is_looked_at_too() {
        let mut registry = Fixture::new(RegistrySettings::default());
        for count in [3, 2] {
            registry.grow(count);
            make(&registry.shared, None).unwrap();
        }
        registry.shared.store.spoil_snapshot(3);
        whole_pass(&registry);
        assert!(registry.shared.damage().unwrap().contains("version 3"), "{:?}", registry.shared.damage());
    }

    #[test]
    fn a_stored_cosignature_that_was_changed_is_found() {
        let key = crate::fixture::key(20);
        let line = ron_log::NoteKey::cosignature("w.example", key.verifying_key());
        let mut settings = RegistrySettings::default();
        settings.witness.urls = vec![format!("http://127.0.0.1:1 {line}")];
        let mut registry = Fixture::new(settings);
        registry.grow(2);
        let mut note = make(&registry.shared, None).unwrap().0.note;
        note.signatures.push(ron_log::checkpoint::cosign(&note.text, "w.example", &key, 1));
        let store = |note: &Note| {
            registry.shared.store.note_writer().checkpoint(3, &note.to_string(), None, |_| true).unwrap();
        };
        store(&note);
        whole_pass(&registry);
        assert_eq!(registry.shared.damage(), None);
        note.signatures[1].bytes[20] ^= 1;
        store(&note);
        whole_pass(&registry);
        assert!(registry.shared.damage().unwrap().contains("version 2"), "{:?}", registry.shared.damage());
    }

    #[test]
    fn what_was_changed_on_disk_is_named_and_ends_writing() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(9);
        registry.shared.store.spoil(4);
        whole_pass(&registry);
        assert!(registry.shared.damage().unwrap().contains("version 4"));
        let health = registry.shared.service.kernel().health();
        registry.shared.service.ready();
        let write = health.readiness(Some("registry"), ron_kernel::health::Scope::Write).unwrap();
        assert!(!write.ready && write.missing == ["registry.corrupt_version_4"], "{:?}", write.missing);
        assert!(health.readiness(Some("registry"), ron_kernel::health::Scope::Read).unwrap().ready);
    }
}
