//! Listener for agents: reports to every replica by `POST /v1/report`, and eviction requests to the leader by `POST
//! /v1/evict`.
//!
//! It has its own thread, so that agents never wait for the rest of the controller. Reports are kept per node until
//! the controller takes them from [`Reports`].

mod busy;
mod connections;
mod handler;
mod identity;
mod interval;
mod keys;
mod latest;
mod listener;
mod metrics;
pub(crate) mod token;
pub mod warm_up;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use futures::FutureExt;
use futures::future::BoxFuture;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot, watch};

use crate::cluster::client::Server;
use crate::cluster::election::Leadership;
use crate::cluster::requests::RequestObserver;
use crate::crd::report::MissingReport;
use crate::evictions::{self, Evictions, RuleQuery};
use crate::serve;

use super::certificates::Tls;
use super::start_error::StartError;
use handler::ReportHandler;
use identity::Identity;

pub(super) use connections::NewConnections;
pub use identity::NODE_NAME;
pub use latest::{ReceivedReport, is_fresh, lifetime};
pub use metrics::ReportMetrics;

/// Settings of the report listener.
#[derive(Clone, Debug)]
pub struct Options {
    /// Listen address.
    pub listen: SocketAddr,
    /// User name of the agents' `ServiceAccount`: `system:serviceaccount:NAMESPACE:NAME`.
    pub agents: String,
    /// Prometheus metrics.
    pub metrics: ReportMetrics,
    /// Settings of evictions.
    pub evictions: evictions::Options,
}

/// Received reports, for the controller to process.
#[derive(Clone)]
pub struct Reports(Arc<ReportHandler>);

impl Reports {
    /// All nodes are known: accepts reports from now on.
    pub fn open(&self) {
        self.0.open();
    }

    /// A Node was added or changed (with its boot ID, or an empty string), or (`None`) deleted.
    pub fn node(&self, name: &str, boot_id: Option<&str>) {
        self.0.node(name, boot_id);
    }

    /// The region and zone of a node.
    pub fn zone(&self, name: &str, zone: &Arc<str>) {
        self.0.zone(name, zone);
    }

    /// Completes when a report has arrived.
    pub async fn arrived(&self) {
        self.0.arrived().await;
    }

    /// The newest report of each node since the last call.
    pub fn take(&self) -> Vec<ReceivedReport> {
        self.0.take()
    }

    /// Whether any node currently reports here.
    pub fn has_reporting_nodes(&self) -> bool {
        self.0.has_reporting_nodes()
    }

    /// Stores relayed reports, and returns which nodes' reports are still missing.
    ///
    /// # Errors
    /// The body can't be parsed.
    pub fn store_relayed(&self, body: &[u8]) -> serde_json::Result<Vec<MissingReport>> {
        self.0.store_relayed(body)
    }

    /// Encodes reports that another replica is missing, up to `max_bytes` bytes. Returns the body and the number of
    /// reports.
    pub fn relay(&self, missed: &[MissingReport], max_bytes: usize) -> (Vec<u8>, usize) {
        self.0.relay(missed, max_bytes)
    }

    /// User name of the agents' `ServiceAccount`.
    pub fn agents(&self) -> &str {
        &self.0.identity.agents
    }

    /// Queue of eviction requests.
    pub fn evictions(&self) -> &Evictions {
        &self.0.evictions
    }

    /// Prometheus metrics.
    pub fn metrics(&self) -> &ReportMetrics {
        &self.0.metrics
    }
}

#[cfg(test)]
impl Reports {
    /// Without any agents.
    pub fn unconnected(client: kube::Client) -> Self {
        let (_, leadership) = watch::channel(Leadership::default());
        let metrics = ReportMetrics::default();
        let identity = Identity::new(client, String::new(), metrics.clone());
        let evictions = Evictions::unconnected();
        Self(Arc::new(ReportHandler::new(
            identity, leadership, metrics, evictions,
        )))
    }

