//! What a user is told: the engine's decisions, and what became of them.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::engine::plan::Transition;
use crate::engine::time::BootTime;

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Event {
    /// The engine decided something.
    Decision(Decision),
    /// Something else happened.
    Notice(Notice),
}

/// A decision of the engine, with the names that a user knows things by.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Decision {
    /// What was decided.
    #[serde(flatten)]
    pub transition: Transition,
    /// The rule's metric, as the manifest has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metric: Option<String>,
    /// `namespace/name` of the pod that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_name: Option<String>,
}

/// What happened besides the engine's decisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Notice {
    /// When.
    pub at: BootTime,
    /// What.
    #[serde(flatten)]
    pub news: News,
}

/// The kinds of notice.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(
    tag = "change",
    rename_all = "camelCase",
    rename_all_fields = "camelCase"
)]
pub enum News {
    /// The first complete sample was taken: policies are being enforced.
    Started {
        /// Rules that are judged.
        rules: usize,
        /// Pods that are looked after.
        pods: usize,
        /// Throttles of an earlier process that were found in force and taken over.
        adopted: usize,
    },
    /// A set of policies was taken over.
    PoliciesTaken {
        /// Rules that are judged from now on.
        rules: usize,
    },
    /// Policies that cannot be used: an edit as a whole, or what is found broken at the start. The last good ones stay
    /// in force.
    PoliciesKept {
        /// What is wrong with it.
        findings: Vec<PolicyProblem>,
    },
    /// A policy that is left out, or is in force but perhaps not as its author thinks.
    PolicyProblem(PolicyProblem),
    /// A pod that cannot be looked after, or not as its manifest has it.
    PodRefused(Refusal),
    /// Pods came or went.
    PodsTaken {
        /// Pods that are looked after from now on.
        pods: usize,
    },
    /// A cgroup file holds our value now.
    FileSet {
        /// `namespace/name`, where the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// The file.
        file: String,
        /// What it held.
        from: String,
        /// What it holds.
        to: String,
    },
    /// A throttle was not put in force: nothing was changed.
    ThrottleFailed {
        /// `namespace/name`, where the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// Why.
        reason: String,
    },
    /// Something was written, found or given up in the pods' cgroups besides the engine's steps.
    Cgroup {
        /// `namespace/name`, where the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// What, in words.
        what: String,
    },
    /// An eviction went on: signalled, gone, killed, refused.
    Eviction {
        /// `namespace/name`, where the pod is known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pod_name: Option<String>,
        /// What, in words.
        what: String,
    },
    /// Keeping new work away went on: refused, failed, in order again.
    Scheduling {
        /// What, in words.
        what: String,
    },
    /// A probe does not answer, or does again.
    Probe {
        /// Its URL.
        url: String,
        /// Why it has no answer; absent where it has one again.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        failure: Option<String>,
    },
    /// A file of the state directory could not be written.
    StateNotWritten {
        /// Why.
        reason: String,
    },
    /// What an earlier process left in force was put back.
    Restored {
        /// How many cgroup files were looked at.
        files: usize,
        /// How many pods could not be put back.
        left: usize,
    },
    /// The process ends.
    Stopped {
        /// Why, in words.
        why: String,
        /// Pods whose throttle stays in force.
        left_throttled: usize,
    },
}

/// A pod that cannot be looked after, or not as its manifest has it, and why. The others are unharmed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// The file, or the parent cgroup.
    pub place: String,
    /// The line that its document starts at, from 1; 0 where the file as a whole is meant.
    pub line: usize,
    /// `namespace/name`, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// What is wrong and what to do.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if let Some(pod) = &self.pod {
            write!(f, ": pod {pod}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// What is wrong with a policy, and where.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicyProblem {
    /// The file; empty where it is not known.
    pub file: String,
    /// The line, from 1; 0 where it is not known.
    pub line: usize,
    /// `error`: the policy, or the rule, is left out. `warning`: it is in force.
    pub severity: String,
    /// Object and field, what is wrong and what to write instead.
    pub message: String,
}

impl PolicyProblem {
    /// Whether the policy, or the rule, is left out.
    pub fn is_error(&self) -> bool {
        self.severity == "error"
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

    /// Whether it only repeats in detail what another event says: left out of `--output text`.
    pub const fn is_detail(&self) -> bool {
        matches!(
            self,
            Self::Notice(Notice {
                news: News::FileSet { .. },
                ..
            })
        )
    }

    /// A notice.
    pub const fn notice(at: BootTime, news: News) -> Self {
        Self::Notice(Notice { at, news })
    }
}

/// An event with the wall time: one line of `--output json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// The wall clock when it happened.
    pub time: Timestamp,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}
