//! Finds the library of the preview page, if `cargo xtask assets` has put it into `assets`.

use std::fmt::Write as _;
use std::path::Path;

/// As they are called there and on the page.
const FILES: [&str; 4] =
    ["maplibre-gl.mjs", "maplibre-gl-worker.mjs", "maplibre-gl.css", "maplibre-gl-licence.txt"];

fn main() {
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let folder = Path::new(&root).join("assets");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut text = String::from("/// File names and bytes; none if the build did not find them.\n");
    text += "const LIBRARY: &[(&str, &[u8])] = &[";
    if FILES.iter().all(|file| folder.join(file).is_file()) {
        for file in FILES {
            let path = folder.join(file).canonicalize().expect("it is a file");
            let _ = write!(text, "({file:?}, include_bytes!({path:?})), ");
        }
    }
    text += "];\n";
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("library.rs"), text).expect("the build folder can be written");
}
