//! The `plimsoll` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = plimsoll::cli::Cli::from_arguments();
    cli.run().unwrap_or_else(|error| {
        plimsoll::cli::print_failure(&error);
        ExitCode::from(2)
    })
}
