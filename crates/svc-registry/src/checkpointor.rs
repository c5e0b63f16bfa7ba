//! The Checkpointor: reads back what was stored, hashes it again, and only then signs.

use crate::guard::{Hold, Seer};
use crate::hand::Hand;
use crate::shared::{Shared, Signed, now_millis};
use crate::store::{Keeping, Reader, RestoreError, StoreError, Whole, damaged, read_back};
use crate::witness::keys;
use ron_kernel::channel::Sender;
use ron_kernel::health::Severity;
use ron_kernel::kernel::Missing;
use ron_kernel::shutdown::Phase;
use ron_kernel::task::TaskResult;
use ron_log::entry::entry_hash;
use ron_log::tile::Tile;
use ron_log::tree::leaf_hash;
use ron_log::{B3, Checkpoint, Head, Note, Snapshot, State, Tree};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Least time between two checkpoints, however many entries there are; less if somebody waits for one.
const GAP: Duration = Duration::from_secs(1);
/// How soon it is seen that nothing holds the log up any more, if nobody says so.
const LOOK: Duration = Duration::from_secs(1);
const GAP_WANTED: Duration = Duration::from_millis(100);

/// A state of up to so many bytes is kept with each checkpoint, a larger one once as much as it has was committed since
/// the last: what keeping it costs stays in proportion to what is committed, and so does the tail that a restart reads.
const STATE_SMALL: u64 = 256 << 10;

/// Goes along with the log as it is stored.
#[derive(Debug)]
pub(crate) struct Follower {
    head: Head,
    tree: Tree,
    /// Bytes that were read back.
    read: u64,
    /// Bytes of the state kept last, and of what had been read by then; none yet in this process.
    kept: Option<(u64, u64)>,
}

impl Follower {
    /// Begins after the newest checkpoint, for which all before it was read back.
    fn begin(reader: &Reader, shared: &Shared) -> Result<Follower, RestoreError> {
        let signed = reader.newest_checkpoint(|note| {
            Note::parse(note).ok().and_then(|note| Checkpoint::verify(&note, &shared.log_key).ok())
        })?;
        let version = signed.as_ref().map_or(0, |signed| signed.size.saturating_sub(1));
        let record = match signed {
            Some(_) => reader.entry(version)?.ok_or_else(|| damaged(version, "the entry is missing"))?,
            None => shared.roots.genesis().0.bytes().to_vec(),
        };
        let tree = Tree::from_tiles(version, |tile: Tile| reader.sure_tile(tile));
        let mut tree = tree.map_err(|bad| damaged(version, bad))?;
        tree.append(leaf_hash(&record), |_, _, _| {});
        if signed.is_some_and(|signed| signed.root != tree.root()) {
            return Err(damaged(version, "the entry and the tiles are not those of the checkpoint"));
        }
        Ok(Follower { head: Head { version, hash: entry_hash(&record) }, tree, read: 0, kept: None })
    }

    /// Reads back what was stored up to a state's entry, hashes it again and compares it with what the state has of it.
    fn run(&mut self, reader: &Reader, state: &State) -> Result<(), RestoreError> {
        let head = state.head();
        read_back(reader, self.head.version + 1, head.version, |version, entry, proposal| {
            let record = entry.record();
            if (record.version, record.prev) != (version, self.head.hash) {
                return Err(damaged(version, "it does not follow the entry before"));
            }
            if !state.has(version, proposal.payload()) {
                return Err(damaged(version, "what readers see is not what was stored"));
            }
            self.read += (entry.bytes().len() + proposal.bytes().len()) as u64;
            self.tree.append(leaf_hash(entry.bytes()), |_, _, _| {});
            self.head = Head { version, hash: entry.hash() };
            Ok(())
        })?;
        if self.head == head {
            Ok(())
        } else {
            Err(damaged(head.version, "what was stored is not what was committed"))
        }
    }

    fn keeps_state(&self) -> bool {
        self.kept.is_none_or(|(state, read)| state <= STATE_SMALL || self.read - read >= state)
    }
}

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
    // A thread of its own: what a state takes of memory would else be kept by every thread that ever made one.
    let hand = Hand::new("checkpointor")?;
    let mut committed = shared.committed.subscribe();
    let mut follower: Option<Follower> = None;
    let (mut last, mut wanted, mut failed) = (Instant::now(), false, false);
    let mut missing = Missing::new(&shared.service, "checkpoint", Severity::Degraded);
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
            Some(if failed { last + GAP } else { last })
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
        let made = match hand.run(move || make(&working, held)).await {
            Ok(made) => made,
            Err(panic) => {
                shared.panicked("the checkpointor", &panic);
                continue;
            }
        };
        failed = made.is_err();
        match made {
            Ok((signed, followed)) => {
                missing.note(false);
                follower = Some(followed);
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
            // The store was closed under it.
            Err(_) if shared.service.shutdown().phase() > Phase::Running => return Ok(()),
            Err(error) => {
                tracing::warn!(%error, "no checkpoint could be made; once more later");
                missing.because(&format!("no checkpoint can be made: {error}"));
            }
        }
    }
}

