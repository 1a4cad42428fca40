//! HTTP probes: GET Prometheus text from the endpoints in `NodeQOS`, without ever blocking an evaluation.
//!
//! Requests run on a separate thread. A response is passed through a lock that is held only to swap a pointer, and
//! the evaluation only tries that lock. As with the kubelet's probes, certificates are not verified, since a
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

use super::insecure_tls;
use super::prometheus::{self, TextError};
use super::refill::Refill;
use crate::clock::boot_time;
use crate::engine::Demand;
use crate::engine::metric::Metric;
use crate::engine::policy::{PolicySet, Probe};
use crate::engine::sample::{ProbeSample, Sample, Series};
use crate::engine::window::CustomWindow;

/// Maximum response size in bytes.
pub const MAX_RESPONSE_SIZE: usize = 1 << 20;
/// Maximum number of series used from one response.
pub const MAX_SERIES: usize = 4096;

/// Why a probe failed.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The URL or a header cannot be sent.
    #[error("failed to make the request: {0}")]
    Request(#[from] hyper::http::Error),
    /// The connection failed or broke, or the peer does not speak HTTP.
    #[error("the request failed: {}", innermost(.0))]
    Exchange(#[from] hyper_util::client::legacy::Error),
    /// The response was cut off.
    #[error("failed to read the response: {0}")]
    Body(Box<dyn std::error::Error + Send + Sync>),
    /// The request timed out.
    #[error("no response within {0:?}")]
    TimedOut(Duration),
    /// Neither success nor a redirect.
    #[error("the response is {0}")]
    Status(StatusCode),
    /// A redirect.
    #[error("the response is {0}, and redirects are not followed: name the endpoint itself")]
    Redirected(StatusCode),
    /// The response is too long.
    #[error("the response is longer than 1 MiB")]
    TooLong,
    /// Not UTF-8.
    #[error("the response is not UTF-8 text")]
    NotText,
    /// Not Prometheus text, or too many series.
    #[error(transparent)]
    Text(#[from] TextError),
}

/// The root cause: hyper wraps "connection refused" three times.
fn innermost<'e>(error: &'e (dyn std::error::Error + 'static)) -> &'e dyn std::error::Error {
    error.source().map_or(error, innermost)
}

/// Sends the probes of the policies.
#[derive(Debug)]
pub struct Prober {
    /// Host for probes without one.
    node: IpAddr,
    worker: Option<Worker>,
    running: Vec<ActiveProbe>,
    windows: Arc<[CustomWindow]>,
}

/// A probe with its task.
#[derive(Debug)]
struct ActiveProbe {
    target: Arc<Target>,
    task: AbortHandle,
}

#[derive(Debug)]
struct Target {
    probe: Probe,
    /// The probe's URL, with the node's address if it names no host.
    url: Arc<str>,
    /// Names of the series that rules use.
    names: BTreeSet<Arc<str>>,
    wake: Notify,
    /// The last successful response.
    answer: Mutex<Option<ProbeSample>>,
    /// Why the last request failed.
    failure: Mutex<Option<Arc<ProbeError>>>,
}

impl Prober {
    /// A prober without probes; its thread starts with the first one. Probes without a host go to `node`.
    pub fn new(node: IpAddr) -> Self {
        Self {
            node,
            worker: None,
            running: Vec::new(),
            windows: Arc::default(),
        }
    }

    /// Adds the probes of these windows to those of every policy.
    #[must_use]
    pub fn with_windows(mut self, windows: Arc<[CustomWindow]>) -> Self {
        self.windows = windows;
        self
    }

    /// Replaces the probes and series names with those of `policy`. An unchanged probe keeps its last response. If two
    /// probes share a URL, the first one's headers and timeout apply to both.
    ///
    /// # Errors
    /// If the thread could not be started: then nothing is probed.
    pub fn set_policy(&mut self, policy: &PolicySet) -> io::Result<()> {
        let mut before = std::mem::take(&mut self.running);
        for (probe, names) in probes(policy, &self.windows) {
            let same = |it: &ActiveProbe| it.target.probe == probe && it.target.names == names;
            let running = match before.iter().position(same) {
                Some(index) => before.swap_remove(index),
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

    fn start(&mut self, probe: Probe, names: BTreeSet<Arc<str>>) -> io::Result<ActiveProbe> {
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
            .spawn(run_probe(Arc::clone(&target), worker.client.clone()));
        let task = task.abort_handle();
        Ok(ActiveProbe { target, task })
    }

    /// Triggers the demanded probes and returns immediately. A probe whose request is still pending is sent again only
    /// after that has finished or timed out. Call once per evaluation; responses are used by the next sample.
    pub fn set_demand(&self, demand: &Demand) {
        let wanted = |it: &&ActiveProbe| {
            let mut probes = demand.probes.iter();
            probes.any(|probe| probe.url == it.target.probe.url)
        };
        for running in self.running.iter().filter(wanted) {
            running.target.wake.notify_one();
        }
    }

    /// Triggers the probes of the windows like [`Self::set_demand`]; false if there are none.
    pub fn trigger_windows(&self) -> bool {
        let mut any = false;
        for probe in self.windows.iter().filter_map(|it| it.probe.as_ref()) {
            let mut running = self.running.iter();
            if let Some(running) = running.find(|it| it.target.probe.url == probe.url) {
                running.target.wake.notify_one();
                any = true;
            }
        }
        any
    }

    /// Puts the last responses into the sample, without waiting. An old response stays, with its time of arrival, until
    /// there is a newer one.
    pub fn fill(&self, sample: &mut Sample) {
        let mut probes = Refill::new(&mut sample.probes);
        for running in &self.running {
            let target = &running.target;
            let Ok(answer) = target.answer.try_lock() else {
                // It is being replaced: keep the one in the sample.
                probes.skip(|entry| entry.url == target.probe.url);
                continue;
            };
            if let Some(answer) = &*answer {
                *probes.next(|_| true, || answer.clone()) = answer.clone();
            }
        }
    }

    /// The URLs whose last request failed, with the error.
    pub fn failures(&self) -> impl Iterator<Item = (&Arc<str>, Arc<ProbeError>)> {
        self.running.iter().filter_map(|running| {
            let failure = running.target.failure.try_lock().ok()?;
            Some((&running.target.url, Arc::clone(failure.as_ref()?)))
        })
    }
}

/// Every probe that a rule or a window needs, by URL, with the names of its series.
fn probes(policy: &PolicySet, windows: &[CustomWindow]) -> Vec<(Probe, BTreeSet<Arc<str>>)> {
    let mut found: BTreeMap<&Arc<str>, (Probe, BTreeSet<Arc<str>>)> = BTreeMap::new();
    let rules = policy.rules.iter().map(|rule| (&rule.metric, &rule.probe));
    let windows = windows
        .iter()
        .map(|window| (&window.metric.source, &window.probe));
    for needed in rules.chain(windows) {
        let (Metric::Probe(name), Some(probe)) = needed else {
            continue;
        };
        let (_, names) = found
            .entry(&probe.url)
            .or_insert_with(|| (probe.clone(), BTreeSet::new()));
        names.insert(Arc::clone(name));
    }
    found.into_values().collect()
}

/// The URL, with `node` as the host if it has none (`http://:9100/metrics`).
fn with_host(url: &Arc<str>, node: IpAddr) -> Arc<str> {
    let Some((scheme, rest)) = url.split_once("://:") else {
        return Arc::clone(url);
    };
    match node {
        IpAddr::V4(node) => format!("{scheme}://{node}:{rest}").into(),
        IpAddr::V6(node) => format!("{scheme}://[{node}]:{rest}").into(),
    }
}

/// Asks exporters, over HTTP or HTTPS. Its requests belong to the runtime that they are made on.
pub type HttpClient = Client<HttpsConnector<HttpConnector>, Empty<Bytes>>;

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
                // Returns when the sender is dropped.
                let _ = runtime.block_on(stopped);
                // Dropping the runtime would wait for pending DNS lookups.
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

/// A client for exporters.
///
/// # Errors
/// TLS is not available.
pub fn client() -> io::Result<HttpClient> {
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(insecure_tls::config().map_err(io::Error::other)?)
        .https_or_http()
        .enable_http1()
        .build();
    // A new connection for each request, as in the kubelet's probes: the response comes from the current listener.
    Ok(Client::builder(TokioExecutor::new())
        .pool_max_idle_per_host(0)
        .build(connector))
}

async fn run_probe(target: Arc<Target>, client: HttpClient) {
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
                store(&target.answer, answer);
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

fn store(slot: &Mutex<Option<ProbeSample>>, answer: ProbeSample) {
    let before = {
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        slot.replace(answer)
    };
    // Dropped after the lock is released: it may be thousands of series.
    drop(before);
}

async fn series(target: &Target, client: &HttpClient) -> Result<Arc<[Series]>, ProbeError> {
    let headers = target.probe.headers.iter();
    let headers = headers.map(|(name, value)| (name.as_ref(), value.as_ref()));
    let body = page(client, &target.url, headers).await?;
    let text = std::str::from_utf8(&body).map_err(|_| ProbeError::NotText)?;
    let wanted = |name: &str| target.names.contains(name);
    Ok(prometheus::parse(text, wanted, MAX_SERIES)?.into())
}

/// Gets a page of at most [`MAX_RESPONSE_SIZE`], without a time limit.
///
/// # Errors
/// There is no such page.
pub async fn page<'a>(
    client: &HttpClient,
    url: &str,
    headers: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Bytes, ProbeError> {
    let answer = client.request(request(url, headers)?).await?;
    match answer.status() {
        status if status.is_success() => {}
        status if status.is_redirection() => return Err(ProbeError::Redirected(status)),
        status => return Err(ProbeError::Status(status)),
    }
    body(answer).await
}

fn request<'a>(
    url: &str,
    more: impl IntoIterator<Item = (&'a str, &'a str)>,
) -> Result<Request<Empty<Bytes>>, ProbeError> {
    let mut request = Request::get(url).body(Empty::new())?;
    let headers = request.headers_mut();
    let agent = concat!("plimsoll/", env!("CARGO_PKG_VERSION"));
    headers.insert(USER_AGENT, HeaderValue::from_static(agent));
    headers.insert(
        ACCEPT,
        HeaderValue::from_static("text/plain;version=0.0.4,*/*;q=0.1"),
    );
    for (name, value) in more {
        let name = HeaderName::try_from(name).map_err(hyper::http::Error::from)?;
        let value = HeaderValue::try_from(value).map_err(hyper::http::Error::from)?;
        headers.insert(name, value);
    }
    Ok(request)
}

async fn body(answer: Response<hyper::body::Incoming>) -> Result<Bytes, ProbeError> {
    match Limited::new(answer.into_body(), MAX_RESPONSE_SIZE)
        .collect()
        .await
    {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ProbeError::TooLong),
        Err(error) => Err(ProbeError::Body(error)),
    }
}
