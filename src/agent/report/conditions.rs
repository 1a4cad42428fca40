//! The conditions `Ready`, `ActionIneffective`, `Degraded`, `Stopped`, `IdleClass` and `BatchWeightHigh` of a `NodeWatermark`.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

use crate::crd::emergency_stop;
use crate::crd::kstatus::{RECONCILING, STALLED};
use crate::crd::node_watermark::condition::{
    ACTION_INEFFECTIVE, ACTIONS_EFFECTIVE, AGENT_ENDED, ALL_IN_ORDER, BATCH_WEIGHT_HIGH, DEGRADED,
    IDLE_CLASS, IDLE_UNSAFE, NONE_EVALUATED, PREVIOUS_RULES_ENFORCED, READY, RULES_ENFORCED,
    STARTING, STOPPED, TOO_MANY_BUSY_PODS,
};
use crate::crd::node_watermark::stopped::{RELEASED, RELEASING};
use crate::crd::words::truncated;
use crate::engine::RuleReport;
use crate::engine::plan::Unknown;
use crate::messages::unknown_reason;

/// Longest message of a condition, in bytes. The API server allows 32 KiB.
const MAX_MESSAGE_BYTES: usize = 1024;

/// Why pods are not in the idle class, and what to do.
pub const IDLE_UNSAFE_MESSAGE: &str = "pods get the lowest CPU weight instead of the idle class, and quotas at once: with a pod in the \
idle class this kubelet (Kubernetes 1.36 or later) would reject every new pod that requests CPU; to have the idle class, start the kubelet \
with --feature-gates=InPlacePodLevelResourcesVerticalScaling=false";

/// Why the idle class does not protect, and what helps.
pub const BATCH_WEIGHT_MESSAGE: &str = "the busy batch pods together have more than a tenth of the CPU weight beside a protected pod \
(status.batchWeightShare, in percent), so its tail latency grows although they have the lowest class: make them BestEffort, which holds for \
any number; or add a rule on protected_cpu_delay_max with CPU quotas; or raise the CPU request of the protected pod";

/// The health of the agent. Each list is empty if nothing is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AgentHealth {
    /// Why the spec is not enforced.
    pub unready: Option<Unready>,
    /// Which of the rules are evaluated.
    pub rules: Evaluated,
    /// Actions without effect, each with its reason and message.
    pub ineffective: Vec<(&'static str, String)>,
    /// Problems, each with its reason and message.
    pub degraded: Vec<(&'static str, String)>,
    /// A rule asks for the idle class, and pods get the lowest weight instead.
    pub idle_unsafe: bool,
    /// A policy asks for the idle class, and the busy batch pods together weigh too much for it to protect.
    pub batch_weight_high: bool,
    /// The emergency stop, if there is one.
    pub stopped: Option<StopProgress>,
}

/// The number of rules, and those without a usable sample.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Evaluated {
    rules: usize,
    /// Each with the reason.
    unknown: Vec<String>,
    /// All reasons are transient, as after a start.
    transient: bool,
}

impl Evaluated {
    /// From the last evaluation.
    pub fn of(reports: &[RuleReport]) -> Self {
        let is_transient = |why: &Unknown| matches!(why, Unknown::Rebased | Unknown::Sparse);
        let unknown = || reports.iter().filter_map(|it| Some((it, it.unknown?)));
        let describe = |(report, why): (&RuleReport, Unknown)| {
            format!("{} ({})", report.id, unknown_reason(why))
        };
        Self {
            rules: reports.len(),
            unknown: unknown().map(describe).collect(),
            transient: unknown().all(|(_, why)| is_transient(&why)),
        }
    }

    /// Status, reason and message of `Ready`.
    fn condition(&self) -> (bool, &'static str, String) {
        let (rules, not_evaluated) = (self.rules, self.unknown.len());
        let named = self.unknown.join(", ");
        let message = match (rules, not_evaluated) {
            (0, _) => "this node has no rules".to_owned(),
            (_, 0) => "all rules are evaluated".to_owned(),
            _ if rules == not_evaluated => format!("no rule can be evaluated: {named}"),
            _ => format!(
                "{} of {rules} rules are evaluated; not evaluated: {named}",
                rules - not_evaluated
            ),
        };
        if rules > 0 && rules == not_evaluated && !self.transient {
            (false, NONE_EVALUATED, message)
        } else {
            (true, RULES_ENFORCED, message)
        }
    }
}

/// The progress of an emergency stop.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopProgress {
    /// Why; empty if no reason was given.
    pub reason: String,
    /// What is not restored yet.
    pub left: Vec<String>,
}