async fn at(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Follows the log to HEAD as it is stored, compares, signs and stores.
pub(crate) fn make(shared: &Shared, follower: Option<Follower>) -> Result<(Signed, Follower), MakeError> {
    // First, for what is read after it has all of it.
    let view = shared.view.load_full();
    let head = view.state.head();
    let reader = shared.store.reader().map_err(RestoreError::from)?;
    let mut follower = follower.map_or_else(|| Follower::begin(&reader, shared), Ok)?;
    follower.run(&reader, &view.state)?;
    let (size, root) = (follower.tree.size(), follower.tree.root());
    let stored = Tree::from_tiles(size, |tile: Tile| reader.sure_tile(tile));
    if stored.map_err(|bad| damaged(head.version, bad))?.root() != root {
        return Err(damaged(head.version, "the tiles are not those of the entries").into());
    }
    if let Some(hold) = shared.highest.judge(&reader, size)? {
        return Err(MakeError::Held(hold));
    }
    let kept = reader.checkpoints(size..=size).map_err(RestoreError::from)?.pop();
    let before = reader.snapshot_note(u64::MAX).map_err(RestoreError::from)?.map(|(version, _)| version);
    drop(reader);
    let checkpoint = Checkpoint { origin: shared.roots.log.clone(), size, root };
    // One of this size that witnesses have cosigned already says the same and more.
    let kept =
        kept.and_then(|(_, note)| Signed::of(&note, &shared.log_key, &keys(&shared.settings.load().witness)));
    let signed = kept.filter(|kept| kept.root == root).unwrap_or_else(|| {
        let note = checkpoint.sign(&shared.signing);
        Signed { size, root, note, cosignatures: 0, at: now_millis() }
    });
    shared.highest.note(&checkpoint, &signed.note).map_err(MakeError::Highest)?;
    let log = &shared.roots.log;
    let sign = |state_b3: B3| {
        let snapshot = Snapshot { log: log.clone(), version: head.version, hash: head.hash, state_b3 };
        snapshot.sign(&shared.signing).to_string()
    };
    let state = Whole::State(&view.state);
    let keeping = follower.keeps_state().then_some(Keeping { state, sign: &sign });
    let keep = |version: u64| Some(version) == before;
    let written = shared.store.note_writer().checkpoint(size, &signed.note.to_string(), keeping, keep);
    let state = written.map_err(|error: StoreError| RestoreError::Store(error))?;
    if keeping.is_some() {
        follower.kept = Some((state, follower.read));
    }
    Ok((signed, follower))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RegistrySettings;
    use crate::fixture::{Fixture, change, key, log_key, roots};
    use crate::store::{Disk, Faulty, Store};
    use crate::view::View;
    use ron_log::checkpoint::cosign;
    use ron_log::{Key, NoteKey, Op};

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
    fn a_large_state_is_kept_once_there_is_as_much_news() {
        let mut registry = Fixture::new(RegistrySettings::default());
        let large = |registry: &mut Fixture, count: u64| {
            for _ in 0..count {
                let base = registry.shared.head().version;
                let body = Some(format!("\"{}\"", "x".repeat(10_000)));
                let op = Op { key: Key::new("x-n", &base.to_string()).unwrap(), body };
                registry.commit(&change(base, 0, op, 0)).unwrap();
            }
        };
        let kept = |registry: &Fixture| {
            let note = registry.shared.store.reader().unwrap().snapshot_note(u64::MAX).unwrap();
            note.map(|(version, _)| version)
        };
        large(&mut registry, 30);
        let (_, follower) = make(&registry.shared, None).unwrap();
        assert_eq!(kept(&registry), Some(30), "the first of a process");
        large(&mut registry, 10);
        let (signed, follower) = make(&registry.shared, Some(follower)).unwrap();
        assert_eq!((signed.size, kept(&registry)), (41, Some(30)));
        let checkpoint = registry.shared.store.reader().unwrap().checkpoint().unwrap().unwrap().0;
        assert_eq!(checkpoint, 41, "signed all the same");
        let restored = registry.shared.store.restore(&roots(), &log_key()).unwrap();
        assert_eq!(restored.state.head().version, 40, "the state and the tail");
        large(&mut registry, 20);
        make(&registry.shared, Some(follower)).unwrap();
        assert_eq!(kept(&registry), Some(60));
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

    #[test]
    fn nothing_is_signed_that_readers_see_otherwise_than_it_is_stored() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(3);
        let (_, follower) = make(&registry.shared, None).unwrap();
        registry.grow(3);
        let good = View::clone(&registry.shared.view.load());
        let changed = good.state.canonical().replacen(r#"{"n":1}"#, r#"{"n":9}"#, 1);
        let state = State::parse(changed.as_bytes()).unwrap();
        assert_eq!(state.head(), good.state.head());
        registry.shared.publish(View { state, ..good.clone() });
        let again = || Follower { tree: follower.tree.clone(), ..follower };
        let refused = make(&registry.shared, Some(again())).unwrap_err();
        assert!(refused.to_string().contains("version 5: what readers see"), "{refused}");
        registry.shared.publish(good);
        assert_eq!(make(&registry.shared, Some(again())).unwrap().0.size, 7);
    }

    #[test]
    fn the_entry_that_a_start_goes_on_from_is_read_back_too() {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(3);
        make(&registry.shared, None).unwrap();
        registry.grow(1);
        registry.shared.store.spoil(3);
        let refused = make(&registry.shared, None).unwrap_err();
        assert!(refused.to_string().contains("version 3"), "{refused}");
    }

    #[tokio::test]
    async fn a_panic_under_the_checkpointor_is_damage_and_not_a_failed_service() {
        let media = Faulty::default();
        let store = Store::over(Disk::over(media.clone()), &roots()).unwrap();
        let mut registry = Fixture::over(store, RegistrySettings::default());
        registry.grow(3);
        media.panic_on_write();
        let (retention, _commands) = crate::fixture::commands(&registry.shared);
        let shared = registry.shared.clone();
        tokio::select! {
            ended = checkpoint(shared.clone(), retention) => panic!("it ends: {ended:?}"),
            () = crate::fixture::until(|| shared.damage().is_some()) => {}
        }
        assert!(shared.damage().unwrap().contains("the checkpointor failed"), "{:?}", shared.damage());
        assert!(shared.checkpoint.load().is_none(), "nothing is served that is not stored");
    }
}
