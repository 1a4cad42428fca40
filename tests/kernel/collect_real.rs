//! The sampler on a real kernel.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::collect_support::{CgroupFixture, everything, pod, uid, wait_for};
use plimsoll::clock::boot_time;
use plimsoll::engine::Demand;
use plimsoll::engine::sample::Sample;
use plimsoll::engine::units::{Bytes, MilliCpu, Quota};
use plimsoll::node::cgroup::cached_file::FdBudget;
use plimsoll::node::cgroup::{CgroupPath, Controller, Hierarchy};
use plimsoll::node::collect::Sampler;

fn sampler(ground: &CgroupFixture) -> Sampler {
    Sampler::new(Path::new("/proc"), ground.hierarchy.clone())
}

fn take_sample(sampler: &mut Sampler, demand: &Demand, sample: &mut Sample) {
    sampler.sample_node(boot_time(), demand, sample);
    sampler.sample_pods(boot_time(), demand, sample);
}

#[test]
fn the_node_is_sampled() {
    let Some(ground) = CgroupFixture::make() else {
        return;
    };
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    take_sample(&mut sampler, &everything(), &mut sample);
    let cpu = sample.node.cpu.unwrap();
    let online = std::thread::available_parallelism().unwrap().get();
    assert!(cpu.online as usize >= online, "{cpu:?}");
    assert!(cpu.busy > 0 && cpu.idle > 0, "{cpu:?}");
    let memory = sample.node.memory.unwrap();
    assert!(memory.total > memory.available, "{memory:?}");
    assert!(sample.node.load.is_some());
    assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());
    let lo = sample
        .node
        .interfaces
        .iter()
        .any(|it| *it.interface == *"lo");
    assert!(!lo);
}

#[test]
fn a_busy_pod_uses_cpu_and_a_removed_pod_leaves_the_sample() {
    let Some(mut ground) = CgroupFixture::make() else {
        return;
    };
    let busy = ground.mkdir("busy");
    let idle = ground.mkdir("idle");
    ground.spawn("busy", "while :; do :; done");
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    sampler.set_pods([(uid("b"), busy), (uid("i"), idle)].into_iter());
    let grew = wait_for(Duration::from_secs(20), || {
        take_sample(&mut sampler, &Demand::default(), &mut sample);
        pod(&sample, "b").unwrap().cpu_nanos > Some(50_000_000)
    });
    assert!(grew, "{sample:?}");
    assert_eq!(pod(&sample, "i").unwrap().cpu_nanos, Some(0));
    assert!(pod(&sample, "b").unwrap().memory.is_some());

    ground.stop_all();
    ground.rmdir("busy");
    take_sample(&mut sampler, &Demand::default(), &mut sample);
    assert_eq!(pod(&sample, "b"), None);
    assert_eq!(sampler.gone(), [uid("b")]);
    assert!(pod(&sample, "i").is_some());
    assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());

    ground.mkdir("busy");
    take_sample(&mut sampler, &Demand::default(), &mut sample);
    assert_eq!(
        pod(&sample, "b").unwrap().cpu_nanos,
        Some(0),
        "a new cgroup starts from zero"
    );
    assert!(sampler.gone().is_empty());
}

#[test]
fn on_v1_limited_containers_are_the_targets() {
    let Some(ground) = CgroupFixture::make() else {
        return;
    };
    if ground.hierarchy.is_v2() {
        eprintln!("skipped: this machine has cgroup v2");
        return;
    }
    let path = ground.mkdir("pod");
    ground.mkdir("pod/main");
    ground.mkdir("pod/side");
    let quota = |name: &str, text: &str| {
        let file = ground.dir(Controller::Cpu, name).join("cpu.cfs_quota_us");
        fs::write(file, text).unwrap();
    };
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    sampler.set_pods([(uid("p"), path)].into_iter());
    let mut target_cgroups = |sampler: &mut Sampler| -> Vec<(String, Quota)> {
        take_sample(sampler, &everything(), &mut sample);
        let target_cgroups = &pod(&sample, "p").unwrap().target_cgroups;
        target_cgroups
            .iter()
            .map(|target_cgroup| {
                (
                    target_cgroup.cgroup.to_string(),
                    target_cgroup.quota.unwrap(),
                )
            })
            .collect()
    };
    let own = |quota| vec![(String::new(), quota)];
    assert_eq!(target_cgroups(&mut sampler), own(Quota::Unlimited));
    quota("pod", "55555");
    assert_eq!(
        target_cgroups(&mut sampler),
        own(Quota::Limit(MilliCpu(555)))
    );
    quota("pod/side", "20000");
    let by_container = vec![
        ("main".to_owned(), Quota::Unlimited),
        ("side".to_owned(), Quota::Limit(MilliCpu(200))),
    ];
    assert_eq!(target_cgroups(&mut sampler), by_container);

    sampler.pin_targets(&uid("p"), false);
    assert_eq!(
        target_cgroups(&mut sampler),
        own(Quota::Limit(MilliCpu(555)))
    );
    sampler.unpin_targets(&uid("p"));
    quota("pod/side", "-1");
    sampler.pin_targets(&uid("p"), true);
    assert_eq!(
        target_cgroups(&mut sampler).len(),
        2,
        "by container while pinned"
    );
    sampler.unpin_targets(&uid("p"));
    assert_eq!(
        target_cgroups(&mut sampler),
        own(Quota::Limit(MilliCpu(555)))
    );
}

