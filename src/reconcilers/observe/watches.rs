//! The watched kinds.

use futures::stream::{BoxStream, StreamExt};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::Value;

use super::wire::{NodeObject, WatermarkObject};
use crate::cluster::lease::LeaseObject;
use crate::cluster::nodes;
use crate::cluster::watch::{self, Change, resource};
use crate::crd::{self, Kind, node_watermark};

/// Objects per page of a list; a `NodeWatermark` may have 40 kB.
const PAGE: u32 = 500;
const WATERMARK_PAGE: u32 = 100;

/// A watched kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WatchedKind {
    Policy(Kind),
    Nodes,
    Watermarks,
    Leases,
}

/// An object of a watched kind.
pub enum Item {
    Policy(Kind, Value),
    Node(Box<NodeObject>),
    Watermark(Box<WatermarkObject>),
    Lease(Box<LeaseObject>),
}

impl WatchedKind {
    pub const ALL: [Self; 6] = [
        Self::Policy(Kind::AvoidanceAction),
        Self::Policy(Kind::NodeQos),
        Self::Policy(Kind::PodQos),
        Self::Nodes,
        Self::Watermarks,
        Self::Leases,
    ];

    pub const fn kind(self) -> &'static str {
        match self {
            Self::Policy(kind) => kind.name(),
            Self::Nodes => "Node",
            Self::Watermarks => "NodeWatermark",
            Self::Leases => "Lease",
        }
    }

    /// Whether the controller has to know its objects before it acts. Without Leases, agents are seen by what they write.
    pub const fn is_required(self) -> bool {
        !matches!(self, Self::Leases)
    }

    /// Whether its changes affect compilation.
    pub const fn is_compiled(self) -> bool {
        !matches!(self, Self::Watermarks | Self::Leases)
    }

    /// Watches it; `leases` are the agents'.
    pub fn watch(
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
                watch::labelled_as(client, &nodes, PAGE, nodes::MANAGED_SELECTOR)
                    .map(|change| change.map(|node| Item::Node(Box::new(node))))
                    .boxed()
            }
            Self::Watermarks => watch::all_as(client, &watermark_resource(), WATERMARK_PAGE)
                .map(|change| change.map(|object| Item::Watermark(Box::new(object))))
                .boxed(),
            Self::Leases => watch::objects(leases.clone(), PAGE)
                .map(|change| change.map(|object| Item::Lease(Box::new(object))))
                .boxed(),
        }
    }
}

pub fn policy_resource(kind: Kind) -> ApiResource {
    resource(crd::GROUP, crd::VERSION, kind.name(), kind.plural())
}

pub fn watermark_resource() -> ApiResource {
    let group = node_watermark::GROUP;
    resource(group, "v1alpha1", "NodeWatermark", "nodewatermarks")
}
