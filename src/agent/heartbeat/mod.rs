//! The agent's heartbeat: renews the Lease of its node, with a summary of the node's health and load.
//!
//! ```text
//! sampling loop ─► HeartbeatInput ─► Schedule (what to call, and when) ─► Lease ─► API server
//! ```
//! A heartbeat means that the agent works, not only that its process runs: a stuck sampling loop stops it.

pub mod digest;
mod lease;
pub mod metrics;
mod run;
pub mod schedule;

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::metrics::Heartbeats;
use crate::crd::Summary;
use crate::engine::time::BootTime;

/// Interval of Lease renewals unless direct reports are acknowledged.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// Options of the heartbeat.
#[derive(Clone, Debug)]
pub struct Options {
    /// Namespace of the Leases; it has to exist.
    pub namespace: String,
    /// Name of the node and of its Lease.
    pub node: String,
    /// Interval of renewals while direct reports are acknowledged. At least [`INTERVAL`].
    pub relaxed: Duration,
    /// The sampling loop is stuck after this time without a run.
    pub stuck_after: Duration,
}

/// The state of the sampling loop.
#[derive(Clone, Debug, Default)]
pub struct HeartbeatInput {
    /// Its last run, if any.
    pub last_run: Option<BootTime>,
    /// UID of our Node, if known.
    pub node_uid: Option<Arc<str>>,
    /// The node's health and load, without the sequence.
    pub summary: Summary,
}

/// The task that renews the Lease.
pub struct Heartbeat {
    client: Client,
    options: Options,
    task: JoinHandle<()>,
}

impl Heartbeat {
    /// Starts the task. While `acknowledged` is true the interval is [`Options::relaxed`]. `client` must not retry requests
    /// by itself.
    pub fn start(
        client: Client,
        options: Options,
        input: watch::Receiver<HeartbeatInput>,
        acknowledged: watch::Receiver<bool>,
        metrics: Heartbeats,
    ) -> Self {
        let sending = run::run(
            client.clone(),
            options.clone(),
            input,
            acknowledged,
            metrics,
        );
        Self {
            client,
            options,
            task: tokio::spawn(sending),
        }
    }

    /// Stops renewing and releases the Lease, so that a removed agent is not reported as unresponsive.
    pub async fn release(self) {
        self.task.abort();
        if let Err(error) = run::release(&self.client, &self.options).await {
            tracing::warn!(
                why = error.message(),
                "failed to release the Lease: the controller will report an unresponsive agent"
            );
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.task.abort();
    }
}
