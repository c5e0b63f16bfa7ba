//! The command line.

mod cli;
mod commands;

use clap::Parser as _;
use std::process::ExitCode;

/// Bad usage or configuration.
const USAGE: u8 = 64;

fn main() -> ExitCode {
    let cli = match cli::Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(USAGE) } else { ExitCode::SUCCESS };
        }
    };
    match commands::run(cli) {
        Ok(code) => code,
        Err(error) => {
            let usage = error.downcast_ref::<ron_kernel::config::Problems>().is_some();
            eprintln!("ron: {error:#}");
            ExitCode::from(if usage { USAGE } else { 1 })
        }
    }
}
