//! The cluster: what waits is placed, containers start and end, nodes tick, and what rules evict comes back.

use std::collections::VecDeque;
use std::sync::Arc;

use fastrand::Rng;
use plimsoll::engine::pod::Pod;
use plimsoll::engine::units::{Bytes, MilliCpu};

use super::in_tree::{fits, select};
use super::node::{CAPACITY, Node, Starting};
use super::outcome::Outcome;
use super::scenes::{Arrival, Workload};
use super::{Placing, Scheduler, TICK, Way, truncated};
use crate::engine_support::pod;
use crate::simulation::Worker;

/// Seconds between two placements: kube-scheduler binds 50 pods a second by default.
const PER_POD: f64 = 0.02;
/// A pod that a rule evicted is not to meet a node over its threshold, nor the same node, for this many seconds.
const RETURN: u64 = 30 * 60;
/// A node under this load, in percent of its load line, has room.
const HAS_ROOM: f64 = 95.0;
/// Seconds until a terminating pod is gone.
const LINGERS: u64 = 20;

#[derive(Clone, Copy, Debug)]
struct Evicted {
    at: u64,
    node: usize,
}

/// A pod that has no node yet.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    arrival: Arrival,
    evicted: Option<Evicted>,
}

/// A pod on a node.
#[derive(Clone, Copy, Debug)]
struct Placed {
    arrival: Arrival,
    /// When it ends if no rule evicts it.
    ends: Option<u64>,
}

pub struct Cluster {
    workload: Workload,
    nodes: Vec<Node>,
    scheduler: Box<dyn Scheduler>,
    waiting: VecDeque<Waiting>,
    /// By id.
    placed: Vec<Option<Placed>>,
    /// Nodes whose agent has not noticed their pods yet: from when on it has.
    unnoticed: VecDeque<(f64, usize)>,
    /// Arrivals so far.
    arrived: usize,
    random: Rng,
    now: u64,
    outcome: Outcome,
}

impl Cluster {
    pub fn new(workload: Workload, way: Way, seed: u64) -> Self {
        let count = workload.nodes;
        Self {
            nodes: (0..count).map(Node::new).collect(),
            scheduler: way.scheduler(count),
            workload,
            waiting: VecDeque::new(),
            placed: Vec::new(),
            unnoticed: VecDeque::new(),
            arrived: 0,
            random: Rng::with_seed(seed),
            now: 0,
            outcome: Outcome::default(),
        }
    }

    /// Runs it to its end.
    pub fn run(mut self) -> Outcome {
        // Empty nodes report before there are pods.
        for _ in 0..6 {
            self.tick();
        }
        while self.now < self.workload.until {
            self.drain();
            self.place();
            self.tick();
        }
        self.outcome
    }

    fn is_measured(&self) -> bool {
        self.now >= self.workload.from
    }

    /// All pods of the node end at their time, and are not replaced.
    fn drain(&mut self) {
        let Some(drain) = self.workload.drain.filter(|drain| drain.at == self.now) else {
            return;
        };
        for worker in &mut self.nodes[drain.node].sim.workers {
            worker.ends = Some(self.now + TICK);
        }
    }

    /// Places what waits, and what arrives in this tick, one after the other.
    fn place(&mut self) {
        let end = (self.now + TICK) as f64;
        let mut time = self.now as f64;
        let mut later = VecDeque::new();
        loop {
            let next = match self.waiting.pop_front() {
                Some(waiting) => waiting,
                None => match self.workload.arrivals.get(self.arrived) {
                    Some(arrival) if (arrival.at as f64) < end => {
                        self.arrived += 1;
                        time = time.max(arrival.at as f64);
                        Waiting {
                            arrival: *arrival,
                            evicted: None,
                        }
                    }
                    _ => break,
                },
            };
            self.notice(time);
            if !self.schedule(time, next) {
                later.push_back(next);
            }
            time += PER_POD;
        }
        self.notice(end);
        if self.is_measured() {
            self.outcome.pending_minutes += later.len() as f64 * TICK as f64 / 60.0;
        }
        self.waiting = later;
    }

    /// Agents notice pods that were bound a moment ago.
    fn notice(&mut self, time: f64) {
        while let Some(&(due, index)) = self.unnoticed.front()
            && due <= time
        {
            self.unnoticed.pop_front();
            self.nodes[index].refresh();
            self.scheduler.refreshed(due, index, &self.nodes[index]);
        }
    }

