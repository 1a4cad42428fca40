//! `NodeMetric`: how loaded one node is, as its agent measured it last.
//!
//! It is held in memory and served by the controller's aggregated API, so that there is no definition of it among
//! [`super::definitions`]: [`NodeMetric::schema`] is what `OpenAPI` and `kubectl explain` are made from. The agent fills
//! everything but the conditions, which the controller adds.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use kube::Resource;
use kube::core::ClusterResourceScope;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Value, json};

use super::schema::{inlined_schema, tidy};

/// The API group.
pub const GROUP: &str = "metrics.plimsoll.dev";
/// Its only version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of a `NodeMetric`.
pub const API_VERSION: &str = "metrics.plimsoll.dev/v1alpha1";
/// The kind.
pub const KIND: &str = "NodeMetric";
/// Its name in paths.
pub const PLURAL: &str = "nodemetrics";
/// What people type.
pub const SHORT_NAME: &str = "nm";
/// The most pods that are listed.
pub const MOST_PODS: usize = 10;
/// The most breached rules that are named.
pub const MOST_BREACHED: usize = 16;

/// The conditions of a `NodeMetric`.
pub mod condition {
    /// The agent reports.
    pub const HEALTHY: &str = "Healthy";

    /// Why [`HEALTHY`] has the status that it has.
    pub mod reason {
        /// True: the last report, or renewal of the Lease, is young enough.
        pub const REPORTING: &str = "AgentReporting";
        /// False: neither came for longer than the grace; the figures are the last ones.
        pub const SILENT: &str = "AgentSilent";
        /// Unknown: nothing has come from the agent since the controller started; there are no figures.
        pub const NO_REPORT: &str = "NoReport";
    }
}

/// A NodeMetric tells how loaded a node is: its use of CPU and memory now and over the last hours, its pressure, its
/// busiest pods and the rules that are over their marks. It bears the name of its Node. It is measured by the node's
/// agent every few seconds and held in memory by plimsoll's controller; nobody can write it.
#[expect(
    clippy::doc_markdown,
    reason = "`kubectl explain` shows the text as it is"
)]
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
pub struct NodeMetric {
    /// The name is that of the Node; the labels are those of the Node.
    #[schemars(schema_with = "metadata")]
    pub metadata: ObjectMeta,
    /// What was measured.
    #[serde(default)]
    pub status: NodeMetricStatus,
}

/// What was measured on a node. What could not be measured is absent, never 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMetricStatus {
    /// When the node was measured, by its own clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<Time>,
    /// The time before `timestamp` that `usage` and the pods' figures are averages over: `10s`. Absent until two
    /// samples have been taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    /// Who measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<ReportingAgent>,
    /// All CPUs that are online, and all memory of the machine: what percentages are of.
    #[serde(default, skip_serializing_if = "is_default")]
    pub capacity: Amounts,
    /// What is in use.
    #[serde(default, skip_serializing_if = "is_default")]
    pub usage: Usage,
    /// Pressure stall information of the node: how much of the time work had to wait for a resource.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pressure: Pressures,
    /// How long the pods that no rule's action may touch waited, in percent of the time since the last report. Absent on
    /// cgroup v1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub protected: ProtectedStalls,
    /// The use of the node over longer times, in percent of its capacity.
    #[serde(default, skip_serializing_if = "is_default")]
    pub windows: Windows,
    /// How many pods the agent looks after.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<i64>,
    /// The pods that use most of the node, by the larger of their shares of its CPU and its memory. At most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "atomic"))]
    pub top_pods: Vec<PodUsage>,
    /// How many of the node's rules are in which state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<RuleCounts>,
    /// The rules that are Breached, as `<NodeQOS>/<rule>`, in order of name. At most 16; `rules.breached` counts all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub breached: Vec<String>,
    /// `Healthy`: True while the agent reports, False (`AgentSilent`) once it has not for longer than its grace, Unknown
    /// (`NoReport`) where it has not reported since the controller started. A silent agent's figures are its last.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map"),
        extend("x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// The agent behind a report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReportingAgent {
    /// Version of plimsoll.
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id` of the node: changes with each start of the machine.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// Grows with each report of one boot: of two reports of the same boot, the one with the larger number is newer.
    pub sequence: i64,
}

/// An amount of CPU and of memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    /// CPUs, as a quantity: `1250m` is one and a quarter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub cpu: Option<Quantity>,
    /// Bytes, as a quantity: `512Mi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub memory: Option<Quantity>,
}

/// What is in use, and by what.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The whole node. CPU: all that is not idle or waiting for I/O, time stolen by a hypervisor included. Memory: what
    /// is not available to new work (`MemTotal` less `MemAvailable`).
    #[serde(default, skip_serializing_if = "is_default")]
    pub node: Amounts,
    /// All pods together, page cache included.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pods: Amounts,
    /// The node less its pods: the kubelet, the container runtime, the system. Absent where the pods' page cache makes
    /// their memory larger than the node's.
    #[serde(default, skip_serializing_if = "is_default")]
    pub system: Amounts,
}

