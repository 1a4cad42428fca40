//! Publishes events: a task with a bounded queue and a rate limit. Events that happen while no API server answers are
//! published afterwards with their own time.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::{mpsc, watch};

use super::events::{NewEvent, Regarding};
use crate::clock;
use crate::cluster::backoff::{at_least, backoff};
use crate::cluster::client::CallError;
use crate::cluster::events::{EventSpec, Events, node_reference};
use crate::cluster::token_bucket::TokenBucket;
use crate::crd::words::truncated;
use crate::engine::time::BootTime;

/// Maximum length of the queue; further events are dropped and counted.
const MAX_QUEUED: usize = 256;
/// Events that may be sent at once; after them one every [`REFILL_INTERVAL`].
const BURST: u32 = 50;
const REFILL_INTERVAL: Duration = Duration::from_secs(1);
/// First and longest delay before a retry.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// API servers keep events for an hour: older ones are dropped.
const MAX_AGE: Duration = Duration::from_hours(1);
/// After this many error answers the event is dropped.
const MAX_REFUSALS: u32 = 8;
/// Longest message in bytes; the API server allows 1024.
const MAX_MESSAGE_BYTES: usize = 1000;

/// Results of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Accepted by the API server.
    pub done: u64,
    /// Not accepted and dropped: nothing depends on an event.
    pub failed: u64,
}

/// An event and when it happened.
#[derive(Debug)]
struct QueuedEvent {
    event: NewEvent,
    watermark_uid: Option<String>,
    time: Timestamp,
    at: BootTime,
}

/// Sends events to the task.
#[derive(Debug)]
pub struct Publisher {
    queue: mpsc::Sender<QueuedEvent>,
    published: watch::Receiver<Published>,
    dropped: u64,
}

impl Publisher {
    /// Spawns the task, which publishes as the agent of this node and ends with this value.
    pub fn start(client: Client, node: &str) -> Self {
        let (queue, taken) = mpsc::channel(MAX_QUEUED);
        let (counts, published) = watch::channel(Published::default());
        let events = Events::new(client, "plimsoll-agent", node);
        tokio::spawn(run(events, node.to_owned(), taken, counts));
        Self {
            queue,
            published,
            dropped: 0,
        }
    }

    /// Publishes an event; without the UID of the `NodeWatermark` its events are dropped.
    pub fn publish(&mut self, event: NewEvent, watermark_uid: Option<&str>) {
        tracing::debug!(reason = event.reason, "{}", event.message);
        if event.regarding == Regarding::Watermark && watermark_uid.is_none() {
            return;
        }
        let queued = QueuedEvent {
            event,
            watermark_uid: watermark_uid.map(str::to_owned),
            time: clock::wall_time(),
            at: clock::boot_time(),
        };
        if self.queue.try_send(queued).is_err() {
            self.dropped += 1;
        }
    }

    /// Results, and how many were dropped from the queue.
    pub fn counts(&self) -> (Published, u64) {
        (*self.published.borrow(), self.dropped)
    }
}

async fn run(
    events: Events,
    node: String,
    mut queue: mpsc::Receiver<QueuedEvent>,
    counts: watch::Sender<Published>,
) {
    let mut bucket = TokenBucket::new(BURST, REFILL_INTERVAL);
    while let Some(queued) = queue.recv().await {
        let is_accepted = publish(&events, &node, queued, &mut bucket).await;
        counts.send_modify(|counts| {
            counts.done += u64::from(is_accepted);
            counts.failed += u64::from(!is_accepted);
        });
    }
}

/// Tries until the event is accepted or a retry is useless; true if it was accepted.
async fn publish(
    events: &Events,
    node: &str,
    queued: QueuedEvent,
    bucket: &mut TokenBucket,
) -> bool {
    let (time, at) = (queued.time, queued.at);
    let event_spec = event_spec(queued.event, node, queued.watermark_uid);
    let mut refusals = 0;
    for pause in backoff(RETRY_DELAYS.0, RETRY_DELAYS.1) {
        tokio::time::sleep(bucket.reserve(clock::boot_time())).await;
        let Err(error) = events.publish_at(event_spec.clone(), time).await else {
            return true;
        };
        tracing::debug!(why = error.message(), "failed to publish an event");
        refusals += u32::from(error.code().is_some());
        let is_old = clock::boot_time().since(at) >= MAX_AGE;
        if !is_retryable(&error) || refusals >= MAX_REFUSALS || is_old {
            return false;
        }
        tokio::time::sleep(at_least(error.retry_after(), pause)).await;
        // After an outage all nodes come back with full queues: none may burst.
        bucket.empty_to_one(clock::boot_time());
    }
    false
}

/// Whether the server or the connection failed, not the event.
fn is_retryable(error: &CallError) -> bool {
    error.code().is_none_or(|code| code == 429 || code >= 500)
}

fn event_spec(event: NewEvent, node: &str, watermark_uid: Option<String>) -> EventSpec {
    let about = match event.regarding {
        Regarding::Node => node_reference(node),
        Regarding::Watermark => ObjectReference {
            api_version: Some("plimsoll.dev/v1alpha1".to_owned()),
            kind: Some("NodeWatermark".to_owned()),
            name: Some(node.to_owned()),
            uid: watermark_uid,
            ..ObjectReference::default()
        },
        Regarding::Pod {
            namespace,
            name,
            uid,
        } => ObjectReference {
            api_version: Some("v1".to_owned()),
            kind: Some("Pod".to_owned()),
            namespace: Some(namespace),
            name: Some(name),
            uid: Some(uid.to_string()),
            ..ObjectReference::default()
        },
    };
    EventSpec {
        about,
        warning: event.warning,
        action: event.reason.to_owned(),
        reason: event.reason.to_owned(),
        message: truncated(event.message, MAX_MESSAGE_BYTES),
    }
}
