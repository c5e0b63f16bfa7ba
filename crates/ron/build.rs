//! Notes the commit the binary is built from, for `/version`.

use std::process::Command;

fn main() {
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let commit = output.ok().filter(|output| output.status.success());
    let commit = commit.map_or_else(
        || "unknown".to_owned(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    );
    println!("cargo::rustc-env=BUILD_COMMIT={commit}");
    // Only what can change the commit: other branches come and go without a new build.
    let head = std::fs::read_to_string("../../.git/HEAD").unwrap_or_default();
    let branch = head.trim().strip_prefix("ref: ").unwrap_or_default();
    for name in ["HEAD", branch, "packed-refs"] {
        let path = format!("../../.git/{name}");
        if std::path::Path::new(&path).is_file() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
}
