//! `NodeMetric`: the load of one node, as last measured by its agent.
//!
//! It is stored in memory and served by the controller's aggregated API, so [`super::definitions`] does not include it:
//! `OpenAPI` and `kubectl explain` use [`NodeMetric::schema`]. The agent sets all fields but the conditions, which the
//! controller sets.

use std::borrow::Cow;
use std::collections::BTreeMap;

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
/// The only version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of a `NodeMetric`.
pub const API_VERSION: &str = "metrics.plimsoll.dev/v1alpha1";
/// The kind.
pub const KIND: &str = "NodeMetric";
/// The name in API paths.
pub const PLURAL: &str = "nodemetrics";
/// The short name for `kubectl`.
pub const SHORT_NAME: &str = "nm";
/// The maximum number of pods in `topPods`.
pub const MAX_PODS: usize = 10;
/// The maximum number of rules in `breached`.
pub const MAX_BREACHED: usize = 16;

/// The conditions of a `NodeMetric`.
pub mod condition {
    /// The agent reports.
    pub const HEALTHY: &str = "Healthy";

    /// The reasons of [`HEALTHY`].
    pub mod reason {
        /// True: the last report or Lease renewal is recent.
        pub const REPORTING: &str = "AgentReporting";
        /// False: there was neither within the grace period; the values are the last ones.
        pub const UNRESPONSIVE: &str = "AgentUnresponsive";
        /// Unknown: the agent has not reported since the controller started; there are no values.
        pub const NO_REPORT: &str = "NoReport";
        /// Unknown: the agent has not reported since the controller started; the values are polled from an exporter.
        pub const POLLED: &str = "Polled";
    }
}

/// A NodeMetric is the load of a node: its CPU and memory usage now and over the last hours, its pressure, its busiest pods
/// and its breached rules. It has the name of its Node. The node's agent measures it every few seconds and the plimsoll
/// controller stores it in memory; it is read-only.
#[expect(
    clippy::doc_markdown,
    reason = "`kubectl explain` shows the text as it is"
)]
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
pub struct NodeMetric {
    /// The metadata. The name and labels are those of the Node.
    #[schemars(schema_with = "metadata")]
    pub metadata: ObjectMeta,
    /// The measurements.
    #[serde(default)]
    pub status: NodeMetricStatus,
}

/// The measurements of a node. A value that could not be measured is absent, not 0.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeMetricStatus {
    /// The time of the measurement, by the clock of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timestamp: Option<Time>,
    /// The time before `timestamp` over which `usage` and the values of pods are averaged, for example `10s`. Absent until
    /// two samples have been taken.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<String>,
    /// The agent that reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<ReportingAgent>,
    /// All online CPUs and all memory of the machine. Percentages are relative to these.
    #[serde(default, skip_serializing_if = "is_default")]
    pub capacity: Amounts,
    /// The resources in use.
    #[serde(default, skip_serializing_if = "is_default")]
    pub usage: Usage,
    /// Pressure stall information of the node: the share of time in which tasks waited for a resource.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pressure: Pressures,
    /// The stalls of protected pods (those on which no rule may act), in percent of the time since the last report. Absent
    /// on cgroup v1.
    #[serde(default, skip_serializing_if = "is_default")]
    pub protected: ProtectedStalls,
    /// The usage of the node over longer windows, in percent of its capacity.
    #[serde(default, skip_serializing_if = "is_default")]
    pub windows: Windows,
    /// How near the node is to where its rules act. Schedulers see it as the label `plimsoll.dev/load` of the Node. Absent if
    /// it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load: Option<Load>,
    /// The number of pods that the agent monitors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<i64>,
    /// The pods with the highest usage, by the larger of their shares of the CPU and the memory of the node. At most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "atomic"))]
    pub top_pods: Vec<PodUsage>,
    /// The number of rules of the node in each state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<RuleCounts>,
    /// The rules that are Breached, as `<NodeQOS>/<rule>`, in order of name. At most 16; `rules.breached` counts all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub breached: Vec<String>,
    /// The conditions. `Healthy` is True while the agent reports, False (`AgentUnresponsive`) if it has not reported within the grace
    /// period, and Unknown (`NoReport`) if it has not reported since the controller started, or (`Polled`) if the values then are
    /// those of an exporter that the controller polls. The values of an unresponsive agent are the last that it reported, or polled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map"),
        extend("x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// The agent that reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReportingAgent {
    /// The version of plimsoll.
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id` of the node, which changes with each boot.
    #[serde(rename = "bootID")]
    pub boot_id: String,
    /// Increases with each report within a boot.
    pub sequence: i64,
}

/// An amount of CPU and of memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Amounts {
    /// CPU, as a quantity, for example `1250m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub cpu: Option<Quantity>,
    /// Memory, as a quantity, for example `512Mi`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub memory: Option<Quantity>,
}

/// The resources in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The whole node. CPU: all time that is neither idle nor waiting for I/O, including time stolen by a hypervisor. Memory:
    /// `MemTotal` minus `Hugetlb` minus `MemAvailable`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub node: Amounts,
    /// All pods together, including page cache.
    #[serde(default, skip_serializing_if = "is_default")]
    pub pods: Amounts,
    /// The node minus its pods: the kubelet, the container runtime, the system. Absent if the memory of the pods is larger than
    /// that of the node because of their page cache.
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
    /// Waiting for I/O.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io: Option<Pressure>,
}

