//! The Checkpointor: reads back what was stored, hashes it again, and only then signs.

use crate::guard::{Hold, Seer};
use crate::shared::{Shared, Signed, now_millis};
use crate::store::{Replay, RestoreError, StoreError};
use crate::witness::keys;
use ron_kernel::channel::Sender;
use ron_kernel::task::TaskResult;
use ron_log::tile::Tile;
use ron_log::{B3, Checkpoint, Snapshot, Tree};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Least time between two checkpoints, however many entries there are; less if somebody waits for one.
const GAP: Duration = Duration::from_secs(1);
/// How soon it is seen that nothing holds the log up any more, if nobody says so.
const LOOK: Duration = Duration::from_secs(1);
const GAP_WANTED: Duration = Duration::from_millis(100);

/// Why there is no checkpoint.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MakeError {
    #[error("{0}")]
    Restore(#[from] RestoreError),
    /// It would not continue what was signed before.
    #[error("{0}")]
    Held(Hold),
    #[error("the file of the highest checkpoint: {0}")]
    Highest(std::io::Error),
}

pub(crate) async fn checkpoint(shared: Arc<Shared>, retention: Sender<()>) -> TaskResult {
    let mut committed = shared.committed.subscribe();
    let mut follower: Option<Replay> = None;
    let (mut last, mut wanted) = (Instant::now(), false);
    loop {
        let covered = shared.signed_size.load(Ordering::Acquire);
        let blocked = || shared.damage().is_some() || shared.holds.any();
        let new = (shared.head().version + 1).saturating_sub(covered);
        let settings = shared.settings.load_full();
        let due = if new == 0 {
            None
        } else if blocked() {
            Some(Instant::now() + LOOK)
        } else if covered == 0 {
            Some(last)
        } else if wanted {
            Some(last + GAP_WANTED)
        } else if new >= settings.checkpoint.entries {
            Some(last + GAP.min(settings.checkpoint.interval.0))
        } else {
            Some(last + settings.checkpoint.interval.0)
        };
        tokio::select! {
            biased;
            () = shared.service.shutdown().draining() => return Ok(()),
            () = shared.checkpoint_wanted.notified(), if !wanted => { wanted = true; continue }
            () = at(due) => {}
            // Lag does not matter: HEAD is looked at anew.
            _ = committed.recv() => continue,
        }
        if blocked() {
            continue;
        }
        wanted = false;
        last = Instant::now();
        let (working, held) = (shared.clone(), follower.take());
        let made = match tokio::task::spawn_blocking(move || make(&working, held)).await {
            Ok(made) => made,
            Err(panic) => {
                shared.panicked("the checkpointor", &panic.to_string());
                continue;
            }
        };
        match made {
            Ok((signed, replay)) => {
                follower = Some(replay);
                shared.signed_size.store(signed.size, Ordering::Release);
                if settings.witness.quorum == 0 {
                    shared.publish_checkpoint(signed);
                }
                shared.cosignatures_wanted.notify_one();
                // A command that finds no place is skipped: the next one does as well.
                drop(retention.try_send(()));
            }
            Err(MakeError::Restore(RestoreError::Damaged { version, what })) => {
                shared.damaged(version, &what)
            }
            Err(MakeError::Held(hold)) => shared.holds.set(&Seer::Own, Some(hold)),
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
pub(crate) fn make(shared: &Shared, follower: Option<Replay>) -> Result<(Signed, Replay), MakeError> {
    let head = shared.head().head();
    let reader = shared.store.reader().map_err(RestoreError::from)?;
    let mut replay = match follower {
        Some(replay) => replay,
        None => Replay::before(&reader, head.version + 1, &shared.roots, &shared.log_key)?,
    };
    replay.run(&reader, head.version)?;
    let damaged = |what: &str| RestoreError::Damaged { version: head.version, what: what.to_owned() };
    if replay.head() != head {
        return Err(damaged("what was stored is not what was committed").into());
    }
    let (size, root) = (replay.tree.size(), replay.tree.root());
    let stored = Tree::from_tiles(size, |tile: Tile| reader.sure_tile(tile));
    if stored.map_err(|bad| damaged(&bad.to_string()))?.root() != root {
        return Err(damaged("the tiles are not those of the entries").into());
    }
    if let Some(hold) = shared.highest.judge(&reader, size)? {
        return Err(MakeError::Held(hold));
    }
    let kept = reader.checkpoints(size..=size).map_err(RestoreError::from)?.pop();
    let before = reader.snapshot(u64::MAX).map_err(RestoreError::from)?.map(|(version, _, _)| version);
    drop(reader);
    let log = shared.roots.log.clone();
    let checkpoint = Checkpoint { origin: log.clone(), size, root };
    // One of this size that witnesses have cosigned already says the same and more.
    let kept =
        kept.and_then(|(_, note)| Signed::of(&note, &shared.log_key, &keys(&shared.settings.load().witness)));
    let signed = kept.filter(|kept| kept.root == root).unwrap_or_else(|| {
        let note = checkpoint.sign(&shared.signing);
        Signed { size, root, note, cosignatures: 0, at: now_millis() }
    });
    shared.highest.note(&checkpoint, &signed.note).map_err(MakeError::Highest)?;
    let state = replay.state.canonical();
    let state_b3 = B3::of(state.as_bytes());
    let snapshot = Snapshot { log, version: head.version, hash: head.hash, state_b3 }.sign(&shared.signing);
    let keep = |version: u64| Some(version) == before;
    let (text, snapshot) = (signed.note.to_string(), snapshot.to_string());
    let written = shared.store.note_writer().checkpoint(size, &text, Some((&snapshot, &state)), keep);
    written.map_err(|error: StoreError| RestoreError::Store(error))?;
    Ok((signed, replay))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistrySettings;
    use crate::fixture::{Fixture, key, log_key, roots};
    use ron_log::checkpoint::cosign;
    use ron_log::{Note, NoteKey, State};

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
    fn a_checkpoint_made_again_keeps_the_good_cosignatures_of_known_witnesses() {
        let witness = |name: &str, seed: u8| NoteKey::cosignature(name, key(seed).verifying_key());
        let mut settings = RegistrySettings::default();
        let url = |key: NoteKey| format!("http://127.0.0.1:1 {key}");
        settings.witness.urls = vec![url(witness("a", 20)), url(witness("b", 21))];
        let mut registry = Fixture::new(settings);
        registry.grow(2);
        let (signed, _) = make(&registry.shared, None).unwrap();
        let mut note = signed.note.clone();
        let spoiled = || {
            let mut line = cosign(&note.text, "b", &key(21), 1);
            line.bytes[9] ^= 1;
            line
        };
        let lines = [
            cosign(&note.text, "stranger", &key(22), 1),
            spoiled(),
            cosign(&note.text, "a", &key(20), 1),
            cosign(&note.text, "a", &key(20), 2),
        ];
        note.signatures.extend(lines.clone());
        let writer = registry.shared.store.note_writer();
        writer.checkpoint(3, &note.to_string(), None, |_| true).unwrap();
        let (again, _) = make(&registry.shared, None).unwrap();
        assert_eq!((again.size, again.cosignatures), (3, 1), "one witness counts once");
        assert_eq!(again.note.signatures[1..], lines[2..3]);
        let stored = registry.shared.store.reader().unwrap().checkpoint().unwrap().unwrap().1;
        assert_eq!(String::from_utf8(stored).unwrap(), again.note.to_string());
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
