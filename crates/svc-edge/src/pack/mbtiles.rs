//! An MBTiles file: an SQLite database with a `tiles` table or view, rows counted from the south.
//!
//! The database is opened read-only and as immutable, is never mapped into memory, and may contain views that mean
//! harm: statements only read, do not recurse, and are stopped after a number of steps or when a value is too large.

pub mod rows;

use super::metadata::{MEMBERS_MAX, METADATA_BYTES_MAX};
use super::{Compression, Fault, Limits, Metadata, PackError, Tile, TileCoord, TileKind, TileSet};
use ron_kernel::inventory::{Inventory, LockSpec};
use ron_kernel::lock::Lock;
use rusqlite::config::DbConfig;
use rusqlite::hooks::{AuthAction, Authorization};
use rusqlite::limits::Limit;
use rusqlite::types::ValueRef;
use rusqlite::{Connection, ErrorCode, OpenFlags};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// Steps of SQLite's machine between two rows of an answer. A look-up by an index takes some dozens.
const STEPS_MAX: u64 = 10_000_000;
/// Steps between two looks at the count.
const STEPS_COUNTED: i32 = 1000;
/// What all of SQLite in this process may take.
const HEAP_BYTES_MAX: u64 = 256 << 20;

pub(crate) static CONNECTION: LockSpec = LockSpec {
    service: "edge",
    name: "pack_connection",
    rank: 51,
    guards: "one SQLite connection of an MBTiles pack, while a statement runs; on blocking threads only",
};

/// The relations that tiles are read from, the usual one first. The other is for files whose view was lost.
const RELATIONS: [&str; 2] = [
    "tiles",
    "(SELECT zoom_level, tile_column, tile_row, tile_data FROM map JOIN images ON images.tile_id = map.tile_id)",
];

/// A mounted file. Look-ups block, and as many go on at a time as there are connections.
#[derive(Debug)]
pub struct MbTiles {
    connections: Vec<Lock<Reader>>,
    /// Counts look-ups, so that they take turns at the connections.
    turn: AtomicUsize,
    relation: &'static str,
    set: TileSet,
    limits: Limits,
    indexed: bool,
}

impl MbTiles {
    /// Opens the file once for each connection, so that all see the same file when another takes its name.
    pub fn open(
        path: &Path,
        limits: Limits,
        connections: usize,
        inventory: &Inventory,
    ) -> Result<Self, PackError> {
        let mut file = File::open(path)?;
        let mut magic = [0; 16];
        match file.read_exact(&mut magic) {
            Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => return Err(error.into()),
            _ if magic != *MAGIC => return Err(Fault::NotAPack.into()),
            _ => {}
        }
        for suffix in ["-wal", "-journal"] {
            let mut beside = path.as_os_str().to_owned();
            beside.push(suffix);
            if std::fs::metadata(beside).is_ok_and(|beside| beside.len() > 0) {
                return Err(Fault::Journal.into());
            }
        }
        let first = Reader::open(path, limits)?;
        let mut others = Vec::new();
        for _ in 1..connections {
            others.push(Reader::open(path, limits)?);
        }
        let (opened, now) = (file.metadata()?, std::fs::metadata(path)?);
        if (opened.dev(), opened.ino()) != (now.dev(), now.ino()) {
            return Err(io::Error::other("another file took its name while it was opened").into());
        }
        let relation = first.relation()?;
        let (kind, mut set) = rows::read(&first.rows()?);
        if kind.is_none() {
            set.kind = first.kind(relation)?;
        }
        if set.min_zoom.is_none() || set.max_zoom.is_none() || set.min_zoom > set.max_zoom {
            (set.min_zoom, set.max_zoom) = (first.zoom(relation, "ASC")?, first.zoom(relation, "DESC")?);
        }
        let indexed = first.is_indexed(relation)?;
        let connections = std::iter::once(first).chain(others);
        let connections = connections.map(|reader| Lock::new(inventory, &CONNECTION, reader)).collect();
        Ok(Self { connections, turn: AtomicUsize::new(0), relation, set, limits, indexed })
    }

    pub fn tile_set(&self) -> &TileSet {
        &self.set
    }

