//! Draws a pack and takes some of its tiles out as files, for `cargo xtask bench edge`:
//! `cargo run --release -p svc-edge --example sample_pack FOLDER ZOOM COUNT`.
//!
//! The folder then has `pack.pmtiles`, the list `tiles` of `Z/X/Y`, and each listed tile as a file of that name.

#![expect(clippy::print_stdout, reason = "a command that says what it made")]

use std::fs::File;
use std::io::BufWriter;
use std::path::PathBuf;
use svc_edge::pack::TileCoord;
use svc_edge::pack::sample::Sample;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [folder, zoom, count] = &args[..] else { panic!("FOLDER ZOOM COUNT") };
    let (folder, count) = (PathBuf::from(folder), count.parse::<u64>().expect("a count"));
    let sample = Sample {
        max_zoom: zoom.parse().expect("a zoom"),
        sea_percent: 50,
        points_max: 200,
        ..Sample::default()
    };
    let spill = || tempfile::tempfile().expect("a file");
    let mut out = BufWriter::new(File::create(folder.join("pack.pmtiles")).expect("a file"));
    let header = sample.write(spill(), spill(), &mut out).expect("it is written");
    let all = TileCoord::new(sample.max_zoom, 0, 0).expect("within the zooms").id() * 4;
    let mut list = String::new();
    for number in 0..count {
        // Here and there, the same on every machine.
        let id = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % all.max(1);
        let Some(coord) = TileCoord::of_id(id).filter(|coord| coord.z() <= sample.max_zoom) else { continue };
        let Some(tile) = sample.tile(coord) else { continue };
        let path = folder.join(coord.to_string());
        std::fs::create_dir_all(path.parent().expect("it lies in a folder")).expect("a folder");
        std::fs::write(path, sample.compression.encode(&tile).expect("it compresses")).expect("a file");
        list += &format!("{coord}\n");
    }
    std::fs::write(folder.join("tiles"), &list).expect("a file");
    println!("{} tiles, {} of them as files", header.addressed, list.lines().count());
}
