//! MBTiles files as they occur, and as they should not.

use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use rusqlite::Connection;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use svc_edge::pack::verify::verify_mbtiles;
use svc_edge::pack::{Compression, Fault, Limits, MbTiles, PackError, TileCoord, TileKind};
use tempfile::TempDir;

const FLAT: &str =
    "CREATE TABLE tiles (zoom_level INTEGER, tile_column INTEGER, tile_row INTEGER, tile_data BLOB);
    CREATE UNIQUE INDEX tile_index ON tiles (zoom_level, tile_column, tile_row);";
const MAP: &str =
    "CREATE TABLE map (zoom_level INTEGER, tile_column INTEGER, tile_row INTEGER, tile_id TEXT);
    CREATE UNIQUE INDEX map_index ON map (zoom_level, tile_column, tile_row);
    CREATE TABLE images (tile_id TEXT, tile_data BLOB);
    CREATE UNIQUE INDEX images_id ON images (tile_id);
    INSERT INTO images VALUES ('a', x'89504e470d0a1a0a00'), ('b', x'89504e470d0a1a0a01');
    INSERT INTO map VALUES (0, 0, 0, 'a'), (1, 0, 0, 'b'), (1, 1, 0, 'a');";
const ROWS: &str =
    "INSERT INTO tiles VALUES (0, 0, 0, x'89504e470d0a1a0a00'), (1, 0, 0, x'89504e470d0a1a0a01'),
    (1, 1, 0, x'89504e470d0a1a0a00');";

fn made(dir: &TempDir, sql: &str) -> PathBuf {
    let path = dir.path().join("odd name?#%.mbtiles");
    let _ = std::fs::remove_file(&path);
    Connection::open(&path).expect("a new file").execute_batch(sql).expect("it is SQL");
    path
}

fn opened(path: &Path) -> Result<MbTiles, PackError> {
    MbTiles::open(path, Limits::default(), 2, &Inventory::new(Metrics::default()))
}

fn fault<T: std::fmt::Debug>(result: Result<T, PackError>) -> Fault {
    match result {
        Err(PackError::Invalid(fault)) => fault,
        other => panic!("{other:?}"),
    }
}

fn coord(z: u8, x: u32, y: u32) -> TileCoord {
    TileCoord::new(z, x, y).expect("a tile")
}

#[test]
fn every_shape_of_schema_gives_the_same_tiles() {
    let dir = TempDir::new().unwrap();
    let view = "CREATE VIEW tiles AS SELECT map.zoom_level, map.tile_column, map.tile_row, images.tile_data
        FROM map JOIN images ON images.tile_id = map.tile_id;";
    let hashed = "CREATE TABLE tiles_with_hash (zoom_level INTEGER, tile_column INTEGER, tile_row INTEGER,
        tile_data BLOB, tile_hash TEXT, PRIMARY KEY (zoom_level, tile_column, tile_row));
        CREATE VIEW tiles AS SELECT zoom_level, tile_column, tile_row, tile_data FROM tiles_with_hash;";
    let shallow = "CREATE TABLE tiles_shallow (zoom_level INTEGER, tile_column INTEGER, tile_row INTEGER,
        tile_data_id INTEGER, PRIMARY KEY (zoom_level, tile_column, tile_row)) WITHOUT ROWID;
        CREATE TABLE tiles_data (tile_data_id INTEGER PRIMARY KEY, tile_data BLOB);
        CREATE VIEW tiles AS SELECT zoom_level, tile_column, tile_row, tile_data
        FROM tiles_shallow JOIN tiles_data ON tiles_shallow.tile_data_id = tiles_data.tile_data_id;
        INSERT INTO tiles_data VALUES (1, x'89504e470d0a1a0a00'), (2, x'89504e470d0a1a0a01');
        INSERT INTO tiles_shallow VALUES (0, 0, 0, 1), (1, 0, 0, 2), (1, 1, 0, 1);";
    let shapes = [
        format!("{FLAT}{ROWS}"),
        format!("PRAGMA journal_mode = WAL; {FLAT}{ROWS}"),
        format!("{MAP}{view}"),
        MAP.to_owned(),
        format!(
            "{hashed}{}",
            ROWS.replace("tiles", "tiles_with_hash (zoom_level, tile_column, tile_row, tile_data)")
        ),
        shallow.to_owned(),
    ];
    for sql in shapes {
        let pack = opened(&made(&dir, &sql)).unwrap();
        let bytes = |coord| pack.tile(coord).unwrap().map(|tile| tile.bytes.last().copied().unwrap());
        assert_eq!(bytes(coord(0, 0, 0)), Some(0), "{sql}");
        assert_eq!(bytes(coord(1, 0, 1)), Some(1), "row 0 is the southern one");
        assert_eq!(bytes(coord(1, 1, 1)), Some(0));
        assert_eq!(bytes(coord(1, 0, 0)), None);
        assert_eq!(bytes(coord(31, 5, 5)), None);
        let set = pack.tile_set();
        assert_eq!(
            (set.kind, set.min_zoom, set.max_zoom),
            (TileKind::Png, Some(0), Some(1)),
            "without metadata"
        );
        assert_eq!(pack.ids().unwrap(), (vec![0, 2, 3], 0));
        assert!(pack.is_indexed(), "{sql}");
        let report = verify_mbtiles(&pack, &mut |_| ControlFlow::Continue(()));
        assert!(report.is_good() && report.tiles == 3, "{report:?}");
    }
}

