use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::crd::eviction::Target;
use crate::engine::metric::Metric;
use crate::engine::plan::Transition;
use crate::engine::policy::{Action, CpuThrottle, Strategy};
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};
use crate::node::actuate::evict_api::{Refusal, Request};

fn policy() -> PolicySet {
    let action = Action {
        name: "calm".to_owned(),
        cool_down: Duration::from_mins(5),
        scheduling: Some(TaintEffect::NoSchedule),
        throttle: Some(CpuThrottle {
            min_ratio: 10,
            step: 30,
            idle: false,
        }),
        force_gc: false,
        eviction: None,
    };
    let rule = Rule {
        id: RuleId::from("q/r"),
        metric: Metric::CpuUsage,
        series: None,
        watermark: 4000.0,
        restore: 4000.0,
        avoidance_threshold: 1,
        restore_threshold: 1,
        period: Duration::from_secs(10),
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
    };
    PolicySet {
        rules: vec![rule],
        pods: Vec::new(),
    }
}

fn report() -> RuleReport {
    RuleReport {
        id: RuleId::from("q/r"),
        strategy: Strategy::Enforce,
        state: RuleState::Breached,
        since: None,
        value: Some(7200.0),
        watermark: 4000.0,
        restore: 4000.0,
        breaches: 0,
        quiets: 0,
        guard: None,
        cool_down: std::time::Duration::ZERO,
        unknown: None,
    }
}

fn decision(would: bool, change: Change) -> Event {
    let pod_name = change.pod().map(|uid| format!("batch/{uid}"));
    Event::Decision(Decision {
        transition: Transition {
            at: BootTime::default(),
            rule: RuleId::from("q/r"),
            would,
            change,
        },
        metric: Some("cpu_total_usage".to_owned()),
        pod_name,
    })
}

fn throttle(pod: &str, from: u8, to: u8) -> Change {
    Change::Throttle {
        pod: PodUid::from(pod),
        from,
        to,
        idle: false,
        quota: match to {
            100 => Quota::Unlimited,
            to => Quota::Limit(MilliCpu(10 * u64::from(to))),
        },
        release: MilliCpu(0),
    }
}

fn state(from: RuleState, to: RuleState) -> Change {
    Change::State {
        from,
        to,
        value: Some(7200.0),
        watermark: 4000.0,
        unknown_too_long: false,
    }
}

/// What is told of these changes, one tick each, as `reason about: message`.
fn told(teller: &mut Teller, would: bool, changes: Vec<Change>) -> Vec<String> {
    let (policy, reports) = (policy(), [report()]);
    let facts = Facts {
        policy: &policy,
        reports: &reports,
    };
    let mut notes = Vec::new();
    for change in changes {
        teller.hear(&[decision(would, change)], facts, &mut notes);
    }
    notes.iter().map(line).collect()
}

fn line(note: &Note) -> String {
    let about = match &note.about {
        About::Node => "node".to_owned(),
        About::Watermark => "nwm".to_owned(),
        About::Pod {
            namespace, name, ..
        } => format!("{namespace}/{name}"),
    };
    format!("{} {about}: {}", note.reason, note.message)
}

#[test]
fn a_rule_is_told_with_value_and_mark_in_units_that_people_read() {
    let lines = told(
        &mut Teller::default(),
        false,
        vec![
            state(RuleState::Normal, RuleState::Breached),
            state(RuleState::Breached, RuleState::Cooling),
            state(RuleState::Cooling, RuleState::Normal),
        ],
    );
    assert_eq!(
        lines,
        [
            "RuleBreached node: q/r: cpu_total_usage 7200m is above its mark 4000m; action calm",
            "RuleCooling node: q/r: cpu_total_usage 7200m, mark 4000m: what is in force is held for 5m after the last breach",
            "RuleEnded node: q/r: cpu_total_usage 7200m, mark 4000m: what is in force is undone",
        ]
    );
}

#[test]
fn a_pod_that_is_gone_is_forgotten_while_its_rule_stays_breached() {
    let mut teller = Teller::default();
    for number in 0..1000 {
        for would in [false, true] {
            told(
                &mut teller,
                would,
                vec![throttle(&format!("p{number}"), 100, 70)],
            );
        }
        teller.forget(|uid| *uid.0 == *format!("p{number}"));
    }
    assert_eq!(teller.throttles.count(), 2);
    // Of one that is there the beginning is still known.
    let again = told(&mut teller, false, vec![throttle("p999", 70, 40)]);
    assert_eq!(again, [""; 0]);
}

