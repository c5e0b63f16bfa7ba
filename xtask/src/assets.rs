//! `cargo xtask assets`: the library that the preview page draws its map with, from npm.
//!
//! It is never committed. What was fetched is checked against the digest below, so that every build has the same.

use crate::run::{root, status, target};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

const PACKAGE: &str = "maplibre-gl@6.17.0";
const INTEGRITY: &str =
    "sha512-2chIZwpLGenoUQOcnm9Pk4SLbA8ppNFq8jlpXiq9vcYm3Y1wJ3fc82FL0GLwBaPYJCLzPv/mC46KEupVov75rQ==";
/// Where they are in the package, and what they are called where the build looks.
const FILES: [(&str, &str); 4] = [
    ("package/dist/maplibre-gl.mjs", "maplibre-gl.mjs"),
    ("package/dist/maplibre-gl-worker.mjs", "maplibre-gl-worker.mjs"),
    ("package/dist/maplibre-gl.css", "maplibre-gl.css"),
    ("package/LICENSE.txt", "maplibre-gl-licence.txt"),
];

/// Fetches what is missing; false, saying why, if that cannot be done.
pub(crate) fn ensure() -> bool {
    let folder = root().join("crates/svc-edge/assets");
    if FILES.iter().all(|(_, name)| folder.join(name).is_file()) {
        return true;
    }
    match fetch(&folder) {
        Ok(()) => true,
        Err(why) => {
            println!("the preview page gets no map: {why}");
            false
        }
    }
}

fn fetch(folder: &Path) -> Result<(), String> {
    let down = target().join("assets");
    std::fs::create_dir_all(&down).map_err(|error| format!("{}: {error}", down.display()))?;
    let mut npm = Command::new("npm");
    npm.args(["pack", PACKAGE, "--json", "--pack-destination"]).arg(&down);
    println!("fetching {PACKAGE} from npm");
    let output = npm.output().map_err(|error| format!("npm cannot be run: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let told: Value = serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    let (integrity, archive) = (told[0]["integrity"].as_str(), told[0]["filename"].as_str());
    let (Some(INTEGRITY), Some(archive)) = (integrity, archive) else {
        return Err(format!("{PACKAGE} is not what it was: its digest is {integrity:?}"));
    };
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(down.join(archive)).arg("-C").arg(&down).args(FILES.map(|(path, _)| path));
    if !status(tar) {
        return Err(format!("{archive} cannot be unpacked"));
    }
    for (path, name) in FILES {
        std::fs::copy(down.join(path), folder.join(name)).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok(())
}
