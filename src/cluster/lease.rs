//! The Lease of an agent. Decodes only the fields in use: five hundred may arrive per second.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::Resource;
use serde::Deserialize;

use crate::crd::Summary;

/// The assumed duration of a Lease that has no valid one.
const DEFAULT_DURATION: Duration = Duration::from_secs(40);
/// Longer durations count as this one.
const MAX_DURATION: Duration = Duration::from_hours(1);
/// Time after the expiry of a Lease before its agent counts as unresponsive, for renewals in flight.
const GRACE: Duration = Duration::from_secs(10);

/// Content of an agent's Lease.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LeaseContent {
    /// Renewal time, by the node's clock.
    pub time: Option<Time>,
    /// The node's load.
    pub summary: Summary,
}

/// A Lease at one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseState {
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.resourceVersion`
    pub version: String,
    /// `spec.leaseDurationSeconds`, within limits.
    pub duration: Duration,
    /// It has a holder.
    pub held: bool,
}

impl LeaseState {
    /// How long after a renewal its holder counts as unresponsive.
    pub fn grace(&self) -> Duration {
        self.duration + GRACE
    }
}

/// A Lease.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = Lease)]
#[serde(from = "FullLease")]
pub struct LeaseObject {
    metadata: ObjectMeta,
    summary: Option<String>,
    spec: Spec,
}

#[derive(Deserialize)]
struct FullLease {
    metadata: Meta,
    spec: Option<Spec>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta {
    name: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    annotations: Option<Annotations>,
}

#[derive(Default, Deserialize)]
struct Annotations {
    #[serde(rename = "plimsoll.dev/summary")]
    summary: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    holder_identity: Option<String>,
    renew_time: Option<MicroTime>,
    lease_duration_seconds: Option<i32>,
}

impl From<FullLease> for LeaseObject {
    fn from(full: FullLease) -> Self {
        let metadata = ObjectMeta {
            name: full.metadata.name,
            uid: full.metadata.uid,
            resource_version: full.metadata.resource_version,
            ..ObjectMeta::default()
        };
        Self {
            metadata,
            summary: full.metadata.annotations.and_then(|known| known.summary),
            spec: full.spec.unwrap_or_default(),
        }
    }
}

impl LeaseObject {
    /// The heartbeat of its agent; `None` if the Lease has no holder.
    pub fn heartbeat(&self) -> Option<LeaseContent> {
        self.is_held().then(|| LeaseContent {
            time: self.renewed().map(Time),
            summary: self.summary(),
        })
    }

    /// When it was last renewed, by the node's clock.
    pub fn renewed(&self) -> Option<Timestamp> {
        self.spec.renew_time.as_ref().map(|time| time.0)
    }

    /// The node's health and load as last reported by its agent.
    pub fn summary(&self) -> Summary {
        let summary = self.summary.as_deref().map(Summary::parse);
        summary.unwrap_or_default()
    }

    fn is_held(&self) -> bool {
        let holder = self.spec.holder_identity.as_deref();
        holder.is_some_and(|holder| !holder.is_empty())
    }

    /// Its current state.
    pub fn state(self) -> LeaseState {
        let seconds = self.spec.lease_duration_seconds.unwrap_or(0);
        let duration = u64::try_from(seconds).map_or(Duration::ZERO, Duration::from_secs);
        LeaseState {
            held: self.is_held(),
            uid: self.metadata.uid.unwrap_or_default(),
            version: self.metadata.resource_version.unwrap_or_default(),
            duration: if duration.is_zero() {
                DEFAULT_DURATION
            } else {
                duration.min(MAX_DURATION)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn state(spec: &Value) -> LeaseState {
        let metadata = json!({"name": "n", "uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "m"}]});
        let object: LeaseObject =
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a Lease");
        object.state()
    }

    #[test]
    fn the_duration_of_a_lease_is_limited() {
        let read = state(&json!({"holderIdentity": "n", "leaseDurationSeconds": 240}));
        assert_eq!((read.uid.as_str(), read.version.as_str()), ("u", "7"));
        assert_eq!((read.duration, read.held), (Duration::from_mins(4), true));
        for (seconds, duration) in [
            (-5, DEFAULT_DURATION),
            (0, DEFAULT_DURATION),
            (i32::MAX, MAX_DURATION),
        ] {
            assert_eq!(
                state(&json!({"leaseDurationSeconds": seconds})).duration,
                duration
            );
        }
    }

    #[test]
    fn a_released_lease_has_no_holder() {
        for spec in [json!(null), json!({}), json!({"holderIdentity": ""})] {
            assert!(!state(&spec).held, "{spec}");
        }
    }
}
