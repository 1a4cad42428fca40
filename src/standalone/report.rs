//! The text output of `plimsoll status --local`.

use std::fmt;
use std::time::Duration;

use jiff::Timestamp;

use super::status::{MachineStatus, RuleOverview};
use crate::crd::duration::format_duration;
use crate::engine::policy::Strategy;
use crate::messages::{count, format_seconds, format_value, unknown_reason};

/// Prints a status.
#[derive(Debug)]
pub struct StatusText<'a> {
    status: &'a MachineStatus,
    now: Timestamp,
    alive: bool,
}

impl<'a> StatusText<'a> {
    /// A report of `status` at `now`.
    pub fn new(status: &'a MachineStatus, now: Timestamp) -> Self {
        Self {
            status,
            now,
            alive: status.writer.is_alive(),
        }
    }

    fn header(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.status.writer.pid;
        let age = self.now.duration_since(self.status.time);
        let age = Duration::from_secs(age.as_secs().unsigned_abs());
        let pods = count(self.status.pods, "pod");
        if self.alive {
            write!(f, "plimsoll run, process {pid}, manages {pods}")?;
        } else if self.status.writer.is_of_this_boot() {
            write!(f, "plimsoll run is stopped (process {pid})")?;
        } else {
            write!(f, "plimsoll run has not run since the machine booted")?;
        }
        writeln!(f, "; as of {} ago", format_duration(age))
    }

    fn scheduling(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.status.scheduling {
            _ if !self.alive => writeln!(f, "New work: unknown"),
            None => writeln!(f, "New work: not decided yet"),
            Some(state) if state.schedulable => writeln!(f, "New work: allowed"),
            Some(state) => {
                let rules: Vec<_> = state.rules.iter().map(ToString::to_string).collect();
                let effect = state.effect.map(|effect| format!(" ({effect:?})"));
                let effect = effect.unwrap_or_default();
                writeln!(f, "New work: not allowed{effect} by {}", rules.join(", "))
            }
        }
    }

    fn rules(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.status.rules.iter().map(|rule| rule.rule.0.len()).max();
        let width = width.unwrap_or_default().max("RULE".len());
        writeln!(
            f,
            "\n{:width$}  {:8}  {:>8}  {:>12}  {:>12}  METRIC",
            "RULE", "STATE", "SINCE", "VALUE", "THRESHOLD"
        )?;
        self.status.rules.iter().try_for_each(|rule| {
            let metric = rule.metric.as_deref();
            let value = rule.value.map(|value| format_value(metric, value));
            writeln!(
                f,
                "{:width$}  {:8}  {:>8}  {:>12}  {:>12}  {}{}",
                rule.rule,
                format!("{:?}", rule.state),
                rule.duration.map_or_else(|| "-".to_owned(), format_seconds),
                value.as_deref().unwrap_or("unknown"),
                format_value(metric, rule.threshold),
                metric.unwrap_or("-"),
                notes(rule),
            )
        })
    }

    fn in_force(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.status;
        if !status.throttled.is_empty() {
            writeln!(f, "\nTHROTTLED")?;
        }
        for file in &status.throttled {
            let target_cgroup = match file.target_cgroup.as_str() {
                "" => String::new(),
                target_cgroup => format!(" {target_cgroup}"),
            };
            writeln!(
                f,
                "{}{target_cgroup}: {} %, {} {} (originally {}), for {}",
                file.pod_name, file.ratio, file.file, file.now, file.original, file.rule
            )?;
        }
        list(f, "EVICTING", &status.evicting)?;
        list(f, "WOULD BE IN FORCE (Preview)", &status.would)?;
        list(f, "POLICIES TO CHECK", &status.problems)?;
        list(f, "PODS TO CHECK", &status.refused)
    }
}

impl fmt::Display for StatusText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.header(f)?;
        self.scheduling(f)?;
        if self.alive && !self.status.rules.is_empty() {
            self.rules(f)?;
        }
        self.in_force(f)
    }
}

fn list<T: fmt::Display>(f: &mut fmt::Formatter<'_>, title: &str, items: &[T]) -> fmt::Result {
    if !items.is_empty() {
        writeln!(f, "\n{title}")?;
    }
    items.iter().try_for_each(|item| writeln!(f, "{item}"))
}

fn notes(rule: &RuleOverview) -> String {
    let mut notes = String::new();
    if rule.strategy == Strategy::Preview {
        notes += " (preview)";
    }
    if rule.outside_hours {
        notes += ": outside its hours";
    }
    if let Some(reason) = rule.unknown {
        notes = format!("{notes}: {}", unknown_reason(reason));
    }
    notes
}
