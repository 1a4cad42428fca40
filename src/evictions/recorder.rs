//! Records evictions before they are posted, so that the next leader can continue from the record. Writes are
//! conditional on the record's version, so that a replica that lost leadership can reserve nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use futures::future::{BoxFuture, FutureExt};
use futures::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use serde_json::json;
use thiserror::Error;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{MissedTickBehavior, interval};

use super::budget::Budgets;
use super::ledger::{EvictionLedger, Exhausted, Granted, PodState, Settled, Victim};
use super::metrics::EvictionMetrics;
use super::record::{EvictionRecord, FirstSeen};
use crate::clock;
use crate::cluster::client::{CallError, call, describe, found, stored};
use crate::cluster::election::Leadership;
use crate::cluster::eviction;
use crate::crd::eviction::EvictionTarget;
use crate::crd::pod_facts::PodObject;
use crate::engine::time::BootTime;

const FIELD: &str = "evictions.json";
/// Interval of periodic work.
const TICK: Duration = Duration::from_secs(1);
/// Limit of concurrent pod polls.
const MAX_CONCURRENT_POLLS: usize = 64;
/// Limit of reservations per write.
const MAX_BATCH: usize = 256;
/// Attempts after a write conflict. Other clients rarely write this object.
const MAX_ATTEMPTS: usize = 3;

/// Why no eviction can be allowed.
#[derive(Debug, Error)]
pub enum LedgerError {
    /// The record can't be read or written.
    #[error("failed to read or write the ConfigMap {0}: {message}", message = .1.message())]
    Access(String, CallError),
    /// Another replica leads.
    #[error("another replica leads after term {0}")]
    Deposed(u64),
    /// Another client keeps writing it.
    #[error("failed to write the ConfigMap {0}: another client keeps writing it")]
    Contested(String),
}

/// A change of the ledger.
pub enum LedgerChange {
    /// Reserves an eviction.
    Reserve {
        /// The pod.
        victim: Victim,
        /// Result of the reservation; dropped if it can't be recorded.
        reply: oneshot::Sender<Result<Granted, Exhausted>>,
    },
    /// Settles a reservation by the API server's answer.
    Settle {
        /// UID of the pod.
        uid: String,
        /// The outcome.
        settled: Settlement,
        /// Signals that the ledger is updated.
        done: oneshot::Sender<()>,
    },
}

/// Effect of the API server's answer on a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// The outcome is certain.
    Known(Settled),
    /// This request was refused, but an earlier one for the same pod may still be carried out.
    RefusedAgain,
}

/// A pod to reserve an eviction for, and the channel for the result.
type Reservation = (Victim, oneshot::Sender<Result<Granted, Exhausted>>);

/// The ledger, shared with the handler. `None`: this replica does not lead, or has not read the record yet.
#[derive(Clone, Default)]
pub struct SharedLedger(Arc<Mutex<Option<EvictionLedger>>>);

impl SharedLedger {
    fn lock(&self) -> MutexGuard<'_, Option<EvictionLedger>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the ledger.
    pub fn read<T>(&self, read: impl FnOnce(&EvictionLedger) -> T) -> Option<T> {
        self.lock().as_ref().map(read)
    }

    fn change<T>(&self, change: impl FnOnce(&mut EvictionLedger) -> T) -> Option<T> {
        self.lock().as_mut().map(change)
    }
}

/// Where the record is, and the budgets that it counts for.
#[derive(Clone)]
pub struct RecordLocation {
    /// Namespace of the `ConfigMap`.
    pub namespace: String,
    /// Name of the `ConfigMap`.
    pub name: String,
    /// The budgets.
    pub budgets: Budgets,
}

/// UID of a polled pod, when the poll started, and its result.
type PollResult = (String, BootTime, Result<PodState, CallError>);

