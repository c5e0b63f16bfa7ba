//! The states that snapshots vouch for, each in a file of its own beside the database.
//!
//! A state may be large, and in the database every batch would wait while it is written there. A file is whole before
//! the note that signs it is stored; what it says is checked by the note's hash, so that nothing here need be trusted.
//! It goes past the system's cache, which has better use for its room than what only a restart reads.

use super::disk::{forget_pages, open_direct};
use super::journal::{PAGE, Pages};
use ron_log::{B3, State};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The folder beside the database.
const FOLDER: &str = "states";
/// Bytes that are read at a time.
const READ: usize = 256 << 10;

/// A state to be kept, and what signs it once its hash is known.
#[derive(Clone, Copy)]
pub struct Keeping<'a> {
    pub state: Whole<'a>,
    pub sign: &'a dyn Fn(B3) -> String,
}

impl std::fmt::Debug for Keeping<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Keeping").field("state", &self.state).finish_non_exhaustive()
    }
}

/// A whole state, or its canonical text.
#[derive(Clone, Copy, Debug)]
pub enum Whole<'a> {
    State(&'a State),
    Text(&'a str),
}

impl Whole<'_> {
    fn pieces<E>(self, mut give: impl FnMut(&str) -> Result<(), E>) -> Result<(), E> {
        match self {
            Whole::State(state) => state.canonical_pieces(give),
            Whole::Text(text) => give(text),
        }
    }
}

/// Where states are kept.
#[derive(Debug)]
pub(super) struct States {
    place: Place,
    /// Held from the writing of a state until its note is stored, so that nobody takes it for one without a note.
    writing: Mutex<()>,
}

#[derive(Debug)]
enum Place {
    Folder { path: PathBuf, fsync: bool },
    Memory(Mutex<BTreeMap<u64, Vec<u8>>>),
}

impl States {
    pub(super) fn beside(store: &Path, fsync: bool) -> States {
        States::of(Place::Folder { path: store.with_file_name(FOLDER), fsync })
    }

    pub(super) fn in_memory() -> States {
        States::of(Place::Memory(Mutex::default()))
    }

    fn of(place: Place) -> States {
        States { place, writing: Mutex::default() }
    }

    /// Nobody else writes or removes a state meanwhile. Who panicked with it left a file that is replaced or removed.
    pub(super) fn alone(&self) -> MutexGuard<'_, ()> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes a state; when this returns, it is durable. Says its hash and its bytes.
    pub(super) fn put(&self, version: u64, state: Whole<'_>) -> std::io::Result<(B3, u64)> {
        let (mut hasher, mut bytes) = (blake3::Hasher::new(), 0);
        let mut hash = |piece: &str| {
            hasher.update(piece.as_bytes());
            bytes += piece.len() as u64;
        };
        match &self.place {
            Place::Memory(states) => {
                let mut whole = Vec::new();
                state.pieces(|piece| {
                    hash(piece);
                    whole.extend_from_slice(piece.as_bytes());
                    Ok::<(), std::io::Error>(())
                })?;
                states.lock().unwrap_or_else(PoisonError::into_inner).insert(version, whole);
            }
            Place::Folder { path, fsync } => {
                std::fs::create_dir_all(path)?;
                let name = path.join(version.to_string());
                let temporary = name.with_added_extension("new");
                let mut written = Written::create(&temporary)?;
                state.pieces(|piece| {
                    hash(piece);
                    written.push(piece.as_bytes())
                })?;
                let file = written.finish()?;
                if *fsync {
                    file.sync_data()?;
                }
                std::fs::rename(&temporary, &name)?;
                if *fsync {
                    File::open(path)?.sync_all()?;
                    File::open(path.parent().unwrap_or(path))?.sync_all()?;
                }
            }
        }
        Ok((B3(*hasher.finalize().as_bytes()), bytes))
    }

