//! The summary of a run, whether throttling helped or not.

use std::fmt;

use anstyle::{AnsiColor, Style};
use serde::Serialize;

use super::history::{MeanUse, RECOVERED};
use super::phase::Phase;
use super::plot::{Plot, PlotCell, legend};
use super::pods::DemoPods;
use super::policy::FieldChange;
use super::view::{Mark, Second};
use crate::scene::cgroups::FileChange;
use crate::scene::latency::Distribution;
use crate::scene::pod::ScenePod;

/// Maximum columns of the plot.
const MAX_PLOT: usize = 72;
/// The colours of the live view: harm, cure, and the moments of action.
const HARM: Style = AnsiColor::BrightRed.on_default();
const CURE: Style = AnsiColor::BrightGreen.on_default();
const MARK: Style = AnsiColor::BrightYellow.on_default();
const PLAIN: Style = Style::new();

/// The results of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct DemoReport {
    /// Such as `2 CPUs, cgroup v1`.
    pub machine: String,
    /// How the run ended.
    pub outcome: DemoOutcome,
    /// `cpu.shares` of the whole demo against the rest of the machine.
    pub shares: u64,
    /// The pods.
    pub pods: Vec<PodFacts>,
    /// What the important pod does.
    pub service: ServiceFacts,
    /// The example policy.
    pub policy: &'static str,
    /// When the policy acts.
    #[serde(skip)]
    pub acts: String,
    /// Fields that the demo changed in the example.
    pub policy_changes: Vec<FieldChange>,
    /// The important pod alone.
    pub alone: Option<PhaseFigures>,
    /// While the batch pods ran and no policy was in force.
    pub unprotected: Option<PhaseFigures>,
    /// From the important pod's recovery (or the first write, if it has not recovered) until the batch pods stopped.
    pub protected: Option<PhaseFigures>,
    /// Steps down, all pods together.
    pub steps_down: usize,
    /// Steps up, all pods together.
    pub steps_up: usize,
    /// From the first evaluation above the threshold to the first step in the kernel's files.
    pub breach_to_first_step_seconds: Option<f64>,
    /// From the policies being applied to the first step in the kernel's files.
    pub policy_to_first_step_seconds: Option<f64>,
    /// From the first step to the important pod's recovery; absent if it has not recovered.
    pub first_step_to_recovery_seconds: Option<f64>,
    /// Mean CPU use of everything but the demo in millicores.
    pub others_millicores: Option<u64>,
    /// Files compared with their content before the run.
    pub files_compared: usize,
    /// Files that differ; empty if every original is restored byte for byte.
    pub files_changed: Vec<FileChange>,
    /// The policies restored the originals, not the demo at its end.
    pub released_by_policy: bool,
    /// What could not be removed.
    pub left_behind: Vec<String>,
    /// The important pod's p99 in every second.
    #[serde(skip)]
    pub seconds: Vec<Second>,
    /// The moments of action.
    #[serde(skip)]
    pub marks: Vec<Mark>,
}

/// What was measured in one phase.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PhaseFigures {
    /// The important pod's requests.
    #[serde(flatten)]
    pub latency: Distribution,
    /// CPU use, where samples cover the phase.
    #[serde(rename = "millicores")]
    pub mean_use: Option<MeanUse>,
}

/// What the important pod does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceFacts {
    /// Requests that arrive in a second.
    pub requests_per_second: u32,
    /// CPU time of a request in milliseconds.
    pub work_ms: u128,
    /// Waiting time after which a request is given up, in milliseconds.
    pub request_timeout_ms: u128,
    /// CPU that it needs in millicores.
    pub needed_millicores: u64,
}

