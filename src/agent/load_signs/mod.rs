//! Writes the node's load to its Node, so that schedulers avoid hot nodes: as the label `plimsoll.dev/load`, and as crane's
//! annotations where crane-scheduler runs.

mod crane;
mod label;
pub mod schedule;

use std::time::Duration;

use fastrand::Rng;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::schedule::{SeenSigns, SignSchedule, SignStep, WrittenParts};
use super::taint::{NewestNode, WatchedNode};
use crate::clock;
use crate::cluster::backoff::{at_least, backoff, sleep};
use crate::cluster::client::CallError;
use crate::cluster::load_signs::{self, LoadSignsPatch};
use crate::cluster::taint::NodeSnapshot;
use crate::crd::crane_annotations::{CraneValues, Zone};
use crate::crd::load_label::LoadLabel;
use crate::engine::load::NodeLoad;
use crate::engine::metric::Resource;
use crate::engine::window::{NodeWindows, PeakSpan, Span, Statistic};

/// Minimum and maximum delay after a failed write.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// What schedulers are to see of the node's load.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WantedSigns {
    /// The node's load in percent of its load line; `None`: unknown.
    pub load: Option<f64>,
    /// The label is not to be there.
    pub remove: bool,
    /// crane's annotations.
    pub crane: WantedCrane,
    /// Minimum average interval between writes, as the controller asks.
    pub interval: Duration,
}

/// What is to become of crane's annotations.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum WantedCrane {
    /// They stay as they are.
    Unchanged,
    /// Those that are ours are not to be there.
    Removed,
    /// They have these values.
    Values(CraneValues),
}

impl Default for WantedSigns {
    fn default() -> Self {
        Self {
            load: None,
            remove: false,
            crane: WantedCrane::Unchanged,
            interval: schedule::INTERVAL,
        }
    }
}

impl WantedSigns {
    /// The wanted label.
    fn label(&self) -> Option<LoadLabel> {
        let load = self.load.filter(|_| !self.remove);
        load.and_then(LoadLabel::of)
    }
}

/// What crane's annotations say of a node.
pub fn crane_values(windows: &NodeWindows, load: Option<&NodeLoad>) -> CraneValues {
    let value = |resource, statistic| windows.value(resource, statistic).ok();
    let [average, hour, day] = [
        Statistic::Average(Span::FiveMinutes),
        Statistic::Peak(PeakSpan::Hour),
        Statistic::Peak(PeakSpan::Day),
    ];
    let usage = [
        value(Resource::Cpu, average),
        value(Resource::Cpu, hour),
        value(Resource::Cpu, day),
        value(Resource::Memory, average),
        value(Resource::Memory, hour),
        value(Resource::Memory, day),
    ];
    CraneValues::of(
        usage,
        load.map(|load| load.cpu.newcomers.max(load.memory.newcomers)),
    )
}

/// The task that writes them; it ends when this value is dropped.
#[derive(Debug)]
pub struct LoadSignsTask {
    wanted: watch::Sender<WantedSigns>,
    task: JoinHandle<()>,
}

impl LoadSignsTask {
    /// Starts it; `node` is the Node from a watch, `zone` that of crane's annotations.
    pub fn start(client: Client, node: watch::Receiver<WatchedNode>, zone: Option<Zone>) -> Self {
        let (wanted, received) = watch::channel(WantedSigns::default());
        let writer = SignsWriter::new(client, zone);
        let task = tokio::spawn(run(writer, received, node));
        Self { wanted, task }
    }

    /// Sets what schedulers are to see.
    pub fn want(&self, wanted: WantedSigns) {
        self.wanted
            .send_if_modified(|before| std::mem::replace(before, wanted) != wanted);
    }
}

impl Drop for LoadSignsTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    mut writer: SignsWriter,
    mut wanted: watch::Receiver<WantedSigns>,
    mut node: watch::Receiver<WatchedNode>,
) {
    let mut newest = NewestNode::default();
    let mut pauses = None;
    loop {
        let wants = *wanted.borrow_and_update();
        newest.observe(&node.borrow_and_update());
        let seen = newest.get();
        let step = seen.map_or(SignStep::Wait(None), |seen| writer.step(&wants, seen));
        let pause = match (step, seen) {
            (SignStep::Write(parts), Some(seen)) => {
                match writer.write(&wants, seen, parts).await {
                    Ok(node) => {
                        pauses = None;
                        newest.written(node);
                    }
                    Err(error) => {
                        let (min, max) = RETRY_DELAYS;
                        let pauses = pauses.get_or_insert_with(|| backoff(min, max));
                        let pause = pauses.next().unwrap_or(max);
                        tokio::time::sleep(at_least(error.retry_after(), pause)).await;
                    }
                }
                continue;
            }
            (SignStep::Write(_), None) => None,
            (SignStep::Wait(pause), _) => pause,
        };
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            changed = node.changed() => if changed.is_err() { return },
            () = sleep(pause) => {}
        }
    }
}

fn signs(node: &NodeSnapshot) -> SeenSigns<'_> {
    SeenSigns {
        label: node.load_label(),
        crane: node.crane(),
    }
}

struct SignsWriter {
    client: Client,
    zone: Option<Zone>,
    schedule: SignSchedule,
    /// Why the last write failed, as logged.
    failing: String,
    /// That another writer changes crane's annotations was logged.
    contested: bool,
}

impl SignsWriter {
    fn new(client: Client, zone: Option<Zone>) -> Self {
        Self {
            client,
            zone,
            schedule: SignSchedule::new(Rng::new()),
            failing: String::new(),
            contested: false,
        }
    }

    fn step(&mut self, wants: &WantedSigns, node: &NodeSnapshot) -> SignStep {
        let seen = signs(node);
        if !self.contested && self.schedule.is_contested(seen) {
            self.contested = true;
            let keys: Vec<_> = seen.crane.others().collect();
            tracing::warn!(
                keys = keys.join(", "),
                "another writer changes crane's annotations of this node, probably crane's own controller; writing them again"
            );
        }
        self.schedule.step(clock::boot_time(), wants, seen)
    }

    async fn write(
        &mut self,
        wants: &WantedSigns,
        node: &NodeSnapshot,
        parts: WrittenParts,
    ) -> Result<NodeSnapshot, CallError> {
        let patch = self.patch(wants, node, parts);
        match load_signs::write(&self.client, &node.name, &node.uid, &patch).await {
            Ok(node) => {
                self.failing.clear();
                self.schedule.written(clock::boot_time(), parts);
                Ok(node)
            }
            Err(error) => {
                let why = error.message();
                if self.failing != why {
                    tracing::warn!(why, "failed to write the load to the Node; trying again");
                    self.failing = why;
                }
                Err(error)
            }
        }
    }

    fn patch(
        &self,
        wants: &WantedSigns,
        node: &NodeSnapshot,
        parts: WrittenParts,
    ) -> LoadSignsPatch {
        let mut patch = LoadSignsPatch::default();
        if parts.label {
            patch = patch.label(wants.label());
        }
        match (&self.zone, wants.crane) {
            (Some(zone), WantedCrane::Values(values)) if parts.crane => {
                let time = zone.time(clock::wall_time());
                patch.crane(&values, &time, node.crane())
            }
            (_, WantedCrane::Removed) if parts.crane => patch.without_crane(node.crane()),
            _ => patch,
        }
    }
}
