//! A set of policy objects, each validated, whatever order they came in.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::finding::{Finding, ObjectRef, Reason, Severity};
use super::node_qos::NodeRule;
use super::{API_VERSION, AvoidanceActionSpec, NodeQosSpec, PodQosSpec};

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

    /// As `kind:` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AvoidanceAction => "AvoidanceAction",
            Self::NodeQos => "NodeQOS",
            Self::PodQos => "PodQOS",
        }
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

/// Policy objects, validated: a bad object is left out, of a `NodeQOS` only its bad rules. The set does not depend on
/// the order in which the objects came, nor on how often each did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objects {
    /// By name.
    pub(super) actions: BTreeMap<String, AvoidanceActionSpec>,
    /// By name.
    pub(super) nodes: BTreeMap<String, NodeRules>,
    /// By name.
    pub(super) pods: BTreeMap<String, PodQosSpec>,
    findings: Vec<Finding>,
}

/// A `NodeQOS` whose bad rules are gone.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct NodeRules {
    /// The object without its rules.
    pub(super) spec: NodeQosSpec,
    /// The good rules, each with its index in the manifest.
    pub(super) rules: Vec<(usize, NodeRule)>,
}

impl Objects {
    /// Validates objects as an API server gives them or a manifest holds them. Those of other kinds are ignored.
    pub fn from_values(values: impl IntoIterator<Item = Value>) -> Self {
        let mut named: BTreeMap<(Kind, String), Vec<Value>> = BTreeMap::new();
        for value in values {
            let Some(kind) = Kind::of(&value) else {
                continue;
            };
            let name = name(&value).to_owned();
            let same_name = named.entry((kind, name)).or_default();
            if !same_name.iter().any(|known| known["spec"] == value["spec"]) {
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

    /// What is wrong with single objects.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    fn insert(&mut self, kind: Kind, name: String, values: &[Value]) {
        let object = ObjectRef {
            kind: kind.name().to_owned(),
            name: name.clone(),
        };
        let [value] = values else {
            self.findings.push(duplicate(object));
            return;
        };
        let mut report = Report {
            object,
            findings: &mut self.findings,
        };
        let spec = &value["spec"];
        match kind {
            Kind::AvoidanceAction => {
                if let Some(spec) = report.parse("spec", spec) {
                    self.actions.insert(name, spec);
                }
            }
            Kind::PodQos => {
                if let Some(spec) = report.parse("spec", spec) {
                    self.pods.insert(name, spec);
                }
            }
            Kind::NodeQos => {
                if let Some(rules) = report.parse_node(spec) {
                    self.nodes.insert(name, rules);
                }
            }
        }
    }
}

/// The name of an object, empty where it has none.
pub(super) fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

fn duplicate(object: ObjectRef) -> Finding {
    let message = format!(
        "there are different objects {object}, so that none of them is in force; give each its own metadata.name"
    );
    Finding {
        object,
        path: "metadata.name".to_owned(),
        severity: Severity::Error,
        reason: Reason::DuplicateName,
        message,
    }
}

/// Where the findings about one object go.
struct Report<'a> {
    object: ObjectRef,
    findings: &'a mut Vec<Finding>,
}

impl Report<'_> {
    fn parse<T: DeserializeOwned>(&mut self, path: &str, value: &Value) -> Option<T> {
        T::deserialize(value)
            .map_err(|error| self.invalid(path, &error.to_string()))
            .ok()
    }

    fn parse_node(&mut self, spec: &Value) -> Option<NodeRules> {
        let mut frame = spec.clone();
        let rules = frame
            .get_mut("rules")
            .map(|rules| std::mem::replace(rules, Value::Array(Vec::new())));
        let spec = self.parse("spec", &frame)?;
        let Some(Value::Array(rules)) = rules else {
            self.invalid("spec.rules", "is not a list");
            return None;
        };
        let rules = rules.iter().enumerate().filter_map(|(index, rule)| {
            let path = format!("spec.rules[{index}]");
            self.parse(&path, rule).map(|rule| (index, rule))
        });
        Some(NodeRules {
            rules: rules.collect(),
            spec,
        })
    }

    fn invalid(&mut self, path: &str, message: &str) {
        self.findings.push(Finding {
            object: self.object.clone(),
            path: path.to_owned(),
            severity: Severity::Error,
            reason: Reason::Invalid,
            message: message.to_owned(),
        });
    }
}
