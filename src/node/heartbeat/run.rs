//! Carries out what [`Beat`] decides.

use fastrand::Rng;
use k8s_openapi::api::coordination::v1::Lease;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::sleep;

use super::beat::{Beat, Call, Outcome, Step};
use super::lease;
use super::metrics::Heartbeats;
use super::{Options, Pulse};
use crate::cluster::client::{CallError, call, found, stored};
use crate::crd::summary::Percent;
use crate::node::clock;

/// Runs until the sampling loop is gone.
pub(super) async fn run(
    client: Client,
    options: Options,
    mut pulse: watch::Receiver<Pulse>,
    mut acknowledged: watch::Receiver<bool>,
    metrics: Heartbeats,
) {
    let (relaxed, stuck_after) = (options.relaxed, options.stuck_after);
    let mut beat = Beat::new(relaxed, stuck_after, Rng::new(), clock::boot_time());
    let mut heart = Heart::new(client, options, metrics);
    loop {
        let turned = pulse.borrow_and_update().turned;
        let relaxed = *acknowledged.borrow_and_update();
        let step = beat.step(clock::boot_time(), turned, relaxed);
        heart.metrics.stalled(matches!(step, Step::Stalled(_)));
        match step {
            Step::Wait(left) => tokio::select! {
                () = sleep(left) => {}
                () = changed(&mut acknowledged) => {}
                () = heart.marks_change(&mut pulse) => beat.hurry(clock::boot_time()),
            },
            Step::Stalled(left) => tokio::select! {
                () = sleep(left) => {}
                turns = pulse.changed() => if turns.is_err() { return },
            },
            Step::Call { call, holds } => {
                let pulse = pulse.borrow().clone();
                let outcome = heart.call(call, &pulse, holds).await;
                beat.came(clock::boot_time(), outcome);
                heart.metrics.every(beat.interval());
            }
        }
    }
}

/// Where nobody is left to change it, it stays as it is.
async fn changed(acknowledged: &mut watch::Receiver<bool>) {
    if acknowledged.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// The marks over CPU and memory.
type Marks = [Option<Percent>; 2];

fn marks(pulse: &Pulse) -> Marks {
    [pulse.summary.cpu_mark, pulse.summary.memory_mark]
}

struct Heart {
    api: Api<Lease>,
    options: Options,
    metrics: Heartbeats,
    /// As the API server returned it last.
    lease: Lease,
    /// The marks that it has; `None`: it was not written yet.
    marks: Option<Marks>,
    /// Why the last call failed, as it was last told.
    failure: Option<String>,
}

impl Heart {
    fn new(client: Client, options: Options, metrics: Heartbeats) -> Self {
        Self {
            api: Api::namespaced(client, &options.namespace),
            lease: lease::new(&options.namespace, &options.node),
            marks: None,
            options,
            metrics,
            failure: None,
        }
    }

    /// Waits until the marks are others than those of the Lease, which it has from then on.
    async fn marks_change(&mut self, pulse: &mut watch::Receiver<Pulse>) {
        let Some(written) = &mut self.marks else {
            return std::future::pending().await;
        };
        let changed = pulse.wait_for(|pulse| marks(pulse) != *written).await;
        match changed.map(|pulse| marks(&pulse)) {
            Ok(marks) => *written = marks,
            Err(_) => std::future::pending().await,
        }
    }

    async fn call(&mut self, what: Call, pulse: &Pulse, holds: std::time::Duration) -> Outcome {
        let (api, name) = (&self.api, &self.options.node);
        let params = PostParams::default();
        let renewed = |lease| lease::renewed(lease, pulse, holds, clock::wall_time());
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
                // Who wrote which field is of no use here, and the larger part of it.
                lease.metadata.managed_fields = None;
                self.lease = lease;
                if what != Call::Read {
                    self.marks = Some(marks(pulse));
                }
                self.succeeded(what)
            }
            Err(error) => self.failed(what, &error),
        }
    }

    fn succeeded(&mut self, what: Call) -> Outcome {
        match what {
            Call::Read => return Outcome::Found,
            Call::Create => self.metrics.count("created"),
            Call::Renew => self.metrics.count("renewed"),
        }
        self.metrics.renewed(clock::boot_time());
        if self.failure.take().is_some() {
            tracing::info!("the Lease is renewed again");
        }
        Outcome::Renewed
    }

    fn failed(&mut self, what: Call, error: &CallError) -> Outcome {
        let (result, outcome) = match (what, error.code()) {
            // Without the namespace nothing can be created in it.
            (Call::Read | Call::Renew, Some(404)) => ("missing", Outcome::Missing),
            (Call::Create | Call::Renew, Some(409)) => ("conflict", Outcome::Conflict),
            (_, Some(429)) => ("throttled", Outcome::Failed(error.retry_after())),
            _ if matches!(error, CallError::TimedOut) => ("timeout", Outcome::Failed(None)),
            _ => ("failed", Outcome::Failed(error.retry_after())),
        };
        self.metrics.count(result);
        if let Outcome::Failed(_) = outcome {
            self.tell(what, error);
        } else {
            tracing::debug!(why = error.words(), "the Lease is not as it was");
        }
        outcome
    }

    fn tell(&mut self, what: Call, error: &CallError) {
        let mut why = error.words();
        if (what, error.code()) == (Call::Create, Some(404)) {
            let namespace = &self.options.namespace;
            why = format!(
                "{why}: create the namespace {namespace}, or name another with --lease-namespace"
            );
        }
        if self.failure.as_ref() != Some(&why) {
            let lease = format!("{}/{}", self.options.namespace, self.options.node);
            tracing::warn!(lease, why, "failed to renew the Lease; trying again");
            self.failure = Some(why);
        }
    }
}

/// Gives the Lease back.
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
