//! `NodeWatermark`: what one node has to keep, compiled by the controller, and what its agent makes of it.
//!
//! The spec is written by the controller alone, the status by the node's agent alone.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

mod convert;
mod hash;
mod part;
mod status;

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use convert::{Read, Refusal, Unread};
pub use hash::Hash;
pub use part::Part;
pub use status::{
    AgentStatus, Counts, EvictionStatus, NodeWatermarkStatus, PodPolicyStatus, RefusedStatus,
    RuleStatus, SchedulingStatus, ThrottledStatus, WouldStatus, condition, scheduling, stopped,
};

/// The API group of the kinds that people read and machines write.
pub const GROUP: &str = "plimsoll.dev";
/// The most rules that one node keeps.
pub const MOST_RULES: usize = 256;
/// The most pod policies that one node keeps.
pub const MOST_POD_POLICIES: usize = 1024;
/// The most objects that are named as those that it was compiled from.
pub const MOST_SOURCES: usize = 2048;

/// What one node has to keep.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, CustomResource, KubeSchema)]
#[kube(
    group = "plimsoll.dev",
    version = "v1alpha1",
    kind = "NodeWatermark",
    plural = "nodewatermarks",
    shortname = "nwm",
    category = "plimsoll",
    status = "NodeWatermarkStatus",
    derive = "Default",
    derive = "PartialEq",
    doc = "A NodeWatermark holds the compiled rules of one node, whose name it bears, and says what its agent makes of them. It is written by plimsoll, never by hand: edit NodeQOS, PodQOS and AvoidanceAction instead.",
    printcolumn(name = "Rules", type_ = "integer", json_path = ".status.counts.rules"),
    printcolumn(
        name = "Breached",
        type_ = "integer",
        json_path = ".status.counts.breached"
    ),
    printcolumn(
        name = "Scheduling",
        type_ = "string",
        json_path = ".status.scheduling.state",
        description = "Enabled, or the effect of our taint"
    ),
    printcolumn(
        name = "Throttled",
        type_ = "integer",
        json_path = ".status.counts.throttled",
        description = "Pods that are throttled now"
    ),
    printcolumn(
        name = "Evicted(1h)",
        type_ = "integer",
        json_path = ".status.counts.evictedLastHour"
    ),
    printcolumn(
        name = "Stopped",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Stopped\")].reason",
        description = "Empty, or how far the emergency stop has come: Releasing, Released"
    ),
    printcolumn(name = "Agent", type_ = "string", json_path = ".status.agent.version"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        priority = 1,
        description = "RulesKept, or why the rules are not kept or not judged"
    ),
    printcolumn(
        name = "Degraded",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Degraded\")].reason",
        priority = 1,
        description = "AllInOrder, or what the agent fails to do"
    ),
    printcolumn(
        name = "Contested",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Contested\")].reason",
        priority = 1,
        description = "NotContested, or that others undo what the agent does"
    ),
    printcolumn(
        name = "Unjudged",
        type_ = "string",
        json_path = ".status.rules[?(@.unknown)].id",
        priority = 1,
        description = "The first rule whose value is not known"
    ),
    printcolumn(
        name = "Because",
        type_ = "string",
        json_path = ".status.rules[?(@.unknown)].unknown",
        priority = 1,
        description = "Why it is not known"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct NodeWatermarkSpec {
    /// UID of the Node. An agent on a node with another UID keeps nothing of this.
    #[serde(rename = "nodeUID")]
    #[schemars(length(max = 64))]
    pub node_uid: String,
    /// Identifies `nodeUID`, `rules`, `actions`, `podPolicies` and `softenScheduling`; an agent repeats it as
    /// `status.observedHash`.
    #[schemars(length(max = 64))]
    pub hash: String,
    /// The rules, in order of id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub rules: Vec<Part<WatermarkRule>>,
    /// The actions that the rules name, in order of name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub actions: Vec<Part<WatermarkAction>>,
    /// Which pods may be acted on, in order of name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub pod_policies: Vec<Part<WatermarkPodPolicy>>,
    /// More nodes are over their marks than may be closed at once: where a rule says `NoSchedule`, this node has
    /// `PreferNoSchedule`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub soften_scheduling: bool,
    /// The objects that this was compiled from, each with its generation then: `NodeQOS/watermark1@3`. Not in the
    /// hash: an edit that changes nothing for the node is not written to it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 2048),
        inner(length(max = 300)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub sources: Vec<String>,
    /// Fields of a later version.
    #[serde(flatten)]
    #[schemars(skip)]
    pub other: BTreeMap<String, Value>,
}

/// One rule, every default resolved. The values of words are left open in the definition: an agent says of each
/// rule whether it understands it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkRule {
    /// `<NodeQOS>/<rule>`.
    #[schemars(length(max = 320))]
    pub id: String,
    /// Name of the metric.
    #[schemars(length(max = 200))]
    pub metric: String,
    /// The metric is a series of the probe.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub from_probe: bool,
    /// Over the labels of the metric's series. Absent: all series.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub series: Option<Vec<WatermarkRequirement>>,
    /// High mark, in the metric's unit.
    pub watermark: f64,
    /// Low mark. Absent: the high mark.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restore: Option<f64>,
    /// Consecutive breaches before the action starts.
    pub avoidance_threshold: i64,
    /// Consecutive quiet evaluations before it may end.
    pub restore_threshold: i64,
    /// Seconds from one evaluation to the next.
    pub period_seconds: i64,
    /// A sample older than this is unknown.
    #[serde(rename = "sampleTTLSeconds")]
    pub sample_ttl_seconds: i64,
    /// Where series are fetched from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<WatermarkProbe>,
    /// What is done: the id, else the name, of one of `spec.actions`.
    #[schemars(length(max = 264))]
    pub action: String,
    /// `None`: act. `Preview`: only report.
    #[schemars(length(max = 32))]
    pub strategy: String,
}

/// The HTTP probe of a rule.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkProbe {
    /// Where to GET Prometheus text from.
    #[schemars(length(max = 2048))]
    pub url: String,
    /// Extra request headers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub headers: Vec<WatermarkHeader>,
    /// The answer must have arrived by then.
    pub timeout_seconds: i64,
}

