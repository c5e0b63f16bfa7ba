//! One generation of a pack: a file as it was when it was mounted, for as long as anybody reads it.

use super::checked::{CheckedFile, Damage, Policy, Stamp};
use super::remote::{Manner, RemoteFile};
use crate::address::Address;
use crate::pack::cache::Kept;
use crate::pack::header::Section;
use crate::pack::{Compression, DirectoryCache, Fault, Limits, Pack, PackError, Pmtiles, ReadAt, TileCoord};
use crate::semantics::{Coding, repr_digest};
use bytes::Bytes;
use http::HeaderValue;
use ron_kernel::http::Written;
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use tokio::runtime::Handle;

/// Tiles in memory, by the number of their generation and their place in it.
pub(super) type TileCache = Kept<(u64, Section), Arc<Content>>;

/// How many look-ups of one MBTiles file go on at a time; a guess.
const CONNECTIONS: usize = 4;
/// The largest tile that is read and hashed without leaving the runtime.
const READ_NOW: usize = 64 << 10;
/// The first bytes of a file have a part in naming its generation.
const FRONT: u64 = 16 << 10;

/// What can be sent: bytes as they are stored, and what they are called.
#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) bytes: Bytes,
    pub(crate) coding: Coding,
    pub(crate) address: Address,
    pub(crate) repr_digest: HeaderValue,
    /// The fields of a plain answer as HTTP/1.1 writes them, for a while and for good.
    written: [OnceLock<Arc<Written>>; 2],
}

/// What those fields may take.
const WRITTEN_BYTES: usize = 1024;

impl Content {
    pub(crate) fn new(bytes: Bytes, coding: Coding) -> Content {
        let address = Address::from(blake3::hash(&bytes));
        let digest: [u8; 32] = Sha256::digest(&bytes).into();
        let repr_digest = repr_digest(&digest).try_into().unwrap_or_else(|_| HeaderValue::from_static(""));
        Content { bytes, coding, address, repr_digest, written: Default::default() }
    }

    /// The fields of a plain answer, made once. Besides this content they depend on nothing but whether it is good for ever.
    pub(crate) fn written(&self, forever: bool, make: impl FnOnce() -> Written) -> Arc<Written> {
        self.written[usize::from(forever)].get_or_init(|| Arc::new(make())).clone()
    }

    /// The same without its coding.
    pub(crate) fn decoded(&self, limits: Limits) -> Result<Content, Fault> {
        let compression = match self.coding {
            Coding::Identity => Compression::None,
            Coding::Gzip => Compression::Gzip,
            Coding::Brotli => Compression::Brotli,
            Coding::Zstd => Compression::Zstd,
        };
        let bytes = compression.decode(self.bytes.clone(), limits.decoded_bytes)?;
        Ok(Content::new(bytes, Coding::Identity))
    }
}

/// What all packs share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) directories: Arc<DirectoryCache>,
    pub(super) tiles: TileCache,
    pub(super) limits: Limits,
    pub(super) policy: Arc<Policy>,
    /// Where trees are kept; `None` in memory.
    pub(super) folder: Option<PathBuf>,
    pub(super) mounts: AtomicU64,
}

/// Where a pack's bytes are.
#[derive(Debug)]
pub(crate) enum Source {
    Local(Arc<CheckedFile>),
    Remote(Box<RemoteFile>),
}

impl Source {
    /// The address of all bytes, once it is known. That of a remote pack never is.
    pub(crate) fn address(&self) -> Option<Address> {
        self.local()?.address()
    }

    pub(crate) fn local(&self) -> Option<&Arc<CheckedFile>> {
        match self {
            Source::Local(file) => Some(file),
            Source::Remote(_) => None,
        }
    }

    pub(crate) fn remote(&self) -> Option<&RemoteFile> {
        match self {
            Source::Local(_) => None,
            Source::Remote(file) => Some(file),
        }
    }
}

impl ReadAt for Source {
    fn size(&self) -> u64 {
        match self {
            Source::Local(file) => file.size(),
            Source::Remote(file) => file.size(),
        }
    }

    fn read_at(&self, offset: u64, length: usize) -> std::io::Result<Bytes> {
        match self {
            Source::Local(file) => file.read_at(offset, length),
            Source::Remote(file) => file.read_at(offset, length),
        }
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub(crate) file: Arc<Source>,
    pub(crate) pack: Pack<Arc<Source>>,
    /// The same for the same file after a restart, another for another file.
    pub(crate) generation: String,
    shared: Arc<Shared>,
    /// Which no other generation of this process has.
    number: u64,
    /// Bytes were found that are not those of the address.
    pub(super) damaged: AtomicBool,
    /// Why it has no address and gets none.
    pub(super) unhashed: OnceLock<String>,
}

impl Mounted {
    /// Opens a pack, by its header, metadata and root directory.
    pub(super) fn open(path: &Path, shared: &Arc<Shared>) -> Result<Mounted, PackError> {
        let folder = shared.folder.as_deref();
        let checked = Arc::new(CheckedFile::open(path, shared.policy.clone(), folder)?);
        let stamp = checked.stamp().bytes();
        let file = Arc::new(Source::Local(checked));
        let pack = Pack::of(file.clone(), path, shared.limits, shared.directories.clone(), CONNECTIONS)?;
        Mounted::of(file, pack, &stamp, shared)
    }

