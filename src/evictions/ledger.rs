//! Which evictions count, and whether one more is allowed. Pure.
//!
//! An eviction is reserved before it is posted, and counts from then on: until it is certain
//! that nothing came of it, or else for the budget's window from when the pod was seen ending, and as long as the pod is
//! ending. So in no time of a window's length do more pods begin to end than the budget allows, however late what is
//! allowed is done, and however late it is seen.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::budget::{Budget, Budgets, MAX_EVICTIONS, Scope};
use super::record::{FirstSeen, Record, Recorded};
use crate::engine::time::BootTime;
use crate::ordered;

/// What is allowed has to be done by then: a pod that is looked at later and does not end was not evicted.
pub const RESERVED: Duration = Duration::from_secs(30);
/// A pod that does not come to its end counts no longer than this, or its budget's window.
pub const MAX_ENDING: Duration = Duration::from_mins(10);
/// How often a pod is looked at that is to end, and one that is ending.
const POLL_RESERVED: Duration = Duration::from_secs(2);
const POLL_ENDING: Duration = Duration::from_secs(10);
/// No agent is asked to come back sooner, or later.
const MIN_WAIT: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_mins(5);

/// A pod that is to be evicted, and what its eviction counts for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    /// Its UID.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its node.
    pub node: String,
    /// The node's zone, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Kind and name of its controller, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

impl Victim {
    /// What its eviction counts for.
    pub fn place(&self) -> Place<'_> {
        Place {
            node: &self.node,
            namespace: &self.namespace,
            zone: self.zone.as_deref(),
            owner: self.owner.as_deref(),
        }
    }
}

/// What an eviction counts for. A zone or owner that is not known is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place<'a> {
    /// The node.
    pub node: &'a str,
    /// The namespace.
    pub namespace: &'a str,
    /// The node's zone.
    pub zone: Option<&'a str>,
    /// Kind and name of the pod's controller.
    pub owner: Option<&'a str>,
}

impl Place<'_> {
    fn shares(&self, scope: Scope, other: &Place<'_>) -> bool {
        let same_namespace = self.namespace == other.namespace;
        match scope {
            Scope::Fleet => true,
            Scope::Zone => self.zone.is_some() && self.zone == other.zone,
            Scope::Node => self.node == other.node,
            Scope::Namespace => same_namespace,
            Scope::Owner => self.owner.is_some() && self.owner == other.owner && same_namespace,
        }
    }
}

/// How far an eviction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// It is allowed.
    Reserved,
    /// The pod is ending.
    Ending,
    /// The pod is gone.
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    victim: Victim,
    stage: Stage,
    /// When it was reserved first.
    reserved: BootTime,
    /// When it was reserved last, or else when the pod was first seen ending.
    since: BootTime,
    /// When a look at the pod was begun last.
    looked: BootTime,
}

impl Entry {
    /// How much longer it counts for a budget of this window, as far as that is known; `None`: it does not count.
    fn counts(&self, window: Duration, now: BootTime) -> Option<Duration> {
        let age = now.since(self.since);
        let left = |of: Duration| of.checked_sub(age).filter(|left| !left.is_zero());
        match self.stage {
            Stage::Reserved => Some(RESERVED.saturating_sub(age)),
            Stage::Ending => left(window.max(MAX_ENDING))
                .map(|at_most| left(window).unwrap_or_else(|| POLL_ENDING.min(at_most))),
            Stage::Ended => left(window),
        }
    }
}

/// That an eviction is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// And was not before.
    New,
    /// As it was before: it counts once.
    Again,
}

/// A budget that allows no more now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spent {
    /// Which.
    pub scope: Scope,
    /// How much it is.
    pub budget: Budget,
    /// When it may allow one more.
    pub retry_after: Duration,
}

/// What is to be seen of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// It was not asked to end.
    Running,
    /// It was.
    Ending,
    /// It is no more.
    Gone,
}

/// What became of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The pod was evicted.
    Confirmed,
    /// It was not: a disruption budget forbade it, or whoever asked did not go on.
    Returned,
}

/// All evictions that count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    budgets: Budgets,
    entries: BTreeMap<String, Entry>,
    /// Until then all is as if it were spent.
    shut: BootTime,
}

