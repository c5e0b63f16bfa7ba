//! Developer commands: `cargo xtask test` is the one that everything else rests on.
#![expect(clippy::print_stdout, reason = "a command line tool prints")]

mod assets;
mod bench;
mod conformance;
mod dist;
mod fuzz;
mod run;
mod soak;
mod test;
mod tools;

use std::process::ExitCode;

const HELP: &str = "\
cargo xtask test [--without-servers]   every check and test, installing what they need
cargo xtask fix                        format, and apply what clippy can mend
cargo xtask docs                       write what is generated in docs/
cargo xtask assets                     fetch what the preview page of packs draws its map with
cargo xtask fuzz [TARGET] [SECONDS]    coverage-guided fuzzing, 60 s a target by default
cargo xtask bench gateway [--quick] [SCENARIO...]
                                       beside nginx and HAProxy; figures in target/bench; none named: all of
                                       h1 h2 tls reject tenants tokens idle latency stream overload
cargo xtask bench edge [--quick] [SCENARIO...]
                                       beside nginx, Varnish and, if installed, Martin; none named: all of
                                       objects ranges tiles herd memory
cargo xtask bench registry [--quick] [SCENARIO...]
                                       beside etcd; none named: all of commits alone reads streams verify
cargo xtask bench overlay [--quick] [SCENARIO...]
                                       beside NATS and gossipsub; none named: all of
                                       codec session star gossip frozen sessions
cargo xtask soak gateway [MINUTES]     overload, faults, kills and reloads, 30 minutes by default
cargo xtask soak overlay [MINUTES] [--nodes N] [--seconds S] [--calm]
                                       simulated networks from fresh seeds until the time is over, 30 minutes by
                                       default, or one fails
cargo xtask sim SEED [--nodes N] [--seconds S] [--calm]
                                       the simulated network of a seed, and what happens in it
cargo xtask conformance [--accept]     the public tests of HTTP caches through two sites of the edge; what passed
                                       once must pass, `--accept` keeps a new result
cargo xtask dist                       a release archive in target/dist";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let done = match args[..] {
        ["test"] => test::all(false),
        ["test", "--without-servers"] => test::all(true),
        ["fix"] => {
            run::cargo(&["fmt", "--all"])
                && run::cargo(&[
                    "clippy",
                    "--workspace",
                    "--all-targets",
                    "--fix",
                    "--allow-dirty",
                    "--allow-staged",
                ])
        }
        ["docs"] => run::cargo_env(
            &["test", "-p", "ron", "--test", "e2e", "_page_is_current"],
            &[("UPDATE_DOCS", "1")],
        ),
        ["assets"] => assets::ensure(),
        ["fuzz"] => fuzz::all(60),
        ["fuzz", target] => fuzz::one(target, 60),
        ["fuzz", target, seconds] => {
            number("SECONDS", seconds).is_some_and(|seconds| fuzz::one(target, seconds))
        }
        ["sim", ref args @ ..] => soak::simulate(args),
        ["soak", "overlay", ref args @ ..] => soak::simulate(&[&["soak"], args].concat()),
        ["bench" | "soak", ..] if cfg!(debug_assertions) => run::optimised(&args),
        ["bench", "gateway", ref scenarios @ ..] => bench::gateway(scenarios),
        ["bench", "edge", ref scenarios @ ..] => bench::edge(scenarios),
        ["bench", "registry", ref scenarios @ ..] => bench::registry(scenarios),
        ["bench", "overlay", ref scenarios @ ..] => bench::overlay(scenarios),
        ["soak", "gateway"] => soak::gateway(30),
        ["soak", "gateway", minutes] => {
            number("MINUTES", minutes).is_some_and(|minutes| soak::gateway(minutes.into()))
        }
        ["conformance"] => conformance::run(false),
        ["conformance", "--accept"] => conformance::run(true),
        ["dist"] => dist::build(),
        _ => {
            println!("{HELP}");
            false
        }
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A number on the command line; says so if it is none.
fn number(name: &str, text: &str) -> Option<u32> {
    let number = text.parse().ok();
    if number.is_none() {
        println!("{name} is a whole number, not {text:?}\n\n{HELP}");
    }
    number
}
