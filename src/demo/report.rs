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
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_verdict_follows_the_figures() {
        assert_eq!(verdict(20.0, 1000.0, 25.0), Verdict::Cured);
        assert_eq!(verdict(20.0, 1000.0, 400.0), Verdict::Eased);
        assert_eq!(verdict(20.0, 1000.0, 900.0), Verdict::NoHelp);
        assert_eq!(verdict(20.0, 1000.0, 2000.0), Verdict::NoHelp);
        assert_eq!(verdict(20.0, 30.0, 20.0), Verdict::NoHarm);
    }

    fn figures(p99_ms: f64) -> PhaseFigures {
        PhaseFigures {
            latency: Distribution {
                requests: 100,
                unserved: if p99_ms < 100.0 { 0 } else { 25 },
                seconds: 1.0,
                p50_ms: 8.0,
                p90_ms: 10.0,
                p99_ms,
                p999_ms: p99_ms,
                max_ms: 900.0,
            },
            mean_use: Some(MeanUse {
                node: 2000,
                important: 1200,
                batch: 700,
            }),
        }
    }

    fn report(protected_p99_ms: f64) -> DemoReport {
        let second = |p99_ms, phase| Second {
            p99_ms: Some(p99_ms),
            phase,
        };
        DemoReport {
            machine: "2 CPUs".to_owned(),
            outcome: DemoOutcome::Completed,
            shares: 2048,
            pods: Vec::new(),
            service: ServiceFacts::new(&DemoPods::for_cpus(2)),
            policy: "examples/ensurance/idle-class.yaml",
            acts: "while CPU usage is above 1400m".to_owned(),
            policy_changes: Vec::new(),
            alone: Some(figures(20.0)),
            unprotected: Some(figures(1000.0)),
            protected: Some(figures(protected_p99_ms)),
            steps_down: 2,
            steps_up: 2,
            breach_to_first_step_seconds: Some(0.5),
            policy_to_first_step_seconds: Some(1.0),
            first_step_to_recovery_seconds: None,
            others_millicores: Some(1000),
            files_compared: 15,
            files_changed: Vec::new(),
            released_by_policy: true,
            left_behind: Vec::new(),
            seconds: vec![
                second(20.0, Phase::Alone),
                second(1000.0, Phase::Overloaded),
            ],
            marks: vec![Mark {
                after: Duration::from_secs(1),
                what: "batch pods start",
            }],
        }
    }

    #[test]
    fn the_summary_shows_harm_and_cure_in_figures_and_as_a_plot() {
        let text = report(22.0).to_string();
        for part in [
            "p99 was 50.0 times that alone without protection, 1.1 times with it",
            "  unprotected       8.0   1000.0      75.0    25.0 %      1200m     700m",
            "   1 s ",
            "1 batch pods start",
            "it needs 1200m",
            "restored byte for byte, by the policies",
            "left behind: no cgroup",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn the_plot_fits_a_narrow_terminal() {
        let mut report = report(22.0);
        let second = report.seconds[0];
        report.seconds = vec![second; 60];
        for width in [40_usize, 80] {
            let text = format!("{report:width$}");
            let plot = text.split("Measured: ").nth(1).expect("the plot");
            for line in plot.lines().skip(1) {
                assert!(line.chars().count() <= width, "{width}: {text}");
            }
        }
    }

    #[test]
    fn no_line_is_wider_than_a_terminal_of_80_columns() {
        for released_by_policy in [true, false] {
            let report = DemoReport {
                released_by_policy,
                files_compared: 999,
                breach_to_first_step_seconds: Some(10.52),
                ..report(22.0)
            };
            let text = format!("{report:80}");
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{line}");
            }
        }
    }

    #[test]
    fn the_alternate_form_has_the_same_text_in_colours() {
        let report = report(22.0);
        let coloured = format!("{report:#80}");
        let plain = anstream::adapter::strip_str(&coloured).to_string();
        assert_eq!(plain, format!("{report:80}"));
        for (style, part) in [
            (HARM, "unprotected "),
            (CURE, "protected "),
            (MARK, "1 batch pods start"),
            (CURE, "restored byte for byte"),
        ] {
            assert!(
                coloured.contains(&format!("{style}{part}")),
                "{part}: {coloured}"
            );
        }
        assert!(coloured.contains(&format!("{HARM}█")), "{coloured}");
        let no_harm = DemoReport {
            unprotected: Some(figures(21.0)),
            ..report
        };
        assert!(!format!("{no_harm:#80}").contains(&format!("{HARM}unprotected")));
    }

    #[test]
    fn the_summary_says_when_throttling_did_not_help_and_what_may_be_the_reason() {
        let text = report(1000.0).to_string();
        assert!(text.contains("NOT helped"), "{text}");
        assert!(text.contains("Other processes used 1000m"), "{text}");
        let nothing_throttled = DemoReport {
            policy_to_first_step_seconds: None,
            ..report(1000.0)
        };
        let text = nothing_throttled.to_string();
        assert!(text.contains("Nothing was throttled"), "{text}");
    }

    #[test]
    fn the_summary_says_when_the_machine_is_too_busy_for_the_important_pod() {
        let mut busy = report(1000.0);
        busy.alone = busy.unprotected;
        let text = busy.to_string();
        assert!(text.contains("Even alone it gave up 25.0 %"), "{text}");
        assert!(!text.contains("times that alone"), "{text}");
    }

    #[test]
    fn the_summary_says_when_there_was_no_harm() {
        let unharmed = DemoReport {
            unprotected: Some(figures(21.0)),
            ..report(21.0)
        };
        let text = unharmed.to_string();
        assert!(text.contains("hardly harmed it here"), "{text}");
    }

    #[test]
    fn the_summary_names_what_was_not_restored() {
        let mut report = report(22.0);
        report.files_changed.push(FileChange {
            path: "/cg/cpu.max".to_owned(),
            before: "max 100000\n".to_owned(),
            after: "50000 100000\n".to_owned(),
        });
        report.left_behind.push("/cg/demo".to_owned());
        assert!(!report.is_clean());
        let text = report.to_string();
        assert!(text.contains("NOT RESTORED: /cg/cpu.max"), "{text}");
        assert!(text.contains("LEFT BEHIND: /cg/demo"), "{text}");
        assert!(!text.contains("restored byte for byte"), "{text}");
    }
}
