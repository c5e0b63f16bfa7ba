//! The store on a medium that fails on request: torn writes, failed flushes, a full disk, flipped bits.

mod journal;

use super::*;
use crate::fixture::{key, log_key, roots};
use redb::StorageBackend;
use ron_log::tree::leaf_hash;
use ron_log::{Approval, ConflictRule, Op, Payload, Proposal, State, Tree};
use std::io::{Error, ErrorKind};
use std::sync::Mutex;

/// Memory that remembers what was flushed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Faulty(Arc<Mutex<Media>>);

#[derive(Debug, Default)]
struct Media {
    bytes: Vec<u8>,
    /// Writes since the last flush: where, what was there, what is.
    unflushed: Vec<(usize, Vec<u8>, Vec<u8>)>,
    flush_fails: bool,
    flush_finds_no_room: bool,
    /// How many flushes are left until they fail.
    flushes_left: Option<u64>,
    full: bool,
    panics: bool,
    flushes: u64,
}

impl Faulty {
    pub(crate) fn fill(&self, full: bool) {
        self.set(|media| media.full = full);
    }

    pub(crate) fn fail_flushes(&self, fail: bool) {
        self.set(|media| media.flush_fails = fail);
    }

    /// Every write panics, as redb does over a page that makes no sense.
    pub(crate) fn panic_on_write(&self) {
        self.set(|media| media.panics = true);
    }

    fn set(&self, change: impl FnOnce(&mut Media)) {
        change(&mut self.0.lock().unwrap());
    }

    /// What a power cut leaves: of the writes since the last flush any part, each at a sector's border.
    fn after_power_cut(&self, seed: u64) -> Faulty {
        let media = self.0.lock().unwrap();
        let mut bytes = media.bytes.clone();
        let mut random = seed;
        for (at, before, _) in media.unflushed.iter().rev() {
            for (index, old) in before.chunks(512).enumerate() {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let from = at + index * 512;
                if random >> 63 == 0 && from < bytes.len() {
                    let end = bytes.len().min(from + old.len());
                    bytes[from..end].copy_from_slice(&old[..end - from]);
                }
            }
        }
        Faulty(Arc::new(Mutex::new(Media { bytes, ..Media::default() })))
    }
}

impl StorageBackend for Faulty {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.0.lock().unwrap().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let media = self.0.lock().unwrap();
        let from = offset as usize;
        let found = media.bytes.get(from..from + out.len()).ok_or(ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(found);
        Ok(())
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.0.lock().unwrap().bytes.resize(len as usize, 0);
        Ok(())
    }

    fn sync_data(&self) -> std::io::Result<()> {
        let mut media = self.0.lock().unwrap();
        if media.flush_finds_no_room {
            return Err(ErrorKind::StorageFull.into());
        }
        let left = media.flushes_left.map(|left| left.checked_sub(1));
        media.flushes_left = left.map(Option::unwrap_or_default);
        if media.flush_fails || left == Some(None) {
            return Err(Error::other("the drive does not answer"));
        }
        media.unflushed.clear();
        media.flushes += 1;
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let mut media = self.0.lock().unwrap();
        let panics = media.panics;
        if panics {
            drop(media);
            panic!("a page makes no sense");
        }
        if media.full {
            return Err(ErrorKind::StorageFull.into());
        }
        let range = offset as usize..offset as usize + data.len();
        let before = media.bytes[range.clone()].to_vec();
        media.unflushed.push((range.start, before, data.to_vec()));
        media.bytes[range].copy_from_slice(data);
        Ok(())
    }
}

/// A log that grows by one entry at a time.
struct Grown {
    state: State,
    tree: Tree,
}

impl Grown {
    fn new(store: &Store) -> Grown {
        let Restored { state, tree, .. } = store.restore(&roots(), &log_key()).unwrap();
        Grown { state, tree }
    }

