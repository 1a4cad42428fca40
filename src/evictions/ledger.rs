//! Which evictions count against the budgets, and whether one more is allowed. Pure.
//!
//! An eviction is reserved before it is posted, and counts from then on: either until it is certain that the pod was
//! not evicted, or for the budget's window after the pod was first seen terminating, and at least while it is
//! terminating. So no window ever sees more pods start to terminate than the budget allows, however late an allowed
//! eviction is carried out or observed.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::budget::{Budget, BudgetScope, Budgets, MAX_EVICTIONS};
use super::record::{EvictionRecord, FirstSeen, Recorded};
use crate::engine::time::BootTime;

/// An allowed eviction must be carried out within this time. If a later poll finds the pod running, it was not
/// evicted.
pub const RESERVATION_TIMEOUT: Duration = Duration::from_secs(30);
/// A pod that never finishes terminating counts for at most this long, or for its budget's window if that is longer.
pub const MAX_TERMINATING: Duration = Duration::from_mins(10);
/// Poll intervals for pods with a reservation, and for terminating pods.
const POLL_RESERVED: Duration = Duration::from_secs(2);
const POLL_ENDING: Duration = Duration::from_secs(10);
/// Bounds of the retry delay given to agents.
const MIN_WAIT: Duration = Duration::from_secs(1);
const MAX_WAIT: Duration = Duration::from_mins(5);

/// A pod to evict, with the attributes that budgets count by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    /// UID of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Node of the pod.
    pub node: String,
    /// Zone of the node, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub zone: Option<String>,
    /// Kind and name of the pod's controller, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
}

impl Victim {
    /// The attributes that its eviction counts for.
    pub fn budget_key(&self) -> BudgetKey<'_> {
        BudgetKey {
            node: &self.node,
            namespace: &self.namespace,
            zone: self.zone.as_deref(),
            owner: self.owner.as_deref(),
        }
    }
}

/// The attributes that an eviction counts for. An unknown zone or owner counts for no budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetKey<'a> {
    /// Node of the pod.
    pub node: &'a str,
    /// Namespace of the pod.
    pub namespace: &'a str,
    /// Zone of the node.
    pub zone: Option<&'a str>,
    /// Kind and name of the pod's controller.
    pub owner: Option<&'a str>,
}

impl BudgetKey<'_> {
    fn shares(&self, scope: BudgetScope, other: &BudgetKey<'_>) -> bool {
        let same_namespace = self.namespace == other.namespace;
        match scope {
            BudgetScope::Fleet => true,
            BudgetScope::Zone => self.zone.is_some() && self.zone == other.zone,
            BudgetScope::Node => self.node == other.node,
            BudgetScope::Namespace => same_namespace,
            BudgetScope::Owner => {
                self.owner.is_some() && self.owner == other.owner && same_namespace
            }
        }
    }
}

/// Progress of an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionStage {
    /// Allowed, not confirmed yet.
    Reserved,
    /// The pod is terminating.
    Ending,
    /// The pod is gone.
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    victim: Victim,
    stage: EvictionStage,
    /// When it was first reserved.
    reserved: BootTime,
    /// When it was last reserved, or when the pod was first seen terminating.
    since: BootTime,
    /// When the last poll of the pod started.
    last_polled: BootTime,
}

impl Entry {
    /// Remaining time for which it counts against a budget of this window. `None`: it does not count.
    fn counts(&self, window: Duration, now: BootTime) -> Option<Duration> {
        let age = now.since(self.since);
        let left = |of: Duration| of.checked_sub(age).filter(|left| !left.is_zero());
        match self.stage {
            EvictionStage::Reserved => Some(RESERVATION_TIMEOUT.saturating_sub(age)),
            EvictionStage::Ending => left(window.max(MAX_TERMINATING))
                .map(|at_most| left(window).unwrap_or_else(|| POLL_ENDING.min(at_most))),
            EvictionStage::Ended => left(window),
        }
    }
}

/// Kind of a granted reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    /// A new reservation.
    New,
    /// A repeated request for an existing reservation. It counts once.
    Existing,
}

/// What allows no more evictions now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// A budget.
    Budget(BudgetScope, Budget),
    /// It is not known which earlier evictions count.
    UnknownHistory,
    /// The record has [`MAX_EVICTIONS`].
    FullRecord,
}

/// No more evictions are allowed now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted {
    /// By what.
    pub limit: Limit,
    /// When it may allow one more.
    pub retry_after: Duration,
}

/// Observed state of a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PodState {
    /// Running, without a deletion timestamp.
    Running,
    /// It has a deletion timestamp.
    Terminating,
    /// It does not exist any more.
    Gone,
}

