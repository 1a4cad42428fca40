use fastrand::Rng;
use proptest::prelude::*;

use super::*;

const RELAXED: Duration = Duration::from_mins(1);

/// An agent with its own clock and a running sampling loop.
struct Agent {
    schedule: RenewalSchedule,
    now: BootTime,
    acknowledged: bool,
}

fn start() -> BootTime {
    BootTime::from_nanos(1) + Duration::from_hours(1)
}

impl Agent {
    fn new(seed: u64) -> Self {
        let random = Rng::with_seed(seed);
        Self {
            schedule: RenewalSchedule::new(RELAXED, Duration::from_secs(5), random, start()),
            now: start(),
            acknowledged: false,
        }
    }

    /// An agent whose Lease was just renewed.
    fn renewed(seed: u64) -> Self {
        let mut agent = Self::new(seed);
        assert_eq!(agent.call().0, Call::Read);
        agent.finishes(CallOutcome::Found);
        assert_eq!(agent.call(), (Call::Renew, 40));
        agent.finishes(CallOutcome::Renewed);
        agent
    }

    /// Waits until the next call is due: which, and the lease duration in seconds.
    fn call(&mut self) -> (Call, u64) {
        loop {
            match self
                .schedule
                .step(self.now, Some(self.now), self.acknowledged)
            {
                RenewalStep::Call { call, duration } => return (call, duration.as_secs()),
                RenewalStep::Wait(left) => self.now = self.now + left,
                RenewalStep::Stuck(_) => panic!("the loop runs"),
            }
        }
    }

    fn finishes(&mut self, outcome: CallOutcome) {
        self.schedule.record(self.now, outcome);
    }

    /// Renews once; returns the time since `since`.
    fn renews(&mut self, since: BootTime) -> Duration {
        let call = self.call().0;
        assert_eq!(call, Call::Renew);
        self.finishes(CallOutcome::Renewed);
        self.now.since(since)
    }
}

#[test]
fn a_change_is_written_within_two_seconds_unless_the_last_call_failed() {
    for seed in 0..100 {
        let mut agent = Agent::renewed(seed);
        agent.acknowledged = true;
        for _ in 0..3 {
            let since = agent.now;
            agent.renews(since);
        }
        let since = agent.now;
        agent.schedule.plan_early_renewal(since);
        assert!(agent.renews(since) <= Duration::from_secs(2));
        assert_eq!(agent.call().0, Call::Renew);
        agent.finishes(CallOutcome::Failed(Some(Duration::from_secs(20))));
        let since = agent.now;
        agent.schedule.plan_early_renewal(since);
        assert!(agent.renews(since) >= Duration::from_secs(20));
    }
}

#[test]
fn a_missing_lease_is_created_and_a_changed_one_read_at_once() {
    let mut agent = Agent::new(1);
    assert_eq!(agent.call(), (Call::Read, 40));
    let first = agent.now;
    agent.finishes(CallOutcome::Missing);
    assert_eq!(agent.call(), (Call::Create, 40));
    agent.finishes(CallOutcome::Renewed);
    assert_eq!(agent.now, first);
    // The next renewal needs no read.
    assert_eq!(agent.call().0, Call::Renew);
    let at = agent.now;
    agent.finishes(CallOutcome::Conflict);
    assert_eq!(agent.call().0, Call::Read);
    agent.finishes(CallOutcome::Found);
    assert_eq!(agent.call().0, Call::Renew);
    agent.finishes(CallOutcome::Renewed);
    assert_eq!(agent.now, at);
    assert_eq!(agent.call().0, Call::Renew);
    let at = agent.now;
    agent.finishes(CallOutcome::Missing);
    assert_eq!(agent.call().0, Call::Create);
    assert_eq!(agent.now, at);
}

#[test]
fn another_writer_does_not_make_the_agent_flood_the_server() {
    let mut agent = Agent::renewed(2);
    let mut calls = 0;
    let start = agent.now;
    while agent.now.since(start) < Duration::from_secs(20) {
        let outcome = match agent.call().0 {
            Call::Read => CallOutcome::Found,
            Call::Create | Call::Renew => CallOutcome::Conflict,
        };
        agent.finishes(outcome);
        calls += 1;
    }
    assert!(calls < 40, "{calls} calls in 20 s");
}

