//! Maps tokens to nodes.
//!
//! Tokens are verified locally with the cluster's published keys, so that thousands of agents can connect at once
//! without asking the API server. Only tokens with an unknown key are reviewed by the API server, at a limited rate.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use thiserror::Error;

use super::super::authn::{self, User};
use super::keys::KeyRing;
use super::metrics::ReportMetrics;
use super::token::{AgentToken, BadToken, Unverified};
use crate::clock;
use crate::cluster::reviews::{Bounds, Reviews};
use crate::cluster::token_bucket::TokenBucket;
use crate::crd::report::AUDIENCE;

/// Extra field of a token review with the node that the token is bound to.
pub const NODE_NAME: &str = "authentication.kubernetes.io/node-name";
/// Cache size. Each agent has two tokens for a moment when the kubelet renews one.
const MAX_TOKENS: usize = 1 << 15;
/// Maximum time for which a review is cached.
const REVIEW_TTL: Duration = Duration::from_mins(2);
/// Rate limit of reviews, which is also the burst.
const REVIEWS_PER_SECOND: u32 = 50;

/// Why a token is not accepted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum Denied {
    /// The token is invalid.
    #[error(transparent)]
    Bad(#[from] BadToken),
    /// It belongs to another `ServiceAccount`.
    #[error("the token is not of the agents' ServiceAccount")]
    Account,
    /// It is not bound to a node.
    #[error("the token is not bound to a node")]
    NoNode,
    /// The API server must be asked, but does not answer, or the rate limit is exceeded.
    #[error("failed to have the token reviewed by the API server")]
    Unknown,
}

/// Authenticates agents.
pub struct Identity {
    client: Client,
    /// User name of the agents' `ServiceAccount`.
    pub agents: String,
    keys: Arc<KeyRing>,
    /// Nodes of verified tokens, until the tokens expire.
    good: Reviews<Arc<str>>,
    reviews: Reviews<Option<User>>,
    budget: Mutex<TokenBucket>,
    metrics: ReportMetrics,
}

impl Identity {
    /// `agents` is the agents' user name.
    pub fn new(client: Client, agents: String, metrics: ReportMetrics) -> Self {
        let bounds = |ttl| Bounds {
            ttl,
            max_entries: MAX_TOKENS,
            ..Bounds::default()
        };
        Self {
            keys: Arc::new(KeyRing::new(client.clone(), metrics.clone())),
            client,
            agents,
            good: Reviews::new(bounds(REVIEW_TTL)),
            reviews: Reviews::new(bounds(REVIEW_TTL)),
            budget: Mutex::new(TokenBucket::new(
                REVIEWS_PER_SECOND,
                Duration::from_secs(1) / REVIEWS_PER_SECOND,
            )),
            metrics,
        }
    }

    /// The node that the bearer may report for.
    ///
    /// # Errors
    /// The token is not accepted, or can't be checked.
    pub async fn node(&self, text: &str) -> Result<Arc<str>, Denied> {
        if let Some(node) = self.good.cached(text.as_bytes()) {
            return Ok(node);
        }
        let now = clock::wall_time();
        let token = AgentToken::read(text)?;
        token.claims.check(AUDIENCE, now)?;
        let mut ttl = Duration::from_secs(token.claims.seconds_left(now));
        let node = match self.keys.verify(&token).await {
            Ok(()) => self.node_of(&token.claims.sub, token.claims.node()),
            Err(Unverified::Forged) => Err(BadToken::Signature.into()),
            // A token that does not even claim to be the agents' is not worth a review.
            Err(Unverified::UnknownKey) if token.claims.sub != self.agents => Err(Denied::Account),
            Err(Unverified::UnknownKey) => {
                ttl = ttl.min(REVIEW_TTL);
                self.review(text).await
            }
        }?;
        self.good.insert(text.as_bytes(), ttl, Arc::clone(&node));
        Ok(node)
    }

    fn node_of(&self, user: &str, node: Option<&str>) -> Result<Arc<str>, Denied> {
        if user != self.agents {
            return Err(Denied::Account);
        }
        node.map(Arc::from).ok_or(Denied::NoNode)
    }

    async fn review(&self, text: &str) -> Result<Arc<str>, Denied> {
        let review = async {
            if !self.budget().try_take(clock::boot_time()) {
                return Err(Denied::Unknown);
            }
            let answer = authn::review(&self.client, text, Some(AUDIENCE)).await;
            self.metrics.reviewed(answer.is_ok());
            answer.map_err(|_| Denied::Unknown)
        };
        let user = self.reviews.answer(text.as_bytes(), review).await?;
        let user = user.ok_or(BadToken::Signature)?;
        let node = user.extra.get(NODE_NAME).and_then(|names| names.first());
        self.node_of(&user.name, node.map(String::as_str))
    }

    fn budget(&self) -> std::sync::MutexGuard<'_, TokenBucket> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
