//! Builders for the tests of the engine: a small node, its pods, rules, and a clock that the test turns.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "every test file is its own crate and uses a part of this; a builder may fail its test"
)]

pub mod scenario;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use plimsoll::engine::metric::Metric;
use plimsoll::engine::plan::{Change, Plan, RuleState, Throttle, Transition};
use plimsoll::engine::pod::{Pod, PodUid, QosClass};
use plimsoll::engine::policy::{
    Action, CpuThrottle, EvictionSpec, PodPolicy, PolicySet, Rule, RuleId, Strategy, TaintEffect,
};
use plimsoll::engine::sample::{
    CpuTimes, LeverSample, MemoryParts, NodeMemory, NodeSample, PodSample, Sample,
};
use plimsoll::engine::selector::Selector;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::{Bytes, MilliCpu, Quota};
use plimsoll::engine::{AdoptedThrottle, Engine};

pub const SECOND: Duration = Duration::from_secs(1);
pub const PERIOD: Duration = Duration::from_secs(10);
pub const CPUS: u32 = 8;
pub const GIB: u64 = 1 << 30;

pub fn rule(id: &str, metric: &str, watermark: f64, action: Action) -> Rule {
    Rule {
        id: RuleId::from(id),
        metric: Metric::parse(metric).unwrap(),
        series: None,
        watermark,
        restore: watermark,
        avoidance_threshold: 1,
        restore_threshold: 1,
        period: PERIOD,
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
    }
}

pub fn action(name: &str) -> Action {
    Action {
        name: name.to_owned(),
        cool_down: Duration::from_secs(30),
        scheduling: None,
        throttle: None,
        force_gc: false,
        eviction: None,
    }
}

pub fn closing(name: &str) -> Action {
    Action {
        scheduling: Some(TaintEffect::NoSchedule),
        ..action(name)
    }
}

pub fn throttling(min_ratio: u8, step: u8) -> Action {
    Action {
        throttle: Some(CpuThrottle {
            min_ratio,
            step,
            idle: false,
        }),
        ..action("slow")
    }
}

pub fn idling(min_ratio: u8, step: u8) -> Action {
    Action {
        throttle: Some(CpuThrottle {
            min_ratio,
            step,
            idle: true,
        }),
        ..action("slow")
    }
}

pub fn evicting(max_pods_per_round: u32) -> Action {
    Action {
        eviction: Some(EvictionSpec {
            grace: Some(Duration::from_secs(5)),
            max_pods_per_round,
            evict_unowned: false,
        }),
        ..closing("away")
    }
}

/// Everything may be done to every pod.
pub fn anything() -> PodPolicy {
    PodPolicy {
        name: "all".to_owned(),
        labels: Some(Selector::default()),
        scopes: Vec::new(),
        allowed: vec!["throttle".to_owned(), "evict".to_owned()],
    }
}

pub fn policy(rules: Vec<Rule>) -> Arc<PolicySet> {
    Arc::new(PolicySet {
        rules,
        pods: vec![anything()],
    })
}

pub fn pod(uid: &str) -> Pod {
    Pod {
        uid: PodUid::from(uid),
        namespace: "default".to_owned(),
        name: uid.to_owned(),
        labels: BTreeMap::new(),
        priority: 0,
        qos: QosClass::BestEffort,
        started: 0,
        running: true,
        terminating: false,
        elastic: false,
        cpu_request: MilliCpu::ZERO,
        container_requests: BTreeMap::new(),
        grace: Duration::from_secs(30),
        protected: false,
        reserved: None,
        kept: None,
        owned: true,
    }
}

/// A pod with what it uses until the next look.
#[derive(Clone, Debug)]
pub struct Load {
    pub pod: Pod,
    /// Millicores.
    pub cpu: u64,
    pub held: u64,
    pub cache: u64,
    pub quota: Quota,
    pub nanos: u64,
}

impl Load {
    pub fn new(uid: &str, cpu: u64) -> Self {
        Self {
            pod: pod(uid),
            cpu,
            held: 0,
            cache: 0,
            quota: Quota::Unlimited,
            nanos: 0,
        }
    }
}

/// A node whose load the test sets.
#[derive(Debug)]
pub struct Node {
    pub engine: Engine,
    pub plan: Plan,
    pub now: BootTime,
    pub sample: Sample,
    pub pods: Vec<Load>,
    /// Millicores of the node.
    pub cpu: u64,
    /// Bytes of the node.
    pub memory: u64,
    busy: u64,
    idle: u64,
}

impl Node {
    pub fn new(rules: Vec<Rule>, pods: Vec<Load>) -> Self {
        Self::with(policy(rules), pods)
    }

    pub fn with(policy: Arc<PolicySet>, pods: Vec<Load>) -> Self {
        let mut engine = Engine::new();
        engine.set_policy(policy);
        let mut node = Self {
            engine,
            plan: Plan::default(),
            now: BootTime::from_nanos(1_000_000_000_000),
            sample: Sample::default(),
            pods,
            cpu: 0,
            memory: 0,
            busy: 0,
            idle: 0,
        };
        node.set_pods();
        node
    }

    pub fn set_pods(&mut self) {
        let pods = self.pods.iter().map(|load| Arc::new(load.pod.clone()));
        self.engine.set_pods(pods.collect());
    }

