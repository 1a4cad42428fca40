//! How many evictions are allowed in how long, and of what.

use std::fmt;
use std::time::Duration;

use jiff::SignedDuration;

/// No budget allows more: what is counted fits into one object of the API server.
pub const MAX_EVICTIONS: u16 = 1000;
/// No budget counts for longer.
pub const MAX_WINDOW: Duration = Duration::from_hours(1);

/// At most so many evictions in any time of this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// From 0, which allows none, to [`MAX_EVICTIONS`].
    pub evictions: u16,
    /// From 1 s to [`MAX_WINDOW`].
    pub window: Duration,
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let window = SignedDuration::try_from(self.window).unwrap_or_default();
        write!(f, "{} in {window:#}", self.evictions)
    }
}

/// What a budget is of, the broadest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// All nodes.
    Fleet,
    /// The nodes of one `topology.kubernetes.io/zone`; a node without one is in none.
    Zone,
    /// One node.
    Node,
    /// The pods of one namespace.
    Namespace,
    /// The pods of one controller, as their ownerReferences name it: of a Deployment that is the `ReplicaSet`.
    Owner,
}

impl Scope {
    /// All, the broadest first.
    pub const ALL: [Self; 5] = [
        Self::Fleet,
        Self::Zone,
        Self::Node,
        Self::Namespace,
        Self::Owner,
    ];

    /// One word for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fleet => "fleet",
            Self::Zone => "zone",
            Self::Node => "node",
            Self::Namespace => "namespace",
            Self::Owner => "owner",
        }
    }
}

/// One budget of each scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// Of all nodes together.
    pub fleet: Budget,
    /// Of each zone.
    pub zone: Budget,
    /// Of each node.
    pub node: Budget,
    /// Of each namespace.
    pub namespace: Budget,
    /// Of each controller of pods.
    pub owner: Budget,
}

impl Budgets {
    /// That of a scope.
    pub const fn of(&self, scope: Scope) -> Budget {
        match scope {
            Scope::Fleet => self.fleet,
            Scope::Zone => self.zone,
            Scope::Node => self.node,
            Scope::Namespace => self.namespace,
            Scope::Owner => self.owner,
        }
    }

    /// How long an eviction counts for the budget that remembers longest.
    pub fn longest(&self) -> Duration {
        let windows = Scope::ALL.map(|scope| self.of(scope).window);
        windows.into_iter().max().unwrap_or_default()
    }
}
