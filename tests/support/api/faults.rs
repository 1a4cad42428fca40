//! A proxy in front of an API server that injects faults.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use futures::stream::{self, StreamExt as _};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use kube::Client;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Watch error for a version that is too old.
pub const EXPIRED: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410,"message":"too old"}}"#;
/// Watch error that ends the stream.
pub const BROKEN: &str = r#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"InternalError","code":500,"message":"broken"}}"#;

/// A fault of a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// This answer, with a `Retry-After` in seconds; the request is not forwarded.
    Answer(u16, Option<u64>, String),
    /// The connection is closed before the request is forwarded.
    CutBefore,
    /// The request is carried out, and the connection closed before the answer.
    CutAfter,
    /// The request is carried out, and the connection closed in the middle of the first frame.
    CutWithin,
    /// The request is carried out, but never answered.
    NeverAnswer,
}

/// Faults of calls that expect an answer, with descriptions.
pub fn of_calls() -> Vec<(&'static str, Fault)> {
    let refused = |code: u16| {
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": "a fault"});
        Fault::Answer(code, None, body.to_string())
    };
    // As in flow control: a header, and plain text.
    let busy = "Too many requests, please try again later.".to_owned();
    vec![
        ("401", refused(401)),
        ("403", refused(403)),
        ("a 404 that is not of the API server", refused(404)),
        ("409", refused(409)),
        ("410", refused(410)),
        ("429", Fault::Answer(429, Some(1), busy)),
        ("500", refused(500)),
        (
            "an invalid answer",
            Fault::Answer(200, None, "not json".to_owned()),
        ),
        (
            "an answer of something else",
            Fault::Answer(200, None, r#"{"result": "ok"}"#.to_owned()),
        ),
        ("a cut before the request", Fault::CutBefore),
        ("a cut after the request", Fault::CutAfter),
        ("a cut in the middle of the answer", Fault::CutWithin),
        ("no answer", Fault::NeverAnswer),
    ]
}

/// Queues of faults by kind of request. `None`: no fault.
#[derive(Clone, Default)]
pub struct FaultQueues(Arc<Mutex<BTreeMap<String, VecDeque<Option<Fault>>>>>);

impl FaultQueues {
    pub fn before(proxy: &Proxy, kind_of: fn(&str, &str) -> Option<String>) -> Self {
        let queues = Self::default();
        let left = queues.clone();
        proxy.respond_with(move |method, path| {
            let mut left = left.0.lock().unwrap();
            left.get_mut(&kind_of(method, path)?)?.pop_front()?
        });
        queues
    }

    pub fn add(&self, kind: impl Into<String>, faults: impl IntoIterator<Item = Option<Fault>>) {
        let mut left = self.0.lock().unwrap();
        left.entry(kind.into()).or_default().extend(faults);
    }

    /// Faults that were not injected yet, by kind.
    pub fn left(&self) -> BTreeMap<String, usize> {
        let left = self.0.lock().unwrap();
        let left = left.iter().map(|(kind, left)| (kind.clone(), left.len()));
        left.filter(|(_, left)| *left > 0).collect()
    }
}

/// A request that arrived: method, and path with query.
pub type Seen = (String, String);

type Answer = Response<UnsyncBoxBody<Bytes, Cut>>;
type Responder = Box<dyn Fn(&str, &str) -> Option<Fault> + Send>;

/// The proxy; stops with the runtime.
pub struct Proxy {
    pub address: SocketAddr,
    responder: Arc<Mutex<Responder>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    cut: watch::Sender<()>,
}

impl Proxy {
    /// In front of the server of `client`.
    pub async fn start(client: Client) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let none: Responder = Box::new(|_, _| None);
        let responder = Arc::new(Mutex::new(none));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let (cut, cuts) = watch::channel(());
        let proxy = Self {
            address,
            responder: Arc::clone(&responder),
            seen: Arc::clone(&seen),
            cut,
        };
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (client, responder, seen) =
                    (client.clone(), Arc::clone(&responder), Arc::clone(&seen));
                let cuts = cuts.clone();
                let service = service_fn(move |request| {
                    let (responder, seen) = (Arc::clone(&responder), Arc::clone(&seen));
                    pass(client.clone(), responder, seen, cuts.clone(), request)
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(async move { drop(connection.await) });
            }
        });
        proxy
    }

    /// In front of the cluster of a kubeconfig, on a thread of its own: for blocking tests.
    pub fn beside(kubeconfig: &Path) -> Self {
        let kubeconfig = kubeconfig.to_owned();
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .unwrap();
            runtime.block_on(async {
                let client = connect(&ClusterSource::file(&kubeconfig)).await.unwrap();
                sender.send(Self::start(client).await).unwrap();
                std::future::pending::<()>().await;
            });
        });
        receiver.recv().unwrap()
    }

    /// Sets the faults of requests, by method and path. `None`: no fault.
    pub fn respond_with(&self, responder: impl Fn(&str, &str) -> Option<Fault> + Send + 'static) {
        *self.responder.lock().unwrap() = Box::new(responder);
    }

    /// Closes all responses in progress, such as watches.
    pub fn cut(&self) {
        self.cut.send_replace(());
    }

    /// A kubeconfig for the proxy.
    pub fn kubeconfig(&self) -> serde_json::Value {
        json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
            "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "nobody"}}],
            "users": [{"name": "nobody", "user": {}}],
            "clusters": [{"name": "proxy", "cluster": {"server": format!("http://{}", self.address)}}],
        })
    }

    /// The requests since the last call.
    pub fn take_seen(&self) -> Vec<Seen> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }

    /// A client through the proxy, built like the product's. Needs a runtime.
    pub fn client(&self) -> Client {
        let mut config = kube::Config::new(format!("http://{}", self.address).parse().unwrap());
        config.default_retry = false;
        Client::try_from(config).unwrap()
    }
}

