//! HTTP probes: GET Prometheus text from where a `NodeQOS` says, beside the evaluations and never in their way.
//!
//! A thread of its own asks; an answer waits behind a lock that is held for the exchange of a pointer only, and
//! even that is never waited for. As the kubelet does it for its probes, certificates are not verified, since a
//! probe's target is the node itself. Redirects are not followed.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::body::Bytes;
use hyper::header::{ACCEPT, HeaderName, HeaderValue, USER_AGENT};
use hyper::{Request, Response, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;

use super::prometheus::{self, TextError};
use super::refill::Refill;
use super::trusting;
use crate::engine::Demand;
use crate::engine::metric::Metric;
use crate::engine::policy::{PolicySet, Probe};
use crate::engine::sample::{ProbeSample, Sample, Series};
use crate::node::clock::boot_time;

/// An answer may be that long.
pub const LONGEST_ANSWER: usize = 1 << 20;
/// Series kept of one answer.
pub const MOST_SERIES: usize = 4096;

/// Why a probe has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The URL or a header cannot be sent.
    #[error("failed to make the request: {0}")]
    Request(#[from] hyper::http::Error),
    /// No connection, or it broke, or HTTP was not spoken.
    #[error("the request failed: {}", innermost(.0))]
    Exchange(#[from] hyper_util::client::legacy::Error),
    /// The answer broke off.
    #[error("failed to read the answer: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    /// It took too long.
    #[error("no answer within {0:?}")]
    TimedOut(Duration),
    /// Neither success nor a redirect.
    #[error("answered {0}")]
    Status(StatusCode),
    /// A redirect.
    #[error("answered {0}, and redirects are not followed: name the endpoint itself")]
    Redirected(StatusCode),
    /// A longer answer than is read.
    #[error("the answer is longer than 1 MiB")]
    TooLong,
    /// Not UTF-8.
    #[error("the answer is not UTF-8 text")]
    NotText,
    /// Not Prometheus text, or too many series.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// What an error comes down to: hyper wraps "connection refused" three times.
fn innermost<'e>(error: &'e (dyn std::error::Error + 'static)) -> &'e dyn std::error::Error {
    error.source().map_or(error, innermost)
}

/// Asks the probes of the policies.
#[derive(Debug)]
pub struct Prober {
    /// Where probes that name no host are asked.
    node: IpAddr,
    worker: Option<Worker>,
    running: Vec<Running>,
}

/// A probe that is being asked.
#[derive(Debug)]
struct Running {
    target: Arc<Target>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Target {
    probe: Probe,
    /// The probe's URL, with the node's address where it names no host.
    url: Arc<str>,
    /// Names of the series that rules ask for.
    names: BTreeSet<Arc<str>>,
    wake: Notify,
    /// The last good answer.
    answer: Mutex<Option<ProbeSample>>,
    /// Why the last request had none.
    failure: Mutex<Option<Arc<ProbeError>>>,
}

impl Prober {
    /// A prober with nothing to ask; its thread starts with the first probe. One that names no host is asked at `node`.
    pub const fn new(node: IpAddr) -> Self {
        Self {
            node,
            worker: None,
            running: Vec::new(),
        }
    }

    /// Takes the probes of a set of policies and the names of the series that their rules ask for. A probe that stays
    /// as it is keeps its last answer. Where two have one URL, the first's headers and timeout count for both.
    ///
    /// # Errors
    /// Where the thread could not be started: then nothing is probed.
    pub fn set_policy(&mut self, policy: &PolicySet) -> io::Result<()> {
        let mut before = std::mem::take(&mut self.running);
        for (probe, names) in probes(policy) {
            let same = |it: &Running| it.target.probe == probe && it.target.names == names;
            let running = match before.iter().position(same) {
                Some(place) => before.swap_remove(place),
                None => self.start(probe, names)?,
            };
            self.running.push(running);
        }
        for stopped in before {
            stopped.task.abort();
        }
        if self.running.is_empty() {
            self.worker = None;
        }
        Ok(())
    }

    fn start(&mut self, probe: Probe, names: BTreeSet<Arc<str>>) -> io::Result<Running> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::start()?,
        };
        let worker = self.worker.insert(worker);
        let target = Arc::new(Target {
            url: with_host(&probe.url, self.node),
            probe,
            names,
            wake: Notify::new(),
            answer: Mutex::default(),
            failure: Mutex::default(),
        });
        let task = worker
            .runtime
            .spawn(keep_asking(Arc::clone(&target), worker.client.clone()));
        let task = task.abort_handle();
        Ok(Running { target, task })
    }

    /// Has the demanded probes asked, and returns at once. One that still waits for an answer is asked again only when
    /// that has come or timed out. Call it once an evaluation; the answer is there for the next sample.
    pub fn ask(&self, demand: &Demand) {
        let wanted = |it: &&Running| {
            let mut probes = demand.probes.iter();
            probes.any(|probe| probe.url == it.target.probe.url)
        };
        for running in self.running.iter().filter(wanted) {
            running.target.wake.notify_one();
        }
    }

    /// Puts the last answers into the sample, without waiting for any. An old answer stays, with the time of its
    /// arrival, until there is a newer one.
    pub fn fill(&self, sample: &mut Sample) {
        let mut probes = Refill::new(&mut sample.probes);
        for running in &self.running {
            let target = &running.target;
            let Ok(answer) = target.answer.try_lock() else {
                // It is being replaced just now: what the sample still holds of it will do.
                probes.keep(|kept| kept.url == target.probe.url);
                continue;
            };
            if let Some(answer) = &*answer {
                *probes.next(|_| true, || answer.clone()) = answer.clone();
            }
        }
    }

    /// The URLs whose last request failed, with the reason.
    pub fn failures(&self) -> impl Iterator<Item = (&Arc<str>, Arc<ProbeError>)> {
        self.running.iter().filter_map(|running| {
            let failure = running.target.failure.try_lock().ok()?;
            Some((&running.target.url, Arc::clone(failure.as_ref()?)))
        })
    }
}

/// Every probe that a rule needs, by URL, with the names of the series that are asked for.
fn probes(policy: &PolicySet) -> Vec<(Probe, BTreeSet<Arc<str>>)> {
    let mut found: BTreeMap<&Arc<str>, (Probe, BTreeSet<Arc<str>>)> = BTreeMap::new();
    for rule in &policy.rules {
        let (Metric::Probe(name), Some(probe)) = (&rule.metric, &rule.probe) else {
            continue;
        };
        let (_, names) = found
            .entry(&probe.url)
            .or_insert_with(|| (probe.clone(), BTreeSet::new()));
        names.insert(Arc::clone(name));
    }
    found.into_values().collect()
}

/// The URL, with `node` as its host where it has none (`http://:9100/metrics`).
fn with_host(url: &Arc<str>, node: IpAddr) -> Arc<str> {
    let Some((scheme, rest)) = url.split_once("://:") else {
        return Arc::clone(url);
    };
    match node {
        IpAddr::V4(node) => format!("{scheme}://{node}:{rest}").into(),
        IpAddr::V6(node) => format!("{scheme}://[{node}]:{rest}").into(),
    }
}

type HttpClient = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

/// The thread that the requests run on.
#[derive(Debug)]
struct Worker {
    runtime: Handle,
    client: HttpClient,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start() -> io::Result<Self> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name("probes".into())
            .spawn(move || {
                // Ends when told to, or when the sender is gone.
                let _ = runtime.block_on(stopped);
                // A name that is still being looked up would be waited for.
                runtime.shutdown_background();
            })?;
        Ok(Self {
            runtime: handle,
            client: client()?,
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn client() -> io::Result<HttpClient> {
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(trusting::config().map_err(io::Error::other)?)
        .https_or_http()
        .enable_http1()
        .build();
    // A connection for each request, as the kubelet's probes have it: what answers is what listens now.
    Ok(Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .build(connector))
}

async fn keep_asking(target: Arc<Target>, client: HttpClient) {
    loop {
        target.wake.notified().await;
        let timeout = target.probe.timeout;
        let result = match tokio::time::timeout(timeout, series(&target, &client)).await {
            Ok(result) => result,
            Err(_) => Err(ProbeError::TimedOut(timeout)),
        };
        let failure = match result {
            Ok(series) => {
                let answer = ProbeSample {
                    url: Arc::clone(&target.probe.url),
                    at: boot_time(),
                    series,
                };
                put(&target.answer, answer);
                None
            }
            Err(error) => Some(Arc::new(error)),
        };
        *target
            .failure
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = failure;
    }
}

fn put(slot: &Mutex<Option<ProbeSample>>, answer: ProbeSample) {
    let before = {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.replace(answer)
    };
    // Freed when the lock is given back: it may be thousands of series.
    drop(before);
}

async fn series(target: &Target, client: &HttpClient) -> Result<Arc<[Series]>, ProbeError> {
    let answer = client.request(request(target)?).await?;
    match answer.status() {
        status if status.is_success() => {}
        status if status.is_redirection() => return Err(ProbeError::Redirected(status)),
        status => return Err(ProbeError::Status(status)),
    }
    let body = body(answer).await?;
    let text = std::str::from_utf8(&body).map_err(|_| ProbeError::NotText)?;
    let wanted = |name: &str| target.names.contains(name);
    Ok(prometheus::parse(text, wanted, MOST_SERIES)?.into())
}

fn request(target: &Target) -> Result<Request<Empty<Bytes>>, ProbeError> {
    let mut request = Request::get(&*target.url).body(Empty::new())?;
    let headers = request.headers_mut();
    let agent = concat!("plimsoll/", env!("CARGO_PKG_VERSION"));
    headers.insert(USER_AGENT, HeaderValue::from_static(agent));
    headers.insert(
        ACCEPT,
        HeaderValue::from_static("text/plain;version=0.0.4,*/*;q=0.1"),
    );
    for (name, value) in &target.probe.headers {
        let name = HeaderName::try_from(name).map_err(hyper::http::Error::from)?;
        let value = HeaderValue::try_from(value).map_err(hyper::http::Error::from)?;
        headers.insert(name, value);
    }
    Ok(request)
}

async fn body(answer: Response<hyper::body::Incoming>) -> Result<Bytes, ProbeError> {
    match Limited::new(answer.into_body(), LONGEST_ANSWER)
        .collect()
        .await
    {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ProbeError::TooLong),
        Err(error) => Err(ProbeError::Body(error)),
    }
}
