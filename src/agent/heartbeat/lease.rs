//! Builds the Lease that the agent writes. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, OwnerReference};
use kube::api::ObjectMeta;

use super::HeartbeatInput;
use crate::crd::Summary;
use crate::crd::summary::ANNOTATION;

/// A new Lease.
pub(super) fn new(namespace: &str, node: &str) -> Lease {
    Lease {
        metadata: ObjectMeta {
            namespace: Some(namespace.to_owned()),
            name: Some(node.to_owned()),
            ..ObjectMeta::default()
        },
        spec: None,
    }
}

/// The renewed Lease: with the next sequence, and owned by the Node if its UID is known. Fields of other writers stay.
pub(super) fn renewed(
    mut lease: Lease,
    input: &HeartbeatInput,
    duration: Duration,
    now: Timestamp,
) -> Lease {
    let node = lease.metadata.name.clone().unwrap_or_default();
    if let Some(uid) = &input.node_uid {
        let owners = lease.metadata.owner_references.get_or_insert_default();
        owners.retain(|owner| owner.kind != "Node");
        owners.push(OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: node.clone(),
            uid: uid.to_string(),
            ..OwnerReference::default()
        });
    }
    let annotations = lease.metadata.annotations.get_or_insert_default();
    let before = annotations.get(ANNOTATION);
    let before = before.and_then(|text| Summary::parse(text).sequence);
    let summary = Summary {
        sequence: Some(before.map_or(1, |before| before.wrapping_add(1))),
        ..input.summary.clone()
    };
    annotations.insert(ANNOTATION.to_owned(), summary.to_string());
    let is_first = lease.spec.is_none();
    let spec = lease.spec.take().unwrap_or_default();
    // A removed agent has released it.
    let acquired_now = spec.holder_identity.as_ref() != Some(&node);
    let acquired = spec.acquire_time.filter(|_| !acquired_now);
    let transitions = spec.lease_transitions.unwrap_or(0);
    lease.spec = Some(LeaseSpec {
        holder_identity: Some(node),
        lease_duration_seconds: i32::try_from(duration.as_secs()).ok(),
        renew_time: Some(MicroTime(now)),
        acquire_time: acquired.or(Some(MicroTime(now))),
        lease_transitions: Some(transitions.saturating_add(i32::from(acquired_now && !is_first))),
        ..spec
    });
    lease
}

/// The released Lease; `None` if it is not held by this node.
pub(super) fn released(mut lease: Lease, node: &str) -> Option<Lease> {
    let spec = lease.spec.as_mut()?;
    if spec.holder_identity.as_deref() != Some(node) {
        return None;
    }
    spec.holder_identity = None;
    Some(lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DURATION: Duration = Duration::from_secs(40);

    fn input(uid: Option<&str>) -> HeartbeatInput {
        HeartbeatInput {
            node_uid: uid.map(Into::into),
            summary: Summary {
                throttled: Some(3),
                ..Summary::default()
            },
            ..HeartbeatInput::default()
        }
    }

    fn renew(lease: Lease, uid: Option<&str>) -> Lease {
        renewed(lease, &input(uid), DURATION, Timestamp::UNIX_EPOCH)
    }

    fn owners(lease: &Lease) -> Vec<(String, String)> {
        let owners = lease.metadata.owner_references.clone().unwrap_or_default();
        let owner = |it: OwnerReference| (it.kind, it.uid);
        owners.into_iter().map(owner).collect()
    }

    fn summary(lease: &Lease) -> Summary {
        let annotations = lease.metadata.annotations.as_ref().expect("annotations");
        Summary::parse(&annotations[ANNOTATION])
    }

    #[test]
    fn a_renewal_sets_holder_duration_time_owner_and_sequence() {
        let first = renew(new("leases", "worker"), Some("u"));
        let spec = first.spec.clone().expect("a spec");
        assert_eq!(spec.holder_identity.as_deref(), Some("worker"));
        assert_eq!(spec.lease_duration_seconds, Some(40));
        assert!(spec.renew_time.is_some());
        assert_eq!(owners(&first), [("Node".to_owned(), "u".to_owned())]);
        assert_eq!(summary(&first).sequence, Some(1));
        assert_eq!(summary(&first).throttled, Some(3));
        assert_eq!(summary(&renew(first, None)).sequence, Some(2));
    }

    #[test]
    fn the_owner_is_set_once_known_and_replaced_by_a_new_node() {
        let lease = renew(new("leases", "worker"), None);
        assert_eq!(owners(&lease), []);
        let lease = renew(renew(lease, Some("old")), Some("new"));
        assert_eq!(owners(&lease), [("Node".to_owned(), "new".to_owned())]);
        assert_eq!(owners(&renew(lease, None)).len(), 1, "the owner stays");
    }

    #[test]
    fn fields_of_other_writers_stay() {
        let mut lease = new("leases", "worker");
        let other = OwnerReference {
            kind: "Thing".to_owned(),
            ..OwnerReference::default()
        };
        lease.metadata.owner_references = Some(vec![other]);
        let annotations = lease.metadata.annotations.get_or_insert_default();
        annotations.insert("theirs".to_owned(), "1".to_owned());
        let lease = renew(lease, Some("u"));
        assert_eq!(owners(&lease).len(), 2);
        let annotations = lease.metadata.annotations.expect("annotations");
        assert_eq!(annotations["theirs"], "1");
    }

    #[test]
    fn acquiring_a_released_lease_counts_a_transition() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let first = renewed(new("leases", "worker"), &input(None), DURATION, at(1));
        let transitions = |lease: &Lease| lease.spec.as_ref().and_then(|it| it.lease_transitions);
        assert_eq!(transitions(&first), Some(0));
        let second = renewed(first, &input(None), DURATION, at(2));
        assert_eq!(transitions(&second), Some(0));
        let lease = released(second, "worker").expect("ours");
        let again = renewed(lease, &input(None), DURATION, at(3));
        assert_eq!(transitions(&again), Some(1));
        let spec = again.spec.expect("a spec");
        assert_eq!(spec.acquire_time, Some(MicroTime(at(3))));
    }

    #[test]
    fn only_our_own_lease_is_released() {
        let lease = renew(new("leases", "worker"), None);
        assert!(released(lease.clone(), "other").is_none());
        let released_spec = released(lease, "worker").and_then(|lease| lease.spec);
        assert_eq!(released_spec.expect("a spec").holder_identity, None);
    }
}
