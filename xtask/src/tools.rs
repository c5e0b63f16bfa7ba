//! What the checks and tests need beyond cargo, installed when it is missing.

use crate::run::{status, target};
use std::path::PathBuf;
use std::process::Command;

/// A program, the Debian package it is in, and what cannot be done without it.
pub(crate) type Program = (&'static str, &'static str, &'static str);

pub(crate) const FOR_TESTS: [Program; 3] = [
    ("curl", "curl", "TLS, HTTP/2 and Unix sockets with a client of others"),
    ("openssl", "openssl", "keys and certificates with tools of others"),
    (
        "python3",
        "python3",
        "bodies compressed by encoders of others, and a second verifier of the registry's formats",
    ),
];

pub(crate) const FOR_BENCHES: [Program; 5] = [
    ("nginx", "nginx", "the origin, and a proxy to compare with"),
    ("haproxy", "haproxy", "a proxy to compare with"),
    ("wrk", "wrk", "load over HTTP/1.1"),
    ("h2load", "nghttp2-client", "load over TLS and HTTP/2"),
    ("openssl", "openssl", "a certificate"),
];

pub(crate) const FOR_REGISTRY_BENCHES: [Program; 2] =
    [("etcd", "etcd-server", "a store to compare with"), ("wrk", "wrk", "load over HTTP/1.1")];

pub(crate) const FOR_CONFORMANCE: [Program; 2] =
    [("node", "nodejs", "the tests of HTTP caches"), ("npm", "npm", "fetching them")];

const DENY: &str = "0.20.2";

fn exists(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// Installs missing programs from Debian's packages; false, naming them, if that cannot be done.
pub(crate) fn ensure(programs: &[Program]) -> bool {
    let missing: Vec<_> = programs.iter().filter(|(program, _, _)| !exists(program)).collect();
    if missing.is_empty() {
        return true;
    }
    let packages: Vec<&str> = missing.iter().map(|(_, package, _)| *package).collect();
    println!("installing from Debian's packages: {}", packages.join(" "));
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(args).env("DEBIAN_FRONTEND", "noninteractive");
        status(command)
    };
    if apt(&["update", "-qq"]) {
        apt(&[&["install", "-y", "-qq", "--no-install-recommends"], &packages[..]].concat());
    }
    let still: Vec<_> = missing.into_iter().filter(|(program, _, _)| !exists(program)).collect();
    for (program, package, needed) in &still {
        println!("missing: {program} (package {package}), needed for {needed}");
    }
    still.is_empty()
}

/// `cargo-deny`, built once into the target folder unless the machine has it.
pub(crate) fn deny() -> Option<PathBuf> {
    if exists("cargo-deny") {
        return Some(PathBuf::from("cargo-deny"));
    }
    let tools = target().join("tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        println!("building cargo-deny {DENY} once, into {}", tools.display());
        let mut command = Command::new("cargo");
        command
            .args(["install", "--quiet", "--locked", "--version", DENY, "--root"])
            .arg(&tools)
            .arg("cargo-deny");
        // Its dependencies are built apart from ours and thrown away.
        command.env_remove("CARGO_TARGET_DIR");
        status(command);
    }
    program.exists().then_some(program)
}
