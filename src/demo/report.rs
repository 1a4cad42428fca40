//! What the demo measured, told whichever way it falls.

use std::fmt;

use serde::Serialize;

use super::latency::Distribution;
use super::policy::{Change, MANIFEST_NAME};

/// What a run measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Such as `2 CPUs, cgroup v1`.
    pub machine: String,
    /// How it ended.
    pub ended: Ended,
    /// `cpu.shares` of the whole demo against the rest of the machine.
    pub shares: u64,
    /// The load line in millicores.
    pub line_millicores: u64,
    /// The pods with what Kubernetes would give them.
    pub pods: Vec<PodFacts>,
    /// What the demo set otherwise than the manifest.
    pub policy_changes: Vec<Change>,
    /// The important worker's latency while it ran alone.
    pub before: Option<Distribution>,
    /// While the batch work ran and no policy was in force.
    pub overloaded: Option<Distribution>,
    /// From the first evaluation at or below the line after the first step, until the batch work stopped.
    pub throttled: Option<Distribution>,
    /// Steps down, all pods together.
    pub steps_down: usize,
    /// Steps up, all pods together.
    pub steps_up: usize,
    /// From the first evaluation above the line to the first of its steps being seen in the kernel's files.
    pub breach_to_first_step_seconds: Option<f64>,
    /// From the policies being applied to the same.
    pub policy_to_first_step_seconds: Option<f64>,
    /// Node CPU in millicores, means: alone, overloaded, throttled.
    pub node_millicores: [Option<u64>; 3],
    /// CPU of the node in millicores that others than the demo used while the worker ran alone.
    pub others_millicores: Option<u64>,
    /// Enforcement periods in which the important worker's own limit held it back.
    pub own_limit_periods: Option<u64>,
    /// Files compared with what they held before.
    pub files_compared: usize,
    /// Those that differ: path, before, after. None: the originals are back byte for byte.
    pub files_changed: Vec<FileChange>,
    /// The policies let go by themselves; else the demo put the originals back at its end.
    pub released_by_policy: bool,
    /// What could not be removed.
    pub left_behind: Vec<String>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Ended {
    /// By itself.
    ByItself,
    /// Somebody stopped it: how.
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
    /// The weight file and what it holds.
    pub weight: String,
    /// Threads that want to run.
    pub threads: usize,
    /// The lowest quota that was seen in force, where it was below the original.
    pub lowest_quota: Option<String>,
}

/// A file that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// Which.
    pub path: String,
    /// Before.
    pub before: String,
    /// After; empty where it is gone.
    pub after: String,
}

/// Whether throttling helped the important worker's tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Some act was not measured.
    NotMeasured,
    /// The overload hardly raised the p99: there was nothing to win.
    NoHarm,
    /// More than half of what the overload added is gone again.
    Recovered,
    /// Some of it is.
    Eased,
    /// None of it is.
    NoHelp,
}

/// Judges by the 99th percentiles: harm is anything above 1.25 times the quiet value; help under a tenth of what the
/// overload added is none.
pub fn verdict(before: f64, overloaded: f64, throttled: f64) -> Verdict {
    if overloaded <= before * 1.25 {
        return Verdict::NoHarm;
    }
    let left = (throttled - before) / (overloaded - before);
    if left < 0.5 {
        Verdict::Recovered
    } else if left < 0.9 {
        Verdict::Eased
    } else {
        Verdict::NoHelp
    }
}

impl Report {
    /// The originals are back and nothing is left behind.
    pub fn is_clean(&self) -> bool {
        self.files_changed.is_empty() && self.left_behind.is_empty()
    }

    /// Whether throttling helped.
    pub fn verdict(&self) -> Verdict {
        let p99 = |seen: &Option<Distribution>| seen.map(|seen| seen.p99_ms);
        match (
            p99(&self.before),
            p99(&self.overloaded),
            p99(&self.throttled),
        ) {
            (Some(before), Some(overloaded), Some(throttled)) => {
                verdict(before, overloaded, throttled)
            }
            _ => Verdict::NotMeasured,
        }
    }

