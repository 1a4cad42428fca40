//! The plant beside real kernels, and the engine in a closed loop with them.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;
mod kernel_support;
mod plant;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use engine_support::{pod, rule, throttling};
use kernel_support::{World, assert_fine, wait_for, world};
use plant::{Plant, Worker};
use plimsoll::engine::plan::Plan;
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::policy::{Action, PolicySet, Rule};
use plimsoll::engine::protected::Guard;
use plimsoll::engine::sample::{PodSample, Sample};
use plimsoll::engine::{Demand, Engine};
use plimsoll::node::actuate::throttle::Throttler;
use plimsoll::node::cgroup::CgroupPath;
use plimsoll::node::clock::boot_time;
use plimsoll::node::collect::Sampler;

/// Pods of real cgroups, one test at a time.
struct Bed {
    world: World,
    sampler: Sampler,
    pods: Vec<(&'static str, CgroupPath)>,
    _quiet: MutexGuard<'static, ()>,
}

impl Bed {
    fn new(names: &[&'static str]) -> Option<Self> {
        static QUIET: Mutex<()> = Mutex::new(());
        let quiet = QUIET.lock().unwrap_or_else(PoisonError::into_inner);
        let world = world()?;
        world.prefer();
        let pods: Vec<_> = names.iter().map(|name| (*name, world.pod(name))).collect();
        let mut sampler = Sampler::new(Path::new("/proc"), world.hierarchy.clone());
        let cgroups = pods
            .iter()
            .map(|(name, path)| (PodUid::from(*name), path.clone()));
        sampler.set_pods(cgroups);
        Some(Self {
            world,
            sampler,
            pods,
            _quiet: quiet,
        })
    }

    fn path(&self, name: &str) -> CgroupPath {
        let mut pods = self.pods.iter();
        pods.find(|(known, _)| *known == name).unwrap().1.clone()
    }

    fn burn(&mut self, name: &str, threads: usize) {
        let path = self.path(name);
        self.world.burn(&path, threads);
    }

    fn sample(&mut self, demand: &Demand) -> Sample {
        let (now, mut sample) = (boot_time(), Sample::default());
        self.sampler.sample_node(now, demand, &mut sample);
        self.sampler.sample_pods(now, demand, &mut sample);
        sample
    }

    /// Over some seconds: CPUs and the stalled share of each pod, the stalled share of the node, and the CPUs that were
    /// neither theirs nor idle.
    fn measure(&mut self) -> (Vec<(f64, Option<f64>)>, f64, f64) {
        let demand = Demand {
            pressure: [true; 3],
            pod_pressure: true,
            ..Demand::default()
        };
        let before = self.sample(&demand);
        wait_for(Duration::from_secs(4), || false);
        let after = self.sample(&demand);
        let nanos = after.at.since(before.at).as_nanos() as f64;
        let share = |from: Option<u64>, to: Option<u64>| Some((to? - from?) as f64 / nanos);
        let pod = |(from, to): (&PodSample, &PodSample)| {
            let stalled = share(from.waits.stalled[0], to.waits.stalled[0]);
            (share(from.cpu_nanos, to.cpu_nanos).unwrap(), stalled)
        };
        let total = |sample: &Sample| sample.node.pressure[0].unwrap().totals[0];
        let node = share(total(&before), total(&after)).unwrap();
        let pods: Vec<_> = before.pods.iter().zip(&after.pods).map(pod).collect();
        let idle = |sample: &Sample| sample.node.cpu.map(|cpu| cpu.idle);
        let idle = share(idle(&before), idle(&after)).unwrap();
        let others = cpus() as f64 - idle - pods.iter().map(|(used, _)| used).sum::<f64>();
        (pods, node, others)
    }
}

fn cpus() -> usize {
    std::thread::available_parallelism().unwrap().get()
}

/// The kernel does what the plant says: each pod's CPU and stall, and that the node is stalled with its pods.
fn compare(bed: &mut Bed, workers: Vec<Worker>) {
    let mut plant = Plant::new(u32::try_from(cpus()).unwrap(), Vec::new(), workers);
    plant.pass(10);
    // What the last enforcement period had left is used up first.
    wait_for(Duration::from_millis(300), || false);
    let (pods, node, others) = bed.measure();
    if others > 0.15 {
        eprintln!("skipped: other work, or the host of this machine, took {others:.2} CPUs");
        return;
    }
    let mut highest = 0.0_f64;
    for (worker, (used, stalled)) in plant.workers.iter().zip(&pods) {
        let name = &worker.pod.name;
        println!(
            "{name}: {used:.2} CPUs of {:.2}, stalled {stalled:?} of {:.2}",
            worker.gets, worker.stalls
        );
        assert!(
            (used - worker.gets).abs() <= 0.1 + 0.15 * worker.gets,
            "{name}"
        );
        if let Some(stalled) = stalled {
            assert!((stalled - worker.stalls).abs() <= 0.3, "{name}");
        }
        highest = highest.max(worker.stalls);
    }
    println!("node stalled {node:.2}");
    // The kernel takes the mean over the CPUs: a wait on one of two counts half.
    assert!(node >= 0.5 * highest - 0.1, "{node} of {highest}");
}

#[test]
fn a_quota_stalls_its_pod_and_the_node() {
    let Some(mut bed) = Bed::new(&["held"]) else {
        return;
    };
    bed.burn("held", 2);
    bed.world.set_quota(&bed.path("held"), Some(30_000));
    let held = Worker {
        limit: Some(0.3),
        ..Worker::new(pod("held"), 2.0)
    };
    compare(&mut bed, vec![held]);
}

#[test]
fn equal_weights_share_the_cpus_and_all_wait() {
    let Some(mut bed) = Bed::new(&["a", "b"]) else {
        return;
    };
    let threads = cpus();
    bed.burn("a", threads);
    bed.burn("b", threads);
    let worker = |name| Worker::new(pod(name), threads as f64);
    compare(&mut bed, vec![worker("a"), worker("b")]);
}

#[test]
fn the_idle_class_gets_what_is_left() {
    let Some(mut bed) = Bed::new(&["idle", "other"]) else {
        return;
    };
    let idle = bed.path("idle");
    if !bed.world.has(&idle, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    let threads = cpus();
    bed.world.write(&idle, "cpu.idle", "1");
    bed.burn("idle", threads);
    bed.burn("other", threads - 1);
    let idle = Worker {
        idle: true,
        ..Worker::new(pod("idle"), threads as f64)
    };
    let other = Worker::new(pod("other"), threads as f64 - 1.0);
    compare(&mut bed, vec![idle, other]);
}

const PERIOD: Duration = Duration::from_secs(1);
const COOL_DOWN: Duration = Duration::from_secs(5);

fn pressure_rule(metric: &str) -> Rule {
    let action = Action {
        cool_down: COOL_DOWN,
        ..throttling(10, 30)
    };
    Rule {
        period: PERIOD,
        ..rule("node/pressure", metric, 10.0, action)
    }
}

/// The engine, the sampler and the throttler on real cgroups, once a second.
struct Loop {
    bed: Bed,
    engine: Engine,
    throttler: Throttler,
    plan: Plan,
    sample: Sample,
}

impl Loop {
    fn new(bed: Bed, metric: &str) -> Self {
        let mut engine = Engine::new();
        engine.set_policy(Arc::new(PolicySet {
            rules: vec![pressure_rule(metric)],
            pods: vec![plant::batch()],
        }));
        let mut greedy = pod("greedy");
        "batch".clone_into(&mut greedy.namespace);
        engine.set_pods(vec![Arc::new(greedy), Arc::new(pod("important"))]);
        let throttler = bed.world.throttler();
        Self {
            bed,
            engine,
            throttler,
            plan: Plan::default(),
            sample: Sample::default(),
        }
    }

    fn step(&mut self) {
        let (now, demand) = (boot_time(), self.engine.demand());
        self.bed.sampler.sample_node(now, &demand, &mut self.sample);
        self.bed.sampler.sample_pods(now, &demand, &mut self.sample);
        self.engine.step(boot_time(), &self.sample, &mut self.plan);
        if self.plan.evaluated {
            let find = self.bed.world.find();
            assert_fine(&self.throttler.apply(now, &self.plan.throttles, &find));
        }
        wait_for(PERIOD, || false);
    }

    /// Steps until the condition holds; for how long that was, or `None` where it was not in time.
    fn until(&mut self, most: Duration, holds: impl Fn(&Self) -> bool) -> Option<Duration> {
        let start = boot_time();
        while !holds(self) {
            if boot_time().since(start) > most {
                return None;
            }
            self.step();
        }
        Some(boot_time().since(start))
    }

    /// By the estimate of cgroup v1.
    fn is_machine_busy(&self) -> bool {
        let guard = self.engine.reports().next().unwrap().guard;
        matches!(guard, Some(Guard::BusiestSample(percent)) if percent >= 90.0)
    }

    fn is_held(&self) -> bool {
        self.bed.world.quota(&self.bed.path("greedy")) != self.bed.world.quota_text(None)
    }
}

/// Protected work waits for half a minute beside a pod that goes on wanting more than its quota gives. Without the judgement
/// by the protected the pod's own stall keeps the node's pressure, and so its quota, up for ever.
fn a_spike_of(metric: &str) {
    let Some(mut bed) = Bed::new(&["greedy", "important"]) else {
        return;
    };
    let is_v2 = bed.world.is_v2();
    if !is_v2 && metric.starts_with("protected") {
        eprintln!("skipped: cgroup v1 has no pressure by cgroup");
        return;
    }
    bed.burn("greedy", cpus());
    let mut node = Loop::new(bed, metric);
    let important = node.bed.path("important");
    let threads = cpus();
    node.bed.burn("important", threads);
    let spike = boot_time();
    let begun = node.until(Duration::from_secs(30), Loop::is_held);
    assert!(
        begun.is_some(),
        "{metric}: no throttle while protected work waits"
    );
    while boot_time().since(spike) < Duration::from_secs(30) {
        node.step();
    }
    assert!(node.is_held(), "{metric}: released during the spike");
    // The greedy pod goes on wanting one CPU, ten times what its floor gives.
    let greedy = node.bed.path("greedy");
    node.bed.world.end_all_but(0, &important);
    node.bed.world.end_all_but(1, &greedy);
    let steps = PERIOD * 3;
    let released = node.until(COOL_DOWN + steps + Duration::from_secs(15), |node| {
        !node.is_held()
    });
    println!("{metric}: held after {begun:?}, released after {released:?}");
    if !is_v2 && released.is_none() && node.is_machine_busy() {
        eprintln!(
            "skipped: other work keeps the CPUs of this machine busy, which cgroup v1 can't be told from ours"
        );
        return;
    }
    assert!(released.is_some(), "{metric}: the throttle keeps itself up");
    // Without pressure by cgroup other work on the machine is a reason to throttle, too.
    for _ in 0..if is_v2 { 15 } else { 0 } {
        node.step();
        assert!(
            !node.is_held(),
            "{metric}: throttled again for its own waiting"
        );
    }
}

#[test]
fn cpu_pressure_releases_a_pod_that_wants_more_than_its_quota() {
    a_spike_of("cpu_pressure_some_avg10");
}

#[test]
fn the_delay_of_the_protected_throttles_and_releases() {
    a_spike_of("protected_cpu_delay_max");
}