    /// Lets `elapsed` pass under the present load and takes a sample.
    pub fn pass(&mut self, elapsed: Duration) {
        self.now = self.now + elapsed;
        let nanos = u64::try_from(elapsed.as_nanos()).unwrap();
        self.busy += self.cpu * (nanos / 1000);
        self.idle += (u64::from(CPUS) * 1000).saturating_sub(self.cpu) * (nanos / 1000);
        for load in &mut self.pods {
            load.nanos += load.cpu * (nanos / 1000);
        }
        self.sample = Sample {
            at: self.now,
            node: NodeSample {
                cpu: Some(CpuTimes {
                    busy: self.busy,
                    idle: self.idle,
                    online: CPUS,
                }),
                memory: Some(NodeMemory {
                    total: Bytes(32 * GIB),
                    available: Bytes(32 * GIB - self.memory),
                }),
                ..NodeSample::default()
            },
            pods: self.pods.iter().map(|load| self.pod_sample(load)).collect(),
            ..Sample::default()
        };
    }

    fn pod_sample(&self, load: &Load) -> PodSample {
        PodSample {
            cpu_nanos: Some(load.nanos),
            memory: Some(Bytes(load.held + load.cache)),
            memory_parts: Some(MemoryParts {
                held: Bytes(load.held),
                cache: Bytes(load.cache),
            }),
            levers: vec![LeverSample {
                cgroup: Arc::from(""),
                cpu_nanos: Some(load.nanos),
                quota: Some(load.quota),
            }],
            ..PodSample::new(load.pod.uid.clone(), self.now)
        }
    }

    /// Evaluates the sample.
    pub fn step(&mut self) -> &Plan {
        self.engine.step(self.now, &self.sample, &mut self.plan);
        &self.plan
    }

    /// One period under the present load, and its evaluation.
    pub fn tick(&mut self) -> &Plan {
        self.pass(PERIOD);
        self.step()
    }

    /// One period with the node using so many millicores.
    pub fn at(&mut self, cpu: u64) -> &Plan {
        self.cpu = cpu;
        self.tick()
    }

    /// One period with so many bytes of memory used.
    pub fn holding(&mut self, memory: u64) -> &Plan {
        self.memory = memory;
        self.tick()
    }

    pub fn state(&self, rule: &str) -> RuleState {
        let id = RuleId::from(rule);
        let mut reports = self.engine.reports();
        reports.find(|report| report.id == id).unwrap().state
    }

    /// `(pod, ratio)` of every throttle in the plan.
    pub fn ratios(&self) -> Vec<(String, u8)> {
        let throttles = self.plan.throttles.iter();
        throttles.map(|t| (t.uid.to_string(), t.ratio)).collect()
    }

    /// Quotas in millicores of a pod's levers in the plan.
    pub fn quotas(&self, uid: &str) -> Vec<Option<u64>> {
        let uid = PodUid::from(uid);
        let throttle = self.plan.throttles.iter().find(|t| t.uid == uid);
        let levers = throttle.into_iter().flat_map(|t| &t.levers);
        levers.map(|lever| lever.quota.map(|q| q.0)).collect()
    }

    pub fn evicted(&self) -> Vec<String> {
        let evictions = self.plan.evictions.iter();
        evictions.map(|evict| evict.uid.to_string()).collect()
    }

    pub fn spared(&self) -> Vec<(String, plimsoll::engine::plan::Spared)> {
        let transitions = self.plan.transitions.iter();
        transitions
            .filter_map(|t| match &t.change {
                Change::Spared { pod, reason } => Some((pod.to_string(), *reason)),
                _ => None,
            })
            .collect()
    }

    pub fn moves(&self) -> Vec<(RuleState, RuleState)> {
        moves(&self.plan.transitions)
    }
}

pub fn moves(transitions: &[Transition]) -> Vec<(RuleState, RuleState)> {
    let transitions = transitions.iter();
    transitions
        .filter_map(|t| match t.change {
            Change::State { from, to, .. } => Some((from, to)),
            _ => None,
        })
        .collect()
}

/// A new engine goes on from what the old one kept and from what is in force, as a journal would tell it.
pub fn restart(node: &mut Node, policy: PolicySet) {
    let kept = serde_json::to_string(&node.engine.state()).unwrap();
    let state = serde_json::from_str(&kept).unwrap();
    let quota = |uid: &PodUid| {
        let load = node.pods.iter().find(|load| load.pod.uid == *uid);
        load.map_or(Quota::Unlimited, |load| load.quota)
    };
    let adopt = |throttle: &Throttle| AdoptedThrottle {
        uid: throttle.uid.clone(),
        rule: throttle.rule.clone(),
        ratio: throttle.ratio,
        idle: throttle.idle,
        levers: throttle
            .levers
            .iter()
            .map(|lever| (lever.cgroup.clone(), lever.base, quota(&throttle.uid)))
            .collect(),
    };
    let throttles: Vec<_> = node.plan.throttles.iter().map(adopt).collect();
    node.engine = Engine::new();
    node.engine.set_policy(Arc::new(policy));
    node.set_pods();
    node.engine.adopt(&state, &throttles);
}
