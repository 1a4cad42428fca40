//! The open connections to replicas, and what the leader asks for. Eviction requests use the one to the leader.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http2::SendRequest;

/// A connection.
pub(super) type Sender = SendRequest<Full<Bytes>>;

/// The open connections by the replica's address; clones share them.
#[derive(Clone, Debug, Default)]
pub struct Links(Arc<Mutex<BTreeMap<SocketAddr, Link>>>);

#[derive(Debug)]
struct Link {
    sender: Sender,
    /// What the replica asked for when it acknowledged the last report as the leader.
    leads: Option<LeaderRequests>,
}

/// What the leader asks of a node, with its answers to reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaderRequests {
    /// Minimum average interval between writes of the load label; `None` if it asks for none.
    pub label_interval: Option<Duration>,
    /// The node may have the soft taint while it is busy.
    pub may_be_busy: bool,
}

impl Link {
    /// A broken connection stays listed until the next report fails.
    fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }
}

impl Links {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Link>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn opened(&self, address: SocketAddr, sender: Sender) {
        let leads = None;
        self.lock().insert(address, Link { sender, leads });
    }

    pub(super) fn closed(&self, address: SocketAddr) {
        self.lock().remove(&address);
    }

    /// The replica answered a report; `leads`: as the leader.
    pub(super) fn leads(&self, address: SocketAddr, leads: Option<LeaderRequests>) {
        if let Some(link) = self.lock().get_mut(&address) {
            link.leads = leads;
        }
    }

    /// The connection to the leader, else to any replica, which knows the leader's address.
    pub(super) fn best(&self) -> Option<Sender> {
        let links = self.lock();
        let mut open = links.values().filter(|link| link.is_open());
        let leader = open.clone().find(|link| link.leads.is_some());
        let best = leader.or_else(|| open.next());
        best.map(|link| link.sender.clone())
    }

    /// What the leader asks for; `None` while no leader is known.
    pub fn requests(&self) -> Option<LeaderRequests> {
        let links = self.lock();
        let mut open = links.values().filter(|link| link.is_open());
        open.find_map(|link| link.leads)
    }

    /// The connection to the replica at this address.
    pub(super) fn to(&self, ip: IpAddr) -> Option<Sender> {
        let links = self.lock();
        let mut links = links.iter();
        let link = links.find(|(address, link)| address.ip() == ip && link.is_open());
        link.map(|(_, link)| link.sender.clone())
    }
}
