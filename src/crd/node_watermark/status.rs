//! The status of a `NodeWatermark`: the state of each rule and the actions in force.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

/// The types of condition on a `NodeWatermark`.
pub mod condition {
    /// The agent enforces the spec.
    pub const READY: &str = "Ready";
    /// An action has no effect: another writer reverts it, the kernel does not enforce it, or the pod is elsewhere.
    pub const ACTION_INEFFECTIVE: &str = "ActionIneffective";
    /// A part of the spec cannot be enforced, or the agent has a problem on the node: see the message.
    pub const DEGRADED: &str = "Degraded";
    /// The emergency stop is in effect. Only present then.
    pub const STOPPED: &str = "Stopped";
    /// Actions with `idle: true` use the idle class. Only present while they do not.
    pub const IDLE_CLASS: &str = "IdleClass";
    /// The reason of [`IDLE_CLASS`]: with a pod in the idle class the kubelet would reject new pods.
    pub const IDLE_UNSAFE: &str = "IdleUnsafe";
    /// The busy batch pods together weigh so much that the idle class does not protect. Only present then.
    pub const BATCH_WEIGHT_HIGH: &str = "BatchWeightHigh";
    /// The reason of [`BATCH_WEIGHT_HIGH`].
    pub const TOO_MANY_BUSY_PODS: &str = "TooManyBusyPods";
    /// A reason of [`READY`]: the spec is enforced, but none of its rules has a usable sample.
    pub const NONE_EVALUATED: &str = "NoRuleEvaluated";
    /// A reason of [`READY`]: the spec is not enforced, but the previous one.
    pub const PREVIOUS_RULES_ENFORCED: &str = "PreviousRulesEnforced";
    /// A reason of [`READY`]: the spec is enforced.
    pub const RULES_ENFORCED: &str = "RulesEnforced";
    /// A reason of [`READY`]: not every rule has been evaluated yet.
    pub const STARTING: &str = "Starting";
    /// A reason of [`READY`]: the agent has ended.
    pub const AGENT_ENDED: &str = "AgentEnded";
    /// The reason of [`DEGRADED`] while it is False.
    pub const ALL_IN_ORDER: &str = "AllInOrder";
    /// The reason of [`ACTION_INEFFECTIVE`] while it is False.
    pub const ACTIONS_EFFECTIVE: &str = "ActionsEffective";
}

/// The reasons of the condition [`condition::STOPPED`].
pub mod stopped {
    /// Some changes are not restored yet.
    pub const RELEASING: &str = "Releasing";
    /// Everything is restored.
    pub const RELEASED: &str = "Released";
}

/// The values of `status.scheduling.state`.
pub mod scheduling {
    /// Plimsoll does not disable scheduling.
    pub const ENABLED: &str = "Enabled";
    /// No new pods are scheduled to the node.
    pub const NO_SCHEDULE: &str = "NoSchedule";
    /// The scheduler avoids the node where it can.
    pub const PREFER_NO_SCHEDULE: &str = "PreferNoSchedule";
}

