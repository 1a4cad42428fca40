//! The policy objects, and what they amount to for each class of node. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde_json::Value;

use super::content::{Content, Contents};
use crate::crd::Kind;
use crate::crd::node_watermark::MOST_SOURCES;
use crate::crd::{Compiled, Finding, Objects, compile};
use crate::engine::policy::{NodeFacts, PolicySet};
use crate::engine::selector::Selector;
use crate::engine::units::Bytes;

/// An object's kind and name.
pub type Key = (Kind, String);

/// Nodes that the same `NodeQOS` select and that are of one size keep the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassKey {
    selected: Vec<Arc<str>>,
    cpus: u32,
    memory: u64,
}

/// What the nodes of one class keep.
#[derive(Debug, Default)]
pub struct Class {
    /// The `NodeQOS` that select them, in order of name.
    pub selected: Vec<Arc<str>>,
    /// What they keep. Empty, pod policies included, where nothing selects them.
    pub content: Arc<Content>,
    /// What was found about these while compiling.
    pub findings: Vec<Finding>,
    /// `<kind>/<name>@<generation>` of what it was compiled from.
    pub sources: Arc<[String]>,
}

impl Class {
    /// Whether this `NodeQOS` selects its nodes.
    pub fn is_selected_by(&self, node_qos: &str) -> bool {
        let place = self
            .selected
            .binary_search_by(|name| (**name).cmp(node_qos));
        place.is_ok()
    }
}

/// One object as it was last seen.
struct Part {
    objects: Objects,
    uid: String,
    generation: i64,
    immediate: bool,
    spec: Value,
    /// Its conditions, as last seen.
    status: Value,
}

/// Which nodes an edit may concern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Affected {
    /// None: nothing that is compiled changed.
    None,
    /// Those that these `NodeQOS` select now, or did before.
    SelectedBy(BTreeSet<Arc<str>>),
    /// Those that any `NodeQOS` selects.
    AllSelected,
}

/// All policy objects.
#[derive(Default)]
pub struct Catalog {
    parts: BTreeMap<Key, Part>,
    objects: Objects,
    selectors: Vec<(Arc<str>, Option<Selector>)>,
    classes: HashMap<ClassKey, Arc<Class>>,
    contents: Contents,
}

impl Catalog {
    /// What nodes keep, or are to keep.
    pub const fn contents(&mut self) -> &mut Contents {
        &mut self.contents
    }

    /// Takes an object as it is now; says which nodes that may concern.
    pub fn apply(&mut self, kind: Kind, name: &str, object: &Value) -> Affected {
        let key = (kind, name.to_owned());
        let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
        let annotation = &object["metadata"]["annotations"]["plimsoll.dev/rollout"];
        let immediate = annotation.as_str() == Some("immediate");
        let status = object["status"].clone();
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        if let Some(part) = self.parts.get_mut(&key) {
            part.status = status;
            uid.clone_into(&mut part.uid);
            part.immediate = immediate;
            part.generation = generation;
            // The generation does not tell: of an object that was made anew, or put back from a backup, it may be the same.
            if part.spec == object["spec"] {
                return Affected::None;
            }
            part.spec.clone_from(&object["spec"]);
        }
        let objects = Objects::from_values([object.clone()]);
        if self
            .parts
            .get(&key)
            .is_some_and(|part| part.objects == objects)
        {
            return Affected::None;
        }
        let part = Part {
            objects,
            uid: uid.to_owned(),
            generation,
            immediate,
            spec: object["spec"].clone(),
            status: object["status"].clone(),
        };
        self.parts.insert(key, part);
        self.rebuild(kind, name)
    }

    /// An object is gone.
    pub fn delete(&mut self, kind: Kind, name: &str) -> Affected {
        match self.parts.remove(&(kind, name.to_owned())) {
            Some(_) => self.rebuild(kind, name),
            None => Affected::None,
        }
    }

    fn rebuild(&mut self, kind: Kind, name: &str) -> Affected {
        let before = self.concerned(kind, name);
        self.objects = Objects::merged(self.parts.values().map(|part| &part.objects));
        let selectors = self.objects.node_selectors();
        self.selectors = selectors
            .map(|(name, selector)| (Arc::from(name), selector))
            .collect();
        let after = self.concerned(kind, name);
        let affected = match (before, after) {
            (Affected::SelectedBy(mut before), Affected::SelectedBy(after)) => {
                before.extend(after);
                Affected::SelectedBy(before)
            }
            _ => Affected::AllSelected,
        };
        self.classes
            .retain(|key, _| !affected.concerns(&key.selected));
        affected
    }

    fn concerned(&self, kind: Kind, name: &str) -> Affected {
        match kind {
            Kind::PodQos => Affected::AllSelected,
            Kind::NodeQos => Affected::SelectedBy(BTreeSet::from([Arc::from(name)])),
            Kind::AvoidanceAction => Affected::SelectedBy(self.users(name)),
        }
    }

    /// The `NodeQOS` whose rules name this action.
    pub fn users(&self, action: &str) -> BTreeSet<Arc<str>> {
        let names = self.selectors.iter().map(|(name, _)| name);
        names
            .filter(|name| self.objects.actions_named_by(name).contains(action))
            .cloned()
            .collect()
    }

