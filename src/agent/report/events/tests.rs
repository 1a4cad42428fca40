use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::*;
use crate::agent::eviction::{Refusal, WantedEviction};
use crate::crd::eviction::EvictionTarget;
use crate::engine::metric::Metric;
use crate::engine::plan::Transition;
use crate::engine::policy::{Action, CpuThrottle, Strategy};
use crate::engine::time::BootTime;
use crate::engine::units::{MilliCpu, Quota};

fn policy() -> PolicySet {
    let action = Action {
        name: "slow".to_owned(),
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
        threshold: 4000.0,
        restore_value: 4000.0,
        avoidance_threshold: 1,
        restore_threshold: 1,
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
        active_during: Vec::new(),
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
        outside_hours: false,
        state: RuleState::Breached,
        since: None,
        value: Some(7200.0),
        threshold: 4000.0,
        restore_value: 4000.0,
        breaches: 0,
        quiet_evaluations: 0,
        limited: false,
        rung: None,
        next_rung: None,
        evictions_ended: false,
        earliest_eviction: None,
        cool_down: std::time::Duration::ZERO,
        would: None,
        unknown: None,
    }
}

#[test]
fn an_unsafe_idle_class_is_one_event() {
    let mut builder = EventBuilder::default();
    let mut out = Vec::new();
    for idle_unsafe in [false, true, true] {
        builder.idle_class(idle_unsafe, &mut out);
    }
    let [event] = &out[..] else {
        panic!("{out:?}");
    };
    assert_eq!((&event.regarding, event.warning), (&Regarding::Node, true));
    assert_eq!(event.reason, "IdleUnsafe");
    builder.idle_class(false, &mut out);
    builder.idle_class(true, &mut out);
    assert_eq!(out.len(), 2);
}

#[test]
fn too_much_batch_weight_is_one_event() {
    let mut builder = EventBuilder::default();
    let mut out = Vec::new();
    for high in [false, true, true, false] {
        builder.batch_weight(high, &mut out);
    }
    let [event] = &out[..] else {
        panic!("{out:?}");
    };
    assert_eq!((&event.regarding, event.warning), (&Regarding::Node, true));
    assert_eq!(event.reason, "BatchWeightHigh");
    builder.batch_weight(true, &mut out);
    assert_eq!(out.len(), 2);
}

