//! Label selectors with full Kubernetes semantics.

use std::collections::BTreeMap;

/// A compiled label selector: all requirements must match; an empty selector matches everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// The requirements, sorted.
    pub requirements: Vec<Requirement>,
}

/// One requirement on one label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Requirement {
    /// The label exists and has one of the values.
    In(String, Vec<String>),
    /// The label is absent, or has none of the values.
    NotIn(String, Vec<String>),
    /// The label exists.
    Exists(String),
    /// The label is absent.
    DoesNotExist(String),
}

/// Anything with labels.
pub trait Labels {
    /// The value of the label `key`.
    fn label(&self, key: &str) -> Option<&str>;
}

impl Labels for BTreeMap<String, String> {
    fn label(&self, key: &str) -> Option<&str> {
        self.get(key).map(String::as_str)
    }
}

impl Labels for [(&str, &str)] {
    fn label(&self, key: &str) -> Option<&str> {
        self.iter()
            .find(|(name, _)| *name == key)
            .map(|(_, value)| *value)
    }
}

impl Selector {
    /// Whether the selector matches these labels.
    pub fn matches<L: Labels + ?Sized>(&self, labels: &L) -> bool {
        self.requirements
            .iter()
            .all(|requirement| requirement.matches(labels))
    }
}

impl Requirement {
    /// The label key.
    pub fn key(&self) -> &str {
        match self {
            Self::In(key, _)
            | Self::NotIn(key, _)
            | Self::Exists(key)
            | Self::DoesNotExist(key) => key,
        }
    }

    fn matches<L: Labels + ?Sized>(&self, labels: &L) -> bool {
        match self {
            Self::In(key, values) => labels
                .label(key)
                .is_some_and(|value| values.iter().any(|v| v == value)),
            Self::NotIn(key, values) => labels
                .label(key)
                .is_none_or(|value| values.iter().all(|v| v != value)),
            Self::Exists(key) => labels.label(key).is_some(),
            Self::DoesNotExist(key) => labels.label(key).is_none(),
        }
    }
}
