//! What the registry keeps: entries, payloads, tiles, proposals, notes and HEAD, in one embedded database.
//!
//! A [`Store`] reads. Writing takes one of two types: a [`LogWriter`], of which there is one and which the
//! Committer owns, moves HEAD; a [`NoteWriter`] adds signed notes and lets go of what they cover, and cannot
//! touch HEAD. All calls block: they belong on a thread that may.

mod behind;
mod disk;
mod index;
mod journal;
mod read;
mod restore;
mod states;
#[cfg(test)]
mod tests;
mod write;

pub use disk::Disk;
use read::Shown;
pub(crate) use read::changes_signers;
pub use read::{Gone, Kept, Reader};
pub use restore::{Replay, RestoreError, Restored, good_snapshot};
pub(crate) use restore::{damaged, read_back};
pub use states::{Keeping, Whole};
#[cfg(test)]
pub(crate) use tests::Faulty;
pub use write::{Changes, LogWriter, NoteWriter};

use crate::hand::Hand;
use arc_swap::{ArcSwap, ArcSwapOption};
use behind::{Batch, Behind, TakingIn, panicked};
use index::Index;
use journal::Journal;
use redb::{Database, Durability, TableDefinition, WriteTransaction};
use ron_log::{Head, TrustRoots};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Bytes of pages kept in memory.
const CACHE: usize = 64 << 20;
/// How long a close waits for those who read.
const CLOSE_PATIENCE: Duration = Duration::from_millis(500);
/// Room that must be left on the disk before anything is written.
const RESERVE: u64 = 1 << 20;

/// The database's file in the registry's folder.
pub const FILE: &str = "registry.redb";

/// By version.
const ENTRIES: TableDefinition<u64, &[u8]> = TableDefinition::new("entries");
/// By version; the record names the hash.
const PAYLOADS: TableDefinition<u64, &[u8]> = TableDefinition::new("payloads");
/// Level and place to hashes.
const TILES: TableDefinition<(u8, u64), &[u8]> = TableDefinition::new("tiles");
/// The hash of a committed payload to its version; the newest are in memory alone.
const COMMITTED: TableDefinition<&[u8], u64> = TableDefinition::new("committed");
/// The hash of a pending payload to when it came, when it ends, and its bytes.
const PROPOSALS: TableDefinition<&[u8], (u64, u64, &[u8])> = TableDefinition::new("proposals");
/// The hash of a pending payload and a signer's name to the approval.
const APPROVALS: TableDefinition<&[u8], &[u8]> = TableDefinition::new("approvals");
/// The hash of a payload that was withdrawn or has ended to which, and when.
const GONE: TableDefinition<&[u8], (u8, u64)> = TableDefinition::new("gone");
/// Tree size to note.
const CHECKPOINTS: TableDefinition<u64, &[u8]> = TableDefinition::new("checkpoints");
/// Version to note; the state itself is a file.
const SNAPSHOTS: TableDefinition<u64, &[u8]> = TableDefinition::new("snapshot_notes");
/// First version kept to note.
const MANIFESTS: TableDefinition<u64, &[u8]> = TableDefinition::new("manifests");
/// Single values: the roots, HEAD, the first version kept, bytes of records and payloads, the last batch that came
/// through the journal.
const META: TableDefinition<&str, &[u8]> = TableDefinition::new("meta");

const ROOTS: &str = "roots";
const HEAD: &str = "head";
const MIN_VERSION: &str = "min_version";
const KEPT_BYTES: &str = "kept_bytes";
const JOURNALED: &str = "journaled";
/// The first version whose payload may not be in the table of those committed.
const INDEXED: &str = "indexed";
/// One while there may be batches in the journal that the database has not.
const IN_JOURNAL: &str = "in_journal";

