//! The rule's state machine against a reference model that computes the state from the whole history, without counters.

use std::time::Duration;

use crate::engine_support::{PERIOD, action, policy, rule};
use plimsoll::engine::Engine;
use plimsoll::engine::plan::{Plan, PlanChange, RuleState};
use plimsoll::engine::policy::{Action, Rule};
use plimsoll::engine::sample::Sample;
use plimsoll::engine::time::BootTime;
use proptest::prelude::*;

const HIGH: f64 = 10.0;
const LOW: f64 = 6.0;
const UNKNOWN_LIMIT: Duration = Duration::from_secs(55);
const TTL: Duration = Duration::from_secs(35);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Seen {
    Breach,
    Between,
    Quiet,
    Unknown,
    /// The previous sample again.
    Again,
}
use Seen::{Again, Between, Breach, Quiet, Unknown};

impl Seen {
    fn load(self) -> Option<[f64; 3]> {
        let load = match self {
            Breach => HIGH + 0.5,
            Between => HIGH,
            Quiet => LOW,
            Unknown | Again => return None,
        };
        Some([load; 3])
    }
}

#[derive(Clone, Copy, Debug)]
struct Params {
    avoidance: usize,
    restore: usize,
    cool_down: Duration,
}

type History = [(BootTime, Seen)];

/// Replaces repeated samples: they count for nothing until they are stale.
fn plain(history: &History) -> Vec<(BootTime, Seen)> {
    let mut sample = None;
    let mut plain = Vec::new();
    for (now, seen) in history {
        let seen = match (seen, sample) {
            (Again, Some((at, known))) if known && now.since(at) <= TTL => Between,
            (Again, _) => Unknown,
            (new, _) => {
                sample = Some((*now, *new != Unknown));
                *new
            }
        };
        plain.push((*now, seen));
    }
    plain
}

/// The state after the whole history.
fn state(history: &History, params: Params) -> RuleState {
    let mut rest = history;
    loop {
        let Some(start) = breached_at(rest, params) else {
            return RuleState::Normal;
        };
        let episode = &rest[start..];
        match normal_at(episode, params) {
            Ok(end) => rest = &episode[end + 1..],
            Err(state) => return state,
        }
    }
}

/// From Normal: the first evaluation after enough breaches with no quiet one in between.
fn breached_at(history: &History, params: Params) -> Option<usize> {
    (0..history.len()).find(|&at| {
        let known = history[..=at].iter().rev().map(|(_, seen)| *seen);
        let run = known.take_while(|seen| *seen != Quiet);
        history[at].1 == Breach && run.filter(|seen| *seen == Breach).count() >= params.avoidance
    })
}

/// From Breached: the evaluation that returns to Normal, or else the state at the end.
fn normal_at(episode: &History, params: Params) -> Result<usize, RuleState> {
    for end in 1..episode.len() {
        if unknown_too_long(&episode[..=end]) {
            return Ok(end);
        }
        if episode[end].1 != Unknown && cooling(&episode[..=end], params) {
            let last = last_breach(&episode[..=end]);
            if episode[end].0.since(episode[last].0) >= params.cool_down {
                return Ok(end);
            }
        }
    }
    Err(if cooling(episode, params) {
        RuleState::Cooling
    } else {
        RuleState::Breached
    })
}

fn last_breach(episode: &History) -> usize {
    let breach = |(_, seen): &(BootTime, Seen)| *seen == Breach;
    episode.iter().rposition(breach).unwrap()
}

/// Enough quiet evaluations since the last breach.
fn cooling(episode: &History, params: Params) -> bool {
    let since = &episode[last_breach(episode)..];
    since.iter().filter(|(_, seen)| *seen == Quiet).count() >= params.restore
}

fn unknown_too_long(history: &History) -> bool {
    let (now, seen) = history[history.len() - 1];
    let known = history.iter().rposition(|(_, seen)| *seen != Unknown);
    let first = known.map_or(0, |known| known + 1);
    seen == Unknown && now.since(history[first].0) >= UNKNOWN_LIMIT
}

fn rule_of(params: Params) -> Rule {
    Rule {
        restore_value: LOW,
        sample_ttl: TTL,
        avoidance_threshold: u32::try_from(params.avoidance).unwrap(),
        restore_threshold: u32::try_from(params.restore).unwrap(),
        ..rule(
            "n/load",
            "cpu_load_1_min",
            HIGH,
            Action {
                cool_down: params.cool_down,
                ..action("watch")
            },
        )
    }
}

