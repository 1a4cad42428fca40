//! The sampler on fake directories for other kernels, and on damaged files.

use std::time::Duration;

use crate::collect_support::{Fake, everything, pod, uid};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use plimsoll::engine::Demand;
use plimsoll::engine::sample::{CpuTimes, NodeSample, PodSample, Sample, WaitCounters};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::{Bytes, MilliCpu, Quota};
use plimsoll::node::cgroup::kubepods::scan;
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::collect::{SampledPod, Sampler};

const UID: &str = "0f5a3c9e-27b1-4c58-9d1b-2f6f0e7a1b3c";
const CONTAINER: &str = "3f1de0cb9a5bb3a65c1d3d7e4f6a7b8c9d0e1f2a3b4c5d6e7f8091a2b3c4d5e6";

const STAT: &str = "\
cpu  100 20 30 4000 50 6 7 8 9 10
cpu0 50 10 15 2000 25 3 3 4 4 5
cpu1 50 10 15 2000 25 3 4 4 5 5
intr 1 2 3
ctxt 4
procs_running 3
procs_blocked 2
softirq 1 2
";
const MEMINFO: &str = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    400 kB\n";
const PRESSURE: &str = "\
some avg10=1.50 avg60=2.00 avg300=0.25 total=99
full avg10=0.50 avg60=0.00 avg300=0.00 total=9
";
const DISKSTATS: &str = "   7       0 loop0 1 0 2 0 3 0 4 0 0 5 0 0 0 0 0 0 0
 253       0 zram0 1 0 2 0 3 0 4 0 0 5 0
 254       0 vda 10 1 20 2 30 3 40 4 0 50 6
 254       1 vda1 1 1 2 2 3 3 4 4 0 5 6 7 8 9 10 11 12
 259       0 ramses0n1 1 0 2 0 3 0 4 0 0 5 0
   8       0 sda 1 2 3
";
const NET_DEV: &str = "\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:    3193      29    0    0    0     0          0         0     3193      29    0    0    0     0       0          0
  eth0: 1000 10 1 2 0 0 0 0 2000 20 3 4 0 0 0 0
eth1:7 1 0 0 0 0 0 0 8 2 0 0 0 0 0 0
  cut0: 1000 10 1
";

fn node_files(fake: &Fake) {
    fake.file("proc/stat", STAT)
        .file("proc/meminfo", MEMINFO)
        .file(
            "proc/vmstat",
            "nr_free_pages 9\npgscan_kswapd 5\npgscan_direct 6\npgscan_direct_throttle 7\n",
        )
        .file("proc/loadavg", "0.11 1.24 12.00 1/91 17965\n")
        .file("proc/pressure/cpu", PRESSURE)
        .file("proc/pressure/memory", PRESSURE)
        .file(
            "proc/pressure/io",
            PRESSURE.lines().next().unwrap().to_owned() + "\n",
        )
        .file("proc/diskstats", DISKSTATS)
        .file("proc/1/net/dev", NET_DEV);
}

fn v2(fake: &Fake) -> Hierarchy {
    fake.file("cg/cgroup.controllers", "cpu memory\n");
    Hierarchy::below(&fake.root().join("cg")).unwrap()
}

fn v2_pod(fake: &Fake, cgroup: &str) {
    fake.file(
        &format!("cg/{cgroup}/cpu.stat"),
        "usage_usec 1500\nuser_usec 1000\nnr_periods 7\nnr_throttled 3\n",
    )
    .file(&format!("cg/{cgroup}/memory.current"), "8192\n")
    .file(
        &format!("cg/{cgroup}/memory.stat"),
        "anon 100\nfile 900\nkernel 50\nshmem 200\nslab_reclaimable 5\nslab_unreclaimable 30\nworkingset_refault_anon 4\nworkingset_refault_file 17\n",
    )
    .file(
        &format!("cg/{cgroup}/memory.events"),
        "low 1\nhigh 10\nmax 2\noom 0\noom_kill 0\noom_group_kill 0\n",
    )
    .file(&format!("cg/{cgroup}/cpu.max"), "50000 100000\n")
    .file(&format!("cg/{cgroup}/cgroup.threads"), "")
    .file(
        &format!("cg/{cgroup}/cpu.pressure"),
        "some avg10=12.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=3.00 avg60=0.00 avg300=0.00 total=0\n",
    )
    .file(
        &format!("cg/{cgroup}/memory.pressure"),
        "some avg10=0.25 avg60=0.00 avg300=0.00 total=20\n",
    )
    .file(
        &format!("cg/{cgroup}/io.stat"),
        "254:0 rbytes=4096 wbytes=100 rios=1 wios=1 dbytes=7 dios=1\n8:0 rbytes=1 wbytes=2 rios=1 wios=1\n8:1\n",
    );
}