/// Why the store did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// Nothing was written.
    #[error("no room is left for the registry's store")]
    Full,
    /// What was being written may be there or not.
    #[error("a flush failed; nothing is written before a restart")]
    FlushFailed,
    /// A flush failed before; nothing was written.
    #[error("writing has stopped after a failed flush, until a restart")]
    Stopped,
    #[error("the store is closed")]
    Closed,
    /// HEAD is not what the writer believes; nothing was written.
    #[error("HEAD has moved")]
    HeadMoved,
    #[error("the store: {0}")]
    Database(Box<redb::Error>),
    /// What was read is not what was written.
    #[error("{0}")]
    Damaged(String),
    /// The same of one entry.
    #[error("version {version}: {what}")]
    DamagedEntry { version: u64, what: &'static str },
}

impl StoreError {
    /// Whether what is stored is not what was stored, rather than not to be had now.
    pub fn is_damage(&self) -> bool {
        match self {
            StoreError::Damaged(_) | StoreError::DamagedEntry { .. } => true,
            StoreError::Database(error) => matches!(**error, redb::Error::Corrupted(_)),
            _ => false,
        }
    }

    fn of(error: impl Into<redb::Error>) -> StoreError {
        StoreError::Database(Box::new(error.into()))
    }

    fn of_io(error: std::io::Error) -> StoreError {
        StoreError::of(redb::Error::Io(error))
    }
}

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    #[error("{0}: {1}")]
    File(String, std::io::Error),
    #[error("{0}")]
    Store(#[from] StoreError),
    #[error("the store is that of trust roots {0}; {1} were given")]
    OtherRoots(ron_log::B3, ron_log::B3),
}

/// Does what opens and reads the store of a folder. redb panics where a page makes no sense to it; whatever was used
/// then is not used again, so that it can be told as the damage it is.
pub fn reading<T, E: From<StoreError>>(dir: &Path, read: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
    let read = catch_unwind(AssertUnwindSafe(read));
    read.unwrap_or_else(|_panic| Err(damaged_file(dir, "").into()))
}

/// Whether every page that the database of a folder uses is what was written, by the checksums it keeps of them. Reads all
/// of it, and changes nothing there.
pub fn has_good_pages(dir: &Path) -> Result<bool, OpenError> {
    let failed = |error| OpenError::File(dir.display().to_string(), error);
    let (handle, _) = Disk::looked_at(&dir.join(FILE)).map_err(failed)?.handle();
    let checked = reading(dir, || {
        let database = Database::builder().set_cache_size(CACHE).create_with_backend(handle);
        database.map_err(StoreError::of)?.check_integrity().map_err(StoreError::of)
    });
    match checked {
        Err(StoreError::Database(cause)) if is_of_file(&cause) => Ok(false),
        Err(error) if error.is_damage() => Ok(false),
        checked => Ok(checked?),
    }
}

fn damaged_file(dir: &Path, cause: &str) -> StoreError {
    let file = dir.join(FILE);
    let advice = "make the folder anew from an export with `ron registry import`, or from a copy";
    StoreError::Damaged(format!("{} is damaged: {advice}{cause}", file.display()))
}

/// Whether it is the file that is at fault: it is no database, of no version that there is, or was cut short.
fn is_of_file(cause: &redb::Error) -> bool {
    use std::io::ErrorKind::{InvalidData, UnexpectedEof};
    match cause {
        redb::Error::Corrupted(_) | redb::Error::UpgradeRequired(_) => true,
        redb::Error::Io(error) => matches!(error.kind(), InvalidData | UnexpectedEof),
        _ => false,
    }
}

/// A file that redb does not take for one of its own is damaged too, and says so in our words.
fn of_folder(dir: &Path, opened: Result<Store, OpenError>) -> Result<Store, OpenError> {
    opened.map_err(|error| match error {
        OpenError::Store(StoreError::Database(cause)) if is_of_file(&cause) => {
            damaged_file(dir, &format!(" ({cause})")).into()
        }
        error => error,
    })
}

