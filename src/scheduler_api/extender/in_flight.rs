//! Pods that were placed a moment ago, which no report has yet. Pure.
//!
//! The scheduler does not say where it put a pod, so each pod is charged to the node that was ranked first for it, for 2 s: by
//! then the node's agent has reported it.

use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::time::BootTime;

/// How long a pod is charged.
const LIFETIME: Duration = Duration::from_secs(2);
/// Limit of pods; the oldest are dropped. No scheduler places so many in the time.
const MAX_PODS: usize = 8192;

/// CPU and memory, in percent of a node.
pub type Shares = [f64; 2];

/// A hash that is equal in every replica.
pub fn hash(parts: &[&str]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

#[derive(Debug)]
struct Charge {
    pod: u64,
    /// What the node had then, with the pods in flight before it.
    base: Shares,
    share: Shares,
}

/// The pods in flight.
#[derive(Debug, Default)]
pub struct PodsInFlight {
    by_node: HashMap<Arc<str>, VecDeque<Charge>>,
    by_pod: HashMap<u64, (BootTime, Arc<str>)>,
    order: VecDeque<(BootTime, u64)>,
}

impl PodsInFlight {
    /// Removes what has expired.
    pub fn expire(&mut self, now: BootTime) {
        while let Some(&(at, pod)) = self.order.front()
            && (now.since(at) >= LIFETIME || self.order.len() > MAX_PODS)
        {
            self.order.pop_front();
            // A pod that was asked for again has a later entry.
            if self.by_pod.get(&pod).is_some_and(|(last, _)| *last == at) {
                self.remove(pod);
            }
        }
    }

    /// The pod is asked for again: wherever it was ranked first, it is not there.
    pub fn forget(&mut self, uid: &str) {
        self.remove(hash(&[uid]));
    }

    fn remove(&mut self, pod: u64) {
        let Some((_, node)) = self.by_pod.remove(&pod) else {
            return;
        };
        if let Some(charges) = self.by_node.get_mut(&node) {
            charges.retain(|charge| charge.pod != pod);
            if charges.is_empty() {
                self.by_node.remove(&node);
            }
        }
    }

    /// Charges a pod with this share to a node that has `base` now.
    pub fn charge(
        &mut self,
        uid: &str,
        node: &Arc<str>,
        base: Shares,
        share: Shares,
        now: BootTime,
    ) {
        let pod = hash(&[uid]);
        self.remove(pod);
        self.by_pod.insert(pod, (now, Arc::clone(node)));
        self.order.push_back((now, pod));
        let charges = self.by_node.entry(Arc::clone(node)).or_default();
        charges.push_back(Charge { pod, base, share });
        self.expire(now);
    }

    /// What the node has with its pods in flight, at least: what it had before the first of them, and their shares. Not added to
    /// what it has now, for a report may have come between. `None` without any.
    pub fn floor(&self, node: &str) -> Option<Shares> {
        if self.by_node.is_empty() {
            return None;
        }
        let charges = self.by_node.get(node)?;
        let base = charges.front()?.base;
        let sum = |index: usize| charges.iter().map(|it| it.share[index]).sum::<f64>();
        Some([base[0] + sum(0), base[1] + sum(1)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> BootTime {
        BootTime::default() + Duration::from_millis(10_000 + millis)
    }

    fn charged(pods: &[(&str, &str, u64)]) -> PodsInFlight {
        let mut found = PodsInFlight::default();
        for (pod, node, millis) in pods {
            let node: Arc<str> = (*node).into();
            found.charge(pod, &node, [40.0, 10.0], [2.0, 1.0], at(*millis));
        }
        found
    }

    #[test]
    fn pods_are_charged_for_two_seconds() {
        let mut found = charged(&[("p", "a", 0), ("q", "a", 500), ("r", "b", 500)]);
        assert_eq!(found.floor("a"), Some([44.0, 12.0]));
        assert_eq!(found.floor("b"), Some([42.0, 11.0]));
        assert_eq!(found.floor("c"), None);
        found.expire(at(1999));
        assert_eq!(found.floor("a"), Some([44.0, 12.0]));
        found.expire(at(2000));
        assert_eq!(found.floor("a"), Some([42.0, 11.0]));
        found.expire(at(2500));
        assert_eq!((found.floor("a"), found.floor("b")), (None, None));
        assert!(found.by_pod.is_empty() && found.order.is_empty());
    }

    #[test]
    fn a_pod_is_charged_once() {
        let mut found = charged(&[("p", "a", 0), ("p", "b", 100), ("p", "b", 1900)]);
        assert_eq!(
            (found.floor("a"), found.floor("b")),
            (None, Some([42.0, 11.0]))
        );
        // The first entries expire, the last does not.
        found.expire(at(2200));
        assert_eq!(found.floor("b"), Some([42.0, 11.0]));
        found.forget("p");
        assert_eq!(found.floor("b"), None);
        found.expire(at(9000));
        assert!(found.order.is_empty());
    }

    #[test]
    fn it_does_not_grow_without_bound() {
        let mut found = PodsInFlight::default();
        let node: Arc<str> = "a".into();
        for pod in 0..20_000 {
            found.charge(&pod.to_string(), &node, [0.0; 2], [1.0; 2], at(0));
        }
        assert_eq!(found.by_pod.len(), MAX_PODS);
    }
}
