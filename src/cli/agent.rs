//! `plimsoll agent`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::run::StateDir;
use super::{LEASE_NAMESPACE, duration, logging, runtime};
use crate::node::agent::{self, AgentError, Options, PodData, PodRef, Stop};
use crate::node::{direct_report, heartbeat};

/// Where the chart mounts what direct reports need.
const CREDENTIALS: &str = "/var/run/secrets/plimsoll.dev/report";

const HELP: &str = "\
Keeps what the NodeWatermark of one Kubernetes node says: throttles its pods, keeps new pods away by a taint, and \
evicts, when the node goes over its marks; undoes all of it afterwards. Runs once on each node, as a DaemonSet of \
plimsoll's Helm chart. While the API server or the controller is away it goes on throttling by the rules it has, which \
it keeps in --state-dir, also over a restart of its own.

Examples:
  What the DaemonSet runs:
    plimsoll agent --node-name $(NODE_NAME) --cgroup-root /host/sys/fs/cgroup --net-dev /host/proc/1/net/dev
  On a node itself, as root, with an administrator's kubeconfig (that of the node's kubelet has too few rights):
    plimsoll agent --node-name worker-1 --kubeconfig /root/.kube/config
  Undo everything that an agent left on this node (cgroups first, the taint and condition where the API answers):
    plimsoll agent --restore --node-name worker-1
  What it makes of the node's rules:
    kubectl get nodewatermark; kubectl describe nodewatermark worker-1
  How loaded it finds the node (measured anew every 10 s, and after a change of more than 5 %):
    kubectl port-forward -n plimsoll $POD 8080 & sleep 1; curl http://127.0.0.1:8080/v1/node-metric
  The same told to the controller within seconds, so that the Lease is renewed only every 60 s (kubectl get nodemetrics):
    --report-service plimsoll-report --report-credentials /var/run/secrets/plimsoll.dev/report
  Whether it is well, and how loaded the node is: the Lease that it renews every 10 s while its sampling loop turns:
    plimsoll top

SIGTERM: where the agent's own DaemonSet (--namespace, --pod-name) is deleted, being deleted, or does not select this \
node any more, and where the API server refuses to say (401, 403), everything is undone; otherwise what is in force \
stays, for the next agent to take over. Ctrl-C undoes everything.

Exit status: 0 ended as asked, 1 something could not be undone, or another agent runs on this node, 2 could not start.";

/// Arguments of `plimsoll agent`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Name of this node's Node object
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: String,

    #[command(flatten)]
    state_dir: StateDir,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// The kubelet's `cgroupRoot`, below which `kubepods` stands [default: wherever this node's pods are found, below
    /// the root or one folder further down]
    #[arg(long, value_name = "CGROUP")]
    kubelet_cgroup_root: Option<String>,

    /// Where proc is mounted: a container's own will do, but for --net-dev
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc_root: PathBuf,

    /// The node's /proc/1/net/dev [default: that of --proc-root]
    #[arg(long, value_name = "FILE")]
    net_dev: Option<PathBuf>,

    /// The node's own address, where exporters are asked that a policy names no host of
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "NODE_ADDRESS",
        default_value = "127.0.0.1"
    )]
    node_address: IpAddr,

    /// Read the node's files, and what is in force, at least this often
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "1s")]
    sample_interval: Duration,

    /// Where /livez, /readyz and /metrics are served to everybody, and /v1/node-metric to who connects over loopback; [::] is
    /// all addresses, of IPv4 too
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:8080")]
    listen: SocketAddr,

    /// Series of single pods among the metrics, which everybody who reaches --listen may read: of the ten that use most of
    /// the node, and of the ten that are throttled most
    #[arg(long)]
    pod_metrics: bool,

    /// Serve /v1/node-metric, which names the busiest pods, to everybody who reaches --listen
    #[arg(long)]
    open_node_metric: bool,

    /// Namespace of the agent's own pod
    #[arg(
        long,
        value_name = "NAME",
        env = "POD_NAMESPACE",
        requires = "pod_name"
    )]
    namespace: Option<String>,

    /// Name of the agent's own pod: the pod is never acted on, and its owner is the `DaemonSet` that SIGTERM asks about
    #[arg(long, value_name = "NAME", env = "POD_NAME", requires = "namespace")]
    pod_name: Option<String>,

    /// Namespace of the Leases that agents renew as their heartbeat; it has to exist
    #[arg(long, value_name = "NAME", default_value = LEASE_NAMESPACE)]
    lease_namespace: String,

    /// Renew the Lease only so often while direct reports to the controller are acknowledged, from 10s to 2m; it is
    /// every 10 s otherwise
    #[arg(long, value_name = "DURATION", value_parser = renew_interval, default_value = "60s")]
    lease_renew_interval: Duration,

    /// Report to the ready replicas of the controller behind this Service in --namespace, over TLS [default: no direct
    /// reports, the Lease alone tells that the agent is well]
    #[arg(long, value_name = "NAME", requires = "namespace")]
    report_service: Option<String>,

    /// Folder with the `token` that direct reports bear (audience plimsoll.dev/report) and the `ca.crt` that the
    /// controller's certificate is verified by; both are read again when they change, and waited for while they are missing
    #[arg(long, value_name = "DIR", default_value = CREDENTIALS)]
    report_credentials: PathBuf,

    /// Undo everything that an agent left in force on this node, tell each file, and leave. Needs no API server, but
    /// without one the taint and the condition stay
    #[arg(long)]
    restore: bool,
}

