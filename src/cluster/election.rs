//! One replica leads: a Lease, written by compare-and-swap, whose expiry each replica judges by its own clock.
//!
//! A wall clock is never compared: a holder is gone when its Lease was not written for `leaseDurationSeconds` as this
//! replica sees it. A leader that could not renew for shorter than that stops by itself, so that no two lead.

mod lease;

use std::net::SocketAddr;
use std::time::Duration;

use crate::engine::time::BootTime;

pub use lease::{Elector, follow, run};

/// A Lease that was not written for so long is free.
pub const LEASE: Duration = Duration::from_secs(6);
/// A leader that could not renew for so long stops: before others may take over.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(4);
/// How often each replica looks.
pub const RETRY: Duration = Duration::from_secs(1);
/// A Lease is free after its end, not in that moment.
const AFTER: Duration = Duration::from_millis(10);

/// The Lease as it was last read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Who holds it; empty: nobody.
    pub holder: String,
    /// `metadata.resourceVersion`.
    pub version: String,
    /// How long it holds without a renewal, as its holder says.
    pub duration: Duration,
}

/// A leadership without interruption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// The resourceVersion of the write that won it: larger than that of any term before, of whichever replica.
    pub epoch: u64,
    /// It ends here, unless it is renewed.
    pub until: BootTime,
}

/// Who leads, as one replica knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    mine: Option<Term>,
    leader: Option<SocketAddr>,
    blind: bool,
}

impl Standing {
    /// A replica that leads in a term, or that knows where the leader is.
    pub const fn new(mine: Option<Term>, leader: Option<SocketAddr>) -> Self {
        Self {
            mine,
            leader,
            blind: false,
        }
    }

    /// A replica that could not read the Lease for so long that another may lead meanwhile. Where the leader was reached
    /// before is all it knows.
    pub const fn blind(leader: Option<SocketAddr>) -> Self {
        Self {
            mine: None,
            leader,
            blind: true,
        }
    }

    /// Whether this replica led when it looked last; [`Self::term`] is for what must not be late.
    pub const fn leads(&self) -> bool {
        self.mine.is_some()
    }

    /// The term in which this replica may act for the cluster now.
    pub fn term(&self, now: BootTime) -> Option<Term> {
        self.mine.filter(|term| now < term.until)
    }

    /// Where another replica that leads can be reached.
    pub const fn leader(&self) -> Option<SocketAddr> {
        self.leader
    }

    /// Whether it would not be seen here if another replica began to lead.
    pub const fn is_blind(&self) -> bool {
        self.blind
    }
}

/// What one replica remembers.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// The version of the Lease that was last read, and when that was first seen.
    observed: Option<(String, BootTime)>,
    /// When the Lease that another holds is free, if it is not written before.
    free: Option<BootTime>,
    /// When the Lease was last read.
    read: BootTime,
    /// When the last own write was begun that succeeded.
    renewed: Option<BootTime>,
    /// The version of the write that began this term.
    epoch: Option<u64>,
}

/// What to do now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing: somebody else leads.
    Wait,
    /// Create the Lease.
    Create,
    /// Write it with its version as a precondition: to take it.
    Take,
    /// Write it with its version as a precondition: to keep it.
    Renew,
}

impl Memory {
    /// That of a replica that begins.
    pub fn new(now: BootTime) -> Self {
        Self {
            read: now,
            ..Self::default()
        }
    }

    /// The Lease was read.
    pub const fn saw(&mut self, now: BootTime) {
        self.read = now;
    }

    /// Whether another replica may lead by now without this one knowing.
    pub fn is_blind(&self, now: BootTime) -> bool {
        !self.leads(now) && now.since(self.read) >= LEASE
    }

    /// Notes what was read (`None`: there is no Lease) and says what to do. Pure.
    pub fn decide(&mut self, me: &str, seen: Option<&Seen>, now: BootTime) -> Decision {
        self.free = None;
        let Some(seen) = seen else {
            self.observed = None;
            return Decision::Create;
        };
        let known = self
            .observed
            .as_ref()
            .filter(|(version, _)| *version == seen.version);
        let since = known.map_or(now, |(_, since)| *since);
        self.observed = Some((seen.version.clone(), since));
        if seen.holder == me {
            return Decision::Renew;
        }
        let duration = seen.duration.max(LEASE);
        if seen.holder.is_empty() || now.since(since) > duration {
            return Decision::Take;
        }
        self.free = Some(since + duration);
        Decision::Wait
    }

    /// How long after `now` to look again: soon after the moment in which the Lease of another is free, if that is first.
    pub fn pause(&self, now: BootTime) -> Duration {
        if self.leads(now) {
            return RETRY.min(self.remaining(now));
        }
        let free = self.free.filter(|free| now < *free);
        free.map_or(RETRY, |free| RETRY.min(free.since(now) + AFTER))
    }

    /// Own write, begun at `begun`, succeeded.
    pub fn wrote(&mut self, begun: BootTime, version: &str) {
        if !self.leads(begun) || self.epoch.is_none() {
            self.epoch = version.parse().ok();
        }
        self.renewed = Some(begun);
        self.observed = Some((version.to_owned(), begun));
    }

    /// Somebody else has it.
    pub fn lost(&mut self) {
        self.renewed = None;
        self.epoch = None;
    }

    /// The term in which this replica may act for the cluster now. None where the API server's versions are no numbers.
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

    /// For how much longer it may, without another renewal.
    pub fn remaining(&self, now: BootTime) -> Duration {
        let since = self.renewed.map(|renewed| now.since(renewed));
        since.map_or(Duration::ZERO, |since| RENEW_DEADLINE.saturating_sub(since))
    }
}
