//! Eviction budgets: how many evictions are allowed per window, and for which scope.

use std::fmt;
use std::time::Duration;

use jiff::SignedDuration;

/// Upper bound of any budget, so that the record fits into one API object.
pub const MAX_EVICTIONS: u16 = 1000;
/// Longest window of any budget.
pub const MAX_WINDOW: Duration = Duration::from_hours(1);

/// At most `evictions` in any window of this length.
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

/// The set of evictions that a budget limits, broadest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum BudgetScope {
    /// All nodes.
    Fleet,
    /// The nodes of one `topology.kubernetes.io/zone`. A node without the label belongs to no zone.
    Zone,
    /// One node.
    Node,
    /// The pods of one namespace.
    Namespace,
    /// The pods of one controller, taken from their ownerReferences: for a Deployment that is the `ReplicaSet`.
    Owner,
}

impl BudgetScope {
    /// All scopes, broadest first.
    pub const ALL: [Self; 5] = [
        Self::Fleet,
        Self::Zone,
        Self::Node,
        Self::Namespace,
        Self::Owner,
    ];

    /// The scope as one word.
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
    /// For all nodes together.
    pub fleet: Budget,
    /// For each zone.
    pub zone: Budget,
    /// For each node.
    pub node: Budget,
    /// For each namespace.
    pub namespace: Budget,
    /// For each controller of pods.
    pub owner: Budget,
}

impl Budgets {
    /// The budget of a scope.
    pub const fn of(&self, scope: BudgetScope) -> Budget {
        match scope {
            BudgetScope::Fleet => self.fleet,
            BudgetScope::Zone => self.zone,
            BudgetScope::Node => self.node,
            BudgetScope::Namespace => self.namespace,
            BudgetScope::Owner => self.owner,
        }
    }

    /// The longest window of all budgets.
    pub fn longest(&self) -> Duration {
        let windows = BudgetScope::ALL.map(|scope| self.of(scope).window);
        windows.into_iter().max().unwrap_or_default()
    }
}
