//! A connection to one replica: HTTP/2 over TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER};
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::TIMEOUT;
use super::credentials::Credentials;
use crate::crd::report::{Acknowledgement, PATH};

/// Largest answer that is read.
const MAX_ANSWER_BYTES: usize = 16 << 10;
/// Longest logged reason of a replica, in characters.
const MAX_REASON_CHARS: usize = 300;

/// Why a report was not accepted.
#[derive(Debug, Error)]
pub enum SendError {
    /// No answer in time.
    #[error("no answer within {} s", TIMEOUT.as_secs())]
    TimedOut,
    /// The connection or the handshake failed, for example because the certificate is not for the Service.
    #[error("failed to connect")]
    Connect(#[from] std::io::Error),
    /// The name is not valid in a certificate.
    #[error("failed to use {0} as the name of the Service")]
    Name(String),
    /// The connection broke.
    #[error("failed to send the report")]
    Http(#[from] hyper::Error),
    /// The request cannot be built.
    #[error("failed to write the request")]
    Request(#[from] hyper::http::Error),
    /// The answer is too long or incomplete.
    #[error("failed to read the answer: {0}")]
    Body(String),
    /// The answer is not an acknowledgement.
    #[error("failed to understand the answer")]
    Answer(#[from] serde_json::Error),
    /// The replica refused it.
    #[error("{0}{1}")]
    Refused(StatusCode, String, Option<Duration>),
}

/// The connection; it is closed when dropped.
pub(super) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// The TLS configuration it was opened with.
    tls: Arc<ClientConfig>,
    task: JoinHandle<()>,
}

impl Connection {
    /// Connects to the replica at `address`, whose certificate has to be for `name`.
    pub(super) async fn open(
        address: SocketAddr,
        name: &str,
        tls: Arc<ClientConfig>,
    ) -> Result<Self, SendError> {
        let server = ServerName::try_from(name.to_owned());
        let server = server.map_err(|_| SendError::Name(name.to_owned()))?;
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let connector = TlsConnector::from(Arc::clone(&tls));
        let stream = TokioIo::new(connector.connect(server, stream).await?);
        let (sender, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
        let task = tokio::spawn(async move { drop(connection.await) });
        Ok(Self { sender, tls, task })
    }

    /// A sender for other requests on this connection.
    pub(super) fn sender(&self) -> SendRequest<Full<Bytes>> {
        self.sender.clone()
    }

    /// Whether it is open and was opened with these credentials.
    pub(super) fn is_usable_with(&self, credentials: &Credentials) -> bool {
        !self.sender.is_closed() && Arc::ptr_eq(&self.tls, &credentials.tls)
    }

    /// Sends a report.
    pub(super) async fn send(
        &mut self,
        name: &str,
        credentials: &Credentials,
        body: String,
    ) -> Result<Acknowledgement, SendError> {
        let request = Request::post(format!("https://{name}{PATH}"))
            .header(AUTHORIZATION, &credentials.authorization)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body)))?;
        self.sender.ready().await?;
        parse_answer(self.sender.send_request(request).await?).await
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // With a peer that does not answer it would not end by itself.
        self.task.abort();
    }
}

async fn parse_answer(answer: Response<Incoming>) -> Result<Acknowledgement, SendError> {
    let (status, wait) = (answer.status(), retry_after(answer.headers()));
    let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES)
        .collect()
        .await;
    let body = body.map_err(|error| SendError::Body(error.to_string()))?;
    let body = body.to_bytes();
    if status != StatusCode::OK {
        return Err(SendError::Refused(status, reason(&body), wait));
    }
    Ok(serde_json::from_slice(&body)?)
}

/// In whole seconds, as Kubernetes writes it.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

/// The reason that the replica gives.
fn reason(body: &[u8]) -> String {
    let status: Option<Status> = serde_json::from_slice(body).ok();
    let message = status.and_then(|status| status.message).unwrap_or_default();
    if message.is_empty() {
        return message;
    }
    let reason: String = message.chars().take(MAX_REASON_CHARS).collect();
    format!(": {reason}")
}
