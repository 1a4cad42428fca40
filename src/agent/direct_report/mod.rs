//! Reports the node's state directly to the controller. Every ready replica gets each report, so that any of them can take
//! over with current data. While the leader acknowledges them the Lease is renewed less often.
//!
//! ```text
//! sampling loop ─► the newest report ─► one task for each replica ─► controller
//!                                          │ answers
//!                        heartbeat ◄── Acknowledged
//! ```
//! The sampling loop never waits, and nothing is queued: each replica gets the newest report.

mod acknowledged;
mod body;
mod connection;
mod credentials;
mod endpoints;
mod leader;
mod links;
pub mod metrics;
mod replica;
mod run;
mod schedule;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::metrics::DirectReportMetrics;
use self::schedule::Newest;
use crate::crd::NodeMetric;
use crate::engine::time::BootTime;

pub use self::leader::LeaderClient;
pub use self::links::Links;

/// Timeout of a report; the connection is then considered dead.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Options of direct reports.
#[derive(Clone, Debug)]
pub struct Options {
    /// The Service of the controller's replicas, with one port.
    pub service: String,
    /// Its namespace.
    pub namespace: String,
    /// The directory with `token` and `ca.crt`.
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

/// A report of the sampling loop.
#[derive(Clone, Debug)]
struct Measured {
    /// When the node was sampled.
    at: BootTime,
    metric: Arc<NodeMetric>,
    /// Sequence of the last report with a change, which is sent at once.
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

/// The tasks that send reports; they end when it is dropped.
pub struct ReportTasks {
    newest: watch::Sender<Option<Measured>>,
    task: JoinHandle<()>,
}

impl ReportTasks {
    /// Starts the tasks. `started` is the start of this process; `acknowledged` is true while the leader acknowledges; `links`
    /// track the connections.
    pub fn start(
        client: Client,
        options: Options,
        started: BootTime,
        acknowledged: watch::Sender<bool>,
        metrics: DirectReportMetrics,
        links: Links,
    ) -> Self {
        metrics.start(started);
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

    /// Submits the report of the sample taken `at`; `changed`: it has a change and is sent at once.
    pub fn submit(&self, at: BootTime, metric: Arc<NodeMetric>, changed: bool) {
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

impl Drop for ReportTasks {
    fn drop(&mut self) {
        self.task.abort();
    }
}
