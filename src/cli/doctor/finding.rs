//! One thing that is wrong, and words for it.

use std::fmt;

use serde::Serialize;
use serde_json::Value;

use super::read::{Answer, Seen};
use crate::crd::KubernetesVersion;

/// What to do where there is no installation.
pub(super) const INSTALL: &str = "install the chart: charts/plimsoll/README.md";

/// So many of many are named.
const NAMED: usize = 5;

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    /// The object, or the part of the installation.
    pub about: String,
    /// What is wrong with it.
    pub what: String,
    /// What to do.
    #[serde(rename = "do")]
    pub cure: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n  do: {}", self.about, self.what, self.cure)
    }
}

pub(super) fn finding(
    about: impl Into<String>,
    what: impl Into<String>,
    cure: impl Into<String>,
) -> Finding {
    Finding {
        about: about.into(),
        what: what.into(),
        cure: cure.into(),
    }
}

/// The objects of a list; none where it could not be read.
pub(super) fn items(list: &Answer) -> Vec<&Value> {
    let items = list.as_ref().ok().and_then(|list| list["items"].as_array());
    items.into_iter().flatten().collect()
}

/// `a, b and 3 more`
pub(super) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let shown = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// `namespace/name`, or the name alone.
pub(super) fn full_name(object: &Value) -> String {
    let word = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    match word("namespace") {
        "" => word("name").to_owned(),
        namespace => format!("{namespace}/{}", word("name")),
    }
}

/// The cluster's, where it told.
pub(super) fn version_of(seen: &Seen) -> Option<KubernetesVersion> {
    let version = seen.version.as_ref().ok()?;
    KubernetesVersion::from_numbers(version["major"].as_str()?, version["minor"].as_str()?)
}

/// What to run where a definition is missing or of another version.
pub(super) fn define(seen: &Seen) -> String {
    version_of(seen).unwrap_or_default().define()
}
