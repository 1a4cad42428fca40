use fastrand::Rng;
use proptest::prelude::*;

use super::*;

const RELAXED: Duration = Duration::from_mins(1);

/// An agent on a clock of its own, whose sampling loop turns.
struct Agent {
    beat: Beat,
    now: BootTime,
    acknowledged: bool,
}

fn begun() -> BootTime {
    BootTime::from_nanos(1) + Duration::from_hours(1)
}

impl Agent {
    fn new(seed: u64) -> Self {
        let random = Rng::with_seed(seed);
        Self {
            beat: Beat::new(RELAXED, Duration::from_secs(5), random, begun()),
            now: begun(),
            acknowledged: false,
        }
    }

    /// One whose Lease was just renewed.
    fn beating(seed: u64) -> Self {
        let mut agent = Self::new(seed);
        assert_eq!(agent.call().0, Call::Read);
        agent.comes(Outcome::Found);
        assert_eq!(agent.call(), (Call::Renew, 40));
        agent.comes(Outcome::Renewed);
        agent
    }

    /// Waits until the next call is due: which, and for how many seconds the Lease holds.
    fn call(&mut self) -> (Call, u64) {
        loop {
            match self.beat.step(self.now, Some(self.now), self.acknowledged) {
                Step::Call { call, holds } => return (call, holds.as_secs()),
                Step::Wait(left) => self.now = self.now + left,
                Step::Stalled(_) => panic!("the loop turns"),
            }
        }
    }

    fn comes(&mut self, outcome: Outcome) {
        self.beat.came(self.now, outcome);
    }

    /// Renews once; after how long from `since`.
    fn renews(&mut self, since: BootTime) -> Duration {
        let call = self.call().0;
        assert_eq!(call, Call::Renew);
        self.comes(Outcome::Renewed);
        self.now.since(since)
    }
}

#[test]
fn what_changed_is_written_within_two_seconds_unless_the_last_call_failed() {
    for seed in 0..100 {
        let mut agent = Agent::beating(seed);
        agent.acknowledged = true;
        for _ in 0..3 {
            let since = agent.now;
            agent.renews(since);
        }
        let since = agent.now;
        agent.beat.hurry(since);
        assert!(agent.renews(since) <= Duration::from_secs(2));
        assert_eq!(agent.call().0, Call::Renew);
        agent.comes(Outcome::Failed(Some(Duration::from_secs(20))));
        let since = agent.now;
        agent.beat.hurry(since);
        assert!(agent.renews(since) >= Duration::from_secs(20));
    }
}

#[test]
fn a_missing_lease_is_created_at_once_and_one_that_changed_is_read_at_once() {
    let mut agent = Agent::new(1);
    assert_eq!(agent.call(), (Call::Read, 40));
    let first = agent.now;
    agent.comes(Outcome::Missing);
    assert_eq!(agent.call(), (Call::Create, 40));
    agent.comes(Outcome::Renewed);
    assert_eq!(agent.now, first);
    // The next needs no read before it.
    assert_eq!(agent.call().0, Call::Renew);
    let at = agent.now;
    agent.comes(Outcome::Conflict);
    assert_eq!(agent.call().0, Call::Read);
    agent.comes(Outcome::Found);
    assert_eq!(agent.call().0, Call::Renew);
    agent.comes(Outcome::Renewed);
    assert_eq!(agent.now, at);
    assert_eq!(agent.call().0, Call::Renew);
    let at = agent.now;
    agent.comes(Outcome::Missing);
    assert_eq!(agent.call().0, Call::Create);
    assert_eq!(agent.now, at);
}

#[test]
fn who_writes_against_us_does_not_make_us_storm_the_server() {
    let mut agent = Agent::beating(2);
    let mut calls = 0;
    let begun = agent.now;
    while agent.now.since(begun) < Duration::from_secs(20) {
        let outcome = match agent.call().0 {
            Call::Read => Outcome::Found,
            Call::Create | Call::Renew => Outcome::Conflict,
        };
        agent.comes(outcome);
        calls += 1;
    }
    assert!(calls < 40, "{calls} calls in 20 s");
}

#[test]
fn failures_are_tried_again_sooner_than_the_next_period_and_ever_more_seldom() {
    let mut agent = Agent::beating(3);
    agent.call();
    let begun = agent.now;
    let mut pauses = Vec::new();
    for _ in 0..8 {
        let before = agent.now;
        agent.comes(Outcome::Failed(None));
        agent.call();
        pauses.push(agent.now.since(before));
    }
    assert!(
        pauses[0] >= Duration::from_millis(250) && pauses[0] <= PAUSE,
        "{pauses:?}"
    );
    assert!(
        pauses[..3].iter().sum::<Duration>() < INTERVAL,
        "{pauses:?}"
    );
    assert!(pauses.iter().all(|pause| *pause <= INTERVAL), "{pauses:?}");
    assert!(pauses[7] >= INTERVAL / 2, "{pauses:?}");
    agent.comes(Outcome::Renewed);
    // Renewed late in a period, and then as always.
    assert!(agent.now.since(begun) > INTERVAL);
    let at = agent.now;
    assert!(agent.renews(at) <= INTERVAL.mul_f64(1.05));
    let at = agent.now;
    assert!(agent.renews(at) >= INTERVAL.mul_f64(0.95));
}

