//! From MBTiles to PMTiles and back.

use super::mbtiles::rows;
use super::verify::{Progress, Watch};
use super::writer::{Layout, WriteError, Writer};
use super::{Compression, Limits, MbTiles, PackError, Pmtiles, ReadAt, Tile, TileCoord, TileKind};
use rusqlite::{Connection, OpenFlags};
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::ops::ControlFlow;
use std::path::Path;

/// Tiles of an MBTiles file; an archive can claim more than any disk holds.
const TILES_MAX: u64 = 1 << 28;

/// A conversion that did not come to its end. What was written so far is no pack.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    #[error(transparent)]
    Pack(#[from] PackError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("the database cannot be written: {0}")]
    Database(#[from] rusqlite::Error),
    #[error("there are too many tiles for a database")]
    TooMany,
    #[error("stopped")]
    Stopped,
}

/// What a conversion did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Converted {
    pub tiles: u64,
    /// Rows that name no tile or have no bytes, which an archive cannot hold.
    pub skipped: u64,
}

/// Vector tiles are compressed by gzip, which every reader knows; images are compressed already.
pub(super) fn compression(kind: TileKind) -> Compression {
    if kind.is_vector() { Compression::Gzip } else { Compression::None }
}

pub(super) fn recoded(mut tile: Tile, to: Compression, limits: Limits) -> Result<Vec<u8>, PackError> {
    if tile.compression == Compression::Unknown {
        tile.compression = Compression::of_bytes(&tile.bytes);
    }
    if tile.compression == to {
        return Ok(tile.bytes.into());
    }
    Ok(to.encode(&tile.decoded(limits).map_err(PackError::from)?)?)
}

/// Writes the archive of a file. Two temporary files as for [`Writer::new`]; memory of eight bytes a tile.
pub fn to_pmtiles<S: Read + Write + Seek>(
    pack: &MbTiles,
    [contents, records]: [S; 2],
    out: &mut dyn Write,
    watch: Watch<'_>,
) -> Result<Converted, ConvertError> {
    let set = pack.tile_set();
    let compression = compression(set.kind);
    let mut writer =
        Writer::new(Layout { kind: set.kind, compression, internal: Compression::Gzip }, contents, records);
    let (mut ids, skipped) = pack.ids()?;
    ids.dedup();
    let (mut converted, total) = (Converted { tiles: 0, skipped }, ids.len() as u64);
    for (done, id) in (1..).zip(ids) {
        let Some(coord) = TileCoord::of_id(id) else { continue };
        match pack.tile(coord)?.filter(|tile| !tile.bytes.is_empty()) {
            None => converted.skipped += 1,
            Some(tile) => {
                writer.push(coord, &recoded(tile, compression, pack.limits())?)?;
                converted.tiles += 1;
            }
        }
        if watch(Progress { done, total }).is_break() {
            return Err(ConvertError::Stopped);
        }
    }
    writer.finish(&set.metadata, set.geography(), out)?;
    Ok(converted)
}

const SCHEMA: &str = "
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA application_id = 0x4d504258;
    BEGIN;
    CREATE TABLE metadata (name TEXT PRIMARY KEY, value TEXT);
    CREATE TABLE images (tile_id INTEGER PRIMARY KEY, tile_data BLOB);
    CREATE TABLE map (zoom_level INTEGER, tile_column INTEGER, tile_row INTEGER, tile_id INTEGER,
        PRIMARY KEY (zoom_level, tile_column, tile_row)) WITHOUT ROWID;
    CREATE VIEW tiles AS SELECT map.zoom_level AS zoom_level, map.tile_column AS tile_column,
        map.tile_row AS tile_row, images.tile_data AS tile_data
        FROM map JOIN images ON images.tile_id = map.tile_id;";

/// Writes the MBTiles file of an archive to a path where nothing is yet. A content is stored once.
pub fn to_mbtiles<R: ReadAt>(
    pack: &Pmtiles<R>,
    path: &Path,
    watch: Watch<'_>,
) -> Result<Converted, ConvertError> {
    File::create_new(path).map_err(PackError::from)?;
    let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE)?;
    db.execute_batch(SCHEMA)?;
    for (name, value) in rows::write(pack.tile_set()) {
        db.execute("INSERT OR IGNORE INTO metadata VALUES (?1, ?2)", (name, value))?;
    }
    let mut copy = Copy { pack, db: &db, done: 0 };
    let mut failure = None;
    let total = pack.header().addressed;
    let flow = pack.walk(&mut |step| {
        let copied = match step {
            Ok(entry) => copy.entry(&entry),
            Err((_, error)) => Err(error.into()),
        };
        if let Err(error) = copied {
            failure = Some(error);
            return ControlFlow::Break(());
        }
        watch(Progress { done: copy.done, total: total.max(copy.done) })
    });
    let tiles = copy.done;
    match failure {
        Some(error) => return Err(error),
        None if flow.is_break() => return Err(ConvertError::Stopped),
        None => {}
    }
    db.execute_batch("COMMIT")?;
    db.close().map_err(|(_, error)| error)?;
    File::open(path).and_then(|file| file.sync_all()).map_err(PackError::from)?;
    Ok(Converted { tiles, skipped: 0 })
}

struct Copy<'a, R> {
    pack: &'a Pmtiles<R>,
    db: &'a Connection,
    done: u64,
}

impl<R: ReadAt> Copy<'_, R> {
    fn entry(&mut self, entry: &super::directory::Entry) -> Result<(), ConvertError> {
        // Where a content is in the archive is as good a number as any, and the same whenever it is named.
        let place = i64::try_from(entry.offset).map_err(io::Error::other).map_err(PackError::from)?;
        let header = self.pack.header();
        if !self.db.prepare_cached("SELECT 1 FROM images WHERE tile_id = ?1")?.exists((place,))? {
            let tile = Tile { bytes: self.pack.read(entry.section())?, compression: header.compression };
            let bytes = recoded(tile, compression(header.kind), self.pack.limits())?;
            self.db.prepare_cached("INSERT INTO images VALUES (?1, ?2)")?.execute((place, bytes))?;
        }
        self.done += u64::from(entry.run);
        if self.done > TILES_MAX {
            return Err(ConvertError::TooMany);
        }
        let mut row = self.db.prepare_cached("INSERT INTO map VALUES (?1, ?2, ?3, ?4)")?;
        for coord in (entry.id..entry.id + u64::from(entry.run)).filter_map(TileCoord::of_id) {
            row.execute((coord.z(), coord.x(), coord.tms_row(), place))?;
        }
        Ok(())
    }
}
