//! Compares the simulated node with real kernels, and runs the engine in a closed loop on them.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::engine_support::{idle_action, pod, rule, throttling};
use crate::kernel_support::{TestCgroups, assert_fine, test_cgroups, wait_for};
use crate::simulation::{Simulation, Worker};
use plimsoll::clock::boot_time;
use plimsoll::engine::plan::{Plan, PlanChange, PodThrottle};
use plimsoll::engine::pod::{Pod, PodUid};
use plimsoll::engine::policy::{Action, PolicySet, Rule};
use plimsoll::engine::sample::{PodSample, Sample};
use plimsoll::engine::{Demand, Engine};
use plimsoll::node::actuate::throttle::Throttler;
use plimsoll::node::cgroup::CgroupPath;
use plimsoll::node::collect::Sampler;

/// Pods as real cgroups, one test at a time.
struct Testbed {
    cgroups: TestCgroups,
    sampler: Sampler,
    pods: Vec<(&'static str, CgroupPath)>,
    _lock: MutexGuard<'static, ()>,
}

impl Testbed {
    fn new(names: &[&'static str]) -> Option<Self> {
        static LOCK: Mutex<()> = Mutex::new(());
        let lock = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
        let cgroups = test_cgroups()?;
        cgroups.prefer();
        let pods: Vec<_> = names
            .iter()
            .map(|name| (*name, cgroups.pod(name)))
            .collect();
        let mut sampler = Sampler::new(Path::new("/proc"), cgroups.hierarchy.clone());
        let paths = pods
            .iter()
            .map(|(name, path)| (PodUid::from(*name), path.clone()));
        sampler.set_pods(paths);
        Some(Self {
            cgroups,
            sampler,
            pods,
            _lock: lock,
        })
    }

    fn path(&self, name: &str) -> CgroupPath {
        let mut pods = self.pods.iter();
        pods.find(|(known, _)| *known == name).unwrap().1.clone()
    }

    fn burn(&mut self, name: &str, threads: usize) {
        let path = self.path(name);
        self.cgroups.burn(&path, threads);
    }

    fn sample(&mut self, demand: &Demand) -> Sample {
        let (now, mut sample) = (boot_time(), Sample::default());
        self.sampler.sample_node(now, demand, &mut sample);
        self.sampler.sample_pods(now, demand, &mut sample);
        sample
    }

    /// Measures over some seconds: CPUs and stalled share of each pod, stalled share of the node, and CPUs used by others.
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

/// Checks each pod's CPU usage and stall against the simulation, and that the node is stalled with its pods.
fn compare(testbed: &mut Testbed, workers: Vec<Worker>) {
    let mut sim = Simulation::new(u32::try_from(cpus()).unwrap(), Vec::new(), workers);
    sim.advance(10);
    // Use up the rest of the last enforcement period first.
    wait_for(Duration::from_millis(300), || false);
    let (pods, node, others) = testbed.measure();
    if others > 0.15 {
        eprintln!("skipped: other work, or the host of this machine, took {others:.2} CPUs");
        return;
    }
    let mut highest = 0.0_f64;
    for (worker, (used, stalled)) in sim.workers.iter().zip(&pods) {
        let name = &worker.pod.name;
        println!(
            "{name}: {used:.2} CPUs of {:.2}, stalled {stalled:?} of {:.2}",
            worker.allocated, worker.stalls
        );
        assert!(
            (used - worker.allocated).abs() <= 0.1 + 0.15 * worker.allocated,
            "{name}"
        );
        if let Some(stalled) = stalled {
            assert!((stalled - worker.stalls).abs() <= 0.3, "{name}");
        }
        highest = highest.max(worker.stalls);
    }
    println!("node stalled {node:.2}");
    // The kernel averages over the CPUs: a wait on one of two counts half.
    assert!(node >= 0.5 * highest - 0.1, "{node} of {highest}");
}

#[test]
fn a_quota_stalls_its_pod_and_the_node() {
    let Some(mut testbed) = Testbed::new(&["held"]) else {
        return;
    };
    testbed.burn("held", 2);
    testbed
        .cgroups
        .set_quota(&testbed.path("held"), Some(30_000));
    let held = Worker {
        limit: Some(0.3),
        ..Worker::new(pod("held"), 2.0)
    };
    compare(&mut testbed, vec![held]);
}

#[test]
fn equal_weights_share_the_cpus_and_all_wait() {
    let Some(mut testbed) = Testbed::new(&["a", "b"]) else {
        return;
    };
    // With a thread on each CPU a pod would wait half of the time, or always, depending on where the kernel places them.
    let threads = 2 * cpus();
    testbed.burn("a", threads);
    testbed.burn("b", threads);
    let worker = |name| Worker::new(pod(name), threads as f64);
    compare(&mut testbed, vec![worker("a"), worker("b")]);
}

#[test]
fn the_idle_class_gets_the_remaining_cpu() {
    let Some(mut testbed) = Testbed::new(&["idle", "other"]) else {
        return;
    };
    let idle = testbed.path("idle");
    if !testbed.cgroups.has(&idle, "cpu.idle") {
        eprintln!("skipped: this kernel has no cpu.idle");
        return;
    }
    let threads = cpus();
    testbed.cgroups.write(&idle, "cpu.idle", "1");
    testbed.burn("idle", threads);
    testbed.burn("other", threads - 1);
    let idle = Worker {
        idle: true,
        ..Worker::new(pod("idle"), threads as f64)
    };
    let other = Worker::new(pod("other"), threads as f64 - 1.0);
    compare(&mut testbed, vec![idle, other]);
}

const PERIOD: Duration = Duration::from_secs(1);
const COOL_DOWN: Duration = Duration::from_secs(5);

fn pressure_rule(metric: &str, action: Action) -> Rule {
    let action = Action {
        cool_down: COOL_DOWN,
        ..action
    };
    Rule {
        ..rule("node/pressure", metric, 10.0, action)
    }
}

/// The engine, the sampler and the throttler on real cgroups, once per second.
struct Loop {
    testbed: Testbed,
    engine: Engine,
    throttler: Throttler,
    plan: Plan,
    sample: Sample,
    /// The pods of the sample before.
    before: Vec<PodSample>,
}

impl Loop {
    /// All pods but `important` may be throttled.
    fn new(testbed: Testbed, rule: Rule) -> Self {
        let mut engine = Engine::new().with_period(PERIOD);
        engine.set_policy(Arc::new(PolicySet {
            rules: vec![rule],
            pods: vec![crate::simulation::batch()],
        }));
        let throttler = testbed.cgroups.throttler();
        let mut node = Self {
            testbed,
            engine,
            throttler,
            plan: Plan::default(),
            sample: Sample::default(),
            before: Vec::new(),
        };
        node.engine.set_pods(node.pods());
        node
    }

    fn pods(&self) -> Vec<Arc<Pod>> {
        let pods = self.testbed.pods.iter().map(|(name, _)| {
            let mut pod = pod(name);
            if *name != "important" {
                "batch".clone_into(&mut pod.namespace);
            }
            Arc::new(pod)
        });
        pods.collect()
    }

    fn step(&mut self) {
        let (now, demand) = (boot_time(), self.engine.demand());
        self.before.clone_from(&self.sample.pods);
        self.testbed
            .sampler
            .sample_node(now, &demand, &mut self.sample);
        self.testbed
            .sampler
            .sample_pods(now, &demand, &mut self.sample);
        self.engine.step(boot_time(), &self.sample, &mut self.plan);
        let ineffective: Vec<_> = self.engine.ineffective().collect();
        assert_eq!(ineffective, [], "this kernel enforces quotas");
        if self.plan.evaluated {
            let find = self.testbed.cgroups.find();
            assert_fine(&self.throttler.apply(now, &self.plan.throttles, &find));
        }
        wait_for(PERIOD, || false);
    }

    /// Steps until the condition is true. Returns how long that took; `None` on timeout.
    fn until(&mut self, timeout: Duration, condition: impl Fn(&Self) -> bool) -> Option<Duration> {
        let start = boot_time();
        while !condition(self) {
            if boot_time().since(start) > timeout {
                return None;
            }
            self.step();
        }
        Some(boot_time().since(start))
    }

    fn is_throttled(&self) -> bool {
        self.testbed.cgroups.quota(&self.testbed.path("greedy"))
            != self.testbed.cgroups.quota_text(None)
    }
}

/// Protected pods wait for half a minute next to a pod that demands more than its quota forever. If the rule did not look at
/// protected pods, the stall of the throttled pod would keep the node's pressure up, and so the throttle in force.
fn a_spike_of(metric: &str) {
    let Some(mut testbed) = Testbed::new(&["greedy", "important"]) else {
        return;
    };
    if !testbed.cgroups.is_v2() {
        eprintln!("skipped: cgroup v1 has no per-cgroup pressure");
        return;
    }
    testbed.burn("greedy", cpus());
    let mut node = Loop::new(testbed, pressure_rule(metric, throttling(10, 30)));
    let important = node.testbed.path("important");
    let threads = cpus();
    node.testbed.burn("important", threads);
    let spike = boot_time();
    let started = node.until(Duration::from_secs(30), Loop::is_throttled);
    assert!(
        started.is_some(),
        "{metric}: no throttle while protected work waits"
    );
    while boot_time().since(spike) < Duration::from_secs(30) {
        node.step();
    }
    assert!(node.is_throttled(), "{metric}: released during the spike");
    // The greedy pod still demands one CPU, ten times its floor.
    let greedy = node.testbed.path("greedy");
    node.testbed.cgroups.end_all_but(0, &important);
    node.testbed.cgroups.end_all_but(1, &greedy);
    let steps = PERIOD * 3;
    // An emulated kernel on a busy host may wait for itself for a while.
    let slack = Duration::from_secs(45);
    let released = node.until(COOL_DOWN + steps + slack, |node| !node.is_throttled());
    println!("{metric}: throttled after {started:?}, released after {released:?}");
    assert!(
        released.is_some(),
        "{metric}: the throttle keeps itself in force"
    );
    for _ in 0..15 {
        node.step();
        assert!(
            !node.is_throttled(),
            "{metric}: throttled again for its own waiting"
        );
    }
}

#[test]
fn the_delay_of_protected_pods_throttles_and_releases() {
    a_spike_of("protected_cpu_delay_max");
}

/// Gives `greedy` a weight of its own, and throttles it by class and quota; then the other pod uses all CPUs.
fn throttled_on_a_saturated_node() -> Option<Loop> {
    let mut testbed = Testbed::new(&["greedy", "important"])?;
    let greedy = testbed.path("greedy");
    let weight = testbed.cgroups.weight_file();
    testbed.cgroups.write(&greedy, weight, WEIGHT);
    testbed.burn("greedy", cpus());
    let rule = Rule {
        ..rule("node/cpu", "cpu_total_usage", 500.0, idle_action(10, 90))
    };
    let mut node = Loop::new(testbed, rule);
    let throttled = node.until(Duration::from_secs(30), Loop::is_throttled);
    assert!(throttled.is_some(), "it uses more than half a CPU");
    node.testbed.burn("important", 2 * cpus());
    Some(node)
}

const WEIGHT: &str = "777";
const GRACE: Duration = Duration::from_secs(15);

/// A pod that shuts down beside pods that use all CPUs gets its share of them: in the idle class it would get none.
#[test]
fn a_throttled_pod_that_terminates_shuts_down_within_its_grace_period() {
    let Some(mut node) = throttled_on_a_saturated_node() else {
        return;
    };
    let greedy = node.testbed.path("greedy");
    let mut pods = node.pods();
    for pod in pods.iter_mut().filter(|pod| pod.name == "greedy") {
        Arc::make_mut(pod).terminating = true;
    }
    node.engine.set_pods(pods);
    node.testbed.cgroups.end_all_but(0, &greedy);
    // Two seconds of CPU time to shut down.
    let script = "ulimit -t 2; while :; do :; done";
    node.testbed.cgroups.spawn(&greedy, script);
    let is_done = |node: &Loop| node.testbed.cgroups.procs(&greedy).is_empty();
    let took = node.until(GRACE, is_done);
    println!("shut down after {took:?}");
    let cgroups = &node.testbed.cgroups;
    assert_eq!(cgroups.quota(&greedy), cgroups.quota_text(None));
    assert_eq!(cgroups.read(&greedy, cgroups.weight_file()), WEIGHT);
    if cgroups.has(&greedy, "cpu.idle") {
        assert_eq!(cgroups.read(&greedy, "cpu.idle"), "0");
    }
    assert!(cgroups.journal_lines().is_empty());
    assert!(took.is_some(), "it would be killed");
}

/// A random mix of pods: the busy threads of each batch pod and of the important one.
#[derive(Debug)]
struct Mix {
    batch: Vec<usize>,
    important: usize,
    idle: bool,
}

impl Mix {
    /// The mix of a number, always the same.
    fn of(number: u64) -> Self {
        let mut hasher = DefaultHasher::new();
        let mut below = |limit: u64| {
            number.hash(&mut hasher);
            usize::try_from(hasher.finish() % limit).unwrap()
        };
        let pods = 1 + below(BATCH.len() as u64);
        let threads = 2 * cpus() as u64;
        Self {
            batch: (0..pods).map(|_| 1 + below(threads)).collect(),
            important: 1 + below(threads),
            idle: below(2) == 1,
        }
    }
}

const MIXES: u64 = 50;
const BATCH: [&str; 3] = ["b0", "b1", "b2"];
/// Longest time in which nothing is done while the important pod waits: the evaluations from the idle class to the first quota,
/// and the sample of the next.
const MAX_DELAY: Duration = Duration::from_secs(5);

impl Loop {
    /// Percent of the last second that the important pod waited, without its own quota; `None` on cgroup v1.
    fn waiting(&self) -> Option<f64> {
        let report = self.engine.reports().next().unwrap();
        report.value.filter(|_| self.sample.pressure_by_cgroup)
    }

    fn has_acted(&self) -> bool {
        let mut transitions = self.plan.transitions.iter();
        transitions.any(|it| matches!(it.change, PlanChange::Throttle { .. }))
    }

    /// Whether a batch pod uses more than the lowest quota that the action allows: in the idle class it may use less.
    fn can_act(&self, mix: &Mix) -> bool {
        let throttles = &self.plan.throttles;
        let above_floor = |it: &PodThrottle| {
            let base: u64 = it.target_cgroups.iter().map(|it| it.base.0).sum();
            let floor = (base / 10).max(20);
            it.ratio > 10 && self.used(&it.uid).is_none_or(|used| used > floor)
        };
        throttles.len() < mix.batch.len() || throttles.iter().any(above_floor)
    }

    /// Millicores that a pod used between the last two samples.
    fn used(&self, uid: &PodUid) -> Option<u64> {
        let of = |pods: &[PodSample]| {
            let pod = pods.iter().find(|it| it.uid == *uid)?;
            Some((pod.at, pod.cpu_nanos?))
        };
        let ((from, before), (to, now)) = (of(&self.before)?, of(&self.sample.pods)?);
        let nanos = u64::try_from(to.since(from).as_nanos()).ok()?;
        (now.saturating_sub(before) * 1000).checked_div(nanos)
    }
}

fn run_mix(mix: &Mix) -> Option<()> {
    let names: Vec<_> = BATCH[..mix.batch.len()]
        .iter()
        .copied()
        .chain(["important"])
        .collect();
    let mut testbed = Testbed::new(&names)?;
    for (name, threads) in BATCH.iter().zip(&mix.batch) {
        testbed.burn(name, *threads);
    }
    if !testbed.cgroups.is_v2() {
        eprintln!("skipped: cgroup v1 has no per-cgroup pressure");
        return None;
    }
    let action = if mix.idle {
        idle_action(10, 30)
    } else {
        throttling(10, 30)
    };
    let mut node = Loop::new(testbed, pressure_rule("protected_cpu_delay_max", action));
    node.step();
    node.testbed.burn("important", mix.important);
    let mut acted = boot_time();
    while boot_time().since(acted) < Duration::from_secs(15) && node.can_act(mix) {
        node.step();
        if node.has_acted() || node.waiting().is_some_and(|waiting| waiting <= 10.0) {
            acted = boot_time();
        }
        let late = boot_time().since(acted);
        assert!(
            late <= MAX_DELAY,
            "{mix:?}: it waits, and nothing was done for {late:?}"
        );
        if node.waiting().is_some_and(|waiting| waiting <= 2.0) {
            break;
        }
    }
    // The important pod needs nothing any more.
    node.testbed
        .cgroups
        .end_all_but(0, &node.testbed.path("important"));
    let limit = COOL_DOWN + Duration::from_mins(1);
    let released = node.until(limit, |node| node.plan.throttles.is_empty());
    println!("{mix:?}: released after {released:?}");
    assert!(released.is_some(), "{mix:?}: the throttle stays in force");
    Some(())
}

/// Nothing stays throttled once no protected pod waits, and while one waits something is done.
#[test]
#[ignore = "takes half an hour: make mixes"]
fn throttles_follow_random_mixes() {
    let done = (0..MIXES)
        .filter(|number| run_mix(&Mix::of(*number)).is_some())
        .count();
    println!("{done} mixes");
    assert!(done as u64 > MIXES / 2, "most mixes were skipped");
}
