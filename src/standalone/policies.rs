//! Policies from manifest files, and when an edit of them is taken over.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use super::event::PolicyProblem;
use super::manifest::{self, Place};
use crate::crd::{Finding, Objects, compile};
use crate::engine::policy::{NodeFacts, PolicySet, Strategy};

/// What the command line says over what the policies say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overrides {
    /// Evaluate every rule at this period.
    pub period: Option<Duration>,
    /// Every rule only reports what it would do.
    pub preview: bool,
}

/// Policies as they were read at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// What can be enforced of them.
    pub policy: PolicySet,
    /// What is wrong with the rest, or worth knowing; sorted.
    pub problems: Vec<PolicyProblem>,
}

impl Overrides {
    /// The policies with these settings in place of their own.
    pub fn apply(self, policy: &mut PolicySet) {
        for rule in &mut policy.rules {
            if let Some(period) = self.period {
                rule.period = period;
            }
            if self.preview {
                rule.strategy = Strategy::Preview;
            }
        }
    }
}

impl Loaded {
    /// The errors that `former` did not have. With any, an edit is refused as a whole: half of an edit is in nobody's
    /// mind. An error that was there from the start does not keep the good edits out.
    pub fn new_errors(&self, former: &[PolicyProblem]) -> Vec<PolicyProblem> {
        let known = |problem: &PolicyProblem| {
            let same = |other: &PolicyProblem| {
                other.is_error() && other.file == problem.file && other.message == problem.message
            };
            former.iter().any(same)
        };
        let errors = self.problems.iter().filter(|problem| problem.is_error());
        errors.filter(|error| !known(error)).cloned().collect()
    }
}

/// Reads the policies of `paths` and compiles them for `node`. One bad object, document or file leaves the others
/// as they are. Objects of other kinds (pods may lie in the same folder) are passed over.
pub fn load(paths: &[PathBuf], node: &NodeFacts, overrides: Overrides) -> Loaded {
    let mut problems = Vec::new();
    let mut places = BTreeMap::new();
    let mut values = Vec::new();
    manifest::read(paths, |place, object| match object {
        Ok(object) => {
            places.entry(key(&object)).or_insert_with(|| place.clone());
            values.push(object);
        }
        Err(reason) => problems.push(problem(Some(place), "error", reason)),
    });
    let compiled = compile(&Objects::from_values(values), node);
    problems.extend(
        compiled
            .findings
            .iter()
            .map(|finding| locate(finding, &places)),
    );
    problems.sort();
    let mut policy = compiled.policy;
    overrides.apply(&mut policy);
    Loaded { policy, problems }
}

fn key(object: &Value) -> (String, String) {
    let text = |pointer: &str| {
        let text = object.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    (text("/kind"), text("/metadata/name"))
}

fn locate(finding: &Finding, places: &BTreeMap<(String, String), Place>) -> PolicyProblem {
    let object = &finding.object;
    let place = places.get(&(object.kind.clone(), object.name.clone()));
    let field = match finding.path.as_str() {
        "" => String::new(),
        path => format!(" {path}"),
    };
    let message = format!("{object}{field}: {}", finding.message);
    problem(place, &finding.severity.to_string(), message)
}

fn problem(place: Option<&Place>, severity: &str, message: String) -> PolicyProblem {
    PolicyProblem {
        file: place.map_or_else(String::new, |place| place.file.display().to_string()),
        line: place.map_or(0, |place| place.line),
        severity: severity.to_owned(),
        message,
    }
}