/// An interval that is no shorter than the usual one, and short enough that the controller tells a silent agent from a
/// slow one in time.
fn renew_interval(text: &str) -> Result<Duration, String> {
    let interval = duration::positive(text)?;
    let allowed = heartbeat::INTERVAL..=Duration::from_mins(2);
    let fits = allowed.contains(&interval).then_some(interval);
    fits.ok_or_else(|| "write a time from 10s to 2m, such as 60s".to_owned())
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    logging::init();
    match runtime::start()?.block_on(args.start()) {
        Err(error) if error.is_busy() => {
            tracing::error!("{error}");
            Ok(ExitCode::from(1))
        }
        ended => Ok(ExitCode::from(u8::from(!ended?))),
    }
}

impl Args {
    async fn start(&self) -> Result<bool, AgentError> {
        let options = self.options();
        if self.restore {
            return agent::restore(&options).await;
        }
        let (sender, stop) = watch::channel(None);
        let signals = tokio::spawn(signals(sender));
        let ended = agent::run(options, stop).await;
        signals.abort();
        ended
    }

    fn options(&self) -> Options {
        let own = self.namespace.clone().zip(self.pod_name.clone());
        Options {
            kubeconfig: self.kubeconfig.clone(),
            node: self.node_name.clone(),
            state_dir: self.state_dir.state_dir.clone(),
            cgroup_root: self.cgroup_root.clone(),
            kubelet_root: self.kubelet_cgroup_root.clone(),
            proc_root: self.proc_root.clone(),
            net_dev: self.net_dev.clone(),
            node_address: self.node_address,
            sample_interval: self.sample_interval,
            listen: self.listen,
            pod_data: PodData {
                series: self.pod_metrics,
                node_metric: self.open_node_metric,
            },
            own: own.map(|(namespace, name)| PodRef { namespace, name }),
            lease_namespace: self.lease_namespace.clone(),
            lease_renew_interval: self.lease_renew_interval,
            reports: self.reports(),
        }
    }

    fn reports(&self) -> Option<direct_report::Options> {
        Some(direct_report::Options {
            service: self.report_service.clone()?,
            namespace: self.namespace.clone()?,
            credentials: self.report_credentials.clone(),
            node: self.node_name.clone(),
        })
    }
}

/// Tells of the first signal. The sender is kept until the end: a dropped one would look like another.
async fn signals(stop: watch::Sender<Option<Stop>>) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        // Without handlers the signals do what they do to any process.
        tracing::warn!(
            "failed to wait for signals: what is in force stays so when this process is ended"
        );
        return std::future::pending().await;
    };
    let why = tokio::select! {
        _ = terminate.recv() => Stop::Terminated,
        _ = interrupt.recv() => Stop::Interrupted,
    };
    stop.send_replace(Some(why));
    std::future::pending::<()>().await;
}
