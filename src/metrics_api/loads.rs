//! The load of each node, from its last report. Every replica receives all reports, so every replica can answer schedulers.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use super::reports::is_fresh;
use crate::crd::NodeMetricStatus;
use crate::crd::node_metric::Load;
use crate::engine::time::BootTime;
use crate::engine::units::{Bytes, MilliCpu};

/// The last report of a node.
#[derive(Clone, Debug)]
pub struct NodeLoad {
    /// When it was received.
    pub at: BootTime,
    /// Time until the next report.
    pub interval: Duration,
    /// The node's CPUs; 0 if unknown.
    pub cpu: MilliCpu,
    /// The node's memory; 0 if unknown.
    pub memory: Bytes,
    /// What it reported.
    pub status: Arc<NodeMetricStatus>,
}

impl NodeLoad {
    /// The load, if the agent knows it and the report is younger than three of its intervals.
    pub fn fresh(&self, now: BootTime) -> Option<&Load> {
        let load = self.status.load.as_ref();
        load.filter(|_| is_fresh(self.at, self.interval, now))
    }
}

/// All nodes of the cluster by name; `None`: the node has no report.
pub type ByNode = BTreeMap<Arc<str>, Option<NodeLoad>>;

/// All nodes, shared by the task that updates them and those that answer schedulers.
#[derive(Clone, Debug, Default)]
pub struct NodeLoads(Arc<RwLock<ByNode>>);

impl NodeLoads {
    /// Reads them. Updates wait meanwhile.
    pub fn read(&self) -> RwLockReadGuard<'_, ByNode> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node exists, with this report.
    pub fn set(&self, node: &str, load: Option<NodeLoad>) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(node) {
            *known = load;
        } else {
            all.insert(node.into(), load);
        }
    }

    /// The node does not exist.
    pub fn remove(&self, node: &str) {
        let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
        all.remove(node);
    }
}