impl ServiceFacts {
    /// Of the demo's important pod.
    pub fn new(demo_pods: &DemoPods) -> Self {
        Self {
            requests_per_second: demo_pods.service.rate,
            work_ms: demo_pods.service.work.as_millis(),
            request_timeout_ms: demo_pods.service.request_timeout.as_millis(),
            needed_millicores: demo_pods.needed().0,
        }
    }
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum DemoOutcome {
    /// It ran to its end.
    Completed,
    /// The user stopped it: how.
    Stopped(String),
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PodFacts {
    /// Name.
    pub name: String,
    /// Quality-of-service class.
    pub class: String,
    /// CPU request in millicores.
    pub request_millicores: u64,
    /// CPU limit in millicores.
    pub limit_millicores: Option<u64>,
    /// The weight file and its content.
    pub weight: String,
    /// Busy threads.
    pub threads: usize,
    /// How far it was throttled, if it was.
    pub throttled: Option<String>,
}

impl PodFacts {
    /// Of a pod with this weight, that was throttled this far.
    pub fn new(pod: &ScenePod, weight: String, throttled: Option<String>) -> Self {
        Self {
            name: pod.name.clone(),
            class: pod.qos.to_string(),
            request_millicores: pod.request.0,
            limit_millicores: pod.limit.map(|limit| limit.0),
            weight,
            threads: pod.threads,
            throttled,
        }
    }
}

/// Whether the batch pods harmed the important one, and whether the policies cured that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A phase was not measured.
    NotMeasured,
    /// The important pod had not enough CPU even alone.
    NoRoom,
    /// The batch pods hardly raised the p99.
    NoHarm,
    /// The p99 is below [`RECOVERED`] times that of the pod alone.
    Cured,
    /// More than half of what the batch pods added is gone.
    Eased,
    /// It is not.
    NoHelp,
}

/// Compares the 99th percentiles. Below twice the value alone, harm cannot be distinguished from noise.
pub fn verdict(alone: f64, unprotected: f64, protected: f64) -> Verdict {
    if unprotected < alone * 2.0 {
        Verdict::NoHarm
    } else if protected <= alone * RECOVERED {
        Verdict::Cured
    } else if protected - alone < (unprotected - alone) * 0.5 {
        Verdict::Eased
    } else {
        Verdict::NoHelp
    }
}

impl DemoReport {
    /// Whether the originals are restored and nothing is left behind.
    pub fn is_clean(&self) -> bool {
        self.files_changed.is_empty() && self.left_behind.is_empty()
    }

    /// Whether there was harm, and whether it was cured.
    pub fn verdict(&self) -> Verdict {
        if self.unserved_alone() > 1.0 {
            return Verdict::NoRoom;
        }
        let p99 = |figures: &Option<PhaseFigures>| figures.map(|figures| figures.latency.p99_ms);
        match (
            p99(&self.alone),
            p99(&self.unprotected),
            p99(&self.protected),
        ) {
            (Some(alone), Some(unprotected), Some(protected)) => {
                verdict(alone, unprotected, protected)
            }
            _ => Verdict::NotMeasured,
        }
    }

    fn unserved_alone(&self) -> f64 {
        self.alone.map_or(0.0, |it| it.latency.unserved_percent())
    }

    fn fmt_pods(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let service = &self.service;
        writeln!(
            f,
            "\nPods, with the CPU weights that Kubernetes would give them"
        )?;
        for pod in &self.pods {
            let limit = pod
                .limit_millicores
                .map_or_else(|| "no limit".to_owned(), |limit| format!("limit {limit}m"));
            writeln!(
                f,
                "  {:<10} {} request {}m, {limit}, {}, {}",
                pod.name,
                pod.class,
                pod.request_millicores,
                pod.weight,
                threads(pod.threads),
            )?;
        }
        writeln!(
            f,
            "  important serves {} requests a second of {} ms of CPU each: it needs {}m.\n  \
             A request that waits for {} ms is given up, and counts with that time.",
            service.requests_per_second,
            service.work_ms,
            service.needed_millicores,
            service.request_timeout_ms
        )?;
        writeln!(
            f,
            "  The threads of batch pods are always busy. All together have {} cpu.shares\n  \
             against the rest of the machine.",
            self.shares
        )
    }

