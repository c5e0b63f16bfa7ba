//! What can be wrong with a pack.

use ron_kernel::admission::decode::DecodeError;
use std::io;

/// A pack, or a part of one, that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    #[error("the pack cannot be read: {0}")]
    Read(#[from] io::Error),
    #[error("the pack is invalid: {0}")]
    Invalid(#[from] Fault),
}

/// Why a pack, or a part of one, is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    #[error("it is neither a PMTiles archive nor an SQLite database")]
    NotAPack,
    #[error("it is a PMTiles archive of version {0}, only 3 is known")]
    Version(u8),
    #[error("the header's {0} is out of range")]
    Field(&'static str),
    #[error("the {0} lies outside of the file")]
    Outside(&'static str),
    #[error("the {0} and the {1} share bytes")]
    Shared(&'static str, &'static str),
    #[error("a directory is larger than the cap")]
    DirectoryCap,
    #[error("a directory is cut short, has bytes left over, or has a number that is too large")]
    Numbers,
    #[error("a directory has no entries")]
    NoEntries,
    #[error("the tile ids of a directory do not ascend, or overlap")]
    Order,
    #[error("the tile ids of a directory go beyond what was said of it")]
    Span,
    #[error("an entry has no bytes")]
    EmptyEntry,
    #[error("an entry lies outside of its section")]
    EntryOutside,
    #[error("two entries share a part of their bytes")]
    EntriesOverlap,
    #[error("leaf directories are nested too deeply")]
    Depth,
    #[error("a leaf directory leads to itself")]
    Cycle,
    #[error("it is not valid in its compression: {0}")]
    Decode(#[from] DecodeError),
    #[error("the metadata is larger than the cap")]
    MetadataCap,
    #[error("the metadata is not a JSON object")]
    Metadata,
    #[error("a tile is larger than the cap")]
    TileCap,
    #[error("it has vector tiles, but its metadata does not describe their layers")]
    VectorLayers,
    #[error("it says that it is clustered, but its tiles are not in order")]
    Clustered,
    #[error("it says of its {name} {stated}, but {found} is true")]
    Stated { name: &'static str, stated: u64, found: u64 },
    #[error("a tile is not of the type that the pack says")]
    Content,
    #[error("the SQLite database has no tiles table or view")]
    Schema,
    #[error("the SQLite database is corrupt")]
    Database,
    #[error("the SQLite database has a journal of unfinished changes beside it")]
    Journal,
    #[error(
        "a query takes more steps than the cap; an index on zoom_level, tile_column, tile_row is missing"
    )]
    Budget,
    #[error("a tile's row does not name a tile, or its data is no blob")]
    Row,
    #[error("a tile has more than one row")]
    Rows,
    #[error("a part of the pack cannot be read")]
    Unreadable,
    #[error("it has more entries than can be checked")]
    TooMany,
}
