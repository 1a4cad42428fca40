//! What is wrong with a policy, and what to write instead.

use std::fmt;

use serde::Serialize;

/// One thing that is wrong with, or worth knowing about, one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// Which object.
    pub object: ObjectRef,
    /// The field, as `spec.rules[0].metricRule.value`; empty for the object as a whole.
    pub path: String,
    /// How bad.
    pub severity: Severity,
    /// Its kind: the reason of a condition.
    pub reason: Reason,
    /// What is wrong, and what to write instead.
    pub message: String,
}

/// An object of a policy kind. All of them are cluster-scoped.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// Kind.
    pub kind: String,
    /// Name.
    pub name: String,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

/// Whether what is written can do what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    /// The object, or the rule, is off or can't have the effect that it describes.
    Error,
    /// It is in force, but perhaps not as its author thinks.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

/// The kinds of finding; the name is the reason of a Kubernetes condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Reason {
    /// The definition of the kind (schema or CEL rule) refuses it.
    Invalid,
    /// Two different objects have the same kind and name: neither is in force.
    DuplicateName,
    /// The rule names an action that does not exist: the rule is off.
    UnknownAction,
    /// Nobody measures the metric, and the object has no HTTP probe: the rule is off.
    UnknownMetric,
    /// The metric is known and not kept yet: the rule stays Unknown.
    MetricNotKept,
    /// Nothing that the action does lowers the metric: the rule is off.
    NoLeverage,
    /// A part of the action does not lower the metric, or hardly.
    PartialLeverage,
    /// Throttles raise the metric, so that the rule is judged by the waiting of protected pods as well.
    JudgedByProtected,
    /// No `PodQOS` allows the action on any pod.
    NobodyToActOn,
    /// The watermark is under 1 % of the node: the rule is off.
    WatermarkTooLow,
    /// The watermark can't be passed.
    WatermarkTooHigh,
    /// The low mark is so low that the rule would never end: the rule is off.
    RestoreNeverReached,
    /// The selector over series can't match the metric's.
    NoSuchSeries,
    /// The action can't change anything.
    ActionWithoutEffect,
    /// Accepted fields that have no effect.
    FieldsNotEnforced,
    /// A `PodQOS` that matches nothing.
    SelectsNothing,
    /// A `PodQOS` that allows nothing.
    AllowsNothing,
    /// A `PodQOS` allows an action that does not exist.
    AllowsUnknownAction,
    /// An entry of `allowedActions` is the word of a kind of action, and the action of that name does more.
    KindWord,
    /// It is more than one node can keep: what comes last is off there.
    TooMany,
    /// A `PodQOS` names `kube-system`.
    SystemPods,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
