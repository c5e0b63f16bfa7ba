//! Simulated networks from the command line: one seed, or fresh ones until the time is over.
#![expect(clippy::print_stdout, reason = "a command line tool prints")]
#![expect(clippy::disallowed_methods, reason = "a soak lasts as long as its user says")]

mod audit;
mod events;
mod hostile;
mod net;
mod scenario;

use scenario::{Plan, Wishes};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const HELP: &str = "\
sim SEED [--nodes N] [--seconds S] [--calm]   runs a seed and tells what happens
sim soak MINUTES [--nodes N]                  runs fresh seeds until the time is over or one fails";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let held = match args[..] {
        ["soak", minutes, ref rest @ ..] => {
            minutes.parse().ok().zip(wishes(rest)).map(|(minutes, wishes)| soak(minutes, wishes, rest))
        }
        [seed, ref rest @ ..] => {
            seed.parse().ok().zip(wishes(rest)).map(|(seed, wishes)| replay(seed, wishes))
        }
        _ => None,
    };
    match held {
        Some(true) => ExitCode::SUCCESS,
        Some(false) => ExitCode::FAILURE,
        None => {
            println!("{HELP}");
            ExitCode::from(64)
        }
    }
}

fn wishes(args: &[&str]) -> Option<Wishes> {
    match *args {
        [] => Some(Wishes::default()),
        ["--calm", ref rest @ ..] => Some(Wishes { calm: true, ..wishes(rest)? }),
        ["--nodes", count, ref rest @ ..] => {
            let count = count.parse().ok().filter(|count| (3..=1000).contains(count))?;
            Some(Wishes { nodes: Some(count), ..wishes(rest)? })
        }
        ["--seconds", count, ref rest @ ..] => {
            let count = count.parse().ok().filter(|count| (10..=200).contains(count))?;
            Some(Wishes { seconds: Some(count), ..wishes(rest)? })
        }
        _ => None,
    }
}

fn replay(seed: u64, wishes: Wishes) -> bool {
    let plan = Plan::new(seed, wishes);
    println!("{plan:#?}");
    let report = plan.run(|net, what| println!("{:>8.3} s  {what}", net.now.as_secs_f64()));
    println!("{report}");
    report.faults.is_empty()
}

fn soak(minutes: u64, wishes: Wishes, args: &[&str]) -> bool {
    let (begun, length) = (Instant::now(), Duration::from_secs(minutes * 60));
    let first = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let mut seeds = 0;
    while begun.elapsed() < length {
        let report = Plan::new(first + seeds, wishes).run(|_, _| {});
        println!("{report}");
        if !report.faults.is_empty() {
            println!("FAILED; to replay it: cargo xtask sim {} {}", first + seeds, args.join(" "));
            return false;
        }
        seeds += 1;
    }
    println!("{seeds} seeds from {first} on held");
    true
}
