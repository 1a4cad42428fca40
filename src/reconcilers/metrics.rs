//! What the controller tells Prometheus, and its probes.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::world::World;
use crate::cluster::clock;
use crate::cluster::requests::Observer;
use crate::engine::time::BootTime;
use crate::evictions::EvictionMetrics;
use crate::metrics_api;
use crate::metrics_api::reports::ReportMetrics;
use crate::serve::{Source, with_one_series};

/// What the probes call the metrics API, and whom it believes.
const METRICS_API: &str = "metrics API";
const FRONT_PROXY: &str = "API servers' certificates";
/// The loop turns at least every second: silent for so long it hangs.
const HANGS: Duration = Duration::from_secs(30);
/// Upper bounds of the time between two heartbeats, in seconds: they come every 10 or 60.
const AGES: [f64; 10] = [5.0, 9.0, 11.0, 15.0, 20.0, 40.0, 58.0, 65.0, 120.0, 600.0];

/// Labels of a write.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct WriteLabels {
    /// `NodeWatermark`, `status`, `Node` (the taint of a silent agent) or `Event`.
    pub object: &'static str,
    /// `ok` or `error`.
    pub result: &'static str,
}

/// Labels of a watch.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct WatchLabels {
    /// The kind.
    pub kind: &'static str,
}

/// Labels of a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct RequestLabels {
    /// As in the audit log: `get`, `list`, `watch`, `create`, `update`, `patch` or `delete`.
    pub verb: &'static str,
    /// The HTTP code of the answer; `none` where there was none.
    pub code: String,
}

/// Labels of an answer of the metrics API.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct AnswerLabels {
    /// `get`, `list`, `watch`, `discovery`, `health`, `eviction`, `relay` or `other`.
    pub verb: &'static str,
    /// The HTTP code.
    pub code: u16,
}

/// Labels of connections that were cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct CutLabels {
    /// `too_many_new`, `too_slow` or `pinned`.
    pub reason: &'static str,
}

/// Labels of a roll-out.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct RolloutLabels {
    /// `canaries`, `progressing` or `stopped`.
    pub phase: &'static str,
}

/// All figures.
pub struct Metrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    answers: Family<AnswerLabels, Counter>,
    pinned: Gauge,
    cut: Family<CutLabels, Counter>,
    compile: Histogram,
    /// Writes to the API server.
    pub writes: Family<WriteLabels, Counter>,
    running: Gauge,
    watch_errors: Family<WatchLabels, Counter>,
    /// Events that were dropped, because too many wait.
    pub events_dropped: Counter,
    /// Taints of silent agents that were taken away.
    pub taints_removed: Counter,
    nodes: Gauge,
    pending: Gauge,
    softened: Gauge,
    silent: Gauge,
    silent_throttled: Gauge,
    held: Gauge,
    agents: Gauge,
    unkept: Gauge,
    oldest: Gauge<f64, AtomicU64>,
    ages: Histogram,
    undefined: Gauge,
    certificate_ends: Gauge,
    certificate_errors: Counter,
    rollouts: Family<RolloutLabels, Gauge>,
    /// 1 while this replica leads.
    pub leader: Gauge,
    /// Direct reports of agents.
    pub reports: ReportMetrics,
    /// Evictions by agents.
    pub evictions: EvictionMetrics,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    beat: BootTime,
    /// What each watch waits for; absent once it was complete.
    waiting: BTreeMap<&'static str, String>,
    /// What is wrong with definitions, by kind.
    undefined: BTreeMap<String, String>,
}

impl Default for Metrics {
    fn default() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("plimsoll_controller"),
            requests: Family::default(),
            answers: Family::default(),
            pinned: Gauge::default(),
            cut: Family::default(),
            // From 10 µs, what one node costs, to 2.6 s.
            compile: Histogram::new(exponential_buckets(10e-6, 4.0, 10)),
            writes: Family::default(),
            running: Gauge::default(),
            watch_errors: Family::default(),
            events_dropped: Counter::default(),
            taints_removed: Counter::default(),
            nodes: Gauge::default(),
            pending: Gauge::default(),
            softened: Gauge::default(),
            silent: Gauge::default(),
            silent_throttled: Gauge::default(),
            held: Gauge::default(),
            agents: Gauge::default(),
            unkept: Gauge::default(),
            oldest: Gauge::default(),
            ages: Histogram::new(AGES),
            undefined: Gauge::default(),
            certificate_ends: Gauge::default(),
            certificate_errors: Counter::default(),
            rollouts: Family::default(),
            leader: Gauge::default(),
            reports: ReportMetrics::default(),
            evictions: EvictionMetrics::default(),
            health: Mutex::default(),
        };
        metrics.register_work();
        metrics.begin();
        metrics.register_state();
        metrics.register_agents();
        metrics.register_certificates();
        metrics.reports.register(&mut metrics.registry);
        metrics.evictions.register(&mut metrics.registry);
        metrics
    }
}

