//! The record that survives a failover: evictions that count, in a `ConfigMap` that is written before any of them is
//! posted.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::ledger::Victim;
use crate::engine::time::BootTime;

/// The evictions that count. It has no times: clocks of different machines are never compared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EvictionRecord {
    /// Term of the leader that wrote it. A replica that finds a later term than its own has lost leadership.
    pub epoch: u64,
    /// The history is unknown: nothing is allowed for as long as anything could count.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub shut: bool,
    /// Evictions that are reserved or confirmed.
    pub evictions: Vec<Recorded>,
}

/// A recorded eviction.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recorded {
    /// The pod.
    pub victim: Victim,
    /// It was seen terminating.
    pub confirmed: bool,
}

impl EvictionRecord {
    /// Parses the stored form.
    ///
    /// # Errors
    /// It is not a record.
    pub fn read(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str(text)
    }

    /// The stored form.
    pub fn write(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// When this replica first saw each confirmation, by its own clock. A standby follows the record for this: what it saw
/// a minute ago happened at least a minute ago.
#[derive(Clone, Debug, Default)]
pub struct FirstSeen(BTreeMap<String, BootTime>);

impl FirstSeen {
    /// Updates from the current record.
    pub fn update(&mut self, record: &EvictionRecord, now: BootTime) {
        let before = std::mem::take(&mut self.0);
        let confirmed = record.evictions.iter().filter(|it| it.confirmed);
        let since = |uid: &String| before.get(uid).copied().unwrap_or(now);
        let uids = confirmed.map(|it| it.victim.uid.clone());
        self.0 = uids.map(|uid| (uid.clone(), since(&uid))).collect();
    }

    /// When the confirmation was first seen. `None`: just now.
    pub fn confirmed(&self, recorded: &Recorded) -> Option<BootTime> {
        self.0.get(&recorded.victim.uid).copied()
    }
}
