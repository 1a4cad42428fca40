use serde_json::{Value, json};

use super::*;
use crate::agent::eviction::{Refusal, WantedEviction};
use crate::crd::eviction::{Delay, EvictionTarget};
use crate::engine::plan::Unknown;
use crate::engine::policy::{PodPolicy, ScopeRequirement, Standing, Strategy};
use crate::engine::selector::Selector;
use crate::engine::units::MilliCpu;
use crate::node::machine::ineffective::Cause;

fn report(state: RuleState, value: Option<f64>) -> RuleReport {
    RuleReport {
        id: RuleId::from("q/r"),
        strategy: Strategy::Enforce,
        outside_hours: false,
        state,
        since: Some(BootTime::default() + Duration::from_secs(90)),
        value,
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
        unknown: value.is_none().then_some(Unknown::Missing),
    }
}

fn record(file: &str, original: &str, ours: &str) -> JournalRecord {
    serde_json::from_value(json!({
        "uid": "u", "cgroup": "kubepods/pod1", "lever": "", "inode": 7, "file": file,
        "original": original, "previous": original, "ours": ours, "base": 1000, "ratio": 45, "idle": false,
        "rule": "q/r", "deadline": 0,
    }))
    .expect("a record")
}

struct Scene {
    agent: AgentStatus,
    policy: PolicySet,
    plan: Plan,
    previews: Vec<NamedDecision>,
    ineffective: Vec<IneffectiveAction>,
}

impl Scene {
    fn new() -> Self {
        Self {
            agent: AgentStatus::default(),
            policy: PolicySet::default(),
            plan: Plan::default(),
            previews: Vec::new(),
            ineffective: Vec::new(),
        }
    }

    /// 100 s after boot, which was at 1000 s of the wall clock.
    fn view(&self) -> StatusView<'_> {
        StatusView {
            now: BootTime::default() + Duration::from_secs(100),
            time: Timestamp::from_second(1100).expect("a time"),
            generation: Some(3),
            hash: Some("abc"),
            agent: &self.agent,
            reports: Vec::new(),
            policy: &self.policy,
            plan: &self.plan,
            records: Vec::new(),
            names: BTreeMap::from([(PodUid::from("u"), "batch/a".to_owned())]),
            previews: &self.previews,
            ineffective: &self.ineffective,
            taint_state: TaintState {
                known: true,
                ..TaintState::default()
            },
            evicted: Vec::new(),
            batch_weight_share: None,
            health: AgentHealth::default(),
            not_enforced: Vec::new(),
        }
    }
}

#[test]
fn a_rule_shows_value_threshold_since_and_why_it_is_unknown() {
    let scene = Scene::new();
    let mut view = scene.view();
    view.reports = vec![
        report(RuleState::Breached, Some(7200.1234)),
        report(RuleState::Normal, None),
    ];
    let mut builder = StatusBuilder::default();
    let status = builder.build(&view);
    let breached = &status.rules[0];
    assert_eq!(breached.state, "Breached");
    assert_eq!(breached.value, Some(7200.123));
    assert_eq!(
        breached.since.as_ref().map(|it| it.0.as_second()),
        Some(1090)
    );
    assert_eq!(status.rules[1].value, None);
    assert!(status.rules[1].unknown.is_some());
    let counts = status.counts.expect("counts");
    assert_eq!((counts.rules, counts.breached), (2, 1));
    assert_eq!(status.observed_hash.as_deref(), Some("abc"));
    // A moment has the same time whenever it is reported, also if the clock is a little off then.
    view.time = Timestamp::from_millisecond(1_100_900).expect("a time");
    assert_eq!(builder.build(&view).rules[0].since, breached.since);
}

#[test]
fn what_a_preview_rule_would_have_done_is_shown_and_counted() {
    let scene = Scene::new();
    let mut view = scene.view();
    view.reports = vec![report(RuleState::Normal, Some(1.0))];
    let status = StatusBuilder::default().build(&view);
    assert_eq!(status.rules[0].would_last_day, None);
    let counts = status.counts.expect("counts");
    assert_eq!(counts.would_last_day, None, "no rule in Preview");
    let would = |breaches, seconds| RuleReport {
        strategy: Strategy::Preview,
        would: Some(WouldReport {
            since: Timestamp::from_millisecond(5_500).expect("a time"),
            last_breach: Some(Timestamp::from_second(9).expect("a time")),
            counts: crate::engine::WouldCounts {
                breaches,
                throttle_rounds: 7,
                evictions: 1,
                active: Duration::from_secs(seconds),
            },
        }),
        ..report(RuleState::Normal, Some(1.0))
    };
    view.reports.extend([would(2, 61), would(1, 20)]);
    let status = StatusBuilder::default().build(&view);
    let shown = serde_json::to_value(&status.rules[1].would_last_day).expect("JSON");
    let expected = json!({
        "breaches": 2, "activeMinutes": 2, "throttleRounds": 7, "evictions": 1,
        "lastBreachTime": "1970-01-01T00:00:09Z", "since": "1970-01-01T00:00:05Z",
    });
    assert_eq!(shown, expected);
    assert_eq!(status.counts.expect("counts").would_last_day, Some(3));
}

