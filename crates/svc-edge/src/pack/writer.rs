//! Writes a PMTiles archive: clustered, each content once, the same bytes for the same tiles.
//!
//! Tiles come in the order of their ids. Contents and entries go to temporary files of the caller, so memory does
//! not grow with the archive; only the hashes by which a content is known again are kept, up to a cap.

use super::directory::{DIRECTORY_BYTES_MAX, Directory, ENTRIES_MAX, Entry};
use super::header::{Geography, HEADER_BYTES, Header, ROOT_BYTES_MAX, Section};
use super::{Compression, Metadata, TileCoord, TileKind};
use std::collections::HashMap;
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};

/// Contents that are known again; beyond, one may be stored twice. About 100 MiB.
const CONTENTS_MAX: usize = 1 << 21;
/// Entries of a leaf directory, unless there are so many that the root would not hold all leaves.
const LEAF_ENTRIES: usize = 4096;
/// An entry in the temporary file.
const RECORD_BYTES: usize = 24;

/// An archive that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WriteError {
    #[error("the archive cannot be written: {0}")]
    Write(#[from] io::Error),
    #[error("tile {0} comes out of order or for the second time")]
    Order(TileCoord),
    #[error("tile {0} has no bytes, or more than 4 GiB")]
    Size(TileCoord),
    #[error("an archive without tiles is not allowed")]
    NoTiles,
    #[error("there are too many tiles for one archive")]
    TooMany,
}

/// What is the same for all tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub kind: TileKind,
    /// Of the tiles; they come compressed.
    pub compression: Compression,
    /// Of directories and metadata.
    pub internal: Compression,
}

/// A writer on its way. `S` is a temporary file, or memory.
#[derive(Debug)]
pub struct Writer<S: Read + Write + Seek> {
    layout: Layout,
    contents: BufWriter<S>,
    records: BufWriter<S>,
    /// By their hash.
    known: HashMap<blake3::Hash, Section>,
    /// The entry that may still grow.
    open: Option<Entry>,
    first: Option<TileCoord>,
    last: Option<TileCoord>,
    content_bytes: u64,
    addressed: u64,
    entries: u64,
    stored: u64,
}

impl<S: Read + Write + Seek> Writer<S> {
    /// Two empty temporary files are needed, one for the contents of tiles and one for 24 bytes an entry.
    pub fn new(layout: Layout, contents: S, records: S) -> Self {
        Self {
            layout,
            contents: BufWriter::new(contents),
            records: BufWriter::new(records),
            known: HashMap::new(),
            open: None,
            first: None,
            last: None,
            content_bytes: 0,
            addressed: 0,
            entries: 0,
            stored: 0,
        }
    }

    /// Adds a tile.
    pub fn push(&mut self, coord: TileCoord, bytes: &[u8]) -> Result<(), WriteError> {
        let id = coord.id();
        if self.last.is_some_and(|last| last.id() >= id) {
            return Err(WriteError::Order(coord));
        }
        let length = u32::try_from(bytes.len()).ok().filter(|length| *length > 0);
        let length = length.ok_or(WriteError::Size(coord))?;
        let hash = blake3::hash(bytes);
        let place = match self.known.get(&hash) {
            Some(place) => *place,
            None => self.store(hash, bytes)?,
        };
        self.first.get_or_insert(coord);
        self.last = Some(coord);
        self.addressed += 1;
        match &mut self.open {
            Some(open)
                if open.section() == place && open.id + u64::from(open.run) == id && open.run < u32::MAX =>
            {
                open.run += 1;
            }
            _ => {
                self.close()?;
                self.open = Some(Entry { id, offset: place.offset, length, run: 1 });
            }
        }
        Ok(())
    }

    /// Puts the archive together. Directories that do not fit into the root become leaves.
    pub fn finish(
        mut self,
        metadata: &Metadata,
        geography: Geography,
        out: &mut dyn Write,
    ) -> Result<Header, WriteError> {
        self.close()?;
        let (Some(first), Some(last)) = (self.first, self.last) else { return Err(WriteError::NoTiles) };
        let records = self.records.into_inner().map_err(io::IntoInnerError::into_error)?;
        let mut records = Records { file: records, count: self.entries, internal: self.layout.internal };
        let (root, leaf_entries, leaf_bytes) = records.root()?;
        let json = self.layout.internal.encode(metadata.to_json().as_bytes())?;

        let mut end = HEADER_BYTES as u64;
        let mut section = |length: u64| {
            end += length;
            Section { offset: end - length, length }
        };
        let header = Header {
            root: section(root.len() as u64),
            metadata: section(json.len() as u64),
            leaves: section(leaf_bytes),
            tiles: section(self.content_bytes),
            addressed: self.addressed,
            entries: self.entries,
            contents: self.stored,
            clustered: true,
            internal: self.layout.internal,
            compression: self.layout.compression,
            kind: self.layout.kind,
            min_zoom: first.z(),
            max_zoom: last.z(),
            geography,
        };
        out.write_all(&header.to_bytes())?;
        out.write_all(&root)?;
        out.write_all(&json)?;
        if let Some(leaf_entries) = leaf_entries {
            // Compressing once more takes time, and keeping what was compressed would take memory.
            records.leaves(leaf_entries, out)?;
        }
        let mut contents = self.contents.into_inner().map_err(io::IntoInnerError::into_error)?;
        contents.rewind()?;
        io::copy(&mut contents, out)?;
        out.flush()?;
        Ok(header)
    }