/// Keeps the ledger and its record in step.
pub struct Recorder {
    client: Client,
    records: Api<ConfigMap>,
    location: RecordLocation,
    leadership: watch::Receiver<Leadership>,
    ledger: SharedLedger,
    changes: mpsc::Receiver<LedgerChange>,
    metrics: EvictionMetrics,
    first_seen: FirstSeen,
    polls: FuturesUnordered<BoxFuture<'static, PollResult>>,
    /// Term in which the ledger was opened.
    epoch: Option<u64>,
    /// The record as last written, and its version. `None`: it does not exist.
    written: EvictionRecord,
    version: Option<String>,
    /// The last error, so that it is logged once.
    last_error: String,
}

impl Recorder {
    /// Starts without a ledger.
    pub fn new(
        client: Client,
        location: RecordLocation,
        leadership: watch::Receiver<Leadership>,
        ledger: SharedLedger,
        changes: mpsc::Receiver<LedgerChange>,
        metrics: EvictionMetrics,
    ) -> Self {
        Self {
            records: Api::namespaced(client.clone(), &location.namespace),
            client,
            location,
            leadership,
            ledger,
            changes,
            metrics,
            first_seen: FirstSeen::default(),
            polls: FuturesUnordered::new(),
            epoch: None,
            written: EvictionRecord::default(),
            version: None,
            last_error: String::new(),
        }
    }

    /// Runs until all senders of changes are dropped.
    pub async fn run(mut self) {
        let followed = watch_object(self.records.clone(), &self.location.name).default_backoff();
        let mut followed = followed.boxed();
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut leadership = self.leadership.clone();
        loop {
            tokio::select! {
                change = self.changes.recv() => match change {
                    Some(change) => self.apply(change).await,
                    None => return,
                },
                Some(record) = followed.next() => self.follow(record.ok().flatten().as_ref()),
                Some(result) = self.polls.next() => self.polled(result),
                changed = leadership.changed() => match changed {
                    Ok(()) => self.reconcile().await,
                    Err(_) => return,
                },
                _ = tick.tick() => self.reconcile().await,
            }
        }
    }

    /// Follows the record as a standby.
    fn follow(&mut self, map: Option<&ConfigMap>) {
        if let Some(Ok(record)) = map.map(read) {
            self.first_seen.update(&record, clock::boot_time());
        }
    }

    /// Opens or closes the ledger with leadership, and does periodic work.
    async fn reconcile(&mut self) {
        let epoch = self.term();
        if self.epoch != epoch {
            self.close();
        }
        let Some(epoch) = epoch else {
            return;
        };
        let outcome = if self.epoch.is_none() {
            self.open(epoch).await
        } else {
            self.settle(epoch).await
        };
        self.log_outcome(outcome);
        let now = clock::boot_time();
        let ledger = self.ledger.lock();
        self.metrics.counts(ledger.as_ref(), now);
    }

    fn term(&self) -> Option<u64> {
        let term = self.leadership.borrow().term(clock::boot_time());
        term.map(|term| term.epoch)
    }

    fn close(&mut self) {
        self.epoch = None;
        *self.ledger.lock() = None;
        self.polls.clear();
        self.metrics.counts(None, clock::boot_time());
    }

    fn log_outcome(&mut self, outcome: Result<(), LedgerError>) {
        let why = outcome
            .err()
            .map_or_else(String::new, |error| describe(&error));
        if !why.is_empty() {
            self.metrics.unrecorded();
        }
        if why != self.last_error && !why.is_empty() {
            tracing::error!(why, "no pod is evicted");
        }
        self.last_error = why;
    }

    /// Starts a term from the previous leader's record.
    async fn open(&mut self, epoch: u64) -> Result<(), LedgerError> {
        let record = self.read(epoch).await?;
        let now = clock::boot_time();
        let ledger = if let Ok(record) = record {
            self.first_seen.update(&record, now);
            EvictionLedger::resume(self.location.budgets, record, &self.first_seen, now)
        } else {
            let nothing = EvictionRecord::default();
            EvictionLedger::resume(self.location.budgets, nothing, &self.first_seen, now).close(now)
        };
        // Conditional on the version just read: if the previous leader has written since, that is read first.
        let stored = self.store(&ledger.record(epoch, now)).await;
        stored.map_err(|error| LedgerError::Access(self.location.name.clone(), error))?;
        let counting = self.written.evictions.len();
        tracing::info!(
            epoch,
            counting,
            "ready to evict pods for agents, within the budgets"
        );
        *self.ledger.lock() = Some(ledger);
        self.epoch = Some(epoch);
        Ok(())
    }

