//! The pod to be placed.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, bail};
use k8s_openapi::api::core::v1::Toleration;
use serde::Deserialize;
use serde_json::Value;

use crate::crd::node_selector::Placement;
use crate::crd::pod_facts::{PodObject, pod_facts};
use crate::engine::load::expected_of;
use crate::engine::units::{Bytes, MilliCpu};

/// A pod, with what decides where it may run.
#[derive(Clone, Debug)]
pub struct ExplainedPod {
    /// Namespace and name.
    pub name: String,
    /// The CPU that it is expected to use.
    pub cpu: MilliCpu,
    /// The memory that it is expected to use.
    pub memory: Bytes,
    pub placement: Placement,
    pub tolerations: Vec<Toleration>,
    /// The node where it is.
    pub node: Option<String>,
    /// A scheduler by another name may use other terms.
    pub scheduler: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Tolerates {
    tolerations: Vec<Toleration>,
    node_name: Option<String>,
    scheduler_name: Option<String>,
}

impl ExplainedPod {
    /// From a Pod, or an object with a pod template.
    ///
    /// # Errors
    /// It has no valid pod spec.
    pub fn of(object: &Value) -> anyhow::Result<Self> {
        let mut pod = super::template(object).clone();
        if pod["metadata"]["name"].is_null() {
            // A template has none.
            pod["metadata"]["name"] = object["metadata"]["name"].clone();
            pod["metadata"]["namespace"] = object["metadata"]["namespace"].clone();
        }
        if !pod["spec"]["containers"].is_array() {
            bail!("it is neither a Pod nor a workload with a pod template");
        }
        let spec = &pod["spec"];
        let Tolerates {
            tolerations,
            node_name,
            scheduler_name,
        } = Tolerates::deserialize(spec)?;
        let placement = Placement::deserialize(spec)?;
        let facts = pod_facts(&PodObject::deserialize(&pod)?)?;
        let (cpu, memory) = expected_of(&facts);
        Ok(Self {
            name: facts.full_name().to_string(),
            cpu,
            memory,
            placement,
            tolerations,
            node: node_name,
            scheduler: scheduler_name,
        })
    }
}

/// Reads the first object of a manifest that has a pod.
///
/// # Errors
/// The file cannot be read, or has no such object.
pub fn read_manifest(file: &Path) -> anyhow::Result<ExplainedPod> {
    let name = file.display();
    let text = fs::read_to_string(file).with_context(|| format!("failed to read {name}"))?;
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(&text).with_context(|| format!("failed to read {name}"))?;
    let mut pods = documents.iter().map(ExplainedPod::of);
    match pods.next() {
        None => bail!("{name} is empty"),
        Some(first) => pods
            .find_map(Result::ok)
            .filter(|_| first.is_err())
            .map_or(first, Ok)
            .with_context(|| format!("failed to read {name}")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_pod_is_expected_to_use_most_of_what_it_requests() {
        let container =
            json!({"name": "c", "resources": {"requests": {"cpu": "1", "memory": "1Gi"}}});
        let spec = json!({"containers": [container], "nodeSelector": {"pool": "a"}, "schedulerName": "plimsoll"});
        let pod = json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": spec});
        let of_pod = ExplainedPod::of(&pod).expect("a pod");
        assert_eq!(of_pod.name, "shop/web");
        assert_eq!(of_pod.cpu, MilliCpu(850));
        assert_eq!(of_pod.memory.0, (1_u64 << 30) * 7 / 10);
        assert_eq!(of_pod.scheduler.as_deref(), Some("plimsoll"));
        let workload = json!({"metadata": {"name": "web", "namespace": "shop"}, "spec": {"template": {"spec": pod["spec"]}}});
        let of_workload = ExplainedPod::of(&workload).expect("a template");
        assert_eq!(
            (of_workload.name, of_workload.cpu),
            (of_pod.name, of_pod.cpu)
        );
        let job = json!({"metadata": {"name": "j"}, "spec": {"jobTemplate": {"spec": {"template": {"spec": pod["spec"]}}}}});
        assert_eq!(
            ExplainedPod::of(&job).expect("a template").cpu,
            MilliCpu(850)
        );
        let error = ExplainedPod::of(&json!({"kind": "ConfigMap", "metadata": {"name": "c"}}));
        let error = error.expect_err("no pod").to_string();
        assert!(error.contains("neither a Pod"), "{error}");
    }
}
