//! How fast packs are made, mounted, read and checked: `cargo run --release -p svc-edge --example pack_speed [ZOOM]`.

#![expect(clippy::print_stdout, reason = "a command that prints its measurements")]

use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use svc_edge::pack::convert::to_mbtiles;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::{DirectoryCache, Limits, Pack, TileCoord};

fn main() {
    let max_zoom = std::env::args().nth(1).map_or(9, |text| text.parse().expect("a zoom"));
    let folder = tempfile::tempdir().expect("a folder");
    let (archive, database) = (folder.path().join("pack.pmtiles"), folder.path().join("pack.mbtiles"));
    let sample = Sample { max_zoom, sea_percent: 50, points_max: 200, ..Sample::default() };
    let spill = || tempfile::tempfile().expect("a file");
    let mut out = File::create(&archive).expect("a file");
    let (header, took) = timed(|| sample.write(spill(), spill(), &mut out).expect("it is written"));
    println!(
        "{} tiles in {} entries with {} contents, {} bytes of leaves, {} of tiles: drawn and written in {took:.2?}",
        header.addressed, header.entries, header.contents, header.leaves.length, header.tiles.length
    );
    let open = |path: &Path| {
        Pack::open(
            path,
            Limits::default(),
            Arc::new(DirectoryCache::new(&Inventory::new(Metrics::default()), 64 << 20)),
            1,
        )
    };
    // The clock is too coarse for one mount.
    let mount = |path: &Path| {
        let (_, took) = timed(|| (0..1000).for_each(|_| drop(open(path).expect("it mounts"))));
        println!("{}: mounted in {:.2?}", path.display(), took / 1000);
        open(path).expect("it mounts")
    };
    let pack = mount(&archive);
    read(&pack, max_zoom);
    let Pack::Pmtiles(inner) = &pack else { panic!("it is an archive") };
    let (_, took) =
        timed(|| to_mbtiles(inner, &database, &mut |_| ControlFlow::Continue(())).expect("it converts"));
    println!("converted to MBTiles in {took:.2?}");
    read(&mount(&database), max_zoom);
}

/// Tiles of the last zoom here and there, and then everything.
fn read(pack: &Pack, max_zoom: u8) {
    let rounds = 200_000u32;
    for round in ["cold", "warm", "warm"] {
        let (bytes, took) = timed(|| {
            let mut bytes = 0;
            for number in 0..rounds {
                let place = number.wrapping_mul(0x9e37_79b9);
                let (x, y) = (place >> (32 - max_zoom), (place << 13) >> (32 - max_zoom));
                let coord = TileCoord::new(max_zoom, x, y).expect("within the zoom");
                bytes += pack.tile(coord).expect("it reads").map_or(0, |tile| tile.bytes.len());
            }
            bytes
        });
        let rate = f64::from(rounds) / took.as_secs_f64();
        println!(
            "  {round}: {rate:.0} look-ups per second of one core, {} bytes each",
            bytes / rounds as usize
        );
    }
    let (report, took) = timed(|| pack.verify(&mut |_| ControlFlow::Continue(())));
    assert!(report.is_good(), "{report:?}");
    println!("  verified {} tiles with {} contents in {took:.2?}", report.tiles, report.contents);
}

/// By the time this thread has run, so that a busy machine does not count.
fn timed<T>(run: impl FnOnce() -> T) -> (T, Duration) {
    let now = || {
        let text =
            std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux counts a thread's time");
        Duration::from_nanos(
            text.split(' ').next().and_then(|nanos| nanos.parse().ok()).expect("nanoseconds"),
        )
    };
    let begun = now();
    let result = run();
    (result, now() - begun)
}
