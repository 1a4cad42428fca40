//! Leader election by a Lease, written with compare-and-swap. Each replica judges its expiry by its own monotonic clock.
//!
//! Wall clocks are never compared: the Lease has expired when this replica has seen no write to it for `leaseDurationSeconds`. A
//! leader that can't renew stops before that, so that two replicas never lead at a time.

mod lease;

use std::net::SocketAddr;
use std::time::Duration;

use crate::engine::time::BootTime;

pub use lease::{Elector, follow, run};

/// The Lease expires after this time without a renewal.
pub const LEASE_DURATION: Duration = Duration::from_secs(6);
/// A leader that could not renew for this long stops, before others may take over.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(4);
/// How often each replica reads the Lease.
pub const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Margin after the expiry before the Lease is read again.
const EXPIRY_MARGIN: Duration = Duration::from_millis(10);

/// The Lease as last read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObservedLease {
    /// `spec.holderIdentity`; empty if it was released.
    pub holder: String,
    /// `metadata.resourceVersion`.
    pub version: String,
    /// `spec.leaseDurationSeconds`.
    pub duration: Duration,
}

/// An uninterrupted time of leadership.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The resourceVersion of the write that acquired the Lease: larger than that of any earlier term of any replica.
    pub epoch: u64,
    /// When it ends unless renewed.
    pub until: BootTime,
}

/// Leadership as one replica knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leadership {
    mine: Option<Term>,
    leader: Option<SocketAddr>,
    disconnected: bool,
}

impl Leadership {
    /// A replica that leads, or that knows the leader's address.
    pub const fn new(mine: Option<Term>, leader: Option<SocketAddr>) -> Self {
        Self {
            mine,
            leader,
            disconnected: false,
        }
    }

    /// A replica that has not read the Lease for so long that another may lead by now. `leader` is the last known address.
    pub const fn disconnected(leader: Option<SocketAddr>) -> Self {
        Self {
            mine: None,
            leader,
            disconnected: true,
        }
    }

    /// Whether this replica led at the last check; [`Self::term`] checks the deadline too.
    pub const fn leads(&self) -> bool {
        self.mine.is_some()
    }

    /// The term in which this replica may act for the cluster now.
    pub fn term(&self, now: BootTime) -> Option<Term> {
        self.mine.filter(|term| now < term.until)
    }

    /// The address of the leader, if it is another replica.
    pub const fn leader(&self) -> Option<SocketAddr> {
        self.leader
    }

    /// Whether this replica can't see if another one leads.
    pub const fn is_disconnected(&self) -> bool {
        self.disconnected
    }
}

/// The election state of one replica.
#[derive(Clone, Debug, Default)]
pub struct ElectionState {
    /// The version of the Lease last read, and when it was first seen.
    observed: Option<(String, BootTime)>,
    /// When another replica's Lease expires unless renewed.
    expiry: Option<BootTime>,
    /// When the Lease was last read.
    read: BootTime,
    /// When our last successful write was started.
    renewed: Option<BootTime>,
    /// The version of the write that acquired the Lease.
    epoch: Option<u64>,
}

/// The next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElectionStep {
    /// Wait: another replica leads.
    Wait,
    /// Create the Lease.
    Create,
    /// Acquire the Lease, with its version as a precondition.
    Take,
    /// Renew the Lease, with its version as a precondition.
    Renew,
}

impl ElectionState {
    /// The state of a replica that starts now.
    pub fn new(now: BootTime) -> Self {
        Self {
            read: now,
            ..Self::default()
        }
    }

    /// The Lease was read.
    pub const fn lease_read(&mut self, now: BootTime) {
        self.read = now;
    }

    /// Whether another replica may lead by now without this one knowing.
    pub fn is_disconnected(&self, now: BootTime) -> bool {
        !self.leads(now) && now.since(self.read) >= LEASE_DURATION
    }

    /// Records the Lease that was read (`None`: there is none) and decides what to do. Pure.
    pub fn decide(
        &mut self,
        me: &str,
        lease: Option<&ObservedLease>,
        now: BootTime,
    ) -> ElectionStep {
        self.expiry = None;
        let Some(lease) = lease else {
            self.observed = None;
            return ElectionStep::Create;
        };
        let known = self
            .observed
            .as_ref()
            .filter(|(version, _)| *version == lease.version);
        let since = known.map_or(now, |(_, since)| *since);
        self.observed = Some((lease.version.clone(), since));
        if lease.holder == me {
            return ElectionStep::Renew;
        }
        let duration = lease.duration.max(LEASE_DURATION);
        if lease.holder.is_empty() || now.since(since) > duration {
            return ElectionStep::Take;
        }
        self.expiry = Some(since + duration);
        ElectionStep::Wait
    }

    /// The pause until the Lease should be read again: at the retry interval, or just after another replica's Lease expires.
    pub fn pause(&self, now: BootTime) -> Duration {
        if self.leads(now) {
            return RETRY_INTERVAL.min(self.remaining(now));
        }
        let expiry = self.expiry.filter(|expiry| now < *expiry);
        expiry.map_or(RETRY_INTERVAL, |expiry| {
            RETRY_INTERVAL.min(expiry.since(now) + EXPIRY_MARGIN)
        })
    }

    /// Our write, started at `started`, succeeded.
    pub fn wrote(&mut self, started: BootTime, version: &str) {
        if !self.leads(started) || self.epoch.is_none() {
            self.epoch = version.parse().ok();
        }
        self.renewed = Some(started);
        self.observed = Some((version.to_owned(), started));
    }

    /// Another replica has the Lease.
    pub fn lost(&mut self) {
        self.renewed = None;
        self.epoch = None;
    }

    /// The term in which this replica may act for the cluster now; `None` also if resource versions are not numbers.
    pub fn term(&self, now: BootTime) -> Option<Term> {
        let renewed = self.renewed.filter(|_| self.leads(now))?;
        Some(Term {
            epoch: self.epoch?,
            until: renewed + RENEW_DEADLINE,
        })
    }

    /// Whether this replica may act for the cluster now.
    pub fn leads(&self, now: BootTime) -> bool {
        self.renewed
            .is_some_and(|renewed| now.since(renewed) < RENEW_DEADLINE)
    }

    /// Time until this replica stops leading unless it renews.
    pub fn remaining(&self, now: BootTime) -> Duration {
        let since = self.renewed.map(|renewed| now.since(renewed));
        since.map_or(Duration::ZERO, |since| RENEW_DEADLINE.saturating_sub(since))
    }
}
