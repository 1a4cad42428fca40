//! A set of validated policy objects.

use std::collections::{BTreeMap, BTreeSet};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::finding::{Finding, ObjectRef, Reason, Severity};
use super::node_qos::NodeRule;
use super::path::rule_index;
use super::validate::{Problem, validate};
use super::words::nearest;
use super::{API_VERSION, AvoidanceActionSpec, NodeQosSpec, PodQosSpec};
use crate::engine::policy::{Strategy, node_qos_of};
use crate::engine::selector::Selector;

/// The kinds of policy object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `AvoidanceAction`
    AvoidanceAction,
    /// `NodeQOS`
    NodeQos,
    /// `PodQOS`
    PodQos,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::AvoidanceAction, Self::NodeQos, Self::PodQos];

    /// The value of `kind`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AvoidanceAction => "AvoidanceAction",
            Self::NodeQos => "NodeQOS",
            Self::PodQos => "PodQOS",
        }
    }

    /// The name in API paths.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::AvoidanceAction => "avoidanceactions",
            Self::NodeQos => "nodeqoss",
            Self::PodQos => "podqoss",
        }
    }

    /// Says that there is no such kind of policy, and which one is probably meant.
    pub fn unknown(kind: &str, version: &str) -> String {
        let names = Self::ALL.map(Self::name);
        let meant = nearest(kind, names);
        let right_version = format!("write apiVersion: {API_VERSION}");
        if kind.is_empty() {
            return format!("kind is missing; write one of {}", names.join(", "));
        }
        let fix = match meant {
            Some(meant) if version == API_VERSION => format!("did you mean {meant}?"),
            Some(meant) if meant == kind => right_version,
            Some(meant) => format!("{right_version} and kind: {meant}"),
            None if version == API_VERSION => format!("write one of {}", names.join(", ")),
            None => format!("{right_version}, and kind: one of {}", names.join(", ")),
        };
        format!("there is no kind {kind} in {version}; {fix}")
    }

    /// The kind of an object; `None` for any other `apiVersion` or `kind`.
    pub fn of(object: &Value) -> Option<Self> {
        if object.get("apiVersion")?.as_str()? != API_VERSION {
            return None;
        }
        let kind = object.get("kind")?.as_str()?;
        Self::ALL.into_iter().find(|known| known.name() == kind)
    }
}

/// Validated policy objects. An invalid object is left out; of a `NodeQOS`, only its invalid rules are. The set does not depend
/// on the order of the objects, or on repetition.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects {
    /// By name.
    pub(super) actions: BTreeMap<String, AvoidanceActionSpec>,
    /// By name.
    pub(super) nodes: BTreeMap<String, NodeRules>,
    /// By name.
    pub(super) pods: BTreeMap<String, PodQosSpec>,
    /// The `PodQOS` whose `resourceQOS` is only reported.
    previews: BTreeSet<String>,
    findings: Vec<Finding>,
    every_node: bool,
}

/// A `NodeQOS` without its invalid rules.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeRules {
    /// The object without its rules.
    pub(super) spec: NodeQosSpec,
    /// The valid rules, with their indices in the manifest.
    pub(super) rules: Vec<(usize, NodeRule)>,
}

/// `Preview`: the `resourceQOS` of this `PodQOS` is only reported.
const STRATEGY_ANNOTATION: &str = "plimsoll.dev/strategy";

impl Objects {
    /// Validates objects from an API server or a manifest. Objects of other kinds are ignored.
    pub fn from_values(values: impl IntoIterator<Item = Value>) -> Self {
        let mut named: BTreeMap<(Kind, String), Vec<Value>> = BTreeMap::new();
        for value in values {
            let Some(kind) = Kind::of(&value) else {
                continue;
            };
            let name = name(&value).to_owned();
            let same_name = named.entry((kind, name)).or_default();
            if !same_name.contains(&value) {
                same_name.push(value);
            }
        }
        let mut objects = Self::default();
        for ((kind, name), values) in named {
            objects.insert(kind, name, &values);
        }
        objects.findings.sort();
        objects.findings.dedup();
        objects
    }

