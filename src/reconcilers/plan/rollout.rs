//! The rollout of one tightening edit: to a few canary nodes first, and to the others if it does no harm there. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use crate::crd::node_watermark::Hash;
use crate::engine::policy::PolicySet;
use crate::engine::time::BootTime;

/// Minimum time for which canaries are watched.
const MIN_WATCH: Duration = Duration::from_mins(1);
/// The edit stops when more than this part of the canaries newly acts.
const MAX_ACTING_PERCENT: usize = 20;
/// Another canary is added when the agent of one has not confirmed the edit for this long. Agents report within 10 s.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(30);
/// How often more canaries are searched while too few nodes can be one.
const SEARCH_INTERVAL: Duration = Duration::from_secs(5);
/// Unresponsive canaries are replaced by up to as many again, and at least this many. More would spread an untested edit.
const MIN_SPARE: usize = 3;
/// The remaining watch time is reported in steps of this many seconds, and of minutes above the limit below.
const STEP_SECONDS: u64 = 10;
const MINUTE_STEPS_ABOVE: Duration = Duration::from_mins(5);

/// The rollout of one object's edit.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollout {
    /// The nodes whose content it changes, ordered by a hash of their names, so that objects edited together share canaries.
    members: Vec<String>,
    /// Members on which nothing of the object was in force before. They have canaries of their own, since success on the others
    /// proves nothing for them.
    new_members: HashSet<String>,
    /// The index of each member.
    positions: HashMap<String, usize>,
    /// The nodes that get the edit first.
    canaries: BTreeSet<String>,
    /// Canaries that already acted for the object before the edit.
    acting_before: BTreeSet<String>,
    /// Nodes that had the edit at the start and acted: it is unknown whether they did so before the edit.
    excluded: BTreeSet<String>,
    /// The object's policies before the edit.
    before: PolicySet,
    watch: Duration,
    /// The remaining watch time, in steps.
    remaining: Duration,
    phase: RolloutPhase,
}

/// One number for members with an earlier version of the object in force, one for new members.
pub type Counts = [usize; 2];

/// The phase of a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RolloutPhase {
    /// Waits until the canaries' agents confirm that they enforce the edit.
    Canaries {
        /// When canaries were last searched.
        searched: Option<BootTime>,
        /// Number of members none of which can be a canary; 0: canaries are about to confirm.
        stuck: usize,
    },
    /// The canaries enforce the edit and are watched.
    Watching {
        /// When the last canary confirmed it.
        since: BootTime,
        /// The number of canaries.
        canaries: Counts,
    },
    /// The edit goes to the other nodes at a limited rate.
    Progressing {
        /// When that started; `None`: starts with the next call.
        since: Option<BootTime>,
        /// Members released at that time.
        base: usize,
        /// The first `released` members may have it, and the canaries.
        released: usize,
    },
    /// Too many canaries act: the edit goes no further.
    Stopped {
        /// Canaries that newly act; 0: an earlier leader counted them.
        acting: usize,
    },
    /// Every node may have it.
    Done,
}

/// What is known of one node during a rollout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeObservation {
    /// It is Ready, and its agent reports.
    pub reporting: bool,
    /// Its agent enforces all that was released to the node.
    pub up_to_date: bool,
    /// It acts for the object.
    pub acting: bool,
}

impl RolloutPhase {
    const fn canaries(searched: Option<BootTime>, stuck: usize) -> Self {
        Self::Canaries { searched, stuck }
    }
}

