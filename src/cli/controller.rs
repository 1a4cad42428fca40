//! `plimsoll controller`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use super::eviction_budgets::EvictionArgs;
use super::{LEASE_NAMESPACE, duration, logging, runtime};
use crate::cluster::client::Server;
use crate::cluster::clock;
use crate::evictions;
use crate::metrics_api::{self, CertificatePlace, Place, ReportPlace, TlsFiles, reports};
use crate::reconcilers::cap::Cap;
use crate::reconcilers::metrics::Metrics;
use crate::reconcilers::reconciler::Settings;
use crate::reconcilers::run::{self, Options};

const HELP: &str = "\
Compiles NodeQOS, PodQOS and AvoidanceAction into one NodeWatermark a node, which the node's agent keeps, and says \
in the status of each object what it makes of it. Run two or more replicas: one leads, the others take over within \
10 s. Nothing is kept on disk; any restart converges. Agents ask the leader to evict pods; it does where the node's \
rules, PodQOS and the budgets below allow it.

Examples:
  On your machine, against the cluster of your kubeconfig (install the definitions first):
    plimsoll crds | kubectl apply --server-side -f -    (on Kubernetes 1.33: plimsoll crds --kubernetes 1.33)
    plimsoll controller --kubeconfig ~/.kube/config --namespace default
  What it makes of the cluster:
    kubectl get nodeqoss,podqoss,avoidanceactions,nodewatermarks
    kubectl describe nodeqos NAME

An edit that makes a NodeQOS or PodQOS stricter goes to 1 % of its nodes first (at least one), for at least a minute, \
and stops there when more than 20 % of these newly act; deleting and loosening go to all nodes at once. Only nodes that \
are Ready with an agent that reports can be the first; where there is none the edit waits, and the condition RolledOut \
says so. To send an edit to all nodes at once: kubectl annotate nodeqos NAME plimsoll.dev/rollout=immediate

Exit status: 0 ended by SIGTERM or Ctrl-C, 2 could not start.";

/// Arguments of `plimsoll controller`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,

    /// Namespace of the Lease by which replicas elect their leader; it has to exist
    #[arg(
        long,
        value_name = "NAME",
        env = "POD_NAMESPACE",
        default_value = "plimsoll"
    )]
    namespace: String,

    /// Name of that Lease
    #[arg(long, value_name = "NAME", default_value = "plimsoll-controller")]
    lease_name: String,

    /// Namespace of the Leases that agents renew as their heartbeat
    #[arg(long = "lease-namespace", value_name = "NAME", default_value = LEASE_NAMESPACE)]
    agents: String,

    /// Where /livez, /readyz and /metrics are served; [::] is all addresses, of IPv4 too
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:8080")]
    listen: SocketAddr,

    /// Where the load of nodes is served over TLS, as the API metrics.plimsoll.dev [default: nowhere]
    #[arg(long, value_name = "ADDRESS:PORT")]
    metrics_api_listen: Option<SocketAddr>,

    /// The Service, in --namespace, by which API servers reach that address
    #[arg(long, value_name = "NAME", default_value = "plimsoll-metrics")]
    metrics_api_service: String,

    /// The Secret, in --namespace, in which replicas keep the certificate authority of that address, and of --report-listen;
    /// made if missing
    #[arg(long, value_name = "NAME", default_value = "plimsoll-metrics-ca")]
    metrics_api_secret: String,

    /// The certificate of --metrics-api-listen and --report-listen, in PEM with those between it and its authority; read again
    /// when it is replaced [default: replicas make their own, by the authority in --metrics-api-secret]
    #[arg(long, value_name = "FILE", requires_all = ["tls_private_key_file", "tls_ca_file"])]
    tls_cert_file: Option<PathBuf>,

    /// Its key, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_private_key_file: Option<PathBuf>,

    /// The certificate authorities by which others shall know it, in PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert_file")]
    tls_ca_file: Option<PathBuf>,

    /// Where agents report the load of their nodes, and ask for evictions, over TLS [default: nowhere; they then renew their
    /// Leases every 10 s, and no pod is evicted]
    #[arg(long, value_name = "ADDRESS:PORT")]
    report_listen: Option<SocketAddr>,

    /// The headless Service, in --namespace, by whose endpoints agents reach that address
    #[arg(long, value_name = "NAME", default_value = "plimsoll-report")]
    report_service: String,

    /// The ConfigMap, in --namespace, in which agents find the certificate authority of that address; made if missing
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "NAME", default_value = "plimsoll-report-ca")]
    report_ca_configmap: String,

    /// The agents' ServiceAccount, in --namespace: only its tokens are believed, each for the node of its pod
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "NAME", default_value = "plimsoll-agent")]
    report_account: String,

    /// Where other replicas reach this one, to pass requests on to the one that leads
    #[arg(long, value_name = "ADDRESS", env = "POD_IP")]
    pod_ip: Option<IpAddr>,

    /// So many of the nodes that any rule may close, those of all policies together, are at most closed to new pods at
    /// once, as a number (3) or a part (30%); further ones get, within seconds, a taint that prefers other nodes
    #[arg(long, value_name = "NODES", default_value = "30%")]
    max_unschedulable: Cap,

    /// How fast an edit that makes policies stricter goes to the rest of the nodes
    #[arg(long, value_name = "NODES", default_value = "100", value_parser = rate)]
    rollout_nodes_per_second: f64,

    /// An agent that was not heard for so long, while our taint is on its node and the node is Ready, is dead: its taint
    /// is taken away. Not below 6m: an agent that has no Lease may write as seldom as every 5 minutes
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration::positive)]
    silent_agent_after: Duration,

    /// For tests: takes a shorter --silent-agent-after, at which living agents count as dead
    #[arg(long, hide = true)]
    short_silence: bool,

    #[command(flatten)]
    evictions: EvictionArgs,
}

