//! What lies under the store: a file or memory, and what is known of its health.
//!
//! A failed flush is not passed on as an error: redb would then refuse reads too, and what was durable before
//! is still good. It is noted here instead, and nothing is written any more until the process restarts: what redb goes on to
//! write, believing that all before it is safe, stays in memory.

use super::StoreError;
use super::journal::Pages;
use super::states::States;
use redb::StorageBackend;
use rustix::io::Errno;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{Error, ErrorKind, IoSlice};
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// So much free room is not gone within this time.
const PLENTY: u64 = 1 << 30;
const PLENTY_FOR: Duration = Duration::from_millis(20);

/// The bytes a store is kept in; outlives each time it is opened.
#[derive(Clone, Debug)]
pub struct Disk {
    medium: Arc<dyn StorageBackend>,
    /// Where batches are flushed first; none where nothing is.
    journal: Option<Arc<dyn StorageBackend>>,
    pub(super) states: Arc<States>,
    /// Where free room is asked for; memory has none to ask.
    path: Option<Arc<Path>>,
    health: Arc<Health>,
    fsync: bool,
}

#[derive(Debug, Default)]
struct Health {
    flush_failed: AtomicBool,
    full: AtomicBool,
    /// When there was room in plenty last.
    roomy: Mutex<Option<Instant>>,
}