/// The stalls of protected pods, and of `system.slice` where the agent can read it, in percent of the time. Waiting because
/// of their own CPU quota is not included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ProtectedStalls {
    /// The 95th percentile of their CPU stalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_delay_p95: Option<f64>,
    /// The maximum of their CPU stalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_delay_max: Option<f64>,
    /// The maximum of their memory stalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_stall_max: Option<f64>,
    /// The maximum of their I/O stalls.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_stall_max: Option<f64>,
}

/// The pressure on a resource.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Pressure {
    /// At least one task waited.
    pub some: Stalled,
    /// All non-idle tasks waited at the same time. Absent if the kernel does not report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub full: Option<Stalled>,
}

/// The percent of the time spent waiting.
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

/// The usage of the node over longer windows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Windows {
    /// Percent of the CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<ResourceWindows>,
    /// Percent of the memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ResourceWindows>,
    /// The windows of the node's settings by name, at most 16: percent where the source has a capacity, else the unit of the
    /// source. A window of which less than half has samples is absent.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 16))]
    pub custom: BTreeMap<String, f64>,
}

/// The usage of a resource over longer windows.
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
    /// The highest 5-minute average within the last hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_avg1h: Option<PeakStats>,
    /// The highest 5-minute average within the last day.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_avg1d: Option<PeakStats>,
}

/// The distribution of the usage over a window. The values are absent if `coverage` is below 0.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WindowStats {
    /// The average, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub avg: Option<f64>,
    /// The standard deviation, in percent of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stddev: Option<f64>,
    /// The median, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p50: Option<f64>,
    /// The 90th percentile, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p90: Option<f64>,
    /// The 95th percentile, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p95: Option<f64>,
    /// The 99th percentile, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// The highest sample, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max: Option<f64>,
    /// The share of the window that has samples, from 0 to 1. A gap counts as unknown, not as idle.
    pub coverage: f64,
}

/// The highest 5-minute average within a window. The value is absent if `coverage` is below 0.5.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PeakStats {
    /// The value, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The share of the window that has samples, from 0 to 1.
    pub coverage: f64,
}

/// How near a node is to where its rules act.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Load {
    /// Percent of the load line: 100 where a rule would act, more beyond that. The highest of the terms below.
    pub percent: f64,
    /// The term that decides: `cpu`, `memory` or `pressure`.
    pub worst: String,
    /// CPU, in percent of all CPUs.
    pub cpu: ResourceLoad,
    /// Memory, in percent of all memory.
    pub memory: ResourceLoad,
    /// The enforced rule over pressure that is closest to acting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pressure: Option<PressureLoad>,
}

/// The load of one resource: the higher of `expected` and `history`, divided by `line`; more if a rule over it is above its
/// threshold.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ResourceLoad {
    /// Percent of the load line.
    pub percent: f64,
    /// What the pods of the node and its system are expected to use, in percent of the node.
    pub expected: f64,
    /// The part of it that averages do not show yet, of pods that have just started or will, in percent of the node.
    pub newcomers: f64,
    /// Lasting peaks of the last hour and day, without the pods that have ended since, in percent of the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<f64>,
    /// The lowest threshold of an enforced rule over the resource, in percent of the node; 90 without one.
    pub line: f64,
    /// The rule with that threshold, as `<NodeQOS>/<rule>`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
}

/// How near a rule over pressure is to acting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PressureLoad {
    /// The rule, as `<NodeQOS>/<rule>`.
    pub rule: String,
    /// Its value in percent of its threshold.
    pub percent: f64,
}

/// The usage of a pod.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodUsage {
    /// The namespace of the pod.
    pub namespace: String,
    /// The name of the pod.
    pub name: String,
    /// The CPU usage, as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub cpu: Option<Quantity>,
    /// The memory usage including page cache, as a quantity.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "quantity")]
    pub memory: Option<Quantity>,
    /// The CPU scheduling delay: the percent of the time in which at least one runnable thread of the pod waited for a CPU,
    /// because of other threads or because of the pod's own limit. From `cpu.pressure` of the cgroup; absent on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_delay: Option<f64>,
    /// The percent of the time in which at least one thread of the pod waited for memory. Absent on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_pressure: Option<f64>,
    /// The percent of the time in which at least one thread of the pod waited for I/O. Absent on cgroup v1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub io_pressure: Option<f64>,
}

/// The number of rules by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuleCounts {
    /// All rules that the agent enforces.
    pub total: i64,
    /// Rules in state Breached, including those with strategy Preview.
    pub breached: i64,
    /// Rules in state Cooling: no longer breached, but their actions are still in force.
    pub cooling: i64,
    /// Rules whose metric is currently unknown.
    pub unknown: i64,
}

impl NodeMetric {
    /// The structural schema of the whole object, for the `OpenAPI` document of an API server. `metadata` is just an object,
    /// because `ObjectMeta` has its own schema in such a document.
    pub fn schema() -> Value {
        let mut schema = inlined_schema::<Self>();
        tidy(&mut schema);
        schema["properties"]["apiVersion"] = json!({
            "type": "string",
            "description": "The API version: metrics.plimsoll.dev/v1alpha1.",
        });
        schema["properties"]["kind"] =
            json!({"type": "string", "description": "The kind: NodeMetric."});
        schema
    }
}

impl Serialize for NodeMetric {
    /// Includes `apiVersion` and `kind`.
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