    fn next(&mut self) -> Changes {
        let version = self.state.head().version + 1;
        let op = Op {
            key: ron_log::Key::new("x-n", &(version % 7).to_string()).unwrap(),
            body: Some(format!("{{\"n\":{version}}}")),
        };
        let payload = Payload {
            base_version: version - 1,
            signers_version: 0,
            nonce: [0; 16],
            ops: vec![op],
            note: String::new(),
            expires_at: u64::from(u32::MAX),
        };
        let proposal = Proposal::new(payload).unwrap();
        let approvals = [1, 2].map(|seed| {
            let approval = Approval::sign(&format!("s{seed}"), &key(seed), proposal.b3(), 1);
            approval.check(proposal.b3(), self.state.signers(), None).unwrap()
        });
        let entry = self.state.commit(&proposal, &approvals, version, ConflictRule::Touched).unwrap();
        self.state.apply(&entry, proposal.payload()).unwrap();
        let mut changes = Changes::default();
        changes.grow(&mut self.tree, leaf_hash(entry.bytes()));
        changes.entries.push((entry, Arc::new(proposal)));
        changes
    }
}

fn over(media: &Faulty) -> Result<Store, OpenError> {
    Store::over(Disk::over(media.clone()), &roots())
}

#[test]
fn what_was_acknowledged_survives_every_power_cut_and_nothing_is_torn() {
    let media = Faulty::default();
    let store = over(&media).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    assert!(store.log_writer().is_none(), "there is one writer");
    let flushes = media.0.lock().unwrap().flushes;
    for version in 1..=300u64 {
        let before = log.state.head();
        writer.write(before, log.next()).unwrap();
        if version % 23 == 0 {
            for seed in 0..4 {
                let cut = media.after_power_cut(version * 31 + seed);
                let restored = over(&cut).unwrap().restore(&roots(), &log_key()).unwrap();
                assert_eq!(restored.state.head(), log.state.head());
                assert_eq!(restored.tree.root(), log.tree.root());
            }
        }
    }
    let spent = media.0.lock().unwrap().flushes - flushes;
    assert!((600..620).contains(&spent), "without a journal two flushes a batch: {spent}");
    // A batch whose flush never came is there as a whole or not at all.
    let (before, changes) = (log.state.head(), log.next());
    media.set(|media| media.flush_fails = true);
    assert!(matches!(writer.write(before, changes.clone()), Err(StoreError::FlushFailed)));
    for seed in 0..32 {
        let restored = over(&media.after_power_cut(seed)).unwrap().restore(&roots(), &log_key()).unwrap();
        assert!([before, log.state.head()].contains(&restored.state.head()), "seed {seed}");
    }
}

#[test]
fn a_failed_flush_stops_writing_and_not_reading() {
    let media = Faulty::default();
    let store = over(&media).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let first = log.state.head();
    writer.write(first, log.next()).unwrap();
    media.set(|media| media.flush_fails = true);
    let head = log.state.head();
    assert!(matches!(writer.write(head, log.next()), Err(StoreError::FlushFailed)));
    media.set(|media| media.flush_fails = false);
    let head = log.state.head();
    assert!(matches!(writer.write(head, log.next()), Err(StoreError::Stopped)), "for good");
    assert!(matches!(store.writable(), Err(StoreError::Stopped)));
    assert!(store.reader().unwrap().pair(1).unwrap().is_some());
}

#[test]
fn a_full_disk_refuses_writes_keeps_reads_and_is_over_when_there_is_room() {
    let media = Faulty::default();
    let store = over(&media).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let first = log.state.head();
    writer.write(first, log.next()).unwrap();
    let head = log.state.head();
    media.set(|media| media.full = true);
    let changes = log.next();
    assert!(matches!(writer.write(head, changes.clone()), Err(StoreError::Full)));
    assert!(matches!(writer.write(head, changes.clone()), Err(StoreError::Full | StoreError::Database(_))));
    media.set(|media| media.full = false);
    store.writable().unwrap();
    assert_eq!(store.reader().unwrap().head().unwrap(), head, "nothing of it was kept");
    assert!(store.reader().unwrap().pair(1).unwrap().is_some());
    writer.write(head, changes.clone()).unwrap();
    assert_eq!(store.restore(&roots(), &log_key()).unwrap().state.head(), log.state.head());
}

#[test]
fn a_writer_with_another_head_writes_nothing() {
    let store = Store::in_memory(&roots()).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let changes = log.next();
    assert!(matches!(writer.write(log.state.head(), changes.clone()), Err(StoreError::HeadMoved)));
    assert_eq!(store.reader().unwrap().head().unwrap().version, 0);
}

