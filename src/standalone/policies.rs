//! Policies from manifest files, and when an edit of them is taken over.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::manifest;
use super::sources::{Source, absolute, merge};
use crate::crd::manifest::{Lines, Object};
use crate::crd::{API_VERSION, Finding, GROUP, Kind, ObjectRef};
use crate::engine::policy::{NodeFacts, PolicySet, Strategy};
use crate::node::machine::event::PolicyProblem;
use crate::ordered;

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
    /// Those of the problems for which the last good version of something stays in force.
    pub kept: Vec<PolicyProblem>,
    /// The objects in force, from which a later load takes what has turned broken by then.
    pub sources: Vec<Source>,
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
/// as they are; of one that was good in `former`, that version stays in force. Objects of other kinds (pods may lie
/// in the same folder) are passed over.
pub fn load(
    paths: &[PathBuf],
    node: &NodeFacts,
    overrides: Overrides,
    former: &[Source],
) -> Loaded {
    let mut flaws = Vec::new();
    let mut places = Places::new();
    let mut objects = Vec::new();
    manifest::read(paths, |file, object| match object {
        Ok(object) => {
            flaws.extend(misspelt(file, &object));
            places
                .entry(key(&object.value))
                .or_insert_with(|| (file.to_owned(), object.lines));
            objects.push(Source::new(file, object.value));
        }
        Err(flaw) => flaws.push(problem(file, flaw.line, "error", flaw.message)),
    });
    let doubtful = flaws.iter().map(|flaw| absolute(Path::new(&flaw.file)));
    let merged = merge(objects, former, &doubtful.collect(), node);
    let mut kept: Vec<_> = merged
        .refused
        .iter()
        .map(|finding| stays(locate(finding, &places), "its last good version stays"))
        .collect();
    let (covering, flaws): (Vec<_>, Vec<_>) = flaws
        .into_iter()
        .map(|flaw| hides(flaw, &merged.hidden))
        .partition(|(_, hides)| *hides);
    kept.extend(covering.into_iter().map(|(flaw, _)| flaw));
    ordered::sort(&mut kept);
    let findings = merged.compiled.findings.iter();
    let mut problems: Vec<_> = findings.map(|finding| locate(finding, &places)).collect();
    problems.extend(flaws.into_iter().map(|(flaw, _)| flaw));
    problems.extend_from_slice(&kept);
    ordered::sort(&mut problems);
    let mut policy = merged.compiled.policy;
    overrides.apply(&mut policy);
    Loaded {
        policy,
        problems,
        kept,
        sources: merged.sources,
    }
}

/// Tells which objects a flaw may hide that stay in force as they were; true where there are any.
fn hides(flaw: PolicyProblem, hidden: &[(ObjectRef, PathBuf)]) -> (PolicyProblem, bool) {
    let place = absolute(Path::new(&flaw.file));
    let names = hidden.iter().filter(|(_, file)| file.starts_with(&place));
    let names: Vec<_> = names.map(|(object, _)| object.to_string()).collect();
    match names.as_slice() {
        [] => (flaw, false),
        [one] => (stays(flaw, &format!("{one} as it was stays")), true),
        some => (
            stays(flaw, &format!("{} as they were stay", some.join(", "))),
            true,
        ),
    }
}

fn stays(problem: PolicyProblem, what: &str) -> PolicyProblem {
    let message = format!("{}; {what} in force", problem.message);
    PolicyProblem { message, ..problem }
}

/// Where the first object of each kind and name stands.
type Places = BTreeMap<(String, String), (PathBuf, Lines)>;

fn key(object: &Value) -> (String, String) {
    let text = |pointer: &str| {
        let text = object.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    (text("/kind"), text("/metadata/name"))
}

/// An object of our group that is of none of its kinds was meant to be one.
fn misspelt(file: &Path, object: &Object) -> Option<PolicyProblem> {
    let api = object.value.get("apiVersion").and_then(Value::as_str)?;
    if api.split('/').next() != Some(GROUP) || Kind::of(&object.value).is_some() {
        return None;
    }
    let (kind, name) = key(&object.value);
    let kinds = Kind::ALL.map(Kind::name).join(", ");
    let message = format!(
        "{kind}/{name}: there is no kind {kind} in {api}; write apiVersion: {API_VERSION}, and kind: one of {kinds}"
    );
    Some(problem(file, object.lines.line("kind"), "error", message))
}

fn locate(finding: &Finding, places: &Places) -> PolicyProblem {
    let object = &finding.object;
    let field = match finding.path.as_str() {
        "" => String::new(),
        path => format!(" {path}"),
    };
    let message = format!("{object}{field}: {}", finding.message);
    let severity = finding.severity.to_string();
    match places.get(&(object.kind.clone(), object.name.clone())) {
        Some((file, lines)) => problem(file, lines.line(&finding.path), &severity, message),
        None => problem(Path::new(""), 0, &severity, message),
    }
}

fn problem(file: &Path, line: usize, severity: &str, message: String) -> PolicyProblem {
    PolicyProblem {
        file: file.display().to_string(),
        line,
        severity: severity.to_owned(),
        message,
    }
}
