//! The fields of a Pod that decisions need: code that decodes the whole spec would be 0.2 MB of the binary.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1 as k8s;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// A Pod.
#[derive(Clone, Debug, Default, Deserialize, Resource)]
#[resource(inherit = k8s::Pod)]
#[serde(default)]
pub struct PodObject {
    /// `metadata`
    pub metadata: ObjectMeta,
    /// `spec`
    pub spec: Option<PodSpec>,
    /// `status`
    pub status: Option<PodStatus>,
}

/// The spec of a pod. The fields are those of the API.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
#[expect(missing_docs, reason = "the fields are those of the API")]
pub struct PodSpec {
    pub containers: Option<Vec<Container>>,
    pub init_containers: Option<Vec<Container>>,
    pub node_name: Option<String>,
    pub overhead: Option<BTreeMap<String, Quantity>>,
    pub priority: Option<i32>,
    pub priority_class_name: Option<String>,
    pub resources: Option<ResourceRequirements>,
    pub restart_policy: Option<String>,
    pub termination_grace_period_seconds: Option<i64>,
}

/// A container of the spec.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Container {
    pub name: String,
    pub resources: Option<ResourceRequirements>,
    pub restart_policy: Option<String>,
    pub liveness_probe: Option<ContainerProbe>,
    pub readiness_probe: Option<ContainerProbe>,
    pub startup_probe: Option<ContainerProbe>,
}

/// A probe of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ContainerProbe {
    /// It runs a command in the container.
    pub exec: Option<IgnoredAny>,
}

/// The resources of a container, or of the whole pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ResourceRequirements {
    pub limits: Option<BTreeMap<String, Quantity>>,
    pub requests: Option<BTreeMap<String, Quantity>>,
}

/// The status of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct PodStatus {
    pub conditions: Option<Vec<PodCondition>>,
    pub container_statuses: Option<Vec<ContainerStatus>>,
    pub init_container_statuses: Option<Vec<ContainerStatus>>,
    pub phase: Option<String>,
    /// Of the whole pod. `containerStatuses[].resources` is older and of no interest here.
    pub resources: Option<IgnoredAny>,
    pub start_time: Option<Time>,
}

/// A condition of a pod.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct PodCondition {
    pub status: String,
    #[serde(rename = "type")]
    pub type_: String,
}

/// The status of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ContainerStatus {
    #[serde(rename = "containerID")]
    pub container_id: Option<String>,
    pub name: String,
    pub state: Option<ContainerState>,
}

/// The state of a container: waiting if it is neither running nor terminated.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    pub running: Option<IgnoredAny>,
    pub terminated: Option<ContainerEnd>,
}

/// The termination state of a container.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct ContainerEnd {
    pub exit_code: i32,
}
