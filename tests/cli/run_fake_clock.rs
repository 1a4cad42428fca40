//! A machine on a fake clock and a fake cgroup tree: persisted state, grace periods and throttles over time.

use std::fs::{self, OpenOptions};
use std::net::Ipv4Addr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use nix::libc::O_NONBLOCK;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use plimsoll::clock::boot_time;
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::time::BootTime;
use plimsoll::node::cgroup::Hierarchy;
use plimsoll::node::machine::MachineSettings;
use plimsoll::standalone::host::{self, Machine};
use plimsoll::standalone::pods::own::OwnCgroups;
use plimsoll::standalone::pods::{self, manifests::Manifests};
use plimsoll::standalone::policies;
use serde_json::{Value, json};
use tempfile::TempDir;

const POLICY: &str = "\
{apiVersion: ensurance.crane.io/v1alpha1, kind: AvoidanceAction, metadata: {name: evict},
  spec: {eviction: {evictUnowned: true, terminationGracePeriodSeconds: 5}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: node},
  spec: {rules: [{name: memory, actionName: evict, metricRule: {name: memory_total_utilization, value: 50}}]}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: PodQOS, metadata: {name: all},
  spec: {allowedActions: [evict], labelSelector: {}}}
";
const THROTTLE: &str = "\
{apiVersion: ensurance.crane.io/v1alpha1, kind: AvoidanceAction, metadata: {name: slow},
  spec: {throttle: {cpuThrottle: {stepCPURatio: 30}}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: node},
  spec: {rules: [{name: load, actionName: slow, metricRule: {name: cpu_load_1_min, value: 2}}]}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: PodQOS, metadata: {name: all},
  spec: {allowedActions: [slow], labelSelector: {}}}
";
const POD: &str = "\
{apiVersion: v1, kind: Pod, metadata: {name: batch, annotations: {plimsoll.dev/cgroup: batch}},
  spec: {containers: [{name: c}]}}
";

const fn at(seconds: u64) -> BootTime {
    BootTime::from_nanos(seconds * 1_000_000_000)
}

/// A machine whose memory is full, with one pod that uses some of it.
struct FakeTree {
    dir: TempDir,
    /// Time between two evaluations.
    period: Duration,
}

