//! A recorded demo: a trace as `plimsoll run --record` writes it, and beside it what a trace does not hold.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::chronicle::Chronicle;
use super::latency::Latencies;
use super::story::Act;
use crate::engine::plan::Transition;
use crate::engine::pod::Pod;
use crate::engine::policy::NodeFacts;
use crate::engine::sample::{NodeSample, Sample};
use crate::engine::time::BootTime;
use crate::node::clock::wall_time;
use crate::node::journal::{JournalError, boot_id};
use crate::node::machine::event::Event;
use crate::trace::record::{RecordError, Recorder};
use crate::trace::{Header, VERSION};

/// What the demo knew and a trace does not hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Programme {
    /// Such as `2 CPUs, cgroup v1`.
    pub machine: String,
    /// When the demo began.
    pub begun: BootTime,
    /// How long it was asked to take.
    pub asked: Duration,
    /// How long it took.
    pub lasted: Duration,
    /// When each act began.
    pub acts: Vec<(Act, BootTime)>,
    /// CPU weights by pod name.
    pub weights: BTreeMap<String, String>,
    /// The important worker's p99 in each second, in milliseconds.
    pub p99_ms: Vec<Option<f64>>,
}

/// A recording could not be written.
#[derive(Debug, thiserror::Error)]
pub enum TapeError {
    /// The trace.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// No boot id.
    #[error(transparent)]
    Boot(#[from] JournalError),
    /// The file beside it.
    #[error("failed to write {}: {source}", path.display())]
    Programme {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A recording under way.
#[derive(Debug)]
pub struct Tape {
    recorder: Recorder,
    beside: PathBuf,
}

impl Tape {
    /// Begins a trace at `path`.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn create(
        path: &Path,
        node: &NodeFacts,
        period: Duration,
        pods: &[Arc<Pod>],
        now: BootTime,
    ) -> Result<Self, TapeError> {
        let header = Header {
            version: VERSION,
            plimsoll: env!("CARGO_PKG_VERSION").to_owned(),
            boot_id: boot_id()?,
            at: now,
            time: wall_time(),
            node: node.into(),
            period_nanos: u64::try_from(period.as_nanos()).ok(),
        };
        let mut recorder = Recorder::create(path, header)?;
        recorder.pods(pods)?;
        Ok(Self {
            recorder,
            beside: path.with_extension("programme.json"),
        })
    }

    /// Writes a step of the machine.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn tick(
        &mut self,
        now: BootTime,
        sample: &Sample,
        events: &[Event],
    ) -> Result<(), TapeError> {
        let transitions = events.iter().filter_map(transition);
        let sample = essence(sample);
        Ok(self.recorder.tick(now, &sample, transitions)?)
    }

    /// Writes what a trace does not hold.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub fn finish(self, programme: &Programme) -> Result<(), TapeError> {
        let failed = |source| TapeError::Programme {
            path: self.beside.clone(),
            source,
        };
        let text = serde_json::to_string(programme).map_err(|error| failed(error.into()))?;
        fs::write(&self.beside, text + "\n").map_err(failed)
    }
}

impl Programme {
    /// Of a demo that has ended.
    pub fn of(
        machine: String,
        asked: Duration,
        weights: BTreeMap<String, String>,
        chronicle: &Chronicle,
        latencies: &Latencies,
        now: BootTime,
    ) -> Self {
        let seconds = chronicle.seconds(latencies, now);
        let rounded = |p99: f64| (p99 * 1000.0).round() / 1000.0;
        Self {
            machine,
            begun: chronicle.begun(),
            asked,
            lasted: now.since(chronicle.begun()),
            acts: chronicle.acts().to_vec(),
            weights,
            p99_ms: seconds
                .iter()
                .map(|second| second.p99_ms.map(rounded))
                .collect(),
        }
    }
}

/// What the demo's policies read: CPU and memory, so that the recording which the program carries is small.
fn essence(sample: &Sample) -> Sample {
    let mut pods = sample.pods.clone();
    for pod in &mut pods {
        pod.memory_parts = None;
        pod.containers.clear();
    }
    Sample {
        at: sample.at,
        node: NodeSample {
            cpu: sample.node.cpu,
            memory: sample.node.memory,
            ..NodeSample::default()
        },
        pods,
        ..Sample::default()
    }
}

fn transition(event: &Event) -> Option<&Transition> {
    match event {
        Event::Decision(decision) => Some(&decision.transition),
        Event::Notice(_) => None,
    }
}