#[test]
fn failures_are_retried_within_the_period_with_growing_pauses() {
    let mut agent = Agent::renewed(3);
    agent.call();
    let start = agent.now;
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let before = agent.now;
        agent.finishes(CallOutcome::Failed(None));
        agent.call();
        pauses.push(agent.now.since(before));
    }
    assert!(
        pauses[0] >= Duration::from_millis(250) && pauses[0] <= MIN_RETRY_DELAY,
        "{pauses:?}"
    );
    assert!(
        pauses[..3].iter().sum::<Duration>() < INTERVAL,
        "{pauses:?}"
    );
    assert!(pauses.iter().all(|pause| *pause <= INTERVAL), "{pauses:?}");
    assert!(pauses[7] >= INTERVAL / 2, "{pauses:?}");
    agent.finishes(CallOutcome::Renewed);
    // Renewed late in a period, then as usual.
    assert!(agent.now.since(start) > INTERVAL);
    let at = agent.now;
    assert!(agent.renews(at) <= INTERVAL.mul_f64(1.05));
    let at = agent.now;
    assert!(agent.renews(at) >= INTERVAL.mul_f64(0.95));
}

#[test]
fn a_success_after_retries_does_not_shift_the_periods() {
    let mut agent = Agent::renewed(4);
    agent.call();
    let period_start = agent.now;
    agent.finishes(CallOutcome::Failed(None));
    agent.call();
    agent.now = agent.now + Duration::from_secs(2);
    agent.finishes(CallOutcome::Renewed);
    agent.call();
    let period = agent.now.since(period_start);
    assert!(
        period >= INTERVAL.mul_f64(0.95) && period <= INTERVAL.mul_f64(1.05),
        "{period:?}"
    );
}

#[test]
fn a_retry_after_is_respected_up_to_a_limit() {
    for (asked, waited) in [(7, 7), (3600, 60)] {
        let mut agent = Agent::renewed(5);
        agent.call();
        let before = agent.now;
        agent.finishes(CallOutcome::Failed(Some(Duration::from_secs(asked))));
        agent.call();
        let min = Duration::from_secs(waited);
        let pause = agent.now.since(before);
        assert!(pause > min && pause <= min.mul_f64(1.25), "{pause:?}");
    }
}

#[test]
fn a_stuck_sampling_loop_stops_the_heartbeat() {
    let mut agent = Agent::renewed(6);
    let last_run = agent.now;
    agent.now = agent.now + INTERVAL * 2;
    let (late, early) = (Some(last_run), Some(agent.now));
    assert_eq!(
        agent.schedule.step(agent.now, late, false),
        RenewalStep::Stuck(STUCK_CHECK_INTERVAL)
    );
    assert_eq!(
        agent.schedule.step(agent.now, None, false),
        RenewalStep::Stuck(STUCK_CHECK_INTERVAL)
    );
    let step = agent.schedule.step(agent.now, early, false);
    assert!(
        matches!(
            step,
            RenewalStep::Call {
                call: Call::Renew,
                ..
            }
        ),
        "{step:?}"
    );
}

#[test]
fn the_lease_has_its_longer_duration_before_the_interval_grows() {
    let mut agent = Agent::renewed(7);
    agent.acknowledged = true;
    let at = agent.now;
    assert_eq!(
        agent.call(),
        (Call::Renew, 240),
        "written in the last short period"
    );
    assert!(agent.now.since(at) <= INTERVAL.mul_f64(1.05));
    agent.finishes(CallOutcome::Renewed);
    assert_eq!(agent.schedule.interval(), RELAXED);
    let at = agent.now;
    let period = agent.renews(at);
    assert!(
        period >= INTERVAL && period <= INTERVAL + RELAXED,
        "{period:?}"
    );
    let at = agent.now;
    let period = agent.renews(at);
    assert!(
        period >= RELAXED.mul_f64(0.95) && period <= RELAXED.mul_f64(1.05),
        "{period:?}"
    );
}

