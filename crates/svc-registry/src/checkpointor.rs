//! The Checkpointor: reads back what was stored, hashes it again, and only then signs.

use crate::shared::{Shared, Signed, now_millis};
use crate::store::{Replay, RestoreError, StoreError};
use crate::witness::Witnesses;
use ron_kernel::channel::Sender;
use ron_kernel::task::TaskResult;
use ron_log::tile::Tile;
use ron_log::{B3, Checkpoint, Snapshot, Tree};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Least time between two checkpoints, however many entries there are; less if somebody waits for one.
const GAP: Duration = Duration::from_secs(1);
const GAP_WANTED: Duration = Duration::from_millis(100);

pub(crate) async fn checkpoint(shared: Arc<Shared>, retention: Sender<()>) -> TaskResult {
    let mut committed = shared.committed.subscribe();
    let mut follower: Option<Replay> = None;
    let mut witnesses = Witnesses::new(&shared);
    let (mut last, mut wanted) = (Instant::now(), false);
    loop {
        let covered = shared.checkpoint.load().as_ref().map_or(0, |signed| signed.size);
        let new = (shared.head().version + 1).saturating_sub(covered);
        let settings = shared.settings.load_full();
        let due = if new == 0 {
            None
        } else if covered == 0 {
            Some(Duration::ZERO)
        } else if wanted {
            Some(GAP_WANTED)
        } else if new >= settings.checkpoint.entries {
            Some(GAP.min(settings.checkpoint.interval.0))
        } else {
            Some(settings.checkpoint.interval.0)
        };
        let due = due.map(|due| last + due);
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            () = shared.checkpoint_wanted.notified(), if !wanted => { wanted = true; continue }
            () = at(due) => {}
            // Lag does not matter: HEAD is looked at anew.
            _ = committed.recv() => continue,
        }
        wanted = false;
        last = Instant::now();
        if shared.damage().is_some() {
            continue;
        }
        let (working, held) = (shared.clone(), follower.take());
        let made = tokio::task::spawn_blocking(move || make(&working, held)).await?;
        match made {
            Ok((signed, replay)) => {
                follower = Some(replay);
                witnesses.publish(&shared, signed).await;
                // A command that finds no place is skipped: the next one does as well.
                drop(retention.try_send(()));
            }
            Err(RestoreError::Damaged { version, what }) => shared.damaged(version, &what),
            Err(error) => tracing::warn!(%error, "no checkpoint could be made; once more later"),
        }
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Follows the log to HEAD on its own, compares, signs and stores.
pub(crate) fn make(shared: &Shared, follower: Option<Replay>) -> Result<(Signed, Replay), RestoreError> {
    let head = shared.head().head();
    let reader = shared.store.reader()?;
    let mut replay = match follower {
        Some(replay) => replay,
        None => Replay::before(&reader, head.version + 1, &shared.roots, &shared.log_key)?,
    };
    replay.run(&reader, head.version)?;
    let damaged = |what: &str| RestoreError::Damaged { version: head.version, what: what.to_owned() };
    if replay.head() != head {
        return Err(damaged("what was stored is not what was committed"));
    }
    let (size, root) = (replay.tree.size(), replay.tree.root());
    let stored = Tree::from_tiles(size, |tile: Tile| reader.sure_tile(tile));
    if stored.map_err(|bad| damaged(&bad.to_string()))?.root() != root {
        return Err(damaged("the tiles are not those of the entries"));
    }
    let before = reader.snapshot(u64::MAX)?.map(|(version, _, _)| version);
    drop(reader);
    let log = shared.roots.log.clone();
    let note = Checkpoint { origin: log.clone(), size, root }.sign(&shared.signing);
    let state = replay.state.canonical();
    let state_b3 = B3::of(state.as_bytes());
    let snapshot = Snapshot { log, version: head.version, hash: head.hash, state_b3 }.sign(&shared.signing);
    let keep = |version: u64| Some(version) == before;
    let (text, snapshot) = (note.to_string(), snapshot.to_string());
    let written = shared.store.note_writer().checkpoint(size, &text, Some((&snapshot, &state)), keep);
    written.map_err(|error: StoreError| RestoreError::Store(error))?;
    Ok((Signed { size, root, note, at: now_millis() }, replay))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistrySettings;
    use crate::fixture::{Fixture, log_key, roots};
    use ron_log::{Note, State};

    #[test]
    fn a_checkpoint_is_of_what_was_read_back_and_carries_the_state() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(300);
        let (signed, replay) = make(&registry.shared, None).unwrap();
        assert_eq!((signed.size, signed.root), (301, registry.shared.view.load().tree.root()));
        assert!(Checkpoint::verify(&signed.note, &log_key()).is_ok());
        registry.grow(3);
        let (next, _) = make(&registry.shared, Some(replay)).unwrap();
        assert_eq!(next.size, 304);
        let reader = registry.shared.store.reader().unwrap();
        let (version, note, state) = reader.snapshot(u64::MAX).unwrap().unwrap();
        let snapshot = Snapshot::verify(&Note::parse(&note).unwrap(), &log_key()).unwrap();
        assert_eq!((version, snapshot.state_b3), (303, B3::of(&state)));
        assert_eq!(State::parse(&state).unwrap().head(), registry.shared.head().head());
        let restored = registry.shared.store.restore(&roots(), &log_key()).unwrap();
        assert_eq!(restored.state.head(), registry.shared.head().head());
    }

    #[test]
    fn nothing_is_signed_over_what_was_changed_on_disk() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(3);
        registry.shared.store.spoil(2);
        let refused = make(&registry.shared, None).unwrap_err();
        assert!(refused.to_string().contains("version 2"), "{refused}");
        assert!(registry.shared.store.reader().unwrap().checkpoint().unwrap().is_none());
    }
}
