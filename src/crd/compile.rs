//! Compiles policy objects to the policies of one node. Pure: equal sets of objects compile to equal policies.

mod action;
mod limit;
mod pods;
pub(super) mod rule;
mod rule_check;

use std::collections::BTreeMap;
use std::sync::Arc;

use super::finding::{Finding, ObjectRef, Reason, Severity};
use super::objects::{Kind, NodeRules, Objects};
use crate::engine::policy::{Action, NodeFacts, PodPolicy, PolicySet};

/// The policies of one node, and the findings about the objects that they come from.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Compiled {
    /// The policies that the node enforces.
    pub policy: PolicySet,
    /// All findings, sorted; those about single objects included.
    pub findings: Vec<Finding>,
}

/// Compiles the objects for a node, with all defaults resolved. A rule that cannot have the effect it describes is left out,
/// with a finding that says why.
pub fn compile(objects: &Objects, node: &NodeFacts) -> Compiled {
    let mut findings = Findings(objects.findings().to_vec());
    let actions = action::compile_all(objects, &mut findings);
    let mut pods = pods::compile_all(objects, &actions, &mut findings);
    // The pods of rules count on the nodes of the rules.
    pods.retain(|it| {
        let node_qos = objects.node_of(&it.name);
        node_qos.is_none_or(|object| applies(object, node))
    });
    limit::pods(&mut pods, &mut findings);
    let scope = Scope {
        objects,
        actions: &actions,
        pods: &pods,
        node,
    };
    let mut rules = Vec::new();
    for (name, object) in &objects.nodes {
        let mut findings = findings.for_object(Kind::NodeQos, name);
        findings.not_enforced(unenforced_fields(object));
        if object.spec.evaluation_period_seconds.is_some() {
            findings.warning(
                Reason::FieldsNotEnforced,
                "spec.evaluationPeriodSeconds",
                PERIOD_NOT_ENFORCED,
            );
        }
        if applies(object, node) {
            rules.extend(rule::compile_all(name, object, &scope, &mut findings));
        }
    }
    rules.sort_by(|a, b| a.id.cmp(&b.id));
    if !objects.is_for_every_node() {
        limit::rules(&mut rules, &mut findings);
    }
    let mut findings: Vec<Finding> = findings
        .0
        .into_iter()
        .map(|it| objects.locate(it))
        .collect();
    findings.sort();
    findings.dedup();
    Compiled {
        policy: PolicySet { rules, pods },
        findings,
    }
}

/// The context that a rule is compiled in.
struct Scope<'a> {
    objects: &'a Objects,
    actions: &'a BTreeMap<&'a str, Arc<Action>>,
    pods: &'a [PodPolicy],
    node: &'a NodeFacts,
}

fn applies(object: &NodeRules, node: &NodeFacts) -> bool {
    object
        .spec
        .selector
        .as_ref()
        .is_none_or(|selector| selector.compile().matches(&node.labels))
}

const PERIOD_NOT_ENFORCED: &str = "evaluationPeriodSeconds has no effect, since all rules of a node are evaluated at one period; \
remove it, and set the chart's agent.evaluationPeriod (--evaluation-period of agent and controller, --period of plimsoll run)";

fn unenforced_fields(object: &NodeRules) -> Vec<&'static str> {
    let spec = &object.spec;
    let fields = [
        ("elasticCpuLimit", &spec.elastic_cpu_limit),
        ("memLimit", &spec.mem_limit),
        ("netLimits", &spec.net_limits),
        ("memoryCompression", &spec.memory_compression),
    ];
    let given = fields.into_iter().filter(|(_, value)| value.is_some());
    given.map(|(name, _)| name).collect()
}

struct Findings(Vec<Finding>);

impl Findings {
    fn for_object(&mut self, kind: Kind, name: &str) -> ObjectFindings<'_> {
        ObjectFindings {
            object: ObjectRef {
                kind: kind.name().to_owned(),
                name: name.to_owned(),
            },
            findings: &mut self.0,
        }
    }
}

/// Collects findings about one object.
struct ObjectFindings<'a> {
    object: ObjectRef,
    findings: &'a mut Vec<Finding>,
}

impl ObjectFindings<'_> {
    fn error(&mut self, reason: Reason, path: impl Into<String>, message: impl Into<String>) {
        self.push(Severity::Error, reason, path.into(), message.into());
    }

    fn warning(&mut self, reason: Reason, path: impl Into<String>, message: impl Into<String>) {
        self.push(Severity::Warning, reason, path.into(), message.into());
    }

    fn push(&mut self, severity: Severity, reason: Reason, path: String, message: String) {
        self.findings.push(Finding {
            object: self.object.clone(),
            path,
            severity,
            reason,
            message,
            follows: false,
        });
    }

    /// An error whose cause is another finding.
    fn following(&mut self, reason: Reason, path: impl Into<String>, message: impl Into<String>) {
        self.error(reason, path, message);
        if let Some(last) = self.findings.last_mut() {
            last.follows = true;
        }
    }

    fn not_enforced<S: std::fmt::Display>(&mut self, fields: impl IntoIterator<Item = S>) {
        for field in fields {
            self.warning(
                Reason::FieldsNotEnforced,
                format!("spec.{field}"),
                format!("{field} is accepted, but has no effect; remove it, and do not rely on it"),
            );
        }
    }
}
