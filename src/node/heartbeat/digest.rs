//! The node's health and load in one line, from what the sampling loop has at hand anyway. Pure.

use std::time::Duration;

use crate::crd::Summary;
use crate::crd::summary::{Percent, Scheduling};
use crate::engine::RuleReport;
use crate::engine::metric::Metric;
use crate::engine::plan::RuleState;
use crate::engine::policy::PolicySet;
use crate::engine::sample::{CpuTimes, NodeMemory, NodeSample};
use crate::engine::time::BootTime;

/// CPU is told over so long, and nothing is told more often.
const WINDOW: Duration = Duration::from_secs(5);

/// Makes summaries.
#[derive(Debug, Default)]
pub struct Digest {
    /// CPU time at the last summary, and when that was.
    before: Option<(BootTime, Option<CpuTimes>)>,
}

/// What a summary is made of.
#[derive(Debug)]
pub struct Facts<'a, R> {
    /// The node as last sampled.
    pub node: &'a NodeSample,
    /// Its policies.
    pub policy: &'a PolicySet,
    /// How the rules stand.
    pub reports: R,
    /// Pods that are throttled.
    pub throttled: usize,
    /// What stands on the Node; `None`: not known.
    pub scheduling: Option<Scheduling>,
}

impl Digest {
    /// Whether it is time for another.
    pub fn is_due(&self, now: BootTime) -> bool {
        self.before
            .is_none_or(|(before, _)| now.since(before) >= WINDOW)
    }

