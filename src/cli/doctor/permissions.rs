//! The permissions that agents and controllers need, as in docs/permissions.md.

use std::fmt;

use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};

use super::snapshot::{ClusterSnapshot, InstalledWorkload, Read, accounts, user};
use crate::cli::progress::ProgressLine;
use crate::cluster::client::call;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Actor {
    Agent,
    Controller,
}

impl Actor {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Agent => "agents",
            Self::Controller => "the controller",
        }
    }
}

/// A permission that an actor needs, and whether it has it.
#[derive(Clone, Debug)]
pub(super) struct Review {
    pub actor: Actor,
    /// `system:serviceaccount:namespace:name`
    pub user: String,
    pub verb: &'static str,
    /// `nodes/status`
    pub what: String,
    pub allowed: Read<bool>,
}

/// Reviews the permissions of all agents and controllers.
pub(super) async fn review_all(
    client: &Client,
    snapshot: &ClusterSnapshot,
    progress: &ProgressLine,
) -> Vec<Review> {
    let leases = &snapshot.lease_namespace;
    let agents = needs(Actor::Agent, &snapshot.daemon_sets, leases);
    let controllers = needs(Actor::Controller, &snapshot.deployments, leases);
    let reviews: Api<SubjectAccessReview> = Api::all(client.clone());
    let needs = [agents, controllers].concat();
    progress.next("reviewing permissions", Some(needs.len()));
    let mut found = Vec::new();
    for (actor, namespace, user, permission) in needs {
        let groups = [
            "system:serviceaccounts",
            &format!("system:serviceaccounts:{namespace}"),
            "system:authenticated",
        ];
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.clone()),
                groups: Some(groups.map(str::to_owned).to_vec()),
                ..permission.spec()
            },
            ..SubjectAccessReview::default()
        };
        let answer = call(reviews.create(&PostParams::default(), &review)).await;
        progress.advance();
        found.push(Review {
            actor,
            user,
            verb: permission.verb,
            what: permission.to_string(),
            allowed: answer
                .map(|it| it.status.is_some_and(|status| status.allowed))
                .map_err(Into::into),
        });
    }
    found
}

/// What the accounts of these workloads need: actor, namespace, user and permission.
fn needs<W: InstalledWorkload>(
    actor: Actor,
    workloads: &Read<Vec<W>>,
    leases: &str,
) -> Vec<(Actor, String, String, Permission)> {
    let mut needs = Vec::new();
    for ((namespace, account), workload) in accounts(workloads) {
        let user = user(&namespace, &account);
        let wanted = wanted(actor, workload, [&namespace, leases]).into_iter();
        needs.extend(wanted.map(|it| (actor, namespace.clone(), user.clone(), it)));
    }
    needs
}

#[derive(Clone, Debug)]
pub(super) struct Permission {
    verb: &'static str,
    /// `resource.group/subresource`, or a path.
    what: &'static str,
    /// Empty for cluster-wide permissions.
    namespace: String,
    /// Empty for any name.
    name: String,
}

impl Permission {
    fn spec(&self) -> SubjectAccessReviewSpec {
        let some = |text: &str| Some(text.to_owned());
        if self.what.starts_with('/') {
            return SubjectAccessReviewSpec {
                non_resource_attributes: Some(NonResourceAttributes {
                    verb: some(self.verb),
                    path: some(self.what),
                }),
                ..SubjectAccessReviewSpec::default()
            };
        }
        let (what, subresource) = self.what.split_once('/').unwrap_or((self.what, ""));
        let (resource, group) = what.split_once('.').unwrap_or((what, ""));
        SubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                verb: some(self.verb),
                group: some(group),
                resource: some(resource),
                subresource: some(subresource),
                namespace: some(&self.namespace),
                name: some(&self.name),
                ..ResourceAttributes::default()
            }),
            ..SubjectAccessReviewSpec::default()
        }
    }
}

/// Everything but the verb.
impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)?;
        for (sign, part) in [(" ", &self.name), (" in ", &self.namespace)] {
            if !part.is_empty() {
                write!(f, "{sign}{part}")?;
            }
        }
        Ok(())
    }
}

/// Scope, verbs, resource; optionally the argument without which it is not needed (`-`: always needed), and the name of the
/// object (`=`: the value of the argument).
const AGENT: &str = "\
cluster get,list,watch,patch nodes
cluster patch nodes/status
cluster get,list,watch pods
cluster create nodemetrics.metrics.plimsoll.dev/evictions
cluster create,patch events
cluster get,list,watch nodewatermarks.plimsoll.dev
cluster patch nodewatermarks.plimsoll.dev/status
own get daemonsets.apps
own list,watch endpointslices.discovery.k8s.io --report-service=
leases list,watch configmaps - plimsoll-stop
leases get,create,update leases.coordination.k8s.io";

