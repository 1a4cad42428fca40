//! The agent's heartbeat: it renews one Lease, named as its node, with a line on the node's health and load.
//!
//! ```text
//! sampling loop ─► Pulse ─► Beat (when, and what next) ─► Lease ─► API server
//! ```
//! A heartbeat says that the agent works, not that its process runs: where the sampling loop stands still there is none.

pub mod beat;
pub mod digest;
mod lease;
pub mod metrics;
mod run;

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::metrics::Heartbeats;
use crate::crd::Summary;
use crate::engine::time::BootTime;

/// The Lease is renewed this often unless reports reach the controller directly.
pub const INTERVAL: Duration = Duration::from_secs(10);

/// How the heartbeat is sent.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the Leases are; it has to exist.
    pub namespace: String,
    /// Name of the node, and of its Lease.
    pub node: String,
    /// The Lease is renewed this often while reports reach the controller directly. At least [`INTERVAL`].
    pub relaxed: Duration,
    /// The sampling loop stands still when it has not turned for so long.
    pub stuck_after: Duration,
}

/// What the sampling loop tells.
#[derive(Clone, Debug, Default)]
pub struct Pulse {
    /// When it turned last; `None`: not yet.
    pub turned: Option<BootTime>,
    /// UID of our Node, where it is known.
    pub node_uid: Option<Arc<str>>,
    /// The node's health and load; its sequence is not the loop's to know.
    pub summary: Summary,
}

/// The task that sends it.
pub struct Heartbeat {
    client: Client,
    options: Options,
    task: JoinHandle<()>,
}

impl Heartbeat {
    /// Starts it. While `acknowledged` is true the controller hears of the node by other means, and the Lease is
    /// renewed only as often as [`Options::relaxed`] says. `client` must not repeat requests by itself.
    pub fn start(
        client: Client,
        options: Options,
        pulse: watch::Receiver<Pulse>,
        acknowledged: watch::Receiver<bool>,
        metrics: Heartbeats,
    ) -> Self {
        let sending = run::run(
            client.clone(),
            options.clone(),
            pulse,
            acknowledged,
            metrics,
        );
        Self {
            client,
            options,
            task: tokio::spawn(sending),
        }
    }

    /// Ends it and gives the Lease back, so that nobody waits for an agent that left for good.
    pub async fn release(self) {
        self.task.abort();
        if let Err(error) = run::release(&self.client, &self.options).await {
            tracing::warn!(
                why = error.words(),
                "failed to give the Lease back: the controller will tell of a silent agent"
            );
        }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.task.abort();
    }
}
