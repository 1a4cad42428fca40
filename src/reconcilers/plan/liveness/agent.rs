//! The liveness of one agent.

use std::sync::Arc;
use std::time::Duration;

use super::{LivenessCheck, MAX_LEASE_READS, NodeEffects};
use crate::cluster::lease::LeaseState;
use crate::engine::time::BootTime;
use crate::reconcilers::retry::Attempt;

/// Grace period for direct reports, or five intervals if that is longer: the same as for a Lease of 40 s.
const REPORT_GRACE: Duration = Duration::from_secs(50);
/// A watch may lag. Nothing is reported or restored unless the Lease itself was read within this time.
const CONFIRMATION_TTL: Duration = Duration::from_mins(1);

/// The direct reports of an agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReportLiveness {
    /// The time between two reports.
    pub(super) interval: Duration,
    /// When the last report was seen; `None`: since the last check.
    pub(super) last: Option<BootTime>,
}

/// One agent.
#[derive(Clone, Debug, Default)]
pub(super) struct AgentLiveness {
    /// Zone of its node, and what is in force there; `None`: there is no such node.
    pub(super) node: Option<(Arc<str>, NodeEffects)>,
    /// The Lease that it holds, as last seen.
    pub(super) lease: Option<LeaseState>,
    /// Set if it reports directly.
    pub(super) reports: Option<ReportLiveness>,
    /// When it was last seen; `None`: since the last check.
    pub(super) last_seen: Option<BootTime>,
    /// When a read of its Lease last confirmed that it was not renewed.
    pub(super) confirmed: Option<BootTime>,
    pub(super) lease_read: Attempt,
    /// It was reported as unresponsive.
    pub(super) reported: bool,
    /// Its throttled pods were reported.
    reported_throttled: bool,
    /// Of its taint.
    pub(super) taint: Removal,
    /// Of its load label.
    pub(super) label: Removal,
}

/// The removal of something that an unresponsive agent left on its node.
#[derive(Clone, Debug, Default)]
pub(super) struct Removal {
    /// It was removed since the agent was last seen.
    pub(super) done: bool,
    pub(super) attempt: Attempt,
}

impl Removal {
    fn is_due(&self, now: BootTime) -> bool {
        !self.done && self.attempt.is_due(now)
    }

    /// An attempt finished.
    pub(super) fn finished(&mut self, now: BootTime, done: bool) {
        if done {
            self.done = true;
            self.attempt = Attempt::default();
        } else {
            self.attempt.failed(now);
        }
    }
}

impl AgentLiveness {
    pub(super) fn on(node: Option<(Arc<str>, NodeEffects)>) -> Self {
        Self {
            node,
            ..Self::default()
        }
    }

    /// The agent was seen. Returns whether it had been reported as unresponsive. A Lease read in progress goes on.
    pub(super) fn seen(&mut self, at: Option<BootTime>) -> bool {
        let before = std::mem::take(self);
        *self = Self {
            node: before.node,
            lease: before.lease,
            reports: before.reports,
            last_seen: at,
            lease_read: before.lease_read,
            ..Self::default()
        };
        before.reported
    }

    /// Counts as just seen, in every way. Returns whether it had been reported as unresponsive.
    pub(super) fn start(&mut self) -> bool {
        if let Some(reports) = &mut self.reports {
            reports.last = None;
        }
        self.seen(None)
    }

    /// As [`Self::start`], but stays reported.
    pub(super) fn restart(&mut self) {
        self.reported = self.start();
    }

    /// When it was last seen; sets the time if it was seen since the last check.
    pub(super) fn last_seen_by(&mut self, now: BootTime) -> BootTime {
        if let Some(reports) = &mut self.reports {
            reports.last.get_or_insert(now);
        }
        *self.last_seen.get_or_insert(now)
    }

    pub(super) const fn has_lease(&self) -> bool {
        self.lease.is_some()
    }

    pub(super) fn zone(&self) -> Option<&Arc<str>> {
        self.node.as_ref().map(|(zone, _)| zone)
    }

    fn effects(&self) -> NodeEffects {
        self.node
            .as_ref()
            .map_or_else(NodeEffects::default, |it| it.1)
    }

    pub(super) fn throttled(&self) -> usize {
        self.effects().throttled
    }