/// The status of a `NodeWatermark`, set by the agent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct NodeWatermarkStatus {
    /// The `spec.hash` that the agent enforces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub observed_hash: Option<String>,
    /// The agent that wrote this status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentStatus>,
    /// The counts for the printer columns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub counts: Option<Counts>,
    /// The state of each rule, sorted by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub rules: Vec<RuleStatus>,
    /// Whether scheduling is disabled. Absent until every rule has been evaluated once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<SchedulingStatus>,
    /// The throttled pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub throttled: Vec<ThrottledStatus>,
    /// The pods that a `PodQOS` gives a burst.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub bursts: Vec<BurstStatus>,
    /// The last evictions, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-kubernetes-list-type" = "atomic"))]
    pub evictions: Vec<EvictionStatus>,
    /// The actions that would be in force now if rules with strategy `Preview` had the strategy `Enforce`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub would: Vec<WouldStatus>,
    /// The rules, policies and actions that were refused, with reasons.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256), extend("x-kubernetes-list-type" = "atomic"))]
    pub refused: Vec<RefusedStatus>,
    /// The number of pods of the node that each `PodQOS` matches, sorted by name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "atomic"))]
    pub pod_policies: Vec<PodPolicyStatus>,
    /// The batch weight share: the whole percentage of CPU weight that the busy batch pods have, in the class that a policy gives them,
    /// beside the protected pod for which it is highest. Above 10 its tail latency grows. Absent if it is not known, or there are no
    /// such pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batch_weight_share: Option<i64>,
    /// The conditions: `Ready`, `ActionIneffective`, `Degraded`; `Stopped` during an emergency stop; `IdleClass` while pods get the
    /// lowest CPU weight instead of the idle class, because the kubelet would reject new pods; `BatchWeightHigh` while there are too many
    /// busy batch pods for the idle class to protect; `Reconciling` and `Stalled` are those of kstatus.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// The agent that wrote the status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// The version of plimsoll.
    #[schemars(length(max = 64))]
    pub version: String,
    /// `/proc/sys/kernel/random/boot_id` of the node, which changes with each boot.
    #[serde(rename = "bootID")]
    #[schemars(length(max = 64))]
    pub boot_id: String,
    /// The time of this status, by the clock of the node. While an action is in force the agent updates it at least every five
    /// minutes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub report_time: Option<Time>,
    /// Whether the agent reads `value` and `restoreValue` of rules. The spec for an older agent does not have them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub reads_quantities: bool,
}

/// The counts for the printer columns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct Counts {
    /// The number of rules that the agent enforces.
    #[serde(default)]
    pub rules: i64,
    /// The number of rules in state Breached.
    #[serde(default)]
    pub breached: i64,
    /// The number of throttled pods.
    #[serde(default)]
    pub throttled: i64,
    /// The number of pods evicted in the last hour.
    #[serde(default)]
    pub evicted_last_hour: i64,
    /// The number of pods that rules with strategy `Preview` would act on.
    #[serde(default)]
    pub would: i64,
    /// How many times rules with strategy `Preview` would have begun to act in the last 24 hours. Absent if there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_last_day: Option<i64>,
}

/// The state of a rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RuleStatus {
    /// The id: `<NodeQOS>/<rule>`.
    #[schemars(length(max = 320))]
    pub id: String,
    /// The metric. Its unit is that of `value` and `mark`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 200))]
    pub metric: Option<String>,
    /// `Preview`, or absent if the rule takes its action.
    #[serde(default = "strategy_enforce", skip_serializing_if = "is_enforce")]
    #[schemars(length(max = 32))]
    pub strategy: String,
    /// The state: `Normal`, `Breached` or `Cooling`.
    #[schemars(length(max = 32))]
    pub state: String,
    /// The last value, in the unit of the metric. Absent if it is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<f64>,
    /// The threshold.
    #[serde(rename = "mark")]
    pub threshold: f64,
    /// Whether limits of a protected pod's own made it wait as well, which is not counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
    /// What the rule does to pods now: `idle class`, `CPU quota`, `page cache` or `eviction`. Absent if it does nothing to pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub rung: Option<String>,
    /// What it does next, when nothing more can be done on this rung and that did not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 32))]
    pub next_rung: Option<String>,
    /// The earliest time at which the rule evicts a pod, if its metric stays above the threshold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub earliest_eviction_time: Option<Time>,
    /// Whether the rule evicts no more, since two evictions in a row did not lower its metric.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evictions_ended: bool,
    /// Whether the rule is outside the hours of its `activeDuring`: its state is then Normal, whatever its value.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outside_hours: bool,
    /// The cool-down in seconds, if it is longer than that of the action. It doubles, up to 8 times its length, with each
    /// breach right after a release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cool_down_seconds: Option<i64>,
    /// The time when the rule entered its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
    /// Why the value is unknown, or the rule is not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1024))]
    pub unknown: Option<String>,
    /// How often it would have acted, if its strategy is `Preview`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub would_last_day: Option<WouldLastDay>,
}

