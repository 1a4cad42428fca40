//! A standby forwards data requests to the leader, which recognizes it by its certificate.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{ACCEPT, HOST};
use hyper::{HeaderMap, Request};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use super::server::Answer;

/// Time limit for connecting to the leader.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit for the response headers, for requests that need no waiting.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// Buffer between the leader's response and the client.
const BUFFER: usize = 64 << 10;
/// Header of forwarded requests, so that they are never forwarded twice.
const FORWARDED_HEADER: &str = "x-plimsoll-forwarded";

/// Why there is no answer of the leader.
#[derive(Debug, Error)]
pub enum ForwardError {
    /// No connection in time.
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Unreachable,
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// The connection or the handshake failed.
    #[error("failed to connect")]
    Connect(#[from] std::io::Error),
    /// Our name is not a valid DNS name.
    #[error("failed to use our own name")]
    Name(#[from] rustls::pki_types::InvalidDnsNameError),
    /// The request failed.
    #[error("failed to send the request")]
    Http(#[from] hyper::Error),
    /// The request can't be built.
    #[error("failed to build the request")]
    Request(#[from] hyper::http::Error),
}

impl ForwardError {
    /// Whether the leader may have received the request.
    pub const fn may_have_arrived(&self) -> bool {
        matches!(self, Self::TimedOut | Self::Http(_))
    }
}

/// Whether a request was forwarded.
pub fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.contains_key(FORWARDED_HEADER)
}

/// Sends a GET, or a POST of `body`, to the leader; `limit` bounds the time to the response headers. The body is
/// streamed.
pub async fn pass(
    leader: SocketAddr,
    tls: Arc<ClientConfig>,
    name: &str,
    path: &str,
    accept: &str,
    body: Option<Bytes>,
    limit: Duration,
) -> Result<Answer, ForwardError> {
    let connected = timeout(CONNECT_TIMEOUT, connect(leader, tls, name)).await;
    let mut sender = connected.map_err(|_| ForwardError::Unreachable)??;
    let request = match body {
        Some(_) => Request::post(path),
        None => Request::get(path),
    };
    let mut request = request.header(HOST, name).header(FORWARDED_HEADER, "1");
    if !accept.is_empty() {
        request = request.header(ACCEPT, accept);
    }
    let request = request.body(Full::new(body.unwrap_or_default()))?;
    let answer = timeout(limit, sender.send_request(request)).await;
    let (mut parts, body) = answer.map_err(|_| ForwardError::TimedOut)??.into_parts();
    // Hop-by-hop headers.
    for name in ["connection", "transfer-encoding", "content-length"] {
        parts.headers.remove(name);
    }
    Ok(Answer::from_parts(parts, body.boxed_unsync()))
}

async fn connect(
    leader: SocketAddr,
    tls: Arc<ClientConfig>,
    name: &str,
) -> Result<SendRequest<Full<Bytes>>, ForwardError> {
    let stream = TcpStream::connect(leader).await?;
    stream.set_nodelay(true)?;
    let server = ServerName::try_from(name.to_owned())?;
    let stream = TlsConnector::from(tls).connect(server, stream).await?;
    let mut http = http1::Builder::new();
    http.max_buf_size(BUFFER);
    let (sender, connection) = http.handshake(TokioIo::new(stream)).await?;
    // It ends with the response body, or when the client disconnects.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}
