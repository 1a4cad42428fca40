//! The load of each node, from its last report or what was polled. Every replica receives all reports, so every replica can
//! answer schedulers.

mod history;

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

pub use self::history::{HISTORY, LoadHistory, Past};
use super::reports::is_fresh;
use crate::crd::NodeMetricStatus;
use crate::crd::load_values::LoadValues;
use crate::crd::node_metric::Load;
use crate::engine::time::BootTime;
use crate::engine::units::{Bytes, MilliCpu};

/// The last report of a node, or what was polled.
#[derive(Clone, Debug)]
pub struct KnownLoad {
    /// When it was received, or what was polled was measured.
    pub at: BootTime,
    /// Time until the next one.
    pub interval: Duration,
    /// The node's CPUs; 0 if unknown.
    pub cpu: MilliCpu,
    /// The node's memory; 0 if unknown.
    pub memory: Bytes,
    /// What it reported.
    pub status: Arc<NodeMetricStatus>,
    /// It is from the page of an exporter (`--poll`), and no agent's report.
    pub polled: bool,
}

impl KnownLoad {
    /// The load, if the agent knows it and the report is younger than three of its intervals.
    pub fn fresh(&self, now: BootTime) -> Option<&Load> {
        let load = self.status.load.as_ref();
        load.filter(|_| is_fresh(self.at, self.interval, now))
    }

    /// Whether it is a report, and younger than three of its intervals.
    pub fn is_reported(&self, now: BootTime) -> bool {
        !self.polled && is_fresh(self.at, self.interval, now)
    }
}

/// What was found on the page of an exporter.
#[derive(Clone, Debug)]
pub struct PolledLoad {
    /// When it was measured.
    pub at: BootTime,
    /// Time until the next one.
    pub interval: Duration,
    /// The figures of the page.
    pub status: Arc<NodeMetricStatus>,
}

/// An update of a polled node.
#[derive(Clone, Debug)]
pub struct Polled {
    /// Its name.
    pub node: Arc<str>,
    /// `None`: what was polled before is too old, or the node has no endpoint any more.
    pub load: Option<PolledLoad>,
}

/// All nodes of the cluster by name; `None`: the node has no report. Hashed, for the extender looks up hundreds of names for each pod.
pub type ByNode = HashMap<Arc<str>, Option<KnownLoad>>;

/// What is known of a Node besides its load.
#[derive(Debug, Default)]
struct Record {
    /// Its internal addresses.
    addresses: Vec<IpAddr>,
    cpu: MilliCpu,
    memory: Bytes,
    history: LoadHistory,
    /// Why it was not polled the last time.
    failure: Option<String>,
}

/// All nodes, shared by the task that updates them and those that answer schedulers.
#[derive(Clone, Debug, Default)]
pub struct NodeLoads {
    loads: Arc<RwLock<ByNode>>,
    records: Arc<RwLock<BTreeMap<Arc<str>, Record>>>,
}

impl NodeLoads {
    /// Reads them. Updates wait meanwhile.
    pub fn read(&self) -> RwLockReadGuard<'_, ByNode> {
        self.loads.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The node exists, with this report.
    pub fn set(&self, node: &str, load: Option<KnownLoad>) {
        if let Some(load) = &load {
            let values = LoadValues::of(&load.status);
            self.change(node, |record| record.history.push(load.at, &values));
        }
        let mut all = self.loads.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(node) {
            *known = load;
        } else {
            all.insert(node.into(), load);
        }
    }

    /// The node exists, with these internal addresses and this capacity.
    pub fn set_node(&self, node: &str, addresses: &[IpAddr], cpu: MilliCpu, memory: Bytes) {
        let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
        if !records.contains_key(node) {
            records.insert(node.into(), Record::default());
        }
        if let Some(record) = records.get_mut(node) {
            record.addresses = addresses.to_vec();
            (record.cpu, record.memory) = (cpu, memory);
        }
    }

    /// The node does not exist.
    pub fn remove(&self, node: &str) {
        let mut all = self.loads.write().unwrap_or_else(PoisonError::into_inner);
        all.remove(node);
        let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
        records.remove(node);
    }

    /// Why polling a node failed; `None`: it did not.
    pub fn set_failure(&self, node: &str, why: Option<String>) {
        self.change(node, |record| record.failure = why);
    }

    /// Why polling the node failed the last time.
    pub fn failure(&self, node: &str) -> Option<String> {
        self.records().get(node)?.failure.clone()
    }

    /// The node with this internal address.
    pub fn node_at(&self, address: IpAddr) -> Option<Arc<str>> {
        let records = self.records();
        let mut all = records.iter();
        let found = all.find(|(_, record)| record.addresses.contains(&address));
        found.map(|(node, _)| Arc::clone(node))
    }

    /// All nodes by internal address.
    pub fn by_address(&self) -> HashMap<IpAddr, Arc<str>> {
        let records = self.records();
        let all = records.iter().flat_map(|(node, record)| {
            let addresses = record.addresses.iter();
            addresses.map(|address| (*address, Arc::clone(node)))
        });
        all.collect()
    }

    /// CPUs and memory of a node; 0 if unknown.
    pub fn capacity(&self, node: &str) -> (MilliCpu, Bytes) {
        let records = self.records();
        let record = records.get(node);
        record.map_or_else(Default::default, |record| (record.cpu, record.memory))
    }

    /// The newest values of a node that were measured at this time or before.
    pub fn past(&self, node: &str, at: BootTime) -> Option<Past> {
        self.records().get(node)?.history.at(at)
    }

    fn records(&self) -> RwLockReadGuard<'_, BTreeMap<Arc<str>, Record>> {
        self.records.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, node: &str, change: impl FnOnce(&mut Record)) {
        let mut records = self.records.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = records.get_mut(node) {
            change(record);
        }
    }
}
