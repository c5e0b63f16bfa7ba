//! A whole archive is looked at: what is good is found good, and each fault by its name.

use crate::samples::{Crafted, entry, opened, written};
use bytes::Bytes;
use std::ops::ControlFlow;
use svc_edge::pack::header::Header;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::verify::{FINDINGS_MAX, Report, verify_pmtiles};
use svc_edge::pack::{Compression, Fault, TileCoord, TileKind};

fn report(bytes: &Bytes) -> Report {
    verify_pmtiles(&opened(bytes).expect("it opens"), &mut |_| ControlFlow::Continue(()))
}

/// The first fault of a good pack whose header says something else.
fn with_header(bytes: &Bytes, change: &dyn Fn(&mut Header)) -> Option<Fault> {
    let mut header = Header::parse(bytes, bytes.len() as u64).expect("it is good");
    change(&mut header);
    let changed = [&header.to_bytes()[..], &bytes[127..]].concat();
    report(&changed.into()).findings.first().map(|finding| finding.fault)
}

#[test]
fn what_the_writer_writes_is_good() {
    for compression in Compression::ALL.into_iter().skip(1) {
        let sample = Sample { compression, internal: compression, max_zoom: 6, ..Sample::default() };
        let (header, bytes) = written(&sample);
        let report = report(&bytes);
        assert!(report.is_good(), "{report:?}");
        assert_eq!((report.tiles, report.contents), (header.addressed, header.contents));
    }
}

#[test]
fn a_header_that_is_not_true_is_found_out() {
    let (header, bytes) = written(&Sample::default());
    let check = |change: &dyn Fn(&mut Header), fault| assert_eq!(with_header(&bytes, change), fault);
    check(&|_| (), None);
    check(&|h| h.addressed = 0, None);
    let stated = |name, found| Some(Fault::Stated { name, stated: 9, found });
    check(&|h| h.addressed = 9, stated("tiles", header.addressed));
    check(&|h| h.entries = 9, stated("entries", header.entries));
    check(&|h| h.contents = 9, stated("contents", header.contents));
    check(&|h| h.max_zoom = 9, stated("highest zoom", 5));
    check(&|h| h.min_zoom = 1, Some(Fault::Stated { name: "lowest zoom", stated: 1, found: 0 }));
    check(&|h| h.geography.bounds[0] = i32::MAX, Some(Fault::Field("bounds")));
    check(&|h| h.geography.bounds.swap(1, 3), Some(Fault::Field("bounds")));
    check(&|h| h.geography.center[1] = i32::MIN, Some(Fault::Field("center")));
    check(&|h| h.kind = TileKind::Png, Some(Fault::Content));
    check(&|h| h.compression = Compression::Unknown, Some(Fault::Field("tile compression")));
    let not_zstd = with_header(&bytes, &|h| h.compression = Compression::Zstd);
    assert!(matches!(not_zstd, Some(Fault::Decode(_))), "{not_zstd:?}");
}

#[test]
fn a_tile_that_does_not_decode_is_named() {
    let (header, bytes) = written(&Sample::default());
    let coord = TileCoord::new(5, 7, 9).unwrap();
    let place = opened(&bytes).unwrap().locate(coord).unwrap().unwrap();
    let mut bytes = bytes.to_vec();
    bytes[place.offset as usize + 12] ^= 1;
    let report = report(&bytes.into());
    assert_eq!((report.found, report.complete, report.contents), (1, true, header.contents));
    assert!(matches!(report.findings[0].fault, Fault::Decode(_)), "{report:?}");
    assert_eq!(report.findings[0].tile, Some(coord));
}

fn faults(pack: &Crafted, clustered: bool) -> Vec<Fault> {
    let mut bytes = pack.bytes().to_vec();
    bytes[96] = u8::from(clustered);
    bytes[101] = 2;
    report(&bytes.into()).findings.iter().map(|finding| finding.fault).collect()
}

#[test]
fn a_clustered_archive_has_its_contents_in_order() {
    let check = |entries: &[(u64, u64)], good| {
        // Up to a tile of the last zoom that the header names.
        let last = [entry(20, 1, entries.last().expect("some").1, 10)];
        let entries = entries.iter().map(|(id, offset)| entry(*id, 1, *offset, 10)).chain(last).collect();
        let pack = Crafted::new(entries);
        assert_eq!(faults(&pack, false), []);
        assert_eq!(faults(&pack, true), if good { vec![] } else { vec![Fault::Clustered] });
    };
    check(&[(0, 0), (1, 10), (2, 20)], true);
    check(&[(0, 0), (1, 10), (2, 0), (3, 10), (4, 20)], true);
    check(&[(0, 10), (1, 20)], false);
    check(&[(0, 0), (1, 20), (2, 10)], false);
    check(&[(0, 0), (1, 20), (2, 30)], false);
}

#[test]
fn contents_that_overlap_in_two_leaves_are_found() {
    let root = vec![entry(0, 0, 0, 5), entry(5, 0, 5, 5)];
    let pack = Crafted::new(root.clone()).leaf(&[entry(0, 1, 0, 10)]).leaf(&[entry(15, 1, 9, 10)]);
    assert_eq!(pack.leaves[1].len(), 5);
    assert_eq!(faults(&pack, false), [Fault::EntriesOverlap]);
    let apart = Crafted::new(root).leaf(&[entry(0, 1, 9, 10)]).leaf(&[entry(15, 1, 9, 10)]);
    assert_eq!(faults(&apart, false), []);
}

#[test]
fn a_bad_leaf_is_told_of_and_the_rest_is_looked_at() {
    let pack = Crafted::new(vec![entry(0, 0, 0, 5), entry(9, 0, 5, 5), entry(20, 1, 999, 1)]);
    let pack = pack.leaf(&[entry(0, 0, 0, 5)]).leaf(&[entry(8, 1, 0, 10)]);
    assert_eq!(faults(&pack, false), [Fault::Cycle, Fault::Span]);
}

#[test]
fn findings_are_bounded_and_a_watcher_may_stop() {
    let entries = (0..20_000).map(|id| entry(id, 1, id, 1)).collect::<Vec<_>>();
    let mut pack = Crafted::new(vec![entry(0, 0, 0, 0)]).leaf(&entries);
    pack.root[0].length = u32::try_from(pack.leaves[0].len()).unwrap();
    pack.tiles = vec![7; 20_000];
    let mut bytes = pack.bytes().to_vec();
    bytes[98] = 2;
    let bytes = Bytes::from(bytes);
    let report = report(&bytes);
    assert_eq!((report.findings.len(), report.found, report.complete), (FINDINGS_MAX, 10_000, false));

    let (header, bytes) = written(&Sample::default());
    let mut told = vec![];
    let stopped = verify_pmtiles(&opened(&bytes).unwrap(), &mut |progress| {
        told.push(progress);
        if told.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(!stopped.complete && stopped.found == 0 && !stopped.is_good());
    assert!(told.windows(2).all(|pair| pair[0].done < pair[1].done));
    assert_eq!(told[0].total, header.tiles.length);
}

#[test]
fn vector_tiles_need_their_layers_described() {
    let mut pack = Crafted::new(vec![entry(20, 1, 0, 10)]);
    pack.metadata = b"{}".to_vec();
    let mut bytes = pack.bytes().to_vec();
    bytes[99..102].copy_from_slice(&[1, 2, 2]);
    let found = report(&bytes.into()).findings;
    assert_eq!(found.iter().map(|finding| finding.fault).collect::<Vec<_>>(), [Fault::VectorLayers]);
}
