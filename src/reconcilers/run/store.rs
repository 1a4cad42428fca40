//! From the changes of one kind to the world.

use std::collections::BTreeSet;

use kube::core::ApiResource;
use serde_json::Value;

use super::super::world::{Live, World};
use crate::cluster::watch::{Change, resource};
use crate::crd::{self, Kind, node_facts, node_watermark};

/// What is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Policy(Kind),
    Nodes,
    Watermarks,
}

impl Source {
    pub(super) const ALL: [Self; 5] = [
        Self::Policy(Kind::AvoidanceAction),
        Self::Policy(Kind::NodeQos),
        Self::Policy(Kind::PodQos),
        Self::Nodes,
        Self::Watermarks,
    ];

    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::Policy(kind) => kind.name(),
            Self::Nodes => "Node",
            Self::Watermarks => "NodeWatermark",
        }
    }

    pub(super) fn resource(self) -> ApiResource {
        match self {
            Self::Policy(kind) => policy_resource(kind),
            Self::Nodes => resource("", "v1", "Node", "nodes"),
            Self::Watermarks => watermark_resource(),
        }
    }
}

pub(super) fn policy_resource(kind: Kind) -> ApiResource {
    resource(crd::GROUP, crd::VERSION, kind.name(), kind.plural())
}

pub(super) fn watermark_resource() -> ApiResource {
    let group = node_watermark::GROUP;
    resource(group, "v1alpha1", "NodeWatermark", "nodewatermarks")
}

/// The objects of one kind: only their names, so that a new list shows which are gone.
pub(super) struct Store {
    pub(super) source: Source,
    known: BTreeSet<String>,
    listed: Option<BTreeSet<String>>,
    /// All objects were there once.
    pub(super) complete: bool,
}

impl Store {
    pub(super) const fn new(source: Source) -> Self {
        Self {
            source,
            known: BTreeSet::new(),
            listed: None,
            complete: false,
        }
    }

    /// Tells the world of a change. True when all objects are there now.
    pub(super) fn take(&mut self, change: Change, world: &mut World) -> bool {
        match change {
            Change::Restarted => self.listed = Some(BTreeSet::new()),
            Change::Apply(name, object) => {
                if let Some(listed) = &mut self.listed {
                    listed.insert(name.clone());
                }
                self.apply(&name, &object, world);
                self.known.insert(name);
            }
            Change::Delete(name) => {
                self.known.remove(&name);
                self.delete(&name, world);
            }
            Change::Complete => {
                let listed = self.listed.take().unwrap_or_default();
                let gone: Vec<String> = self.known.difference(&listed).cloned().collect();
                for name in gone {
                    self.known.remove(&name);
                    self.delete(&name, world);
                }
                self.complete = true;
                return true;
            }
            Change::Failed(_) => {}
        }
        false
    }

    fn apply(&self, name: &str, object: &Value, world: &mut World) {
        match self.source {
            Source::Policy(kind) => {
                let mut object = object.clone();
                // Items of a list come without them.
                object["apiVersion"] = crd::API_VERSION.into();
                object["kind"] = kind.name().into();
                world.apply_policy(kind, name, &object);
            }
            Source::Nodes => {
                let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
                world.apply_node(name, uid, node_facts(object));
            }
            Source::Watermarks => world.apply_live(name, Live::of(object)),
        }
    }

    fn delete(&self, name: &str, world: &mut World) {
        match self.source {
            Source::Policy(kind) => world.delete_policy(kind, name),
            Source::Nodes => world.delete_node(name),
            Source::Watermarks => world.delete_live(name),
        }
    }
}
