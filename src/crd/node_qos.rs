//! `NodeQOS`: rules that take an action when a metric exceeds a threshold on a node.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::avoidance_action::AvoidanceActionSpec;
use super::common::LabelSelector;
use super::pod_qos::{PodQosSpec, ScopeExpression, ScopeSelector};
use crate::engine::quantity::RawQuantity;

/// Rules that take an action when a metric exceeds a threshold on a node.
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
    doc = "A NodeQOS defines rules: each takes an AvoidanceAction when a metric exceeds a threshold on a selected node.",
    printcolumn(
        name = "Rules",
        type_ = "integer",
        json_path = ".status.rules",
        description = "Rules in force"
    ),
    printcolumn(
        name = "Strategy",
        type_ = "string",
        json_path = ".status.strategy",
        description = "Enforce (take the action) or Preview (only report)"
    ),
    printcolumn(
        name = "Nodes",
        type_ = "integer",
        json_path = ".status.matchedNodes",
        description = "Selected nodes"
    ),
    printcolumn(
        name = "Breached",
        type_ = "integer",
        json_path = ".status.breachedNodes",
        description = "Selected nodes on which a rule is breached or cooling down"
    ),
    printcolumn(
        name = "Would(24h)",
        type_ = "integer",
        json_path = ".status.wouldLastDay",
        description = "How often rules with strategy Preview would have acted, over all selected nodes; empty if there are none"
    ),
    printcolumn(
        name = "Preview",
        type_ = "integer",
        json_path = ".status.previewNodes",
        priority = 1,
        description = "Selected nodes on which a rule with strategy Preview would act"
    ),
    printcolumn(
        name = "Rollout",
        type_ = "string",
        json_path = ".status.rollout",
        description = "Progress of the rollout of the last edit"
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
    /// The selector over the labels of nodes. Defaults to all nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::label_selector")]
    pub selector: Option<LabelSelector>,
    /// The sources of the metrics. Defaults to metrics measured on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_quality_probe: Option<NodeQualityProbe>,
    /// The rules, 1 to 64, each with a unique name. The actions in force are the union over all rules.
    #[schemars(
        length(min = 1, max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub rules: Vec<NodeRule>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::evaluation_period")]
    pub evaluation_period_seconds: Option<Value>,
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

/// The sources of the metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeQualityProbe {
    /// Options for metrics that are measured on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_local_get: Option<NodeLocalGet>,
    /// An endpoint with metrics in the Prometheus text format, scraped at each evaluation. Rules may use its series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http_get: Option<HttpGet>,
    /// The timeout of `httpGet` in seconds. Defaults to 10; 0 means 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600), extend("default" = 10))]
    pub timeout_seconds: Option<i64>,
}

/// Options for metrics that are measured on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeLocalGet {
    /// The maximum age of a sample in seconds. With an older sample the metric is unknown: no action starts or ends.
    /// Defaults to 60. With `httpGet` it is at least the evaluation period and the timeout.
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
    /// The host name or address. Defaults to the address of the node (`status.hostIP`), so an exporter that listens only on
    /// the loopback address is not reached; in `plimsoll run` defaults to the loopback address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z0-9._:-]+$')")
            .message("host is not a host name or address; write it without scheme, port and path, for example host: 127.0.0.1"),
    )]
    pub host: Option<String>,
    /// The port number, from 1 to 65535.
    #[schemars(schema_with = "super::schema::int_or_string")]
    #[x_kube(
        validation = Rule::new("string(self).matches('^[1-9][0-9]{0,4}$') && int(string(self)) <= 65535")
            .message("port is not a port number; write a number from 1 to 65535, for example port: 9100"),
    )]
    pub port: RawQuantity,
    /// The path of the metrics. Defaults to `/metrics`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024), extend("default" = "/metrics"))]
    #[x_kube(
        validation = Rule::new("self.matches('^/[!-~]*$')")
            .message("path is not an absolute URL path; write for example path: /metrics"),
    )]
    pub path: Option<String>,
    /// The scheme: `HTTP` (default) or `HTTPS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["HTTP", "HTTPS"], "default" = "HTTP"))]
    pub scheme: Option<String>,
    /// Additional request headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub http_headers: Vec<HttpHeader>,
}

/// A request header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
pub struct HttpHeader {
    /// The name of the header.
    #[schemars(length(min = 1, max = 128))]
    #[x_kube(
        validation = Rule::new("self.matches('^[!#$%&*+.^_`|~0-9A-Za-z-]+$')")
            .message("name is not an HTTP header name; write for example name: X-Scope-OrgID"),
    )]
    pub name: String,
    /// The value of the header.
    #[schemars(length(max = 4096))]
    #[x_kube(
        validation = Rule::new("self.matches('^[ -~]*$')")
            .message("value has characters that are not allowed in an HTTP header; write printable ASCII on one line"),
    )]
    pub value: String,
}

