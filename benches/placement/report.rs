//! The table, and its place in `docs/internals/scheduling-comparison.md`.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::placement::Way;
use crate::placement::node::{CPUS, THRESHOLD};
use crate::placement::outcome::Outcome;
use crate::placement::scenes::Scene;

const BEGIN: &str = "<!-- measured: make simulate renews this -->\n";
const END: &str = "<!-- end of measured -->\n";

/// Everything that was measured.
pub struct Measured {
    pub nodes: usize,
    pub seeds: u64,
    pub scenes: Vec<SceneTable>,
}

/// A scene with all schedulers.
pub struct SceneTable {
    pub scene: Scene,
    pub rows: Vec<Row>,
}

/// One scheduler; an outcome for each seed.
pub struct Row {
    pub way: Way,
    pub outcomes: Vec<Outcome>,
}

/// Over the seeds.
#[derive(Clone, Copy)]
pub struct Spread {
    pub mean: f64,
    pub lowest: f64,
    pub highest: f64,
}

impl Row {
    pub fn spread(&self, of: impl Fn(&Outcome) -> f64) -> Spread {
        let values: Vec<f64> = self.outcomes.iter().map(of).collect();
        Spread {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            lowest: values.iter().copied().fold(f64::INFINITY, f64::min),
            highest: values.iter().copied().fold(f64::NEG_INFINITY, f64::max),
        }
    }
}

impl Spread {
    fn text(self, digits: usize) -> String {
        let Self {
            mean,
            lowest,
            highest,
        } = self;
        format!("{mean:.digits$} ({lowest:.digits$} - {highest:.digits$})")
    }
}

impl Measured {
    /// In markdown.
    pub fn table(&self) -> String {
        let mut text = format!(
            "{} nodes of {CPUS} CPUs, in *Day* {}; a rule of each evicts above {THRESHOLD} % CPU: the load line. Means of {} seeds, with the \
             lowest and the highest.\n",
            self.nodes,
            Scene::Day.nodes(self.nodes),
            self.seeds
        );
        for scene in &self.scenes {
            scene.write(&mut text);
        }
        text
    }
}

impl SceneTable {
    fn write(&self, text: &mut String) {
        let first = &self.rows[0];
        let is_burst = self.scene == Scene::Burst;
        write!(
            text,
            "\n### {}\nScene: {}. CPU use of the cluster, and placements, with {}: {:.0} %, {:.0}.\n\n",
            title(self.scene.name()),
            self.scene.about(),
            first.way.name(),
            first.spread(Outcome::mean_use).mean,
            first.spread(|it| it.placements as f64).mean,
        )
        .unwrap();
        text.push_str(
            "| scheduler | hot-spot minutes | balance | evictions | ping-pongs | regret, mean | regret, p95 | waiting",
        );
        text.push_str(if is_burst {
            " | on the emptied node | highest use |\n|---|---|---|---|---|---|---|---|---|---|\n"
        } else {
            " |\n|---|---|---|---|---|---|---|---|\n"
        });
        for row in &self.rows {
            let mean = |of: &dyn Fn(&Outcome) -> f64| row.spread(of).mean;
            write!(
                text,
                "| {} | {} | {} | {} | {} | {:.1} | {:.1} | {:.0} |",
                row.way.name(),
                row.spread(|it| it.hot_minutes).text(0),
                row.spread(Outcome::balance).text(1),
                row.spread(|it| it.evictions as f64).text(0),
                row.spread(|it| it.ping_pongs as f64).text(1),
                mean(&Outcome::regret_mean),
                mean(&Outcome::regret_p95),
                mean(&|it| it.pending_minutes),
            )
            .unwrap();
            if is_burst {
                write!(
                    text,
                    " {} | {:.0} % |",
                    row.spread(|it| it.on_emptied as f64).text(0),
                    mean(&|it| it.highest)
                )
                .unwrap();
            }
            text.push('\n');
        }
    }
}

pub fn title(name: &str) -> String {
    let mut letters = name.chars();
    letters.next().map_or_else(String::new, |first| {
        first.to_uppercase().chain(letters).collect()
    })
}

/// Replaces the table in the page.
pub fn renew(page: &Path, table: &str) {
    let text = fs::read_to_string(page).unwrap();
    let (before, rest) = text.split_once(BEGIN).unwrap();
    let (_, after) = rest.split_once(END).unwrap();
    fs::write(page, format!("{before}{BEGIN}{table}{END}{after}")).unwrap();
}
