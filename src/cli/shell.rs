//! `plimsoll completions` and `plimsoll man`, generated from the arguments.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use super::{Cli, print};

/// Arguments of `plimsoll completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {
    /// Shell to complete for
    shell: Shell,
}

/// Arguments of `plimsoll man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {
    /// Subcommand to print the page of [default: the whole command]
    subcommand: Option<String>,
}

/// Prints the completion script.
pub(super) fn completions(args: &CompletionsArgs) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "plimsoll", &mut script);
    print(&script)
}

/// Prints the manual page.
pub(super) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let mut command = Cli::command();
    command.build();
    let page = match &args.subcommand {
        None => command,
        Some(name) => command.find_subcommand(name).cloned().ok_or_else(|| {
            anyhow::anyhow!("there is no subcommand `{name}`: see `plimsoll --help`")
        })?,
    };
    let mut text = Vec::new();
    clap_mangen::Man::new(page).render(&mut text)?;
    print(&text)
}