/// One request header.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkHeader {
    /// Its name.
    #[schemars(length(max = 128))]
    pub name: String,
    /// Its value.
    #[schemars(length(max = 4096))]
    pub value: String,
}

/// An `AvoidanceAction`, every default resolved.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkAction {
    /// What rules call it, where there are two of one name: one rule already keeps an edit that another doesn't yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 264))]
    pub id: Option<String>,
    /// The object's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Least time in force after the last breach.
    pub cool_down_seconds: i64,
    /// Effect of the taint that disables scheduling: `NoSchedule` or `PreferNoSchedule`. Absent: the node stays open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub disable_scheduling: Option<String>,
    /// CPU throttling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_throttle: Option<WatermarkThrottle>,
    /// Page cache is reclaimed.
    #[serde(
        rename = "forceGC",
        default,
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub force_gc: bool,
    /// Eviction.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub eviction: Option<WatermarkEviction>,
}

/// How a pod's CPU is taken down, in percent of its base.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkThrottle {
    /// The floor.
    #[serde(rename = "minCPURatio")]
    pub min_cpu_ratio: i64,
    /// The step.
    #[serde(rename = "stepCPURatio")]
    pub step_cpu_ratio: i64,
    /// The pod becomes idle class before the first step.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub idle: bool,
}

/// How pods are evicted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkEviction {
    /// From the first signal to the kill. Absent: the pod's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<i64>,
    /// At most so many pods a round.
    pub max_pods_per_round: i64,
    /// Pods without a controller too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evict_unowned: bool,
}

/// Which pods a `PodQOS` matches, and what it allows to be done to them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WatermarkPodPolicy {
    /// The object's name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Over pod labels; all must hold, and an empty list takes every pod. Absent: not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub labels: Option<Vec<WatermarkRequirement>>,
    /// `key` is `QOSClass`, `Priority` or `Namespace`; all must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub scopes: Vec<WatermarkRequirement>,
    /// Names of actions, or words for kinds of action, in lower case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(max = 253)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub allowed: Vec<String>,
}

/// One requirement on one label, or on one property of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(deny_unknown_fields)]
pub struct WatermarkRequirement {
    /// The label's key, or the property.
    #[schemars(length(max = 317))]
    pub key: String,
    /// `In`, `NotIn`, `Exists` or `DoesNotExist`.
    #[schemars(length(max = 32))]
    pub operator: String,
    /// The values of `In` and `NotIn`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}
