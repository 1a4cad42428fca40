//! `plimsoll controller`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::cluster_args::ClusterArgs;
use super::eviction_budgets::EvictionArgs;
use super::logging::{self, LogArgs};
use super::period::EvaluationPeriod;
use super::windows::AgentWindowsFile;
use super::{FileErrors, LEASE_NAMESPACE, duration, runtime, settings_file};
use crate::clock;
use crate::cluster::client::Server;
use crate::crd;
use crate::engine::window::CustomWindow;
use crate::evictions;
use crate::metrics_api::{self, CertificateSource, ObjectNames, ReportEndpoint, TlsFiles, reports};
use crate::polling;
use crate::reconcilers::cap::Cap;
use crate::reconcilers::metrics::ControllerMetrics;
use crate::reconcilers::reconciler::ControllerSettings;
use crate::reconcilers::run::{self, Options};
use crate::scheduler_api::{self, PolicyFile, PolicyFileError};

const HELP: &str = "\
Compiles NodeQOS, PodQOS and AvoidanceAction objects into one NodeWatermark per node, which the node's agent enforces, \
and reports the result in the status of each object. Run two or more replicas: one leads, and another takes over within \
10 s. It stores nothing on disk. Agents request evictions from the leader, which evicts a pod if the node's rules, PodQOS \
and the budgets below allow it.

Examples:
  On your machine, against the cluster of your kubeconfig:
    plimsoll crds | kubectl apply --server-side -f -
    plimsoll controller --kubeconfig ~/.kube/config --namespace default
  On Kubernetes 1.33 the definitions are those of:
    plimsoll crds --kubernetes 1.33
  See the result:
    kubectl get nodeqoss,podqoss,avoidanceactions,nodewatermarks
    kubectl describe nodeqos NAME

Rollout: an edit that makes a NodeQOS or PodQOS stricter first goes to 1 % of its nodes (at least one) for at least a \
minute. If more than 20 % of these start to act, it stops there. Deleting or relaxing a policy takes effect on all nodes \
at once. The first nodes must be Ready with a reporting agent; if there is none, the edit waits, and the condition \
RolledOut says so. To skip the rollout: kubectl annotate nodeqos NAME plimsoll.dev/rollout=immediate

Exit status: 0 stopped by SIGTERM or Ctrl-C, 2 could not start.";