#[test]
fn a_file_is_locked_pinned_to_its_roots_and_found_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), &roots(), true).unwrap();
    let mut log = Grown::new(&store);
    let first = log.state.head();
    store.log_writer().unwrap().write(first, log.next()).unwrap();
    let again = Store::open(dir.path(), &roots(), true).unwrap_err();
    assert!(again.to_string().contains("in use by another process"), "{again}");
    drop(store);
    let others = TrustRoots { log: "other.example/log".into(), ..roots() };
    let refused = Store::open(dir.path(), &others, true).unwrap_err();
    assert!(matches!(refused, OpenError::OtherRoots(..)), "{refused}");
    let store = Store::open(dir.path(), &roots(), true).unwrap();
    assert_eq!(store.restore(&roots(), &log_key()).unwrap().state, log.state);
}

#[test]
fn a_file_with_a_damaged_head_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    Store::open(dir.path(), &roots(), true).unwrap().close();
    let file = dir.path().join(FILE);
    let whole = std::fs::read(&file).unwrap();
    let damages: [fn(&mut Vec<u8>); 5] = [
        |bytes| bytes[0] ^= 1,
        |bytes| bytes[12..16].fill(0xFF),
        |bytes| bytes[64..320].fill(0xA5),
        |bytes| bytes.truncate(100),
        |bytes| bytes.truncate(bytes.len() / 2),
    ];
    for (index, damage) in damages.into_iter().enumerate() {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        std::fs::write(&file, bytes).unwrap();
        let open = |look: bool| {
            let open = || {
                if look { Store::look(dir.path(), &roots()) } else { Store::open(dir.path(), &roots(), true) }
            };
            reading(dir.path(), open).unwrap_err().to_string()
        };
        for said in [open(true), open(false)] {
            assert!(said.contains("registry.redb is damaged"), "{index}: {said}");
            assert!(said.contains("from an export with `ron registry import`"), "{index}: {said}");
        }
    }
}

#[test]
fn a_changed_byte_of_any_page_in_use_is_found_by_its_checksum() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), &roots(), true).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for _ in 0..20 {
        let head = log.state.head();
        writer.write(head, log.next()).unwrap();
    }
    let killed = tempfile::tempdir().unwrap();
    for file in ["registry.redb", "registry.journal"] {
        std::fs::copy(dir.path().join(file), killed.path().join(file)).unwrap();
    }
    assert!(has_good_pages(killed.path()).unwrap(), "as a kill leaves it");
    drop(writer);
    store.close();
    drop(store);
    assert!(has_good_pages(dir.path()).unwrap());
    let file = dir.path().join(FILE);
    let whole = std::fs::read(&file).unwrap();
    let good_with = |changes: &[usize]| {
        let mut bytes = whole.clone();
        changes.iter().for_each(|at| bytes[*at] ^= 0x10);
        std::fs::write(&file, bytes).unwrap();
        has_good_pages(dir.path()).unwrap()
    };
    // The name of a table; what other pages have of it is from before.
    let name = b"checkpoints";
    let names: Vec<usize> =
        whole.windows(name.len()).enumerate().filter(|(_, found)| found == name).map(|(at, _)| at).collect();
    assert!(!names.is_empty() && !good_with(&names));
    // A byte of each page: most are not in use, and none is worse than found.
    let places = (0..whole.len()).step_by(4096).filter(|at| whole[*at + 2] != 0);
    let bad = places.filter(|at| !good_with(&[at + 2])).count();
    assert!(bad >= 5, "{bad} pages");
}

