//! The states that snapshots vouch for, each in a file of its own beside the database.
//!
//! A state may be large, and in the database every batch would wait while it is written there. A file is whole before
//! the note that signs it is stored; what it says is checked by the note's hash, so that nothing here need be trusted.

use ron_log::{B3, State};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The folder beside the database.
const FOLDER: &str = "states";

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
                let mut file = File::create(&temporary)?;
                state.pieces(|piece| {
                    hash(piece);
                    file.write_all(piece.as_bytes())
                })?;
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