/// The store, for reading. Cloning is cheap.
#[derive(Clone, Debug)]
pub struct Store {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    disk: Disk,
    /// What it was made with.
    roots: TrustRoots,
    /// None once it was closed.
    opened: ArcSwapOption<Opened>,
    /// Somebody has the writer of the log.
    writer_taken: AtomicBool,
    /// Bytes of the write that found no room: until there is as much, the disk counts as full.
    short_of: AtomicU64,
    /// Held by who opens the database anew.
    reopening: Mutex<()>,
    /// Until when writes are held up: what an operator may do to see a slow disk.
    stalled_until: ArcSwapOption<Instant>,
    /// Gives the database what is behind, when it was asked to.
    hand: Hand,
    asked: AtomicBool,
}

/// The database as opened once.
#[derive(Debug)]
struct Opened {
    database: Database,
    /// What readers see of it.
    shown: ArcSwap<Shown>,
    /// Held by whoever writes a batch.
    journal: Mutex<Option<Journal>>,
    /// The last batch of the journal that is in the database, and the last one that is flushed there.
    taken_in: AtomicU64,
    flushed: AtomicU64,
    /// What is durable and not in the database yet.
    behind: Behind,
    /// Changed by whoever has the right to write the database.
    index: Mutex<Index>,
    ended: Arc<AtomicBool>,
    /// Nothing reaches the disk from here.
    held: bool,
}

impl Opened {
    fn new(disk: &Disk) -> Result<Opened, StoreError> {
        let (handle, ended) = disk.handle();
        let database = Database::builder().set_cache_size(CACHE).create_with_backend(handle);
        let database = database.map_err(StoreError::of)?;
        let shown = ArcSwap::from_pointee(Shown::of(&database)?);
        Ok(Opened {
            database,
            shown,
            journal: Mutex::new(None),
            taken_in: AtomicU64::new(0),
            flushed: AtomicU64::new(0),
            behind: Behind::default(),
            index: Mutex::default(),
            ended,
            held: false,
        })
    }

    /// Opens what lies on a disk, or begins a store there, and does what the journal has.
    fn at(disk: &Disk, roots: &TrustRoots) -> Result<Opened, OpenError> {
        let opened = Opened::new(disk)?;
        let canonical = roots.canonical();
        let known = write::prepare(&opened.database, &canonical, roots)?;
        if known != canonical.as_bytes() {
            return Err(OpenError::OtherRoots(ron_log::B3::of(&known), roots.b3()));
        }
        if disk.journal().is_none() {
            opened.needs_no_journal(disk)?;
        }
        let mut opened = opened.recover(disk, roots.b3())?;
        opened.index = Mutex::new(opened.shown.load().index()?);
        Ok(opened)
    }

    /// The same where the disk has no room for what that would write: it stays in memory, from where all can be read.
    /// Nothing is written to it, since a full disk is opened anew before.
    fn held(disk: &Disk, roots: &TrustRoots) -> Result<Opened, OpenError> {
        let opened = Opened::at(&disk.held().map_err(StoreError::of_io)?, roots)?;
        let opened = Opened { held: true, ..opened };
        disk.set_full(true);
        tracing::error!(
            "the disk is full: the registry is read from memory where it would have been written"
        );
        Ok(opened)
    }

    /// Refuses to go on without a journal that may have something.
    fn needs_no_journal(&self, disk: &Disk) -> Result<(), StoreError> {
        self.show()?;
        if Reader::new(self.shown.load_full(), disk).in_journal()? {
            return Err(journal::damaged(
                "it is missing, cut or of another build, and has what was acknowledged last",
            ));
        }
        Ok(())
    }