#[test]
fn a_changed_byte_of_the_tail_is_found_at_the_start() {
    let store = Store::in_memory(&roots()).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for spoil in [0, 1, 2] {
        let head = log.state.head();
        let mut changes = log.next();
        writer.write(head, changes.clone()).unwrap();
        assert!(store.restore(&roots(), &log_key()).is_ok());
        let version = log.state.head().version;
        let (entry, proposal) = changes.entries.remove(0);
        let width = u16::try_from(version + 1).unwrap();
        let tile =
            store.reader().unwrap().sure_tile(ron_log::tile::Tile { level: 0, index: 0, width }).unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        store.change(|transaction| match spoil {
            0 => {
                let changed = text(entry.bytes()).replace("committed_at\":", "committed_at\":1");
                transaction.open_table(ENTRIES).unwrap().insert(version, changed.as_bytes()).unwrap();
            }
            1 => {
                let changed = text(proposal.bytes()).replace("\"note\":\"", "\"note\":\"x");
                transaction.open_table(PAYLOADS).unwrap().insert(version, changed.as_bytes()).unwrap();
            }
            _ => {
                let mut tile = tile.clone();
                *tile.last_mut().unwrap() ^= 1;
                transaction.open_table(TILES).unwrap().insert((0, 0), tile.as_slice()).unwrap();
            }
        });
        let found = store.restore(&roots(), &log_key()).unwrap_err().to_string();
        assert!(found.contains(&format!("version {version}")), "{spoil}: {found}");
        store.change(|transaction| {
            transaction.open_table(ENTRIES).unwrap().insert(version, entry.bytes()).unwrap();
            transaction.open_table(PAYLOADS).unwrap().insert(version, proposal.bytes()).unwrap();
            transaction.open_table(TILES).unwrap().insert((0, 0), tile.as_slice()).unwrap();
        });
    }
}

/// What the log signs of a state.
fn snapshot_note(head: Head, state_b3: ron_log::B3) -> String {
    let snapshot = ron_log::Snapshot { log: roots().log, version: head.version, hash: head.hash, state_b3 };
    snapshot.sign(&key(9)).to_string()
}

/// A state that is none, as far as these tests care.
fn keeping() -> Keeping<'static> {
    Keeping { state: Whole::Text("{}"), sign: &|_| "note".to_owned() }
}

#[test]
fn old_checkpoints_are_thinned_and_what_a_manifest_names_stays() {
    let store = Store::in_memory(&roots()).unwrap();
    let writer = store.note_writer();
    let named = ron_log::PruneManifest {
        log: roots().log,
        min_version: 1,
        size: 7,
        root: [0; 32],
        digest: ron_log::B3::ZERO,
        pruned_at: 1,
    };
    let named = named.sign(&key(9)).to_string();
    writer.manifest(1, &named, keeping()).unwrap();
    for size in 1..=1300 {
        writer.checkpoint(size, "note", Some(keeping()), |_| false).unwrap();
    }
    let kept = store.reader().unwrap().checkpoints(0..=u64::MAX).unwrap();
    let kept: Vec<u64> = kept.into_iter().map(|(size, _)| size).collect();
    assert_eq!(kept[..4], [1, 7, 256, 301], "and the newest thousand");
    assert_eq!((kept.len(), kept.last()), (1003, Some(&1300)));
}

#[test]
fn the_state_a_pruned_log_begins_with_outlives_every_checkpoint() {
    let store = Store::in_memory(&roots()).unwrap();
    let writer = store.note_writer();
    writer.checkpoint(10, "note", Some(keeping()), |_| false).unwrap();
    // Decided on before the pruning, and written after it: it knows of the last snapshot alone.
    writer.manifest(5, "manifest", keeping()).unwrap();
    writer.checkpoint(20, "note", Some(keeping()), |version| version == 9).unwrap();
    writer.checkpoint(30, "note", Some(keeping()), |version| version == 19).unwrap();
    let reader = store.reader().unwrap();
    let kept = |up_to| reader.snapshot(up_to).unwrap().map(|(version, _, _)| version);
    assert_eq!([kept(u64::MAX), kept(28), kept(18), kept(3)], [Some(29), Some(19), Some(4), None]);
}

