//! A finding, and words that findings share.

use std::fmt;

use kube::ResourceExt;
use serde::Serialize;

use super::snapshot::SnapshotError;
use crate::crd::words;

/// What to do if nothing is installed.
pub(super) const INSTALL: &str = "install the chart: charts/plimsoll/README.md";
/// What to do if a part of the installation is missing.
pub(super) const REINSTALL: &str = "reinstall the chart with helm upgrade";

/// Maximum number of names in a finding.
const MAX_NAMED: usize = 5;

/// One problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct DoctorFinding {
    /// The object, or the part of the installation.
    pub about: String,
    /// What is wrong with it.
    pub what: String,
    /// What to do.
    pub fix: String,
}

impl fmt::Display for DoctorFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}\n  fix: {}", self.about, self.what, self.fix)
    }
}

pub(super) fn finding(
    about: impl Into<String>,
    what: impl Into<String>,
    fix: impl Into<String>,
) -> DoctorFinding {
    DoctorFinding {
        about: about.into(),
        what: what.into(),
        fix: fix.into(),
    }
}

/// A finding about something that could not be read.
pub(super) fn unreadable(
    about: impl Into<String>,
    what: &str,
    error: &SnapshotError,
) -> DoctorFinding {
    let fix = match error.code {
        Some(401) => "run it as a user who may read that",
        Some(403) => "run it as a user who may read that, or grant the roles that it prints",
        _ => "try again; if it persists, check the API server",
    };
    finding(about, format!("{what}: {}", error.why), fix)
}

/// The first names of a list.
pub(super) fn list<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> String {
    words::named(names, MAX_NAMED)
}

/// `namespace/name`, or the name of an object without namespace.
pub(super) fn full_name(object: &impl ResourceExt) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}
