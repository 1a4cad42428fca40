//! HTTP server of the process: `/livez`, `/readyz`, `/metrics`, and JSON documents.

mod exposition;
mod labels;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::hash::Hash;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use nix::errno::Errno;
use prometheus_client::metrics::family::Family;
use rustix::net::sockopt::set_ipv6_v6only;
use thiserror::Error;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::{AbortHandle, yield_now};
use tokio::time::sleep;

use self::exposition::ExpositionFormat;

pub use self::labels::{KindLabels, ReasonLabels, RequestLabels, ResultLabels, StateLabels};

/// Limit of connections. A new one replaces the oldest, so that idle connections can't lock out probes.
const MAX_CONNECTIONS: usize = 32;

/// Delay after a failed accept.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Content to serve.
pub trait ServedState: Send + Sync + 'static {
    /// `Err`: why the process should be restarted.
    fn livez(&self) -> Result<(), String>;
    /// `Err`: what the process waits for before it is ready.
    fn readyz(&self) -> Result<(), String>;
    /// Metrics in the `OpenMetrics` text format.
    fn metrics(&self) -> String;
    /// Another document by path. `local`: the client connected over loopback.
    fn document(&self, path: &str, local: bool) -> Option<JsonDocument> {
        let _ = (path, local);
        None
    }
    /// The paths of [`Self::document`].
    fn documents(&self) -> &'static [&'static str] {
        &[]
    }
}

/// A JSON document of a [`ServedState`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JsonDocument {
    /// The document.
    Json(String),
    /// Not available yet, and why.
    Missing(String),
    /// Not allowed for this client, and who may read it.
    Forbidden(String),
}

/// Creates one series with empty labels, for the documentation.
pub fn with_one_series<S, M>(family: &Family<S, M>)
where
    S: Clone + Default + Eq + Hash,
    M: Default,
{
    drop(family.get_or_create(&S::default()));
}

/// Why the server did not start.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The address can't be listened on.
    #[error("failed to listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The error of the kernel.
        source: io::Error,
    },
}

/// Length of the accept queue.
const BACKLOG: u32 = 1024;

/// Listens on an address. `[::]` accepts IPv4 clients as well, and falls back to `0.0.0.0` on machines without IPv6.
///
/// # Errors
/// The kernel refuses.
pub fn listen(address: SocketAddr) -> Result<TcpListener, ServeError> {
    listen_by(address, |_| Ok(()))
}

/// Like [`listen`], with more socket options.
///
/// # Errors
/// The kernel refuses.
pub fn listen_by(
    address: SocketAddr,
    set: impl Fn(&TcpSocket) -> io::Result<()>,
) -> Result<TcpListener, ServeError> {
    let open = |address| {
        let socket = bound(address)?;
        set(&socket)?;
        socket.listen(BACKLOG)
    };
    let opened = open(address).or_else(|error| {
        let fallback = without_ipv6(address, &error).ok_or(error)?;
        open(fallback)
    });
    opened.map_err(|source| ServeError::Listen { address, source })
}

fn bound(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => {
            let socket = TcpSocket::new_v6()?;
            // The default depends on net.ipv6.bindv6only.
            set_ipv6_v6only(&socket, false)?;
            socket
        }
    };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    Ok(socket)
}

/// The fallback for `[::]` on machines without IPv6.
fn without_ipv6(address: SocketAddr, error: &io::Error) -> Option<SocketAddr> {
    let is_missing = [Errno::EAFNOSUPPORT, Errno::EADDRNOTAVAIL]
        .map(|errno| Some(errno as i32))
        .contains(&error.raw_os_error());
    (is_missing && address.ip() == Ipv6Addr::UNSPECIFIED)
        .then(|| SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), address.port()))
}

/// Accepts the next connection; pauses after failures.
pub async fn accept(listener: &TcpListener) -> TcpStream {
    accepted(|| listener.accept()).await
}

/// Without free file descriptors accept fails immediately, and would be retried in a busy loop.
async fn accepted<T, F>(mut accept: impl FnMut() -> F) -> T
where
    F: Future<Output = io::Result<(T, SocketAddr)>>,
{
    loop {
        if let Ok((stream, _)) = accept().await {
            return stream;
        }
        sleep(ACCEPT_RETRY_INTERVAL).await;
    }
}

/// Serves forever.
pub async fn serve(listener: TcpListener, source: Arc<dyn ServedState>) {
    let mut connections = VecDeque::new();
    loop {
        let stream = accept(&listener).await;
        let connection = tokio::spawn(serve_one(stream, Arc::clone(&source)));
        connections.push_back(connection.abort_handle());
        evict_oldest(&mut connections).await;
    }
}

async fn evict_oldest(connections: &mut VecDeque<AbortHandle>) {
    connections.retain(|connection| !connection.is_finished());
    if connections.len() <= MAX_CONNECTIONS {
        return;
    }
    if let Some(oldest) = connections.pop_front() {
        oldest.abort();
    }
    // Gives the connections accepted so far a chance to be answered before more are accepted.
    yield_now().await;
}

async fn serve_one(stream: TcpStream, source: Arc<dyn ServedState>) {
    let local = stream.peer_addr().is_ok_and(|peer| is_loopback(peer.ip()));
    let answer = service_fn(|request| {
        let response = answer(&request, &*source, local);
        async { Ok::<_, Infallible>(response) }
    });
    let mut http = http1::Builder::new();
    http.keep_alive(false);
    // Clients may disconnect at any time.
    drop(http.serve_connection(TokioIo::new(stream), answer).await);
}

/// Handles IPv4 clients of IPv6 sockets.
const fn is_loopback(peer: IpAddr) -> bool {
    peer.to_canonical().is_loopback()
}

fn answer(
    request: &Request<Incoming>,
    source: &dyn ServedState,
    local: bool,
) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return text(
            StatusCode::METHOD_NOT_ALLOWED,
            "only GET is allowed\n".to_owned(),
        );
    }
    match request.uri().path() {
        "/livez" => verdict(source.livez()),
        "/readyz" => verdict(source.readyz()),
        "/metrics" => {
            let format = ExpositionFormat::accepted(request.headers());
            let metrics = format.of(source.metrics());
            of_type(StatusCode::OK, format.content_type(), metrics)
        }
        path => document(path, source, local),
    }
}

fn document(path: &str, source: &dyn ServedState, local: bool) -> Response<Full<Bytes>> {
    match source.document(path, local) {
        Some(JsonDocument::Json(json)) => of_type(StatusCode::OK, "application/json", json),
        Some(JsonDocument::Missing(why)) => {
            text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n"))
        }
        Some(JsonDocument::Forbidden(why)) => text(StatusCode::FORBIDDEN, format!("{why}\n")),
        None => {
            let more = source.documents().iter().copied();
            let all = ["/livez", "/readyz", "/metrics"].into_iter().chain(more);
            let paths = format!("{}\n", all.collect::<Vec<_>>().join(", "));
            text(StatusCode::NOT_FOUND, paths)
        }
    }
}

fn verdict(verdict: Result<(), String>) -> Response<Full<Bytes>> {
    match verdict {
        Ok(()) => text(StatusCode::OK, "ok\n".to_owned()),
        Err(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
    }
}

fn text(status: StatusCode, body: String) -> Response<Full<Bytes>> {
    of_type(status, "text/plain; charset=utf-8", body)
}

fn of_type(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    let kind = hyper::header::HeaderValue::from_static(kind);
    headers.insert(hyper::header::CONTENT_TYPE, kind);
    response
}

#[cfg(test)]
mod tests;
