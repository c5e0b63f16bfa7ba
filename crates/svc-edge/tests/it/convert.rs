//! From one format to the other and back, nothing is lost.

use crate::samples::{Crafted, entry, opened, written};
use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use rusqlite::Connection;
use std::io::Cursor;
use std::ops::ControlFlow;
use svc_edge::pack::convert::{ConvertError, Converted, to_mbtiles, to_pmtiles};
use svc_edge::pack::sample::Sample;
use svc_edge::pack::verify::{Progress, verify_mbtiles, verify_pmtiles};
use svc_edge::pack::{Compression, Fault, Limits, MbTiles, PackError, TileCoord, TileKind};
use tempfile::TempDir;

fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn spill() -> [Cursor<Vec<u8>>; 2] {
    [Cursor::default(), Cursor::default()]
}

#[test]
fn an_archive_comes_back_as_it_was() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("pack.mbtiles");
    let sample = Sample { max_zoom: 6, ..Sample::default() };
    let (header, bytes) = written(&sample);
    let archive = opened(&bytes).unwrap();
    let all = Converted { tiles: header.addressed, skipped: 0 };
    assert_eq!(to_mbtiles(&archive, &path, &mut go_on).unwrap(), all);
    let database = MbTiles::open(&path, Limits::default(), 1, &Inventory::new(Metrics::default())).unwrap();
    assert!(verify_mbtiles(&database, &mut go_on).is_good());
    for coord in sample.coords() {
        assert_eq!(database.tile(coord).unwrap(), archive.tile(coord).unwrap(), "{coord}");
    }
    assert_eq!(database.tile_set().tile_json(&[], "1"), archive.tile_set().tile_json(&[], "1"));
    let mut again = Vec::new();
    assert_eq!(to_pmtiles(&database, spill(), &mut again, &mut go_on).unwrap(), all);
    assert_eq!(bytes, again, "the writer knows one form only");
    let taken = to_mbtiles(&archive, &path, &mut go_on);
    assert!(matches!(taken, Err(ConvertError::Pack(PackError::Read(_)))), "nothing is overwritten");
}

#[test]
fn tiles_change_their_compression_where_the_format_wants_it() {
    let dir = TempDir::new().unwrap();
    for compression in [Compression::None, Compression::Brotli, Compression::Zstd] {
        let path = dir.path().join(format!("{compression:?}.mbtiles"));
        let sample = Sample { max_zoom: 3, compression, ..Sample::default() };
        let archive = opened(&written(&sample).1).unwrap();
        to_mbtiles(&archive, &path, &mut go_on).unwrap();
        let database =
            MbTiles::open(&path, Limits::default(), 1, &Inventory::new(Metrics::default())).unwrap();
        for coord in sample.coords() {
            let tile = database.tile(coord).unwrap();
            assert!(tile.as_ref().is_none_or(|tile| tile.compression == Compression::Gzip));
            let decoded = tile.map(|tile| tile.decoded(Limits::default()).unwrap());
            assert_eq!(decoded.as_deref(), sample.tile(coord).as_deref());
        }
    }
}

#[test]
fn a_database_as_it_occurs_becomes_a_good_archive() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("pack.mbtiles");
    let db = Connection::open(&path).unwrap();
    db.execute_batch(
        "CREATE TABLE tiles (zoom_level, tile_column, tile_row, tile_data);
         CREATE TABLE metadata (name, value);
         INSERT INTO metadata VALUES ('name', 'Odd'), ('format', 'png'), ('center', '10,20,1');
         INSERT INTO tiles VALUES (1, 1, 1, x'89504e470d0a1a0a01'), (0, 0, 0, x'89504e470d0a1a0a00'), (1, 0, 0, x''),
             (1, 9, 9, x'00'), (1, 0, 1, x'89504e470d0a1a0a00'), (1, 1, 1, x'89504e470d0a1a0a02');",
    )
    .unwrap();
    let database = MbTiles::open(&path, Limits::default(), 1, &Inventory::new(Metrics::default())).unwrap();
    let mut out = Vec::new();
    let converted = to_pmtiles(&database, spill(), &mut out, &mut go_on).unwrap();
    assert_eq!(converted, Converted { tiles: 3, skipped: 2 });
    let archive = opened(&out.into()).unwrap();
    assert!(verify_pmtiles(&archive, &mut go_on).is_good());
    let (header, set) = (archive.header(), archive.tile_set());
    assert_eq!((header.contents, header.compression, set.kind), (2, Compression::None, TileKind::Png));
    assert_eq!((set.center, set.metadata.text("name").as_deref()), (Some((10.0, 20.0, 1)), Some("Odd")));
    let north_west = archive.tile(TileCoord::new(1, 0, 0).unwrap()).unwrap().unwrap();
    assert_eq!(north_west.bytes.last(), Some(&0));
}

#[test]
fn a_conversion_ends_at_a_fault_and_when_it_is_told() {
    let dir = TempDir::new().unwrap();
    let cyclic = Crafted::new(vec![entry(0, 0, 0, 5)]).leaf(&[entry(0, 0, 0, 5)]);
    let result = to_mbtiles(&opened(&cyclic.bytes()).unwrap(), &dir.path().join("a"), &mut go_on);
    assert!(matches!(result, Err(ConvertError::Pack(PackError::Invalid(Fault::Cycle)))));
    let endless = Crafted::new(vec![entry(0, u32::MAX, 0, 5)]);
    let result = to_mbtiles(&opened(&endless.bytes()).unwrap(), &dir.path().join("b"), &mut go_on);
    assert!(matches!(result, Err(ConvertError::TooMany)));
    let good = opened(&written(&Sample::default()).1).unwrap();
    let result = to_mbtiles(&good, &dir.path().join("c"), &mut |_| ControlFlow::Break(()));
    assert!(matches!(result, Err(ConvertError::Stopped)));
}
