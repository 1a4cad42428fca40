//! The ways to protect the important pods.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use plimsoll::clock::boot_time;
use plimsoll::crd::{Objects, compile};
use plimsoll::demo::phase::PhaseSchedule;
use plimsoll::demo::pods::DemoPods;
use plimsoll::demo::policy;
use plimsoll::engine::policy::{CpuThrottle, NodeFacts, PolicySet};
use plimsoll::engine::time::BootTime;
use plimsoll::node::machine::MachineSettings;
use plimsoll::node::machine::workload::Workload;
use plimsoll::scene::cgroups::SceneCgroups;
use plimsoll::scene::pod::ScenePod;
use plimsoll::standalone::host::{self, Machine};
use serde_json::Value;
use tempfile::TempDir;

use crate::peers::{Crane, Koordlet};
use crate::round::Ground;
use crate::scenes::{ByWaiting, Scene};

/// Above this share of the machine's CPU in percent: the threshold of every way but koordlet's default.
pub const THRESHOLD_PERCENT: u64 = 85;
/// Evaluation period of Plimsoll's rules.
const PERIOD: Duration = Duration::from_secs(1);

/// How the important pods are protected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// There are no batch pods.
    Alone,
    /// The kernel alone, by the weights of the requests.
    Unprotected,
    /// Plimsoll: quota steps.
    Quota,
    /// Plimsoll: idle class.
    Idle,
    /// What Plimsoll does in place of the idle class where a kubelet or a kernel does not allow it, without quotas: the batch pods
    /// have the lowest weight from the start.
    LowestWeight,
    /// Plimsoll: idle class, then quota steps.
    IdleAndQuota,
    /// Plimsoll: idle class at all times, by a `PodQOS` without a rule.
    Standing,
    /// The kernel alone, with `BestEffort` batch pods.
    BestEffort,
    /// koordlet's formula at this percentage.
    Koordlet(u64),
    /// crane's steps.
    Crane,
}

impl Way {
    /// Those of every scene.
    pub const ALL: [Self; 8] = [
        Self::Alone,
        Self::Unprotected,
        Self::Standing,
        Self::Quota,
        Self::Idle,
        Self::IdleAndQuota,
        Self::Koordlet(65),
        Self::Koordlet(THRESHOLD_PERCENT),
    ];

    /// Those of the scenes *many*.
    pub const MANY: [Self; 8] = [
        Self::Alone,
        Self::Unprotected,
        Self::Standing,
        Self::Quota,
        Self::Idle,
        Self::LowestWeight,
        Self::IdleAndQuota,
        Self::BestEffort,
    ];

    pub fn name(self) -> String {
        match self {
            Self::Alone => "alone".to_owned(),
            Self::Unprotected => "unprotected".to_owned(),
            Self::Quota => "quota only".to_owned(),
            Self::Idle => "idle class only".to_owned(),
            Self::LowestWeight => "weight 1 only".to_owned(),
            Self::Standing => "standing idle class".to_owned(),
            Self::BestEffort => "BestEffort".to_owned(),
            Self::IdleAndQuota => "idle class and quota".to_owned(),
            Self::Koordlet(percent) => format!("koordlet's formula, {percent} %"),
            Self::Crane => "crane's steps".to_owned(),
        }
    }

    /// Whether it is one of Plimsoll's.
    pub const fn is_ours(self) -> bool {
        matches!(
            self,
            Self::Standing | Self::Quota | Self::Idle | Self::LowestWeight | Self::IdleAndQuota
        )
    }

    const fn throttle(self) -> Option<CpuThrottle> {
        let (idle, min_ratio) = match self {
            Self::Quota => (false, 10),
            Self::Idle => (true, 100),
            Self::IdleAndQuota => (true, 10),
            _ => return None,
        };
        Some(CpuThrottle {
            idle,
            min_ratio,
            step: 30,
        })
    }
}

/// A way at work.
pub enum Control {
    Nothing,
    Ours {
        machine: Box<Machine>,
        _state: TempDir,
    },
    Koordlet(Koordlet),
    Crane(Crane),
}