    /// Polls pods, and records what was settled since.
    async fn settle(&mut self, epoch: u64) -> Result<(), LedgerError> {
        let now = clock::boot_time();
        let free = MAX_CONCURRENT_POLLS.saturating_sub(self.polls.len());
        let due = self.ledger.change(|ledger| {
            ledger.prune(now);
            ledger.due_for_poll(now, free)
        });
        for victim in due.unwrap_or_default() {
            let client = self.client.clone();
            let poll = async move {
                let state = poll(&client, &victim).await;
                (victim.uid, now, state)
            };
            self.polls.push(poll.boxed());
        }
        match self.ledger.read(|ledger| ledger.record(epoch, now)) {
            Some(record) if record != self.written => self.write(epoch, &record).await,
            _ => Ok(()),
        }
    }

    fn polled(&mut self, (uid, started, state): PollResult) {
        // A failed poll is repeated.
        let Ok(state) = state else {
            return;
        };
        let now = clock::boot_time();
        let settled = self
            .ledger
            .change(|ledger| ledger.observe(&uid, state, started, now));
        if let Some(settled) = settled.flatten() {
            self.metrics.settled(settled);
        }
    }

    /// Applies this change and all others that are queued, with one write.
    async fn apply(&mut self, change: LedgerChange) {
        let mut changes = vec![change];
        while changes.len() < MAX_BATCH
            && let Ok(more) = self.changes.try_recv()
        {
            changes.push(more);
        }
        let Some(epoch) = self.term().filter(|epoch| self.epoch == Some(*epoch)) else {
            return;
        };
        let reservations = changes.into_iter().filter_map(|change| match change {
            LedgerChange::Reserve { victim, reply } => Some((victim, reply)),
            LedgerChange::Settle { uid, settled, done } => {
                self.settled(&uid, settled);
                // The handler waits for this, so that the node's next request sees the change.
                done.send(()).ok();
                None
            }
        });
        let reservations: Vec<Reservation> = reservations.collect();
        if !reservations.is_empty() {
            self.reserve(epoch, reservations).await;
        }
    }

    /// The next periodic write records it.
    fn settled(&self, uid: &str, settlement: Settlement) {
        let Settlement::Known(settled) = settlement else {
            self.ledger.change(|ledger| ledger.refused_again(uid));
            return;
        };
        let now = clock::boot_time();
        let is_new = self
            .ledger
            .change(|ledger| ledger.settle(uid, settled, now));
        if is_new == Some(true) {
            self.metrics.settled(settled);
        }
    }

    async fn reserve(&mut self, epoch: u64, reservations: Vec<Reservation>) {
        let Some(mut ledger) = self.ledger.read(EvictionLedger::clone) else {
            return;
        };
        let now = clock::boot_time();
        let reserved: Vec<String> = reservations.iter().map(|(it, _)| it.uid.clone()).collect();
        let (replies, answers): (Vec<_>, Vec<_>) = reservations
            .into_iter()
            .map(|(victim, reply)| (reply, ledger.reserve(victim, now)))
            .unzip();
        let record = ledger.record(epoch, now);
        let outcome = if record == self.written {
            Ok(())
        } else {
            self.write(epoch, &record).await
        };
        let recorded = outcome.is_ok();
        self.log_outcome(outcome);
        if !recorded {
            return;
        }
        for uid in &reserved {
            ledger.renew(uid, clock::boot_time());
        }
        *self.ledger.lock() = Some(ledger);
        for (reply, answer) in replies.into_iter().zip(answers) {
            // A repeated request renews the same reservation.
            reply.send(answer).ok();
        }
    }