#[test]
fn compression_is_seen_tile_by_tile() {
    let dir = TempDir::new().unwrap();
    let path = made(&dir, &format!("{FLAT}CREATE TABLE metadata (name, value);"));
    let db = Connection::open(&path).unwrap();
    let layers = r#"{"vector_layers":[{"id":"a","fields":{}}]}"#;
    db.execute_batch(&format!(
        "INSERT INTO metadata VALUES ('format', 'pbf'), ('maxzoom', 7), ('minzoom', NULL), (NULL, 'x'), (3, x'41'),
         ('json', '{layers}'), ('bounds', '-180,-85,180,85')"
    ))
    .unwrap();
    let forms = [Compression::None, Compression::Gzip, Compression::Zstd];
    for (x, compression) in (0..).zip(forms) {
        let bytes = compression.encode(b"\x1a\x02\x0a\x00").unwrap();
        db.execute("INSERT INTO tiles VALUES (2, ?1, 3, ?2)", (x, bytes)).unwrap();
    }
    db.execute_batch("INSERT INTO tiles VALUES (2, 3, 3, x''), (3, 0, 0, NULL)").unwrap();
    drop(db);
    let pack = opened(&path).unwrap();
    for (x, compression) in (0..).zip(forms) {
        let tile = pack.tile(coord(2, x, 0)).unwrap().unwrap();
        assert_eq!(tile.compression, compression);
        assert_eq!(tile.decoded(pack.limits()).unwrap(), b"\x1a\x02\x0a\x00"[..]);
    }
    assert_eq!(pack.tile(coord(2, 3, 0)).unwrap().unwrap().bytes, b""[..]);
    assert_eq!(pack.tile(coord(3, 0, 7)).unwrap(), None, "no data is no tile");
    let set = pack.tile_set();
    assert_eq!((set.kind, set.min_zoom, set.max_zoom), (TileKind::Mvt, Some(2), Some(3)));
    assert!(set.metadata.vector_layers().is_some());
    assert_eq!(set.metadata.text("3").as_deref(), Some("A"));
    let json = set.tile_json(&[], "1");
    assert!(json.ends_with(&format!(
        r#""bounds":[-180.0,-85.0,180.0,85.0],"minzoom":2,"maxzoom":3,{}"#,
        &layers[1..]
    )));
}