    /// The union of disjoint sets, so that only changed objects need to be validated again.
    #[must_use]
    pub fn merged<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut all = Self::default();
        for part in parts {
            let Self {
                actions,
                nodes,
                pods,
                previews,
                findings,
                ..
            } = part.clone();
            all.actions.extend(actions);
            all.nodes.extend(nodes);
            all.pods.extend(pods);
            all.previews.extend(previews);
            all.findings.extend(findings);
        }
        all.findings.sort();
        all.findings.dedup();
        all
    }

    /// The node selector of each `NodeQOS` in force, sorted by name; `None` selects all nodes.
    pub fn node_selectors(&self) -> impl Iterator<Item = (&str, Option<Selector>)> {
        self.nodes.iter().map(|(name, node)| {
            let selector = node.spec.selector.as_ref();
            (name.as_str(), selector.map(super::LabelSelector::compile))
        })
    }

    /// The names of the actions of the rules of a `NodeQOS`.
    pub fn actions_named_by(&self, node_qos: &str) -> BTreeSet<&str> {
        let rules = self.nodes.get(node_qos).map_or(&[][..], |node| &node.rules);
        rules.iter().map(|(_, rule)| rule.named_action()).collect()
    }

    /// The set for a hypothetical node that every `NodeQOS` selects. The maximum number of rules of a node does not apply.
    #[must_use]
    pub fn for_every_node(mut self) -> Self {
        self.every_node = true;
        for node in self.nodes.values_mut() {
            node.spec.selector = None;
        }
        self
    }

    /// Whether it is [`Self::for_every_node`].
    pub(super) const fn is_for_every_node(&self) -> bool {
        self.every_node
    }

    /// Whether the object is in force. A `NodeQOS` is if at least one of its rules is.
    pub fn has(&self, kind: Kind, name: &str) -> bool {
        match kind {
            Kind::AvoidanceAction => self.actions.contains_key(name),
            Kind::NodeQos => self.nodes.contains_key(name),
            Kind::PodQos => self.pods.contains_key(name),
        }
    }

    /// The rules with strategy `Preview`, as `<NodeQOS>/<rule>`.
    pub fn preview_rules(&self) -> impl Iterator<Item = String> {
        self.nodes.iter().flat_map(|(name, node)| {
            let rules = node.rules.iter().map(|(_, rule)| rule);
            let strategy = |rule: &NodeRule| Strategy::from_name(rule.strategy.as_deref()?);
            let previews = rules.filter(move |rule| strategy(rule) == Some(Strategy::Preview));
            previews.map(move |rule| format!("{name}/{}", rule.name))
        })
    }

    /// The `PodQOS` whose `resourceQOS` is only reported.
    pub fn preview_pod_qos(&self) -> impl Iterator<Item = &str> {
        self.previews.iter().map(String::as_str)
    }

    /// Whether the `resourceQOS` of the `PodQOS` is only reported.
    pub(super) fn previews(&self, pod_qos: &str) -> bool {
        self.previews.contains(pod_qos)
    }

    /// Whether the object exists, but is not in force because it is invalid.
    pub(super) fn is_rejected(&self, kind: Kind, name: &str) -> bool {
        self.rejected(kind).contains(name)
    }

    /// The names of the objects that are not in force because they are invalid; an empty one of an object without a name.
    pub(super) fn rejected(&self, kind: Kind) -> BTreeSet<&str> {
        let found = self.findings.iter().map(|finding| &finding.object);
        let same_kind = found.filter(|object| object.kind == kind.name());
        let names = same_kind.map(|object| object.name.as_str());
        names.filter(|name| !self.has(kind, name)).collect()
    }

    /// The findings about single objects.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    fn insert(&mut self, kind: Kind, name: String, values: &[Value]) {
        let object = ObjectRef {
            kind: kind.name().to_owned(),
            name: name.clone(),
        };
        if values
            .iter()
            .any(|value| value["spec"] != values[0]["spec"])
        {
            self.findings.push(duplicate(object));
            return;
        }
        // Copies that differ only in their metadata are in force if an API server would accept each of them.
        let (policies, problems): (Vec<_>, Vec<_>) =
            values.iter().map(|value| admit(kind, value)).unzip();
        let policies: Option<Vec<Policy>> = policies.into_iter().collect();
        let problems = problems.into_iter().flatten();
        match policies.and_then(|mut policies| policies.pop()) {
            Some(Policy::Action(spec)) => drop(self.actions.insert(name, spec)),
            Some(Policy::Node(rules)) => self.insert_node(name, *rules),
            Some(Policy::Pods(spec)) => {
                if values.iter().any(is_preview) {
                    self.previews.insert(name.clone());
                }
                self.pods.insert(name, *spec);
            }
            None => {}
        }
        let invalid = problems.map(|problem| Finding {
            object: object.clone(),
            path: problem.path,
            severity: Severity::Error,
            reason: Reason::Invalid,
            message: problem.message,
            follows: false,
        });
        self.findings.extend(invalid);
    }
}

/// The action and the pods of a rule itself are those of an `AvoidanceAction` and a `PodQOS` with the rule's name, which no
/// object can have.
impl Objects {
    fn insert_node(&mut self, name: String, mut node: NodeRules) {
        for (_, rule) in &mut node.rules {
            let Some(action) = rule.action.take() else {
                continue;
            };
            let id = format!("{name}/{}", rule.name);
            if let Some(pods) = rule.pods.take() {
                self.pods.insert(id.clone(), pods.into_pod_qos(id.clone()));
            }
            self.actions.insert(id.clone(), action);
            rule.action_name = Some(id);
        }
        self.nodes.insert(name, node);
    }

    /// The `NodeQOS` with the rule whose own action or pods have this name.
    pub(super) fn node_of(&self, name: &str) -> Option<&NodeRules> {
        self.nodes.get(node_qos_of(name)?)
    }