impl StopProgress {
    /// The reason of the condition, and its message.
    fn condition(&self) -> (&'static str, String) {
        let message = emergency_stop::stop_message(&self.reason);
        match self.left.as_slice() {
            [] => (RELEASED, format!("{message}; nothing is in force")),
            left => {
                let left = left.join(", ");
                (RELEASING, format!("{message}; being restored: {left}"))
            }
        }
    }
}

/// Why a spec is not enforced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unready {
    /// Not every rule has been evaluated yet.
    Starting,
    /// The last valid rules are enforced instead, for this reason.
    PreviousRulesEnforced(String),
    /// The agent has ended, for this reason; the message says whether it has restored everything.
    Ended(String),
    /// An emergency stop is in force.
    Stopped,
}

#[expect(
    clippy::too_many_lines,
    reason = "one list, in the order in which it is shown"
)]
/// Builds the conditions from the previous ones: the transition time changes only with the status.
pub fn conditions(
    health: &AgentHealth,
    generation: Option<i64>,
    before: &[Condition],
    now: Timestamp,
) -> Vec<Condition> {
    let make = |kind: &str, status: bool, reason: &str, message: String| {
        let status = if status { "True" } else { "False" };
        let same = |known: &&Condition| known.type_ == kind && known.status == status;
        let since = before.iter().find(same);
        Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            message: truncated(message, MAX_MESSAGE_BYTES),
            observed_generation: generation,
            last_transition_time: since.map_or(Time(now), |it| it.last_transition_time.clone()),
        }
    };
    let ready = match &health.unready {
        None => {
            let (status, reason, message) = health.rules.condition();
            make(READY, status, reason, message)
        }
        Some(Unready::Starting) => {
            let message = "not every rule has been evaluated yet".to_owned();
            make(READY, false, STARTING, message)
        }
        Some(Unready::PreviousRulesEnforced(why)) => {
            make(READY, false, PREVIOUS_RULES_ENFORCED, why.clone())
        }
        Some(Unready::Ended(why)) => make(READY, false, AGENT_ENDED, why.clone()),
        Some(Unready::Stopped) => {
            let message = "stopped: rules take no action".to_owned();
            make(READY, false, STOPPED, message)
        }
    };
    let problems = |kind, without, problems: &[(&'static str, String)]| match problems {
        [] => make(kind, false, without, String::new()),
        [(reason, _), ..] => {
            let messages = problems.iter().map(|(_, message)| message.as_str());
            let message = messages.collect::<Vec<_>>().join("; ");
            make(kind, true, reason, message)
        }
    };
    let ineffective = problems(ACTION_INEFFECTIVE, ACTIONS_EFFECTIVE, &health.ineffective);
    let degraded = problems(DEGRADED, ALL_IN_ORDER, &health.degraded);
    let stopped = health.stopped.as_ref().map(|stopped| {
        let (reason, message) = stopped.condition();
        make(STOPPED, true, reason, message)
    });
    let idle_class = health.idle_unsafe.then(|| {
        let message = IDLE_UNSAFE_MESSAGE.to_owned();
        make(IDLE_CLASS, false, IDLE_UNSAFE, message)
    });
    let batch_weight = health.batch_weight_high.then(|| {
        let message = BATCH_WEIGHT_MESSAGE.to_owned();
        make(BATCH_WEIGHT_HIGH, true, TOO_MANY_BUSY_PODS, message)
    });
    let progress = match (&health.unready, ready.reason.as_str()) {
        (_, NONE_EVALUATED | PREVIOUS_RULES_ENFORCED) => Some(STALLED),
        (Some(Unready::Starting), _) => Some(RECONCILING),
        _ => None,
    };
    let progress = progress.map(|kind| make(kind, true, &ready.reason, ready.message.clone()));
    [ready, ineffective, degraded]
        .into_iter()
        .chain(stopped)
        .chain(idle_class)
        .chain(batch_weight)
        .chain(progress)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_transition_time_changes_only_with_the_status() {
        let at = |second| Timestamp::from_second(second).expect("a time");
        let healthy = AgentHealth::default();
        let first = conditions(&healthy, Some(1), &[], at(100));
        let held = AgentHealth {
            unready: Some(Unready::PreviousRulesEnforced(
                "the spec is not understood".to_owned(),
            )),
            ..AgentHealth::default()
        };
        let second = conditions(&held, Some(2), &first, at(200));
        assert_eq!(second[0].status, "False");
        assert_eq!(second[0].reason, "PreviousRulesEnforced");
        assert_eq!(second[0].last_transition_time.0, at(200));
        assert_eq!(second[2].last_transition_time.0, at(100));
        assert_eq!(second[2].observed_generation, Some(2));
        let third = conditions(&held, Some(2), &second, at(300));
        assert_eq!(third, second);
    }

    #[test]
    fn what_goes_on_by_itself_is_reconciling_and_what_does_not_is_stalled() {
        let shown = |health: &AgentHealth| {
            let all = conditions(health, None, &[], Timestamp::UNIX_EPOCH);
            let progress = all
                .iter()
                .filter(|it| [STALLED, RECONCILING].contains(&&*it.type_));
            let progress: Vec<String> = progress
                .map(|it| format!("{} {} {}", it.type_, it.status, it.reason))
                .collect();
            progress.join(", ")
        };
        let unready = |why: Unready| AgentHealth {
            unready: Some(why),
            ..AgentHealth::default()
        };
        assert_eq!(shown(&AgentHealth::default()), "");
        assert_eq!(
            shown(&unready(Unready::Starting)),
            "Reconciling True Starting"
        );
        let held = unready(Unready::PreviousRulesEnforced("why".to_owned()));
        assert_eq!(shown(&held), "Stalled True PreviousRulesEnforced");
        assert_eq!(shown(&unready(Unready::Stopped)), "");
        let none = AgentHealth {
            rules: Evaluated {
                rules: 1,
                unknown: vec!["r (no sample)".to_owned()],
                transient: false,
            },
            ..AgentHealth::default()
        };
        assert_eq!(shown(&none), "Stalled True NoRuleEvaluated");
    }

    #[test]
    fn the_idle_class_is_mentioned_only_while_it_is_unsafe() {
        let shown = |idle_unsafe| {
            let health = AgentHealth {
                idle_unsafe,
                ..AgentHealth::default()
            };
            let all = conditions(&health, None, &[], Timestamp::UNIX_EPOCH);
            let found = all.into_iter().find(|it| it.type_ == IDLE_CLASS);
            found.map(|it| (it.status, it.reason, it.message))
        };
        assert_eq!(shown(false), None);
        let (status, reason, message) = shown(true).expect("a condition");
        assert_eq!((status.as_str(), reason.as_str()), ("False", "IdleUnsafe"));
        assert!(message.contains("--feature-gates=InPlacePodLevelResourcesVerticalScaling=false"));
    }

    #[test]
    fn too_much_batch_weight_is_mentioned_only_while_it_lasts() {
        let shown = |batch_weight_high| {
            let health = AgentHealth {
                batch_weight_high,
                ..AgentHealth::default()
            };
            let all = conditions(&health, None, &[], Timestamp::UNIX_EPOCH);
            let found = all.into_iter().find(|it| it.type_ == BATCH_WEIGHT_HIGH);
            found.map(|it| (it.status, it.reason, it.message))
        };
        assert_eq!(shown(false), None);
        let (status, reason, message) = shown(true).expect("a condition");
        assert_eq!(
            (status.as_str(), reason.as_str()),
            ("True", "TooManyBusyPods")
        );
        assert_eq!(message, BATCH_WEIGHT_MESSAGE, "not truncated");
        assert!(message.contains("BestEffort") && message.contains("protected_cpu_delay_max"));
    }

    #[test]
    fn a_stop_shows_its_reason_and_what_is_not_restored() {
        let at = Timestamp::UNIX_EPOCH;
        let shown = |stopped: Option<StopProgress>| {
            let health = AgentHealth {
                unready: stopped.as_ref().map(|_| Unready::Stopped),
                stopped,
                ..AgentHealth::default()
            };
            conditions(&health, None, &[], at)
        };
        assert!(shown(None).iter().all(|it| it.type_ != STOPPED));
        let releasing = StopProgress {
            reason: "bad thresholds (by ann)".to_owned(),
            left: vec!["CPU of 2 pods".to_owned(), "our taint".to_owned()],
        };
        let conditions = shown(Some(releasing));
        assert_eq!(
            (conditions[0].status.as_str(), conditions[0].reason.as_str()),
            ("False", "Stopped")
        );
        let stopped = conditions.last().expect("a condition");
        assert_eq!(
            (stopped.type_.as_str(), stopped.status.as_str()),
            (STOPPED, "True")
        );
        assert_eq!(stopped.reason, RELEASING);
        let expected = "stopped: bad thresholds (by ann); being restored: CPU of 2 pods, our taint";
        assert_eq!(stopped.message, expected);
        let released = shown(Some(StopProgress::default()));
        let stopped = released.last().expect("a condition");
        assert_eq!(stopped.reason, RELEASED);
        assert_eq!(stopped.message, "stopped; nothing is in force");
    }
}