    /// Does what the journal has and the database has not.
    fn recover(self, disk: &Disk, roots: ron_log::B3) -> Result<Opened, StoreError> {
        self.show()?;
        let reader = Reader::new(self.shown.load_full(), disk);
        let Some(medium) = disk.journal() else { return Ok(self) };
        let last = reader.journaled()?;
        let mut done = 0;
        let mut journal = Journal::recover(medium, roots, last, |number, head, changes| {
            done += 1;
            let did = write::transact(&self.database, Durability::None, |transaction| {
                write::apply(transaction, &[(head, changes)])?;
                write::journaled(transaction, number)
            });
            did.map_err(|error| match error {
                StoreError::HeadMoved => {
                    journal::damaged("it goes on from another entry than the database's last")
                }
                error => error,
            })
        })?;
        if done > 0 {
            tracing::info!(batches = done, "what the registry's journal had was done");
        }
        if done > 0 || reader.in_journal()? != disk.flushes() {
            let used = disk.flushes();
            write::transact(&self.database, Durability::Immediate, |transaction| {
                write::in_journal(transaction, used)
            })?;
            if disk.flush_failed() {
                return Err(StoreError::FlushFailed);
            }
            self.show()?;
        }
        journal.begin_again();
        let [taken_in, flushed] = [journal.last(); 2].map(AtomicU64::new);
        let journal = Mutex::new(Some(journal).filter(|_| disk.flushes()));
        Ok(Opened { journal, taken_in, flushed, ..self })
    }

    /// Readers see what was written last.
    fn show(&self) -> Result<(), StoreError> {
        self.shown.store(Arc::new(Shown::of(&self.database)?));
        Ok(())
    }

    /// Takes in what is behind, all of it in one transaction.
    fn catch_up(&self) -> Result<(), StoreError> {
        if self.behind.queue()?.is_empty() {
            return Ok(());
        }
        self.take_in(&self.behind.taking_in()?)
    }

    fn take_in(&self, alone: &TakingIn<'_>) -> Result<(), StoreError> {
        let taken = self.write_index(alone, false).and_then(|()| self.take_in_batches(alone));
        self.behind.queue()?.failed = taken.is_err();
        taken
    }

    fn take_in_batches(&self, _alone: &TakingIn<'_>) -> Result<(), StoreError> {
        let batches = self.behind.queue()?.batches();
        let Some(last) = batches.last() else { return Ok(()) };
        write::transact(&self.database, Durability::None, |transaction| {
            let batches: Vec<_> = batches.iter().map(|batch| (batch.expected, &batch.changes)).collect();
            write::apply(transaction, &batches)?;
            write::journaled(transaction, last.number)
        })?;
        // What is in the database is here from then on, whoever may see it.
        batches.iter().try_for_each(|batch| self.add_to_index(&batch.changes))?;
        self.show()?;
        self.taken_in.store(last.number, Ordering::Release);
        self.behind.queue()?.forget(batches.len());
        Ok(())
    }

