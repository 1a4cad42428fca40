//! Falls back to the last good version of a policy object whose file is broken.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::crd::{
    API_VERSION, Compiled, Finding, Kind, ObjectRef, Objects, Reason, Severity, compile,
};
use crate::engine::policy::NodeFacts;

/// A policy object, and the file that it was read from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PolicySource {
    /// The file; absolute, so that it does not depend on the working directory.
    pub file: PathBuf,
    /// The object: its kind, name and spec.
    pub object: Value,
}

impl PolicySource {
    /// An object that was read from `file`.
    pub fn new(file: &Path, object: Value) -> Self {
        let file = absolute(file);
        Self { file, object }
    }

    fn key(&self) -> Option<Key> {
        let kind = Kind::of(&self.object)?;
        let name = self.object["metadata"]["name"].as_str();
        Some((kind, name.unwrap_or_default().to_owned()))
    }

    /// Only the fields that are compiled.
    fn trimmed(self) -> Self {
        let object = json!({
            "apiVersion": API_VERSION,
            "kind": self.object["kind"],
            "metadata": {"name": self.object["metadata"]["name"]},
            "spec": self.object["spec"],
        });
        Self { object, ..self }
    }
}

/// The absolute path with links unresolved: those in a mounted `ConfigMap` change their target.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// A kind and a name.
type Key = (Kind, String);

/// The result of [`merge`].
#[derive(Debug)]
pub struct Merged {
    /// The policies in force, with findings about them.
    pub compiled: Compiled,
    /// The objects in force.
    pub sources: Vec<PolicySource>,
    /// Errors of objects whose last good version stays in force.
    pub refused: Vec<Finding>,
    /// Objects that are missing, but may be in a file that cannot be parsed: they stay in force. Each with its file.
    pub hidden: Vec<(ObjectRef, PathBuf)>,
}

/// Compiles what was `read`. An object with new errors, or one that may be in a file or directory that could not be parsed
/// (`unparsed`), stays in force as in `former`. An object that is missing otherwise is removed.
pub fn merge(
    read: Vec<PolicySource>,
    former: &[PolicySource],
    unparsed: &BTreeSet<PathBuf>,
    node: &NodeFacts,
) -> Merged {
    let mut merger = Merger::new(read, former, node);
    let hidden = merger.restore_hidden(unparsed);
    let mut compiled = merger.compile();
    let mut refused = Vec::new();
    while let Some(broken) = merger.newly_broken(&compiled) {
        for key in broken {
            let about = compiled.findings.iter();
            let about = about.filter(|finding| is_error(finding) && is_about(finding, &key));
            refused.extend(about.cloned());
            merger.fall_back(key);
        }
        compiled = merger.compile();
    }
    Merged {
        sources: merger.in_force(),
        compiled,
        refused,
        hidden,
    }
}

struct Merger<'a> {
    /// Objects to compile; several with the same key are duplicates.
    objects: BTreeMap<Key, Vec<PolicySource>>,
    former: BTreeMap<Key, &'a PolicySource>,
    fallen_back: BTreeSet<Key>,
    former_findings: BTreeSet<Finding>,
    node: &'a NodeFacts,
}

impl<'a> Merger<'a> {
    fn new(read: Vec<PolicySource>, former: &'a [PolicySource], node: &'a NodeFacts) -> Self {
        let mut objects: BTreeMap<Key, Vec<PolicySource>> = BTreeMap::new();
        for source in read {
            if let Some(key) = source.key() {
                objects.entry(key).or_default().push(source);
            }
        }
        let values = former.iter().map(|source| source.object.clone());
        let former_findings = match former {
            [] => BTreeSet::new(),
            _ => compile(&Objects::from_values(values), node)
                .findings
                .into_iter()
                .collect(),
        };
        Self {
            objects,
            former: former
                .iter()
                .filter_map(|source| Some((source.key()?, source)))
                .collect::<BTreeMap<_, _>>(),
            fallen_back: BTreeSet::new(),
            former_findings,
            node,
        }
    }

    fn compile(&self) -> Compiled {
        let sources = self.objects.values().flatten();
        let values = sources.map(|source| source.object.clone());
        compile(&Objects::from_values(values), self.node)
    }

    /// Falls back for objects that may be in an unparsed file.
    fn restore_hidden(&mut self, unparsed: &BTreeSet<PathBuf>) -> Vec<(ObjectRef, PathBuf)> {
        let mut hidden = Vec::new();
        for (key, source) in &self.former {
            let covered = unparsed.iter().any(|path| source.file.starts_with(path));
            if covered && !self.objects.contains_key(key) {
                self.objects.insert(key.clone(), vec![(*source).clone()]);
                self.fallen_back.insert(key.clone());
                hidden.push((object_ref(key), source.file.clone()));
            }
        }
        hidden
    }

    /// Objects with new errors of which another version was in force. Those that are invalid by themselves come first:
    /// falling back may fix the others, too.
    fn newly_broken(&self, compiled: &Compiled) -> Option<BTreeSet<Key>> {
        let broken = |by_itself: bool| -> BTreeSet<Key> {
            let errors = compiled.findings.iter().filter(|it| is_error(it));
            let new = errors.filter(|error| !self.former_findings.contains(error));
            let wanted = new.filter(|error| !by_itself || is_invalid_by_itself(error));
            let keys = wanted.filter_map(|error| self.replaceable(&error.object));
            keys.cloned().collect()
        };
        [broken(true), broken(false)]
            .into_iter()
            .find(|broken| !broken.is_empty())
    }

    fn replaceable(&self, object: &ObjectRef) -> Option<&Key> {
        let same = |key: &&Key| object_ref(key) == *object;
        let key = self.former.keys().find(same)?;
        let spec = |source: &PolicySource| source.object["spec"].clone();
        let former = spec(self.former.get(key)?);
        let read = self.objects.get(key)?;
        let differs = read.iter().any(|source| spec(source) != former);
        (differs && !self.fallen_back.contains(key)).then_some(key)
    }

    fn fall_back(&mut self, key: Key) {
        if let Some(source) = self.former.get(&key) {
            self.objects.insert(key.clone(), vec![(*source).clone()]);
            self.fallen_back.insert(key);
        }
    }

    /// The objects that are in force, at least in part.
    fn in_force(&self) -> Vec<PolicySource> {
        let values = self.objects.values().flatten();
        let objects = Objects::from_values(values.map(|source| source.object.clone()));
        let valid = self
            .objects
            .iter()
            .filter(|((kind, name), _)| objects.has(*kind, name));
        let sources = valid.filter_map(|(_, sources)| sources.first());
        sources.cloned().map(PolicySource::trimmed).collect()
    }
}

fn object_ref((kind, name): &Key) -> ObjectRef {
    ObjectRef {
        kind: kind.name().to_owned(),
        name: name.clone(),
    }
}

fn is_about(finding: &Finding, key: &Key) -> bool {
    finding.object == object_ref(key)
}

fn is_error(finding: &Finding) -> bool {
    finding.severity == Severity::Error
}

const fn is_invalid_by_itself(finding: &Finding) -> bool {
    matches!(finding.reason, Reason::Invalid | Reason::DuplicateName)
}

#[cfg(test)]
mod tests;
