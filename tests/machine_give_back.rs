//! What a machine gives back by itself, and holds no longer and no shorter than it is asked for. Folders play the cgroups
//! where no kernel is needed: a folder does not cut its files, so their values are of one length.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod engine_support;
mod kernel_support;

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use engine_support::{policy, rule, throttling};
use kernel_support::{on_levers, throttle};
use plimsoll::crd::pod_facts::ContainerFacts;
use plimsoll::engine::policy::{PolicySet, Rule, RuleId};
use plimsoll::engine::time::BootTime;
use plimsoll::engine::units::MilliCpu;
use plimsoll::node::actuate::throttle::Throttler;
use plimsoll::node::cgroup::{CgroupPath, Hierarchy};
use plimsoll::node::clock::boot_time;
use plimsoll::node::machine::workload::Workload;
use plimsoll::node::machine::{Settings, restore_expired};
use plimsoll::standalone::host;
use tempfile::TempDir;

const ORIGINAL: &str = "400000 100000";
const OURS: &str = "150000 100000";
const MINUTE: Duration = Duration::from_mins(1);

/// A node with one pod.
struct Ground {
    dir: TempDir,
    hierarchy: Hierarchy,
    now: BootTime,
}

impl Ground {
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

    /// One whose pod an earlier process has throttled.
    fn throttled() -> Self {
        let ground = Self::new();
        let find = |_: &_| CgroupPath::new("pod").ok();
        let mut plan = on_levers("pod", &[("", Some(1500))]);
        plan.levers[0].base = MilliCpu(3000);
        let mut throttler = ground.throttler(ground.now);
        let outcomes = throttler.apply(ground.now, &[plan], &find);
        kernel_support::assert_fine(&outcomes);
        assert_eq!(ground.quota(), OURS);
        ground
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
            pod: Arc::new(engine_support::pod("pod")),
            cgroup: CgroupPath::new("pod").unwrap(),
            inode: fs::metadata(self.file().parent().unwrap()).unwrap().ino(),
            containers: None,
        }
    }

    fn machine(&self, policy: Arc<PolicySet>) -> host::Machine {
        machine(
            self.hierarchy.clone(),
            self.state(),
            policy,
            vec![self.pod()],
            self.now,
        )
    }
}

fn machine(
    hierarchy: Hierarchy,
    state_dir: PathBuf,
    policy: Arc<PolicySet>,
    pods: Vec<Workload>,
    now: BootTime,
) -> host::Machine {
    let settings = Settings {
        hierarchy,
        proc_root: "/proc".into(),
        net_dev: None,
        node_address: Ipv4Addr::LOCALHOST.into(),
        state_dir,
        sample_interval: Duration::from_secs(1),
        sample_everything: false,
    };
    host::open(settings, policy, pods, now).unwrap()
}

/// Lets so much time pass, a second at a time; what was told with these words in it.
fn told(machine: &mut host::Machine, now: &mut BootTime, passes: Duration, words: &str) -> usize {
    let mut count = 0;
    for _ in 0..passes.as_secs() {
        *now = *now + Duration::from_secs(1);
        let events = machine.tick(*now).iter().map(ToString::to_string);
        count += events.filter(|text| text.contains(words)).count();
    }
    count
}

#[test]
fn a_throttle_lasts_between_evaluations_that_lie_further_apart_than_it_does_by_itself() {
    let mut ground = Ground::throttled();
    let seldom = Rule {
        id: RuleId::from("test/cpu"),
        period: 40 * MINUTE,
        ..rule("", "cpu_total_usage", 1.0, throttling(10, 10))
    };
    let mut machine = machine_of(&ground, seldom);
    machine.tick(ground.now);
    let held = ground.quota();
    assert_ne!(held, ORIGINAL);
    let expired = told(&mut machine, &mut ground.now, 39 * MINUTE, "expired");
    assert_eq!((expired, ground.quota()), (0, held.clone()));
    drop(machine);
    // The next process knows it, too.
    drop(ground.throttler(ground.now));
    assert_eq!(ground.quota(), held);
}

