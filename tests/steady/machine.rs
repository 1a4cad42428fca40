//! A tick of the machine allocates nothing while nothing changes, and handles new containers between evaluations.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::run_support::{Machine, eventually, pod, throttle};
use allocation_counter::measure;
use nix::unistd::Pid;
use plimsoll::clock::boot_time;
use plimsoll::crd::windows;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::node::cgroup::CgroupPath;
use plimsoll::node::machine::MachineSettings;
use plimsoll::standalone::host;
use plimsoll::standalone::pods::own::OwnCgroups;
use plimsoll::standalone::pods::{self, manifests::Manifests};
use plimsoll::standalone::policies;

/// A series for each kind of source.
const WINDOWS: &str = "\
metrics:
- {name: load_avg_1m, source: cpu_load_1_min, window: avg_1m}
- {name: io_stddev_1h, source: io_pressure_some_avg10, window: stddev_1h}
- {name: disk_p95_1d, source: disk_utilization, window: p95_1d}
- {name: network_max_avg_1h, source: network_receive_kibps, window: max_avg_1h}
- {name: cpu_p99_5m, source: cpu_total_utilization, window: p99_5m}
";

/// A machine in this process over real cgroups.
fn machine(env: &Machine, threshold: &str) -> host::Machine {
    env.write(
        "policies/throttle.yaml",
        &throttle().replace("value: 1000", &format!("value: {threshold}")),
    );
    let loaded = policies::load(&[env.path("policies")], &NodeFacts::default(), false, &[]);
    assert_eq!(loaded.problems, []);
    let parent = CgroupPath::new(&env.parent).unwrap();
    let own = OwnCgroups::read(Path::new("/proc"));
    let manifests = Manifests::read(&[env.path("pods")]);
    let found = pods::find(&manifests, &[parent], &env.hierarchy, &own);
    let settings = MachineSettings {
        hierarchy: env.hierarchy.clone(),
        proc_root: "/proc".into(),
        sys_root: "/sys".into(),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir: env.path("state"),
        sample_interval: Duration::from_millis(20),
        evaluation_period: Duration::from_millis(100),
        sample_everything: false,
        windows: windows::read(WINDOWS).unwrap().into(),
    };
    let policy = Arc::new(loaded.policy);
    host::open(settings, policy, found.workloads, boot_time()).unwrap()
}

/// Runs `count` ticks when they are due, and returns the number of allocations.
fn allocations(machine: &mut host::Machine, count: usize) -> u64 {
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
    let _files = crate::files();
    let env = Machine::new();
    for number in 0..110 {
        env.cgroup(&format!("unit-{number}"));
    }
    // A threshold that two CPUs cannot reach.
    let mut machine = machine(&env, "4000");
    allocations(&mut machine, 30);
    assert_eq!(machine.pods().len(), 110);
    assert!(!machine.is_acting());
    assert_eq!(allocations(&mut machine, 30), 0, "samples and evaluations");
}

#[test]
fn verifying_what_is_in_force_allocates_nothing() {
    let _files = crate::files();
    let mut env = Machine::new();
    env.burning_pod("batch");
    let mut machine = machine(&env, "100");
    eventually("the pod is throttled", || {
        while boot_time() < machine.next_tick() {
            std::hint::spin_loop();
        }
        machine.tick(boot_time());
        (machine.throttled_pods() == 1).then_some(())
    });
    // Between evaluations it reads node files and every enforced file.
    let mut between = Vec::new();
    while between.len() < 20 {
        let allocated = allocations(&mut machine, 1);
        if !machine.plan().evaluated {
            between.push(allocated);
        }
    }
    assert_eq!(between, [0; 20]);
    machine.restore(boot_time());
    assert_eq!(machine.throttled_pods(), 0);
}

/// Creates a container of the pod `batch` that burns CPU and is limited to one CPU.
fn limited(env: &mut Machine, name: &str) -> (String, Pid) {
    let cgroup = env.cgroup(&format!("batch/{name}"));
    let quota = env.quota_file(&format!("batch/{name}"));
    std::fs::write(quota, "100000").unwrap();
    let pid = env.burn(&cgroup);
    (cgroup, pid)
}

/// Ticks until an evaluation, applies `change`, and ticks again before the next evaluation.
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
fn a_restarted_container_is_throttled_at_the_next_tick() {
    let _files = crate::files();
    let mut env = Machine::new();
    if env.hierarchy.is_v2() {
        eprintln!("skipped: on cgroup v2 the pod's own quota limits every container");
        return;
    }
    let batch = env.cgroup("batch");
    env.write("pods/batch.yaml", &pod("batch", &batch));
    env.cgroup("batch/pause");
    let (mut cgroup, mut pid) = limited(&mut env, "0");
    let mut machine = machine(&env, "100");
    let quota = |env: &Machine, name: &str| env.quota(name).parse::<i64>().unwrap();
    eventually("the container is throttled", || {
        machine.tick(boot_time());
        (quota(&env, "batch/0") < 100_000).then_some(())
    });
    // Another container replaces it.
    tick_between(&mut machine, |_| {
        env.remove(&cgroup, pid);
        (cgroup, pid) = limited(&mut env, "1");
    });
    assert!(quota(&env, "batch/1") < 100_000);
    // A container appears after the last one is gone. The pod itself is not limited meanwhile.
    env.remove(&cgroup, pid);
    for _ in 0..2 {
        tick_between(&mut machine, |machine| {
            machine.set_pods(machine.pods().values().cloned().collect());
        });
    }
    assert_eq!(quota(&env, "batch"), -1);
    tick_between(&mut machine, |_| {
        (cgroup, pid) = limited(&mut env, "2");
    });
    assert!(quota(&env, "batch/2") < 100_000);
    let at = machine.sample().at;
    let unchanged = measure(|| {
        machine.tick(at + Duration::from_millis(1));
    });
    assert_eq!(unchanged.count_total, 0, "nothing has changed");
    machine.restore(boot_time());
    assert_eq!(quota(&env, "batch/2"), 100_000);
    assert_eq!(machine.throttled_pods(), 0);
}
