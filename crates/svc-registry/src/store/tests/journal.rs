//! The journal: what it has survives every cut, and what is wrong with it is told.

use super::super::journal::{SIZE, decode, encode};
use super::*;

/// A store's two media.
struct Pair {
    database: Faulty,
    journal: Faulty,
}

impl Pair {
    fn new() -> Pair {
        Pair::with_pages(SIZE / 4096)
    }

    /// With a journal of so many pages.
    fn with_pages(count: u64) -> Pair {
        let journal = Faulty::default();
        journal.set_len(count * 4096).unwrap();
        Pair { database: Faulty::default(), journal }
    }

    fn open(&self) -> Result<Store, OpenError> {
        Store::over(Disk::over(self.database.clone()).with_journal(self.journal.clone()), &roots())
    }

    fn after_power_cut(&self, seed: u64) -> Pair {
        Pair {
            database: self.database.after_power_cut(seed),
            journal: self.journal.after_power_cut(seed + 1),
        }
    }

    fn flushes(&self) -> (u64, u64) {
        let count = |media: &Faulty| media.0.lock().unwrap().flushes;
        (count(&self.database), count(&self.journal))
    }

    fn restored(&self) -> Restored {
        self.open().unwrap().restore(&roots(), &log_key()).unwrap()
    }
}

/// A store with so many batches in its journal.
fn grown(batches: u64) -> (Pair, Grown) {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for _ in 0..batches {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    // A crash: neither is closed.
    (media.after_power_cut(0), log)
}

#[test]
fn what_was_acknowledged_through_the_journal_survives_every_power_cut() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let before = media.flushes();
    for version in 1..=300u64 {
        let head = log.state.head();
        writer.write(head, log.next()).unwrap();
        assert_eq!(store.reader().unwrap().head().unwrap(), log.state.head());
        if version % 70 == 0 {
            store.change(|_| {});
        }
        if version % 23 == 0 {
            for seed in 0..2 {
                let restored = media.after_power_cut(version * 31 + seed).restored();
                assert_eq!(restored.state, log.state);
                assert_eq!(restored.tree.root(), log.tree.root());
            }
        }
    }
    let after = media.flushes();
    assert_eq!(
        (after.0 - before.0, after.1 - before.1),
        (8, 300),
        "one flush a batch, two for anything else"
    );
    // A batch whose flush never came is there as a whole or not at all, and nobody was shown it.
    let (head, changes) = (log.state.head(), log.next());
    media.journal.fail_flushes(true);
    assert!(matches!(writer.write(head, changes.clone()), Err(StoreError::FlushFailed)));
    assert_eq!(store.reader().unwrap().head().unwrap(), head);
    for seed in 0..16 {
        let found = media.after_power_cut(seed).restored().state.head();
        assert!([head, log.state.head()].contains(&found), "seed {seed}");
    }
}

