//! What agents and controllers have to be allowed: all that docs/permissions.md says of them.

use std::fmt;

use serde_json::{Value, json};

use super::read::told;

/// Who has to be allowed something.
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

/// One thing to do.
#[derive(Clone, Debug)]
pub(super) struct Attributes {
    pub verb: &'static str,
    /// `resource.group/subresource`, or a path.
    what: &'static str,
    /// Empty: in all, or of no namespace.
    namespace: String,
    /// Empty: any.
    name: String,
}

impl Attributes {
    /// As a `SubjectAccessReview` has it.
    pub(super) fn spec(&self) -> Value {
        if self.what.starts_with('/') {
            return json!({"nonResourceAttributes": {"verb": self.verb, "path": self.what}});
        }
        let (what, subresource) = self.what.split_once('/').unwrap_or((self.what, ""));
        let (resource, group) = what.split_once('.').unwrap_or((what, ""));
        json!({"resourceAttributes": {
            "verb": self.verb, "group": group, "resource": resource, "subresource": subresource,
            "namespace": self.namespace, "name": self.name,
        }})
    }
}

/// All but the verb.
impl fmt::Display for Attributes {
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

/// Where, verbs, what; then, where there are any, the argument without which nobody needs it (`-`: needed always), and the
/// name of the one object (`=`: the one that the argument names).
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

/// What it has to be allowed, by what its workload is told; in its own namespace, and in that of the Leases.
pub(super) fn wanted(actor: Actor, workload: &Value, [own, leases]: [&str; 2]) -> Vec<Attributes> {
    let rows = match actor {
        Actor::Agent => AGENT,
        Actor::Controller => CONTROLLER,
    };
    let mut wanted = Vec::new();
    for row in rows.lines() {
        let mut words = row.split(' ');
        let mut word = || words.next().unwrap_or_default();
        let [place, verbs, what, argument, name] = [word(), word(), word(), word(), word()];
        let named = told(workload, argument).first().copied();
        if argument.starts_with("--") && named.is_none() {
            continue;
        }
        let namespace = match place {
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
        wanted.extend(verbs.split(',').map(|verb| Attributes {
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

    use super::*;

    /// What docs/permissions.md says that this account may do.
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
            let place = match row[0] {
                "the cluster" => String::new(),
                namespace => format!(" in {namespace}"),
            };
            let ticked = head.iter().zip(&row).filter(|(_, cell)| **cell == "✓");
            found.extend(ticked.map(|(verb, _)| format!("{verb} {what}{place}")));
        }
        found
    }

    fn asked(actor: Actor, arguments: &[&str]) -> BTreeSet<String> {
        let workload =
            json!({"spec": {"template": {"spec": {"containers": [{"args": arguments}]}}}});
        let wanted = wanted(actor, &workload, ["plimsoll", "plimsoll-node-lease"]);
        let words = wanted.iter().map(|it| format!("{} {it}", it.verb));
        words.collect()
    }

    #[test]
    fn all_that_the_chart_gives_is_asked_for_and_nothing_else() {
        let agent = ["agent", "--report-service=plimsoll-report"];
        assert_eq!(asked(Actor::Agent, &agent), documented("plimsoll-agent\n"));
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
        assert_eq!(asked(Actor::Controller, &controller), documented);
    }

    #[test]
    fn what_is_not_installed_needs_nothing() {
        assert!(
            !asked(Actor::Agent, &["agent"])
                .contains("list endpointslices.discovery.k8s.io in plimsoll")
        );
        let controller = asked(Actor::Controller, &["controller", "--lease-name=it"]);
        assert!(controller.contains("update leases.coordination.k8s.io it in plimsoll"));
        for gone in ["secrets", "tokenreviews", "pods", "configmaps"] {
            let asks = controller.iter().any(|it| it.contains(&format!(" {gone}")));
            assert!(!asks, "{gone}: {controller:?}");
        }
    }

    #[test]
    fn a_review_names_group_and_subresource_and_paths_are_none_of_resources() {
        let of = |what| Attributes {
            verb: "get",
            what,
            namespace: String::new(),
            name: String::new(),
        };
        let resource =
            of("nodewatermarks.plimsoll.dev/status").spec()["resourceAttributes"].clone();
        assert_eq!(resource["group"], "plimsoll.dev");
        assert_eq!(resource["resource"], "nodewatermarks");
        assert_eq!(resource["subresource"], "status");
        let path = of("/openid/v1/jwks").spec();
        assert_eq!(path["nonResourceAttributes"]["path"], "/openid/v1/jwks");
    }
}