#[test]
fn a_throttled_pod_shows_its_limit_before_and_now() {
    let scene = Scene::new();
    let throttled = |records: Vec<JournalRecord>| {
        let mut view = scene.view();
        view.records = records;
        StatusBuilder::default().build(&view).throttled.remove(0)
    };
    let limited = throttled(vec![record("cpu.max", "100000 100000", "45000 100000")]);
    assert_eq!(
        (limited.namespace.as_str(), limited.pod.as_str()),
        ("batch", "a")
    );
    assert_eq!(limited.ratio, 45);
    assert_eq!(limited.from_millicores, Some(1000));
    assert_eq!(limited.to_millicores, Some(450));
    let unlimited = throttled(vec![
        record("cpu.max.burst", "100", "0"),
        record("cpu.max", "max 100000", "45000 100000"),
    ]);
    assert_eq!(unlimited.from_millicores, None);
    assert_eq!(unlimited.to_millicores, Some(450));
    let v1 = throttled(vec![record("cpu.cfs_quota_us", "-1", "45000")]);
    assert_eq!((v1.from_millicores, v1.to_millicores), (None, Some(450)));
    let sandbox = JournalRecord {
        base: MilliCpu(0),
        ..record("cpu.cfs_quota_us", "-1", "1000")
    };
    let container = record("cpu.cfs_quota_us", "100000", "45000");
    let both = throttled(vec![sandbox, container]);
    assert_eq!(
        (both.from_millicores, both.to_millicores),
        (Some(1000), Some(450))
    );
    let idle = throttled(vec![record("cpu.idle", "0", "1")]);
    assert_eq!((idle.from_millicores, idle.to_millicores), (None, None));
}

#[test]
fn a_burst_is_listed_and_is_no_throttle() {
    let scene = Scene::new();
    let mut view = scene.view();
    let given = |file: &str| JournalRecord {
        ratio: 100,
        base: MilliCpu(500),
        ..record(file, "0", "50000")
    };
    view.records = vec![given("cpu.max.burst"), given("cpu.cfs_burst_us")];
    let status = StatusBuilder::default().build(&view);
    assert_eq!(status.throttled, []);
    assert_eq!(status.counts.map(|it| it.throttled), Some(0));
    let [burst] = &status.bursts[..] else {
        panic!("one pod: {:?}", status.bursts);
    };
    assert_eq!((burst.pod.as_str(), burst.millicores), ("a", 500));
}

#[test]
fn scheduling_shows_the_taint_and_the_rules_that_want_it() {
    let mut scene = Scene::new();
    let mut builder = StatusBuilder::default();
    assert_eq!(
        builder.build(&scene.view()).scheduling,
        None,
        "nothing is evaluated yet"
    );
    scene.plan.scheduling = Scheduling::Disabled {
        effect: TaintEffect::NoSchedule,
        rules: vec![RuleId::from("q/r")],
    };
    let mut view = scene.view();
    let not_yet = builder.build(&view).scheduling.expect("known");
    assert_eq!(not_yet.state, "Enabled");
    assert_eq!(not_yet.rules, ["q/r"]);
    view.taint_state.effect = Some(TaintEffect::NoSchedule);
    let closed = builder.build(&view).scheduling.expect("known");
    assert_eq!(closed.state, "NoSchedule");
    view.time = Timestamp::from_second(9999).expect("a time");
    assert_eq!(
        builder.build(&view).scheduling.expect("known").since,
        closed.since
    );
}

#[test]
fn a_preview_shows_what_would_be_in_force_on_which_pod() {
    let mut scene = Scene::new();
    let decision = json!({
        "at": 0, "rule": "q/r", "would": true, "change": "evict", "pod": "u", "grace": {"secs": 30, "nanos": 0},
        "release": 450, "metric": "cpu_total_usage", "podName": "batch/a",
    });
    scene.previews = vec![serde_json::from_value(decision).expect("a decision")];
    let status = StatusBuilder::default().build(&scene.view());
    assert_eq!(
        status.would,
        [WouldStatus {
            rule: "q/r".to_owned(),
            what: "evict".to_owned(),
            namespace: Some("batch".to_owned()),
            pod: Some("a".to_owned()),
            how: Some("grace 30s, to release 450m".to_owned()),
        }]
    );
    assert_eq!(status.counts.expect("counts").would, 1);
}

