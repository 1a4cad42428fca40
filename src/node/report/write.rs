//! Writes the status: a task that takes the latest and keeps a pace.

use std::time::Duration;

use backon::ExponentialBackoff;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;

use super::pace::{Pace, Step};
use super::status::seconds;
use crate::cluster::backoff::{at_least, backoff, rest};
use crate::cluster::client::{CallError, call, stored};
use crate::crd::{NodeWatermark, NodeWatermarkStatus};
use crate::engine::time::BootTime;
use crate::node::clock;

/// Who owns the fields that an agent writes.
pub const FIELD_MANAGER: &str = "plimsoll-agent";
/// Pauses after a write that failed.
const FAILED: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// What is not found was deleted, most likely: the watch says so by then, and of which UID the next is.
const GONE: Duration = Duration::from_secs(10);
/// What an API server says of a field that the definition it has does not know.
const NOT_DECLARED: &str = "field not declared in schema";
const CURE: &str = "the definition of NodeWatermark is of another version (`plimsoll crds | kubectl apply --server-side \
                    --force-conflicts -f -`)";

/// What is to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// UID of the `NodeWatermark`; no other of that name gets it.
    pub uid: String,
    /// Its status.
    pub status: NodeWatermarkStatus,
    /// When the status was written that it has by now, as far as is known.
    pub over: Option<Timestamp>,
}

/// Counts writes, for whoever wants to know.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writes {
    /// That were taken.
    pub done: u64,
    /// That were not.
    pub failed: u64,
}

/// Runs until the sender of `reports` is gone. `None`: there is no `NodeWatermark` to write to.
pub async fn run(
    client: Client,
    node: String,
    mut reports: watch::Receiver<Option<Report>>,
    writes: watch::Sender<Writes>,
) {
    let mut state = Writer::default();
    loop {
        let report = reports.borrow_and_update().clone();
        let pause = match report {
            None => None,
            Some(report) => state.step(&client, &node, report, &writes).await,
        };
        tokio::select! {
            changed = reports.changed() => if changed.is_err() { return },
            () = rest(pause) => {}
        }
    }
}

#[derive(Default)]
struct Writer {
    pace: Pace,
    uid: String,
    pauses: Option<ExponentialBackoff>,
    /// Not before then.
    until: BootTime,
    failure: Option<String>,
}

impl Writer {
    /// Writes where that is due; after which pause to look again, if at all.
    async fn step(
        &mut self,
        client: &Client,
        node: &str,
        report: Report,
        writes: &watch::Sender<Writes>,
    ) -> Option<Duration> {
        if self.uid != report.uid {
            self.pace.forget();
            self.until = BootTime::default();
            self.uid.clone_from(&report.uid);
        }
        let now = clock::boot_time();
        let left = self.until.since(now);
        if !left.is_zero() {
            return Some(left);
        }
        match self.pace.step(&report.status, report.over, now) {
            Step::Rest => None,
            Step::Wait(left) => Some(left),
            Step::Write => {
                let written = write(client, node, &report).await;
                writes.send_modify(|writes| match written {
                    Ok(_) => writes.done += 1,
                    Err(_) => writes.failed += 1,
                });
                Some(self.written(report, written))
            }
        }
    }

    fn written(&mut self, report: Report, written: Result<Timestamp, CallError>) -> Duration {
        let now = clock::boot_time();
        let error = match written {
            Ok(time) => {
                self.pauses = None;
                self.failure = None;
                self.pace.wrote(report.status, report.over, time, now);
                return Duration::ZERO;
            }
            Err(error) => error,
        };
        if error.code() == Some(404) {
            self.pace.forget();
            self.until = now + GONE;
            return GONE;
        }
        let mut words = error.words();
        if words.contains(NOT_DECLARED) {
            words = format!("{CURE}: {words}");
        }
        if self.failure.as_ref() != Some(&words) {
            tracing::warn!(
                why = words,
                "failed to write the status of the NodeWatermark; trying again"
            );
            self.failure = Some(words);
        }
        let (least, most) = FAILED;
        let pauses = self.pauses.get_or_insert_with(|| backoff(least, most));
        let pause = pauses.next().unwrap_or(most);
        let pause = at_least(error.retry_after(), pause);
        self.until = now + pause;
        pause
    }
}

/// Writes the status once; the time that it bears.
///
/// # Errors
/// The API server refused it, or did not answer.
pub(super) async fn write(
    client: &Client,
    node: &str,
    report: &Report,
) -> Result<Timestamp, CallError> {
    let api: Api<NodeWatermark> = Api::all(client.clone());
    let time = seconds(clock::wall_time());
    let status = stamped(report.status.clone(), time);
    let body = json!({
        "apiVersion": "plimsoll.dev/v1alpha1",
        "kind": "NodeWatermark",
        "metadata": {"name": node, "uid": report.uid},
        "status": status,
    });
    let params = PatchParams::apply(FIELD_MANAGER).force();
    call(stored(api.patch_status(
        node,
        &params,
        &Patch::Apply(&body),
    )))
    .await
    .map(|_| time)
}

/// With the time of the write: a status in which nothing else has changed must not look like silence.
fn stamped(mut status: NodeWatermarkStatus, time: Timestamp) -> NodeWatermarkStatus {
    if let Some(agent) = &mut status.agent {
        agent.report_time = Some(Time(time));
    }
    status
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::node_watermark::AgentStatus;

    #[test]
    fn the_same_status_written_again_is_not_the_same_object() {
        let status = NodeWatermarkStatus {
            agent: Some(AgentStatus::default()),
            ..NodeWatermarkStatus::default()
        };
        let first = stamped(status.clone(), Timestamp::UNIX_EPOCH);
        let later = Timestamp::UNIX_EPOCH + Duration::from_mins(5);
        assert_ne!(first, stamped(status, later));
    }
}
