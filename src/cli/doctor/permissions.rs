//! What agents and controllers have to be allowed to be of use.

use std::fmt;

use serde_json::{Value, json};

use crate::crd::emergency_stop::OBJECT;

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
#[derive(Clone, Copy, Debug)]
pub(super) struct Attributes<'a> {
    verb: &'static str,
    group: &'static str,
    resource: &'static str,
    subresource: &'static str,
    /// Empty: in all, or of no namespace.
    namespace: &'a str,
    /// Empty: any.
    name: &'static str,
}

impl Attributes<'_> {
    /// As a `SubjectAccessReview` has it.
    pub(super) fn body(&self) -> Value {
        json!({
            "verb": self.verb, "group": self.group, "resource": self.resource, "subresource": self.subresource,
            "namespace": self.namespace, "name": self.name,
        })
    }
}

impl fmt::Display for Attributes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        for (sign, part) in [("/", self.subresource), (".", self.group), (" ", self.name)] {
            if !part.is_empty() {
                write!(f, "{sign}{part}")?;
            }
        }
        match self.namespace {
            "" => Ok(()),
            namespace => write!(f, " in {namespace}"),
        }
    }
}

const POLICIES: &str = "ensurance.crane.io";
const OURS: &str = "plimsoll.dev";
/// Where events of what has no namespace are.
const OF_NODES: &str = "default";
const EVENTS: &str = "events.k8s.io";
const LEASES: &str = "coordination.k8s.io";

/// Of a cluster: verb, group, resource, subresource.
type Plain = (&'static str, &'static str, &'static str, &'static str);

const AGENT: [Plain; 7] = [
    ("watch", OURS, "nodewatermarks", ""),
    ("patch", OURS, "nodewatermarks", "status"),
    ("watch", "", "nodes", ""),
    ("patch", "", "nodes", ""),
    ("patch", "", "nodes", "status"),
    ("watch", "", "pods", ""),
    ("create", "", "pods", "eviction"),
];

const CONTROLLER: [Plain; 12] = [
    ("watch", POLICIES, "nodeqoss", ""),
    ("watch", POLICIES, "podqoss", ""),
    ("watch", POLICIES, "avoidanceactions", ""),
    ("patch", POLICIES, "nodeqoss", "status"),
    ("patch", POLICIES, "podqoss", "status"),
    ("patch", POLICIES, "avoidanceactions", "status"),
    ("create", OURS, "nodewatermarks", ""),
    ("patch", OURS, "nodewatermarks", ""),
    ("delete", OURS, "nodewatermarks", ""),
    ("watch", "", "nodes", ""),
    ("patch", "", "nodes", ""),
    ("patch", "", "nodes", "status"),
];

/// What it has to be allowed, `namespace` being its own and `leases` that of the Leases.
pub(super) fn wanted<'a>(actor: Actor, namespace: &'a str, leases: &'a str) -> Vec<Attributes<'a>> {
    let in_namespace = |namespace, verb, group, resource, name| Attributes {
        verb,
        group,
        resource,
        subresource: "",
        namespace,
        name,
    };
    let (plain, more) = match actor {
        Actor::Agent => (
            AGENT.as_slice(),
            vec![
                in_namespace(leases, "update", LEASES, "leases", ""),
                in_namespace(leases, "watch", "", "configmaps", OBJECT),
                in_namespace(OF_NODES, "create", EVENTS, "events", ""),
            ],
        ),
        Actor::Controller => (
            CONTROLLER.as_slice(),
            vec![
                in_namespace(leases, "watch", LEASES, "leases", ""),
                in_namespace(namespace, "create", LEASES, "leases", ""),
                in_namespace(OF_NODES, "create", EVENTS, "events", ""),
            ],
        ),
    };
    let plain = plain.iter();
    let plain = plain.map(|&(verb, group, resource, subresource)| Attributes {
        verb,
        group,
        resource,
        subresource,
        namespace: "",
        name: "",
    });
    plain.chain(more).collect()
}
