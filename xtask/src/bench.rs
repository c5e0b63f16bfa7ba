//! `cargo xtask bench`: ron beside its peers (nginx, HAProxy, Varnish, etcd, NATS, gossipsub), in one run on one
//! machine.
//!
//! The server under test has a core of its own; origin and client share the other. Runs of the servers alternate,
//! and a figure is the median over the rounds, so that what else the machine does falls on all alike.

mod compare;
mod edge;
mod idle;
mod load;
mod overlay;
mod overload;
mod own;
mod peers;
mod plot;
mod process;
mod registry;
mod table;

use crate::run::{cargo, target};
use crate::tools;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::process::Command;

/// What every scenario needs to know.
pub(crate) struct Bench {
    binary: PathBuf,
    /// For files of this run.
    dir: PathBuf,
    /// For results.
    out: PathBuf,
    rounds: usize,
    seconds: u32,
}

/// A scenario prints its table and returns its figures; `None` if it could not be run.
type Scenario = fn(&Bench) -> Option<Value>;

const SCENARIOS: [(&str, Scenario); 10] = [
    ("h1", compare::h1),
    ("h2", compare::h2),
    ("tls", compare::tls),
    ("reject", own::reject),
    ("tenants", own::tenants),
    ("tokens", own::tokens),
    ("idle", idle::run),
    ("latency", compare::latency),
    ("stream", compare::stream),
    ("overload", overload::run),
];

const OF_REGISTRY: [(&str, Scenario); 5] = [
    ("commits", registry::commits),
    ("alone", registry::alone),
    ("reads", registry::reads),
    ("streams", registry::streams),
    ("verify", registry::verify),
];

const OF_EDGE: [(&str, Scenario); 5] = [
    ("objects", edge::objects),
    ("ranges", edge::ranges),
    ("tiles", edge::tiles),
    ("herd", edge::herd),
    ("memory", edge::memory),
];

const OF_OVERLAY: [(&str, Scenario); 6] = [
    ("codec", overlay::codec),
    ("session", overlay::session),
    ("star", overlay::star),
    ("gossip", overlay::gossip),
    ("frozen", overlay::frozen),
    ("sessions", overlay::sessions),
];

pub(crate) fn gateway(args: &[&str]) -> bool {
    run("gateway", &SCENARIOS, &tools::FOR_BENCHES, args)
}

pub(crate) fn registry(args: &[&str]) -> bool {
    run("registry", &OF_REGISTRY, &tools::FOR_REGISTRY_BENCHES, args)
}

pub(crate) fn edge(args: &[&str]) -> bool {
    run("edge", &OF_EDGE, &tools::FOR_EDGE_BENCHES, args)
}

pub(crate) fn overlay(args: &[&str]) -> bool {
    run("overlay", &OF_OVERLAY, &tools::FOR_OVERLAY_BENCHES, args)
}

fn run(service: &str, scenarios: &[(&str, Scenario)], needs: &[tools::Program], args: &[&str]) -> bool {
    let quick = args.contains(&"--quick");
    let named: Vec<&str> = args.iter().copied().filter(|arg| *arg != "--quick").collect();
    if let Some(unknown) = named.iter().find(|name| !scenarios.iter().any(|known| known.0 == **name)) {
        let known: Vec<&str> = scenarios.iter().map(|known| known.0).collect();
        println!("no scenario {unknown:?}; known: {}", known.join(", "));
        return false;
    }
    // A binary that exists already. No name of ours begins with `RON_`: those are keys of its configuration.
    let given = match std::env::var_os("BENCH_RON").map(std::fs::canonicalize).transpose() {
        Ok(given) => given,
        Err(error) => {
            println!("the binary that BENCH_RON names: {error}");
            return false;
        }
    };
    let built = given.is_some() || cargo(&["build", "--release", "-p", "ron"]);
    // Nodes of the overlay share both cores with the load; elsewhere the server has one to itself.
    if !tools::ensure(needs) || !built || !settle(service != "overlay") {
        return false;
    }
    let Ok(dir) = tempfile::tempdir() else { return false };
    let bench = Bench {
        binary: given.unwrap_or_else(|| target().join("release/ron")),
        dir: dir.path().to_owned(),
        out: target().join("bench"),
        rounds: if quick { 3 } else { 5 },
        seconds: if quick { 1 } else { 3 },
    };
    let prepared = service != "gateway" || peers::prepare(&bench.dir);
    if !prepared || std::fs::create_dir_all(&bench.out).is_err() {
        println!("cannot write to {} and {}", bench.dir.display(), bench.out.display());
        return false;
    }
    let machine = machine(&bench, needs);
    let mut results = Map::new();
    let mut good = true;
    for (name, scenario) in scenarios.iter().filter(|known| named.is_empty() || named.contains(&known.0)) {
        match scenario(&bench) {
            Some(result) => {
                results.insert((*name).to_owned(), result);
            }
            None => {
                println!("{name} could not be measured");
                good = false;
            }
        }
    }
    let page =
        json!({"machine": machine, "rounds": bench.rounds, "seconds": bench.seconds, "scenarios": results});
    let path = bench.out.join(format!("{service}.json"));
    println!("\n{}", path.display());
    good && std::fs::write(path, format!("{page:#}\n")).is_ok()
}

/// Children inherit all three: a client's core, precedence over what else the machine does, if that is allowed,
/// and room for ten thousand connections on either side.
fn settle(pinned: bool) -> bool {
    if pinned && !process::pin(std::process::id(), process::CLIENT_CORE) {
        println!("this needs two cores");
        return false;
    }
    let pid = std::process::id().to_string();
    let _ = Command::new("renice").args(["-n", "-15", "-p", &pid]).output();
    for limits in ["65536:65536", "65536:", "16384:"] {
        let output = Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={limits}")]).output();
        if output.is_ok_and(|output| output.status.success()) {
            break;
        }
    }
    true
}

/// Says where this runs and against what.
fn machine(bench: &Bench, programs: &[tools::Program]) -> Value {
    let first_line = |program: &str, args: &[&str]| {
        let output = Command::new(program).args(args).output().ok();
        let text = output.map(|output| {
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
        });
        text.and_then(|text| text.lines().next().map(str::to_owned)).unwrap_or_default()
    };
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map_or("unknown", |(_, model)| model);
    let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let mut versions = vec![first_line(&bench.binary.to_string_lossy(), &["--version"])];
    for (program, _, _) in programs {
        let flag = if matches!(*program, "nginx" | "haproxy" | "wrk") {
            "-v"
        } else if *program == "varnishd" {
            "-V"
        } else {
            "--version"
        };
        versions.push(first_line(program, &[flag]));
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split(' ').next().unwrap_or("?");
    println!(
        "\n{cores} cores, {model}, {}; load average {load} before the run",
        first_line("uname", &["-sr"])
    );
    for version in &versions {
        println!("{version}");
    }
    if !programs.iter().any(|(program, ..)| *program == "nats-server") {
        println!("server on core {}, everything else on core {}", process::PROXY_CORE, process::CLIENT_CORE);
    }
    json!({"cores": cores, "cpu": model, "versions": versions, "load_average": load})
}
