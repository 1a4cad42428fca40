//! Prometheus metrics and probes of the controller.

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

use super::reconciler::Reconciler;
use crate::clock;
use crate::cluster::requests::RequestObserver;
use crate::engine::time::BootTime;
use crate::evictions::EvictionMetrics;
use crate::metrics_api;
use crate::metrics_api::reports::ReportMetrics;
use crate::polling::PollMetrics;
use crate::scheduler_api::SchedulerApiMetrics;
use crate::serve::{KindLabels, ReasonLabels, RequestLabels, ServedState, with_one_series};

/// Names in the readiness probe.
const METRICS_API: &str = "metrics API";
const FRONT_PROXY: &str = "API servers' certificates";
/// The event loop runs at least every second; after this long without a turn it hangs.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);
/// Upper bounds of the time between two heartbeats, in seconds: they come every 10 or 60.
const AGES: [f64; 10] = [5.0, 9.0, 11.0, 15.0, 20.0, 40.0, 58.0, 65.0, 120.0, 600.0];

/// Labels of a write.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct WriteLabels {
    /// `NodeWatermark`, `status`, `Node` (removing the taint or the load label of an unresponsive agent) or `Event`.
    pub object: &'static str,
    /// `ok` or `error`.
    pub result: &'static str,
}

/// Labels of an answer of the metrics API.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct AnswerLabels {
    /// `get`, `list`, `watch`, `discovery`, `health`, `eviction`, `relay` or `other`.
    pub verb: &'static str,
    /// The HTTP code.
    pub code: u16,
}

/// Labels of a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct RolloutLabels {
    /// `canaries`, `progressing` or `stopped`.
    pub phase: &'static str,
}

/// All metrics.
pub struct ControllerMetrics {
    registry: Registry,
    requests: Family<RequestLabels, Counter>,
    answers: Family<AnswerLabels, Counter>,
    pinned: Gauge,
    cut: Family<ReasonLabels, Counter>,
    compile: Histogram,
    /// Writes to the API server.
    pub writes: Family<WriteLabels, Counter>,
    running: Gauge,
    watch_errors: Family<KindLabels, Counter>,
    /// Events dropped because too many were waiting.
    pub events_dropped: Counter,
    /// Taints of unresponsive agents that were removed.
    pub taints_removed: Counter,
    nodes: Gauge,
    pending: Gauge,
    prefer_no_schedule: Gauge,
    unresponsive: Gauge,
    unresponsive_throttled: Gauge,
    frozen_zones: Gauge,
    agents: Gauge,
    without_agent: Gauge,
    oldest_heartbeat: Gauge<f64, AtomicU64>,
    heartbeat_ages: Histogram,
    definitions_missing: Gauge,
    certificate_ends: Gauge,
    certificate_errors: Counter,
    rollouts: Family<RolloutLabels, Gauge>,
    /// 1 while this replica leads.
    pub leader: Gauge,
    /// Direct reports of agents.
    pub reports: ReportMetrics,
    /// Evictions for agents.
    pub evictions: EvictionMetrics,
    /// Requests of schedulers.
    pub scheduler_api: SchedulerApiMetrics,
    /// Exporters that are polled.
    pub polling: PollMetrics,
    health: Mutex<Health>,
}

#[derive(Default)]
struct Health {
    last_turn: BootTime,
    /// What each watch waits for; absent once it is complete.
    waiting: BTreeMap<&'static str, String>,
    /// What is wrong with definitions, by kind.
    incomplete: BTreeMap<String, String>,
}

impl Default for ControllerMetrics {
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
            prefer_no_schedule: Gauge::default(),
            unresponsive: Gauge::default(),
            unresponsive_throttled: Gauge::default(),
            frozen_zones: Gauge::default(),
            agents: Gauge::default(),
            without_agent: Gauge::default(),
            oldest_heartbeat: Gauge::default(),
            heartbeat_ages: Histogram::new(AGES),
            definitions_missing: Gauge::default(),
            certificate_ends: Gauge::default(),
            certificate_errors: Counter::default(),
            rollouts: Family::default(),
            leader: Gauge::default(),
            reports: ReportMetrics::default(),
            evictions: EvictionMetrics::default(),
            scheduler_api: SchedulerApiMetrics::default(),
            polling: PollMetrics::default(),
            health: Mutex::default(),
        };
        metrics.register_work();
        metrics.init_counters();
        metrics.register_state();
        metrics.register_agents();
        metrics.register_certificates();
        metrics.reports.register(&mut metrics.registry);
        metrics.evictions.register(&mut metrics.registry);
        metrics.scheduler_api.register(&mut metrics.registry);
        metrics.polling.register(&mut metrics.registry);
        metrics
    }
}

impl ControllerMetrics {
    /// Starts counters at 0: Prometheus sees no increase in a counter that appears with its first count.
    fn init_counters(&self) {
        for object in ["NodeWatermark", "status", "Node", "Event"] {
            for result in ["ok", "error"] {
                drop(self.writes.get_or_create(&WriteLabels { object, result }));
            }
        }
    }

