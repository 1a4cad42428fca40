//! Publishes events: a task with a bounded queue and a bounded rate, so that nothing waits for it and no API server
//! is stormed by it. What happens while no API server answers is told afterwards, with the time when it happened.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::{mpsc, watch};

use super::conditions::cut;
use super::events::{About, Note};
use crate::cluster::backoff::{at_least, backoff};
use crate::cluster::client::CallError;
use crate::cluster::events::{Events, Happening, about_node};
use crate::engine::time::BootTime;
use crate::node::clock;

/// More are not waiting at a time; what comes then is dropped, and counted.
const MOST_WAITING: usize = 256;
/// So many may go at once, and then one every so often.
const BURST: u32 = 50;
const EVERY: Duration = Duration::from_secs(1);
/// Pauses before what no API server took is tried again.
const FAILED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// API servers keep events for an hour: what happened before that is told nobody any more.
const WORTH: Duration = Duration::from_hours(1);
/// A server that answers, but takes it so often not, will not take this one.
const MOST_REFUSALS: u32 = 8;
/// An API server takes no longer message.
const LONGEST: usize = 1000;

/// What became of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Taken by the API server.
    pub done: u64,
    /// Not taken, and given up: nothing rests on an event.
    pub failed: u64,
}

/// A note, and when what it tells happened.
#[derive(Debug)]
struct Told {
    note: Note,
    watermark_uid: Option<String>,
    time: Timestamp,
    at: BootTime,
}

/// The way to the task.
#[derive(Debug)]
pub struct Publisher {
    notes: mpsc::Sender<Told>,
    published: watch::Receiver<Published>,
    dropped: u64,
}

impl Publisher {
    /// In the name of the agent of this node. Spawns the task, which ends with it.
    pub fn start(client: Client, node: &str) -> Self {
        let (notes, taken) = mpsc::channel(MOST_WAITING);
        let (counts, published) = watch::channel(Published::default());
        let events = Events::new(client, "plimsoll-agent", node);
        tokio::spawn(run(events, node.to_owned(), taken, counts));
        Self {
            notes,
            published,
            dropped: 0,
        }
    }

    /// Publishes a note; `watermark_uid` is that of the `NodeWatermark`, without which nothing can be said of it.
    pub fn publish(&mut self, note: Note, watermark_uid: Option<&str>) {
        tracing::debug!(reason = note.reason, "{}", note.message);
        if note.about == About::Watermark && watermark_uid.is_none() {
            return;
        }
        let told = Told {
            note,
            watermark_uid: watermark_uid.map(str::to_owned),
            time: clock::wall_time(),
            at: clock::boot_time(),
        };
        if self.notes.try_send(told).is_err() {
            self.dropped += 1;
        }
    }

    /// What became of them, and how many were dropped.
    pub fn counts(&self) -> (Published, u64) {
        (*self.published.borrow(), self.dropped)
    }
}

async fn run(
    events: Events,
    node: String,
    mut notes: mpsc::Receiver<Told>,
    counts: watch::Sender<Published>,
) {
    let mut bucket = Bucket::full(clock::boot_time());
    while let Some(told) = notes.recv().await {
        let is_taken = publish(&events, &node, told, &mut bucket).await;
        counts.send_modify(|counts| {
            counts.done += u64::from(is_taken);
            counts.failed += u64::from(!is_taken);
        });
    }
}

/// Tries until it is taken or there is no use in it; whether it was taken.
async fn publish(events: &Events, node: &str, told: Told, bucket: &mut Bucket) -> bool {
    let (time, at) = (told.time, told.at);
    let happening = happening(told.note, node, told.watermark_uid);
    let mut refusals = 0;
    for pause in backoff(FAILED.0, FAILED.1) {
        tokio::time::sleep(bucket.take(clock::boot_time())).await;
        let Err(error) = events.publish_of(happening.clone(), time).await else {
            return true;
        };
        tracing::debug!(why = error.words(), "failed to publish an event");
        refusals += u32::from(error.code().is_some());
        let is_old = clock::boot_time().since(at) >= WORTH;
        if !may_pass(&error) || refusals >= MOST_REFUSALS || is_old {
            return false;
        }
        tokio::time::sleep(at_least(error.retry_after(), pause)).await;
        // Every node that lost the server comes back with all it has: none of them at once.
        bucket.slow_down(clock::boot_time());
    }
    false
}

/// Whether it is the server or the way to it, and not the event, that is the trouble.
fn may_pass(error: &CallError) -> bool {
    error.code().is_none_or(|code| code == 429 || code >= 500)
}

fn happening(told: Note, node: &str, watermark_uid: Option<String>) -> Happening {
    let about = match told.about {
        About::Node => about_node(node),
        About::Watermark => ObjectReference {
            api_version: Some("plimsoll.dev/v1alpha1".to_owned()),
            kind: Some("NodeWatermark".to_owned()),
            name: Some(node.to_owned()),
            uid: watermark_uid,
            ..ObjectReference::default()
        },
        About::Pod {
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
    Happening {
        about,
        warning: told.warning,
        action: told.reason.to_owned(),
        reason: told.reason.to_owned(),
        message: cut(told.message, LONGEST),
    }
}

/// A bucket of tokens: one comes every [`EVERY`], at most [`BURST`] are kept.
#[derive(Debug)]
struct Bucket {
    tokens: u32,
    filled: BootTime,
}

impl Bucket {
    const fn full(now: BootTime) -> Self {
        Self {
            tokens: BURST,
            filled: now,
        }
    }

    /// Leaves one token.
    fn slow_down(&mut self, now: BootTime) {
        self.tokens = 1;
        self.filled = now;
    }

    /// Takes a token; for how long to wait until it is there.
    fn take(&mut self, now: BootTime) -> Duration {
        let passed = now.since(self.filled).as_secs() / EVERY.as_secs();
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        self.filled = self.filled + EVERY.saturating_mul(passed);
        self.tokens = self.tokens.saturating_add(passed).min(BURST);
        if let Some(left) = self.tokens.checked_sub(1) {
            self.tokens = left;
            return Duration::ZERO;
        }
        self.filled = self.filled + EVERY;
        self.filled.since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fifty_go_at_once_and_then_one_a_second() {
        let at =
            |millis| BootTime::default() + Duration::from_secs(100) + Duration::from_millis(millis);
        let mut bucket = Bucket::full(at(0));
        for _ in 0..BURST {
            assert_eq!(bucket.take(at(0)), Duration::ZERO);
        }
        assert_eq!(bucket.take(at(0)), Duration::from_secs(1));
        assert_eq!(bucket.take(at(1000)), Duration::from_secs(1));
        assert_eq!(bucket.take(at(4500)), Duration::ZERO);
        assert_eq!(bucket.take(at(4500)), Duration::ZERO);
        assert_eq!(bucket.take(at(4500)), Duration::from_millis(500));
        // However long it took: after an outage it begins slowly.
        bucket.slow_down(at(900_000));
        assert_eq!(bucket.take(at(900_000)), Duration::ZERO);
        assert_eq!(bucket.take(at(900_000)), Duration::from_secs(1));
    }
}