impl FakeTree {
    fn new() -> Self {
        let tree = Self {
            dir: tempfile::tempdir().unwrap(),
            period: Duration::from_secs(10),
        };
        tree.write("policies/p.yaml", POLICY);
        tree.write("pods/p.yaml", POD);
        tree.write(
            "proc/stat",
            "cpu  1 0 1 1 0 0 0 0 0 0\ncpu0 1 0 1 1 0 0 0 0 0 0\nprocs_running 10\nprocs_blocked 0\n",
        );
        tree.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 100 kB\n");
        tree.write("cgroup/batch/cpu.stat", "usage_usec 1\n");
        tree.write("cgroup/batch/memory.current", "40960000\n");
        tree.write(
            "cgroup/batch/memory.stat",
            "anon 40960000\nshmem 0\nslab_unreclaimable 0\nfile 0\n",
        );
        tree.write("cgroup/batch/cgroup.kill", "");
        tree
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn open(&self, preview: bool) -> Machine {
        self.open_with_problems(preview, 0)
    }

    fn open_with_problems(&self, preview: bool, problems: usize) -> Machine {
        let loaded = policies::load(
            &[self.path("policies")],
            &NodeFacts::default(),
            preview,
            &[],
        );
        assert_eq!(loaded.problems.len(), problems, "{:?}", loaded.problems);
        let hierarchy = Hierarchy::V2 {
            root: self.path("cgroup"),
        };
        let manifests = Manifests::read(&[self.path("pods")]);
        let found = pods::find(&manifests, &[], &hierarchy, &OwnCgroups::default());
        let settings = MachineSettings {
            hierarchy,
            proc_root: self.path("proc"),
            sys_root: self.path("sys"),
            net_dev: None,
            node_address: Ipv4Addr::LOCALHOST.into(),
            state_dir: self.path("state"),
            sample_interval: Duration::from_secs(1),
            evaluation_period: self.period,
            sample_everything: false,
            windows: std::sync::Arc::default(),
        };
        host::open(settings, Arc::new(loaded.policy), found.workloads, at(10)).unwrap()
    }

    fn saved_state(&self) -> Option<Value> {
        let text = fs::read(self.path("state/engine.json")).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

#[test]
fn an_eviction_round_is_saved_before_a_process_is_signalled() {
    let tree = FakeTree::new();
    let processes = tree.path("cgroup/batch/cgroup.procs");
    // Reading the list of processes blocks until the pipe has a writer.
    mkfifo(&processes, Mode::S_IRWXU).unwrap();
    let mut machine = tree.open(false);
    let tick = thread::spawn(move || machine.tick(at(10)).len());
    let end = boot_time() + Duration::from_secs(30);
    while tree.saved_state().is_none() {
        assert!(!tick.is_finished() && boot_time() < end, "nothing saved");
        thread::yield_now();
    }
    assert!(!tick.is_finished(), "it waits for the list of processes");
    let saved = tree.saved_state().unwrap();
    assert_eq!(saved["state"]["rounds"][0]["group"], "memory", "{saved}");
    // With O_NONBLOCK the last open fails, since there is no reader any more, instead of blocking.
    let mut writer = OpenOptions::new();
    writer.write(true).custom_flags(O_NONBLOCK);
    while !tick.is_finished() {
        drop(writer.open(&processes));
        thread::yield_now();
    }
    assert!(tick.join().unwrap() > 0);
}

/// Writes the state of a process that was terminated within the grace period.
fn left_behind(tree: &FakeTree) {
    tree.write("cgroup/batch/cgroup.procs", "4194303\n");
    let inode = fs::metadata(tree.path("cgroup/batch")).unwrap().ino();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let pending = json!({"uid": format!("default/batch@{inode}"), "cgroup": "batch", "inode": inode,
        "started": at(5), "killAt": at(10)});
    let saved = json!({"bootId": boot.trim(), "state": {}, "evictions": [pending]});
    tree.write("state/engine.json", &saved.to_string());
}

#[test]
fn an_inherited_grace_period_ends_with_a_kill_unless_preview() {
    for (preview, killed) in [(false, "1"), (true, "")] {
        let tree = FakeTree::new();
        left_behind(&tree);
        let mut machine = tree.open(preview);
        machine.tick(at(11));
        let kill = fs::read_to_string(tree.path("cgroup/batch/cgroup.kill")).unwrap();
        assert_eq!(kill, killed, "preview: {preview}");
    }
}

#[test]
fn a_throttle_lasts_until_the_next_evaluation() {
    let mut tree = FakeTree::new();
    tree.period = Duration::from_hours(1);
    tree.write("policies/p.yaml", THROTTLE);
    tree.write("proc/loadavg", "9.00 9.00 9.00 1/1 1\n");
    tree.write("cgroup/batch/cpu.max", "max 100000\n");
    let mut machine = tree.open(false);
    machine.tick(at(10));
    // One CPU for the whole hour, and for the second that a busy machine may take to read it.
    tree.write("cgroup/batch/cpu.stat", "usage_usec 3601500000\n");
    machine.tick(at(3610));
    for minute in 0..59 {
        machine.tick(at(3611 + minute * 60));
        let quota = fs::read_to_string(tree.path("cgroup/batch/cpu.max")).unwrap();
        assert_eq!(quota, "70000 100000", "after {minute} minutes");
    }
}

/// Events of a minute with a throttle, whose text has this part.
fn events_of_a_minute(
    tree: &FakeTree,
    part: &str,
    mut each_second: impl FnMut(u64),
) -> (Machine, Vec<String>) {
    tree.write("policies/p.yaml", THROTTLE);
    tree.write("proc/loadavg", "9.00 9.00 9.00 1/1 1\n");
    tree.write("cgroup/batch/cpu.max", "max 100000\n");
    let mut machine = tree.open(false);
    let mut found = Vec::new();
    for second in 0..60 {
        each_second(second);
        let events = machine.tick(at(10 + second)).iter();
        found.extend(
            events
                .map(ToString::to_string)
                .filter(|it| it.contains(part)),
        );
    }
    (machine, found)
}

#[test]
fn usage_above_a_quota_that_another_writer_reset_is_no_missing_effect() {
    let tree = FakeTree::new();
    let (machine, found) = events_of_a_minute(&tree, "no effect", |second| {
        // As `systemctl daemon-reload` does; the pod uses what it gets until the next tick.
        if second == 15 || second == 25 {
            tree.write("cgroup/batch/cpu.max", "max 100000\n");
        }
        let used = format!("usage_usec {}\n", second.min(30) * 1_000_000);
        tree.write("cgroup/batch/cpu.stat", &used);
    });
    let quota = fs::read_to_string(tree.path("cgroup/batch/cpu.max")).unwrap();
    assert!(!quota.starts_with("max"), "it is throttled: {quota}");
    assert_eq!(found, [""; 0]);
    assert_eq!(machine.ineffective(), []);
}

#[test]
fn a_pod_whose_usage_cannot_be_read_is_reported() {
    let tree = FakeTree::new();
    let (machine, found) = events_of_a_minute(&tree, "no effect", |_| {
        tree.write("cgroup/batch/cpu.stat", "unreadable\n");
    });
    assert!(
        found[0].contains("its CPU usage cannot be read"),
        "{found:?}"
    );
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(machine.ineffective()[0].cause.reason, "NotMeasured");
}

#[test]
fn a_quota_that_a_sched_ext_scheduler_ignores_is_reported_with_its_cause() {
    let tree = FakeTree::new();
    tree.write("policies/p.yaml", THROTTLE);
    tree.write("proc/loadavg", "9.00 9.00 9.00 1/1 1\n");
    tree.write("cgroup/batch/cpu.max", "max 100000\n");
    tree.write("cgroup/batch/cgroup.procs", "1\n");
    tree.write("sys/kernel/sched_ext/state", "enabled\n");
    tree.write("sys/kernel/sched_ext/root/ops", "simple\n");
    let mut machine = tree.open(false);
    let mut texts = Vec::new();
    for second in 0..60 {
        // One CPU, whatever the quota.
        let used = format!("usage_usec {}\n", second * 1_000_000);
        tree.write("cgroup/batch/cpu.stat", &used);
        let events = machine.tick(at(10 + second)).iter();
        texts.extend(events.map(|event| (second, event.to_string())));
    }
    let first = |text: &str| texts.iter().find(|(_, it)| it.contains(text)).cloned();
    let (throttled, _) = first("throttle default/batch: 100 % -> 70 %").expect("a step");
    let (seen, text) = first("the action has no effect").expect("it is noticed");
    assert!(seen - throttled <= 30, "{throttled} s, {seen} s");
    assert!(text.contains("`simple` is attached"), "{text}");
    let ineffective = machine.ineffective();
    assert_eq!(ineffective[0].cause.reason, "SchedExt");
    let quota = fs::read_to_string(tree.path("cgroup/batch/cpu.max")).unwrap();
    machine.tick(at(200));
    let later = fs::read_to_string(tree.path("cgroup/batch/cpu.max")).unwrap();
    assert_eq!(later, quota, "no further step");
}