/// The pods that a rule may act on: all that is given must match, and without anything no pod does. A `PodQOS` can say more.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RulePods {
    /// The labels that a pod has, at most 8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::few_labels")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// The classes: `BestEffort`, `Burstable`, `Guaranteed`.
    #[serde(rename = "qosClasses", default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "super::schema::qos_classes")]
    pub qos_classes: Vec<String>,
    /// The namespaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(min = 1, max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub namespaces: Vec<String>,
}

impl RulePods {
    /// The `PodQOS` that allows this action on these pods.
    pub(super) fn into_pod_qos(self, action: String) -> PodQosSpec {
        let is_in = |name: &str, values: Vec<String>| {
            (!values.is_empty()).then(|| ScopeExpression {
                scope_name: name.to_owned(),
                operator: "In".to_owned(),
                values,
            })
        };
        let scopes = [
            is_in("QOSClass", self.qos_classes),
            is_in("Namespace", self.namespaces),
        ];
        let match_expressions: Vec<_> = scopes.into_iter().flatten().collect();
        PodQosSpec {
            label_selector: self.match_labels.map(|labels| LabelSelector {
                match_labels: Some(labels),
                ..LabelSelector::default()
            }),
            scope_selector: (!match_expressions.is_empty())
                .then_some(ScopeSelector { match_expressions }),
            allowed_actions: vec![action],
            ..PodQosSpec::default()
        }
    }
}

/// A rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.restoreThreshold) || !has(self.restoredThreshold) || self.restoreThreshold == self.restoredThreshold")
        .message("restoredThreshold is an alias of restoreThreshold, and the two differ; write only restoreThreshold")
        .field_path(".restoredThreshold"),
    validation = Rule::new("!has(self.restoreValue) || !isQuantity(string(self.restoreValue)) || !isQuantity(string(self.metricRule.value)) || quantity(string(self.restoreValue)).compareTo(quantity(string(self.metricRule.value))) <= 0")
        .message("restoreValue is above metricRule.value; write a value at or below it, or remove restoreValue")
        .field_path(".restoreValue"),
    validation = Rule::new("has(self.actionName) != has(self.action)")
        .message("actionName is missing, or action is given as well; write either actionName, the name of an AvoidanceAction, or action, the action itself")
        .field_path(".actionName"),
    validation = Rule::new("!has(self.pods) || has(self.action)")
        .message("pods is only for an action of the rule itself; write action instead of actionName, or a PodQOS that allows the AvoidanceAction")
        .field_path(".pods"),
)]
pub struct NodeRule {
    /// The name of the rule, unique within the object: at most 63 lower-case letters, digits, `-` and `_`.
    #[schemars(length(min = 1, max = 63))]
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-_a-z0-9]*[a-z0-9])?$')")
            .message("name is not a valid rule name; write lower-case letters, digits, '-' and '_', for example name: cpu-usage"),
    )]
    pub name: String,
    /// The metric and its threshold. Required; optional here so that a rule without it does not invalidate the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(required, description = "The metric and its threshold.")]
    pub metric_rule: Option<MetricRule>,
    /// The number of consecutive evaluations above `metricRule.value` after which the action starts. Defaults to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX), extend("default" = 1))]
    pub avoidance_threshold: Option<i64>,
    /// The number of consecutive evaluations at or below `restoreValue` after which the action may end. It stays in force for at
    /// least `coolDownSeconds` after the last breach. Defaults to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX))]
    pub restore_threshold: Option<i64>,
    /// An alias of `restoreThreshold`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = i32::MAX))]
    pub restored_threshold: Option<i64>,
    /// The value at or below which an evaluation counts towards `restoreThreshold`. At most `metricRule.value`, which is the
    /// default. Between the two values neither count changes, so that the action does not flap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::int_or_string")]
    #[x_kube(
        validation = Rule::new("isQuantity(string(self)) && quantity(string(self)).compareTo(quantity('0')) >= 0")
            .message("restoreValue is not a quantity of 0 or more; write for example 3000, \"0.5\" or 4Gi"),
    )]
    pub restore_value: Option<RawQuantity>,
    /// The name of the `AvoidanceAction`. A rule has either this or `action`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub action_name: Option<String>,
    /// The action itself, instead of the name of an `AvoidanceAction`. Its name is that of the object and of the rule: `NODEQOS/RULE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub action: Option<AvoidanceActionSpec>,
    /// The pods that `action` may act on, in addition to those for which a `PodQOS` allows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pods: Option<RulePods>,
    /// The strategy. `Enforce` (default; crane: `None`): the action is taken. `Preview`: the rule only reports what the action
    /// would do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(extend("enum" = ["Enforce", "Preview", "None"], "default" = "Enforce"))]
    pub strategy: Option<String>,
    /// The hours in which the rule is active, 1 to 16 entries such as `22:00-06:00 Europe/Berlin` or
    /// `Mon-Fri 08:00-18:00 UTC`. Defaults to always. Outside of all of them the rule is Normal: it takes no action, and what it did
    /// is restored step by step. An end before the start is on the next day; the days are those of the start. The time zone is
    /// required: `UTC`, or a name of the IANA time zone database.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(min = 1, max = 16),
        inner(length(max = 64)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    #[x_kube(
        validation = Rule::new("self.all(hours, hours.matches('^((Mon|Tue|Wed|Thu|Fri|Sat|Sun)(-(Mon|Tue|Wed|Thu|Fri|Sat|Sun))? )?([01][0-9]|2[0-3]):[0-5][0-9]-(([01][0-9]|2[0-3]):[0-5][0-9]|24:00) [A-Za-z][A-Za-z0-9_+/-]*$'))")
            .message("activeDuring has an entry that is not a span of hours with a time zone; write for example \"22:00-06:00 Europe/Berlin\" or \"Mon-Fri 08:00-18:00 UTC\""),
        validation = Rule::new("self.all(hours, !hours.matches('^[^:]*[0-9]{2}:[0-9]{2}-[0-9]{2}:[0-9]{2}') || hours.substring(hours.indexOf(':') - 2, hours.indexOf(':') + 3) != hours.substring(hours.indexOf(':') + 4, hours.indexOf(':') + 9))")
            .message("activeDuring has an entry that ends when it starts; write 00:00-24:00 for the whole day"),
    )]
    pub active_during: Vec<String>,
}

