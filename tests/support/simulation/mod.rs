//! A simulated node on which the engine's actions have effects: quotas, the idle class, reclaim and evictions change what
//! pods use, which changes busy time, pressure and load averages like a kernel would. The engine only sees these.
//!
//! A tick is a second, or as many as [`Simulation::tick_seconds`] says: that saves time where pods change slowly.
//! `tests/kernel/closed_loop.rs` compares it with real kernels.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "every test file is its own crate and uses only part of this; a model may fail its test"
)]

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use plimsoll::engine::Engine;
use plimsoll::engine::metric::ActionKind;
use plimsoll::engine::plan::{CpuClass, Feedback, Plan};
use plimsoll::engine::pod::{Pod, PodUid};
use plimsoll::engine::policy::{PodPolicy, PolicySet, Rule, ScopeRequirement, Standing};
use plimsoll::engine::sample::{
    CpuTimes, MemoryParts, NodeMemory, NodeSample, PodSample, Pressure, Sample, TargetCgroupSample,
    WaitCounters,
};
use plimsoll::engine::selector::Selector;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::{Bytes, Quota};

const TICK: Duration = Duration::from_secs(1);
const NANOS: f64 = 1e9;
/// The pod's own cgroup.
static POD_CGROUP: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from(""));
/// Seconds between updates of the kernel's averages.
const LOAD_STEP: u64 = 5;
const PRESSURE_STEP: u64 = 2;
/// Bytes per second that a pod reads again.
const DISK_RATE: u64 = 256 << 20;

/// A pod of the simulation.
#[derive(Clone, Debug)]
pub struct Worker {
    pub pod: Pod,
    /// CPUs that it would use if it had the node to itself.
    pub demand: f64,
    /// Share of contended CPUs, relative to others (`cpu.weight`).
    pub weight: f64,
    /// A limit of its own, in CPUs.
    pub limit: Option<f64>,
    /// A number of the caller's choice.
    pub tag: usize,
    /// Anonymous memory in bytes.
    pub memory: u64,
    /// Page cache in bytes, and how many bytes it reads per second.
    pub cache: u64,
    pub reads: u64,
    /// Bytes of page cache that it always uses: it reads them again when they are reclaimed, and waits for that.
    pub working_set: u64,
    /// Seconds that it keeps running after its eviction.
    pub lingers: u64,
    /// The engine's quota in its file, in CPUs, and the least that the kernel accepts: 1 ms per enforcement period.
    pub written: Option<f64>,
    pub min_quota: f64,
    /// The engine's quota as the kernel enforces it, in CPUs.
    pub quota: Option<f64>,
    pub idle: bool,
    /// The tick at which it is gone.
    pub ends: Option<u64>,
    /// CPUs that it got in the last tick, and the shares of the tick that it waited for CPU and for memory.
    pub allocated: f64,
    pub stalls: f64,
    pub memory_stalls: f64,
    /// Counters of its cgroup.
    pub used: f64,
    pub stalled: f64,
    pub memory_stalled: f64,
    pub periods: f64,
    pub throttled: f64,
    /// How often its own memory limit made it reclaim.
    pub own_limit_reclaims: f64,
    /// Share of the time that it waits for memory at its own limit.
    pub limit_stalls: f64,
}