const CONTROLLER: &str = "\
cluster get /openapi/v3/apis/*
cluster get /.well-known/openid-configuration --report-listen=
cluster get /openid/v1/jwks --report-listen=
cluster get,list,watch,patch nodes
cluster patch nodes/status
cluster get pods --report-listen=
cluster create pods/eviction --report-listen=
cluster get,patch apiservices.apiregistration.k8s.io --metrics-api-listen= v1alpha1.metrics.plimsoll.dev
cluster create tokenreviews.authentication.k8s.io --report-listen=
cluster create subjectaccessreviews.authorization.k8s.io --metrics-api-listen=
cluster list,watch avoidanceactions.ensurance.crane.io
cluster list,watch nodeqoss.ensurance.crane.io
cluster list,watch podqoss.ensurance.crane.io
cluster patch avoidanceactions.ensurance.crane.io/status
cluster patch nodeqoss.ensurance.crane.io/status
cluster patch podqoss.ensurance.crane.io/status
cluster create,patch events
cluster list,watch,create,patch,delete nodewatermarks.plimsoll.dev
kube-system list,watch configmaps --metrics-api-listen= extension-apiserver-authentication
own get,list,watch,create,patch configmaps --eviction-record= =
own get,create,patch configmaps --report-ca-configmap= =
own get,create,patch,update secrets --metrics-api-secret= =
own create leases.coordination.k8s.io
own get,update leases.coordination.k8s.io --lease-name= =
leases get configmaps --report-listen= plimsoll-stop
leases get,list,watch leases.coordination.k8s.io";

/// The permissions that a workload with these arguments needs, in its own namespace and in that of the Leases.
fn wanted(
    actor: Actor,
    workload: &impl InstalledWorkload,
    [own, leases]: [&str; 2],
) -> Vec<Permission> {
    let rows = match actor {
        Actor::Agent => AGENT,
        Actor::Controller => CONTROLLER,
    };
    let mut wanted = Vec::new();
    for row in rows.lines() {
        let mut words = row.split(' ');
        let mut word = || words.next().unwrap_or_default();
        let [scope, verbs, what, argument, name] = [word(), word(), word(), word(), word()];
        let named = workload.argument(argument).first().copied();
        if argument.starts_with("--") && named.is_none() {
            continue;
        }
        let namespace = match scope {
            "cluster" => "",
            "own" => own,
            "leases" => leases,
            other => other,
        };
        let name = if name == "=" {
            named.unwrap_or_default()
        } else {
            name
        };
        wanted.extend(verbs.split(',').map(|verb| Permission {
            verb,
            what,
            namespace: namespace.to_owned(),
            name: name.to_owned(),
        }));
    }
    wanted
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use k8s_openapi::api::apps::v1::Deployment;
    use serde_json::json;

    use super::*;

    /// The permissions of this account in docs/permissions.md.
    fn documented(account: &str) -> BTreeSet<String> {
        let text = include_str!("../../../docs/permissions.md");
        let section = text.split("\n## ").find(|it| it.starts_with(account));
        let rows = section.expect("a section").lines();
        let rows = rows.filter_map(|line| line.strip_prefix("| "));
        let mut rows = rows.map(|line| line.split('|').map(str::trim).collect::<Vec<_>>());
        let head = rows.next().expect("verbs");
        let mut found = BTreeSet::new();
        for row in rows {
            let what = row[1].replace('`', "");
            let scope = match row[0] {
                "the cluster" => String::new(),
                namespace => format!(" in {namespace}"),
            };
            let ticked = head.iter().zip(&row).filter(|(_, cell)| **cell == "✓");
            found.extend(ticked.map(|(verb, _)| format!("{verb} {what}{scope}")));
        }
        found
    }

    fn reviewed(actor: Actor, arguments: &[&str]) -> BTreeSet<String> {
        let workload =
            json!({"spec": {"template": {"spec": {"containers": [{"args": arguments}]}}}});
        let workload: Deployment = serde_json::from_value(workload).expect("a Deployment");
        let wanted = wanted(actor, &workload, ["plimsoll", "plimsoll-node-lease"]);
        let words = wanted.iter().map(|it| format!("{} {it}", it.verb));
        words.collect()
    }

    #[test]
    fn exactly_the_documented_permissions_are_reviewed() {
        let agent = ["agent", "--report-service=plimsoll-report"];
        assert_eq!(
            reviewed(Actor::Agent, &agent),
            documented("plimsoll-agent\n")
        );
        let controller = [
            "controller",
            "--lease-name=plimsoll-controller",
            "--metrics-api-listen=[::]:8443",
            "--report-listen=[::]:8444",
            "--metrics-api-secret=plimsoll-metrics-ca",
            "--report-ca-configmap=plimsoll-report-ca",
            "--eviction-record=plimsoll-evictions",
        ];
        let documented = documented("plimsoll-controller\n");
        assert_eq!(reviewed(Actor::Controller, &controller), documented);
    }

    #[test]
    fn components_that_are_not_installed_need_nothing() {
        assert!(
            !reviewed(Actor::Agent, &["agent"])
                .contains("list endpointslices.discovery.k8s.io in plimsoll")
        );
        let controller = reviewed(Actor::Controller, &["controller", "--lease-name=it"]);
        assert!(controller.contains("update leases.coordination.k8s.io it in plimsoll"));
        for gone in ["secrets", "tokenreviews", "pods", "configmaps"] {
            let needs = controller.iter().any(|it| it.contains(&format!(" {gone}")));
            assert!(!needs, "{gone}: {controller:?}");
        }
    }

    #[test]
    fn a_review_has_group_and_subresource_or_a_path() {
        let of = |what| Permission {
            verb: "get",
            what,
            namespace: String::new(),
            name: String::new(),
        };
        let resource = of("nodewatermarks.plimsoll.dev/status").spec();
        let resource = resource.resource_attributes.expect("a resource");
        assert_eq!(resource.group.as_deref(), Some("plimsoll.dev"));
        assert_eq!(resource.resource.as_deref(), Some("nodewatermarks"));
        assert_eq!(resource.subresource.as_deref(), Some("status"));
        let path = of("/openid/v1/jwks").spec().non_resource_attributes;
        let path = path.expect("a path").path;
        assert_eq!(path.as_deref(), Some("/openid/v1/jwks"));
    }
}
