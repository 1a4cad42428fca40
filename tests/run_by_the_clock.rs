//! A machine whose time the test decides, on folders that play a cgroup tree: what is kept, when, and how long it lasts.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

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
use plimsoll::engine::policy::NodeFacts;
use plimsoll::engine::time::BootTime;
use plimsoll::node::cgroup::Hierarchy;
use plimsoll::node::clock::boot_time;
use plimsoll::node::machine::Settings;
use plimsoll::standalone::host::{self, Machine};
use plimsoll::standalone::pods::own::OwnCgroups;
use plimsoll::standalone::pods::{self, manifests::Manifests};
use plimsoll::standalone::policies::{self, Overrides};
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
/// Evaluated once an hour.
const THROTTLE: &str = "\
{apiVersion: ensurance.crane.io/v1alpha1, kind: AvoidanceAction, metadata: {name: slow},
  spec: {throttle: {cpuThrottle: {stepCPURatio: 30}}}}
---
{apiVersion: ensurance.crane.io/v1alpha1, kind: NodeQOS, metadata: {name: node},
  spec: {evaluationPeriodSeconds: 3600,
    rules: [{name: load, actionName: slow, metricRule: {name: cpu_load_1_min, value: 2}}]}}
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

/// A machine whose memory is full, and one pod that holds some of it.
struct Ground(TempDir);

impl Ground {
    fn new() -> Self {
        let ground = Self(tempfile::tempdir().unwrap());
        ground.write("policies/p.yaml", POLICY);
        ground.write("pods/p.yaml", POD);
        ground.write(
            "proc/stat",
            "cpu  1 0 1 1 0 0 0 0 0 0\ncpu0 1 0 1 1 0 0 0 0 0 0\n",
        );
        ground.write("proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 100 kB\n");
        ground.write("cgroup/batch/cpu.stat", "usage_usec 1\n");
        ground.write("cgroup/batch/memory.current", "409600\n");
        ground.write(
            "cgroup/batch/memory.stat",
            "anon 409600\nshmem 0\nslab_unreclaimable 0\nfile 0\n",
        );
        ground.write("cgroup/batch/cgroup.kill", "");
        ground
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    fn open(&self, preview: bool) -> Machine {
        let overrides = Overrides {
            period: None,
            preview,
        };
        let loaded = policies::load(
            &[self.path("policies")],
            &NodeFacts::default(),
            overrides,
            &[],
        );
        assert_eq!(loaded.problems, []);
        let hierarchy = Hierarchy::V2 {
            root: self.path("cgroup"),
        };
        let manifests = Manifests::read(&[self.path("pods")]);
        let found = pods::find(&manifests, &[], &hierarchy, &OwnCgroups::default());
        let settings = Settings {
            hierarchy,
            proc_root: self.path("proc"),
            net_dev: None,
            node_address: Ipv4Addr::LOCALHOST.into(),
            state_dir: self.path("state"),
            sample_interval: Duration::from_secs(1),
            sample_everything: false,
        };
        host::open(settings, Arc::new(loaded.policy), found.workloads, at(10)).unwrap()
    }

    fn kept(&self) -> Option<Value> {
        let text = fs::read(self.path("state/engine.json")).ok()?;
        serde_json::from_slice(&text).ok()
    }
}

#[test]
fn that_a_round_has_begun_is_kept_before_anybody_is_signalled() {
    let ground = Ground::new();
    let processes = ground.path("cgroup/batch/cgroup.procs");
    // The processes are listed only when somebody writes into the pipe.
    mkfifo(&processes, Mode::S_IRWXU).unwrap();
    let mut machine = ground.open(false);
    let tick = thread::spawn(move || machine.tick(at(10)).len());
    let end = boot_time() + Duration::from_secs(30);
    while ground.kept().is_none() {
        assert!(!tick.is_finished() && boot_time() < end, "nothing kept");
        thread::yield_now();
    }
    assert!(!tick.is_finished(), "it waits for the list of processes");
    let kept = ground.kept().unwrap();
    assert_eq!(kept["state"]["rounds"][0]["group"], "memory", "{kept}");
    // Without O_NONBLOCK the last open would wait for a reader that never comes; with it it fails.
    let mut writer = OpenOptions::new();
    writer.write(true).custom_flags(O_NONBLOCK);
    while !tick.is_finished() {
        drop(writer.open(&processes));
        thread::yield_now();
    }
    assert!(tick.join().unwrap() > 0);
}

/// What a process that was terminated within the grace period leaves.
fn left_behind(ground: &Ground) {
    ground.write("cgroup/batch/cgroup.procs", "4194303\n");
    let inode = fs::metadata(ground.path("cgroup/batch")).unwrap().ino();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let pending = json!({"uid": format!("default/batch@{inode}"), "cgroup": "batch", "inode": inode,
        "started": at(5), "killAt": at(10)});
    let kept = json!({"bootId": boot.trim(), "state": {}, "evictions": [pending]});
    ground.write("state/engine.json", &kept.to_string());
}

#[test]
fn a_grace_period_that_an_earlier_process_began_ends_with_the_kill_but_not_under_preview() {
    for (preview, killed) in [(false, "1"), (true, "")] {
        let ground = Ground::new();
        left_behind(&ground);
        let mut machine = ground.open(preview);
        machine.tick(at(11));
        let kill = fs::read_to_string(ground.path("cgroup/batch/cgroup.kill")).unwrap();
        assert_eq!(kill, killed, "preview: {preview}");
    }
}

#[test]
fn a_throttle_lasts_from_one_evaluation_to_the_next_however_rare_they_are() {
    let ground = Ground::new();
    ground.write("policies/p.yaml", THROTTLE);
    ground.write("proc/loadavg", "9.00 9.00 9.00 1/1 1\n");
    ground.write("cgroup/batch/cpu.max", "max 100000\n");
    let mut machine = ground.open(false);
    machine.tick(at(10));
    // One CPU for the whole hour.
    ground.write("cgroup/batch/cpu.stat", "usage_usec 3600000001\n");
    machine.tick(at(3610));
    for minute in 0..59 {
        machine.tick(at(3611 + minute * 60));
        let quota = fs::read_to_string(ground.path("cgroup/batch/cpu.max")).unwrap();
        assert_eq!(quota, "70000 100000", "after {minute} minutes");
    }
}
