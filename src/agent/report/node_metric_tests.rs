use std::sync::Arc;

use super::*;
use crate::engine::plan::Unknown;
use crate::engine::policy::{RuleId, Strategy};
use crate::engine::sample::NodeMemory;
use crate::engine::testing::pod;
use crate::node::cgroup::CgroupPath;

const GIB: u64 = 1 << 30;
const CPUS: u32 = 8;

/// A node whose load a test sets.
struct Node {
    now: BootTime,
    sample: Sample,
    windows: NodeWindows,
    load: Option<NodeLoad>,
    pods: BTreeMap<PodUid, Workload>,
    reports: Vec<RuleReport>,
    builder: Builder,
}

impl Node {
    /// A node with this many pods; pod `n` uses `n + 1` millicores and MiB.
    fn new(pods: usize, name: impl Fn(usize) -> (String, String)) -> Self {
        let workload = |number| {
            let (namespace, name) = name(number);
            let uid = format!("uid-{number:03}");
            let pod = crate::engine::pod::Pod {
                namespace,
                name,
                ..pod(&uid)
            };
            let workload = Workload {
                pod: Arc::new(pod),
                cgroup: CgroupPath::new("kubepods/pod").unwrap(),
                inode: 0,
                containers: None,
            };
            (PodUid::from(&*uid), workload)
        };
        Self {
            now: BootTime::from_nanos(1_000_000_000_000),
            sample: Sample::default(),
            windows: NodeWindows::default(),
            load: None,
            pods: (0..pods).map(workload).collect(),
            reports: Vec::new(),
            builder: Builder::new("worker", "boot", BootTime::default(), Rng::with_seed(7)),
        }
    }

    fn plain(pods: usize) -> Self {
        Self::new(pods, |number| {
            ("default".to_owned(), format!("pod-{number:03}"))
        })
    }

    /// Lets `time` pass with the node using `millicores`.
    fn pass(&mut self, time: Duration, millicores: u64) {
        let nanos = u64::try_from(time.as_nanos()).unwrap();
        self.now = self.now + time;
        self.sample.at = self.now;
        let node = &mut self.sample.node;
        let busy = node.cpu.map_or(0, |cpu| cpu.busy) + nanos / 1000 * millicores;
        node.cpu = Some(CpuTimes {
            busy,
            idle: 0,
            online: CPUS,
        });
        node.memory = Some(NodeMemory {
            total: Bytes(32 * GIB),
            available: Bytes(16 * GIB),
            ..NodeMemory::default()
        });
        let before = std::mem::take(&mut self.sample.pods);
        self.sample.pods = self
            .pods
            .keys()
            .enumerate()
            .map(|(number, uid)| {
                let used = before.get(number).and_then(|pod| pod.cpu_nanos);
                PodSample {
                    cpu_nanos: Some(used.unwrap_or(0) + nanos / 1000 * (number as u64 + 1)),
                    memory: Some(Bytes((number as u64 + 1) << 20)),
                    stalled: [Some(0.5), None, Some(1.25)],
                    ..PodSample::new(uid.clone(), self.now)
                }
            })
            .collect();
        self.windows.add(&self.sample);
    }

    fn report(&mut self) -> (NodeMetric, String) {
        self.builder.build(&MetricView {
            time: Timestamp::UNIX_EPOCH,
            sample: &self.sample,
            windows: &self.windows,
            load: self.load.clone(),
            pods: &self.pods,
            protected: self.pods.keys().collect(),
            reports: &self.reports,
        })
    }

    /// The second of two reports, ten seconds apart.
    fn second_report(&mut self) -> (NodeMetric, String) {
        self.pass(Duration::from_secs(1), 2000);
        self.report();
        self.pass(INTERVAL, 2000);
        self.report()
    }
}

fn rule(id: &str, state: RuleState) -> RuleReport {
    RuleReport {
        id: RuleId::from(id),
        strategy: Strategy::Enforce,
        outside_hours: false,
        state,
        since: None,
        value: Some(1.0),
        threshold: 1.0,
        restore_value: 1.0,
        breaches: 0,
        quiet_evaluations: 0,
        limited: false,
        rung: None,
        next_rung: None,
        evictions_ended: false,
        earliest_eviction: None,
        cool_down: std::time::Duration::ZERO,
        would: None,
        unknown: None,
    }
}

fn quantity(amount: Option<&Quantity>) -> &str {
    amount.map_or("-", |quantity| quantity.0.as_str())
}