    /// Opens a pack on a server. Blocks.
    pub(super) fn reach(
        manner: Manner,
        runtime: &Handle,
        shared: &Arc<Shared>,
    ) -> Result<Mounted, PackError> {
        let remote = RemoteFile::open(manner, runtime, shared.directories.inventory())
            .map_err(|fault| PackError::Read(fault.into()))?;
        let tag = remote.tag().to_owned();
        let file = Arc::new(Source::Remote(Box::new(remote)));
        let pack = Pmtiles::open(file.clone(), shared.limits, shared.directories.clone())?;
        Mounted::of(file, Pack::Pmtiles(pack), &tag, shared)
    }

    fn of(
        file: Arc<Source>,
        pack: Pack<Arc<Source>>,
        stamp: &[u8],
        shared: &Arc<Shared>,
    ) -> Result<Mounted, PackError> {
        let mut hasher = blake3::Hasher::new();
        hasher.update(stamp);
        hasher.update(&file.read_at(0, usize::try_from(file.size().min(FRONT)).unwrap_or(0))?);
        Ok(Mounted {
            file,
            pack,
            generation: hasher.finalize().to_hex()[..16].to_owned(),
            shared: shared.clone(),
            number: shared.mounts.fetch_add(1, Ordering::Relaxed),
            damaged: AtomicBool::new(false),
            unhashed: OnceLock::new(),
        })
    }

    pub(super) fn is_of(&self, stamp: Stamp) -> bool {
        self.file.local().is_some_and(|file| file.stamp() == stamp)
    }

    pub(crate) fn limits(&self) -> Limits {
        self.shared.limits
    }

    /// A tile, if it can be had without waiting for a disk; the inner `None`: there is none.
    pub(crate) fn held(&self, coord: TileCoord) -> Option<Result<Option<Arc<Content>>, PackError>> {
        let place = match &self.pack {
            Pack::Pmtiles(pack) => match pack.locate_held(coord)? {
                Ok(Some(place)) => place,
                Ok(None) => return Some(Ok(None)),
                Err(error) => return Some(Err(error)),
            },
            Pack::MbTiles(_) => row(coord),
        };
        if let Some(content) = self.shared.tiles.find((self.number, place)) {
            return Some(Ok(Some(content)));
        }
        let Pack::Pmtiles(pack) = &self.pack else { return None };
        let length = usize::try_from(place.length).ok().filter(|length| *length <= READ_NOW)?;
        let bytes = self.file.local()?.read_now(place.offset, length)?;
        Some(Ok(Some(self.keep(place, bytes, pack.header().compression))))
    }

    fn keep(&self, place: Section, bytes: Bytes, compression: Compression) -> Arc<Content> {
        let coding = match compression {
            Compression::Unknown | Compression::None => Coding::Identity,
            Compression::Gzip => Coding::Gzip,
            Compression::Brotli => Coding::Brotli,
            Compression::Zstd => Coding::Zstd,
        };
        let content = Arc::new(Content::new(bytes, coding));
        let bytes = content.bytes.len() + size_of::<Content>() + WRITTEN_BYTES;
        self.shared.tiles.keep((self.number, place), content.clone(), bytes);
        content
    }

    /// A tile. Blocks.
    pub(crate) fn read(&self, coord: TileCoord) -> Result<Option<Arc<Content>>, PackError> {
        let (place, bytes, compression) = match &self.pack {
            Pack::Pmtiles(pack) => {
                let Some(place) = pack.locate(coord)? else { return Ok(None) };
                // Other tiles may have the same content.
                if let Some(content) = self.shared.tiles.find((self.number, place)) {
                    return Ok(Some(content));
                }
                (place, pack.read(place)?, pack.header().compression)
            }
            Pack::MbTiles(pack) => {
                let tile = pack.tile(coord);
                // SQLite reads by itself, so all that can be told is whether the file is still the same.
                let unchanged = self.file.local().map_or(Ok(true), |file| file.is_unchanged());
                if !unchanged? {
                    return Err(PackError::Read(Damage::Changed.into()));
                }
                let Some(tile) = tile? else { return Ok(None) };
                (row(coord), tile.bytes, tile.compression)
            }
        };
        Ok(Some(self.keep(place, bytes, compression)))
    }
}

/// A place for a tile that has none in a file we read ourselves.
fn row(coord: TileCoord) -> Section {
    Section { offset: coord.id(), length: 0 }
}
