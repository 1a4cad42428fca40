//! Writes the status: a task that takes the newest one, at a limited rate.

use std::time::Duration;

use backon::ExponentialBackoff;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;

use super::status::seconds;
use super::status_schedule::{StatusSchedule, StatusStep};
use crate::clock;
use crate::cluster::backoff::{at_least, backoff, sleep};
use crate::cluster::client::{CallError, call, stored};
use crate::crd::{NodeWatermark, NodeWatermarkStatus};
use crate::engine::time::BootTime;

/// Field manager of the fields that an agent writes.
pub const FIELD_MANAGER: &str = "plimsoll-agent";
/// First and longest delay after a failed write.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));
/// Pause after a 404: the object was most likely deleted, and by then the watch has its new UID.
const NOT_FOUND_PAUSE: Duration = Duration::from_secs(10);
/// The API server's message for a field that its CRD does not have.
const NOT_DECLARED: &str = "field not declared in schema";
const CRD_HINT: &str = "the CRD of NodeWatermark is of another version (`plimsoll crds | kubectl apply --server-side \
                    --force-conflicts -f -`)";

/// A status to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct PendingStatus {
    /// UID of the `NodeWatermark`; another object of that name is not written.
    pub uid: String,
    /// Its status.
    pub status: NodeWatermarkStatus,
    /// The report time of its current status, if known.
    pub replaces: Option<Timestamp>,
}

/// Counts of writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Writes {
    /// Accepted writes.
    pub done: u64,
    /// Failed writes.
    pub failed: u64,
}

/// Runs until the sender of `reports` is dropped. `None`: there is no `NodeWatermark` to write to.
pub async fn run(
    client: Client,
    node: String,
    mut reports: watch::Receiver<Option<PendingStatus>>,
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
            () = sleep(pause) => {}
        }
    }
}

#[derive(Default)]
struct Writer {
    schedule: StatusSchedule,
    uid: String,
    pauses: Option<ExponentialBackoff>,
    /// No write before then.
    until: BootTime,
    failure: Option<String>,
}

impl Writer {
    /// Writes if that is due; returns when to check again, if at all.
    async fn step(
        &mut self,
        client: &Client,
        node: &str,
        report: PendingStatus,
        writes: &watch::Sender<Writes>,
    ) -> Option<Duration> {
        if self.uid != report.uid {
            self.schedule.forget();
            self.until = BootTime::default();
            self.uid.clone_from(&report.uid);
        }
        let now = clock::boot_time();
        let left = self.until.since(now);
        if !left.is_zero() {
            return Some(left);
        }
        match self.schedule.step(&report.status, report.replaces, now) {
            StatusStep::Idle => None,
            StatusStep::Wait(left) => Some(left),
            StatusStep::Write => {
                let written = write(client, node, &report).await;
                writes.send_modify(|writes| match written {
                    Ok(_) => writes.done += 1,
                    Err(_) => writes.failed += 1,
                });
                Some(self.written(report, written))
            }
        }
    }

    fn written(
        &mut self,
        report: PendingStatus,
        written: Result<Timestamp, CallError>,
    ) -> Duration {
        let now = clock::boot_time();
        let error = match written {
            Ok(time) => {
                self.pauses = None;
                self.failure = None;
                self.schedule
                    .record_write(report.status, report.replaces, time, now);
                return Duration::ZERO;
            }
            Err(error) => error,
        };
        if error.code() == Some(404) {
            self.schedule.forget();
            self.until = now + NOT_FOUND_PAUSE;
            return NOT_FOUND_PAUSE;
        }
        let mut message = error.message();
        if message.contains(NOT_DECLARED) {
            message = format!("{CRD_HINT}: {message}");
        }
        if self.failure.as_ref() != Some(&message) {
            tracing::warn!(
                why = message,
                "failed to write the status of the NodeWatermark; retrying"
            );
            self.failure = Some(message);
        }
        let (min, max) = RETRY_DELAYS;
        let pauses = self.pauses.get_or_insert_with(|| backoff(min, max));
        let pause = pauses.next().unwrap_or(max);
        let pause = at_least(error.retry_after(), pause);
        self.until = now + pause;
        pause
    }
}

/// Writes the status once; returns its report time.
///
/// # Errors
/// If the API server refused it or did not answer.
pub(super) async fn write(
    client: &Client,
    node: &str,
    report: &PendingStatus,
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

/// Sets the time of the write, so that an unchanged status is not taken for a stale one.
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
    fn the_same_status_written_again_has_a_new_time() {
        let status = NodeWatermarkStatus {
            agent: Some(AgentStatus::default()),
            ..NodeWatermarkStatus::default()
        };
        let first = stamped(status.clone(), Timestamp::UNIX_EPOCH);
        let later = Timestamp::UNIX_EPOCH + Duration::from_mins(5);
        assert_ne!(first, stamped(status, later));
    }
}
