//! The policy objects, and what they compile to for each class of nodes. Pure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde_json::Value;

use super::content::{CompiledPolicy, Contents};
use crate::crd::Kind;
use crate::crd::node_watermark::MAX_SOURCES;
use crate::crd::{Compiled, Finding, Objects, compile};
use crate::engine::policy::{NodeFacts, PolicySet, node_qos_of};
use crate::engine::selector::Selector;
use crate::engine::units::Bytes;
use crate::engine::window::CustomWindow;

/// An object's kind and name.
pub type Key = (Kind, String);

/// Nodes of the same size, selected by the same `NodeQOS`, get the same policies.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ClassKey {
    selected: Vec<Arc<str>>,
    cpus: u32,
    memory: u64,
}

/// The compiled policies of one class of nodes.
#[derive(Debug, Default)]
pub struct Class {
    /// The `NodeQOS` that select the nodes, ordered by name.
    pub selected: Vec<Arc<str>>,
    /// The compiled policies. If no `NodeQOS` selects the nodes, only the pod policies that act at all times.
    pub content: Arc<CompiledPolicy>,
    /// Findings about these `NodeQOS` while compiling.
    pub findings: Vec<Finding>,
    /// `<kind>/<name>@<generation>` of each object compiled in.
    pub sources: Arc<[String]>,
}

impl Class {
    /// Whether this `NodeQOS` selects its nodes.
    pub fn is_selected_by(&self, node_qos: &str) -> bool {
        let index = self
            .selected
            .binary_search_by(|name| (**name).cmp(node_qos));
        index.is_ok()
    }
}

/// One policy object as last seen.
struct Policy {
    objects: Objects,
    uid: String,
    generation: i64,
    immediate: bool,
    spec: Value,
    status: Value,
}

/// Which nodes an edit may affect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Affected {
    /// None: the compiled result is the same.
    None,
    /// The nodes that these `NodeQOS` select now or selected before.
    SelectedBy(BTreeSet<Arc<str>>),
    /// All nodes: those that no `NodeQOS` selects have what a `PodQOS` does at all times.
    All,
}

/// All policy objects.
#[derive(Default)]
pub struct Catalog {
    policies: BTreeMap<Key, Policy>,
    objects: Objects,
    selectors: Vec<(Arc<str>, Option<Selector>)>,
    classes: HashMap<ClassKey, Arc<Class>>,
    contents: Contents,
    /// The windows of all nodes.
    windows: Option<Arc<[CustomWindow]>>,
}

impl Catalog {
    /// No objects yet, for nodes with these windows.
    pub fn new(windows: Option<Arc<[CustomWindow]>>) -> Self {
        Self {
            windows,
            ..Self::default()
        }
    }

    /// The compiled policies of all nodes.
    pub const fn contents(&mut self) -> &mut Contents {
        &mut self.contents
    }

    /// Adds or changes an object; returns which nodes that may affect.
    pub fn apply(&mut self, kind: Kind, name: &str, object: &Value) -> Affected {
        let key = (kind, name.to_owned());
        let generation = object["metadata"]["generation"].as_i64().unwrap_or(0);
        let annotation = &object["metadata"]["annotations"]["plimsoll.dev/rollout"];
        let immediate = annotation.as_str() == Some("immediate");
        let status = object["status"].clone();
        let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
        if let Some(policy) = self.policies.get_mut(&key) {
            policy.status = status;
            uid.clone_into(&mut policy.uid);
            policy.immediate = immediate;
            policy.generation = generation;
            // Not by generation: an object that was created again or restored from a backup may have the same one.
            if policy.spec == object["spec"] && kind != Kind::PodQos {
                return Affected::None;
            }
            policy.spec.clone_from(&object["spec"]);
        }
        let objects = Objects::from_values([object.clone()]);
        if self
            .policies
            .get(&key)
            .is_some_and(|policy| policy.objects == objects)
        {
            return Affected::None;
        }
        let policy = Policy {
            objects,
            uid: uid.to_owned(),
            generation,
            immediate,
            spec: object["spec"].clone(),
            status: object["status"].clone(),
        };
        self.policies.insert(key, policy);
        self.rebuild(kind, name)
    }

    /// Removes an object.
    pub fn delete(&mut self, kind: Kind, name: &str) -> Affected {
        match self.policies.remove(&(kind, name.to_owned())) {
            Some(_) => self.rebuild(kind, name),
            None => Affected::None,
        }
    }

    fn rebuild(&mut self, kind: Kind, name: &str) -> Affected {
        let before = self.affected_by(kind, name);
        self.objects = Objects::merged(self.policies.values().map(|policy| &policy.objects));
        let selectors = self.objects.node_selectors();
        self.selectors = selectors
            .map(|(name, selector)| (Arc::from(name), selector))
            .collect();
        let after = self.affected_by(kind, name);
        let affected = match (before, after) {
            (Affected::SelectedBy(mut before), Affected::SelectedBy(after)) => {
                before.extend(after);
                Affected::SelectedBy(before)
            }
            _ => Affected::All,
        };
        self.classes
            .retain(|key, _| !affected.affects(&key.selected));
        affected
    }