impl Control {
    /// Starts to protect the pods in `cgroups` from `batch`.
    pub fn start(
        way: Way,
        ground: &Ground,
        cgroups: &Arc<SceneCgroups>,
        scene: &Scene,
        batch: &[ScenePod],
    ) -> Self {
        let important = &scene.important;
        let threshold = ground.capacity() * THRESHOLD_PERCENT / 100;
        match way {
            Way::Alone | Way::Unprotected | Way::LowestWeight | Way::BestEffort => Self::Nothing,
            Way::Koordlet(percent) => {
                Self::Koordlet(Koordlet::new(ground, cgroups, important, batch, percent))
            }
            Way::Crane => Self::Crane(Crane::new(cgroups, batch, threshold)),
            Way::Standing | Way::Quota | Way::Idle | Way::IdleAndQuota => {
                let state = tempfile::tempdir().unwrap();
                let settings = MachineSettings {
                    hierarchy: ground.hierarchy.clone(),
                    proc_root: PathBuf::from("/proc"),
                    sys_root: PathBuf::from("/sys"),
                    net_dev: None,
                    node_address: Ipv4Addr::LOCALHOST.into(),
                    state_dir: state.path().to_owned(),
                    sample_interval: PERIOD,
                    evaluation_period: PERIOD,
                    sample_everything: false,
                    windows: std::sync::Arc::default(),
                };
                let pods = important.iter().chain(batch);
                let workloads = pods.map(|pod| Workload {
                    pod: Arc::new(pod.pod()),
                    inode: cgroups.inode(&cgroups.cgroup(pod)),
                    cgroup: cgroups.cgroup(pod),
                    containers: None,
                });
                let policy = Arc::new(policy_for(way, ground, scene));
                let machine = host::open(settings, policy, workloads.collect(), boot_time());
                Self::Ours {
                    machine: Box::new(machine.unwrap()),
                    _state: state,
                }
            }
        }
    }

    /// When it acts next.
    pub fn next(&self) -> BootTime {
        match self {
            Self::Nothing => BootTime::from_nanos(u64::MAX),
            Self::Ours { machine, .. } => machine.next_tick(),
            Self::Koordlet(koordlet) => koordlet.next,
            Self::Crane(crane) => crane.next,
        }
    }

    pub fn act(&mut self, now: BootTime) {
        match self {
            Self::Nothing => {}
            Self::Ours { machine, .. } => {
                let _events = machine.tick(now);
            }
            Self::Koordlet(koordlet) => koordlet.act(now),
            Self::Crane(crane) => crane.act(now),
        }
    }
}

/// The example of standing quality of service, or one with this way's throttle: on cgroup v2 the scene's, on v1 the demo's on CPU usage.
fn policy_for(way: Way, ground: &Ground, scene: &Scene) -> PolicySet {
    if way == Way::Standing {
        return standing(&ground.node);
    }
    let mut policy = if ground.hierarchy.is_v2() {
        by_waiting(scene.by_waiting, &ground.node)
    } else {
        by_usage(ground)
    };
    for rule in &mut policy.rules {
        let mut action = rule.action.as_ref().clone();
        action.throttle = way.throttle();
        rule.action = Arc::new(action);
    }
    policy
}

fn standing(node: &NodeFacts) -> PolicySet {
    let example = include_str!("../../examples/ensurance/standing.yaml");
    let objects: Vec<Value> = serde_saphyr::from_multiple(example).unwrap();
    let compiled = compile(&Objects::from_values(objects), node);
    assert!(compiled.policy.acts(), "{:?}", compiled.findings);
    compiled.policy
}

fn by_waiting(policy: ByWaiting, node: &NodeFacts) -> PolicySet {
    let objects: Vec<Value> = serde_saphyr::from_multiple(policy.example).unwrap();
    let mut node = node.clone();
    // Of the pool that the example selects.
    node.labels.insert("pool".to_owned(), "shared".to_owned());
    let mut compiled = compile(&Objects::from_values(objects), &node);
    assert!(!compiled.policy.rules.is_empty(), "{:?}", compiled.findings);
    if let Some((threshold, restore_value)) = policy.threshold {
        for rule in &mut compiled.policy.rules {
            rule.threshold = threshold.into();
            rule.restore_value = restore_value.into();
        }
    }
    compiled.policy
}

fn by_usage(ground: &Ground) -> PolicySet {
    let demo_pods = DemoPods::for_cpus(ground.cpus);
    let schedule = PhaseSchedule::lasting(Duration::from_mins(10));
    let adapted = policy::adapt(&demo_pods, &schedule, &ground.node, false).unwrap();
    let mut policy = adapted.policy;
    for rule in &mut policy.rules {
        rule.threshold = (ground.capacity() * THRESHOLD_PERCENT / 100) as f64;
        rule.restore_value = rule.threshold;
    }
    policy
}
