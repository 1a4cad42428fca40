//! A connection to one replica: HTTP/2 over TLS, kept while it works.

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

use super::DEADLINE;
use super::credentials::Credentials;
use crate::crd::report::{Acknowledgement, PATH};

/// No answer is read further.
const MOST_ANSWER: usize = 16 << 10;
/// Of what a replica gives as its reason, so much is told.
const MOST_WORDS: usize = 300;

/// Why a report was not taken.
#[derive(Debug, Error)]
pub enum SendError {
    /// There is no answer.
    #[error("no answer within {} s", DEADLINE.as_secs())]
    TimedOut,
    /// The connection failed, or the handshake: also where the certificate is not that of the Service.
    #[error("failed to connect")]
    Connect(#[from] std::io::Error),
    /// The name can't be in a certificate.
    #[error("failed to use {0} as the name of the Service")]
    Name(String),
    /// The connection broke.
    #[error("failed to send the report")]
    Http(#[from] hyper::Error),
    /// The request can't be written.
    #[error("failed to write the request")]
    Request(#[from] hyper::http::Error),
    /// The answer is too long, or broke off.
    #[error("failed to read the answer: {0}")]
    Body(String),
    /// The answer is none of ours.
    #[error("failed to understand the answer")]
    Answer(#[from] serde_json::Error),
    /// The replica does not take it now.
    #[error("{0}{1}")]
    Refused(StatusCode, String, Option<Duration>),
}

/// The connection; it ends with the value.
pub(super) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    /// By what the replica was known.
    tls: Arc<ClientConfig>,
    task: JoinHandle<()>,
}

impl Connection {
    /// To the replica at `address`, whose certificate has to be for `name`.
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

    /// What else is sent by it.
    pub(super) fn sender(&self) -> SendRequest<Full<Bytes>> {
        self.sender.clone()
    }

    /// Whether it can still be used by who knows the replica so.
    pub(super) fn is_of(&self, credentials: &Credentials) -> bool {
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
        understood(self.sender.send_request(request).await?).await
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // A peer that does not answer would not let it end by itself.
        self.task.abort();
    }
}

async fn understood(answer: Response<Incoming>) -> Result<Acknowledgement, SendError> {
    let (status, wait) = (answer.status(), retry_after(answer.headers()));
    let body = Limited::new(answer.into_body(), MOST_ANSWER)
        .collect()
        .await;
    let body = body.map_err(|error| SendError::Body(error.to_string()))?;
    let body = body.to_bytes();
    if status != StatusCode::OK {
        return Err(SendError::Refused(status, words(&body), wait));
    }
    Ok(serde_json::from_slice(&body)?)
}

/// In whole seconds, as Kubernetes writes it.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(RETRY_AFTER)?.to_str().ok()?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

/// What the replica says of its reason.
fn words(body: &[u8]) -> String {
    let status: Option<Status> = serde_json::from_slice(body).ok();
    let message = status.and_then(|status| status.message).unwrap_or_default();
    if message.is_empty() {
        return message;
    }
    let words: String = message.chars().take(MOST_WORDS).collect();
    format!(": {words}")
}
