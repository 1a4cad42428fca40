use fastrand::Rng;
use proptest::prelude::*;

use super::*;

/// A replica on a clock of its own, told of a node that is measured every ten seconds.
struct Replica {
    pace: Pace,
    now: BootTime,
    newest: Newest,
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn begun() -> BootTime {
    BootTime::default() + seconds(3600)
}

impl Replica {
    fn new(seed: u64) -> Self {
        Self {
            pace: Pace::new(begun(), Rng::with_seed(seed)),
            now: begun(),
            newest: Newest {
                sequence: 1,
                changed: 1,
            },
        }
    }

    /// One that took the first report just now.
    fn told(interval: Duration) -> Self {
        let mut replica = Self::new(1);
        replica.sends();
        replica.pace.came(replica.now, Outcome::Taken(interval));
        replica
    }

    fn measured(&mut self, changed: bool) {
        self.newest.sequence += 1;
        if changed {
            self.newest.changed = self.newest.sequence;
        }
    }

    fn step(&mut self) -> Step {
        self.pace.step(self.now, Some(self.newest))
    }

    /// Waits until it is to be sent; after how long.
    fn sends(&mut self) -> Duration {
        let before = self.now;
        loop {
            match self.step() {
                Step::Send => return self.now.since(before),
                Step::Wait(left) => self.now = self.now + left,
                Step::Rest => panic!("nothing is to be sent"),
            }
        }
    }
}

#[test]
fn nothing_is_sent_before_anything_is_measured() {
    let mut pace = Pace::new(begun(), Rng::with_seed(1));
    assert_eq!(pace.step(begun() + seconds(99), None), Step::Rest);
}

#[test]
fn a_report_is_sent_once_and_the_next_when_it_is_there() {
    let mut replica = Replica::told(INTERVAL);
    assert_eq!(replica.step(), Step::Rest);
    replica.now = replica.now + seconds(100);
    assert_eq!(replica.step(), Step::Rest, "no old report is told again");
    replica.measured(false);
    assert_eq!(replica.step(), Step::Send);
}

#[test]
fn a_change_is_told_at_once_but_no_more_than_once_a_second() {
    let mut replica = Replica::told(INTERVAL);
    replica.measured(true);
    let left = replica.sends();
    assert_eq!(left, LEAST);
    replica.pace.came(replica.now, Outcome::Taken(INTERVAL));
    replica.now = replica.now + seconds(3);
    replica.measured(true);
    assert_eq!(replica.sends(), Duration::ZERO);
}

#[test]
fn a_replica_that_wants_fewer_reports_gets_those_of_changes_and_one_in_each_interval() {
    let interval = seconds(30);
    let mut replica = Replica::told(interval);
    let mut sent = vec![replica.now];
    for _ in 0..30 {
        replica.now = replica.now + seconds(10);
        replica.measured(false);
        if replica.step() == Step::Send {
            sent.push(replica.now);
            replica.pace.came(replica.now, Outcome::Taken(interval));
        }
    }
    let gaps: Vec<_> = sent.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    assert_eq!(gaps.len(), 10);
    assert!(gaps.iter().all(|gap| *gap == interval), "{gaps:?}");
    // A change is told, after a tenth of the interval at the earliest, also where a report of no change came after it.
    replica.measured(true);
    replica.measured(false);
    assert_eq!(replica.sends(), seconds(3));
}

#[test]
fn after_a_failure_the_newest_is_sent_in_pauses_that_grow_up_to_a_limit() {
    let mut replica = Replica::told(INTERVAL);
    replica.now = replica.now + INTERVAL;
    replica.measured(false);
    replica.sends();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        replica.pace.came(replica.now, Outcome::Failed(None));
        pauses.push(replica.sends());
    }
    assert!(pauses[0] >= LEAST && pauses[0] <= LEAST * 2, "{pauses:?}");
    assert!(pauses[7] >= PAUSES[1], "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= INTERVAL), "{pauses:?}");
    replica.pace.came(replica.now, Outcome::Taken(INTERVAL));
    assert_eq!(replica.step(), Step::Rest);
    replica.now = replica.now + INTERVAL;
    replica.measured(false);
    replica.sends();
    replica.pace.came(replica.now, Outcome::Failed(None));
    assert!(replica.sends() <= LEAST * 2, "it begins anew");
}

#[test]
fn a_replica_that_wants_few_reports_is_tried_again_soon_all_the_same() {
    let mut replica = Replica::told(LONGEST_INTERVAL);
    replica.measured(true);
    replica.sends();
    replica.pace.came(replica.now, Outcome::Failed(None));
    replica.measured(false);
    assert!(replica.sends() <= LEAST * 2);
}

#[test]
fn who_asks_to_wait_is_left_alone_for_so_long_but_not_for_ever() {
    for (asked, least) in [(7, 7), (3600, 60)] {
        let mut replica = Replica::told(INTERVAL);
        replica.measured(true);
        replica.sends();
        let wait = Outcome::Failed(Some(seconds(asked)));
        replica.pace.came(replica.now, wait);
        replica.measured(true);
        let waited = replica.sends();
        let least = seconds(least);
        assert!(
            waited >= least && waited <= least.mul_f64(1.0 + SPREAD),
            "{waited:?}"
        );
    }
}

proptest! {
    #[test]
    fn agents_that_see_a_replica_at_once_do_not_come_at_once(seed in any::<u64>()) {
        let mut replica = Replica::new(seed);
        prop_assert!(replica.sends() < INTERVAL);
    }

    /// However replicas answer: never two reports within a second, never one while the replica asked for none, and of
    /// one that takes them each change and, within its interval, each node is heard.
    #[test]
    fn reports_are_bounded_and_nothing_is_lost(
        seed in any::<u64>(),
        story in prop::collection::vec((0_u8..5, 0_u64..5_000, any::<bool>(), 10_u64..=60), 1..200),
    ) {
        let mut replica = Replica::new(seed);
        let mut last: Option<BootTime> = None;
        let mut not_before = begun();
        for (outcome, took, changed, interval) in story {
            replica.measured(changed);
            let step = replica.step();
            if let Step::Wait(left) = step {
                prop_assert!(left <= LONGEST_INTERVAL.mul_f64(1.0 + SPREAD), "{left:?}");
                replica.now = replica.now + left;
            }
            if step == Step::Rest {
                let (taken, at) = replica.pace.taken.unwrap();
                prop_assert!(replica.newest.changed <= taken, "a change is held back");
                prop_assert!(replica.now.since(at) + INTERVAL <= replica.pace.interval(), "late");
                replica.now = replica.now + INTERVAL;
                continue;
            }
            if step != Step::Send {
                prop_assert_eq!(replica.step(), Step::Send);
            }
            if let Some(last) = last {
                prop_assert!(replica.now.since(last) >= LEAST);
            }
            prop_assert!(replica.now >= not_before);
            last = Some(replica.now);
            replica.now = replica.now + Duration::from_millis(took);
            let wait = seconds(interval);
            let outcome = match outcome {
                0 => Outcome::Failed(None),
                1 => Outcome::Failed(Some(wait)),
                _ => Outcome::Taken(wait),
            };
            if let Outcome::Failed(Some(wait)) = outcome {
                not_before = replica.now + wait;
            }
            replica.pace.came(replica.now, outcome);
        }
    }
}
