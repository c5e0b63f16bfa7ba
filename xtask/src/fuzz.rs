//! libFuzzer on stable Rust: coverage instrumentation by compiler flags, one binary for all targets.

use crate::run::{root, status, target};
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

/// What `cargo fuzz` passes, less the sanitizer, which stable Rust does not have.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions";

/// The names in `fuzz::TARGETS`, read from the source so that xtask needs no dependency.
fn targets() -> Vec<String> {
    let source = std::fs::read_to_string(root().join("fuzz/src/lib.rs")).unwrap_or_default();
    let list = source.split("TARGETS:").nth(1).and_then(|rest| rest.split("];").next()).unwrap_or_default();
    list.lines()
        .filter_map(|line| line.trim().strip_prefix("(\"")?.split('"').next().map(str::to_owned))
        .collect()
}

fn build() -> Option<PathBuf> {
    let out = target().join("fuzz");
    let mut command = Command::new("cargo");
    command.args([
        "build",
        "--quiet",
        "--release",
        "-p",
        "fuzz",
        "--features",
        "libfuzzer",
        "--bin",
        "libfuzzer",
    ]);
    // A target triple keeps the flags away from build scripts and macros.
    command.args(["--target", &host()?, "--target-dir"]).arg(&out);
    command
        .env("RUSTFLAGS", FLAGS)
        .env("CARGO_PROFILE_RELEASE_LTO", "false")
        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1");
    let built = status(command);
    built.then(|| out.join(host().unwrap_or_default()).join("release/libfuzzer"))
}

fn host() -> Option<String> {
    let output = Command::new("rustc").arg("-vV").output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(|line| line.strip_prefix("host: ").map(str::to_owned))
}

fn fuzz(binary: &PathBuf, name: &str, seconds: u32, fixed: bool) -> bool {
    let corpus = root().join("fuzz/corpus").join(name);
    let artifacts = root().join("fuzz/artifacts").join(name);
    if std::fs::create_dir_all(&corpus).and_then(|()| std::fs::create_dir_all(&artifacts)).is_err() {
        return false;
    }
    let mut command = Command::new(binary);
    command.env("FUZZ_TARGET", name).arg(format!("-max_total_time={seconds}"));
    command.arg(format!("-artifact_prefix={}/", artifacts.display())).args([
        "-verbosity=0",
        "-max_len=8192",
        "-timeout=10",
    ]);
    if fixed {
        // The same inputs on a quick machine as on a slow one.
        command.args(["-seed=1", "-runs=100000"]);
    }
    command.arg(corpus).current_dir(root());
    let begun = Instant::now();
    // Its statistics say little; what it says about a failure says all.
    let output = command.output();
    let good = output.as_ref().is_ok_and(|output| output.status.success());
    println!(
        "fuzz {name}: {} after {:.1} s",
        if good { "held" } else { "FAILED" },
        begun.elapsed().as_secs_f64()
    );
    if let (false, Ok(output)) = (good, &output) {
        println!("{}", String::from_utf8_lossy(&output.stderr));
    }
    if !good {
        println!("{name}: the input that failed is in {}", artifacts.display());
    }
    good
}

pub(crate) fn one(name: &str, seconds: u32) -> bool {
    let known = targets();
    if !known.iter().any(|target| target == name) {
        println!("no target {name:?}; known: {}", known.join(", "));
        return false;
    }
    build().is_some_and(|binary| fuzz(&binary, name, seconds, false))
}

pub(crate) fn all(seconds: u32) -> bool {
    let Some(binary) = build() else { return false };
    targets().iter().filter(|name| !fuzz(&binary, name, seconds, false)).count() == 0
}

/// A short run of every target from a fixed seed: whether all held, how many did, how many did not.
pub(crate) fn short(seconds: u32) -> (bool, usize, usize) {
    let Some(binary) = build() else { return (false, 0, 1) };
    let names = targets();
    let failed = names.iter().filter(|name| !fuzz(&binary, name, seconds, true)).count();
    (failed == 0 && !names.is_empty(), names.len() - failed, failed)
}