    pub fn metadata(&self) -> &Metadata {
        &self.set.metadata
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether a look-up finds its row by an index; without one it reads the whole file.
    pub fn is_indexed(&self) -> bool {
        self.indexed
    }

    /// A tile as it is stored; its compression shows in its first bytes.
    pub fn tile(&self, coord: TileCoord) -> Result<Option<Tile>, PackError> {
        let bytes = self.with(|reader| reader.tile(self.relation, coord))?;
        Ok(bytes.map(|bytes| Tile { compression: Compression::of_bytes(&bytes), bytes: bytes.into() }))
    }

    /// The ids of all tiles, ascending, eight bytes each, one for each row: without a unique index a tile may have
    /// several. And how many rows do not name a tile.
    pub fn ids(&self) -> Result<(Vec<u64>, u64), PackError> {
        self.with(|reader| reader.ids(self.relation))
    }

    /// Has SQLite check its own structures.
    pub fn check_database(&self) -> Result<(), PackError> {
        self.with(Reader::check)
    }

    fn with<T>(&self, run: impl FnOnce(&Reader) -> T) -> T {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        run(&self.connections[turn % self.connections.len()].lock())
    }
}

/// A connection that can do nothing but read, and not for ever.
#[derive(Debug)]
struct Reader {
    db: Connection,
    /// Steps that are left; the connection's handler counts down.
    steps: Arc<AtomicU64>,
}

impl Reader {
    fn open(path: &Path, limits: Limits) -> Result<Self, PackError> {
        let flags =
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut db = Connection::open_with_flags(uri(path), flags).map_err(failed)?;
        let steps = Arc::new(AtomicU64::new(STEPS_MAX));
        restrict(&mut db, limits, steps.clone()).map_err(failed)?;
        Ok(Self { db, steps })
    }

    fn relation(&self) -> Result<&'static str, PackError> {
        for relation in RELATIONS {
            match self
                .db
                .prepare(&format!("SELECT zoom_level, tile_column, tile_row, tile_data FROM {relation}"))
            {
                Ok(_) => return Ok(relation),
                Err(error) => match failed(error) {
                    PackError::Invalid(Fault::Schema) => {}
                    error => return Err(error),
                },
            }
        }
        Err(Fault::Schema.into())
    }

    fn tile(&self, relation: &str, coord: TileCoord) -> Result<Option<Vec<u8>>, PackError> {
        self.steps.store(STEPS_MAX, Ordering::Relaxed);
        let sql = format!(
            "SELECT tile_data FROM {relation} WHERE zoom_level = ?1 AND tile_column = ?2 AND tile_row = ?3"
        );
        let mut statement = self.db.prepare_cached(&sql).map_err(failed)?;
        let mut rows = statement.query((coord.z(), coord.x(), coord.tms_row())).map_err(failed)?;
        let Some(row) = rows.next().map_err(failed)? else { return Ok(None) };
        match row.get_ref(0).map_err(failed)? {
            ValueRef::Null => Ok(None),
            ValueRef::Blob(bytes) | ValueRef::Text(bytes) => Ok(Some(bytes.to_vec())),
            ValueRef::Integer(_) | ValueRef::Real(_) => Err(Fault::Row.into()),
        }
    }

    fn ids(&self, relation: &str) -> Result<(Vec<u64>, u64), PackError> {
        let sql = format!("SELECT zoom_level, tile_column, tile_row FROM {relation}");
        let mut statement = self.db.prepare(&sql).map_err(failed)?;
        let mut rows = statement.query(()).map_err(failed)?;
        let (mut ids, mut strange) = (Vec::new(), 0);
        loop {
            self.steps.store(STEPS_MAX, Ordering::Relaxed);
            let Some(row) = rows.next().map_err(failed)? else { break };
            let number = |column| row.get_ref(column).ok()?.as_i64().ok();
            let coord = || {
                let (z, x, row) = (number(0)?, number(1)?, number(2)?);
                TileCoord::from_tms(z.try_into().ok()?, x.try_into().ok()?, row.try_into().ok()?)
            };
            match coord() {
                Some(coord) => ids.push(coord.id()),
                None => strange += 1,
            }
        }
        ids.sort_unstable();
        Ok((ids, strange))
    }