#[test]
fn pods_added_and_removed_at_any_time_never_stop_a_sample() {
    let Some(ground) = CgroupFixture::make() else {
        return;
    };
    let steady = ground.mkdir("steady");
    let names: Vec<String> = (0..8).map(|number| format!("p{number}")).collect();
    let pods: Vec<_> = names
        .iter()
        .map(|name| (uid(name), ground.path(name)))
        .chain([(uid("steady"), steady)])
        .collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                for name in &names {
                    ground.mkdir(&format!("{name}/c"));
                }
                for name in &names {
                    ground.rmdir(name);
                }
            }
        });
        let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
        sampler.set_pods(pods.into_iter());
        let (mut here, mut gone) = (0, 0);
        let both = wait_for(Duration::from_mins(2), || {
            take_sample(&mut sampler, &everything(), &mut sample);
            assert!(pod(&sample, "steady").unwrap().cpu_nanos.is_some());
            assert_eq!(sample.pods.len() + sampler.gone().len(), names.len() + 1);
            assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());
            here += sample.pods.len() - 1;
            gone += sampler.gone().len();
            here > 500 && gone > 500
        });
        done.store(true, Ordering::Relaxed);
        assert!(both, "seen {here} times, gone {gone} times");
    });
}

#[test]
fn a_restarted_container_has_its_new_name() {
    let Some(ground) = CgroupFixture::make() else {
        return;
    };
    let path = ground.mkdir("pod");
    ground.mkdir("pod/pause");
    ground.mkdir("pod/first");
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    sampler.set_pods([(uid("p"), path)].into_iter());
    let mut names = |sampler: &mut Sampler| -> Vec<String> {
        take_sample(sampler, &everything(), &mut sample);
        let containers = &pod(&sample, "p").unwrap().containers;
        containers
            .iter()
            .map(|it| it.container.to_string())
            .collect()
    };
    assert_eq!(names(&mut sampler), ["first", "pause"]);
    // The same number of children, but different ones.
    ground.rmdir("pod/first");
    ground.mkdir("pod/second");
    names(&mut sampler);
    assert_eq!(names(&mut sampler), ["pause", "second"]);
    ground.rmdir("pod/second");
    assert_eq!(names(&mut sampler), ["pause"]);
    ground.rmdir("pod/pause");
    assert_eq!(
        names(&mut sampler),
        ["pod"],
        "without child cgroups it is its own container"
    );
}

#[test]
fn throttled_periods_and_run_delay_grow_under_a_quota() {
    let Some(mut ground) = CgroupFixture::make() else {
        return;
    };
    if ground.hierarchy.is_v2() {
        eprintln!("skipped: written for cgroup v1");
        return;
    }
    let path = ground.mkdir("pod");
    ground.mkdir("pod/main");
    for (cgroup, quota) in [("pod", "190000"), ("pod/main", "5000")] {
        let file = ground.dir(Controller::Cpu, cgroup).join("cpu.cfs_quota_us");
        fs::write(file, quota).unwrap();
    }
    for _ in 0..3 {
        ground.spawn("pod/main", "while :; do :; done");
    }
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    sampler.set_pods([(uid("p"), path)].into_iter());
    let grew = wait_for(Duration::from_secs(30), || {
        take_sample(&mut sampler, &everything(), &mut sample);
        let seen = pod(&sample, "p").unwrap();
        let main = &seen.containers[0];
        // The pod's own quota is never used up, so none of its periods is throttled.
        seen.waits.periods > Some(3)
            && seen.waits.throttled_periods == Some(0)
            && main.throttled_periods > Some(3)
            && main.periods >= main.throttled_periods
            && main.run_delay_nanos > Some(1_000_000)
    });
    assert!(grew, "{:?}", sample.pods);
}