/// Arguments of `plimsoll controller`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    #[command(flatten)]
    cluster: ClusterArgs,

    /// Namespace of the Lease used for leader election; it must exist
    #[arg(
        long,
        value_name = "NAME",
        env = "POD_NAMESPACE",
        default_value = "plimsoll"
    )]
    namespace: String,

    /// Name of the Lease used for leader election
    #[arg(long, value_name = "NAME", default_value = "plimsoll-controller")]
    lease_name: String,

    /// Namespace of the Leases that agents renew as a heartbeat
    #[arg(long = "lease-namespace", value_name = "NAME", default_value = LEASE_NAMESPACE)]
    agents: String,

    /// Address of /livez, /readyz and /metrics; [::] is all addresses, including IPv4
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:8080")]
    listen: SocketAddr,

    /// Address of the aggregated API metrics.plimsoll.dev (node load), over TLS [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_api_listen: Option<SocketAddr>,

    /// Service in --namespace through which API servers reach --metrics-api-listen
    #[arg(long, value_name = "NAME", default_value = "plimsoll-metrics")]
    metrics_api_service: String,

    /// Secret in --namespace with the certificate authority of --metrics-api-listen and --report-listen; created if missing
    #[arg(long, value_name = "NAME", default_value = "plimsoll-metrics-ca")]
    metrics_api_secret: String,

    /// PEM certificate chain of --metrics-api-listen and --report-listen; read again when it changes [default: issued by the
    /// authority in --metrics-api-secret]
    #[arg(long, value_name = "FILE", requires_all = ["tls_private_key_file", "tls_ca_file"])]
    tls_cert_file: Option<PathBuf>,

    /// PEM private key of --tls-cert-file
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_private_key_file: Option<PathBuf>,

    /// PEM certificate authorities that clients verify --tls-cert-file with
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_ca_file: Option<PathBuf>,

    /// Address where agents report node load and request evictions, over TLS [default: not served; agents then renew their
    /// Leases every 10 s, and no pod is evicted]
    #[arg(long, value_name = "ADDRESS:PORT")]
    report_listen: Option<SocketAddr>,

    /// Headless Service in --namespace through which agents reach --report-listen
    #[arg(long, value_name = "NAME", default_value = "plimsoll-report")]
    report_service: String,

    /// ConfigMap in --namespace with the certificate authority of --report-listen, for agents; created if missing
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "NAME", default_value = "plimsoll-report-ca")]
    report_ca_configmap: String,

    /// ServiceAccount of the agents, in --namespace; only its tokens are accepted, each for the node of its pod
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "NAME", default_value = "plimsoll-agent")]
    report_account: String,

    /// Address where schedulers and the descheduler ask for node loads, over plain HTTP: the extender of kube-scheduler below
    /// /extender, the page of load-watcher for Trimaran's plugins, and queries in the format of Prometheus (docs/scheduling-integrations.md)
    /// [default: not served]
    #[arg(long, value_name = "ADDRESS:PORT", requires = "report_listen")]
    scheduler_listen: Option<SocketAddr>,

    /// Policy file of crane-scheduler (DynamicSchedulerPolicy) for the extender of --scheduler-listen; read
    /// again when it changes [default: by load line]
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "FILE", requires = "scheduler_listen")]
    scheduler_policy: Option<PathBuf>,

    /// YAML file of exporters that are polled for the load of nodes from which no agent reports (docs/scheduling-integrations.md), such as
    /// `services: [{namespace: plimsoll, name: plimsoll-agent}]`; read once [default: none are polled]
    #[arg(long, value_name = "FILE", requires = "report_listen")]
    poll: Option<PathBuf>,

    /// Address of this replica, to which others forward requests while it leads
    #[arg(long, value_name = "ADDRESS", env = "POD_IP")]
    pod_ip: Option<IpAddr>,

    /// Maximum number (3) or share (30%) of nodes tainted NoSchedule at once, of those that any policy may taint; any more
    /// get PreferNoSchedule instead, within seconds
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "NODES", default_value = "30%")]
    max_unschedulable: Cap,

    /// How fast a stricter policy is rolled out to the remaining nodes
    #[arg(long, value_name = "NODES", default_value = "100", value_parser = rate)]
    rollout_nodes_per_second: f64,

    /// Remove plimsoll's taint from a Ready node whose agent has not reported for this long. At least 6m: an agent without
    /// a Lease may report only every 5 minutes
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration::positive)]
    dead_agent_after: Duration,

    /// For tests: allows --dead-agent-after below 6m
    #[arg(long, hide = true)]
    short_dead_agent_after: bool,

    #[command(flatten)]
    evaluation: EvaluationPeriod,

    #[command(flatten)]
    windows: AgentWindowsFile,

    #[command(flatten)]
    log: LogArgs,

    #[command(flatten)]
    evictions: EvictionArgs,
}

/// Agents may report only every five minutes; the sixth is for delays.
const MIN_DEAD_AGENT_AFTER: Duration = Duration::from_mins(6);

fn rate(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    number
        .filter(|rate| rate.is_finite() && *rate > 0.0)
        .ok_or_else(|| "write a number above 0, such as 100 or 0.5".to_owned())
}

impl Args {
    fn metrics_api(&self, metrics: &ControllerMetrics) -> Option<metrics_api::Options> {
        let account = format!("{}:{}", self.namespace, self.report_account);
        let agents = format!("system:serviceaccount:{account}");
        let reports = self.report_listen.map(|listen| reports::Options {
            listen,
            agents,
            metrics: metrics.reports.clone(),
            evictions: evictions::Options {
                namespace: self.namespace.clone(),
                record: self.evictions.eviction_record.clone(),
                budgets: self.evictions.budgets(),
                lease_namespace: self.agents.clone(),
                metrics: metrics.evictions.clone(),
            },
        });
        if self.metrics_api_listen.is_none() && reports.is_none() {
            return None;
        }
        Some(metrics_api::Options {
            listen: self.metrics_api_listen,
            names: ObjectNames {
                namespace: self.namespace.clone(),
                service: self.metrics_api_service.clone(),
                certificate: self.certificate(),
                reports: reports.as_ref().map(|_| ReportEndpoint {
                    service: self.report_service.clone(),
                    bundle: self.report_ca_configmap.clone(),
                }),
                api: self.metrics_api_listen.is_some(),
            },
            reports,
        })
    }