impl Rollout {
    /// Starts to roll out an edit to the nodes whose content it changes (true: nothing of the object was in force there). `slowest`
    /// is the longest threshold x period of the object's rules; `before` are the object's policies before the edit.
    pub fn new(nodes: BTreeMap<String, bool>, slowest: Duration, before: PolicySet) -> Self {
        let new_members = nodes.iter().filter(|(_, new)| **new);
        let new_members = new_members.map(|(node, _)| node.clone());
        let new_members = if_several_of_each(nodes.len(), new_members.collect());
        let mut members: Vec<String> = nodes.into_keys().collect();
        members.sort_by_cached_key(Hash::of);
        // With one node there are no others to protect.
        let phase = if members.len() <= 1 {
            RolloutPhase::Done
        } else {
            RolloutPhase::canaries(None, 0)
        };
        let positions = members.iter().cloned().zip(0..).collect();
        let watch = MIN_WATCH.max(slowest.saturating_mul(2));
        Self {
            members,
            new_members,
            positions,
            canaries: BTreeSet::new(),
            acting_before: BTreeSet::new(),
            excluded: BTreeSet::new(),
            before,
            watch,
            remaining: watch,
            phase,
        }
    }

    /// Chooses the first canaries. Nodes that already have the edit and act cannot be canaries.
    pub fn start(
        &mut self,
        has_it: impl Fn(&str) -> bool,
        observe: impl Fn(&str) -> NodeObservation,
    ) {
        let excluded = self
            .members
            .iter()
            .filter(|node| observe(node).acting && has_it(node));
        self.excluded = excluded.cloned().collect();
        self.choose(self.wanted(), &observe);
        self.phase = RolloutPhase::canaries(None, self.without(self.count(|_| true)));
    }

    /// An earlier leader stopped the edit, and the object was not edited since: it stays on the nodes that have it.
    pub fn stop(&mut self, has_it: impl Fn(&str) -> bool) {
        let canaries = self.members.iter().filter(|node| has_it(node));
        self.canaries = canaries.cloned().collect();
        self.phase = RolloutPhase::Stopped { acting: 0 };
    }

    /// Continues after a time without observations: the canaries are watched again.
    pub const fn resume(&mut self) {
        match self.phase {
            RolloutPhase::Watching { .. } => self.phase = RolloutPhase::canaries(None, 0),
            RolloutPhase::Progressing { released, .. } => {
                self.phase = RolloutPhase::Progressing {
                    since: None,
                    base: released,
                    released,
                };
            }
            _ => {}
        }
    }

    /// Removes a node. Returns whether the rollout has to start again with the nodes of now: with at most one member there could be
    /// no canary, and nodes that join later would wait forever.
    pub fn remove_node(&mut self, node: &str) -> bool {
        let Some(position) = self.positions.remove(node) else {
            return false;
        };
        self.members.remove(position);
        self.new_members.remove(node);
        self.new_members =
            if_several_of_each(self.members.len(), std::mem::take(&mut self.new_members));
        for later in self
            .positions
            .values_mut()
            .filter(|later| **later > position)
        {
            *later -= 1;
        }
        for set in [
            &mut self.canaries,
            &mut self.acting_before,
            &mut self.excluded,
        ] {
            set.remove(node);
        }
        if let RolloutPhase::Progressing { base, released, .. } = &mut self.phase
            && position < *released
        {
            *released -= 1;
            *base = base.saturating_sub(1);
        }
        self.members.len() <= 1 && !matches!(self.phase, RolloutPhase::Stopped { .. })
    }

    /// The number of members of each kind.
    fn sizes(&self) -> Counts {
        let new = self.new_members.len();
        [self.members.len().saturating_sub(new), new]
    }

    /// The number of canaries wanted: 1 % of the members, at least one of each kind.
    fn wanted(&self) -> Counts {
        self.sizes().map(|size| size.div_ceil(100))
    }

    /// The number of canaries that match.
    fn count(&self, matches: impl Fn(&str) -> bool) -> Counts {
        let counted = self.canaries.iter().filter(|node| matches(node));
        let (new, old): (Vec<_>, Vec<_>) =
            counted.partition(|node| self.new_members.contains(*node));
        [old.len(), new.len()]
    }

    /// The number of members of the kinds without any of these canaries.
    fn without(&self, canaries: Counts) -> usize {
        let kinds = self.sizes().into_iter().zip(canaries);
        kinds
            .filter(|(_, canaries)| *canaries == 0)
            .map(|(size, _)| size)
            .sum()
    }

