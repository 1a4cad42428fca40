//! The help of `plimsoll` itself: its commands by what they are about.

use clap::Command;

/// The commands, in the order of a user's way through them.
const GROUPS: [(&str, &[&str]); 5] = [
    ("Policies", &["check", "preview", "replay", "crds"]),
    (
        "Cluster",
        &["status", "top", "explain", "doctor", "stop", "resume"],
    ),
    ("This machine, without Kubernetes", &["demo", "run"]),
    (
        "Components, started by the Helm chart",
        &["controller", "agent"],
    ),
    ("Other", &["completions", "man", "version", "help"]),
];

/// The command, whose help lists its subcommands in groups.
pub(super) fn grouped(mut command: Command) -> Command {
    // Adds `help`.
    command.build();
    let style = *command.get_styles().get_header();
    let literal = *command.get_styles().get_literal();
    let names = command.get_subcommands().map(|it| it.get_name().len());
    let width = names.max().unwrap_or_default();
    let listed = GROUPS.map(|(title, names)| {
        let subcommands = names.iter().filter_map(|it| command.find_subcommand(it));
        let lines = subcommands.map(|subcommand| {
            let name = subcommand.get_name();
            let about = subcommand.get_about().map(ToString::to_string);
            let about = about.unwrap_or_default();
            let about = about.trim_end_matches('.');
            format!("  {literal}{name:<width$}{literal:#}  {about}\n")
        });
        let lines: String = lines.collect();
        // Elsewhere than on Linux a group may have none.
        if lines.is_empty() {
            return lines;
        }
        format!("{style}{title}:{style:#}\n{lines}\n")
    });
    let listed = listed.concat();
    command.help_template(format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{listed}{style}Options:{style:#}\n{{options}}{{after-help}}\n"
    ))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::CommandFactory as _;

    use super::super::Cli;
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let mut command = Cli::command();
        command.build();
        let visible = command.get_subcommands().filter(|it| !it.is_hide_set());
        let visible: BTreeSet<&str> = visible.map(Command::get_name).collect();
        let listed = GROUPS.iter().flat_map(|(_, names)| names.iter().copied());
        assert_eq!(listed.clone().count(), visible.len());
        assert_eq!(listed.collect::<BTreeSet<_>>(), visible);
    }

    #[test]
    fn the_help_lists_groups_with_their_commands() {
        let help = grouped(Cli::command()).render_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{text}: {help}"));
        assert!(at("Usage:") < at("Policies:"));
        assert!(at("Policies:") < at("\n  check ") && at("\n  check ") < at("Cluster:"));
        assert!(at("Cluster:") < at("\n  stop ") && at("\n  stop ") < at("Options:"));
        assert!(!help.contains("demo-worker"), "{help}");
    }
}