async fn pass(
    client: Client,
    responder: Arc<Mutex<Responder>>,
    seen: Arc<Mutex<Vec<Seen>>>,
    cuts: watch::Receiver<()>,
    request: Request<Incoming>,
) -> Result<Answer, Cut> {
    let method = request.method().to_string();
    let path = request.uri().to_string();
    let fault = responder.lock().unwrap()(&method, &path);
    seen.lock().unwrap().push((method, path));
    match fault {
        Some(Fault::Answer(code, wait, body)) => return Ok(answer(code, wait, body)),
        Some(Fault::CutBefore) => return Err(Cut),
        _ => {}
    }
    let (mut parts, body) = request.into_parts();
    parts.headers.remove("host");
    let body = body.collect().await.map_err(|_| Cut)?.to_bytes();
    let request = Request::from_parts(parts, kube::client::Body::from(body));
    let response = client.send(request).await.map_err(|_| Cut)?;
    let (parts, body) = response.into_parts();
    match fault {
        Some(Fault::CutAfter) => {
            drop(body.collect().await);
            Err(Cut)
        }
        Some(Fault::NeverAnswer) => {
            drop(body.collect().await);
            std::future::pending().await
        }
        _ => {
            let body = passed_on(body, cuts);
            let mut response = Response::new(match fault {
                Some(Fault::CutWithin) => halved(body),
                _ => body,
            });
            *response.status_mut() = parts.status;
            Ok(response)
        }
    }
}

/// Forwards a body until it ends or is cut.
fn passed_on(body: kube::client::Body, mut cuts: watch::Receiver<()>) -> UnsyncBoxBody<Bytes, Cut> {
    cuts.mark_unchanged();
    let frames = stream::unfold(Some((body, cuts)), |state| async {
        let (mut body, mut cuts) = state?;
        tokio::select! {
            frame = body.frame() => {
                let frame = frame?.map_err(|_| Cut);
                Some((frame, Some((body, cuts))))
            }
            Ok(()) = cuts.changed() => Some((Err(Cut), None)),
        }
    });
    StreamBody::new(frames).boxed_unsync()
}

/// Half of the first frame, and then an error.
fn halved(mut body: UnsyncBoxBody<Bytes, Cut>) -> UnsyncBoxBody<Bytes, Cut> {
    let half = async move {
        let frame = body.frame().await.ok_or(Cut)??;
        let data = frame.into_data().map_err(|_| Cut)?;
        Ok(Frame::data(data.slice(..data.len() / 2)))
    };
    let cut = async {
        // Let the data arrive first.
        tokio::time::sleep(Duration::from_millis(50)).await;
        Err(Cut)
    };
    StreamBody::new(stream::once(half).chain(stream::once(cut))).boxed_unsync()
}

fn answer(code: u16, wait: Option<u64>, body: String) -> Answer {
    let mut answer = Response::builder().status(code);
    if let Some(wait) = wait {
        answer = answer.header("retry-after", wait);
    }
    let body = Full::new(Bytes::from(body)).map_err(|never| match never {});
    answer.body(body.boxed_unsync()).unwrap()
}

/// The connection is closed.
#[derive(Debug)]
struct Cut;

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cut")
    }
}

impl std::error::Error for Cut {}
