//! Sets or removes the node's taint and condition as the engine decides: a task that reconciles the Node with the
//! wanted state.

use std::collections::VecDeque;
use std::time::Duration;

use backon::ExponentialBackoff;
use kube::Client;
use tokio::sync::watch;

use crate::clock;
use crate::cluster::backoff::{at_least, backoff, sleep};
use crate::cluster::taint::{self, Desired, DesiredTaint, NodeSnapshot, NodeTaint, TaintError};
use crate::engine::plan::Scheduling;
use crate::engine::policy::{RuleId, TaintEffect};
use crate::engine::time::BootTime;

/// Minimum and maximum delay after a failed write.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Minimum and maximum delay after our taint was removed too often.
const CONTESTED_DELAYS: (Duration, Duration) = (Duration::from_secs(30), Duration::from_mins(5));
/// How many times the taint may be removed within [`LOSS_WINDOW`] before we stop restoring it for a while.
const MAX_LOSSES: usize = 3;
const LOSS_WINDOW: Duration = Duration::from_mins(1);

/// The wanted state of the Node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WantedTaint {
    /// The engine's decision. [`Scheduling::Unchanged`] leaves the Node unchanged.
    pub scheduling: Scheduling,
    /// Value and threshold of the rules when the engine made that decision, as text.
    pub message: String,
    /// When the taint is removed, remove the condition as well.
    pub remove_condition: bool,
    /// The load of the node is at its load line: it gets the soft taint.
    pub busy: bool,
}

/// The Node from a watch.
#[derive(Clone, Debug, Default)]
pub struct WatchedNode {
    /// Our taint and condition on it; `None` if the Node does not exist or was not seen yet.
    pub node: Option<NodeSnapshot>,
    /// Number of full lists so far.
    pub lists: u64,
}

/// The Node as last seen, or as written by us since: the watch may lag behind.
#[derive(Debug, Default)]
pub struct NewestNode {
    node: Option<NodeSnapshot>,
    /// Number of full lists at that time.
    lists: u64,
}

impl NewestNode {
    /// The Node; `None` if it does not exist or was not seen yet.
    pub const fn get(&self) -> Option<&NodeSnapshot> {
        self.node.as_ref()
    }

    /// Takes the Node from the watch, unless it is older than the known one; false if it is. From a new list it is taken even
    /// then: versions restart when etcd is restored from a backup.
    pub fn observe(&mut self, seen: &WatchedNode) -> bool {
        if seen.lists != self.lists {
            self.lists = seen.lists;
            self.node = None;
        }
        let is_old = match (&seen.node, &self.node) {
            (Some(seen), Some(known)) => !seen.is_newer_than(known),
            _ => false,
        };
        if !is_old {
            self.node.clone_from(&seen.node);
        }
        !is_old
    }

    /// The Node was written, and is now as the API server answered.
    pub fn written(&mut self, node: NodeSnapshot) {
        self.node = Some(node);
    }
}

/// The last known state of our taint on the Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TaintState {
    /// The Node has been seen.
    pub known: bool,
    /// The effect of our taint; `None` if there is no taint.
    pub effect: Option<TaintEffect>,
    /// Why the last write failed; `None` if it did not.
    pub failing: Option<String>,
    /// Another writer keeps removing our taint.
    pub contested: bool,
}

/// Runs until the sender of `wanted` is dropped, and leaves the Node as it is then. `node` is the Node from a watch;
/// `taint_state` receives the state.
pub async fn run(
    client: Client,
    mut wanted: watch::Receiver<WantedTaint>,
    mut node: watch::Receiver<WatchedNode>,
    taint_state: watch::Sender<TaintState>,
) {
    let mut reconciler = Reconciler::default();
    loop {
        let now = clock::boot_time();
        reconciler.set_wanted(&wanted.borrow_and_update());
        reconciler.observe(now, &node.borrow_and_update());
        let step = reconciler.step(now);
        publish(&taint_state, reconciler.state());
        let pause = match step {
            Step::Write(seen) => {
                let written = taint::reconcile(&client, seen, reconciler.desired()).await;
                reconciler.written(clock::boot_time(), written);
                continue;
            }
            Step::Wait(pause) => pause,
        };
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            changed = node.changed() => if changed.is_err() { return },
            () = sleep(pause) => {}
        }
    }
}

fn publish(taint_state: &watch::Sender<TaintState>, now: TaintState) {
    taint_state.send_if_modified(|before| {
        let changed = *before != now;
        *before = now;
        changed
    });
}

/// The next step.
#[derive(Debug, PartialEq)]
enum Step {
    /// Write: this Node differs from the wanted state.
    Write(NodeSnapshot),
    /// Wait until something changes, or for this long.
    Wait(Option<Duration>),
}

/// What is wanted besides the engine's decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Extra {
    remove_condition: bool,
    busy: bool,
}

