//! Problems found in policies, each with a suggested fix.

use std::fmt;

use serde::Serialize;

/// A problem with one object.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    /// The object.
    pub object: ObjectRef,
    /// The path of the field, such as `spec.rules[0].metricRule.value`; empty for the object as a whole.
    pub path: String,
    /// The severity.
    pub severity: Severity,
    /// The reason, which is also that of a condition.
    pub reason: Reason,
    /// What is wrong, and how to fix it.
    pub message: String,
    /// Another finding is the cause; `check` reports only that one.
    #[serde(skip)]
    pub follows: bool,
}

/// An object of a policy kind. All of them are cluster-scoped.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ObjectRef {
    /// The kind.
    pub kind: String,
    /// The name.
    pub name: String,
}

impl fmt::Display for ObjectRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind, self.name)
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Severity {
    /// The object or the rule is off, or cannot have the effect that it describes.
    Error,
    /// The object is in force, but may not do what its author expects.
    Warning,
    /// It does what it says, and something else would serve better. Only people who write policies see it.
    Note,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

/// The reason of a finding; its name is the reason of a Kubernetes condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Reason {
    /// The schema or a CEL rule of the kind rejects the object.
    Invalid,
    /// Two different objects have the same kind and name: neither is in force.
    DuplicateName,
    /// The rule names an action that does not exist: the rule is off.
    UnknownAction,
    /// The metric is unknown, and the object has no HTTP probe: the rule is off.
    UnknownMetric,
    /// An entry of `activeDuring` has a time zone that does not exist: the rule is off.
    UnknownTimeZone,
    /// The metric is known but not measured yet: the rule stays Unknown.
    MetricNotMeasured,
    /// No part of the action lowers the metric: the rule is off.
    ActionDoesNotHelp,
    /// A part of the action does not lower the metric, or hardly does.
    ActionPartlyHelps,
    /// No `PodQOS` allows the action on any pod.
    ActionNotAllowed,
    /// The threshold is under 1 % of the capacity of the node: the rule is off.
    ThresholdTooLow,
    /// The value can never exceed the threshold.
    ThresholdTooHigh,
    /// `restoreValue` is so low that the rule would never end: the rule is off.
    RestoreNeverReached,
    /// The selector cannot match any series of the metric.
    NoSuchSeries,
    /// The action has no effect.
    ActionWithoutEffect,
    /// Accepted fields that have no effect.
    FieldsNotEnforced,
    /// A `PodQOS` that matches nothing.
    SelectsNothing,
    /// A `PodQOS` that allows nothing.
    AllowsNothing,
    /// A `PodQOS` allows an action that does not exist.
    AllowsUnknownAction,
    /// An entry of `allowedActions` is a keyword for a type of action, and also the name of an action that does more.
    AmbiguousAction,
    /// A node has more rules or pod policies than the maximum: the last ones are off there.
    TooMany,
    /// A `PodQOS` names `kube-system`.
    SystemPods,
    // Notes, which are reasons of no condition.
    /// A note: the rule does not say whether it acts.
    StrategyLeftOut,
    /// A note: the `NodeQOS` has no selector.
    ActsOnAllNodes,
    /// A note: one evaluation suffices to evict.
    EvictsAtOnce,
    /// A note: another way protects more.
    ProtectsLittle,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