    fn fmt_policy(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nPolicy: throttle batch pods {}\n  {} with these changes",
            self.acts, self.policy
        )?;
        for change in &self.policy_changes {
            let from = change.from.as_deref().unwrap_or("unset");
            writeln!(f, "  {}: {from} -> {}", change.field, change.to)?;
            writeln!(f, "    {}", change.why)?;
        }
        Ok(())
    }

    fn fmt_plot(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nMeasured: p99 of the important pod's requests in each second"
        )?;
        let width = f.width().map_or(MAX_PLOT, |width| width.saturating_sub(2));
        let width = width.min(MAX_PLOT);
        let plot = Plot::new(&self.seconds, std::time::Duration::ZERO, &self.marks, width);
        let in_colour = f.alternate();
        let style = |cell| if in_colour { cell_style(cell) } else { PLAIN };
        for line in plot.lines(6, style) {
            writeln!(f, "  {line}")?;
        }
        let entries = legend(&self.marks);
        let in_a_line = if width < MAX_PLOT { 1 } else { 4 };
        for entries in entries.chunks(in_a_line) {
            write_line(f, &entries.join("  "), MARK)?;
        }
        Ok(())
    }

    fn fmt_figures(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nMeasured: the important pod's requests, and CPU used\n  \
             {:<12} {:>8} {:>8} {:>9} {:>9} {:>10} {:>8}",
            "", "p50 ms", "p99 ms", "served/s", "given up", "important", "batch"
        )?;
        let [unprotected, protected] = self.styles();
        let phases = [
            ("alone", self.alone, PLAIN),
            ("unprotected", self.unprotected, unprotected),
            ("protected", self.protected, protected),
        ];
        for (name, figures, style) in phases {
            write_line(f, &phase_line(name, figures), style)?;
        }
        for line in self.conclusion() {
            writeln!(f, "  {line}")?;
        }
        Ok(())
    }

    /// Of the figures without and with protection.
    fn styles(&self) -> [Style; 2] {
        match self.verdict() {
            Verdict::NotMeasured | Verdict::NoRoom | Verdict::NoHarm => [PLAIN, PLAIN],
            Verdict::Cured => [HARM, CURE],
            Verdict::Eased => [HARM, MARK],
            Verdict::NoHelp => [HARM, HARM],
        }
    }

    fn conclusion(&self) -> Vec<String> {
        let times = |figures: Option<PhaseFigures>| {
            let p99 = |figures: Option<PhaseFigures>| figures.map_or(0.0, |it| it.latency.p99_ms);
            format!("{:.1} times", p99(figures) / p99(self.alone))
        };
        let mut lines = match self.verdict() {
            Verdict::NotMeasured => vec!["Not every phase was measured: no conclusion.".to_owned()],
            Verdict::NoRoom => vec![format!(
                "Even alone it gave up {:.1} % of its requests: it got too little CPU.",
                self.unserved_alone()
            )],
            Verdict::NoHarm => vec![
                format!(
                    "The batch pods hardly harmed it here: its p99 was {} that alone.",
                    times(self.unprotected)
                ),
                "Perhaps they got too little CPU: compare their use above.".to_owned(),
            ],
            Verdict::Cured => vec![format!(
                "Its p99 was {} that alone without protection, {} with it.",
                times(self.unprotected),
                times(self.protected)
            )],
            Verdict::Eased | Verdict::NoHelp => self.not_cured(&times(self.protected)),
        };
        if let Some(others) = self.others_millicores.filter(|others| *others >= 200) {
            lines.push(format!(
                "Other processes used {others}m of this machine's CPU, which affects all figures:"
            ));
            lines.push("run it when they are quiet, or with more --shares.".to_owned());
        }
        lines
    }

    /// What happened, and what may be the reason.
    fn not_cured(&self, times: &str) -> Vec<String> {
        let result = match self.verdict() {
            Verdict::Eased => "is better, but has not recovered",
            _ => "was NOT helped by the policy here",
        };
        let reason = match (self.policy_to_first_step_seconds, self.others_millicores) {
            (None, _) => {
                "Nothing was throttled: the rule's metric did not stay above its threshold."
            }
            (_, Some(200..)) => {
                "Perhaps because of other processes, which the policy does not touch."
            }
            _ => "Perhaps the batch pods stopped too early for it: run longer, with --seconds.",
        };
        vec![
            format!("It {result}: its p99 is {times} that alone."),
            reason.to_owned(),
        ]
    }

    fn fmt_enforcement(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nMeasured: enforcement")?;
        writeln!(
            f,
            "  {} steps down, {} steps up",
            self.steps_down, self.steps_up
        )?;
        for pod in &self.pods {
            if let Some(throttled) = &pod.throttled {
                writeln!(f, "  {}: {throttled}", pod.name)?;
            }
        }
        let seconds = |seconds: Option<f64>| {
            seconds.map_or_else(|| "no step".to_owned(), |s| format!("{s:.2} s"))
        };
        writeln!(
            f,
            "  first evaluation above the threshold to first change in the kernel: {}",
            seconds(self.breach_to_first_step_seconds)
        )?;
        writeln!(
            f,
            "  policy applied to first change in the kernel: {}",
            seconds(self.policy_to_first_step_seconds)
        )?;
        writeln!(
            f,
            "  from then until the important pod had recovered: {}",
            self.first_step_to_recovery_seconds
                .map_or_else(|| "it did not".to_owned(), |s| format!("{s:.2} s"))
        )?;
        let restored_by = if self.released_by_policy {
            "by the policies after cool-down"
        } else {
            "by the demo at its end"
        };
        if self.files_changed.is_empty() {
            let compared = self.files_compared;
            let line = format!("restored byte for byte, {restored_by} ({compared} files compared)");
            write_line(f, &line, CURE)?;
        }
        for file in &self.files_changed {
            let FileChange {
                path,
                before,
                after,
            } = file;
            let line = format!("NOT RESTORED: {path} was {before:?}, is now {after:?}");
            write_line(f, &line, HARM)?;
        }
        match self.left_behind.as_slice() {
            [] => writeln!(f, "  left behind: no cgroup, no process, no file"),
            left => write_line(f, &format!("LEFT BEHIND: {}", left.join("; ")), HARM),
        }
    }
}

