//! What outlives a leader: the evictions that count, in a `ConfigMap` that is written before any of them is allowed.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ledger::Victim;
use crate::engine::time::BootTime;

/// The evictions that count. No times: clocks of machines are never compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Record {
    /// The term of the leader that wrote it. A replica that finds a later one than its own leads no more.
    pub epoch: u64,
    /// It is not known what was allowed before: nothing is, for as long as anything can count.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shut: bool,
    /// Those that are allowed, or were done a while ago.
    pub evictions: Vec<Recorded>,
}

/// One of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recorded {
    /// The pod.
    pub victim: Victim,
    /// It was seen ending.
    pub confirmed: bool,
}

impl Record {
    /// As it is kept.
    ///
    /// # Errors
    /// It is not a record.
    pub fn read(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// As it is kept.
    pub fn write(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// When this replica first saw, by its own clock, that evictions were confirmed. A standby follows the record for this:
/// what it saw a minute ago happened at least a minute ago.
#[derive(Clone, Debug, Default)]
pub struct FirstSeen(BTreeMap<String, BootTime>);

impl FirstSeen {
    /// Takes in the record as it is now.
    pub fn take(&mut self, record: &Record, now: BootTime) {
        let before = std::mem::take(&mut self.0);
        let confirmed = record.evictions.iter().filter(|it| it.confirmed);
        let since = |uid: &String| before.get(uid).copied().unwrap_or(now);
        let uids = confirmed.map(|it| it.victim.uid.clone());
        self.0 = uids.map(|uid| (uid.clone(), since(&uid))).collect();
    }

    /// When that was; `None`: it is new.
    pub fn confirmed(&self, recorded: &Recorded) -> Option<BootTime> {
        self.0.get(&recorded.victim.uid).copied()
    }
}
