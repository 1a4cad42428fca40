//! Generators of random nodes, pods, rules and histories.

use std::sync::Arc;
use std::time::Duration;

use plimsoll::engine::policy::{Action, PolicySet, Rule, Strategy as RuleStrategy};
use plimsoll::engine::units::{MilliCpu, Quota};
use plimsoll::engine::{metric::Metric, pod::QosClass};
use proptest::collection::vec;
use proptest::prelude::*;

use super::{
    GIB, Load, Node, PERIOD, allow_all, disabling_scheduling, eviction_action, idle_action, rule,
    throttling,
};

/// The input of one period.
#[derive(Clone, Debug)]
pub struct PeriodInput {
    /// CPU usage of the node in millicores.
    pub cpu: u64,
    pub memory: u64,
    pub load: f64,
    pub fault: Fault,
}

/// A fault in the sample of one period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// The node's files could not be read.
    NoNode,
    /// The sample is two minutes old.
    Stale,
    /// The load is not a number, and the CPU counter went back.
    Invalid,
    /// No pod could be read.
    NoPods,
    /// The pods' samples are two minutes old.
    StalePods,
    /// The machine was suspended.
    Suspended,
    /// The first pod is gone.
    PodGone,
    /// The last pod is annotated as protected.
    Protected,
}

pub fn input() -> impl Strategy<Value = PeriodInput> {
    let fault = prop_oneof![
        12 => Just(Fault::None),
        1 => Just(Fault::NoNode),
        1 => Just(Fault::Stale),
        1 => Just(Fault::Invalid),
        1 => Just(Fault::NoPods),
        1 => Just(Fault::StalePods),
        1 => Just(Fault::Suspended),
        1 => Just(Fault::PodGone),
        1 => Just(Fault::Protected),
    ];
    (
        prop_oneof![2 => 4001_u64..8000, 1 => 0_u64..4000],
        prop_oneof![1 => 9 * GIB..30 * GIB, 2 => 0..8 * GIB],
        0.0..10.0,
        fault,
    )
        .prop_map(|(cpu, memory, load, fault)| PeriodInput {
            cpu,
            memory,
            load,
            fault,
        })
}

pub fn load(index: usize) -> impl Strategy<Value = Load> {
    let quota = prop_oneof![
        Just(Quota::Unlimited),
        (5_u64..4000).prop_map(|limit| Quota::Limit(MilliCpu(limit))),
    ];
    let qos = prop_oneof![
        Just(QosClass::BestEffort),
        Just(QosClass::Burstable),
        Just(QosClass::Guaranteed),
    ];
    let flags = (any::<bool>(), 0..8_u8, 0..8_u8, 0..8_u8);
    (
        0_u64..3000,
        0_u64..600,
        quota,
        qos,
        -2..3_i32,
        flags,
        0..4 * GIB,
    )
        .prop_map(
            move |(cpu, request, quota, qos, priority, flags, unreclaimable)| {
                let mut load = Load::new(&format!("pod-{index}"), cpu);
                load.quota = quota;
                load.unreclaimable = unreclaimable;
                load.cache = unreclaimable / 3;
                load.pod.qos = qos;
                load.pod.cpu_request = MilliCpu(request);
                load.pod.priority = priority;
                load.pod.elastic = flags.0;
                load.pod.protected = flags.1 == 0;
                load.pod.owned = flags.2 != 0;
                load.pod.running = flags.3 != 0;
                load
            },
        )
}

pub fn loads() -> impl Strategy<Value = Vec<Load>> {
    (1_usize..9).prop_flat_map(|n| (0..n).map(load).collect::<Vec<_>>())
}

fn gc() -> Action {
    Action {
        force_gc: true,
        ..eviction_action(2)
    }
}

