//! Manifests that are wrong, each with what has to be said about it.
#![allow(dead_code, reason = "each test that shares this file reads its part")]

mod objects;
mod rules;
mod together;
pub mod variants;

/// One manifest with one mistake.
pub struct Case {
    /// What is wrong, in a few words.
    pub name: &'static str,
    /// The whole file.
    pub text: String,
    /// Field path and a part of the message, of each finding that must be there.
    pub expected: Vec<(&'static str, &'static str)>,
    /// An API server refuses it too; else only the objects together show it.
    pub refused: bool,
}

/// A policy in which nothing is wrong; it stands in each file beside the mistake and has to stay in force.
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

/// A `NodeQOS` with this rule and a good one after it.
fn rule(rule: &str) -> String {
    let good =
        "{name: other, actionName: good-action, metricRule: {name: cpu_total_usage, value: 4000}}";
    object("NodeQOS", &format!("{{rules: [{rule}, {good}]}}"))
}

/// A rule with this value.
fn value(value: &str) -> String {
    rule(&format!(
        "{{name: cpu, actionName: good-action, metricRule: {{name: cpu_total_usage, value: {value}}}}}"
    ))
}

/// A rule with these fields besides.
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

fn refused(name: &'static str, text: String, path: &'static str, part: &'static str) -> Case {
    Case {
        name,
        text,
        expected: vec![(path, part)],
        refused: true,
    }
}

fn together(name: &'static str, text: String, path: &'static str, part: &'static str) -> Case {
    Case {
        refused: false,
        ..refused(name, text, path, part)
    }
}

/// All of them.
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