#[test]
fn a_half_that_is_full_is_used_again_once_the_database_was_flushed() {
    let media = Pair::with_pages(24);
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let before = media.flushes();
    // Each takes one page.
    for version in 1..=600_u64 {
        writer.write(log.state.head(), log.next()).unwrap();
        if version % 7 == 0 {
            assert_eq!(media.after_power_cut(version).restored().state, log.state);
        }
    }
    let after = media.flushes();
    assert!((30..90).contains(&(after.0 - before.0)), "when both are full: {before:?} {after:?}");
    assert_eq!(after.1 - before.1, 600);
    // A record that is needed is missed, in whichever half it is, unless it is the last.
    store.change(|_| {});
    for _ in 0..18 {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    let mut missed = [0, 0];
    for page in 0..24 {
        let media = media.after_power_cut(1);
        media.journal.set(|media| media.bytes[page * 4096] ^= 1);
        match media.open() {
            Ok(store) => {
                let found = store.reader().unwrap().head().unwrap().version;
                assert!(found + 1 >= log.state.head().version, "{page}: {found}");
            }
            Err(error) => {
                assert!(error.to_string().contains("registry.journal is damaged"), "{page}: {error}");
                missed[page / 12] += 1;
            }
        }
    }
    assert!(missed.iter().all(|missed| *missed > 0), "{missed:?}");
}

#[test]
fn no_batch_waits_while_the_database_is_written_unless_both_halves_are_full() {
    let media = Pair::with_pages(200);
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let opened = store.opened().unwrap();
    let writing = opened.behind.taking_in().unwrap();
    let mut written = 0;
    while opened.flush_wanted().is_none() {
        writer.write(log.state.head(), log.next()).unwrap();
        written += 1;
    }
    for _ in 0..written / 2 {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    assert_eq!(media.after_power_cut(2).restored().state, log.state);
    let flushes = media.flushes();
    drop(writing);
    writer.settle(false);
    let begun = Instant::now();
    while opened.flush_wanted().is_some() {
        assert!(begun.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(media.flushes().0 > flushes.0);
    assert_eq!(media.after_power_cut(3).restored().state, log.state);
    // What does not fit into a half goes into the database with all before it.
    let (head, mut changes) = (log.state.head(), log.next());
    let proposal = changes.entries[0].1.clone();
    changes.proposals = vec![(proposal, 1, u64::MAX); 5000];
    let flushes = media.flushes();
    writer.write(head, changes).unwrap();
    assert_eq!(media.flushes().1, flushes.1);
    assert_eq!(media.after_power_cut(4).restored().state, log.state);
    writer.write(log.state.head(), log.next()).unwrap();
    assert_eq!(media.after_power_cut(5).restored().state, log.state);
}

#[test]
fn a_full_disk_takes_back_what_the_journal_could_not_take() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    writer.write(log.state.head(), log.next()).unwrap();
    let head = log.state.head();
    media.journal.fill(true);
    let changes = log.next();
    for _ in 0..2 {
        assert!(matches!(writer.write(head, changes.clone()), Err(StoreError::Full)));
        assert_eq!(store.reader().unwrap().head().unwrap(), head, "nothing of it was kept");
    }
    media.journal.fill(false);
    store.writable().unwrap();
    writer.write(head, changes.clone()).unwrap();
    assert_eq!(media.after_power_cut(1).restored().state, log.state);
}

#[test]
fn a_start_on_a_full_disk_reads_what_the_journal_has_and_writes_once_there_is_room() {
    let (media, mut log) = grown(5);
    media.database.fill(true);
    media.journal.fill(true);
    let before = media.database.0.lock().unwrap().bytes.clone();
    let store = media.open().unwrap();
    let restored = store.restore(&roots(), &log_key()).unwrap();
    assert_eq!(restored.state, log.state);
    let (head, changes) = (log.state.head(), log.next());
    let mut writer = store.log_writer().unwrap();
    for _ in 0..2 {
        assert!(matches!(writer.write(head, changes.clone()), Err(StoreError::Full)));
        assert_eq!(store.reader().unwrap().head().unwrap(), head, "it is still read");
    }
    assert!(media.database.0.lock().unwrap().bytes.starts_with(&before), "nothing was written");
    media.database.fill(false);
    media.journal.fill(false);
    writer.write(head, changes.clone()).unwrap();
    assert_eq!(store.reader().unwrap().head().unwrap(), log.state.head());
    assert_eq!(media.after_power_cut(3).restored().state, log.state);
}

#[test]
fn a_batch_that_goes_on_from_elsewhere_is_refused_before_anything_is_written() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for settled in [false, true] {
        writer.write(log.state.head(), log.next()).unwrap();
        if settled {
            store.reader().unwrap();
        }
        assert_eq!(is_behind(&store), !settled);
        let (head, changes, flushes) = (log.state.head(), log.next(), media.flushes());
        assert!(matches!(writer.write(log.state.head(), changes.clone()), Err(StoreError::HeadMoved)));
        assert_eq!(media.flushes(), flushes);
        assert_eq!(media.after_power_cut(1).restored().state.head(), head, "a start does not find it");
        writer.write(head, changes).unwrap();
        assert_eq!(media.after_power_cut(1).restored().state, log.state);
    }
}

fn is_behind(store: &Store) -> bool {
    !store.opened().unwrap().behind.queue().unwrap().is_empty()
}

#[test]
fn the_database_takes_in_many_batches_at_once_and_whoever_reads_sees_all() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let mut ids = Vec::new();
    let mut write = |writer: &mut LogWriter| {
        let (head, changes) = (log.state.head(), log.next());
        ids.push(changes.entries[0].1.b3());
        writer.write(head, changes).unwrap();
        writer.settle(false);
    };
    for version in 1..=255 {
        write(&mut writer);
        assert!(is_behind(&store));
        assert_eq!(store.settled().unwrap().head().unwrap().version, 0);
        assert_eq!(store.settled_to(version).unwrap().1, 0, "what is behind is not looked for");
    }
    // Enough of them.
    write(&mut writer);
    let begun = Instant::now();
    while is_behind(&store) {
        assert!(begun.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert_eq!(store.settled_to(256).unwrap().1, 256);
    write(&mut writer);
    assert!(is_behind(&store));
    writer.settle(false);
    assert!(is_behind(&store), "one is not enough");
    for (id, version) in ids.iter().zip(1..) {
        assert_eq!(store.committed(*id).unwrap(), Some(version), "in the database or on its way there");
    }
    assert!(is_behind(&store), "that did not need it");
    let reader = store.reader().unwrap();
    assert!(!is_behind(&store));
    assert_eq!(reader.head().unwrap(), log.state.head());
    assert_eq!(store.committed(ids[256]).unwrap(), Some(257));
    let restored = store.restore(&roots(), &log_key()).unwrap();
    assert_eq!((restored.state, restored.tree.root()), (log.state.clone(), log.tree.root()));
    assert_eq!(media.after_power_cut(5).restored().state, log.state);
}

/// Commits entries, and asks again and again what became of each payload, also after a power cut.
fn check_index(store: &Store, reopen: &dyn Fn(u64) -> Store) {
    let mut log = Grown::new(store);
    let mut writer = store.log_writer().unwrap();
    let mut ids = vec![roots().genesis().1.b3()];
    let check = |store: &Store, ids: &[ron_log::B3]| {
        for (id, version) in ids.iter().zip(0..) {
            assert_eq!(store.committed(*id).unwrap(), Some(version), "of {}", ids.len());
        }
        assert_eq!(store.committed(ron_log::B3::ZERO).unwrap(), None);
    };
    for version in 1..=1000 {
        let (head, changes) = (log.state.head(), log.next());
        ids.push(changes.entries[0].1.b3());
        writer.write(head, changes).unwrap();
        if version % 37 == 0 {
            store.reader().unwrap();
        }
        if version % 90 == 0 {
            check(store, &ids);
            let oldest = store.opened().unwrap().index().unwrap().oldest().unwrap();
            assert!(oldest + 400 > version, "a part stays in memory");
            check(&reopen(version), &ids);
        }
    }
    let notes = store.note_writer();
    notes.manifest(990, "note", keeping()).unwrap();
    assert_eq!(notes.prune(2000).unwrap(), 990);
    check(store, &ids);
    store.change(|_| {});
    let reopened = reopen(1);
    assert_eq!(reopened.reader().unwrap().entry(989).unwrap(), None);
    check(&reopened, &ids);
    // As a build left it that wrote each with its entry.
    let opened = store.opened().unwrap();
    opened.write_index(&opened.behind.taking_in().unwrap(), true).unwrap();
    store.change(|transaction| {
        transaction.open_table(META).unwrap().remove(INDEXED).unwrap();
    });
    let reopened = reopen(2);
    assert_eq!(reopened.opened().unwrap().index().unwrap().oldest(), None, "nothing is read again");
    check(&reopened, &ids);
}

#[test]
fn what_a_payload_became_is_known_after_every_cut_also_when_the_entry_was_pruned() {
    let media = Pair::new();
    check_index(&media.open().unwrap(), &|seed| media.after_power_cut(seed).open().unwrap());
    let media = Faulty::default();
    check_index(&over(&media).unwrap(), &|seed| over(&media.after_power_cut(seed)).unwrap());
}

#[test]
fn what_changes_one_proposal_again_and_again_is_taken_in_in_its_order() {
    let store = Pair::new().open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let (head, proposal) = (log.state.head(), log.next().entries[0].1.clone());
    let id = proposal.b3();
    let proposed = || Changes { proposals: vec![(proposal.clone(), 1, u64::MAX)], ..Changes::default() };
    let ended = || Changes { ended: vec![(id, Some((Gone::Withdrawn, 6)))], ..Changes::default() };
    let approved =
        || Changes { approvals: vec![(id, Approval::sign("s1", &key(1), id, 7))], ..Changes::default() };
    for changes in [proposed(), approved(), ended(), proposed()] {
        writer.write(head, changes).unwrap();
    }
    let reader = store.reader().unwrap();
    let kept = reader.proposal(id).unwrap().unwrap();
    assert!(kept.approvals.is_empty(), "those of before it was withdrawn");
    assert_eq!(reader.gone(id).unwrap(), None);
    for changes in [approved(), ended()] {
        writer.write(head, changes).unwrap();
    }
    let reader = store.reader().unwrap();
    assert_eq!(reader.proposal(id).unwrap(), None);
    assert_eq!(reader.gone(id).unwrap(), Some((Gone::Withdrawn, 6)));
}

#[test]
fn after_a_panic_over_the_database_nothing_is_written_and_a_start_has_all() {
    for behind in [true, false] {
        let media = Pair::new();
        let store = media.open().unwrap();
        let mut log = Grown::new(&store);
        let mut writer = store.log_writer().unwrap();
        writer.write(log.state.head(), log.next()).unwrap();
        if !behind {
            store.reader().unwrap();
        }
        let (head, opened) = (log.state.head(), store.opened().unwrap());
        std::thread::scope(|scope| {
            let panic = || {
                let _alone = opened.behind.taking_in().unwrap();
                panic!("a page makes no sense");
            };
            assert!(scope.spawn(panic).join().is_err());
        });
        let damaged = |error: StoreError| error.is_damage();
        assert!(writer.write(head, log.next()).is_err_and(damaged));
        assert_eq!(store.reader().is_err_and(damaged), behind, "who would go on from there is told");
        assert_eq!(store.good_reader().unwrap().head().unwrap().version, u64::from(!behind));
        assert_eq!(media.after_power_cut(1).restored().state.head(), head);
    }
}

#[test]
fn what_a_full_disk_keeps_from_the_database_is_read_all_the_same() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for _ in 0..5 {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    assert!(is_behind(&store));
    media.database.fill(true);
    let note = || store.note_writer().former_manifest(1, "note");
    assert!(matches!(note(), Err(StoreError::Full)));
    assert_eq!(store.reader().unwrap().head().unwrap(), log.state.head(), "what was acknowledged is read");
    let (head, changes) = (log.state.head(), log.next());
    assert!(matches!(writer.write(head, changes.clone()), Err(StoreError::Full)));
    assert_eq!(store.reader().unwrap().head().unwrap(), head);
    media.database.fill(false);
    writer.write(head, changes).unwrap();
    note().unwrap();
    assert_eq!(store.reader().unwrap().head().unwrap(), log.state.head());
    assert_eq!(media.after_power_cut(3).restored().state, log.state);
}

#[test]
fn a_damaged_record_is_told_unless_it_is_the_last() {
    let (media, log) = grown(5);
    let restored_with = |at: usize| {
        let media = media.after_power_cut(0);
        media.journal.set(|media| media.bytes[at] ^= 1);
        media.open().map(|store| store.reader().unwrap().head().unwrap().version)
    };
    assert_eq!(media.after_power_cut(0).restored().state, log.state);
    assert_eq!(restored_with(SIZE as usize - 1).unwrap(), 5, "nothing is there");
    for at in [0, 9, 17, 30, 100] {
        let said = restored_with(at).unwrap_err().to_string();
        assert!(said.contains("registry.journal is damaged") && said.contains("import"), "{at}: {said}");
    }
    let last = 4 * 4096;
    assert_eq!(restored_with(last + 100).unwrap(), 4, "as after a write that was cut");
}

#[test]
fn a_journal_of_another_store_is_none_and_one_that_goes_on_elsewhere_is_told() {
    let (media, _) = grown(5);
    let others = TrustRoots { log: "other.example/log".into(), ..roots() };
    let other = Disk::over(Faulty::default()).with_journal(media.journal.clone());
    assert_eq!(Store::over(other, &others).unwrap().reader().unwrap().head().unwrap().version, 0);
    // It was begun again after the third batch, and the database is one from before.
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let old = media.database.after_power_cut(0);
    for version in 1..=5 {
        writer.write(log.state.head(), log.next()).unwrap();
        if version == 3 {
            store.change(|_| {});
        }
    }
    assert_eq!(media.after_power_cut(0).restored().state, log.state);
    let said = Pair { database: old, ..media.after_power_cut(0) }.open().unwrap_err().to_string();
    assert!(said.contains("begins after the database's last change"), "{said}");
}

#[test]
fn a_batch_is_read_as_it_was_written_and_no_part_of_one_is_one() {
    let store = Store::in_memory(&roots()).unwrap();
    let mut log = Grown::new(&store);
    let head = log.state.head();
    let first = log.next();
    let mut changes = log.next();
    let proposal = first.entries[0].1.clone();
    let id = proposal.b3();
    changes.proposals.push((proposal, 1, u64::MAX));
    changes.approvals.push((id, Approval::sign("s1", &key(1), id, 7)));
    changes.ended = vec![(id, None), (id, Some((Gone::Expired, 5))), (id, Some((Gone::Withdrawn, 6)))];
    changes.forgotten = vec![id, ron_log::B3::ZERO];
    let body = encode(head, &changes);
    let (found, read) = decode(&body).unwrap();
    assert_eq!(found, head);
    assert_eq!(format!("{read:?}"), format!("{changes:?}"));
    for len in 0..body.len() {
        assert!(decode(&body[..len]).is_none(), "{len}");
    }
    assert!(decode(&[body.as_slice(), &[0]].concat()).is_none());
}

#[test]
fn a_failed_flush_of_the_database_leaves_the_journal_as_it_is() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for _ in 0..3 {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    let head = log.state.head();
    media.database.fail_flushes(true);
    let note = store.note_writer();
    assert!(matches!(note.former_manifest(1, "note"), Err(StoreError::FlushFailed)));
    // Who was past the question whether it may write, and waited for the journal meanwhile.
    let opened = store.opened().unwrap();
    assert!(matches!(opened.append(store.disk(), head, log.next()), Err(StoreError::Stopped)));
    assert!(matches!(
        opened.write(store.disk(), Durability::Immediate, |_| Ok(())),
        Err(StoreError::Stopped)
    ));
    drop(opened);
    assert_eq!(store.reader().unwrap().head().unwrap(), head, "what was acknowledged is read");
    let writes = || media.database.0.lock().unwrap().unflushed.len();
    let before = writes();
    drop((writer, note));
    store.close();
    drop(store);
    assert_eq!(writes(), before, "the end writes nothing over what was good");
    for seed in 0..8 {
        assert_eq!(media.after_power_cut(seed).restored().state.head(), head, "seed {seed}");
    }
}

#[test]
fn nothing_is_acknowledged_into_memory_or_by_a_store_that_was_opened_anew() {
    let (media, mut log) = grown(2);
    media.database.fill(true);
    media.journal.fill(true);
    let store = media.open().unwrap();
    let (head, changes) = (log.state.head(), log.next());
    let held = store.opened().unwrap();
    assert!(matches!(held.append(store.disk(), head, changes.clone()), Err(StoreError::Full)));
    media.database.fill(false);
    media.journal.fill(false);
    store.writable().unwrap();
    assert!(matches!(held.append(store.disk(), head, changes.clone()), Err(StoreError::Full)));
    let mut writer = store.log_writer().unwrap();
    writer.write(head, changes).unwrap();
    assert_eq!(media.after_power_cut(1).restored().state, log.state);
}

#[test]
fn a_flush_that_fails_for_want_of_room_is_a_failed_flush() {
    let media = Pair::new();
    let store = media.open().unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    let (head, changes) = (log.state.head(), log.next());
    media.journal.set(|media| media.flush_finds_no_room = true);
    assert!(matches!(writer.write(head, changes), Err(StoreError::FlushFailed)));
    assert!(matches!(store.writable(), Err(StoreError::Stopped)), "whether it is there is not known");
    assert_eq!(store.reader().unwrap().head().unwrap(), head);
}

/// The folder of a store with so many batches as it is at a crash, and once it was closed.
fn folders(batches: u64) -> (tempfile::TempDir, tempfile::TempDir) {
    let (dir, crashed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = Store::open(dir.path(), &roots(), true).unwrap();
    let mut log = Grown::new(&store);
    let mut writer = store.log_writer().unwrap();
    for _ in 0..batches {
        writer.write(log.state.head(), log.next()).unwrap();
    }
    for name in [FILE, "registry.journal"] {
        std::fs::copy(dir.path().join(name), crashed.path().join(name)).unwrap();
    }
    drop(writer);
    store.close();
    (crashed, dir)
}

#[test]
fn what_the_journal_has_is_done_also_by_a_start_that_flushes_nothing() {
    let (crashed, _) = folders(5);
    for fsync in [false, true, false] {
        let store = Store::open(crashed.path(), &roots(), fsync).unwrap();
        let mut log = Grown::new(&store);
        let version = log.state.head().version;
        assert!(version >= 5, "{version}");
        store.log_writer().unwrap().write(log.state.head(), log.next()).unwrap();
        assert_eq!(store.restore(&roots(), &log_key()).unwrap().state, log.state);
        store.close();
    }
}

#[test]
fn a_journal_that_is_gone_or_cut_is_told_unless_the_store_was_closed() {
    for cut in [None, Some(0), Some(4096)] {
        let (crashed, closed) = folders(5);
        for (folder, good) in [(&crashed, false), (&closed, true)] {
            let journal = folder.path().join("registry.journal");
            match cut {
                None => std::fs::remove_file(&journal).unwrap(),
                Some(len) => {
                    std::fs::File::options().write(true).open(&journal).unwrap().set_len(len).unwrap()
                }
            }
            for fsync in [false, true] {
                let opened = Store::open(folder.path(), &roots(), fsync);
                assert_eq!(opened.is_ok(), good, "{cut:?} {fsync}: {opened:?}");
                if let Ok(store) = &opened {
                    assert_eq!(store.reader().unwrap().head().unwrap().version, 5);
                    store.close();
                }
            }
            let said = Store::look(folder.path(), &roots()).err().map(|error| error.to_string());
            assert_eq!(said.is_none(), good, "{said:?}");
            assert!(said.is_none_or(|said| said.contains("acknowledged last")));
        }
    }
}