impl Ledger {
    /// As whoever led before has recorded it. What was allowed but not confirmed may be done any time now; what was
    /// confirmed counts from when this replica first saw that it was, which is later than it happened.
    pub fn resume(budgets: Budgets, record: Record, first_seen: &FirstSeen, now: BootTime) -> Self {
        let entry = |recorded: Recorded| {
            let confirmed = first_seen.confirmed(&recorded).unwrap_or(now);
            let (stage, since) = if recorded.confirmed {
                (Stage::Ending, confirmed)
            } else {
                (Stage::Reserved, now)
            };
            let entry = Entry {
                victim: recorded.victim,
                stage,
                reserved: since,
                since,
                looked: BootTime::default(),
            };
            (entry.victim.uid.clone(), entry)
        };
        let ledger = Self {
            budgets,
            entries: record.evictions.into_iter().map(entry).collect(),
            shut: BootTime::default(),
        };
        if record.shut {
            ledger.shut(now)
        } else {
            ledger
        }
    }

    /// Where it is not known what was allowed: as if it were as much as is ever allowed.
    #[must_use]
    pub fn shut(self, now: BootTime) -> Self {
        Self {
            shut: now + self.budgets.longest().max(RESERVED),
            ..self
        }
    }

    /// What the next one to lead has to know.
    pub fn record(&self, epoch: u64, now: BootTime) -> Record {
        let recorded = |entry: &Entry| Recorded {
            victim: entry.victim.clone(),
            confirmed: entry.stage != Stage::Reserved,
        };
        Record {
            epoch,
            shut: !self.shut.since(now).is_zero(),
            evictions: self.entries.values().map(recorded).collect(),
        }
    }

    /// Whether this pod's eviction is allowed already.
    pub fn knows(&self, uid: &str) -> bool {
        self.entries.contains_key(uid)
    }

    /// The broadest budget that does not allow one more there.
    pub fn spent(&self, place: &Place<'_>, now: BootTime) -> Option<Spent> {
        let shut = self.shut.since(now);
        if !shut.is_zero() || self.entries.len() >= usize::from(MAX_EVICTIONS) {
            return Some(self.full(shut.max(POLL_ENDING)));
        }
        let of = |scope| self.spent_of(scope, place, now);
        Scope::ALL.into_iter().find_map(of)
    }

    fn spent_of(&self, scope: Scope, place: &Place<'_>, now: BootTime) -> Option<Spent> {
        let budget = self.budgets.of(scope);
        let sharing = self.entries.values();
        let sharing = sharing.filter(|entry| place.shares(scope, &entry.victim.place()));
        let counting = sharing.filter_map(|entry| entry.counts(budget.window, now));
        let mut left: Vec<Duration> = counting.collect();
        let too_many = left.len().checked_sub(budget.evictions.into())?;
        ordered::sort(&mut left);
        // A budget of none has no such time.
        let wait = left.get(too_many).copied().unwrap_or(MAX_WAIT);
        Some(Spent {
            scope,
            budget,
            retry_after: wait.clamp(MIN_WAIT, MAX_WAIT),
        })
    }

    /// More are not remembered, whatever the budgets are.
    fn full(&self, wait: Duration) -> Spent {
        Spent {
            scope: Scope::Fleet,
            budget: self.budgets.fleet,
            retry_after: wait.min(MAX_WAIT),
        }
    }

    /// Allows an eviction, if all budgets do. Asked again it is the same one, and may be done for another [`RESERVED`].
    ///
    /// # Errors
    /// A budget is spent.
    pub fn ask(&mut self, victim: Victim, now: BootTime) -> Result<Granted, Spent> {
        if let Some(known) = self.entries.get_mut(&victim.uid) {
            if known.stage == Stage::Reserved {
                known.since = now;
            }
            return Ok(Granted::Again);
        }
        if let Some(spent) = self.spent(&victim.place(), now) {
            return Err(spent);
        }
        let entry = Entry {
            stage: Stage::Reserved,
            reserved: now,
            since: now,
            looked: now,
            victim,
        };
        self.entries.insert(entry.victim.uid.clone(), entry);
        Ok(Granted::New)
    }