fn machine_of(ground: &Ground, rule: Rule) -> host::Machine {
    ground.machine(policy(vec![rule]))
}

#[test]
fn a_pod_that_leaves_while_its_throttle_is_taken_back_has_it_all_back_though_no_rule_is_left() {
    let mut ground = Ground::throttled();
    let rule = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
    let mut machine = machine_of(&ground, rule);
    told(&mut machine, &mut ground.now, MINUTE / 6, "");
    assert_ne!(ground.quota(), ORIGINAL);
    machine.set_policy(Arc::default());
    told(&mut machine, &mut ground.now, Duration::from_secs(1), "");
    assert_ne!(ground.quota(), ORIGINAL, "it is taken back step by step");
    machine.set_pods(Vec::new());
    told(&mut machine, &mut ground.now, 2 * MINUTE, "");
    assert_eq!(
        (ground.quota(), machine.throttled_pods()),
        (ORIGINAL.into(), 0)
    );
}

#[test]
fn a_file_that_could_not_be_opened_at_the_start_is_given_back_where_no_rule_is_left() {
    let mut ground = Ground::throttled();
    let elsewhere = ground.dir.path().join("elsewhere");
    fs::rename(ground.file(), &elsewhere).unwrap();
    symlink(&elsewhere, ground.file()).unwrap();
    let mut machine = ground.machine(Arc::default());
    machine.tick(ground.now);
    told(&mut machine, &mut ground.now, MINUTE, "");
    assert_eq!(
        (ground.quota().as_str(), machine.throttled_pods()),
        (OURS, 1)
    );
    fs::rename(&elsewhere, ground.file()).unwrap();
    told(&mut machine, &mut ground.now, Duration::from_secs(10), "");
    assert_eq!(
        (ground.quota().as_str(), machine.throttled_pods()),
        (ORIGINAL, 0)
    );
}

#[test]
fn what_the_kernel_refuses_to_take_back_is_tried_again_where_no_rule_is_left() {
    let Some(world) = kernel_support::world() else {
        return;
    };
    if world.is_v2() {
        eprintln!("skipped: cgroup v2 refuses no quota");
        return;
    }
    let pod = world.pod("pod");
    world.set_quota(&pod, Some(90_000));
    let plan = [throttle("pod", 300)];
    world.throttler().apply(boot_time(), &plan, &world.find());
    // A parent that allows less than a child may have is what v1 refuses.
    world.set_quota(&world.parent, Some(50_000));
    let (state, mut now) = (world.state.path().to_owned(), boot_time());
    let mut machine = machine(
        world.hierarchy.clone(),
        state,
        Arc::default(),
        Vec::new(),
        now,
    );
    machine.tick(now);
    let tried = told(&mut machine, &mut now, MINUTE, "the kernel refuses");
    assert_eq!(world.quota(&pod), "30000");
    assert!((2..=12).contains(&tried), "{tried}: now and then");
    let expired = told(&mut machine, &mut now, 35 * MINUTE, "expired");
    assert_eq!((expired, world.journal_lines().len()), (1, 1));
    world.set_quota(&world.parent, None);
    told(&mut machine, &mut now, Duration::from_secs(10), "");
    assert_eq!(world.quota(&pod), "90000");
    assert_eq!(
        (machine.throttled_pods(), world.journal_lines().len()),
        (0, 0)
    );
}