    /// What a node of these facts keeps.
    pub fn class(&mut self, facts: &NodeFacts) -> Arc<Class> {
        let key = ClassKey {
            selected: self.selected(facts),
            cpus: facts.cpus,
            memory: about(facts.memory.0),
        };
        if let Some(class) = self.classes.get(&key) {
            return Arc::clone(class);
        }
        let class = Arc::new(self.compile(&key, facts));
        self.classes.insert(key, Arc::clone(&class));
        class
    }

    fn selected(&self, facts: &NodeFacts) -> Vec<Arc<str>> {
        let selects =
            |(_, selector): &&(Arc<str>, Option<Selector>)| takes(selector.as_ref(), facts);
        let selected = self.selectors.iter().filter(selects);
        selected.map(|(name, _)| Arc::clone(name)).collect()
    }

    /// The selectors of the `NodeQOS` that an edit names, as they are now.
    pub fn selectors_of(&self, affected: &Affected) -> Vec<Option<Selector>> {
        let Affected::SelectedBy(names) = affected else {
            return Vec::new();
        };
        let concerned = self
            .selectors
            .iter()
            .filter(|(name, _)| names.contains(name));
        concerned.map(|(_, selector)| selector.clone()).collect()
    }

    fn compile(&mut self, key: &ClassKey, facts: &NodeFacts) -> Class {
        let facts = NodeFacts {
            labels: facts.labels.clone(),
            cpus: key.cpus,
            memory: Bytes(key.memory),
        };
        let compiled = compile(&self.objects, &facts);
        let policy = if key.selected.is_empty() {
            PolicySet::default()
        } else {
            compiled.policy
        };
        // What is found about others holds on any node, or is another class's: an edit of theirs does not make this one anew.
        let mut class = Class {
            selected: key.selected.clone(),
            sources: self.sources(&key.selected, &policy),
            content: self.contents.of(policy),
            findings: Vec::new(),
        };
        let concerns = |finding: &Finding| {
            let object = &finding.object;
            object.kind == Kind::NodeQos.name() && class.is_selected_by(&object.name)
        };
        class.findings = compiled.findings.into_iter().filter(concerns).collect();
        class
    }

    fn sources(&self, selected: &[Arc<str>], policy: &PolicySet) -> Arc<[String]> {
        let node_qos = selected
            .iter()
            .map(|name| (Kind::NodeQos, name.to_string()));
        let actions = policy.rules.iter().map(|rule| rule.action.name.clone());
        let actions = actions.map(|name| (Kind::AvoidanceAction, name));
        let pods = policy
            .pods
            .iter()
            .map(|pod| (Kind::PodQos, pod.name.clone()));
        let keys: BTreeSet<Key> = node_qos.chain(actions).chain(pods).collect();
        let print = |key: Key| {
            let generation = self.generation(&key);
            format!("{}/{}@{generation}", key.0.name(), key.1)
        };
        keys.into_iter().take(MOST_SOURCES).map(print).collect()
    }

    /// What the objects amount to, and what is found about them, whatever the node.
    pub fn compiled_for_any_node(&self) -> Compiled {
        let everywhere = self.objects.clone().for_every_node();
        compile(&everywhere, &NodeFacts::default())
    }

    /// `metadata.uid` of an object as it was last seen; empty where there is none.
    pub fn uid(&self, key: &Key) -> &str {
        self.parts.get(key).map_or("", |part| &part.uid)
    }

    /// `metadata.generation` of an object as it was last seen; 0 where there is none.
    pub fn generation(&self, key: &Key) -> i64 {
        self.parts.get(key).map_or(0, |part| part.generation)
    }

    /// Whether the object asks for its edits to go to all nodes at once.
    pub fn is_immediate(&self, key: &Key) -> bool {
        self.parts.get(key).is_some_and(|part| part.immediate)
    }

    /// Every object with its status as last seen.
    pub fn statuses(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.parts.iter().map(|(key, part)| (key, &part.status))
    }

    /// The status of one object as last seen.
    pub fn status(&self, key: &Key) -> Option<&Value> {
        self.parts.get(key).map(|part| &part.status)
    }
}

/// Whether a node is selected; a selector that is absent takes all.
pub fn takes(selector: Option<&Selector>, facts: &NodeFacts) -> bool {
    selector.is_none_or(|selector| selector.matches(&facts.labels))
}

impl Affected {
    /// Whether the edit changes what this object does.
    pub fn edits(&self, key: &Key) -> bool {
        match self {
            Self::SelectedBy(names) => {
                key.0 == Kind::NodeQos && names.iter().any(|name| **name == *key.1)
            }
            Self::None | Self::AllSelected => false,
        }
    }

    /// Whether a node that these `NodeQOS` select is among them.
    pub fn concerns(&self, selected: &[Arc<str>]) -> bool {
        match self {
            Self::None => false,
            // Both are sorted, and mostly one name is looked up among many.
            Self::SelectedBy(names) => names
                .iter()
                .any(|name| selected.binary_search(name).is_ok()),
            Self::AllSelected => !selected.is_empty(),
        }
    }
}

/// The memory of a node to about 3 %, rounded down: it only serves to find mistakes in the unit, and nodes of one
/// make differ by a few pages.
const fn about(bytes: u64) -> u64 {
    let bits = 64 - bytes.leading_zeros();
    let drop = bits.saturating_sub(6);
    (bytes >> drop) << drop
}