/// The formatter's width is the width of the terminal, if any. The alternate form has colours.
impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stopped = match &self.outcome {
            DemoOutcome::Completed => String::new(),
            DemoOutcome::Stopped(how) => format!(" (stopped by {how} before its end)"),
        };
        writeln!(
            f,
            "Plimsoll demo on this machine: {}{stopped}",
            self.machine
        )?;
        self.fmt_pods(f)?;
        self.fmt_policy(f)?;
        self.fmt_plot(f)?;
        self.fmt_figures(f)?;
        self.fmt_enforcement(f)
    }
}

/// An indented line, in this style if the formatter has the alternate form.
fn write_line(f: &mut fmt::Formatter<'_>, line: &str, style: Style) -> fmt::Result {
    if f.alternate() {
        writeln!(f, "  {style}{line}{style:#}")
    } else {
        writeln!(f, "  {line}")
    }
}

const fn cell_style(cell: PlotCell) -> Style {
    match cell {
        PlotCell::Bar(_, Phase::Overloaded) => HARM,
        PlotCell::Bar(_, Phase::Enforced) => CURE,
        PlotCell::Bar(..) | PlotCell::Empty => PLAIN,
        PlotCell::Mark => MARK,
    }
}

fn phase_line(name: &str, figures: Option<PhaseFigures>) -> String {
    let Some(PhaseFigures { latency, mean_use }) = figures else {
        return format!("{name:<12} not measured");
    };
    let used = |of: fn(&MeanUse) -> u64| {
        mean_use.map_or_else(|| "?".to_owned(), |mean_use| format!("{}m", of(&mean_use)))
    };
    format!(
        "{name:<12} {:>8.1} {:>8.1} {:>9.1} {:>7.1} % {:>10} {:>8}",
        latency.p50_ms,
        latency.p99_ms,
        latency.served_per_second(),
        latency.unserved_percent(),
        used(|it| it.important),
        used(|it| it.batch)
    )
}

fn threads(count: usize) -> String {
    match count {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
