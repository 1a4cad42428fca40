//! The decisions of one engine step: the only input of the actuators.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metric::ActionKind;
use super::pod::PodUid;
use super::policy::{RuleId, TaintEffect};
use super::time::BootTime;
use super::units::{Bytes, MilliCpu, Quota};

/// The result of one evaluation. Its buffers are reused.
///
/// `scheduling` and `throttles` are the desired state, not changes to it. A throttled pod that is not listed is restored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// A rule was due. If not, ignore the rest of the plan.
    pub evaluated: bool,
    /// The desired scheduling state.
    pub scheduling: Scheduling,
    /// Every pod to throttle or to give a burst, in victim order.
    pub throttles: Vec<PodThrottle>,
    /// Page cache to reclaim now.
    pub reclaims: Vec<Reclaim>,
    /// Pods to evict now.
    pub evictions: Vec<Evict>,
    /// What changed, for logs, events and traces, including Preview entries (`would`).
    pub transitions: Vec<Transition>,
}

/// Whether new pods may be scheduled to the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scheduling {
    /// Leave it unchanged: not every rule has been evaluated since the start.
    #[default]
    Unchanged,
    /// No rule disables scheduling.
    Enabled,
    /// At least one rule disables scheduling.
    Disabled {
        /// The strongest effect of these rules.
        effect: TaintEffect,
        /// The rules that disable scheduling, ordered by ID.
        rules: Vec<RuleId>,
    },
}

/// The desired throttle of one pod, or its burst.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodThrottle {
    /// Pod UID.
    pub uid: PodUid,
    /// The rule with the lowest ratio, which is in force.
    pub rule: RuleId,
    /// Percent of the base, 0..=100; 100 while the pod is only idle class, or only has a burst.
    pub ratio: u8,
    /// Its scheduling class.
    pub class: CpuClass,
    /// The burst of each of its cgroups that has a quota, at most that quota; 0 restores the original.
    pub burst: MilliCpu,
    /// The cgroups to limit.
    pub target_cgroups: Vec<TargetCgroup>,
}

/// How a pod ranks below the others for CPU time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuClass {
    /// As the kubelet set it.
    #[default]
    Normal,
    /// The lowest weight, where the idle class would make the kubelet reject new pods.
    LowestWeight,
    /// The idle class: it gets the CPU time that nothing else wants.
    Idle,
}

impl PodThrottle {
    /// Whether the pod is in the lowest class, in either form.
    pub fn is_lowest(&self) -> bool {
        self.class != CpuClass::Normal
    }
}

/// One cgroup to limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetCgroup {
    /// Path below the pod's cgroup, as in [`super::sample::TargetCgroupSample::cgroup`].
    pub cgroup: Arc<str>,
    /// The CPU that a ratio of 100 % stands for.
    pub base: MilliCpu,
    /// The quota to set; `None` restores the original.
    pub quota: Option<MilliCpu>,
}

/// Page cache to reclaim from one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaim {
    /// Pod UID.
    pub uid: PodUid,
    /// The rule that decided it.
    pub rule: RuleId,
    /// Maximum amount.
    pub amount: Bytes,
}

/// One pod to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evict {
    /// Pod UID, a precondition of the eviction.
    pub uid: PodUid,
    /// The rule that decided it.
    pub rule: RuleId,
    /// Grace period, at least 1 s.
    pub grace: Duration,
}

/// The state of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RuleState {
    /// Nothing in force, or being restored step by step.
    #[default]
    Normal,
    /// Above its threshold for long enough: acting.
    Breached,
    /// Quiet again; actions stay in force until the cool-down ends.
    Cooling,
}

/// Why an evaluation gave no result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Unknown {
    /// No sample, no series that matches the selector, or a metric that this node does not provide.
    Missing,
    /// Older than the rule's `sample_ttl`.
    Stale,
    /// Not a number, infinite, negative, or more than the machine can do.
    Impossible,
    /// The first sample, or the first after a gap of more than three periods: there is no baseline.
    Rebased,
    /// Less than half of the metric's window has samples, as after a start.
    Sparse,
}