#[test]
fn agents_that_relax_together_do_not_write_together() {
    const AGENTS: u64 = 600;
    let mut in_seconds = [0; 120];
    for seed in 0..AGENTS {
        let mut agent = Agent::renewed(seed);
        agent.acknowledged = true;
        let relaxes = agent.now;
        agent.renews(relaxes);
        loop {
            let second = agent.renews(start()).as_secs().saturating_sub(60);
            let Some(count) = in_seconds.get_mut(usize::try_from(second).unwrap()) else {
                break;
            };
            *count += usize::from(second > 0);
        }
    }
    // 10 a second, and 100 in ten of them.
    for tenth in in_seconds[1..].windows(10) {
        let writes: usize = tenth.iter().sum();
        assert!((50..=150).contains(&writes), "{writes} in 10 s");
    }
}

#[test]
fn without_acknowledgements_it_is_renewed_every_ten_seconds_again() {
    let mut agent = Agent::renewed(8);
    agent.acknowledged = true;
    for _ in 0..2 {
        let at = agent.now;
        agent.renews(at);
    }
    // Half of a relaxed period has passed: due at once.
    agent.now = agent.now + RELAXED / 2;
    let at = agent.now;
    agent.acknowledged = false;
    assert_eq!(agent.call(), (Call::Renew, 40));
    assert_eq!(agent.now, at);
    agent.finishes(CallOutcome::Renewed);
    assert!(agent.renews(at) <= INTERVAL.mul_f64(1.05));
    // Just renewed: not before ten seconds have passed.
    agent.acknowledged = true;
    let at = agent.now;
    agent.renews(at);
    agent.acknowledged = false;
    let at = agent.now;
    assert!(agent.renews(at) >= INTERVAL.mul_f64(0.95));
}

#[test]
fn a_relaxed_interval_is_never_shorter_than_the_normal_one() {
    let schedule =
        RenewalSchedule::new(Duration::from_secs(1), INTERVAL, Rng::with_seed(0), start());
    assert_eq!(schedule.relaxed, INTERVAL);
}

proptest! {
    #[test]
    fn agents_that_start_together_do_not_renew_together(seed in any::<u64>()) {
        let mut agent = Agent::new(seed);
        agent.call();
        prop_assert!(agent.now.since(start()) < INTERVAL);
        agent.finishes(CallOutcome::Missing);
        agent.call();
        agent.finishes(CallOutcome::Renewed);
        for _ in 0..50 {
            let at = agent.now;
            let period = agent.renews(at);
            prop_assert!(period >= INTERVAL.mul_f64(0.959) && period <= INTERVAL.mul_f64(1.041), "{period:?}");
        }
    }

    /// With any outcomes and durations: never 40 calls in 10 s, and a server that works again gets a renewal within two
    /// intervals.
    #[test]
    fn calls_are_bounded_and_it_always_comes_back(
        seed in any::<u64>(),
        outcomes in prop::collection::vec((0_u8..6, 0_u64..10_000, any::<bool>()), 1..200),
    ) {
        let mut agent = Agent::new(seed);
        let mut times: Vec<BootTime> = Vec::new();
        for (outcome, took, acknowledged) in outcomes {
            agent.acknowledged = acknowledged;
            agent.call();
            times.push(agent.now);
            agent.now = agent.now + Duration::from_millis(took / 10);
            agent.finishes(match outcome {
                0 => CallOutcome::Found,
                1 => CallOutcome::Renewed,
                2 => CallOutcome::Missing,
                3 => CallOutcome::Conflict,
                4 => CallOutcome::Failed(None),
                _ => CallOutcome::Failed(Some(Duration::from_millis(took))),
            });
        }
        for window in times.windows(40) {
            prop_assert!(window[39].since(window[0]) > INTERVAL, "too many calls");
        }
        agent.acknowledged = false;
        let at = agent.now;
        let mut calls = 0;
        while agent.call().0 != Call::Renew {
            agent.finishes(CallOutcome::Found);
            calls += 1;
            prop_assert!(calls < 4);
        }
        prop_assert!(agent.now.since(at) <= INTERVAL * 2);
    }
}
