//! Simulated networks from the command line: one seed, or fresh ones until the time is over.
#![expect(clippy::print_stdout, reason = "a command line tool prints")]
#![expect(clippy::disallowed_methods, reason = "a soak lasts as long as its user says")]

mod audit;
mod events;
mod hostile;
mod net;
mod scenario;

use scenario::{Plan, Wishes};
use std::ops::RangeInclusive;
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const HELP: &str = "\
sim SEED [--nodes N] [--seconds S] [--calm]
        runs a seed and tells what happens
sim soak [MINUTES] [--nodes N] [--seconds S] [--calm]
        runs fresh seeds until the time is over, 30 minutes by default, or one fails";
/// For a soak; a year is a way to say until somebody stops it.
const MINUTES_MAX: u64 = 366 * 24 * 60;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let held = match args[..] {
        ["soak", minutes, ref rest @ ..] if !minutes.starts_with("--") => {
            number("MINUTES", minutes, 1..=MINUTES_MAX).and_then(|minutes| soak(minutes, rest))
        }
        ["soak", ref rest @ ..] => soak(30, rest),
        [seed, ref rest @ ..] => number("SEED", seed, 0..=u64::MAX).and_then(|seed| replay(seed, rest)),
        [] => Err("which seed?".to_owned()),
    };
    match held {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            println!("{problem}\n\n{HELP}");
            ExitCode::from(64)
        }
    }
}

fn number(name: &str, text: &str, within: RangeInclusive<u64>) -> Result<u64, String> {
    let number = text.parse().ok().filter(|number| within.contains(number));
    let (least, most) = within.into_inner();
    number.ok_or_else(|| format!("{name} is a number from {least} to {most}, not {text:?}"))
}

fn wishes(args: &[&str]) -> Result<Wishes, String> {
    match *args {
        [] => Ok(Wishes::default()),
        ["--calm", ref rest @ ..] => Ok(Wishes { calm: true, ..wishes(rest)? }),
        ["--nodes", count, ref rest @ ..] => {
            Ok(Wishes { nodes: Some(number("--nodes", count, 3..=1000)? as usize), ..wishes(rest)? })
        }
        ["--seconds", count, ref rest @ ..] => {
            Ok(Wishes { seconds: Some(number("--seconds", count, 10..=200)?), ..wishes(rest)? })
        }
        [flag @ ("--nodes" | "--seconds")] => Err(format!("{flag} needs a number")),
        [unknown, ..] => Err(format!("not understood: {unknown:?}")),
    }
}

fn replay(seed: u64, args: &[&str]) -> Result<bool, String> {
    let plan = Plan::new(seed, wishes(args)?);
    println!("{plan:#?}");
    let report = plan.run(|net, what| println!("{:>8.3} s  {what}", net.now.as_secs_f64()));
    println!("{report}");
    Ok(report.faults.is_empty())
}

fn soak(minutes: u64, args: &[&str]) -> Result<bool, String> {
    let wishes = wishes(args)?;
    let (begun, length) = (Instant::now(), Duration::from_secs(minutes * 60));
    let first = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut seeds = 0;
    while begun.elapsed() < length {
        let report = Plan::new(first + seeds, wishes).run(|_, _| {});
        println!("{report}");
        if !report.faults.is_empty() {
            let seed = (first + seeds).to_string();
            let again = [&["cargo", "xtask", "sim", &seed], args].concat().join(" ");
            println!("FAILED; to see it again, to the same trace: {again}");
            return Ok(false);
        }
        seeds += 1;
    }
    println!("{seeds} seeds from {first} on held");
    Ok(true)
}