    /// The nodes that get the edit first.
    pub const fn canaries(&self) -> &BTreeSet<String> {
        &self.canaries
    }

    /// The number of nodes that the edit changes.
    pub const fn size(&self) -> usize {
        self.members.len()
    }

    /// The current phase.
    pub const fn phase(&self) -> RolloutPhase {
        self.phase
    }

    /// How long the canaries will still be watched, counted from their confirmation; `None`: they are not waited for.
    pub const fn remaining(&self) -> Option<Duration> {
        match self.phase {
            RolloutPhase::Canaries { stuck: 0, .. } | RolloutPhase::Watching { .. } => {
                Some(self.remaining)
            }
            _ => None,
        }
    }

    /// The object's policies before the edit.
    pub const fn before(&self) -> &PolicySet {
        &self.before
    }

    /// Whether a node may have the edit. A node that joined later waits for the canaries too.
    pub fn releases(&self, node: &str) -> bool {
        match self.phase {
            RolloutPhase::Done => true,
            RolloutPhase::Progressing { released, .. } => {
                let position = self.positions.get(node);
                position.is_none_or(|position| *position < released) || self.canaries.contains(node)
            }
            _ => self.canaries.contains(node),
        }
    }

    /// Advances with the current observations. Returns the nodes that may have the edit from now on.
    pub fn advance(
        &mut self,
        now: BootTime,
        rate: f64,
        observe: impl Fn(&str) -> NodeObservation,
    ) -> Vec<String> {
        let released = match self.phase {
            RolloutPhase::Canaries { searched, .. } => self.await_canaries(now, searched, observe),
            RolloutPhase::Watching { since, canaries } => self.watch(now, since, canaries, observe),
            RolloutPhase::Progressing {
                since,
                base,
                released,
            } => self.release(now, since.unwrap_or(now), [base, released], rate),
            _ => Vec::new(),
        };
        self.remaining = match self.phase {
            RolloutPhase::Watching { since, .. } => {
                in_steps(self.watch.saturating_sub(now.since(since)))
            }
            _ => self.watch,
        };
        released
    }

    /// Waits until enough canaries enforce the edit, and adds canaries where agents don't confirm it.
    fn await_canaries(
        &mut self,
        now: BootTime,
        searched: Option<BootTime>,
        observe: impl Fn(&str) -> NodeObservation,
    ) -> Vec<String> {
        let confirmed = self.count(|node| observe(node).reporting && observe(node).up_to_date);
        let missing = difference(self.wanted(), confirmed);
        let watching = RolloutPhase::Watching {
            since: now,
            canaries: confirmed,
        };
        if missing == Counts::default() {
            self.phase = watching;
            return Vec::new();
        }
        let chosen = self.count(|_| true);
        let untried = self.without(chosen);
        let Some(searched) = searched else {
            self.phase = RolloutPhase::canaries(Some(now), untried);
            return Vec::new();
        };
        let pause = if untried > 0 {
            SEARCH_INTERVAL
        } else {
            CONFIRM_TIMEOUT
        };
        if now.since(searched) < pause {
            return Vec::new();
        }
        let max = self.wanted().map(|wanted| wanted + wanted.max(MIN_SPARE));
        let [room, room_for_new] = difference(max, chosen);
        let [missing, missing_new] = missing;
        let more = self.choose([missing.min(room), missing_new.min(room_for_new)], &observe);
        let unproven = self.without(confirmed);
        // Fewer canaries than wanted are better than none.
        self.phase = if more.is_empty() && unproven == 0 {
            watching
        } else {
            let stuck = if more.is_empty() { unproven } else { 0 };
            RolloutPhase::canaries(Some(now), stuck)
        };
        more
    }

