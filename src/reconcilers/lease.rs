//! The Lease of an agent, read only as far as it is used: five hundred may arrive in a second.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, Time};
use kube::Resource;
use serde::Deserialize;

use crate::crd::Summary;
use crate::metrics_api::compose::Heartbeat;

/// What a Lease holds for that does not say so sensibly...
const USUAL: Duration = Duration::from_secs(40);
/// ...and at most.
const LONGEST: Duration = Duration::from_hours(1);
/// A renewal takes its way: an agent is silent so long after its Lease has run out.
const GRACE: Duration = Duration::from_secs(10);

/// One state of a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renewal {
    /// `metadata.uid`
    pub uid: String,
    /// `metadata.resourceVersion`
    pub version: String,
    /// How long it holds without a renewal, as its holder says.
    pub holds: Duration,
    /// Somebody holds it.
    pub held: bool,
}

impl Renewal {
    /// How long after it its holder is silent.
    pub fn grace(&self) -> Duration {
        self.holds + GRACE
    }
}

/// A Lease.
#[derive(Clone, Debug, Deserialize, Resource)]
#[resource(inherit = Lease)]
#[serde(from = "Whole")]
pub struct LeaseObject {
    metadata: ObjectMeta,
    summary: Option<String>,
    spec: Spec,
}

#[derive(Deserialize)]
struct Whole {
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

impl From<Whole> for LeaseObject {
    fn from(whole: Whole) -> Self {
        let metadata = ObjectMeta {
            name: whole.metadata.name,
            uid: whole.metadata.uid,
            resource_version: whole.metadata.resource_version,
            ..ObjectMeta::default()
        };
        Self {
            metadata,
            summary: whole.metadata.annotations.and_then(|known| known.summary),
            spec: whole.spec.unwrap_or_default(),
        }
    }
}

impl LeaseObject {
    /// What its agent says of the node; `None`: nobody holds it.
    pub fn heartbeat(&self) -> Option<Heartbeat> {
        self.is_held().then(|| Heartbeat {
            time: self.renewed().map(Time),
            summary: self.summary(),
        })
    }

    /// When it was renewed last, by the clock of the node.
    pub fn renewed(&self) -> Option<Timestamp> {
        self.spec.renew_time.as_ref().map(|time| time.0)
    }

    /// The node's health and load, as its agent told it last.
    pub fn summary(&self) -> Summary {
        let summary = self.summary.as_deref().map(Summary::parse);
        summary.unwrap_or_default()
    }

    fn is_held(&self) -> bool {
        let holder = self.spec.holder_identity.as_deref();
        holder.is_some_and(|holder| !holder.is_empty())
    }

    /// What it says.
    pub fn renewal(self) -> Renewal {
        let seconds = self.spec.lease_duration_seconds.unwrap_or(0);
        let holds = u64::try_from(seconds).map_or(Duration::ZERO, Duration::from_secs);
        Renewal {
            held: self.is_held(),
            uid: self.metadata.uid.unwrap_or_default(),
            version: self.metadata.resource_version.unwrap_or_default(),
            holds: if holds.is_zero() {
                USUAL
            } else {
                holds.min(LONGEST)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn renewal(spec: &Value) -> Renewal {
        let metadata = json!({"name": "n", "uid": "u", "resourceVersion": "7", "managedFields": [{"manager": "m"}]});
        let object: LeaseObject =
            serde_json::from_value(json!({"metadata": metadata, "spec": spec})).expect("a Lease");
        object.renewal()
    }

    #[test]
    fn a_lease_holds_for_what_it_says_within_reason() {
        let read = renewal(&json!({"holderIdentity": "n", "leaseDurationSeconds": 240}));
        assert_eq!((read.uid.as_str(), read.version.as_str()), ("u", "7"));
        assert_eq!((read.holds, read.held), (Duration::from_mins(4), true));
        for (said, holds) in [(-5, USUAL), (0, USUAL), (i32::MAX, LONGEST)] {
            assert_eq!(renewal(&json!({"leaseDurationSeconds": said})).holds, holds);
        }
    }

    #[test]
    fn a_lease_that_was_given_back_is_held_by_nobody() {
        for spec in [json!(null), json!({}), json!({"holderIdentity": ""})] {
            assert!(!renewal(&spec).held, "{spec}");
        }
    }
}
