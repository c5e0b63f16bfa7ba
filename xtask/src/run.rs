//! Running commands so that one can see what runs and how it ended.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// The folder of the workspace.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_owned()
}

/// The one target folder.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from)
}

pub(crate) fn cargo(args: &[&str]) -> bool {
    cargo_env(args, &[])
}

pub(crate) fn cargo_env(args: &[&str], env: &[(&str, &str)]) -> bool {
    let mut command = Command::new("cargo");
    command.args(args).envs(env.iter().copied());
    status(command)
}

/// Runs this program again, optimised: what makes load must be faster than what bears it.
pub(crate) fn optimised(args: &[&str]) -> bool {
    let mut command = Command::new(target().join("release/xtask"));
    command.args(args).current_dir(root());
    cargo(&["build", "--release", "-p", "xtask"]) && command.status().is_ok_and(|status| status.success())
}

/// What an example of ours prints, as JSON. It is built apart from its run, so that one sees it being built.
pub(crate) fn example(package: &str, name: &str, args: &[&str]) -> Option<serde_json::Value> {
    if !cargo(&["build", "--release", "-p", package, "--example", name]) {
        return None;
    }
    println!("running the example {name} of {package}");
    figures(Command::new(built_example(name)).args(args))
}

/// Where the program of an example lies once it was built.
pub(crate) fn built_example(name: &str) -> PathBuf {
    target().join("release/examples").join(name)
}

/// The figures that a program prints.
pub(crate) fn figures(command: &mut Command) -> Option<serde_json::Value> {
    let output = command.output().ok()?;
    let figures = serde_json::from_slice(&output.stdout).ok().filter(|_| output.status.success());
    if figures.is_none() {
        println!("{}", String::from_utf8_lossy(&output.stderr));
    }
    figures
}

/// Runs a command, saying what and how long.
pub(crate) fn status(mut command: Command) -> bool {
    command.current_dir(root());
    println!("\n$ {}", shown(&command));
    let begun = Instant::now();
    let good = command.status().is_ok_and(|status| status.success());
    println!("{} after {:.1} s", if good { "done" } else { "FAILED" }, begun.elapsed().as_secs_f64());
    good
}

/// Runs a test command, passing its output on; returns whether it succeeded and how many tests passed and failed.
pub(crate) fn tests(mut command: Command) -> (bool, u32, u32) {
    command.current_dir(root()).stdout(Stdio::piped());
    println!("\n$ {}", shown(&command));
    let begun = Instant::now();
    let Ok(mut child) = command.spawn() else { return (false, 0, 1) };
    let (mut passed, mut failed) = (0, 0);
    for line in BufReader::new(child.stdout.take().expect("it is piped")).lines().map_while(Result::ok) {
        if let Some(rest) = line.strip_prefix("test result: ") {
            let count = |word: &str| {
                let before = rest.split(word).next()?;
                before.rsplit([' ', '.']).find(|text| !text.is_empty())?.parse::<u32>().ok()
            };
            passed += count(" passed").unwrap_or(0);
            failed += count(" failed").unwrap_or(0);
        }
        // What passed is counted; what did not is shown.
        if !line.ends_with("... ok") && !line.is_empty() {
            println!("{line}");
        }
    }
    let good = child.wait().is_ok_and(|status| status.success());
    println!("{} after {:.1} s", if good { "done" } else { "FAILED" }, begun.elapsed().as_secs_f64());
    (good, passed, failed.max(u32::from(!good)))
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}