/// The wait counters in [`v2_pod`].
const WAITS: WaitCounters = WaitCounters {
    stalled: [Some(1000), Some(20_000), None],
    periods: Some(7),
    throttled_periods: Some(3),
    own_limit_reclaims: Some(12),
};

fn sampler(fake: &Fake, hierarchy: Hierarchy) -> Sampler {
    Sampler::new(&fake.root().join("proc"), hierarchy)
}

/// Samples `cgroup` as pod `p`, with everything demanded.
fn sample_pod(fake: &Fake, hierarchy: Hierarchy, cgroup: &str) -> (Option<PodSample>, Vec<String>) {
    let mut sampler = sampler(fake, hierarchy);
    let cgroup = CgroupPath::new(cgroup).unwrap();
    sampler.set_pods([(uid("p"), cgroup)].into_iter());
    let mut sample = Sample::default();
    let now = BootTime::from_nanos(1);
    sampler.sample_pods(now, &everything(), &mut sample);
    let faults = sampler.faults().iter().map(ToString::to_string);
    (pod(&sample, "p").cloned(), faults.collect())
}

fn sample_node(fake: &Fake) -> (Sample, Vec<String>) {
    let mut sampler = sampler(fake, v2(fake));
    let mut sample = Sample::default();
    sampler.sample_node(BootTime::from_nanos(5), &everything(), &mut sample);
    let faults = sampler.faults().iter().map(ToString::to_string);
    let faults = faults.collect();
    (sample, faults)
}

#[test]
fn node_files_are_read() {
    let fake = Fake::new();
    node_files(&fake);
    let (sample, faults) = sample_node(&fake);
    assert_eq!(sample.at, BootTime::from_nanos(5));
    assert_eq!(faults, [""; 0]);
    let node = sample.node;
    let tick = 10_000_000;
    let expected = CpuTimes {
        busy: (100 + 20 + 30 + 6 + 7 + 8) * tick,
        idle: 4050 * tick,
        online: 2,
    };
    assert_eq!(node.cpu, Some(expected));
    let memory = node.memory.unwrap();
    assert_eq!(
        (memory.total, memory.available),
        (Bytes(1_024_000), Bytes(409_600))
    );
    assert_eq!(node.page_scans, Some(11));
    assert_eq!(node.load, Some([0.11, 1.24, 12.0]));
    assert_eq!(node.tasks, Some(4), "without the reading task itself");
    let [cpu, _, io] = node.pressure.map(Option::unwrap);
    assert_eq!(
        (cpu.some, cpu.full),
        ([1.5, 2.0, 0.25], Some([0.5, 0.0, 0.0]))
    );
    assert_eq!(cpu.totals, [Some(99_000), Some(9000)]);
    assert_eq!((io.full, io.totals), (None, [Some(99_000), None]));
    let disks: Vec<_> = node.disks.iter().map(|disk| &*disk.device).collect();
    assert_eq!(disks, ["vda", "vda1", "ramses0n1"]);
    let vda = &node.disks[0];
    let counts = (
        vda.reads,
        vda.read_bytes,
        vda.writes,
        vda.write_bytes,
        vda.io_ms,
    );
    assert_eq!(counts, (10, 10_240, 30, 20_480, 50));
    let names: Vec<_> = node.interfaces.iter().map(|it| &*it.interface).collect();
    assert_eq!(names, ["eth0", "eth1"]);
    let eth0 = &node.interfaces[0];
    let received = (eth0.receive_bytes, eth0.receive_packets, eth0.receive_drops);
    let sent = (eth0.send_bytes, eth0.send_packets, eth0.send_drops);
    assert_eq!((received, sent), ((1000, 10, 2), (2000, 20, 4)));
}

