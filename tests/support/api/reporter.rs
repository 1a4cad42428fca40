//! Agents that report to a controller, honest and malicious.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures::stream;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper::{HeaderMap, Request};
use hyper_util::rt::{TokioExecutor, TokioIo};
use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::ControlPlane;

const TIMEOUT: Duration = Duration::from_mins(1);
pub const ACCOUNT: &str = "plimsoll-agent";

/// Body type of requests.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

/// An answer: code, headers, body.
pub struct Answer {
    pub code: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

/// TLS configuration of agents, with the published authorities.
pub fn trust(plane: &ControlPlane) -> Arc<ClientConfig> {
    plane.until("the authorities are published", TIMEOUT, |plane| {
        plane.get("configmap", "plimsoll-report-ca")["data"]["ca.crt"].is_string()
    });
    let bundle = plane.get("configmap", "plimsoll-report-ca")["data"]["ca.crt"].clone();
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(bundle.as_str().unwrap().as_bytes()) {
        roots.add(authority.unwrap()).unwrap();
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(config)
}

/// The agents' `ServiceAccount`, in namespace `default`.
pub fn account(plane: &ControlPlane) {
    let metadata = json!({"name": ACCOUNT, "namespace": "default"});
    plane.apply(&[json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata})]);
}

/// The token of the agent on a node, as created by the kubelet.
pub fn token(plane: &ControlPlane, node: &str) -> String {
    let bound = format!("--bound-object-name={node}");
    let args = [
        "create",
        "token",
        ACCOUNT,
        "--audience=plimsoll.dev/report",
        "--bound-object-kind=Node",
        &bound,
    ];
    plane.kubectl(&args).trim().to_owned()
}

/// TLS to a controller with the name of its Service. `None`: disconnected.
pub async fn connect(trust: Arc<ClientConfig>, port: u16) -> Option<TlsStream<TcpStream>> {
    let stream = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
    stream.set_nodelay(true).ok()?;
    let name = ServerName::try_from("plimsoll-report.default.svc").unwrap();
    TlsConnector::from(trust).connect(name, stream).await.ok()
}

pub fn runtime() -> Runtime {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all().build().unwrap()
}

/// An answer, or an error.
pub type Answered = Result<Answer, hyper::Error>;

/// One connection, on a thread of its own that answers pings while the test waits.
pub struct Reporter(UnboundedSender<(Request<Body>, Sender<Answered>)>);

impl Reporter {
    pub fn new(trust: &Arc<ClientConfig>, port: u16) -> Self {
        Self::dial(trust, port).unwrap()
    }

    /// `None`: the controller disconnected.
    pub fn dial(trust: &Arc<ClientConfig>, port: u16) -> Option<Self> {
        let trust = Arc::clone(trust);
        let (ask, mut asked) = unbounded_channel::<(Request<Body>, Sender<Answered>)>();
        let (connected, connects) = channel();
        let serve = async move {
            let stream = TokioIo::new(connect(trust, port).await?);
            let (mut sender, connection) = handshake(TokioExecutor::new(), stream).await.ok()?;
            tokio::spawn(async move { drop(connection.await) });
            connected.send(()).ok()?;
            while let Some((request, answer)) = asked.recv().await {
                answer.send(send(&mut sender, request).await).ok()?;
            }
            Some(())
        };
        thread::spawn(move || runtime().block_on(serve));
        connects.recv().ok().map(|()| Self(ask))
    }

    /// Sends any request.
    pub fn send(&self, request: Request<Body>) -> Answered {
        let (answer, answers) = channel();
        self.0.send((request, answer)).unwrap();
        answers.recv().unwrap()
    }

    /// Sends a report.
    pub fn report(&self, token: &str, report: &Value) -> Answer {
        let request = post(token).body(full_body(report.to_string()));
        self.send(request.unwrap()).unwrap()
    }
}

/// Sends one request on a connection.
pub async fn send(sender: &mut SendRequest<Body>, request: Request<Body>) -> Answered {
    let (parts, body) = sender.send_request(request).await?.into_parts();
    let body = body.collect().await?.to_bytes();
    Ok(Answer {
        code: parts.status.as_u16(),
        headers: parts.headers,
        body: serde_json::from_slice(&body).unwrap_or(Value::Null),
    })
}

