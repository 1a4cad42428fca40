//! Events for the user: the engine's decisions, and their outcomes.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::crd::Severity;
use crate::crd::manifest::{Location, Position};
use crate::engine::plan::Transition;
use crate::engine::policy::{PolicySet, RuleId};
use crate::engine::time::BootTime;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Event {
    /// The engine decided something.
    Decision(NamedDecision),
    /// Something else happened.
    Notice(Notice),
}

/// A decision of the engine, with user-visible names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NamedDecision {
    /// The decision.
    #[serde(flatten)]
    pub transition: Transition,
    /// The rule's metric, as in the manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// `namespace/name` of the pod that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
    /// Why an action has no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
}

/// The name of a rule's metric.
pub fn metric(policy: &PolicySet, rule: &RuleId) -> Option<String> {
    let rule = policy.rules.iter().find(|known| known.id == *rule)?;
    Some(rule.metric.to_string())
}

/// An event that is not a decision of the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Notice {
    /// When it happened.
    pub at: BootTime,
    /// What happened.
    #[serde(flatten)]
    pub kind: NoticeKind,
}

/// The kinds of notice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "change",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum NoticeKind {
    /// The first complete sample was taken: policies are being enforced.
    Started {
        /// Number of rules.
        rules: usize,
        /// Number of managed pods.
        pods: usize,
        /// Throttles of an earlier process that were adopted.
        adopted: usize,
    },
    /// A new set of policies is in force.
    PoliciesApplied {
        /// Number of rules now in force.
        rules: usize,
    },
    /// Invalid policies, after an edit or at the start. The last valid ones stay in force.
    PoliciesRejected {
        /// The problems.
        findings: Vec<PolicyProblem>,
    },
    /// A policy that is ignored, or in force but perhaps not as its author intended.
    PolicyProblem(PolicyProblem),
    /// A pod that cannot be managed, or not as in its manifest.
    PodRefused(PodRefusal),
    /// Pods were added or removed.
    PodsChanged {
        /// Number of managed pods now.
        pods: usize,
    },
    /// A cgroup file now holds our value.
    FileSet {
        /// `namespace/name`, if the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// The file.
        file: String,
        /// The old value.
        from: String,
        /// The new value.
        to: String,
    },
    /// A throttle could not be applied; nothing was changed.
    ThrottleFailed {
        /// `namespace/name`, if the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// Why.
        reason: String,
    },
    /// Something else was written, found or released in the pods' cgroups.
    Cgroup {
        /// `namespace/name`, if the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// Description.
        what: String,
    },
    /// Progress of an eviction: signalled, gone, killed, refused.
    Eviction {
        /// `namespace/name`, if the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// Description.
        what: String,
    },
    /// Disabling scheduling was refused, failed, or works again.
    Scheduling {
        /// Description.
        what: String,
    },
    /// A probe fails, or works again.
    Probe {
        /// Its URL.
        url: String,
        /// Why it fails; absent if it works again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
    /// A file of the state directory could not be written.
    StateNotWritten {
        /// Why.
        reason: String,
    },
    /// The changes of an earlier process were restored.
    Restored {
        /// Number of cgroup files checked.
        files: usize,
        /// Number of pods that could not be restored.
        left: usize,
    },
    /// The process ends.
    Stopped {
        /// Why.
        why: String,
        /// Pods whose throttle stays in force.
        left_throttled: usize,
    },
}

/// A pod that cannot be managed, or not as in its manifest, and why. Other pods are not affected.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PodRefusal {
    /// The file, or the parent cgroup.
    pub location: String,
    /// The start of its document, or of what is wrong.
    #[serde(flatten)]
    pub position: Position,
    /// `namespace/name`, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// What is wrong and what to do.
    pub reason: String,
}

impl fmt::Display for PodRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let location = Location {
            file: &self.location,
            position: self.position,
        };
        write!(f, "{location}: {}: ", Severity::Error)?;
        if let Some(pod) = &self.pod {
            write!(f, "pod {pod}: ")?;
        }
        f.write_str(&self.reason)
    }
}

/// A problem with a policy, and its location.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyProblem {
    /// The file; empty if unknown.
    pub file: String,
    /// Where it is in the file.
    #[serde(flatten)]
    pub position: Position,
    /// `error`: the policy or rule is ignored. `warning`: it is in force.
    pub severity: String,
    /// Object and field, what is wrong and what to write instead.
    pub message: String,
}

impl PolicyProblem {
    /// Whether the policy or rule is ignored.
    pub fn is_error(&self) -> bool {
        self.severity == "error"
    }
}

impl fmt::Display for PolicyProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.file.is_empty() {
            let location = Location {
                file: &self.file,
                position: self.position,
            };
            write!(f, "{location}: ")?;
        }
        write!(f, "{}: {}", self.severity, self.message)
    }
}

impl Event {
    /// When it happened.
    pub const fn at(&self) -> BootTime {
        match self {
            Self::Decision(decision) => decision.transition.at,
            Self::Notice(notice) => notice.at,
        }
    }

    /// Whether it only adds detail to another event; left out of `--output text`.
    pub const fn is_detail(&self) -> bool {
        matches!(
            self,
            Self::Notice(Notice {
                kind: NoticeKind::FileSet { .. },
                ..
            })
        )
    }

    /// A notice.
    pub const fn notice(at: BootTime, kind: NoticeKind) -> Self {
        Self::Notice(Notice { at, kind })
    }
}

/// An event with its wall-clock time: one line of `--output json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventLine {
    /// Wall-clock time of the event.
    pub time: Timestamp,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}
