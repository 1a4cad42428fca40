//! A node of the cluster: the plant and the engine, what is requested on it, and what it has used.

use std::sync::Arc;

use plimsoll::agent::regret::Regret;
use plimsoll::engine::load::NodeLoad;
use plimsoll::engine::pod::Pod;

use super::history::History;
use super::{Amounts, TICK, boot_time};
use crate::engine_support::{evicting_only, rule};
use crate::simulation::{Simulation, Worker};

pub const CPUS: u32 = 16;
pub const MEMORY: u64 = 64 << 30;
pub const CAPACITY: Amounts = [CPUS as u64 * 1000, MEMORY];
/// Percent of the CPUs above which the node's rule evicts: its load line.
pub const THRESHOLD: f64 = 80.0;

/// A pod on its way to a container.
#[derive(Clone, Debug)]
pub struct Starting {
    pub at: f64,
    pub worker: Worker,
}

#[derive(Debug)]
pub struct Node {
    pub name: Arc<str>,
    pub sim: Simulation,
    pub requested: Amounts,
    pub history: History,
    /// As its agent knows it.
    pub load: Option<NodeLoad>,
    /// Its last [`Self::load`] less what was promised 5 minutes ago, if pods were bound then.
    pub regret: Option<f64>,
    starting: Vec<Starting>,
    promises: Regret,
    /// How many pods were bound to it, and how many of its evictions were seen.
    bound: u64,
    seen: usize,
}

impl Node {
    pub fn new(index: usize) -> Self {
        let mut rule = rule(
            "node/cpu",
            "cpu_total_utilization",
            THRESHOLD,
            evicting_only(),
        );
        rule.avoidance_threshold = 3;
        let mut sim = Simulation::new(CPUS, vec![rule], Vec::new());
        sim.tick_seconds = TICK;
        sim.memory = MEMORY;
        sim.now = 0;
        Self {
            name: format!("node-{index}").into(),
            sim,
            requested: [0; 2],
            history: History::default(),
            load: None,
            regret: None,
            starting: Vec::new(),
            promises: Regret::default(),
            bound: 0,
            seen: 0,
        }
    }

    /// A pod is bound to it, and will start.
    pub fn bind(&mut self, requests: Amounts, starting: Starting) {
        self.bound += 1;
        self.requested[0] += requests[0];
        self.requested[1] += requests[1];
        self.starting.push(starting);
        self.set_pending();
    }

    /// Its agent looks at its pods.
    pub fn refresh(&mut self) {
        self.load = self.sim.engine.load().ok();
    }

    fn set_pending(&mut self) {
        let pending = self
            .starting
            .iter()
            .map(|it| Arc::new(Pod::clone(&it.worker.pod)));
        let pending = pending.collect();
        self.sim.engine.set_pending_pods(pending);
    }

    /// Whether the last value of its rule is above the threshold.
    pub fn is_over_threshold(&self) -> bool {
        let mut reports = self.sim.engine.reports();
        let value = reports.next().and_then(|report| report.value);
        value.is_some_and(|value| value > THRESHOLD)
    }

    /// Runs the tick that begins at `now`. `demand` gives the CPUs that a pod would use, by its tag. Returns the pods that ended.
    pub fn tick(&mut self, now: u64, demand: impl Fn(usize) -> f64) -> Vec<usize> {
        let due = |it: &Starting| it.at <= now as f64;
        let (started, starting): (Vec<_>, Vec<_>) = std::mem::take(&mut self.starting)
            .into_iter()
            .partition(due);
        self.starting = starting;
        let any = !started.is_empty();
        for it in started {
            self.sim.start(it.worker);
        }
        if any {
            self.set_pending();
        }
        for worker in &mut self.sim.workers {
            worker.demand = demand(worker.tag);
        }
        let end = now + TICK;
        let ends = |it: &&Worker| it.ends.is_some_and(|ends| ends <= end);
        let ended = self.sim.workers.iter().filter(ends).map(|it| it.tag);
        let ended = ended.collect();
        self.sim.tick();
        let memory: u64 = self.sim.workers.iter().map(|it| it.memory).sum();
        self.history.push([
            self.sim.uses() / f64::from(CPUS) * 100.0,
            memory as f64 / MEMORY as f64 * 100.0,
        ]);
        self.refresh();
        let load = self.load.as_ref().map(|load| load.percent);
        self.regret = self
            .promises
            .update(boot_time(end as f64), load, self.bound);
        ended
    }

    /// Frees what an ended pod requested.
    pub fn free(&mut self, requests: Amounts) {
        self.requested[0] -= requests[0];
        self.requested[1] -= requests[1];
    }

    /// The names of pods that were evicted since the last call.
    pub fn new_evictions(&mut self) -> Vec<String> {
        let new = self.sim.evicted[self.seen..].iter();
        let names = new.map(|(_, name)| name.clone()).collect();
        self.seen = self.sim.evicted.len();
        names
    }
}
