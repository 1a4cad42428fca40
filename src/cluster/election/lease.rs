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

use super::{Decision, LEASE, Memory, RENEW_DEADLINE, Seen, Standing};
use crate::cluster::backoff::jittered;
use crate::cluster::client::stored;
use crate::cluster::clock;

/// No call of an election takes longer.
const CALL: Duration = Duration::from_secs(2);
/// How often a replica that ends looks who leads now.
const LOOK: Duration = Duration::from_millis(250);
/// Where the holder can be reached by other replicas.
const ADDRESS: &str = "plimsoll.dev/address";

/// One replica.
pub struct Elector {
    api: Api<Lease>,
    name: String,
    me: String,
    memory: Memory,
    address: Option<SocketAddr>,
    /// Where the replica that leads can be reached, if it is another.
    leader: Option<SocketAddr>,
}

impl Elector {
    /// `me` has to differ between replicas, and between two lives of one. `address`: where the others can reach it.
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
            memory: Memory::new(clock::now()),
            address,
            leader: None,
        }
    }

    /// Looks once, and writes if that is called for. Any error is as if the API server were away.
    async fn step(&mut self) -> kube::Result<()> {
        let lease = self.read().await?;
        let now = clock::now();
        let decision = self
            .memory
            .decide(&self.me, lease.as_ref().map(seen).as_ref(), now);
        self.leader = None;
        let written = match (decision, lease) {
            (Decision::Wait, lease) => {
                self.leader = lease.as_ref().and_then(address);
                self.memory.lost();
                return Ok(());
            }
            (Decision::Create, _) | (_, None) => {
                let lease = self.filled(Lease::default(), true);
                stored(self.api.create(&PostParams::default(), &lease)).await
            }
            (decision, Some(lease)) => {
                let lease = self.filled(lease, decision == Decision::Take);
                let api = &self.api;
                stored(api.replace(&self.name, &PostParams::default(), &lease)).await
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
        let mut annotations = lease.metadata.annotations.take().unwrap_or_default();
        annotations.remove(ADDRESS);
        let address = self.address.map(|address| address.to_string());
        annotations.extend(address.map(|address| (ADDRESS.to_owned(), address)));
        lease.metadata = ObjectMeta {
            name: Some(self.name.clone()),
            annotations: Some(annotations).filter(|annotations| !annotations.is_empty()),
            ..lease.metadata
        };
        let time = MicroTime(clock::wall());
        lease.spec = Some(held(lease.spec.take(), &self.me, taken, time));
        lease
    }

    async fn read(&mut self) -> kube::Result<Option<Lease>> {
        let lease = self.api.get_opt(&self.name).await?;
        self.memory.saw(clock::now());
        Ok(lease)
    }

    fn standing(&self) -> Standing {
        let now = clock::now();
        if self.memory.is_blind(now) {
            return Standing::blind(self.leader);
        }
        Standing::new(self.memory.term(now), self.leader)
    }

    /// Gives the Lease back, so that another needn't wait for its end.
    async fn release(&mut self) -> kube::Result<()> {
        let Some(mut lease) = self.read().await? else {
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

/// The spec as its holder writes it. The first holder of all is no transition, as it is none for client-go.
fn held(before: Option<LeaseSpec>, me: &str, taken: bool, now: MicroTime) -> LeaseSpec {
    let is_first = before.is_none();
    let before = before.unwrap_or_default();
    let transitions = before.lease_transitions.unwrap_or(0);
    LeaseSpec {
        holder_identity: Some(me.to_owned()),
        lease_duration_seconds: i32::try_from(LEASE.as_secs()).ok(),
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

fn seen(lease: &Lease) -> Seen {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.unwrap_or(0);
    Seen {
        holder: spec.holder_identity.unwrap_or_default(),
        version: lease.metadata.resource_version.clone().unwrap_or_default(),
        duration: Duration::from_secs(u64::try_from(seconds).unwrap_or(0)),
    }
}

/// Takes part until `stop` is true, and says in `standing` whether this replica leads. It stops leading before the Lease
/// can be another's, and gives it back in the end.
pub async fn run(
    elector: &mut Elector,
    standing: &watch::Sender<Standing>,
    mut stop: watch::Receiver<bool>,
) {
    while !*stop.borrow() {
        let remaining = elector.memory.remaining(clock::now());
        let deadline = if standing.borrow().leads() {
            remaining.min(CALL)
        } else {
            CALL
        };
        match timeout(deadline.max(Duration::from_millis(1)), elector.step()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%error, "failed to read or write the Lease"),
            Err(_) => tracing::warn!("no answer about the Lease in time"),
        }
        publish(standing, elector.standing());
        // The leadership ends in time also when the next look is late.
        let pause = elector.memory.pause(clock::now());
        // Those that stand by look at different moments; the leader must not be late.
        let leads = standing.borrow().leads();
        let pause = if leads { pause } else { jittered(pause) };
        let stopped = timeout(pause, stop.wait_for(|stop| *stop)).await;
        publish(standing, elector.standing());
        if stopped.is_ok() {
            break;
        }
    }
    let led = standing.borrow().leads();
    elector.memory.lost();
    publish(standing, Standing::new(None, elector.leader));
    if led && let Err(error) = timeout(RENEW_DEADLINE, elector.release()).await {
        tracing::warn!(%error, "failed to give the Lease back in time");
    }
}

/// Says for ever where the replica that leads can be reached, and doesn't take part: what is under way where a replica ends
/// is passed on to the next leader.
pub async fn follow(elector: &mut Elector, standing: &watch::Sender<Standing>) -> Infallible {
    loop {
        if let Ok(Ok(lease)) = timeout(CALL, elector.read()).await {
            let other = |lease: &Lease| {
                let holder = seen(lease).holder;
                !holder.is_empty() && holder != elector.me
            };
            elector.leader = lease.filter(other).as_ref().and_then(address);
        }
        publish(standing, elector.standing());
        sleep(LOOK).await;
    }
}

fn publish(standing: &watch::Sender<Standing>, now: Standing) {
    standing.send_if_modified(|before| {
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
    fn each_holder_after_the_first_is_a_transition_and_a_renewal_is_none() {
        let time = |second| MicroTime(Timestamp::from_second(second).expect("a time"));
        let first = held(None, "a", true, time(1));
        assert_eq!(first.lease_transitions, Some(0));
        let renewed = held(Some(first), "a", false, time(2));
        assert_eq!(renewed.lease_transitions, Some(0));
        assert_eq!(renewed.acquire_time, Some(time(1)));
        let released = LeaseSpec {
            holder_identity: None,
            ..renewed
        };
        let again = held(Some(released), "a", true, time(3));
        assert_eq!(again.lease_transitions, Some(1));
        assert_eq!(again.acquire_time, Some(time(3)));
        let other = held(Some(again), "b", true, time(4));
        assert_eq!(other.lease_transitions, Some(2));
    }
}
