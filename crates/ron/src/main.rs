//! The command line.

mod cli;
mod client;
mod commands;
mod edge;
mod gateway;
mod http1;
mod man;
mod overlay;
mod packs;
mod progress;
mod registry;
mod secret;
mod table;
mod top;
mod witness;

use clap::Parser as _;
use ron_kernel::config::Problems;
use ron_kernel::token::TokenError;
use std::process::ExitCode;

/// The system's allocator grows a thread's heap a page at a time, each with a system call.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Bad usage or configuration.
const USAGE: u8 = 64;

/// What was asked cannot be done as it was asked.
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

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
            use TokenError::{NoScope, Path, Word};
            let token = matches!(error.downcast_ref(), Some(NoScope | Word(_) | Path));
            let usage = token || error.is::<Problems>() || error.is::<Usage>();
            eprintln!("ron: {}", said(&error));
            ExitCode::from(if usage { USAGE } else { 1 })
        }
    }
}

/// An error and its causes; one that the error before tells already is not told twice.
pub(crate) fn said(error: &anyhow::Error) -> String {
    let mut out = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if out.is_empty() {
            out = cause;
        } else if !out.ends_with(&cause) {
            out += &format!(": {cause}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_cause_that_was_told_is_not_told_twice() {
        let error = anyhow::anyhow!("it is gone").context("the file: it is gone").context("no start");
        assert_eq!(super::said(&error), "no start: the file: it is gone");
    }
}
