//! Feeds changes of the watched kinds to the reconciler and to the metrics API.

use std::collections::BTreeSet;

use super::super::observe::watches::{Item, WatchedKind};
use super::super::observe::wire::{NodeStatus, ObservedNode, Watermark};
use super::super::reconciler::Reconciler;
use crate::cluster::watch::Change;
use crate::crd;
use crate::engine::time::BootTime;
use crate::metrics_api::StoreUpdater;
use crate::metrics_api::compose::NodeKnown;

/// The watch of one kind. Remembers names, so that a new list shows which objects are gone.
pub struct KindWatch {
    pub source: WatchedKind,
    known: BTreeSet<String>,
    listed: Option<BTreeSet<String>>,
    /// All objects were listed once.
    pub complete: bool,
}

impl KindWatch {
    /// Whether its objects are known, as far as required.
    pub fn is_known(&self) -> bool {
        self.complete || !self.source.is_required()
    }

    pub const fn new(source: WatchedKind) -> Self {
        Self {
            source,
            known: BTreeSet::new(),
            listed: None,
            complete: false,
        }
    }

    /// The watch was interrupted: updates of agents may have been missed.
    pub fn interrupted(&self, reconciler: &mut Reconciler) {
        match self.source {
            WatchedKind::Nodes | WatchedKind::Watermarks => reconciler.watch_interrupted(),
            WatchedKind::Leases => reconciler.lease_watch_interrupted(),
            WatchedKind::Policy(_) => {}
        }
    }

    /// Passes a change on to the reconciler and the metrics API. Returns whether the list is now complete.
    pub fn apply_change(
        &mut self,
        change: Change<Item>,
        reconciler: &mut Reconciler,
        mut updater: Option<&mut StoreUpdater>,
        now: BootTime,
    ) -> bool {
        match change {
            Change::Restarted => self.listed = Some(BTreeSet::new()),
            Change::Apply(name, object) => {
                if let Some(listed) = &mut self.listed {
                    listed.insert(name.clone());
                }
                let is_listed = self.listed.is_some();
                apply(&name, object, is_listed, reconciler, updater, now);
                self.known.insert(name);
            }
            Change::Delete(name) => {
                self.known.remove(&name);
                self.delete(&name, reconciler, updater.as_deref_mut());
            }
            Change::Complete => {
                let listed = self.listed.take().unwrap_or_default();
                let gone: Vec<String> = self.known.difference(&listed).cloned().collect();
                for name in gone {
                    self.known.remove(&name);
                    self.delete(&name, reconciler, updater.as_deref_mut());
                }
                self.complete = true;
                match (self.source, updater) {
                    (WatchedKind::Nodes, Some(updater)) => updater.nodes_known(),
                    (WatchedKind::Leases, Some(updater)) => updater.leases_known(),
                    _ => {}
                }
                return true;
            }
            Change::Failed(_) => {}
        }
        false
    }

    fn delete(&self, name: &str, reconciler: &mut Reconciler, updater: Option<&mut StoreUpdater>) {
        if let Some(updater) = updater {
            match self.source {
                WatchedKind::Policy(_) => {}
                WatchedKind::Nodes => updater.node(name, None),
                WatchedKind::Watermarks => updater.watermark(name, None),
                WatchedKind::Leases => updater.heartbeat(name, None),
            }
        }
        match self.source {
            WatchedKind::Policy(kind) => reconciler.delete_policy(kind, name),
            WatchedKind::Nodes => reconciler.delete_node(name),
            WatchedKind::Watermarks => reconciler.delete_watermark(name),
            WatchedKind::Leases => reconciler.delete_lease(name),
        }
    }
}

fn apply(
    name: &str,
    object: Item,
    is_listed: bool,
    reconciler: &mut Reconciler,
    updater: Option<&mut StoreUpdater>,
    now: BootTime,
) {
    match object {
        Item::Policy(kind, mut object) => {
            // Items of a list lack these.
            object["apiVersion"] = crd::API_VERSION.into();
            object["kind"] = kind.name().into();
            reconciler.apply_policy(kind, name, &object);
        }
        Item::Node(node) => {
            let created = node.metadata.creation_timestamp.clone();
            let status = node.status.as_ref();
            let boot_id = status.map(|status| status.boot_id().to_owned());
            let addresses = status.map(NodeStatus::internal_addresses);
            let seen = ObservedNode::of(*node);
            if let Some(updater) = updater {
                let (uid, facts) = (seen.uid.clone(), seen.facts.clone());
                let known = NodeKnown {
                    uid,
                    created,
                    boot_id: boot_id.unwrap_or_default(),
                    addresses: addresses.unwrap_or_default(),
                    facts,
                };
                updater.node(name, Some(known));
            }
            reconciler.apply_node(name, seen);
        }
        Item::Watermark(object) => {
            let seen = Watermark::of(*object);
            if let Some(updater) = updater {
                updater.watermark(name, Some(seen.status()));
            }
            if is_listed {
                reconciler.apply_listed_watermark(name, &seen);
            } else {
                reconciler.apply_watermark(name, &seen);
            }
        }
        Item::Lease(object) => {
            if let Some(updater) = updater {
                updater.heartbeat(name, object.heartbeat());
            }
            reconciler.apply_lease(name, object.state(), now);
        }
    }
}
