//! Which node a token speaks for.
//!
//! Tokens are verified here, by the keys that the cluster publishes, so that thousands of agents that connect at once ask
//! the API server for nothing. It is asked only of tokens whose key is not known here, few at a time and so often a second.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use thiserror::Error;

use super::super::authn::{self, User};
use super::keys::KeyRing;
use super::metrics::ReportMetrics;
use super::token::{BadToken, Token, Unverified};
use crate::cluster::clock;
use crate::cluster::reviews::{Bounds, Reviews};
use crate::crd::report::AUDIENCE;
use crate::engine::time::BootTime;

/// What a review says of the node that a token is bound to.
pub const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// Tokens of so many agents are kept; each has two for a moment when the kubelet renews it.
const MOST_TOKENS: usize = 1 << 15;
/// A review is good for so long, at most.
const REVIEWED: Duration = Duration::from_mins(2);
/// So many reviews are asked for in a second, and so many at once after a quiet time.
const REVIEWS_A_SECOND: f64 = 50.0;

/// Why it is not known for which node somebody speaks.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Denied {
    /// The token is not believed.
    #[error(transparent)]
    Bad(#[from] BadToken),
    /// It is of a `ServiceAccount` that is not the agents'.
    #[error("the token is not of the agents' ServiceAccount")]
    Account,
    /// It is not bound to a node.
    #[error("the token is bound to no node")]
    NoNode,
    /// The API server, which would have to be asked, does not answer, or was asked too often.
    #[error("failed to ask the API server whose token this is")]
    Unknown,
}

/// Knows nodes by tokens.
pub struct Identity {
    client: Client,
    /// The name of the agents' `ServiceAccount`, as a user.
    pub agents: String,
    keys: Arc<KeyRing>,
    /// The nodes of good tokens, each for as long as its token is valid.
    good: Reviews<Arc<str>>,
    reviews: Reviews<Option<User>>,
    budget: Mutex<Budget>,
    metrics: ReportMetrics,
}

impl Identity {
    /// Agents are this user.
    pub fn new(client: Client, agents: String, metrics: ReportMetrics) -> Self {
        let bounds = |lasts| Bounds {
            lasts,
            most_kept: MOST_TOKENS,
            ..Bounds::default()
        };
        Self {
            keys: Arc::new(KeyRing::new(client.clone(), metrics.clone())),
            client,
            agents,
            good: Reviews::new(bounds(REVIEWED)),
            reviews: Reviews::new(bounds(REVIEWED)),
            budget: Mutex::default(),
            metrics,
        }
    }

    /// The node that the bearer of a token may report for.
    ///
    /// # Errors
    /// None, or it can't be found out.
    pub async fn node(&self, text: &str) -> Result<Arc<str>, Denied> {
        if let Some(node) = self.good.kept(text.as_bytes()) {
            return Ok(node);
        }
        let now = clock::wall();
        let token = Token::read(text)?;
        token.claims.check(AUDIENCE, now)?;
        let mut lasts = Duration::from_secs(token.claims.seconds_left(now));
        let node = match self.keys.verify(&token).await {
            Ok(()) => self.node_of(&token.claims.sub, token.claims.node()),
            Err(Unverified::Forged) => Err(BadToken::Signature.into()),
            // What says itself that it is nobody's of ours is not worth a question.
            Err(Unverified::UnknownKey) if token.claims.sub != self.agents => Err(Denied::Account),
            Err(Unverified::UnknownKey) => {
                lasts = lasts.min(REVIEWED);
                self.review(text).await
            }
        }?;
        self.good.keep(text.as_bytes(), lasts, Arc::clone(&node));
        Ok(node)
    }

    fn node_of(&self, user: &str, node: Option<&str>) -> Result<Arc<str>, Denied> {
        if user != self.agents {
            return Err(Denied::Account);
        }
        node.map(Arc::from).ok_or(Denied::NoNode)
    }

    async fn review(&self, text: &str) -> Result<Arc<str>, Denied> {
        let ask = async {
            if !self.budget().spend(clock::now()) {
                return Err(Denied::Unknown);
            }
            let answer = authn::review(&self.client, text, Some(AUDIENCE)).await;
            self.metrics.reviewed(answer.is_ok());
            answer.map_err(|_| Denied::Unknown)
        };
        let user = self.reviews.answer(text.as_bytes(), ask).await?;
        let user = user.ok_or(BadToken::Signature)?;
        let node = user.extra.get(NODE_NAME).and_then(|names| names.first());
        self.node_of(&user.name, node.map(String::as_str))
    }

    fn budget(&self) -> std::sync::MutexGuard<'_, Budget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How many questions may be asked now: a token bucket.
#[derive(Debug)]
struct Budget {
    left: f64,
    at: BootTime,
}

impl Default for Budget {
    fn default() -> Self {
        Self {
            left: REVIEWS_A_SECOND,
            at: BootTime::default(),
        }
    }
}

impl Budget {
    /// Whether one more may be asked.
    fn spend(&mut self, now: BootTime) -> bool {
        let earned = now.since(self.at).as_secs_f64() * REVIEWS_A_SECOND;
        self.left = (self.left + earned).min(REVIEWS_A_SECOND);
        self.at = now;
        let may = self.left >= 1.0;
        if may {
            self.left -= 1.0;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reviews_are_asked_for_at_a_bounded_rate() {
        let at = |millis| BootTime::default() + Duration::from_millis(millis);
        let mut budget = Budget::default();
        let asked =
            |budget: &mut Budget, millis| (0..1000).filter(|_| budget.spend(at(millis))).count();
        assert_eq!(asked(&mut budget, 0), 50);
        assert_eq!(asked(&mut budget, 10), 0);
        assert_eq!(asked(&mut budget, 100), 5);
        assert_eq!(
            asked(&mut budget, 3_600_000),
            50,
            "no more is saved than a second's"
        );
    }
}
