//! Never two leaders, whatever the network does; one leads within seconds once the network works.

use std::time::Duration;

use plimsoll::cluster::election::{
    ElectionState, ElectionStep, LEASE_DURATION, ObservedLease, RENEW_DEADLINE, RETRY_INTERVAL,
};
use plimsoll::engine::time::BootTime;
use proptest::collection::vec;
use proptest::prelude::*;

/// The Lease, written by compare-and-swap.
#[derive(Clone, Default)]
struct Server {
    lease: Option<ObservedLease>,
    version: u64,
}

impl Server {
    fn write(&mut self, holder: &str, expected: Option<&str>) -> Option<String> {
        if self.lease.as_ref().map(|lease| lease.version.as_str()) != expected {
            return None;
        }
        self.version += 1;
        self.lease = Some(ObservedLease {
            holder: holder.to_owned(),
            version: self.version.to_string(),
            duration: LEASE_DURATION,
        });
        Some(self.version.to_string())
    }
}

/// A fault in one step of one replica.
#[derive(Clone, Copy, Debug)]
enum Fault {
    None,
    /// The request is lost.
    RequestLost,
    /// The write happens, its response is lost.
    ResponseLost,
    /// The write arrives this many milliseconds after the decision.
    Delayed(u64),
    /// The process restarts.
    Restart,
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        4 => Just(Fault::None),
        2 => Just(Fault::RequestLost),
        1 => Just(Fault::ResponseLost),
        2 => (0u64..3000).prop_map(Fault::Delayed),
        1 => Just(Fault::Restart),
    ]
}

struct Replica {
    name: String,
    restarts: usize,
    state: ElectionState,
    /// A delayed write: when it arrives, when it was started, its precondition.
    pending: Option<(BootTime, BootTime, Option<String>)>,
}

impl Replica {
    fn step(&mut self, server: &mut Server, now: BootTime, fault: Fault) {
        match fault {
            Fault::RequestLost => return,
            Fault::Restart => {
                self.restarts += 1;
                self.name = format!("{}-{}", &self.name[..1], self.restarts);
                self.state = ElectionState::default();
                self.pending = None;
                return;
            }
            _ => {}
        }
        if self.pending.is_some() {
            return;
        }
        let seen = server.lease.clone();
        let version = seen.as_ref().map(|seen| seen.version.clone());
        if self.state.decide(&self.name, seen.as_ref(), now) == ElectionStep::Wait {
            return self.state.lost();
        }
        if let Fault::Delayed(delay) = fault {
            self.pending = Some((now + Duration::from_millis(delay), now, version));
            return;
        }
        let written = server.write(&self.name, version.as_deref());
        if let (Some(version), Fault::None) = (written, fault) {
            self.state.wrote(now, &version);
        }
    }

    fn arrive(&mut self, server: &mut Server, now: BootTime) {
        if self.pending.as_ref().is_none_or(|(at, _, _)| *at > now) {
            return;
        }
        let (_, started, version) = self.pending.take().unwrap();
        if let Some(version) = server.write(&self.name, version.as_deref()) {
            self.state.wrote(started, &version);
        }
    }
}

fn replicas() -> Vec<Replica> {
    let replica = |name: &str| Replica {
        name: format!("{name}-0"),
        restarts: 0,
        state: ElectionState::default(),
        pending: None,
    };
    ["a", "b", "c"].map(replica).into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_two_replicas_lead_at_a_time(steps in vec((0usize..3, 1u64..1500, fault()), 1..200)) {
        let (mut server, mut replicas) = (Server::default(), replicas());
        let mut now = BootTime::default();
        for (index, pause, fault) in steps {
            // Check every instant between two steps.
            for _ in 0..pause.div_ceil(100) {
                now = now + Duration::from_millis(100);
                for replica in &mut replicas {
                    replica.arrive(&mut server, now);
                }
                let leaders = replicas.iter().filter(|replica| replica.state.leads(now)).count();
                prop_assert!(leaders <= 1);
            }
            replicas[index].step(&mut server, now, fault);
            let leaders = replicas.iter().filter(|replica| replica.state.leads(now)).count();
            prop_assert!(leaders <= 1);
        }
        // Without faults one replica leads within 10 s, and stays the leader.
        let mut leader = None;
        for second in 0..30 {
            now = now + Duration::from_secs(1);
            for replica in &mut replicas {
                replica.arrive(&mut server, now + Duration::from_secs(5));
                replica.step(&mut server, now, Fault::None);
            }
            let leads = replicas.iter().position(|replica| replica.state.leads(now));
            if second >= 10 {
                prop_assert!(leads.is_some());
                prop_assert!(leader.is_none() || leader == leads);
                leader = leads;
            }
        }
    }
}

#[test]
fn a_leader_that_cannot_renew_stops_before_another_can_take_over() {
    assert!(RENEW_DEADLINE < LEASE_DURATION);
    let mut leader = ElectionState::default();
    let started = BootTime::from_nanos(1);
    leader.wrote(started, "1");
    assert!(leader.leads(started + Duration::from_millis(3999)));
    assert!(!leader.leads(started + RENEW_DEADLINE));
}

fn held_by(holder: &str, version: &str) -> ObservedLease {
    ObservedLease {
        holder: holder.to_owned(),
        version: version.to_owned(),
        duration: LEASE_DURATION,
    }
}

#[test]
fn a_standby_takes_over_as_soon_as_the_lease_expires() {
    let mut standby = ElectionState::default();
    let started = BootTime::from_nanos(1);
    let lease = held_by("other", "1");
    assert_eq!(
        standby.decide("me", Some(&lease), started),
        ElectionStep::Wait
    );
    assert_eq!(standby.pause(started), RETRY_INTERVAL);
    let almost = started + LEASE_DURATION.saturating_sub(Duration::from_millis(300));
    assert_eq!(
        standby.decide("me", Some(&lease), almost),
        ElectionStep::Wait
    );
    let next = almost + standby.pause(almost);
    assert!(next < started + LEASE_DURATION + Duration::from_millis(100));
    // If the API server is unreachable then, it is not polled in a tight loop.
    assert_eq!(standby.pause(next), RETRY_INTERVAL);
    assert_eq!(standby.decide("me", Some(&lease), next), ElectionStep::Take);
    let renewed = held_by("other", "2");
    assert_eq!(
        standby.decide("me", Some(&renewed), next),
        ElectionStep::Wait
    );
    assert_eq!(standby.pause(next), RETRY_INTERVAL);
}

#[test]
fn a_replica_that_cannot_read_the_lease_is_disconnected_once_another_may_lead() {
    let started = BootTime::from_nanos(1);
    let mut replica = ElectionState::new(started);
    assert!(!replica.is_disconnected(started));
    replica.wrote(started, "1");
    assert!(!replica.is_disconnected(started + RENEW_DEADLINE));
    assert!(replica.is_disconnected(started + LEASE_DURATION));
    replica.lease_read(started + LEASE_DURATION);
    assert!(!replica.is_disconnected(started + LEASE_DURATION));
}
