//! The `plimsoll` command.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    let cli = plimsoll::cli::Cli::parse();
    cli.run().unwrap_or_else(|error| {
        eprintln!("plimsoll: {}", plimsoll::cli::told(&error));
        ExitCode::from(2)
    })
}
