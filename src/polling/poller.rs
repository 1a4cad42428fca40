//! The rounds: requests to the endpoints that are due, a limited number at a time.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{BoxStream, FuturesUnordered, StreamExt};
use hyper::body::Bytes;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval, timeout};

use super::Options;
use super::metrics::PollMetrics;
use super::page::{self, Clock, PageError, PolledCapacity};
use super::schedule::PollSchedule;
use super::targets::{PollTarget, PollTargets};
use crate::clock;
use crate::cluster::watch::Change;
use crate::crd::NodeMetricStatus;
use crate::crd::polling::PollSettings;
use crate::engine::time::BootTime;
use crate::metrics_api::loads::{NodeLoads, Polled, PolledLoad};
use crate::metrics_api::reports::lifetime;
use crate::node::collect::probe::{self, HttpClient, ProbeError};

/// Requests in progress at a time. Each may hold a page of 1 MiB.
const MAX_REQUESTS: usize = 64;
/// Without any endpoint, time to the next round.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Failing endpoints are logged this often at most.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// Changes of the slices of each Service, by its index in the settings.
pub type Changes = BoxStream<'static, (usize, Change)>;

/// Why a node has no new value.
#[derive(Debug, Error)]
enum PollError {
    #[error(transparent)]
    Request(#[from] ProbeError),
    #[error(transparent)]
    Page(#[from] PageError),
}

impl PollError {
    /// As a word, for the metric.
    fn reason(&self) -> &'static str {
        match self {
            Self::Request(ProbeError::Exchange(error)) if error.is_connect() => "connect",
            Self::Request(ProbeError::TimedOut(_)) => "timeout",
            Self::Request(ProbeError::Status(_) | ProbeError::Redirected(_)) => "status",
            Self::Request(ProbeError::TooLong) => "too_long",
            Self::Request(_) => "broken",
            Self::Page(PageError::NotText | PageError::Text(_)) => "text",
            Self::Page(PageError::Ambiguous(_)) => "ambiguous",
            Self::Page(PageError::Implausible(..)) => "implausible",
            Self::Page(PageError::Old(..)) => "old",
            Self::Page(PageError::NoCapacity(_)) => "capacity",
            Self::Page(PageError::Missing(_)) => "missing",
        }
    }
}

/// An endpoint has answered, or not.
struct Outcome {
    node: Arc<str>,
    target: PollTarget,
    page: Result<Bytes, ProbeError>,
}

/// A round in progress.
struct Round {
    began: BootTime,
    /// Endpoints of no known Node.
    unknown: usize,
    failed: usize,
    /// One of the failures.
    example: String,
}

struct Poller {
    settings: PollSettings,
    metrics: PollMetrics,
    loads: NodeLoads,
    client: HttpClient,
    targets: PollTargets,
    schedule: PollSchedule,
    waiting: VecDeque<(Arc<str>, PollTarget)>,
    running: FuturesUnordered<BoxFuture<'static, Outcome>>,
    round: Option<Round>,
    /// When the last round began.
    began: Option<BootTime>,
    /// The number of failed endpoints that was last logged, and when.
    logged: (usize, Option<BootTime>),
    found: mpsc::Sender<Polled>,
}

/// The receiver is gone: the controller stops.
struct Stopped;

/// Polls until the receiver of what it finds is gone.
///
/// # Errors
/// TLS is not available.
pub async fn run(
    options: Options,
    loads: NodeLoads,
    mut changes: Changes,
    found: mpsc::Sender<Polled>,
) -> io::Result<()> {
    let mut tick = interval(options.settings.interval);
    // A round is finished before the next begins, and ticks that were missed meanwhile are one.
    tick.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut poller = Poller {
        targets: PollTargets::new(&options.settings.services),
        schedule: PollSchedule::new(options.settings.interval),
        settings: options.settings,
        metrics: options.metrics,
        loads,
        client: probe::client()?,
        waiting: VecDeque::new(),
        running: FuturesUnordered::new(),
        round: None,
        began: None,
        logged: (0, None),
        found,
    };
    loop {
        let done = tokio::select! {
            Some((service, change)) = changes.next() => {
                poller.changed(service, change);
                Ok(())
            }
            Some(outcome) = poller.running.next() => poller.finished(outcome).await,
            _ = tick.tick(), if poller.round.is_none() => {
                let begun = poller.begin().await;
                if poller.schedule.is_empty() {
                    // After a start, Nodes and slices are not known yet.
                    tick.reset_after(RETRY_INTERVAL.min(poller.settings.interval));
                }
                begun
            }
        };
        if done.is_err() {
            return Ok(());
        }
    }
}

impl Poller {
    fn changed(&mut self, service: usize, change: Change) {
        if let (Change::Failed(why), Some(settings)) =
            (&change, self.settings.services.get(service))
        {
            let (namespace, name) = (&settings.namespace, &settings.name);
            tracing::warn!(
                namespace,
                name,
                why,
                "failed to watch the EndpointSlices to poll"
            );
        }
        self.targets.apply(service, change);
    }