impl Disk {
    /// A file, made if it is not there and locked against other processes.
    pub(super) fn file(path: &Path, fsync: bool) -> std::io::Result<Disk> {
        let fresh = !path.exists();
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path)?;
        if file.try_lock().is_err() {
            let used = format!("{} is in use by another process", path.display());
            return Err(Error::new(ErrorKind::ResourceBusy, used));
        }
        // What a failed flush left in the system's cache may not be on the disk: what is read from now on is.
        if fsync {
            file.sync_data()?;
            forget_pages(&file);
        }
        let folder = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let folder = folder.map_or_else(|| PathBuf::from("."), Path::to_owned);
        if fresh && fsync {
            // Else a crash could forget the file's name.
            File::open(&folder)?.sync_all()?;
        }
        let journal = whole_journal(&path.with_extension("journal"))?;
        let states = Arc::new(States::beside(path, fsync));
        Ok(Disk { path: Some(folder.into()), journal, states, fsync, ..Disk::over(FileMedium::new(file)?) })
    }

    /// A file that is looked at and not changed: what redb writes in order to read it, as after a crash, stays in
    /// memory. Whoever writes it has it locked.
    pub(super) fn looked_at(path: &Path) -> std::io::Result<Disk> {
        let file = File::open(path)?;
        if file.try_lock_shared().is_err() {
            let used = format!("{} is in use by another process", path.display());
            return Err(Error::new(ErrorKind::ResourceBusy, used));
        }
        let journal = match File::open(path.with_extension("journal")) {
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            journal => {
                let journal = Overlay::new(Arc::new(JournalFile::new(journal?, None)))?;
                let whole = journal.len()? == super::journal::SIZE;
                whole.then(|| Arc::new(journal) as Arc<dyn StorageBackend>)
            }
        };
        let states = Arc::new(States::beside(path, false));
        Ok(Disk { journal, states, ..Disk::over(Overlay::new(Arc::new(FileMedium::new(file)?))?) })
    }

    /// The same with nothing written to it any more: what is written stays in memory.
    pub(super) fn held(&self) -> std::io::Result<Disk> {
        let journal = self.journal.clone().map(Overlay::new).transpose()?;
        let journal = journal.map(|journal| Arc::new(journal) as Arc<dyn StorageBackend>);
        Ok(Disk { medium: Arc::new(Overlay::new(self.medium.clone())?), journal, ..self.clone() })
    }

    pub(super) fn memory() -> Disk {
        Disk::over(redb::backends::InMemoryBackend::new())
    }

    /// Any medium; tests give one that fails on request.
    pub(crate) fn over(medium: impl StorageBackend) -> Disk {
        let states = Arc::new(States::in_memory());
        Disk {
            medium: Arc::new(medium),
            journal: None,
            states,
            path: None,
            health: Arc::default(),
            fsync: true,
        }
    }

    /// The same with a journal, which is as long as one has to be.
    #[cfg(test)]
    pub(super) fn with_journal(self, journal: impl StorageBackend) -> Disk {
        Disk { journal: Some(Arc::new(journal)), ..self }
    }

    pub(super) fn journal(&self) -> Option<Arc<dyn StorageBackend>> {
        self.journal.clone()
    }

    /// Makes the journal if there is to be one and there is none.
    pub(super) fn make_journal(&mut self) -> std::io::Result<()> {
        if let (None, Some(folder), true) = (&self.journal, &self.path, self.fsync) {
            self.journal = made_journal(&folder.join(super::FILE).with_extension("journal"), folder)?;
        }
        Ok(())
    }

    /// Whether batches are flushed before they are acknowledged.
    pub(super) fn flushes(&self) -> bool {
        self.fsync
    }

    /// What became of a batch's write to the journal. No room is the only error after which one can go on: no
    /// record was made then.
    pub(super) fn journaled(&self, written: std::io::Result<()>) -> Result<(), StoreError> {
        match self.note(written) {
            Err(error) if is_no_room(&error) => Err(StoreError::of_io(error)),
            written => self.flushed(written),
        }
    }

    /// What became of the journal's flush: whether the record is there is not known if it failed, for whatever reason.
    pub(super) fn flushed<T>(&self, flushed: std::io::Result<T>) -> Result<T, StoreError> {
        flushed.map_err(|error| {
            tracing::error!(%error, "the registry's journal could not be written: nothing is written any more");
            self.health.flush_failed.store(true, Ordering::Release);
            StoreError::of_io(error)
        })
    }

    /// A handle for one opening of the store, and what ends it: a handle that has ended reads and writes nothing,
    /// so that a reader left over from before does not see what came after.
    pub(super) fn handle(&self) -> (Handle, Arc<AtomicBool>) {
        let ended = Arc::new(AtomicBool::new(false));
        (Handle { disk: self.clone(), ended: ended.clone(), over: OnceLock::new() }, ended)
    }

    /// A flush failed: nobody knows what is on the disk.
    pub fn flush_failed(&self) -> bool {
        self.health.flush_failed.load(Ordering::Acquire)
    }

    /// A write found no room.
    pub(super) fn is_full(&self) -> bool {
        self.health.full.load(Ordering::Acquire)
    }

    pub(super) fn set_full(&self, full: bool) {
        self.health.full.store(full, Ordering::Release);
    }

    /// Whether so many bytes can be written.
    pub(super) fn has_room(&self, bytes: u64) -> bool {
        let Some(path) = &self.path else { return true };
        let mut roomy = self.health.roomy.lock().unwrap_or_else(PoisonError::into_inner);
        if bytes <= PLENTY / 2 && roomy.is_some_and(|seen| seen.elapsed() < PLENTY_FOR) {
            return true;
        }
        let free = rustix::fs::statvfs(&**path).map_or(0, |fs| fs.f_bavail.saturating_mul(fs.f_frsize));
        *roomy = (free >= PLENTY).then(Instant::now);
        free >= bytes
    }

    pub(super) fn note<T>(&self, outcome: std::io::Result<T>) -> std::io::Result<T> {
        if outcome.as_ref().is_err_and(is_no_room) {
            self.set_full(true);
        }
        outcome
    }
}