    fn index(&self) -> Result<MutexGuard<'_, Index>, StoreError> {
        self.index.lock().map_err(panicked)
    }

    fn add_to_index(&self, changes: &Changes) -> Result<(), StoreError> {
        let mut index = self.index()?;
        let entries = changes.entries.iter();
        entries.for_each(|(entry, proposal)| index.add(proposal.b3(), entry.record().version));
        Ok(())
    }

    /// Writes what of the index is more than may stay in memory, or all of it.
    fn write_index(&self, _alone: &TakingIn<'_>, all: bool) -> Result<(), StoreError> {
        let leaving = self.index()?.leaving(all);
        if leaving.is_nothing() {
            return Ok(());
        }
        write::transact(&self.database, Durability::None, |transaction| leaving.write(transaction))?;
        self.show()?;
        self.index()?.left(&leaving);
        Ok(())
    }

    /// Writes the index if entries below a version are in memory alone: without them it could not be made again.
    fn index_below(&self, disk: &Disk, version: u64) -> Result<(), StoreError> {
        let alone = self.behind.taking_in()?;
        self.may_write(disk)?;
        self.take_in(&alone)?;
        let needed = self.index()?.oldest().is_some_and(|oldest| oldest < version);
        if needed { self.write_index(&alone, true) } else { Ok(()) }
    }

    /// One transaction of the database, all or nothing, after all that is behind. Batches go on into the journal
    /// meanwhile.
    fn write(
        &self,
        disk: &Disk,
        durability: Durability,
        act: impl Fn(&WriteTransaction) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let alone = self.behind.taking_in()?;
        self.may_write(disk)?;
        self.write_alone(&alone, disk, durability, act)
    }

    /// While somebody waited to write, that may have ended.
    fn may_write(&self, disk: &Disk) -> Result<(), StoreError> {
        if disk.flush_failed() {
            return Err(StoreError::Stopped);
        }
        if self.held || self.ended.load(Ordering::Acquire) {
            return Err(StoreError::Full);
        }
        Ok(())
    }

    fn write_alone(
        &self,
        alone: &TakingIn<'_>,
        disk: &Disk,
        durability: Durability,
        act: impl Fn(&WriteTransaction) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.write_unseen(alone, disk, durability, act)?;
        self.show()
    }

    /// The same before anybody sees it.
    fn write_unseen(
        &self,
        alone: &TakingIn<'_>,
        disk: &Disk,
        durability: Durability,
        act: impl Fn(&WriteTransaction) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.take_in(alone)?;
        write::transact(&self.database, durability, act)?;
        // Then the journal is needed as it is.
        if disk.flush_failed() {
            return Err(StoreError::FlushFailed);
        }
        if let Durability::Immediate = durability {
            self.flushed.store(self.taken_in.load(Ordering::Acquire), Ordering::Release);
        }
        Ok(())
    }

    /// Flushes the database unless it was up to a batch of the journal.
    fn flush(&self, disk: &Disk, number: u64) -> Result<(), StoreError> {
        // Who is at it already is waited for, and may have done enough.
        let alone = self.behind.taking_in()?;
        self.may_write(disk)?;
        if self.flushed.load(Ordering::Acquire) >= number {
            return Ok(());
        }
        self.write_alone(&alone, disk, Durability::Immediate, |_| Ok(()))
    }

    /// Up to which batch the database should be flushed, so that the journal can go on.
    fn flush_wanted(&self) -> Option<u64> {
        let other = self.journal.lock().ok()?.as_ref()?.other();
        Some(other).filter(|other| self.flushed.load(Ordering::Acquire) < *other)
    }

    /// Makes a batch durable: in the journal, or, if that cannot take it, in the database with everything before it.
    fn append(&self, disk: &Disk, expected: Head, changes: Changes) -> Result<(), StoreError> {
        let mut journal = self.journal.lock().map_err(panicked)?;
        self.may_write(disk)?;
        let body = journal.is_some().then(|| journal::encode(expected, &changes));
        match (&mut *journal, body) {
            (Some(journal), Some(body)) if journal.can_take(&body) => {
                self.append_to(journal, disk, &body, Batch { number: 0, expected, changes })
            }
            _ => {
                let alone = self.behind.taking_in()?;
                self.may_write(disk)?;
                self.write_unseen(&alone, disk, Durability::Immediate, |transaction| {
                    write::apply(transaction, &[(expected, &changes)])
                })?;
                self.add_to_index(&changes)?;
                self.show()
            }
        }
    }

    fn append_to(
        &self,
        journal: &mut Journal,
        disk: &Disk,
        body: &[u8],
        batch: Batch,
    ) -> Result<(), StoreError> {
        // What the database does not take need not be made more.
        if self.behind.is_stuck()? {
            self.take_in(&self.behind.taking_in()?)?;
        }
        let head = self.behind.queue()?.head();
        let head = head.map_or_else(|| Reader::new(self.shown.load_full(), disk).head(), Ok)?;
        if head != batch.expected {
            return Err(StoreError::HeadMoved);
        }
        while !journal.make_room(body, self.flushed.load(Ordering::Acquire)) {
            self.flush(disk, journal.other())?;
        }
        disk.journaled(journal.write(body))?;
        let number = disk.flushed(journal.flush(body))?;
        self.behind.queue()?.push(Batch { number, ..batch });
        Ok(())
    }
}

