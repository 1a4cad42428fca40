//! Events of refusals: one a minute for each node and reason, and no more than so many in all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::Client;
use tokio::sync::Semaphore;

use super::refusal::Refusal;
use crate::cluster::clock;
use crate::cluster::events::{Events, Happening, about_node};
use crate::crd::eviction::Target;
use crate::engine::time::BootTime;

/// What was published is not published again for so long.
const PAUSE: Duration = Duration::from_mins(1);
/// So many in that time, and at once.
const MAX_EVENTS: usize = 60;
const MAX_AT_ONCE: usize = 16;

/// Publishes them.
pub struct RefusalEvents {
    events: Events,
    published: Mutex<Published>,
    at_once: Arc<Semaphore>,
}

impl RefusalEvents {
    /// In the controller's name, on this instance.
    pub fn new(client: Client, instance: &str) -> Self {
        Self {
            events: Events::new(client, "plimsoll-controller", instance),
            published: Mutex::default(),
            at_once: Arc::new(Semaphore::new(MAX_AT_ONCE)),
        }
    }

    /// Publishes that a request of the agent of `node` was refused, unless that is too much.
    pub fn refused(&self, node: &str, target: &Target, refusal: &Refusal) {
        // That a pod is gone, or on its way, is what was wanted.
        let Some(why) = refusal.answer.why() else {
            return;
        };
        let key = (node.to_owned(), refusal.label);
        let now = clock::now();
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !published.is_new(key, now) {
            return;
        }
        drop(published);
        let Ok(permit) = Arc::clone(&self.at_once).try_acquire_owned() else {
            return;
        };
        let happening = Happening {
            about: about_node(node),
            warning: true,
            reason: "EvictionRefused".to_owned(),
            action: "Evict".to_owned(),
            message: message(target, refusal.is_general, why),
        };
        let events = self.events.clone();
        tokio::spawn(async move {
            let _permit = permit;
            if let Err(error) = events.publish(happening).await {
                tracing::debug!(
                    why = error.words(),
                    "failed to publish that an eviction was refused"
                );
            }
        });
    }
}

/// A refusal that is about no pod reads the same for all: events of the same words are counted, not repeated.
fn message(target: &Target, is_general: bool, why: &str) -> String {
    if is_general {
        return format!("no pod of the node is evicted now: {why}");
    }
    let Target {
        namespace, name, ..
    } = target;
    format!("{namespace}/{name} is not evicted: {why}")
}

/// What was published in the last minute.
#[derive(Default)]
struct Published(HashMap<(String, &'static str), BootTime>);

impl Published {
    fn is_new(&mut self, key: (String, &'static str), now: BootTime) -> bool {
        self.0.retain(|_, at| now.since(*at) < PAUSE);
        if self.0.len() >= MAX_EVENTS || self.0.contains_key(&key) {
            return false;
        }
        self.0.insert(key, now);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_published_once_a_minute_and_few_are_in_all() {
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        let key = |node: usize| (format!("node{node}"), "fleet");
        let mut published = Published::default();
        assert!(published.is_new(key(0), at(0)));
        assert!(!published.is_new(key(0), at(59)));
        assert!(published.is_new(("node0".to_owned(), "node"), at(59)));
        assert!(published.is_new(key(0), at(60)));
        let more = (1..1000).filter(|node| published.is_new(key(*node), at(61)));
        assert_eq!(more.count(), MAX_EVENTS - 2);
    }
}
