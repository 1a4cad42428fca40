//! Events of refusals: one a minute for each node and reason, and no more than so many in all.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::Semaphore;

use super::review::{Asked, Refusal};
use crate::cluster::clock;
use crate::cluster::events::{Events, Happening, about_node};
use crate::engine::time::BootTime;

/// What was told is not told again for so long.
const PAUSE: Duration = Duration::from_mins(1);
/// So many in that time, and at once.
const MOST: usize = 60;
const MOST_AT_ONCE: usize = 16;

/// Tells of them.
pub struct Teller {
    events: Events,
    told: Mutex<Told>,
    room: Arc<Semaphore>,
}

impl Teller {
    /// In the controller's name, on this instance.
    pub fn new(client: Client, instance: &str) -> Self {
        Self {
            events: Events::new(client, "plimsoll-controller", instance),
            told: Mutex::default(),
            room: Arc::new(Semaphore::new(MOST_AT_ONCE)),
        }
    }

    /// Tells of a refusal, if it is not too much.
    pub fn refused(&self, asked: &Asked, refusal: &Refusal) {
        if !asked.is_named() {
            return;
        }
        let about = about(asked);
        let key = (about.name.clone().unwrap_or_default(), refusal.label);
        let now = clock::now();
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if !told.is_new(key, now) {
            return;
        }
        drop(told);
        let Ok(room) = Arc::clone(&self.room).try_acquire_owned() else {
            return;
        };
        let happening = Happening {
            about,
            warning: true,
            reason: "EvictionRefused".to_owned(),
            action: "Evict".to_owned(),
            message: message(asked, refusal),
        };
        let events = self.events.clone();
        tokio::spawn(async move {
            let _room = room;
            if let Err(error) = events.publish(happening).await {
                tracing::debug!(why = error.words(), "failed to tell of a refused eviction");
            }
        });
    }
}

/// The node whose agent asked; where that is not known the pod that it asked for.
fn about(asked: &Asked) -> ObjectReference {
    if let Some(node) = &asked.node {
        return about_node(node);
    }
    ObjectReference {
        api_version: Some("v1".to_owned()),
        kind: Some("Pod".to_owned()),
        namespace: Some(asked.namespace.clone()),
        name: Some(asked.pod.clone()),
        uid: asked.pod_uid.clone(),
        ..ObjectReference::default()
    }
}

/// A budget's refusals are about no pod: they are the same for all.
fn message(asked: &Asked, refusal: &Refusal) -> String {
    let why = &refusal.message;
    if refusal.scope.is_some() {
        return format!("an agent may not evict a pod now: {why}");
    }
    let (namespace, pod) = (&asked.namespace, &asked.pod);
    format!("the agent may not evict {namespace}/{pod}: {why}")
}

/// What was told of late.
#[derive(Default)]
struct Told(HashMap<(String, &'static str), BootTime>);

impl Told {
    fn is_new(&mut self, key: (String, &'static str), now: BootTime) -> bool {
        self.0.retain(|_, at| now.since(*at) < PAUSE);
        if self.0.len() >= MOST || self.0.contains_key(&key) {
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
    fn a_refusal_is_told_once_a_minute_and_few_are_in_all() {
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        let key = |node: usize| (format!("node{node}"), "fleet");
        let mut told = Told::default();
        assert!(told.is_new(key(0), at(0)));
        assert!(!told.is_new(key(0), at(59)));
        assert!(told.is_new(("node0".to_owned(), "node"), at(59)));
        assert!(told.is_new(key(0), at(60)));
        let more = (1..1000).filter(|node| told.is_new(key(*node), at(61)));
        assert_eq!(more.count(), MOST - 2);
    }
}
