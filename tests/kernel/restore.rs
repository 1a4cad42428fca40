//! How long a machine enforces throttles, and what it restores by itself. Plain directories stand in for cgroups where no
//! kernel is needed. Their values have the same length, since writes do not truncate.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::engine_support::{policy, rule, throttling};
use crate::kernel_support::{throttle, throttle_of_cgroups};
use plimsoll::clock::boot_time;
use plimsoll::crd::pod_facts::ContainerFacts;
use plimsoll::engine::DEFAULT_PERIOD;
use plimsoll::engine::policy::{PolicySet, Rule};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::MilliCpu;
use plimsoll::node::actuate::throttle::Throttler;
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::machine::workload::Workload;
use plimsoll::node::machine::{MachineSettings, restore_expired};
use plimsoll::standalone::host;
use tempfile::TempDir;

const ORIGINAL: &str = "400000 100000";
const OURS: &str = "150000 100000";
const MINUTE: Duration = Duration::from_mins(1);

/// A node with one pod.
struct TestNode {
    dir: TempDir,
    hierarchy: Hierarchy,
    now: BootTime,
}

impl TestNode {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cgroup");
        fs::create_dir_all(root.join("pod")).unwrap();
        fs::write(root.join("pod/cpu.max"), ORIGINAL).unwrap();
        Self {
            hierarchy: Hierarchy::V2 { root },
            now: boot_time(),
            dir,
        }
    }

    /// A node whose pod was throttled by an earlier process.
    fn throttled() -> Self {
        let node = Self::new();
        let find = |_: &_| CgroupPath::new("pod").ok();
        let mut plan = throttle_of_cgroups("pod", &[("", Some(1500))]);
        plan.target_cgroups[0].base = MilliCpu(3000);
        let mut throttler = node.throttler(node.now);
        let outcomes = throttler.apply(node.now, &[plan], &find);
        crate::kernel_support::assert_fine(&outcomes);
        assert_eq!(node.quota(), OURS);
        node
    }

    fn throttler(&self, now: BootTime) -> Throttler {
        Throttler::open(&self.state(), self.hierarchy.clone(), now)
            .unwrap()
            .0
    }

    fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("cgroup/pod/cpu.max")
    }

    fn quota(&self) -> String {
        fs::read_to_string(self.file()).unwrap()
    }

    fn pod(&self) -> Workload {
        Workload {
            pod: Arc::new(crate::engine_support::pod("pod")),
            cgroup: CgroupPath::new("pod").unwrap(),
            inode: fs::metadata(self.file().parent().unwrap()).unwrap().ino(),
            containers: None,
        }
    }

    fn machine(&self, policy: Arc<PolicySet>) -> host::Machine {
        self.machine_every(DEFAULT_PERIOD, policy)
    }

    fn machine_every(&self, period: Duration, policy: Arc<PolicySet>) -> host::Machine {
        machine(
            self.hierarchy.clone(),
            self.state(),
            period,
            policy,
            vec![self.pod()],
            self.now,
        )
    }
}

fn machine(
    hierarchy: Hierarchy,
    state_dir: PathBuf,
    evaluation_period: Duration,
    policy: Arc<PolicySet>,
    pods: Vec<Workload>,
    now: BootTime,
) -> host::Machine {
    let settings = MachineSettings {
        hierarchy,
        proc_root: "/proc".into(),
        sys_root: "/sys".into(),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir,
        sample_interval: Duration::from_secs(1),
        evaluation_period,
        sample_everything: false,
        windows: std::sync::Arc::default(),
    };
    host::open(settings, policy, pods, now).unwrap()
}

/// Lets time pass in steps of a second; returns how many events contained `words`.
fn count_events(
    machine: &mut host::Machine,
    now: &mut BootTime,
    passes: Duration,
    words: &str,
) -> usize {
    let mut count = 0;
    for _ in 0..passes.as_secs() {
        *now = *now + Duration::from_secs(1);
        let events = machine.tick(*now).iter().map(ToString::to_string);
        count += events.filter(|text| text.contains(words)).count();
    }
    count
}