fn states_of_engine(history: &History, params: Params) -> Vec<RuleState> {
    let mut engine = Engine::new().with_unknown_limit(UNKNOWN_LIMIT);
    engine.set_policy(policy(vec![rule_of(params)]));
    let mut plan = Plan::default();
    let mut reported = RuleState::Normal;
    let mut states = Vec::new();
    let mut sample = Sample::default();
    for (at, seen) in history {
        if *seen != Again {
            sample.at = *at;
            sample.node.load = seen.load();
        }
        engine.step(*at, &sample, &mut plan);
        assert!(plan.evaluated, "an evaluation was due at {at:?}");
        for transition in &plan.transitions {
            if let PlanChange::State { from, to, .. } = transition.change {
                assert_eq!(
                    from, reported,
                    "each transition continues from the previous state"
                );
                reported = to;
            }
        }
        let state = engine.reports().next().unwrap().state;
        assert_eq!(state, reported, "every change of state is reported");
        states.push(state);
    }
    states
}

fn seen() -> impl Strategy<Value = Seen> {
    prop_oneof![4 => Just(Breach), 1 => Just(Between), 4 => Just(Quiet), 2 => Just(Unknown), 2 => Just(Again)]
}

/// Runs of equal observations, since these drive the state machine.
fn history() -> impl Strategy<Value = Vec<(BootTime, Seen)>> {
    let run = (seen(), 1_usize..6);
    proptest::collection::vec(run, 1..25).prop_map(|runs| {
        let seen = runs.into_iter().flat_map(|(seen, n)| vec![seen; n]);
        let mut now = BootTime::from_nanos(1_000_000_000_000);
        let observation = |seen| {
            now = now + PERIOD;
            (now, seen)
        };
        seen.map(observation).collect()
    })
}

fn params() -> impl Strategy<Value = Params> {
    (1_usize..4, 1_usize..4, 1_u64..60).prop_map(|(avoidance, restore, cool_down)| Params {
        avoidance,
        restore,
        cool_down: Duration::from_secs(cool_down),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn the_state_machine_matches_the_reference_model(history in history(), params in params()) {
        let plain = plain(&history);
        let expected: Vec<_> = (1..=plain.len()).map(|n| state(&plain[..n], params)).collect();
        prop_assert_eq!(states_of_engine(&history, params), expected);
    }
}

fn table(seen: &[Seen], params: Params) -> Vec<RuleState> {
    let at =
        |n: usize| BootTime::from_nanos(1_000_000_000_000) + PERIOD * u32::try_from(n).unwrap();
    let history: Vec<_> = seen.iter().enumerate().map(|(n, s)| (at(n), *s)).collect();
    states_of_engine(&history, params)
}

const PARAMS: Params = Params {
    avoidance: 2,
    restore: 2,
    cool_down: Duration::from_secs(30),
};
use RuleState::{Breached as B, Cooling as C, Normal as N};

#[test]
fn breaches_must_be_consecutive() {
    let seen = [Breach, Quiet, Breach, Quiet, Breach, Breach];
    assert_eq!(table(&seen, PARAMS), [N, N, N, N, N, B]);
}

#[test]
fn no_counter_changes_between_the_thresholds() {
    let seen = [Breach, Between, Breach, Quiet, Between, Quiet, Between];
    assert_eq!(table(&seen, PARAMS), [N, N, B, B, B, N, N]);
}

#[test]
fn a_repeated_sample_counts_once() {
    let seen = [Breach, Again, Again, Breach, Quiet, Again, Quiet, Between];
    assert_eq!(table(&seen, PARAMS), [N, N, N, B, B, B, N, N]);
}

#[test]
fn a_breach_resets_the_quiet_count() {
    let seen = [Breach, Breach, Quiet, Breach, Quiet, Quiet, Quiet];
    assert_eq!(table(&seen, PARAMS), [N, B, B, B, B, C, N]);
}

#[test]
fn one_breach_while_cooling_returns_to_breached() {
    let seen = [Breach, Breach, Quiet, Quiet, Breach, Quiet, Quiet, Quiet];
    assert_eq!(table(&seen, PARAMS), [N, B, B, C, B, B, C, N]);
}

#[test]
fn the_cool_down_starts_at_the_last_breach_and_ends_on_a_known_value() {
    let seen = [Breach, Breach, Quiet, Quiet, Unknown, Unknown, Between];
    assert_eq!(table(&seen, PARAMS), [N, B, B, C, C, C, N]);
}

#[test]
fn unknown_freezes_the_state_until_it_lasts_too_long() {
    let mut seen = vec![Breach, Unknown, Breach];
    seen.extend([Unknown; 7]);
    assert_eq!(table(&seen, PARAMS), [N, N, B, B, B, B, B, B, B, N]);
}
