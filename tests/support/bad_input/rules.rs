//! Mistakes in a single rule.
#![allow(clippy::too_many_lines, reason = "tables")]

use super::{Case, VALUE, object, rejected, rule, value, with};

const HOURS: &str = "spec.rules[0].activeDuring";
const METRIC: &str = "spec.rules[0].metricRule";

pub fn rules() -> Vec<Case> {
    let thresholds = [
        (
            "avoidanceThreshold 0",
            with("avoidanceThreshold: 0"),
            "spec.rules[0].avoidanceThreshold",
            "must be from 1 to 2147483647",
        ),
        (
            "avoidanceThreshold 2^31",
            with("avoidanceThreshold: 2147483648"),
            "spec.rules[0].avoidanceThreshold",
            "is 2147483648",
        ),
        (
            "restoreThreshold 0",
            with("restoreThreshold: 0"),
            "spec.rules[0].restoreThreshold",
            "write for example 1",
        ),
        (
            "restoredThreshold 2^31",
            with("restoredThreshold: 2147483648"),
            "spec.rules[0].restoredThreshold",
            "must be from 1",
        ),
        (
            "thresholds that differ",
            with("restoreThreshold: 1, restoredThreshold: 2"),
            "spec.rules[0].restoredThreshold",
            "write only restoreThreshold",
        ),
        (
            "threshold as a string",
            with("avoidanceThreshold: \"2\""),
            "spec.rules[0].avoidanceThreshold",
            "remove the quotes: 2",
        ),
        (
            "threshold with a fraction",
            with("avoidanceThreshold: 1.5"),
            "spec.rules[0].avoidanceThreshold",
            "must be an integer",
        ),
        (
            "unknown strategy",
            with("strategy: Dry"),
            "spec.rules[0].strategy",
            "write one of Enforce, Preview",
        ),
        (
            "unknown field",
            with("restoreTreshold: 2"),
            "spec.rules[0].restoreTreshold",
            "did you mean restoreThreshold?",
        ),
        (
            "hours without a time zone",
            with("activeDuring: [\"22:00-06:00\"]"),
            HOURS,
            "write for example \"22:00-06:00 Europe/Berlin\"",
        ),
        (
            "hours of the clock with 12 hours",
            with("activeDuring: [10pm-6am UTC]"),
            HOURS,
            "is not a span of hours with a time zone",
        ),
        (
            "hours that start at 24:00",
            with("activeDuring: [\"24:00-06:00 UTC\"]"),
            HOURS,
            "is not a span of hours with a time zone",
        ),
        (
            "hours on a day that does not exist",
            with("activeDuring: [Monday 22:00-06:00 UTC]"),
            HOURS,
            "Mon-Fri 08:00-18:00 UTC",
        ),
        (
            "hours with the rules of a time zone",
            with("activeDuring: [\"22:00-06:00 CET-1CEST,M3.5.0,M10.5.0/3\"]"),
            HOURS,
            "is not a span of hours with a time zone",
        ),
        (
            "hours that end when they start",
            with("activeDuring: [\"08:00-18:00 UTC\", \"22:00-22:00 UTC\"]"),
            HOURS,
            "write 00:00-24:00 for the whole day",
        ),
        (
            "no hours",
            with("activeDuring: []"),
            HOURS,
            "needs at least 1",
        ),
        (
            "hours as a string",
            with("activeDuring: 22:00-06:00 UTC"),
            HOURS,
            "must be a list",
        ),
        (
            "too many hours",
            with(&format!(
                "activeDuring: [{}]",
                "\"22:00-06:00 UTC\", ".repeat(17)
            )),
            HOURS,
            "may have at most 16",
        ),
        (
            "restoreValue above value",
            with("restoreValue: 4001"),
            "spec.rules[0].restoreValue",
            "write a value at or below it",
        ),
        (
            "invalid restoreValue",
            with("restoreValue: low"),
            "spec.rules[0].restoreValue",
            "write for example 3000",
        ),
        (
            "negative restoreValue",
            with("restoreValue: -1"),
            "spec.rules[0].restoreValue",
            "0 or more",
        ),
    ];
    let rule_cases = [
        (
            "no metricRule",
            rule("{name: cpu, actionName: good-action}"),
            METRIC,
            "write metricRule: {name: \"...\", value: 4000}",
        ),
        (
            "empty metricRule",
            rule("{name: cpu, actionName: good-action, metricRule: ~}"),
            METRIC,
            "metricRule is missing",
        ),
        (
            "no value",
            rule("{name: cpu, actionName: good-action, metricRule: {name: cpu_total_usage}}"),
            VALUE,
            "write value: 4000",
        ),
        (
            "no actionName",
            rule("{name: cpu, metricRule: {name: cpu_total_usage, value: 1}}"),
            "spec.rules[0].actionName",
            "actionName is missing",
        ),
        (
            "metric name with spaces",
            rule(
                "{name: cpu, actionName: good-action, metricRule: {name: cpu usage, value: 4000}}",
            ),
            "spec.rules[0].metricRule.name",
            "write for example name: cpu_total_usage",
        ),
        (
            "rule name in capitals",
            rule(
                "{name: CPU, actionName: good-action, metricRule: {name: cpu_total_usage, value: 4000}}",
            ),
            "spec.rules[0].name",
            "write lower-case letters",
        ),
        (
            "two rules with the same name",
            rule(
                "{name: other, actionName: good-action, metricRule: {name: cpu_total_usage, value: 4000}}",
            ),
            "spec.rules[1]",
            "give each a unique name",
        ),
        (
            "selector without values",
            rule(
                "{name: cpu, actionName: good-action, metricRule: {name: disk_utilization, value: 90, selector: {matchExpressions: [{key: device, operator: In}]}}}",
            ),
            "spec.rules[0].metricRule.selector.matchExpressions[0].values",
            "need at least one value",
        ),
        (
            "unknown selector operator",
            rule(
                "{name: cpu, actionName: good-action, metricRule: {name: disk_utilization, value: 90, selector: {matchExpressions: [{key: device, operator: Is}]}}}",
            ),
            "spec.rules[0].metricRule.selector.matchExpressions[0].operator",
            "write one of In, NotIn, Exists, DoesNotExist",
        ),
        (
            "no rules",
            object("NodeQOS", "{rules: []}"),
            "spec.rules",
            "needs at least 1",
        ),
        (
            "rules missing",
            object("NodeQOS", "{}"),
            "spec.rules",
            "rules is missing",
        ),
        (
            "rules as a map",
            object("NodeQOS", "{rules: {name: a}}"),
            "spec.rules",
            "must be a list",
        ),
        (
            "spec missing",
            "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: NodeQOS\nmetadata: {name: bad}\n"
                .to_owned(),
            "spec",
            "spec is missing",
        ),
        (
            "invalid label value in the node selector",
            object(
                "NodeQOS",
                "{selector: {matchLabels: {pool: a b}}, rules: [{name: a, actionName: b, metricRule: {name: c, value: 1}}]}",
            ),
            "spec.selector.matchLabels",
            "write at most 63",
        ),
        (
            "huge selector",
            object(
                "NodeQOS",
                &format!(
                    "{{selector: {{matchExpressions: [{{key: a, operator: In, values: [{}]}}]}}, rules: []}}",
                    "x, ".repeat(2000)
                ),
            ),
            "spec.selector.matchExpressions[0].values",
            "may have at most 64",
        ),
        (
            "probe with a named port",
            object(
                "NodeQOS",
                "{nodeQualityProbe: {httpGet: {port: metrics}}, rules: [{name: a, actionName: b, metricRule: {name: c, value: 1}}]}",
            ),
            "spec.nodeQualityProbe.httpGet.port",
            "from 1 to 65535",
        ),
        (
            "probe with a URL as host",
            object(
                "NodeQOS",
                "{nodeQualityProbe: {httpGet: {host: \"http://a/\", port: 80}}, rules: [{name: a, actionName: b, metricRule: {name: c, value: 1}}]}",
            ),
            "spec.nodeQualityProbe.httpGet.host",
            "without scheme",
        ),
    ];
    let all = thresholds.into_iter().chain(rule_cases);
    all.map(|(name, text, path, part)| rejected(name, text, path, part))
        .collect()
}

