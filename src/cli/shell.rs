//! `plimsoll completions` and `plimsoll man`, generated from the arguments.

use std::process::ExitCode;

use clap::{Command, CommandFactory};
use clap_complete::Shell;

use super::{Cli, man, print};

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
    clap_complete::generate(args.shell, &mut visible(), "plimsoll", &mut script);
    print(&script)
}

/// Prints the manual page.
pub(super) fn man(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let mut command = visible();
    command.build();
    let page = match &args.subcommand {
        None => command,
        Some(name) => command.find_subcommand(name).cloned().ok_or_else(|| {
            anyhow::anyhow!("there is no subcommand `{name}`: see `plimsoll --help`")
        })?,
    };
    print(&man::page(&page)?)
}

/// The command without what is hidden.
fn visible() -> Command {
    let all = Cli::command();
    let subcommands = all.get_subcommands().filter(|it| !it.is_hide_set());
    let (subcommands, about) = (subcommands.cloned(), all.get_about().cloned());
    let visible = Command::new("plimsoll")
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .arg_required_else_help(true)
        .args(all.get_arguments().cloned())
        .subcommands(subcommands);
    visible.about(about.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_commands_are_not_completed() {
        let mut script = Vec::new();
        clap_complete::generate(Shell::Bash, &mut visible(), "plimsoll", &mut script);
        let script = String::from_utf8(script).expect("text");
        assert!(script.contains("placement") && script.contains("--kubeconfig"));
        assert!(script.contains("--color"), "flags of every command");
        for hidden in ["demo-worker", "demo-burner", "demo-stage"] {
            assert!(!script.contains(hidden), "{hidden}");
        }
    }
}
