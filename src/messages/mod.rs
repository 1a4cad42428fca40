//! What happens on a machine, as events, and the words for it. Clients use the same words, on systems without the node side too.

pub mod event;

use std::fmt;
use std::time::Duration;

use self::event::{Event, NamedDecision, NoticeKind};
use crate::crd::duration::format_duration;
use crate::engine::metric::Metric;
use crate::engine::plan::{PlanChange, RuleState, Skipped, Unknown};
use crate::engine::pod::PodUid;
use crate::engine::units::{Bytes, MilliCpu};

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Decision(decision) => decision.fmt(f),
            Self::Notice(notice) => notice.kind.fmt(f),
        }
    }
}

impl fmt::Display for NamedDecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let transition = &self.transition;
        let observed = matches!(
            transition.change,
            PlanChange::State { .. }
                | PlanChange::Unknown { .. }
                | PlanChange::Known { .. }
                | PlanChange::OutsideHours
                | PlanChange::WithinHours
        );
        write!(f, "{}", transition.rule)?;
        f.write_str(match (transition.would, observed) {
            (false, _) => ": ",
            (true, true) => " (preview): ",
            (true, false) => " (preview, not done): ",
        })?;
        self.fmt_change(&transition.change, f)
    }
}

impl NamedDecision {
    fn metric(&self) -> &str {
        self.metric.as_deref().unwrap_or("its metric")
    }

    fn pod<'a>(&'a self, uid: &'a PodUid) -> &'a str {
        self.pod_name.as_deref().unwrap_or(&uid.0)
    }

    fn value(&self, value: f64) -> String {
        format_value(self.metric.as_deref(), value)
    }

    fn fmt_change(&self, change: &PlanChange, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match change {
            PlanChange::State { .. } => self.fmt_state(change, f),
            PlanChange::Unknown { reason } => {
                let reason = unknown_reason(*reason);
                write!(
                    f,
                    "{} cannot be evaluated: {reason}; actions in force stay unchanged",
                    self.metric()
                )
            }
            PlanChange::Known { value } => {
                write!(
                    f,
                    "{} is known again: {}",
                    self.metric(),
                    self.value(*value)
                )
            }
            PlanChange::OutsideHours => f.write_str(
                "outside its hours: no action is taken, and what the rule did is restored",
            ),
            PlanChange::WithinHours => f.write_str("within its hours"),
            PlanChange::SchedulingDisabled { effect } => {
                write!(f, "scheduling is disabled ({effect:?})")
            }
            PlanChange::SchedulingEnabled => f.write_str("scheduling is enabled again"),
            PlanChange::EvictionsEnded { before, after } => write!(
                f,
                "no more evictions: two in a row did not lower {}, {} before and {} after",
                self.metric(),
                self.value(*before),
                self.value(*after)
            ),
            about_pod => self.fmt_pod_change(about_pod, f),
        }
    }

    fn fmt_state(&self, change: &PlanChange, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanChange::State {
            from,
            to,
            value,
            threshold,
            unknown_too_long,
        } = change
        else {
            return Ok(());
        };
        write!(f, "{from:?} -> {to:?}")?;
        if *unknown_too_long {
            return write!(f, ": {} has been unknown for too long", self.metric());
        }
        let threshold = self.value(*threshold);
        match (value, to) {
            (None, _) => Ok(()),
            (Some(value), RuleState::Breached) => {
                write!(
                    f,
                    ": {} {} is above the threshold {threshold}",
                    self.metric(),
                    self.value(*value)
                )
            }
            (Some(value), _) => {
                write!(
                    f,
                    ": {} {}, threshold {threshold}",
                    self.metric(),
                    self.value(*value)
                )
            }
        }
    }

