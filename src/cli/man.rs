//! Manual pages, from the arguments and help texts of the commands.

use std::io;

use clap::{Arg, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// Paragraphs of a help text that are sections of a page: their first words, and the title.
const SECTIONS: [(&str, &str); 4] = [
    ("Permissions:", "PERMISSIONS"),
    ("Signals:", "SIGNALS"),
    ("Examples:", "EXAMPLES"),
    ("Exit status:", "EXIT STATUS"),
];

/// The page of this command, in roff. `Command::build` was called.
pub(super) fn page(command: &Command) -> io::Result<Vec<u8>> {
    let help = command.get_after_help().map(ToString::to_string);
    let help = help.unwrap_or_default();
    let paragraphs: Vec<&str> = help.split("\n\n").filter(|it| !it.is_empty()).collect();
    let mut text = Vec::new();
    let man = Man::new(command.clone());
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    let mut roff = Roff::new();
    for paragraph in paragraphs.iter().filter(|it| section(it).is_none()) {
        roff.control("PP", []);
        body(&mut roff, paragraph);
    }
    roff.to_writer(&mut text)?;
    man.render_options_section(&mut text)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut text)?;
    }
    let mut roff = Roff::new();
    for (start, title) in SECTIONS {
        let paragraph = paragraphs.iter().find_map(|it| it.strip_prefix(start));
        if let Some(paragraph) = paragraph {
            roff.control("SH", [title]);
            body(&mut roff, paragraph.trim_start_matches([' ', '\n']));
        }
    }
    list(&mut roff, "ENVIRONMENT", &environment(command));
    list(&mut roff, "FILES", &files(command));
    if command.get_name() != "plimsoll" {
        roff.control("SH", ["SEE ALSO"]);
        roff.text([bold("plimsoll"), roman("(1)")]);
    }
    roff.to_writer(&mut text)?;
    Ok(text)
}

fn section(paragraph: &str) -> Option<&'static str> {
    let mut sections = SECTIONS.iter();
    let found = sections.find(|(start, _)| paragraph.starts_with(start));
    found.map(|(_, title)| *title)
}

/// Lines that are indented by four spaces are commands, and stay as they are.
fn body(roff: &mut Roff, paragraph: &str) {
    let mut is_command = false;
    for line in paragraph.lines() {
        let starts = line.starts_with("    ");
        match (is_command, starts) {
            (false, true) => drop(roff.control("RS", ["4"]).control("nf", [])),
            (true, false) => drop(roff.control("fi", []).control("RE", []).control("PP", [])),
            _ => {}
        }
        is_command = starts;
        roff.text([roman(line.trim_start())]);
    }
    if is_command {
        roff.control("fi", []).control("RE", []);
    }
}

fn list(roff: &mut Roff, title: &str, items: &[(String, String)]) {
    if !items.is_empty() {
        roff.control("SH", [title]);
    }
    for (name, meaning) in items {
        roff.control("TP", []);
        roff.text([bold(name)]);
        roff.text([roman(meaning)]);
    }
}

/// The variables that the command reads.
fn environment(command: &Command) -> Vec<(String, String)> {
    let by_flags = command.get_arguments().filter_map(|argument| {
        let name = argument.get_env()?.to_string_lossy().into_owned();
        Some((name, format!("the same as --{}", argument.get_long()?)))
    });
    let mut all: Vec<_> = by_flags.collect();
    if has(command, "kubeconfig") {
        let meaning = "the kubeconfig, or several, separated by colons";
        all.push(("KUBECONFIG".to_owned(), meaning.to_owned()));
    }
    let levels = "levels of the log on standard error, such as warn or info,plimsoll=debug";
    all.push(("RUST_LOG".to_owned(), levels.to_owned()));
    let no_colour = "if it is not empty, nothing is coloured";
    all.push(("NO_COLOR".to_owned(), no_colour.to_owned()));
    all
}

/// The files and directories that the command uses by default.
fn files(command: &Command) -> Vec<(String, String)> {
    let by_flags = command.get_arguments().filter_map(|argument| {
        let default = argument.get_default_values().first()?.to_str()?;
        let help = argument.get_help()?.to_string();
        let is_file = default.starts_with('/') && argument.get_long().is_some();
        is_file.then(|| (default.to_owned(), help))
    });
    let mut all: Vec<_> = by_flags.collect();
    if has(command, "kubeconfig") {
        let meaning = "the kubeconfig, if neither --kubeconfig nor KUBECONFIG names one";
        all.push(("~/.kube/config".to_owned(), meaning.to_owned()));
    }
    all
}

fn has(command: &Command, argument: &str) -> bool {
    let mut ids = command.get_arguments().map(Arg::get_id);
    ids.any(|id| id == argument)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::super::Cli;
    use super::*;

    fn pages() -> Vec<(String, String)> {
        let mut command = Cli::command();
        command.build();
        let of = |command: &Command| {
            let page = page(command).expect("written");
            let page = String::from_utf8(page).expect("text");
            (command.get_name().to_owned(), page)
        };
        let visible = command.get_subcommands().filter(|it| !it.is_hide_set());
        visible.chain([&command]).map(of).collect()
    }

    fn of(name: &str) -> String {
        let mut pages = pages().into_iter();
        pages.find(|(own, _)| own == name).expect("a page").1
    }

    #[test]
    fn a_page_has_the_sections_of_its_help_text() {
        let page = of("top");
        for (title, text) in [
            ("PERMISSIONS", "list nodemetrics.metrics.plimsoll.dev"),
            ("EXAMPLES", "plimsoll top pods"),
            ("EXIT STATUS", "0 shown, 2 neither"),
            ("ENVIRONMENT", "KUBECONFIG"),
            ("FILES", "~/.kube/config"),
            ("SEE ALSO", "plimsoll"),
        ] {
            let heading = page
                .find(&format!(".SH \"{title}\""))
                .or_else(|| page.find(&format!(".SH {title}\n")));
            let after = &page[heading.unwrap_or_else(|| panic!("{title}: {page}"))..];
            let plain = after.replace("\\-", "-");
            assert!(plain.contains(text), "{title}: {after}");
        }
        let files = of("agent").replace("\\-", "-");
        assert!(files.contains("/var/lib/plimsoll"), "{files}");
    }

    #[test]
    fn every_command_with_an_exit_status_in_its_help_has_the_section() {
        for (name, page) in pages() {
            let stated = page.contains("Exit status:");
            assert!(!stated, "{name}: the paragraph is a section");
        }
    }
}