fn is_no_room(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// One opening.
#[derive(Debug)]
pub(super) struct Handle {
    disk: Disk,
    ended: Arc<AtomicBool>,
    /// What is written after a failed flush.
    over: OnceLock<Overlay>,
}

impl Handle {
    fn medium(&self) -> std::io::Result<&dyn StorageBackend> {
        if self.ended.load(Ordering::Acquire) {
            return Err(Error::other("the store was opened anew"));
        }
        if !self.disk.flush_failed() {
            return Ok(&*self.disk.medium);
        }
        if let Some(over) = self.over.get() {
            return Ok(over);
        }
        let over = Overlay::new(self.disk.medium.clone())?;
        Ok(self.over.get_or_init(|| over))
    }
}

impl StorageBackend for Handle {
    fn len(&self) -> std::io::Result<u64> {
        self.medium()?.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.medium()?.read(offset, out)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.disk.note(self.medium()?.set_len(len))
    }

    fn sync_data(&self) -> std::io::Result<()> {
        let medium = self.medium()?;
        if self.disk.fsync
            && let Err(error) = medium.sync_data()
        {
            tracing::error!(%error, "the registry's store could not be flushed: it is not written any more");
            self.disk.health.flush_failed.store(true, Ordering::Release);
        }
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.disk.note(self.medium()?.write(offset, data))
    }
}

/// A medium, and over it what was written, by page.
#[derive(Debug)]
struct Overlay {
    below: Arc<dyn StorageBackend>,
    over: Mutex<Over>,
}

#[derive(Debug)]
struct Over {
    len: u64,
    /// How much of the medium is still to be seen.
    stored: u64,
    pages: BTreeMap<u64, Vec<u8>>,
}

const PAGE: u64 = 4096;

impl Overlay {
    fn new(below: Arc<dyn StorageBackend>) -> std::io::Result<Overlay> {
        let len = below.len()?;
        Ok(Overlay { below, over: Mutex::new(Over { len, stored: len, pages: BTreeMap::new() }) })
    }

    fn over(&self) -> std::io::Result<MutexGuard<'_, Over>> {
        self.over.lock().map_err(|_poisoned| Error::other("what was written is in disorder"))
    }

    /// A page from below; beyond the end there are zeros.
    fn page(&self, number: u64, stored: u64) -> std::io::Result<Vec<u8>> {
        let mut page = vec![0; PAGE as usize];
        let kept = stored.saturating_sub(number * PAGE).min(PAGE);
        self.below.read(number * PAGE, &mut page[..kept as usize])?;
        Ok(page)
    }
}

/// The parts of a range by page: page, where in it, where in the range.
fn by_page(offset: u64, len: usize) -> impl Iterator<Item = (u64, Range<usize>, Range<usize>)> {
    let end = offset + len as u64;
    (offset / PAGE..end.div_ceil(PAGE)).map(move |page| {
        let (from, to) = (offset.max(page * PAGE), end.min((page + 1) * PAGE));
        let within = |base: u64| (from - base) as usize..(to - base) as usize;
        (page, within(page * PAGE), within(offset))
    })
}

impl StorageBackend for Overlay {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.over()?.len)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        let over = self.over()?;
        if offset + out.len() as u64 > over.len {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        for (number, at, part) in by_page(offset, out.len()) {
            match over.pages.get(&number) {
                Some(page) => out[part].copy_from_slice(&page[at]),
                None => out[part].copy_from_slice(&self.page(number, over.stored)?[at]),
            }
        }
        Ok(())
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        let mut over = self.over()?;
        (over.len, over.stored) = (len, over.stored.min(len));
        over.pages.retain(|number, _| number * PAGE < len);
        Ok(())
    }

    fn sync_data(&self) -> std::io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let mut over = self.over()?;
        for (number, at, part) in by_page(offset, data.len()) {
            let stored = over.stored;
            let page = match over.pages.entry(number) {
                Entry::Occupied(page) => page.into_mut(),
                Entry::Vacant(place) => place.insert(self.page(number, stored)?),
            };
            page[at].copy_from_slice(&data[part]);
        }
        Ok(())
    }
}

/// The journal beside a store; none if it is not there, or not as a whole.
fn whole_journal(path: &Path) -> std::io::Result<Option<Arc<dyn StorageBackend>>> {
    match File::options().read(true).write(true).open(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        file => {
            let file = file?;
            let whole = file.metadata()?.len() == super::journal::SIZE;
            Ok(whole.then(|| Arc::new(JournalFile::new(file, direct(path))) as Arc<dyn StorageBackend>))
        }
    }
}

