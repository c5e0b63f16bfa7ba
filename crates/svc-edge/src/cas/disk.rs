//! The folder of the store: objects under `b3/aa/bb/`, the index, and a small file for each name, from which the index
//! is made again if it is lost.

use super::catalog::{Asset, Catalog, Condition, Object};
use super::pending;
use super::upload::{ArrivedBytes, Temporary};
use crate::address::Address;
use redb::{Database, ReadableDatabase as _, ReadableTable as _, TableDefinition};
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const OBJECTS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("objects");
const NAMES: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("names");
/// How often the index was changed.
const CHANGED: TableDefinition<'_, (), u64> = TableDefinition::new("changed");
/// What the index keeps in memory of itself; everything that requests need is in the catalog.
const CACHE_BYTES: usize = 8 << 20;
const OUTBOARD: &str = ".bao";
/// What the index is told next.
const PENDING: &str = "pending";

/// What the index is told.
#[derive(Clone, Debug)]
pub enum Change {
    Object(Address, Object),
    NoObject(Address),
    Name(Arc<str>, Arc<Asset>),
    NoName(Arc<str>),
}

#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("{0}: {1}")]
    Folder(PathBuf, io::Error),
    #[error("the index: {0}")]
    Index(#[from] redb::Error),
}

/// See the module. Its calls block.
#[derive(Debug)]
pub struct Disk {
    root: PathBuf,
    index: Database,
    sync: bool,
    /// How often the index was changed.
    changed: AtomicU64,
    /// What is going to be in the index.
    pending: File,
}

fn index_error(error: impl Into<redb::Error>) -> DiskError {
    DiskError::Index(error.into())
}

impl Disk {
    /// Opens the folder, or makes it. Under the index that is there, or one made again from the files.
    pub fn open(root: &Path, sync: bool, catalog: &mut Catalog) -> Result<Disk, DiskError> {
        let at = |path: &Path| {
            let path = path.to_owned();
            move |error| DiskError::Folder(path, error)
        };
        let temporary = root.join("tmp");
        // Nobody else writes here: what lies in it belonged to a process that was killed.
        let _ = std::fs::remove_dir_all(&temporary);
        for folder in [root.join("b3"), root.join("names"), temporary] {
            std::fs::create_dir_all(&folder).map_err(at(&folder))?;
        }
        let path = root.join("index.redb");
        let known = path.exists();
        let open = || Database::builder().set_cache_size(CACHE_BYTES).create(&path);
        let (index, known) = match open() {
            Ok(index) => (index, known),
            Err(redb::DatabaseError::Storage(redb::StorageError::Io(error)))
                if error.kind() != io::ErrorKind::InvalidData =>
            {
                return Err(DiskError::Folder(path, error));
            }
            Err(error @ redb::DatabaseError::DatabaseAlreadyOpen) => return Err(index_error(error)),
            Err(error) => {
                tracing::error!(%error, "the index cannot be read and is made again from the files");
                std::fs::rename(&path, root.join("index.broken")).map_err(at(&path))?;
                (open().map_err(index_error)?, false)
            }
        };
        let pending = root.join(PENDING);
        let pending =
            File::options().write(true).create(true).truncate(false).open(&pending).map_err(at(&pending))?;
        let disk = Disk { root: root.to_owned(), index, sync, changed: AtomicU64::new(0), pending };
        disk.catch_up()?;
        if !known || !disk.load(catalog)? {
            let changes = disk.found(catalog).map_err(at(root))?;
            disk.commit(&changes)?;
            tracing::info!(
                objects = catalog.addresses().len(),
                names = catalog.names(),
                "index made from the files"
            );
        }
        Ok(disk)
    }

    /// Puts what the index holds into the catalog; false if it was never written.
    pub fn load(&self, catalog: &mut Catalog) -> Result<bool, DiskError> {
        let read = self.index.begin_read().map_err(index_error)?;
        let objects = match read.open_table(OBJECTS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(false),
            opened => opened.map_err(index_error)?,
        };
        for row in objects.iter().map_err(index_error)? {
            let (address, object) = row.map_err(index_error)?;
            if let Some((address, object)) = decode(address.value(), object.value()) {
                catalog.add(address, object);
            }
        }
        let names = read.open_table(NAMES).map_err(index_error)?;
        for row in names.iter().map_err(index_error)? {
            let (_, asset) = row.map_err(index_error)?;
            if let Some((name, asset)) = Asset::from_json(asset.value()) {
                catalog.set_name(&name, Arc::new(asset));
            }
        }
        Ok(true)
    }

