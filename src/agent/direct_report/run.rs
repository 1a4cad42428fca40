//! Runs one task per ready replica and tracks the leader's acknowledgements.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use futures::StreamExt;
use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::acknowledged::Acknowledged;
use super::endpoints::Endpoints;
use super::metrics::DirectReportMetrics;
use super::replica::{ReplicaTask, Sending};
use super::{Links, Measured, Options};
use crate::clock;
use crate::cluster::backoff::sleep;
use crate::cluster::watch::{self as objects, Change};
use crate::engine::time::BootTime;

/// Never ends.
pub(super) async fn run(
    client: Client,
    options: Options,
    started: BootTime,
    newest: watch::Receiver<Option<Measured>>,
    acknowledged: watch::Sender<bool>,
    metrics: DirectReportMetrics,
    links: Links,
) {
    let kind = objects::resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices");
    let labels = format!("kubernetes.io/service-name={}", options.service);
    let mut changes = objects::labelled(client, &kind, &options.namespace, &labels);
    let (recorded, mut answers) = watch::channel(Acknowledged::default());
    let sending = Sending::new(options, started, newest, recorded, metrics, links);
    let mut replicas = Replicas::new(Arc::new(sending));
    loop {
        let remaining = answers.borrow_and_update().remaining(clock::boot_time());
        acknowledged.send_if_modified(|now| {
            std::mem::replace(now, remaining.is_some()) != remaining.is_some()
        });
        tokio::select! {
            Some(change) = changes.next() => replicas.apply(change),
            Ok(()) = answers.changed() => {}
            () = sleep(remaining) => {}
        }
    }
}

/// The tasks of the replicas.
struct Replicas {
    sending: Arc<Sending>,
    endpoints: Endpoints,
    tasks: BTreeMap<SocketAddr, Task>,
    /// The replicas as last logged.
    known: Option<BTreeSet<SocketAddr>>,
    failure: String,
}

impl Replicas {
    fn new(sending: Arc<Sending>) -> Self {
        Self {
            sending,
            endpoints: Endpoints::default(),
            tasks: BTreeMap::new(),
            known: None,
            failure: String::new(),
        }
    }

    fn apply(&mut self, change: Change) {
        if let Change::Failed(why) = &change
            && self.failure != *why
        {
            tracing::warn!(
                why,
                "failed to watch the controller's replicas; trying again"
            );
            self.failure.clone_from(why);
        }
        self.endpoints.apply(change);
        let replicas = self.endpoints.replicas();
        if self.known == replicas {
            return;
        }
        if let Some(replicas) = &replicas {
            self.follow(replicas);
        }
        self.known = replicas;
    }

    /// Runs tasks for exactly these replicas.
    fn follow(&mut self, replicas: &BTreeSet<SocketAddr>) {
        self.tasks.retain(|address, _| replicas.contains(address));
        for address in replicas {
            self.tasks.entry(*address).or_insert_with(|| {
                let replica = ReplicaTask::new(*address, Arc::clone(&self.sending));
                Task(tokio::spawn(replica.run()))
            });
        }
        self.sending.metrics.replicas(replicas.len());
        let service = &self.sending.options.service;
        if replicas.is_empty() {
            tracing::info!(
                service,
                "no replica accepts direct reports: only the Lease is renewed"
            );
        } else {
            tracing::info!(service, ?replicas, "reporting to the controller directly");
        }
    }
}

/// A task that is aborted when dropped.
struct Task(JoinHandle<()>);

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}