/// A change of state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Transition {
    /// Time of the change.
    pub at: BootTime,
    /// The rule that caused it.
    pub rule: RuleId,
    /// Preview: the change was not made.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub would: bool,
    /// The change.
    #[serde(flatten)]
    pub change: PlanChange,
}

/// The kinds of change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "change",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum PlanChange {
    /// The rule changed state.
    State {
        /// Previous state.
        from: RuleState,
        /// New state.
        to: RuleState,
        /// The metric's value; with several series, the one that decided.
        value: Option<f64>,
        /// The rule's threshold.
        #[serde(alias = "watermark")]
        threshold: f64,
        /// It returned to Normal because its metric was Unknown for too long.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unknown_too_long: bool,
    },
    /// The metric became Unknown.
    Unknown {
        /// Reason.
        reason: Unknown,
    },
    /// The metric is known again.
    Known {
        /// The value.
        value: f64,
    },
    /// The rule is now outside its hours: it becomes Normal, and what it did is restored.
    OutsideHours,
    /// The rule is within its hours again.
    WithinHours,
    /// A pod's throttle moved a step down (`to` below `from`) or up. 100 % and not idle is the original.
    Throttle {
        /// Pod UID.
        pod: PodUid,
        /// Previous ratio, percent of the base.
        from: u8,
        /// New ratio, percent of the base.
        to: u8,
        /// Whether the pod is now in the idle class.
        idle: bool,
        /// The CPU the pod is now allowed, over all target cgroups.
        quota: Quota,
        /// The predicted release of the step.
        release: MilliCpu,
    },
    /// A `PodQOS` gives the pod a burst, or another one; 0 ends it.
    Burst {
        /// Pod UID.
        pod: PodUid,
        /// As CPUs over one enforcement period.
        burst: MilliCpu,
    },
    /// Page cache of a pod is reclaimed.
    Reclaim {
        /// Pod UID.
        pod: PodUid,
        /// Maximum amount.
        amount: Bytes,
    },
    /// A pod is evicted.
    Evict {
        /// Pod UID.
        pod: PodUid,
        /// Grace period.
        grace: Duration,
        /// The predicted release in millicores or bytes; absent if the metric has no such unit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        release: Option<u64>,
        /// Memory was about to run out, so it did not wait for milder steps.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        urgent: bool,
    },
    /// Two evictions in a row did not lower the metric, so the rule evicts no more.
    EvictionsEnded {
        /// The input of its metric before them, in the metric's unit.
        before: f64,
        /// The same after them.
        after: f64,
    },
    /// This rule disables scheduling.
    SchedulingDisabled {
        /// Taint effect.
        effect: TaintEffect,
    },
    /// This rule no longer disables scheduling.
    SchedulingEnabled,
    /// An action on a pod has no effect, so the rule takes no further step of that kind on it.
    Ineffective {
        /// Pod UID.
        pod: PodUid,
        /// What was observed.
        observed: Ineffective,
    },
    /// Actions on the pod have an effect again.
    Effective {
        /// Pod UID.
        pod: PodUid,
    },
    /// A pod selected for the rule's action was skipped; reported once per change of reason.
    #[serde(alias = "spared")]
    Skipped {
        /// Pod UID.
        pod: PodUid,
        /// Reason.
        reason: Skipped,
    },
}

impl PlanChange {
    /// The kind of action on a pod; `None` for what happens to a rule or the node.
    pub const fn action(&self) -> Option<ActionKind> {
        match self {
            Self::Throttle { .. } => Some(ActionKind::CpuThrottle),
            Self::Reclaim { .. } => Some(ActionKind::ForceGc),
            Self::Evict { .. } => Some(ActionKind::Eviction),
            _ => None,
        }
    }

