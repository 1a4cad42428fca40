//! Obstacles that block all evictions of a rule: reported once, and shown until they are over. Each evaluation meets them
//! again with possibly different messages; the shown message changes only every few minutes.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::agent::eviction::{EvictionObstacle, EvictionOutcome, EvictionResult, WantedEviction};
use crate::crd::eviction::Delay;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;

/// An obstacle that was not met for this time after a possible retry is over: the rule wants no eviction any more.
const ENDS_AFTER: Duration = Duration::from_mins(5);
/// Lower bound of the period: an outcome takes a moment to arrive.
const MIN_PERIOD: Duration = Duration::from_secs(10);
/// A changed message is updated at most this often.
const MESSAGE_INTERVAL: Duration = Duration::from_mins(5);

/// When a refusal that lasts until `until` is over unless it is met again: by then the rule has been evaluated once more.
pub fn over_at(outcome: &EvictionOutcome, until: BootTime) -> BootTime {
    let WantedEviction { expires, .. } = outcome.request;
    let period = expires.since(outcome.at).max(MIN_PERIOD);
    expires.max(until).max(outcome.at) + period
}

/// All obstacles of the node.
#[derive(Debug, Default)]
pub struct Obstacles(BTreeMap<(RuleId, EvictionObstacle), Entry>);

#[derive(Debug)]
struct Entry {
    /// The message as of `at`.
    message: String,
    at: BootTime,
    /// Until when it is shown, unless it is met again.
    shown: BootTime,
    /// Until when it is remembered, so that it is reported once.
    ends: BootTime,
    /// It was reported. One that is usually transient is reported when it is met again.
    reported: bool,
}

impl Obstacles {
    /// Records an outcome; true if it met an obstacle that has to be reported now.
    pub fn record(&mut self, outcome: &EvictionOutcome) -> bool {
        let rule = &outcome.request.rule;
        match (&outcome.result, outcome.obstacle()) {
            (EvictionResult::Accepted, _) => self.retain(|known| known != rule),
            (EvictionResult::Refused { until, why }, Some(obstacle)) => {
                let ends = outcome.request.expires.max(*until).max(outcome.at) + ENDS_AFTER;
                // A budget says when it is free again; nothing else does.
                let shown = match obstacle {
                    EvictionObstacle::Wait(Delay::Budget) => over_at(outcome, *until),
                    _ => ends,
                };
                let met = Entry {
                    message: why.to_string(),
                    at: outcome.at,
                    shown,
                    ends,
                    reported: !obstacle.is_transient(),
                };
                return self.add((rule.clone(), obstacle), met);
            }
            _ => {}
        }
        false
    }

    fn add(&mut self, key: (RuleId, EvictionObstacle), new: Entry) -> bool {
        let now = new.at;
        self.0.retain(|_, met| now < met.ends);
        let Some(met) = self.0.get_mut(&key) else {
            let reported = new.reported;
            self.0.insert(key, new);
            return reported;
        };
        if now.since(met.at) >= MESSAGE_INTERVAL || now >= met.shown {
            (met.message, met.at) = (new.message, now);
        }
        (met.shown, met.ends) = (new.shown, new.ends);
        !std::mem::replace(&mut met.reported, true)
    }

    /// Keeps only those of the given rules.
    pub fn retain(&mut self, keep: impl Fn(&RuleId) -> bool) {
        self.0.retain(|(rule, _), _| keep(rule));
    }

    /// The rules that are blocked now, with the message.
    pub fn current(&self, now: BootTime) -> impl Iterator<Item = (&RuleId, &str)> {
        let reported = self
            .0
            .iter()
            .filter(move |(_, it)| it.reported && now < it.shown);
        reported.map(|((rule, _), met)| (rule, &*met.message))
    }