    fn fmt_pods(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nThe pods, weighted as Kubernetes weighs them")?;
        for pod in &self.pods {
            let limit = pod
                .limit_millicores
                .map_or_else(|| "no limit".to_owned(), |limit| format!("limit {limit}m"));
            let lowest = pod
                .lowest_quota
                .as_ref()
                .map_or_else(String::new, |quota| format!(", taken down to {quota}"));
            writeln!(
                f,
                "  {:<10} {:<11} request {}m, {limit}, {}, {} busy{lowest}",
                pod.name,
                pod.class,
                pod.request_millicores,
                pod.weight,
                threads(pod.threads),
            )?;
        }
        writeln!(
            f,
            "  all together weigh {} cpu.shares against the rest of the machine",
            self.shares
        )
    }

    fn fmt_policy(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nThe policy: {MANIFEST_NAME} with these fields set otherwise"
        )?;
        for change in &self.policy_changes {
            let from = change.from.as_deref().unwrap_or("nothing");
            writeln!(f, "  {}: {from} -> {}", change.field, change.to)?;
            writeln!(f, "    {}", change.why)?;
        }
        Ok(())
    }

    fn fmt_latency(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\nMeasured: latency of the important worker's requests in ms, node CPU"
        )?;
        writeln!(
            f,
            "  {:<12} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}",
            "", "p50", "p90", "p99", "slowest", "requests", "node"
        )?;
        let acts = [
            ("before", self.before),
            ("overloaded", self.overloaded),
            ("throttled", self.throttled),
        ];
        for ((name, seen), node) in acts.into_iter().zip(self.node_millicores) {
            fmt_act(f, name, seen, node)?;
        }
        writeln!(f, "  {}", self.conclusion())?;
        if let Some(others) = self.others_millicores.filter(|others| *others >= 200) {
            writeln!(
                f,
                "  Others than the demo used {others}m of this machine's CPU: that blurs all of these figures."
            )?;
        }
        match self.own_limit_periods {
            Some(0) => writeln!(f, "  The worker's own limit never held it back."),
            Some(periods) => writeln!(
                f,
                "  The worker's own limit held it back in {periods} periods: that is part of its latency."
            ),
            None => Ok(()),
        }
    }

    fn conclusion(&self) -> String {
        match self.verdict() {
            Verdict::NotMeasured => "Not every act was measured: no conclusion.".to_owned(),
            Verdict::NoHarm => {
                "The overload hardly raised the worker's p99 here: CPU weights were enough.".to_owned()
            }
            Verdict::Recovered => {
                "The worker recovered: more than half of what the overload added to its p99 is gone."
                    .to_owned()
            }
            Verdict::Eased => {
                "The worker's p99 is better than under overload, but has not recovered.".to_owned()
            }
            Verdict::NoHelp => "Throttling did NOT help the worker's p99 here. Compare p50 and p90, and see below what \
                else disturbed it."
                .to_owned(),
        }
    }

    fn fmt_enforcement(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nMeasured: enforcement")?;
        writeln!(
            f,
            "  load line {}m; {} steps down, {} steps up",
            self.line_millicores, self.steps_down, self.steps_up
        )?;
        let seconds = |seconds: Option<f64>| {
            seconds.map_or_else(|| "no step was taken".to_owned(), |s| format!("{s:.2} s"))
        };
        writeln!(
            f,
            "  first evaluation above the line to first change in the kernel: {}",
            seconds(self.breach_to_first_step_seconds)
        )?;
        writeln!(
            f,
            "  policy applied to first change in the kernel: {}",
            seconds(self.policy_to_first_step_seconds)
        )?;
        let who = if self.released_by_policy {
            "by the policies, after their cool-down"
        } else {
            "by the demo at its end"
        };
        if self.files_changed.is_empty() {
            writeln!(
                f,
                "  originals restored byte for byte, {who} ({} files compared)",
                self.files_compared
            )?;
        }
        for file in &self.files_changed {
            writeln!(
                f,
                "  NOT RESTORED: {} held {:?}, now holds {:?}",
                file.path, file.before, file.after
            )?;
        }
        match self.left_behind.as_slice() {
            [] => writeln!(f, "  left behind: no cgroup, no process, no file"),
            left => writeln!(f, "  LEFT BEHIND: {}", left.join("; ")),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ended = match &self.ended {
            Ended::ByItself => String::new(),
            Ended::Stopped(how) => format!(" (stopped by {how} before its end)"),
        };
        writeln!(f, "Plimsoll demo on this machine: {}{ended}", self.machine)?;
        self.fmt_pods(f)?;
        self.fmt_policy(f)?;
        self.fmt_latency(f)?;
        self.fmt_enforcement(f)
    }
}

