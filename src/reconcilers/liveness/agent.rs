//! One agent that is listened for.

use std::sync::Arc;
use std::time::Duration;

use super::super::attempt::Attempt;
use super::super::lease::Renewal;
use super::{InForce, Look, MOST_ASKED};
use crate::engine::time::BootTime;

/// An agent that reports is silent after so long, or five of its intervals: as soon as one whose Lease holds for 40 s.
const REPORTS: Duration = Duration::from_secs(50);
/// What a watch shows may be old. Nothing is told or undone unless the Lease itself was read so short a while ago.
const CONFIRMED: Duration = Duration::from_mins(1);

/// What an agent promises that reports directly.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reporting {
    /// The next report comes within this time...
    pub(super) interval: Duration,
    /// ...of the last one; `None`: since the last look.
    pub(super) last: Option<BootTime>,
}

/// One agent, and what is known of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Watched {
    /// Zone of its node, and what is in force there; `None`: there is no such node.
    pub(super) place: Option<(Arc<str>, InForce)>,
    /// Its Lease as last seen, where it holds one.
    pub(super) lease: Option<Renewal>,
    /// Where it reports directly.
    pub(super) reports: Option<Reporting>,
    /// When it was heard last; `None`: since the last look.
    pub(super) heard: Option<BootTime>,
    /// When its Lease was last read and was as old as it seemed.
    pub(super) confirmed: Option<BootTime>,
    pub(super) asking: Attempt,
    /// Its silence was told of.
    pub(super) told: bool,
    /// That it left throttled pods was told of.
    told_throttled: bool,
    /// Its taint was taken away in this silence.
    pub(super) opened: bool,
    pub(super) opening: Attempt,
}

impl Watched {
    pub(super) fn at(place: Option<(Arc<str>, InForce)>) -> Self {
        Self {
            place,
            ..Self::default()
        }
    }

    /// It is heard; whether its silence was told of. A Lease is being read for as long as it takes.
    pub(super) fn is_heard(&mut self, at: Option<BootTime>) -> bool {
        let before = std::mem::take(self);
        *self = Self {
            place: before.place,
            lease: before.lease,
            reports: before.reports,
            heard: at,
            asking: before.asking,
            ..Self::default()
        };
        before.told
    }

    /// It counts as just heard, in every way; whether its silence was told of.
    pub(super) fn begin(&mut self) -> bool {
        if let Some(reports) = &mut self.reports {
            reports.last = None;
        }
        self.is_heard(None)
    }

    /// The same, but what was told was told.
    pub(super) fn restart(&mut self) {
        let told = self.begin();
        self.told = told;
    }

    /// When it was heard last; what was since the last look was now.
    pub(super) fn heard_by(&mut self, now: BootTime) -> BootTime {
        if let Some(reports) = &mut self.reports {
            reports.last.get_or_insert(now);
        }
        *self.heard.get_or_insert(now)
    }

    pub(super) const fn has_lease(&self) -> bool {
        self.lease.is_some()
    }

    pub(super) fn zone(&self) -> Option<&Arc<str>> {
        self.place.as_ref().map(|(zone, _)| zone)
    }

    fn state(&self) -> InForce {
        self.place.as_ref().map_or_else(InForce::default, |it| it.1)
    }

    pub(super) fn throttled(&self) -> usize {
        self.state().throttled
    }

    /// It neither holds a Lease nor reports, and nothing is in force there that it would have to tell of.
    pub(super) fn is_idle(&self) -> bool {
        let opens = self.place.is_some() && self.opening.is_begun();
        !self.has_agent() && !self.state().is_anything() && !opens
    }

    pub(super) const fn has_agent(&self) -> bool {
        self.lease.is_some() || self.reports.is_some()
    }

    fn silent_for(&self, now: BootTime) -> Duration {
        self.heard.map_or(Duration::ZERO, |heard| now.since(heard))
    }

    /// How long it may be silent. A report promises the next one, a renewal of its Lease the next renewal, and it is silent
    /// once both promises are broken. While it reports the Lease is renewed seldom, and promises no more than a report.
    fn grace(&self) -> Option<Duration> {
        let by_lease = self.lease.as_ref().map(Renewal::grace);
        let Some(Reporting { interval, last }) = self.reports else {
            return by_lease;
        };
        let by_reports = REPORTS.max(interval * 5);
        let passed = self.heard.zip(last);
        let passed = passed.map_or(Duration::ZERO, |(heard, last)| heard.since(last));
        let at_least = by_lease.map_or(by_reports, |lease| lease.min(by_reports));
        Some(by_reports.saturating_sub(passed).max(at_least))
    }

    /// It is silent.
    pub(super) fn is_silent(&self, now: BootTime, after: Duration) -> bool {
        let silent = self.silent_for(now);
        self.grace().map_or(silent >= after, |grace| silent > grace)
    }

    /// Two of its words are missing: its grace is that of four or five.
    pub(super) fn is_quiet(&self, now: BootTime, after: Duration) -> bool {
        let silent = self.silent_for(now);
        self.grace()
            .map_or(silent >= after, |grace| silent > grace / 2)
    }

    /// It should have been heard by now. One without a Lease may write as seldom as twice in the time after which it
    /// counts as silent, and a write takes its way.
    pub(super) fn is_overdue(&self, now: BootTime, after: Duration) -> bool {
        let allowed = self.grace().unwrap_or(after / 2 + after / 10);
        self.silent_for(now) > allowed
    }

    /// Notes what is to be done about it.
    pub(super) fn look(&mut self, name: &str, now: BootTime, after: Duration, look: &mut Look) {
        if !self.is_silent(now, after) {
            return;
        }
        let state = self.state();
        let dead_after = self.grace().map_or(after, |grace| grace.max(after));
        let dead = state.ready && self.silent_for(now) >= dead_after;
        let leaves = dead && state.throttled > 0 && !self.told_throttled;
        let marked = state.marked || self.opening.is_begun();
        let opens = dead && marked && !self.opened && self.opening.is_due(now);
        let tells = self.has_agent() && !self.told;
        if !(tells || leaves || opens) || !self.is_sure(name, now, look) {
            return;
        }
        if let (true, Some(grace)) = (tells, self.grace()) {
            self.told = true;
            look.silent.push((name.to_owned(), grace));
        }
        if leaves {
            self.told_throttled = true;
            look.throttled.push((name.to_owned(), state.throttled));
        }
        if opens {
            self.opening.begin();
            look.open.push(name.to_owned());
        }
    }

    /// Whether its silence is certain; where it is not, its Lease is asked for.
    fn is_sure(&mut self, name: &str, now: BootTime, look: &mut Look) -> bool {
        let fresh = |confirmed| now.since(confirmed) <= CONFIRMED;
        if !self.has_lease() || self.confirmed.is_some_and(fresh) {
            return true;
        }
        if self.asking.is_due(now) && look.ask.len() < MOST_ASKED {
            self.asking.begin();
            look.ask.push(name.to_owned());
        }
        false
    }
}
