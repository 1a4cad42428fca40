//! Sends reports to one replica, as [`ReportSchedule`] decides.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use fastrand::Rng;
use hyper::StatusCode;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::acknowledged::Acknowledged;
use super::body::body;
use super::connection::{Connection, SendError};
use super::credentials::{CredentialFiles, Credentials, CredentialsError};
use super::links::LeaderRequests;
use super::metrics::DirectReportMetrics;
use super::schedule::{ReportSchedule, SendOutcome, SendStep};
use super::{Links, Measured, Options, TIMEOUT};
use crate::clock;
use crate::cluster::client::describe;
use crate::crd::report::{Acknowledgement, Report};
use crate::engine::time::BootTime;

/// Shared by the tasks of all replicas.
pub(super) struct Sending {
    pub(super) options: Options,
    /// Start of this process.
    pub(super) started: BootTime,
    pub(super) newest: watch::Receiver<Option<Measured>>,
    pub(super) acknowledged: watch::Sender<Acknowledged>,
    pub(super) metrics: DirectReportMetrics,
    links: Links,
    files: Mutex<Source>,
}

/// The credential files.
struct Source {
    files: CredentialFiles,
    /// What is wrong with them, as last logged.
    problem: String,
}

impl Sending {
    pub(super) fn new(
        options: Options,
        started: BootTime,
        newest: watch::Receiver<Option<Measured>>,
        acknowledged: watch::Sender<Acknowledged>,
        metrics: DirectReportMetrics,
        links: Links,
    ) -> Self {
        let files = CredentialFiles::new(&options.credentials);
        Self {
            options,
            started,
            newest,
            acknowledged,
            metrics,
            links,
            files: Mutex::new(Source {
                files,
                problem: String::new(),
            }),
        }
    }

    /// The credentials; `None`, logged once, if there are none.
    fn credentials(&self) -> Option<Credentials> {
        let mut source = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let current = source.files.current();
        let missing = current.as_ref().is_err_and(CredentialsError::is_missing);
        let problem = current.as_ref().err().map(|error| describe(error));
        let problem = problem.unwrap_or_default();
        if problem != source.problem {
            log_problem(&problem, missing, &self.options.credentials);
            source.problem = problem;
        }
        current.ok()
    }

    /// The report for one replica.
    fn body(&self, measured: &Measured, schedule: &ReportSchedule) -> String {
        let status = &measured.metric.status;
        let agent = status.agent.as_ref();
        body(Report {
            node: self.options.node.clone(),
            boot_id: agent.map_or_else(String::new, |agent| agent.boot_id.clone()),
            agent_started_millis: self.started.as_nanos() / 1_000_000,
            sequence: super::sequence(&measured.metric).unsigned_abs(),
            uptime_millis: Some(clock::boot_time().as_nanos() / 1_000_000),
            interval_seconds: u32::try_from(schedule.interval().as_secs()).unwrap_or(u32::MAX),
            status: Cow::Borrowed(status),
        })
    }
}

fn log_problem(problem: &str, missing: bool, directory: &Path) {
    let directory = directory.display();
    if problem.is_empty() {
        tracing::info!("credentials for direct reports found");
    } else if missing {
        tracing::info!(
            why = problem,
            "no direct reports, only the Lease is renewed: mount a token of audience plimsoll.dev/report and the \
             controller's ca.crt at {directory}"
        );
    } else {
        tracing::warn!(
            why = problem,
            "no direct reports, only the Lease is renewed"
        );
    }
}

/// The task of one replica.
pub(super) struct ReplicaTask {
    address: SocketAddr,
    sending: Arc<Sending>,
    connection: Option<Connection>,
    schedule: ReportSchedule,
    /// Why reports fail, as last logged.
    failure: String,
}

impl ReplicaTask {
    pub(super) fn new(address: SocketAddr, sending: Arc<Sending>) -> Self {
        Self {
            address,
            sending,
            connection: None,
            schedule: ReportSchedule::new(clock::boot_time(), Rng::new()),
            failure: String::new(),
        }
    }