impl Store {
    /// Opens the store in a folder, which is made if it is not there.
    pub fn open(dir: &Path, roots: &TrustRoots, fsync: bool) -> Result<Store, OpenError> {
        let failed = |error| OpenError::File(dir.display().to_string(), error);
        std::fs::create_dir_all(dir).map_err(failed)?;
        of_folder(dir, Store::over(Disk::file(&dir.join(FILE), fsync).map_err(failed)?, roots))
    }

    /// Opens the store in a folder to be read, and changes nothing there.
    pub fn look(dir: &Path, roots: &TrustRoots) -> Result<Store, OpenError> {
        let failed = |error| OpenError::File(dir.display().to_string(), error);
        of_folder(dir, Store::over(Disk::looked_at(&dir.join(FILE)).map_err(failed)?, roots))
    }

    /// A store that leaves nothing behind.
    pub fn in_memory(roots: &TrustRoots) -> Result<Store, OpenError> {
        Store::over(Disk::memory(), roots)
    }

    pub(crate) fn over(mut disk: Disk, roots: &TrustRoots) -> Result<Store, OpenError> {
        let opened = Opened::at(&disk, roots).and_then(|opened| {
            if disk.journal().is_some() {
                return Ok(opened);
            }
            disk.make_journal().map_err(StoreError::of_io)?;
            Ok(opened.recover(&disk, roots.b3())?)
        });
        let opened = match opened {
            Err(_) if disk.is_full() => Opened::held(&disk, roots)?,
            opened => opened?,
        };
        let inner = Inner {
            disk,
            roots: roots.clone(),
            opened: ArcSwapOption::from_pointee(opened),
            writer_taken: AtomicBool::new(false),
            short_of: AtomicU64::new(0),
            reopening: Mutex::new(()),
            stalled_until: ArcSwapOption::empty(),
            hand: Hand::new("database").map_err(StoreError::of_io)?,
            asked: AtomicBool::new(false),
        };
        Ok(Store { inner: Arc::new(inner) })
    }

    /// The one writer of the log; none while somebody has it.
    pub fn log_writer(&self) -> Option<LogWriter> {
        let taken = self.inner.writer_taken.swap(true, Ordering::AcqRel);
        (!taken).then(|| LogWriter::new(self))
    }

    /// A writer of notes.
    pub fn note_writer(&self) -> NoteWriter {
        NoteWriter::new(self)
    }

    pub fn disk(&self) -> &Disk {
        &self.inner.disk
    }

    /// Everything that is durable, as it is at one moment.
    pub fn reader(&self) -> Result<Reader, StoreError> {
        let opened = self.opened()?;
        match opened.catch_up() {
            Err(StoreError::Database(_)) if self.inner.disk.is_full() && !self.inner.disk.flush_failed() => {
                drop(opened);
                // Without room it is read from memory.
                let _ = self.reopen();
                self.opened()?.catch_up()?;
            }
            done => done?,
        }
        self.settled()
    }

    /// The same for who serves what can be served: of a damaged database what it had before.
    pub fn good_reader(&self) -> Result<Reader, StoreError> {
        self.reader().or_else(|error| if error.is_damage() { self.settled() } else { Err(error) })
    }

    /// What is in the database, which may be a little behind: for who has time.
    pub fn settled(&self) -> Result<Reader, StoreError> {
        Ok(Reader::new(self.opened()?.shown.load_full(), &self.inner.disk))
    }

    /// The same, and the version it goes up to if all up to this one is durable.
    pub fn settled_to(&self, durable: u64) -> Result<(Reader, u64), StoreError> {
        let behind = !self.opened()?.behind.queue()?.is_empty();
        let reader = self.settled()?;
        let version = if behind { reader.head()?.version } else { durable };
        Ok((reader, version))
    }

    /// The version a payload was committed as. Asked with every proposal: nothing is taken in for it.
    pub fn committed(&self, payload: ron_log::B3) -> Result<Option<u64>, StoreError> {
        let opened = self.opened()?;
        // In the order in which it goes from one to the next.
        if let Some(version) = opened.behind.queue()?.committed(payload) {
            return Ok(Some(version));
        }
        let gathered = opened.index()?.get(payload);
        if gathered.is_some() { Ok(gathered) } else { opened.shown.load().committed(payload) }
    }

