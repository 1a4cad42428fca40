//! Mistakes within actions and pod policies.
#![allow(clippy::too_many_lines, reason = "tables")]

use super::{Case, object, rejected, scope, throttle};

pub fn actions() -> Vec<Case> {
    let step = "spec.throttle.cpuThrottle.stepCPURatio";
    let floor = "spec.throttle.cpuThrottle.minCPURatio";
    let cases = [
        (
            "step 0",
            throttle("stepCPURatio: 0"),
            step,
            "must be from 1 to 100",
        ),
        (
            "step above 100",
            throttle("stepCPURatio: 101"),
            step,
            "write for example 10",
        ),
        (
            "floor below 0",
            throttle("minCPURatio: -1"),
            floor,
            "must be from 0 to 100",
        ),
        (
            "floor above 100",
            throttle("minCPURatio: 101"),
            floor,
            "is 101",
        ),
        (
            "empty throttle",
            object("AvoidanceAction", "{throttle: {}}"),
            "spec.throttle",
            "write cpuThrottle: {minCPURatio: 10",
        ),
        (
            "throttle with forceGC false",
            object(
                "AvoidanceAction",
                "{throttle: {memoryThrottle: {forceGC: false}}}",
            ),
            "spec.throttle",
            "or remove throttle",
        ),
        (
            "cool-down 0",
            object("AvoidanceAction", "{coolDownSeconds: 0}"),
            "spec.coolDownSeconds",
            "write for example 300",
        ),
        (
            "negative grace",
            object(
                "AvoidanceAction",
                "{eviction: {terminationGracePeriodSeconds: -1}}",
            ),
            "spec.eviction.terminationGracePeriodSeconds",
            "must be from 0",
        ),
        (
            "no pods per round",
            object("AvoidanceAction", "{eviction: {maxPodsPerRound: 0}}"),
            "spec.eviction.maxPodsPerRound",
            "must be from 1",
        ),
        (
            "unknown effect",
            object(
                "AvoidanceAction",
                "{disableScheduling: {effect: NoExecute}}",
            ),
            "spec.disableScheduling.effect",
            "write one of NoSchedule, PreferNoSchedule",
        ),
        (
            "description too long",
            object(
                "AvoidanceAction",
                &format!("{{description: {}}}", "x".repeat(1025)),
            ),
            "spec.description",
            "may have at most 1024",
        ),
        (
            "description that is a number",
            object("AvoidanceAction", "{description: 5}"),
            "spec.description",
            "put it in quotes: \"5\"",
        ),
        (
            "field of another kind",
            object("AvoidanceAction", "{rules: []}"),
            "spec.rules",
            "is not a field of spec",
        ),
    ];
    cases
        .map(|(name, text, path, part)| rejected(name, text, path, part))
        .into()
}

pub fn pods() -> Vec<Case> {
    let values = "spec.scopeSelector.matchExpressions[0].values";
    let cases = [
        ("unknown scope", scope("scopeName: Node, operator: Exists"), "spec.scopeSelector.matchExpressions[0].scopeName", "write one of QOSClass, Priority, Namespace"),
        ("unknown operator", scope("scopeName: Namespace, operator: Equals, values: [a]"), "spec.scopeSelector.matchExpressions[0].operator", "write one of In, NotIn"),
        ("In without values", scope("scopeName: Namespace, operator: In"), values, "need at least one value"),
        ("Exists with values", scope("scopeName: Namespace, operator: Exists, values: [a]"), values, "remove it"),
        ("unknown class", scope("scopeName: QOSClass, operator: In, values: [besteffort]"), values, "the classes are BestEffort, Burstable and Guaranteed, not \"besteffort\"; did you mean BestEffort?"),
        ("priority that is not a number", scope("scopeName: Priority, operator: In, values: [low]"), values, "is not a priority"),
        ("priority range in reverse order", scope("scopeName: Priority, operator: In, values: [\"-1--100\"]"), values, "write the smaller one first"),
        ("priority that is not a string", scope("scopeName: Priority, operator: In, values: [0]"), "spec.scopeSelector.matchExpressions[0].values[0]", "put it in quotes: \"0\""),
        ("invalid namespace", scope("scopeName: Namespace, operator: NotIn, values: [Kube_System]"), values, "not a namespace name"),
        ("invalid label key", object("PodQOS", "{allowedActions: [throttle], labelSelector: {matchLabels: {\"a b\": c}}}"), "spec.labelSelector.matchLabels", "not a valid label key"),
        ("label value that is a boolean", object("PodQOS", "{allowedActions: [throttle], labelSelector: {matchLabels: {preemptible_job: true}}}"), "spec.labelSelector.matchLabels.preemptible_job", "put it in quotes: \"true\""),
        ("invalid object name", "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: PodQOS\nmetadata: {name: All_Pods}\nspec: {allowedActions: [a], labelSelector: {}}\n".to_owned(), "metadata.name", "write lower-case letters"),
        ("no name", "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: PodQOS\nmetadata: {}\nspec: {allowedActions: [a], labelSelector: {}}\n".to_owned(), "metadata.name", "name is missing"),
        ("unknown field of metadata", "---\napiVersion: ensurance.crane.io/v1alpha1\nkind: PodQOS\nmetadata: {name: bad, lables: {a: b}}\nspec: {allowedActions: [a], labelSelector: {}}\n".to_owned(), "metadata.lables", "did you mean labels?"),
    ];
    cases
        .map(|(name, text, path, part)| rejected(name, text, path, part))
        .into()
}
