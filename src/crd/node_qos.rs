//! `NodeQOS`: which metric over which watermark triggers which action, on which nodes.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::common::LabelSelector;
use crate::engine::quantity::RawQuantity;

/// Which metric over which watermark triggers which action, on which nodes.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, CustomResource, KubeSchema,
)]
#[kube(
    group = "ensurance.crane.io",
    version = "v1alpha1",
    kind = "NodeQOS",
    root = "NodeQos",
    plural = "nodeqoss",
    shortname = "nq",
    category = "plimsoll",
    status = "NodeQosStatus",
    derive = "PartialEq",
    doc = "A NodeQOS says which metric over which watermark triggers which AvoidanceAction, on which nodes.",
    printcolumn(
        name = "Rules",
        type_ = "integer",
        json_path = ".status.rules",
        description = "Rules that are in force"
    ),
    printcolumn(
        name = "Strategy",
        type_ = "string",
        json_path = ".status.strategy",
        description = "None acts, Preview only reports"
    ),
    printcolumn(
        name = "Nodes",
        type_ = "integer",
        json_path = ".status.matchedNodes",
        description = "Nodes that it selects"
    ),
    printcolumn(
        name = "Breached",
        type_ = "integer",
        json_path = ".status.breachedNodes",
        description = "Those of them where one of its rules is over its mark, or cooling down"
    ),
    printcolumn(
        name = "Preview",
        type_ = "integer",
        json_path = ".status.previewNodes",
        priority = 1,
        description = "Those of them where one of its rules with strategy Preview would act"
    ),
    printcolumn(
        name = "Rollout",
        type_ = "string",
        json_path = ".status.rollout",
        description = "How far an edit is that is on its way"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NodeQosSpec {
    /// Over the labels of nodes. Absent: all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::label_selector")]
    pub selector: Option<LabelSelector>,
    /// Where the metrics come from, and how old they may be. Absent: measured on the node, with the defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_quality_probe: Option<NodeQualityProbe>,
    /// How often the rules are evaluated, in seconds. Default 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400), extend("default" = 10))]
    pub evaluation_period_seconds: Option<i64>,
    /// The rules, 1 to 64, each with its own name. What is in force is the union over all rules.
    #[schemars(
        length(min = 1, max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub rules: Vec<NodeRule>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::elastic_cpu_limit")]
    pub elastic_cpu_limit: Option<Value>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::mem_limit")]
    pub mem_limit: Option<Value>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::net_limits")]
    pub net_limits: Option<Value>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::memory_compression")]
    pub memory_compression: Option<Value>,
}

/// Where the metrics come from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeQualityProbe {
    /// Metrics that the node measures itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_local_get: Option<NodeLocalGet>,
    /// Metrics in Prometheus text format, fetched from the node at each evaluation. Rules can name its series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_get: Option<HttpGet>,
    /// The answer to `httpGet` must have arrived within this many seconds. Default 10; 0 means 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600), extend("default" = 10))]
    pub timeout_seconds: Option<i64>,
}

/// How old a local sample may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeLocalGet {
    /// A sample older than this many seconds counts as unknown: nothing new starts, what is in force is held.
    /// Default 60.
    #[serde(
        rename = "localCacheTTLSeconds",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(range(min = 1, max = 86400), extend("default" = 60))]
    pub local_cache_ttl_seconds: Option<i64>,
}

/// An HTTP GET, as in a container's probes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct HttpGet {
    /// Host name or address. Absent: the node's own address (`status.hostIP`), so that the exporter has to listen there and not on
    /// the node's loopback alone; in `plimsoll run` the loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z0-9._:-]+$')")
            .message("host is no host name or address; write it without scheme, port and path, for example host: 127.0.0.1"),
    )]
    pub host: Option<String>,
    /// Port number, 1 to 65535.
    #[schemars(schema_with = "super::schema::int_or_string")]
    #[x_kube(
        validation = Rule::new("string(self).matches('^[1-9][0-9]{0,4}$') && int(string(self)) <= 65535")
            .message("port is no port number; write a number from 1 to 65535, for example port: 9100"),
    )]
    pub port: RawQuantity,
    /// Path of the metrics. Default `/metrics`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024), extend("default" = "/metrics"))]
    #[x_kube(
        validation = Rule::new("self.matches('^/[!-~]*$')")
            .message("path is no absolute path of a URL; write for example path: /metrics"),
    )]
    pub path: Option<String>,
    /// `HTTP` (default) or `HTTPS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["HTTP", "HTTPS"], "default" = "HTTP"))]
    pub scheme: Option<String>,
    /// Extra request headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub http_headers: Vec<HttpHeader>,
}

/// One request header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
pub struct HttpHeader {
    /// Its name.
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(
        validation = Rule::new("self.matches('^[!#$%&*+.^_`|~0-9A-Za-z-]+$')")
            .message("name is no name of an HTTP header; write for example name: X-Scope-OrgID"),
    )]
    pub name: String,
    /// Its value.
    #[schemars(length(max = 4096))]
    #[x_kube(
        validation = Rule::new("self.matches('^[ -~]*$')")
            .message("value has characters that an HTTP header must not have; write printable ASCII on one line"),
    )]
    pub value: String,
}