    /// Whether the database did not take in what is behind, when it was to.
    pub fn is_stuck(&self) -> bool {
        self.opened().is_ok_and(|opened| opened.behind.is_stuck().unwrap_or(true))
    }

    /// Has the database take in what is behind, soon and on another thread, and flush what the journal needs to go on.
    pub fn settle(&self) {
        if self.inner.asked.swap(true, Ordering::AcqRel) {
            return;
        }
        let store = self.clone();
        self.inner.hand.begin(move || {
            store.inner.asked.store(false, Ordering::Release);
            // Whoever reads or writes next finds the same, and is told.
            match catch_unwind(AssertUnwindSafe(|| store.take_in_and_flush())) {
                Ok(Ok(()) | Err(StoreError::Closed)) => {}
                Ok(Err(error)) => {
                    tracing::error!(%error, "the registry's database does not take in what its journal has")
                }
                Err(_panic) => tracing::error!("the registry's database panicked over what its journal has"),
            }
        });
    }

    fn take_in_and_flush(&self) -> Result<(), StoreError> {
        self.reader()?;
        match self.opened()?.flush_wanted() {
            Some(number) => self.writing(0, |opened, disk| opened.flush(disk, number)),
            None => Ok(()),
        }
    }

    /// Holds up every write until this much time has passed.
    pub fn stall(&self, by: Duration) {
        self.inner.stalled_until.store(Some(Arc::new(Instant::now() + by)));
    }

    /// Whether a write can be tried; after a full disk the store is opened anew once there is room.
    pub fn writable(&self) -> Result<(), StoreError> {
        self.room_for(self.inner.short_of.load(Ordering::Relaxed))?;
        self.inner.short_of.store(0, Ordering::Relaxed);
        Ok(())
    }

    /// Changes a byte of an entry's record, as a failing disk does.
    #[cfg(test)]
    pub(crate) fn spoil(&self, version: u64) {
        let mut record = self.reader().unwrap().entry(version).unwrap().unwrap();
        let at = record.len() / 2;
        record[at] ^= 1;
        self.change(|transaction| {
            transaction.open_table(ENTRIES).unwrap().insert(version, record.as_slice()).unwrap();
        });
    }

    /// The same of a payload.
    #[cfg(test)]
    pub(crate) fn spoil_payload(&self, version: u64) {
        let mut payload = self.reader().unwrap().payload(version).unwrap().unwrap();
        let at = payload.len() / 2;
        payload[at] ^= 1;
        self.change(|transaction| {
            transaction.open_table(PAYLOADS).unwrap().insert(version, payload.as_slice()).unwrap();
        });
    }

    /// Takes an entry away.
    #[cfg(test)]
    pub(crate) fn lose(&self, version: u64) {
        self.change(|transaction| drop(transaction.open_table(ENTRIES).unwrap().remove(version).unwrap()));
    }

    /// Changes a byte of a snapshot's state, as a failing disk does.
    #[cfg(test)]
    pub(crate) fn spoil_snapshot(&self, version: u64) {
        let mut state = self.inner.disk.states.get(version).unwrap().unwrap();
        let at = state.len() / 2;
        state[at] ^= 1;
        let state = String::from_utf8(state).unwrap();
        self.inner.disk.states.put(version, Whole::Text(&state)).unwrap();
    }

    /// Changes a byte of a pending proposal's payload, as a failing disk does.
    #[cfg(test)]
    pub(crate) fn spoil_proposal(&self, id: ron_log::B3) {
        let mut kept = self.reader().unwrap().proposal(id).unwrap().unwrap();
        let at = kept.payload.len() / 2;
        kept.payload[at] ^= 1;
        let row = (kept.received_at, kept.ends_at, kept.payload.as_slice());
        self.change(|transaction| {
            transaction.open_table(PROPOSALS).unwrap().insert(id.0.as_slice(), row).unwrap();
        });
    }