#[test]
fn interfaces_are_read_from_the_given_file() {
    let fake = Fake::new();
    node_files(&fake);
    fake.file("host/net_dev", NET_DEV.replace("eth", "host"));
    let mut sampler = sampler(&fake, v2(&fake));
    let mut sample = Sample::default();
    let names = |sample: &Sample| -> Vec<String> {
        let interfaces = sample.node.interfaces.iter();
        interfaces.map(|it| it.interface.to_string()).collect()
    };
    sampler.set_net_dev(&fake.root().join("host/net_dev"));
    sampler.sample_node(BootTime::default(), &everything(), &mut sample);
    assert_eq!(names(&sample), ["host0", "host1"]);
    assert!(sample.node.cpu.is_some() && !sample.node.disks.is_empty());
    // If it is missing, no other interfaces are used instead.
    sampler.set_net_dev(&fake.root().join("host/none"));
    sampler.sample_node(BootTime::default(), &everything(), &mut sample);
    assert_eq!(names(&sample), [""; 0]);
}

#[test]
fn only_what_is_demanded_is_read() {
    let fake = Fake::new();
    node_files(&fake);
    let mut sampler = sampler(&fake, v2(&fake));
    let mut sample = Sample::default();
    sampler.sample_node(BootTime::default(), &everything(), &mut sample);
    sampler.sample_node(BootTime::default(), &Demand::default(), &mut sample);
    let node = &sample.node;
    assert!(node.cpu.is_some() && node.memory.is_some());
    assert!(node.load.is_none() && node.pressure.iter().all(Option::is_none));
    assert!(node.disks.is_empty() && node.interfaces.is_empty());
    assert_eq!((node.tasks, node.system.len()), (None, 0));
    assert_eq!(node.page_scans, None);
}

#[test]
fn each_pod_has_the_time_of_its_own_read() {
    let fake = Fake::new();
    node_files(&fake);
    let hierarchy = v2(&fake);
    v2_pod(&fake, "p");
    v2_pod(&fake, "q");
    // Opening a pipe blocks until there is a writer.
    let pause = Duration::from_millis(60);
    let slow = ["proc/loadavg", "cg/p/memory.current"].map(|name| fake.root().join(name));
    for path in &slow {
        std::fs::remove_file(path).unwrap();
        mkfifo(path, Mode::S_IRWXU).unwrap();
    }
    let mut sampler = sampler(&fake, hierarchy);
    let pod = |name| (uid(name), CgroupPath::new(name).unwrap());
    sampler.set_pods(["p", "q"].map(pod).into_iter());
    let (mut sample, now) = (Sample::default(), BootTime::from_nanos(7));
    let demand = Demand {
        load: true,
        ..Demand::default()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for path in &slow {
                std::thread::park_timeout(pause);
                drop(std::fs::OpenOptions::new().write(true).open(path).unwrap());
            }
        });
        sampler.sample_node(now, &demand, &mut sample);
        sampler.sample_pods(now, &demand, &mut sample);
    });
    let [p, q] = [0, 1].map(|index: usize| sample.pods[index].at);
    assert_eq!(sample.at, now);
    assert!(p.since(now) >= pause / 2, "{p:?}");
    assert!(q.since(p) >= pause / 2, "{p:?} {q:?}");
}