    /// Stores a report. Returns whether it was accepted.
    pub fn put(&self, report: crate::crd::Report) -> bool {
        matches!(self.0.put(report), latest::StoreOutcome::Stored(_))
    }
}

/// Listens, and returns a future that completes when the listener ends. `requests` observes requests to the API
/// server, `rules` reaches the reconciler that knows each node's rules.
///
/// # Errors
/// The address can't be listened on, or there is no client for the API server or no thread.
pub fn start(
    server: &Server,
    requests: Arc<dyn RequestObserver>,
    options: Options,
    rules: mpsc::Sender<RuleQuery>,
    leadership: watch::Receiver<Leadership>,
    tls: watch::Receiver<Option<Tls>>,
) -> Result<(Reports, BoxFuture<'static, ()>), StartError> {
    allow_connections();
    let listener = serve::listen(options.listen)?.into_std()?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let client = {
        // The client belongs to the listener's runtime: its requests must not wait for the controller's computations.
        let _there = runtime.enter();
        server.client(requests)
    };
    let client = match client {
        Ok(client) => client,
        Err(error) => {
            // Dropping the runtime here would panic, because that blocks.
            runtime.shutdown_background();
            return Err(error.into());
        }
    };
    let identity = Identity::new(client.clone(), options.agents, options.metrics.clone());
    let (evictions, evicting) =
        evictions::start(client, options.evictions, rules, leadership.clone());
    let handler = ReportHandler::new(identity, leadership, options.metrics, evictions);
    let handler = Arc::new(handler);
    let (stop, stopped) = oneshot::channel::<()>();
    let (end, ended) = oneshot::channel::<()>();
    let taking = Arc::clone(&handler);
    let take = move || {
        let _end = end;
        runtime.block_on(async move {
            let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
                return;
            };
            tokio::select! {
                () = listener::listen(listener, taking, tls) => {}
                () = evicting => {}
                _ = stopped => {}
            }
        });
    };
    let thread = thread::Builder::new().name("reports".to_owned());
    thread.spawn(take)?;
    let serving = async move {
        let _stop = stop;
        drop(ended.await);
    };
    Ok((Reports(handler), serving.boxed()))
}

/// Thousands of agents are connected: raises the limit of open files to the maximum.
fn allow_connections() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "failed to raise the limit of open files: fewer agents can be connected");
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use super::token::tests::a_token;
    use super::*;
    use crate::cluster::kubeconfig::ClusterSource;

    fn runtime() -> tokio::runtime::Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn keys_are_loaded_while_the_controller_is_busy() {
        let api_server = TcpListener::bind("127.0.0.1:0").unwrap();
        let kubeconfig = tempfile::NamedTempFile::new().unwrap();
        let config = serde_json::json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", api_server.local_addr().unwrap())}}],
        });
        std::fs::write(kubeconfig.path(), config.to_string()).unwrap();
        let (_leadership, elected) = watch::channel(Leadership::default());
        let (_tls, tls_receiver) = watch::channel(None);
        let options = Options {
            listen: "127.0.0.1:0".parse().unwrap(),
            agents: "system:serviceaccount:plimsoll:plimsoll-agent".to_owned(),
            metrics: ReportMetrics::default(),
            evictions: evictions::Options::unconnected(),
        };
        // The controller's runtime, which does nothing during this test.
        let controller = runtime();
        let (reports, _taking) = controller.block_on(async {
            let server = Server::find(&ClusterSource::file(kubeconfig.path()))
                .await
                .unwrap();
            start(
                &server,
                Arc::new(()),
                options,
                mpsc::channel(1).0,
                elected,
                tls_receiver,
            )
            .unwrap()
        });
        api_server.set_nonblocking(true).unwrap();
        let asked = async {
            while api_server.accept().is_err() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let text = a_token();
        let identify = reports.0.identity.node(&text);
        runtime().block_on(async {
            tokio::select! {
                _ = identify => panic!("the API server was not asked"),
                () = asked => {}
            }
        });
    }
}
