//! Why a pod was not evicted: a reason of this pod, or one that applies to every pod of the node.

use std::time::Duration;

use crate::crd::eviction::{Delay, Objection};

/// Why a pod was not evicted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A `PodDisruptionBudget` or the eviction budget of its namespace or owner forbids it.
    #[error("{0}")]
    Budget(String),
    /// More than one `PodDisruptionBudget` selects the pod.
    #[error("{0} Remove all but one of its PodDisruptionBudgets")]
    ManyBudgets(String),
    /// The pod may no longer be evicted.
    #[error("{0}")]
    Objection(Objection),
    /// The controller, the API server or a webhook forbids it.
    #[error("it was refused: {0}")]
    Server(String),
    /// The server or the controller asks for a delay, or does not answer.
    #[error("{}{why}", introduction(*by))]
    Wait {
        /// The delay.
        wait: Duration,
        /// Who asked for it.
        by: Delay,
        /// Why.
        why: String,
    },
    /// The API server can't be reached.
    #[error("the API server can't be reached: {0}")]
    ApiServerUnreachable(String),
    /// The API server did not answer, and the pod is still there.
    #[error("the pod is still there after an attempt without an answer: {0}")]
    Unanswered(String),
    /// The node is not tainted yet: the pod's replacement could come straight back.
    #[error("the node has no taint of ours yet: {0}")]
    NotTainted(String),
    /// The request expired before it could be sent.
    #[error("the request could not be sent before the next evaluation")]
    Late,
}

const fn introduction(by: Delay) -> &'static str {
    match by {
        Delay::Budget | Delay::Leader => "",
        Delay::Server => "the API server is busy: ",
    }
}

impl Refusal {
    /// The obstacle to all evictions on the node; `None` if the reason is about this pod only.
    pub const fn obstacle(&self) -> Option<EvictionObstacle> {
        match self {
            Self::Wait { by, .. } => Some(EvictionObstacle::Wait(*by)),
            Self::ApiServerUnreachable(_) => Some(EvictionObstacle::ApiServerUnreachable),
            Self::NotTainted(_) => Some(EvictionObstacle::NotTainted),
            Self::Late => Some(EvictionObstacle::Late),
            Self::Budget(_)
            | Self::ManyBudgets(_)
            | Self::Objection(_)
            | Self::Server(_)
            | Self::Unanswered(_) => None,
        }
    }
}

/// An obstacle to all evictions on the node, in the order in which an eviction meets them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum EvictionObstacle {
    /// See [`Refusal::Late`].
    Late,
    /// See [`Refusal::NotTainted`].
    NotTainted,
    /// See [`Refusal::ApiServerUnreachable`].
    ApiServerUnreachable,
    /// See [`Refusal::Wait`].
    Wait(Delay),
}

impl EvictionObstacle {
    /// Whether it is usually gone by the next evaluation: setting a taint takes a moment.
    pub const fn is_transient(self) -> bool {
        matches!(self, Self::Late | Self::NotTainted)
    }
}
