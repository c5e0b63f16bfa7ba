//! A PMTiles archive, read a piece at a time.
//!
//! Opening reads the front of the file and the metadata. A tile costs at most the leaf directory that names it,
//! unless that is cached, and the tile. Archives may nest leaf directories, though no writer known does; each level
//! is one more read.

use super::directory::{DIRECTORY_BYTES_MAX, Directory, Entry, Found, Leaf, Span};
use super::header::{FRONT_BYTES, Header, Section};
use super::metadata::{METADATA_BYTES_MAX, Metadata};
use super::{DirectoryCache, Fault, Limits, PackError, ReadAt, Tile, TileCoord, TileSet};
use bytes::Bytes;
use std::ops::ControlFlow;
use std::sync::Arc;

/// Leaf directories on the way to a tile.
pub const DEPTH_MAX: usize = 3;

#[derive(Debug)]
pub struct Pmtiles<R> {
    source: R,
    header: Header,
    root: Directory,
    set: TileSet,
    limits: Limits,
    cache: Arc<DirectoryCache>,
    /// Ours in the cache.
    number: u64,
}

impl<R: ReadAt> Pmtiles<R> {
    pub fn open(source: R, limits: Limits, cache: Arc<DirectoryCache>) -> Result<Self, PackError> {
        let size = source.size();
        let front = source.read_at(0, size.min(FRONT_BYTES as u64) as usize)?;
        let header = Header::parse(&front, size)?;
        // The header says that it ends within the front and within the file.
        let root =
            front.slice(header.root.offset as usize..(header.root.offset + header.root.length) as usize);
        let root = Directory::decode(root, header.internal, &Span::root(&header))?;
        if header.metadata.length > METADATA_BYTES_MAX {
            return Err(Fault::MetadataCap.into());
        }
        let metadata = match header.metadata.length as usize {
            // Some writers leave it out.
            0 => Metadata::default(),
            length => {
                let json = source.read_at(header.metadata.offset, length)?;
                Metadata::parse(&header.internal.decode(json, METADATA_BYTES_MAX)?)?
            }
        };
        let number = cache.enrol();
        let set = TileSet::of_header(&header, metadata);
        Ok(Self { source, header, root, set, limits, cache, number })
    }

    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn metadata(&self) -> &Metadata {
        &self.set.metadata
    }

    pub fn tile_set(&self) -> &TileSet {
        &self.set
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn source(&self) -> &R {
        &self.source
    }

    /// Where in the file a tile is.
    pub fn locate(&self, coord: TileCoord) -> Result<Option<Section>, PackError> {
        let id = coord.id();
        let mut found = self.root.find(id);
        let mut path = Vec::new();
        loop {
            match found {
                Found::Absent => return Ok(None),
                Found::Tile(tile) => return Ok(Some(self.place(self.header.tiles, tile)?)),
                Found::Leaf(leaf) => found = self.leaf(leaf, &mut path)?.find(id),
            }
        }
    }

    /// Like [`Pmtiles::locate`], but with what is in memory alone; none if a leaf directory has to be read.
    pub fn locate_held(&self, coord: TileCoord) -> Option<Result<Option<Section>, PackError>> {
        let id = coord.id();
        let mut found = self.root.find(id);
        let mut path = Vec::new();
        loop {
            match found {
                Found::Absent => return Some(Ok(None)),
                Found::Tile(tile) => {
                    return Some(self.place(self.header.tiles, tile).map(Some).map_err(PackError::from));
                }
                Found::Leaf(leaf) => {
                    if let Err(fault) = step(&mut path, leaf) {
                        return Some(Err(fault.into()));
                    }
                    match self.cache.find(self.number, leaf)? {
                        Ok(directory) => found = directory.find(id),
                        Err(fault) => return Some(Err(fault.into())),
                    }
                }
            }
        }
    }

    /// A tile as it is stored.
    pub fn tile(&self, coord: TileCoord) -> Result<Option<Tile>, PackError> {
        match self.locate(coord)? {
            Some(place) => Ok(Some(Tile { bytes: self.read(place)?, compression: self.header.compression })),
            None => Ok(None),
        }
    }

    /// The bytes of a tile that was located.
    pub fn read(&self, place: Section) -> Result<Bytes, PackError> {
        if place.length > self.limits.tile_bytes {
            return Err(Fault::TileCap.into());
        }
        Ok(self.source.read_at(place.offset, place.length as usize)?)
    }

    /// Visits all entries in the order of their tile ids, their places as in the file. A leaf directory that cannot
    /// be read is told of and passed over. The cache is neither asked nor filled.
    pub fn walk(
        &self,
        visit: &mut dyn FnMut(Result<Entry, (Leaf, PackError)>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        self.walk_directory(&self.root, &mut Vec::new(), visit)
    }

    fn walk_directory(
        &self,
        directory: &Directory,
        path: &mut Vec<Section>,
        visit: &mut dyn FnMut(Result<Entry, (Leaf, PackError)>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        for (at, entry) in directory.entries().iter().enumerate() {
            let Some(leaf) = directory.leaf(at) else {
                let offset = self.header.tiles.offset + entry.offset;
                visit(Ok(Entry { offset, ..*entry }))?;
                continue;
            };
            let depth = path.len();
            match step(path, leaf).map_err(PackError::from).and_then(|()| self.read_leaf(leaf)) {
                Ok(directory) => self.walk_directory(&directory, path, visit)?,
                Err(error) => visit(Err((leaf, error)))?,
            }
            path.truncate(depth);
        }
        ControlFlow::Continue(())
    }

    fn leaf(&self, leaf: Leaf, path: &mut Vec<Section>) -> Result<Arc<Directory>, PackError> {
        step(path, leaf)?;
        if let Some(known) = self.cache.find(self.number, leaf) {
            return Ok(known?);
        }
        let decoded = match self.read_leaf(leaf) {
            Ok(directory) => Ok(Arc::new(directory)),
            Err(PackError::Invalid(fault)) => Err(fault),
            // What could not be read may be readable the next time.
            Err(error) => return Err(error),
        };
        self.cache.keep(self.number, leaf, decoded.clone());
        Ok(decoded?)
    }

    fn read_leaf(&self, leaf: Leaf) -> Result<Directory, PackError> {
        if leaf.section.length > DIRECTORY_BYTES_MAX {
            return Err(Fault::DirectoryCap.into());
        }
        let place = self.place(self.header.leaves, leaf.section)?;
        let bytes = self.source.read_at(place.offset, place.length as usize)?;
        let span = Span { ids: leaf.from..leaf.until, ..Span::root(&self.header) };
        Ok(Directory::decode(bytes, self.header.internal, &span)?)
    }

    fn place(&self, section: Section, part: Section) -> Result<Section, Fault> {
        section.part(part).ok_or(Fault::EntryOutside)
    }
}

/// Goes on to a leaf directory, unless the path led through it already or is too long.
fn step(path: &mut Vec<Section>, leaf: Leaf) -> Result<(), Fault> {
    if path.contains(&leaf.section) {
        return Err(Fault::Cycle);
    }
    if path.len() == DEPTH_MAX {
        return Err(Fault::Depth);
    }
    path.push(leaf.section);
    Ok(())
}