#[test]
fn a_report_has_the_use_of_node_pods_and_system_since_the_last_one() {
    let mut node = Node::plain(3);
    let (metric, text) = node.second_report();
    let NodeMetricStatus {
        window,
        capacity,
        usage,
        ..
    } = &metric.status;
    assert_eq!(window.as_deref(), Some("10s"));
    assert_eq!(quantity(capacity.cpu.as_ref()), "8");
    let amounts = [&usage.node, &usage.pods, &usage.system];
    let cpu = amounts.map(|amounts| quantity(amounts.cpu.as_ref()));
    assert_eq!(cpu, ["2000m", "6m", "1994m"]);
    let memory = amounts.map(|amounts| quantity(amounts.memory.as_ref()));
    assert_eq!(memory, ["16777216Ki", "6144Ki", "16771072Ki"]);
    let names: Vec<_> = metric
        .status
        .top_pods
        .iter()
        .map(|pod| &*pod.name)
        .collect();
    assert_eq!(names, ["pod-002", "pod-001", "pod-000"]);
    let first = &metric.status.top_pods[0];
    assert_eq!(quantity(first.cpu.as_ref()), "3m");
    assert_eq!(
        (first.cpu_delay, first.memory_pressure, first.io_pressure),
        (Some(0.5), None, Some(1.25))
    );
    assert_eq!(metric.status.agent.as_ref().unwrap().sequence, 2);
    assert_eq!(serde_json::from_str::<NodeMetric>(&text).unwrap(), metric);
}