#[test]
fn zooms_that_cross_are_read_from_the_tiles() {
    let dir = TempDir::new().unwrap();
    let rows = "CREATE TABLE metadata (name, value);
        INSERT INTO metadata VALUES ('minzoom', '9'), ('maxzoom', '3'), ('center', '0,0,5');";
    let pack = opened(&made(&dir, &format!("{FLAT}{ROWS}{rows}"))).unwrap();
    let json = pack.tile_set().tile_json(&[], "1");
    assert!(json.contains(r#""center":[0.0,0.0,1],"minzoom":0,"maxzoom":1"#), "{json}");
    let none = opened(&made(&dir, &format!("{FLAT}{rows}"))).unwrap();
    assert_eq!((none.tile_set().min_zoom, none.tile_set().max_zoom), (None, None));
}

#[test]
fn what_is_no_pack_is_refused_by_its_fault() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("file");
    for bytes in [&b""[..], b"SQLite", b"<html>not found</html>"] {
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(fault(opened(&path)), Fault::NotAPack);
    }
    std::fs::write(&path, [&b"SQLite format 3\0"[..], &[0xff; 4096]].concat()).unwrap();
    assert_eq!(fault(opened(&path)), Fault::Database);
    assert!(matches!(opened(&dir.path().join("none")), Err(PackError::Read(_))));
    assert_eq!(fault(opened(&made(&dir, "CREATE TABLE other (x)"))), Fault::Schema);
    assert_eq!(fault(opened(&made(&dir, "CREATE TABLE tiles (x)"))), Fault::Schema);
    let path = made(&dir, FLAT);
    assert_eq!(opened(&path).unwrap().tile(coord(0, 0, 0)).unwrap(), None);
    let mut beside = path.clone().into_os_string();
    beside.push("-wal");
    std::fs::write(beside, b"changes").unwrap();
    assert_eq!(fault(opened(&path)), Fault::Journal);
}

#[test]
fn views_that_mean_harm_are_stopped() {
    let dir = TempDir::new().unwrap();
    let columns = "n AS zoom_level, n AS tile_column, n AS tile_row";
    let recursive = format!(
        "CREATE VIEW tiles AS WITH RECURSIVE r(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM r)
         SELECT {columns}, x'00' AS tile_data FROM r WHERE n < 0;"
    );
    assert_eq!(fault(opened(&made(&dir, &recursive))), Fault::Schema);
    let many: Vec<String> = (0..100).map(|n| format!("({n})")).collect();
    let endless = format!(
        "CREATE TABLE t (n); INSERT INTO t VALUES {}; CREATE TABLE metadata (name, value);
         INSERT INTO metadata VALUES ('format', 'png'), ('minzoom', '0'), ('maxzoom', '1');
         CREATE VIEW tiles AS SELECT a.{columns}, x'00' AS tile_data FROM t a, t b, t c, t d, t e
         WHERE a.n + b.n + c.n + d.n + e.n = -1;",
        many.join(",")
    );
    let pack = opened(&made(&dir, &endless.replace(", n AS", ", a.n AS"))).unwrap();
    assert_eq!(fault(pack.tile(coord(0, 0, 0))), Fault::Budget);
    let large = format!(
        "CREATE TABLE t (n); INSERT INTO t VALUES (0);
         CREATE TABLE metadata (name, value); INSERT INTO metadata VALUES ('format', 'png');
         CREATE VIEW tiles AS SELECT {columns}, zeroblob(900000000) AS tile_data FROM t;"
    );
    assert_eq!(fault(opened(&made(&dir, &large)).and_then(|pack| pack.tile(coord(0, 0, 0)))), Fault::TileCap);
    let reaching = format!(
        "CREATE TABLE t (n); CREATE VIEW tiles AS SELECT {columns},
         load_extension('x') AS tile_data FROM t;"
    );
    assert_eq!(fault(opened(&made(&dir, &reaching))), Fault::Schema);
}

#[test]
fn a_file_without_an_index_or_with_strange_rows_is_told_of() {
    let dir = TempDir::new().unwrap();
    let flat = FLAT.split(';').next().unwrap();
    let sql = format!(
        "{flat};{ROWS} INSERT INTO tiles VALUES (1, 2, 0, x'00'), (-1, 0, 0, x'00'), ('a', 0, 0, x'00'),
         (1, 1, 1, x'ff'), (1, 0, 1, 42), (1, 1, 0, x'00');"
    );
    let pack = opened(&made(&dir, &sql)).unwrap();
    assert!(!pack.is_indexed());
    let report = verify_mbtiles(&pack, &mut |_| ControlFlow::Continue(()));
    let found: Vec<_> = report.findings.iter().map(|finding| (finding.fault, finding.tile)).collect();
    let expected = [
        (Fault::Row, None),
        (Fault::Row, None),
        (Fault::Row, None),
        (Fault::Rows, Some(coord(1, 1, 1))),
        (Fault::Row, Some(coord(1, 0, 0))),
        (Fault::Content, Some(coord(1, 1, 0))),
    ];
    assert_eq!(found, expected);
    // A few tiles are found without one.
    let many = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 10000)
                INSERT INTO tiles SELECT 14, i, 0, x'1a' FROM n;";
    let pack = opened(&made(&dir, &format!("{flat};{ROWS}{many}"))).unwrap();
    let report = verify_mbtiles(&pack, &mut |_| ControlFlow::Continue(()));
    assert_eq!((report.findings[0].fault, report.found), (Fault::Budget, 1), "and many are not looked for");
}

