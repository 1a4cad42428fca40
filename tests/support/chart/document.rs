//! What the chart permits, as a document.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{Permission, VERBS, objects, permissions, text, texts};

/// What admission policies hold writes to: the policy, whose writes, and of what.
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
                || "everyone's but kubelets'".to_owned(),
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
# Who may do what

Written from the chart by `make generate`: every permission that an installation in the namespace `plimsoll` gives, and why.
Whatever is not here is refused: `tests/api_permissions.rs` tries all of it on a real API server. Whatever is here is used: `make e2e-long` fails where
the audit log of its cluster lacks one.
`plimsoll-test` and `plimsoll-uninstall` are there only while `helm test` and `helm uninstall` run; `plimsoll-test` also while Helm waits for the agents (`waitForAgents`), for which it
reads nodes, pods, events, DaemonSets and the namespace.
[security.md](security.md) says what follows from it.
";

const ADMISSION: &str = "
## Held to less by admission policies
Roles know no \"its own node\". A ValidatingAdmissionPolicy refuses what goes beyond what stands above, to this account alone, and
refuses too when it can't be evaluated. Tokens of the two accounts it refuses to everyone but kubelets, who may create them for pods of their
node, and those whom the chart's `tokens.creators` names: of Secrets only those that Kubernetes fills with such a token.

| policy | whose writes | of |
|---|---|---|
";

/// The matrix as a document.
pub fn document(rendered: &str) -> String {
    let mut by_actor: BTreeMap<String, Vec<Permission>> = BTreeMap::new();
    for permission in permissions(rendered) {
        let of_actor = by_actor.entry(permission.actor.clone()).or_default();
        of_actor.push(permission);
    }
    let mut document = INTRODUCTION.to_owned();
    for (actor, mut permissions) in by_actor {
        permissions.sort_by_key(|it| {
            let place = it.namespace.clone();
            (
                place,
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
        let place = it.namespace.as_deref().unwrap_or("the cluster");
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
        let marks: String = verbs
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
        writeln!(section, "| {place} | {what}{only} |{marks} {why} |").unwrap();
    }
    section
}