fn skipped(reason: &str, would: bool) -> Event {
    let decision = json!({
        "at": 0, "rule": "q/r", "would": would, "change": "skipped", "pod": "u", "reason": reason, "podName": "batch/a",
    });
    Event::Decision(serde_json::from_value(decision).expect("a decision"))
}

#[test]
fn a_skipped_pod_is_shown_until_the_rule_ends() {
    let scene = Scene::new();
    let mut builder = StatusBuilder::default();
    builder.record(&[skipped("usesLittle", false), skipped("protected", true)]);
    assert_eq!(builder.build(&scene.view()).refused, []);
    for (reason, shown) in [("atFloor", "floor"), ("containerMissing", "containers")] {
        builder.record(&[skipped(reason, false)]);
        let refused = builder.build(&scene.view()).refused;
        assert!(refused[0].reason.contains(shown), "{refused:?}");
    }
    builder.record(&[skipped("contested", false)]);
    let status = builder.build(&scene.view());
    assert_eq!(status.refused[0].pod.as_deref(), Some("batch/a"));
    let over = json!({
        "at": 0, "rule": "q/r", "change": "state", "from": "Cooling", "to": "Normal", "value": 1.0, "threshold": 2.0,
    });
    let over = Event::Decision(serde_json::from_value(over).expect("a decision"));
    builder.record(&[over]);
    let status = builder.build(&scene.view());
    assert_eq!(status.refused, []);
}

#[test]
fn actions_without_effect_are_a_condition_with_their_cause() {
    let mut scene = Scene::new();
    let mut builder = StatusBuilder::default();
    let ineffective = |status: &NodeWatermarkStatus| {
        let condition = status.conditions[1].clone();
        assert_eq!(condition.type_, "ActionIneffective");
        (condition.status, condition.reason, condition.message)
    };
    let none = ineffective(&builder.build(&scene.view()));
    assert_eq!(
        (none.0.as_str(), none.1.as_str()),
        ("False", "ActionsEffective")
    );
    scene.ineffective.push(IneffectiveAction {
        uid: PodUid::from("u"),
        pod: "batch/a".to_owned(),
        rule: RuleId::from("q/r"),
        cause: Cause::no_cgroup(),
    });
    let (status, reason, message) = ineffective(&builder.build(&scene.view()));
    assert_eq!((status.as_str(), reason.as_str()), ("True", "WrongLayout"));
    assert!(
        message.starts_with("q/r: batch/a: it has no cgroup"),
        "{message}"
    );
    scene.ineffective.clear();
    assert_eq!(ineffective(&builder.build(&scene.view())), none);
}

fn outcome(pod: &str, result: EvictionResult) -> EvictionOutcome {
    EvictionOutcome {
        request: WantedEviction {
            target: EvictionTarget {
                namespace: "batch".to_owned(),
                name: pod.to_owned(),
                uid: pod.to_owned(),
            },
            rule: RuleId::from("q/r"),
            grace: Duration::from_secs(30),
            expires: BootTime::default() + Duration::from_secs(100),
        },
        at: BootTime::default() + Duration::from_secs(90),
        result,
    }
}

fn refused(pod: &str, why: Refusal) -> EvictionOutcome {
    let until = BootTime::default() + Duration::from_secs(100);
    outcome(pod, EvictionResult::Refused { until, why })
}

fn decided(pod: &str, change: &Value) -> Event {
    let mut decision = json!({"at": 0, "rule": "q/r", "would": false, "pod": pod, "podName": format!("batch/{pod}")});
    let decision = decision.as_object_mut().expect("an object");
    decision.extend(change.as_object().expect("an object").clone());
    let decision = Value::Object(decision.clone());
    Event::Decision(serde_json::from_value(decision).expect("a decision"))
}

