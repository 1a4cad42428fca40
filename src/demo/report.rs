//! The summary of a run, whether throttling helped or not.

use std::fmt;

use serde::Serialize;

use super::latency::Distribution;
use super::policy::{Change, MANIFEST_NAME};

/// The results of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// Such as `2 CPUs, cgroup v1`.
    pub machine: String,
    /// How the run ended.
    #[serde(rename = "ended")]
    pub outcome: Outcome,
    /// `cpu.shares` of the whole demo against the rest of the machine.
    pub shares: u64,
    /// The rule's threshold in millicores.
    #[serde(rename = "lineMillicores")]
    pub threshold_millicores: u64,
    /// The pods.
    pub pods: Vec<PodFacts>,
    /// Fields that the demo changed in the manifest.
    pub policy_changes: Vec<Change>,
    /// The important worker's latency while it ran alone.
    pub before: Option<Distribution>,
    /// While the batch work ran and no policy was in force.
    pub overloaded: Option<Distribution>,
    /// From the first evaluation at or below the threshold after the first step until the batch work stopped.
    pub throttled: Option<Distribution>,
    /// Steps down, all pods together.
    pub steps_down: usize,
    /// Steps up, all pods together.
    pub steps_up: usize,
    /// From the first evaluation above the threshold to the first step in the kernel's files.
    pub breach_to_first_step_seconds: Option<f64>,
    /// From the policies being applied to the first step in the kernel's files.
    pub policy_to_first_step_seconds: Option<f64>,
    /// Mean CPU use of the node in millicores: alone, overloaded, throttled.
    pub node_millicores: [Option<u64>; 3],
    /// Mean CPU use of everything but the demo in millicores.
    pub others_millicores: Option<u64>,
    /// Quota periods in which the important worker's own limit throttled it.
    pub own_limit_periods: Option<u64>,
    /// Files compared with their content before the run.
    pub files_compared: usize,
    /// Files that differ; empty if every original is restored byte for byte.
    pub files_changed: Vec<FileChange>,
    /// The policies restored the originals, not the demo at its end.
    pub released_by_policy: bool,
    /// What could not be removed.
    pub left_behind: Vec<String>,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// It ran to its end.
    #[serde(rename = "byItself")]
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
    /// The lowest quota in force, if it was below the original.
    pub lowest_quota: Option<String>,
}

/// A file whose content differs from before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// Its path.
    pub path: String,
    /// Content before.
    pub before: String,
    /// Content after; empty if it is gone.
    pub after: String,
}

/// Whether throttling helped the important worker's p99 latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A phase was not measured.
    NotMeasured,
    /// The overload hardly raised the p99.
    NoHarm,
    /// More than half of what the overload added is gone.
    Recovered,
    /// Some of it is gone.
    Eased,
    /// Less than a tenth of it is gone.
    NoHelp,
}

