//! Builders for engine tests: a small node, its pods, rules, and a manual clock.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "every test file is its own crate and uses only part of this; a builder may fail its test"
)]

pub mod scenario;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use plimsoll::engine::metric::Metric;
use plimsoll::engine::plan::{Plan, PlanChange, PodThrottle, RuleState, Transition};
use plimsoll::engine::pod::{Pod, PodUid, QosClass, Resources};
use plimsoll::engine::policy::{
    Action, CpuThrottle, EvictionSpec, PodPolicy, PolicySet, Rule, RuleId, Standing, Strategy,
    TaintEffect,
};
use plimsoll::engine::sample::{
    CpuTimes, MemoryParts, NodeMemory, NodeSample, PodSample, Sample, TargetCgroupSample,
};
use plimsoll::engine::selector::Selector;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::{Bytes, MilliCpu, Quota};
use plimsoll::engine::{AdoptedThrottle, Engine};

pub const SECOND: Duration = Duration::from_secs(1);
pub const PERIOD: Duration = Duration::from_secs(10);
pub const CPUS: u32 = 8;
pub const GIB: u64 = 1 << 30;

pub fn rule(id: &str, metric: &str, threshold: f64, action: Action) -> Rule {
    Rule {
        id: RuleId::from(id),
        metric: Metric::parse(metric).unwrap(),
        series: None,
        threshold,
        restore_value: threshold,
        avoidance_threshold: 1,
        restore_threshold: 1,
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
        active_during: Vec::new(),
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

pub fn disabling_scheduling(name: &str) -> Action {
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

pub fn idle_action(min_ratio: u8, step: u8) -> Action {
    Action {
        throttle: Some(CpuThrottle {
            min_ratio,
            step,
            idle: true,
        }),
        ..action("slow")
    }
}

pub fn eviction_action(max_pods_per_round: u32) -> Action {
    Action {
        eviction: Some(EvictionSpec {
            grace: Some(Duration::from_secs(5)),
            max_pods_per_round,
            evict_unowned: false,
        }),
        ..disabling_scheduling("away")
    }
}

/// Evicts one pod of the namespace `batch` at a time, and leaves scheduling enabled: the taint would hide what schedulers do.
pub fn evicting_only() -> Action {
    Action {
        scheduling: None,
        name: action("away").name,
        ..eviction_action(1)
    }
}

/// Allows every action on every pod.
pub fn allow_all() -> PodPolicy {
    PodPolicy {
        name: "all".to_owned(),
        labels: Some(Selector::default()),
        scopes: Vec::new(),
        allowed: vec!["throttle".to_owned(), "evict".to_owned()],
        standing: Standing::default(),
    }
}

pub fn policy(rules: Vec<Rule>) -> Arc<PolicySet> {
    Arc::new(PolicySet {
        rules,
        pods: vec![allow_all()],
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
        resources_reported: false,
        resizing: false,
        elastic: false,
        cpu_request: MilliCpu::ZERO,
        resources: Resources::default(),
        exec_probes: false,
        container_requests: BTreeMap::new(),
        grace: Duration::from_secs(30),
        protected: false,
        reserved: None,
        eviction_exemption: None,
        owned: true,
        owner: None,
    }
}

/// A pod with its usage until the next sample.
#[derive(Clone, Debug)]
pub struct Load {
    pub pod: Pod,
    /// Millicores.
    pub cpu: u64,
    pub unreclaimable: u64,
    pub cache: u64,
    pub quota: Quota,
    pub nanos: u64,
}

impl Load {
    pub fn new(uid: &str, cpu: u64) -> Self {
        Self {
            pod: pod(uid),
            cpu,
            unreclaimable: 0,
            cache: 0,
            quota: Quota::Unlimited,
            nanos: 0,
        }
    }
}

/// A node whose load is set by the test.
#[derive(Debug)]
pub struct Node {
    pub engine: Engine,
    pub plan: Plan,
    pub now: BootTime,
    /// The wall clock at the next sample; it runs on.
    pub time: Option<Timestamp>,
    pub sample: Sample,
    pub pods: Vec<Load>,
    /// CPU usage of the node in millicores.
    pub cpu: u64,
    /// Memory usage of the node in bytes.
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
            time: None,
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

    /// Advances the time by `elapsed` with the current load and takes a sample.
    pub fn advance(&mut self, elapsed: Duration) {
        self.now = self.now + elapsed;
        self.time = self.time.map(|time| time + elapsed);
        let nanos = u64::try_from(elapsed.as_nanos()).unwrap();
        self.busy += self.cpu * (nanos / 1000);
        self.idle += (u64::from(CPUS) * 1000).saturating_sub(self.cpu) * (nanos / 1000);
        let allowed: Vec<u64> = self.pods.iter().map(|load| self.allowed(load)).collect();
        for (load, allowed) in self.pods.iter_mut().zip(allowed) {
            load.nanos += allowed * (nanos / 1000);
        }
        self.sample = Sample {
            at: self.now,
            time: self.time,
            node: NodeSample {
                cpu: Some(CpuTimes {
                    busy: self.busy,
                    idle: self.idle,
                    online: CPUS,
                }),
                memory: Some(NodeMemory {
                    total: Bytes(32 * GIB),
                    available: Bytes(32 * GIB - self.memory),
                    ..NodeMemory::default()
                }),
                ..NodeSample::default()
            },
            pods: self.pods.iter().map(|load| self.pod_sample(load)).collect(),
            ..Sample::default()
        };
    }

    /// The millicores that the pod uses under the quotas of the plan.
    fn allowed(&self, load: &Load) -> u64 {
        let uid = load.pod.uid.to_string();
        let quotas: Option<u64> = self.quotas(&uid).into_iter().sum();
        let is_throttled = !self.quotas(&uid).is_empty();
        quotas
            .filter(|_| is_throttled)
            .map_or(load.cpu, |quota| quota.min(load.cpu))
    }

    fn pod_sample(&self, load: &Load) -> PodSample {
        PodSample {
            cpu_nanos: Some(load.nanos),
            memory: Some(Bytes(load.unreclaimable + load.cache)),
            memory_parts: Some(MemoryParts {
                unreclaimable: Bytes(load.unreclaimable),
                cache: Bytes(load.cache),
            }),
            target_cgroups: vec![TargetCgroupSample {
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

    /// Advances by one period with the current load and evaluates.
    pub fn tick(&mut self) -> &Plan {
        self.advance(PERIOD);
        self.step()
    }

    /// One period with `cpu` millicores used on the node.
    pub fn at(&mut self, cpu: u64) -> &Plan {
        self.cpu = cpu;
        self.tick()
    }

    /// One period with `memory` bytes used on the node.
    pub fn at_memory(&mut self, memory: u64) -> &Plan {
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

    /// Quotas in millicores of a pod's target cgroups in the plan.
    pub fn quotas(&self, uid: &str) -> Vec<Option<u64>> {
        let uid = PodUid::from(uid);
        let throttle = self.plan.throttles.iter().find(|t| t.uid == uid);
        let target_cgroups = throttle.into_iter().flat_map(|t| &t.target_cgroups);
        target_cgroups
            .map(|target_cgroup| target_cgroup.quota.map(|q| q.0))
            .collect()
    }

    pub fn evicted(&self) -> Vec<String> {
        let evictions = self.plan.evictions.iter();
        evictions.map(|evict| evict.uid.to_string()).collect()
    }

    pub fn skipped(&self) -> Vec<(String, plimsoll::engine::plan::Skipped)> {
        let transitions = self.plan.transitions.iter();
        transitions
            .filter_map(|t| match &t.change {
                PlanChange::Skipped { pod, reason } => Some((pod.to_string(), *reason)),
                _ => None,
            })
            .collect()
    }

    pub fn state_changes(&self) -> Vec<(RuleState, RuleState)> {
        state_changes(&self.plan.transitions)
    }
}

pub fn state_changes(transitions: &[Transition]) -> Vec<(RuleState, RuleState)> {
    let transitions = transitions.iter();
    transitions
        .filter_map(|t| match t.change {
            PlanChange::State { from, to, .. } => Some((from, to)),
            _ => None,
        })
        .collect()
}

/// Replaces the engine by a new one, restored from the saved state and the throttles in force, as from a journal.
pub fn restart(node: &mut Node, policy: PolicySet) {
    let saved = serde_json::to_string(&node.engine.state()).unwrap();
    let state = serde_json::from_str(&saved).unwrap();
    let quota = |uid: &PodUid| {
        let load = node.pods.iter().find(|load| load.pod.uid == *uid);
        load.map_or(Quota::Unlimited, |load| load.quota)
    };
    let adopt = |throttle: &PodThrottle| AdoptedThrottle {
        uid: throttle.uid.clone(),
        rule: throttle.rule.clone(),
        ratio: throttle.ratio,
        idle: throttle.is_lowest(),
        burst: throttle.burst,
        target_cgroups: throttle
            .target_cgroups
            .iter()
            .map(|target_cgroup| {
                (
                    target_cgroup.cgroup.clone(),
                    target_cgroup.base,
                    quota(&throttle.uid),
                )
            })
            .collect(),
    };
    let throttles: Vec<_> = node.plan.throttles.iter().map(adopt).collect();
    node.engine = Engine::new();
    node.engine.set_policy(Arc::new(policy));
    node.set_pods();
    node.engine.adopt(node.now, &state, &throttles);
}
