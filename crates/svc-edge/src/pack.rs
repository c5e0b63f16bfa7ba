//! Packs: map tiles in one file, read in pieces and never trusted.
//!
//! Start from [`Pack`]. In reading order: [`coord`] says where a tile is, [`kind`] what it is made of, [`read_at`] how
//! bytes are reached; [`header`], [`varint`], [`directory`] and [`metadata`] are the format, each a pure function of
//! bytes; [`pmtiles`] puts them together with a [`cache`] of directories; [`mbtiles`] is the other format, through
//! SQLite. [`tile_set`] is what clients are told of either. [`writer`] writes an archive, [`convert`] turns one format
//! into the other, [`grow`] makes an archive of single tiles, [`verify`] looks at everything, [`sample`] draws packs for tests.
//!
//! Every length is checked against the file's size and a cap before it is used, and whatever is decompressed stops
//! at a cap, so a hostile file costs its size and a constant.

pub mod cache;
pub mod convert;
pub mod coord;
pub mod directory;
mod fault;
pub mod grow;
pub mod header;
pub mod kind;
pub mod mbtiles;
pub mod metadata;
mod mount;
pub mod pmtiles;
pub mod read_at;
pub mod sample;
pub mod tile_set;
pub mod varint;
pub mod verify;
pub mod writer;

pub(crate) use cache::DIRECTORIES;
pub use cache::DirectoryCache;
pub use coord::TileCoord;
pub use fault::{Fault, PackError};
pub use kind::{Compression, TileKind};
pub(crate) use mbtiles::CONNECTION;
pub use mbtiles::MbTiles;
pub use metadata::Metadata;
pub use mount::Pack;
pub use pmtiles::Pmtiles;
pub use read_at::{PackFile, ReadAt};
pub use tile_set::TileSet;
pub use writer::Writer;

use bytes::Bytes;

/// A tile as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    pub bytes: Bytes,
    pub compression: Compression,
}

/// What one tile may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// As it is stored.
    pub tile_bytes: u64,
    /// Decompressed.
    pub decoded_bytes: u64,
}

impl Default for Limits {
    /// The largest real tiles seen have 1.5 MiB; a guess that leaves room.
    fn default() -> Self {
        Self { tile_bytes: 16 << 20, decoded_bytes: 32 << 20 }
    }
}

impl Tile {
    /// The tile without its compression.
    pub fn decoded(self, limits: Limits) -> Result<Bytes, Fault> {
        self.compression.decode(self.bytes, limits.decoded_bytes)
    }
}