#[test]
fn a_throttle_outlives_its_lifetime_between_distant_evaluations() {
    let mut node = TestNode::throttled();
    let rule = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
    let mut machine = node.machine_every(40 * MINUTE, policy(vec![rule]));
    machine.tick(node.now);
    let throttled = node.quota();
    assert_ne!(throttled, ORIGINAL);
    let expired = count_events(&mut machine, &mut node.now, 39 * MINUTE, "expired");
    assert_eq!((expired, node.quota()), (0, throttled.clone()));
    drop(machine);
    // The next process also knows the deadline.
    drop(node.throttler(node.now));
    assert_eq!(node.quota(), throttled);
}

fn machine_of(node: &TestNode, rule: Rule) -> host::Machine {
    node.machine(policy(vec![rule]))
}

#[test]
fn a_removed_pod_is_restored_completely_without_rules() {
    let mut node = TestNode::throttled();
    let rule = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
    let mut machine = machine_of(&node, rule);
    count_events(&mut machine, &mut node.now, MINUTE / 6, "");
    assert_ne!(node.quota(), ORIGINAL);
    machine.set_policy(Arc::default());
    count_events(&mut machine, &mut node.now, Duration::from_secs(1), "");
    assert_ne!(node.quota(), ORIGINAL, "it is restored step by step");
    machine.set_pods(Vec::new());
    count_events(&mut machine, &mut node.now, 2 * MINUTE, "");
    assert_eq!(
        (node.quota(), machine.throttled_pods()),
        (ORIGINAL.into(), 0)
    );
}

#[test]
fn a_file_unreadable_at_the_start_is_restored_later_without_rules() {
    let mut node = TestNode::throttled();
    let elsewhere = node.dir.path().join("elsewhere");
    fs::rename(node.file(), &elsewhere).unwrap();
    symlink(&elsewhere, node.file()).unwrap();
    let mut machine = node.machine(Arc::default());
    machine.tick(node.now);
    count_events(&mut machine, &mut node.now, MINUTE, "");
    assert_eq!((node.quota().as_str(), machine.throttled_pods()), (OURS, 1));
    fs::rename(&elsewhere, node.file()).unwrap();
    count_events(&mut machine, &mut node.now, Duration::from_secs(10), "");
    assert_eq!(
        (node.quota().as_str(), machine.throttled_pods()),
        (ORIGINAL, 0)
    );
}

#[test]
fn a_restore_rejected_by_the_kernel_is_retried_without_rules() {
    let Some(cgroups) = crate::kernel_support::test_cgroups() else {
        return;
    };
    if cgroups.is_v2() {
        eprintln!("skipped: cgroup v2 rejects no quota");
        return;
    }
    let pod = cgroups.pod("pod");
    cgroups.set_quota(&pod, Some(90_000));
    let plan = [throttle("pod", 300)];
    cgroups
        .throttler()
        .apply(boot_time(), &plan, &cgroups.find());
    // v1 rejects a child's quota above its parent's.
    cgroups.set_quota(&cgroups.parent, Some(50_000));
    let (state, mut now) = (cgroups.state.path().to_owned(), boot_time());
    let mut machine = machine(
        cgroups.hierarchy.clone(),
        state,
        DEFAULT_PERIOD,
        Arc::default(),
        Vec::new(),
        now,
    );
    machine.tick(now);
    let tried = count_events(&mut machine, &mut now, MINUTE, "the kernel rejects");
    assert_eq!(cgroups.quota(&pod), "30000");
    assert!((2..=12).contains(&tried), "{tried} attempts");
    let expired = count_events(&mut machine, &mut now, 35 * MINUTE, "expired");
    assert_eq!((expired, cgroups.journal_lines().len()), (1, 1));
    cgroups.set_quota(&cgroups.parent, None);
    count_events(&mut machine, &mut now, Duration::from_secs(10), "");
    assert_eq!(cgroups.quota(&pod), "90000");
    assert_eq!(
        (machine.throttled_pods(), cgroups.journal_lines().len()),
        (0, 0)
    );
}