#[test]
fn pod_pressure_is_read_only_on_demand() {
    let fake = Fake::new();
    let hierarchy = v2(&fake);
    v2_pod(&fake, "p");
    let mut sampler = sampler(&fake, hierarchy);
    sampler.set_pods([(uid("p"), CgroupPath::new("p").unwrap())].into_iter());
    let mut sample = Sample::default();
    let mut sample_once = |demand: Demand| {
        sampler.sample_pods(BootTime::default(), &demand, &mut sample);
        let pod = &sample.pods[0];
        (pod.waits, pod.io_bytes)
    };
    assert_eq!(sample_once(everything()), (WAITS, Some(4199)));
    assert_eq!(
        sample_once(Demand::default()),
        (WaitCounters::default(), None)
    );
    let pod_io = Demand {
        pod_io: true,
        ..Demand::default()
    };
    assert_eq!(sample_once(pod_io), (WaitCounters::default(), Some(4199)));
}

#[test]
fn limits_reached_by_containers_count_for_their_pod() {
    // The kernel adds them to the pod's own counters, unless the tree is mounted with `memory_localevents`.
    for (options, reclaims) in [("rw,nsdelegate", 12), ("rw,memory_localevents", 12 + 24)] {
        let fake = Fake::new();
        let hierarchy = v2(&fake);
        for cgroup in ["p", "p/one", "p/two"] {
            v2_pod(&fake, cgroup);
        }
        fake.file(
            "proc/self/mounts",
            format!("cgroup2 /sys/fs/cgroup cgroup2 {options} 0 0\n"),
        );
        let (pod, faults) = sample_pod(&fake, hierarchy, "p");
        assert_eq!(faults, [""; 0]);
        let counted = pod.unwrap().waits.own_limit_reclaims;
        assert_eq!(counted, Some(reclaims), "{options}");
    }
}

#[test]
fn an_empty_io_stat_is_zero_and_a_truncated_one_unknown() {
    for (text, bytes, faults) in [
        ("", Some(0), 0),
        ("254:0 rbytes=1 wbytes=2", None, 1),
        ("254:0 rbytes=1 wbytes=x\n", None, 1),
        ("254:0 rbytes=18446744073709551615\n8:0 wbytes=1\n", None, 1),
    ] {
        let fake = Fake::new();
        let hierarchy = v2(&fake);
        v2_pod(&fake, "p");
        fake.file("cg/p/io.stat", text);
        let (pod, found) = sample_pod(&fake, hierarchy, "p");
        assert_eq!(
            (pod.unwrap().io_bytes, found.len()),
            (bytes, faults),
            "{text:?}"
        );
    }
}

#[test]
fn the_services_of_system_slice_are_read_one_by_one() {
    let fake = Fake::new();
    node_files(&fake);
    let mut sampler = sampler(&fake, v2(&fake));
    let mut sample = Sample::default();
    let mut services = |sampler: &mut Sampler, demand: &Demand| -> Vec<String> {
        let now = BootTime::default();
        sampler.sample_node(now, demand, &mut sample);
        assert_eq!(sample.node.system, [], "only read with the pods");
        sampler.sample_pods(now, demand, &mut sample);
        assert!(sampler.faults().is_empty(), "{:?}", sampler.faults());
        let services = sample.node.system.iter();
        services
            .map(|service| {
                assert_eq!(service.waits, WAITS);
                service.name.to_string()
            })
            .collect()
    };
    let none: [&str; 0] = [];
    assert_eq!(services(&mut sampler, &everything()), none);
    for name in [
        "sshd.service",
        "cron.service",
        "run-1.scope",
        "system-getty.slice",
    ] {
        v2_pod(&fake, &format!("system.slice/{name}"));
    }
    let all = ["cron.service", "run-1.scope", "sshd.service"];
    assert_eq!(services(&mut sampler, &everything()), all);
    assert_eq!(services(&mut sampler, &Demand::default()), none);
    std::fs::remove_dir_all(fake.root().join("cg/system.slice/cron.service")).unwrap();
    assert_eq!(services(&mut sampler, &everything()), all[1..]);
    let pod = |path: &str| SampledPod::from((uid("unit"), CgroupPath::new(path).unwrap()));
    sampler.set_pods(std::iter::once(pod("system.slice/unit.service")));
    assert_eq!(
        services(&mut sampler, &everything()),
        none,
        "pods are below it"
    );
    sampler.set_pods(std::iter::once(pod("system.slices/unit.service")));
    assert_eq!(services(&mut sampler, &everything()), all[1..]);
    for number in 0..100 {
        v2_pod(&fake, &format!("system.slice/{number}.service"));
    }
    assert_eq!(services(&mut sampler, &everything()).len(), 64);
}