    /// Whether the pod got a node.
    fn schedule(&mut self, time: f64, waiting: Waiting) -> bool {
        let template = &self.workload.templates[waiting.arrival.template];
        let placing = Placing {
            id: self.placed.len(),
            owner: Arc::clone(&template.owner),
            requests: template.requests,
        };
        let fit = |index: &usize| fits(self.nodes[*index].requested, placing.requests, CAPACITY);
        let feasible: Vec<usize> = (0..self.nodes.len()).filter(fit).collect();
        let points = self
            .scheduler
            .points(time, &placing, &feasible, &self.nodes);
        let Some(place) = select(&points, &mut self.random) else {
            return false;
        };
        let index = feasible[place];
        self.check(index, waiting, &feasible);
        let starting = self.starting(time, &placing, waiting.arrival);
        let ends = starting.worker.ends;
        self.nodes[index].bind(placing.requests, starting);
        self.scheduler.bound(time, &placing, index);
        self.unnoticed
            .push_back((time + self.scheduler.delay(), index));
        self.placed.push(Some(Placed {
            arrival: waiting.arrival,
            ends,
        }));
        true
    }

    /// Counts the placement, and whether it sends back what a rule evicted.
    fn check(&mut self, index: usize, waiting: Waiting, feasible: &[usize]) {
        if !self.is_measured() {
            return;
        }
        self.outcome.placements += 1;
        if self.workload.drain.is_some_and(|drain| drain.node == index) {
            self.outcome.on_emptied += 1;
        }
        let recent = waiting
            .evicted
            .filter(|it| self.now.saturating_sub(it.at) <= RETURN);
        let Some(evicted) = recent else { return };
        self.outcome.returned += 1;
        let has_room = |index: &usize| {
            let load = self.nodes[*index].load.as_ref();
            load.is_some_and(|load| load.percent < HAS_ROOM)
        };
        let onto_hot = self.nodes[index].is_over_threshold() && feasible.iter().any(has_room);
        if onto_hot || evicted.node == index {
            self.outcome.ping_pongs += 1;
        }
    }

    fn starting(&mut self, time: f64, placing: &Placing, arrival: Arrival) -> Starting {
        let template = &self.workload.templates[arrival.template];
        let [cpu, memory] = template.requests;
        let mut facts = Pod {
            namespace: if template.batch { "batch" } else { "web" }.to_owned(),
            cpu_request: MilliCpu(cpu),
            owner: Some(Arc::clone(&placing.owner)),
            ..pod(&placing.uid())
        };
        facts.resources.memory_request = Bytes(memory);
        facts.name = placing.id.to_string();
        let at = time + 1.0 + 3.0 * self.random.f64();
        let mut worker = Worker::new(facts, 0.0);
        worker.tag = placing.id;
        worker.weight = cpu as f64;
        worker.memory = memory / 10 * 6;
        worker.lingers = LINGERS;
        let begins = truncated((at / TICK as f64).ceil()).unsigned_abs() * TICK;
        worker.ends = arrival.length.map(|length| begins + length.max(2 * TICK));
        Starting { at, worker }
    }

    fn tick(&mut self) {
        let now = self.now;
        for index in 0..self.nodes.len() {
            let (placed, workload) = (&self.placed, &self.workload);
            let demand =
                |id: usize| placed[id].map_or(0.0, |placed| workload.demand(placed.arrival, now));
            let ended = self.nodes[index].tick(now, demand);
            for name in self.nodes[index].new_evictions() {
                self.evicted(index, name.parse().unwrap());
            }
            for id in ended {
                let placed = self.placed[id].take().unwrap();
                let template = &self.workload.templates[placed.arrival.template];
                self.nodes[index].free(template.requests);
                self.scheduler.ended(id, index);
            }
        }
        self.now += TICK;
        self.scheduler.ticked(self.now as f64, &self.nodes);
        if self.is_measured() {
            self.outcome.observe(&self.nodes);
        }
    }

    /// The pod's controller makes another, which runs for the rest of its time.
    fn evicted(&mut self, index: usize, id: usize) {
        if self.is_measured() {
            self.outcome.evictions += 1;
        }
        let mut placed = self.placed[id].unwrap();
        let left = |ends: u64| ends.saturating_sub(self.now);
        placed.arrival.length = placed.ends.map(left);
        self.waiting.push_back(Waiting {
            arrival: placed.arrival,
            evicted: Some(Evicted {
                at: self.now + TICK,
                node: index,
            }),
        });
    }
}