fn fmt_act(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    seen: Option<Distribution>,
    node: Option<u64>,
) -> fmt::Result {
    let node = node.map_or_else(|| "?".to_owned(), |node| format!("{node}m"));
    match seen {
        None => writeln!(f, "  {name:<12} not measured"),
        Some(seen) => writeln!(
            f,
            "  {name:<12} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>9} {node:>8}",
            seen.p50_ms, seen.p90_ms, seen.p99_ms, seen.max_ms, seen.requests
        ),
    }
}

fn threads(count: usize) -> String {
    match count {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_follows_the_figures_either_way() {
        assert_eq!(verdict(1.0, 5.0, 1.4), Verdict::Recovered);
        assert_eq!(verdict(1.0, 5.0, 4.0), Verdict::Eased);
        assert_eq!(verdict(1.0, 5.0, 4.9), Verdict::NoHelp);
        assert_eq!(verdict(1.0, 5.0, 9.0), Verdict::NoHelp);
        assert_eq!(verdict(1.0, 1.1, 1.0), Verdict::NoHarm);
    }

    fn report() -> Report {
        let seen = |p99_ms| {
            Some(Distribution {
                requests: 100,
                seconds: 1.0,
                p50_ms: 0.9,
                p90_ms: 1.0,
                p99_ms,
                max_ms: 9.0,
            })
        };
        Report {
            machine: "2 CPUs".to_owned(),
            ended: Ended::ByItself,
            shares: 2048,
            line_millicores: 1400,
            pods: Vec::new(),
            policy_changes: Vec::new(),
            before: seen(1.0),
            overloaded: seen(5.0),
            throttled: seen(5.0),
            steps_down: 8,
            steps_up: 8,
            breach_to_first_step_seconds: Some(0.5),
            policy_to_first_step_seconds: Some(1.0),
            node_millicores: [Some(250), Some(2000), None],
            others_millicores: Some(1000),
            own_limit_periods: Some(0),
            files_compared: 15,
            files_changed: Vec::new(),
            released_by_policy: true,
            left_behind: Vec::new(),
        }
    }

    #[test]
    fn a_throttle_that_did_not_help_is_said_to_have_not() {
        let told = report().to_string();
        assert!(told.contains("did NOT help"), "{told}");
        assert!(told.contains("Others than the demo used 1000m"), "{told}");
        assert!(
            told.contains("restored byte for byte, by the policies"),
            "{told}"
        );
        assert!(told.contains("left behind: no cgroup"), "{told}");
    }

    #[test]
    fn what_was_not_put_back_is_shouted() {
        let mut report = report();
        report.files_changed.push(FileChange {
            path: "/cg/cpu.max".to_owned(),
            before: "max 100000\n".to_owned(),
            after: "50000 100000\n".to_owned(),
        });
        report.left_behind.push("/cg/demo".to_owned());
        assert!(!report.is_clean());
        let told = report.to_string();
        assert!(told.contains("NOT RESTORED: /cg/cpu.max"), "{told}");
        assert!(told.contains("LEFT BEHIND: /cg/demo"), "{told}");
        assert!(!told.contains("restored byte for byte"), "{told}");
    }
}
