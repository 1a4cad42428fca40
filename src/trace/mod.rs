//! Recorded samples and transitions, and their replay. `docs/without-kubernetes.md` describes the file.

pub mod read;
pub mod record;
pub mod replay;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::engine::DEFAULT_PERIOD;
use crate::engine::plan::Transition;
use crate::engine::pod::Pod;
use crate::engine::policy::NodeFacts;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::units::Bytes;

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u32 = 1;

/// One line of a trace.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TraceLine {
    /// The first line.
    Header(TraceHeader),
    /// The pods from here on.
    Pods(Vec<Arc<Pod>>),
    /// A sample.
    Tick(Box<Tick>),
    /// A decision of the engine on that sample.
    Transition(Transition),
}

/// A borrowed [`TraceLine`].
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) enum LineRef<'a> {
    Header(&'a TraceHeader),
    Pods(&'a [Arc<Pod>]),
    Tick(TickRef<'a>),
    Transition(&'a Transition),
}

/// The first line of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TraceHeader {
    /// [`VERSION`].
    pub version: u32,
    /// The version of the program that recorded it.
    pub plimsoll: String,
    /// The boot that its times belong to.
    pub boot_id: String,
    /// When it was started.
    pub at: BootTime,
    /// The wall clock at that moment.
    pub time: Timestamp,
    /// The facts that policies are compiled for.
    pub node: TracedNode,
    /// The time between two evaluations in nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub period_nanos: Option<u64>,
}

/// The facts of a node that policies are compiled for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TracedNode {
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Online CPUs; 0 if unknown.
    pub cpus: u32,
    /// Memory in bytes, without the pools of huge pages; 0 if unknown.
    pub memory: Bytes,
}

impl From<&NodeFacts> for TracedNode {
    fn from(facts: &NodeFacts) -> Self {
        Self {
            labels: facts.labels.clone(),
            cpus: facts.cpus,
            memory: facts.memory,
        }
    }
}

impl From<&TracedNode> for NodeFacts {
    fn from(node: &TracedNode) -> Self {
        Self {
            labels: node.labels.clone(),
            cpus: node.cpus,
            memory: node.memory,
            windows: None,
        }
    }
}

/// One step of the engine.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tick {
    /// The time passed to the engine.
    pub now: BootTime,
    /// The sample passed to the engine.
    pub sample: Sample,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TickRef<'a> {
    pub(crate) now: BootTime,
    pub(crate) sample: &'a Sample,
}

impl TraceHeader {
    /// The header of a trace that starts now: at `at` since boot and `time` on the wall clock.
    pub fn new(
        boot_id: String,
        at: BootTime,
        time: Timestamp,
        node: &NodeFacts,
        period: Duration,
    ) -> Self {
        Self {
            version: VERSION,
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id,
            at,
            time,
            node: node.into(),
            period_nanos: u64::try_from(period.as_nanos()).ok(),
        }
    }

    /// The time between two evaluations.
    pub fn period(&self) -> Duration {
        let recorded = self.period_nanos.map(Duration::from_nanos);
        recorded.unwrap_or(DEFAULT_PERIOD)
    }

    /// The wall clock at `at`, unless it was set since the start.
    pub fn wall_time(&self, at: BootTime) -> Timestamp {
        let after = at.since(self.at);
        self.time.checked_add(after).unwrap_or(self.time)
    }
}