    /// The pods to look at now, `max` of them: first those that were not looked at for longest.
    pub fn due(&mut self, now: BootTime, max: usize) -> Vec<Victim> {
        let is_due = |entry: &&mut Entry| {
            let pause = match entry.stage {
                Stage::Reserved => POLL_RESERVED,
                Stage::Ending => POLL_ENDING,
                Stage::Ended => return false,
            };
            now.since(entry.looked) >= pause
        };
        let mut due: Vec<&mut Entry> = self.entries.values_mut().filter(is_due).collect();
        ordered::sort_by(&mut due, |a, b| a.looked.cmp(&b.looked));
        let take = |entry: &mut Entry| {
            entry.looked = now;
            entry.victim.clone()
        };
        due.into_iter().take(max).map(take).collect()
    }

    /// Takes in a look at a pod that was begun then.
    pub fn look(
        &mut self,
        uid: &str,
        seen: Seen,
        begun: BootTime,
        now: BootTime,
    ) -> Option<Settled> {
        let entry = self.entries.get_mut(uid)?;
        match (entry.stage, seen) {
            (Stage::Reserved, Seen::Running) => {
                if begun.since(entry.since) < RESERVED {
                    return None;
                }
                self.entries.remove(uid);
                Some(Settled::Returned)
            }
            (Stage::Reserved, Seen::Ending | Seen::Gone) => {
                entry.since = now;
                entry.stage = Stage::Ending;
                if seen == Seen::Gone {
                    entry.stage = Stage::Ended;
                }
                Some(Settled::Confirmed)
            }
            (Stage::Ending, Seen::Gone) => {
                entry.stage = Stage::Ended;
                None
            }
            _ => None,
        }
    }

    /// Whether another pod of the node may still be evicted: it is reserved, and nothing is known of it yet.
    pub fn is_unsettled(&self, node: &str, uid: &str) -> bool {
        let mut others = self.entries.values().filter(|it| it.victim.uid != uid);
        others.any(|it| it.stage == Stage::Reserved && it.victim.node == node)
    }

    /// The reservation is on record only now: its Eviction follows.
    pub fn renew(&mut self, uid: &str, now: BootTime) {
        let reserved = self.entries.get_mut(uid);
        if let Some(entry) = reserved.filter(|entry| entry.stage == Stage::Reserved) {
            entry.since = now;
        }
    }

    /// The API server has refused a pod that was reserved before: that may still be carried out, for no longer than without
    /// this request.
    pub fn refused_again(&mut self, uid: &str) {
        let reserved = self.entries.get_mut(uid);
        if let Some(entry) = reserved.filter(|entry| entry.stage == Stage::Reserved) {
            entry.since = entry.reserved;
        }
    }

    /// Takes in what the API server answered to the Eviction of a reserved pod; whether it was still reserved.
    pub fn settle(&mut self, uid: &str, settled: Settled, now: BootTime) -> bool {
        let Some(entry) = self.entries.get_mut(uid) else {
            return false;
        };
        if entry.stage != Stage::Reserved {
            return false;
        }
        match settled {
            Settled::Confirmed => (entry.stage, entry.since) = (Stage::Ending, now),
            Settled::Returned => drop(self.entries.remove(uid)),
        }
        true
    }

    /// Forgets what counts for no budget any more.
    pub fn forget(&mut self, now: BootTime) {
        let longest = self.budgets.longest();
        self.entries
            .retain(|_, entry| entry.counts(longest, now).is_some());
    }

    /// How many evictions are at each stage.
    pub fn stages(&self) -> [(Stage, usize); 3] {
        [Stage::Reserved, Stage::Ending, Stage::Ended].map(|stage| {
            let at = self.entries.values().filter(|entry| entry.stage == stage);
            (stage, at.count())
        })
    }

    /// How many evictions count for the fleet's budget.
    pub fn fleet(&self, now: BootTime) -> usize {
        let window = self.budgets.fleet.window;
        let counting = self.entries.values();
        let counting = counting.filter(|entry| entry.counts(window, now).is_some());
        counting.count()
    }
}

#[cfg(test)]
mod tests;