/// A metric and its threshold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricRule {
    /// The name of the metric: `cpu_total_usage` (millicores), `cpu_total_utilization` (percent), `memory_total_usage`
    /// (bytes), `memory_total_utilization` (percent), `cpu_load_1_min` (also `_5_min`, `_15_min`),
    /// `cpu_pressure_some_avg10` (percent; cpu, memory, io; some, full; avg10, avg60, avg300), `disk_read_kibps`,
    /// `disk_write_kibps`, `disk_read_iops`, `disk_write_iops`, `disk_utilization` (percent) per device,
    /// `network_receive_kibps`, `network_sent_kibps`, `network_receive_pckps`, `network_sent_pckps`,
    /// `network_drop_in`, `network_drop_out` per interface, `container_sched_run_queue_time` (µs/s),
    /// `container_cpu_throttled_ratio` (percent), `ext_cpu_total_distribute` (percent), `protected_cpu_delay_max` and
    /// `_p95` (also `protected_memory_stall_max`, `protected_io_stall_max`, percent), `pod_cpu_delay` (also
    /// `pod_memory_stall`, `pod_io_stall`, percent) per pod, a window of the node such as `cpu_usage_avg_5m` or
    /// `mem_usage_max_avg_1h` (percent), or a series of `httpGet`.
    #[schemars(length(min = 1, max = 200))]
    #[x_kube(
        validation = Rule::new("self.matches('^[A-Za-z_:][A-Za-z0-9_:]*$')")
            .message("name is not a metric name; write for example name: cpu_total_usage"),
    )]
    pub name: String,
    /// The threshold in the unit of the metric, above 0: an evaluation above it is a breach. The unit of `cpu_total_usage` is
    /// millicores: 4000 means 4 CPUs. Fractions must be strings: "0.5". Suffixes of quantities are allowed: 6Gi.
    #[schemars(schema_with = "super::schema::int_or_string")]
    #[x_kube(
        validation = Rule::new("isQuantity(string(self)) && quantity(string(self)).isGreaterThan(quantity('0'))")
            .message("value is not a quantity above 0; write for example 4000, \"0.5\" or 6Gi"),
    )]
    pub value: RawQuantity,
    /// The selector over the labels of the series of the metric, for example `{matchLabels: {device: sda}}`. Defaults to all
    /// series. Any selected series above the threshold is a breach.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// The status of a `NodeQOS`, set by the controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeQosStatus {
    /// The `metadata.generation` that this status was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The number of rules in force on at least one selected node; if no node is selected, the number of valid rules.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<i64>,
    /// The strategies of these rules: `Enforce`, `Preview`, or `Enforce,Preview`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub strategy: Option<String>,
    /// The number of selected nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_nodes: Option<i64>,
    /// The number of selected nodes on which a rule is breached or cooling down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub breached_nodes: Option<i64>,
    /// The number of selected nodes on which a rule with strategy `Preview` would act.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preview_nodes: Option<i64>,
    /// How many times rules with strategy `Preview` would have begun to act in the last 24 hours, over all selected nodes. Absent if
    /// there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_last_day: Option<i64>,
    /// The progress of the rollout of the last edit. Absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rollout: Option<String>,
    /// The conditions of the object. `Ready` is True when all of it is in force; `Accepted`, `ActionsResolved` and
    /// `FieldsNotEnforced` show what is not; `RolledOut` is the progress of the last edit; `Reconciling` and `Stalled` are
    /// those of kstatus.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

impl NodeRule {
    /// The name of its `AvoidanceAction`.
    pub(super) fn named_action(&self) -> &str {
        self.action_name.as_deref().unwrap_or_default()
    }
}