    /// It neither holds a Lease nor reports, and nothing is in force that it would have to report.
    pub(super) fn is_idle(&self) -> bool {
        let removing = self.node.is_some() && self.taint.attempt.is_started();
        !self.exists() && !self.effects().any() && !removing
    }

    /// It holds a Lease or reports.
    pub(super) const fn exists(&self) -> bool {
        self.lease.is_some() || self.reports.is_some()
    }

    fn unseen_for(&self, now: BootTime) -> Duration {
        self.last_seen
            .map_or(Duration::ZERO, |seen| now.since(seen))
    }

    /// How long it may go unseen. It is unresponsive when both its next report and its next Lease renewal are overdue. An agent
    /// that reports renews its Lease rarely, so its Lease counts for no longer than a report would.
    fn grace(&self) -> Option<Duration> {
        let by_lease = self.lease.as_ref().map(LeaseState::grace);
        let Some(ReportLiveness { interval, last }) = self.reports else {
            return by_lease;
        };
        let by_reports = REPORT_GRACE.max(interval * 5);
        let passed = self.last_seen.zip(last);
        let passed = passed.map_or(Duration::ZERO, |(seen, last)| seen.since(last));
        let at_least = by_lease.map_or(by_reports, |lease| lease.min(by_reports));
        Some(by_reports.saturating_sub(passed).max(at_least))
    }

    /// It was not seen within its grace period.
    pub(super) fn is_unresponsive(&self, now: BootTime, dead_after: Duration) -> bool {
        let unseen = self.unseen_for(now);
        self.grace()
            .map_or(unseen >= dead_after, |grace| unseen > grace)
    }

    /// Two updates are missing; the grace period is that of four or five.
    pub(super) fn is_late(&self, now: BootTime, dead_after: Duration) -> bool {
        let unseen = self.unseen_for(now);
        self.grace()
            .map_or(unseen >= dead_after, |grace| unseen > grace / 2)
    }

    /// An update is overdue. An agent without a Lease may write only twice within `dead_after`; a tenth is added for the write itself.
    pub(super) fn is_overdue(&self, now: BootTime, dead_after: Duration) -> bool {
        let allowed = self.grace().unwrap_or(dead_after / 2 + dead_after / 10);
        self.unseen_for(now) > allowed
    }

    /// Adds what has to be done about this agent.
    pub(super) fn check(
        &mut self,
        name: &str,
        now: BootTime,
        dead_after: Duration,
        check: &mut LivenessCheck,
    ) {
        if !self.is_unresponsive(now, dead_after) {
            return;
        }
        let effects = self.effects();
        let dead_after = self
            .grace()
            .map_or(dead_after, |grace| grace.max(dead_after));
        let dead = effects.ready && self.unseen_for(now) >= dead_after;
        let report_throttled = dead && effects.throttled > 0 && !self.reported_throttled;
        let tainted = effects.tainted || self.taint.attempt.is_started();
        let remove_taint = dead && tainted && self.taint.is_due(now);
        let remove_label = effects.labelled && self.label.is_due(now);
        let report = self.exists() && !self.reported;
        if !(report || report_throttled || remove_taint || remove_label)
            || !self.confirm(name, now, check)
        {
            return;
        }
        if let (true, Some(grace)) = (report, self.grace()) {
            self.reported = true;
            check.unresponsive.push((name.to_owned(), grace));
        }
        if report_throttled {
            self.reported_throttled = true;
            check.throttled.push((name.to_owned(), effects.throttled));
        }
        if remove_label {
            self.label.attempt.start();
            check.remove_label.push(name.to_owned());
        }
        if remove_taint {
            self.taint.attempt.start();
            check.remove_taint.push(name.to_owned());
        }
    }

    /// Whether a recent read of the Lease confirms that it was not renewed; otherwise requests a read.
    fn confirm(&mut self, name: &str, now: BootTime, check: &mut LivenessCheck) -> bool {
        let fresh = |confirmed| now.since(confirmed) <= CONFIRMATION_TTL;
        if !self.has_lease() || self.confirmed.is_some_and(fresh) {
            return true;
        }
        if self.lease_read.is_due(now) && check.read_lease.len() < MAX_LEASE_READS {
            self.lease_read.start();
            check.read_lease.push(name.to_owned());
        }
        false
    }
}