#[test]
fn process_memory_is_distinguished_from_page_cache() {
    let Some(mut ground) = CgroupFixture::make() else {
        return;
    };
    let path = ground.mkdir("pod");
    // dd holds its buffer until the pipe is read, which never happens.
    ground.spawn(
        "pod",
        "exec 3<&0; dd if=/dev/zero bs=30000000 count=1 | read wait <&3",
    );
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    sampler.set_pods([(uid("p"), path)].into_iter());
    let done = wait_for(Duration::from_secs(30), || {
        take_sample(&mut sampler, &everything(), &mut sample);
        let pod = pod(&sample, "p").unwrap();
        let parts = pod.memory_parts.unwrap();
        parts.unreclaimable > Bytes(29_000_000)
            && parts.cache < Bytes(20_000_000)
            && pod.memory >= Some(parts.unreclaimable)
    });
    assert!(done, "{:?}", sample.pods);
}

#[test]
fn without_open_descriptors_the_values_are_the_same() {
    let Some(mut ground) = CgroupFixture::make() else {
        return;
    };
    let path = ground.mkdir("pod");
    ground.mkdir("pod/main");
    ground.spawn("pod/main", "exec sleep 600");
    let look_with = |fds: usize| {
        let (budget, mut sample) = (FdBudget::new(fds), Sample::default());
        let mut sampler =
            Sampler::with_budget(Path::new("/proc"), ground.hierarchy.clone(), budget.clone());
        sampler.set_pods([(uid("p"), path.clone())].into_iter());
        take_sample(&mut sampler, &everything(), &mut sample);
        take_sample(&mut sampler, &everything(), &mut sample);
        let left = budget.left();
        drop(sampler);
        assert_eq!(budget.left(), fds, "all are returned");
        let pod = sample.pods.remove(0);
        (
            left,
            pod.target_cgroups.len(),
            pod.containers.len(),
            pod.cpu_nanos.is_some(),
            pod.memory.is_some(),
        )
    };
    assert_eq!(look_with(0), (0, 1, 1, true, true));
    let (left, ..) = look_with(1000);
    assert!(left < 990, "{left}");
    assert_eq!(look_with(3), (0, 1, 1, true, true));
}

#[test]
fn without_open_descriptors_a_recreated_cgroup_is_detected() {
    let Some(ground) = CgroupFixture::make() else {
        return;
    };
    let path = ground.mkdir("pod");
    ground.mkdir("pod/old");
    let mut sampler = Sampler::with_budget(
        Path::new("/proc"),
        ground.hierarchy.clone(),
        FdBudget::new(0),
    );
    let mut sample = Sample::default();
    sampler.set_pods([(uid("p"), path)].into_iter());
    take_sample(&mut sampler, &everything(), &mut sample);
    ground.rmdir("pod");
    ground.mkdir("pod/new");
    take_sample(&mut sampler, &everything(), &mut sample);
    let containers = &pod(&sample, "p").unwrap().containers;
    assert_eq!(containers.len(), 1);
    assert_eq!(&*containers[0].container, "new");
}

#[test]
fn a_real_v2_tree_is_sampled() {
    let unified = Path::new("/sys/fs/cgroup/unified");
    if !unified.join("cgroup.procs").exists() {
        eprintln!("skipped: no v2 tree beside v1 here");
        return;
    }
    let name = format!("plimsoll-collect-v2-{}", std::process::id());
    let directory = unified.join(&name);
    fs::create_dir(&directory).unwrap();
    let hierarchy = Hierarchy::V2 {
        root: unified.into(),
    };
    let mut sampler = Sampler::new(Path::new("/proc"), hierarchy);
    let mut sample = Sample::default();
    sampler.set_pods([(uid("p"), CgroupPath::new(&name).unwrap())].into_iter());
    take_sample(&mut sampler, &everything(), &mut sample);
    let seen = pod(&sample, "p").cloned();
    let pressure = directory.join("cpu.pressure").exists();
    fs::remove_dir(&directory).unwrap();
    let seen = seen.unwrap();
    assert_eq!((seen.cpu_nanos, seen.memory), (Some(0), None));
    assert_eq!(seen.waits.stalled[0], pressure.then_some(0));
    assert!(sample.pressure_by_cgroup && sample.node.tasks > Some(0));
    assert_eq!(seen.containers[0].run_delay_nanos, Some(0));
    take_sample(&mut sampler, &everything(), &mut sample);
    assert_eq!(sampler.gone(), [uid("p")]);
    assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());
}
