//! `plimsoll agent`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::cluster_args::ClusterArgs;
use super::logging::{self, LogArgs};
use super::period::EvaluationPeriod;
use super::run::StateDirArgs;
use super::windows::WindowsFile;
use super::{LEASE_NAMESPACE, duration, runtime};
use crate::agent::{self, AgentError, Options, PodData, PodRef, Stop};
use crate::agent::{direct_report, heartbeat};
use crate::crd::crane_annotations::Zone;

/// Where the chart mounts the credentials of direct reports.
const CREDENTIALS: &str = "/var/run/secrets/plimsoll.dev/report";

const HELP: &str = "\
Enforces the rules in the NodeWatermark of this node. While the node exceeds a threshold, it throttles pods, taints the \
node against new pods, or requests evictions; afterwards it restores everything. The Helm chart runs it on each node, as \
a DaemonSet. Rules are saved in --state-dir: while the API server or the controller is unavailable, throttling continues \
by the last known rules, even after a restart.

Examples:
  As in the DaemonSet:
    plimsoll agent --node-name $(NODE_NAME) \\
      --cgroup-root /host/sys/fs/cgroup --net-dev /host/proc/1/net/dev
  On the node itself, as root, with the kubeconfig of an administrator:
    plimsoll agent --node-name worker-1 --kubeconfig /root/.kube/config
  Restore everything that an agent changed on this node:
    plimsoll agent --restore --node-name worker-1
  See the state of the node's rules:
    kubectl get nodewatermark; kubectl describe nodewatermark worker-1
  See the load that the agent measures:
    kubectl port-forward -n plimsoll $POD 8080 &
    curl http://127.0.0.1:8080/v1/node-metric
  Also report the load to the controller, for kubectl get nodemetrics:
    plimsoll agent --node-name $(NODE_NAME) \\
      --report-service plimsoll-report \\
      --report-credentials /var/run/secrets/plimsoll.dev/report
  See whether the agents work, and the load of their nodes:
    plimsoll top

SIGTERM restores everything if the agent's DaemonSet (--namespace, --pod-name) is deleted, or no longer selects this \
node, or if the API server denies access to it (401, 403). Otherwise limits stay in force for the next agent to take \
over. Ctrl-C restores everything.

Exit status: 0 stopped as requested, 1 something could not be restored, or another agent runs on this node, 2 could not start.";

/// Arguments of `plimsoll agent`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// Name of this node's Node object
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node_name: String,

    #[command(flatten)]
    state_dir: StateDirArgs,

    /// Where the cgroup trees are mounted [default: found among the mounts]
    #[arg(long, value_name = "DIR")]
    cgroup_root: Option<PathBuf>,

    /// The kubelet's `cgroupRoot`, the parent of `kubepods` [default: found in the cgroup root or one level below]
    #[arg(long, value_name = "CGROUP")]
    kubelet_cgroup_root: Option<String>,

    /// Where proc is mounted; a container's own works, except for --net-dev
    #[arg(long, value_name = "DIR", default_value = "/proc")]
    proc_root: PathBuf,

    /// Where sys is mounted, to see whether a `sched_ext` scheduler is attached
    #[arg(long, value_name = "DIR", default_value = "/sys")]
    sys_root: PathBuf,

    /// The node's /proc/1/net/dev [default: that of --proc-root]
    #[arg(long, value_name = "FILE")]
    net_dev: Option<PathBuf>,

    /// Address of the node, used for exporters whose policy names no host
    #[arg(
        long,
        value_name = "ADDRESS",
        env = "NODE_ADDRESS",
        default_value = "127.0.0.1"
    )]
    node_address: IpAddr,

    #[command(flatten)]
    windows: WindowsFile,

    /// Read the node's metrics, and the limits in force, at least this often
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "1s")]
    sample_interval: Duration,

    #[command(flatten)]
    evaluation: EvaluationPeriod,

    /// Address of /livez, /readyz and /metrics, without authentication, and of /v1/node-metric for loopback clients only;
    /// [::] is all addresses, including IPv4
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:8080")]
    listen: SocketAddr,

    /// Add metrics of the ten busiest and the ten most throttled pods; anyone who can reach --listen can read them
    #[arg(long)]
    pod_metrics: bool,

    /// Serve /v1/node-metric, which names the busiest pods, to anyone who can reach --listen
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

    /// Name of the agent's own pod, which is never throttled or evicted; SIGTERM checks the `DaemonSet` that owns it
    #[arg(long, value_name = "NAME", env = "POD_NAME", requires = "namespace")]
    pod_name: Option<String>,

    /// Namespace of the Leases that agents renew as a heartbeat; it must exist
    #[arg(long, value_name = "NAME", default_value = LEASE_NAMESPACE)]
    lease_namespace: String,

    /// How often to renew the Lease while the controller acknowledges direct reports, from 10s to 2m; otherwise it is
    /// renewed every 10 s
    #[arg(long, value_name = "DURATION", value_parser = renew_interval, default_value = "60s")]
    lease_renew_interval: Duration,

    /// Report over TLS to the controller replicas behind this Service in --namespace [default: no direct reports, only the
    /// Lease]
    #[arg(long, value_name = "NAME", requires = "namespace")]
    report_service: Option<String>,

    /// Directory with `token`, the bearer token of direct reports (audience plimsoll.dev/report), and `ca.crt`, which
    /// verifies the controller's certificate; both are read again when they change, and may appear later
    #[arg(long, value_name = "DIR", default_value = CREDENTIALS)]
    report_credentials: PathBuf,

    #[command(flatten)]
    placement: Placement,

    #[command(flatten)]
    log: LogArgs,

    /// Restore everything that an agent changed on this node, list each file, and exit. Without an API server the taint
    /// and the condition stay
    #[arg(long)]
    restore: bool,
}