/// Agents write as seldom as every five minutes, and a write takes its way.
const LEAST_SILENCE: Duration = Duration::from_mins(6);

fn rate(text: &str) -> Result<f64, String> {
    let number = text.parse::<f64>().ok();
    number
        .filter(|rate| rate.is_finite() && *rate > 0.0)
        .ok_or_else(|| "write a number above 0, such as 100 or 0.5".to_owned())
}

impl Args {
    fn metrics_api(&self, metrics: &Metrics) -> Option<metrics_api::Options> {
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
            place: Place {
                namespace: self.namespace.clone(),
                service: self.metrics_api_service.clone(),
                certificate: self.certificate(),
                reports: reports.as_ref().map(|_| ReportPlace {
                    service: self.report_service.clone(),
                    bundle: self.report_ca_configmap.clone(),
                }),
                api: self.metrics_api_listen.is_some(),
            },
            reports,
        })
    }

    fn certificate(&self) -> CertificatePlace {
        let files = (
            &self.tls_cert_file,
            &self.tls_private_key_file,
            &self.tls_ca_file,
        );
        match files {
            (Some(certificate), Some(key), Some(authorities)) => {
                CertificatePlace::Files(TlsFiles {
                    certificate: certificate.clone(),
                    key: key.clone(),
                    authorities: authorities.clone(),
                })
            }
            _ => CertificatePlace::Secret(self.metrics_api_secret.clone()),
        }
    }

    fn address(&self) -> Option<SocketAddr> {
        let listen = self.metrics_api_listen.or(self.report_listen)?;
        let port = listen.port();
        self.pod_ip.map(|ip| SocketAddr::new(ip, port))
    }
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    logging::init();
    runtime::start()?.block_on(control(args))?;
    Ok(ExitCode::SUCCESS)
}

async fn control(args: &Args) -> anyhow::Result<()> {
    anyhow::ensure!(
        args.short_silence || args.silent_agent_after >= LEAST_SILENCE,
        "--silent-agent-after {:?} is too short: agents may write as seldom as every 5 minutes, and living ones would lose \
         their taint; write 6m or more",
        args.silent_agent_after
    );
    let metrics = Arc::new(Metrics::default());
    let server = Server::find(args.kubeconfig.as_deref()).await?;
    let identity = identity();
    let options = Options {
        settings: Settings {
            rollout_nodes_per_second: args.rollout_nodes_per_second,
            max_unschedulable: args.max_unschedulable,
            silent_agent_after: args.silent_agent_after,
        },
        namespace: args.namespace.clone(),
        lease: args.lease_name.clone(),
        agents: args.agents.clone(),
        listen: args.listen,
        metrics_api: args.metrics_api(&metrics),
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
        // Kept until the end: a dropped sender would look like a second signal.
        std::future::pending::<()>().await;
    });
    let ended = Box::pin(run::run(server, options, metrics, stopped)).await;
    signals.abort();
    Ok(ended?)
}

/// The machine's (in a cluster the pod's) name, and when this life of the process began.
fn identity() -> String {
    let host = nix::unistd::gethostname().ok();
    let host = host.and_then(|host| host.into_string().ok());
    let host = host.unwrap_or_else(|| "controller".to_owned());
    format!("{host}_{:x}", clock::wall().as_nanosecond())
}
