//! What a tick of the whole machine costs while nothing happens: no memory. What it does between evaluations.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod run_support;

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use allocation_counter::measure;
use nix::unistd::Pid;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::node::cgroup::CgroupPath;
use plimsoll::node::clock::boot_time;
use plimsoll::node::machine::Settings;
use plimsoll::standalone::host;
use plimsoll::standalone::pods::own::OwnCgroups;
use plimsoll::standalone::pods::{self, manifests::Manifests};
use plimsoll::standalone::policies::{self, Overrides};
use run_support::{Machine, eventually, pod, throttle};

#[test]
#[ignore = "a helper of the other tests: burns a CPU until it is killed"]
fn burn() {
    run_support::burn();
}

/// A machine over real cgroups, in this process, after its first evaluations.
fn steady(ground: &Machine, watermark: &str) -> host::Machine {
    ground.write(
        "policies/throttle.yaml",
        &throttle().replace("value: 1000", &format!("value: {watermark}")),
    );
    let overrides = Overrides {
        period: Some(Duration::from_millis(100)),
        preview: false,
    };
    let loaded = policies::load(
        &[ground.path("policies")],
        &NodeFacts::default(),
        overrides,
        &[],
    );
    assert_eq!(loaded.problems, []);
    let parent = CgroupPath::new(&ground.parent).unwrap();
    let own = OwnCgroups::read(Path::new("/proc"));
    let manifests = Manifests::read(&[ground.path("pods")]);
    let found = pods::find(&manifests, &[parent], &ground.hierarchy, &own);
    let settings = Settings {
        hierarchy: ground.hierarchy.clone(),
        proc_root: "/proc".into(),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir: ground.path("state"),
        sample_interval: Duration::from_millis(20),
        sample_everything: false,
    };
    let policy = Arc::new(loaded.policy);
    host::open(settings, policy, found.workloads, boot_time()).unwrap()
}

/// Ticks when it is time to, so many times, and returns how often memory was allocated.
fn ticks(machine: &mut host::Machine, count: usize) -> u64 {
    let counted = measure(|| {
        for _ in 0..count {
            while boot_time() < machine.next_tick() {
                std::hint::spin_loop();
            }
            machine.tick(boot_time());
        }
    });
    counted.count_total
}

#[test]
fn a_tick_that_changes_nothing_allocates_nothing() {
    let ground = Machine::new();
    for number in 0..110 {
        ground.cgroup(&format!("unit-{number}"));
    }
    // A watermark that two CPUs cannot reach.
    let mut machine = steady(&ground, "4000");
    ticks(&mut machine, 30);
    assert_eq!(machine.pods().len(), 110);
    assert!(!machine.is_acting());
    assert_eq!(ticks(&mut machine, 30), 0, "samples and evaluations");
}

#[test]
fn reading_back_what_is_in_force_allocates_nothing() {
    let mut ground = Machine::new();
    ground.burning_pod("batch");
    let mut machine = steady(&ground, "100");
    eventually("the pod is throttled", || {
        while boot_time() < machine.next_tick() {
            std::hint::spin_loop();
        }
        machine.tick(boot_time());
        (machine.throttled_pods() == 1).then_some(())
    });
    // Between evaluations: node files, and every file that is held.
    let mut between = Vec::new();
    while between.len() < 20 {
        let allocated = ticks(&mut machine, 1);
        if !machine.plan().evaluated {
            between.push(allocated);
        }
    }
    assert_eq!(between, [0; 20]);
    machine.restore(boot_time());
    assert_eq!(machine.throttled_pods(), 0);
}

/// A container of the pod `batch` that burns CPU and is limited to a whole one.
fn limited(ground: &mut Machine, name: &str) -> (String, Pid) {
    let cgroup = ground.cgroup(&format!("batch/{name}"));
    let quota = ground.quota_file(&format!("batch/{name}"));
    std::fs::write(quota, "100000").unwrap();
    let pid = ground.burn(&cgroup, "burn");
    (cgroup, pid)
}

/// Ticks until there was an evaluation, and then once more before the next one is due, at once after `change`.
fn tick_between(machine: &mut host::Machine, change: impl FnOnce(&mut host::Machine)) {
    let at = loop {
        let now = boot_time();
        machine.tick(now);
        if machine.plan().evaluated {
            break now;
        }
    };
    change(machine);
    machine.tick(at + Duration::from_millis(1));
    assert!(!machine.plan().evaluated);
}

#[test]
fn a_container_that_is_started_anew_is_throttled_at_the_next_tick() {
    let mut ground = Machine::new();
    if ground.hierarchy.is_v2() {
        eprintln!("skipped: on cgroup v2 the pod's own quota holds every container");
        return;
    }
    let batch = ground.cgroup("batch");
    ground.write("pods/batch.yaml", &pod("batch", &batch));
    ground.cgroup("batch/pause");
    let (mut cgroup, mut pid) = limited(&mut ground, "0");
    let mut machine = steady(&ground, "100");
    let quota = |ground: &Machine, name: &str| ground.quota(name).parse::<i64>().unwrap();
    eventually("the container is throttled", || {
        machine.tick(boot_time());
        (quota(&ground, "batch/0") < 100_000).then_some(())
    });
    // Another in its place.
    tick_between(&mut machine, |_| {
        ground.remove(&cgroup, pid);
        (cgroup, pid) = limited(&mut ground, "1");
    });
    assert!(quota(&ground, "batch/1") < 100_000);
    // One that comes when the last one was long gone: meanwhile the pod is not limited instead.
    ground.remove(&cgroup, pid);
    for _ in 0..2 {
        tick_between(&mut machine, |machine| {
            machine.set_pods(machine.pods().values().cloned().collect());
        });
    }
    assert_eq!(quota(&ground, "batch"), -1);
    tick_between(&mut machine, |_| {
        (cgroup, pid) = limited(&mut ground, "2");
    });
    assert!(quota(&ground, "batch/2") < 100_000);
    let at = machine.sample().at;
    let still = measure(|| {
        machine.tick(at + Duration::from_millis(1));
    });
    assert_eq!(still.count_total, 0, "nothing has changed since");
    machine.restore(boot_time());
    assert_eq!(quota(&ground, "batch/2"), 100_000);
    assert_eq!(machine.throttled_pods(), 0);
}