    fn certificate(&self) -> CertificateSource {
        let files = (
            &self.tls_cert_file,
            &self.tls_private_key_file,
            &self.tls_ca_file,
        );
        match files {
            (Some(certificate), Some(key), Some(authorities)) => {
                CertificateSource::Files(TlsFiles {
                    certificate: certificate.clone(),
                    key: key.clone(),
                    authorities: authorities.clone(),
                })
            }
            _ => CertificateSource::Secret(self.metrics_api_secret.clone()),
        }
    }

    fn scheduler_api(
        &self,
        windows: &[CustomWindow],
        metrics: &ControllerMetrics,
    ) -> anyhow::Result<Option<scheduler_api::Options>> {
        let Some(listen) = self.scheduler_listen else {
            return Ok(None);
        };
        let custom = windows.iter().map(|window| window.metric.name.clone());
        let open = |path: &PathBuf| {
            let opened = PolicyFile::open(path.clone(), custom.collect());
            opened.map_err(|error| match error {
                PolicyFileError::Invalid(errors) => anyhow::Error::from(FileErrors(errors)),
                error @ PolicyFileError::Read(..) => error.into(),
            })
        };
        Ok(Some(scheduler_api::Options {
            listen,
            policy: self.scheduler_policy.as_ref().map(open).transpose()?,
            metrics: metrics.scheduler_api.clone(),
        }))
    }

    fn polling(&self, metrics: &ControllerMetrics) -> anyhow::Result<Option<polling::Options>> {
        let read = |path: &PathBuf| settings_file::read(path, crd::polling::read);
        let settings = self.poll.as_ref().map(read).transpose()?;
        Ok(settings.map(|settings| polling::Options {
            settings,
            metrics: metrics.polling.clone(),
        }))
    }

    fn address(&self) -> Option<SocketAddr> {
        let listen = self.metrics_api_listen.or(self.report_listen)?;
        let port = listen.port();
        self.pod_ip.map(|ip| SocketAddr::new(ip, port))
    }
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    logging::init(args.log.format);
    runtime::start()?.block_on(control(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn control(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.short_dead_agent_after || args.dead_agent_after >= MIN_DEAD_AGENT_AFTER,
        "--dead-agent-after {:?} is too short: agents may report only every 5 minutes, and healthy ones would lose their \
         taint; use 6m or more",
        args.dead_agent_after
    );
    let metrics = Arc::new(ControllerMetrics::default());
    let server = Server::find(&args.cluster.source()).await?;
    let identity = identity();
    let windows = args.windows.read()?.unwrap_or_default();
    let options = Options {
        settings: ControllerSettings {
            rollout_nodes_per_second: args.rollout_nodes_per_second,
            max_unschedulable: args.max_unschedulable,
            dead_agent_after: args.dead_agent_after,
            evaluation_period: args.evaluation.period,
            windows: Some(Arc::clone(&windows)),
        },
        namespace: args.namespace.clone(),
        lease: args.lease_name.clone(),
        agents: args.agents.clone(),
        listen: args.listen,
        metrics_api: args.metrics_api(&metrics),
        scheduler_api: args.scheduler_api(&windows, &metrics)?,
        polling: args.polling(&metrics)?,
        identity,
        address: args.address(),
    };
    tracing::info!(
        identity = options.identity,
        listen = %options.listen,
        "controller {}",
        env!("CARGO_PKG_VERSION")
    );
    let (stop, stopped) = watch::channel(false);
    let mut terminate = signal(SignalKind::terminate()).context("failed to wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("failed to wait for SIGINT")?;
    let signals = tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        stop.send_replace(true);
        // Keeps the sender: dropping it would look like a second signal.
        std::future::pending::<()>().await;
    });
    let result = Box::pin(run::run(server, options, metrics, stopped)).await;
    signals.abort();
    Ok(result?)
}

/// The host name (in a cluster, the pod's name) and the start time of the process.
fn identity() -> String {
    let host = nix::unistd::gethostname().ok();
    let host = host.and_then(|host| host.into_string().ok());
    let host = host.unwrap_or_else(|| "controller".to_owned());
    format!("{host}_{:x}", clock::wall_time().as_nanosecond())
}