    /// The rows of the metadata table as text; without such a table there are none.
    fn rows(&self) -> Result<Vec<(String, String)>, PackError> {
        self.steps.store(STEPS_MAX, Ordering::Relaxed);
        let mut statement = match self.db.prepare("SELECT name, value FROM metadata") {
            Ok(statement) => statement,
            Err(error) => {
                return match failed(error) {
                    PackError::Invalid(Fault::Schema) => Ok(Vec::new()),
                    error => Err(error),
                };
            }
        };
        let text = |value: ValueRef<'_>| match value {
            ValueRef::Null => None,
            ValueRef::Integer(number) => Some(number.to_string()),
            ValueRef::Real(number) => Some(number.to_string()),
            ValueRef::Text(bytes) | ValueRef::Blob(bytes) => {
                Some(String::from_utf8_lossy(bytes).into_owned())
            }
        };
        let mut found = statement.query(()).map_err(failed)?;
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while let Some(row) = found.next().map_err(failed)? {
            let (name, value) = (row.get_ref(0).map_err(failed)?, row.get_ref(1).map_err(failed)?);
            let (Some(name), Some(value)) = (text(name), text(value)) else { continue };
            bytes += name.len() + value.len();
            if rows.len() == MEMBERS_MAX || bytes as u64 > METADATA_BYTES_MAX {
                return Err(Fault::MetadataCap.into());
            }
            rows.push((name, value));
        }
        Ok(rows)
    }

    /// The type that any tile shows, for a file that does not say.
    fn kind(&self, relation: &str) -> Result<TileKind, PackError> {
        self.steps.store(STEPS_MAX, Ordering::Relaxed);
        let sql = format!("SELECT tile_data FROM {relation} LIMIT 1");
        let mut statement = self.db.prepare(&sql).map_err(failed)?;
        let mut rows = statement.query(()).map_err(failed)?;
        let Some(row) = rows.next().map_err(failed)? else { return Ok(TileKind::Other) };
        let Ok(bytes) = row.get_ref(0).map_err(failed)?.as_bytes() else { return Ok(TileKind::Other) };
        // A vector tile is compressed, or begins with a layer.
        let vector = Compression::of_bytes(bytes) != Compression::None || bytes.first() == Some(&0x1a);
        Ok(TileKind::of_image(bytes).unwrap_or(if vector { TileKind::Mvt } else { TileKind::Other }))
    }

    /// The lowest or highest zoom; none if there are no tiles, or if finding out takes too long.
    fn zoom(&self, relation: &str, order: &str) -> Result<Option<u8>, PackError> {
        self.steps.store(STEPS_MAX, Ordering::Relaxed);
        let sql = format!("SELECT zoom_level FROM {relation} ORDER BY zoom_level {order} LIMIT 1");
        let found = self.db.query_row(&sql, (), |row| Ok(row.get_ref(0)?.as_i64().unwrap_or(-1)));
        match found {
            Ok(zoom) => Ok(u8::try_from(zoom).ok().filter(|zoom| *zoom <= super::coord::ZOOM_MAX)),
            Err(rusqlite::Error::QueryReturnedNoRows) => Ok(None),
            Err(error) => match failed(error) {
                PackError::Invalid(Fault::Budget) => Ok(None),
                error => Err(error),
            },
        }
    }

    fn is_indexed(&self, relation: &str) -> Result<bool, PackError> {
        let sql = format!(
            "EXPLAIN QUERY PLAN SELECT tile_data FROM {relation} WHERE zoom_level = 1 AND tile_column = 1 AND tile_row = 1"
        );
        let mut statement = self.db.prepare(&sql).map_err(failed)?;
        let mut rows = statement.query(()).map_err(failed)?;
        while let Some(row) = rows.next().map_err(failed)? {
            if row
                .get_ref(3)
                .is_ok_and(|detail| detail.as_str().is_ok_and(|detail| detail.starts_with("SCAN")))
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn check(&self) -> Result<(), PackError> {
        self.steps.store(u64::MAX, Ordering::Relaxed);
        let answer = self.db.query_row("PRAGMA quick_check(1)", (), |row| row.get::<_, String>(0));
        if answer.map_err(failed)? == "ok" { Ok(()) } else { Err(Fault::Database.into()) }
    }
}

/// The address of a file that does not change. Whatever is special in an address is escaped.
fn uri(path: &Path) -> String {
    let mut uri = String::from("file:");
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'-' | b'_' => {
                uri.push(char::from(*byte))
            }
            _ => uri.push_str(&format!("%{byte:02x}")),
        }
    }
    uri.push_str("?mode=ro&immutable=1");
    uri
}

fn restrict(db: &mut Connection, limits: Limits, steps: Arc<AtomicU64>) -> rusqlite::Result<()> {
    let length = limits.tile_bytes.clamp(METADATA_BYTES_MAX, 1 << 30) as i32;
    db.set_limit(Limit::SQLITE_LIMIT_LENGTH, length)?;
    db.set_limit(Limit::SQLITE_LIMIT_ATTACHED, 0)?;
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_DEFENSIVE, true)?;
    db.execute_batch(&format!(
        "PRAGMA hard_heap_limit = {HEAP_BYTES_MAX}; PRAGMA mmap_size = 0; PRAGMA cache_size = -2048; \
         PRAGMA temp_store = MEMORY; PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON;"
    ))?;
    db.authorizer(Some(|context: rusqlite::hooks::AuthContext<'_>| match context.action {
        AuthAction::Select | AuthAction::Read { .. } | AuthAction::Function { .. } => Authorization::Allow,
        AuthAction::Pragma { pragma_name: "quick_check", .. } => Authorization::Allow,
        _ => Authorization::Deny,
    }))?;
    db.progress_handler(
        STEPS_COUNTED,
        Some(move || {
            let left = steps.load(Ordering::Relaxed).saturating_sub(STEPS_COUNTED as u64);
            steps.store(left, Ordering::Relaxed);
            left == 0
        }),
    )
}

fn failed(error: rusqlite::Error) -> PackError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => Fault::Database.into(),
        Some(ErrorCode::TooBig) => Fault::TileCap.into(),
        Some(ErrorCode::OperationInterrupted | ErrorCode::OutOfMemory) => Fault::Budget.into(),
        Some(ErrorCode::SystemIoFailure | ErrorCode::CannotOpen) => io::Error::other(error).into(),
        // No such table or column, or a view that asks for what is forbidden.
        _ => Fault::Schema.into(),
    }
}
