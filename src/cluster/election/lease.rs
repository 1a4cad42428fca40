//! Reads and writes the Lease.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::timeout;

use super::{Decision, LEASE, Memory, RENEW_DEADLINE, RETRY, Seen};
use crate::cluster::clock;

/// No call of an election takes longer.
const CALL: Duration = Duration::from_secs(2);

/// One replica.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    me: String,
    memory: Memory,
}

impl Elector {
    /// `me` has to differ between replicas, and between two lives of one.
    pub fn new(client: Client, namespace: &str, name: &str, me: String) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            me,
            memory: Memory::default(),
        }
    }

    /// Looks once, and writes if that is called for. Any error is as if the API server were away.
    async fn step(&mut self) -> kube::Result<()> {
        let lease = self.api.get_opt(&self.name).await?;
        let now = clock::now();
        let decision = self
            .memory
            .decide(&self.me, lease.as_ref().map(seen).as_ref(), now);
        let written = match (decision, lease) {
            (Decision::Wait, _) => {
                self.memory.lost();
                return Ok(());
            }
            (Decision::Create, _) | (_, None) => {
                let lease = self.filled(Lease::default(), true);
                self.api.create(&PostParams::default(), &lease).await
            }
            (decision, Some(lease)) => {
                let lease = self.filled(lease, decision == Decision::Take);
                let api = &self.api;
                api.replace(&self.name, &PostParams::default(), &lease)
                    .await
            }
        };
        match written {
            Ok(lease) => {
                let version = lease.metadata.resource_version.unwrap_or_default();
                self.memory.wrote(now, &version);
                Ok(())
            }
            // Somebody else was faster: the next look says who.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn filled(&self, mut lease: Lease, taken: bool) -> Lease {
        let time = Some(MicroTime(clock::wall()));
        let before = lease.spec.take().unwrap_or_default();
        let transitions = before.lease_transitions.unwrap_or(0);
        lease.metadata = ObjectMeta {
            name: Some(self.name.clone()),
            ..lease.metadata
        };
        lease.spec = Some(LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(LEASE.as_secs()).ok(),
            renew_time: time.clone(),
            acquire_time: if taken { time } else { before.acquire_time },
            lease_transitions: Some(transitions.saturating_add(i32::from(taken))),
            ..before
        });
        lease
    }

    /// Gives the Lease back, so that another needn't wait for its end.
    async fn release(&mut self) -> kube::Result<()> {
        let Some(mut lease) = self.api.get_opt(&self.name).await? else {
            return Ok(());
        };
        if seen(&lease).holder != self.me {
            return Ok(());
        }
        if let Some(spec) = &mut lease.spec {
            spec.holder_identity = None;
        }
        let params = PostParams::default();
        self.api
            .replace(&self.name, &params, &lease)
            .await
            .map(drop)
    }
}

fn seen(lease: &Lease) -> Seen {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.unwrap_or(0);
    Seen {
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: Duration::from_secs(u64::try_from(seconds).unwrap_or(0)),
    }
}

/// Takes part until `stop` is true, and says in `leads` whether this replica leads. It stops leading before the Lease
/// can be another's, and gives it back in the end.
pub async fn run(
    mut elector: Elector,
    leads: &watch::Sender<bool>,
    mut stop: watch::Receiver<bool>,
) {
    while !*stop.borrow() {
        let remaining = elector.memory.remaining(clock::now());
        let deadline = if *leads.borrow() {
            remaining.min(CALL)
        } else {
            CALL
        };
        match timeout(deadline.max(Duration::from_millis(1)), elector.step()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "failed to read or write the Lease"),
            Err(_) => tracing::warn!("no answer about the Lease in time"),
        }
        publish(leads, elector.memory.leads(clock::now()));
        // The leadership ends in time also when the next look is late.
        let remaining = elector.memory.remaining(clock::now());
        let leading = *leads.borrow();
        let pause = if leading { RETRY.min(remaining) } else { RETRY };
        let stopped = timeout(pause, stop.wait_for(|stop| *stop)).await;
        publish(leads, elector.memory.leads(clock::now()));
        if stopped.is_ok() {
            break;
        }
    }
    let led = *leads.borrow();
    publish(leads, false);
    if led && let Err(error) = timeout(RENEW_DEADLINE, elector.release()).await {
        tracing::warn!(%error, "failed to give the Lease back in time");
    }
}

fn publish(leads: &watch::Sender<bool>, now: bool) {
    leads.send_if_modified(|before| {
        let changed = *before != now;
        *before = now;
        changed
    });
}