impl Metrics {
    /// Counts writes from 0: a counter that appears with its first count has not grown, to Prometheus.
    fn begin(&self) {
        for object in ["NodeWatermark", "status", "Node", "Event"] {
            for result in ["ok", "error"] {
                drop(self.writes.get_or_create(&WriteLabels { object, result }));
            }
        }
    }

    fn register_work(&mut self) {
        let registry = &mut self.registry;
        let help = "Requests to the API server, by verb and code of the answer";
        registry.register("api_requests", help, self.requests.clone());
        let help = "Answers of the metrics API, by verb and code";
        registry.register("metrics_api_answers", help, self.answers.clone());
        let help = "Memory that is there for answers of the metrics API under way alone: what was replaced since they began, and what \
                    their clients have not taken";
        let pinned = self.pinned.clone();
        registry.register_with_unit("metrics_api_pinned", help, Unit::Bytes, pinned);
        let help = "Connections of the metrics API that were cut: too_many_new, too_slow (less than 32 KiB a second), or pinned (the slowest, \
                    where answers under way took more than 64 MiB)";
        registry.register("metrics_api_connections_cut", help, self.cut.clone());
        let help = "Time to take one change of a policy or node and compile what it concerns";
        registry.register_with_unit("compile", help, Unit::Seconds, self.compile.clone());
        registry.register("writes", "Writes to the API server", self.writes.clone());
        let help = "Writes that are under way";
        registry.register("running_writes", help, self.running.clone());
        let help = "Failures of watches";
        registry.register("watch_errors", help, self.watch_errors.clone());
        let help = "Events that were dropped, because too many wait";
        registry.register("events_dropped", help, self.events_dropped.clone());
        let help = "Taints of silent agents that were taken away";
        registry.register("taints_removed", help, self.taints_removed.clone());
    }

    fn register_state(&mut self) {
        let registry = &mut self.registry;
        registry.register("nodes", "Nodes", self.nodes.clone());
        let help = "Nodes whose NodeWatermark waits to be written";
        registry.register("pending_nodes", help, self.pending.clone());
        let help = "Nodes that get PreferNoSchedule, because too many are over their marks";
        registry.register("softened_nodes", help, self.softened.clone());
        let help = "Edits on their way to all nodes, by how far they are";
        registry.register("rollouts", help, self.rollouts.clone());
        let help = "Definitions that are missing, or lack fields that this version writes";
        registry.register("definitions_missing", help, self.undefined.clone());
        let help = "1 while this replica leads";
        registry.register("leader", help, self.leader.clone());
    }

    fn register_certificates(&mut self) {
        let registry = &mut self.registry;
        let help = "When the certificate of the metrics API and of reports is good no more, in seconds since 1970; 0: there is none";
        let ends = self.certificate_ends.clone();
        registry.register("certificate_expiration_timestamp_seconds", help, ends);
        let help = "Looks at the certificate, and at who has to know its authority, that found something wrong; they come every minute";
        let errors = self.certificate_errors.clone();
        registry.register("certificate_errors", help, errors);
    }

    fn register_agents(&mut self) {
        let registry = &mut self.registry;
        let help = "Agents that hold the Lease of their node";
        registry.register("agents", help, self.agents.clone());
        let help = "Nodes that a NodeQOS selects and on which no agent holds the Lease or reports: nobody keeps it there";
        registry.register("unkept_nodes", help, self.unkept.clone());
        let help = "Agents that are silent: their Lease is not renewed, or they write nothing while something is in force";
        registry.register("silent_agents", help, self.silent.clone());
        let help = "Those of them whose node had throttled pods: see `plimsoll agent --restore`";
        let throttled = self.silent_throttled.clone();
        registry.register("silent_agents_throttling", help, throttled);
        let help = "Zones in which so many agents are silent that nothing of theirs is undone";
        registry.register("silence_held", help, self.held.clone());
        let help = "Age of the oldest heartbeat of all agents";
        let oldest = self.oldest.clone();
        registry.register_with_unit("heartbeat_age_max", help, Unit::Seconds, oldest);
        let help = "How old heartbeats were when the next was seen";
        registry.register_with_unit("heartbeat_age", help, Unit::Seconds, self.ages.clone());
    }

    /// Heartbeats of this age were followed by another.
    pub fn heard(&self, ages: Vec<Duration>) {
        for age in ages {
            self.ages.observe(age.as_secs_f64());
        }
    }

    /// A watch failed, or did not show what it should have shown.
    pub fn missed(&self, kind: &'static str) {
        self.watch_errors.get_or_create(&WatchLabels { kind }).inc();
    }

    /// One series of every metric, in the text format: for the documentation.
    pub fn example() -> String {
        let metrics = Self::default();
        with_one_series(&metrics.requests);
        with_one_series(&metrics.answers);
        with_one_series(&metrics.cut);
        with_one_series(&metrics.watch_errors);
        with_one_series(&metrics.rollouts);
        metrics.reports.example();
        metrics.evictions.example();
        metrics.text()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }

