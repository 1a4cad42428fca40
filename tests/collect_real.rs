//! The sampler on this machine's own kernel.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod collect_support;

use std::fs;
use std::path::Path;
use std::time::Duration;

use collect_support::{Ground, pod, uid, wait_for};
use plimsoll::engine::Demand;
use plimsoll::engine::sample::Sample;
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::node::cgroup::Controller;
use plimsoll::node::clock::boot_time;
use plimsoll::node::collect::Sampler;

fn everything() -> Demand {
    Demand {
        load: true,
        pressure: [true; 3],
        disks: true,
        interfaces: true,
        pod_memory: true,
        pod_quota: true,
        run_delay: true,
        throttled: true,
        probes: Vec::new(),
    }
}

fn sampler(ground: &Ground) -> Sampler {
    Sampler::new(Path::new("/proc"), ground.hierarchy.clone())
}

fn look(sampler: &mut Sampler, demand: &Demand, sample: &mut Sample) {
    sampler.sample_node(boot_time(), demand, sample);
    sampler.sample_pods(boot_time(), demand, sample);
}

#[test]
fn the_node_is_read_as_the_kernel_has_it() {
    let Some(ground) = Ground::make() else { return };
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    look(&mut sampler, &everything(), &mut sample);
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
fn a_busy_pod_uses_cpu_and_one_that_ends_leaves_the_sample() {
    let Some(mut ground) = Ground::make() else {
        return;
    };
    let busy = ground.mkdir("busy");
    let idle = ground.mkdir("idle");
    ground.spawn("busy", "while :; do :; done");
    let (mut sampler, mut sample) = (sampler(&ground), Sample::default());
    sampler.set_pods([(uid("b"), busy), (uid("i"), idle)].into_iter());
    let grew = wait_for(Duration::from_secs(20), || {
        look(&mut sampler, &Demand::default(), &mut sample);
        pod(&sample, "b").unwrap().cpu_nanos > Some(50_000_000)
    });
    assert!(grew, "{sample:?}");
    assert_eq!(pod(&sample, "i").unwrap().cpu_nanos, Some(0));
    assert!(pod(&sample, "b").unwrap().memory.is_some());

    ground.stop_all();
    ground.rmdir("busy");
    look(&mut sampler, &Demand::default(), &mut sample);
    assert_eq!(pod(&sample, "b"), None);
    assert_eq!(sampler.gone(), [uid("b")]);
    assert!(pod(&sample, "i").is_some());
    assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());

    ground.mkdir("busy");
    look(&mut sampler, &Demand::default(), &mut sample);
    assert_eq!(
        pod(&sample, "b").unwrap().cpu_nanos,
        Some(0),
        "a new cgroup starts anew"
    );
    assert!(sampler.gone().is_empty());
}

#[test]
fn on_v1_the_levers_are_the_containers_where_one_of_them_has_a_quota() {
    let Some(ground) = Ground::make() else { return };
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
    let mut levers = |sampler: &mut Sampler| -> Vec<(String, Quota)> {
        look(sampler, &everything(), &mut sample);
        let levers = &pod(&sample, "p").unwrap().levers;
        levers
            .iter()
            .map(|lever| (lever.cgroup.to_string(), lever.quota.unwrap()))
            .collect()
    };
    let own = |quota| vec![(String::new(), quota)];
    assert_eq!(levers(&mut sampler), own(Quota::Unlimited));
    quota("pod", "55555");
    assert_eq!(levers(&mut sampler), own(Quota::Limit(MilliCpu(555))));
    quota("pod/side", "20000");
    let by_container = vec![
        ("main".to_owned(), Quota::Unlimited),
        ("side".to_owned(), Quota::Limit(MilliCpu(200))),
    ];
    assert_eq!(levers(&mut sampler), by_container);

    sampler.pin_levers(&uid("p"), false);
    assert_eq!(levers(&mut sampler), own(Quota::Limit(MilliCpu(555))));
    sampler.unpin_levers(&uid("p"));
    quota("pod/side", "-1");
    sampler.pin_levers(&uid("p"), true);
    assert_eq!(levers(&mut sampler).len(), 2, "by container while pinned");
    sampler.unpin_levers(&uid("p"));
    assert_eq!(levers(&mut sampler), own(Quota::Limit(MilliCpu(555))));
}
