//! The last good version of each policy object: what goes on where a file turns broken.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::crd::{
    API_VERSION, Compiled, Finding, Kind, ObjectRef, Objects, Reason, Severity, compile,
};
use crate::engine::policy::NodeFacts;
use crate::ordered;

/// A policy object, and the file that it was read from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Source {
    /// The file; absolute, so that another working folder makes no other file of it.
    pub file: PathBuf,
    /// The object: its kind, name and spec.
    pub object: Value,
}

impl Source {
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

    /// All that is ever compiled of it.
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

/// The path from the root, links left as they are: behind those of a mounted `ConfigMap` the folder changes.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// A kind and a name.
type Key = (Kind, String);

/// What is in force of what was read and of what was in force before.
#[derive(Debug)]
pub struct Merged {
    /// The policies, and what is worth knowing of what is in force.
    pub compiled: Compiled,
    /// The objects in force.
    pub sources: Vec<Source>,
    /// What is wrong with the objects whose last good version is in force instead.
    pub refused: Vec<Finding>,
    /// Objects that are nowhere to be read any more, where a file that cannot be understood may hold them: in force
    /// as they were, each with its file.
    pub hidden: Vec<(ObjectRef, PathBuf)>,
}

/// Compiles what was `read`. Where an object has become worse than it was in `former`, or may be hidden by a file or
/// folder that could not be understood (`doubtful`), what was in force of it before goes on. What is simply not there
/// any more is gone.
pub fn merge(
    read: Vec<Source>,
    former: &[Source],
    doubtful: &BTreeSet<PathBuf>,
    node: &NodeFacts,
) -> Merged {
    let mut merger = Merger::new(read, former, node);
    let hidden = merger.uncover(doubtful);
    let mut compiled = merger.compile();
    let mut refused = Vec::new();
    while let Some(worse) = merger.worse(&compiled) {
        for key in worse {
            let about = compiled.findings.iter();
            let about = about.filter(|finding| is_error(finding) && is_about(finding, &key));
            refused.extend(about.cloned());
            merger.hold(key);
        }
        compiled = merger.compile();
    }
    Merged {
        sources: merger.admitted(),
        compiled,
        refused,
        hidden,
    }
}

struct Merger<'a> {
    /// What is to be compiled; several of a key where they contradict each other.
    objects: BTreeMap<Key, Vec<Source>>,
    former: BTreeMap<Key, &'a Source>,
    held: BTreeSet<Key>,
    known: BTreeSet<Finding>,
    node: &'a NodeFacts,
}

impl<'a> Merger<'a> {
    fn new(read: Vec<Source>, former: &'a [Source], node: &'a NodeFacts) -> Self {
        let mut objects: BTreeMap<Key, Vec<Source>> = BTreeMap::new();
        for source in read {
            if let Some(key) = source.key() {
                objects.entry(key).or_default().push(source);
            }
        }
        let values = former.iter().map(|source| source.object.clone());
        let known = match former {
            [] => BTreeSet::new(),
            _ => compile(&Objects::from_values(values), node)
                .findings
                .into_iter()
                .collect(),
        };
        Self {
            objects,
            former: ordered::map(
                former
                    .iter()
                    .filter_map(|source| Some((source.key()?, source))),
            ),
            held: BTreeSet::new(),
            known,
            node,
        }
    }

    fn compile(&self) -> Compiled {
        let sources = self.objects.values().flatten();
        let values = sources.map(|source| source.object.clone());
        compile(&Objects::from_values(values), self.node)
    }

    /// Takes up again what may stand where nothing can be read.
    fn uncover(&mut self, doubtful: &BTreeSet<PathBuf>) -> Vec<(ObjectRef, PathBuf)> {
        let mut hidden = Vec::new();
        for (key, source) in &self.former {
            let covered = doubtful.iter().any(|path| source.file.starts_with(path));
            if covered && !self.objects.contains_key(key) {
                self.objects.insert(key.clone(), vec![(*source).clone()]);
                self.held.insert(key.clone());
                hidden.push((object_ref(key), source.file.clone()));
            }
        }
        hidden
    }

    /// The objects that have errors which they did not have, and of which an other version was in force. Objects that
    /// are invalid by themselves first: what they break elsewhere may be whole again with them.
    fn worse(&self, compiled: &Compiled) -> Option<BTreeSet<Key>> {
        let worse = |by_itself: bool| -> BTreeSet<Key> {
            let errors = compiled.findings.iter().filter(|it| is_error(it));
            let new = errors.filter(|error| !self.known.contains(error));
            let wanted = new.filter(|error| !by_itself || is_of_itself(error));
            let keys = wanted.filter_map(|error| self.replaceable(&error.object));
            keys.cloned().collect()
        };
        [worse(true), worse(false)]
            .into_iter()
            .find(|worse| !worse.is_empty())
    }

    fn replaceable(&self, object: &ObjectRef) -> Option<&Key> {
        let same = |key: &&Key| object_ref(key) == *object;
        let key = self.former.keys().find(same)?;
        let spec = |source: &Source| source.object["spec"].clone();
        let former = spec(self.former.get(key)?);
        let read = self.objects.get(key)?;
        let differs = read.iter().any(|source| spec(source) != former);
        (differs && !self.held.contains(key)).then_some(key)
    }

    fn hold(&mut self, key: Key) {
        if let Some(source) = self.former.get(&key) {
            self.objects.insert(key.clone(), vec![(*source).clone()]);
            self.held.insert(key);
        }
    }

    /// Those that are in force, at least in part.
    fn admitted(&self) -> Vec<Source> {
        let values = self.objects.values().flatten();
        let objects = Objects::from_values(values.map(|source| source.object.clone()));
        let admitted = self
            .objects
            .iter()
            .filter(|((kind, name), _)| objects.has(*kind, name));
        let sources = admitted.filter_map(|(_, sources)| sources.first());
        sources.cloned().map(Source::trimmed).collect()
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

const fn is_of_itself(finding: &Finding) -> bool {
    matches!(finding.reason, Reason::Invalid | Reason::DuplicateName)
}

#[cfg(test)]
mod tests;
