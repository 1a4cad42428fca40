//! Builds the summary of the node's health and load from the data of its last report. Pure.

use crate::crd::Summary;
use crate::crd::summary::{Percent, ReportedScheduling};
use crate::engine::RuleReport;
use crate::engine::metric::Metric;
use crate::engine::plan::RuleState;
use crate::engine::policy::{PolicySet, Rule, RuleId};
use crate::engine::sample::NodeSample;

/// The input of a summary.
#[derive(Debug)]
pub struct DigestInput<'a, R> {
    /// The sample of the last report.
    pub node: &'a NodeSample,
    /// CPU and memory in use, in percent of the node, as in that report.
    pub used: [Option<f64>; 2],
    /// Its load in percent of its load line, if known.
    pub load: Option<f64>,
    /// Its policies.
    pub policy: &'a PolicySet,
    /// The state of the rules.
    pub reports: R,
    /// Number of throttled pods.
    pub throttled: usize,
    /// The scheduling state of the Node, if known.
    pub scheduling: Option<ReportedScheduling>,
}

/// The summary, without its sequence, which is set with the Lease.
pub fn summary<R: Iterator<Item = RuleReport>>(facts: DigestInput<'_, R>) -> Summary {
    let DigestInput {
        node,
        used,
        load,
        policy,
        reports,
        throttled,
        scheduling,
    } = facts;
    let mut breached = Vec::new();
    let mut outside_hours = Vec::new();
    for report in reports {
        if report.state == RuleState::Breached {
            breached.push(report.id);
        } else if report.outside_hours {
            outside_hours.push(report.id);
        }
    }
    let [cpu, memory] = used.map(|percent| percent.and_then(Percent::of));
    let [cpu_threshold, memory_threshold] = thresholds(policy, node, &outside_hours);
    Summary {
        sequence: None,
        version: Some(env!("CARGO_PKG_VERSION").to_owned()),
        cpu,
        memory,
        load: load.and_then(Percent::of),
        cpu_threshold,
        memory_threshold,
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

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The lowest thresholds of CPU and memory, in percent of the node. Those above 100 are never reached and are left out.
fn thresholds(
    policy: &PolicySet,
    node: &NodeSample,
    outside_hours: &[RuleId],
) -> [Option<Percent>; 2] {
    let cpus = node.cpu.map(|cpu| f64::from(cpu.online));
    let total = node.memory.map(|memory| memory.capacity().0 as f64);
    let mut lowest = [None, None];
    let active = |rule: &&Rule| !outside_hours.contains(&rule.id);
    for rule in policy.rules.iter().filter(active) {
        let (resource, threshold) = match rule.metric {
            Metric::CpuUtilization => (0, Some(rule.threshold)),
            // One CPU is 1000 millicores: a percent of it is ten.
            Metric::CpuUsage => (0, cpus.map(|cpus| rule.threshold / cpus / 10.0)),
            Metric::MemoryUtilization => (1, Some(rule.threshold)),
            Metric::MemoryUsage => (1, total.map(|total| rule.threshold * 100.0 / total)),
            _ => continue,
        };
        let threshold = threshold
            .filter(|threshold| *threshold <= 100.0)
            .and_then(Percent::of);
        lowest[resource] = lowest[resource].into_iter().chain(threshold).min();
    }
    lowest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::policy::{RuleId, Strategy};
    use crate::engine::sample::{CpuTimes, NodeMemory, Pressure};
    use crate::engine::testing::rule;
    use crate::engine::units::Bytes;

    fn node() -> NodeSample {
        NodeSample {
            cpu: Some(CpuTimes {
                busy: 1,
                idle: 1,
                online: 8,
            }),
            memory: Some(NodeMemory {
                total: Bytes(1000),
                available: Bytes(250),
                ..NodeMemory::default()
            }),
            pressure: [
                Some(Pressure {
                    some: [1.5, 2.0, 3.0],
                    ..Pressure::default()
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
            outside_hours: false,
            state,
            since: None,
            value: None,
            threshold: 1.0,
            restore_value: 1.0,
            breaches: 0,
            quiet_evaluations: 0,
            limited: false,
            rung: None,
            next_rung: None,
            evictions_ended: false,
            earliest_eviction: None,
            cool_down: std::time::Duration::ZERO,
            would: None,
            unknown: None,
        }
    }

    fn summarize(node: &NodeSample, used: [Option<f64>; 2], policy: &PolicySet) -> Summary {
        let outside_hours = RuleReport {
            outside_hours: true,
            ..report("q/night", RuleState::Normal)
        };
        let reports = [
            report("q/cpu", RuleState::Breached),
            report("q/mem", RuleState::Cooling),
            outside_hours,
        ];
        summary(DigestInput {
            node,
            used,
            load: Some(91.84),
            policy,
            reports: reports.into_iter(),
            throttled: 2,
            scheduling: Some(ReportedScheduling::Enabled),
        })
    }

    #[test]
    fn it_has_the_values_of_the_last_report_and_omits_unknown_ones() {
        let policy = PolicySet::default();
        let known = summarize(&node(), [Some(74.96), Some(33.3)], &policy);
        assert_eq!(known.cpu, Percent::of(75.0));
        assert_eq!(known.memory, Percent::of(33.3));
        assert_eq!(known.load, Percent::of(91.8));
        assert_eq!(known.pressure, [Percent::of(1.5), None, None]);
        assert_eq!(known.throttled, Some(2));
        assert_eq!(known.breached, Some(1));
        assert_eq!(known.breached_rules, [RuleId::from("q/cpu")]);
        let unknown = summarize(&NodeSample::default(), [None; 2], &policy);
        assert_eq!((unknown.cpu, unknown.memory), (None, None));
        assert_eq!(unknown.pressure, [None; 3]);
    }

    #[test]
    fn the_lowest_thresholds_are_in_percent_of_the_node() {
        let night = Rule {
            id: RuleId::from("q/night"),
            ..rule("cpu_total_usage", 1000.0)
        };
        let policy = PolicySet {
            rules: vec![
                night,
                rule("cpu_total_usage", 6000.0),
                rule("cpu_total_utilization", 90.0),
                rule("memory_total_usage", 2000.0),
                rule("cpu_load_1_min", 1.0),
            ],
            ..PolicySet::default()
        };
        let known = summarize(&node(), [None; 2], &policy);
        assert_eq!(known.cpu_threshold, Percent::of(75.0));
        assert_eq!(known.memory_threshold, None, "above the node's memory");
        assert_eq!(known.rules, Some(5));
        let unknown = summarize(&NodeSample::default(), [None; 2], &policy);
        assert_eq!(
            unknown.cpu_threshold,
            Percent::of(90.0),
            "the number of CPUs is unknown"
        );
    }
}
