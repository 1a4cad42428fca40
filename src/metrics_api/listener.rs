//! Connections of the API listener. Unknown clients are limited in number and time; API servers and replicas, which
//! show certificates, always get in. Slow readers are disconnected, and so is the slowest one when responses in
//! progress take too much memory.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificates::Tls;
use super::client_lag::{ClientLag, ClientLags};
use super::reports::NewConnections;
use super::server::Api;
use super::watch::MAX_DURATION;
use super::write_timeout::WriteTimeout;
use crate::serve::{self, ServeError};

/// Time limit for the TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for the next request's headers. API servers keep connections for 90 s.
const HEADER_TIMEOUT: Duration = Duration::from_secs(100);
/// Time limit for a client that reads nothing, such as a stuck watcher.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum lifetime of a connection.
const MAX_AGE: Duration = MAX_DURATION.saturating_add(Duration::from_mins(5));
/// Time limit for requests in progress at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Limit of connections from unknown clients. A new one replaces the oldest.
const MAX_UNKNOWN: usize = 256;
/// Minimum time that a connection is kept: in a flood of connections an API server has that long to show its
/// certificate.
const MIN_STAY: Duration = Duration::from_millis(250);
/// Limit of connections from API servers and replicas.
const MAX_KNOWN: usize = 2048;
const BUFFER: usize = 64 << 10;
/// API servers send a header for each group of the user.
const MAX_HEADERS: usize = 1024;
/// Kernel buffer for unread data; half of it is used by the kernel itself.
const SEND_BUFFER: u32 = 256 << 10;
/// Memory limit for responses in progress, besides the objects themselves.
const MAX_PINNED: usize = 64 << 20;
/// How often that is checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Connections of API servers and replicas, oldest first.
struct KnownConnections {
    connections: Mutex<VecDeque<AbortHandle>>,
    max: usize,
}

impl KnownConnections {
    const fn new(max: usize) -> Self {
        Self {
            connections: Mutex::new(VecDeque::new()),
            max,
        }
    }

    /// Adds a connection. If there are too many, the oldest is closed.
    fn enter(&self, one: AbortHandle) {
        let mut connections = self
            .connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        connections.retain(|other| !other.is_finished());
        if connections.len() >= self.max
            && let Some(oldest) = connections.pop_front()
        {
            oldest.abort();
        }
        connections.push_back(one);
    }
}

/// Listens on an address, with small send buffers.
pub fn open(address: SocketAddr) -> Result<TcpListener, ServeError> {
    serve::listen_by(address, |socket| socket.set_send_buffer_size(SEND_BUFFER))
}

/// Accepts the next connection, and reaps finished ones meanwhile. Cancel safe.
pub async fn accept(listener: &TcpListener, connections: &mut JoinSet<()>) -> TcpStream {
    loop {
        tokio::select! {
            stream = serve::accept(listener) => return stream,
            Some(_) = connections.join_next() => {}
        }
    }
}

/// TLS handshake. `None`: it failed or timed out.
pub async fn handshake(
    stream: TcpStream,
    config: Arc<ServerConfig>,
) -> Option<TlsStream<TcpStream>> {
    drop(stream.set_nodelay(true));
    let stream = timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(stream)).await;
    stream.ok()?.ok()
}

/// Accepts connections until `stop` is true, and then drains them. Dropping the future closes them all.
pub async fn listen(
    listener: TcpListener,
    api: Arc<Api>,
    tls: watch::Receiver<Option<Tls>>,
    stop: watch::Receiver<bool>,
) {
    let all = Arc::new(Connections::default());
    let mut connections = JoinSet::new();
    tokio::select! {
        () = accept_all(&listener, &api, tls, stop, &all, &mut connections) => {}
        () = limit_memory(&api, &all.lags) => {}
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    drop(timeout(DRAIN_TIMEOUT, ended).await);
}

async fn accept_all(
    listener: &TcpListener,
    api: &Arc<Api>,
    tls: watch::Receiver<Option<Tls>>,
    mut stop: watch::Receiver<bool>,
    all: &Arc<Connections>,
    connections: &mut JoinSet<()>,
) {
    loop {
        let stream = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return,
            stream = accept(listener, connections) => stream,
        };
        let Some(tls) = tls.borrow().clone() else {
            continue;
        };
        if all.unknown.evict_oldest().await {
            api.observer.cut("too_many_new");
        }
        let connection = Connection::new(api, all, stop.clone());
        let served = async move { drop(timeout(MAX_AGE, connection.serve(stream, tls)).await) };
        all.unknown.enter(|| connections.spawn(served));
    }
}

/// Enforces the memory limit for responses in progress, forever.
async fn limit_memory(api: &Api, lags: &ClientLags) {
    let mut ticks = interval(CHECK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let pinned = api.data.pinned();
        api.observer.pinned(pinned);
        if pinned > MAX_PINNED && lags.cut_slowest(Instant::now()) {
            api.observer.cut("pinned");
        }
    }
}

/// All open connections.
struct Connections {
    unknown: NewConnections,
    known: KnownConnections,
    lags: ClientLags,
}

impl Default for Connections {
    fn default() -> Self {
        Self {
            unknown: NewConnections::new(MAX_UNKNOWN, MIN_STAY),
            known: KnownConnections::new(MAX_KNOWN),
            lags: ClientLags::default(),
        }
    }
}

struct Connection {
    api: Arc<Api>,
    all: Arc<Connections>,
    lag: Arc<ClientLag>,
    stop: watch::Receiver<bool>,
}

impl Connection {
    fn new(api: &Arc<Api>, all: &Arc<Connections>, stop: watch::Receiver<bool>) -> Self {
        Self {
            api: Arc::clone(api),
            all: Arc::clone(all),
            lag: all.lags.add(),
            stop,
        }
    }

    async fn serve(self, stream: TcpStream, tls: Tls) {
        let Some(stream) = handshake(stream, tls.server).await else {
            return;
        };
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let certificates: Arc<[CertificateDer<'static>]> = certificates.into();
        self.admit(&certificates);
        self.answer(stream, certificates).await;
    }

    /// Serves requests of a client with these certificates.
    async fn answer<S>(mut self, stream: S, certificates: Arc<[CertificateDer<'static>]>)
    where
        S: AsyncRead + AsyncWrite + Send + Unpin,
    {
        let api = Arc::clone(&self.api);
        let answer = service_fn(move |request| {
            let (api, certificates) = (Arc::clone(&api), Arc::clone(&certificates));
            async move { Ok::<_, Infallible>(api.answer(request, &certificates).await) }
        });
        let stream = WriteTimeout::new(stream, WRITE_TIMEOUT, Arc::clone(&self.lag));
        let stream = TokioIo::new(stream);
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new());
        http.header_read_timeout(HEADER_TIMEOUT)
            .max_headers(MAX_HEADERS)
            .max_buf_size(BUFFER);
        let connection = http.serve_connection(stream, answer);
        tokio::pin!(connection);
        tokio::select! {
            // Clients may disconnect at any time.
            _ = &mut connection => {
                if self.lag.was_too_slow() {
                    self.api.observer.cut("too_slow");
                }
                return;
            }
            () = self.lag.cut() => return,
            _ = self.stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
        }
        drop(connection.await);
    }

    /// Moves a connection from the unknown clients to the known ones.
    fn admit(&self, certificates: &[CertificateDer<'static>]) {
        if self.api.is_known_client(certificates)
            && let Some(one) = tokio::task::try_id().and_then(|id| self.all.unknown.leave(id))
        {
            self.all.known.enter(one);
        }
    }
}

#[cfg(test)]
mod tests;
