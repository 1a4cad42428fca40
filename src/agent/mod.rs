//! The agent of one Kubernetes node: it watches the node's rules and pods and runs the same machine as `plimsoll run`.
//!
//! ```text
//! API server ─► feed ─► rules, pods ─► Machine ─► cgroups
//!      ▲                                  │
//!      └── taint, status ◄────────────────┤
//! leader ◄── eviction requests, reports ◄─┘
//! ```

mod backend;
mod cgroup_locator;
pub mod direct_report;
mod emergency_stop;
pub mod eviction;
mod feed;
pub mod heartbeat;
pub mod load_signs;
mod metrics;
mod node_lock;
mod objects;
mod pods;
mod reconcile;
pub mod regret;
pub mod report;
mod reporter;
mod restore;
mod rules;
mod saved_state;
mod shutdown;
mod soft_taint;
mod start;
pub mod taint;
mod telemetry;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::watch;

use self::direct_report::Links;
use self::metrics::AgentMetrics;
pub use self::metrics::PodData;
use self::node_lock::NodeLockError;
pub use self::pods::PodRef;
use self::reconcile::Agent;
use self::telemetry::Telemetry;
use crate::agent::backend::ApiServer;
use crate::clock;
use crate::cluster::client::{self, ClientError, Server};
use crate::cluster::kubeconfig::ClusterSource;
use crate::crd::crane_annotations::Zone;
use crate::engine::Demand;
use crate::engine::sample::Sample;
use crate::engine::time::BootTime;
use crate::engine::window::CustomWindow;
use crate::node::actuate::throttle::OpenError;
use crate::node::cgroup::Hierarchy;
use crate::node::cgroup::layout::LayoutError;
use crate::node::collect::Sampler;
use crate::node::journal::LockError;
use crate::node::machine::{self, MachineError};
use crate::serve::{self, ServeError};

type Machine = machine::Machine<ApiServer>;

/// Options of the command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// How to reach the API server.
    pub cluster: ClusterSource,
    /// Name of our Node.
    pub node: String,
    /// The directory of the files that outlive the process.
    pub state_dir: PathBuf,
    /// Where the cgroup trees are mounted; detected if absent.
    pub cgroup_root: Option<PathBuf>,
    /// The kubelet's `cgroupRoot`; detected if absent.
    pub kubelet_root: Option<String>,
    /// Where a `/proc` is mounted.
    pub proc_root: PathBuf,
    /// Where `/sys` is mounted.
    pub sys_root: PathBuf,
    /// The node's `/proc/1/net/dev`, if that `/proc` is not the node's.
    pub net_dev: Option<PathBuf>,
    /// The node's own address, for probes without a host.
    pub node_address: IpAddr,
    /// The node's files are read at least this often.
    pub sample_interval: Duration,
    /// Where probes and metrics are served.
    pub listen: SocketAddr,
    /// Which data of single pods are served there.
    pub pod_data: PodData,
    /// The agent's own pod.
    pub own: Option<PodRef>,
    /// The namespace of the agents' Leases.
    pub lease_namespace: String,
    /// How often the Lease is renewed while direct reports are acknowledged.
    pub lease_renew_interval: Duration,
    /// Write the node's load as a label of its Node; otherwise the label is removed.
    pub load_label: bool,
    /// Write crane's annotations with times of this zone; absent: ours are removed.
    pub crane_annotations: Option<Zone>,
    /// Set the soft taint while the node is busy.
    pub soft_taint: bool,
    /// Time between two evaluations of the rules.
    pub evaluation_period: Duration,
    /// The windows of the node's settings.
    pub windows: Arc<[CustomWindow]>,
    /// Where direct reports go; absent: none are sent.
    pub reports: Option<direct_report::Options>,
}

/// Why the agent stops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// SIGINT from a terminal: restore everything.
    Interrupted,
    /// SIGTERM from the kubelet: what is in force stays, unless the agent's `DaemonSet` or its rights are gone.
    Terminated,
}

/// Why the agent cannot start or continue. What is in force stays in force.
#[derive(Debug, Error)]
pub enum AgentError {
    /// No API server can be reached.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// No cgroup trees were found.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// No usable `/proc`.
    #[error(
        "failed to read CPU time or memory from {}: {reason}; name the directory that proc is mounted at with --proc-root, usually /proc",
        root.display()
    )]
    Proc {
        /// The directory.
        root: PathBuf,
        /// The first thing that went wrong there.
        reason: String,
    },
    /// The kernel's boot id cannot be read.
    #[error("failed to read the kernel's boot id: {0}; is /proc mounted?")]
    BootId(#[source] io::Error),
    /// The lock of the node cannot be acquired.
    #[error(transparent)]
    Lock(#[from] NodeLockError),
    /// The state directory or its journal.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// The address cannot be listened on.
    #[error(transparent)]
    Serve(#[from] ServeError),
}

impl AgentError {
    /// Another agent runs on the node.
    pub const fn is_another_agent(&self) -> bool {
        matches!(
            self,
            Self::Lock(NodeLockError::Busy(_))
                | Self::Machine(MachineError::Open(OpenError::Lock(LockError::Busy { .. })))
        )
    }
}

/// One series of every metric of the agent, in the text format of `OpenMetrics`: for the documentation.
pub fn metrics_example() -> String {
    AgentMetrics::example()
}

/// Runs until it is stopped; true if everything that had to be restored was.
///
/// # Errors
/// If it cannot start; nothing was changed then.
pub async fn run(
    options: Options,
    stop: watch::Receiver<Option<Stop>>,
) -> Result<bool, AgentError> {
    let hierarchy = Hierarchy::detect(&options.proc_root, options.cgroup_root.as_deref())?;
    let now = clock::boot_time();
    check_proc(&options, &hierarchy, now)?;
    let metrics = Arc::new(AgentMetrics::new(now, options.pod_data, &options.windows));
    let server = Server::find(&options.cluster).await?;
    let client = server.client(metrics.clone())?;
    let heartbeat_client = server.client(metrics.clone())?;
    let listener = serve::listen(options.listen)?;
    let serving = tokio::spawn(serve::serve(listener, metrics.clone()));
    let links = Links::default();
    let telemetry = Telemetry::start(
        &client,
        heartbeat_client,
        &options,
        &metrics,
        links.clone(),
        now,
    );
    let agent = Agent::new(client, options, hierarchy, metrics, telemetry, links, now)?;
    let result = Box::pin(agent.run(stop)).await;
    serving.abort();
    result
}

/// Restores what an agent left in force on this node and logs each file; true if nothing is left.
///
/// # Errors
/// If an agent still uses that state directory, or the journal is corrupt; nothing was changed then.
pub async fn restore(options: &Options) -> Result<bool, AgentError> {
    let hierarchy = Hierarchy::detect(&options.proc_root, options.cgroup_root.as_deref())?;
    let client = match client::connect(&options.cluster).await {
        Ok(client) => Some(client),
        Err(error) => {
            tracing::warn!("{error}: the node's taint, if there is one, stays");
            None
        }
    };
    let (client, now) = (client.as_ref(), clock::boot_time());
    restore::restore_leftovers(options, hierarchy, client, "`--restore`", now).await
}

fn check_proc(options: &Options, hierarchy: &Hierarchy, now: BootTime) -> Result<(), AgentError> {
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
            || "it has no `stat` or no `meminfo`".to_owned(),
            ToString::to_string,
        ),
    })
}
