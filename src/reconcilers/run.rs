//! The event loop: feeds the reconciler from watches, and carries out what it plans.

mod definitions;
mod feed;
mod probes;

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{BoxStream, FuturesUnordered, SelectAll, StreamExt};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Api, Client};
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::apply::task_queue::TaskQueue;
use super::apply::write::{self, WriteOutcome};
use super::events::{EventSubject, PendingEvent};
use super::metrics::ControllerMetrics;
use super::observe::watches::{Item, WatchedKind};
use super::plan::operations::{Operation, WriteError};
use super::plan::settings::ControllerSettings;
use super::reconciler::Reconciler;
use crate::clock;
use crate::cluster::client::{CallError, ClientError, Server, call};
use crate::cluster::election::{self, Elector, Leadership};
use crate::cluster::events::{EventSpec, Events, node_reference};
use crate::cluster::lease::{LeaseObject, LeaseState};
use crate::cluster::watch::Change;
use crate::evictions::{Denial, RuleQuery};
use crate::metrics_api::loads::Polled;
use crate::metrics_api::reports::Reports;
use crate::metrics_api::{self, Serving, StartError, StoreUpdater};
use crate::polling;
use crate::scheduler_api;
use crate::serve::ServeError;
use feed::KindWatch;

/// Writes in progress at a time.
const MAX_WRITES: usize = 16;
/// How often timers are checked.
const TICK: Duration = Duration::from_millis(250);
/// Eviction queries that may wait; senders of further ones block.
const MAX_QUERIES: usize = 64;
/// Minimum interval between two turns for reports, so that one turn handles many.
const REPORT_INTERVAL: Duration = Duration::from_millis(50);

/// Options of the controller.
#[derive(Clone, Debug)]
pub struct Options {
    /// Settings of the decisions.
    pub settings: ControllerSettings,
    /// Namespace of the election Lease.
    pub namespace: String,
    /// Name of the election Lease.
    pub lease: String,
    /// Namespace of the agents' Leases.
    pub agents: String,
    /// Identifies this replica; differs after a restart.
    pub identity: String,
    /// Address of probes and metrics.
    pub listen: SocketAddr,
    /// Options of the metrics API; `None`: not served.
    pub metrics_api: Option<metrics_api::Options>,
    /// Options of the listener for schedulers; `None`, or without reports: not served.
    pub scheduler_api: Option<scheduler_api::Options>,
    /// Exporters to poll; `None`, or without reports: none.
    pub polling: Option<polling::Options>,
    /// Address at which other replicas reach this one for `NodeMetrics`.
    pub address: Option<SocketAddr>,
}

