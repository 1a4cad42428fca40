//! The table, the bars, and their place in `docs/protection.md`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::cpu_burst::BurstFigures;
use crate::figures::{Recovery, SceneFigures, Summary};
use crate::ways::Way;

/// Where the table is in the page.
const BEGIN: &str = "<!-- measured: make protect renews this -->\n";
const END: &str = "<!-- end of measured -->\n";
/// The bars of the best of Plimsoll's ways, beside [`SceneFigures::max_ratio`].
const MIN_UTILISATION: f64 = 90.0;
const MIN_OF_LEFT_PERCENT: f64 = 90.0;

/// Everything that was measured.
pub struct Measured {
    pub machine: String,
    pub rounds: usize,
    pub scenes: Vec<SceneFigures>,
    pub cpu_burst: Option<BurstFigures>,
}

impl Measured {
    /// In markdown.
    pub fn table(&self) -> String {
        let mut text = format!(
            "Measured on {}, {} rounds (at most 2 of the scenes many); medians, and the lowest and highest p99 of a round.\n",
            self.machine, self.rounds
        );
        for scene in &self.scenes {
            scene_table(&mut text, scene);
        }
        if let Some(figures) = &self.cpu_burst {
            figures.table(&mut text);
        }
        text
    }

    /// The bars that were missed.
    pub fn missed(&self) -> Vec<String> {
        let cpu_burst = self.cpu_burst.as_ref().and_then(BurstFigures::missed);
        self.scenes
            .iter()
            .filter_map(missed)
            .chain(cpu_burst)
            .collect()
    }
}

fn scene_table(text: &mut String, scene: &SceneFigures) {
    let summaries = scene.summaries();
    write!(
        text,
        "\n### {}\nScene: {}.\n\n",
        title(scene.name),
        scene.about
    )
    .unwrap();
    text.push_str(
        "| way | p50 ms | p99 ms | rounds | times alone | p99.9 ms | served/s | given up | batch CPU | of what is left | CPU busy | \
         recovered after |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in &summaries {
        let (lowest, highest) = row.p99_range;
        let (batch, of_left, recovered) = if row.way == Way::Alone {
            ("-".to_owned(), "-".to_owned(), "-".to_owned())
        } else {
            (
                format!("{:.0}m", row.batch),
                format!("{:.0} %", row.of_left_percent),
                recovered(row),
            )
        };
        writeln!(
            text,
            "| {} | {} | {} | {} - {} | {:.2} | {} | {:.0} | {:.1} % | {batch} | {of_left} | {:.0} % | {recovered} |",
            row.way.name(),
            ms(row.p50),
            ms(row.p99),
            ms(lowest),
            ms(highest),
            row.ratio,
            ms(row.p999),
            row.served,
            row.unserved_percent,
            row.utilisation,
        )
        .unwrap();
    }
    text.push('\n');
    let suffices = summaries
        .iter()
        .any(|row| row.way == Way::Unprotected && meets(scene, row));
    if suffices {
        text.push_str("The kernel's weights alone suffice here.\n");
    }
    match missed(scene) {
        None => writeln!(
            text,
            "Bar met{}: p99 at most {} times alone, CPU busy at least {MIN_UTILISATION} %, batch at least {MIN_OF_LEFT_PERCENT} % of what \
             is left.",
            by(&scene.must_hold),
            scene.max_ratio
        ),
        Some(missed) => writeln!(text, "Bar missed: {missed}."),
    }
    .unwrap();
}

fn title(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

fn ms(value: f64) -> String {
    if value.is_nan() {
        "-".to_owned()
    } else if value < 10.0 {
        format!("{value:.2}")
    } else if value < 100.0 {
        format!("{value:.1}")
    } else {
        format!("{value:.0}")
    }
}

fn recovered(row: &Summary) -> String {
    match row.recovery {
        Recovery::NotMeasured => "-".to_owned(),
        Recovery::Not => "not in its round".to_owned(),
        Recovery::After(0.0) => "was never harmed".to_owned(),
        Recovery::After(after) => format!("{after:.1} s"),
    }
}

/// Whether all bars are met.
fn meets(scene: &SceneFigures, row: &Summary) -> bool {
    row.ratio <= scene.max_ratio
        && row.utilisation >= MIN_UTILISATION
        && row.of_left_percent >= MIN_OF_LEFT_PERCENT
}

/// The ways that must meet the bars, if it is not the best one.
fn by(ways: &[Way]) -> String {
    let names: Vec<String> = ways.iter().map(|way| way.name()).collect();
    match names.as_slice() {
        [] => String::new(),
        names => format!(" by {}", names.join(" and ")),
    }
}

/// What the ways that must meet the bars miss, or the best of Plimsoll's.
fn missed(scene: &SceneFigures) -> Option<String> {
    let summaries = scene.summaries();
    let rows = summaries.iter();
    if scene.must_hold.is_empty() {
        let mut ours: Vec<&Summary> = rows.filter(|row| row.way.is_ours()).collect();
        if ours.iter().any(|row| meets(scene, row)) {
            return None;
        }
        ours.sort_by(|a, b| a.ratio.total_cmp(&b.ratio));
        let best = shown(scene, ours.first()?);
        return Some(format!(
            "{}: the best of the ways tried is {best}",
            scene.name
        ));
    }
    let held = rows.filter(|row| scene.must_hold.contains(&row.way));
    let missed: Vec<String> = held
        .filter(|row| !meets(scene, row))
        .map(|row| shown(scene, row))
        .collect();
    (!missed.is_empty()).then(|| format!("{}: {}", scene.name, missed.join("; ")))
}

/// A way's figures beside their bars.
fn shown(scene: &SceneFigures, row: &Summary) -> String {
    format!(
        "{}: p99 {:.2} times alone (bar {}), CPU busy {:.0} % (bar {MIN_UTILISATION}), batch {:.0} % of what is left (bar \
         {MIN_OF_LEFT_PERCENT})",
        row.way.name(),
        row.ratio,
        scene.max_ratio,
        row.utilisation,
        row.of_left_percent
    )
}

/// A page before its table, the table, and the page after it.
pub fn parts(page: &str) -> [&str; 3] {
    let (before, rest) = page.split_once(BEGIN).unwrap();
    let (table, after) = rest.split_once(END).unwrap();
    [before, table, after]
}

/// Replaces the table in the page.
pub fn renew(page: &Path, table: &str) {
    let text = fs::read_to_string(page).unwrap();
    let [before, _, after] = parts(&text);
    fs::write(page, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
}
