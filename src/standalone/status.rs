//! What is in force, for `plimsoll status --local`.

use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::host::Machine;
use super::scheduling::SchedulingState;
use crate::engine::RuleReport;
use crate::engine::metric::Rung;
use crate::engine::plan::{RuleState, Unknown};
use crate::engine::pod::PodUid;
use crate::engine::policy::{RuleId, Strategy};
use crate::engine::time::BootTime;
use crate::messages::event::{NamedDecision, PodRefusal, PolicyProblem, metric};
use crate::node::journal::JournalRecord;
use crate::node::machine::backend::Backend;
use crate::node::machine::state_dir::WriterProcess;

/// Its name in the state directory.
pub const FILE: &str = "status.json";
/// The version of the format.
pub const VERSION: u32 = 1;

/// The state of a machine at one moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineStatus {
    /// [`VERSION`].
    pub version: u32,
    /// The process that wrote it.
    pub writer: WriterProcess,
    /// Time since boot.
    pub at: BootTime,
    /// The same moment on the wall clock.
    pub time: Timestamp,
    /// Number of managed pods.
    pub pods: usize,
    /// Whether new work may be started; absent before the first full evaluation.
    pub scheduling: Option<SchedulingState>,
    /// Every rule, in order of id.
    pub rules: Vec<RuleOverview>,
    /// Every cgroup file that differs from its original.
    pub throttled: Vec<ThrottledFile>,
    /// Pods that are being evicted.
    pub evicting: Vec<String>,
    /// What the Preview rules would have in force.
    pub would: Vec<NamedDecision>,
    /// Policies that are ignored or should be checked.
    pub problems: Vec<PolicyProblem>,
    /// Pods that cannot be managed.
    pub refused: Vec<PodRefusal>,
}

/// One rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleOverview {
    /// `<NodeQOS>/<rule>`
    pub rule: RuleId,
    /// Its metric.
    pub metric: Option<String>,
    /// Act or report.
    pub strategy: Strategy,
    /// State.
    pub state: RuleState,
    /// Time in that state; absent before the first evaluation.
    pub duration: Option<Duration>,
    /// Last value.
    pub value: Option<f64>,
    /// The threshold.
    pub threshold: f64,
    /// The restore value.
    pub restore_value: f64,
    /// Consecutive evaluations above the threshold.
    pub breaches: u32,
    /// Consecutive evaluations at or below the restore value.
    pub quiet_evaluations: u32,
    /// Why it could not be evaluated.
    pub unknown: Option<Unknown>,
    /// Limits of a protected pod's own made it wait as well, which is not counted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub limited: bool,
    /// What it does to pods now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rung: Option<Rung>,
    /// What follows if that does not help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_rung: Option<Rung>,
    /// It evicts no more: two evictions in a row did not lower its metric.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub evictions_ended: bool,
    /// Outside its hours.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub outside_hours: bool,
}

/// One cgroup file that differs from its original.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ThrottledFile {
    /// `namespace/name`, or the UID where the name is not known.
    pub pod_name: String,
    /// The cgroup relative to the pod's; empty for the pod's own.
    pub target_cgroup: String,
    /// The file.
    pub file: String,
    /// Its original content.
    pub original: String,
    /// Its current content.
    pub now: String,
    /// Percent of the base that the pod may use.
    pub ratio: u8,
    /// The rule that changed it.
    pub rule: RuleId,
}

impl MachineStatus {
    /// The state of `machine`, without problems and refusals, which the caller adds.
    pub fn of(machine: &Machine, now: BootTime, time: Timestamp) -> Self {
        let named = |uid: &PodUid| machine.name(uid).unwrap_or_else(|| uid.to_string());
        let rules = machine.reports();
        let files = machine.records();
        Self {
            version: VERSION,
            writer: machine.writer().clone(),
            at: now,
            time,
            pods: machine.pods().len(),
            scheduling: machine.backend().scheduling().cloned(),
            rules: rules
                .map(|rule| RuleOverview::of(machine, rule, now))
                .collect(),
            throttled: files
                .map(|file| ThrottledFile::of(named(&file.uid), file))
                .collect(),
            evicting: machine.backend().evicting().map(named).collect(),
            would: machine.previews().to_vec(),
            problems: Vec::new(),
            refused: Vec::new(),
        }
    }
}

impl RuleOverview {
    fn of(machine: &Machine, report: RuleReport, now: BootTime) -> Self {
        Self {
            metric: metric(machine.policy(), &report.id),
            rule: report.id,
            strategy: report.strategy,
            state: report.state,
            duration: report.since.map(|since| now.since(since)),
            value: report.value,
            threshold: report.threshold,
            restore_value: report.restore_value,
            breaches: report.breaches,
            quiet_evaluations: report.quiet_evaluations,
            unknown: report.unknown,
            limited: report.limited,
            rung: report.rung,
            next_rung: report.next_rung,
            evictions_ended: report.evictions_ended,
            outside_hours: report.outside_hours,
        }
    }
}

impl ThrottledFile {
    fn of(pod_name: String, record: JournalRecord) -> Self {
        Self {
            pod_name,
            target_cgroup: record.target_cgroup.to_string(),
            file: record.file.to_string(),
            original: record.original.into(),
            now: record.ours.into(),
            ratio: record.ratio,
            rule: record.rule,
        }
    }
}