    /// Reads the record and its version. The inner error means that another client overwrote it, and its content is
    /// lost.
    async fn read(
        &mut self,
        epoch: u64,
    ) -> Result<serde_json::Result<EvictionRecord>, LedgerError> {
        let map = found(call(self.records.get(&self.location.name)).await);
        let map = map.map_err(|error| LedgerError::Access(self.location.name.clone(), error))?;
        self.version = map
            .as_ref()
            .and_then(|map| map.metadata.resource_version.clone());
        let record = map
            .as_ref()
            .map_or_else(|| Ok(EvictionRecord::default()), read);
        match &record {
            Ok(record) if record.epoch > epoch => return Err(LedgerError::Deposed(epoch)),
            Ok(_) => {}
            Err(error) => {
                let name = &self.location.name;
                tracing::error!(%error, "the ConfigMap {name} was changed by another client, and is rewritten");
            }
        }
        Ok(record)
    }

    /// Writes the record in our term, unless another replica leads.
    async fn write(&mut self, epoch: u64, record: &EvictionRecord) -> Result<(), LedgerError> {
        for _ in 0..MAX_ATTEMPTS {
            match self.store(record).await {
                Ok(()) => return Ok(()),
                // Another client changed, created or deleted it. The ledger is authoritative while we lead.
                Err(error) if matches!(error.code(), Some(404 | 409)) => {
                    drop(self.read(epoch).await?);
                    if self.term() != Some(epoch) {
                        return Err(LedgerError::Deposed(epoch));
                    }
                }
                Err(error) => return Err(LedgerError::Access(self.location.name.clone(), error)),
            }
        }
        Err(LedgerError::Contested(self.location.name.clone()))
    }

    /// Writes it, conditional on the version last read or written.
    async fn store(&mut self, record: &EvictionRecord) -> Result<(), CallError> {
        let version = self.version.as_deref();
        let map = put(&self.records, &self.location.name, version, record).await?;
        self.version = map.metadata.resource_version;
        self.written = record.clone();
        Ok(())
    }
}

/// Writes it conditional on this version, or on its absence.
async fn put(
    records: &Api<ConfigMap>,
    name: &str,
    version: Option<&str>,
    record: &EvictionRecord,
) -> Result<ConfigMap, CallError> {
    let text = record.write();
    if let Some(version) = version {
        let patch = Patch::Merge(json!({
            "metadata": {"resourceVersion": version}, "data": {FIELD: text},
        }));
        return call(stored(records.patch(name, &PatchParams::default(), &patch))).await;
    }
    // Server-side apply can be granted for a single name. A field manager per term turns a concurrent creation into a
    // conflict (409).
    let manager = format!("plimsoll-evictions-{}", record.epoch);
    let map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {FIELD: text},
    });
    let params = PatchParams::apply(&manager);
    call(stored(records.patch(name, &params, &Patch::Apply(&map)))).await
}

/// State of a pod.
async fn poll(client: &Client, victim: &Victim) -> Result<PodState, CallError> {
    let target = EvictionTarget {
        namespace: victim.namespace.clone(),
        name: victim.name.clone(),
        uid: victim.uid.clone(),
    };
    let pod = eviction::read_pod::<PodObject>(client, &target).await?;
    Ok(match pod {
        None => PodState::Gone,
        Some(pod) if pod.metadata.deletion_timestamp.is_some() => PodState::Terminating,
        Some(_) => PodState::Running,
    })
}

/// Parses the record of a `ConfigMap`. A new one is empty.
fn read(map: &ConfigMap) -> serde_json::Result<EvictionRecord> {
    let text = map.data.as_ref().and_then(|data| data.get(FIELD));
    text.map_or_else(
        || Ok(EvictionRecord::default()),
        |text| EvictionRecord::read(text),
    )
}
