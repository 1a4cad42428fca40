//! Feeds the world from watches, and carries out what it plans.

mod definitions;
mod outbox;
mod store;
mod write;

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

use super::lease::{LeaseObject, Renewal};
use super::metrics::Metrics;
use super::world::{Failed, Note, Settings, Subject, World, Write};
use crate::cluster::client::{CallError, ClientError, Server, call};
use crate::cluster::clock;
use crate::cluster::election::{self, Elector, Standing};
use crate::cluster::events::{Events, Happening, about_node};
use crate::cluster::watch::Change;
use crate::evictions::{Denial, RuleQuery};
use crate::metrics_api::reports::Reports;
use crate::metrics_api::{self, Feed, Serving, StartError};
use crate::serve::{self, ServeError};
use outbox::Outbox;
use store::{Item, Source, Store};
use write::Done;

/// At most so many writes at a time.
const MOST_WRITES: usize = 16;
/// What is due by the time is looked at so often.
const TICK: Duration = Duration::from_millis(250);
/// So many evictions wait to be judged; further ones wait for them.
const MAX_QUERIES: usize = 64;
/// Reports are taken so often at most: one turn of the loop, and one look of each watch, for all that came since.
const GATHER: Duration = Duration::from_millis(50);

/// How the controller runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// What an administrator chooses.
    pub settings: Settings,
    /// Where the Lease of the election is.
    pub namespace: String,
    /// Its name.
    pub lease: String,
    /// Where the Leases of agents are.
    pub agents: String,
    /// This replica, and this life of it.
    pub identity: String,
    /// Where probes and metrics are served.
    pub listen: SocketAddr,
    /// How the `NodeMetrics` are served; `None`: not at all.
    pub metrics_api: Option<metrics_api::Options>,
    /// Where other replicas reach this one for `NodeMetrics`.
    pub address: Option<SocketAddr>,
}