    /// A finding about a rule's own action or pods is one about the `NodeQOS`.
    pub(super) fn locate(&self, mut finding: Finding) -> Finding {
        let id = &finding.object.name;
        let rules = self.node_of(id).map_or(&[][..], |node| &node.rules);
        let own = |(_, rule): &&(usize, NodeRule)| rule.named_action() == id;
        let (Some(node_qos), Some((index, _))) = (node_qos_of(id), rules.iter().find(own)) else {
            return finding;
        };
        let part = if finding.object.kind == Kind::PodQos.name() {
            "pods"
        } else {
            "action"
        };
        let path = finding.path.strip_prefix("spec").unwrap_or("");
        finding.path = format!("spec.rules[{index}].{part}{path}");
        finding.object = ObjectRef {
            name: node_qos.to_owned(),
            kind: Kind::NodeQos.name().to_owned(),
        };
        finding
    }
}

/// Whether the object is annotated to be only reported.
fn is_preview(object: &Value) -> bool {
    object["metadata"]["annotations"][STRATEGY_ANNOTATION].as_str() == Some("Preview")
}

/// The name of an object; empty if it has none.
pub(super) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

fn duplicate(object: ObjectRef) -> Finding {
    let message = format!(
        "two objects that differ are named {object}, so neither is in force; rename one, or remove it"
    );
    Finding {
        object,
        path: "metadata.name".to_owned(),
        severity: Severity::Error,
        reason: Reason::DuplicateName,
        message,
        follows: false,
    }
}

/// A valid object.
enum Policy {
    Action(AvoidanceActionSpec),
    Node(Box<NodeRules>),
    Pods(Box<PodQosSpec>),
}

/// Validates an object. An invalid rule is left out; an invalid field elsewhere rejects the object.
fn admit(kind: Kind, value: &Value) -> (Option<Policy>, Vec<Problem>) {
    if kind == Kind::NodeQos {
        let (rules, problems) = admit_node(value);
        return (rules.map(Box::new).map(Policy::Node), problems);
    }
    let mut validation = validate(kind, value);
    if !validation.problems.is_empty() {
        return (None, validation.problems);
    }
    let spec = &validation.object["spec"];
    let policy = match kind {
        Kind::PodQos => parse(spec, "spec", &mut validation.problems)
            .map(Box::new)
            .map(Policy::Pods),
        _ => parse(spec, "spec", &mut validation.problems).map(Policy::Action),
    };
    (policy, validation.problems)
}

/// Removes invalid rules until the rest is valid: the CEL rules of the others are evaluated only if the schema is valid.
fn admit_node(value: &Value) -> (Option<NodeRules>, Vec<Problem>) {
    let mut value = value.clone();
    let mut indices: Vec<usize> = (0..rule_count(&value)).collect();
    let mut found = Vec::new();
    loop {
        let validation = validate(Kind::NodeQos, &value);
        if validation.problems.is_empty() {
            let rules = parse_node(&validation.object, &indices, &mut found);
            return (rules, found);
        }
        let invalid: BTreeSet<usize> = validation
            .problems
            .iter()
            .filter_map(|problem| rule_index(&problem.path).map(|(index, _)| index))
            .collect();
        let elsewhere = validation
            .problems
            .iter()
            .any(|problem| rule_index(&problem.path).is_none());
        found.extend(
            validation
                .problems
                .into_iter()
                .map(|problem| renumber(problem, &indices)),
        );
        if elsewhere || invalid.len() >= indices.len() {
            return (None, found);
        }
        if let Some(rules) = value["spec"]["rules"].as_array_mut() {
            remove_indices(rules, &invalid);
        }
        remove_indices(&mut indices, &invalid);
    }
}

fn rule_count(value: &Value) -> usize {
    value["spec"]["rules"].as_array().map_or(0, Vec::len)
}

/// Replaces the index among the remaining rules by the index in the manifest.
fn renumber(problem: Problem, indices: &[usize]) -> Problem {
    let Some((index, rest)) = rule_index(&problem.path) else {
        return problem;
    };
    let original = indices.get(index).copied().unwrap_or(index);
    Problem {
        path: format!("spec.rules[{original}]{rest}"),
        ..problem
    }
}

fn remove_indices<T>(items: &mut Vec<T>, removed: &BTreeSet<usize>) {
    let mut index = 0;
    items.retain(|_| {
        index += 1;
        !removed.contains(&(index - 1))
    });
}

fn parse_node(object: &Value, indices: &[usize], problems: &mut Vec<Problem>) -> Option<NodeRules> {
    let mut spec: NodeQosSpec = parse(&object["spec"], "spec", problems)?;
    let rules = std::mem::take(&mut spec.rules);
    Some(NodeRules {
        spec,
        rules: indices.iter().copied().zip(rules).collect(),
    })
}

/// Fails only if the type does not match the definition.
fn parse<T: DeserializeOwned>(value: &Value, path: &str, problems: &mut Vec<Problem>) -> Option<T> {
    T::deserialize(value)
        .map_err(|error| {
            problems.push(Problem {
                path: path.to_owned(),
                message: error.to_string(),
            });
        })
        .ok()
}