#[test]
fn of_a_throttle_the_beginning_the_floor_and_the_end_are_told_once() {
    let steps = vec![
        throttle("a", 100, 70),
        throttle("a", 70, 40),
        throttle("a", 40, 10),
        throttle("a", 10, 40),
        throttle("a", 40, 10),
        throttle("a", 10, 70),
        throttle("a", 70, 100),
    ];
    let lines = told(&mut Teller::default(), false, steps);
    assert_eq!(
        lines,
        [
            "PodThrottled batch/a: q/r: cpu_total_usage 7200m, mark 4000m; CPU at most 700m from now on (70 %)",
            "PodAtThrottleFloor batch/a: q/r: cpu_total_usage 7200m, mark 4000m; CPU at most 100m from now on (10 %), the lowest",
            "PodRestored batch/a: q/r: cpu_total_usage 7200m, mark 4000m; it has its own CPU limit again",
        ]
    );
}

#[test]
fn a_preview_says_what_the_rule_would_do_with_the_same_words() {
    let steps = || {
        vec![
            throttle("a", 100, 70),
            throttle("a", 70, 10),
            throttle("a", 10, 100),
        ]
    };
    let done = told(&mut Teller::default(), false, steps());
    let would = told(&mut Teller::default(), true, steps());
    let rest = |lines: &[String]| -> Vec<String> {
        let rest = lines
            .iter()
            .map(|line| line.split_once(' ').expect("a reason").1);
        rest.map(str::to_owned).collect()
    };
    assert_eq!(rest(&done), rest(&would));
    assert!(
        would.iter().all(|line| line.starts_with("Would")),
        "{would:?}"
    );
    let closing = vec![
        Change::SchedulingDisabled {
            effect: TaintEffect::NoSchedule,
        },
        Change::SchedulingEnabled,
    ];
    let would = told(&mut Teller::default(), true, closing.clone());
    assert!(
        would[0].starts_with("WouldDisableScheduling node: "),
        "{would:?}"
    );
    assert_eq!(
        told(&mut Teller::default(), false, closing),
        [] as [&str; 0]
    );
}

#[test]
fn a_pod_that_another_rule_still_holds_is_not_told_to_be_free() {
    let of = |rule: &str, from, to| {
        let Event::Decision(mut decision) = decision(false, throttle("a", from, to)) else {
            panic!("a decision")
        };
        decision.transition.rule = RuleId::from(rule);
        Event::Decision(decision)
    };
    let (policy, reports) = (policy(), [report()]);
    let facts = Facts {
        policy: &policy,
        reports: &reports,
    };
    let mut teller = Teller::default();
    let mut notes = Vec::new();
    teller.hear(&[of("q/r", 100, 70), of("q/s", 100, 70)], facts, &mut notes);
    notes.clear();
    teller.hear(&[of("q/r", 70, 100)], facts, &mut notes);
    assert_eq!(notes, []);
    teller.hear(&[of("q/s", 70, 100)], facts, &mut notes);
    assert_eq!(notes[0].reason, "PodRestored");
}

#[test]
fn a_pod_that_went_away_throttled_is_not_remembered_when_the_rule_begins_anew() {
    let mut teller = Teller::default();
    told(
        &mut teller,
        false,
        vec![throttle("gone", 100, 70), throttle("other", 100, 70)],
    );
    told(&mut teller, true, vec![throttle("gone", 100, 70)]);
    told(
        &mut teller,
        false,
        vec![state(RuleState::Normal, RuleState::Breached)],
    );
    let again = told(&mut teller, false, vec![throttle("other", 100, 70)]);
    assert!(
        again[0].starts_with("PodThrottled batch/other"),
        "{again:?}"
    );
    let preview = told(&mut teller, true, vec![throttle("gone", 70, 40)]);
    assert_eq!(preview, [] as [&str; 0], "the preview has not begun anew");
}

fn outcome(fate: Fate) -> Outcome {
    let target = Target {
        namespace: "batch".to_owned(),
        name: "a".to_owned(),
        uid: "a".to_owned(),
    };
    Outcome {
        request: Request {
            target,
            rule: RuleId::from("q/r"),
            grace: Duration::from_secs(30),
            expires: BootTime::default(),
        },
        at: BootTime::default(),
        fate,
    }
}