#[test]
fn a_pod_quota_is_replaced_by_that_of_a_limited_container() {
    let Some(cgroups) = crate::kernel_support::test_cgroups() else {
        return;
    };
    if cgroups.is_v2() {
        eprintln!("skipped: cgroup v2 rejects no quota");
        return;
    }
    for pause in [true, false] {
        let name = format!("pod-{pause}");
        let pod = cgroups.pod(&name);
        if pause {
            cgroups.container(&pod, "pause");
        }
        let plan = [throttle(&name, 300)];
        cgroups
            .throttler()
            .apply(boot_time(), &plan, &cgroups.find());
        assert_eq!(cgroups.quota(&pod), "30000");
        let workload = |missing| Workload {
            pod: Arc::new(crate::engine_support::pod(&name)),
            cgroup: pod.clone(),
            inode: 0,
            containers: Some(ContainerFacts {
                limited: true,
                missing,
            }),
        };
        let (state, mut now) = (cgroups.state.path().to_owned(), boot_time());
        let rule = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
        let pods = vec![workload(true)];
        let rules = policy(vec![rule]);
        let mut machine = machine(
            cgroups.hierarchy.clone(),
            state,
            DEFAULT_PERIOD,
            rules,
            pods,
            now,
        );
        count_events(&mut machine, &mut now, Duration::from_secs(11), "");
        assert_eq!(cgroups.quota(&pod), "-1", "pause: {pause}");
        let main = cgroups.container(&pod, "main");
        cgroups.set_quota(&main, Some(80_000));
        machine.set_pods(vec![workload(false)]);
        count_events(&mut machine, &mut now, Duration::from_secs(21), "");
        let limited: u64 = cgroups.quota(&main).parse().unwrap();
        assert!(
            limited < 80_000,
            "it is throttled by its container: {limited}"
        );
        assert_eq!(cgroups.quota(&pod), "-1");
        let mut effects = machine.restore(now).iter();
        assert!(effects.all(|event| !event.to_string().contains("failed")));
        assert_eq!(cgroups.quota(&main), "80000");
    }
}

#[test]
fn adopted_throttles_are_not_restored_before_an_evaluation() {
    let node = TestNode::throttled();
    let rule = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
    let mut machine = node.machine_every(MINUTE, policy(vec![rule]));
    // A slow start: the first tick is late.
    let events = machine.tick(node.now + Duration::from_secs(20));
    let texts: Vec<_> = events.iter().map(ToString::to_string).collect();
    assert!(
        !texts.iter().any(|text| text.contains("restored")),
        "{texts:?}"
    );
    assert_ne!(node.quota(), ORIGINAL);
}

#[test]
fn rule_states_are_saved_once_the_disk_has_space_again() {
    let mut node = TestNode::throttled();
    let mut machine = node.machine(Arc::default());
    let in_the_way = node.state().join("engine.new");
    fs::create_dir(&in_the_way).unwrap();
    machine.tick(node.now);
    // Everything is restored by then, and nothing is left to evaluate.
    let failed = count_events(&mut machine, &mut node.now, 2 * MINUTE, "engine.json");
    assert_eq!(
        (node.quota().as_str(), machine.is_acting()),
        (ORIGINAL, false)
    );
    assert!(failed > 0, "the save must fail");
    let file = node.state().join("engine.json");
    assert!(!file.exists());
    fs::remove_dir(&in_the_way).unwrap();
    let failed = count_events(
        &mut machine,
        &mut node.now,
        Duration::from_secs(10),
        "engine.json",
    );
    let text = fs::read_to_string(&file).unwrap();
    assert!(failed == 0 && text.contains(r#""claims":[]"#), "{text}");
}

#[test]
fn expired_throttles_are_restored_from_the_journal_and_others_stay() {
    let node = TestNode::throttled();
    let restore = |after: Duration| {
        let (state, hierarchy) = (node.state(), node.hierarchy.clone());
        restore_expired(&state, hierarchy, node.now + after)
    };
    assert_eq!(restore(29 * MINUTE).unwrap(), []);
    let user = node.throttler(node.now);
    assert_eq!(restore(29 * MINUTE).unwrap(), []);
    let error = restore(31 * MINUTE).unwrap_err().to_string();
    assert!(error.contains("is in use"), "{error}");
    assert_eq!(node.quota(), OURS);
    drop(user);
    let events = restore(31 * MINUTE).unwrap();
    let texts: Vec<_> = events.iter().map(ToString::to_string).collect();
    assert!(
        texts.iter().any(|text| text.contains("expired")),
        "{texts:?}"
    );
    assert_eq!(node.quota(), ORIGINAL);
    assert_eq!(restore(31 * MINUTE).unwrap(), []);
    let nowhere = node.dir.path().join("nowhere");
    let nothing = restore_expired(&nowhere, node.hierarchy.clone(), node.now);
    assert_eq!(nothing.unwrap(), []);
    assert!(!nowhere.exists());
}