    /// Adds canaries of each kind.
    fn choose(
        &mut self,
        [more, more_new]: Counts,
        observe: &impl Fn(&str) -> NodeObservation,
    ) -> Vec<String> {
        let mut chosen = self.choose_among(false, more, observe);
        chosen.extend(self.choose_among(true, more_new, observe));
        chosen
    }

    /// Takes members whose agents report, in order; those that don't act yet first, since the edit can't make the others act.
    fn choose_among(
        &mut self,
        new: bool,
        more: usize,
        observe: &impl Fn(&str) -> NodeObservation,
    ) -> Vec<String> {
        let [mut idle, mut acting] = [Vec::new(), Vec::new()];
        let of_kind = |node: &&String| self.new_members.contains(*node) == new;
        for node in self.members.iter().filter(of_kind) {
            if idle.len() >= more {
                break;
            }
            let node_state = observe(node);
            if !node_state.reporting || self.canaries.contains(node) || self.excluded.contains(node)
            {
                continue;
            }
            let list = if node_state.acting {
                &mut acting
            } else {
                &mut idle
            };
            list.push(node.clone());
        }
        let room = more - idle.len().min(more);
        acting.truncate(room);
        self.acting_before.extend(acting.iter().cloned());
        idle.extend(acting);
        self.canaries.extend(idle.iter().cloned());
        idle
    }

    fn watch(
        &mut self,
        now: BootTime,
        since: BootTime,
        canaries: Counts,
        observe: impl Fn(&str) -> NodeObservation,
    ) -> Vec<String> {
        let reporting = self.count(|node| observe(node).reporting);
        let acting = self.count(|node| {
            let node_state = observe(node);
            node_state.reporting && node_state.acting && !self.acting_before.contains(node)
        });
        let mut kinds = acting.into_iter().zip(reporting);
        let too_many = |(acting, reporting)| acting * 100 > reporting * MAX_ACTING_PERCENT;
        let mut remaining = reporting.into_iter().zip(canaries);
        if kinds.any(too_many) {
            let acting = acting.into_iter().sum();
            self.phase = RolloutPhase::Stopped { acting };
        } else if remaining.any(|(reporting, canaries)| reporting * 2 < canaries) {
            // Too few are left to prove anything.
            self.phase = RolloutPhase::canaries(Some(now), 0);
        } else if now.since(since) >= self.watch {
            let released = self.canaries.len();
            self.phase = RolloutPhase::Progressing {
                since: Some(now),
                base: released,
                released,
            };
            return self.members[..released].to_vec();
        }
        Vec::new()
    }

    fn release(
        &mut self,
        now: BootTime,
        since: BootTime,
        [base, had]: [usize; 2],
        rate: f64,
    ) -> Vec<String> {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a number of nodes; `as` saturates"
        )]
        let more = (now.since(since).as_secs_f64() * rate) as usize;
        let released = base.saturating_add(more).min(self.members.len());
        self.phase = if released == self.members.len() {
            RolloutPhase::Done
        } else {
            RolloutPhase::Progressing {
                since: Some(since),
                base,
                released,
            }
        };
        self.members[had.min(released)..released].to_vec()
    }
}

/// A kind with a single node needs no canary of its own: that would be the node itself, and must not block the others while it is
/// unavailable.
fn if_several_of_each(members: usize, new_members: HashSet<String>) -> HashSet<String> {
    let split = new_members.len() > 1 && members - new_members.len() > 1;
    if split { new_members } else { HashSet::new() }
}

/// Rounds up to a step, so that the status that shows it changes only once per step.
fn in_steps(time: Duration) -> Duration {
    let step = if time > MINUTE_STEPS_ABOVE {
        60
    } else {
        STEP_SECONDS
    };
    Duration::from_secs(time.as_secs().div_ceil(step) * step)
}

/// `of - there`, by kind.
fn difference(of: Counts, there: Counts) -> Counts {
    let ([of, of_new], [there, there_new]) = (of, there);
    [of.saturating_sub(there), of_new.saturating_sub(there_new)]
}
