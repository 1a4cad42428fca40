//! `plimsoll preview`: what policies would do on a live cluster. Only reads the cluster, and runs the engine on what it read.
//!
//! ```text
//!  cluster's policies, overlaid by files ──► Objects ──► compile for each node ────────┐
//!  Node, Pods, NodeWatermark, /stats/summary of the kubelet ──► Samples ───────────────┴─► Engine ──► Preview
//! ```

mod agent_status;
mod evaluate;
mod history;
mod overlay;
mod read;
mod reasons;
mod report;
mod standing;
mod summary;
mod table;

use std::sync::Arc;

use crate::crd::pod_facts::{self, PodFactsError, PodObject};
use crate::engine::pod::Pod;
use crate::engine::units::Quota;

pub use self::agent_status::ReportedWatermark;
pub use self::evaluate::{NodeInput, ValueOverrides, evaluate};
pub use self::history::{History, NodeHistory, RuleHistory};
pub use self::overlay::overlay;
pub use self::read::{
    Cluster, ClusterNode, ClusterReadError, KubeletError, KubeletResult, Options, Selection,
    subjects,
};
pub use self::report::{
    LoadLines, NodePreview, PodPreview, Preview, RulePreview, ThresholdComparison, ValueSource,
};
pub use self::standing::StandingPreview;
pub use self::summary::KubeletSummary;
pub use self::table::{Table, wrapped};

/// Annotation of a mirror pod with the UID that the kubelet uses for the static pod.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// Labels of agent pods in the chart; an agent never acts on its own pod.
const AGENT_LABELS: [(&str, &str); 2] = [
    ("app.kubernetes.io/name", "plimsoll"),
    ("app.kubernetes.io/component", "agent"),
];

/// A pod that may be acted on.
#[derive(Clone, Debug, PartialEq)]
pub struct PodSubject {
    /// The facts that the engine decides by.
    pub pod: Arc<Pod>,
    /// The quota of its cgroup, derived from its limits.
    pub quota: Quota,
    /// Its UID in the kubelet's statistics.
    pub kubelet_uid: String,
}

impl PodSubject {
    /// Reads a pod object.
    ///
    /// # Errors
    /// The object is invalid.
    pub fn of(pod: &PodObject) -> Result<Self, PodFactsError> {
        let mut facts = pod_facts::pod_facts(pod)?;
        let mirrored = pod_facts::annotation(&pod.metadata, MIRROR);
        let kubelet_uid = mirrored.unwrap_or(&facts.uid.0).to_owned();
        facts.protected |= is_agent(&facts);
        Ok(Self {
            quota: pod_facts::cpu_quota(pod)?,
            kubelet_uid,
            pod: Arc::new(facts),
        })
    }
}

fn is_agent(pod: &Pod) -> bool {
    let has = |(key, value): &(&str, &str)| pod.labels.get(*key).is_some_and(|own| own == value);
    AGENT_LABELS.iter().all(has)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn kubelet_uid(annotations: &serde_json::Value) -> String {
        let pod = json!({
            "metadata": {"name": "a", "namespace": "tenant", "uid": "own", "annotations": annotations},
            "spec": {"containers": [{"name": "c"}]},
        });
        let pod = serde_json::from_value(pod).expect("a pod");
        PodSubject::of(&pod).expect("facts").kubelet_uid
    }

    #[test]
    fn only_a_mirror_pod_has_another_uid_in_the_kubelet() {
        let named = json!({"kubernetes.io/config.hash": "another"});
        assert_eq!(kubelet_uid(&named), "own");
        let mirror =
            json!({"kubernetes.io/config.hash": "static", "kubernetes.io/config.mirror": "static"});
        assert_eq!(kubelet_uid(&mirror), "static");
    }
}
