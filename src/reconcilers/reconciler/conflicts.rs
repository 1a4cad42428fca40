//! Somebody else writes `NodeWatermarks`: they are made anew, at once the first time, and ever more slowly where it does
//! not end.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::attempt::pause;
use super::World;
use crate::engine::time::BootTime;

/// An edit so long after the last is a new one.
const FORGOTTEN: Duration = Duration::from_mins(10);

/// Who writes to what, how often.
#[derive(Default)]
pub(super) struct Contests {
    /// Edits that were not looked at yet.
    new: Vec<String>,
    known: BTreeMap<String, Contest>,
}

#[derive(Clone, Copy, Debug)]
struct Contest {
    edits: u32,
    last: BootTime,
}

impl World {
    /// Somebody edited the `NodeWatermark` of a node.
    pub(super) fn edited_by(&mut self, name: &str, manager: Option<&str>) {
        let by = manager.unwrap_or("somebody else");
        let message = format!(
            "its NodeWatermark was edited by {by} and is made anew; edit NodeQOS, PodQOS and AvoidanceAction instead"
        );
        self.warn_node(name, "WatermarkEdited", message);
        self.contests.new.push(name.to_owned());
    }

    /// From the second edit on it is waited before the object is made anew.
    pub(super) fn pace_contests(&mut self, now: BootTime) {
        if self.contests.new.is_empty() {
            return;
        }
        let is_recent = |contest: &Contest| now.since(contest.last) < FORGOTTEN;
        self.contests.known.retain(|_, contest| is_recent(contest));
        for name in std::mem::take(&mut self.contests.new) {
            let none = Contest {
                edits: 0,
                last: now,
            };
            let contest = self.contests.known.entry(name.clone()).or_insert(none);
            if contest.edits > 0 {
                let attempt = self.attempts.entry(name).or_default();
                attempt.wait(now + pause(contest.edits - 1));
            }
            *contest = Contest {
                edits: contest.edits.saturating_add(1),
                last: now,
            };
        }
    }
}