    fn fmt_pod_change(&self, change: &PlanChange, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match change {
            PlanChange::Throttle {
                pod,
                to: 100,
                idle: false,
                from,
                ..
            } => write!(f, "throttle {}: {from} % -> original", self.pod(pod)),
            PlanChange::Throttle {
                pod,
                from,
                to,
                idle,
                quota,
                release,
            } => {
                let idle = if *idle { ", idle class" } else { "" };
                write!(
                    f,
                    "throttle {}: {from} % -> {to} % ({quota}{idle})",
                    self.pod(pod)
                )?;
                if to < from {
                    write!(f, ", to release {release}")?;
                }
                Ok(())
            }
            PlanChange::Burst { pod, burst } => self.fmt_burst(pod, *burst, f),
            PlanChange::Reclaim { pod, amount } => {
                write!(
                    f,
                    "reclaim up to {amount} of page cache from {}",
                    self.pod(pod)
                )
            }
            PlanChange::Evict {
                pod,
                grace,
                release,
                urgent,
            } => {
                write!(
                    f,
                    "evict {} (grace {})",
                    self.pod(pod),
                    format_duration(*grace)
                )?;
                if let Some(release) = release {
                    write!(f, ", to release {}", self.value(*release as f64))?;
                }
                f.write_str(if *urgent { MEMORY_RUNS_OUT } else { "" })
            }
            about_effect => self.fmt_effect(about_effect, f),
        }
    }

    fn fmt_burst(&self, pod: &PodUid, burst: MilliCpu, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pod = self.pod(pod);
        match burst {
            MilliCpu::ZERO => write!(f, "burst of {pod}: none any more"),
            burst => write!(f, "burst of {pod}: up to {burst} above its limit"),
        }
    }

    fn fmt_effect(&self, change: &PlanChange, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match change {
            PlanChange::Ineffective { pod, .. } => {
                let cause = self.cause.as_deref().unwrap_or("the cause is not known");
                write!(f, "{}: the action has no effect: {cause}", self.pod(pod))
            }
            PlanChange::Effective { pod } => {
                write!(f, "{}: the action has an effect again", self.pod(pod))
            }
            PlanChange::Skipped { pod, reason } => {
                write!(f, "{} is skipped: {}", self.pod(pod), skip_reason(*reason))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for NoticeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started {
                rules,
                pods,
                adopted,
            } => {
                write!(
                    f,
                    "enforcing {} over {}",
                    count(*rules, "rule"),
                    count(*pods, "pod")
                )?;
                if *rules == 0 {
                    f.write_str(": no rule is in force")?;
                }
                match adopted {
                    0 => Ok(()),
                    adopted => write!(f, ", {} adopted", count(*adopted, "throttle")),
                }
            }
            Self::Cgroup { pod_name, what } => named(f, pod_name.as_deref(), what),
            Self::Eviction { pod_name, what } => {
                named(f, pod_name.as_deref(), &format!("eviction: {what}"))
            }
            Self::Scheduling { what } => f.write_str(what),
            Self::Probe {
                url,
                failure: Some(failure),
            } => write!(f, "the probe {url} failed: {failure}"),
            Self::Probe { url, failure: None } => write!(f, "the probe {url} works again"),
            Self::Restored { files: 0, left: 0 } => f.write_str("there was nothing to restore"),
            Self::Restored { files, left: 0 } => {
                write!(
                    f,
                    "everything is restored: {}",
                    count(*files, "cgroup file")
                )
            }
            Self::Restored { left, .. } => {
                write!(
                    f,
                    "{} could not be restored: try again",
                    count(*left, "pod")
                )
            }
            Self::Stopped {
                why,
                left_throttled,
            } => match left_throttled {
                0 => write!(f, "stopped: {why}"),
                pods => write!(f, "stopped: {why}; {} left throttled", count(*pods, "pod")),
            },
            about_input => about_input.fmt_input(f),
        }
    }
}

impl NoticeKind {
    /// Notices about the given policies and pods.
    fn fmt_input(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PoliciesApplied { rules } => {
                write!(f, "policies applied: {}", count(*rules, "rule"))
            }
            Self::PoliciesRejected { findings } => {
                f.write_str("the policies are invalid, the last valid ones stay in force:")?;
                findings
                    .iter()
                    .try_for_each(|finding| write!(f, " {finding};"))
            }
            Self::PolicyProblem(problem) => write!(f, "{problem}"),
            Self::PodRefused(refusal) => write!(f, "{refusal}"),
            Self::PodsChanged { pods } => write!(f, "managing {}", count(*pods, "pod")),
            Self::FileSet {
                pod_name,
                file,
                from,
                to,
            } => named(
                f,
                pod_name.as_deref(),
                &format!("{file}: `{from}` -> `{to}`"),
            ),
            Self::ThrottleFailed { pod_name, reason } => {
                let what = format!("throttle failed, nothing was changed: {reason}");
                named(f, pod_name.as_deref(), &what)
            }
            Self::StateNotWritten { reason } => f.write_str(reason),
            _ => Ok(()),
        }
    }
}

