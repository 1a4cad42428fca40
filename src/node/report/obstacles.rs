//! What keeps rules from evicting any pod of the node: told when it is met, and shown until it is over. It is met anew
//! with each evaluation, in words that may differ, and what is shown stays the same for minutes all the same.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::crd::eviction::Delay;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;
use crate::node::actuate::evict_api::{Fate, Obstacle, Outcome, Request};

/// It is over where it was not met for so long after an eviction could be tried again: the rule wants none any more.
const OVER: Duration = Duration::from_mins(5);
/// An outcome takes a moment to arrive, however short the rule's period is.
const MIN_PERIOD: Duration = Duration::from_secs(10);
/// Words that change are brought up to date no more often than this.
const REWORD: Duration = Duration::from_mins(5);

/// When a refusal that holds until `until` is over, unless it is met again before: the rule has been evaluated once more by
/// then, and wants no eviction any more.
pub fn over_at(outcome: &Outcome, until: BootTime) -> BootTime {
    let Request { expires, .. } = outcome.request;
    let period = expires.since(outcome.at).max(MIN_PERIOD);
    expires.max(until).max(outcome.at) + period
}

/// All of them.
#[derive(Debug, Default)]
pub struct Obstacles(BTreeMap<(RuleId, Obstacle), Met>);

#[derive(Debug)]
struct Met {
    /// As it was met `at`.
    words: String,
    at: BootTime,
    /// Until when it is shown, if it is not met before.
    shown: BootTime,
    /// Until when it is known, so that it is told once.
    ends: BootTime,
    /// One that mostly passes is told where it is met again.
    told: bool,
}

impl Obstacles {
    /// Takes in what came of an eviction; whether it met something that is to be told now.
    pub fn hear(&mut self, outcome: &Outcome) -> bool {
        let rule = &outcome.request.rule;
        match (&outcome.fate, outcome.obstacle()) {
            (Fate::Accepted, _) => self.retain(|known| known != rule),
            (Fate::Refused { until, why }, Some(obstacle)) => {
                let ends = outcome.request.expires.max(*until).max(outcome.at) + OVER;
                // A budget says when it is free again; nothing else does.
                let shown = match obstacle {
                    Obstacle::Wait(Delay::Budget) => over_at(outcome, *until),
                    _ => ends,
                };
                let met = Met {
                    words: why.to_string(),
                    at: outcome.at,
                    shown,
                    ends,
                    told: !obstacle.is_passing(),
                };
                return self.meet((rule.clone(), obstacle), met);
            }
            _ => {}
        }
        false
    }

    fn meet(&mut self, key: (RuleId, Obstacle), new: Met) -> bool {
        let now = new.at;
        self.0.retain(|_, met| now < met.ends);
        let Some(met) = self.0.get_mut(&key) else {
            let told = new.told;
            self.0.insert(key, new);
            return told;
        };
        if now.since(met.at) >= REWORD || now >= met.shown {
            (met.words, met.at) = (new.words, now);
        }
        (met.shown, met.ends) = (new.shown, new.ends);
        !std::mem::replace(&mut met.told, true)
    }

    /// Forgets those of other rules.
    pub fn retain(&mut self, is_kept: impl Fn(&RuleId) -> bool) {
        self.0.retain(|(rule, _), _| is_kept(rule));
    }

    /// What keeps which rule from evicting now, in words.
    pub fn told(&self, now: BootTime) -> impl Iterator<Item = (&RuleId, &str)> {
        let told = self
            .0
            .iter()
            .filter(move |(_, it)| it.told && now < it.shown);
        told.map(|((rule, _), met)| (rule, &*met.words))
    }

