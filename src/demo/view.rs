//! What the demo shows at one moment: plain figures, fed by measurements or by a recording, drawn by
//! [`super::screen`] and told by [`super::plain`].

use std::time::Duration;

use super::story::Act;
use crate::engine::units::{MilliCpu, Quota};

/// One moment of the demo.
#[derive(Clone, Debug, PartialEq)]
pub struct View {
    /// Where the figures come from.
    pub source: Source,
    /// The act.
    pub act: Act,
    /// Since the begin.
    pub elapsed: Duration,
    /// At most so long until the end.
    pub left: Duration,
    /// The node.
    pub node: NodeView,
    /// The pods, the important one first.
    pub pods: Vec<PodView>,
    /// The important worker's latency, a bar a second from the begin on.
    pub latency: Vec<Second>,
    /// What happened, oldest first.
    pub events: Vec<Happening>,
}

/// Where the figures come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// This machine, now.
    Live {
        /// Such as `2 CPUs, cgroup v1`.
        machine: String,
    },
    /// A recording.
    Replay {
        /// The machine that it was made on, and when.
        recorded: String,
    },
}

/// CPU use of the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeView {
    /// In use; `None` before the second sample.
    pub usage: Option<MilliCpu>,
    /// All CPUs.
    pub capacity: MilliCpu,
    /// The load line.
    pub line: MilliCpu,
}

/// One pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodView {
    /// Its name.
    pub name: String,
    /// Its quality-of-service class.
    pub class: String,
    /// Its CPU weight, as the kernel file has it; `None` where no recording holds it.
    pub weight: Option<String>,
    /// In use; `None` where not known.
    pub usage: Option<MilliCpu>,
    /// What its quota file allowed before anything was done.
    pub original: Option<Quota>,
    /// What it allows now.
    pub quota: Option<Quota>,
}

/// One second of the important worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Second {
    /// 99th percentile of its requests in milliseconds; `None` without a request.
    pub p99_ms: Option<f64>,
    /// The act in which it began.
    pub act: Act,
}

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Happening {
    /// Since the begin.
    pub after: Duration,
    /// What, in words.
    pub what: String,
}

impl PodView {
    /// It may use less than its original allows.
    pub fn is_throttled(&self) -> bool {
        match (self.quota, self.original) {
            (Some(Quota::Limit(now)), Some(Quota::Limit(original))) => now < original,
            (Some(Quota::Limit(_)), Some(Quota::Unlimited)) => true,
            _ => false,
        }
    }
}

impl View {
    /// The p99 of the last second whose requests have ended.
    pub fn latest_p99(&self) -> Option<f64> {
        self.latency.iter().rev().find_map(|second| second.p99_ms)
    }
}