    fn register_work(&mut self) {
        let registry = &mut self.registry;
        let help = "Requests to the API server, by verb and response code";
        registry.register("api_requests", help, self.requests.clone());
        let help = "Responses of the metrics API, by verb and code";
        registry.register("metrics_api_answers", help, self.answers.clone());
        let help = "Memory held only by responses of the metrics API in progress: data that was replaced since they started, and data \
                    that clients have not read yet";
        let pinned = self.pinned.clone();
        registry.register_with_unit("metrics_api_pinned", help, Unit::Bytes, pinned);
        let help = "Connections of the metrics API closed by the server: too_many_new, too_slow (less than 32 KiB/s), or pinned (the \
                    slowest, when responses in progress took more than 64 MiB)";
        registry.register("metrics_api_connections_cut", help, self.cut.clone());
        let help = "Time to process one change of a policy or node and compile what it affects";
        registry.register_with_unit("compile", help, Unit::Seconds, self.compile.clone());
        registry.register("writes", "Writes to the API server", self.writes.clone());
        let help = "Writes in progress";
        registry.register("running_writes", help, self.running.clone());
        let help = "Watch errors";
        registry.register("watch_errors", help, self.watch_errors.clone());
        let help = "Events dropped because too many were waiting";
        registry.register("events_dropped", help, self.events_dropped.clone());
        let help = "Taints of unresponsive agents that were removed";
        registry.register("taints_removed", help, self.taints_removed.clone());
    }

    fn register_state(&mut self) {
        let registry = &mut self.registry;
        registry.register("nodes", "Nodes", self.nodes.clone());
        let help = "Nodes whose NodeWatermark is waiting to be written";
        registry.register("pending_nodes", help, self.pending.clone());
        let help = "Nodes with PreferNoSchedule instead of NoSchedule because of the cap on unschedulable nodes";
        registry.register("softened_nodes", help, self.prefer_no_schedule.clone());
        let help = "Edits that are being rolled out, by phase";
        registry.register("rollouts", help, self.rollouts.clone());
        let help =
            "Custom resource definitions that are missing or lack fields that this version writes";
        registry.register(
            "definitions_missing",
            help,
            self.definitions_missing.clone(),
        );
        let help = "1 while this replica leads";
        registry.register("leader", help, self.leader.clone());
    }

    fn register_certificates(&mut self) {
        let registry = &mut self.registry;
        let help = "Expiry of the certificate of the metrics API and of reports, in seconds since 1970; 0: there is none";
        let ends = self.certificate_ends.clone();
        registry.register("certificate_expiration_timestamp_seconds", help, ends);
        let help = "Failed checks of the certificate and of where its authority is published; checks run every minute";
        let errors = self.certificate_errors.clone();
        registry.register("certificate_errors", help, errors);
    }

    fn register_agents(&mut self) {
        let registry = &mut self.registry;
        let help = "Agents that hold the Lease of their node";
        registry.register("agents", help, self.agents.clone());
        let help = "Nodes that a NodeQOS selects but on which no agent holds the Lease or reports: it is not enforced there";
        registry.register("nodes_without_agent", help, self.without_agent.clone());
        let help = "Unresponsive agents: their Lease is not renewed, or they write nothing while something is in force";
        registry.register("unresponsive_agents", help, self.unresponsive.clone());
        let help =
            "Unresponsive agents whose node had throttled pods: see `plimsoll agent --restore`";
        let throttled = self.unresponsive_throttled.clone();
        registry.register("unresponsive_agents_throttling", help, throttled);
        let help =
            "Zones in which so many agents are unresponsive that nothing of theirs is restored";
        registry.register("frozen_zones", help, self.frozen_zones.clone());
        let help = "Age of the oldest heartbeat of all agents";
        let oldest = self.oldest_heartbeat.clone();
        registry.register_with_unit("heartbeat_age_max", help, Unit::Seconds, oldest);
        let help = "Age of heartbeats when the next one arrived";
        registry.register_with_unit(
            "heartbeat_age",
            help,
            Unit::Seconds,
            self.heartbeat_ages.clone(),
        );
    }

    /// Heartbeats had these ages when the next one arrived.
    pub fn heartbeats(&self, ages: Vec<Duration>) {
        for age in ages {
            self.heartbeat_ages.observe(age.as_secs_f64());
        }
    }

    /// A watch failed or missed a change.
    pub fn watch_error(&self, kind: &'static str) {
        self.watch_errors.get_or_create(&KindLabels { kind }).inc();
    }

    /// One series of every metric in the text format, for the documentation.
    pub fn example() -> String {
        let metrics = Self::default();
        with_one_series(&metrics.requests);
        with_one_series(&metrics.answers);
        with_one_series(&metrics.cut);
        with_one_series(&metrics.watch_errors);
        with_one_series(&metrics.rollouts);
        metrics.reports.example();
        metrics.evictions.example();
        metrics.scheduler_api.example();
        metrics.polling.example();
        metrics.text()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }

    /// Sets the gauges from the controller's state.
    pub fn update(&self, reconciler: &Reconciler, running: usize) {
        let set = |gauge: &Gauge, count: usize| {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        };
        let [nodes, pending, prefer_no_schedule] = reconciler.counts();
        set(&self.nodes, nodes);
        set(&self.pending, pending);
        set(&self.prefer_no_schedule, prefer_no_schedule);
        set(&self.running, running);
        let liveness = reconciler.liveness_counts();
        set(&self.agents, liveness.agents);
        set(&self.without_agent, reconciler.nodes_without_agent());
        set(&self.unresponsive, liveness.unresponsive);
        set(&self.unresponsive_throttled, liveness.throttling);
        set(&self.frozen_zones, liveness.frozen_zones);
        self.oldest_heartbeat
            .set(liveness.oldest_heartbeat.as_secs_f64());
        for (phase, rollouts) in reconciler.rollout_counts() {
            set(
                &self.rollouts.get_or_create(&RolloutLabels { phase }),
                rollouts,
            );
        }
    }

    /// One change was processed and compiled.
    pub fn compiled(&self, took: Duration) {
        self.compile.observe(took.as_secs_f64());
    }

    fn health<T>(&self, with: impl FnOnce(&mut Health) -> T) -> T {
        with(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The event loop made a turn.
    pub fn loop_turned(&self, now: BootTime) {
        self.health(|health| health.last_turn = now);
    }

    /// A watch waits for its first full list; `why` may be an error.
    pub fn waiting(&self, kind: &'static str, why: String) {
        self.health(|health| drop(health.waiting.insert(kind, why)));
    }

    /// A watch has listed all of its objects.
    pub fn complete(&self, kind: &'static str) {
        self.health(|health| drop(health.waiting.remove(kind)));
    }

    /// A prerequisite is there, or why not.
    fn prerequisite(&self, what: &'static str, outcome: Result<(), &str>) {
        match outcome {
            Ok(()) => self.complete(what),
            Err(why) => self.waiting(what, why.to_owned()),
        }
    }

    /// Whether some kind is not listed yet.
    pub fn is_waiting(&self) -> bool {
        self.health(|health| !health.waiting.is_empty())
    }

    /// What the definition of a kind lacks; `None`: nothing, or unknown.
    pub fn definition_checked(&self, kind: String, missing: Option<String>) {
        let incomplete = self.health(|health| {
            match missing {
                Some(missing) => drop(health.incomplete.insert(kind, missing)),
                None => drop(health.incomplete.remove(&kind)),
            }
            health.incomplete.len()
        });
        self.definitions_missing
            .set(i64::try_from(incomplete).unwrap_or(i64::MAX));
    }

    /// A write finished.
    pub fn wrote(&self, object: &'static str, ok: bool) {
        let result = if ok { "ok" } else { "error" };
        let labels = WriteLabels { object, result };
        self.writes.get_or_create(&labels).inc();
    }
}

impl RequestObserver for ControllerMetrics {
    fn requested(&self, verb: &'static str, code: Option<u16>) {
        let labels = RequestLabels::new(verb, code);
        self.requests.get_or_create(&labels).inc();
    }
}

impl metrics_api::ApiObserver for ControllerMetrics {
    fn answered(&self, verb: &'static str, code: u16) {
        self.answers
            .get_or_create(&AnswerLabels { verb, code })
            .inc();
    }

    fn pinned(&self, bytes: usize) {
        self.pinned.set(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    fn cut(&self, reason: &'static str) {
        self.cut.get_or_create(&ReasonLabels { reason }).inc();
    }

    fn certified(&self, outcome: Result<(), &str>) {
        self.prerequisite(METRICS_API, outcome);
    }

    fn certificates_reconciled(&self, ends: Option<Timestamp>, ok: bool) {
        self.certificate_ends
            .set(ends.map_or(0, Timestamp::as_second));
        if !ok {
            self.certificate_errors.inc();
        }
    }

    fn front_proxy_loaded(&self, outcome: Result<(), &str>) {
        self.prerequisite(FRONT_PROXY, outcome);
    }

    fn ready(&self) -> Result<(), String> {
        self.readyz()
    }
}

impl ServedState for ControllerMetrics {
    fn livez(&self) -> Result<(), String> {
        let idle = clock::boot_time().since(self.health(|health| health.last_turn));
        if idle > HANG_TIMEOUT {
            return Err(format!(
                "the event loop has not run for {} s",
                idle.as_secs()
            ));
        }
        Ok(())
    }

    /// A standby is as ready as the leader: it has listed all objects, and can lead at once.
    fn readyz(&self) -> Result<(), String> {
        let waiting: Vec<String> = self.health(|health| {
            let line = |kind: &str, why: &str| format!("{kind}: {why}");
            let waiting = health.waiting.iter().map(|(kind, why)| line(kind, why));
            let incomplete = health.incomplete.iter().map(|(kind, why)| line(kind, why));
            incomplete.chain(waiting).collect()
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
