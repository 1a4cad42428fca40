use fastrand::Rng;
use proptest::prelude::*;

use super::*;

/// A replica with its own clock, for a node that is measured every ten seconds.
struct Replica {
    schedule: ReportSchedule,
    now: BootTime,
    newest: Newest,
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

fn start() -> BootTime {
    BootTime::default() + seconds(3600)
}

impl Replica {
    fn new(seed: u64) -> Self {
        Self {
            schedule: ReportSchedule::new(start(), Rng::with_seed(seed)),
            now: start(),
            newest: Newest {
                sequence: 1,
                changed: 1,
            },
        }
    }

    /// A replica that just accepted the first report.
    fn reported(interval: Duration) -> Self {
        let mut replica = Self::new(1);
        replica.sends();
        replica
            .schedule
            .record(replica.now, SendOutcome::Accepted(interval));
        replica
    }

    fn measured(&mut self, changed: bool) {
        self.newest.sequence += 1;
        if changed {
            self.newest.changed = self.newest.sequence;
        }
    }

    fn step(&mut self) -> SendStep {
        self.schedule.step(self.now, Some(self.newest))
    }

    /// Waits until a report is due; returns how long.
    fn sends(&mut self) -> Duration {
        let before = self.now;
        loop {
            match self.step() {
                SendStep::Send => return self.now.since(before),
                SendStep::Wait(left) => self.now = self.now + left,
                SendStep::Idle => panic!("nothing is to be sent"),
            }
        }
    }
}

#[test]
fn nothing_is_sent_before_the_first_measurement() {
    let mut schedule = ReportSchedule::new(start(), Rng::with_seed(1));
    assert_eq!(schedule.step(start() + seconds(99), None), SendStep::Idle);
}

#[test]
fn each_report_is_sent_once() {
    let mut replica = Replica::reported(INTERVAL);
    assert_eq!(replica.step(), SendStep::Idle);
    replica.now = replica.now + seconds(100);
    assert_eq!(replica.step(), SendStep::Idle, "no report is sent again");
    replica.measured(false);
    assert_eq!(replica.step(), SendStep::Send);
}

#[test]
fn a_change_is_sent_at_once_but_at_most_once_a_second() {
    let mut replica = Replica::reported(INTERVAL);
    replica.measured(true);
    let left = replica.sends();
    assert_eq!(left, MIN_INTERVAL);
    replica
        .schedule
        .record(replica.now, SendOutcome::Accepted(INTERVAL));
    replica.now = replica.now + seconds(3);
    replica.measured(true);
    assert_eq!(replica.sends(), Duration::ZERO);
}

#[test]
fn a_longer_interval_is_respected_except_for_changes() {
    let interval = seconds(30);
    let mut replica = Replica::reported(interval);
    let mut sent = vec![replica.now];
    for _ in 0..30 {
        replica.now = replica.now + seconds(10);
        replica.measured(false);
        if replica.step() == SendStep::Send {
            sent.push(replica.now);
            replica
                .schedule
                .record(replica.now, SendOutcome::Accepted(interval));
        }
    }
    let gaps: Vec<_> = sent.windows(2).map(|pair| pair[1].since(pair[0])).collect();
    assert_eq!(gaps.len(), 10);
    assert!(gaps.iter().all(|gap| *gap == interval), "{gaps:?}");
    // A change is sent after a tenth of the interval, also if a report without a change came after it.
    replica.measured(true);
    replica.measured(false);
    assert_eq!(replica.sends(), seconds(3));
}

#[test]
fn after_failures_the_pauses_grow_up_to_a_limit() {
    let mut replica = Replica::reported(INTERVAL);
    replica.now = replica.now + INTERVAL;
    replica.measured(false);
    replica.sends();
    let mut pauses = Vec::new();
    for _ in 0..8 {
        replica
            .schedule
            .record(replica.now, SendOutcome::Failed(None));
        pauses.push(replica.sends());
    }
    assert!(
        pauses[0] >= MIN_INTERVAL && pauses[0] <= MIN_INTERVAL * 2,
        "{pauses:?}"
    );
    assert!(pauses[7] >= RETRY_DELAYS[1], "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= INTERVAL), "{pauses:?}");
    replica
        .schedule
        .record(replica.now, SendOutcome::Accepted(INTERVAL));
    assert_eq!(replica.step(), SendStep::Idle);
    replica.now = replica.now + INTERVAL;
    replica.measured(false);
    replica.sends();
    replica
        .schedule
        .record(replica.now, SendOutcome::Failed(None));
    assert!(replica.sends() <= MIN_INTERVAL * 2, "it starts again");
}

#[test]
fn a_failure_is_retried_quickly_despite_a_long_interval() {
    let mut replica = Replica::reported(MAX_INTERVAL);
    replica.measured(true);
    replica.sends();
    replica
        .schedule
        .record(replica.now, SendOutcome::Failed(None));
    replica.measured(false);
    assert!(replica.sends() <= MIN_INTERVAL * 2);
}

#[test]
fn a_retry_after_is_respected_up_to_a_limit() {
    for (asked, min) in [(7, 7), (3600, 60)] {
        let mut replica = Replica::reported(INTERVAL);
        replica.measured(true);
        replica.sends();
        let wait = SendOutcome::Failed(Some(seconds(asked)));
        replica.schedule.record(replica.now, wait);
        replica.measured(true);
        let waited = replica.sends();
        let min = seconds(min);
        assert!(
            waited >= min && waited <= min.mul_f64(1.0 + RETRY_AFTER_JITTER),
            "{waited:?}"
        );
    }
}

proptest! {
    #[test]
    fn agents_that_see_a_new_replica_do_not_report_at_once(seed in any::<u64>()) {
        let mut replica = Replica::new(seed);
        prop_assert!(replica.sends() < INTERVAL);
    }

    /// With any answers: never two reports within a second, none during a Retry-After, and a replica that accepts them gets
    /// each change, and a report within its interval.
    #[test]
    fn reports_are_bounded_and_no_change_is_lost(
        seed in any::<u64>(),
        outcomes in prop::collection::vec((0_u8..5, 0_u64..5_000, any::<bool>(), 10_u64..=60), 1..200),
    ) {
        let mut replica = Replica::new(seed);
        let mut last: Option<BootTime> = None;
        let mut not_before = start();
        for (outcome, took, changed, interval) in outcomes {
            replica.measured(changed);
            let step = replica.step();
            if let SendStep::Wait(left) = step {
                prop_assert!(left <= MAX_INTERVAL.mul_f64(1.0 + RETRY_AFTER_JITTER), "{left:?}");
                replica.now = replica.now + left;
            }
            if step == SendStep::Idle {
                let (accepted, at) = replica.schedule.accepted.unwrap();
                prop_assert!(replica.newest.changed <= accepted, "a change is not sent");
                prop_assert!(replica.now.since(at) + INTERVAL <= replica.schedule.interval(), "late");
                replica.now = replica.now + INTERVAL;
                continue;
            }
            if step != SendStep::Send {
                prop_assert_eq!(replica.step(), SendStep::Send);
            }
            if let Some(last) = last {
                prop_assert!(replica.now.since(last) >= MIN_INTERVAL);
            }
            prop_assert!(replica.now >= not_before);
            last = Some(replica.now);
            replica.now = replica.now + Duration::from_millis(took);
            let wait = seconds(interval);
            let outcome = match outcome {
                0 => SendOutcome::Failed(None),
                1 => SendOutcome::Failed(Some(wait)),
                _ => SendOutcome::Accepted(wait),
            };
            if let SendOutcome::Failed(Some(wait)) = outcome {
                not_before = replica.now + wait;
            }
            replica.schedule.record(replica.now, outcome);
        }
    }
}