pub fn quantities() -> Vec<Case> {
    let quantity = "write for example 4000";
    let mut cases = vec![
        rejected(
            "value .nan",
            value(".nan"),
            "spec.rules[0].metricRule.value",
            "write a number",
        ),
        rejected(
            "value .inf",
            value("-.inf"),
            "spec.rules[0].metricRule.value",
            "not a finite number",
        ),
        rejected(
            "bare fraction",
            value("0.5"),
            VALUE,
            "write it as a string: \"0.5\"",
        ),
        rejected(
            "bare fraction above 1",
            value("80.25"),
            VALUE,
            "write it as a string: \"80.25\"",
        ),
        rejected(
            "value true",
            value("yes"),
            VALUE,
            "must be an integer or a string",
        ),
        rejected("value as a list", value("[1]"), VALUE, "is a list"),
        rejected(
            "value as a percentage",
            value("80%"),
            VALUE,
            "not \"80%\"; for a percentage write name: cpu_total_utilization and value: 80",
        ),
        rejected(
            "very long value",
            value(&format!("\"{}\"", "9".repeat(100))),
            VALUE,
            "may have at most 64",
        ),
    ];
    for (name, text) in [
        ("value NaN", "NaN"),
        ("value Infinity", "\"+Inf\""),
        ("negative value", "-4000"),
        ("value 0", "0"),
        ("value 0.0", "\"0.0\""),
        ("unknown suffix", "4000mc"),
        ("two decimal points", "\"1.2.3\""),
        ("empty value", "\"\""),
    ] {
        cases.push(rejected(name, value(text), VALUE, quantity));
    }
    cases
}