/// What schedulers see of the node's load.
#[derive(Debug, clap::Args)]
struct Placement {
    /// Write the node's load into its label plimsoll.dev/load, so that schedulers avoid loaded nodes (0, 5, ... 95, 100: the
    /// rules would act); false removes the label
    #[arg(long, value_name = "true|false", action = clap::ArgAction::Set, default_value_t = true)]
    load_label: bool,

    /// Write the annotations that crane-scheduler reads, `cpu_usage_avg_5m` and others, instead of its controller; ZONE is the
    /// time zone that crane-scheduler has in TZ, or it silently ignores them [default: they are removed; without ZONE:
    /// Asia/Shanghai]
    #[arg(long, value_name = "ZONE", num_args = 0..=1, require_equals = true, default_missing_value = "Asia/Shanghai")]
    crane_annotations: Option<Zone>,

    /// Set the taint plimsoll.dev/busy (`PreferNoSchedule`) at a load of 95, until it is below 85; on at most 40 percent of a
    /// zone's nodes, so it needs --report-service
    #[arg(long, requires = "report_service")]
    soft_taint: bool,
}

/// At least the default interval, and short enough for the controller to detect an unresponsive agent in time.
fn renew_interval(text: &str) -> Result<Duration, String> {
    let interval = duration::positive(text)?;
    let allowed = heartbeat::INTERVAL..=Duration::from_mins(2);
    let fits = allowed.contains(&interval).then_some(interval);
    fits.ok_or_else(|| "write a time from 10s to 2m, such as 60s".to_owned())
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    logging::init(args.log.format);
    let options = args.options()?;
    match runtime::start()?.block_on(args.start(options)) {
        Err(error) if error.is_another_agent() => {
            tracing::error!("{error}");
            Ok(ExitCode::from(1))
        }
        restored => Ok(ExitCode::from(u8::from(!restored?))),
    }
}

impl Args {
    async fn start(&self, options: Options) -> Result<bool, AgentError> {
        if self.restore {
            return agent::restore(&options).await;
        }
        let (sender, stop) = watch::channel(None);
        let signals = tokio::spawn(signals(sender));
        let result = agent::run(options, stop).await;
        signals.abort();
        result
    }

    fn options(&self) -> anyhow::Result<Options> {
        let own = self.namespace.clone().zip(self.pod_name.clone());
        Ok(Options {
            cluster: self.cluster.source(),
            node: self.node_name.clone(),
            state_dir: self.state_dir.state_dir.clone(),
            cgroup_root: self.cgroup_root.clone(),
            kubelet_root: self.kubelet_cgroup_root.clone(),
            proc_root: self.proc_root.clone(),
            sys_root: self.sys_root.clone(),
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
            evaluation_period: self.evaluation.period,
            windows: self.windows.read()?,
            reports: self.reports(),
            load_label: self.placement.load_label,
            crane_annotations: self.placement.crane_annotations.clone(),
            soft_taint: self.placement.soft_taint,
        })
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

/// Forwards the first signal. The sender is kept: dropping it would look like a second signal.
async fn signals(stop: watch::Sender<Option<Stop>>) {
    let (Ok(mut terminate), Ok(mut interrupt)) = (
        signal(SignalKind::terminate()),
        signal(SignalKind::interrupt()),
    ) else {
        tracing::warn!(
            "failed to install signal handlers: limits stay in force when this process is stopped"
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
