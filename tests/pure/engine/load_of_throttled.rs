//! What pods that are throttled count with, against a simulated node.

use crate::engine_support::{pod, rule, throttling};
use crate::simulation::{Simulation, Worker};
use plimsoll::engine::pod::Pod;
use proptest::prelude::*;

/// A simulated node, and what its pods got in every second.
struct Throttled {
    sim: Simulation,
    used: Vec<Vec<f64>>,
}

impl Throttled {
    fn new(demands: &[f64]) -> Self {
        let batch = demands.iter().enumerate().map(|(number, demand)| {
            let namespace = "batch".to_owned();
            let pod = Pod {
                namespace,
                ..pod(&format!("b{number}"))
            };
            Worker::new(pod, *demand)
        });
        let workers: Vec<_> = batch.chain([Worker::new(pod("important"), 0.5)]).collect();
        let rules = vec![rule(
            "node/cpu",
            "cpu_total_utilization",
            60.0,
            throttling(30, 20),
        )];
        Self {
            used: vec![Vec::new(); workers.len()],
            sim: Simulation::new(8, rules, workers),
        }
    }

    fn tick(&mut self) {
        self.sim.tick();
        for (used, worker) in self.used.iter_mut().zip(&self.sim.workers) {
            used.push(worker.allocated * 1000.0);
        }
    }

    /// Mean millicores of a pod over the last seconds, from its first sample on.
    fn mean(&self, worker: usize, seconds: usize) -> f64 {
        let used = &self.used[worker][1..];
        let last = &used[used.len().saturating_sub(seconds)..];
        last.iter().sum::<f64>() / last.len() as f64
    }

    /// What a pod counts with; `None` if it is not clear whether it wants more than its quota.
    fn expected(&self, worker: usize) -> Option<f64> {
        let own = self.mean(worker, 300);
        let uid = &self.sim.workers[worker].pod.uid;
        let throttle = self.sim.plan.throttles.iter().find(|it| it.uid == *uid);
        let Some(target) = throttle.map(|it| &it.target_cgroups[0]) else {
            return Some(own);
        };
        let Some(quota) = target.quota else {
            return Some(own);
        };
        let wants = |seconds| self.mean(worker, seconds) >= 0.9 * quota.0 as f64;
        let wants: Vec<bool> = (14..=31).map(wants).collect();
        match wants.iter().all(|it| *it) {
            true => Some(own.max(target.base.0 as f64)),
            false if wants.iter().any(|it| *it) => None,
            false => Some(own),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn throttled_pods_count_with_what_they_used_while_they_want_more(
        demands in proptest::collection::vec(0.1..3.0_f64, 1..5),
        changes in proptest::collection::vec((0..5_usize, 0.05..3.0_f64), 1..6),
    ) {
        let mut node = Throttled::new(&demands);
        let mut compared = 0;
        for (worker, demand) in changes {
            for _ in 0..150 {
                node.tick();
                let Ok(load) = node.sim.engine.load() else { continue };
                let pods = 0..node.used.len();
                let wanted: Option<f64> = pods.map(|worker| node.expected(worker)).sum();
                if let Some(wanted) = wanted {
                    let found = load.cpu.expected * 80.0;
                    prop_assert!(
                        (found - wanted).abs() <= 0.02 * wanted + 60.0,
                        "{}: {found}, not {wanted}", node.sim.now
                    );
                    compared += 1;
                }
            }
            let count = node.sim.workers.len();
            node.sim.workers[worker % count].demand = demand;
        }
        prop_assert!(compared > 50);
    }
}
