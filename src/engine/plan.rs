//! What a step of the engine decides: the only input of those who act.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::pod::PodUid;
use super::policy::{RuleId, TaintEffect};
use super::time::BootTime;
use super::units::{Bytes, MilliCpu, Quota};

/// The outcome of one evaluation. Its buffers are kept and refilled.
///
/// `scheduling` and `throttles` are levels, not edges: they say what has to be in force from now on. A pod that is
/// in force and not listed is restored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// Some rule was due. Where not, nothing else here is to be acted on.
    pub evaluated: bool,
    /// The scheduling state to keep.
    pub scheduling: Scheduling,
    /// Every pod that has to be throttled, in the order of victims.
    pub throttles: Vec<Throttle>,
    /// Page cache to reclaim now.
    pub reclaims: Vec<Reclaim>,
    /// Pods to evict now.
    pub evictions: Vec<Evict>,
    /// What changed, for logs, events and traces; `would` entries of Preview included.
    pub transitions: Vec<Transition>,
}

/// Whether new work may be placed here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scheduling {
    /// Leave it as it is: not every rule has been judged once since the start.
    #[default]
    Hold,
    /// No rule needs it closed.
    Enabled,
    /// Closed.
    Disabled {
        /// The strongest effect that a rule asks for.
        effect: TaintEffect,
        /// The rules that ask, in order of id.
        rules: Vec<RuleId>,
    },
}

/// The throttle that one pod has to be under.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Throttle {
    /// Which pod.
    pub uid: PodUid,
    /// The rule with the lowest ratio, which is the one in force.
    pub rule: RuleId,
    /// Percent of the base, 0..=100; 100 while the pod is only idle class.
    pub ratio: u8,
    /// The pod is idle class.
    pub idle: bool,
    /// The cgroups to limit. A `quota` of `None` leaves the cgroup's quota at its original.
    pub levers: Vec<Lever>,
}

/// One cgroup to limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lever {
    /// The cgroup below the pod's, as in [`super::sample::LeverSample::cgroup`].
    pub cgroup: Arc<str>,
    /// What 100 % is.
    pub base: MilliCpu,
    /// What it may use from now on; `None`: its original.
    pub quota: Option<MilliCpu>,
}

/// Page cache to reclaim from one pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reclaim {
    /// Which pod.
    pub uid: PodUid,
    /// For which rule.
    pub rule: RuleId,
    /// At most so much.
    pub amount: Bytes,
}

/// One pod to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evict {
    /// Which pod; a precondition of the eviction.
    pub uid: PodUid,
    /// For which rule.
    pub rule: RuleId,
    /// From the first signal to the kill, at least 1 s.
    pub grace: Duration,
}

/// The state of a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum RuleState {
    /// Nothing in force (or being taken back step by step).
    #[default]
    Normal,
    /// Above its mark for long enough: acting.
    Breached,
    /// Quiet again, what is in force is held.
    Cooling,
}

/// Why an evaluation could not be judged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Unknown {
    /// No sample of it, no series that the selector takes, or a metric that is not kept here.
    Missing,
    /// Older than the cache's time to live.
    Stale,
    /// Not a number, infinite, negative, or beyond what the machine can do.
    Impossible,
    /// The first look, or the first after a gap of more than three periods: nothing to compare with.
    Rebased,
    /// Less than half of the metric's window has samples, as after a start.
    Sparse,
}

/// Something that changed. `would` marks what a Preview rule would have done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Transition {
    /// When.
    pub at: BootTime,
    /// The rule behind it.
    pub rule: RuleId,
    /// Preview: it was not done.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub would: bool,
    /// What.
    #[serde(flatten)]
    pub change: Change,
}