    /// What the folder holds, put into the catalog.
    fn found(&self, catalog: &mut Catalog) -> io::Result<Vec<Change>> {
        let mut changes = Vec::new();
        self.each_object(&mut |address, len, stored| {
            // Whether it was stored by its address is not known: then it may not go with a name.
            let object =
                Object { len, sha256: None, direct: true, stored, bytes: None, condition: Arc::default() };
            catalog.add(address, object.clone());
            changes.push(Change::Object(address, object));
            Ok(())
        })?;
        walk(&self.root.join("names"), 1, &mut |path| {
            let Some((name, mut asset)) = std::fs::read(path).ok().and_then(|text| Asset::from_json(&text))
            else {
                return Ok(());
            };
            if catalog.object(&asset.variants[0].1).is_some() {
                asset.variants.retain(|(_, address)| catalog.object(address).is_some());
                let asset = Arc::new(asset);
                catalog.set_name(&name, asset.clone());
                changes.push(Change::Name(name.into(), asset));
            }
            Ok(())
        })?;
        Ok(changes)
    }

    /// Calls with the address, length and time of each object's file.
    pub fn each_object(&self, each: &mut impl FnMut(Address, u64, u64) -> io::Result<()>) -> io::Result<()> {
        walk(&self.root.join("b3"), 2, &mut |path| {
            let address = path.file_name().and_then(|name| Address::from_hex(name.to_str()?));
            let (Some(address), Ok(meta)) = (address, path.metadata()) else { return Ok(()) };
            let modified = meta.modified().ok().and_then(|at| at.duration_since(std::time::UNIX_EPOCH).ok());
            each(address, meta.len(), modified.unwrap_or_default().as_secs())
        })
    }

    /// Makes all of it durable at once.
    pub fn commit(&self, changes: &[Change]) -> Result<(), DiskError> {
        let write = self.index.begin_write().map_err(index_error)?;
        let number = self.changed.load(Ordering::Relaxed) + 1;
        {
            write.open_table(CHANGED).map_err(index_error)?.insert((), number).map_err(index_error)?;
            let mut objects = write.open_table(OBJECTS).map_err(index_error)?;
            let mut names = write.open_table(NAMES).map_err(index_error)?;
            for change in changes {
                match change {
                    Change::Object(address, object) => {
                        objects.insert(&address.0[..], &encode(object)[..]).map_err(index_error)?;
                    }
                    Change::NoObject(address) => {
                        objects.remove(&address.0[..]).map_err(index_error)?;
                    }
                    Change::Name(name, asset) => {
                        let text = asset.to_json(name).to_string();
                        names.insert(&**name, text.as_bytes()).map_err(index_error)?;
                    }
                    Change::NoName(name) => {
                        names.remove(&**name).map_err(index_error)?;
                    }
                }
            }
        }
        write.commit().map_err(index_error)?;
        self.changed.store(number, Ordering::Relaxed);
        Ok(())
    }

    /// Writes down what the next commit is going to bring, for a process that is killed before it. The disk is not waited
    /// for, so that after a power cut this may be missing.
    pub fn note(&self, changes: &[Change]) -> io::Result<()> {
        let note = pending::encode(self.changed.load(Ordering::Relaxed) + 1, changes);
        self.pending.write_all_at(&note, 0)
    }

    /// Does what was noted and not done.
    fn catch_up(&self) -> Result<(), DiskError> {
        let read = self.index.begin_read().map_err(index_error)?;
        let number = match read.open_table(CHANGED) {
            Err(redb::TableError::TableDoesNotExist(_)) => 0,
            opened => {
                let row = opened.map_err(index_error)?.get(()).map_err(index_error)?;
                row.map_or(0, |row| row.value())
            }
        };
        self.changed.store(number, Ordering::Relaxed);
        match File::open(self.root.join(PENDING)).ok().and_then(pending::read) {
            // It can all be had again, so that a full disk is no reason not to start.
            Some((next, changes)) if next == number + 1 => self.commit(&changes).unwrap_or_else(|error| {
                tracing::warn!(%error, "what was noted before the process ended is not in the index");
            }),
            _ => {}
        }
        Ok(())
    }