    /// When each is over by the passing of time.
    pub fn ends(&self) -> impl Iterator<Item = BootTime> {
        self.0.values().map(|met| met.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::eviction::Target;
    use crate::node::actuate::evict_api::Refusal;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    /// What came of an eviction so long after boot, by a rule that is evaluated every 10 s.
    fn outcome(seconds: u64, fate: Fate) -> Outcome {
        Outcome {
            request: Request {
                target: Target {
                    namespace: "batch".to_owned(),
                    name: "a".to_owned(),
                    uid: "u".to_owned(),
                },
                rule: RuleId::from("q/r"),
                grace: Duration::from_secs(30),
                expires: at(seconds + 10),
            },
            at: at(seconds),
            fate,
        }
    }

    fn refused(seconds: u64, wait: u64, why: Refusal) -> Outcome {
        let until = at(seconds + wait);
        outcome(seconds, Fate::Refused { until, why })
    }

    fn leader_is_away(why: &str) -> Refusal {
        Refusal::Wait {
            wait: Duration::from_secs(10),
            by: Delay::Leader,
            why: why.to_owned(),
        }
    }

    fn told(obstacles: &Obstacles, seconds: u64) -> Vec<&str> {
        obstacles
            .told(at(seconds))
            .map(|(_, words)| words)
            .collect()
    }

    #[test]
    fn what_goes_on_is_told_once_and_shown_in_the_same_words_until_an_eviction_is_accepted() {
        let mut obstacles = Obstacles::default();
        assert!(obstacles.hear(&refused(100, 10, leader_is_away("refused"))));
        for seconds in (110..400).step_by(10) {
            assert!(!obstacles.hear(&refused(seconds, 10, leader_is_away("timed out"))));
            assert_eq!(told(&obstacles, seconds), ["refused"]);
        }
        assert!(!obstacles.hear(&refused(400, 10, leader_is_away("timed out"))));
        assert_eq!(told(&obstacles, 400), ["timed out"], "after five minutes");
        assert!(!obstacles.hear(&outcome(410, Fate::Accepted)));
        assert_eq!(told(&obstacles, 410), [""; 0]);
        assert!(obstacles.hear(&refused(420, 10, leader_is_away("refused"))));
    }

    #[test]
    fn two_that_take_turns_are_each_told_once() {
        let mut obstacles = Obstacles::default();
        let spent = || Refusal::Wait {
            wait: Duration::from_secs(5),
            by: Delay::Budget,
            why: "spent".to_owned(),
        };
        let news = |obstacles: &mut Obstacles, seconds| {
            let first = obstacles.hear(&refused(seconds, 10, leader_is_away("down")));
            (first, obstacles.hear(&refused(seconds + 10, 5, spent())))
        };
        assert_eq!(news(&mut obstacles, 100), (true, true));
        assert_eq!(news(&mut obstacles, 120), (false, false));
        assert_eq!(told(&obstacles, 130), ["down", "spent"]);
    }

    #[test]
    fn a_budget_is_shown_until_it_is_free_and_the_rule_has_not_asked_again() {
        let mut obstacles = Obstacles::default();
        let spent = |why: &str| Refusal::Wait {
            wait: Duration::from_mins(1),
            by: Delay::Budget,
            why: why.to_owned(),
        };
        assert!(obstacles.hear(&refused(100, 60, spent("1 of 1"))));
        assert_eq!(told(&obstacles, 169), ["1 of 1"]);
        assert_eq!(obstacles.ends().collect::<Vec<_>>(), [at(170)]);
        assert_eq!(
            told(&obstacles, 170),
            [""; 0],
            "free at 160, evaluated by 170"
        );
        assert!(!obstacles.hear(&refused(200, 60, spent("2 of 2"))), "told");
        assert_eq!(told(&obstacles, 200), ["2 of 2"]);
    }

    #[test]
    fn what_mostly_passes_by_itself_is_told_where_it_does_not() {
        let mut obstacles = Obstacles::default();
        let open = || Refusal::Open("it was not seen there in time".to_owned());
        assert!(!obstacles.hear(&refused(100, 0, open())));
        assert_eq!(told(&obstacles, 100), [""; 0]);
        assert!(obstacles.hear(&refused(110, 0, open())));
        assert!(!obstacles.hear(&refused(120, 0, open())));
        assert_eq!(told(&obstacles, 120).len(), 1);
        let away = Refusal::Away("timed out".to_owned());
        assert!(obstacles.hear(&refused(130, 0, away)));
        let about_the_pod = Refusal::Budget("web needs 2".to_owned());
        assert!(!obstacles.hear(&refused(140, 10, about_the_pod)));
        assert_eq!(told(&obstacles, 140).len(), 2);
    }

    #[test]
    fn what_is_met_no_more_is_over_after_minutes_and_with_its_rule() {
        let mut obstacles = Obstacles::default();
        obstacles.hear(&refused(100, 60, leader_is_away("down")));
        assert_eq!(obstacles.ends().collect::<Vec<_>>(), [at(100 + 60 + 300)]);
        assert_eq!(told(&obstacles, 459), ["down"]);
        assert_eq!(told(&obstacles, 460), [""; 0]);
        assert!(
            obstacles.hear(&refused(500, 0, leader_is_away("down"))),
            "it begins anew"
        );
        obstacles.retain(|rule| *rule != RuleId::from("q/r"));
        assert_eq!(told(&obstacles, 500), [""; 0]);
    }
}