#[test]
fn a_tile_that_is_there_twice_is_named_once() {
    let dir = TempDir::new().unwrap();
    let flat = FLAT.split(';').next().unwrap();
    let pack = opened(&made(&dir, &format!("{flat};{ROWS}{ROWS}{ROWS}"))).unwrap();
    let report = verify_mbtiles(&pack, &mut |_| ControlFlow::Continue(()));
    let found: Vec<_> = report.findings.iter().map(|finding| (finding.fault, finding.tile)).collect();
    let twice = |z, x, y| (Fault::Rows, Some(coord(z, x, y)));
    assert_eq!(found, [twice(0, 0, 0), twice(1, 0, 1), twice(1, 1, 1)]);
    assert_eq!((report.tiles, report.contents), (3, 3), "and counted once");
    // In the other schema it takes two images of one name, also where the map has a unique index.
    let sql = format!("{MAP} DROP INDEX images_id; INSERT INTO images VALUES ('b', x'89504e470d0a1a0a02');");
    let report = verify_mbtiles(&opened(&made(&dir, &sql)).unwrap(), &mut |_| ControlFlow::Continue(()));
    let found: Vec<_> = report.findings.iter().map(|finding| (finding.fault, finding.tile)).collect();
    assert_eq!((found, report.tiles), (vec![twice(1, 0, 1)], 3));
}

#[test]
fn a_damaged_database_gives_errors_and_never_more() {
    let dir = TempDir::new().unwrap();
    let path = made(&dir, &format!("PRAGMA page_size = 512; {FLAT}{ROWS}"));
    let good = std::fs::read(&path).unwrap();
    let ask = || {
        let Ok(pack) = opened(&path) else { return };
        (0..5).for_each(|id| drop(pack.tile(TileCoord::of_id(id).expect("small"))));
        let _ = pack.ids();
        let _ = pack.check_database();
    };
    for at in (0..good.len()).step_by(7) {
        let mut bytes = good.clone();
        bytes[at] ^= 0x55;
        std::fs::write(&path, &bytes).unwrap();
        ask();
        std::fs::write(&path, &good[..at]).unwrap();
        ask();
    }
    std::fs::write(&path, &good).unwrap();
    let pack = opened(&path).unwrap();
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    // The connection that looked at the file first may have kept these pages.
    assert!((0..2).any(|_| pack.tile(coord(1, 0, 1)).is_err()), "cut short while in use");
}

#[test]
fn connections_are_shared_and_keep_their_file() {
    let dir = TempDir::new().unwrap();
    let path = made(&dir, &format!("{FLAT}{ROWS}"));
    let pack = opened(&path).unwrap();
    // Another file takes the name.
    let other = dir.path().join("other");
    Connection::open(&other).unwrap().execute_batch(FLAT).unwrap();
    std::fs::rename(&other, &path).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert!(pack.tile(coord(1, 0, 1)).expect("it reads").is_some());
                }
            });
        }
    });
    assert_eq!(opened(&path).unwrap().tile(coord(1, 0, 1)).unwrap(), None);
}
