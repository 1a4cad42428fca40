//! The expected load, against the counters of a real kernel.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::pod;
use crate::kernel_support::{TestCgroups, test_cgroups, wait_for};
use plimsoll::clock::boot_time;
use plimsoll::engine::Engine;
use plimsoll::engine::plan::Plan;
use plimsoll::engine::pod::PodUid;
use plimsoll::engine::sample::Sample;
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::MilliCpu;
use plimsoll::node::collect::Sampler;

const NAME: &str = "new";
/// Over which usage counts.
const WINDOW: Duration = Duration::from_mins(5);

/// A node with one pod that starts and ends.
struct Node {
    cgroups: TestCgroups,
    sampler: Sampler,
    engine: Engine,
    plan: Plan,
    sample: Sample,
    /// The counters at each sample.
    seen: Vec<Counters>,
}

/// Nanoseconds of the node and of the pod.
#[derive(Clone, Copy)]
struct Counters {
    at: BootTime,
    busy: u64,
    used: u64,
}

impl Node {
    fn step(&mut self) {
        wait_for(Duration::from_secs(1), || false);
        let (now, demand) = (boot_time(), self.engine.demand());
        self.sampler.sample_node(now, &demand, &mut self.sample);
        self.sampler.sample_pods(now, &demand, &mut self.sample);
        self.engine.step(now, &self.sample, &mut self.plan);
        self.seen.push(Counters {
            at: now,
            busy: self.sample.node.cpu.unwrap().busy,
            used: self.sample.pods[0].cpu_nanos.unwrap(),
        });
    }

    /// The counters at this time and now, over 5 minutes at most, and the seconds between.
    fn over(&self, from: BootTime) -> (Counters, Counters, f64) {
        let now = *self.seen.last().unwrap();
        let is_within = |it: &&Counters| it.at >= from && now.at.since(it.at) <= WINDOW;
        let before = *self.seen.iter().find(is_within).unwrap();
        (before, now, now.at.since(before.at).as_secs_f64())
    }

    /// What the pod adds to the expected usage beside what the system used, in millicores. After 5 minutes it is off by the
    /// system's changes: the engine's window is some seconds longer.
    fn share_of_pod(&self) -> f64 {
        let (before, now, seconds) = self.over(BootTime::default());
        let system = (now.busy - before.busy) as f64 - (now.used - before.used) as f64;
        let online = self.sample.node.cpu.unwrap().online;
        let expected = self.engine.load().unwrap().cpu.expected;
        expected * f64::from(online) * 10.0 - system / seconds / 1e6
    }

    /// What it has used since it started, in millicores.
    fn use_of_pod(&self, started: BootTime) -> f64 {
        let (before, now, seconds) = self.over(started);
        (now.used - before.used) as f64 / seconds / 1e6
    }
}

/// Checks the expected usage at these ages of a pod, in seconds, and after its end. The pod uses this many millicores, twice the
/// estimate by its request.
fn compare(millicores: u64, ages: &[u64]) {
    let Some(cgroups) = test_cgroups() else {
        return;
    };
    cgroups.prefer();
    let path = cgroups.pod(NAME);
    cgroups.set_quota(&path, Some(millicores * 100));
    let mut sampler = Sampler::new(Path::new("/proc"), cgroups.hierarchy.clone());
    sampler.set_pods([(PodUid::from(NAME), path.clone())].into_iter());
    let mut node = Node {
        cgroups,
        sampler,
        engine: Engine::new(),
        plan: Plan::default(),
        sample: Sample::default(),
        seen: Vec::new(),
    };
    for _ in 0..5 {
        node.step();
    }
    let mut pod = pod(NAME);
    let estimate = millicores as f64 / 2.0;
    // 85 % of a request are expected to be used.
    pod.cpu_request = MilliCpu(millicores * 100 / 170);
    node.engine.set_pods(vec![Arc::new(pod)]);
    let started = node.sample.at;
    node.cgroups.burn(&path, 1);
    for age in ages {
        while boot_time().since(started) < Duration::from_secs(*age) {
            node.step();
        }
        let (share, real) = (node.share_of_pod(), node.use_of_pod(started));
        println!("after {age} s: {share:.1}m, used {real:.1}m");
        if *age < 15 {
            assert!(
                (estimate..real).contains(&share),
                "after {age} s: {share}, not {real} yet"
            );
        } else {
            assert!(
                (share - real).abs() <= 0.05 * real,
                "after {age} s: {share}, not {real}"
            );
        }
    }
    node.cgroups.end_all_but(0, &path);
    node.engine.set_pods(Vec::new());
    node.step();
    node.step();
    let share = node.share_of_pod();
    assert!(
        share.abs() <= 0.05 * millicores as f64,
        "after its end: {share}"
    );
}

#[test]
fn a_pod_counts_with_its_use_once_it_is_15_seconds_old() {
    // Little, because other tests run beside this one.
    compare(80, &[5, 16, 25]);
}

#[test]
#[ignore = "ten minutes, on an idle machine: make mixes"]
fn a_pod_counts_with_its_use_for_ten_minutes() {
    compare(800, &[5, 16, 60, 150, 300, 310, 420, 600]);
}
