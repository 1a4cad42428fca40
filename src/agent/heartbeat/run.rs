//! Makes the calls that [`RenewalSchedule`] decides on.

use fastrand::Rng;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::sleep;

use super::lease;
use super::metrics::Heartbeats;
use super::schedule::{Call, CallOutcome, RenewalSchedule, RenewalStep};
use super::{HeartbeatInput, Options};
use crate::clock;
use crate::cluster::client::{CallError, call, found, stored};
use crate::crd::summary::Percent;

/// Runs until the sampling loop ends.
pub(super) async fn run(
    client: Client,
    options: Options,
    mut input: watch::Receiver<HeartbeatInput>,
    mut acknowledged: watch::Receiver<bool>,
    metrics: Heartbeats,
) {
    let (relaxed, stuck_after) = (options.relaxed, options.stuck_after);
    let mut schedule = RenewalSchedule::new(relaxed, stuck_after, Rng::new(), clock::boot_time());
    let mut writer = LeaseWriter::new(client, options, metrics);
    loop {
        let last_run = input.borrow_and_update().last_run;
        let relaxed = *acknowledged.borrow_and_update();
        let step = schedule.step(clock::boot_time(), last_run, relaxed);
        writer.metrics.stuck(matches!(step, RenewalStep::Stuck(_)));
        match step {
            RenewalStep::Wait(left) => tokio::select! {
                () = sleep(left) => {}
                () = changed(&mut acknowledged) => {}
                () = writer.thresholds_changed(&mut input) => schedule.plan_early_renewal(clock::boot_time()),
            },
            RenewalStep::Stuck(left) => tokio::select! {
                () = sleep(left) => {}
                run = input.changed() => if run.is_err() { return },
            },
            RenewalStep::Call { call, duration } => {
                let input = input.borrow().clone();
                let outcome = writer.call(call, &input, duration).await;
                schedule.record(clock::boot_time(), outcome);
                writer.metrics.set_interval(schedule.interval());
            }
        }
    }
}

/// Never completes if the sender is dropped.
async fn changed(acknowledged: &mut watch::Receiver<bool>) {
    if acknowledged.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The thresholds of CPU and memory.
type Thresholds = [Option<Percent>; 2];

fn thresholds(input: &HeartbeatInput) -> Thresholds {
    [input.summary.cpu_threshold, input.summary.memory_threshold]
}

struct LeaseWriter {
    api: Api<Lease>,
    options: Options,
    metrics: Heartbeats,
    /// As last returned by the API server.
    lease: Lease,
    /// The thresholds in the Lease; `None`: it was not written yet.
    thresholds: Option<Thresholds>,
    /// Why the last call failed, as last logged.
    failure: Option<String>,
}

impl LeaseWriter {
    fn new(client: Client, options: Options, metrics: Heartbeats) -> Self {
        Self {
            api: Api::namespaced(client, &options.namespace),
            lease: lease::new(&options.namespace, &options.node),
            thresholds: None,
            options,
            metrics,
            failure: None,
        }
    }

    /// Waits until the thresholds differ from those in the Lease, and takes them as written.
    async fn thresholds_changed(&mut self, input: &mut watch::Receiver<HeartbeatInput>) {
        let Some(written) = &mut self.thresholds else {
            return std::future::pending().await;
        };
        let changed = input.wait_for(|input| thresholds(input) != *written).await;
        match changed.map(|input| thresholds(&input)) {
            Ok(thresholds) => *written = thresholds,
            Err(_) => std::future::pending().await,
        }
    }

    async fn call(
        &mut self,
        what: Call,
        input: &HeartbeatInput,
        duration: std::time::Duration,
    ) -> CallOutcome {
        let (api, name) = (&self.api, &self.options.node);
        let params = PostParams::default();
        let renewed = |lease| lease::renewed(lease, input, duration, clock::wall_time());
        let answer = match what {
            Call::Read => call(stored(api.get(name))).await,
            Call::Create => {
                let lease = renewed(lease::new(&self.options.namespace, name));
                call(stored(api.create(&params, &lease))).await
            }
            Call::Renew => {
                let lease = renewed(self.lease.clone());
                call(stored(api.replace(name, &params, &lease))).await
            }
        };
        match answer {
            Ok(mut lease) => {
                // Not needed here, and larger than the rest.
                lease.metadata.managed_fields = None;
                self.lease = lease;
                if what != Call::Read {
                    self.thresholds = Some(thresholds(input));
                }
                self.succeeded(what)
            }
            Err(error) => self.failed(what, &error),
        }
    }

    fn succeeded(&mut self, what: Call) -> CallOutcome {
        match what {
            Call::Read => return CallOutcome::Found,
            Call::Create => self.metrics.count("created"),
            Call::Renew => self.metrics.count("renewed"),
        }
        self.metrics.renewed(clock::boot_time());
        if self.failure.take().is_some() {
            tracing::info!("the Lease is renewed again");
        }
        CallOutcome::Renewed
    }

    fn failed(&mut self, what: Call, error: &CallError) -> CallOutcome {
        let (result, outcome) = match (what, error.code()) {
            // A 404 to a create means that the namespace is missing.
            (Call::Read | Call::Renew, Some(404)) => ("missing", CallOutcome::Missing),
            (Call::Create | Call::Renew, Some(409)) => ("conflict", CallOutcome::Conflict),
            (_, Some(429)) => ("throttled", CallOutcome::Failed(error.retry_after())),
            _ if matches!(error, CallError::TimedOut { .. }) => {
                ("timeout", CallOutcome::Failed(None))
            }
            _ => ("failed", CallOutcome::Failed(error.retry_after())),
        };
        self.metrics.count(result);
        if let CallOutcome::Failed(_) = outcome {
            self.log_failure(what, error);
        } else {
            tracing::debug!(why = error.message(), "the Lease was changed or deleted");
        }
        outcome
    }

    fn log_failure(&mut self, what: Call, error: &CallError) {
        let mut why = error.message();
        if (what, error.code()) == (Call::Create, Some(404)) {
            let namespace = &self.options.namespace;
            why = format!(
                "{why}: create the namespace {namespace}, or name another with --lease-namespace"
            );
        }
        if self.failure.as_ref() != Some(&why) {
            let lease = format!("{}/{}", self.options.namespace, self.options.node);
            tracing::warn!(lease, why, "failed to renew the Lease; retrying");
            self.failure = Some(why);
        }
    }
}

/// Releases the Lease.
pub(super) async fn release(client: &Client, options: &Options) -> Result<(), CallError> {
    let api: Api<Lease> = Api::namespaced(client.clone(), &options.namespace);
    let Some(lease) = found(call(stored(api.get(&options.node))).await)? else {
        return Ok(());
    };
    let Some(lease) = lease::released(lease, &options.node) else {
        return Ok(());
    };
    let params = PostParams::default();
    call(api.replace(&options.node, &params, &lease))
        .await
        .map(drop)
}
