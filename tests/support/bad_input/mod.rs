//! Invalid manifests, each with the expected findings.
#![allow(dead_code, reason = "each test binary uses a part of this module")]

mod objects;
mod rules;
mod together;
pub mod variants;

/// A manifest with one mistake.
pub struct Case {
    /// A short name of the mistake.
    pub name: &'static str,
    /// The content of the file.
    pub text: String,
    /// The field path and a part of the message of each expected finding.
    pub expected: Vec<(&'static str, &'static str)>,
    /// Whether an API server rejects it too; otherwise only several objects together show it.
    pub rejected: bool,
}

/// A valid policy that is added to each file and must stay in force.
pub const GOOD: &str = r"
---
apiVersion: ensurance.crane.io/v1alpha1
kind: AvoidanceAction
metadata: {name: good-action}
spec: {throttle: {cpuThrottle: {}}}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: NodeQOS
metadata: {name: good}
spec:
  rules:
  - {name: good_rule, actionName: good-action, metricRule: {name: cpu_total_utilization, value: 80}}
---
apiVersion: ensurance.crane.io/v1alpha1
kind: PodQOS
metadata: {name: good-pods}
spec: {allowedActions: [good-action], labelSelector: {}}
";

fn object(kind: &str, spec: &str) -> String {
    format!(
        "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: {kind}\nmetadata: {{name: bad}}\nspec: {spec}\n"
    )
}

/// A `NodeQOS` with this rule and a valid one after it.
fn rule(rule: &str) -> String {
    let valid =
        "{name: other, actionName: good-action, metricRule: {name: cpu_total_usage, value: 4000}}";
    object("NodeQOS", &format!("{{rules: [{rule}, {valid}]}}"))
}

/// A rule with this value.
fn value(value: &str) -> String {
    rule(&format!(
        "{{name: cpu, actionName: good-action, metricRule: {{name: cpu_total_usage, value: {value}}}}}"
    ))
}

/// A rule with these additional fields.
fn with(fields: &str) -> String {
    rule(&format!(
        "{{name: cpu, actionName: good-action, metricRule: {{name: cpu_total_usage, value: 4000}}, {fields}}}"
    ))
}

fn throttle(fields: &str) -> String {
    object(
        "AvoidanceAction",
        &format!("{{throttle: {{cpuThrottle: {{{fields}}}}}}}"),
    )
}

fn scope(expression: &str) -> String {
    object(
        "PodQOS",
        &format!(
            "{{allowedActions: [throttle], scopeSelector: {{matchExpressions: [{{{expression}}}]}}}}"
        ),
    )
}

fn rejected(name: &'static str, text: String, path: &'static str, part: &'static str) -> Case {
    Case {
        name,
        text,
        expected: vec![(path, part)],
        rejected: true,
    }
}

fn together(name: &'static str, text: String, path: &'static str, part: &'static str) -> Case {
    Case {
        rejected: false,
        ..rejected(name, text, path, part)
    }
}

/// All cases.
pub fn cases() -> Vec<Case> {
    let parts = [
        rules::rules(),
        rules::quantities(),
        objects::actions(),
        objects::pods(),
        together::texts(),
        together::pairs(),
    ];
    parts.into_iter().flatten().collect()
}

const VALUE: &str = "spec.rules[0].metricRule.value";
