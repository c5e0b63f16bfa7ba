//! The fixed part of a PMTiles archive: 127 bytes that say where everything else is.

use super::coord::ZOOM_MAX;
use super::{Compression, Fault, TileKind};

pub const HEADER_BYTES: usize = 127;
/// The header and the compressed root directory stand within this many first bytes.
pub const FRONT_BYTES: usize = 16_384;
/// The largest compressed root directory.
pub const ROOT_BYTES_MAX: usize = FRONT_BYTES - HEADER_BYTES;

const MAGIC: &[u8; 7] = b"PMTiles";

/// A run of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Section {
    pub offset: u64,
    pub length: u64,
}

impl Section {
    /// Where it ends; none if no file can be that long.
    pub fn end(self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }

    /// The bytes at a place within this section; none if they are not all in it.
    pub fn part(self, part: Self) -> Option<Self> {
        part.end().filter(|end| *end <= self.length)?;
        Some(Self { offset: self.offset.checked_add(part.offset)?, length: part.length })
    }
}

/// Where a pack's tiles lie on Earth, in ten-millionths of a degree. Nothing here depends on it, so it is as odd as
/// the file says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geography {
    /// West, south, east, north.
    pub bounds: [i32; 4],
    /// Longitude and latitude.
    pub center: [i32; 2],
    pub center_zoom: u8,
}

impl Default for Geography {
    /// The whole of the Mercator map.
    fn default() -> Self {
        Self {
            bounds: [-1_800_000_000, -850_511_287, 1_800_000_000, 850_511_287],
            center: [0, 0],
            center_zoom: 0,
        }
    }
}

/// A header whose sections lie within the file and apart from each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub root: Section,
    pub metadata: Section,
    pub leaves: Section,
    pub tiles: Section,
    /// Tiles that have an address; 0 if nobody counted.
    pub addressed: u64,
    /// Entries that name tiles; 0 if nobody counted.
    pub entries: u64,
    /// Different contents; 0 if nobody counted.
    pub contents: u64,
    /// Whether contents stand in the order of tile ids.
    pub clustered: bool,
    /// The compression of directories and metadata.
    pub internal: Compression,
    /// The compression of tiles.
    pub compression: Compression,
    pub kind: TileKind,
    pub min_zoom: u8,
    pub max_zoom: u8,
    pub geography: Geography,
}

impl Header {
    /// Reads a header out of the first bytes of a file of a size.
    pub fn parse(bytes: &[u8], file_bytes: u64) -> Result<Self, Fault> {
        if !bytes.starts_with(MAGIC) {
            return Err(Fault::NotAPack);
        }
        let bytes: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(Fault::Outside("header"))?;
        // The first writers put the digit.
        if !matches!(bytes[7], 3 | b'3') {
            return Err(Fault::Version(bytes[7]));
        }
        let u64_at =
            |at: usize| bytes[at..].first_chunk().map_or(0, |bytes: &[u8; 8]| u64::from_le_bytes(*bytes));
        let i32_at =
            |at: usize| bytes[at..].first_chunk().map_or(0, |bytes: &[u8; 4]| i32::from_le_bytes(*bytes));
        let section = |at: usize| Section { offset: u64_at(at), length: u64_at(at + 8) };
        let compression =
            |at: usize, name| Compression::ALL.get(usize::from(bytes[at])).copied().ok_or(Fault::Field(name));
        let header = Self {
            root: section(8),
            metadata: section(24),
            leaves: section(40),
            tiles: section(56),
            addressed: u64_at(72),
            entries: u64_at(80),
            contents: u64_at(88),
            clustered: match bytes[96] {
                0 => false,
                1 => true,
                _ => return Err(Fault::Field("clustered flag")),
            },
            internal: compression(97, "internal compression")?,
            compression: compression(98, "tile compression")?,
            kind: TileKind::ALL.get(usize::from(bytes[99])).copied().ok_or(Fault::Field("tile type"))?,
            min_zoom: bytes[100],
            max_zoom: bytes[101],
            geography: Geography {
                bounds: [i32_at(102), i32_at(106), i32_at(110), i32_at(114)],
                center_zoom: bytes[118],
                center: [i32_at(119), i32_at(123)],
            },
        };
        header.check(file_bytes)?;
        Ok(header)
    }

