//! From the changes of one kind to the world.

use std::collections::BTreeSet;

use futures::stream::{BoxStream, StreamExt};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::Value;

use super::super::lease::LeaseObject;
use super::super::wire::{NodeObject, NodeSeen, Watermark, WatermarkObject};
use super::super::world::World;
use crate::cluster::nodes;
use crate::cluster::watch::{self, Change, resource};
use crate::crd::{self, Kind, node_watermark};
use crate::engine::time::BootTime;
use crate::metrics_api::Feed;
use crate::metrics_api::compose::NodeKnown;

/// Objects in one page of a list: a `NodeWatermark` may have 40 kB.
const NODES: u32 = 500;
const WATERMARKS: u32 = 100;

/// What is watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Policy(Kind),
    Nodes,
    Watermarks,
    Leases,
}

/// An object of one of them.
pub(super) enum Item {
    Policy(Kind, Value),
    Node(Box<NodeObject>),
    Watermark(Box<WatermarkObject>),
    Lease(Box<LeaseObject>),
}

impl Source {
    pub(super) const ALL: [Self; 6] = [
        Self::Policy(Kind::AvoidanceAction),
        Self::Policy(Kind::NodeQos),
        Self::Policy(Kind::PodQos),
        Self::Nodes,
        Self::Watermarks,
        Self::Leases,
    ];

    pub(super) const fn kind(self) -> &'static str {
        match self {
            Self::Policy(kind) => kind.name(),
            Self::Nodes => "Node",
            Self::Watermarks => "NodeWatermark",
            Self::Leases => "Lease",
        }
    }

    /// Whether nothing can be done before its objects are known. Without Leases agents are heard by what they write.
    pub(super) const fn is_needed(self) -> bool {
        !matches!(self, Self::Leases)
    }

    /// Whether its changes change what is compiled.
    pub(super) const fn is_compiled(self) -> bool {
        !matches!(self, Self::Watermarks | Self::Leases)
    }

    /// It can't be seen: what agents do meanwhile is not known.
    pub(super) fn is_blind(self, world: &mut World) {
        match self {
            Self::Nodes | Self::Watermarks => world.missed(),
            Self::Leases => world.missed_leases(),
            Self::Policy(_) => {}
        }
    }

    /// All changes; `leases` are those of agents.
    pub(super) fn watch(
        self,
        client: Client,
        leases: &Api<LeaseObject>,
    ) -> BoxStream<'static, Change<Item>> {
        match self {
            Self::Policy(kind) => watch::all(client, &policy_resource(kind))
                .map(move |change| change.map(|object| Item::Policy(kind, object)))
                .boxed(),
            Self::Nodes => {
                let nodes = resource("", "v1", "Node", "nodes");
                watch::labelled_as(client, &nodes, NODES, nodes::KEPT)
                    .map(|change| change.map(|node| Item::Node(Box::new(node))))
                    .boxed()
            }
            Self::Watermarks => watch::all_as(client, &watermark_resource(), WATERMARKS)
                .map(|change| change.map(|object| Item::Watermark(Box::new(object))))
                .boxed(),
            Self::Leases => watch::objects(leases.clone(), NODES)
                .map(|change| change.map(|object| Item::Lease(Box::new(object))))
                .boxed(),
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
    /// Whether nothing has to be awaited of it before the controller acts.
    pub(super) fn is_known(&self) -> bool {
        self.complete || !self.source.is_needed()
    }

    pub(super) const fn new(source: Source) -> Self {
        Self {
            source,
            known: BTreeSet::new(),
            listed: None,
            complete: false,
        }
    }

    /// Tells the world, and those who serve `NodeMetrics`, of a change. True when all objects are there now.
    pub(super) fn take(
        &mut self,
        change: Change<Item>,
        world: &mut World,
        mut feed: Option<&mut Feed>,
        now: BootTime,
    ) -> bool {
        match change {
            Change::Restarted => self.listed = Some(BTreeSet::new()),
            Change::Apply(name, object) => {
                if let Some(listed) = &mut self.listed {
                    listed.insert(name.clone());
                }
                let is_listed = self.listed.is_some();
                apply(&name, object, is_listed, world, feed, now);
                self.known.insert(name);
            }
            Change::Delete(name) => {
                self.known.remove(&name);
                self.delete(&name, world, feed.as_deref_mut());
            }
            Change::Complete => {
                let listed = self.listed.take().unwrap_or_default();
                let gone: Vec<String> = self.known.difference(&listed).cloned().collect();
                for name in gone {
                    self.known.remove(&name);
                    self.delete(&name, world, feed.as_deref_mut());
                }
                self.complete = true;
                match (self.source, feed) {
                    (Source::Nodes, Some(feed)) => feed.nodes_known(),
                    (Source::Leases, Some(feed)) => feed.leases_known(),
                    _ => {}
                }
                return true;
            }
            Change::Failed(_) => {}
        }
        false
    }

    fn delete(&self, name: &str, world: &mut World, feed: Option<&mut Feed>) {
        if let Some(feed) = feed {
            match self.source {
                Source::Policy(_) => {}
                Source::Nodes => feed.node(name, None),
                Source::Watermarks => feed.watermark(name, None),
                Source::Leases => feed.heartbeat(name, None),
            }
        }
        match self.source {
            Source::Policy(kind) => world.delete_policy(kind, name),
            Source::Nodes => world.delete_node(name),
            Source::Watermarks => world.delete_live(name),
            Source::Leases => world.delete_lease(name),
        }
    }
}

fn apply(
    name: &str,
    object: Item,
    is_listed: bool,
    world: &mut World,
    feed: Option<&mut Feed>,
    now: BootTime,
) {
    match object {
        Item::Policy(kind, mut object) => {
            // Items of a list come without them.
            object["apiVersion"] = crd::API_VERSION.into();
            object["kind"] = kind.name().into();
            world.apply_policy(kind, name, &object);
        }
        Item::Node(node) => {
            let created = node.metadata.creation_timestamp.clone();
            let boot_id = node
                .status
                .as_ref()
                .map(|status| status.boot_id().to_owned());
            let seen = NodeSeen::of(*node);
            if let Some(feed) = feed {
                let (uid, facts) = (seen.uid.clone(), seen.facts.clone());
                let known = NodeKnown {
                    uid,
                    created,
                    boot_id: boot_id.unwrap_or_default(),
                    facts,
                };
                feed.node(name, Some(known));
            }
            world.apply_node(name, seen);
        }
        Item::Watermark(object) => {
            let seen = Watermark::of(*object);
            if let Some(feed) = feed {
                feed.watermark(name, Some(seen.status()));
            }
            if is_listed {
                world.list_live(name, &seen);
            } else {
                world.apply_live(name, &seen);
            }
        }
        Item::Lease(object) => {
            if let Some(feed) = feed {
                feed.heartbeat(name, object.heartbeat());
            }
            world.apply_lease(name, object.renewal(), now);
        }
    }
}
