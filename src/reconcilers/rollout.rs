//! A tightening edit goes to a few nodes first, and to the others when it does no harm there. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use crate::crd::node_watermark::Hash;
use crate::engine::policy::PolicySet;
use crate::engine::time::BootTime;

/// The canaries are watched at least for so long.
const LEAST_WATCH: Duration = Duration::from_mins(1);
/// More of them than this newly acting stops the edit.
const MOST_ACTING_PERCENT: usize = 20;
/// A canary whose agent has not said for so long that it keeps the edit is joined by another. Agents tell within 10 s.
const PATIENCE: Duration = Duration::from_secs(30);
/// Where there are too few nodes that could try the edit, it is looked for some so often.
const LOOK: Duration = Duration::from_secs(5);
/// Canaries that are silent are replaced by as many again, and at least by so many: more would spread an edit that
/// nobody has seen at work.
const LEAST_SPARE: usize = 3;
/// How long the canaries are still watched is reported in steps of so many seconds, and of a minute where it is longer than this.
const STEP: u64 = 10;
const LONG_WATCH: Duration = Duration::from_mins(5);

/// How far an edit of one object has come.
#[derive(Clone, Debug, PartialEq)]
pub struct Rollout {
    /// The nodes whose content it changes, in an order that only their names decide: objects that are edited together
    /// have their canaries in common.
    members: Vec<String>,
    /// Members on which nothing of the object was in force before: they have canaries of their own, since an edit that
    /// does well on the others proves nothing for them.
    newcomers: HashSet<String>,
    /// Where each stands in it.
    places: HashMap<String, usize>,
    /// Those that have the edit first.
    canaries: BTreeSet<String>,
    /// Canaries that acted for the object before the edit.
    acting_before: BTreeSet<String>,
    /// Nodes that had the edit when this began, and acted: whether they did before they had it is not known.
    unclear: BTreeSet<String>,
    /// What the object amounted to before the edit.
    before: PolicySet,
    watch: Duration,
    /// The canaries are still watched for so long, in steps.
    left: Duration,
    phase: Phase,
}

/// One number for members that had an earlier version of the object in force, one for the newcomers.
pub type Counts = [usize; 2];

/// What the edit waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// For agents of canaries to say that they keep it.
    Canaries {
        /// When it was last looked for canaries.
        looked: Option<BootTime>,
        /// So many members are waited for of which none can try it; 0: canaries are about to.
        stuck: usize,
    },
    /// For the time to pass in which the canaries are watched.
    Watching {
        /// When the last canary kept it.
        since: BootTime,
        /// How many these are.
        canaries: Counts,
    },
    /// It goes to the others, so many a second.
    Others {
        /// When that began; `None`: with the next look.
        since: Option<BootTime>,
        /// Nodes that had been released then.
        base: usize,
        /// Those that come first of all nodes, so many, may have it; canaries too.
        released: usize,
    },
    /// Too many canaries act: it goes no further.
    Stopped {
        /// Canaries that newly act; 0: an earlier leader has counted them.
        acting: usize,
    },
    /// Every node may have it.
    Done,
}

/// What is seen of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    /// It is Ready, and its agent tells what it does.
    pub speaks: bool,
    /// Its agent keeps all that the node may have.
    pub keeps: bool,
    /// It acts for the object.
    pub acts: bool,
}

impl Phase {
    const fn canaries(looked: Option<BootTime>, stuck: usize) -> Self {
        Self::Canaries { looked, stuck }
    }
}

impl Rollout {
    /// Begins to roll an edit out to the nodes whose content it changes; true for those on which nothing of the object was
    /// in force. `slowest` is the longest threshold x period of the object's rules; `before` is what the object amounted to
    /// until now.
    pub fn new(nodes: BTreeMap<String, bool>, slowest: Duration, before: PolicySet) -> Self {
        let newcomers = nodes.iter().filter(|(_, new)| **new);
        let newcomers = newcomers.map(|(node, _)| node.clone());
        let newcomers = several_of_each(nodes.len(), newcomers.collect());
        let mut members: Vec<String> = nodes.into_keys().collect();
        members.sort_by_cached_key(Hash::of);
        // With nobody left to protect there is nothing to wait for.
        let phase = if members.len() <= 1 {
            Phase::Done
        } else {
            Phase::canaries(None, 0)
        };
        let places = members.iter().cloned().zip(0..).collect();
        let watch = LEAST_WATCH.max(slowest.saturating_mul(2));
        Self {
            members,
            newcomers,
            places,
            canaries: BTreeSet::new(),
            acting_before: BTreeSet::new(),
            unclear: BTreeSet::new(),
            before,
            watch,
            left: watch,
            phase,
        }
    }