/// The kinds of change.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "change",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum Change {
    /// The rule went from one state to another.
    State {
        /// Before.
        from: RuleState,
        /// After.
        to: RuleState,
        /// The metric's value; of several series the one that decided.
        value: Option<f64>,
        /// The high mark.
        watermark: f64,
        /// It went to Normal because its metric was Unknown for too long.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        unknown_too_long: bool,
    },
    /// The metric can no longer be judged.
    Unknown {
        /// Why.
        reason: Unknown,
    },
    /// It can again.
    Known {
        /// The value.
        value: f64,
    },
    /// A pod's throttle went a step down (`to` below `from`) or up. 100 % and not idle is the original.
    Throttle {
        /// Which pod.
        pod: PodUid,
        /// Percent of the base before.
        from: u8,
        /// Percent of the base from now on.
        to: u8,
        /// Idle class from now on.
        idle: bool,
        /// The pod's allowance from now on, all levers together.
        quota: Quota,
        /// What the step is predicted to release.
        release: MilliCpu,
    },
    /// Page cache of a pod is reclaimed.
    Reclaim {
        /// Which pod.
        pod: PodUid,
        /// At most so much.
        amount: Bytes,
    },
    /// A pod is evicted.
    Evict {
        /// Which pod.
        pod: PodUid,
        /// With this grace.
        grace: Duration,
        /// What its end is predicted to release, in millicores or bytes; absent where the metric has no such unit.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        release: Option<u64>,
    },
    /// New work is kept away for this rule.
    SchedulingDisabled {
        /// How strongly.
        effect: TaintEffect,
    },
    /// This rule no longer keeps new work away.
    SchedulingEnabled,
    /// A pod that the rule's action selects was passed over, with the reason; told once a change of reason.
    Spared {
        /// Which pod.
        pod: PodUid,
        /// Why.
        reason: Spared,
    },
}

impl Change {
    /// The pod that it is about, where it is about one.
    pub const fn pod(&self) -> Option<&PodUid> {
        match self {
            Self::Throttle { pod, .. }
            | Self::Reclaim { pod, .. }
            | Self::Evict { pod, .. }
            | Self::Spared { pod, .. } => Some(pod),
            Self::State { .. }
            | Self::Unknown { .. }
            | Self::Known { .. }
            | Self::SchedulingDisabled { .. }
            | Self::SchedulingEnabled => None,
        }
    }
}

/// Why a pod was passed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Spared {
    /// No `PodQOS` allows this action on it.
    NotAllowed,
    /// Annotated, our own, or a unit that the machine needs.
    Protected,
    /// Not running, or on its way out.
    NotRunning,
    /// No fresh usage sample.
    NoSample,
    /// One of its containers has no cgroup: on cgroup v1 the quotas of its others cannot be told from the pod's then.
    ContainerMissing,
    /// It uses less than 10 m of CPU.
    UsesLittle,
    /// Its floor is not below its usage.
    AtFloor,
    /// It has no controller, and the action does not evict such pods.
    Unowned,
    /// Never evicted: static, `DaemonSet`, system-critical, or annotated.
    Kept,
    /// The last attempt was refused; waiting before the next.
    BackingOff,
    /// Somebody else keeps writing the same files.
    Contested,
}

impl Spared {
    /// One word for it.
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
            Self::Kept => "kept",
            Self::BackingOff => "backingOff",
            Self::Contested => "contested",
        }
    }
}

/// What those who act report back before the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Feedback {
    /// A throttle could not be put in force (no journal, no permission): nothing was changed.
    ThrottleFailed {
        /// Which pod.
        uid: PodUid,
    },
    /// Somebody else keeps writing the pod's files: leave it alone until then.
    Contested {
        /// Which pod.
        uid: PodUid,
        /// When to try again.
        until: BootTime,
    },
    /// Somebody else (an in-place resize) gave the cgroup a new original.
    Resized {
        /// Which pod.
        uid: PodUid,
        /// The cgroup below the pod's.
        cgroup: Arc<str>,
        /// The new original.
        original: Quota,
    },
    /// An eviction was refused.
    EvictionRefused {
        /// Which pod.
        uid: PodUid,
        /// When it may be tried again.
        until: BootTime,
    },
    /// The pod is gone.
    Gone {
        /// Which pod.
        uid: PodUid,
    },
}