/// A new journal with all of its blocks; none if there is no room for them, which costs speed alone.
fn made_journal(path: &Path, folder: &Path) -> std::io::Result<Option<Arc<dyn StorageBackend>>> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    let blocks = vec![0; super::journal::SIZE as usize];
    match file.write_all_at(&blocks, 0).and_then(|()| file.sync_all()) {
        Err(error) if is_no_room(&error) => return Ok(None),
        made => made?,
    }
    File::open(folder)?.sync_all()?;
    Ok(Some(Arc::new(JournalFile::new(file, direct(path)))))
}

/// A file for writing past the system's cache, which takes less time where nobody will read it: none where it cannot be
/// opened so.
pub(super) fn open_direct(path: &Path) -> Option<File> {
    let flags = i32::try_from(rustix::fs::OFlags::DIRECT.bits()).ok()?;
    File::options().read(true).write(true).custom_flags(flags).open(path).ok()
}

/// The same of one that has pages; none also if one of them cannot be read so.
fn direct(path: &Path) -> Option<File> {
    let file = open_direct(path)?;
    let mut pages = Pages::default();
    file.read_exact_at(pages.of(PAGE as usize), 0).is_ok().then_some(file)
}

/// What is in the system's cache of a file and on the disk too is read from there the next time.
pub(super) fn forget_pages(file: &File) {
    // It is advice: where it is not taken, nothing but time is lost.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// A file of fixed length whose blocks are all there.
#[derive(Debug)]
struct JournalFile {
    file: File,
    /// The same, for whole pages.
    direct: Option<File>,
    /// Something is in the system's cache that was not flushed.
    cached: AtomicBool,
}

impl JournalFile {
    fn new(file: File, direct: Option<File>) -> JournalFile {
        JournalFile { file, direct, cached: AtomicBool::new(false) }
    }

    /// Writes whole pages past the system's cache and has them flushed in the same call, if the system can. Whatever goes
    /// wrong may be the flush: what is on the disk is not known then, even for want of room.
    fn write_flushed(&self, mut data: &[u8], mut offset: u64) -> std::io::Result<bool> {
        let Some(direct) = &self.direct else { return Ok(false) };
        while !data.is_empty() {
            let flags = rustix::io::ReadWriteFlags::DSYNC;
            match rustix::io::pwritev2(direct, &[IoSlice::new(data)], offset, flags) {
                // A file system that wants them larger still, or a system or sandbox that does not know how.
                Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Error::other(error)),
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => (data, offset) = (&data[written..], offset + written as u64),
            }
        }
        Ok(true)
    }
}

impl StorageBackend for JournalFile {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(out, offset)?;
        // What was read or written in large pieces is kept in large pieces, each of which a flush looks through as a whole.
        forget_pages(&self.file);
        Ok(())
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.file.set_len(len)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        if self.cached.swap(false, Ordering::AcqRel) { self.file.sync_data() } else { Ok(()) }
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let page = PAGE as usize;
        let whole = offset.is_multiple_of(PAGE)
            && data.len().is_multiple_of(page)
            && data.as_ptr().addr().is_multiple_of(page);
        if whole && self.write_flushed(data, offset)? {
            return Ok(());
        }
        self.cached.store(true, Ordering::Release);
        let written = self.file.write_all_at(data, offset);
        // The record may be there from what was tried before.
        if whole && self.direct.is_some() { written.map_err(Error::other) } else { written }
    }
}

/// How far ahead of what is written a file's blocks are made.
const AHEAD: u64 = 4 << 20;

/// A file whose blocks exist before they are needed: a flush then writes pages, and not the file system's books too.
#[derive(Debug)]
struct FileMedium {
    file: File,
    /// Beyond this nothing was ever written.
    made: Mutex<u64>,
}

impl FileMedium {
    fn new(file: File) -> std::io::Result<FileMedium> {
        let made = Mutex::new(file.metadata()?.len());
        Ok(FileMedium { file, made })
    }