#[test]
fn an_earlier_trace_has_the_system_as_a_whole() {
    let text = r#"{"system":{"stalled":[1000,20000,null],"periods":7,"throttledPeriods":3}}"#;
    let node: NodeSample = serde_json::from_str(text).unwrap();
    let [whole] = &node.system[..] else {
        panic!("{node:?}");
    };
    let waits = WaitCounters {
        own_limit_reclaims: None,
        ..WAITS
    };
    assert_eq!((&*whole.name, whole.waits), ("system.slice", waits));
    let again: NodeSample = serde_json::from_str(&serde_json::to_string(&node).unwrap()).unwrap();
    assert_eq!(again, node);
}

#[test]
fn cpu_time_is_known_for_any_counter_values() {
    let fake = Fake::new();
    node_files(&fake);
    for text in [
        // 512 CPUs for two years: more than 2^64 ns.
        "cpu  3200000000000 0 0 1800000000000 0 0 0 0 0 0\ncpu0 1\n",
        "cpu  18446744073709551615 1 1 1 1 1 1 1 0 0\ncpu0 1\n",
        // Guest time is ignored: it is already included in user time.
        "cpu  1 2 3 4 5 6 7 8 99999999999999999999 x\ncpu0 1\n",
    ] {
        fake.file("proc/stat", text);
        let (sample, faults) = sample_node(&fake);
        assert!(sample.node.cpu.is_some(), "{text}");
        assert_eq!(faults, [""; 0]);
    }
}

/// Files of `/proc`, each with texts that must be rejected.
const DAMAGES: [(&str, &[&str]); 4] = [
    (
        "stat",
        &[
            "",
            "cpu",
            "cpu  1 2 3 4\ncpu0 1 2 3 4\n",
            "cpu  1 2 3 4 5 6 7 99999999999999999999\ncpu0 1\n",
            "cpu  1 2 3 4 5 6 7 8\n",
            "intr 1\n",
        ],
    ),
    (
        "meminfo",
        &[
            "",
            "MemTotal: 1000 kB\n",
            "MemTotal: 1000 kB\nMemAvailable: 4",
            "MemTotal: 1000 kB\nMemAvailable: 4 MB\n",
            "MemTotal: 0 kB\nMemAvailable: 0 kB\n",
            "MemTotal: 99999999999999999999 kB\nMemAvailable: 1 kB\n",
            "MemTotal: 18446744073709551615 kB\nMemAvailable: 1 kB\n",
        ],
    ),
    (
        "loadavg",
        &[
            "",
            "0.1 0.2",
            "0.1 0.2\n",
            "nan 1 1\n",
            "-1 1 1\n",
            "1e5 1 1\n",
        ],
    ),
    (
        "pressure/cpu",
        &[
            "",
            "some avg10=1.0 avg60=2.0\n",
            "some avg10=x avg60=0 avg300=0\n",
            "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
        ],
    ),
];

#[test]
fn a_damaged_node_file_is_none_with_its_path() {
    for (name, texts) in DAMAGES {
        for text in texts {
            let fake = Fake::new();
            node_files(&fake);
            fake.file(&format!("proc/{name}"), text);
            let (sample, faults) = sample_node(&fake);
            let node = sample.node;
            let there = match name {
                "stat" => node.cpu.is_some(),
                "meminfo" => node.memory.is_some(),
                "loadavg" => node.load.is_some(),
                _ => node.pressure[0].is_some(),
            };
            assert!(!there, "{name}: {text:?}");
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].ends_with(name), "{faults:?}");
        }
    }
}

#[test]
fn missing_node_files_are_none_without_errors() {
    let fake = Fake::new();
    let (sample, faults) = sample_node(&fake);
    assert_eq!(sample.node, NodeSample::default());
    assert_eq!(faults, [""; 0]);
}

