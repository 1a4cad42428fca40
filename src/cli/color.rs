//! Colours of what is printed for people: `--color`, `NO_COLOR`, and only on a terminal. Structured output never has any.

use anstream::ColorChoice;
use anstyle::{AnsiColor, Effects, Style};
use clap::ValueEnum;
use ratatui::crossterm::style::force_color_output;

/// What is wrong.
pub(super) const ERROR: Style = AnsiColor::Red.on_default().effects(Effects::BOLD);
/// What may be wrong.
pub(super) const WARNING: Style = AnsiColor::Yellow.on_default().effects(Effects::BOLD);
/// What is right.
pub(super) const GOOD: Style = AnsiColor::Green.on_default().effects(Effects::BOLD);
/// What is worth knowing.
const NOTE: Style = AnsiColor::Cyan.on_default().effects(Effects::BOLD);

/// Words that say how bad a message is.
const SEVERITIES: [(&str, Style); 3] = [("error", ERROR), ("warning", WARNING), ("note", NOTE)];

/// When to colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless `NO_COLOR` is set
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

impl Color {
    /// Applies to everything that is printed from now on.
    pub(super) fn apply(self) {
        let choice = match self {
            Self::Auto => return,
            Self::Always => ColorChoice::AlwaysAnsi,
            Self::Never => ColorChoice::Never,
        };
        choice.write_global();
        // The demo draws with another library.
        force_color_output(self == Self::Always);
    }
}

/// A text in this style.
pub(super) fn paint(text: &str, style: Style) -> String {
    format!("{style}{text}{style:#}")
}

/// A message with its first severity in colour: `file:1:2: error: ...`, `plimsoll: warning: ...`, `note: ...`.
pub(super) fn message(line: &str) -> String {
    let start = |word: &str| match line.find(&format!(": {word}: ")) {
        _ if line.starts_with(&format!("{word}: ")) => Some(0),
        found => found.map(|at| at + ": ".len()),
    };
    let found = SEVERITIES
        .iter()
        .filter_map(|(word, style)| Some((start(word)?, *word, *style)));
    match found.min_by_key(|(at, ..)| *at) {
        Some((at, word, style)) => {
            let (before, rest) = line.split_at(at);
            let word = paint(&rest[..=word.len()], style);
            let rest = rest.split_once(": ").map_or("", |(_, rest)| rest);
            format!("{before}{word} {rest}")
        }
        None => line.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_severity_of_a_message_is_coloured() {
        let red = "\u{1b}[1m\u{1b}[31m";
        let yellow = "\u{1b}[1m\u{1b}[33m";
        let cyan = "\u{1b}[1m\u{1b}[36m";
        let end = "\u{1b}[0m";
        for (line, expected) in [
            (
                "p.yaml:3:4: error: NodeQOS/a: note: x",
                format!("p.yaml:3:4: {red}error:{end} NodeQOS/a: note: x"),
            ),
            (
                "plimsoll: warning: error: x",
                format!("plimsoll: {yellow}warning:{end} error: x"),
            ),
            (
                "note: is this an error: no",
                format!("{cyan}note:{end} is this an error: no"),
            ),
            (
                "0 errors and 1 warning",
                "0 errors and 1 warning".to_owned(),
            ),
        ] {
            assert_eq!(message(line), expected);
            assert_eq!(anstream::adapter::strip_str(&expected).to_string(), line);
        }
    }
}