/// Outcome of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// The pod was evicted.
    Confirmed,
    /// The pod was not evicted: refused by a disruption budget, or the request was abandoned.
    Returned,
}

/// All evictions that count against the budgets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EvictionLedger {
    budgets: Budgets,
    entries: BTreeMap<String, Entry>,
    /// Until then, nothing is allowed: the history is unknown.
    closed_until: BootTime,
}

impl EvictionLedger {
    /// Continues from the record of the previous leader. Reservations may still be carried out at any time. Confirmed
    /// evictions count from when this replica first saw the confirmation, which is never earlier than the eviction.
    pub fn resume(
        budgets: Budgets,
        record: EvictionRecord,
        first_seen: &FirstSeen,
        now: BootTime,
    ) -> Self {
        let entry = |recorded: Recorded| {
            let confirmed = first_seen.confirmed(&recorded).unwrap_or(now);
            let (stage, since) = if recorded.confirmed {
                (EvictionStage::Ending, confirmed)
            } else {
                (EvictionStage::Reserved, now)
            };
            let entry = Entry {
                victim: recorded.victim,
                stage,
                reserved: since,
                since,
                last_polled: BootTime::default(),
            };
            (entry.victim.uid.clone(), entry)
        };
        let ledger = Self {
            budgets,
            entries: record.evictions.into_iter().map(entry).collect(),
            closed_until: BootTime::default(),
        };
        if record.shut {
            ledger.close(now)
        } else {
            ledger
        }
    }

    /// For an unknown history: allows nothing for the longest window.
    #[must_use]
    pub fn close(self, now: BootTime) -> Self {
        Self {
            closed_until: now + self.budgets.longest().max(RESERVATION_TIMEOUT),
            ..self
        }
    }

    /// The record for the next leader.
    pub fn record(&self, epoch: u64, now: BootTime) -> EvictionRecord {
        let recorded = |entry: &Entry| Recorded {
            victim: entry.victim.clone(),
            confirmed: entry.stage != EvictionStage::Reserved,
        };
        EvictionRecord {
            epoch,
            shut: !self.closed_until.since(now).is_zero(),
            evictions: self.entries.values().map(recorded).collect(),
        }
    }

    /// Whether the pod's eviction is in the ledger.
    pub fn contains(&self, uid: &str) -> bool {
        self.entries.contains_key(uid)
    }

    /// What does not allow one more; of several budgets the broadest.
    pub fn exhausted(&self, key: &BudgetKey<'_>, now: BootTime) -> Option<Exhausted> {
        let closed_for = self.closed_until.since(now);
        let limit = if closed_for > Duration::ZERO {
            Some(Limit::UnknownHistory)
        } else if self.entries.len() >= usize::from(MAX_EVICTIONS) {
            Some(Limit::FullRecord)
        } else {
            None
        };
        if let Some(limit) = limit {
            return Some(Exhausted {
                limit,
                retry_after: closed_for.clamp(POLL_ENDING, MAX_WAIT),
            });
        }
        let of = |scope| self.exhausted_in(scope, key, now);
        BudgetScope::ALL.into_iter().find_map(of)
    }

    fn exhausted_in(
        &self,
        scope: BudgetScope,
        key: &BudgetKey<'_>,
        now: BootTime,
    ) -> Option<Exhausted> {
        let budget = self.budgets.of(scope);
        let sharing = self.entries.values();
        let sharing = sharing.filter(|entry| key.shares(scope, &entry.victim.budget_key()));
        let counting = sharing.filter_map(|entry| entry.counts(budget.window, now));
        let mut left: Vec<Duration> = counting.collect();
        let too_many = left.len().checked_sub(budget.evictions.into())?;
        left.sort();
        // A budget of 0 never recovers.
        let wait = left.get(too_many).copied().unwrap_or(MAX_WAIT);
        Some(Exhausted {
            limit: Limit::Budget(scope, budget),
            retry_after: wait.clamp(MIN_WAIT, MAX_WAIT),
        })
    }

    /// Reserves an eviction if all budgets allow it. A repeated request renews the reservation for another
    /// [`RESERVATION_TIMEOUT`].
    ///
    /// # Errors
    /// What allows no more.
    pub fn reserve(&mut self, victim: Victim, now: BootTime) -> Result<Granted, Exhausted> {
        if let Some(entry) = self.entries.get_mut(&victim.uid) {
            if entry.stage == EvictionStage::Reserved {
                entry.since = now;
            }
            return Ok(Granted::Existing);
        }
        if let Some(exhausted) = self.exhausted(&victim.budget_key(), now) {
            return Err(exhausted);
        }
        let entry = Entry {
            stage: EvictionStage::Reserved,
            reserved: now,
            since: now,
            last_polled: now,
            victim,
        };
        self.entries.insert(entry.victim.uid.clone(), entry);
        Ok(Granted::New)
    }

