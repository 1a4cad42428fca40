//! The permissions that the user of `doctor` lacks, as objects to apply. Pure.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::finding::DoctorFinding;

/// What the names of roles and bindings begin with. The rest depends on user and rules: what was granted before must not be replaced,
/// since some permissions are only missed once others are there.
const NAME: &str = "plimsoll-doctor";

/// What API servers say of a refused request: `User "ann" cannot list resource "nodes" in API group "" at the cluster scope`,
/// or `in the namespace "shop"`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Refusal<'a> {
    user: &'a str,
    /// Empty for the whole cluster.
    namespace: &'a str,
    group: &'a str,
    resource: &'a str,
    verb: &'a str,
}

/// Rules by group and resource: the verbs.
type Rules<'a> = BTreeMap<(&'a str, &'a str), BTreeSet<&'a str>>;

/// Roles with the permissions that were refused, and their bindings to the users; none: nothing was.
pub(super) fn missing(findings: &[DoctorFinding]) -> Vec<Value> {
    let refusals: BTreeSet<Refusal<'_>> = findings
        .iter()
        .flat_map(|finding| refusals(&finding.what))
        .collect();
    let mut by_place: BTreeMap<_, Rules<'_>> = BTreeMap::new();
    for refusal in &refusals {
        let rules = by_place.entry((refusal.user, refusal.namespace));
        let verbs = rules.or_default().entry((refusal.group, refusal.resource));
        verbs.or_default().insert(refusal.verb);
    }
    let objects = by_place.iter().flat_map(|((user, namespace), rules)| {
        let (kind, metadata) = match *namespace {
            "" => ("ClusterRole", json!({})),
            namespace => ("Role", json!({"namespace": namespace})),
        };
        let mut role = role(kind, &metadata, rules);
        let digest = crc32fast::hash(format!("{user} {}", role["rules"]).as_bytes());
        role["metadata"]["name"] = format!("{NAME}-{digest:08x}").into();
        let binding = binding(&role, user);
        [role, binding]
    });
    objects.collect()
}

fn refusals(text: &str) -> impl Iterator<Item = Refusal<'_>> {
    let starts = text.match_indices("User \"");
    starts.filter_map(|(at, _)| Refusal::parse(&text[at..]))
}

impl<'a> Refusal<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let (user, rest) = quoted(text.strip_prefix("User ")?)?;
        let (verb, rest) = rest.strip_prefix(" cannot ")?.split_once(" resource ")?;
        let (resource, rest) = quoted(rest)?;
        let (group, rest) = quoted(rest.strip_prefix(" in API group ")?)?;
        let namespace = match rest.strip_prefix(" in the namespace ") {
            Some(rest) => quoted(rest)?.0,
            None => rest.strip_prefix(" at the cluster scope").map(|_| "")?,
        };
        Some(Self {
            user,
            namespace,
            group,
            resource,
            verb,
        })
    }
}

/// `"a" rest` as `a` and ` rest`.
fn quoted(text: &str) -> Option<(&str, &str)> {
    text.strip_prefix('"')?.split_once('"')
}

fn role(kind: &str, metadata: &Value, rules: &Rules<'_>) -> Value {
    let rule = |((group, resource), verbs): (&(&str, &str), &BTreeSet<&str>)| json!({"apiGroups": [group], "resources": [resource], "verbs": verbs});
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "rules": rules.iter().map(rule).collect::<Vec<_>>(),
    })
}

/// The binding of a role, with its name.
fn binding(role: &Value, user: &str) -> Value {
    let account = user.strip_prefix("system:serviceaccount:");
    let subject = match account.and_then(|account| account.split_once(':')) {
        Some((namespace, name)) => {
            json!({"kind": "ServiceAccount", "name": name, "namespace": namespace})
        }
        None => json!({"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}),
    };
    let (kind, metadata) = (role["kind"].as_str().unwrap_or_default(), &role["metadata"]);
    json!({
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": format!("{kind}Binding"),
        "metadata": metadata,
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": metadata["name"]},
        "subjects": [subject],
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::finding;
    use super::*;

    fn refused(verb: &str, resource: &str, group: &str, place: &str) -> DoctorFinding {
        let what = format!(
            "could not be read: {resource} is forbidden: User \"ann\" cannot {verb} resource \"{resource}\" in API group \
             \"{group}\" {place}"
        );
        finding("x", what, "y")
    }

    #[test]
    fn what_was_refused_is_a_role_with_its_binding() {
        let cluster = "at the cluster scope";
        let found = [
            refused("list", "nodes", "", cluster),
            refused("get", "nodes", "", cluster),
            refused("list", "daemonsets", "apps", cluster),
            refused(
                "get",
                "leases",
                "coordination.k8s.io",
                "in the namespace \"plimsoll\"",
            ),
            finding("x", "the agent is not ready", "y"),
        ];
        let objects = missing(&found);
        let kinds: Vec<&str> = objects
            .iter()
            .filter_map(|it| it["kind"].as_str())
            .collect();
        assert_eq!(
            kinds,
            ["ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"]
        );
        assert_eq!(
            objects[0]["rules"],
            json!([
                {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list"]},
                {"apiGroups": ["apps"], "resources": ["daemonsets"], "verbs": ["list"]},
            ])
        );
        assert_eq!(objects[1]["subjects"][0]["name"], "ann");
        assert_eq!(objects[3]["metadata"]["namespace"], "plimsoll");
        assert_eq!(
            objects[1]["roleRef"]["name"],
            objects[0]["metadata"]["name"]
        );
        assert_eq!(missing(&found[4..]), [Value::Null; 0]);
    }

    #[test]
    fn what_was_granted_before_is_not_replaced() {
        let name = |finding: DoctorFinding| missing(&[finding])[0]["metadata"]["name"].clone();
        let cluster = "at the cluster scope";
        let nodes = name(refused("list", "nodes", "", cluster));
        assert_eq!(nodes, name(refused("list", "nodes", "", cluster)));
        assert_ne!(nodes, name(refused("list", "pods", "", cluster)));
    }

    #[test]
    fn a_service_account_is_bound_as_one() {
        let what = "User \"system:serviceaccount:ci:doctor\" cannot list resource \"pods\" in API group \"\" at the cluster scope";
        let objects = missing(&[finding("x", what, "y")]);
        let subject = json!({"kind": "ServiceAccount", "name": "doctor", "namespace": "ci"});
        assert_eq!(objects[1]["subjects"][0], subject);
    }
}