#[test]
fn a_success_after_retries_keeps_the_step_of_the_periods() {
    let mut agent = Agent::beating(4);
    agent.call();
    let began = agent.now;
    agent.comes(Outcome::Failed(None));
    agent.call();
    agent.now = agent.now + Duration::from_secs(2);
    agent.comes(Outcome::Renewed);
    agent.call();
    let period = agent.now.since(began);
    assert!(
        period >= INTERVAL.mul_f64(0.95) && period <= INTERVAL.mul_f64(1.05),
        "{period:?}"
    );
}

#[test]
fn a_server_that_asks_to_wait_is_left_alone_for_so_long_but_not_for_ever() {
    for (asked, waited) in [(7, 7), (3600, 60)] {
        let mut agent = Agent::beating(5);
        agent.call();
        let before = agent.now;
        agent.comes(Outcome::Failed(Some(Duration::from_secs(asked))));
        agent.call();
        let least = Duration::from_secs(waited);
        let pause = agent.now.since(before);
        assert!(pause > least && pause <= least.mul_f64(1.25), "{pause:?}");
    }
}

#[test]
fn where_the_sampling_loop_stands_still_there_is_no_heartbeat() {
    let mut agent = Agent::beating(6);
    let turned = agent.now;
    agent.now = agent.now + INTERVAL * 2;
    let (late, early) = (Some(turned), Some(agent.now));
    assert_eq!(agent.beat.step(agent.now, late, false), Step::Stalled(LOOK));
    assert_eq!(agent.beat.step(agent.now, None, false), Step::Stalled(LOOK));
    let turns = agent.beat.step(agent.now, early, false);
    assert!(
        matches!(
            turns,
            Step::Call {
                call: Call::Renew,
                ..
            }
        ),
        "{turns:?}"
    );
}

#[test]
fn the_lease_says_that_it_is_relaxed_before_it_is() {
    let mut agent = Agent::beating(7);
    agent.acknowledged = true;
    let at = agent.now;
    assert_eq!(
        agent.call(),
        (Call::Renew, 240),
        "written in the last short period"
    );
    assert!(agent.now.since(at) <= INTERVAL.mul_f64(1.05));
    agent.comes(Outcome::Renewed);
    assert_eq!(agent.beat.interval(), RELAXED);
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
        let mut agent = Agent::beating(seed);
        agent.acknowledged = true;
        let relaxes = agent.now;
        agent.renews(relaxes);
        loop {
            let second = agent.renews(begun()).as_secs().saturating_sub(60);
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
fn when_reports_are_no_longer_acknowledged_it_is_renewed_every_ten_seconds_again_at_once() {
    let mut agent = Agent::beating(8);
    agent.acknowledged = true;
    for _ in 0..2 {
        let at = agent.now;
        agent.renews(at);
    }
    // Half a relaxed period is over: due at once.
    agent.now = agent.now + RELAXED / 2;
    let at = agent.now;
    agent.acknowledged = false;
    assert_eq!(agent.call(), (Call::Renew, 40));
    assert_eq!(agent.now, at);
    agent.comes(Outcome::Renewed);
    assert!(agent.renews(at) <= INTERVAL.mul_f64(1.05));
    // Just renewed: not before its ten seconds are over.
    agent.acknowledged = true;
    let at = agent.now;
    agent.renews(at);
    agent.acknowledged = false;
    let at = agent.now;
    assert!(agent.renews(at) >= INTERVAL.mul_f64(0.95));
}

#[test]
fn a_relaxed_interval_is_never_shorter_than_the_usual() {
    let beat = Beat::new(Duration::from_secs(1), INTERVAL, Rng::with_seed(0), begun());
    assert_eq!(beat.relaxed, INTERVAL);
}

proptest! {
    #[test]
    fn agents_that_start_together_do_not_beat_together(seed in any::<u64>()) {
        let mut agent = Agent::new(seed);
        agent.call();
        prop_assert!(agent.now.since(begun()) < INTERVAL);
        agent.comes(Outcome::Missing);
        agent.call();
        agent.comes(Outcome::Renewed);
        for _ in 0..50 {
            let at = agent.now;
            let period = agent.renews(at);
            prop_assert!(period >= INTERVAL.mul_f64(0.959) && period <= INTERVAL.mul_f64(1.041), "{period:?}");
        }
    }

    /// However calls end and however long they take: never 40 calls in 10 s, and a server that is well
    /// again hears of us within two intervals.
    #[test]
    fn calls_are_bounded_and_it_always_comes_back(
        seed in any::<u64>(),
        story in prop::collection::vec((0_u8..6, 0_u64..10_000, any::<bool>()), 1..200),
    ) {
        let mut agent = Agent::new(seed);
        let mut times: Vec<BootTime> = Vec::new();
        for (outcome, took, acknowledged) in story {
            agent.acknowledged = acknowledged;
            agent.call();
            times.push(agent.now);
            agent.now = agent.now + Duration::from_millis(took / 10);
            agent.comes(match outcome {
                0 => Outcome::Found,
                1 => Outcome::Renewed,
                2 => Outcome::Missing,
                3 => Outcome::Conflict,
                4 => Outcome::Failed(None),
                _ => Outcome::Failed(Some(Duration::from_millis(took))),
            });
        }
        for window in times.windows(40) {
            prop_assert!(window[39].since(window[0]) > INTERVAL, "a storm");
        }
        agent.acknowledged = false;
        let at = agent.now;
        let mut calls = 0;
        while agent.call().0 != Call::Renew {
            agent.comes(Outcome::Found);
            calls += 1;
            prop_assert!(calls < 4);
        }
        prop_assert!(agent.now.since(at) <= INTERVAL * 2);
    }
}
