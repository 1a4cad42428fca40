//! Serves on a thread of its own: the deletion of every namespace in the cluster waits for discovery, so discovery
//! must not wait for the controller's computations.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::runtime::Builder;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::cluster::client::Server;
use crate::cluster::election::Leadership;
use crate::cluster::requests;
use crate::evictions::RuleQuery;

use super::authn::Authenticator;
use super::authz::Authorizer;
use super::certificate_manager::CertificateManager;
use super::certificates::Tls;
use super::data::Data;
use super::documents::Documents;
use super::front_proxy;
use super::in_flight::{MAX_PER_USER, RequestsInFlight};
use super::listener;
use super::readiness::Readiness;
use super::relay::Relay;
use super::reports;
use super::server::{Api, MAX_WAITING};
use super::start_error::StartError;
use super::store::Limits;
use super::store_updater::StoreUpdater;
use super::{ApiObserver, Options};

/// Handle of the serving thread. Dropping it stops the thread; [`Self::end`] waits for that.
pub struct Serving {
    stop: watch::Sender<bool>,
    ended: oneshot::Receiver<Result<(), StartError>>,
}

impl Serving {
    /// Waits until the thread ends by itself, which it should not.
    ///
    /// # Errors
    /// It failed to start.
    pub async fn ended(&mut self) -> Result<(), StartError> {
        // A thread that panicked sends no result.
        (&mut self.ended).await.unwrap_or(Ok(()))
    }

    /// Graceful shutdown: watches end between two events so that clients can resume, and other requests are finished.
    ///
    /// # Errors
    /// It failed to start.
    pub async fn end(mut self) -> Result<(), StartError> {
        self.stop.send_replace(true);
        self.ended().await
    }
}

/// Listens, and returns the store updater. `requests` observes requests to the API server; `rules` reaches the
/// reconciler that knows each node's rules.
///
/// # Errors
/// The address can't be listened on, or there is no thread.
pub fn start(
    server: Server,
    requests: Arc<dyn requests::RequestObserver>,
    options: Options,
    rules: mpsc::Sender<RuleQuery>,
    leadership: watch::Receiver<Leadership>,
    observer: Arc<dyn ApiObserver>,
) -> Result<(StoreUpdater, Serving), StartError> {
    let listener = options.listen.map(bind).transpose()?;
    let data = Arc::new(Data::new(Limits::default(), leadership.clone()));
    let (tls_sender, tls) = watch::channel(None);
    let (reports, listening) = match options.reports {
        Some(options) => {
            let (requests, leadership) = (Arc::clone(&requests), leadership.clone());
            let started =
                reports::start(&server, requests, options, rules, leadership, tls.clone());
            or_never(Some(started?))
        }
        None => or_never(None),
    };
    let updater = StoreUpdater::new(Arc::clone(&data), reports.clone());
    let (stop, stopped) = watch::channel(false);
    let (ended_sender, ended) = oneshot::channel();
    let serving = async move {
        // Both belong to this thread's runtime.
        let listener = listener.map(TcpListener::from_std).transpose()?;
        let has_api = listener.is_some();
        let client = server.client(requests)?;
        let (trust, trusted) = watch::channel(None);
        let readiness = Arc::new(Readiness::new(Arc::clone(&observer)));
        let api = Api {
            data,
            documents: Documents::default(),
            authenticator: Authenticator::new(client.clone(), trusted),
            authorizer: Authorizer::new(client.clone()),
            leadership: leadership.clone(),
            tls: tls.clone(),
            server_name: options.names.server_name(),
            stop: stopped.clone(),
            waiting: Semaphore::new(MAX_WAITING),
            in_flight: Arc::new(RequestsInFlight::new(MAX_PER_USER)),
            readiness: Arc::clone(&readiness),
            observer: Arc::clone(&observer),
            reports,
        };
        let relay = Relay::of(&api);
        let sink = Arc::clone(&observer);
        let manager =
            CertificateManager::new(client.clone(), options.names, leadership, tls_sender, sink);
        tokio::select! {
            () = serve_api(listener, Arc::new(api), tls, stopped) => {}
            () = only(has_api, readiness.follow(client.clone())) => {}
            () = only(has_api, front_proxy::follow(client, trust, observer)) => {}
            () = manager.run() => {}
            () = listening => {}
            () = only(has_api, relay.run()) => {}
        }
        Ok(())
    };
    let thread = thread::Builder::new().name("metrics-api".to_owned());
    thread.spawn(move || drop(ended_sender.send(block_on(serving))))?;
    Ok((updater, Serving { stop, ended }))
}

fn bind(listen: SocketAddr) -> Result<std::net::TcpListener, StartError> {
    Ok(listener::open(listen)?.into_std()?)
}

/// Runs a part that only the aggregated API needs.
async fn only(has_api: bool, part: impl Future<Output = ()>) {
    if has_api {
        part.await;
    } else {
        pending::<()>().await;
    }
}

/// Runs until `stop` is true, with or without a listener.
async fn serve_api(
    listener: Option<TcpListener>,
    api: Arc<Api>,
    tls: watch::Receiver<Option<Tls>>,
    mut stop: watch::Receiver<bool>,
) {
    match listener {
        Some(listener) => listener::listen(listener, api, tls, stop).await,
        None => drop(stop.wait_for(|stop| *stop).await),
    }
}

/// The future that was started, or one that never completes.
fn or_never<T>(
    started: Option<(T, BoxFuture<'static, ()>)>,
) -> (Option<T>, BoxFuture<'static, ()>) {
    match started {
        Some((part, future)) => (Some(part), future),
        None => (None, pending().boxed()),
    }
}

fn block_on(serving: impl Future<Output = Result<(), StartError>>) -> Result<(), StartError> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(serving)
}