#[test]
fn a_v2_pod_is_sampled_with_either_driver() {
    let uid = UID.replace('-', "_");
    for (cgroup, container) in [
        (
            format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid}.slice"),
            format!("cri-containerd-{CONTAINER}.scope"),
        ),
        (
            format!("kubepods/besteffort/pod{UID}"),
            CONTAINER.to_owned(),
        ),
    ] {
        let fake = Fake::new();
        let hierarchy = v2(&fake);
        v2_pod(&fake, &cgroup);
        v2_pod(&fake, &format!("{cgroup}/{container}"));
        let found = scan(&hierarchy, "/").unwrap();
        assert_eq!(found[0].cgroup.as_str(), cgroup);
        assert_eq!(&*found[0].name.uid.0, UID);

        let (pod, faults) = sample_pod(&fake, hierarchy, &cgroup);
        let pod = pod.unwrap();
        assert_eq!(faults, [""; 0]);
        assert_eq!(pod.cpu_nanos, Some(1_500_000));
        assert_eq!(pod.memory, Some(Bytes(8192)));
        let parts = pod.memory_parts.unwrap();
        assert_eq!((parts.unreclaimable, parts.cache), (Bytes(330), Bytes(700)));
        // A kernel without io.pressure.
        assert_eq!(pod.stalled, [Some(12.5), Some(0.25), None]);
        assert_eq!(pod.waits, WAITS);
        assert_eq!(pod.io_bytes, Some(4199));
        // The pod's own cgroup is the target, although the container has a quota as well.
        assert_eq!(pod.target_cgroups.len(), 1);
        assert_eq!(&*pod.target_cgroups[0].cgroup, "");
        assert_eq!(pod.target_cgroups[0].cpu_nanos, Some(1_500_000));
        assert_eq!(
            pod.target_cgroups[0].quota,
            Some(Quota::Limit(MilliCpu(500)))
        );
        assert_eq!(pod.containers.len(), 1);
        let one = &pod.containers[0];
        assert_eq!(*one.container, *container);
        assert_eq!((one.periods, one.throttled_periods), (Some(7), Some(3)));
    }
}

#[test]
fn a_pod_is_sampled_on_joint_and_hybrid_v1_trees() {
    for (cpu, cpuacct) in [("cpu,cpuacct", "cpu,cpuacct"), ("cpu", "cpuacct")] {
        let fake = Fake::new();
        let root = fake.directory("cg");
        fake.directory("cg/unified/p");
        fake.file(&format!("cg/{cpuacct}/p/cpuacct.usage"), "77\n")
            .file(&format!("cg/{cpu}/p/cpu.cfs_quota_us"), "25000\n")
            .file(&format!("cg/{cpu}/p/cpu.cfs_period_us"), "100000\n")
            .file(
                &format!("cg/{cpu}/p/cpu.stat"),
                "nr_periods 4\nnr_throttled 1\nthrottled_time 5\n",
            )
            .file(&format!("cg/{cpu}/p/tasks"), "")
            .file("cg/memory/p/memory.usage_in_bytes", "4096\n")
            .file("cg/memory/p/memory.kmem.usage_in_bytes", "7\n")
            .file(
                "cg/memory/p/memory.stat",
                "cache 1\nrss 1\nshmem 1\ntotal_cache 900\ntotal_rss 100\ntotal_shmem 200\n",
            );
        let (pod, faults) = sample_pod(&fake, Hierarchy::below(&root).unwrap(), "p");
        let pod = pod.unwrap();
        assert_eq!(faults, [""; 0]);
        assert_eq!((pod.cpu_nanos, pod.memory), (Some(77), Some(Bytes(4096))));
        let parts = pod.memory_parts.unwrap();
        assert_eq!((parts.unreclaimable, parts.cache), (Bytes(307), Bytes(700)));
        assert_eq!(pod.target_cgroups.len(), 1);
        assert_eq!(
            pod.target_cgroups[0].quota,
            Some(Quota::Limit(MilliCpu(250)))
        );
        let waits = WaitCounters {
            stalled: [None; 3],
            periods: Some(4),
            throttled_periods: Some(1),
            ..WaitCounters::default()
        };
        assert_eq!((pod.waits, pod.io_bytes), (waits, None));
        // A cgroup without child cgroups is its own container.
        assert_eq!(&*pod.containers[0].container, "p");
        assert_eq!(pod.containers[0].throttled_periods, Some(1));
    }
}