#[test]
fn a_states_file_is_checked_by_its_note_and_goes_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path(), &roots(), true).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let mut keep = |grow: u64| {
        for _ in 0..grow {
            let head = log.state.head();
            writer.write(head, log.next()).unwrap();
        }
        let head = log.state.head();
        let sign = |state_b3| snapshot_note(head, state_b3);
        let keeping = Keeping { state: Whole::State(&log.state), sign: &sign };
        let before = store.reader().unwrap().snapshot_note(u64::MAX).unwrap().map(|(version, _)| version);
        store
            .note_writer()
            .checkpoint(head.version + 1, "note", Some(keeping), |v| Some(v) == before)
            .unwrap();
    };
    let states = dir.path().join("states");
    let files = || {
        let names = std::fs::read_dir(&states).unwrap().map(|file| file.unwrap().file_name());
        let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
        names.sort();
        names
    };
    keep(2);
    keep(2);
    // What a crash left: a file that was not finished, and one whose note was never stored.
    std::fs::write(states.join("6.new"), "half").unwrap();
    std::fs::write(states.join("5"), "{}").unwrap();
    keep(2);
    assert_eq!(files(), ["2", "4", "6"], "the one that lost its note just now stays for who reads it");
    keep(2);
    assert_eq!(files(), ["4", "6", "8"]);
    let begins = |version: u64| {
        let reader = store.reader().unwrap();
        Replay::before(&reader, version, &roots(), &log_key()).map(|replay| replay.head().version)
    };
    assert_eq!(begins(9).unwrap(), 8);
    let mut whole = std::fs::read(states.join("8")).unwrap();
    whole[40] ^= 1;
    std::fs::write(states.join("8"), whole).unwrap();
    assert_eq!(begins(9).unwrap(), 6, "one that was changed is left out");
    std::fs::write(states.join("6"), "").unwrap();
    assert_eq!(begins(9).unwrap(), 0, "and one that is cut short");
    std::fs::remove_file(states.join("6")).unwrap();
    assert_eq!(begins(9).unwrap(), 0, "and one that is gone");
}

#[test]
fn a_store_is_opened_anew_by_one_at_a_time() {
    let media = Faulty::default();
    let store = over(&media).unwrap();
    let mut log = Grown::new(&store);
    let (head, changes) = (log.state.head(), log.next());
    let mut writer = store.log_writer().unwrap();
    let handle = || Arc::as_ptr(&store.opened().unwrap());
    store.inner.disk.set_full(true);
    let before = handle();
    // Somebody is at it.
    let other = store.inner.reopening.lock().unwrap();
    assert!(matches!(store.writable(), Err(StoreError::Full)));
    assert_eq!(handle(), before, "no second handle");
    drop(other);
    let left_over = store.reader().unwrap();
    let all = std::thread::scope(|scope| {
        [(); 8].map(|()| scope.spawn(|| store.writable())).map(|tried| tried.join().unwrap())
    });
    assert!(
        all.iter().any(Result::is_ok) && all.iter().all(|one| matches!(one, Ok(()) | Err(StoreError::Full)))
    );
    assert_ne!(handle(), before);
    drop(left_over);
    writer.write(head, changes.clone()).unwrap();
    assert_eq!(store.reader().unwrap().head().unwrap(), log.state.head());
}

#[test]
fn a_damaged_entry_below_a_signed_state_hides_nothing_that_came_after() {
    let store = Store::in_memory(&roots()).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for _ in 0..12 {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    store.spoil(4);
    let damaged = |error| match error {
        RestoreError::Damaged { version, .. } => version,
        error => panic!("{error}"),
    };
    let restored = || store.restore(&roots(), &log_key()).map(drop).map_err(damaged);
    let despite = |version| store.restore_despite(version, &roots(), &log_key()).unwrap();
    assert_eq!(restored(), Err(4));
    assert_eq!(despite(4).0.head().version, 3, "nothing vouches for what came after");
    let head = log.state.head();
    let sign = |state_b3| snapshot_note(head, state_b3);
    let keeping = Keeping { state: Whole::State(&log.state), sign: &sign };
    let size = head.version + 1;
    let checkpoint = ron_log::Checkpoint { origin: roots().log, size, root: log.tree.root() };
    let note = checkpoint.sign(&key(9)).to_string();
    store.note_writer().checkpoint(size, &note, Some(keeping), |_| false).unwrap();
    assert_eq!(restored(), Err(4), "it is told all the same");
    let (state, tree, last) = despite(4);
    assert_eq!((state.head(), tree.root(), last.hash()), (head, log.tree.root(), head.hash));
    assert_eq!(state, log.state);
    store.spoil(12);
    assert_eq!(despite(4).0.head().version, 3, "HEAD's own entry must be there");
}