fn decision(would: bool, change: PlanChange) -> Event {
    let pod_name = change.pod().map(|uid| format!("batch/{uid}"));
    Event::Decision(NamedDecision {
        cause: None,
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

fn throttle(pod: &str, from: u8, to: u8) -> PlanChange {
    PlanChange::Throttle {
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

fn state(from: RuleState, to: RuleState) -> PlanChange {
    PlanChange::State {
        from,
        to,
        value: Some(7200.0),
        threshold: 4000.0,
        unknown_too_long: false,
    }
}

/// The events of these changes, one tick each, as `reason object: message`.
fn reported(builder: &mut EventBuilder, would: bool, changes: Vec<PlanChange>) -> Vec<String> {
    let (policy, reports) = (policy(), [report()]);
    let facts = MessageFacts {
        policy: &policy,
        reports: &reports,
    };
    let mut events = Vec::new();
    for change in changes {
        builder.record(&[decision(would, change)], facts, &mut events);
    }
    events.iter().map(line).collect()
}

#[test]
fn the_end_of_the_hours_is_only_an_event_if_it_ends_something() {
    let (policy, mut report) = (policy(), report());
    report.outside_hours = true;
    let reports = [report];
    let facts = MessageFacts {
        policy: &policy,
        reports: &reports,
    };
    let mut builder = EventBuilder::default();
    let unknown = PlanChange::Unknown {
        reason: Unknown::Stale,
    };
    let mut record = |change| {
        let mut events = Vec::new();
        builder.record(&[decision(false, change)], facts, &mut events);
        events.iter().map(line).collect::<Vec<_>>()
    };
    assert_eq!(record(PlanChange::OutsideHours), [""; 0]);
    assert_eq!(
        record(state(RuleState::Breached, RuleState::Normal)),
        ["RuleEnded node: q/r: outside its hours: what the rule did is being restored"]
    );
    assert_eq!(record(PlanChange::WithinHours), [""; 0]);
    // What was unknown before is reported again in the next hours.
    assert_eq!(record(unknown.clone()).len(), 1);
    assert_eq!(record(unknown.clone()).len(), 0);
    record(PlanChange::OutsideHours);
    assert_eq!(record(unknown).len(), 1);
}

fn line(event: &NewEvent) -> String {
    let regarding = match &event.regarding {
        Regarding::Node => "node".to_owned(),
        Regarding::Watermark => "nwm".to_owned(),
        Regarding::Pod {
            namespace, name, ..
        } => format!("{namespace}/{name}"),
    };
    format!("{} {regarding}: {}", event.reason, event.message)
}

#[test]
fn a_rule_event_has_value_and_threshold_in_readable_units() {
    let lines = reported(
        &mut EventBuilder::default(),
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
            "RuleBreached node: q/r: cpu_total_usage 7200m is above its threshold 4000m; action slow",
            "RuleCooling node: q/r: cpu_total_usage 7200m, threshold 4000m: actions stay in force for 5m after the last breach",
            "RuleEnded node: q/r: cpu_total_usage 7200m, threshold 4000m: what the rule did is being restored",
        ]
    );
}

#[test]
fn a_deleted_pod_is_forgotten_while_its_rule_stays_breached() {
    let mut builder = EventBuilder::default();
    for number in 0..1000 {
        for would in [false, true] {
            reported(
                &mut builder,
                would,
                vec![throttle(&format!("p{number}"), 100, 70)],
            );
        }
        builder.forget(|uid| *uid.0 == *format!("p{number}"));
    }
    assert_eq!(builder.throttles.count(), 2);
    // For an existing pod the start is still known.
    let again = reported(&mut builder, false, vec![throttle("p999", 70, 40)]);
    assert_eq!(again, [""; 0]);
}

#[test]
fn a_throttle_reports_start_floor_and_end_once() {
    let steps = vec![
        throttle("a", 100, 70),
        throttle("a", 70, 40),
        throttle("a", 40, 10),
        throttle("a", 10, 40),
        throttle("a", 40, 10),
        throttle("a", 10, 70),
        throttle("a", 70, 100),
    ];
    let lines = reported(&mut EventBuilder::default(), false, steps);
    assert_eq!(
        lines,
        [
            "PodThrottled batch/a: q/r: cpu_total_usage 7200m, threshold 4000m; CPU limit 700m (70 %)",
            "PodAtThrottleFloor batch/a: q/r: cpu_total_usage 7200m, threshold 4000m; CPU limit 100m (10 %), its floor",
            "PodRestored batch/a: q/r: cpu_total_usage 7200m, threshold 4000m; its CPU limit is restored",
        ]
    );
}

#[test]
fn a_preview_has_the_same_messages_as_the_enforced_rule() {
    let steps = || {
        vec![
            throttle("a", 100, 70),
            throttle("a", 70, 10),
            throttle("a", 10, 100),
        ]
    };
    let done = reported(&mut EventBuilder::default(), false, steps());
    let would = reported(&mut EventBuilder::default(), true, steps());
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
        PlanChange::SchedulingDisabled {
            effect: TaintEffect::NoSchedule,
        },
        PlanChange::SchedulingEnabled,
    ];
    let would = reported(&mut EventBuilder::default(), true, closing.clone());
    assert!(
        would[0].starts_with("WouldDisableScheduling node: "),
        "{would:?}"
    );
    assert_eq!(
        reported(&mut EventBuilder::default(), false, closing),
        [] as [&str; 0]
    );
}

#[test]
fn a_pod_throttled_by_another_rule_is_not_reported_as_restored() {
    let of = |rule: &str, from, to| {
        let Event::Decision(mut decision) = decision(false, throttle("a", from, to)) else {
            panic!("a decision")
        };
        decision.transition.rule = RuleId::from(rule);
        Event::Decision(decision)
    };
    let (policy, reports) = (policy(), [report()]);
    let facts = MessageFacts {
        policy: &policy,
        reports: &reports,
    };
    let mut builder = EventBuilder::default();
    let mut events = Vec::new();
    builder.record(
        &[of("q/r", 100, 70), of("q/s", 100, 70)],
        facts,
        &mut events,
    );
    events.clear();
    builder.record(&[of("q/r", 70, 100)], facts, &mut events);
    assert_eq!(events, []);
    builder.record(&[of("q/s", 70, 100)], facts, &mut events);
    assert_eq!(events[0].reason, "PodRestored");
}

#[test]
fn a_throttled_pod_that_is_deleted_is_forgotten_at_the_next_breach() {
    let mut builder = EventBuilder::default();
    reported(
        &mut builder,
        false,
        vec![throttle("gone", 100, 70), throttle("other", 100, 70)],
    );
    reported(&mut builder, true, vec![throttle("gone", 100, 70)]);
    reported(
        &mut builder,
        false,
        vec![state(RuleState::Normal, RuleState::Breached)],
    );
    let again = reported(&mut builder, false, vec![throttle("other", 100, 70)]);
    assert!(
        again[0].starts_with("PodThrottled batch/other"),
        "{again:?}"
    );
    let preview = reported(&mut builder, true, vec![throttle("gone", 70, 40)]);
    assert_eq!(
        preview,
        [] as [&str; 0],
        "the preview is not breached again"
    );
}

fn outcome(result: EvictionResult) -> EvictionOutcome {
    let target = EvictionTarget {
        namespace: "batch".to_owned(),
        name: "a".to_owned(),
        uid: "a".to_owned(),
    };
    EvictionOutcome {
        request: WantedEviction {
            target,
            rule: RuleId::from("q/r"),
            grace: Duration::from_secs(30),
            expires: BootTime::default(),
        },
        at: BootTime::default(),
        result,
    }
}

#[test]
fn an_eviction_is_reported_when_accepted_or_refused() {
    let evict = || PlanChange::Evict {
        pod: PodUid::from("a"),
        grace: Duration::from_secs(30),
        release: Some(450),
        urgent: false,
    };
    let mut builder = EventBuilder::default();
    assert_eq!(
        reported(&mut builder, false, vec![evict()]),
        [] as [&str; 0]
    );
    let mut events = Vec::new();
    builder.outcome(&outcome(EvictionResult::Accepted), &mut events);
    let lines: Vec<String> = events.iter().map(line).collect();
    let message = "q/r: cpu_total_usage 7200m, threshold 4000m; grace 30s, to release 450m";
    assert_eq!(lines, [format!("PodEvicted batch/a: {message}")]);
    let would = reported(&mut EventBuilder::default(), true, vec![evict()]);
    assert_eq!(would, [format!("WouldEvict batch/a: {message}")]);
    events.clear();
    let why =
        Refusal::Budget("The disruption budget web needs 2 healthy pods and has 2".to_owned());
    let until = BootTime::default();
    builder.outcome(
        &outcome(EvictionResult::Refused { until, why }),
        &mut events,
    );
    let lines: Vec<String> = events.iter().map(line).collect();
    let message = "q/r: The disruption budget web needs 2 healthy pods and has 2";
    assert_eq!(lines, [format!("EvictionRefused batch/a: {message}")]);
    events.clear();
    let why = Refusal::Unanswered("timed out".to_owned());
    builder.outcome(
        &outcome(EvictionResult::Refused { until, why }),
        &mut events,
    );
    assert_eq!(events.len(), 1, "{events:?}");
    events.clear();
    let why = Refusal::ApiServerUnreachable("timed out".to_owned());
    let away = outcome(EvictionResult::Refused { until, why });
    builder.outcome(&away, &mut events);
    assert_eq!(events, [], "no pod is the cause");
    assert_eq!(
        line(&evictions_blocked(&away)),
        "EvictionRefused nwm: q/r: no pod is evicted: the API server can't be reached: timed out"
    );
}

#[test]
fn the_taint_is_reported_once_and_not_again_by_a_new_process() {
    let taint_state = |effect| TaintState {
        known: true,
        effect,
        ..TaintState::default()
    };
    let closed = Some(TaintEffect::NoSchedule);
    let mut builder = EventBuilder::default();
    let mut events = Vec::new();
    builder.taint_state(&TaintState::default(), "", &mut events);
    builder.taint_state(&taint_state(closed), "q/r: why", &mut events);
    assert_eq!(events, [], "an earlier process reported that");
    builder.taint_state(&taint_state(None), "", &mut events);
    builder.taint_state(&taint_state(closed), "q/r: why", &mut events);
    let lines: Vec<String> = events.iter().map(line).collect();
    assert_eq!(
        lines,
        [
            "SchedulingEnabled node: no rule disables scheduling any more: the taint is removed",
            "SchedulingDisabled node: q/r: why; taint interference.crane.io:NoSchedule",
        ]
    );
}

fn adopted(pod: &str, ratio: u8) -> EventBuilder {
    let record = json!({
        "uid": pod, "cgroup": "kubepods/pod1", "lever": "", "inode": 7, "file": "cpu.max",
        "original": "max 100000", "previous": "max 100000", "ours": "60000 100000", "base": 1000, "ratio": ratio,
        "idle": false, "rule": "q/r", "deadline": 0,
    });
    let record = serde_json::from_value(record).expect("a record");
    let mut builder = EventBuilder::default();
    builder.adopt(std::iter::once(record), &policy());
    builder
}

#[test]
fn throttles_of_an_earlier_process_are_not_reported_again() {
    let steps = vec![throttle("a", 60, 70), throttle("a", 70, 40)];
    assert_eq!(reported(&mut adopted("a", 60), false, steps), [""; 0]);
    let back = vec![throttle("a", 60, 100)];
    let lines = reported(&mut adopted("a", 60), false, back);
    assert!(lines[0].starts_with("PodRestored batch/a"), "{lines:?}");
    // The floor is reported once, by the process that reached it.
    let to_floor = vec![throttle("a", 40, 10)];
    let lines = reported(&mut adopted("a", 40), false, to_floor.clone());
    assert!(lines[0].starts_with("PodAtThrottleFloor"), "{lines:?}");
    assert_eq!(reported(&mut adopted("a", 10), false, to_floor), [""; 0]);
    // Other pods are reported as usual.
    let lines = reported(&mut adopted("a", 60), false, vec![throttle("b", 100, 70)]);
    assert!(lines[0].starts_with("PodThrottled batch/b"), "{lines:?}");
}

/// A decision of the `PodQOS` `batch`.
fn of_pod_qos(would: bool, change: PlanChange) -> Event {
    let mut event = decision(would, change);
    if let Event::Decision(decision) = &mut event {
        decision.transition.rule = RuleId::standing("batch");
    }
    event
}

#[test]
fn a_policy_that_holds_pods_is_one_event_not_one_for_each_pod() {
    let held = |would: bool, pod: &str, idle: bool| {
        let mut change = throttle(pod, 100, 100);
        if let PlanChange::Throttle { idle: now, .. } = &mut change {
            *now = idle;
        }
        of_pod_qos(would, change)
    };
    let with = |standing: bool| PolicySet {
        pods: vec![crate::engine::policy::PodPolicy {
            name: "batch".to_owned(),
            labels: None,
            scopes: Vec::new(),
            allowed: Vec::new(),
            standing: crate::engine::policy::Standing {
                idle: standing,
                burst: crate::engine::units::MilliCpu(500 * u64::from(standing)),
                preview: false,
            },
        }],
        ..policy()
    };
    let mut builder = EventBuilder::default();
    let mut reported = |policy: &PolicySet, events: &[Event]| {
        let mut out = Vec::new();
        let reports = [report()];
        let facts = MessageFacts {
            policy,
            reports: &reports,
        };
        builder.record(events, facts, &mut out);
        out.iter().map(|event| event.reason).collect::<Vec<_>>()
    };
    let first = [held(false, "a", true), held(false, "b", true)];
    assert_eq!(reported(&with(true), &first), ["IdleClassSet"]);
    // One pod ends, another starts: the policy stays.
    let churn = [held(false, "a", false), held(false, "c", true)];
    assert_eq!(reported(&with(true), &churn), [""; 0]);
    let last = [held(false, "b", false), held(false, "c", false)];
    assert_eq!(reported(&with(false), &last), ["IdleClassEnded"]);
    // A burst of the same policy has events of its own.
    let burst = |would: bool, pod: &str, millicores: u64| {
        let change = PlanChange::Burst {
            pod: PodUid::from(pod),
            burst: crate::engine::units::MilliCpu(millicores),
        };
        of_pod_qos(would, change)
    };
    let first = [
        burst(false, "a", 500),
        burst(false, "b", 500),
        burst(true, "c", 500),
    ];
    assert_eq!(reported(&with(true), &first), ["BurstSet", "WouldSetBurst"]);
    assert_eq!(reported(&with(true), &[burst(false, "a", 0)]), [""; 0]);
    assert_eq!(
        reported(&with(false), &[burst(false, "b", 0)]),
        ["BurstEnded"]
    );
}