    /// Chooses the first canaries, of an edit that is not [`Phase::Done`]. Nodes that have it already, for whatever
    /// reason, and act prove nothing.
    pub fn begin(&mut self, has_it: impl Fn(&str) -> bool, look: impl Fn(&str) -> Sight) {
        let unclear = self
            .members
            .iter()
            .filter(|node| look(node).acts && has_it(node));
        self.unclear = unclear.cloned().collect();
        self.choose(self.wanted(), &look);
        self.phase = Phase::canaries(None, self.without(self.count(|_| true)));
    }

    /// It was stopped before this process led, and the object was not edited since: it stays with those that have it.
    pub fn stop(&mut self, has_it: impl Fn(&str) -> bool) {
        let canaries = self.members.iter().filter(|node| has_it(node));
        self.canaries = canaries.cloned().collect();
        self.phase = Phase::Stopped { acting: 0 };
    }

    /// It goes on after a time in which nothing was seen: what that would have shown is watched for anew.
    pub const fn resume(&mut self) {
        match self.phase {
            Phase::Watching { .. } => self.phase = Phase::canaries(None, 0),
            Phase::Others { released, .. } => {
                self.phase = Phase::Others {
                    since: None,
                    base: released,
                    released,
                };
            }
            _ => {}
        }
    }

    /// A node is gone. Says whether the edit has to begin anew, among the nodes that there are now: with one member or
    /// none nobody could try it, and whoever came later would wait for ever.
    pub fn forget(&mut self, node: &str) -> bool {
        let Some(place) = self.places.remove(node) else {
            return false;
        };
        self.members.remove(place);
        self.newcomers.remove(node);
        self.newcomers = several_of_each(self.members.len(), std::mem::take(&mut self.newcomers));
        for later in self.places.values_mut().filter(|later| **later > place) {
            *later -= 1;
        }
        for set in [
            &mut self.canaries,
            &mut self.acting_before,
            &mut self.unclear,
        ] {
            set.remove(node);
        }
        if let Phase::Others { base, released, .. } = &mut self.phase
            && place < *released
        {
            *released -= 1;
            *base = base.saturating_sub(1);
        }
        self.members.len() <= 1 && !matches!(self.phase, Phase::Stopped { .. })
    }

    /// How many members there are of each kind.
    fn sizes(&self) -> Counts {
        let new = self.newcomers.len();
        [self.members.len().saturating_sub(new), new]
    }

    /// So many canaries are asked for: 1 % of the members, at least one of each kind that there is.
    fn wanted(&self) -> Counts {
        self.sizes().map(|size| size.div_ceil(100))
    }

    /// How many canaries this holds of.
    fn count(&self, holds: impl Fn(&str) -> bool) -> Counts {
        let counted = self.canaries.iter().filter(|node| holds(node));
        let (new, old): (Vec<_>, Vec<_>) = counted.partition(|node| self.newcomers.contains(*node));
        [old.len(), new.len()]
    }

    /// How many members there are of the kinds that have none of these canaries.
    fn without(&self, canaries: Counts) -> usize {
        let kinds = self.sizes().into_iter().zip(canaries);
        kinds
            .filter(|(_, canaries)| *canaries == 0)
            .map(|(size, _)| size)
            .sum()
    }

    /// Those that have the edit first.
    pub const fn canaries(&self) -> &BTreeSet<String> {
        &self.canaries
    }

    /// How many nodes it changes something on.
    pub const fn size(&self) -> usize {
        self.members.len()
    }

    /// How far it is.
    pub const fn phase(&self) -> Phase {
        self.phase
    }

    /// For how long the canaries have still to do well, from when they keep the edit; `None`: it does not wait for that.
    pub const fn left(&self) -> Option<Duration> {
        match self.phase {
            Phase::Canaries { stuck: 0, .. } | Phase::Watching { .. } => Some(self.left),
            _ => None,
        }
    }

    /// What the object amounted to before the edit.
    pub const fn before(&self) -> &PolicySet {
        &self.before
    }

    /// Whether a node may have the edit. One that came later waits for the canaries too.
    pub fn releases(&self, node: &str) -> bool {
        match self.phase {
            Phase::Done => true,
            Phase::Others { released, .. } => {
                let place = self.places.get(node);
                place.is_none_or(|place| *place < released) || self.canaries.contains(node)
            }
            _ => self.canaries.contains(node),
        }
    }

    /// Goes on, given what is seen of nodes. Gives those that may have the edit from now on.
    pub fn advance(
        &mut self,
        now: BootTime,
        rate: f64,
        look: impl Fn(&str) -> Sight,
    ) -> Vec<String> {
        let released = match self.phase {
            Phase::Canaries { looked, .. } => self.try_out(now, looked, look),
            Phase::Watching { since, canaries } => self.watch(now, since, canaries, look),
            Phase::Others {
                since,
                base,
                released,
            } => self.release(now, since.unwrap_or(now), [base, released], rate),
            _ => Vec::new(),
        };
        self.left = match self.phase {
            Phase::Watching { since, .. } => in_steps(self.watch.saturating_sub(now.since(since))),
            _ => self.watch,
        };
        released
    }

