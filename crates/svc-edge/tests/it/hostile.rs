//! Packs that mean harm: refused where the harm is, within the caps, and without a panic.

use crate::samples::{Crafted, entry, opened, written};
use bytes::Bytes;
use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use svc_edge::pack::directory::{DIRECTORY_BYTES_MAX, Directory};
use svc_edge::pack::header::{Header, Section};
use svc_edge::pack::metadata::METADATA_BYTES_MAX;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::{
    Compression, DirectoryCache, Fault, Limits, PackError, PackFile, Pmtiles, ReadAt, Tile, TileCoord,
};

/// Counts what is read, and fails the test where a place outside of the file is asked for.
struct Counted {
    bytes: Bytes,
    read: Arc<AtomicU64>,
    reads: Arc<AtomicU64>,
}

impl Counted {
    fn new(bytes: &Bytes) -> Self {
        Self { bytes: bytes.clone(), read: Arc::default(), reads: Arc::default() }
    }
}

impl ReadAt for Counted {
    fn size(&self) -> u64 {
        self.bytes.size()
    }

    fn read_at(&self, offset: u64, length: usize) -> io::Result<Bytes> {
        assert!(offset + length as u64 <= self.size(), "places are checked before they are read");
        self.read.fetch_add(length as u64, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.bytes.read_at(offset, length)
    }
}

fn coord(id: u64) -> TileCoord {
    TileCoord::of_id(id).expect("a small id")
}

fn fault<T>(result: Result<T, PackError>) -> Fault {
    match result {
        Err(PackError::Invalid(fault)) => fault,
        Err(PackError::Read(error)) => panic!("{error}"),
        Ok(_) => panic!("it is taken for good"),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn a_tile_costs_a_leaf_and_itself_and_mounting_no_tile() {
    let sample = Sample { internal: Compression::None, max_zoom: 6, sea_percent: 10, ..Sample::default() };
    let (header, bytes) = written(&sample);
    assert!(header.leaves.length > 0);
    let source = Counted::new(&bytes);
    let (read, reads) = (source.read.clone(), source.reads.clone());
    let pack = Pmtiles::open(
        source,
        Limits::default(),
        Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 20)),
    )
    .unwrap();
    assert_eq!(reads.load(Ordering::Relaxed), 2);
    assert_eq!(read.swap(0, Ordering::Relaxed), 16_384 + header.metadata.length);
    let mut tiles =
        sample.coords().filter(|coord| coord.z() == 6).filter_map(|coord| pack.tile(coord).unwrap());
    let first = tiles.next().unwrap();
    assert_eq!(reads.swap(0, Ordering::Relaxed), 4);
    assert!(read.load(Ordering::Relaxed) <= header.leaves.length + first.bytes.len() as u64);
    tiles.next().unwrap();
    assert_eq!(reads.load(Ordering::Relaxed), 1, "the directory is known by now");
}

#[test]
fn a_directory_or_metadata_that_explodes_is_refused_at_the_cap() {
    for internal in [Compression::Gzip, Compression::Brotli, Compression::Zstd] {
        let bomb = internal.encode(&vec![0; 64 << 20]).unwrap();
        assert!(bomb.len() < 100_000, "{}", bomb.len());
        let length = u32::try_from(bomb.len()).unwrap();
        let mut pack = Crafted::new(vec![entry(0, 1, 0, 10), entry(1, 0, 0, length)]);
        pack.internal = internal;
        pack.leaves.push(bomb.clone());
        let open = opened(&pack.bytes()).unwrap();
        assert!(matches!(fault(open.tile(coord(1))), Fault::Decode(_)));
        assert!(matches!(fault(open.tile(coord(9))), Fault::Decode(_)), "again, from the cache");
        assert!(open.tile(coord(0)).unwrap().is_some(), "the rest is served");
        pack.metadata = vec![b' '; METADATA_BYTES_MAX as usize + 1];
        assert!(matches!(fault(opened(&pack.bytes())), Fault::Decode(_)));
        let tile = Tile { bytes: bomb.into(), compression: internal };
        assert!(matches!(tile.decoded(Limits::default()), Err(Fault::Decode(_))));
    }
}

#[test]
fn what_is_not_compressed_is_held_to_the_caps_too() {
    let cap = DIRECTORY_BYTES_MAX as usize;
    let mut pack = Crafted::new(vec![entry(0, 0, 0, cap as u32 + 1), entry(5, 1, 0, 20 << 20)]);
    pack.leaves.push(vec![1; cap + 1]);
    pack.tiles = vec![1; 20 << 20];
    let open = opened(&pack.bytes()).unwrap();
    assert_eq!(fault(open.tile(coord(0))), Fault::DirectoryCap);
    assert_eq!(fault(open.tile(coord(5))), Fault::TileCap);
    pack.metadata = vec![b' '; METADATA_BYTES_MAX as usize + 1];
    assert_eq!(fault(opened(&pack.bytes())), Fault::MetadataCap);
}

#[test]
fn leaves_that_lead_in_a_circle_or_too_deep_are_refused() {
    // The length of a leaf of one small entry is five.
    let itself = Crafted::new(vec![entry(0, 0, 0, 5)]).leaf(&[entry(0, 0, 0, 5)]);
    assert_eq!(fault(opened(&itself.bytes()).unwrap().tile(coord(3))), Fault::Cycle);
    let in_turn = Crafted::new(vec![entry(0, 0, 0, 5)]).leaf(&[entry(0, 0, 5, 5)]).leaf(&[entry(0, 0, 0, 5)]);
    assert_eq!(in_turn.leaves[0].len(), 5);
    assert_eq!(fault(opened(&in_turn.bytes()).unwrap().tile(coord(3))), Fault::Cycle);

    let nested = |levels: u64| {
        let mut pack = Crafted::new(vec![entry(0, 0, 0, 5)]);
        for level in 1..levels {
            pack = pack.leaf(&[entry(0, 0, 5 * level, 5)]);
        }
        opened(&pack.leaf(&[entry(3, 1, 0, 10)]).bytes()).unwrap().tile(coord(3))
    };
    assert_eq!(nested(3).unwrap().unwrap().bytes, [7; 10][..]);
    assert_eq!(fault(nested(4)), Fault::Depth);
}

#[test]
fn a_leaf_speaks_only_of_what_it_was_named_for() {
    let root = vec![entry(5, 0, 0, 6), entry(9, 1, 0, 10)];
    for (leaf, expected) in [
        (entry(4, 1, 0, 10), Fault::Span),
        (entry(9, 1, 0, 10), Fault::Span),
        (entry(8, 2, 0, 10), Fault::Span),
        (entry(5, 1, 99, 1000), Fault::EntryOutside),
        (entry(5, 0, 99, 1000), Fault::EntryOutside),
    ] {
        let mut pack = Crafted::new(root.clone()).leaf(&[leaf]);
        pack.root[0].length = u32::try_from(pack.leaves[0].len()).unwrap();
        let open = opened(&pack.bytes()).unwrap();
        assert_eq!(fault(open.tile(coord(6))), expected);
        assert!(open.tile(coord(9)).unwrap().is_some());
    }
}

#[test]
fn entries_that_share_bytes_or_lie_outside_are_refused() {
    let check = |root, expected| assert_eq!(fault(opened(&Crafted::new(root).bytes())), expected);
    check(vec![entry(0, 1, 0, 10), entry(1, 1, 9, 10)], Fault::EntriesOverlap);
    check(vec![entry(0, 1, 991, 10)], Fault::EntryOutside);
    check(vec![entry(0, 0, 0, 1)], Fault::EntryOutside);
    check(vec![], Fault::NoEntries);
}

/// Opens what it can and asks for everything; what comes must be bounded and within the file.
fn survive(bytes: Vec<u8>) -> bool {
    let bytes = Bytes::from(bytes);
    let Ok(pack) = Pmtiles::open(
        Counted::new(&bytes),
        Limits::default(),
        Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 16)),
    ) else {
        return false;
    };
    for id in [0, 1, 4, 5, 7, 8, 9, 20, 89, 90, 1 << 40] {
        if let Ok(Some(tile)) = pack.tile(coord(id)) {
            assert!(tile.bytes.len() <= bytes.len());
            let _ = tile.decoded(pack.limits());
        }
    }
    let mut visited = 0;
    let _ = pack.walk(&mut |_| {
        visited += 1;
        assert!(visited <= 2 * bytes.len(), "no more entries than bytes");
        std::ops::ControlFlow::Continue(())
    });
    true
}