/// The request headers of a report.
pub fn post(token: &str) -> hyper::http::request::Builder {
    Request::post("https://plimsoll-report.default.svc/v1/report")
        .header("authorization", format!("Bearer {token}"))
        .header("content-type", "application/json")
}

pub fn full_body(body: impl Into<Bytes>) -> Body {
    Full::new(body.into()).boxed_unsync()
}

/// A body without a known length.
pub fn in_parts(parts: usize, bytes: usize) -> Body {
    let part = Bytes::from(vec![b' '; bytes]);
    let parts = (0..parts).map(move |_| Ok(Frame::data(part.clone())));
    StreamBody::new(stream::iter(parts)).boxed_unsync()
}

/// A report with this CPU usage in millicores. No number is whole, because kubectl writes 1.0 as 1.
pub fn report(node: &str, sequence: u64, millicores: u32) -> Value {
    let window = json!({"avg": 40.5, "p50": 38.5, "p90": 60.5, "p95": 66.5, "p99": 71.5, "max": 80.5, "coverage": 0.95});
    let term = json!({"percent": 31.5, "expected": 25.2, "newcomers": 0.5, "line": 80.5});
    json!({
        "node": node, "bootID": "boot", "agentStartedMillis": 5000, "sequence": sequence, "intervalSeconds": 10,
        "status": {
            "timestamp": "2026-01-02T03:04:05Z",
            "window": "10s",
            "agent": {"version": "0.1.0", "bootID": "boot", "sequence": sequence},
            "capacity": {"cpu": "8", "memory": "16777216Ki"},
            "usage": {"node": {"cpu": format!("{millicores}m"), "memory": "4194304Ki"}},
            "pressure": {"memory": {"some": {"avg10": 12.5, "avg60": 3.5, "avg300": 1.5}}},
            "windows": {"cpu": {"last5m": window}},
            "load": {"percent": 31.5, "worst": "cpu", "cpu": term, "memory": term},
            "pods": 2,
            "topPods": [{"namespace": "shop", "name": "cart-0", "cpu": "900m", "memory": "1048576Ki"}],
            "rules": {"total": 2, "breached": 1, "cooling": 0, "unknown": 0},
            "breached": ["batch/cpu"],
        },
    })
}

/// Signs tokens with the API server's key.
pub struct Forger {
    pair: EcdsaKeyPair,
    header: Value,
    claims: Value,
}

fn part(text: &str) -> Value {
    serde_json::from_slice(&URL_SAFE_NO_PAD.decode(text).unwrap()).unwrap()
}

impl Forger {
    /// Based on an honest token.
    pub fn new(plane: &ControlPlane, valid_token: &str) -> Self {
        let key = PrivatePkcs8KeyDer::from_pem_slice(&plane.token_key()).unwrap();
        let (algorithm, random) = (&ECDSA_P256_SHA256_FIXED_SIGNING, SystemRandom::new());
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, key.secret_pkcs8_der(), &random);
        let mut parts = valid_token.split('.').map(str::to_owned);
        Self {
            pair: pair.unwrap(),
            header: part(&parts.next().unwrap()),
            claims: part(&parts.next().unwrap()),
        }
    }

    /// A token with these changes, by JSON pointer: in the header below `/header`, otherwise in the claims.
    pub fn token(&self, changes: &[(&str, Value)]) -> String {
        let mut token = json!({"header": self.header, "claims": self.claims});
        for (path, value) in changes {
            *token.pointer_mut(path).unwrap() = value.clone();
        }
        let encode = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", encode(&token["header"]), encode(&token["claims"]));
        let signature = self.pair.sign(&SystemRandom::new(), signed.as_bytes());
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature.unwrap()))
    }
}

/// Number of reports by result, from a controller's metrics.
pub fn counted(metrics: &str) -> BTreeMap<String, u64> {
    let start = "plimsoll_controller_reports_total{result=\"";
    let lines = metrics.lines().filter_map(|line| line.strip_prefix(start));
    let counts = lines.filter_map(|line| {
        let (result, count) = line.split_once("\"} ")?;
        Some((result.to_owned(), count.parse().ok()?))
    });
    counts.collect()
}