    /// At most `max` pods to poll now, least recently polled first.
    pub fn due_for_poll(&mut self, now: BootTime, max: usize) -> Vec<Victim> {
        let is_due = |entry: &&mut Entry| {
            let pause = match entry.stage {
                EvictionStage::Reserved => POLL_RESERVED,
                EvictionStage::Ending => POLL_ENDING,
                EvictionStage::Ended => return false,
            };
            now.since(entry.last_polled) >= pause
        };
        let mut due: Vec<&mut Entry> = self.entries.values_mut().filter(is_due).collect();
        due.sort_by_key(|entry| entry.last_polled);
        let take = |entry: &mut Entry| {
            entry.last_polled = now;
            entry.victim.clone()
        };
        due.into_iter().take(max).map(take).collect()
    }

    /// Applies the result of a poll that started at `started`.
    pub fn observe(
        &mut self,
        uid: &str,
        seen: PodState,
        started: BootTime,
        now: BootTime,
    ) -> Option<Settled> {
        let entry = self.entries.get_mut(uid)?;
        match (entry.stage, seen) {
            (EvictionStage::Reserved, PodState::Running) => {
                if started.since(entry.since) < RESERVATION_TIMEOUT {
                    return None;
                }
                self.entries.remove(uid);
                Some(Settled::Returned)
            }
            (EvictionStage::Reserved, PodState::Terminating | PodState::Gone) => {
                entry.since = now;
                entry.stage = EvictionStage::Ending;
                if seen == PodState::Gone {
                    entry.stage = EvictionStage::Ended;
                }
                Some(Settled::Confirmed)
            }
            (EvictionStage::Ending, PodState::Gone) => {
                entry.stage = EvictionStage::Ended;
                None
            }
            _ => None,
        }
    }

    /// Whether another pod of the node has a reservation with an unknown outcome.
    pub fn is_unsettled(&self, node: &str, uid: &str) -> bool {
        let mut others = self.entries.values().filter(|it| it.victim.uid != uid);
        others.any(|it| it.stage == EvictionStage::Reserved && it.victim.node == node)
    }

    /// Restarts the reservation's timeout once it is on record, right before the Eviction is posted.
    pub fn renew(&mut self, uid: &str, now: BootTime) {
        let reserved = self.entries.get_mut(uid);
        if let Some(entry) = reserved.filter(|entry| entry.stage == EvictionStage::Reserved) {
            entry.since = now;
        }
    }

    /// The API server refused a pod that had an earlier reservation. That one may still be carried out, within its
    /// original timeout.
    pub fn refused_again(&mut self, uid: &str) {
        let reserved = self.entries.get_mut(uid);
        if let Some(entry) = reserved.filter(|entry| entry.stage == EvictionStage::Reserved) {
            entry.since = entry.reserved;
        }
    }

    /// Applies the API server's answer to a reservation. Returns whether it was still open.
    pub fn settle(&mut self, uid: &str, settled: Settled, now: BootTime) -> bool {
        let Some(entry) = self.entries.get_mut(uid) else {
            return false;
        };
        if entry.stage != EvictionStage::Reserved {
            return false;
        }
        match settled {
            Settled::Confirmed => (entry.stage, entry.since) = (EvictionStage::Ending, now),
            Settled::Returned => drop(self.entries.remove(uid)),
        }
        true
    }

    /// Removes entries that count for no budget any more.
    pub fn prune(&mut self, now: BootTime) {
        let longest = self.budgets.longest();
        self.entries
            .retain(|_, entry| entry.counts(longest, now).is_some());
    }

    /// Number of evictions at each stage.
    pub fn stages(&self) -> [(EvictionStage, usize); 3] {
        [
            EvictionStage::Reserved,
            EvictionStage::Ending,
            EvictionStage::Ended,
        ]
        .map(|stage| {
            let at = self.entries.values().filter(|entry| entry.stage == stage);
            (stage, at.count())
        })
    }

    /// Number of evictions that count for the fleet budget.
    pub fn fleet(&self, now: BootTime) -> usize {
        let window = self.budgets.fleet.window;
        let counting = self.entries.values();
        let counting = counting.filter(|entry| entry.counts(window, now).is_some());
        counting.count()
    }
}

#[cfg(test)]
mod tests;