/// Why the controller could not run.
#[derive(Debug, Error)]
pub enum RunError {
    /// No client for the API server could be made.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The address of probes and metrics can't be listened on.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The thread of probes and metrics can't be started.
    #[error("failed to start the thread of probes and metrics")]
    Thread(#[from] std::io::Error),
    /// The `NodeMetrics` can't be served.
    #[error(transparent)]
    MetricsApi(#[from] StartError),
    /// Schedulers can't be served.
    #[error(transparent)]
    SchedulerApi(#[from] scheduler_api::StartError),
    /// Exporters can't be polled.
    #[error(transparent)]
    Polling(#[from] polling::StartError),
}

/// Runs until `stop` is true.
///
/// # Errors
/// An address can't be listened on, or no client for the API server could be made.
pub async fn run(
    server: Server,
    options: Options,
    metrics: Arc<ControllerMetrics>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), RunError> {
    metrics.loop_turned(clock::boot_time());
    let client = server.client(Arc::clone(&metrics) as _)?;
    let probes = probes::serve(options.listen, Arc::clone(&metrics))?;
    let Options {
        namespace,
        lease,
        identity,
        ..
    } = &options;
    let mut elector = Elector::new(
        client.clone(),
        namespace,
        lease,
        identity.clone(),
        options.address,
    );
    let (leadership, elected) = watch::channel(Leadership::default());
    let stopped = stop.clone();
    let (release, released) = oneshot::channel();
    let election = async {
        election::run(&mut elector, &leadership, stopped).await;
        // The receiver only waits during shutdown.
        release.send(()).ok();
        election::follow(&mut elector, &leadership).await
    };
    let mut controller = Controller::new(client.clone(), &options, Arc::clone(&metrics));
    let mut api = controller.serve(&server, options, elected.clone())?;
    let definitions = definitions::check(client, metrics);
    // If any part ends, the process ends.
    tokio::pin!(election, probes, definitions);
    tokio::select! {
        _ = stop.wait_for(|stop| *stop) => {
            tokio::select! {
                result = shut_down(released, api) => result?,
                never = &mut election => match never {},
                () = &mut probes => {}
            }
        }
        never = &mut election => match never {},
        () = &mut probes => {}
        result = finished(api.as_mut()) => result?,
        never = &mut definitions => match never {},
        () = controller.run(elected) => {}
    }
    Ok(())
}

/// Releases the leadership first: clients whose watches end look for another leader at once, and requests in flight here are
/// forwarded to it.
async fn shut_down(
    released: oneshot::Receiver<()>,
    api: Option<Serving>,
) -> Result<(), StartError> {
    drop(released.await);
    match api {
        Some(api) => api.end().await,
        None => Ok(()),
    }
}

/// Waits for the metrics API to end by itself.
async fn finished(api: Option<&mut Serving>) -> Result<(), StartError> {
    match api {
        Some(api) => api.ended().await,
        None => std::future::pending().await,
    }
}

const LEASE: &str = "Lease";

/// The election Lease, which events about the controller itself refer to.
#[derive(Clone, Debug)]
struct LeaseName {
    namespace: String,
    name: String,
}

impl EventSubject {
    fn reference(self, lease: &LeaseName) -> ObjectReference {
        let (api_version, kind, name, uid) = match self {
            Self::Node(name) => return node_reference(&name),
            Self::Policy { kind, name, uid } => {
                (crate::crd::API_VERSION, kind.name(), name, Some(uid))
            }
            Self::Controller => ("coordination.k8s.io/v1", LEASE, lease.name.clone(), None),
        };
        ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(kind.to_owned()),
            namespace: (kind == LEASE).then(|| lease.namespace.clone()),
            name: Some(name),
            uid,
            ..ObjectReference::default()
        }
    }
}

/// Changes of all kinds, with the index of their watch.
type Changes = SelectAll<BoxStream<'static, (usize, Change<Item>)>>;

struct Controller {
    client: Client,
    reconciler: Reconciler,
    watches: Vec<KindWatch>,
    changes: Changes,
    writes: FuturesUnordered<BoxFuture<'static, WriteOutcome>>,
    events: TaskQueue<Result<(), CallError>>,
    recorder: Events,
    lease: LeaseName,
    /// The agents' Leases.
    leases: Api<LeaseObject>,
    metrics: Arc<ControllerMetrics>,
    /// Publishes the `NodeMetrics`.
    updater: Option<StoreUpdater>,
    /// Direct reports of agents.
    reports: Option<Reports>,
    /// What is polled from exporters.
    polled: Option<mpsc::Receiver<Polled>>,
    /// Evictions requested by agents, to be checked against the rules of their nodes. The sender keeps the channel open.
    rule_queries: (mpsc::Sender<RuleQuery>, mpsc::Receiver<RuleQuery>),
    /// When reports were last taken.
    reports_taken: Instant,
}

impl Controller {
    fn new(client: Client, options: &Options, metrics: Arc<ControllerMetrics>) -> Self {
        let watches: Vec<KindWatch> = WatchedKind::ALL.into_iter().map(KindWatch::new).collect();
        let leases = Api::namespaced(client.clone(), &options.agents);
        let mut changes = SelectAll::new();
        for (index, watch) in watches.iter().enumerate() {
            metrics.waiting(watch.source.kind(), "not listed yet".to_owned());
            let stream = watch.source.watch(client.clone(), &leases);
            changes.push(stream.map(move |change| (index, change)).boxed());
        }
        Self {
            recorder: Events::new(client.clone(), "plimsoll-controller", &options.identity),
            lease: LeaseName {
                namespace: options.namespace.clone(),
                name: options.lease.clone(),
            },
            leases,
            reconciler: Reconciler::new(options.settings.clone()),
            writes: FuturesUnordered::new(),
            events: TaskQueue::new(),
            client,
            watches,
            changes,
            metrics,
            updater: None,
            reports: None,
            polled: None,
            rule_queries: mpsc::channel(MAX_QUERIES),
            reports_taken: Instant::now(),
        }
    }

    /// Starts to serve the `NodeMetrics`, reports and schedulers, and to poll exporters, as far as the options say.
    fn serve(
        &mut self,
        server: &Server,
        options: Options,
        leadership: watch::Receiver<Leadership>,
    ) -> Result<Option<Serving>, RunError> {
        let Some(metrics_api) = options.metrics_api else {
            return Ok(None);
        };
        let (requests, observer) = (
            Arc::clone(&self.metrics) as _,
            Arc::clone(&self.metrics) as _,
        );
        let rules = self.rule_queries.0.clone();
        let (updater, serving) = metrics_api::start(
            server.clone(),
            requests,
            metrics_api,
            rules,
            leadership,
            observer,
        )?;
        self.reports = updater.reports();
        if let Some(options) = options.scheduler_api {
            scheduler_api::start(options, updater.loads())?;
        }
        if let Some(options) = options.polling {
            let requests = Arc::clone(&self.metrics) as _;
            self.polled = Some(polling::start(server, requests, options, updater.loads())?);
        }
        self.updater = Some(updater);
        Ok(Some(serving))
    }

    async fn run(&mut self, mut elected: watch::Receiver<Leadership>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leading = false;
        let fence = elected.clone();
        loop {
            tokio::select! {
                Some((index, change)) = self.changes.next() => {
                    self.apply_change(index, change);
                    while let Some(Some((index, change))) = self.changes.next().now_or_never() {
                        self.apply_change(index, change);
                    }
                }
                Some(outcome) = while_leading(&fence, self.writes.next()) => self.finished(outcome),
                Some(outcome) = while_leading(&fence, self.events.next()) => {
                    self.metrics.wrote("Event", outcome.is_ok());
                }
                changed = elected.changed() => if changed.is_err() { return },
                Some(query) = self.rule_queries.1.recv() => self.answer(query, &fence),
                () = arrived(self.reports.as_ref(), self.reports_taken + REPORT_INTERVAL) => {}
                _ = tick.tick() => {}
            }
            self.take_reports();
            self.take_polled();
            let term = elected.borrow().term(clock::boot_time());
            let term = term.filter(|_| self.watches.iter().all(KindWatch::is_known));
            if term.is_some() != leading {
                leading = term.is_some();
                self.lead(leading);
            }
            self.publish(term.map(|term| term.epoch));
            self.work();
        }
    }

    fn lead(&mut self, lead: bool) {
        tracing::info!(lead, "leadership changed");
        self.metrics.leader.set(i64::from(lead));
        if lead {
            self.reconciler.start_leading();
        } else {
            self.reconciler.stop_leading();
            // Nothing more may start; writes in flight are what the next leader would write too.
            self.writes.clear();
            self.events.clear();
        }
    }

    /// Publishes the changes to clients of the metrics API.
    fn publish(&mut self, epoch: Option<u64>) {
        let changes = self.reconciler.take_liveness_changes();
        let Some(updater) = &mut self.updater else {
            return;
        };
        updater.lead(epoch);
        for (node, unresponsive) in changes {
            updater.set_agent_unresponsive(&node, unresponsive);
        }
        updater.flush();
    }

    /// Takes the reports that have arrived.
    fn take_reports(&mut self) {
        let (Some(reports), Some(updater)) = (&self.reports, &mut self.updater) else {
            return;
        };
        let new = reports.take();
        if !new.is_empty() {
            self.reports_taken = Instant::now();
        }
        for report in new {
            reports
                .metrics()
                .published(clock::boot_time().since(report.at));
            self.reconciler
                .reported(&report.node, report.interval, report.at);
            updater.report(report);
        }
    }

    /// Takes what was polled. It waits for the next turn of the loop, a tick at most.
    fn take_polled(&mut self) {
        let (Some(polled), Some(updater)) = (&mut self.polled, &mut self.updater) else {
            return;
        };
        while let Ok(polled) = polled.try_recv() {
            updater.polled(polled);
        }
    }

    fn apply_change(&mut self, index: usize, change: Change<Item>) {
        // An agent that shuts down sends its last report before it releases its Lease.
        self.take_reports();
        let Some(watch) = self.watches.get_mut(index) else {
            return;
        };
        let kind = watch.source.kind();
        if let Change::Failed(why) = &change {
            self.metrics.watch_error(kind);
            if !watch.complete {
                self.metrics.waiting(kind, why.clone());
            }
            tracing::warn!(kind, %why, "failed to watch");
            watch.interrupted(&mut self.reconciler);
        }
        let started = clock::boot_time();
        if watch.apply_change(change, &mut self.reconciler, self.updater.as_mut(), started) {
            self.metrics.complete(kind);
        }
        if watch.source.is_compiled() {
            self.metrics.compiled(clock::boot_time().since(started));
        }
    }

    /// Answers whether the rules of a node allow an eviction.
    fn answer(&self, query: RuleQuery, leadership: &watch::Receiver<Leadership>) {
        let knows_all = self.watches.iter().all(KindWatch::is_known);
        let leads = leadership.borrow().term(clock::boot_time()).is_some();
        let verdict = if knows_all && leads {
            self.reconciler.permit(&query)
        } else {
            Err(Denial::NotReady)
        };
        // The handler may have given up.
        query.reply.send(verdict).ok();
    }

    /// Starts the writes and events that are due.
    fn work(&mut self) {
        let now = clock::boot_time();
        self.metrics.loop_turned(now);
        let room = MAX_WRITES.saturating_sub(self.writes.len());
        if room > 0 {
            for operation in self.reconciler.plan(now, room) {
                log(&operation);
                let (client, leases) = (self.client.clone(), self.leases.clone());
                self.writes
                    .push(write::carry_out(client, leases, operation).boxed());
            }
            let timestamp = format!("{:.0}", clock::wall_time());
            for status in self.reconciler.statuses(now, &timestamp) {
                self.writes
                    .push(write::status(self.client.clone(), status).boxed());
            }
        }
        for event in self.reconciler.take_events() {
            self.publish_event(event);
        }
        self.metrics
            .heartbeats(self.reconciler.take_heartbeat_ages());
        self.metrics.update(&self.reconciler, self.writes.len());
    }

    fn publish_event(&mut self, event: PendingEvent) {
        let about = event.about.reference(&self.lease);
        let (kind, name) = (about.kind.as_deref(), about.name.as_deref());
        tracing::info!(kind, name, reason = event.reason, "{}", event.message);
        let event_spec = EventSpec {
            about,
            warning: event.warning,
            action: event.reason.to_owned(),
            reason: event.reason.to_owned(),
            message: event.message,
        };
        let (recorder, client) = (self.recorder.clone(), self.client.clone());
        let published = async move { recorder.publish(with_uid(client, event_spec).await).await };
        if !self.events.push(published.boxed()) {
            self.metrics.events_dropped.inc();
        }
    }

    fn lease_read(&mut self, node: &str, outcome: Result<Option<LeaseState>, CallError>) {
        let outcome = outcome.map_err(|error| {
            let why = error.message();
            tracing::warn!(
                node,
                why,
                "failed to read the Lease of an unresponsive agent"
            );
        });
        if self
            .reconciler
            .lease_read(node, clock::boot_time(), outcome)
        {
            tracing::warn!(node, "the watch of Leases missed a renewal");
            self.metrics.watch_error(WatchedKind::Leases.kind());
        }
    }

    fn finished(&mut self, outcome: WriteOutcome) {
        match outcome {
            WriteOutcome::Watermark { node, outcome } => {
                self.metrics.wrote("NodeWatermark", outcome.is_ok());
                let outcome = outcome.map_err(|error| {
                    let why = error.message();
                    tracing::warn!(node, %why, "failed to write the NodeWatermark");
                    let retry_after = error.retry_after();
                    WriteError { retry_after }
                });
                self.reconciler.written(
                    &node,
                    clock::boot_time(),
                    outcome.map(|seen| seen.map(|seen| *seen)),
                );
            }
            WriteOutcome::LeaseRead { node, outcome } => self.lease_read(&node, outcome),
            WriteOutcome::LabelRemoved { node, outcome } => {
                self.metrics.wrote("Node", outcome.is_ok());
                if let Err(error) = &outcome {
                    let why = error.message();
                    tracing::warn!(node, %why, "failed to remove the load label of an unresponsive agent");
                }
                self.reconciler
                    .label_removed(&node, clock::boot_time(), outcome.is_ok());
            }
            WriteOutcome::TaintRemoved { node, outcome } => {
                self.metrics.wrote("Node", outcome.is_ok());
                let outcome = outcome.map_err(|error| {
                    tracing::warn!(node, %error, "failed to remove the taint of an unresponsive agent");
                });
                if outcome == Ok(true) {
                    self.metrics.taints_removed.inc();
                }
                self.reconciler
                    .taint_removed(&node, clock::boot_time(), outcome);
            }
            WriteOutcome::Status { key, outcome } => {
                self.metrics.wrote("status", outcome.is_ok());
                if let Err(error) = outcome {
                    let (kind, name, why) = (key.0.name(), key.1, error.message());
                    // Most likely it was deleted, and the watch will show that soon.
                    if error.code() == Some(404) {
                        tracing::debug!(kind, name, %why, "failed to write the status");
                    } else {
                        tracing::warn!(kind, name, %why, "failed to write the status");
                    }
                    self.reconciler.status_failed(clock::boot_time());
                }
            }
        }
    }
}

/// Polls `work` only while this replica leads: a process that was paused while another took over sends nothing more of what it had
/// started.
async fn while_leading<T>(
    elected: &watch::Receiver<Leadership>,
    work: impl Future<Output = T>,
) -> T {
    let mut work = pin!(work);
    poll_fn(|context| {
        let term = elected.borrow().term(clock::boot_time());
        match term {
            Some(_) => work.as_mut().poll(context),
            None => Poll::Pending,
        }
    })
    .await
}

/// Waits for a report, but not before `not_before`.
async fn arrived(reports: Option<&Reports>, not_before: Instant) {
    match reports {
        Some(reports) => {
            sleep_until(not_before).await;
            reports.arrived().await;
        }
        None => std::future::pending().await,
    }
}

/// Adds the Lease's UID to an event about it.
async fn with_uid(client: Client, mut event_spec: EventSpec) -> EventSpec {
    let about = &mut event_spec.about;
    if let (Some(LEASE), Some(namespace), Some(name)) =
        (about.kind.as_deref(), &about.namespace, &about.name)
    {
        let leases: Api<Lease> = Api::namespaced(client, namespace);
        let lease = call(leases.get(name)).await;
        about.uid = lease.ok().and_then(|lease| lease.metadata.uid);
    }
    event_spec
}

fn log(operation: &Operation) {
    match operation {
        Operation::Apply { node, spec } => {
            tracing::debug!(node, hash = %spec.hash(), "writing the NodeWatermark");
        }
        Operation::Delete { node, .. } => tracing::info!(node, "deleting the NodeWatermark"),
        Operation::ReadLease { node } => {
            tracing::debug!(node, "reading the Lease of an unresponsive agent");
        }
        Operation::RemoveLabel { node, .. } => {
            tracing::info!(node, "removing the load label of an unresponsive agent");
        }
        Operation::RemoveTaint { node, .. } => {
            tracing::info!(node, "removing the taint of an unresponsive agent");
        }
    }
}

#[cfg(test)]
mod tests;
