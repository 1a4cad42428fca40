//! Reads and writes the Lease.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use super::{
    ElectionState, ElectionStep, LEASE_DURATION, Leadership, ObservedLease, RENEW_DEADLINE,
};
use crate::clock;
use crate::cluster::backoff::jittered;
use crate::cluster::client::{describe, stored};

/// Limit for each call of the election.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// How often a replica that is shutting down reads who leads.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(250);
/// Annotation: the address at which other replicas reach the holder.
const ADDRESS: &str = "plimsoll.dev/address";

/// Takes part in the election for one replica.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    me: String,
    state: ElectionState,
    address: Option<SocketAddr>,
    /// The address of the leader, if it is another replica.
    leader: Option<SocketAddr>,
}

impl Elector {
    /// `me` has to differ between replicas, and between restarts of one. `address`: where other replicas reach this one.
    pub fn new(
        client: Client,
        namespace: &str,
        name: &str,
        me: String,
        address: Option<SocketAddr>,
    ) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            me,
            state: ElectionState::new(clock::boot_time()),
            address,
            leader: None,
        }
    }

    /// Reads the Lease once, and writes it if needed. An error counts as an unreachable API server.
    async fn step(&mut self) -> kube::Result<()> {
        let lease = self.read().await?;
        let now = clock::boot_time();
        let decision = self
            .state
            .decide(&self.me, lease.as_ref().map(observed).as_ref(), now);
        self.leader = None;
        let written = match (decision, lease) {
            (ElectionStep::Wait, lease) => {
                self.leader = lease.as_ref().and_then(address);
                self.state.lost();
                return Ok(());
            }
            (ElectionStep::Create, _) | (_, None) => {
                let lease = self.filled(Lease::default(), true);
                stored(self.api.create(&PostParams::default(), &lease)).await
            }
            (decision, Some(lease)) => {
                let lease = self.filled(lease, decision == ElectionStep::Take);
                let api = &self.api;
                stored(api.replace(&self.name, &PostParams::default(), &lease)).await
            }
        };
        match written {
            Ok(lease) => {
                let version = lease.metadata.resource_version.unwrap_or_default();
                self.state.wrote(now, &version);
                Ok(())
            }
            // Another replica was faster; the next step reads which one.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn filled(&self, mut lease: Lease, taken: bool) -> Lease {
        let mut annotations = lease.metadata.annotations.take().unwrap_or_default();
        annotations.remove(ADDRESS);
        let address = self.address.map(|address| address.to_string());
        annotations.extend(address.map(|address| (ADDRESS.to_owned(), address)));
        lease.metadata = ObjectMeta {
            name: Some(self.name.clone()),
            annotations: Some(annotations).filter(|annotations| !annotations.is_empty()),
            ..lease.metadata
        };
        let time = MicroTime(clock::wall_time());
        lease.spec = Some(held_spec(lease.spec.take(), &self.me, taken, time));
        lease
    }

    async fn read(&mut self) -> kube::Result<Option<Lease>> {
        let lease = self.api.get_opt(&self.name).await?;
        self.state.lease_read(clock::boot_time());
        Ok(lease)
    }

    fn leadership(&self) -> Leadership {
        let now = clock::boot_time();
        if self.state.is_disconnected(now) {
            return Leadership::disconnected(self.leader);
        }
        Leadership::new(self.state.term(now), self.leader)
    }

    /// Releases the Lease, so that another replica need not wait for its expiry.
    async fn release(&mut self) -> kube::Result<()> {
        let Some(mut lease) = self.read().await? else {
            return Ok(());
        };
        if observed(&lease).holder != self.me {
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

/// The spec as its holder writes it. As in client-go, the first holder does not count as a transition.
fn held_spec(before: Option<LeaseSpec>, me: &str, taken: bool, now: MicroTime) -> LeaseSpec {
    let is_first = before.is_none();
    let before = before.unwrap_or_default();
    let transitions = before.lease_transitions.unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(LEASE_DURATION.as_secs()).ok(),
        renew_time: Some(now.clone()),
        acquire_time: if taken {
            Some(now)
        } else {
            before.acquire_time
        },
        lease_transitions: Some(transitions.saturating_add(i32::from(taken && !is_first))),
        ..before
    }
}

fn address(lease: &Lease) -> Option<SocketAddr> {
    let annotations: &BTreeMap<_, _> = lease.metadata.annotations.as_ref()?;
    annotations.get(ADDRESS)?.parse().ok()
}

fn observed(lease: &Lease) -> ObservedLease {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.unwrap_or(0);
    ObservedLease {
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: Duration::from_secs(u64::try_from(seconds).unwrap_or(0)),
    }
}

/// Takes part in the election until `stop` is true, and publishes this replica's state to `leadership`. Stops leading before another replica
/// can acquire the Lease, and releases it at the end.
pub async fn run(
    elector: &mut Elector,
    leadership: &watch::Sender<Leadership>,
    mut stop: watch::Receiver<bool>,
) {
    while !*stop.borrow() {
        let remaining = elector.state.remaining(clock::boot_time());
        let deadline = if leadership.borrow().leads() {
            remaining.min(CALL_TIMEOUT)
        } else {
            CALL_TIMEOUT
        };
        match timeout(deadline.max(Duration::from_millis(1)), elector.step()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => {
                tracing::warn!(why = describe(&error), "failed to read or write the Lease");
            }
            Err(_) => tracing::warn!("reading or writing the Lease timed out"),
        }
        publish(leadership, elector.leadership());
        // Leadership ends in time even if the next step is late.
        let pause = elector.state.pause(clock::boot_time());
        // Standbys read at different times; the leader must not be late.
        let leads = leadership.borrow().leads();
        let pause = if leads { pause } else { jittered(pause) };
        let stopped = timeout(pause, stop.wait_for(|stop| *stop)).await;
        publish(leadership, elector.leadership());
        if stopped.is_ok() {
            break;
        }
    }
    let led = leadership.borrow().leads();
    elector.state.lost();
    publish(leadership, Leadership::new(None, elector.leader));
    if led && let Err(error) = timeout(RENEW_DEADLINE, elector.release()).await {
        tracing::warn!(%error, "failed to release the Lease in time");
    }
}

/// Publishes the leader's address without taking part: requests in flight on a replica that is shutting down are forwarded to the
/// next leader.
pub async fn follow(elector: &mut Elector, leadership: &watch::Sender<Leadership>) -> Infallible {
    loop {
        if let Ok(Ok(lease)) = timeout(CALL_TIMEOUT, elector.read()).await {
            let other = |lease: &Lease| {
                let holder = observed(lease).holder;
                !holder.is_empty() && holder != elector.me
            };
            elector.leader = lease.filter(other).as_ref().and_then(address);
        }
        publish(leadership, elector.leadership());
        sleep(FOLLOW_INTERVAL).await;
    }
}

fn publish(leadership: &watch::Sender<Leadership>, now: Leadership) {
    leadership.send_if_modified(|before| {
        let changed = *before != now;
        *before = now;
        changed
    });
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn each_new_holder_after_the_first_is_a_transition() {
        let time = |second| MicroTime(Timestamp::from_second(second).expect("a time"));
        let first = held_spec(None, "a", true, time(1));
        assert_eq!(first.lease_transitions, Some(0));
        let renewed = held_spec(Some(first), "a", false, time(2));
        assert_eq!(renewed.lease_transitions, Some(0));
        assert_eq!(renewed.acquire_time, Some(time(1)));
        let released = LeaseSpec {
            holder_identity: None,
            ..renewed
        };
        let again = held_spec(Some(released), "a", true, time(3));
        assert_eq!(again.lease_transitions, Some(1));
        assert_eq!(again.acquire_time, Some(time(3)));
        let other = held_spec(Some(again), "b", true, time(4));
        assert_eq!(other.lease_transitions, Some(2));
    }
}