#[test]
fn an_obstacle_to_all_evictions_is_shown_once() {
    let scene = Scene::new();
    let mut builder = StatusBuilder::default();
    let down = || Refusal::Wait {
        wait: Duration::from_secs(10),
        by: Delay::Leader,
        why: "no replica of the controller leads".to_owned(),
    };
    assert!(builder.record_outcome(&refused("a", down())));
    let first = builder.build(&scene.view()).refused;
    let expected = RefusedStatus {
        what: "evict".to_owned(),
        pod: None,
        rule: Some("q/r".to_owned()),
        reason: "no replica of the controller leads".to_owned(),
    };
    assert_eq!(first, [expected]);
    for pod in ["b", "c", "a"] {
        let evict = json!({"change": "evict", "grace": {"secs": 30, "nanos": 0}, "release": 450});
        builder.record(&[decided(pod, &evict)]);
        assert!(!builder.record_outcome(&refused(pod, down())));
        assert_eq!(builder.build(&scene.view()).refused, first);
    }
    let mut later = scene.view();
    later.now = builder.changes_at(later.now, &[]).expect("it ends");
    assert_eq!(builder.build(&later).refused, [], "not met again");
    builder.record_outcome(&outcome("a", EvictionResult::Accepted));
    assert_eq!(builder.build(&scene.view()).refused, []);
}

#[test]
fn a_refused_eviction_is_shown_until_the_pod_is_evicted() {
    let scene = Scene::new();
    let mut builder = StatusBuilder::default();
    let budget = Refusal::Budget("web needs 2 healthy pods".to_owned());
    assert!(!builder.record_outcome(&refused("a", budget)));
    let shown = builder.build(&scene.view()).refused;
    assert_eq!(shown[0].pod.as_deref(), Some("batch/a"));
    let evict = json!({"change": "evict", "grace": {"secs": 30, "nanos": 0}, "release": 450});
    builder.record(&[decided("a", &evict)]);
    assert_eq!(builder.build(&scene.view()).refused, shown);
    builder.record_outcome(&outcome(
        "a",
        EvictionResult::ResultUnknown("timed out".to_owned()),
    ));
    assert_eq!(builder.build(&scene.view()).refused, shown);
    let unanswered = Refusal::Unanswered("timed out".to_owned());
    builder.record_outcome(&refused("a", unanswered));
    let unanswered = builder.build(&scene.view()).refused;
    assert!(unanswered[0].reason.contains("without an answer"));
    builder.record_outcome(&outcome("a", EvictionResult::Accepted));
    assert_eq!(builder.build(&scene.view()).refused, []);
}

#[test]
fn a_refused_eviction_is_not_shown_once_the_rule_stops_asking() {
    let scene = Scene::new();
    let mut builder = StatusBuilder::default();
    let budget = Refusal::Budget("web needs 2 healthy pods".to_owned());
    builder.record_outcome(&refused("a", budget));
    let mut view = scene.view();
    assert_eq!(builder.build(&view).refused.len(), 1);
    view.now = builder.changes_at(view.now, &[]).expect("it ends");
    assert_eq!(view.now.since(BootTime::default()).as_secs(), 110);
    assert_eq!(builder.build(&view).refused, []);
}

#[test]
fn ready_names_rules_without_a_sample_and_is_false_if_all_lack_one() {
    let scene = Scene::new();
    let ready = |reports: Vec<RuleReport>| {
        let mut view = scene.view();
        view.reports = reports;
        let ready = StatusBuilder::default().build(&view).conditions.remove(0);
        format!("{} {}: {}", ready.status, ready.reason, ready.message)
    };
    let known = || report(RuleState::Normal, Some(1.0));
    let unknown = |why| RuleReport {
        unknown: Some(why),
        ..report(RuleState::Normal, None)
    };
    assert_eq!(ready(vec![]), "True RulesEnforced: this node has no rules");
    assert_eq!(
        ready(vec![known(), known()]),
        "True RulesEnforced: all rules are evaluated"
    );
    assert_eq!(
        ready(vec![known(), unknown(Unknown::Missing), known()]),
        "True RulesEnforced: 2 of 3 rules are evaluated; not evaluated: q/r (no sample)"
    );
    assert_eq!(
        ready(vec![unknown(Unknown::Stale), unknown(Unknown::Sparse)]),
        "False NoRuleEvaluated: no rule can be evaluated: q/r (its last sample is too old), \
         q/r (less than half of its window has samples so far)"
    );
    assert_eq!(
        ready(vec![unknown(Unknown::Rebased)]),
        "True RulesEnforced: no rule can be evaluated: q/r (there is no earlier sample to compare with yet)",
        "transient"
    );
}

