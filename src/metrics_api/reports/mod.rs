//! Direct reports: agents tell every replica of their nodes' load, by `POST /v1/report`.
//!
//! They are taken on a thread of their own, so that nothing else the controller does makes an agent wait. What comes is
//! kept by node until the controller takes it from [`Reports`].

mod desk;
mod identity;
mod keys;
mod latest;
mod listener;
mod metrics;
mod pace;
mod room;
mod token;
pub mod warm_up;

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use kube::Client;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::runtime::Builder;
use tokio::sync::{oneshot, watch};

use crate::cluster::election::Standing;
use crate::serve::{self, ServeError};

use super::certificates::Tls;
use desk::Desk;
use identity::Identity;

pub use latest::{Told, is_fresh};
pub use metrics::ReportMetrics;

/// How reports are taken.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where.
    pub listen: SocketAddr,
    /// The name of the agents' `ServiceAccount`, as a user: `system:serviceaccount:NAMESPACE:NAME`.
    pub agents: String,
    /// What Prometheus is told.
    pub metrics: ReportMetrics,
}

/// What came, for the controller to take.
#[derive(Clone)]
pub struct Reports(Arc<Desk>);

impl Reports {
    /// All nodes are known: reports are taken from now on.
    pub fn open(&self) {
        self.0.open();
    }

    /// A node is there, or is gone.
    pub fn node(&self, name: &str, there: bool) {
        self.0.node(name, there);
    }

    /// Comes when a report has.
    pub async fn arrived(&self) {
        self.0.arrived().await;
    }

    /// What came since the last call: the newest report of each node.
    pub fn take(&self) -> Vec<Told> {
        self.0.take()
    }

    /// What Prometheus is told.
    pub fn metrics(&self) -> &ReportMetrics {
        &self.0.metrics
    }
}

/// Listens, and says what has to be awaited for that to go on: it ends when taking reports does.
///
/// # Errors
/// The address can't be listened on, or there is no thread to be had.
pub async fn start(
    client: Client,
    options: Options,
    standing: watch::Receiver<Standing>,
    tls: watch::Receiver<Option<Tls>>,
) -> Result<(Reports, impl Future<Output = ()>), ServeError> {
    allow_connections();
    let listener = serve::listen(options.listen).await?;
    let failed = |source| ServeError::Listen {
        address: options.listen,
        source,
    };
    let listener = listener.into_std().map_err(failed)?;
    let identity = Identity::new(client, options.agents, options.metrics.clone());
    let desk = Arc::new(Desk::new(identity, standing, options.metrics));
    let (stop, stopped) = oneshot::channel::<()>();
    let (end, ended) = oneshot::channel::<()>();
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(failed)?;
    let taking = Arc::clone(&desk);
    let take = move || {
        let _end = end;
        runtime.block_on(async move {
            let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
                return;
            };
            tokio::select! {
                () = listener::listen(listener, taking, tls) => {}
                _ = stopped => {}
            }
        });
    };
    let thread = thread::Builder::new().name("reports".to_owned());
    thread.spawn(take).map_err(failed)?;
    let serving = async move {
        let _stop = stop;
        drop(ended.await);
    };
    Ok((Reports(desk), serving))
}

/// Thousands of agents are connected: as many files may be open as the system allows.
fn allow_connections() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(%error, "failed to raise the limit of open files: fewer agents can be connected");
    }
}