/// Compares the 99th percentiles. An overload below 1.25 times the value before does no harm; a gain of less than a
/// tenth of what the overload added is no help.
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
    /// Whether the originals are restored and nothing is left behind.
    pub fn is_clean(&self) -> bool {
        self.files_changed.is_empty() && self.left_behind.is_empty()
    }

    /// Whether throttling helped.
    pub fn verdict(&self) -> Verdict {
        let p99 = |latency: &Option<Distribution>| latency.map(|latency| latency.p99_ms);
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
        writeln!(
            f,
            "\nPods, with the CPU weights that Kubernetes would give them"
        )?;
        for pod in &self.pods {
            let limit = pod
                .limit_millicores
                .map_or_else(|| "no limit".to_owned(), |limit| format!("limit {limit}m"));
            let lowest = pod
                .lowest_quota
                .as_ref()
                .map_or_else(String::new, |quota| format!(", throttled to {quota}"));
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
            "  together they have {} cpu.shares against the rest of the machine",
            self.shares
        )
    }

    fn fmt_policy(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nPolicy: {MANIFEST_NAME} with these changes")?;
        for change in &self.policy_changes {
            let from = change.from.as_deref().unwrap_or("unset");
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
        let phases = [
            ("before", self.before),
            ("overloaded", self.overloaded),
            ("throttled", self.throttled),
        ];
        for ((name, latency), node) in phases.into_iter().zip(self.node_millicores) {
            fmt_phase(f, name, latency, node)?;
        }
        writeln!(f, "  {}", self.conclusion())?;
        if let Some(others) = self.others_millicores.filter(|others| *others >= 200) {
            writeln!(
                f,
                "  Other processes used {others}m of this machine's CPU, which affects all of these figures."
            )?;
        }
        match self.own_limit_periods {
            Some(0) => writeln!(f, "  The worker's own limit never throttled it."),
            Some(periods) => writeln!(
                f,
                "  The worker's own limit throttled it in {periods} periods, which adds to its latency."
            ),
            None => Ok(()),
        }
    }

    fn conclusion(&self) -> String {
        match self.verdict() {
            Verdict::NotMeasured => "Not every phase was measured: no conclusion.".to_owned(),
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
            Verdict::NoHelp => "Throttling did NOT help the worker's p99 here. Compare p50 and p90, and see what \
                else is reported below."
                .to_owned(),
        }
    }

    fn fmt_enforcement(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nMeasured: enforcement")?;
        writeln!(
            f,
            "  threshold {}m; {} steps down, {} steps up",
            self.threshold_millicores, self.steps_down, self.steps_up
        )?;
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
        let restored_by = if self.released_by_policy {
            "by the policies, after their cool-down"
        } else {
            "by the demo at its end"
        };
        if self.files_changed.is_empty() {
            writeln!(
                f,
                "  originals restored byte for byte, {restored_by} ({} files compared)",
                self.files_compared
            )?;
        }
        for file in &self.files_changed {
            writeln!(
                f,
                "  NOT RESTORED: {} was {:?}, is now {:?}",
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
        let stopped = match &self.outcome {
            Outcome::Completed => String::new(),
            Outcome::Stopped(how) => format!(" (stopped by {how} before its end)"),
        };
        writeln!(
            f,
            "Plimsoll demo on this machine: {}{stopped}",
            self.machine
        )?;
        self.fmt_pods(f)?;
        self.fmt_policy(f)?;
        self.fmt_latency(f)?;
        self.fmt_enforcement(f)
    }
}

fn fmt_phase(
    f: &mut fmt::Formatter<'_>,
    name: &str,
    latency: Option<Distribution>,
    node: Option<u64>,
) -> fmt::Result {
    let node = node.map_or_else(|| "?".to_owned(), |node| format!("{node}m"));
    match latency {
        None => writeln!(f, "  {name:<12} not measured"),
        Some(latency) => writeln!(
            f,
            "  {name:<12} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>9} {node:>8}",
            latency.p50_ms, latency.p90_ms, latency.p99_ms, latency.max_ms, latency.requests
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
    fn the_verdict_follows_the_figures() {
        assert_eq!(verdict(1.0, 5.0, 1.4), Verdict::Recovered);
        assert_eq!(verdict(1.0, 5.0, 4.0), Verdict::Eased);
        assert_eq!(verdict(1.0, 5.0, 4.9), Verdict::NoHelp);
        assert_eq!(verdict(1.0, 5.0, 9.0), Verdict::NoHelp);
        assert_eq!(verdict(1.0, 1.1, 1.0), Verdict::NoHarm);
    }

    fn report() -> Report {
        let latency = |p99_ms| {
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
            outcome: Outcome::Completed,
            shares: 2048,
            threshold_millicores: 1400,
            pods: Vec::new(),
            policy_changes: Vec::new(),
            before: latency(1.0),
            overloaded: latency(5.0),
            throttled: latency(5.0),
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
    fn the_summary_says_when_throttling_did_not_help() {
        let text = report().to_string();
        assert!(text.contains("did NOT help"), "{text}");
        assert!(text.contains("Other processes used 1000m"), "{text}");
        assert!(
            text.contains("restored byte for byte, by the policies"),
            "{text}"
        );
        assert!(text.contains("left behind: no cgroup"), "{text}");
    }

    #[test]
    fn the_summary_names_what_was_not_restored() {
        let mut report = report();
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