fn named(f: &mut fmt::Formatter<'_>, name: Option<&str>, what: &str) -> fmt::Result {
    match name {
        Some(name) => write!(f, "{name}: {what}"),
        None => f.write_str(what),
    }
}

/// `1 rule`, `2 rules`.
pub fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

/// A duration in whole seconds: `30s`, `1m 30s`.
pub fn format_seconds(duration: Duration) -> String {
    format_duration(Duration::from_secs(duration.as_secs()))
}

/// A metric value with its unit, in short form.
pub fn format_value(metric: Option<&str>, value: f64) -> String {
    let plain = || {
        let text = format!("{value:.1}");
        text.strip_suffix(".0")
            .map_or_else(|| text.clone(), str::to_owned)
    };
    match metric.and_then(Metric::parse).map(|metric| metric.unit()) {
        Some("millicores") => format!("{value:.0}m"),
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "saturating, and only for display"
        )]
        Some("bytes") => Bytes(value as u64).to_string(),
        Some("percent") => format!("{} %", plain()),
        Some("load") => format!("{value:.2}"),
        Some(unit @ ("KiB/s" | "operations/s" | "packets/s" | "µs/s")) => {
            format!("{} {unit}", plain())
        }
        _ => plain(),
    }
}

/// Why an eviction did not wait for milder steps.
pub const MEMORY_RUNS_OUT: &str = ", since memory is about to run out";

/// Describes why a value is unknown.
pub const fn unknown_reason(reason: Unknown) -> &'static str {
    match reason {
        Unknown::Missing => "no sample",
        Unknown::Stale => "its last sample is too old",
        Unknown::Impossible => "its value is impossible",
        Unknown::Rebased => "there is no earlier sample to compare with yet",
        Unknown::Sparse => "less than half of its window has samples so far",
    }
}

/// Describes why a pod was skipped.
pub const fn skip_reason(reason: Skipped) -> &'static str {
    match reason {
        Skipped::NotAllowed => "no PodQOS allows this action on it",
        Skipped::Protected => "it is protected",
        Skipped::NotRunning => "it is not running",
        Skipped::NoSample => "it has no fresh sample",
        Skipped::ContainerMissing => "one of its containers is not running",
        Skipped::UsesLittle => "it uses so little that acting on it would not help",
        Skipped::AtFloor => "its usage is at its floor (its CPU request or minCPURatio) or below",
        Skipped::Unowned => "it has no controller, and the action has no evictUnowned",
        Skipped::ExemptFromEviction => {
            "it is static, from a DaemonSet, system-critical or annotated to stay"
        }
        Skipped::BackingOff => {
            "the last attempt failed or was refused; waiting before the next one"
        }
        Skipped::Contested => "another writer keeps changing its cgroup files",
        Skipped::Ineffective => "the last action of this kind has no effect on it",
    }
}

#[cfg(test)]
mod tests;
