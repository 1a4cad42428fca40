//! Policies from manifest files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::manifest;
use super::sources::{PolicySource, absolute, merge};
use crate::crd::manifest::{ManifestObject, Position, Positions};
use crate::crd::{Finding, GROUP, Kind, ObjectRef, Severity};
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::messages::event::PolicyProblem;

/// Policies as read from files.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loaded {
    /// The policies to enforce.
    pub policy: PolicySet,
    /// Errors and warnings, sorted.
    pub problems: Vec<PolicyProblem>,
    /// Problems because of which the last good version of an object stays in force.
    pub fallbacks: Vec<PolicyProblem>,
    /// The objects in force, to which a later load falls back.
    pub sources: Vec<PolicySource>,
}

impl Loaded {
    /// The errors that `former` did not have. With any, the whole edit is refused, since half of it was not intended.
    /// Old errors do not block good edits.
    pub fn new_errors(&self, former: &[PolicyProblem]) -> Vec<PolicyProblem> {
        let is_old = |problem: &PolicyProblem| {
            let same = |other: &PolicyProblem| {
                other.is_error() && other.file == problem.file && other.message == problem.message
            };
            former.iter().any(same)
        };
        let errors = self.problems.iter().filter(|problem| problem.is_error());
        errors.filter(|error| !is_old(error)).cloned().collect()
    }
}

/// Reads the policies in `paths` and compiles them for `node`. A broken object, document or file does not affect others;
/// if it was good in `former`, that version stays in force. Objects of other kinds, such as pods, are skipped.
/// With `preview`, every rule is a Preview.
pub fn load(paths: &[PathBuf], node: &NodeFacts, preview: bool, former: &[PolicySource]) -> Loaded {
    let mut parse_errors = Vec::new();
    let mut locations = Locations::new();
    let mut objects = Vec::new();
    manifest::read(paths, |file, object| match object {
        Ok(object) => {
            parse_errors.extend(unknown_kind(file, &object));
            locations
                .entry(key(&object.value))
                .or_insert_with(|| (file.to_owned(), object.positions));
            objects.push(PolicySource::new(file, object.value));
        }
        Err(parse_error) => parse_errors.push(problem(
            file,
            parse_error.position,
            Severity::Error,
            parse_error.to_string(),
        )),
    });
    let unparsed = parse_errors
        .iter()
        .map(|parse_error| absolute(Path::new(&parse_error.file)));
    let merged = merge(objects, former, &unparsed.collect(), node);
    let mut fallbacks: Vec<_> = merged
        .refused
        .iter()
        .map(|finding| stays_in_force(locate(finding, &locations), "its last good version stays"))
        .collect();
    let (covering, parse_errors): (Vec<_>, Vec<_>) = parse_errors
        .into_iter()
        .map(|parse_error| name_hidden(parse_error, &merged.hidden))
        .partition(|(_, hides)| *hides);
    fallbacks.extend(covering.into_iter().map(|(parse_error, _)| parse_error));
    fallbacks.sort();
    let findings = merged.compiled.findings.iter();
    let mut problems: Vec<_> = findings
        .map(|finding| locate(finding, &locations))
        .collect();
    problems.extend(parse_errors.into_iter().map(|(parse_error, _)| parse_error));
    problems.extend_from_slice(&fallbacks);
    problems.sort();
    let policy = merged.compiled.policy;
    Loaded {
        policy: if preview { policy.as_preview() } else { policy },
        problems,
        fallbacks,
        sources: merged.sources,
    }
}

/// Adds to a parse error the objects in force that it may hide; true if there are any.
fn name_hidden(
    parse_error: PolicyProblem,
    hidden: &[(ObjectRef, PathBuf)],
) -> (PolicyProblem, bool) {
    let path = absolute(Path::new(&parse_error.file));
    let names = hidden.iter().filter(|(_, file)| file.starts_with(&path));
    let names: Vec<_> = names.map(|(object, _)| object.to_string()).collect();
    match names.as_slice() {
        [] => (parse_error, false),
        [one] => (
            stays_in_force(parse_error, &format!("the former {one} stays")),
            true,
        ),
        some => (
            stays_in_force(parse_error, &format!("the former {} stay", some.join(", "))),
            true,
        ),
    }
}

fn stays_in_force(problem: PolicyProblem, what: &str) -> PolicyProblem {
    let message = format!("{}; {what} in force", problem.message);
    PolicyProblem { message, ..problem }
}

/// The location of the first object of each kind and name.
type Locations = BTreeMap<(String, String), (PathBuf, Positions)>;

fn key(object: &Value) -> (String, String) {
    let text = |pointer: &str| {
        let text = object.pointer(pointer).and_then(Value::as_str);
        text.unwrap_or_default().to_owned()
    };
    (text("/kind"), text("/metadata/name"))
}

/// An error for an object of our API group whose kind does not exist.
fn unknown_kind(file: &Path, object: &ManifestObject) -> Option<PolicyProblem> {
    let api = object.value.get("apiVersion").and_then(Value::as_str)?;
    if api.split('/').next() != Some(GROUP) || Kind::of(&object.value).is_some() {
        return None;
    }
    let (kind, name) = key(&object.value);
    let unknown = Kind::unknown(&kind, api);
    let message = if name.is_empty() {
        unknown
    } else {
        format!("{kind}/{name}: {unknown}")
    };
    Some(problem(
        file,
        object.positions.of("kind"),
        Severity::Error,
        message,
    ))
}

fn locate(finding: &Finding, locations: &Locations) -> PolicyProblem {
    let object = &finding.object;
    let field = match finding.path.as_str() {
        "" => String::new(),
        path => format!("{path}: "),
    };
    let message = format!("{object}: {field}{}", finding.message);
    match locations.get(&(object.kind.clone(), object.name.clone())) {
        Some((file, positions)) => {
            problem(file, positions.of(&finding.path), finding.severity, message)
        }
        None => problem(
            Path::new(""),
            Position::default(),
            finding.severity,
            message,
        ),
    }
}

fn problem(file: &Path, position: Position, severity: Severity, message: String) -> PolicyProblem {
    PolicyProblem {
        file: file.display().to_string(),
        position,
        severity: severity.to_string(),
        message,
    }
}