    /// When each stops being shown.
    pub fn ends(&self) -> impl Iterator<Item = BootTime> {
        self.0.values().map(|met| met.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::eviction::Refusal;
    use crate::crd::eviction::EvictionTarget;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    /// The outcome of an eviction by a rule that is evaluated every 10 s.
    fn outcome(seconds: u64, result: EvictionResult) -> EvictionOutcome {
        EvictionOutcome {
            request: WantedEviction {
                target: EvictionTarget {
                    namespace: "batch".to_owned(),
                    name: "a".to_owned(),
                    uid: "u".to_owned(),
                },
                rule: RuleId::from("q/r"),
                grace: Duration::from_secs(30),
                expires: at(seconds + 10),
            },
            at: at(seconds),
            result,
        }
    }

    fn refused(seconds: u64, wait: u64, why: Refusal) -> EvictionOutcome {
        let until = at(seconds + wait);
        outcome(seconds, EvictionResult::Refused { until, why })
    }

    fn leader_is_unreachable(why: &str) -> Refusal {
        Refusal::Wait {
            wait: Duration::from_secs(10),
            by: Delay::Leader,
            why: why.to_owned(),
        }
    }

    fn reported(obstacles: &Obstacles, seconds: u64) -> Vec<&str> {
        obstacles
            .current(at(seconds))
            .map(|(_, message)| message)
            .collect()
    }

    #[test]
    fn an_obstacle_is_reported_once_and_shown_until_an_eviction_is_accepted() {
        let mut obstacles = Obstacles::default();
        assert!(obstacles.record(&refused(100, 10, leader_is_unreachable("refused"))));
        for seconds in (110..400).step_by(10) {
            assert!(!obstacles.record(&refused(seconds, 10, leader_is_unreachable("timed out"))));
            assert_eq!(reported(&obstacles, seconds), ["refused"]);
        }
        assert!(!obstacles.record(&refused(400, 10, leader_is_unreachable("timed out"))));
        assert_eq!(
            reported(&obstacles, 400),
            ["timed out"],
            "after five minutes"
        );
        assert!(!obstacles.record(&outcome(410, EvictionResult::Accepted)));
        assert_eq!(reported(&obstacles, 410), [""; 0]);
        assert!(obstacles.record(&refused(420, 10, leader_is_unreachable("refused"))));
    }

    #[test]
    fn two_alternating_obstacles_are_each_reported_once() {
        let mut obstacles = Obstacles::default();
        let spent = || Refusal::Wait {
            wait: Duration::from_secs(5),
            by: Delay::Budget,
            why: "spent".to_owned(),
        };
        let is_new = |obstacles: &mut Obstacles, seconds| {
            let first = obstacles.record(&refused(seconds, 10, leader_is_unreachable("down")));
            (first, obstacles.record(&refused(seconds + 10, 5, spent())))
        };
        assert_eq!(is_new(&mut obstacles, 100), (true, true));
        assert_eq!(is_new(&mut obstacles, 120), (false, false));
        assert_eq!(reported(&obstacles, 130), ["down", "spent"]);
    }

    #[test]
    fn a_budget_is_shown_until_it_is_free_and_no_longer_requested() {
        let mut obstacles = Obstacles::default();
        let spent = |why: &str| Refusal::Wait {
            wait: Duration::from_mins(1),
            by: Delay::Budget,
            why: why.to_owned(),
        };
        assert!(obstacles.record(&refused(100, 60, spent("1 of 1"))));
        assert_eq!(reported(&obstacles, 169), ["1 of 1"]);
        assert_eq!(obstacles.ends().collect::<Vec<_>>(), [at(170)]);
        assert_eq!(
            reported(&obstacles, 170),
            [""; 0],
            "free at 160, evaluated by 170"
        );
        assert!(
            !obstacles.record(&refused(200, 60, spent("2 of 2"))),
            "already reported"
        );
        assert_eq!(reported(&obstacles, 200), ["2 of 2"]);
    }

    #[test]
    fn a_usually_transient_obstacle_is_reported_when_it_stays() {
        let mut obstacles = Obstacles::default();
        let open = || Refusal::NotTainted("it was not seen there in time".to_owned());
        assert!(!obstacles.record(&refused(100, 0, open())));
        assert_eq!(reported(&obstacles, 100), [""; 0]);
        assert!(obstacles.record(&refused(110, 0, open())));
        assert!(!obstacles.record(&refused(120, 0, open())));
        assert_eq!(reported(&obstacles, 120).len(), 1);
        let away = Refusal::ApiServerUnreachable("timed out".to_owned());
        assert!(obstacles.record(&refused(130, 0, away)));
        let about_the_pod = Refusal::Budget("web needs 2".to_owned());
        assert!(!obstacles.record(&refused(140, 10, about_the_pod)));
        assert_eq!(reported(&obstacles, 140).len(), 2);
    }

    #[test]
    fn an_obstacle_ends_after_minutes_or_with_its_rule() {
        let mut obstacles = Obstacles::default();
        obstacles.record(&refused(100, 60, leader_is_unreachable("down")));
        assert_eq!(obstacles.ends().collect::<Vec<_>>(), [at(100 + 60 + 300)]);
        assert_eq!(reported(&obstacles, 459), ["down"]);
        assert_eq!(reported(&obstacles, 460), [""; 0]);
        assert!(
            obstacles.record(&refused(500, 0, leader_is_unreachable("down"))),
            "it starts again"
        );
        obstacles.retain(|rule| *rule != RuleId::from("q/r"));
        assert_eq!(reported(&obstacles, 500), [""; 0]);
    }
}