/// Why the controller can't run.
#[derive(Debug, Error)]
pub enum RunError {
    /// There is no client for the API server.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The address of probes and metrics can't be listened on.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The `NodeMetrics` can't be served.
    #[error(transparent)]
    MetricsApi(#[from] StartError),
}

/// Runs until `stop` is true.
///
/// # Errors
/// An address can't be listened on, or there is no client for the API server.
pub async fn run(
    server: Server,
    options: Options,
    metrics: Arc<Metrics>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), RunError> {
    metrics.beat(clock::now());
    let client = server.client(Arc::clone(&metrics) as _)?;
    let listener = serve::listen(options.listen)?;
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
    let (standing, elected) = watch::channel(Standing::default());
    let stopped = stop.clone();
    let (release, released) = oneshot::channel();
    let election = async {
        election::run(&mut elector, &standing, stopped).await;
        // Nobody waits for it but where the process is to end.
        release.send(()).ok();
        election::follow(&mut elector, &standing).await
    };
    let mut controller = Controller::new(client.clone(), &options, Arc::clone(&metrics));
    let mut api = None;
    if let Some(options) = options.metrics_api {
        let (requests, observer) = (Arc::clone(&metrics) as _, Arc::clone(&metrics) as _);
        let rules = controller.rule_queries.0.clone();
        let started =
            metrics_api::start(server, requests, options, rules, elected.clone(), observer);
        let (feed, serving) = started?;
        controller.reports = feed.reports();
        controller.feed = Some(feed);
        api = Some(serving);
    }
    let definitions = definitions::check(client, Arc::clone(&metrics));
    // Whatever ends first ends the process: nothing goes on half-dead.
    let serving = serve::serve(listener, metrics);
    tokio::pin!(election, serving, definitions);
    tokio::select! {
        _ = stop.wait_for(|stop| *stop) => {
            tokio::select! {
                ended = end(released, api) => ended?,
                never = &mut election => match never {},
                () = &mut serving => {}
            }
        }
        never = &mut election => match never {},
        () = &mut serving => {}
        ended = ended(api.as_mut()) => ended?,
        never = &mut definitions => match never {},
        () = controller.run(elected) => {}
    }
    Ok(())
}

/// First another replica may lead: clients whose watches end look for it at once, and what is under way here is passed on to
/// it.
async fn end(released: oneshot::Receiver<()>, api: Option<Serving>) -> Result<(), StartError> {
    drop(released.await);
    match api {
        Some(api) => api.end().await,
        None => Ok(()),
    }
}

/// Waits for the metrics API to end by itself.
async fn ended(api: Option<&mut Serving>) -> Result<(), StartError> {
    match api {
        Some(api) => api.ended().await,
        None => std::future::pending().await,
    }
}

const LEASE: &str = "Lease";

/// The Lease that replicas elect their leader by: events about the controller itself are about it.
#[derive(Clone, Debug)]
struct LeaseName {
    namespace: String,
    name: String,
}

impl Subject {
    fn reference(self, lease: &LeaseName) -> ObjectReference {
        let (api_version, kind, name, uid) = match self {
            Self::Node(name) => return about_node(&name),
            Self::Policy { kind, name, uid } => {
                (crate::crd::API_VERSION, kind.name(), name, Some(uid))
            }
            Self::Fleet => ("coordination.k8s.io/v1", LEASE, lease.name.clone(), None),
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

/// A change of one kind.
type Changes = SelectAll<BoxStream<'static, (usize, Change<Item>)>>;

struct Controller {
    client: Client,
    world: World,
    stores: Vec<Store>,
    changes: Changes,
    writes: FuturesUnordered<BoxFuture<'static, Done>>,
    events: Outbox<Result<(), CallError>>,
    recorder: Events,
    lease: LeaseName,
    /// Those of agents.
    leases: Api<LeaseObject>,
    metrics: Arc<Metrics>,
    /// Where the `NodeMetrics` come from.
    feed: Option<Feed>,
    /// Where agents report.
    reports: Option<Reports>,
    /// Evictions that agents ask for, to be judged by the rules of their nodes. The sender keeps the channel open.
    rule_queries: (mpsc::Sender<RuleQuery>, mpsc::Receiver<RuleQuery>),
    /// When some were taken last.
    heard: Instant,
}

impl Controller {
    fn new(client: Client, options: &Options, metrics: Arc<Metrics>) -> Self {
        let stores: Vec<Store> = Source::ALL.into_iter().map(Store::new).collect();
        let leases = Api::namespaced(client.clone(), &options.agents);
        let mut changes = SelectAll::new();
        for (index, store) in stores.iter().enumerate() {
            metrics.waits(store.source.kind(), "not listed yet".to_owned());
            let stream = store.source.watch(client.clone(), &leases);
            changes.push(stream.map(move |change| (index, change)).boxed());
        }
        Self {
            recorder: Events::new(client.clone(), "plimsoll-controller", &options.identity),
            lease: LeaseName {
                namespace: options.namespace.clone(),
                name: options.lease.clone(),
            },
            leases,
            world: World::new(options.settings),
            writes: FuturesUnordered::new(),
            events: Outbox::new(),
            client,
            stores,
            changes,
            metrics,
            feed: None,
            reports: None,
            rule_queries: mpsc::channel(MAX_QUERIES),
            heard: Instant::now(),
        }
    }

    async fn run(&mut self, mut elected: watch::Receiver<Standing>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leading = false;
        let fence = elected.clone();
        loop {
            tokio::select! {
                Some((index, change)) = self.changes.next() => {
                    self.take(index, change);
                    while let Some(Some((index, change))) = self.changes.next().now_or_never() {
                        self.take(index, change);
                    }
                }
                Some(done) = while_leading(&fence, self.writes.next()) => self.written(done),
                Some(outcome) = while_leading(&fence, self.events.next()) => {
                    self.metrics.wrote("Event", outcome.is_ok());
                }
                changed = elected.changed() => if changed.is_err() { return },
                Some(query) = self.rule_queries.1.recv() => self.judge(query, &fence),
                () = arrived(self.reports.as_ref(), self.heard + GATHER) => {}
                _ = tick.tick() => {}
            }
            self.hear();
            let term = elected.borrow().term(clock::now());
            let term = term.filter(|_| self.stores.iter().all(Store::is_known));
            if term.is_some() != leading {
                leading = term.is_some();
                self.lead(leading);
            }
            self.show(term.map(|term| term.epoch));
            self.work();
        }
    }

    fn lead(&mut self, lead: bool) {
        tracing::info!(lead, "leadership changed");
        self.metrics.leader.set(i64::from(lead));
        if lead {
            self.world.lead();
        } else {
            self.world.follow();
            // What did not begin yet must not; writes under way are what the next leader would write too.
            self.writes.clear();
            self.events.clear();
        }
    }

    /// Lets clients see what is known now, in this term.
    fn show(&mut self, epoch: Option<u64>) {
        let silences = self.world.take_silences();
        let Some(feed) = &mut self.feed else { return };
        feed.lead(epoch);
        for (node, silent) in silences {
            feed.silent(&node, silent);
        }
        feed.flush();
    }

    /// Takes what agents have reported since.
    fn hear(&mut self) {
        let (Some(reports), Some(feed)) = (&self.reports, &mut self.feed) else {
            return;
        };
        let new = reports.take();
        if !new.is_empty() {
            self.heard = Instant::now();
        }
        for told in new {
            reports.metrics().shown(clock::now().since(told.at));
            self.world.reported(&told.node, told.interval, told.at);
            feed.report(told);
        }
    }

    fn take(&mut self, index: usize, change: Change<Item>) {
        // An agent that leaves reports its last before it gives its Lease back.
        self.hear();
        let Some(store) = self.stores.get_mut(index) else {
            return;
        };
        let kind = store.source.kind();
        if let Change::Failed(why) = &change {
            self.metrics.missed(kind);
            if !store.complete {
                self.metrics.waits(kind, why.clone());
            }
            tracing::warn!(kind, %why, "failed to watch");
            store.source.is_blind(&mut self.world);
        }
        let begun = clock::now();
        if store.take(change, &mut self.world, self.feed.as_mut(), begun) {
            self.metrics.complete(kind);
        }
        if store.source.is_compiled() {
            self.metrics.compiled(clock::now().since(begun));
        }
    }

    /// Answers whether the rules of a node allow an eviction.
    fn judge(&self, query: RuleQuery, leadership: &watch::Receiver<Standing>) {
        let knows_all = self.stores.iter().all(Store::is_known);
        let leads = leadership.borrow().term(clock::now()).is_some();
        let verdict = if knows_all && leads {
            self.world.permit(&query)
        } else {
            Err(Denial::NotReady)
        };
        // The handler may have given up.
        query.reply.send(verdict).ok();
    }

    /// Begins what is due.
    fn work(&mut self) {
        let now = clock::now();
        self.metrics.beat(now);
        let room = MOST_WRITES.saturating_sub(self.writes.len());
        if room > 0 {
            for write in self.world.plan(now, room) {
                log(&write);
                let (client, leases) = (self.client.clone(), self.leases.clone());
                self.writes
                    .push(write::carry_out(client, leases, write).boxed());
            }
            let timestamp = format!("{:.0}", clock::wall());
            for status in self.world.statuses(now, &timestamp) {
                self.writes
                    .push(write::status(self.client.clone(), status).boxed());
            }
        }
        for note in self.world.take_notes() {
            self.tell(note);
        }
        self.metrics.heard(self.world.take_ages());
        self.metrics.count(&self.world, self.writes.len());
    }

    fn tell(&mut self, note: Note) {
        let about = note.about.reference(&self.lease);
        let (kind, name) = (about.kind.as_deref(), about.name.as_deref());
        tracing::info!(kind, name, reason = note.reason, "{}", note.message);
        let happening = Happening {
            about,
            warning: note.warning,
            action: note.reason.to_owned(),
            reason: note.reason.to_owned(),
            message: note.message,
        };
        let (recorder, client) = (self.recorder.clone(), self.client.clone());
        let event = async move { recorder.publish(with_uid(client, happening).await).await };
        if !self.events.push(event.boxed()) {
            self.metrics.events_dropped.inc();
        }
    }

    fn asked(&mut self, node: &str, outcome: Result<Option<Renewal>, CallError>) {
        let outcome = outcome.map_err(|error| {
            let why = error.words();
            tracing::warn!(node, why, "failed to read the Lease of a silent agent");
        });
        if self.world.answered(node, clock::now(), outcome) {
            tracing::warn!(node, "the watch of Leases did not show a renewal");
            self.metrics.missed(store::Source::Leases.kind());
        }
    }

    fn written(&mut self, done: Done) {
        match done {
            Done::Watermark { node, outcome } => {
                self.metrics.wrote("NodeWatermark", outcome.is_ok());
                let outcome = outcome.map_err(|error| {
                    let why = error.words();
                    tracing::warn!(node, %why, "failed to write the NodeWatermark");
                    let wait = error.retry_after();
                    Failed { wait }
                });
                self.world.written(
                    &node,
                    clock::now(),
                    outcome.map(|seen| seen.map(|seen| *seen)),
                );
            }
            Done::Asked { node, outcome } => self.asked(&node, outcome),
            Done::Opened { node, outcome } => {
                self.metrics.wrote("Node", outcome.is_ok());
                let outcome = outcome.map_err(|error| {
                    tracing::warn!(node, %error, "failed to take the taint of a silent agent away");
                });
                if outcome == Ok(true) {
                    self.metrics.taints_removed.inc();
                }
                self.world.opened(&node, clock::now(), outcome);
            }
            Done::Status { key, outcome } => {
                self.metrics.wrote("status", outcome.is_ok());
                if let Err(error) = outcome {
                    let (kind, name, why) = (key.0.name(), key.1, error.words());
                    // It is gone, most likely, and its end is on its way here.
                    if error.code() == Some(404) {
                        tracing::debug!(kind, name, %why, "failed to write the status");
                    } else {
                        tracing::warn!(kind, name, %why, "failed to write the status");
                    }
                    self.world.status_failed(clock::now());
                }
            }
        }
    }
}

/// Goes on with this only while the replica leads: a process that was stopped, and goes on when another has taken over, sends
/// nothing more of what it had begun.
async fn while_leading<T>(elected: &watch::Receiver<Standing>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|context| {
        let term = elected.borrow().term(clock::now());
        match term {
            Some(_) => work.as_mut().poll(context),
            None => Poll::Pending,
        }
    })
    .await
}

/// Comes when a report has, but not sooner than then.
async fn arrived(reports: Option<&Reports>, soonest: Instant) {
    match reports {
        Some(reports) => {
            sleep_until(soonest).await;
            reports.arrived().await;
        }
        None => std::future::pending().await,
    }
}

/// What is told of the Lease bears its UID, as all else does: nobody else here has to know it.
async fn with_uid(client: Client, mut happening: Happening) -> Happening {
    let about = &mut happening.about;
    if let (Some(LEASE), Some(namespace), Some(name)) =
        (about.kind.as_deref(), &about.namespace, &about.name)
    {
        let leases: Api<Lease> = Api::namespaced(client, namespace);
        let lease = call(leases.get(name)).await;
        about.uid = lease.ok().and_then(|lease| lease.metadata.uid);
    }
    happening
}

fn log(write: &Write) {
    match write {
        Write::Apply { node, spec } => {
            tracing::debug!(node, hash = %spec.hash(), "writing the NodeWatermark");
        }
        Write::Delete { node, .. } => tracing::info!(node, "deleting the NodeWatermark"),
        Write::Ask { node } => tracing::debug!(node, "reading the Lease of a silent agent"),
        Write::Open { node, .. } => tracing::info!(node, "taking the taint of a silent agent away"),
    }
}

#[cfg(test)]
mod tests;
