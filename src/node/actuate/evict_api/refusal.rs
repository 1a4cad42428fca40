//! Why a pod was not evicted: for a reason of its own, or for one that holds for every pod of the node.

use std::time::Duration;

use crate::crd::eviction::{Delay, Objection};

/// Why a pod was not evicted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// A `PodDisruptionBudget` forbids it, or the budget of evictions of its namespace or owner.
    #[error("{0}")]
    Budget(String),
    /// More than one selects the pod.
    #[error("{0} Remove all but one of its PodDisruptionBudgets")]
    ManyBudgets(String),
    /// It must not be evicted any more.
    #[error("{0}")]
    Objection(Objection),
    /// The controller, the API server or a webhook forbids it.
    #[error("it was refused: {0}")]
    Server(String),
    /// Somebody who has to be asked wants to be left alone, or has no answer.
    #[error("{}{why}", introduction(*by))]
    Wait {
        /// For how long.
        wait: Duration,
        /// Who.
        by: Delay,
        /// Why.
        why: String,
    },
    /// The API server can't be reached.
    #[error("the API server can't be reached: {0}")]
    Away(String),
    /// The API server did not answer, and the pod is still there.
    #[error("the pod is still there after an attempt without an answer: {0}")]
    Unanswered(String),
    /// New pods are not kept away from the node: this one's successor would come straight back.
    #[error("the node has no taint of ours yet: {0}")]
    Open(String),
    /// Its time had passed before it could be sent.
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
    /// What keeps every pod of the node from being evicted; `None`: it is about this pod alone.
    pub const fn obstacle(&self) -> Option<Obstacle> {
        match self {
            Self::Wait { by, .. } => Some(Obstacle::Wait(*by)),
            Self::Away(_) => Some(Obstacle::Away),
            Self::Open(_) => Some(Obstacle::Open),
            Self::Late => Some(Obstacle::Late),
            Self::Budget(_)
            | Self::ManyBudgets(_)
            | Self::Objection(_)
            | Self::Server(_)
            | Self::Unanswered(_) => None,
        }
    }
}

/// What keeps every pod of the node from being evicted, in the order in which an eviction meets it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// As [`Refusal::Late`].
    Late,
    /// As [`Refusal::Open`].
    Open,
    /// As [`Refusal::Away`].
    Away,
    /// As [`Refusal::Wait`].
    Wait(Delay),
}

impl Obstacle {
    /// Whether the next evaluation mostly finds it gone: a taint takes a moment to stand.
    pub const fn is_passing(self) -> bool {
        matches!(self, Self::Late | Self::Open)
    }
}