fn lower(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

impl Worker {
    pub fn new(pod: Pod, demand: f64) -> Self {
        Self {
            pod,
            demand,
            weight: 1.0,
            limit: None,
            tag: 0,
            memory: 0,
            cache: 0,
            reads: 0,
            working_set: 0,
            lingers: 2,
            written: None,
            min_quota: 0.01,
            quota: None,
            idle: false,
            ends: None,
            allocated: 0.0,
            stalls: 0.0,
            memory_stalls: 0.0,
            used: 0.0,
            stalled: 0.0,
            memory_stalled: 0.0,
            periods: 0.0,
            throttled: 0.0,
            own_limit_reclaims: 0.0,
            limit_stalls: 0.0,
        }
    }

    fn cap(&self) -> Option<f64> {
        lower(self.limit, self.quota)
    }

    /// CPUs that it would use without contention.
    fn effective_demand(&self) -> f64 {
        self.cap().map_or(self.demand, |cap| self.demand.min(cap))
    }

    fn advance(&mut self, seconds: f64) {
        // Its work takes `demand / allocated` as long and is stalled for the rest. If threads for a full CPU or more do not run,
        // one always waits.
        self.stalls = if self.demand > 0.0 {
            let stretched = 1.0 - self.allocated / self.demand;
            stretched.max(self.demand - self.allocated).clamp(0.0, 1.0)
        } else {
            0.0
        };
        self.used += self.allocated * NANOS * seconds;
        self.stalled += self.stalls * NANOS * seconds;
        if self.cap().is_some() {
            self.periods += 10.0 * seconds;
            self.throttled += 10.0 * seconds * self.throttled_share();
        }
    }

    /// Share of the enforcement periods in which it is throttled: all of them if the quota is the limit.
    fn throttled_share(&self) -> f64 {
        let binds = self
            .cap()
            .is_some_and(|cap| cap < self.demand && self.allocated >= cap - 1e-9);
        f64::from(u8::from(binds))
    }
}

/// Divides `cpus` in proportion to the weights, but gives no one more than it wants.
pub fn share(cpus: f64, demands: &[f64], weights: &[f64]) -> Vec<f64> {
    if demands.iter().sum::<f64>() <= cpus {
        return demands.to_vec();
    }
    let mut allocated = vec![0.0; demands.len()];
    let mut left = cpus;
    let mut open: Vec<usize> = (0..demands.len()).collect();
    while !open.is_empty() && left > 1e-9 {
        let total: f64 = open.iter().map(|i| weights[*i]).sum();
        let fair = |i: usize| left * weights[i] / total;
        let (satisfied, unsatisfied): (Vec<_>, Vec<_>) =
            open.iter().partition(|i| demands[**i] <= fair(**i) + 1e-9);
        if satisfied.is_empty() {
            for i in unsatisfied {
                allocated[i] = fair(i);
            }
            return allocated;
        }
        for i in &satisfied {
            allocated[*i] = demands[*i];
        }
        left -= satisfied.iter().map(|i| demands[*i]).sum::<f64>();
        open = unsatisfied;
    }
    allocated
}

/// Pressure of one resource on the node.
#[derive(Clone, Copy, Debug, Default)]
struct Stalled {
    /// Nanoseconds.
    total: f64,
    before: f64,
    /// Percent, over 10, 60 and 300 s.
    averages: [f64; 3],
}

impl Stalled {
    fn average(&mut self, steps: u64) {
        let elapsed = (steps * PRESSURE_STEP) as f64;
        let stalled = (self.total - self.before) / (elapsed * NANOS);
        self.before = self.total;
        for (average, seconds) in self.averages.iter_mut().zip([10.0, 60.0, 300.0]) {
            let decay = (-elapsed / seconds).exp();
            *average = *average * decay + stalled * 100.0 * (1.0 - decay);
        }
    }
}

/// A node, its pods, and the engine that acts on them.
#[derive(Debug)]
pub struct Simulation {
    pub cpus: u32,
    pub memory: u64,
    pub workers: Vec<Worker>,
    pub engine: Engine,
    pub plan: Plan,
    /// Seconds since the start.
    pub now: u64,
    /// Seconds of a tick.
    pub tick_seconds: u64,
    /// Pressure by cgroup, as cgroup v2 has it.
    pub v2: bool,
    /// The kind of action that has no effect.
    pub ineffective: Option<ActionKind>,
    /// Evictions so far: time and pod.
    pub evicted: Vec<(u64, String)>,
    /// Reclaims so far: time, pod and bytes.
    pub reclaimed: Vec<(u64, String, u64)>,
    busy: f64,
    idle: f64,
    load: [f64; 3],
    /// CPU and memory.
    stalled: [Stalled; 2],
    shares: Vec<f64>,
    /// Sum of tasks over all ticks, so that rounding to whole tasks per sample keeps the mean.
    task_seconds: f64,
}

impl Simulation {
    pub fn new(cpus: u32, rules: Vec<Rule>, workers: Vec<Worker>) -> Self {
        let mut engine = Engine::new();
        engine.set_policy(Arc::new(PolicySet {
            rules,
            pods: vec![batch()],
        }));
        let mut sim = Self {
            cpus,
            memory: 32 << 30,
            workers,
            engine,
            plan: Plan::default(),
            now: 1000,
            tick_seconds: 1,
            v2: true,
            ineffective: None,
            evicted: Vec::new(),
            reclaimed: Vec::new(),
            busy: 0.0,
            idle: 0.0,
            load: [0.0; 3],
            stalled: [Stalled::default(); 2],
            shares: Vec::new(),
            task_seconds: 0.0,
        };
        sim.set_pods();
        sim
    }

    /// Without per-cgroup pressure, as on cgroup v1.
    pub fn on_v1(mut self) -> Self {
        self.v2 = false;
        self
    }

    pub fn worker(&mut self, name: &str) -> &mut Worker {
        let mut workers = self.workers.iter_mut();
        workers.find(|worker| worker.pod.name == name).unwrap()
    }

    /// CPUs in use.
    pub fn uses(&self) -> f64 {
        self.shares.iter().sum()
    }

    /// Percentage of the last tick that the pod was stalled, for any cause.
    pub fn stalls(&self, name: &str) -> f64 {
        let mut workers = self.workers.iter();
        workers.find(|it| it.pod.name == name).unwrap().stalls * 100.0
    }

    /// CPUs that would be used without the terminating pods.
    pub fn remaining(&self) -> f64 {
        let stays = |worker: &&Worker| worker.ends.is_none();
        let demands = self
            .workers
            .iter()
            .filter(stays)
            .map(Worker::effective_demand);
        demands.sum::<f64>().min(f64::from(self.cpus))
    }

    /// Starts a pod.
    pub fn start(&mut self, worker: Worker) {
        self.workers.push(worker);
        self.set_pods();
    }

    /// Makes the engine see edits of the workers' pods.
    pub fn set_pods(&mut self) {
        let pods = self.workers.iter().map(|it| Arc::new(it.pod.clone()));
        self.engine.set_pods(pods.collect());
    }

    /// Advances by one tick: samples, evaluates and acts.
    pub fn tick(&mut self) {
        self.now += self.tick_seconds;
        let before = self.workers.len();
        let now = self.now;
        self.workers
            .retain(|it| it.ends.is_none_or(|ends| now < ends));
        if self.workers.len() != before {
            self.set_pods();
        }
        self.run();
        let sample = self.sample();
        let at = BootTime::from_nanos(self.now * 1_000_000_000);
        self.engine.step(at, &sample, &mut self.plan);
        if self.plan.evaluated {
            self.act();
        }
    }

    pub fn advance(&mut self, seconds: u64) {
        (0..seconds).for_each(|_| self.tick());
    }

    /// Divides the CPUs for this tick and updates the kernel's counters.
    fn run(&mut self) {
        let (cpus, seconds) = (f64::from(self.cpus), self.tick_seconds as f64);
        let class = |idle: bool| {
            move |it: &Worker| {
                if it.idle == idle {
                    it.effective_demand()
                } else {
                    0.0
                }
            }
        };
        let weights: Vec<f64> = self.workers.iter().map(|it| it.weight).collect();
        let first: Vec<f64> = self.workers.iter().map(class(false)).collect();
        let first = share(cpus, &first, &weights);
        let rest = cpus - first.iter().sum::<f64>();
        let second: Vec<f64> = self.workers.iter().map(class(true)).collect();
        let second = share(rest, &second, &weights);
        for (worker, (a, b)) in self.workers.iter_mut().zip(first.iter().zip(&second)) {
            worker.allocated = a + b;
            worker.advance(seconds);
        }
        self.shares = self.workers.iter().map(|it| it.allocated).collect();
        self.busy += self.uses() * NANOS * seconds;
        self.idle += (cpus - self.uses()) * NANOS * seconds;
        // A task of the node is stalled if one of any pod is.
        let free: f64 = self.workers.iter().map(|it| 1.0 - it.stalls).product();
        self.stalled[0].total += (1.0 - free) * NANOS * seconds;
        self.read_files();
        self.task_seconds += self.tasks() * seconds;
        self.average();
    }

    /// Running and runnable tasks; those throttled by a quota are not on a run queue.
    pub fn tasks(&self) -> f64 {
        let tasks = self.workers.iter().map(|it| {
            let waits = (it.effective_demand() - it.allocated).max(0.0);
            it.allocated + waits
        });
        tasks.sum()
    }

    fn average(&mut self) {
        // Steps of so many seconds in this tick.
        let steps = |seconds: u64| self.now / seconds - (self.now - self.tick_seconds) / seconds;
        let (load_steps, pressure_steps) = (steps(LOAD_STEP), steps(PRESSURE_STEP));
        if load_steps > 0 {
            let (tasks, elapsed) = (self.tasks(), (load_steps * LOAD_STEP) as f64);
            for (load, minutes) in self.load.iter_mut().zip([1.0, 5.0, 15.0]) {
                let decay = (-elapsed / (minutes * 60.0)).exp();
                *load = *load * decay + tasks * (1.0 - decay);
            }
        }
        if pressure_steps > 0 {
            for stalled in &mut self.stalled {
                stalled.average(pressure_steps);
            }
        }
    }

    /// Once memory is full, reads evict page cache, and readers wait for that half of the time. Those whose working set was
    /// reclaimed wait until it is read again.
    fn read_files(&mut self) {
        let seconds = self.tick_seconds;
        for worker in &mut self.workers {
            let missing = worker.working_set.saturating_sub(worker.cache);
            let read = missing.min(DISK_RATE * seconds);
            worker.cache += read;
            worker.memory_stalls = read as f64 / (DISK_RATE * seconds) as f64;
        }
        let read = |worker: &Worker| worker.reads * seconds;
        let reads: u64 = self.workers.iter().map(read).sum();
        let used: u64 = self.workers.iter().map(|it| it.memory + it.cache).sum();
        let excess = (used + reads).saturating_sub(self.memory);
        let cache: u64 = self.workers.iter().map(|it| it.cache + read(it)).sum();
        let share = excess as f64 / reads.max(1) as f64;
        for worker in &mut self.workers {
            worker.cache += worker.reads * seconds;
            let pushed = excess as f64 * worker.cache as f64 / cache.max(1) as f64;
            worker.cache -= whole(pushed).min(worker.cache);
            worker.memory_stalls = worker.memory_stalls.max(worker.limit_stalls);
            worker.own_limit_reclaims += worker.limit_stalls * 1000.0 * seconds as f64;
            if worker.reads > 0 {
                worker.memory_stalls = worker.memory_stalls.max(0.5 * share);
            }
            worker.memory_stalled += worker.memory_stalls * NANOS * seconds as f64;
        }
        let highest = self.workers.iter().map(|it| it.memory_stalls);
        self.stalled[1].total += highest.fold(0.0, f64::max) * NANOS * seconds as f64;
    }

    fn sample(&self) -> Sample {
        let at = BootTime::from_nanos(self.now * 1_000_000_000);
        let used: u64 = self.workers.iter().map(|it| it.memory).sum();
        let pressure = |stalled: Stalled| Pressure {
            some: stalled.averages,
            full: None,
            totals: [Some(whole(stalled.total)), None],
        };
        let [cpu, memory] = self.stalled.map(pressure);
        Sample {
            at,
            node: NodeSample {
                cpu: Some(CpuTimes {
                    busy: whole(self.busy),
                    idle: whole(self.idle),
                    online: self.cpus,
                }),
                memory: Some(NodeMemory {
                    total: Bytes(self.memory),
                    available: Bytes(self.memory.saturating_sub(used)),
                    ..NodeMemory::default()
                }),
                load: Some(self.load),
                tasks: Some(whole(self.task_seconds) - whole(self.task_seconds - self.tasks())),
                pressure: [Some(cpu), Some(memory), None],
                ..NodeSample::default()
            },
            pressure_by_cgroup: self.v2,
            pods: self.workers.iter().map(|it| self.pod(it, at)).collect(),
            ..Sample::default()
        }
    }

    fn pod(&self, worker: &Worker, at: BootTime) -> PodSample {
        let file = lower(worker.limit, worker.written);
        let quota = file.map_or(Quota::Unlimited, |quota| {
            Quota::Limit(plimsoll::engine::units::MilliCpu(whole(quota * 1000.0)))
        });
        PodSample {
            cpu_nanos: Some(whole(worker.used)),
            memory: Some(Bytes(worker.memory + worker.cache)),
            memory_parts: Some(MemoryParts {
                unreclaimable: Bytes(worker.memory),
                cache: Bytes(worker.cache),
            }),
            waits: WaitCounters {
                stalled: [
                    self.v2.then(|| whole(worker.stalled)),
                    self.v2.then(|| whole(worker.memory_stalled)),
                    Some(0),
                ],
                periods: Some(whole(worker.periods)),
                throttled_periods: Some(whole(worker.throttled)),
                own_limit_reclaims: self.v2.then(|| whole(worker.own_limit_reclaims)),
            },
            target_cgroups: vec![TargetCgroupSample {
                cgroup: Arc::clone(&POD_CGROUP),
                cpu_nanos: Some(whole(worker.used)),
                quota: Some(quota),
            }],
            ..PodSample::new(worker.pod.uid.clone(), at)
        }
    }

    /// Applies the plan, as the kernel and the API server would.
    fn act(&mut self) {
        for worker in &mut self.workers {
            let throttle = self
                .plan
                .throttles
                .iter()
                .find(|it| it.uid == worker.pod.uid);
            worker.idle = throttle.is_some_and(|it| it.class == CpuClass::Idle);
            let quota = throttle.and_then(|it| it.target_cgroups[0].quota);
            worker.written = quota.map(|it| (it.0 as f64 / 1000.0).max(worker.min_quota));
            let is_enforced = self.ineffective != Some(ActionKind::CpuThrottle);
            worker.quota = worker.written.filter(|_| is_enforced);
        }
        for reclaim in &self.plan.reclaims {
            let mut workers = self.workers.iter_mut();
            let worker = workers.find(|it| it.pod.uid == reclaim.uid).unwrap();
            if self.ineffective == Some(ActionKind::ForceGc) {
                self.engine.feedback(&Feedback::NothingReclaimed {
                    uid: reclaim.uid.clone(),
                    rule: reclaim.rule.clone(),
                });
            } else {
                worker.cache = worker.cache.saturating_sub(reclaim.amount.0);
            }
            let name = worker.pod.name.clone();
            self.reclaimed.push((self.now, name, reclaim.amount.0));
        }
        let evictions: Vec<PodUid> = self
            .plan
            .evictions
            .iter()
            .map(|it| it.uid.clone())
            .collect();
        for uid in evictions {
            let now = self.now;
            let mut workers = self.workers.iter_mut();
            let worker = workers.find(|it| it.pod.uid == uid).unwrap();
            if self.ineffective != Some(ActionKind::Eviction) {
                worker.ends = Some(now + worker.lingers);
                worker.pod.terminating = true;
            }
            self.evicted.push((now, worker.pod.name.clone()));
            self.set_pods();
            self.engine.feedback(&Feedback::EvictionAccepted { uid });
        }
    }
}

/// Pods in the namespace `batch` may be throttled and evicted.
pub fn batch() -> PodPolicy {
    use plimsoll::engine::policy::Membership;
    PodPolicy {
        name: "batch".to_owned(),
        labels: Some(Selector::default()),
        scopes: vec![ScopeRequirement::Namespace(Membership::In(vec![
            "batch".to_owned(),
        ]))],
        allowed: vec!["throttle".to_owned(), "evict".to_owned()],
        standing: Standing::default(),
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "counters of a simulation are small and not negative"
)]
fn whole(value: f64) -> u64 {
    value as u64
}
