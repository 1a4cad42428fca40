//! A node whose pods use what the tests say.

mod expected;
mod line;
mod state;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::engine::plan::Plan;
use crate::engine::policy::{
    Action, CpuThrottle, PodPolicy, PolicySet, Rule, RuleId, Standing, Strategy,
};
use crate::engine::sample::{MemoryParts, NodeMemory, PodSample, Pressure, TargetCgroupSample};
use crate::engine::selector::{Requirement, Selector};
use crate::engine::testing;
use crate::engine::units::{Bytes, MilliCpu};

const CPUS: u32 = 10;
const GIB: u64 = 1 << 30;
const MEMORY: u64 = 100 * GIB;
/// The wall clock at the start.
const TODAY: i64 = 1_800_000_000;

/// One pod of the node.
#[derive(Clone, Debug)]
struct Load {
    pod: Pod,
    /// Millicores and bytes that it uses.
    cpu: u64,
    memory: u64,
    /// Its counter in nanoseconds.
    counter: u64,
    /// Whether its cgroup can be read.
    readable: bool,
}

/// A node of 10 CPUs and 100 GiB that is sampled each second.
struct Node {
    engine: Engine,
    plan: Plan,
    /// Seconds since boot.
    now: u64,
    pods: Vec<Load>,
    /// Millicores and bytes used beside the pods.
    system: u64,
    memory: u64,
    busy: u64,
    idle: u64,
    has_time: bool,
    change: fn(&mut Sample),
}

fn pod(uid: &str, request: u64) -> Pod {
    Pod {
        cpu_request: MilliCpu(request),
        ..testing::pod(uid)
    }
}

fn owned(uid: &str, request: u64) -> Pod {
    Pod {
        owner: Some("owner".into()),
        ..pod(uid, request)
    }
}

impl Node {
    fn new() -> Self {
        Self {
            engine: Engine::new(),
            plan: Plan::default(),
            now: 100_000,
            pods: Vec::new(),
            system: 0,
            memory: 0,
            busy: 0,
            idle: 0,
            has_time: true,
            change: |_| {},
        }
    }

    fn with_rules(rules: Vec<Rule>) -> Self {
        let mut node = Self::new();
        node.engine.set_policy(Arc::new(PolicySet {
            rules,
            pods: vec![PodPolicy {
                name: "all".to_owned(),
                labels: Some(Selector::default()),
                scopes: Vec::new(),
                allowed: vec!["throttle".to_owned()],
                standing: Standing::default(),
            }],
        }));
        node
    }

    fn at(&self) -> BootTime {
        BootTime::default() + Duration::from_secs(self.now)
    }

    fn start(&mut self, pod: Pod, cpu: u64) {
        self.pods.push(Load {
            pod,
            cpu,
            memory: 0,
            counter: 0,
            readable: true,
        });
        self.set_pods();
    }

    fn end(&mut self, uid: &str) {
        self.pods.retain(|load| &*load.pod.uid.0 != uid);
        self.set_pods();
    }

    fn pod(&mut self, uid: &str) -> &mut Load {
        let mut pods = self.pods.iter_mut();
        pods.find(|load| &*load.pod.uid.0 == uid).unwrap()
    }

    fn set_pods(&mut self) {
        let pods = self.pods.iter().map(|load| Arc::new(load.pod.clone()));
        self.engine.set_pods(pods.collect());
    }

    /// Lets a second pass.
    fn pass(&mut self) {
        self.now += 1;
        for load in &mut self.pods {
            let uid = &load.pod.uid;
            let throttle = self.plan.throttles.iter().find(|it| it.uid == *uid);
            let quota = throttle.and_then(|it| it.target_cgroups[0].quota);
            let used = quota.map_or(load.cpu, |quota| quota.0.min(load.cpu));
            load.counter += used * 1_000_000;
            self.busy += used * 1_000_000;
        }
        self.busy += self.system * 1_000_000;
        let total = u64::from(CPUS) * 1_000_000_000 * self.now;
        self.idle = total.saturating_sub(self.busy);
    }

    fn sample(&self) -> Sample {
        let used = self.memory + self.pods.iter().map(|load| load.memory).sum::<u64>();
        let now = TODAY + i64::try_from(self.now).unwrap();
        let mut sample = Sample {
            at: self.at(),
            time: self.has_time.then(|| Timestamp::from_second(now).unwrap()),
            pods: self
                .pods
                .iter()
                .filter_map(|load| self.read(load))
                .collect(),
            ..Sample::default()
        };
        sample.node.cpu = Some(CpuTimes {
            busy: self.busy,
            idle: self.idle,
            online: CPUS,
        });
        sample.node.memory = Some(NodeMemory {
            total: Bytes(MEMORY),
            available: Bytes(MEMORY - used),
            ..NodeMemory::default()
        });
        (self.change)(&mut sample);
        sample
    }

    fn read(&self, load: &Load) -> Option<PodSample> {
        load.readable.then(|| PodSample {
            cpu_nanos: Some(load.counter),
            memory_parts: Some(MemoryParts {
                unreclaimable: Bytes(load.memory),
                cache: Bytes(0),
            }),
            target_cgroups: vec![TargetCgroupSample {
                cgroup: Arc::from(""),
                cpu_nanos: Some(load.counter),
                quota: Some(Quota::Unlimited),
            }],
            ..PodSample::new(load.pod.uid.clone(), self.at())
        })
    }

    fn step(&mut self) {
        let sample = self.sample();
        self.engine.step(sample.at, &sample, &mut self.plan);
    }

    fn advance(&mut self, seconds: u64) {
        for _ in 0..seconds {
            self.pass();
            self.step();
        }
    }

    fn load(&self) -> NodeLoad {
        self.engine.load().unwrap()
    }

    /// Expected millicores.
    fn cpu(&self) -> f64 {
        self.load().cpu.expected * f64::from(CPUS) * 10.0
    }

    /// Expected GiB.
    fn memory(&self) -> f64 {
        self.load().memory.expected * (MEMORY / GIB) as f64 / 100.0
    }

    fn history(&self) -> [Option<f64>; 2] {
        let load = self.load();
        [load.cpu.history, load.memory.history]
    }
}

#[track_caller]
fn near(found: f64, wanted: f64) {
    let tolerance = wanted.abs().max(0.1) * 0.001;
    assert!((found - wanted).abs() <= tolerance, "{found}, not {wanted}");
}

fn throttling() -> Action {
    let throttle = CpuThrottle {
        min_ratio: 10,
        step: 50,
        idle: false,
    };
    Action {
        throttle: Some(throttle),
        ..testing::action("slow")
    }
}

fn rule(id: &str, metric: &str, threshold: f64) -> Rule {
    Rule {
        id: RuleId::from(id),
        ..testing::rule(metric, threshold)
    }
}
