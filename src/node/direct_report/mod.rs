//! Tells the controller directly how the node is: every ready replica hears each report, so that any of them can take
//! over warm, and while the one that leads acknowledges them the Lease may be renewed seldom.
//!
//! ```text
//! sampling loop ─► the newest report ─► one task for each replica ─► controller
//!                                          │ answers
//!                        heartbeat ◄── Acknowledged
//! ```
//! The loop hands its reports over and never waits. None is queued: what a replica is told next is the newest one by then.

mod acknowledged;
mod body;
mod connection;
mod credentials;
mod endpoints;
mod leader;
mod links;
pub mod metrics;
mod pace;
mod replica;
mod run;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::metrics::Reports;
use self::pace::Newest;
use crate::crd::NodeMetric;
use crate::engine::time::BootTime;

pub use self::leader::Leader;
pub use self::links::Links;

/// A report is given up that was not answered within so long; the connection is then taken for dead.
const DEADLINE: Duration = Duration::from_secs(5);

/// Where reports go, and from whom.
#[derive(Clone, Debug)]
pub struct Options {
    /// The Service of the controller's replicas. It has one port.
    pub service: String,
    /// Its namespace.
    pub namespace: String,
    /// The folder with `token` and `ca.crt`.
    pub credentials: PathBuf,
    /// Name of the node.
    pub node: String,
}

impl Options {
    /// The name in the replicas' certificates.
    fn server_name(&self) -> String {
        format!("{}.{}.svc", self.service, self.namespace)
    }
}

/// What the sampling loop hands over.
#[derive(Clone, Debug)]
struct Measured {
    /// When the node was sampled.
    at: BootTime,
    metric: Arc<NodeMetric>,
    /// The last report that told of a change, and is worth telling at once.
    changed: i64,
}

impl Measured {
    fn newest(&self) -> Newest {
        Newest {
            sequence: sequence(&self.metric),
            changed: self.changed,
        }
    }
}

fn sequence(metric: &NodeMetric) -> i64 {
    let agent = metric.status.agent.as_ref();
    agent.map_or(0, |agent| agent.sequence)
}

/// The tasks that send reports; they end with it.
pub struct DirectReports {
    newest: watch::Sender<Option<Measured>>,
    task: JoinHandle<()>,
}

impl DirectReports {
    /// Starts them. `started` is when this process began; `acknowledged` is kept true while the leader acknowledges; `links` follow
    /// the connections.
    pub fn start(
        client: Client,
        options: Options,
        started: BootTime,
        acknowledged: watch::Sender<bool>,
        metrics: Reports,
        links: Links,
    ) -> Self {
        metrics.begin(started);
        let (newest, taken) = watch::channel(None);
        let run = run::run(
            client,
            options,
            started,
            taken,
            acknowledged,
            metrics,
            links,
        );
        Self {
            newest,
            task: tokio::spawn(run),
        }
    }

    /// Hands over what was measured `at`, whose agent has a sequence; `changed`: something changed that is worth telling at once.
    pub fn tell(&self, at: BootTime, metric: Arc<NodeMetric>, changed: bool) {
        self.newest.send_modify(|newest| {
            let sequence = sequence(&metric);
            let before = newest.as_ref().map(|before| before.changed);
            *newest = Some(Measured {
                at,
                metric,
                changed: before.filter(|_| !changed).unwrap_or(sequence),
            });
        });
    }
}

impl Drop for DirectReports {
    fn drop(&mut self) {
        self.task.abort();
    }
}
