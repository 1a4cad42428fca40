//! The agent of one Kubernetes node: it watches what the node has to keep and the node's pods, and runs the same
//! machine as `plimsoll run` over them.
//!
//! ```text
//! API server ─► feed ─► rules, pods ─► Machine ─► cgroups
//!      ▲                                  │
//!      └── taint, evictions, status ◄─────┘
//! ```

mod emergency_stop;
mod ending;
mod feed;
mod memory;
mod metrics;
mod node_lock;
mod objects;
mod place;
mod pods;
mod reconcile;
mod report;
mod rules;
mod start;
mod undo;
mod vitals;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;

use self::metrics::Metrics;
pub use self::metrics::PodData;
use self::node_lock::NodeLockError;
pub use self::pods::PodRef;
use self::reconcile::Agent;
use self::vitals::Vitals;
use crate::cluster::client::{self, ClientError, Server};
use crate::engine::Demand;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::node::actuate::api::ApiServer;
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::Hierarchy;
use crate::node::cgroup::layout::LayoutError;
use crate::node::clock;
use crate::node::collect::Sampler;
use crate::node::direct_report::{self, Links};
use crate::node::journal::LockError;
use crate::node::machine::{self, MachineError};
use crate::serve::{self, ServeError};

type Machine = machine::Machine<ApiServer>;

/// What the command line says.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to reach the API server; absent: the pod's service account, else the user's kubeconfig.
    pub kubeconfig: Option<PathBuf>,
    /// Name of our Node.
    pub node: String,
    /// Where the files live that outlive the process.
    pub state_dir: PathBuf,
    /// Where the cgroup trees are mounted; found by themselves where absent.
    pub cgroup_root: Option<PathBuf>,
    /// The kubelet's `cgroupRoot`; found where absent.
    pub kubelet_root: Option<String>,
    /// Where a `/proc` is mounted.
    pub proc_root: PathBuf,
    /// The node's `/proc/1/net/dev`, where that `/proc` is not the node's.
    pub net_dev: Option<PathBuf>,
    /// The node's own address, where probes that name no host are asked.
    pub node_address: IpAddr,
    /// The node's files are read at least this often.
    pub sample_interval: Duration,
    /// Where probes and metrics are served.
    pub listen: SocketAddr,
    /// What is said there of single pods.
    pub pod_data: PodData,
    /// The agent's own pod.
    pub own: Option<PodRef>,
    /// Where the Leases of the agents are.
    pub lease_namespace: String,
    /// How often ours is renewed while reports reach the controller directly.
    pub lease_renew_interval: Duration,
    /// Where they go; absent: nowhere.
    pub reports: Option<direct_report::Options>,
}

/// What ends the agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Somebody at the keyboard: undo everything.
    Interrupted,
    /// The kubelet: what is in force stays, unless the agent's `DaemonSet` or its rights are gone.
    Terminated,
}

/// Why the agent can't start or go on. What is in force stays so.
#[derive(Debug, Error)]
pub enum AgentError {
    /// There is no way to an API server.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No cgroup trees.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No usable `/proc`.
    #[error(
        "failed to read CPU time or memory from {}: {reason}; name the folder that proc is mounted at with --proc-root, usually /proc",
        root.display()
    )]
    Proc {
        /// The folder.
        root: PathBuf,
        /// The first thing that went wrong there.
        reason: String,
    },
    /// The kernel does not tell which boot this is.
    #[error("failed to read the kernel's boot id: {0}; is /proc mounted?")]
    BootId(#[source] io::Error),
    /// The node can't be kept.
    #[error(transparent)]
    Lock(#[from] NodeLockError),
    /// The state directory or its journal.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The address can't be listened on.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

impl AgentError {
    /// Another agent keeps the node.
    pub const fn is_busy(&self) -> bool {
        matches!(
            self,
            Self::Lock(NodeLockError::Busy(_))
                | Self::Machine(MachineError::Open(OpenError::Lock(LockError::Busy { .. })))
        )
    }
}

/// One series of every metric of the agent, in the text format of `OpenMetrics`: for the documentation.
pub fn metrics_example() -> String {
    Metrics::example()
}

/// Runs until it is stopped; true where everything that had to be undone was.
///
/// # Errors
/// Where it cannot start, in which case nothing was changed.
pub async fn run(
    options: Options,
    stop: watch::Receiver<Option<Stop>>,
) -> Result<bool, AgentError> {
    let hierarchy = Hierarchy::detect(&options.proc_root, options.cgroup_root.as_deref())?;
    let now = clock::boot_time();
    proc_is_there(&options, &hierarchy, now)?;
    let metrics = Arc::new(Metrics::new(now, options.pod_data));
    let server = Server::find(options.kubeconfig.as_deref()).await?;
    let client = server.client(metrics.clone())?;
    let own = server.client(metrics.clone())?;
    let listener = serve::listen(options.listen)?;
    let serving = tokio::spawn(serve::serve(listener, metrics.clone()));
    let links = Links::default();
    let vitals = Vitals::start(&client, own, &options, &metrics, links.clone(), now);
    let agent = Agent::new(client, options, hierarchy, metrics, vitals, links, now)?;
    let ended = Box::pin(agent.run(stop)).await;
    serving.abort();
    ended
}

/// Undoes what an agent left in force on this node, and tells each file; true where nothing is left.
///
/// # Errors
/// Where an agent still runs on that state directory, or the journal cannot be trusted: nothing was changed then.
pub async fn restore(options: &Options) -> Result<bool, AgentError> {
    let hierarchy = Hierarchy::detect(&options.proc_root, options.cgroup_root.as_deref())?;
    let client = match client::connect(options.kubeconfig.as_deref()).await {
        Ok(client) => Some(client),
        Err(error) => {
            tracing::warn!("{error}: a taint of ours stays");
            None
        }
    };
    let (client, now) = (client.as_ref(), clock::boot_time());
    undo::undo_left(options, hierarchy, client, "`--restore`", now).await
}

fn proc_is_there(
    options: &Options,
    hierarchy: &Hierarchy,
    now: BootTime,
) -> Result<(), AgentError> {
    let mut sampler = Sampler::new(&options.proc_root, hierarchy.clone());
    let mut sample = Sample::default();
    sampler.sample_node(now, &Demand::default(), &mut sample);
    if sample.node.cpu.is_some() && sample.node.memory.is_some() {
        return Ok(());
    }
    let fault = sampler.faults().first();
    Err(AgentError::Proc {
        root: options.proc_root.clone(),
        reason: fault.map_or_else(
            || "there is no `stat` or no `meminfo` in it".to_owned(),
            ToString::to_string,
        ),
    })
}