/// Decides the next step; pure.
#[derive(Debug, Default)]
struct Reconciler {
    /// Nothing is done before the engine's first decision.
    decided: bool,
    /// The wanted taint and condition.
    node_taint: Option<NodeTaint>,
    extra: Extra,
    rules: Vec<RuleId>,
    node: NewestNode,
    /// The Node was last seen in the wanted state.
    in_sync: bool,
    /// When another writer changed it.
    losses: VecDeque<BootTime>,
    /// Another writer keeps changing it; no longer contested if it is unchanged until then.
    contested: Option<BootTime>,
    pauses: Option<ExponentialBackoff>,
    pause_until: BootTime,
    failing: Option<String>,
}

impl Reconciler {
    fn desired(&self) -> Desired<'_> {
        let taint = match &self.node_taint {
            Some(taint) => DesiredTaint::Present(taint),
            None if self.extra.remove_condition => DesiredTaint::Removed,
            None => DesiredTaint::Absent,
        };
        Desired {
            taint,
            busy: self.extra.busy,
        }
    }

    fn matches(&self, node: &NodeSnapshot) -> bool {
        node.matches(self.desired())
    }

    fn set_wanted(&mut self, wanted: &WantedTaint) {
        // Our own change is not a loss.
        let extra = Extra {
            remove_condition: wanted.remove_condition,
            busy: wanted.busy,
        };
        self.in_sync &= self.extra == extra;
        self.extra = extra;
        let (effect, rules) = match &wanted.scheduling {
            Scheduling::Unchanged => return,
            Scheduling::Enabled => (None, &[][..]),
            Scheduling::Disabled { effect, rules } => (Some(*effect), &rules[..]),
        };
        self.decided = true;
        let before = self.node_taint.as_ref().map(|taint| taint.effect);
        // The message stays the one from the start: a changed value alone is no reason to write.
        if before == effect && self.rules == rules {
            return;
        }
        self.rules = rules.to_vec();
        self.node_taint = effect.map(|effect| NodeTaint {
            effect,
            reason: rules.first().map_or_else(String::new, ToString::to_string),
            message: wanted.message.clone(),
        });
        self.in_sync = false;
        if before != effect {
            self.losses.clear();
            self.reset_backoff();
        }
    }

    fn observe(&mut self, now: BootTime, seen: &WatchedNode) {
        let is_newer = self.node.observe(seen);
        let node = self.node.get();
        if is_newer && self.in_sync && !node.is_some_and(|node| self.matches(node)) {
            self.losses.push_back(now);
            self.in_sync = false;
        }
    }

    fn step(&mut self, now: BootTime) -> Step {
        let Some(node) = self.node.get().filter(|_| self.decided) else {
            return Step::Wait(None);
        };
        if self.matches(node) {
            return self.in_sync_step(now);
        }
        let write = Step::Write(node.clone());
        self.check_losses(now);
        let left = self.pause_until.since(now);
        if left.is_zero() {
            write
        } else {
            Step::Wait(Some(left))
        }
    }

    /// The Node is in the wanted state.
    fn in_sync_step(&mut self, now: BootTime) -> Step {
        self.in_sync = true;
        self.failing = None;
        let left = self.contested.map(|until| until.since(now));
        let left = left.filter(|left| !left.is_zero());
        if left.is_none() {
            self.reset_backoff();
        }
        Step::Wait(left)
    }

    fn reset_backoff(&mut self) {
        self.contested = None;
        self.pauses = None;
        self.pause_until = BootTime::default();
    }

    /// Once contested, a single further loss is too many.
    fn check_losses(&mut self, now: BootTime) {
        self.losses.retain(|at| now.since(*at) < LOSS_WINDOW);
        let max = self.contested.map_or(MAX_LOSSES, |_| 0);
        if self.losses.len() <= max {
            return;
        }
        self.losses.clear();
        if self.contested.is_none() {
            self.pauses = None;
        }
        self.pause(now, CONTESTED_DELAYS, None);
        self.contested = Some(self.pause_until + LOSS_WINDOW);
    }

    fn pause(
        &mut self,
        now: BootTime,
        (min, max): (Duration, Duration),
        retry_after: Option<Duration>,
    ) {
        let pauses = self.pauses.get_or_insert_with(|| backoff(min, max));
        let pause = pauses.next().unwrap_or(max);
        self.pause_until = now + at_least(retry_after, pause);
    }

    /// Records the result of a write.
    fn written(&mut self, now: BootTime, written: Result<NodeSnapshot, TaintError>) {
        match written {
            Ok(node) => {
                let is_kept = self.matches(&node);
                self.node.written(node);
                if !is_kept {
                    // As if another writer had removed it: an admission webhook did so at once.
                    self.losses.push_back(now);
                }
            }
            Err(error) => {
                let text = error.to_string();
                if self.failing.as_ref() != Some(&text) {
                    tracing::warn!(%error, "failed to update the node's taint");
                }
                self.failing = Some(text);
                self.pause(now, RETRY_DELAYS, error.retry_after());
            }
        }
    }

    fn state(&self) -> TaintState {
        TaintState {
            known: self.node.get().is_some(),
            effect: self.node.get().and_then(NodeSnapshot::effect),
            failing: self.failing.clone(),
            contested: self.contested.is_some(),
        }
    }
}

#[cfg(test)]
mod tests;
