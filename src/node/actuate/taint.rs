//! Keeps new pods away from the node, or welcomes them, as the engine says: a task that brings the Node to the level
//! that is wanted and holds it there.

use std::collections::VecDeque;
use std::time::Duration;

use backon::ExponentialBackoff;
use kube::Client;
use tokio::sync::watch;

use crate::cluster::backoff::{at_least, backoff, rest};
use crate::cluster::taint::{self, Bearing, Mark, Marked, TaintError};
use crate::engine::plan::Scheduling;
use crate::engine::policy::{RuleId, TaintEffect};
use crate::engine::time::BootTime;
use crate::node::clock;

/// Pauses after a write that came to nothing.
const FAILED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Pauses after our taint was taken off too often.
const CONTESTED: (Duration, Duration) = (Duration::from_secs(30), Duration::from_mins(5));
/// It may be taken off so often in [`WINDOW`] before we leave it off for a while.
const MOST_LOSSES: usize = 3;
const WINDOW: Duration = Duration::from_mins(1);

/// What has to stand on the Node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wanted {
    /// The engine's word. [`Scheduling::Hold`] leaves the Node as it is.
    pub scheduling: Scheduling,
    /// Value and mark of the rules, in words, as they were when the engine began to say so.
    pub message: String,
    /// Where nothing has to stand there, nothing has to tell that something did.
    pub no_trace: bool,
}

/// The Node as a watch shows it.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    /// Our marks on it; `None`: there is no such Node, or none was seen yet.
    pub node: Option<Marked>,
    /// In how many full lists it was until now.
    pub lists: u64,
}

/// What stands there, as far as we know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// The Node has been seen.
    pub known: bool,
    /// The effect of our taint on the Node; `None` where there is none.
    pub effect: Option<TaintEffect>,
    /// Why the Node is not as it has to be; `None` where nothing went wrong.
    pub failing: Option<String>,
    /// Somebody keeps taking our taint off.
    pub contested: bool,
}

/// Runs until the sender of `wanted` is gone, and leaves the Node as it is then. `node` is the Node as a watch sees
/// it; `standing` tells what became of it.
pub async fn run(
    client: Client,
    mut wanted: watch::Receiver<Wanted>,
    mut node: watch::Receiver<Watched>,
    standing: watch::Sender<Standing>,
) {
    let mut keeper = Keeper::default();
    loop {
        let now = clock::boot_time();
        keeper.want(&wanted.borrow_and_update());
        keeper.look(now, &node.borrow_and_update());
        let step = keeper.step(now);
        publish(&standing, keeper.standing());
        let pause = match step {
            Step::Keep(seen) => {
                let kept = taint::keep(&client, seen, keeper.bearing()).await;
                keeper.kept(clock::boot_time(), kept);
                continue;
            }
            Step::Rest(pause) => pause,
        };
        tokio::select! {
            changed = wanted.changed() => if changed.is_err() { return },
            changed = node.changed() => if changed.is_err() { return },
            () = rest(pause) => {}
        }
    }
}

fn publish(standing: &watch::Sender<Standing>, now: Standing) {
    standing.send_if_modified(|before| {
        let changed = *before != now;
        *before = now;
        changed
    });
}

/// What to do next.
#[derive(Debug, PartialEq)]
enum Step {
    /// Write: this Node is not as it has to be.
    Keep(Marked),
    /// Nothing, until something changes, or so much time has passed.
    Rest(Option<Duration>),
}

/// Decides; pure.
#[derive(Debug, Default)]
struct Keeper {
    /// Nothing is done before the engine's first word.
    told: bool,
    /// What the Node has to bear.
    mark: Option<Mark>,
    no_trace: bool,
    rules: Vec<RuleId>,
    /// The Node as it was last seen, or as our last write left it.
    node: Option<Marked>,
    /// In how many full lists it was then.
    lists: u64,
    /// It bore what it has to.
    held: bool,
    /// When it was found not to any more.
    losses: VecDeque<BootTime>,
    /// Somebody keeps undoing it; that is over when it holds until then.
    contested: Option<BootTime>,
    pauses: Option<ExponentialBackoff>,
    pause_until: BootTime,
    failing: Option<String>,
}