#[test]
fn parts_not_understood_are_shown_and_degrade() {
    let scene = Scene::new();
    let mut view = scene.view();
    view.not_enforced = vec![("rule", "q/new".to_owned(), "later is not known".to_owned())];
    view.taint_state.failing =
        Some("failed to change the taints of node n: forbidden (403)".to_owned());
    let status = StatusBuilder::default().build(&view);
    assert_eq!(status.refused[0].rule.as_deref(), Some("q/new"));
    let degraded = &status.conditions[2];
    assert_eq!(
        (degraded.status.as_str(), degraded.reason.as_str()),
        ("True", "PartsNotUnderstood")
    );
    assert!(
        degraded.message.contains("forbidden"),
        "{}",
        degraded.message
    );
    assert_eq!(degraded.observed_generation, Some(3));
}

#[test]
fn each_policy_counts_the_pods_that_it_matches() {
    let pod = |namespace: &str| {
        let pod = json!({
            "metadata": {"name": "p", "namespace": namespace, "uid": "x"},
            "spec": {"containers": []}, "status": {"phase": "Running"},
        });
        let pod = serde_json::from_value(pod).expect("a pod");
        Arc::new(crate::crd::pod_facts::pod_facts(&pod).expect("facts"))
    };
    let policy = |name: &str, labels: Option<Selector>, scopes: Vec<ScopeRequirement>| PodPolicy {
        name: name.to_owned(),
        labels,
        scopes,
        allowed: Vec::new(),
        standing: Standing::default(),
    };
    let mut scene = Scene::new();
    scene.policy.pods = vec![
        policy("all", Some(Selector::default()), Vec::new()),
        policy("none", None, Vec::new()),
    ];
    let mut builder = StatusBuilder::default();
    let pods = [pod("a"), pod("b"), pod("kube-system")];
    builder.count(&scene.policy, pods.iter());
    let counted = builder.build(&scene.view()).pod_policies;
    let counted: Vec<_> = counted
        .iter()
        .map(|it| (it.name.as_str(), it.matched))
        .collect();
    assert_eq!(counted, [("all", 2), ("none", 0)]);
}

#[test]
fn old_evictions_and_problems_leave_the_status() {
    let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
    let evicted = |at, until| Evicted {
        uid: PodUid::from("u"),
        namespace: "batch".to_owned(),
        name: "a".to_owned(),
        rule: RuleId::from("q/r"),
        time: Timestamp::UNIX_EPOCH,
        at,
        until,
    };
    let mut builder = StatusBuilder::default();
    assert_eq!(builder.changes_at(at(100), &[]), None);
    let evictions = [evicted(at(90), Some(at(180))), evicted(at(50), None)];
    assert_eq!(builder.changes_at(at(100), &evictions), Some(at(180)));
    assert_eq!(builder.changes_at(at(180), &evictions), Some(at(3650)));
    assert_eq!(builder.changes_at(at(3650), &evictions), Some(at(3690)));
    assert_eq!(builder.changes_at(at(3690), &evictions), None);
    let reason = "disk full".to_owned();
    builder.record(&[Event::notice(
        at(100),
        NoticeKind::StateNotWritten { reason },
    )]);
    assert_eq!(builder.changes_at(at(100), &evictions), Some(at(160)));
    let scene = Scene::new();
    let degraded = |builder: &mut StatusBuilder, now| {
        let view = StatusView {
            now,
            ..scene.view()
        };
        builder.build(&view).conditions[2].status.clone()
    };
    assert_eq!(degraded(&mut builder, at(159)), "True");
    assert_eq!(degraded(&mut builder, at(160)), "False");
}

#[test]
fn a_stop_is_released_when_cgroups_and_node_are_restored() {
    let scene = Scene::new();
    let shown = |records: Vec<JournalRecord>, taint_state: TaintState| {
        let mut view = scene.view();
        (view.records, view.taint_state) = (records, taint_state);
        view.health.stopped = Some(super::super::conditions::StopProgress::default());
        let status = StatusBuilder::default().build(&view);
        let last = status.conditions.last().expect("a condition");
        format!("{} {}: {}", last.type_, last.reason, last.message)
    };
    let throttled = || vec![record("cpu.max", "max 100000", "45000 100000")];
    let open = || TaintState {
        known: true,
        ..TaintState::default()
    };
    let closed = || TaintState {
        effect: Some(TaintEffect::NoSchedule),
        ..open()
    };
    assert_eq!(
        shown(throttled(), closed()),
        "Stopped Releasing: stopped; being restored: CPU of 1 pod, our taint"
    );
    let unseen = shown(Vec::new(), TaintState::default());
    assert!(unseen.starts_with("Stopped Releasing: "), "{unseen}");
    assert_eq!(
        shown(Vec::new(), open()),
        "Stopped Released: stopped; nothing is in force"
    );
}
