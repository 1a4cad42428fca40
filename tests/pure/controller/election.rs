//! No two replicas lead at a time, whatever the network does, and one soon does when all is well.

use std::time::Duration;

use plimsoll::cluster::election::{Decision, LEASE, Memory, RENEW_DEADLINE, RETRY, Seen};
use plimsoll::engine::time::BootTime;
use proptest::collection::vec;
use proptest::prelude::*;

/// The Lease, written by compare-and-swap.
#[derive(Clone, Default)]
struct Server {
    lease: Option<Seen>,
    version: u64,
}

impl Server {
    fn write(&mut self, holder: &str, expected: Option<&str>) -> Option<String> {
        if self.lease.as_ref().map(|lease| lease.version.as_str()) != expected {
            return None;
        }
        self.version += 1;
        self.lease = Some(Seen {
            holder: holder.to_owned(),
            version: self.version.to_string(),
            duration: LEASE,
        });
        Some(self.version.to_string())
    }
}

/// What befalls one step of one replica.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Works,
    /// The request is lost.
    Cut,
    /// The write happens, its answer is lost.
    Deaf,
    /// The write arrives so many milliseconds after the decision.
    Late(u64),
    /// The process begins anew.
    Restart,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        4 => Just(Fate::Works),
        2 => Just(Fate::Cut),
        1 => Just(Fate::Deaf),
        2 => (0u64..3000).prop_map(Fate::Late),
        1 => Just(Fate::Restart),
    ]
}

struct Replica {
    name: String,
    lives: usize,
    memory: Memory,
    /// A write on its way: when it arrives, when it was begun, with which precondition.
    pending: Option<(BootTime, BootTime, Option<String>)>,
}

impl Replica {
    fn step(&mut self, server: &mut Server, now: BootTime, fate: Fate) {
        match fate {
            Fate::Cut => return,
            Fate::Restart => {
                self.lives += 1;
                self.name = format!("{}-{}", &self.name[..1], self.lives);
                self.memory = Memory::default();
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
        if self.memory.decide(&self.name, seen.as_ref(), now) == Decision::Wait {
            return self.memory.lost();
        }
        if let Fate::Late(delay) = fate {
            self.pending = Some((now + Duration::from_millis(delay), now, version));
            return;
        }
        let written = server.write(&self.name, version.as_deref());
        if let (Some(version), Fate::Works) = (written, fate) {
            self.memory.wrote(now, &version);
        }
    }

    fn arrive(&mut self, server: &mut Server, now: BootTime) {
        if self.pending.as_ref().is_none_or(|(at, _, _)| *at > now) {
            return;
        }
        let (_, begun, version) = self.pending.take().unwrap();
        if let Some(version) = server.write(&self.name, version.as_deref()) {
            self.memory.wrote(begun, &version);
        }
    }
}

fn replicas() -> Vec<Replica> {
    let replica = |name: &str| Replica {
        name: format!("{name}-0"),
        lives: 0,
        memory: Memory::default(),
        pending: None,
    };
    ["a", "b", "c"].map(replica).into()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_two_replicas_lead_at_a_time(steps in vec((0usize..3, 1u64..1500, fate()), 1..200)) {
        let (mut server, mut replicas) = (Server::default(), replicas());
        let mut now = BootTime::default();
        for (who, pause, fate) in steps {
            // Every instant between two steps counts.
            for _ in 0..pause.div_ceil(100) {
                now = now + Duration::from_millis(100);
                for replica in &mut replicas {
                    replica.arrive(&mut server, now);
                }
                let leaders = replicas.iter().filter(|replica| replica.memory.leads(now)).count();
                prop_assert!(leaders <= 1);
            }
            replicas[who].step(&mut server, now, fate);
            let leaders = replicas.iter().filter(|replica| replica.memory.leads(now)).count();
            prop_assert!(leaders <= 1);
        }
        // When all is well again, one leads within 10 s, and goes on to.
        let mut leader = None;
        for second in 0..30 {
            now = now + Duration::from_secs(1);
            for replica in &mut replicas {
                replica.arrive(&mut server, now + Duration::from_secs(5));
                replica.step(&mut server, now, Fate::Works);
            }
            let leads = replicas.iter().position(|replica| replica.memory.leads(now));
            if second >= 10 {
                prop_assert!(leads.is_some());
                prop_assert!(leader.is_none() || leader == leads);
                leader = leads;
            }
        }
    }
}

#[test]
fn a_leader_that_cannot_renew_stops_before_another_may_take_over() {
    assert!(RENEW_DEADLINE < LEASE);
    let mut leader = Memory::default();
    let begun = BootTime::from_nanos(1);
    leader.wrote(begun, "1");
    assert!(leader.leads(begun + Duration::from_millis(3999)));
    assert!(!leader.leads(begun + RENEW_DEADLINE));
}

fn held_by(holder: &str, version: &str) -> Seen {
    Seen {
        holder: holder.to_owned(),
        version: version.to_owned(),
        duration: LEASE,
    }
}

#[test]
fn a_standby_takes_over_at_the_end_of_the_lease_not_a_second_later() {
    let mut standby = Memory::default();
    let begun = BootTime::from_nanos(1);
    let lease = held_by("other", "1");
    assert_eq!(standby.decide("me", Some(&lease), begun), Decision::Wait);
    assert_eq!(standby.pause(begun), RETRY);
    let almost = begun + LEASE.saturating_sub(Duration::from_millis(300));
    assert_eq!(standby.decide("me", Some(&lease), almost), Decision::Wait);
    let next = almost + standby.pause(almost);
    assert!(next < begun + LEASE + Duration::from_millis(100));
    // Where the API server is away then, it is not asked again and again in the same moment.
    assert_eq!(standby.pause(next), RETRY);
    assert_eq!(standby.decide("me", Some(&lease), next), Decision::Take);
    let renewed = held_by("other", "2");
    assert_eq!(standby.decide("me", Some(&renewed), next), Decision::Wait);
    assert_eq!(standby.pause(next), RETRY);
}

#[test]
fn who_cannot_read_the_lease_is_blind_once_another_may_lead() {
    let begun = BootTime::from_nanos(1);
    let mut replica = Memory::new(begun);
    assert!(!replica.is_blind(begun));
    replica.wrote(begun, "1");
    assert!(!replica.is_blind(begun + RENEW_DEADLINE));
    assert!(replica.is_blind(begun + LEASE));
    replica.saw(begun + LEASE);
    assert!(!replica.is_blind(begun + LEASE));
}