    fn made(&self) -> std::io::Result<MutexGuard<'_, u64>> {
        self.made.lock().map_err(|_poisoned| Error::other("how much of the file is used is not known"))
    }

    /// Fills with zeros what lies ahead of a write, within the file. Should there be no room, only the speed is lost.
    fn make_ahead(&self, made: &mut u64, end: u64) -> std::io::Result<()> {
        static ZEROS: [u8; 1 << 16] = [0; 1 << 16];
        let until = (end + AHEAD).min(self.file.metadata()?.len());
        let mut at = (*made).max(end);
        *made = at;
        while at < until {
            let piece = (until - at).min(ZEROS.len() as u64);
            if self.file.write_all_at(&ZEROS[..piece as usize], at).is_err() {
                return Ok(());
            }
            at += piece;
            *made = at;
        }
        Ok(())
    }
}

impl StorageBackend for FileMedium {
    fn len(&self) -> std::io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.file.read_exact_at(out, offset)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        let mut made = self.made()?;
        *made = (*made).min(len);
        self.file.set_len(len)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.file.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        let end = offset + data.len() as u64;
        let mut made = self.made()?;
        if end > *made {
            self.make_ahead(&mut made, end)?;
        }
        drop(made);
        self.file.write_all_at(data, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    #[test]
    fn a_journal_has_what_was_written_past_the_cache_or_through_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("registry.journal");
        let journal = made_journal(&path, dir.path()).unwrap().unwrap();
        let (mut pages, page) = (Pages::default(), PAGE as usize);
        let mut expected = vec![0; 16 * page];
        // Whole pages of one's own, the same begun elsewhere, and less than one.
        for (number, (at, skip, len)) in
            [(2, 0, 2), (3, 0, 1), (9, 0, 3), (4, 1, 2), (10, 1, 1)].into_iter().enumerate()
        {
            let bytes = &mut pages.of((len + skip) * page)[skip..][..len * page - skip];
            bytes.fill(number as u8 + 1);
            journal.write(at as u64 * PAGE, bytes).unwrap();
            journal.sync_data().unwrap();
            expected[at * page..][..bytes.len()].copy_from_slice(bytes);
        }
        let reopened = whole_journal(&path).unwrap().unwrap();
        for journal in [journal, reopened] {
            let mut read = vec![1; expected.len()];
            journal.read(0, &mut read).unwrap();
            assert!(read == expected);
        }
    }

    #[test]
    fn only_want_of_room_is_taken_for_it() {
        let disk = Disk::memory();
        assert!(disk.journaled(Err(ErrorKind::StorageFull.into())).is_err() && disk.is_full());
        assert!(!disk.flush_failed());
        // Somebody else's want of room says nothing of this one.
        assert!(disk.journaled(Err(Error::other("the disk is broken"))).is_err());
        assert!(disk.flush_failed());
    }

    #[test]
    fn blocks_are_made_ahead_and_nothing_written_is_touched() {
        let file = tempfile::tempfile().unwrap();
        let medium = FileMedium::new(file.try_clone().unwrap()).unwrap();
        medium.set_len(64 << 20).unwrap();
        let mut written = Vec::new();
        // Forwards, backwards into what was filled, and beyond it.
        for (number, at) in
            [0, 8192, 5 << 20, 4096, (5 << 20) + 4096, 20 << 20, 63 << 20].into_iter().enumerate()
        {
            let page = [number as u8 + 1; 4096];
            medium.write(at, &page).unwrap();
            written.push((at, page));
        }
        for (at, page) in written {
            let mut read = [0; 4096];
            medium.read(at, &mut read).unwrap();
            assert!(read == page, "at {at}");
        }
        let mut between = [1; 4096];
        medium.read(30 << 20, &mut between).unwrap();
        assert!(between == [0; 4096]);
        assert_eq!(file.metadata().unwrap().len(), 64 << 20, "it is as long as it was told to be");
        let made = file.metadata().unwrap().blocks() * 512;
        assert!((AHEAD * 3..64 << 20).contains(&made), "{made}");
        medium.set_len(1 << 20).unwrap();
        medium.set_len(2 << 20).unwrap();
        medium.write(1 << 20, &[9; 4096]).unwrap();
        let mut after = [1; 4096];
        medium.read((1 << 20) + 4096, &mut after).unwrap();
        assert!(after == [0; 4096]);
    }
}
