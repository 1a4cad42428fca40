//! Mistakes in the YAML, and mistakes that only show when several objects are compiled together.
#![allow(clippy::too_many_lines, reason = "tables")]

use std::fmt::Write;

use super::{Case, VALUE, object, rejected, rule, throttle, together};

/// Mistakes in the YAML.
pub fn texts() -> Vec<Case> {
    let mut bomb = "---\na0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..30 {
        let before = level - 1;
        let _ = writeln!(
            bomb,
            "a{level}: &a{level} [*a{before}, *a{before}, *a{before}, *a{before}]"
        );
    }
    let huge = object(
        "AvoidanceAction",
        &format!("{{description: {}}}", "x".repeat(5 * 1024 * 1024)),
    );
    let cases = [
        (
            "key given twice",
            object(
                "AvoidanceAction",
                "\n  coolDownSeconds: 1\n  coolDownSeconds: 2",
            ),
            "",
            "is given twice (first on the line before)",
        ),
        (
            "tab",
            object("AvoidanceAction", "\n\tcoolDownSeconds: 1"),
            "",
            "only spaces",
        ),
        (
            "bracket left open",
            object("AvoidanceAction", "{coolDownSeconds: 1"),
            "",
            "is not valid YAML",
        ),
        (
            "undefined alias",
            object("AvoidanceAction", "*nothing"),
            "",
            "is not valid YAML",
        ),
        ("alias bomb", bomb, "", "split it"),
        ("5 MB in one object", huge, "", "at most 1536"),
        (
            "not an object",
            "---\n- a\n".to_owned(),
            "",
            "is not an object",
        ),
        (
            "no kind",
            "---\napiVersion: ensurance.crane.io/v1alpha1\nspec: {}\n".to_owned(),
            "kind",
            "a policy starts with",
        ),
        (
            "unknown kind",
            "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQos\nmetadata: {name: bad}\n"
                .to_owned(),
            "kind",
            "did you mean NodeQOS?",
        ),
        (
            "unknown version",
            "---\napiVersion: ensurance.crane.io/v1\nkind: NodeQOS\nmetadata: {name: bad}\n"
                .to_owned(),
            "kind",
            "write apiVersion: ensurance.crane.io/v1alpha1",
        ),
    ];
    let unreadable = [
        "key given twice",
        "tab",
        "bracket left open",
        "undefined alias",
        "not an object",
    ];
    let case = |(name, text, path, part)| Case {
        rejected: unreadable.contains(&name),
        ..together(name, text, path, part)
    };
    cases.map(case).into()
}

/// Mistakes that only show when several objects, or the metrics of a node, are known.
pub fn pairs() -> Vec<Case> {
    let lone = |metric: &str, value: &str, fields: &str| {
        rule(&format!(
            "{{name: cpu, actionName: good-action, metricRule: {{name: {metric}, value: {value}}} {fields}}}"
        ))
    };
    let cases = [
        (
            "unknown action",
            rule(
                "{name: cpu, actionName: good-actoin, metricRule: {name: cpu_total_usage, value: 4000}}",
            ),
            "spec.rules[0].actionName",
            "there is no AvoidanceAction named \"good-actoin\"; did you mean good-action?",
        ),
        (
            "6 bytes",
            lone("memory_total_usage", "6", ""),
            "spec.rules[0].metricRule.value",
            "did you mean 6Gi?",
        ),
        (
            "unknown metric",
            lone("cpu_total_usgae", "4000", ""),
            "spec.rules[0].metricRule.name",
            "did you mean cpu_total_usage?",
        ),
        (
            "unknown time zone",
            lone(
                "cpu_total_usage",
                "4000",
                ", activeDuring: [\"08:00-18:00 UTC\", \"22:00-06:00 Europe/Berln\"]",
            ),
            "spec.rules[0].activeDuring[1]",
            "there is no time zone named \"Europe/Berln\", so the rule is off; did you mean Europe/Berlin?",
        ),
        (
            "metric that throttling does not lower",
            lone("memory_total_utilization", "80", ""),
            "spec.rules[0].actionName",
            "name an action with eviction",
        ),
        (
            "metric that is not measured",
            lone("ext_cpu_total_distribute", "80", ""),
            "spec.rules[0].metricRule.name",
            "is not measured yet",
        ),
        (
            "more than 100 percent",
            lone("cpu_total_utilization", "150", ""),
            VALUE,
            "can't be exceeded",
        ),
        (
            "under 1 percent",
            lone("cpu_total_utilization", "\"0.8\"", ""),
            VALUE,
            "did you mean 80?",
        ),
        (
            "4 millicores",
            lone("cpu_total_usage", "4", ""),
            VALUE,
            "did you mean 4000?",
        ),
        (
            "more than the capacity of the node",
            lone("cpu_total_usage", "64000", ""),
            VALUE,
            "the maximum is 16000 millicores",
        ),
        (
            "never ends",
            lone("cpu_total_utilization", "80", ", restoreValue: 0"),
            "spec.rules[0].restoreValue",
            "would never end",
        ),
        (
            "selector over a metric without labels",
            rule(
                "{name: cpu, actionName: good-action, metricRule: {name: cpu_total_usage, value: 4000, selector: {matchLabels: {a: b}}}}",
            ),
            "spec.rules[0].metricRule.selector",
            "remove selector",
        ),
        (
            "no selector of pods",
            object("PodQOS", "{allowedActions: [throttle]}"),
            "spec",
            "matches no pod; write",
        ),
        (
            "empty scopeSelector",
            object("PodQOS", "{allowedActions: [throttle], scopeSelector: {}}"),
            "spec",
            "matches no pod; write",
        ),
        (
            "nothing allowed",
            object("PodQOS", "{labelSelector: {}}"),
            "spec.allowedActions",
            "write for example",
        ),
        (
            "throttling without effect",
            throttle("minCPURatio: 100"),
            "spec.throttle.cpuThrottle.minCPURatio",
            "write for example minCPURatio: 10",
        ),
        (
            "two objects with the same name",
            object("AvoidanceAction", "{}") + &object("AvoidanceAction", "{eviction: {}}"),
            "metadata.name",
            "rename one, or remove it",
        ),
        (
            "no pod to act on",
            object("AvoidanceAction", "{eviction: {}}")
                + &rule(
                    "{name: cpu, actionName: bad, metricRule: {name: cpu_total_usage, value: 4000}}",
                ),
            "spec.rules[0].actionName",
            "add one with allowedActions: [bad]",
        ),
    ];
    let named_invalid = object("AvoidanceAction", "{coolDownSeconds: 0}")
        + &rule("{name: cpu, actionName: bad, metricRule: {name: cpu_total_usage, value: 4000}}");
    let mut cases: Vec<Case> = cases
        .map(|(name, text, path, part)| together(name, text, path, part))
        .into();
    cases.push(rejected(
        "invalid action",
        named_invalid,
        "spec.coolDownSeconds",
        "coolDownSeconds is 0",
    ));
    cases
}
