//! Generates docs/permissions.md from the rendered chart.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Permission, VERBS, objects, permissions, text, texts};

/// The chart's admission policies: name, restricted account, resources.
pub fn policies(rendered: &str) -> Vec<(String, String, String)> {
    let objects = objects(rendered);
    let policies = objects
        .iter()
        .filter(|(it, _)| it["kind"] == "ValidatingAdmissionPolicy");
    policies
        .map(|(policy, _)| {
            let condition = text(&policy["spec"]["matchConditions"][0]["expression"]);
            let account = condition.strip_prefix("request.userInfo.username == ");
            let account = account.and_then(|user| user.rsplit(':').next());
            let account = account.map_or_else(
                || "everyone except kubelets".to_owned(),
                |account| format!("`{}`", account.trim_end_matches('\'')),
            );
            let rules = &policy["spec"]["matchConstraints"]["resourceRules"];
            let resources = rules.as_array().into_iter().flatten();
            let resources = resources.flat_map(|rule| texts(&rule["resources"]));
            let resources: Vec<_> = resources.map(|name| format!("`{name}`")).collect();
            (
                text(&policy["metadata"]["name"]),
                account,
                resources.join(", "),
            )
        })
        .collect()
}

const INTRODUCTION: &str = "\
# Permissions

Generated from the chart by `make generate`: every permission that an installation in the namespace `plimsoll` grants, and why.
Anything else is denied: `tests/api/permissions.rs` verifies that on a real API server. Every permission is used: `make e2e-long` fails if one does not
appear in the audit log of its cluster.
`plimsoll-test` and `plimsoll-uninstall` exist only during `helm test` and `helm uninstall`; `plimsoll-test` also while Helm waits for the agents (`waitForAgents`), for which it
reads nodes, pods, events, DaemonSets and the namespace. With `placement.scheduler.enabled`, `plimsoll-scheduler` has Kubernetes' own roles `system:kube-scheduler`,
`system:volume-scheduler` and `extension-apiserver-authentication-reader`, and may get and update the Lease of its election. With `placement.polling.enabled`, `plimsoll-controller` may list and watch the EndpointSlices in the namespaces of the polled Services.
[security.md](security.md) explains the consequences.
";

const ADMISSION: &str = "
## Further restrictions by admission policies
RBAC cannot express \"only its own node\". ValidatingAdmissionPolicies restrict these accounts further, and fail closed. One of them lets only
kubelets (for pods of their node) and the users in the chart's `tokens.creators` create tokens of the two accounts; of Secrets it restricts only
those that Kubernetes fills with such a token.

| policy | restricted account | resources |
|---|---|---|
";

/// The text of docs/permissions.md.
pub fn document(rendered: &str) -> String {
    let mut by_actor: BTreeMap<String, Vec<Permission>> = BTreeMap::new();
    for permission in permissions(rendered) {
        let of_actor = by_actor.entry(permission.actor.clone()).or_default();
        of_actor.push(permission);
    }
    let mut document = INTRODUCTION.to_owned();
    for (actor, mut permissions) in by_actor {
        permissions.sort_by_key(|it| {
            (
                it.namespace.clone(),
                it.group.clone(),
                it.resource.clone(),
                it.names.clone(),
            )
        });
        document += &section(&actor, &permissions);
    }
    document += ADMISSION;
    for (policy, account, resources) in policies(rendered) {
        writeln!(document, "| `{policy}` | {account} | {resources} |").unwrap();
    }
    document
}

fn section(actor: &str, permissions: &[Permission]) -> String {
    let used = |verb: &&&str| {
        permissions
            .iter()
            .any(|it| it.verbs.iter().any(|v| v == **verb))
    };
    let verbs: Vec<_> = VERBS.iter().filter(used).collect();
    let known = |verb: &String| VERBS.contains(&verb.as_str());
    assert!(permissions.iter().all(|it| it.verbs.iter().all(known)));
    let heads = verbs
        .iter()
        .fold(String::new(), |heads, verb| heads + " " + verb + " |");
    let rules = "|:-:".repeat(verbs.len());
    let mut section = format!("\n## {actor}\n| in | what |{heads} why |\n|---|---{rules}|---|\n");
    for it in permissions {
        let scope = it.namespace.as_deref().unwrap_or("the cluster");
        let (plural, sub) = it.resource.split_once('/').unwrap_or((&it.resource, ""));
        let what = if it.group.is_empty() || it.resource.starts_with('/') {
            it.resource.clone()
        } else if sub.is_empty() {
            format!("{plural}.{}", it.group)
        } else {
            format!("{plural}.{}/{sub}", it.group)
        };
        let quoted: Vec<_> = it.names.iter().map(|name| format!(" `{name}`")).collect();
        let only = quoted.join(",");
        let cells: String = verbs
            .iter()
            .map(|verb| {
                if it.verbs.iter().any(|v| v == *verb) {
                    " ✓ |"
                } else {
                    " |"
                }
            })
            .collect();
        let why = &it.why;
        writeln!(section, "| {scope} | {what}{only} |{cells} {why} |").unwrap();
    }
    section
}