    fn check(&self, file_bytes: u64) -> Result<(), Fault> {
        if self.internal == Compression::Unknown {
            return Err(Fault::Field("internal compression"));
        }
        if self.min_zoom > self.max_zoom || self.max_zoom > ZOOM_MAX {
            return Err(Fault::Field("zoom range"));
        }
        if self.root.length == 0 || self.root.end().is_none_or(|end| end > FRONT_BYTES as u64) {
            return Err(Fault::Field("root directory"));
        }
        let sections = [
            ("header", Section { offset: 0, length: HEADER_BYTES as u64 }),
            ("root directory", self.root),
            ("metadata", self.metadata),
            ("leaf section", self.leaves),
            ("tile section", self.tiles),
        ];
        for (name, section) in sections {
            if section.end().is_none_or(|end| end > file_bytes) {
                return Err(Fault::Outside(name));
            }
        }
        let mut ordered = sections.map(|(name, section)| (section.offset, section.length, name));
        ordered.sort_unstable();
        // A section without bytes shares none, wherever it says it is.
        let mut used = ordered.iter().filter(|(_, length, _)| *length > 0);
        let mut last = used.next();
        for next in used {
            if let Some((offset, length, name)) = last
                && next.0 - offset < *length
            {
                return Err(Fault::Shared(name, next.2));
            }
            last = Some(next);
        }
        Ok(())
    }

    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend_from_slice(MAGIC);
        bytes.push(3);
        for section in [self.root, self.metadata, self.leaves, self.tiles] {
            bytes.extend_from_slice(&section.offset.to_le_bytes());
            bytes.extend_from_slice(&section.length.to_le_bytes());
        }
        for count in [self.addressed, self.entries, self.contents] {
            bytes.extend_from_slice(&count.to_le_bytes());
        }
        bytes.extend_from_slice(&[
            u8::from(self.clustered),
            self.internal as u8,
            self.compression as u8,
            self.kind as u8,
            self.min_zoom,
            self.max_zoom,
        ]);
        self.geography.bounds.iter().for_each(|part| bytes.extend_from_slice(&part.to_le_bytes()));
        bytes.push(self.geography.center_zoom);
        self.geography.center.iter().for_each(|part| bytes.extend_from_slice(&part.to_le_bytes()));
        bytes.try_into().expect("the parts above are 127 bytes")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Header {
        let section = |offset, length| Section { offset, length };
        Header {
            root: section(127, 100),
            metadata: section(227, 50),
            leaves: section(277, 1000),
            tiles: section(1277, 5000),
            addressed: 10,
            entries: 8,
            contents: 7,
            clustered: true,
            internal: Compression::Gzip,
            compression: Compression::Zstd,
            kind: TileKind::Mlt,
            min_zoom: 2,
            max_zoom: 14,
            geography: Geography { bounds: [-1, -2, 3, 4], center: [1, 2], center_zoom: 5 },
        }
    }

    #[test]
    fn a_header_reads_back_as_it_was_written() {
        assert_eq!(Header::parse(&good().to_bytes(), 6277), Ok(good()));
        let empty = Header { leaves: Section { offset: 130, length: 0 }, ..good() };
        assert_eq!(Header::parse(&empty.to_bytes(), 6277), Ok(empty), "an empty section may be anywhere");
    }

    #[test]
    fn a_header_that_cannot_be_true_is_refused() {
        let check = |change: &dyn Fn(&mut Header), fault| {
            let mut header = good();
            change(&mut header);
            assert_eq!(Header::parse(&header.to_bytes(), 6277), Err(fault));
        };
        check(&|h| h.tiles.length += 1, Fault::Outside("tile section"));
        check(&|h| h.tiles.offset = u64::MAX, Fault::Outside("tile section"));
        check(&|h| h.metadata.length = u64::MAX - 100, Fault::Outside("metadata"));
        check(&|h| h.leaves.offset = 276, Fault::Shared("metadata", "leaf section"));
        check(&|h| h.metadata.offset = 100, Fault::Shared("header", "metadata"));
        check(&|h| h.root.offset = 126, Fault::Shared("header", "root directory"));
        check(&|h| h.root.length = 16_258, Fault::Field("root directory"));
        check(&|h| h.root.length = 0, Fault::Field("root directory"));
        check(&|h| h.internal = Compression::Unknown, Fault::Field("internal compression"));
        check(&|h| h.min_zoom = 15, Fault::Field("zoom range"));
        check(&|h| h.max_zoom = 32, Fault::Field("zoom range"));
    }

    #[test]
    fn a_byte_that_means_nothing_is_refused() {
        for (at, value, fault) in [
            (0, b'p', Fault::NotAPack),
            (7, 2, Fault::Version(2)),
            (96, 2, Fault::Field("clustered flag")),
            (97, 5, Fault::Field("internal compression")),
            (98, 5, Fault::Field("tile compression")),
            (99, 7, Fault::Field("tile type")),
        ] {
            let mut bytes = good().to_bytes();
            bytes[at] = value;
            assert_eq!(Header::parse(&bytes, 6277), Err(fault));
        }
        let mut bytes = good().to_bytes();
        bytes[7] = b'3';
        assert_eq!(Header::parse(&bytes, 6277), Ok(good()), "an old way to write the version");
        for cut in 0..HEADER_BYTES {
            let fault = if cut < 7 { Fault::NotAPack } else { Fault::Outside("header") };
            assert_eq!(Header::parse(&bytes[..cut], 6277), Err(fault));
        }
    }
}
