//! Tells one replica: carries out what [`Pace`] decides.

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
use super::credentials::{Credentials, CredentialsError, Files};
use super::metrics::Reports;
use super::pace::{Outcome, Pace, Step};
use super::{DEADLINE, Links, Measured, Options};
use crate::cluster::client::describe;
use crate::crd::report::{Acknowledgement, Report};
use crate::engine::time::BootTime;
use crate::node::clock;

/// What all replicas are told by.
pub(super) struct Sending {
    pub(super) options: Options,
    /// When this process began.
    pub(super) started: BootTime,
    pub(super) newest: watch::Receiver<Option<Measured>>,
    pub(super) heard: watch::Sender<Acknowledged>,
    pub(super) metrics: Reports,
    links: Links,
    files: Mutex<Source>,
}

/// The credentials' files.
struct Source {
    files: Files,
    /// What is wrong with them, as it was last told.
    trouble: String,
}

impl Sending {
    pub(super) fn new(
        options: Options,
        started: BootTime,
        newest: watch::Receiver<Option<Measured>>,
        heard: watch::Sender<Acknowledged>,
        metrics: Reports,
        links: Links,
    ) -> Self {
        let files = Files::new(&options.credentials);
        Self {
            options,
            started,
            newest,
            heard,
            metrics,
            links,
            files: Mutex::new(Source {
                files,
                trouble: String::new(),
            }),
        }
    }

    /// `None`, said once, where there are none.
    fn credentials(&self) -> Option<Credentials> {
        let mut source = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        let current = source.files.current();
        let missing = current.as_ref().is_err_and(CredentialsError::is_missing);
        let trouble = current.as_ref().err().map(|error| describe(error));
        let trouble = trouble.unwrap_or_default();
        if trouble != source.trouble {
            tell(&trouble, missing, &self.options.credentials);
            source.trouble = trouble;
        }
        current.ok()
    }

    /// The report for one replica, which expects the next within its interval.
    fn body(&self, measured: &Measured, pace: &Pace) -> String {
        let status = &measured.metric.status;
        let agent = status.agent.as_ref();
        body(Report {
            node: self.options.node.clone(),
            boot_id: agent.map_or_else(String::new, |agent| agent.boot_id.clone()),
            agent_started_millis: self.started.as_nanos() / 1_000_000,
            sequence: super::sequence(&measured.metric).unsigned_abs(),
            uptime_millis: Some(clock::boot_time().as_nanos() / 1_000_000),
            interval_seconds: u32::try_from(pace.interval().as_secs()).unwrap_or(u32::MAX),
            status: Cow::Borrowed(status),
        })
    }
}

fn tell(trouble: &str, missing: bool, folder: &Path) {
    let folder = folder.display();
    if trouble.is_empty() {
        tracing::info!("there are credentials for direct reports");
    } else if missing {
        tracing::info!(
            why = trouble,
            "no direct reports, the Lease tells of this node: mount a token of audience plimsoll.dev/report and the \
             controller's ca.crt at {folder}"
        );
    } else {
        tracing::warn!(
            why = trouble,
            "no direct reports, the Lease tells of this node"
        );
    }
}

/// One replica.
pub(super) struct Replica {
    address: SocketAddr,
    sending: Arc<Sending>,
    connection: Option<Connection>,
    pace: Pace,
    /// Why reports fail, as it was last told.
    failure: String,
}

impl Replica {
    pub(super) fn new(address: SocketAddr, sending: Arc<Sending>) -> Self {
        Self {
            address,
            sending,
            connection: None,
            pace: Pace::new(clock::boot_time(), Rng::new()),
            failure: String::new(),
        }
    }

    /// Runs until nothing is measured any more.
    pub(super) async fn run(mut self) {
        let mut newest = self.sending.newest.clone();
        loop {
            let measured = newest.borrow_and_update().clone();
            let number = measured.as_ref().map(Measured::newest);
            match (self.pace.step(clock::boot_time(), number), measured) {
                (Step::Send, Some(measured)) => {
                    let outcome = self.tell(&measured).await;
                    self.pace.came(clock::boot_time(), outcome);
                }
                (Step::Wait(left), _) => sleep(left).await,
                (Step::Send | Step::Rest, _) => {
                    if newest.changed().await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    async fn tell(&mut self, measured: &Measured) -> Outcome {
        let sending = Arc::clone(&self.sending);
        let Some(credentials) = sending.credentials() else {
            self.connection = None;
            sending.links.closed(self.address);
            sending.metrics.count("unconfigured");
            return Outcome::Failed(None);
        };
        let begun = clock::boot_time();
        let body = sending.body(measured, &self.pace);
        let sent = timeout(DEADLINE, self.send(&credentials, body)).await;
        match sent.unwrap_or(Err(SendError::TimedOut)) {
            Ok(answer) => self.taken(&answer, begun, measured.at),
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
            .filter(|connection| connection.is_of(credentials));
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

    fn taken(&mut self, answer: &Acknowledgement, begun: BootTime, measured: BootTime) -> Outcome {
        let metrics = &self.sending.metrics;
        metrics.answered(clock::boot_time().since(begun));
        let outcome = Outcome::Taken(answer.next_interval());
        let mut counts = false;
        self.sending.heard.send_modify(|heard| {
            counts = heard.hear(begun, answer);
        });
        self.sending.links.leads(self.address, counts);
        if counts {
            metrics.acknowledged(measured, answer.next_interval());
        }
        metrics.count(if counts { "acknowledged" } else { "standby" });
        if !std::mem::take(&mut self.failure).is_empty() {
            tracing::info!(replica = %self.address, "direct reports are taken again");
        }
        outcome
    }

    fn failed(&mut self, error: &SendError) -> Outcome {
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
            tracing::warn!(replica = %self.address, why, "failed to report directly; trying again");
            self.failure = why;
        }
        Outcome::Failed(wait)
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.sending.links.closed(self.address);
    }
}
