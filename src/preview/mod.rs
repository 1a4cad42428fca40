//! `plimsoll preview`: what policies would do on a live cluster right now. Reads, and decides by the engine alone.
//!
//! ```text
//!  policies of the cluster ◄─ laid over ─ files ──► Objects ──► compile, node by node ─┐
//!  Node, Pods, NodeWatermark, /stats/summary of the kubelet ──► Looks ─────────────────┴─► Engine ──► Preview
//! ```

mod foresee;
mod kept;
mod overlay;
mod read;
mod reasons;
mod report;
mod summary;
mod table;

use std::sync::Arc;

use crate::crd::pod_facts::{self, PodFactsError, PodObject};
use crate::engine::pod::Pod;
use crate::engine::units::Quota;

pub use self::foresee::{Given, Scene, foresee};
pub use self::kept::Kept;
pub use self::overlay::overlay;
pub use self::read::{Answer, Cluster, Node, Options, ReadError, Selection, Silence, subjects};
pub use self::report::{NodePreview, PodPreview, Preview, RulePreview, Source, Standing};
pub use self::summary::Summary;
pub use self::table::Table;

/// The annotation of a static pod's mirror that holds the UID by which its kubelet knows it.
const MIRROR: &str = "kubernetes.io/config.mirror";
/// The labels of our agents' pods, as the chart has them: an agent leaves its own pod alone.
const AGENT: [(&str, &str); 2] = [
    ("app.kubernetes.io/name", "plimsoll"),
    ("app.kubernetes.io/component", "agent"),
];

/// A pod that may be acted on.
#[derive(Clone, Debug, PartialEq)]
pub struct Subject {
    /// The facts that decisions rest on.
    pub pod: Arc<Pod>,
    /// What its cgroup's quota is, going by its limits.
    pub quota: Quota,
    /// Its UID in the kubelet's figures.
    pub kubelet_uid: String,
}

impl Subject {
    /// The pod as an API server has it.
    ///
    /// # Errors
    /// Where the object can't be read.
    pub fn of(pod: &PodObject) -> Result<Self, PodFactsError> {
        let mut facts = pod_facts::pod_facts(pod)?;
        let known_as = pod_facts::annotation(&pod.metadata, MIRROR);
        let kubelet_uid = known_as.unwrap_or(&facts.uid.0).to_owned();
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
    AGENT.iter().all(has)
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
        Subject::of(&pod).expect("facts").kubelet_uid
    }

    #[test]
    fn only_the_mirror_of_a_static_pod_has_the_figures_of_another_uid() {
        let named = json!({"kubernetes.io/config.hash": "another"});
        assert_eq!(kubelet_uid(&named), "own");
        let mirror =
            json!({"kubernetes.io/config.hash": "static", "kubernetes.io/config.mirror": "static"});
        assert_eq!(kubelet_uid(&mirror), "static");
    }
}
