//! Connections. Strangers are few and leave soon; API servers and replicas, who show certificates, always get in.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{AbortHandle, Id, JoinSet};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::certificates::Tls;
use super::patience::Patience;
use super::server::Api;
use super::watch::MOST;
use crate::serve;

/// The handshake has to be done by then.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// The next request has to begin, and its headers to be there, by then; API servers keep connections for 90 s.
const HEADERS: Duration = Duration::from_secs(100);
/// A client that takes nothing for so long is cut: a watcher that doesn't read.
const TAKES: Duration = Duration::from_secs(30);
/// No connection lasts longer.
const LIFE: Duration = MOST.saturating_add(Duration::from_mins(5));
/// When this replica ends, what is under way has to be answered by then.
const DRAIN: Duration = Duration::from_secs(5);
/// Connections whose client is not known; one more, and the oldest goes.
const MOST_STRANGERS: usize = 256;
/// Connections of API servers and replicas.
const MOST_KNOWN: usize = 2048;
const BUFFER: usize = 32 << 10;

/// Connections of one sort, oldest first.
struct Room {
    inside: Mutex<VecDeque<AbortHandle>>,
    most: usize,
}

impl Room {
    const fn new(most: usize) -> Self {
        Self {
            inside: Mutex::new(VecDeque::new()),
            most,
        }
    }

    /// Lets one in; where there is no room, the oldest has to leave.
    fn enter(&self, one: impl FnOnce() -> AbortHandle) {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        inside.retain(|other| !other.is_finished());
        if inside.len() >= self.most
            && let Some(oldest) = inside.pop_front()
        {
            oldest.abort();
        }
        // It begins within the lock: it can't leave before it is inside.
        inside.push_back(one());
    }

    fn leave(&self, id: Id) -> Option<AbortHandle> {
        let mut inside = self.inside.lock().unwrap_or_else(PoisonError::into_inner);
        let place = inside.iter().position(|other| other.id() == id)?;
        inside.remove(place)
    }
}

/// The next connection; those that ended leave meanwhile. Nothing is lost where that is waited for no longer.
pub async fn accept(listener: &TcpListener, connections: &mut JoinSet<()>) -> TcpStream {
    loop {
        tokio::select! {
            stream = serve::accept(listener) => return stream,
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Speaks TLS with whoever connected; `None`: that does not, or is too slow.
pub async fn shake_hands(
    stream: TcpStream,
    config: Arc<ServerConfig>,
) -> Option<TlsStream<TcpStream>> {
    drop(stream.set_nodelay(true));
    let shaken = timeout(HANDSHAKE, TlsAcceptor::from(config).accept(stream)).await;
    shaken.ok()?.ok()
}

/// Takes connections until `stop` is true, and lets those that are there end then; all end with it.
pub async fn listen(
    listener: TcpListener,
    api: Arc<Api>,
    tls: watch::Receiver<Option<Tls>>,
    mut stop: watch::Receiver<bool>,
) {
    let strangers = Arc::new(Room::new(MOST_STRANGERS));
    let known = Arc::new(Room::new(MOST_KNOWN));
    let mut connections = JoinSet::new();
    loop {
        let stream = tokio::select! {
            _ = stop.wait_for(|stop| *stop) => break,
            stream = accept(&listener, &mut connections) => stream,
        };
        let Some(tls) = tls.borrow().clone() else {
            continue;
        };
        let connection = Connection {
            api: Arc::clone(&api),
            tls,
            strangers: Arc::clone(&strangers),
            known: Arc::clone(&known),
            stop: stop.clone(),
        };
        let served = async move { drop(timeout(LIFE, connection.serve(stream)).await) };
        strangers.enter(|| connections.spawn(served));
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    drop(timeout(DRAIN, ended).await);
}

struct Connection {
    api: Arc<Api>,
    tls: Tls,
    strangers: Arc<Room>,
    known: Arc<Room>,
    stop: watch::Receiver<bool>,
}

impl Connection {
    async fn serve(mut self, stream: TcpStream) {
        let Some(stream) = shake_hands(stream, Arc::clone(&self.tls.server)).await else {
            return;
        };
        let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let certificates: Arc<[CertificateDer<'static>]> = certificates.into();
        self.admit(&certificates);
        let api = self.api;
        let answer = service_fn(move |request| {
            let (api, certificates) = (Arc::clone(&api), Arc::clone(&certificates));
            async move { Ok::<_, Infallible>(api.answer(request, &certificates).await) }
        });
        let stream = TokioIo::new(Patience::new(stream, TAKES));
        let mut http = http1::Builder::new();
        http.timer(TokioTimer::new());
        http.header_read_timeout(HEADERS).max_buf_size(BUFFER);
        let connection = http.serve_connection(stream, answer);
        tokio::pin!(connection);
        tokio::select! {
            // A peer that goes away early is no concern of ours.
            _ = &mut connection => return,
            _ = self.stop.wait_for(|stop| *stop) => connection.as_mut().graceful_shutdown(),
        }
        drop(connection.await);
    }

    /// From the strangers to those who are known.
    fn admit(&self, certificates: &[CertificateDer<'static>]) {
        if self.api.knows(certificates)
            && let Some(one) = tokio::task::try_id().and_then(|id| self.strangers.leave(id))
        {
            self.known.enter(|| one);
        }
    }
}