    fn store(&mut self, hash: blake3::Hash, bytes: &[u8]) -> io::Result<Section> {
        let place = Section { offset: self.content_bytes, length: bytes.len() as u64 };
        self.contents.write_all(bytes)?;
        self.content_bytes += place.length;
        self.stored += 1;
        if self.known.len() < CONTENTS_MAX {
            self.known.insert(hash, place);
        }
        Ok(place)
    }

    fn close(&mut self) -> io::Result<()> {
        let Some(entry) = self.open.take() else { return Ok(()) };
        self.entries += 1;
        self.records.write_all(&entry.id.to_le_bytes())?;
        self.records.write_all(&entry.offset.to_le_bytes())?;
        self.records.write_all(&entry.length.to_le_bytes())?;
        self.records.write_all(&entry.run.to_le_bytes())
    }
}

/// The temporary file of entries.
struct Records<S> {
    file: S,
    count: u64,
    internal: Compression,
}

impl<S: Read + Seek> Records<S> {
    /// The compressed root directory; if it names leaves, the entries of each and the bytes of all.
    fn root(&mut self) -> Result<(Vec<u8>, Option<usize>, u64), WriteError> {
        // With more entries than bytes it is not tried: a root that large would be slow to search through anyway.
        if self.count <= ROOT_BYTES_MAX as u64 {
            self.file.rewind()?;
            let entries = read_entries(&mut BufReader::new(&mut self.file), self.count as usize)?;
            let root = self.internal.encode(&Directory::write(&entries))?;
            if root.len() <= ROOT_BYTES_MAX {
                return Ok((root, None, 0));
            }
        }
        let mut leaf_entries = LEAF_ENTRIES;
        while leaf_entries <= ENTRIES_MAX {
            let leaves = self.leaves(leaf_entries, &mut io::sink())?;
            let root = self.internal.encode(&Directory::write(&leaves))?;
            if root.len() <= ROOT_BYTES_MAX {
                let bytes = leaves.iter().map(|leaf| u64::from(leaf.length)).sum();
                return Ok((root, Some(leaf_entries), bytes));
            }
            leaf_entries *= 2;
        }
        Err(WriteError::TooMany)
    }

    /// Writes the leaf directories and returns the entries that name them.
    fn leaves(&mut self, leaf_entries: usize, out: &mut dyn Write) -> Result<Vec<Entry>, WriteError> {
        self.file.rewind()?;
        let mut records = BufReader::new(&mut self.file);
        let (mut leaves, mut offset, mut left) = (Vec::new(), 0, self.count);
        while left > 0 {
            let entries = read_entries(&mut records, left.min(leaf_entries as u64) as usize)?;
            left -= entries.len() as u64;
            let bytes = Directory::write(&entries);
            if bytes.len() as u64 > DIRECTORY_BYTES_MAX {
                return Err(WriteError::TooMany);
            }
            let bytes = self.internal.encode(&bytes)?;
            out.write_all(&bytes)?;
            leaves.push(Entry { id: entries[0].id, offset, length: bytes.len() as u32, run: 0 });
            offset += bytes.len() as u64;
        }
        Ok(leaves)
    }
}

fn read_entries(records: &mut impl Read, count: usize) -> io::Result<Vec<Entry>> {
    let mut entries = Vec::with_capacity(count);
    for _ in 0..count {
        let mut record = [0; RECORD_BYTES];
        records.read_exact(&mut record)?;
        let word =
            |at: usize| record[at..].first_chunk().map_or(0, |bytes: &[u8; 4]| u32::from_le_bytes(*bytes));
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        entries.push(Entry { id: long(0), offset: long(8), length: word(16), run: word(20) });
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn writer() -> Writer<Cursor<Vec<u8>>> {
        let (kind, compression) = (TileKind::Other, Compression::None);
        let layout = Layout { kind, compression, internal: Compression::None };
        Writer::new(layout, Cursor::default(), Cursor::default())
    }

    fn coord(id: u64) -> TileCoord {
        TileCoord::of_id(id).unwrap()
    }

    #[test]
    fn runs_and_repeated_contents_are_stored_once() {
        let mut writer = writer();
        for (id, bytes) in [(1, "sea"), (2, "sea"), (3, "land"), (4, "sea"), (7, "sea")] {
            writer.push(coord(id), bytes.as_bytes()).unwrap();
        }
        let mut out = Vec::new();
        let header = writer.finish(&Metadata::default(), Geography::default(), &mut out).unwrap();
        assert_eq!((header.addressed, header.entries, header.contents), (5, 4, 2));
        assert_eq!((header.min_zoom, header.max_zoom), (1, 2));
        assert_eq!(Header::parse(&out, out.len() as u64), Ok(header));
        assert_eq!(out[127..144], [4, 1, 2, 1, 3, 2, 1, 1, 1, 3, 4, 3, 3, 1, 0, 1, 1]);
        assert_eq!(out[144..], *b"{}sealand");
    }

    #[test]
    fn tiles_out_of_order_or_without_bytes_are_refused() {
        let mut tiles = writer();
        tiles.push(coord(5), b"x").unwrap();
        assert!(matches!(tiles.push(coord(5), b"x"), Err(WriteError::Order(_))));
        assert!(matches!(tiles.push(coord(4), b"x"), Err(WriteError::Order(_))));
        assert!(matches!(tiles.push(coord(6), b""), Err(WriteError::Size(_))));
        let empty = writer().finish(&Metadata::default(), Geography::default(), &mut io::sink());
        assert!(matches!(empty, Err(WriteError::NoTiles)));
    }
}