/// What a rule with strategy `Preview` would have done in the current hour and the 24 before. An edit of its metric or thresholds
/// starts the counts over.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WouldLastDay {
    /// How many times it became Breached.
    #[serde(default)]
    pub breaches: i64,
    /// How many minutes it was Breached or Cooling. A rule that disables scheduling would have done so for that time.
    #[serde(default)]
    pub active_minutes: i64,
    /// The number of evaluations in which it would have throttled pods further.
    #[serde(default)]
    pub throttle_rounds: i64,
    /// The number of pods that it would have evicted.
    #[serde(default)]
    pub evictions: i64,
    /// The last time at which it became Breached, even if that is longer ago.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_breach_time: Option<Time>,
    /// The time when counting began.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

/// Whether scheduling is disabled.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct SchedulingStatus {
    /// The state: `Enabled`, or the effect of the taint (`NoSchedule` or `PreferNoSchedule`).
    #[schemars(length(max = 32))]
    pub state: String,
    /// The rules that disable scheduling.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 256),
        inner(length(max = 320)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub rules: Vec<String>,
    /// The time when scheduling entered its state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<Time>,
}

impl SchedulingStatus {
    /// Whether there is a taint of plimsoll, with any effect.
    pub fn is_disabled(&self) -> bool {
        self.state != scheduling::ENABLED
    }
}

/// A throttled pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ThrottledStatus {
    /// The namespace of the pod.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The UID of the pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The id of the rule.
    #[schemars(length(max = 320))]
    pub rule: String,
    /// The percent of the base quota that the pod has.
    pub ratio: i64,
    /// The quota before throttling, in millicores. Absent if it was unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_millicores: Option<i64>,
    /// The current quota, in millicores. Absent if only the scheduling class is still changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_millicores: Option<i64>,
}

/// A pod with a burst above its CPU limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct BurstStatus {
    /// The namespace of the pod.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The burst, in millicores over one enforcement period. Each cgroup has at most its limit of it.
    pub millicores: i64,
}

/// An eviction.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EvictionStatus {
    /// The namespace of the pod.
    #[schemars(length(max = 63))]
    pub namespace: String,
    /// The name of the pod.
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The UID of the pod.
    #[schemars(length(max = 64))]
    pub uid: String,
    /// The id of the rule.
    #[schemars(length(max = 320))]
    pub rule: String,
    /// The time of the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time: Option<Time>,
    /// The outcome: `Terminating`, `Gone`, or why the eviction was refused.
    #[schemars(length(max = 1024))]
    pub outcome: String,
}

/// An action that a rule with strategy `Preview` would take on a pod or on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct WouldStatus {
    /// The id of the rule.
    #[schemars(length(max = 320))]
    pub rule: String,
    /// The action: `throttle`, `evict`, `reclaim` or `disableScheduling`.
    #[schemars(length(max = 64))]
    pub what: String,
    /// The namespace of the pod. Absent if the action is on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub namespace: Option<String>,
    /// The name of the pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub pod: Option<String>,
    /// The amount as text, for example `100% -> 90%, 450m`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    pub how: Option<String>,
}

/// The number of pods that a `PodQOS` matches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodPolicyStatus {
    /// The name of the `PodQOS`, or of the rule that the pods are of.
    #[schemars(length(max = 317))]
    pub name: String,
    /// The number of matched pods of this node.
    pub matched: i64,
}

/// A rule, policy or action that was refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct RefusedStatus {
    /// What was refused: `throttle`, `evict`, `rule`, `podPolicy`, ...
    #[schemars(length(max = 64))]
    pub what: String,
    /// The pod as `namespace/name`, if it is about a pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub pod: Option<String>,
    /// The id of the rule, if it is about a rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 320))]
    pub rule: Option<String>,
    /// The reason.
    #[schemars(length(max = 1024))]
    pub reason: String,
}

/// The default strategy. It is not serialized, so that the status of 20 rules stays below 8 KiB.
fn strategy_enforce() -> String {
    "Enforce".to_owned()
}

fn is_enforce(strategy: &str) -> bool {
    strategy == "Enforce"
}