    /// Waits until enough canaries keep the edit; others join where agents don't say so.
    fn try_out(
        &mut self,
        now: BootTime,
        looked: Option<BootTime>,
        look: impl Fn(&str) -> Sight,
    ) -> Vec<String> {
        let keeping = self.count(|node| look(node).speaks && look(node).keeps);
        let missing = less(self.wanted(), keeping);
        let watching = Phase::Watching {
            since: now,
            canaries: keeping,
        };
        if missing == Counts::default() {
            self.phase = watching;
            return Vec::new();
        }
        let chosen = self.count(|_| true);
        let untried = self.without(chosen);
        let Some(looked) = looked else {
            self.phase = Phase::canaries(Some(now), untried);
            return Vec::new();
        };
        let pause = if untried > 0 { LOOK } else { PATIENCE };
        if now.since(looked) < pause {
            return Vec::new();
        }
        let most = self.wanted().map(|wanted| wanted + wanted.max(LEAST_SPARE));
        let [room, room_for_new] = less(most, chosen);
        let [missing, missing_new] = missing;
        let more = self.choose([missing.min(room), missing_new.min(room_for_new)], &look);
        let unproven = self.without(keeping);
        // Fewer than were asked for are better than none.
        self.phase = if more.is_empty() && unproven == 0 {
            watching
        } else {
            let stuck = if more.is_empty() { unproven } else { 0 };
            Phase::canaries(Some(now), stuck)
        };
        more
    }

    /// Lets more nodes of each kind try the edit.
    fn choose(&mut self, [more, more_new]: Counts, look: &impl Fn(&str) -> Sight) -> Vec<String> {
        let mut chosen = self.choose_among(false, more, look);
        chosen.extend(self.choose_among(true, more_new, look));
        chosen
    }

    /// In their order those that speak, and before all others those that do not act, since the edit can't make the others
    /// act.
    fn choose_among(
        &mut self,
        new: bool,
        more: usize,
        look: &impl Fn(&str) -> Sight,
    ) -> Vec<String> {
        let [mut quiet, mut acting] = [Vec::new(), Vec::new()];
        let of_kind = |node: &&String| self.newcomers.contains(*node) == new;
        for node in self.members.iter().filter(of_kind) {
            if quiet.len() >= more {
                break;
            }
            let sight = look(node);
            if !sight.speaks || self.canaries.contains(node) || self.unclear.contains(node) {
                continue;
            }
            let list = if sight.acts { &mut acting } else { &mut quiet };
            list.push(node.clone());
        }
        let room = more - quiet.len().min(more);
        acting.truncate(room);
        self.acting_before.extend(acting.iter().cloned());
        quiet.extend(acting);
        self.canaries.extend(quiet.iter().cloned());
        quiet
    }

    fn watch(
        &mut self,
        now: BootTime,
        since: BootTime,
        canaries: Counts,
        look: impl Fn(&str) -> Sight,
    ) -> Vec<String> {
        let speaking = self.count(|node| look(node).speaks);
        let acting = self.count(|node| {
            let sight = look(node);
            sight.speaks && sight.acts && !self.acting_before.contains(node)
        });
        let mut kinds = acting.into_iter().zip(speaking);
        let too_many = |(acting, speaking)| acting * 100 > speaking * MOST_ACTING_PERCENT;
        let mut left = speaking.into_iter().zip(canaries);
        if kinds.any(too_many) {
            let acting = acting.into_iter().sum();
            self.phase = Phase::Stopped { acting };
        } else if left.any(|(speaking, canaries)| speaking * 2 < canaries) {
            // What is left of them proves little.
            self.phase = Phase::canaries(Some(now), 0);
        } else if now.since(since) >= self.watch {
            let released = self.canaries.len();
            self.phase = Phase::Others {
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
            Phase::Done
        } else {
            Phase::Others {
                since: Some(since),
                base,
                released,
            }
        };
        self.members[had.min(released)..released].to_vec()
    }
}

/// A single node needs no canary of its own kind: it would be that canary itself. One that is away must not stop the
/// others.
fn several_of_each(members: usize, newcomers: HashSet<String>) -> HashSet<String> {
    let split = newcomers.len() > 1 && members - newcomers.len() > 1;
    if split { newcomers } else { HashSet::new() }
}

/// So long or a little longer: a status that shows it is written once a step.
fn in_steps(time: Duration) -> Duration {
    let step = if time > LONG_WATCH { 60 } else { STEP };
    Duration::from_secs(time.as_secs().div_ceil(step) * step)
}

/// What is missing of each.
fn less(of: Counts, there: Counts) -> Counts {
    let ([of, of_new], [there, there_new]) = (of, there);
    [of.saturating_sub(there), of_new.saturating_sub(there_new)]
}
