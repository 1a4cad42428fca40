//! The open connections to replicas. Eviction requests use the one to the leader.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// The replica has acknowledged the last report as the leader.
    leads: bool,
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
        let leads = false;
        self.lock().insert(address, Link { sender, leads });
    }

    pub(super) fn closed(&self, address: SocketAddr) {
        self.lock().remove(&address);
    }

    pub(super) fn leads(&self, address: SocketAddr, leads: bool) {
        if let Some(link) = self.lock().get_mut(&address) {
            link.leads = leads;
        }
    }

    /// The connection to the leader, else to any replica, which knows the leader's address.
    pub(super) fn best(&self) -> Option<Sender> {
        let links = self.lock();
        let mut open = links.values().filter(|link| link.is_open());
        let leader = open.clone().find(|link| link.leads);
        let best = leader.or_else(|| open.next());
        best.map(|link| link.sender.clone())
    }

    /// The connection to the replica at this address.
    pub(super) fn to(&self, ip: IpAddr) -> Option<Sender> {
        let links = self.lock();
        let mut links = links.iter();
        let link = links.find(|(address, link)| address.ip() == ip && link.is_open());
        link.map(|(_, link)| link.sender.clone())
    }
}
