//! The decisions: samples and the time in, a [`plan::Plan`] out. Pure: no clock, no files, no threads.
//!
//! ```text
//!  PolicySet ─┐
//!  Pods ──────┼─► Engine::step(now, &Sample) ─► Plan ─► those who act ─┐
//!  Sample ────┘        ▲                                               │
//!                      └──────────────── Feedback ◄────────────────────┘
//! ```
//! The agent, `run`, `demo` and `replay` all call the same [`Engine::step`].

pub mod metric;
pub mod plan;
pub mod pod;
pub mod policy;
pub mod quantity;
pub mod sample;
pub mod selector;
pub mod time;
pub mod units;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use self::plan::{Feedback, Plan, RuleState, Unknown};
use self::pod::{Pod, PodUid};
use self::policy::{PolicySet, Probe, RuleId, Strategy};
use self::sample::Sample;
use self::time::BootTime;
use self::units::{MilliCpu, Quota};

/// What the next samples have to hold: the sampler reads nothing else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one flag for each file that may be left unread"
)]
pub struct Demand {
    /// `/proc/loadavg`
    pub load: bool,
    /// `/proc/pressure/{cpu,memory,io}`
    pub pressure: [bool; 3],
    /// `/proc/diskstats`
    pub disks: bool,
    /// `/proc/1/net/dev`
    pub interfaces: bool,
    /// `memory.stat` of every pod.
    pub pod_memory: bool,
    /// The quota file of every pod's levers.
    pub pod_quota: bool,
    /// `schedstat` of every container's threads.
    pub run_delay: bool,
    /// `cpu.stat` of every container.
    pub throttled: bool,
    /// HTTP probes.
    pub probes: Vec<Probe>,
}

/// The rule machines, and what is in force for whom.
#[derive(Debug, Default)]
pub struct Engine {}

/// What `plimsoll` tells of a rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleReport {
    /// Which rule.
    pub id: RuleId,
    /// Act or report.
    pub strategy: Strategy,
    /// State.
    pub state: RuleState,
    /// Since when it has been in that state; `None` before the first evaluation.
    pub since: Option<BootTime>,
    /// Last value judged (of several series the one that decided).
    pub value: Option<f64>,
    /// High mark.
    pub watermark: f64,
    /// Low mark.
    pub restore: f64,
    /// Consecutive breaches counted.
    pub breaches: u32,
    /// Consecutive quiet evaluations counted.
    pub quiets: u32,
    /// Why the last evaluation could not be judged.
    pub unknown: Option<Unknown>,
}

/// What is kept over a restart: serialised beside the journal.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineState {}

/// A throttle found in force at the start, from the journal.
#[derive(Clone, Debug, PartialEq)]
pub struct AdoptedThrottle {
    /// Which pod.
    pub uid: PodUid,
    /// The rule that it is in force for.
    pub rule: RuleId,
    /// Percent of the base.
    pub ratio: u8,
    /// Idle class.
    pub idle: bool,
    /// Each cgroup with its base and its original.
    pub levers: Vec<(Arc<str>, MilliCpu, Quota)>,
}

impl Engine {
    /// An engine with no policy and no pods.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a new set of policies. What is in force for rules that are gone or no longer enforced is taken back
    /// step by step by the following evaluations.
    pub fn set_policy(&mut self, _policy: Arc<PolicySet>) {}

    /// Takes the pods of the node as they are now.
    pub fn set_pods(&mut self, _pods: Vec<Arc<Pod>>) {}

    /// What the next samples have to hold.
    pub fn demand(&self) -> Demand {
        Demand::default()
    }

    /// When the next evaluation is due; `None` without rules and with nothing left to take back. A sample at or
    /// after this time has to hold the pods.
    pub fn next_due(&self) -> Option<BootTime> {
        None
    }

    /// Hears what became of the last plan.
    pub fn feedback(&mut self, _feedback: &Feedback) {}

    /// Evaluates the rules that are due at `now`.
    pub fn step(&mut self, _now: BootTime, _sample: &Sample, _plan: &mut Plan) {}

    /// The rules as they stand, in order of id.
    pub fn reports(&self) -> impl Iterator<Item = RuleReport> {
        std::iter::empty()
    }

    /// What has to be kept over a restart.
    pub fn state(&self) -> EngineState {
        EngineState::default()
    }

    /// Goes on from where the last process stopped (same boot): call it after [`Self::set_policy`] and
    /// [`Self::set_pods`]. Throttles of rules that are gone are taken back.
    pub fn adopt(&mut self, _state: &EngineState, _throttles: &[AdoptedThrottle]) {}
}