fn small() -> Crafted {
    let mut pack = Crafted::new(vec![entry(0, 1, 0, 10), entry(1, 4, 10, 20), entry(5, 0, 0, 0)]);
    pack.leaves.push(Directory::write(&[entry(5, 3, 30, 5), entry(9, 1, 0, 10), entry(20, 70, 35, 100)]));
    pack.root[2].length = u32::try_from(pack.leaves[0].len()).expect("small");
    pack
}

#[test]
fn a_pack_cut_anywhere_is_refused() {
    let bytes = small().bytes();
    assert!(survive(bytes.to_vec()));
    for cut in 0..bytes.len() {
        assert!(!survive(bytes[..cut].to_vec()), "the last section ends with the file: {cut}");
    }
}

#[test]
fn a_pack_with_any_byte_changed_does_no_harm() {
    let packed = Crafted { internal: Compression::Gzip, leaves: vec![], ..small() };
    let mut packed = packed.leaf(&[entry(5, 3, 30, 5), entry(9, 1, 0, 10)]);
    packed.root[2].length = u32::try_from(packed.leaves[0].len()).unwrap();
    for bytes in [small().bytes(), packed.bytes()] {
        assert!(survive(bytes.to_vec()));
        // All but the tiles.
        for at in 0..bytes.len() - 1000 {
            for change in 1..=255 {
                let mut bytes = bytes.to_vec();
                bytes[at] ^= change;
                survive(bytes);
            }
        }
    }
}

