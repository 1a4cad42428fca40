//! Writes the node's load as the label `plimsoll.dev/load` of its Node, so that schedulers avoid hot nodes.

mod schedule;

use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::schedule::{Schedule, Step};
use super::taint::{NewestNode, ObservedNode};
use crate::cluster::backoff::{at_least, backoff, sleep};
use crate::cluster::load_label;
use crate::node::clock;

/// Minimum and maximum pause after a failed write.
const RETRY_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// What the label is to say.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WantedLabel {
    /// The node's load in percent of its load line; `None`: unknown.
    pub load: Option<f64>,
    /// The label is not to be there.
    pub remove: bool,
    /// The least interval at which writes follow each other for long, as the controller asks.
    pub interval: Duration,
}

impl Default for WantedLabel {
    fn default() -> Self {
        Self {
            load: None,
            remove: false,
            interval: schedule::INTERVAL,
        }
    }
}

/// The task that writes the label; it ends when this value is dropped.
#[derive(Debug)]
pub struct LoadLabelTask {
    wanted: watch::Sender<WantedLabel>,
    task: JoinHandle<()>,
}

impl LoadLabelTask {
    /// Starts it; `node` is the Node from a watch.
    pub fn start(client: Client, node: watch::Receiver<ObservedNode>) -> Self {
        let (wanted, received) = watch::channel(WantedLabel::default());
        let task = tokio::spawn(run(client, received, node));
        Self { wanted, task }
    }

    /// Sets what the label is to say.
    pub fn want(&self, wanted: WantedLabel) {
        self.wanted
            .send_if_modified(|before| std::mem::replace(before, wanted) != wanted);
    }
}

impl Drop for LoadLabelTask {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn run(
    client: Client,
    mut wanted: watch::Receiver<WantedLabel>,
    mut node: watch::Receiver<ObservedNode>,
) {
    let mut schedule = Schedule::default();
    let mut newest = NewestNode::default();
    let mut pauses = None;
    let mut failing = String::new();
    loop {
        let now = clock::boot_time();
        let wants = *wanted.borrow_and_update();
        newest.observe(&node.borrow_and_update());
        let seen = newest.get();
        let step = seen.map_or(Step::Wait(None), |seen| {
            schedule.step(now, wants, seen.load_label())
        });
        let pause = match (step, seen) {
            (Step::Write(label), Some(seen)) => {
                match load_label::write(&client, &seen.name, &seen.uid, label).await {
                    Ok(node) => {
                        pauses = None;
                        failing.clear();
                        newest.written(node);
                    }
                    Err(error) => {
                        let why = error.message();
                        if failing != why {
                            tracing::warn!(
                                why,
                                "failed to write the node's load label; trying again"
                            );
                            failing = why;
                        }
                        let (min, max) = RETRY_PAUSE;
                        let pauses = pauses.get_or_insert_with(|| backoff(min, max));
                        let pause = pauses.next().unwrap_or(max);
                        tokio::time::sleep(at_least(error.retry_after(), pause)).await;
                    }
                }
                continue;
            }
            (Step::Write(_), None) => None,
            (Step::Wait(pause), _) => pause,
        };
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            changed = node.changed() => if changed.is_err() { return },
            () = sleep(pause) => {}
        }
    }
}
