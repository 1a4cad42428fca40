//! What an operator on call asks of a node: which rule, since when, what is in force on which pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// The types of condition on a `NodeWatermark`.
pub mod condition {
    /// The agent keeps the spec.
    pub const READY: &str = "Ready";
    /// Somebody else keeps writing what the agent writes.
    pub const CONTESTED: &str = "Contested";
    /// A part of the spec, or of the node, can't be handled: the message says which.
    pub const DEGRADED: &str = "Degraded";
    /// Everything is stopped. Only there while it is.
    pub const STOPPED: &str = "Stopped";
    /// A reason of [`READY`]: the spec is kept, and none of its rules has a usable sample.
    pub const NONE_JUDGED: &str = "NoneJudged";
}

/// The reasons of the condition [`condition::STOPPED`].
pub mod stopped {
    /// Some of what was in force is not given back yet.
    pub const RELEASING: &str = "Releasing";
    /// Nothing is in force.
    pub const RELEASED: &str = "Released";
}

/// The values of `status.scheduling.state`.
pub mod scheduling {
    /// New pods may be placed on the node, as far as plimsoll is concerned.
    pub const ENABLED: &str = "Enabled";
    /// No new pod is placed on it.
    pub const NO_SCHEDULE: &str = "NoSchedule";
    /// New pods go elsewhere where they can.
    pub const PREFER_NO_SCHEDULE: &str = "PreferNoSchedule";
}

/// What the agent makes of the spec.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeWatermarkStatus {
    /// The `spec.hash` that the agent keeps now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub observed_hash: Option<String>,
    /// Who writes this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentStatus>,
    /// The printed columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Counts>,
    /// One entry a rule, in order of id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub rules: Vec<RuleStatus>,
    /// Whether new pods are kept away. Absent until every rule has been judged once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<SchedulingStatus>,
    /// Pods that are throttled now.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub throttled: Vec<ThrottledStatus>,
    /// The last evictions, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub evictions: Vec<EvictionStatus>,
    /// What rules with strategy `Preview` would have in force now, were their strategy `None`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub would: Vec<WouldStatus>,
    /// What was not done, and why.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub refused: Vec<RefusedStatus>,
    /// How many pods of the node each `PodQOS` matches, in order of name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub pod_policies: Vec<PodPolicyStatus>,
    /// `Ready`, `Contested`, `Degraded`, and `Stopped` while everything is stopped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub conditions: Vec<Condition>,
}

/// Who writes the status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Version of plimsoll.
    #[schemars(length(max = 64))]
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id`: changes with each start of the machine.
    #[serde(rename = "bootID")]
    #[schemars(length(max = 64))]
    pub boot_id: String,
    /// When it wrote this, by its node's clock. While something is in force it writes at least every five minutes, so
    /// that whoever watches sees that it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report_time: Option<Time>,
}

/// The printed columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// Rules that the agent keeps.
    #[serde(default)]
    pub rules: i64,
    /// Rules that are Breached.
    #[serde(default)]
    pub breached: i64,
    /// Pods that are throttled.
    #[serde(default)]
    pub throttled: i64,
    /// Pods evicted in the last hour.
    #[serde(default)]
    pub evicted_last_hour: i64,
    /// Pods that some rule with strategy `Preview` would act on.
    #[serde(default)]
    pub would: i64,
}

/// The state of one rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuleStatus {
    /// `<NodeQOS>/<rule>`.
    #[schemars(length(max = 320))]
    pub id: String,
    /// What is measured; its unit is that of `value` and `mark`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 200))]
    pub metric: Option<String>,
    /// `Preview`. Absent: the rule acts.
    #[serde(default = "acts", skip_serializing_if = "is_acting")]
    #[schemars(length(max = 32))]
    pub strategy: String,
    /// `Normal`, `Breached` or `Cooling`.
    #[schemars(length(max = 32))]
    pub state: String,
    /// The last value, in the metric's unit. Absent while it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The high mark.
    pub mark: f64,
    /// By what it was judged besides the value: a rule on pressure that throttles acts for protected pods that wait.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub judged_by: Option<String>,
    /// For how long at least what it does stays in force after its last breach, where that is longer than its action says:
    /// it doubles, up to 8 times, with each breach right after a release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cool_down_seconds: Option<i64>,
    /// Since when the rule is in that state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Why the value is not known, or the rule is not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub unknown: Option<String>,
}

/// Whether new pods are kept away.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SchedulingStatus {
    /// `Enabled`, or the effect of the taint: `NoSchedule` or `PreferNoSchedule`.
    #[schemars(length(max = 32))]
    pub state: String,
    /// The rules that need it closed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 256),
        inner(length(max = 320)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub rules: Vec<String>,
    /// Since when.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

impl SchedulingStatus {
    /// Whether a taint of ours keeps new pods away, whatever its effect.
    pub fn is_disabled(&self) -> bool {
        self.state != scheduling::ENABLED
    }
}

/// One pod that is throttled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ThrottledStatus {
    /// The pod's namespace.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The pod's name.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The pod's UID.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The rule behind it.
    #[schemars(length(max = 320))]
    pub rule: String,
    /// Percent of the base that it is left.
    pub ratio: i64,
    /// What it had before, in millicores. Absent: it had no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_millicores: Option<i64>,
    /// What it has now, in millicores. Absent: it has its own again, and is only idle class.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_millicores: Option<i64>,
}

/// One eviction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EvictionStatus {
    /// The pod's namespace.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The pod's name.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The pod's UID.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The rule behind it.
    #[schemars(length(max = 320))]
    pub rule: String,
    /// When it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// `Terminating`, `Gone`, or why it was refused.
    #[schemars(length(max = 1024))]
    pub outcome: String,
}

/// What one Preview rule would do to one pod, or to the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WouldStatus {
    /// The rule.
    #[schemars(length(max = 320))]
    pub rule: String,
    /// `throttle`, `evict`, `reclaim` or `disableScheduling`.
    #[schemars(length(max = 64))]
    pub what: String,
    /// The pod's namespace; absent where it is about the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub namespace: Option<String>,
    /// The pod's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod: Option<String>,
    /// By how much, in words: `100% -> 90%, 450m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub how: Option<String>,
}

/// How many pods one `PodQOS` matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodPolicyStatus {
    /// Its name.
    #[schemars(length(max = 253))]
    pub name: String,
    /// Pods of this node.
    pub matched: i64,
}

/// Something that was not done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedStatus {
    /// What: `throttle`, `evict`, `rule`, `podPolicy`, ...
    #[schemars(length(max = 64))]
    pub what: String,
    /// The pod as `namespace/name`; absent where it is about a rule or the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub pod: Option<String>,
    /// The rule, where it is about one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub rule: Option<String>,
    /// Why.
    #[schemars(length(max = 1024))]
    pub reason: String,
}

/// The strategy of a rule that acts; left out, so that 20 rules and their states stay within 8 KiB.
fn acts() -> String {
    "None".to_owned()
}

fn is_acting(strategy: &str) -> bool {
    strategy == "None"
}
