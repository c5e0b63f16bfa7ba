//! The command line.

mod cli;
mod client;
mod commands;
mod gateway;
mod http1;
mod registry;
mod table;
mod witness;

use clap::Parser as _;
use ron_kernel::config::Problems;
use ron_kernel::token::TokenError;
use std::process::ExitCode;

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
            let token = matches!(error.downcast_ref(), Some(TokenError::NoScope | TokenError::Word(_)));
            let usage = token || error.is::<Problems>() || error.is::<Usage>();
            eprintln!("ron: {error:#}");
            ExitCode::from(if usage { USAGE } else { 1 })
        }
    }
}
