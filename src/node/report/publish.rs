//! Publishes events: a task with a bounded queue and a bounded rate, so that nothing waits for it and no API server
//! is stormed by it.

use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use tokio::sync::{mpsc, watch};

use super::conditions::cut;
use super::events::{About, Note};
use crate::cluster::events::{Events, Happening, about_node};
use crate::engine::time::BootTime;
use crate::node::clock;

/// More are not waiting at a time; what comes then is dropped, and counted.
const MOST_WAITING: usize = 256;
/// So many may go at once, and then one every so often.
const BURST: u32 = 50;
const EVERY: Duration = Duration::from_secs(1);
/// An API server takes no longer message.
const LONGEST: usize = 1000;

/// What became of events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Taken by the API server.
    pub done: u64,
    /// Not taken: nothing rests on an event, it is not tried again.
    pub failed: u64,
}

/// The way to the task.
#[derive(Debug)]
pub struct Publisher {
    notes: mpsc::Sender<(Note, Option<String>)>,
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
        let uid = watermark_uid.map(str::to_owned);
        if note.about == About::Watermark && uid.is_none() {
            return;
        }
        if self.notes.try_send((note, uid)).is_err() {
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
    mut notes: mpsc::Receiver<(Note, Option<String>)>,
    counts: watch::Sender<Published>,
) {
    let mut bucket = Bucket::full(clock::boot_time());
    while let Some((note, uid)) = notes.recv().await {
        let pause = bucket.take(clock::boot_time());
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        let published = events.publish(happening(note, &node, uid)).await;
        if let Err(error) = &published {
            tracing::debug!(why = error.words(), "failed to publish an event");
        }
        counts.send_modify(|counts| match published {
            Ok(()) => counts.done += 1,
            Err(_) => counts.failed += 1,
        });
    }
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
    }
}
