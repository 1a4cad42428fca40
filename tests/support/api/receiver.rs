//! A fake replica that receives agents' reports and eviction requests over TLS and HTTP/2, with any answers that a
//! test wants.
#![allow(dead_code, reason = "each test uses its part")]

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::Instant;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use plimsoll::crd::report::Report;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use super::leader::Evicting;
use super::now;

/// A certificate authority.
pub struct Authority {
    pub pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    pub fn make() -> Self {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "plimsoll");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    fn serve_as(&self, name: &str) -> ServerConfig {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let chain = vec![CertificateDer::from(certificate.der().to_vec())];
        let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        config
    }
}

/// A received report.
#[derive(Clone, Debug)]
pub struct Seen {
    pub at: Instant,
    pub authorization: String,
    pub bytes: usize,
    pub report: Report,
}

/// Reaction to a report.
#[derive(Clone, Debug)]
pub enum Act {
    /// This answer, with a `Retry-After` in seconds.
    Answer(u16, Option<u64>, String),
    /// No answer.
    Hang,
}

/// The answer of a replica in this term.
pub fn acknowledge(epoch: u64, leading: bool) -> Act {
    let answer = json!({"epoch": epoch, "leading": leading, "nextIntervalSeconds": 10});
    Act::Answer(200, None, answer.to_string())
}

type Responder = Box<dyn Fn(&Seen) -> Act + Send>;

#[derive(Default)]
struct Counts {
    connections: AtomicUsize,
    in_flight: AtomicUsize,
    max_in_flight: AtomicUsize,
}

/// The replica, on a thread of its own until the process exits.
#[derive(Clone)]
pub struct Receiver {
    pub address: SocketAddr,
    responder: Arc<Mutex<Responder>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    counts: Arc<Counts>,
    tls: Arc<Mutex<Arc<ServerConfig>>>,
    evicting: Arc<OnceLock<Evicting>>,
}

/// No answer: the stream is reset.
#[derive(Debug, thiserror::Error)]
#[error("the answer is lost")]
pub struct Lost;

impl Receiver {
    /// A standby on this local address.
    pub fn start(address: IpAddr, authority: &Authority, name: &str) -> Self {
        let responder: Responder = Box::new(|_| acknowledge(1, false));
        let receiver = Self {
            address: SocketAddr::new(address, 0),
            responder: Arc::new(Mutex::new(responder)),
            seen: Arc::default(),
            counts: Arc::default(),
            tls: Arc::new(Mutex::new(Arc::new(authority.serve_as(name)))),
            evicting: Arc::default(),
        };
        let (sender, address) = mpsc::channel();
        let serving = receiver.clone();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build();
            runtime.unwrap().block_on(serving.serve(&sender));
        });
        Self {
            address: address.recv().unwrap(),
            ..receiver
        }
    }

    async fn serve(self, sender: &mpsc::Sender<SocketAddr>) {
        let listener = TcpListener::bind(self.address).await.unwrap();
        sender.send(listener.local_addr().unwrap()).unwrap();
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            self.counts.connections.fetch_add(1, Ordering::Relaxed);
            let acceptor = TlsAcceptor::from(self.tls.lock().unwrap().clone());
            let receiver = self.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else {
                    return;
                };
                let service = service_fn(move |request| {
                    let receiver = receiver.clone();
                    async move { receiver.answer(request).await }
                });
                let connection = http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                drop(connection.await);
            });
        }
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Lost> {
        if let Some(evicting) = self.evicting.get()
            && request.uri().path() != "/v1/report"
        {
            return evicting.answer(request).await;
        }
        assert_eq!(
            (request.method().as_str(), request.uri().path()),
            ("POST", "/v1/report")
        );
        assert_eq!(request.headers()["content-type"], "application/json");
        let authorization = request.headers()["authorization"]
            .to_str()
            .unwrap()
            .to_owned();
        let in_flight = InFlight::begin(&self.counts);
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let seen = Seen {
            at: now(),
            authorization,
            bytes: body.len(),
            report: Report::parse(&body).unwrap(),
        };
        let act = self.responder.lock().unwrap()(&seen);
        self.seen.lock().unwrap().push(seen);
        let Act::Answer(code, wait, body) = act else {
            std::future::pending::<()>().await;
            unreachable!();
        };
        drop(in_flight);
        let mut answer = Response::builder().status(code);
        if let Some(wait) = wait {
            answer = answer.header("retry-after", wait.to_string());
        }
        Ok(answer.body(Full::new(Bytes::from(body))).unwrap())
    }

    /// Sets the reaction to reports.
    pub fn respond_with(&self, responder: impl Fn(&Seen) -> Act + Send + 'static) {
        *self.responder.lock().unwrap() = Box::new(responder);
    }

    /// Sets one answer for all.
    pub fn respond_always(&self, act: Act) {
        self.respond_with(move |_| act.clone());
    }

    /// Changes its certificate to one for this name.
    pub fn set_certificate(&self, authority: &Authority, name: &str) {
        *self.tls.lock().unwrap() = Arc::new(authority.serve_as(name));
    }

    /// Takes eviction requests from now on.
    pub(super) fn evicts(&self, evicting: Evicting) {
        assert!(self.evicting.set(evicting).is_ok(), "it evicts already");
    }

    /// All received reports.
    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        self.counts.connections.load(Ordering::Relaxed)
    }

    /// The most reports in progress at a time.
    pub fn max_in_flight(&self) -> usize {
        self.counts.max_in_flight.load(Ordering::Relaxed)
    }
}

/// A report without an answer yet; ends with its stream.
struct InFlight<'a>(&'a Counts);

impl<'a> InFlight<'a> {
    fn begin(counts: &'a Counts) -> Self {
        let now = counts.in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        counts.max_in_flight.fetch_max(now, Ordering::Relaxed);
        Self(counts)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Writes files like the kubelet: one directory per version, and a symlink that is replaced.
pub fn publish(directory: &Path, files: &[(&str, &str)]) {
    let version = fs::read_dir(directory).unwrap().count();
    let data = directory.join(format!("..version-{version}"));
    fs::create_dir(&data).unwrap();
    for (name, text) in files {
        fs::write(data.join(name), text).unwrap();
        let visible = directory.join(name);
        if fs::symlink_metadata(&visible).is_err() {
            symlink(Path::new("..data").join(name), visible).unwrap();
        }
    }
    let (next, link) = (directory.join("..data_tmp"), directory.join("..data"));
    symlink(&data, &next).unwrap();
    fs::rename(next, link).unwrap();
}

/// Arguments of an agent that reports to the replicas of this Service.
pub fn arguments<'a>(namespace: &'a str, service: &'a str, credentials: &'a Path) -> [&'a str; 8] {
    [
        "--namespace",
        namespace,
        "--pod-name",
        "agent-x",
        "--report-service",
        service,
        "--report-credentials",
        credentials.to_str().unwrap(),
    ]
}

/// An `EndpointSlice` with these ready replicas, all at one address.
pub fn slice(
    namespace: &str,
    service: &str,
    name: &str,
    replica: SocketAddr,
    ready: bool,
) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
        "metadata": {
            "name": name, "namespace": namespace, "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "ports": [{"name": "report", "port": replica.port(), "protocol": "TCP"}],
        "endpoints": [{"addresses": [replica.ip().to_string()], "conditions": {"ready": ready}}],
    })
}
