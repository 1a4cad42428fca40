//! The result of a replay.

use std::collections::BTreeMap;
use std::fmt;
use std::io::BufRead;
use std::time::Duration;

use serde::Serialize;

use crate::engine::policy::RuleId;
use crate::messages::{count, format_seconds};
use crate::trace::replay::{Replay, RuleSummary, TraceSummary};

/// The summary of a replay, with the names of pods.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReplaySummary {
    /// Counts and times.
    summary: TraceSummary,
    /// `namespace/name` of the pods of each rule.
    pods: BTreeMap<RuleId, Vec<String>>,
}

impl ReplaySummary {
    /// The summary of `replay` so far.
    pub fn new<R: BufRead>(replay: &Replay<R>) -> Self {
        let summary = replay.summary();
        let names = |rule: &RuleSummary| {
            let name = |uid| {
                let pod = replay.pod(uid);
                pod.map_or_else(|| uid.to_string(), |pod| pod.full_name().to_string())
            };
            rule.pods.iter().map(name).collect()
        };
        let rules = summary.rules.iter();
        let pods = rules
            .map(|(id, rule)| (id.clone(), names(rule)))
            .collect::<BTreeMap<_, _>>();
        Self { summary, pods }
    }
}

impl fmt::Display for ReplaySummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TraceSummary { samples, span, .. } = &self.summary;
        match samples {
            1 => write!(f, "\n1 sample")?,
            samples => write!(f, "\n{samples} samples over {}", format_seconds(*span))?,
        }
        writeln!(f, "; nothing of this was done:")?;
        for (id, rule) in &self.summary.rules {
            writeln!(f, "{id}")?;
            if rule.breaches == 0 {
                writeln!(f, "  never above its threshold for long enough to act")?;
                continue;
            }
            write_rule(f, rule)?;
            let pods = self.pods.get(id).map_or(&[][..], Vec::as_slice);
            if !pods.is_empty() {
                writeln!(f, "  pods: {}", pods.join(", "))?;
            }
        }
        Ok(())
    }
}

fn write_rule(f: &mut fmt::Formatter<'_>, rule: &RuleSummary) -> fmt::Result {
    let in_force = format_seconds(rule.in_force);
    let breaches = count(usize::try_from(rule.breaches).unwrap_or(usize::MAX), "time");
    writeln!(
        f,
        "  above its threshold {breaches}, in force for {in_force}, {:?} at the end",
        rule.state
    )?;
    if rule.steps_down + rule.steps_up > 0 {
        writeln!(
            f,
            "  throttle: {} steps down, {} up",
            rule.steps_down, rule.steps_up
        )?;
    }
    if rule.reclaims > 0 {
        writeln!(f, "  page cache reclaimed: {} times", rule.reclaims)?;
    }
    if rule.evictions > 0 {
        writeln!(f, "  evictions wanted: {}", rule.evictions)?;
    }
    if rule.scheduling_disabled > Duration::ZERO {
        writeln!(
            f,
            "  new work not allowed for {}",
            format_seconds(rule.scheduling_disabled)
        )?;
    }
    Ok(())
}
