//! A standby passes requests for data on to the leader, who knows it by its certificate.

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

/// The leader has to be reached by then.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Its first words have to be here so long after, where it has nothing to do for them.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(3);
/// No more of an answer is read than its client takes, but for this.
const BUFFER: usize = 64 << 10;
/// Marks what was passed on, so that it is not passed on again.
const MARK: &str = "x-plimsoll-forwarded";

/// Why the leader's answer is not to be had.
#[derive(Debug, Error)]
pub enum ForwardError {
    /// It can't be reached in time.
    #[error("no connection within {} s", CONNECT_TIMEOUT.as_secs())]
    Unreachable,
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// The connection failed, or the handshake.
    #[error("failed to connect")]
    Connect(#[from] std::io::Error),
    /// The name can't be in a certificate.
    #[error("failed to use our own name")]
    Name(#[from] rustls::pki_types::InvalidDnsNameError),
    /// The request failed.
    #[error("failed to ask")]
    Http(#[from] hyper::Error),
    /// It can't be written.
    #[error("failed to write the request")]
    Request(#[from] hyper::http::Error),
}

impl ForwardError {
    /// Whether the leader may have taken the request.
    pub const fn may_have_arrived(&self) -> bool {
        matches!(self, Self::TimedOut | Self::Http(_))
    }
}

/// Whether a request says that it was passed on.
pub fn is_forwarded(headers: &HeaderMap) -> bool {
    headers.contains_key(MARK)
}

/// The leader's answer to a GET, or to a POST of `body`, within `limit`. Its own body comes as it is read.
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
    let mut request = request.header(HOST, name).header(MARK, "1");
    if !accept.is_empty() {
        request = request.header(ACCEPT, accept);
    }
    let request = request.body(Full::new(body.unwrap_or_default()))?;
    let answer = timeout(limit, sender.send_request(request)).await;
    let (mut parts, body) = answer.map_err(|_| ForwardError::TimedOut)??.into_parts();
    // They are of that connection.
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
    // It ends with the answer's body, or when the client that reads it is gone.
    tokio::spawn(async move { drop(connection.await) });
    Ok(sender)
}
