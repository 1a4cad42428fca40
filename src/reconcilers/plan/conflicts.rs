//! Other writers of `NodeWatermarks`: their edits are reverted, at once the first time, then with exponential backoff.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::engine::time::BootTime;
use crate::reconcilers::retry::retry_delay;

/// An edit this long after the last one starts a new series.
const SERIES_WINDOW: Duration = Duration::from_mins(10);

/// Edits by other writers, per node.
#[derive(Default)]
pub struct EditConflicts {
    /// Edits that are not processed yet.
    new: Vec<String>,
    known: BTreeMap<String, EditSeries>,
}

#[derive(Clone, Copy, Debug)]
struct EditSeries {
    edits: u32,
    last: BootTime,
}

impl EditConflicts {
    /// Another writer edited the `NodeWatermark` of a node.
    pub fn add(&mut self, node: &str) {
        self.new.push(node.to_owned());
    }

    /// Takes the new edits from the second one of a series on, each with the time before which it should not be reverted.
    pub fn take_delays(&mut self, now: BootTime) -> Vec<(String, BootTime)> {
        let mut delays = Vec::new();
        if self.new.is_empty() {
            return delays;
        }
        let is_recent = |series: &EditSeries| now.since(series.last) < SERIES_WINDOW;
        self.known.retain(|_, series| is_recent(series));
        for node in std::mem::take(&mut self.new) {
            let none = EditSeries {
                edits: 0,
                last: now,
            };
            let series = self.known.entry(node.clone()).or_insert(none);
            if series.edits > 0 {
                delays.push((node, now + retry_delay(series.edits - 1)));
            }
            *series = EditSeries {
                edits: series.edits.saturating_add(1),
                last: now,
            };
        }
        delays
    }
}