#[test]
fn a_pods_own_quota_makes_way_for_a_container_with_a_limit() {
    let Some(world) = kernel_support::world() else {
        return;
    };
    if world.is_v2() {
        eprintln!("skipped: cgroup v2 refuses no quota");
        return;
    }
    for pause in [true, false] {
        let name = format!("pod-{pause}");
        let pod = world.pod(&name);
        if pause {
            world.container(&pod, "pause");
        }
        let plan = [throttle(&name, 300)];
        world.throttler().apply(boot_time(), &plan, &world.find());
        assert_eq!(world.quota(&pod), "30000");
        let workload = |missing| Workload {
            pod: Arc::new(engine_support::pod(&name)),
            cgroup: pod.clone(),
            inode: 0,
            containers: Some(ContainerFacts {
                limited: true,
                missing,
            }),
        };
        let (state, mut now) = (world.state.path().to_owned(), boot_time());
        let rule = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
        let pods = vec![workload(true)];
        let rules = policy(vec![rule]);
        let mut machine = machine(world.hierarchy.clone(), state, rules, pods, now);
        told(&mut machine, &mut now, Duration::from_secs(11), "");
        assert_eq!(world.quota(&pod), "-1", "pause: {pause}");
        let main = world.container(&pod, "main");
        world.set_quota(&main, Some(80_000));
        machine.set_pods(vec![workload(false)]);
        told(&mut machine, &mut now, Duration::from_secs(21), "");
        let limited: u64 = world.quota(&main).parse().unwrap();
        assert!(
            limited < 80_000,
            "it is throttled by its container: {limited}"
        );
        assert_eq!(world.quota(&pod), "-1");
        let mut effects = machine.restore(now).iter();
        assert!(effects.all(|event| !event.to_string().contains("failed")));
        assert_eq!(world.quota(&main), "80000");
    }
}

#[test]
fn what_was_adopted_is_not_given_back_before_the_rules_are_judged() {
    let ground = Ground::throttled();
    let mut kept = rule("test/cpu", "cpu_total_usage", 1.0, throttling(10, 10));
    kept.period = MINUTE;
    let mut machine = machine_of(&ground, kept);
    // A start that takes long: the first tick comes late.
    let events = machine.tick(ground.now + Duration::from_secs(20));
    let texts: Vec<_> = events.iter().map(ToString::to_string).collect();
    assert!(
        !texts.iter().any(|text| text.contains("restored")),
        "{texts:?}"
    );
    assert_ne!(ground.quota(), ORIGINAL);
}

#[test]
fn the_last_state_of_the_rules_is_written_when_there_is_room_again() {
    let mut ground = Ground::throttled();
    let mut machine = ground.machine(Arc::default());
    let in_the_way = ground.state().join("engine.new");
    fs::create_dir(&in_the_way).unwrap();
    machine.tick(ground.now);
    // All is given back by then, and nothing is left to be judged.
    let failed = told(&mut machine, &mut ground.now, 2 * MINUTE, "engine.json");
    assert_eq!(
        (ground.quota().as_str(), machine.is_acting()),
        (ORIGINAL, false)
    );
    assert!(failed > 0, "it could not be written");
    let file = ground.state().join("engine.json");
    assert!(!file.exists());
    fs::remove_dir(&in_the_way).unwrap();
    let failed = told(
        &mut machine,
        &mut ground.now,
        Duration::from_secs(10),
        "engine.json",
    );
    let text = fs::read_to_string(&file).unwrap();
    assert!(failed == 0 && text.contains(r#""claims":[]"#), "{text}");
}

#[test]
fn what_has_expired_is_given_back_from_the_journal_alone_and_the_rest_stays() {
    let ground = Ground::throttled();
    let restore = |after: Duration| {
        let (state, hierarchy) = (ground.state(), ground.hierarchy.clone());
        restore_expired(&state, hierarchy, ground.now + after)
    };
    assert_eq!(restore(29 * MINUTE).unwrap(), []);
    let user = ground.throttler(ground.now);
    assert_eq!(restore(29 * MINUTE).unwrap(), []);
    let error = restore(31 * MINUTE).unwrap_err().to_string();
    assert!(error.contains("is in use"), "{error}");
    assert_eq!(ground.quota(), OURS);
    drop(user);
    let events = restore(31 * MINUTE).unwrap();
    let texts: Vec<_> = events.iter().map(ToString::to_string).collect();
    assert!(
        texts.iter().any(|text| text.contains("expired")),
        "{texts:?}"
    );
    assert_eq!(ground.quota(), ORIGINAL);
    assert_eq!(restore(31 * MINUTE).unwrap(), []);
    let nowhere = ground.dir.path().join("nowhere");
    let nothing = restore_expired(&nowhere, ground.hierarchy.clone(), ground.now);
    assert_eq!(nothing.unwrap(), []);
    assert!(!nowhere.exists());
}
