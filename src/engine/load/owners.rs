//! What pods of the same owner have really used, relative to what is usual for their requests.
//!
//! Learned on the node from pods that are older than 5 minutes and not throttled, as a moving mean over about 3 minutes of
//! measurements. The table is bounded: of more owners, those that were not seen for longest are forgotten.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// Owners that are remembered: a full node has 110 pods.
const MAX_OWNERS: usize = 128;
/// Share of each new measurement in the mean. There is one every 15 s.
const WEIGHT: f32 = 0.1;

/// Actual use over usual use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Ratios {
    cpu: Option<f32>,
    memory: Option<f32>,
}

impl Ratios {
    /// Of CPU; 1 if unknown.
    pub(super) fn cpu(self) -> f64 {
        self.cpu.map_or(1.0, f64::from)
    }

    /// Of memory; 1 if unknown.
    pub(super) fn memory(self) -> f64 {
        self.memory.map_or(1.0, f64::from)
    }

    fn learn(&mut self, seen: [Option<f64>; 2]) {
        for (mean, seen) in [&mut self.cpu, &mut self.memory].into_iter().zip(seen) {
            let Some(seen) = seen.filter(|ratio| ratio.is_finite() && *ratio >= 0.0) else {
                continue;
            };
            #[expect(
                clippy::cast_possible_truncation,
                reason = "a ratio needs no more digits"
            )]
            let seen = seen as f32;
            *mean = Some(mean.map_or(seen, |mean| mean + WEIGHT * (seen - mean)));
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Entry {
    owner: Arc<str>,
    ratios: Ratios,
    /// The round in which it was last seen.
    round: u32,
}

/// The ratios of the owners of this node's pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Owners {
    entries: Vec<Entry>,
    round: u32,
}

impl Owners {
    /// Whether restored ones are within bounds.
    pub(super) const fn is_valid(&self) -> bool {
        self.entries.len() <= MAX_OWNERS
    }

    /// Starts a round of measurements.
    pub(super) fn next_round(&mut self) {
        self.round = self.round.wrapping_add(1);
        if self.entries.capacity() < MAX_OWNERS {
            self.entries.reserve_exact(MAX_OWNERS - self.entries.len());
        }
    }

    /// Adds `[CPU, memory]` of one pod, each as actual over usual use. `hint` is where its owner was found last.
    pub(super) fn learn(&mut self, owner: &Arc<str>, hint: &mut u8, seen: [Option<f64>; 2]) {
        let index = self
            .find(owner, *hint)
            .unwrap_or_else(|| self.insert(owner));
        *hint = u8::try_from(index).unwrap_or_default();
        let entry = &mut self.entries[index];
        entry.ratios.learn(seen);
        entry.round = self.round;
    }

    /// The ratios of an owner.
    pub(super) fn of(&self, owner: Option<&Arc<str>>) -> Ratios {
        let found = owner.and_then(|owner| self.find(owner, 0));
        found.map_or_else(Ratios::default, |index| self.entries[index].ratios)
    }

    fn find(&self, owner: &Arc<str>, hint: u8) -> Option<usize> {
        let is_same = |entry: &Entry| entry.owner == *owner;
        let hint = usize::from(hint);
        if self.entries.get(hint).is_some_and(is_same) {
            return Some(hint);
        }
        self.entries.iter().position(is_same)
    }

    fn insert(&mut self, owner: &Arc<str>) -> usize {
        let entry = Entry {
            owner: Arc::clone(owner),
            ratios: Ratios::default(),
            round: self.round,
        };
        if self.entries.len() < MAX_OWNERS {
            self.entries.push(entry);
            return self.entries.len() - 1;
        }
        let age = |entry: &Entry| self.round.wrapping_sub(entry.round);
        let oldest = (0..self.entries.len()).max_by_key(|index| age(&self.entries[*index]));
        let index = oldest.unwrap_or_default();
        self.entries[index] = entry;
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(number: usize) -> Arc<str> {
        format!("owner-{number}").into()
    }

    #[test]
    fn the_mean_follows_what_is_seen() {
        let mut owners = Owners::default();
        let mut hint = 0;
        for seen in [0.5, 0.5, 2.0] {
            owners.next_round();
            owners.learn(&owner(1), &mut hint, [Some(seen), None]);
        }
        let ratios = owners.of(Some(&owner(1)));
        assert!((ratios.cpu() - 0.65).abs() < 1e-6, "{ratios:?}");
        assert!((ratios.memory() - 1.0).abs() < 1e-9, "never seen");
        assert_eq!(owners.of(Some(&owner(2))), Ratios::default());
        assert_eq!(owners.of(None), Ratios::default());
    }

    #[test]
    fn invalid_ratios_are_ignored() {
        let mut owners = Owners::default();
        for seen in [f64::NAN, f64::INFINITY, -1.0] {
            owners.learn(&owner(1), &mut 0, [Some(seen), Some(seen)]);
        }
        assert_eq!(owners.of(Some(&owner(1))), Ratios::default());
    }

    #[test]
    fn the_owner_not_seen_for_longest_is_forgotten() {
        let mut owners = Owners::default();
        let mut hints = [0; MAX_OWNERS + 2];
        for number in 0..=MAX_OWNERS {
            owners.next_round();
            for kept in [3, number] {
                owners.learn(&owner(kept), &mut hints[kept], [Some(0.1), None]);
            }
        }
        assert_eq!(owners.entries.len(), MAX_OWNERS);
        let known = |number| owners.of(Some(&owner(number))) != Ratios::default();
        assert!(!known(0), "the first one");
        assert!(known(1) && known(3) && known(MAX_OWNERS));
    }
}