    /// Figures of the state that the controller is in.
    pub fn count(&self, world: &World, running: usize) {
        let set = |gauge: &Gauge, count: usize| {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        };
        let [nodes, pending, softened] = world.counts();
        set(&self.nodes, nodes);
        set(&self.pending, pending);
        set(&self.softened, softened);
        set(&self.running, running);
        let silence = world.silence_figures();
        set(&self.agents, silence.agents);
        set(&self.unkept, world.unkept());
        set(&self.silent, silence.silent);
        set(&self.silent_throttled, silence.throttling);
        set(&self.held, silence.held);
        self.oldest.set(silence.oldest.as_secs_f64());
        for (phase, rollouts) in world.rollout_counts() {
            set(
                &self.rollouts.get_or_create(&RolloutLabels { phase }),
                rollouts,
            );
        }
    }

    /// One change was taken and compiled.
    pub fn compiled(&self, took: Duration) {
        self.compile.observe(took.as_secs_f64());
    }

    fn health<T>(&self, with: impl FnOnce(&mut Health) -> T) -> T {
        with(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The loop turned.
    pub fn beat(&self, now: BootTime) {
        self.health(|health| health.beat = now);
    }

    /// A watch waits: for its first full list, or because it failed before that.
    pub fn waits(&self, kind: &'static str, why: String) {
        self.health(|health| drop(health.waiting.insert(kind, why)));
    }

    /// A watch has seen all of its objects.
    pub fn complete(&self, kind: &'static str) {
        self.health(|health| drop(health.waiting.remove(kind)));
    }

    /// Something that is needed is there, or why not.
    fn has(&self, what: &'static str, outcome: Result<(), &str>) {
        match outcome {
            Ok(()) => self.complete(what),
            Err(why) => self.waits(what, why.to_owned()),
        }
    }

    /// Whether objects of some kind were not listed yet.
    pub fn is_waiting(&self) -> bool {
        self.health(|health| !health.waiting.is_empty())
    }

    /// What the definition of a kind lacks; `None`: nothing, or nothing is known.
    pub fn defined(&self, kind: String, lacks: Option<String>) {
        let undefined = self.health(|health| {
            match lacks {
                Some(lacks) => drop(health.undefined.insert(kind, lacks)),
                None => drop(health.undefined.remove(&kind)),
            }
            health.undefined.len()
        });
        self.undefined
            .set(i64::try_from(undefined).unwrap_or(i64::MAX));
    }

    /// A write came to its end.
    pub fn wrote(&self, object: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "error" };
        let labels = WriteLabels { object, result };
        self.writes.get_or_create(&labels).inc();
    }
}

impl Observer for Metrics {
    fn requested(&self, verb: &'static str, code: Option<u16>) {
        let code = code.map_or_else(|| "none".to_owned(), |code| code.to_string());
        self.requests
            .get_or_create(&RequestLabels { verb, code })
            .inc();
    }
}

impl metrics_api::Observer for Metrics {
    fn answered(&self, verb: &'static str, code: u16) {
        self.answers
            .get_or_create(&AnswerLabels { verb, code })
            .inc();
    }

    fn pinned(&self, bytes: usize) {
        self.pinned.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    fn cut(&self, reason: &'static str) {
        self.cut.get_or_create(&CutLabels { reason }).inc();
    }

    fn certified(&self, outcome: Result<(), &str>) {
        self.has(METRICS_API, outcome);
    }

    fn kept(&self, ends: Option<Timestamp>, ok: bool) {
        self.certificate_ends
            .set(ends.map_or(0, Timestamp::as_second));
        if !ok {
            self.certificate_errors.inc();
        }
    }

    fn believes(&self, outcome: Result<(), &str>) {
        self.has(FRONT_PROXY, outcome);
    }

    fn lacks(&self) -> Result<(), String> {
        self.readyz()
    }
}

impl Source for Metrics {
    fn livez(&self) -> Result<(), String> {
        let silent = clock::now().since(self.health(|health| health.beat));
        if silent > HANGS {
            return Err(format!("nothing was done for {} s", silent.as_secs()));
        }
        Ok(())
    }

    /// A standby is as ready as the leader: it has seen all objects, and can lead at once.
    fn readyz(&self) -> Result<(), String> {
        let waiting: Vec<String> = self.health(|health| {
            let line = |kind: &str, why: &str| format!("{kind}: {why}");
            let waiting = health.waiting.iter().map(|(kind, why)| line(kind, why));
            let undefined = health.undefined.iter().map(|(kind, why)| line(kind, why));
            undefined.chain(waiting).collect()
        });
        if waiting.is_empty() {
            return Ok(());
        }
        Err(waiting.join("\n"))
    }

    fn metrics(&self) -> String {
        self.text()
    }
}