    async fn begin(&mut self) -> Result<(), Stopped> {
        let now = clock::boot_time();
        let planned = self.began.map(|began| began + self.settings.interval);
        let lag = planned.map_or(Duration::ZERO, |planned| now.since(planned));
        self.metrics.began(lag);
        self.began = Some(now);
        let by_address = self.loads.by_address();
        let (targets, mut unknown) = self
            .targets
            .by_node(|address| by_address.get(&address).cloned());
        let round = {
            let nodes = self.loads.read();
            let count = targets.len();
            let exists = |(node, _): &(Arc<str>, PollTarget)| nodes.contains_key(node);
            let targets: BTreeMap<_, _> = targets.into_iter().filter(exists).collect();
            unknown += count - targets.len();
            let reports = |node: &str| {
                let known = nodes.get(node).and_then(Option::as_ref);
                known.is_some_and(|load| load.is_reported(now))
            };
            self.schedule.begin(targets, reports, now)
        };
        for node in round.gone {
            self.send(Polled { node, load: None }).await?;
        }
        self.waiting = round.due.into();
        self.round = Some(Round {
            began: now,
            unknown,
            failed: 0,
            example: String::new(),
        });
        self.proceed();
        Ok(())
    }

    /// Starts the requests that may run, or ends the round.
    fn proceed(&mut self) {
        while self.running.len() < MAX_REQUESTS
            && let Some((node, target)) = self.waiting.pop_front()
        {
            let path = self.settings.services.get(target.service);
            let path = path.map_or("", |service| &service.path);
            let url = format!("http://{}{path}", target.address);
            let (client, limit) = (self.client.clone(), self.settings.timeout);
            let request = async move {
                let page = timeout(limit, probe::page(&client, &url, [])).await;
                let page = page.unwrap_or(Err(ProbeError::TimedOut(limit)));
                Outcome { node, target, page }
            };
            self.running.push(request.boxed());
        }
        if self.running.is_empty()
            && let Some(round) = self.round.take()
        {
            let now = clock::boot_time();
            let counts = self.schedule.counts(now);
            self.metrics
                .ended(now.since(round.began), counts, round.unknown);
            self.log(&round, now);
        }
    }

    async fn finished(&mut self, outcome: Outcome) -> Result<(), Stopped> {
        let Outcome { node, target, page } = outcome;
        let now = clock::boot_time();
        let read = page
            .map_err(PollError::from)
            .and_then(|page| self.read(&node, target, &page));
        let began = self.round.as_ref().map_or(now, |round| round.began);
        let sent = match read {
            Ok((status, age)) => {
                let at = now.before(age);
                if let Some(before) = self.schedule.record(&node, Some(at), began) {
                    self.metrics.replaced(now.since(before));
                }
                self.loads.set_failure(&node, None);
                let load = PolledLoad {
                    at,
                    interval: self.settings.interval,
                    status: Arc::new(status),
                };
                let load = Some(load);
                self.send(Polled { node, load }).await
            }
            Err(error) => {
                self.schedule.record(&node, None, began);
                self.failed(&node, target, &error);
                Ok(())
            }
        };
        self.proceed();
        sent
    }

    fn read(
        &self,
        node: &str,
        target: PollTarget,
        page: &[u8],
    ) -> Result<(NodeMetricStatus, Duration), PollError> {
        let service = self.settings.services.get(target.service);
        let metrics = service.map_or(&[][..], |service| &service.metrics);
        let clock = Clock {
            wall: clock::wall_time(),
            max_age: lifetime(self.settings.interval),
        };
        let (cpu, memory) = self.loads.capacity(node);
        Ok(page::read(
            page,
            metrics,
            PolledCapacity { cpu, memory },
            clock,
        )?)
    }

    fn failed(&mut self, node: &str, target: PollTarget, error: &PollError) {
        self.metrics.failed(error.reason());
        let why = format!("{}: {error}", target.address);
        tracing::debug!(node, why, "failed to poll");
        if let Some(round) = &mut self.round {
            round.failed += 1;
            round.example = format!("{node} at {why}");
        }
        self.loads.set_failure(node, Some(why));
    }

    /// Logs that the number of failing endpoints has changed.
    fn log(&mut self, round: &Round, now: BootTime) {
        let counts = self.schedule.counts(now);
        let (failed, at) = self.logged;
        if counts.failed == failed || at.is_some_and(|at| now.since(at) < LOG_INTERVAL) {
            return;
        }
        self.logged = (counts.failed, Some(now));
        let (failed, current) = (counts.failed, counts.current);
        if failed == 0 {
            tracing::info!(current, "all polled nodes have a current value again");
        } else {
            let example = &round.example;
            tracing::warn!(
                failed,
                current,
                example,
                "polled nodes have no current value"
            );
        }
    }

    async fn send(&mut self, polled: Polled) -> Result<(), Stopped> {
        self.found.send(polled).await.map_err(|_| Stopped)
    }
}