#[test]
fn the_first_report_has_no_rates_instead_of_zeroes() {
    let mut node = Node::plain(1);
    node.pass(Duration::from_secs(1), 2000);
    let (metric, text) = node.report();
    assert_eq!(metric.status.window, None);
    assert_eq!(metric.status.usage.node.cpu, None);
    assert_eq!(metric.status.usage.pods.cpu, None);
    assert_eq!(metric.status.top_pods[0].cpu, None);
    assert!(!text.contains(r#""cpu":"0"#), "{text}");
}

#[test]
fn a_pod_with_unknown_use_has_no_value() {
    let mut node = Node::plain(2);
    node.pass(Duration::from_secs(1), 2000);
    node.report();
    node.pass(INTERVAL, 2000);
    node.sample.pods[1].cpu_nanos = None;
    node.sample.pods[1].memory = None;
    let (metric, _) = node.report();
    let pod = metric.status.top_pods.iter();
    let pod = pod.clone().find(|pod| pod.name == "pod-001").unwrap();
    assert_eq!((&pod.cpu, &pod.memory), (&None, &None));
    assert_eq!(quantity(metric.status.usage.pods.cpu.as_ref()), "1m");
}

#[test]
fn rules_are_counted_by_state_and_breached_ones_named() {
    let mut node = Node::plain(1);
    node.reports = vec![
        rule("q/a", RuleState::Breached),
        rule("q/b", RuleState::Cooling),
        RuleReport {
            unknown: Some(Unknown::Stale),
            ..rule("q/c", RuleState::Normal)
        },
    ];
    let (metric, _) = node.second_report();
    let expected = RuleCounts {
        total: 3,
        breached: 1,
        cooling: 1,
        unknown: 1,
    };
    assert_eq!(metric.status.rules, Some(expected));
    assert_eq!(metric.status.breached, ["q/a"]);
}

#[test]
fn a_report_of_110_pods_fits_4_kib_with_any_names() {
    let mut node = Node::plain(110);
    // After a day every window has values.
    for _ in 0..3600 {
        node.pass(Duration::from_secs(24), 2345);
    }
    node.sample.node.pressure = [Some(crate::engine::sample::Pressure {
        some: [12.34; 3],
        full: Some([12.34; 3]),
        ..crate::engine::sample::Pressure::default()
    }); 3];
    let (metric, text) = node.second_report();
    assert_eq!(metric.status.top_pods.len(), MAX_PODS);
    assert_eq!(metric.status.pods, Some(110));
    let window = metric.status.windows.cpu.clone().unwrap();
    assert!(window.last5m.unwrap().stddev.is_some());
    assert!(window.last1h.unwrap().p99.is_some() && window.max_avg1d.unwrap().value.is_some());
    assert!(text.len() <= MAX_BYTES, "{} bytes", text.len());

    let mut node = Node::new(110, |number| {
        ("n".repeat(63), format!("{number:03}{}", "p".repeat(250)))
    });
    let id = |number| format!("{}/{number}", "q".repeat(300));
    node.reports = (0..256)
        .map(|number| rule(&id(number), RuleState::Breached))
        .collect();
    let (metric, text) = node.second_report();
    assert!(text.len() <= MAX_BYTES, "{} bytes", text.len());
    assert_eq!(metric.status.rules.unwrap().breached, 256);
    assert!(!metric.status.breached.is_empty());
}

#[test]
fn a_change_is_reported_with_the_next_sample_and_needs_no_extra_one() {
    let mut node = Node::plain(1);
    node.second_report();
    for _ in 0..100 {
        node.builder.changed();
        assert!(node.builder.is_due(node.now));
        assert!(!node.builder.needs_sample(node.now));
    }
    node.report();
    assert!(!node.builder.needs_sample(node.now + INTERVAL / 2));
    assert!(node.builder.needs_sample(node.now + INTERVAL));
}

#[test]
fn a_report_is_due_within_ten_seconds_or_after_a_change_of_use() {
    let mut node = Node::plain(1);
    assert!(node.builder.is_due(node.now), "the first at once");
    assert_eq!(node.builder.reported_usage(), [None; 2]);
    node.second_report();
    assert_eq!(node.builder.reported_usage(), [Some(25.0), Some(50.0)]);
    let second = Duration::from_secs(1);
    for _ in 0..9 {
        // 4.9 % of 8 CPUs more.
        node.pass(second, 2000 + 392);
        node.builder.observe(&node.sample);
        assert!(!node.builder.is_due(node.now));
    }
    assert!(node.builder.is_due(node.now + second));
    node.report();
    for due in [false, false, true] {
        node.pass(second, 2392 + 420);
        node.builder.observe(&node.sample);
        assert_eq!(node.builder.is_due(node.now), due);
    }
    node.report();
    node.sample.node.memory = Some(NodeMemory {
        total: Bytes(32 * GIB),
        available: Bytes(14 * GIB),
        ..NodeMemory::default()
    });
    node.sample.at = node.now + second * 3;
    node.builder.observe(&node.sample);
    assert!(node.builder.is_due(node.now), "memory moved by 6 %");
    node.report();
    assert!(!node.builder.is_due(node.now + second));
    node.builder.changed();
    assert!(node.builder.is_due(node.now + second));
}

#[test]
fn a_second_report_with_cpu_use_follows_the_first_quickly() {
    let mut node = Node::plain(1);
    node.pass(Duration::from_secs(1), 2000);
    node.report();
    assert!(!node.builder.is_due(node.now + Duration::from_secs(2)));
    assert!(node.builder.is_due(node.now + Duration::from_secs(3)));
}

#[test]
fn nodes_that_report_the_same_change_do_not_stay_in_step() {
    let mut dues = Vec::new();
    for seed in 0..200 {
        let mut node = Node::plain(1);
        node.builder = Builder::new("worker", "boot", BootTime::default(), Rng::with_seed(seed));
        node.second_report();
        node.builder.changed();
        node.pass(Duration::from_secs(1), 2000);
        node.report();
        let pause = node.builder.due().unwrap().since(node.now);
        assert!(pause > INTERVAL / 2 && pause <= INTERVAL, "{pause:?}");
        dues.push(pause.as_secs());
    }
    for second in 5..10 {
        let due = dues.iter().filter(|due| **due == second).count();
        assert!((20..=60).contains(&due), "{due} of 200 in second {second}");
    }
}

#[test]
fn a_later_agent_of_the_same_boot_has_higher_sequences() {
    let mut node = Node::plain(1);
    let sequence = |metric: NodeMetric| metric.status.agent.unwrap().sequence;
    let mut last = 0;
    for _ in 0..1000 {
        node.pass(Duration::from_secs(1), 2000);
        last = sequence(node.report().0);
    }
    node.builder = Builder::new(
        "worker",
        "boot",
        BootTime::default() + Duration::from_secs(1000),
        Rng::new(),
    );
    assert!(sequence(node.report().0) > last);
}

fn load_of(percent: f64) -> NodeLoad {
    let resource = crate::engine::load::ResourceLoad {
        expected: percent * 0.8,
        newcomers: 1.234,
        history: None,
        line: 80.0,
        rule: Some(RuleId::from("q/cpu")),
        breached: None,
    };
    NodeLoad {
        at: BootTime::default(),
        percent,
        worst: crate::engine::load::LoadTerm::Resource(Resource::Cpu),
        cpu: resource.clone(),
        memory: resource,
        pressure: None,
    }
}

#[test]
fn a_load_that_counts_differently_for_schedulers_is_reported_at_once() {
    let mut node = Node::plain(1);
    node.load = Some(load_of(40.0));
    let (metric, _) = node.second_report();
    let load = metric.status.load.expect("a load");
    assert_eq!(
        (load.percent, load.cpu.expected, load.cpu.newcomers),
        (40.0, 32.0, 1.2)
    );
    assert_eq!(load.cpu.rule.as_deref(), Some("q/cpu"));
    for (percent, changed) in [(59.0, false), (61.0, true)] {
        node.builder.observe_load(Some(percent));
        assert_eq!(node.builder.due().is_none(), changed, "{percent}");
    }
    node.load = None;
    let (metric, _) = node.report();
    assert_eq!(metric.status.load, None);
    node.builder.observe_load(None);
    assert!(node.builder.due().is_some());
}