    pub fn temporary_folder(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub fn syncs(&self) -> bool {
        self.sync
    }

    pub fn path_of(&self, address: &Address) -> PathBuf {
        let hex = address.hex();
        self.root.join("b3").join(&hex[..2]).join(&hex[2..4]).join(&hex)
    }

    pub fn outboard_of(&self, address: &Address) -> PathBuf {
        let mut path = self.path_of(address).into_os_string();
        path.push(OUTBOARD);
        path.into()
    }

    /// Moves an object to its place; its outboard first, so that no object is without one. The folders that must be
    /// synced go into the set: that of the file if the file itself was.
    pub fn publish(
        &self,
        address: &Address,
        (bytes, synced): (&ArrivedBytes, bool),
        folders: &mut BTreeSet<PathBuf>,
    ) -> io::Result<()> {
        let ArrivedBytes::Disk { file, outboard } = bytes else { return Ok(()) };
        let path = self.path_of(address);
        let folder = path.parent().unwrap_or(&self.root);
        if !folder.is_dir() {
            std::fs::create_dir_all(folder)?;
            folders.extend(folder.ancestors().skip(1).take(2).map(Path::to_owned));
        }
        if let Some(outboard) = outboard {
            std::fs::rename(&outboard.path, self.outboard_of(address))?;
        }
        std::fs::rename(&file.path, &path)?;
        if synced {
            folders.insert(folder.to_owned());
        }
        Ok(())
    }

    /// Has the disk remember the names of the files in these folders.
    pub fn sync_folders(&self, folders: &BTreeSet<PathBuf>) -> io::Result<()> {
        if self.sync {
            for folder in folders {
                File::open(folder)?.sync_all()?;
            }
        }
        Ok(())
    }

    /// Whether an object's file is there.
    pub fn has_file(&self, address: &Address) -> bool {
        self.path_of(address).is_file()
    }

    pub fn unlink(&self, address: &Address) {
        // An outboard without an object is harmless, an object without one costs a pass over it.
        let _ = std::fs::remove_file(self.path_of(address));
        let _ = std::fs::remove_file(self.outboard_of(address));
    }

    /// Writes or removes the small file of a name. It is not synced: it is needed only if the index is lost.
    pub fn note_name(&self, name: &str, asset: Option<&Asset>) -> io::Result<()> {
        let hex = blake3::hash(name.as_bytes()).to_hex();
        let folder = self.root.join("names").join(&hex[..2]);
        let path = folder.join(format!("{hex}.json"));
        let Some(asset) = asset else {
            return match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            };
        };
        std::fs::create_dir_all(&folder)?;
        let temporary = Temporary::new(&self.temporary_folder());
        std::fs::write(&temporary.path, asset.to_json(name).to_string())?;
        std::fs::rename(&temporary.path, path)
    }
}

/// Calls for each file so many folders down.
fn walk(folder: &Path, depth: usize, each: &mut impl FnMut(&Path) -> io::Result<()>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if depth == 0 {
            each(&entry.path())?;
        } else if entry.file_type()?.is_dir() {
            walk(&entry.path(), depth - 1, each)?;
        }
    }
    Ok(())
}

/// An object's row: length, when it was stored, whether by its address, and its SHA-256 if that is known.
pub(super) fn encode(object: &Object) -> Vec<u8> {
    let mut row = Vec::with_capacity(49);
    row.extend_from_slice(&object.len.to_le_bytes());
    row.extend_from_slice(&object.stored.to_le_bytes());
    row.push(u8::from(object.direct));
    row.extend_from_slice(object.sha256.as_ref().map_or(&[][..], |sha256| &sha256[..]));
    row
}

pub(super) fn decode(address: &[u8], row: &[u8]) -> Option<(Address, Object)> {
    let (len, rest) = row.split_first_chunk::<8>()?;
    let (stored, rest) = rest.split_first_chunk::<8>()?;
    let (direct, sha256) = rest.split_first()?;
    let object = Object {
        len: u64::from_le_bytes(*len),
        stored: u64::from_le_bytes(*stored),
        direct: *direct == 1,
        sha256: sha256.try_into().ok(),
        bytes: None,
        condition: Arc::<Condition>::default(),
    };
    Some((Address(address.try_into().ok()?), object))
}