impl Keeper {
    fn bearing(&self) -> Bearing<'_> {
        match &self.mark {
            Some(mark) => Bearing::Mark(mark),
            None if self.no_trace => Bearing::NoTrace,
            None => Bearing::Nothing,
        }
    }

    fn bears(&self, node: &Marked) -> bool {
        node.bears(self.bearing())
    }

    fn want(&mut self, wanted: &Wanted) {
        // Nobody has taken anything from us that we want no more.
        self.held &= self.no_trace == wanted.no_trace;
        self.no_trace = wanted.no_trace;
        let (effect, rules) = match &wanted.scheduling {
            Scheduling::Hold => return,
            Scheduling::Enabled => (None, &[][..]),
            Scheduling::Disabled { effect, rules } => (Some(*effect), &rules[..]),
        };
        self.told = true;
        let before = self.mark.as_ref().map(|mark| mark.effect);
        // The words stay those from when it began: a value that moves is no reason to write.
        if before == effect && self.rules == rules {
            return;
        }
        self.rules = rules.to_vec();
        self.mark = effect.map(|effect| Mark {
            effect,
            reason: rules.first().map_or_else(String::new, ToString::to_string),
            message: wanted.message.clone(),
        });
        self.held = false;
        if before != effect {
            self.losses.clear();
            self.calm();
        }
    }

    /// What is in a new list is taken, however old: versions begin anew where an API server is put back from a backup.
    fn look(&mut self, now: BootTime, seen: &Watched) {
        if seen.lists != self.lists {
            self.lists = seen.lists;
            self.node = None;
        }
        self.see(now, seen.node.as_ref());
    }

    /// Takes in what the watch sees, which may lag behind our own last write.
    fn see(&mut self, now: BootTime, node: Option<&Marked>) {
        let is_old = match (node, &self.node) {
            (Some(node), Some(known)) => !node.is_newer_than(known),
            _ => false,
        };
        if is_old {
            return;
        }
        self.node = node.cloned();
        if self.held && !self.node.as_ref().is_some_and(|node| self.bears(node)) {
            self.losses.push_back(now);
            self.held = false;
        }
    }

    fn step(&mut self, now: BootTime) -> Step {
        let Some(node) = self.node.as_ref().filter(|_| self.told) else {
            return Step::Rest(None);
        };
        if self.bears(node) {
            return self.rest(now);
        }
        let keep = Step::Keep(node.clone());
        self.judge(now);
        let left = self.pause_until.since(now);
        if left.is_zero() {
            keep
        } else {
            Step::Rest(Some(left))
        }
    }

    /// All is as it has to be.
    fn rest(&mut self, now: BootTime) -> Step {
        self.held = true;
        self.failing = None;
        let left = self.contested.map(|until| until.since(now));
        let left = left.filter(|left| !left.is_zero());
        if left.is_none() {
            self.calm();
        }
        Step::Rest(left)
    }

    fn calm(&mut self) {
        self.contested = None;
        self.pauses = None;
        self.pause_until = BootTime::default();
    }

    /// Once contested, each further loss is one too many.
    fn judge(&mut self, now: BootTime) {
        self.losses.retain(|at| now.since(*at) < WINDOW);
        let most = self.contested.map_or(MOST_LOSSES, |_| 0);
        if self.losses.len() <= most {
            return;
        }
        self.losses.clear();
        if self.contested.is_none() {
            self.pauses = None;
        }
        self.pause(now, CONTESTED, None);
        self.contested = Some(self.pause_until + WINDOW);
    }

    fn pause(
        &mut self,
        now: BootTime,
        (least, most): (Duration, Duration),
        asked: Option<Duration>,
    ) {
        let pauses = self.pauses.get_or_insert_with(|| backoff(least, most));
        let pause = pauses.next().unwrap_or(most);
        self.pause_until = now + at_least(asked, pause);
    }

    /// A write came to its end.
    fn kept(&mut self, now: BootTime, kept: Result<Marked, TaintError>) {
        match kept {
            Ok(node) => self.node = Some(node),
            Err(error) => {
                let text = error.to_string();
                if self.failing.as_ref() != Some(&text) {
                    tracing::warn!(%error, "failed to keep the node's taint");
                }
                self.failing = Some(text);
                self.pause(now, FAILED, error.retry_after());
            }
        }
    }

    fn standing(&self) -> Standing {
        Standing {
            known: self.node.is_some(),
            effect: self.node.as_ref().and_then(Marked::effect),
            failing: self.failing.clone(),
            contested: self.contested.is_some(),
        }
    }
}

#[cfg(test)]
mod tests;