    /// A summary of now, with CPU since the last one.
    pub fn summary<R>(&mut self, now: BootTime, facts: Facts<'_, R>) -> Summary
    where
        R: Iterator<Item = RuleReport>,
    {
        let Facts {
            node,
            policy,
            reports,
            throttled,
            scheduling,
        } = facts;
        let before = self.before.replace((now, node.cpu));
        let breached: Vec<_> = reports
            .filter(|report| report.state == RuleState::Breached)
            .map(|report| report.id)
            .collect();
        let [cpu_mark, memory_mark] = marks(policy, node);
        Summary {
            sequence: None,
            version: Some(env!("CARGO_PKG_VERSION").to_owned()),
            cpu: busy(before.and_then(|(_, cpu)| cpu), node.cpu),
            memory: node.memory.and_then(used),
            cpu_mark,
            memory_mark,
            pressure: node
                .pressure
                .map(|kind| kind.and_then(|kind| Percent::of(kind.some[0]))),
            rules: Some(count(policy.rules.len())),
            breached: Some(count(breached.len())),
            breached_rules: breached,
            throttled: Some(count(throttled)),
            scheduling,
        }
    }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Busy time of all time between two looks.
fn busy(before: Option<CpuTimes>, now: Option<CpuTimes>) -> Option<Percent> {
    let (before, now) = (before?, now?);
    let busy = now.busy.checked_sub(before.busy)?;
    // Waiting for I/O may be counted backwards.
    let idle = now.idle.saturating_sub(before.idle);
    let all = busy.checked_add(idle).filter(|all| *all > 0)?;
    Percent::of(busy as f64 * 100.0 / all as f64)
}

fn used(memory: NodeMemory) -> Option<Percent> {
    let used = memory.total.saturating_sub(memory.available);
    // No memory at all makes no number.
    Percent::of(used.0 as f64 * 100.0 / memory.total.0 as f64)
}

/// The lowest high marks over CPU and memory, in percent of the node. One above 100 is never reached, and left out.
fn marks(policy: &PolicySet, node: &NodeSample) -> [Option<Percent>; 2] {
    let cpus = node.cpu.map(|cpu| f64::from(cpu.online));
    let total = node.memory.map(|memory| memory.total.0 as f64);
    let mut lowest = [None, None];
    for rule in &policy.rules {
        let (resource, mark) = match rule.metric {
            Metric::CpuUtilization => (0, Some(rule.watermark)),
            // One CPU is 1000 millicores: a percent of it is ten.
            Metric::CpuUsage => (0, cpus.map(|cpus| rule.watermark / cpus / 10.0)),
            Metric::MemoryUtilization => (1, Some(rule.watermark)),
            Metric::MemoryUsage => (1, total.map(|total| rule.watermark * 100.0 / total)),
            _ => continue,
        };
        let mark = mark.filter(|mark| *mark <= 100.0).and_then(Percent::of);
        lowest[resource] = lowest[resource].into_iter().chain(mark).min();
    }
    lowest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::policy::{RuleId, Strategy};
    use crate::engine::sample::Pressure;
    use crate::engine::testing::rule;
    use crate::engine::units::Bytes;

    fn node(busy: u64, idle: u64) -> NodeSample {
        let seconds = 1_000_000_000;
        NodeSample {
            cpu: Some(CpuTimes {
                busy: busy * seconds,
                idle: idle * seconds,
                online: 8,
            }),
            memory: Some(NodeMemory {
                total: Bytes(1000),
                available: Bytes(250),
            }),
            pressure: [
                Some(Pressure {
                    some: [1.5, 2.0, 3.0],
                    full: None,
                }),
                None,
                None,
            ],
            ..NodeSample::default()
        }
    }

    fn report(id: &str, state: RuleState) -> RuleReport {
        RuleReport {
            id: RuleId::from(id),
            strategy: Strategy::Enforce,
            state,
            since: None,
            value: None,
            watermark: 1.0,
            restore: 1.0,
            breaches: 0,
            quiets: 0,
            unknown: None,
        }
    }

    fn digest(digest: &mut Digest, at: u64, node: &NodeSample, policy: &PolicySet) -> Summary {
        let now = BootTime::default() + Duration::from_secs(at);
        let reports = [
            report("q/cpu", RuleState::Breached),
            report("q/mem", RuleState::Cooling),
        ];
        let facts = Facts {
            node,
            policy,
            reports: reports.into_iter(),
            throttled: 2,
            scheduling: Some(Scheduling::Enabled),
        };
        digest.summary(now, facts)
    }

    #[test]
    fn cpu_is_what_was_busy_since_the_last_summary_and_not_known_at_the_first() {
        let mut maker = Digest::default();
        let policy = PolicySet::default();
        let first = digest(&mut maker, 100, &node(1000, 1000), &policy);
        assert_eq!(first.cpu, None);
        assert_eq!(first.memory, Percent::of(75.0));
        assert_eq!(first.pressure, [Percent::of(1.5), None, None]);
        assert!(!maker.is_due(BootTime::default() + Duration::from_secs(104)));
        assert!(maker.is_due(BootTime::default() + Duration::from_secs(105)));
        let second = digest(&mut maker, 110, &node(1060, 1020), &policy);
        assert_eq!(second.cpu, Percent::of(75.0));
        // A counter that ran backwards tells nothing.
        assert_eq!(digest(&mut maker, 120, &node(10, 5000), &policy).cpu, None);
        assert_eq!(second.throttled, Some(2));
        assert_eq!(second.breached, Some(1));
        assert_eq!(second.breached_rules, [RuleId::from("q/cpu")]);
    }

    #[test]
    fn marks_are_the_lowest_in_percent_of_the_node() {
        let policy = PolicySet {
            rules: vec![
                rule("cpu_total_usage", 6000.0),
                rule("cpu_total_utilization", 90.0),
                rule("memory_total_usage", 2000.0),
                rule("cpu_load_1_min", 1.0),
            ],
            ..PolicySet::default()
        };
        let told = digest(&mut Digest::default(), 1, &node(1, 1), &policy);
        assert_eq!(told.cpu_mark, Percent::of(75.0));
        assert_eq!(told.memory_mark, None, "above all memory there is");
        assert_eq!(told.rules, Some(4));
        let nothing = digest(&mut Digest::default(), 1, &NodeSample::default(), &policy);
        assert_eq!(nothing.cpu_mark, Percent::of(90.0), "CPUs are not known");
        assert_eq!((nothing.cpu, nothing.memory), (None, None));
    }
}