    #[cfg(test)]
    fn change(&self, change: impl Fn(&WriteTransaction)) {
        let change = |transaction: &WriteTransaction| {
            change(transaction);
            Ok(())
        };
        self.opened().unwrap().write(self.disk(), Durability::Immediate, change).unwrap();
    }

    fn room_for(&self, bytes: u64) -> Result<(), StoreError> {
        let disk = &self.inner.disk;
        if disk.flush_failed() {
            return Err(StoreError::Stopped);
        }
        if !disk.has_room(RESERVE.saturating_add(bytes.saturating_mul(4))) {
            self.inner.short_of.fetch_max(bytes, Ordering::Relaxed);
            return Err(StoreError::Full);
        }
        if disk.is_full() {
            self.reopen()?;
        }
        Ok(())
    }

    /// After an error of writing redb wants to be opened anew; what was durable is there.
    fn reopen(&self) -> Result<(), StoreError> {
        // Two handles at once would each write: who comes second is told what the first found.
        let _alone = match self.inner.reopening.try_lock() {
            Ok(alone) => alone,
            Err(TryLockError::Poisoned(alone)) => alone.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(StoreError::Full),
        };
        if self.inner.disk.is_full() { self.open_anew() } else { Ok(()) }
    }

    fn open_anew(&self) -> Result<(), StoreError> {
        let former = self.opened()?;
        // Nothing goes into the journal while it is read, nor from there into the database.
        let _journal = former.journal.lock().map_err(panicked)?;
        let _alone = former.behind.taking_in()?;
        former.ended.store(true, Ordering::Release);
        self.inner.disk.set_full(false);
        let disk = &self.inner.disk;
        let opened = Opened::at(disk, &self.inner.roots);
        let room = !disk.is_full();
        let opened = match opened {
            Err(_) if !room => Opened::held(disk, &self.inner.roots),
            opened => opened,
        };
        let opened = opened.map_err(|error| {
            disk.set_full(true);
            match error {
                OpenError::Store(error) => error,
                error => StoreError::Damaged(error.to_string()),
            }
        })?;
        self.inner.opened.store(Some(Arc::new(opened)));
        if !room {
            return Err(StoreError::Full);
        }
        tracing::info!("the registry's store was opened anew");
        Ok(())
    }

    fn opened(&self) -> Result<Arc<Opened>, StoreError> {
        self.inner.opened.load_full().ok_or(StoreError::Closed)
    }

    /// Closes the store so that the next start need not look through all of it. Nothing can be read any more.
    pub fn close(&self) {
        let Some(mut opened) = self.inner.opened.swap(None) else { return };
        let disk = &self.inner.disk;
        if disk.journal().is_some() && !disk.flush_failed() {
            // From now on the database has all; should this fail, the journal is needed as after a crash.
            let _nobody_appends = opened.journal.lock();
            let done = opened
                .write(disk, Durability::Immediate, |transaction| write::in_journal(transaction, false));
            if let Err(error) = done {
                tracing::debug!(%error, "the registry's store could not be closed properly");
            }
        }
        let until = Instant::now() + CLOSE_PATIENCE;
        while let Err(shared) = Arc::try_unwrap(opened) {
            if Instant::now() > until {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
            opened = shared;
        }
    }
}

/// HEAD in 40 bytes.
fn head_bytes(head: Head) -> [u8; 40] {
    let mut bytes = [0; 40];
    bytes[..8].copy_from_slice(&head.version.to_be_bytes());
    bytes[8..].copy_from_slice(&head.hash.0);
    bytes
}

fn head_of(bytes: &[u8]) -> Option<Head> {
    let (version, hash) = bytes.split_first_chunk::<8>()?;
    Some(Head { version: u64::from_be_bytes(*version), hash: ron_log::B3(hash.try_into().ok()?) })
}