/// One rule.
fn one_rule() -> impl Strategy<Value = Rule> {
    let kind = prop_oneof![
        (0_u8..=60, 1_u8..=60).prop_map(|(min, step)| {
            rule("n/cpu", "cpu_total_usage", 4000.0, throttling(min, step))
        }),
        (0_u8..=60, 1_u8..=60).prop_map(|(min, step)| {
            rule(
                "n/idle",
                "cpu_total_utilization",
                60.0,
                idle_action(min, step),
            )
        }),
        (1_u32..4).prop_map(|max_pods| rule(
            "n/evict",
            "cpu_total_usage",
            5000.0,
            eviction_action(max_pods)
        )),
        Just(rule(
            "n/memory",
            "memory_total_usage",
            8.0 * GIB as f64,
            gc()
        )),
        Just(rule(
            "n/close",
            "cpu_load_1_min",
            5.0,
            disabling_scheduling("close")
        )),
        Just(rule("n/load", "cpu_load_5_min", 6.0, throttling(20, 30))),
        Just(rule(
            "n/load-evict",
            "cpu_load_15_min",
            8.0,
            eviction_action(1)
        )),
    ];
    (kind, 1_u32..3, 1_u32..3, 0.5..=1.0_f64, 5_u64..40).prop_map(
        |(mut rule, avoidance, restore, low, cool_down)| {
            rule.avoidance_threshold = avoidance;
            rule.restore_threshold = restore;
            rule.restore_value = rule.threshold * low;
            Arc::make_mut(&mut rule.action).cool_down = Duration::from_secs(cool_down);
            rule
        },
    )
}

/// Rules with unique IDs, enforced or preview.
pub fn rules() -> impl Strategy<Value = Vec<Rule>> {
    let preview = prop_oneof![3 => Just(false), 1 => Just(true)];
    vec((one_rule(), preview), 1..6).prop_map(|rules| {
        let mut rules: Vec<_> = rules
            .into_iter()
            .map(|(mut rule, preview)| {
                if preview {
                    rule.strategy = RuleStrategy::Preview;
                }
                rule
            })
            .collect();
        rules.sort_by(|a, b| a.id.cmp(&b.id));
        rules.dedup_by(|a, b| a.id == b.id);
        rules
    })
}

pub fn policy_set(rules: Vec<Rule>) -> PolicySet {
    PolicySet {
        rules,
        pods: vec![allow_all()],
    }
}

/// Runs one period and evaluates it.
pub fn run_period(node: &mut Node, input: &PeriodInput) {
    take_sample(node, input);
    node.step();
}

/// Advances by one period and takes its sample.
pub fn take_sample(node: &mut Node, input: &PeriodInput) {
    node.cpu = input.cpu;
    node.memory = input.memory;
    match input.fault {
        Fault::PodGone if node.pods.len() > 1 => {
            node.pods.remove(0);
            node.set_pods();
        }
        Fault::Protected => {
            if let Some(load) = node.pods.last_mut() {
                load.pod.protected = true;
            }
            node.set_pods();
        }
        _ => {}
    }
    node.advance(if input.fault == Fault::Suspended {
        PERIOD * 13
    } else {
        PERIOD
    });
    let loads = [input.load, input.load * 1.2, input.load * 0.9];
    node.sample.node.load = Some(loads);
    inject_fault(node, input.fault);
}

fn inject_fault(node: &mut Node, fault: Fault) {
    let age = Duration::from_mins(2).as_nanos();
    let age = u64::try_from(age).unwrap();
    let stale = super::BootTime::from_nanos(node.now.as_nanos() - age);
    let sample = &mut node.sample;
    match fault {
        Fault::NoNode => sample.node = super::NodeSample::default(),
        Fault::Stale => sample.at = stale,
        Fault::Invalid => {
            sample.node.load = Some([f64::NAN, f64::INFINITY, -1.0]);
            if let Some(cpu) = &mut sample.node.cpu {
                cpu.busy = 0;
            }
        }
        Fault::NoPods => sample.pods.clear(),
        Fault::StalePods => sample.pods.iter_mut().for_each(|pod| pod.at = stale),
        _ => {}
    }
}

/// Whether the metric is measured in CPU.
pub fn is_cpu(rule: &Rule) -> bool {
    matches!(rule.metric, Metric::CpuUsage | Metric::CpuUtilization)
}