/// Pressure by resource.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pressures {
    /// Waiting for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<Pressure>,
    /// Waiting for memory: reclaim, swap, refaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<Pressure>,
    /// Waiting for disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<Pressure>,
}

/// How long protected pods, and `system.slice` where the agent can read it, were stalled: percent of the time. What a CPU
/// quota of their own made them wait is taken off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProtectedStalls {
    /// 95th percentile of their waiting for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_delay_p95: Option<f64>,
    /// The longest waiting for a CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_delay_max: Option<f64>,
    /// The longest waiting for memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_stall_max: Option<f64>,
    /// The longest waiting for disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_stall_max: Option<f64>,
}

/// One resource's pressure.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pressure {
    /// Some task waited.
    pub some: Stalled,
    /// All tasks that were not idle waited at once. Absent where the kernel does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full: Option<Stalled>,
}

/// Percent of the time that was spent waiting.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Stalled {
    /// Over 10 s.
    pub avg10: f64,
    /// Over 60 s.
    pub avg60: f64,
    /// Over 300 s.
    pub avg300: f64,
}

/// The node's use over longer times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Windows {
    /// Percent of the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<ResourceWindows>,
    /// Percent of the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ResourceWindows>,
}

/// One resource's use over longer times.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceWindows {
    /// The last 5 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last5m: Option<WindowStats>,
    /// The last 30 minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last30m: Option<WindowStats>,
    /// The last hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last1h: Option<WindowStats>,
    /// The highest average of any 5 minutes within the last hour: a peak that lasted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_avg1h: Option<PeakStats>,
    /// The same within the last day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_avg1d: Option<PeakStats>,
}

/// How the use was spread over a window. The figures are absent where `coverage` is below 0.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowStats {
    /// The average, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avg: Option<f64>,
    /// Half of the time the use was at most so much, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50: Option<f64>,
    /// 90 % of the time the use was at most so much, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p90: Option<f64>,
    /// 95 % of the time the use was at most so much, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p95: Option<f64>,
    /// 99 % of the time the use was at most so much, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// The highest sample, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// The share of the window for which there are samples: 0 to 1. A gap counts as unknown, not as idle.
    pub coverage: f64,
}

/// The highest average of any 5 minutes within a window. The figure is absent where `coverage` is below 0.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeakStats {
    /// In percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The share of the window for which there are samples: 0 to 1.
    pub coverage: f64,
}

/// One pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodUsage {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// CPUs in use, as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub cpu: Option<Quantity>,
    /// Bytes in use, page cache included, as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub memory: Option<Quantity>,
    /// CPU scheduling delay: percent of the time in which some thread of the pod could have run and waited for a CPU,
    /// because others ran or because of the pod's own limit. From the cgroup's `cpu.pressure`; absent on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_delay: Option<f64>,
    /// Percent of the time in which some thread of the pod waited for memory. Absent on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pressure: Option<f64>,
    /// Percent of the time in which some thread of the pod waited for a disk. Absent on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_pressure: Option<f64>,
}

/// The node's rules by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuleCounts {
    /// All that the agent keeps.
    pub total: i64,
    /// Over their marks for long enough, those with strategy Preview included.
    pub breached: i64,
    /// Under their marks again, with their actions still in force.
    pub cooling: i64,
    /// Those whose metric is not known now.
    pub unknown: i64,
}

impl NodeMetric {
    /// The schema of the whole object: structural, as an `OpenAPI` document of an API server holds it. `metadata` is
    /// only said to be an object: `ObjectMeta` has a schema of its own in such a document.
    pub fn schema() -> Value {
        let mut schema = inlined_schema::<Self>();
        tidy(&mut schema);
        schema["properties"]["apiVersion"] = json!({
            "type": "string",
            "description": "The version of this kind: metrics.plimsoll.dev/v1alpha1.",
        });
        schema["properties"]["kind"] = json!({"type": "string", "description": "NodeMetric."});
        schema
    }
}

impl Serialize for NodeMetric {
    /// With `apiVersion` and `kind`, so that it is an object wherever it is read.
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut object = serializer.serialize_struct(KIND, 4)?;
        object.serialize_field("apiVersion", API_VERSION)?;
        object.serialize_field("kind", KIND)?;
        object.serialize_field("metadata", &self.metadata)?;
        object.serialize_field("status", &self.status)?;
        object.end()
    }
}

impl Resource for NodeMetric {
    type DynamicType = ();
    type Scope = ClusterResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// What says nothing is left out.
fn is_default<T: Default + PartialEq>(part: &T) -> bool {
    *part == T::default()
}

fn metadata(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "object"})
}

fn quantity(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string"})
}

#[cfg(test)]
mod tests;
