//! The decoders of packs. Each gets the input as it is, and as edits of a good one.

use crate::log::each;
use bytes::Bytes;
use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use serde_json::Value;
use std::io::Cursor;
use std::ops::ControlFlow;
use std::sync::{Arc, LazyLock};
use svc_edge::pack::directory::{Directory, Entry, Found, Span};
use svc_edge::pack::header::{Header, Section};
use svc_edge::pack::mbtiles::rows;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::verify::{FINDINGS_MAX, verify_pmtiles};
use svc_edge::pack::{Compression, DirectoryCache, Limits, Metadata, Pmtiles, TileCoord, TileSet, varint};

static PACK: LazyLock<Bytes> = LazyLock::new(|| {
    let none = Compression::None;
    let sample =
        Sample { max_zoom: 2, compression: none, internal: none, points_max: 3, ..Sample::default() };
    let mut out = Vec::new();
    sample.write(Cursor::new(vec![]), Cursor::new(vec![]), &mut out).expect("memory takes it");
    out.into()
});

/// A header is written as it was read, and its sections are within the file and apart.
pub(crate) fn header(data: &[u8]) {
    each(data, &PACK[..127], |data| {
        let size = PACK.len() as u64;
        let Ok(header) = Header::parse(data, size) else { return };
        // The version has two spellings.
        assert_eq!(header.to_bytes()[8..], data[8..127]);
        let front = Section { offset: 0, length: 127 };
        let sections = [front, header.root, header.metadata, header.leaves, header.tiles];
        let used: Vec<_> = sections.iter().filter(|section| section.length > 0).collect();
        for (at, one) in used.iter().enumerate() {
            assert!(u128::from(one.offset) + u128::from(one.length) <= u128::from(size));
            for other in &used[..at] {
                assert!(one.offset >= other.offset + other.length || other.offset >= one.offset + one.length);
            }
        }
    });
}

/// A number is what its bits say, and nothing that follows is lost.
pub(crate) fn number(data: &[u8]) {
    let mut rest = data;
    let taken = varint::take(&mut rest);
    let length = data.iter().take(10).position(|byte| byte & 0x80 == 0).map(|last| last + 1);
    let sum =
        data[..length.unwrap_or(0)].iter().rev().fold(0u128, |sum, byte| sum << 7 | u128::from(byte & 0x7f));
    assert_eq!(taken, length.and_then(|_| u64::try_from(sum).ok()));
    if let Some(number) = taken {
        assert_eq!(rest.len(), data.len() - length.unwrap_or(0));
        let mut again = Vec::new();
        varint::push(&mut again, number);
        assert!(again.len() <= length.unwrap_or(0) && varint::take(&mut &*again) == Some(number));
    }
}

/// A directory that is taken for good is: in order, apart, and it finds what it lists.
pub(crate) fn directory(data: &[u8]) {
    let entry = |id, run, offset, length| Entry { id, offset, length, run };
    let entries = [entry(1, 3, 0, 10), entry(9, 1, 10, 300), entry(10, 0, 0, 40), entry(500, 9, 0, 10)];
    each(data, &Directory::write(&entries), |data| {
        let span = Span { ids: 0..1000, tile_bytes: 1 << 16, leaf_bytes: 1 << 12 };
        let Ok(directory) = Directory::parse(data, &span) else { return };
        let entries = directory.entries();
        assert!(entries.len() * 4 < data.len());
        assert_eq!(Directory::parse(&Directory::write(entries), &span).as_ref(), Ok(&directory));
        assert!(entries.windows(2).all(|pair| pair[0].id + u64::from(pair[0].run.max(1)) <= pair[1].id));
        for entry in entries {
            assert_eq!(directory.find(entry.id) == Found::Tile(entry.section()), entry.run > 0);
            let limit = if entry.run > 0 { span.tile_bytes } else { span.leaf_bytes };
            assert!(entry.section().end().is_some_and(|end| end <= limit) && entry.length > 0);
        }
    });
}

/// Whatever JSON reader takes it for an object, so do we, with the same members.
pub(crate) fn metadata(data: &[u8]) {
    each(
        data,
        br#"{"name":"a","vector_layers":[{"id":"x","fields":{"y":"String"}}],"n":{"m":[1,null]}}"#,
        |data| {
            let ours = Metadata::parse(data);
            if let Ok(Value::Object(theirs)) = serde_json::from_slice(data) {
                let ours = ours.as_ref().expect("it is an object");
                assert!(ours.members().map(|(name, _)| name).eq(theirs.keys()));
                assert_eq!(
                    serde_json::from_str::<Value>(&ours.to_json()).expect("JSON"),
                    Value::Object(theirs)
                );
            }
            if let Ok(ours) = ours {
                let again = Metadata::parse(ours.to_json().as_bytes()).expect("our own");
                assert_eq!(again.to_json(), ours.to_json());
                let _ = ours.vector_layers();
            }
        },
    );
}

/// Rows of any text give a description that clients can read, and that survives being written.
pub(crate) fn mbtiles_rows(data: &[u8]) {
    let seed = b"format=pbf\nbounds=-1,-2,3,4\ncenter=0,0,3\nminzoom=0\nmaxzoom=9\njson={\"vector_layers\":[]}\nname=x";
    each(data, seed, |data| {
        let text = String::from_utf8_lossy(data);
        let pair = |line: &str| line.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
        let found: Vec<_> = text.lines().filter_map(pair).collect();
        let (_, set) = rows::read(&found);
        let json: Value = serde_json::from_str(&set.tile_json(&[], "1")).expect("TileJSON is JSON");
        assert_eq!(json["tilejson"], "3.0.0");
        if let Some([west, south, east, north]) = set.bounds {
            assert!(
                -180.0 <= west
                    && west <= east
                    && east <= 180.0
                    && -90.0 <= south
                    && south <= north
                    && north <= 90.0
            );
        }
        let sorted = |set: &TileSet| {
            let mut rows = rows::write(set);
            rows.sort_unstable();
            rows
        };
        let (_, again) = rows::read(&rows::write(&set));
        assert_eq!(sorted(&again), sorted(&set));
        let _ = set.geography();
    });
}

/// A whole archive: whatever is in it, asking for tiles and looking at everything ends within its bytes.
pub(crate) fn archive(data: &[u8]) {
    each(data, &PACK, |data| {
        let cache = Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 16));
        let Ok(pack) = Pmtiles::open(Bytes::copy_from_slice(data), Limits::default(), cache) else { return };
        for coord in (0..25).filter_map(TileCoord::of_id) {
            if let Ok(Some(place)) = pack.locate(coord) {
                assert!(place.end().is_some_and(|end| end <= data.len() as u64));
                let tile = pack.tile(coord).expect("it is within the file").expect("it was located");
                assert_eq!(tile.bytes.len() as u64, place.length);
            }
        }
        let report = verify_pmtiles(&pack, &mut |_| ControlFlow::Continue(()));
        assert!(report.findings.len() <= FINDINGS_MAX);
        assert!(report.contents <= data.len() as u64);
    });
}
