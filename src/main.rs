//! The `plimsoll` command.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = plimsoll::cli::Cli::parse();
    cli.run().unwrap_or_else(|error| {
        plimsoll::cli::print_failure(&error);
        ExitCode::from(2)
    })
}