/// One rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.restoreThreshold) || !has(self.restoredThreshold) || self.restoreThreshold == self.restoredThreshold")
        .message("restoredThreshold is another name of restoreThreshold, and the two differ; write restoreThreshold alone")
        .field_path(".restoredThreshold"),
    validation = Rule::new("!has(self.restoreValue) || !isQuantity(string(self.restoreValue)) || !isQuantity(string(self.metricRule.value)) || quantity(string(self.restoreValue)).compareTo(quantity(string(self.metricRule.value))) <= 0")
        .message("restoreValue is above metricRule.value; write a value at or below it, or leave restoreValue out")
        .field_path(".restoreValue"),
)]
pub struct NodeRule {
    /// Name of the rule, unique within the object: lower-case letters, digits, `-` and `_`, at most 63.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$')")
            .message("name is no rule name; write lower-case letters, digits, '-' and '_', for example name: cpu-usage"),
    )]
    pub name: String,
    /// The metric and its watermark. Required; optional here so that one rule without it can be told from the rest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(required, description = "The metric and its watermark.")]
    pub metric_rule: Option<MetricRule>,
    /// So many consecutive evaluations above `metricRule.value` start the action. Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX), extend("default" = 1))]
    pub avoidance_threshold: Option<i64>,
    /// So many consecutive evaluations at or below `restoreValue` are needed before the action may end (it stays for
    /// `coolDownSeconds` after the last breach in any case). 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX))]
    pub restore_threshold: Option<i64>,
    /// Another name of `restoreThreshold`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX))]
    pub restored_threshold: Option<i64>,
    /// Low mark: at or below it an evaluation is quiet. At most `metricRule.value`, which it is if absent. Between the
    /// two marks nothing changes, so that an action doesn't flap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::int_or_string")]
    #[x_kube(
        validation = Rule::new("isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0")
            .message("restoreValue is no quantity of 0 or more; write for example 3000, \"0.5\" or 4Gi"),
    )]
    pub restore_value: Option<RawQuantity>,
    /// Name of the `AvoidanceAction` to take.
    #[schemars(length(min = 1, max = 253))]
    pub action_name: String,
    /// `None` (default): act. `Preview`: only report what acting would do, and to which pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["None", "Preview"], "default" = "None"))]
    pub strategy: Option<String>,
}

/// A metric and its watermark.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricRule {
    /// Name of the metric: `cpu_total_usage` (millicores), `cpu_total_utilization` (percent), `memory_total_usage`
    /// (bytes), `memory_total_utilization` (percent), `cpu_load_1_min` (also `_5_min`, `_15_min`),
    /// `cpu_pressure_some_avg10` (percent; cpu, memory, io; some, full; avg10, avg60, avg300), `disk_read_kibps`,
    /// `disk_write_kibps`, `disk_read_iops`, `disk_write_iops`, `disk_utilization` (percent) per device,
    /// `network_receive_kibps`, `network_sent_kibps`, `network_receive_pckps`, `network_sent_pckps`,
    /// `network_drop_in`, `network_drop_out` per interface, `container_sched_run_queue_time` (µs/s),
    /// `container_cpu_throttled_ratio` (percent), `ext_cpu_total_distribute` (percent), or a series of `httpGet`.
    #[schemars(length(min = 1, max = 200))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z_:][A-Za-z0-9_:]*$')")
            .message("name is no metric name; write for example name: cpu_total_usage"),
    )]
    pub name: String,
    /// Watermark in the metric's unit, above 0: an evaluation above it is a breach. For `cpu_total_usage` the unit is
    /// millicores: 4000 is 4 CPUs, 4 is almost nothing. A fraction is written as text: "0.5". Suffixes as everywhere in
    /// Kubernetes: 6Gi.
    #[schemars(schema_with = "super::schema::int_or_string")]
    #[x_kube(
        validation = Rule::new("isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))")
            .message("value is no quantity above 0; write for example 4000, \"0.5\" or 6Gi"),
    )]
    pub value: RawQuantity,
    /// Over the labels of the metric's series. Absent: all series; any of them above the watermark is a breach.
    /// Example for disks: `{matchLabels: {device: sda}}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// What the controller found about a `NodeQOS`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeQosStatus {
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Rules of it that are in force on at least one of its nodes; where it selects none, those that would be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<i64>,
    /// What these do: `None` (act), `Preview` (only report), or `None,Preview` where there are both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub strategy: Option<String>,
    /// Nodes that it selects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_nodes: Option<i64>,
    /// Those of them where one of its rules is over its mark, or is cooling down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breached_nodes: Option<i64>,
    /// Those of them where one of its rules with strategy `Preview` would act.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preview_nodes: Option<i64>,
    /// How far an edit is that is on its way; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rollout: Option<String>,
    /// What holds for the object. `Ready` is True when all of it is in force; `Accepted`, `ActionsResolved` and
    /// `FieldsNotEnforced` say what is not; `RolledOut` says how far the last edit is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}