    /// Runs until the sampling loop ends.
    pub(super) async fn run(mut self) {
        let mut newest = self.sending.newest.clone();
        loop {
            let measured = newest.borrow_and_update().clone();
            let number = measured.as_ref().map(Measured::newest);
            match (self.schedule.step(clock::boot_time(), number), measured) {
                (SendStep::Send, Some(measured)) => {
                    let outcome = self.report(&measured).await;
                    self.schedule.record(clock::boot_time(), outcome);
                }
                (SendStep::Wait(left), _) => sleep(left).await,
                (SendStep::Send | SendStep::Idle, _) => {
                    if newest.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    async fn report(&mut self, measured: &Measured) -> SendOutcome {
        let sending = Arc::clone(&self.sending);
        let Some(credentials) = sending.credentials() else {
            self.connection = None;
            sending.links.closed(self.address);
            sending.metrics.count("unconfigured");
            return SendOutcome::Failed(None);
        };
        let sent_at = clock::boot_time();
        let body = sending.body(measured, &self.schedule);
        let sent = timeout(TIMEOUT, self.send(&credentials, body)).await;
        match sent.unwrap_or(Err(SendError::TimedOut)) {
            Ok(answer) => self.accepted(&answer, sent_at, measured.at),
            Err(error) => self.failed(&error),
        }
    }

    async fn send(
        &mut self,
        credentials: &Credentials,
        body: String,
    ) -> Result<Acknowledgement, SendError> {
        let name = self.sending.options.server_name();
        self.connection = self
            .connection
            .take()
            .filter(|connection| connection.is_usable_with(credentials));
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => {
                let tls = Arc::clone(&credentials.tls);
                let open = Connection::open(self.address, &name, tls).await?;
                self.sending.links.opened(self.address, open.sender());
                none.insert(open)
            }
        };
        connection.send(&name, credentials, body).await
    }

    fn accepted(
        &mut self,
        answer: &Acknowledgement,
        sent_at: BootTime,
        measured: BootTime,
    ) -> SendOutcome {
        let metrics = &self.sending.metrics;
        metrics.answered(clock::boot_time().since(sent_at));
        let outcome = SendOutcome::Accepted(answer.next_interval());
        let mut counts = false;
        self.sending.acknowledged.send_modify(|acknowledged| {
            counts = acknowledged.record(sent_at, answer);
        });
        let asks = LeaderRequests {
            label_interval: answer.label_interval(),
            may_be_busy: answer.busy,
        };
        self.sending
            .links
            .leads(self.address, counts.then_some(asks));
        if counts {
            metrics.acknowledged(measured, answer.next_interval());
        }
        metrics.count(if counts { "acknowledged" } else { "standby" });
        if !std::mem::take(&mut self.failure).is_empty() {
            tracing::info!(replica = %self.address, "direct reports are accepted again");
        }
        outcome
    }

    fn failed(&mut self, error: &SendError) -> SendOutcome {
        let (result, wait) = match error {
            SendError::Refused(StatusCode::TOO_MANY_REQUESTS, _, wait) => ("throttled", *wait),
            SendError::Refused(StatusCode::SERVICE_UNAVAILABLE, _, wait) => ("unready", *wait),
            SendError::Refused(_, _, wait) => ("refused", *wait),
            SendError::TimedOut => ("timeout", None),
            _ => ("failed", None),
        };
        self.sending.metrics.count(result);
        if !matches!(error, SendError::Refused(..)) {
            self.connection = None;
            self.sending.links.closed(self.address);
        }
        let why = describe(error);
        if self.failure != why {
            tracing::warn!(replica = %self.address, why, "failed to send a direct report; retrying");
            self.failure = why;
        }
        SendOutcome::Failed(wait)
    }
}

impl Drop for ReplicaTask {
    fn drop(&mut self) {
        self.sending.links.closed(self.address);
    }
}