#[test]
fn a_damaged_pod_file_affects_only_its_own_value() {
    let texts = [
        "",
        "12",
        "x\n",
        "-1\n",
        "1 2 3\n",
        "99999999999999999999999\n",
        "\n\n",
        "\0\0\0\n",
    ];
    for name in ["cpu.stat", "memory.current", "memory.stat", "cpu.max"] {
        for text in texts {
            let fake = Fake::new();
            let hierarchy = v2(&fake);
            v2_pod(&fake, "p");
            fake.file(&format!("cg/p/{name}"), text);
            let (pod, faults) = sample_pod(&fake, hierarchy, "p");
            let pod = pod.unwrap();
            assert_eq!(
                pod.cpu_nanos.is_none(),
                name == "cpu.stat",
                "{name} {text:?}"
            );
            assert_eq!(
                pod.memory.is_none(),
                name == "memory.current",
                "{name} {text:?}"
            );
            assert_eq!(
                pod.memory_parts.is_none(),
                name == "memory.stat",
                "{name} {text:?}"
            );
            assert_eq!(
                pod.target_cgroups[0].quota.is_none(),
                name == "cpu.max",
                "{name} {text:?}"
            );
            assert_eq!(faults.len(), 1, "{faults:?}");
            assert!(faults[0].contains(&format!("p/{name}")), "{faults:?}");
        }
    }
}

#[test]
fn missing_controllers_are_none_without_errors() {
    let fake = Fake::new();
    let hierarchy = v2(&fake);
    fake.file(
        "cg/p/cpu.stat",
        "usage_usec 5\nuser_usec 1\nsystem_usec 4\n",
    );
    let (pod, faults) = sample_pod(&fake, hierarchy, "p");
    let pod = pod.unwrap();
    assert_eq!(faults, [""; 0]);
    assert_eq!(
        (pod.cpu_nanos, pod.memory, pod.memory_parts),
        (Some(5000), None, None)
    );
    assert_eq!(pod.target_cgroups[0].quota, None);
    assert_eq!(pod.containers[0].periods, None);
    assert_eq!(pod.containers[0].run_delay_nanos, None);
}

#[test]
fn files_that_appear_later_are_found_after_set_pods() {
    let fake = Fake::new();
    let hierarchy = v2(&fake);
    fake.file("cg/p/cpu.stat", "usage_usec 5\n");
    let mut sampler = sampler(&fake, hierarchy);
    let pods = || [(uid("p"), CgroupPath::new("p").unwrap())].into_iter();
    let mut sample = Sample::default();
    sampler.set_pods(pods());
    sampler.sample_pods(BootTime::default(), &Demand::default(), &mut sample);
    assert_eq!(sample.pods[0].memory, None);
    fake.file("cg/p/memory.current", "1\n");
    sampler.set_pods(pods());
    sampler.sample_pods(BootTime::default(), &Demand::default(), &mut sample);
    assert_eq!(sample.pods[0].memory, Some(Bytes(1)));
}

