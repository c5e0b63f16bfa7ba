//! Everything that must hold, in the order in which a failure is cheapest to see.

use crate::run::{cargo, status, tests};
use crate::{assets, fuzz, tools};
use std::process::Command;

/// Seconds for each fuzz target.
const FUZZ_SECONDS: u32 = 4;

pub(crate) fn all(without_servers: bool) -> bool {
    // The library must be there before anything is built.
    let ready =
        tools::ensure(&tools::FOR_TESTS) && assets::ensure() && tools::pack_tools() && tools::s3_server();
    if !ready && !without_servers {
        println!("install the programs above, or pass --without-servers to test without them");
        return false;
    }
    let checks = [
        cargo(&["fmt", "--all", "--check"]),
        cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        cargo(&[
            "clippy",
            "--workspace",
            "--all-targets",
            "--features",
            "ron/otlp,ron/quic",
            "--",
            "-D",
            "warnings",
        ]),
        deny(),
    ];
    let failed = checks.iter().filter(|good| !**good).count();
    let checks = (failed == 0, checks.len() - failed, failed);
    let mut command = Command::new("cargo");
    command.args(["test", "--workspace", "--features", "ron/otlp,ron/quic", "--no-fail-fast"]);
    if !ready {
        command.args([
            "--",
            "--skip",
            "curl",
            "--skip",
            "openssl",
            "--skip",
            "chromium",
            "--skip",
            "strace",
            "--skip",
            "tippecanoe",
            "--skip",
            "moto",
            "--skip",
            "bombs",
            "--skip",
            "certificates",
        ]);
    }
    let tested = tests(command);
    let (fuzzed, fuzz_passed, fuzz_failed) = fuzz::short(FUZZ_SECONDS);
    println!("\nchecks: {} passed, {} failed", checks.1, checks.2);
    println!("fuzz: {fuzz_passed} passed, {fuzz_failed} failed");
    println!("tests: {} passed, {} failed", tested.1, tested.2);
    checks.0 && tested.0 && fuzzed
}

/// Licences, sources, duplicates; advisories where the machine has their database.
fn deny() -> bool {
    let Some(program) = tools::deny() else {
        println!("cargo-deny could not be built");
        return false;
    };
    let mut command = Command::new(&program);
    command.args(["--log-level", "error", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"]);
    let good = status(command);
    let home = std::env::var_os("CARGO_HOME").map(std::path::PathBuf::from);
    let home =
        home.or_else(|| std::env::var_os("HOME").map(|home| std::path::PathBuf::from(home).join(".cargo")));
    if home.is_some_and(|home| home.join("advisory-dbs").exists()) {
        let mut command = Command::new(&program);
        command.args(["--offline", "--log-level", "error", "check", "advisories"]);
        return status(command) && good;
    }
    println!("advisories not checked: this machine has no database of them");
    good
}