#[test]
fn an_eviction_is_told_when_it_is_accepted_and_a_refusal_names_its_reason() {
    let evict = || Change::Evict {
        pod: PodUid::from("a"),
        grace: Duration::from_secs(30),
        release: Some(450),
    };
    let mut teller = Teller::default();
    assert_eq!(told(&mut teller, false, vec![evict()]), [] as [&str; 0]);
    let mut notes = Vec::new();
    teller.outcome(&outcome(Fate::Accepted), &mut notes);
    let lines: Vec<String> = notes.iter().map(line).collect();
    let words = "q/r: cpu_total_usage 7200m, mark 4000m; grace 30s, to release 450m";
    assert_eq!(lines, [format!("PodEvicted batch/a: {words}")]);
    let would = told(&mut Teller::default(), true, vec![evict()]);
    assert_eq!(would, [format!("WouldEvict batch/a: {words}")]);
    notes.clear();
    let why =
        Refusal::Budget("The disruption budget web needs 2 healthy pods and has 2".to_owned());
    let until = BootTime::default();
    teller.outcome(&outcome(Fate::Refused { until, why }), &mut notes);
    let lines: Vec<String> = notes.iter().map(line).collect();
    let words = "q/r: The disruption budget web needs 2 healthy pods and has 2";
    assert_eq!(lines, [format!("EvictionRefused batch/a: {words}")]);
    notes.clear();
    let why = Refusal::Unanswered("timed out".to_owned());
    teller.outcome(&outcome(Fate::Refused { until, why }), &mut notes);
    assert_eq!(notes.len(), 1, "{notes:?}");
    notes.clear();
    let why = Refusal::Away("timed out".to_owned());
    let away = outcome(Fate::Refused { until, why });
    teller.outcome(&away, &mut notes);
    assert_eq!(notes, [], "no pod is to be blamed");
    assert_eq!(
        line(&held_up(&away)),
        "EvictionRefused nwm: q/r: no pod is evicted: the API server can't be reached: timed out"
    );
}

#[test]
fn the_taint_is_told_when_it_stands_and_not_again_by_a_new_process() {
    let standing = |effect| Standing {
        known: true,
        effect,
        ..Standing::default()
    };
    let closed = Some(TaintEffect::NoSchedule);
    let mut teller = Teller::default();
    let mut notes = Vec::new();
    teller.stands(&Standing::default(), "", &mut notes);
    teller.stands(&standing(closed), "q/r: why", &mut notes);
    assert_eq!(notes, [], "an earlier process told that");
    teller.stands(&standing(None), "", &mut notes);
    teller.stands(&standing(closed), "q/r: why", &mut notes);
    let lines: Vec<String> = notes.iter().map(line).collect();
    assert_eq!(
        lines,
        [
            "SchedulingEnabled node: no rule keeps new pods away any more: our taint is gone",
            "SchedulingDisabled node: q/r: why; taint interference.crane.io:NoSchedule",
        ]
    );
}

fn adopted(pod: &str, ratio: u8) -> Teller {
    let record = json!({
        "uid": pod, "cgroup": "kubepods/pod1", "lever": "", "inode": 7, "file": "cpu.max",
        "original": "max 100000", "previous": "max 100000", "ours": "60000 100000", "base": 1000, "ratio": ratio,
        "idle": false, "rule": "q/r", "deadline": 0,
    });
    let record = serde_json::from_value(record).expect("a record");
    let mut teller = Teller::default();
    teller.adopt(std::iter::once(record), &policy());
    teller
}

#[test]
fn what_an_earlier_process_throttled_and_told_is_not_told_anew() {
    let steps = vec![throttle("a", 60, 70), throttle("a", 70, 40)];
    assert_eq!(told(&mut adopted("a", 60), false, steps), [""; 0]);
    let back = vec![throttle("a", 60, 100)];
    let lines = told(&mut adopted("a", 60), false, back);
    assert!(lines[0].starts_with("PodRestored batch/a"), "{lines:?}");
    // The floor is told once: by whoever reached it.
    let to_floor = vec![throttle("a", 40, 10)];
    let lines = told(&mut adopted("a", 40), false, to_floor.clone());
    assert!(lines[0].starts_with("PodAtThrottleFloor"), "{lines:?}");
    assert_eq!(told(&mut adopted("a", 10), false, to_floor), [""; 0]);
    // Of others it says what it always does.
    let lines = told(&mut adopted("a", 60), false, vec![throttle("b", 100, 70)]);
    assert!(lines[0].starts_with("PodThrottled batch/b"), "{lines:?}");
}
