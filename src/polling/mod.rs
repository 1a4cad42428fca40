//! `--poll`: the load of nodes whose agents do not reach the controller, or that have none, from pages of exporters.
//!
//! Every replica polls, as every replica receives all reports: a scheduler asks any of them, and a new leader has all values.
//! Which nodes are due, what a page says, and which values are too old is pure.

mod metrics;
mod page;
mod poller;
mod schedule;
mod targets;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::thread;

use futures::stream::{SelectAll, StreamExt};
use thiserror::Error;
use tokio::runtime::Builder;
use tokio::sync::mpsc;

pub use self::metrics::PollMetrics;
use crate::cluster::client::{ClientError, Server};
use crate::cluster::requests::RequestObserver;
use crate::cluster::watch;
use crate::crd::polling::PollSettings;
use crate::metrics_api::loads::{NodeLoads, Polled};

/// Values that wait to be taken. Rounds wait beyond that.
const MAX_WAITING: usize = 8192;
/// The label of a slice with the name of its Service.
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// What to poll.
#[derive(Clone, Debug)]
pub struct Options {
    /// The file of `--poll`.
    pub settings: PollSettings,
    /// Prometheus metrics.
    pub metrics: PollMetrics,
}

/// Why it did not start.
#[derive(Debug, Error)]
pub enum StartError {
    /// No client for the API server could be made.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The thread can't be started.
    #[error("failed to start the thread that polls")]
    Thread(#[from] std::io::Error),
}

/// Polls until the process ends, on a thread of its own. Returns the receiver of what it finds.
///
/// # Errors
/// There is no client, or no thread.
pub fn start(
    server: &Server,
    requests: Arc<dyn RequestObserver>,
    options: Options,
    loads: NodeLoads,
) -> Result<mpsc::Receiver<Polled>, StartError> {
    let (sender, found) = mpsc::channel(MAX_WAITING);
    let runtime = Builder::new_current_thread().enable_all().build()?;
    // Its connections belong to this runtime.
    let client = {
        let _entered = runtime.enter();
        server.client(requests)?
    };
    let slices = watch::resource("discovery.k8s.io", "v1", "EndpointSlice", "endpointslices");
    let mut changes = SelectAll::new();
    for (index, service) in options.settings.services.iter().enumerate() {
        let labels = format!("{SERVICE_NAME}={}", service.name);
        let slices = watch::labelled(client.clone(), &slices, &service.namespace, &labels);
        changes.push(slices.map(move |change| (index, change)).boxed());
    }
    let polling = poller::run(options, loads, changes.boxed(), sender);
    let thread = thread::Builder::new().name("polling".to_owned());
    thread.spawn(move || {
        if let Err(error) = runtime.block_on(polling) {
            tracing::error!(%error, "failed to poll");
        }
    })?;
    Ok(found)
}