    /// The pod that the change concerns, if any.
    pub const fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::Throttle { pod, .. }
            | Self::Burst { pod, .. }
            | Self::Reclaim { pod, .. }
            | Self::Evict { pod, .. }
            | Self::Ineffective { pod, .. }
            | Self::Effective { pod }
            | Self::Skipped { pod, .. } => Some(pod),
            Self::State { .. }
            | Self::Unknown { .. }
            | Self::Known { .. }
            | Self::OutsideHours
            | Self::WithinHours
            | Self::EvictionsEnded { .. }
            | Self::SchedulingDisabled { .. }
            | Self::SchedulingEnabled => None,
        }
    }
}

/// What shows that an action on a pod has no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    tag = "kind",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Ineffective {
    /// Another writer keeps changing its cgroup files.
    Contested,
    /// In two evaluations in a row it used more CPU than its quota allows.
    QuotaExceeded {
        /// CPU usage in the last one.
        uses: MilliCpu,
        /// The quota.
        quota: MilliCpu,
    },
    /// A rule wants to act on it, but its usage could not be measured in two evaluations in a row.
    NotMeasured,
    /// Reclaiming its page cache freed nothing.
    NothingReclaimed,
    /// Its eviction was accepted, but it is not terminating.
    NotTerminating,
}

/// Why a pod was skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Skipped {
    /// No `PodQOS` allows this action on it.
    NotAllowed,
    /// Annotated as protected, one of our own, or a unit that the machine needs.
    Protected,
    /// Not running, or terminating.
    NotRunning,
    /// No fresh usage sample.
    NoSample,
    /// One of its containers has no cgroup, so on cgroup v1 the quotas of the others cannot be determined.
    ContainerMissing,
    /// It uses so little of the resource that acting on it would not help.
    UsesLittle,
    /// Its floor is not below its usage.
    AtFloor,
    /// It has no controller and the action does not evict such pods.
    Unowned,
    /// Never evicted: static, `DaemonSet`, system-critical, or annotated.
    #[serde(alias = "kept")]
    ExemptFromEviction,
    /// The last attempt failed or was refused; waiting before a retry.
    BackingOff,
    /// Another writer keeps changing the same files.
    Contested,
    /// The last step of this kind has no effect on it.
    Ineffective,
}

impl Skipped {
    /// The reason as one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NotAllowed => "notAllowed",
            Self::Protected => "protected",
            Self::NotRunning => "notRunning",
            Self::NoSample => "noSample",
            Self::ContainerMissing => "containerMissing",
            Self::UsesLittle => "usesLittle",
            Self::AtFloor => "atFloor",
            Self::Unowned => "unowned",
            Self::ExemptFromEviction => "exemptFromEviction",
            Self::BackingOff => "backingOff",
            Self::Contested => "contested",
            Self::Ineffective => "ineffective",
        }
    }
}

/// Feedback from the actuators before the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Feedback {
    /// A throttle could not be applied (no journal, no permission); nothing was changed.
    ThrottleFailed {
        /// Pod UID.
        uid: PodUid,
    },
    /// Another writer changed files of these pods, which were written again: for a moment their quotas were not ours.
    Overwritten {
        /// Pod UIDs.
        uids: Vec<PodUid>,
    },
    /// Another writer keeps changing the pod's files: leave the pod alone for now.
    Contested {
        /// Pod UID.
        uid: PodUid,
        /// When to try again.
        until: BootTime,
    },
    /// Another writer (an in-place resize) changed the original of the cgroup.
    Resized {
        /// Pod UID.
        uid: PodUid,
        /// Path below the pod's cgroup.
        cgroup: Arc<str>,
        /// The new original.
        original: Quota,
    },
    /// Reclaiming page cache of the pod freed nothing, or this kernel cannot reclaim.
    NothingReclaimed {
        /// Pod UID.
        uid: PodUid,
        /// The rule that decided it.
        rule: RuleId,
    },
    /// An eviction was accepted: the pod must terminate now.
    EvictionAccepted {
        /// Pod UID.
        uid: PodUid,
    },
    /// An eviction was refused.
    EvictionRefused {
        /// Pod UID.
        uid: PodUid,
        /// When it may be tried again.
        until: BootTime,
    },
    /// The pod is gone.
    Gone {
        /// Pod UID.
        uid: PodUid,
    },
}
