//! Other writers of `NodeWatermarks`: their edits are reverted, at once the first time, then with exponential backoff.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::attempt::retry_delay;
use super::Reconciler;
use crate::engine::time::BootTime;

/// An edit this long after the last one starts a new series.
const SERIES_WINDOW: Duration = Duration::from_mins(10);

/// Edits by other writers, per node.
#[derive(Default)]
pub(super) struct EditConflicts {
    /// Edits that are not processed yet.
    new: Vec<String>,
    known: BTreeMap<String, EditSeries>,
}

#[derive(Clone, Copy, Debug)]
struct EditSeries {
    edits: u32,
    last: BootTime,
}

impl Reconciler {
    /// Another writer edited the `NodeWatermark` of a node.
    pub(super) fn edited_by(&mut self, name: &str, manager: Option<&str>) {
        let by = manager.unwrap_or("another client");
        let message = format!(
            "its NodeWatermark was edited by {by} and is reverted; edit NodeQOS, PodQOS and AvoidanceAction instead"
        );
        self.warn_node(name, "WatermarkEdited", message);
        self.conflicts.new.push(name.to_owned());
    }

    /// Delays the write from the second edit of a series on.
    pub(super) fn delay_conflicting_writes(&mut self, now: BootTime) {
        if self.conflicts.new.is_empty() {
            return;
        }
        let is_recent = |series: &EditSeries| now.since(series.last) < SERIES_WINDOW;
        self.conflicts.known.retain(|_, series| is_recent(series));
        for name in std::mem::take(&mut self.conflicts.new) {
            let none = EditSeries {
                edits: 0,
                last: now,
            };
            let series = self.conflicts.known.entry(name.clone()).or_insert(none);
            if series.edits > 0 {
                let attempt = self.attempts.entry(name).or_default();
                attempt.wait(now + retry_delay(series.edits - 1));
            }
            *series = EditSeries {
                edits: series.edits.saturating_add(1),
                last: now,
            };
        }
    }
}