#[test]
fn the_run_delay_counter_never_goes_backwards() {
    let fake = Fake::new();
    let hierarchy = v2(&fake);
    v2_pod(&fake, "p");
    v2_pod(&fake, "p/c");
    let mut sampler = sampler(&fake, hierarchy);
    sampler.set_pods([(uid("p"), CgroupPath::new("p").unwrap())].into_iter());
    let mut sample = Sample::default();
    let mut sample_once = |second: u64, threads: &[(u32, u64)]| {
        let ids: String = threads
            .iter()
            .fold(String::new(), |ids, (id, _)| ids + &format!("{id}\n"));
        fake.file("cg/p/c/cgroup.threads", ids);
        for (id, delay) in threads {
            fake.file(&format!("proc/{id}/schedstat"), format!("1 {delay} 1\n"));
        }
        let now = BootTime::from_nanos(second * 1_000_000_000);
        sampler.sample_pods(now, &everything(), &mut sample);
        sample.pods[0].containers[0].run_delay_nanos.unwrap()
    };
    assert_eq!(
        sample_once(0, &[(11, 500), (12, 900)]),
        0,
        "counts from the first sample"
    );
    assert_eq!(sample_once(1, &[(11, 600), (12, 900)]), 100);
    assert_eq!(
        sample_once(2, &[(11, 650)]),
        150,
        "an exited thread's time stays included"
    );
    assert_eq!(
        sample_once(3, &[(11, 650), (13, 40)]),
        190,
        "a new thread counts from its start"
    );
    assert_eq!(
        sample_once(4, &[(11, 30)]),
        220,
        "its ID was reused by another thread"
    );
    let long_past = 500 * 1_000_000_000;
    assert_eq!(
        sample_once(5, &[(11, 30), (14, long_past)]),
        1_000_000_220,
        "a thread cannot wait longer than the elapsed time"
    );
    assert_eq!(sample_once(6, &[]), 1_000_000_220);
}

#[test]
fn invisible_threads_leave_the_counter_unknown() {
    let fake = Fake::new();
    let unified = v2(&fake);
    v2_pod(&fake, "p");
    // What the kernel lists for a process in another PID namespace: zeros on v2, nothing on v1.
    for text in ["0\n0\n", "7\n0\n"] {
        fake.file("cg/p/cgroup.threads", text)
            .file("proc/7/schedstat", "1 2 3\n");
        let (pod, faults) = sample_pod(&fake, unified.clone(), "p");
        assert_eq!(pod.unwrap().containers[0].run_delay_nanos, None, "{text:?}");
        assert_eq!(faults, [""; 0]);
    }
}

#[test]
fn a_private_proc_shows_no_threads_of_pods() {
    let fake = Fake::new();
    fake.file("v1/cpu/tasks", "")
        .file("v1/cpuacct/p/cpuacct.usage", "5\n")
        .file("v1/cpu/p/tasks", "7\n")
        .file("proc/7/schedstat", "1 2 3\n");
    let hierarchy = Hierarchy::below(&fake.root().join("v1")).unwrap();
    for (own, waited) in [(false, Some(0)), (true, None)] {
        let mut sampler = sampler(&fake, hierarchy.clone());
        if own {
            sampler.set_net_dev(&fake.root().join("host/net_dev"));
        }
        let path = CgroupPath::new("p").unwrap();
        sampler.set_pods([(uid("p"), path)].into_iter());
        let mut sample = Sample::default();
        sampler.sample_pods(BootTime::default(), &everything(), &mut sample);
        assert_eq!(sample.pods[0].containers[0].run_delay_nanos, waited);
    }
}

#[test]
fn a_damaged_schedstat_leaves_the_counter_unknown() {
    for text in ["", "1 2\n", "1 x 3\n", "1 2"] {
        let fake = Fake::new();
        let hierarchy = v2(&fake);
        v2_pod(&fake, "p");
        fake.file("cg/p/cgroup.threads", "7\n")
            .file("proc/7/schedstat", text);
        let (pod, faults) = sample_pod(&fake, hierarchy, "p");
        assert_eq!(pod.unwrap().containers[0].run_delay_nanos, None, "{text:?}");
        assert_eq!(faults.len(), 1, "{faults:?}");
    }
}

#[test]
fn a_disk_list_longer_than_the_buffer_is_read_completely() {
    let fake = Fake::new();
    node_files(&fake);
    let line = |number: usize| format!("8 0 sd{number} 1 2 3 4 5 6 7 8 9 10 11\n");
    let text: String = (0..3000).fold(String::new(), |text, number| text + &line(number));
    fake.file("proc/diskstats", text);
    let (sample, _) = sample_node(&fake);
    assert_eq!(sample.node.disks.len(), 3000);
    assert_eq!(*sample.node.disks[2999].device, *"sd2999");
}