    pub(super) fn get(&self, version: u64) -> std::io::Result<Option<Vec<u8>>> {
        match &self.place {
            Place::Memory(states) => {
                Ok(states.lock().unwrap_or_else(PoisonError::into_inner).get(&version).cloned())
            }
            Place::Folder { path, .. } => match std::fs::read(path.join(version.to_string())) {
                Ok(state) => Ok(Some(state)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            },
        }
    }

    /// The hash of a state, which is not held in memory for that.
    pub(super) fn hash(&self, version: u64) -> std::io::Result<Option<B3>> {
        let path = match &self.place {
            Place::Memory(_) => return Ok(self.get(version)?.map(|state| B3::of(&state))),
            Place::Folder { path, .. } => path,
        };
        let mut file = match File::open(path.join(version.to_string())) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            file => file?,
        };
        let (mut hasher, mut piece) = (blake3::Hasher::new(), vec![0; READ]);
        loop {
            let read = file.read(&mut piece)?;
            if read == 0 {
                forget_pages(&file);
                return Ok(Some(B3(*hasher.finalize().as_bytes())));
            }
            hasher.update(&piece[..read]);
        }
    }

    /// Removes every state but those of the given versions, and what a crash left half written.
    pub(super) fn retain(&self, kept: &[u64]) -> std::io::Result<()> {
        match &self.place {
            Place::Memory(states) => {
                let mut states = states.lock().unwrap_or_else(PoisonError::into_inner);
                states.retain(|version, _| kept.contains(version));
            }
            Place::Folder { path, .. } => {
                let files = match std::fs::read_dir(path) {
                    Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                    files => files?,
                };
                for file in files {
                    let file = file?;
                    let version = file.file_name().to_str().and_then(|name| name.parse().ok());
                    if !version.is_some_and(|version| kept.contains(&version)) {
                        std::fs::remove_file(file.path())?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// A file that is written from its beginning in large pieces, past the system's cache where that can be done.
#[derive(Debug)]
struct Written {
    file: File,
    direct: Option<File>,
    pages: Pages,
    /// Bytes in the pages, and on the disk.
    gathered: usize,
    at: u64,
}

impl Written {
    const PIECE: usize = 1 << 20;

    fn create(path: &Path) -> std::io::Result<Written> {
        let file = File::create(path)?;
        Ok(Written { file, direct: open_direct(path), pages: Pages::default(), gathered: 0, at: 0 })
    }

    fn push(&mut self, mut bytes: &[u8]) -> std::io::Result<()> {
        while !bytes.is_empty() {
            let (now, later) = bytes.split_at(bytes.len().min(Self::PIECE - self.gathered));
            self.pages.of(Self::PIECE)[self.gathered..][..now.len()].copy_from_slice(now);
            self.gathered += now.len();
            bytes = later;
            if self.gathered == Self::PIECE {
                self.write()?;
            }
        }
        Ok(())
    }

    /// Writes what was gathered, as whole pages.
    fn write(&mut self) -> std::io::Result<()> {
        let piece = &mut self.pages.of(Self::PIECE)[..self.gathered.next_multiple_of(PAGE)];
        piece[self.gathered..].fill(0);
        let done = match &self.direct {
            Some(direct) => match direct.write_all_at(piece, self.at) {
                // A file system that wants still larger pages.
                Err(error) if error.kind() == ErrorKind::InvalidInput => false,
                written => written.map(|()| true)?,
            },
            None => false,
        };
        if !done {
            self.direct = None;
            self.file.write_all_at(piece, self.at)?;
        }
        self.at += self.gathered as u64;
        self.gathered = 0;
        Ok(())
    }

    /// The file with all of it, which need not be durable.
    fn finish(mut self) -> std::io::Result<File> {
        self.write()?;
        self.file.set_len(self.at)?;
        Ok(self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_what_was_pushed_whatever_the_pieces() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("1");
        let lens =
            [0, 1, PAGE, Written::PIECE - 1, Written::PIECE, Written::PIECE + 1, 3 * Written::PIECE + 7];
        for (len, is_direct) in lens.into_iter().flat_map(|len| [(len, true), (len, false)]) {
            let whole: Vec<u8> = (0..len).map(|at| (at / 7) as u8).collect();
            let mut written = Written::create(&path).unwrap();
            written.direct = written.direct.filter(|_| is_direct);
            whole.chunks(300_001).for_each(|piece| written.push(piece).unwrap());
            written.finish().unwrap();
            assert!(std::fs::read(&path).unwrap() == whole, "{len} {is_direct}");
            let states = States::of(Place::Folder { path: dir.path().to_owned(), fsync: false });
            assert_eq!(states.hash(1).unwrap(), Some(B3::of(&whole)));
            assert_eq!(states.hash(2).unwrap(), None);
        }
    }
}