/// Opens the packs of a folder as a node would and says how much memory that took at most.
fn peak_kib(folder: &str) -> u64 {
    let value = |name: &str| {
        let status = std::fs::read_to_string("/proc/self/status").expect("this is Linux");
        let line =
            status.lines().find_map(|line| line.strip_prefix(name)).expect("it has the line").to_owned();
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number")
    };
    let before = value("VmRSS:");
    for file in std::fs::read_dir(folder).expect("the folder") {
        let source = PackFile::open(&file.expect("a file").path()).expect("it opens");
        let cache = Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 20));
        if let Ok(pack) = Pmtiles::open(source, Limits::default(), cache) {
            for id in 0..3 {
                let tile = pack.tile(coord(id));
                assert!(id > 0 || tile.is_ok(), "what is good is served");
            }
        }
    }
    value("VmHWM:") - before
}

#[test]
fn no_pack_makes_a_mount_or_a_look_up_take_64_mib() {
    // Other tests share this process, so the work is done by another.
    const FOLDER: &str = "HOSTILE_PACKS";
    if let Ok(folder) = std::env::var(FOLDER) {
        let peak = peak_kib(&folder);
        assert!(peak < 64 << 10, "{peak} KiB");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut written = 0;
    let mut write = |bytes: &[u8]| {
        written += 1;
        std::fs::write(folder.path().join(written.to_string()), bytes).unwrap();
    };
    // As many entries as are allowed, in the order that is hardest to check.
    let count = 1 << 20;
    let entries: Vec<_> = (0..count).map(|at| entry(1 + at, 1, count - at, 1)).collect();
    let mut pack = Crafted::new(vec![entry(0, 1, 0, 1), entry(1, 0, 0, 0)]);
    pack.internal = Compression::Gzip;
    pack.tiles = vec![7; 2 << 20];
    let mut pack = pack.leaf(&entries);
    pack.root[1].length = u32::try_from(pack.leaves[0].len()).unwrap();
    write(&pack.bytes());
    assert!(opened(&pack.bytes()).unwrap().tile(coord(1)).unwrap().is_some(), "it is large, but good");
    // Metadata of the shape that takes the most memory as a tree.
    pack.metadata = format!("{{\"vector_layers\":[{}0]}}", "{\"\":0},".repeat(500_000)).into_bytes();
    write(&pack.bytes());
    for compression in [Compression::Gzip, Compression::Brotli, Compression::Zstd] {
        let bomb = compression.encode(&vec![0; 96 << 20]).unwrap();
        let length = u32::try_from(bomb.len()).unwrap();
        let mut pack = Crafted::new(vec![entry(0, 1, 0, 1), entry(1, 0, 0, length)]);
        pack.internal = compression;
        pack.leaves = vec![bomb.clone()];
        write(&pack.bytes());
        // The same as metadata: its section is the leaves', and these are none.
        let header = Header::parse(&pack.bytes(), pack.bytes().size()).unwrap();
        let moved = Header { metadata: header.leaves, leaves: Section::default(), ..header };
        write(&[&moved.to_bytes()[..], &pack.bytes()[127..]].concat());
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "hostile::no_pack_makes_a_mount_or_a_look_up_take_64_mib"])
        .env(FOLDER, folder.path())
        .output()
        .unwrap();
    assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    assert!(String::from_utf8_lossy(&child.stdout).contains("1 passed"));
}

#[test]
fn a_file_cut_short_while_in_use_gives_an_error() {
    let (_, bytes) = written(&Sample::default());
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let source = PackFile::open(file.path()).unwrap();
    let pack = Pmtiles::open(
        source,
        Limits::default(),
        Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 20)),
    )
    .unwrap();
    assert!(pack.tile(coord(0)).unwrap().is_some());
    file.as_file().set_len(200).unwrap();
    assert!(matches!(pack.tile(coord(0)), Err(PackError::Read(_))));
}
