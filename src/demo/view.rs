//! The state of the demo that [`super::screen`] draws and [`super::plain`] prints.

use std::time::Duration;

use super::phase::Phase;
use crate::engine::units::{MilliCpu, Quota};

/// The state of the demo at one moment.
#[derive(Clone, Debug, PartialEq)]
pub struct DemoView {
    /// Such as `2 CPUs, cgroup v1`.
    pub machine: String,
    /// The phase.
    pub phase: Phase,
    /// Since the start.
    pub elapsed: Duration,
    /// Upper bound of the time left.
    pub left: Duration,
    /// The node.
    pub node: DemoNode,
    /// The pods, the important one first.
    pub pods: Vec<PodView>,
    /// The important pod's latency in every second since the start.
    pub latency: Vec<Second>,
    /// The moments that the plot of the latency marks, in order.
    pub marks: Vec<Mark>,
    /// The log, oldest first.
    pub events: Vec<LogEntry>,
}

/// CPU use of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DemoNode {
    /// In use; `None` before the second sample.
    pub usage: Option<MilliCpu>,
    /// All CPUs.
    pub capacity: MilliCpu,
    /// The rule's threshold.
    pub threshold: MilliCpu,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// Its name.
    pub name: String,
    /// Its quality-of-service class.
    pub class: String,
    /// The content of its CPU weight file; `None` where it could not be read.
    pub weight: Option<String>,
    /// In use; `None` before the second sample.
    pub usage: Option<MilliCpu>,
    /// Its quota before the demo changed anything.
    pub original: Option<Quota>,
    /// Its current quota.
    pub quota: Option<Quota>,
    /// Whether it is idle class now.
    pub idle: bool,
}

/// One second of the important pod.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Second {
    /// 99th percentile of its requests in milliseconds; `None` without a request.
    pub p99_ms: Option<f64>,
    /// The phase at its start.
    pub phase: Phase,
}

/// A moment of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Since the start.
    pub after: Duration,
    /// What happened.
    pub what: &'static str,
}

/// One line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// Since the start.
    pub after: Duration,
    /// The text.
    pub message: String,
}

impl PodView {
    /// Whether it is throttled: its quota is below the original, or it is idle class.
    pub fn is_throttled(&self) -> bool {
        self.idle || self.has_lower_quota()
    }

    /// Whether its quota is below the original.
    pub fn has_lower_quota(&self) -> bool {
        match (self.quota, self.original) {
            (Some(Quota::Limit(now)), Some(Quota::Limit(original))) => now < original,
            (Some(Quota::Limit(_)), Some(Quota::Unlimited)) => true,
            _ => false,
        }
    }
}

impl DemoView {
    /// The p99 of the last second that has one.
    pub fn latest_p99(&self) -> Option<f64> {
        self.latency.iter().rev().find_map(|second| second.p99_ms)
    }
}