    fn affected_by(&self, kind: Kind, name: &str) -> Affected {
        match kind {
            Kind::PodQos => Affected::All,
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

    /// The class of a node.
    pub fn class(&mut self, facts: &NodeFacts) -> Arc<Class> {
        let key = ClassKey {
            selected: self.selected(facts),
            cpus: facts.cpus,
            memory: rounded(facts.memory.0),
        };
        if let Some(class) = self.classes.get(&key) {
            return Arc::clone(class);
        }
        let class = Arc::new(self.compile(&key, facts));
        self.classes.insert(key, Arc::clone(&class));
        class
    }

    fn selected(&self, facts: &NodeFacts) -> Vec<Arc<str>> {
        let is_selected =
            |(_, selector): &&(Arc<str>, Option<Selector>)| selects(selector.as_ref(), facts);
        let selected = self.selectors.iter().filter(is_selected);
        selected.map(|(name, _)| Arc::clone(name)).collect()
    }

    /// The current selectors of the `NodeQOS` named by an edit.
    pub fn selectors_of(&self, affected: &Affected) -> Vec<Option<Selector>> {
        let Affected::SelectedBy(names) = affected else {
            return Vec::new();
        };
        let edited = self
            .selectors
            .iter()
            .filter(|(name, _)| names.contains(name));
        edited.map(|(_, selector)| selector.clone()).collect()
    }

    fn compile(&mut self, key: &ClassKey, facts: &NodeFacts) -> Class {
        let facts = NodeFacts {
            labels: facts.labels.clone(),
            cpus: key.cpus,
            memory: Bytes(key.memory),
            windows: self.windows.clone(),
        };
        let compiled = compile(&self.objects, &facts);
        let mut policy = compiled.policy;
        if key.selected.is_empty() {
            // Without rules there is nothing to allow.
            policy.pods.retain(|pods| pods.standing.acts());
        }
        // Findings about other objects belong to other classes or hold on any node; their edits do not recompile this class.
        let mut class = Class {
            selected: key.selected.clone(),
            sources: self.sources(&key.selected, &policy),
            content: self.contents.of(policy),
            findings: Vec::new(),
        };
        let is_about_class = |finding: &Finding| {
            let object = &finding.object;
            object.kind == Kind::NodeQos.name() && class.is_selected_by(&object.name)
        };
        class.findings = compiled
            .findings
            .into_iter()
            .filter(is_about_class)
            .collect();
        class
    }

    fn sources(&self, selected: &[Arc<str>], policy: &PolicySet) -> Arc<[String]> {
        let node_qos = selected
            .iter()
            .map(|name| (Kind::NodeQos, name.to_string()));
        // What a rule has itself is in its `NodeQOS`.
        let is_object = |name: &&String| node_qos_of(name).is_none();
        let actions = policy.rules.iter().map(|rule| &rule.action.name);
        let actions = actions.filter(is_object);
        let actions = actions.map(|name| (Kind::AvoidanceAction, name.clone()));
        let pods = policy.pods.iter().map(|pod| &pod.name).filter(is_object);
        let pods = pods.map(|name| (Kind::PodQos, name.clone()));
        let keys: BTreeSet<Key> = node_qos.chain(actions).chain(pods).collect();
        let print = |key: Key| {
            let generation = self.generation(&key);
            format!("{}/{}@{generation}", key.0.name(), key.1)
        };
        keys.into_iter().take(MAX_SOURCES).map(print).collect()
    }

    /// All objects compiled for a node that everything selects, with the findings that hold on any node.
    pub fn compiled_for_any_node(&self) -> Compiled {
        let everywhere = self.objects.clone().for_every_node();
        let facts = NodeFacts {
            windows: self.windows.clone(),
            ..NodeFacts::default()
        };
        compile(&everywhere, &facts)
    }

    /// `metadata.uid` of an object; empty if there is none.
    pub fn uid(&self, key: &Key) -> &str {
        self.policies.get(key).map_or("", |policy| &policy.uid)
    }

    /// `metadata.generation` of an object; 0 if there is none.
    pub fn generation(&self, key: &Key) -> i64 {
        self.policies.get(key).map_or(0, |policy| policy.generation)
    }

    /// Whether the object is annotated to skip the canaries.
    pub fn is_immediate(&self, key: &Key) -> bool {
        self.policies
            .get(key)
            .is_some_and(|policy| policy.immediate)
    }

    /// The last seen status of every object.
    pub fn statuses(&self) -> impl Iterator<Item = (&Key, &Value)> {
        self.policies
            .iter()
            .map(|(key, policy)| (key, &policy.status))
    }

    /// The last seen status of one object.
    pub fn status(&self, key: &Key) -> Option<&Value> {
        self.policies.get(key).map(|policy| &policy.status)
    }
}

/// Whether a node is selected; an absent selector selects all nodes.
pub fn selects(selector: Option<&Selector>, facts: &NodeFacts) -> bool {
    selector.is_none_or(|selector| selector.matches(&facts.labels))
}

impl Affected {
    /// Whether this object itself was edited.
    pub fn edits(&self, key: &Key) -> bool {
        match self {
            Self::SelectedBy(names) => {
                key.0 == Kind::NodeQos && names.iter().any(|name| **name == *key.1)
            }
            Self::None | Self::All => false,
        }
    }

    /// Whether a node selected by these `NodeQOS` is affected.
    pub fn affects(&self, selected: &[Arc<str>]) -> bool {
        match self {
            Self::None => false,
            // Both are sorted; usually one name is searched among many.
            Self::SelectedBy(names) => names
                .iter()
                .any(|name| selected.binary_search(name).is_ok()),
            Self::All => true,
        }
    }
}

/// The memory of a node, rounded down to about 3 %: it is only used to find mistakes in the unit, and nodes of one
/// model differ by a few pages.
const fn rounded(bytes: u64) -> u64 {
    let bits = 64 - bytes.leading_zeros();
    let drop = bits.saturating_sub(6);
    (bytes >> drop) << drop
}
