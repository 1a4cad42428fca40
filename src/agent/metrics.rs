//! The agent's Prometheus metrics and probes.

mod load;
mod throttled;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use self::load::LoadMetrics;
use self::throttled::Throttled;
pub use self::throttled::ThrottledSeries;
use crate::agent::direct_report::metrics::DirectReportMetrics;
use crate::agent::eviction::EvictionResult;
use crate::agent::heartbeat::metrics::Heartbeats;
use crate::agent::report::publish::Published;
use crate::agent::report::write::Writes;
use crate::clock;
use crate::cluster::requests::RequestObserver;
use crate::crd::NodeMetric;
use crate::engine::RuleReport;
use crate::engine::plan::{PlanChange, RuleState, Scheduling, Transition};
use crate::engine::policy::{RuleId, Strategy, TaintEffect};
use crate::engine::time::BootTime;
use crate::engine::window::CustomWindow;
use crate::serve::{
    JsonDocument, KindLabels, ReasonLabels, RequestLabels, ResultLabels, ServedState,
    with_one_series,
};

/// The loop runs at least every few seconds: after this time without a run it hangs.
const HANG_TIMEOUT: Duration = Duration::from_secs(30);
/// Upper bounds of the regret of a placement, in percent of the load line; below 0, the node is less loaded than expected.
const REGRET_BUCKETS: [f64; 10] = [-40.0, -20.0, -10.0, -5.0, 0.0, 5.0, 10.0, 20.0, 40.0, 80.0];
/// Upper bounds of a tick's duration, in seconds.
const TICK_BUCKETS: [f64; 8] = [0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 1.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct RuleLabels {
    rule: String,
    metric: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct StateLabels {
    rule: String,
    strategy: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct RuleLabel {
    rule: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct EffectLabels {
    effect: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct OutcomeLabels {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct ActionLabels {
    action: &'static str,
    strategy: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct SkippedLabels {
    reason: &'static str,
    strategy: &'static str,
}

/// The state that the metrics show.
#[derive(Debug, Default)]
pub struct Figures {
    /// Every rule.
    pub rules: Vec<RuleReport>,
    /// Pods that are throttled.
    pub throttled: usize,
    /// The throttled cgroups; a pod with several containers may occur several times.
    pub throttled_pods: Vec<ThrottledSeries>,
    /// For each reason, the pods on which the last action has no effect.
    pub ineffective: BTreeMap<&'static str, i64>,
    /// Pods get the lowest weight instead of the idle class.
    pub idle_unsafe: bool,
    /// The batch weight share, in percent; `None` while it is not known.
    pub batch_weight_share: Option<f64>,
    /// The CPUs that batch pods use; `None` while that is not known.
    pub batch_cpus: Option<f64>,
    /// Pods with a cgroup on this node.
    pub pods: usize,
    /// Rules and pod policies that are not enforced.
    pub refused: usize,
    /// How many actions each Preview rule would have in force.
    pub would: BTreeMap<RuleId, i64>,
    /// The wanted scheduling state.
    pub scheduling: Scheduling,
    /// Results of events, since the start.
    pub events: Published,
    /// Events dropped from a full queue, since the start.
    pub dropped: u64,
    /// Results of status writes, since the start.
    pub writes: Writes,
}

/// Which data of single pods are served to any client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodData {
    /// The busiest and the most throttled pods have their own series.
    pub series: bool,
    /// The node's report, which names its busiest pods, is served to clients that do not connect over loopback.
    pub node_metric: bool,
}

/// All metrics of the agent.
pub struct AgentMetrics {
    registry: Registry,
    /// Metrics with names given by others, without our prefix.
    bare: Registry,
    load: LoadMetrics,
    actions: Family<ActionLabels, Counter>,
    skipped: Family<SkippedLabels, Counter>,
    states: Family<StateLabels, Gauge>,
    values: Family<RuleLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    thresholds: Family<RuleLabels, Gauge<f64, std::sync::atomic::AtomicU64>>,
    would: Family<RuleLabel, Gauge>,
    disabled: Family<EffectLabels, Gauge>,
    throttled: Gauge,
    throttled_pods: Throttled,
    ineffective: Family<ReasonLabels, Gauge>,
    idle_unsafe: Gauge,
    batch_weight_share: Gauge<f64, std::sync::atomic::AtomicU64>,
    batch_cpus: Gauge<f64, std::sync::atomic::AtomicU64>,
    pods: Gauge,
    refused: Gauge,
    /// 1 during an emergency stop.
    pub stopped: Gauge,
    sample_age: Gauge<f64, std::sync::atomic::AtomicU64>,
    /// Duration of a tick.
    pub tick: Histogram,
    /// Regret of placements, in percent of the load line.
    pub regret: Histogram,
    evictions: Family<OutcomeLabels, Counter>,
    /// Failed watches.
    pub watch_errors: Family<KindLabels, Counter>,
    requests: Family<RequestLabels, Counter>,
    events: Family<ResultLabels, Counter>,
    writes: Family<ResultLabels, Counter>,
    /// Metrics of the Lease.
    pub heartbeats: Heartbeats,
    /// Metrics of direct reports.
    pub reports: DirectReportMetrics,
    pod_data: PodData,
    state: Mutex<State>,
}

struct State {
    figures: Figures,
    /// The metric of each rule.
    names: BTreeMap<RuleId, String>,
    last_run: BootTime,
    sampled: Option<BootTime>,
    ready: Result<(), String>,
    /// The last report, also as JSON.
    node_metric: Option<(Arc<NodeMetric>, String)>,
}

const EVICT: &str = "evict";
/// The results of [`action`].
const ACTIONS: [&str; 6] = [
    "throttle",
    "unthrottle",
    "reclaim",
    EVICT,
    "disableScheduling",
    "enableScheduling",
];

/// Where the last report of the node is served.
const NODE_METRIC: &str = "/v1/node-metric";
/// The answer to clients that do not connect over loopback.
const FORBIDDEN: &str = "this report names pods: connect over loopback (kubectl port-forward), or start the agent with --open-node-metric";

impl AgentMetrics {
    /// Metrics without values, among them one for each of the `windows`.
    pub fn new(now: BootTime, pod_data: PodData, windows: &[CustomWindow]) -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("plimsoll_agent"),
            bare: Registry::default(),
            load: LoadMetrics::new(windows),
            actions: Family::default(),
            skipped: Family::default(),
            states: Family::default(),
            values: Family::default(),
            thresholds: Family::default(),
            would: Family::default(),
            disabled: Family::default(),
            throttled: Gauge::default(),
            throttled_pods: Throttled::default(),
            ineffective: Family::default(),
            idle_unsafe: Gauge::default(),
            batch_weight_share: Gauge::default(),
            batch_cpus: Gauge::default(),
            pods: Gauge::default(),
            refused: Gauge::default(),
            stopped: Gauge::default(),
            sample_age: Gauge::default(),
            tick: Histogram::new(TICK_BUCKETS),
            regret: Histogram::new(REGRET_BUCKETS),
            evictions: Family::default(),
            watch_errors: Family::default(),
            requests: Family::default(),
            events: Family::default(),
            writes: Family::default(),
            heartbeats: Heartbeats::default(),
            reports: DirectReportMetrics::default(),
            pod_data,
            state: Mutex::new(State {
                figures: Figures::default(),
                names: BTreeMap::new(),
                last_run: now,
                sampled: None,
                ready: Err("starting".to_owned()),
                node_metric: None,
            }),
        };
        metrics.register_rules();
        metrics.register_node();
        let registry = &mut metrics.registry;
        metrics.load.register(registry, &mut metrics.bare);
        if pod_data.series {
            metrics.load.register_pods(registry);
            metrics.throttled_pods.register(registry);
        }
        metrics.heartbeats.register(&mut metrics.registry);
        metrics.reports.register(&mut metrics.registry);
        metrics.initialize_counters();
        metrics
    }

    /// Starts the counters of actions at 0: Prometheus sees no increase in a counter that appears with its first count.
    fn initialize_counters(&self) {
        for outcome in ["accepted", "refused"] {
            drop(self.evictions.get_or_create(&OutcomeLabels { outcome }));
        }
        for action in ACTIONS {
            for strategy in [Strategy::Enforce, Strategy::Preview] {
                let strategy = strategy.name();
                drop(
                    self.actions
                        .get_or_create(&ActionLabels { action, strategy }),
                );
            }
        }
    }

    fn register_rules(&mut self) {
        let registry = &mut self.registry;
        let help = "1 for the state that the rule is in";
        registry.register("rule_state", help, self.states.clone());
        let help = "The rule's metric as last evaluated, in the metric's unit";
        registry.register("rule_value", help, self.values.clone());
        let help = "The rule's threshold, in the metric's unit";
        registry.register("rule_threshold", help, self.thresholds.clone());
        let help = "Pods, and the node, on which the Preview rule would have an action in force";
        registry.register("would", help, self.would.clone());
        let help = "Actions that rules took (strategy Enforce), or would have taken (Preview): throttle and unthrottle count \
                    each step of a pod, evict counts what the API server accepted, in Preview each pod once until the rule \
                    ends";
        registry.register("actions", help, self.actions.clone());
        let help = "Pods that a rule skipped, by reason: counted when the reason changes";
        registry.register("skipped_pods", help, self.skipped.clone());
        let help = "Rules and pod policies of the NodeWatermark that this version does not enforce";
        registry.register("refused", help, self.refused.clone());
    }

    fn register_node(&mut self) {
        let registry = &mut self.registry;
        let help = "1 while a rule disables scheduling, by the effect of the taint";
        registry.register("scheduling_disabled", help, self.disabled.clone());
        let help = "Pods that are throttled";
        registry.register("throttled_pods", help, self.throttled.clone());
        let help = "Pods on which the last action has no effect, by reason: see the condition ActionIneffective";
        registry.register("ineffective_pods", help, self.ineffective.clone());
        let help = "1 while pods would get the lowest CPU weight instead of the idle class, because the kubelet would reject new pods";
        registry.register("idle_class_unsafe", help, self.idle_unsafe.clone());
        let help = "Part of the CPU weight that busy batch pods have, in the class that a policy gives them, beside the protected pod for which it is highest: \
                    above 10 its tail latency grows; NaN while not known";
        let percent = Unit::Other("percent".to_owned());
        let share = self.batch_weight_share.clone();
        registry.register_with_unit("batch_weight_share", help, percent, share);
        let help = "CPU that batch pods, which actions of policies may touch, used in the last 15 to 30 s; NaN while not known";
        let cores = Unit::Other("cores".to_owned());
        registry.register_with_unit("batch_cpu_usage", help, cores, self.batch_cpus.clone());
        let help = "1 while the emergency stop is in force";
        registry.register("stopped", help, self.stopped.clone());
        let help = "Pods of the node that have a cgroup";
        registry.register("pods", help, self.pods.clone());
        let help = "Evictions that rules decided on: accepted by the API server, or refused (also by a webhook or a budget), or \
                    not sent; status.refused of the NodeWatermark says why";
        registry.register("evictions", help, self.evictions.clone());
        let help = "Age of the last sample of the node";
        let age = self.sample_age.clone();
        registry.register_with_unit("sample_age", help, Unit::Seconds, age);
        let help = "Time to sample, evaluate and act";
        let tick = self.tick.clone();
        registry.register_with_unit("tick_duration", help, Unit::Seconds, tick);
        let help = "The node's load, in percent of its load line, 5 min after pods were bound to it, less what was expected with them then";
        registry.register("placement_regret_percent", help, self.regret.clone());
        let help = "Requests to the API server";
        registry.register("api_requests", help, self.requests.clone());
        let help = "Events: written, refused by the API server, or dropped from a full queue";
        registry.register("events", help, self.events.clone());
        let help = "Writes of the NodeWatermark's status";
        registry.register("status_writes", help, self.writes.clone());
        let help = "Failures of watches";
        registry.register("watch_errors", help, self.watch_errors.clone());
    }

    fn state<T>(&self, with: impl FnOnce(&mut State) -> T) -> T {
        with(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The loop ran.
    pub fn loop_ran(&self, now: BootTime) {
        self.state(|state| state.last_run = now);
    }

    /// The node was sampled.
    pub fn sampled(&self, now: BootTime) {
        self.state(|state| state.sampled = Some(now));
    }

    /// Sets the readiness; an error says what the agent waits for.
    pub fn ready(&self, ready: Result<(), &str>) {
        self.state(|state| match (&state.ready, ready) {
            (Ok(()), Ok(())) => {}
            (Err(known), Err(why)) if known == why => {}
            (_, ready) => state.ready = ready.map_err(str::to_owned),
        });
    }

    /// Sets the metric name of each rule.
    pub fn rules(&self, names: BTreeMap<RuleId, String>) {
        self.state(|state| state.names = names);
    }

    /// Updates the state that the metrics show.
    pub fn figures(&self, fill: impl FnOnce(&mut Figures)) {
        self.state(|state| fill(&mut state.figures));
    }

    /// Stores a report of the node, also as JSON.
    pub fn reported(&self, metric: Arc<NodeMetric>, json: String) {
        self.state(|state| state.node_metric = Some((metric, json)));
    }

    /// Counts the outcome of an eviction.
    pub fn outcome(&self, result: &EvictionResult) {
        let outcome = match result {
            EvictionResult::Accepted => "accepted",
            EvictionResult::Refused { .. } => "refused",
            EvictionResult::Terminating
            | EvictionResult::Gone
            | EvictionResult::ResultUnknown(_) => return,
        };
        let labels = OutcomeLabels { outcome };
        self.evictions.get_or_create(&labels).inc();
        if *result == EvictionResult::Accepted {
            self.acted(EVICT, Strategy::Enforce);
        }
    }

    fn acted(&self, action: &'static str, strategy: Strategy) {
        let strategy = strategy.name();
        let labels = ActionLabels { action, strategy };
        self.actions.get_or_create(&labels).inc();
    }

    /// Counts the actions of an evaluation. Evictions count only in Preview: the others are counted by [`Self::outcome`].
    pub fn count(&self, transitions: &[Transition]) {
        for Transition { would, change, .. } in transitions {
            let strategy = if *would {
                Strategy::Preview
            } else {
                Strategy::Enforce
            };
            if let Some(action) = action(change).filter(|it| *would || *it != EVICT) {
                self.acted(action, strategy);
            }
            if let PlanChange::Skipped { reason, .. } = change {
                let (reason, strategy) = (reason.name(), strategy.name());
                let labels = SkippedLabels { reason, strategy };
                self.skipped.get_or_create(&labels).inc();
            }
        }
    }

    /// One series of every metric in the text format, for the documentation.
    pub fn example() -> String {
        let all = PodData {
            series: true,
            node_metric: true,
        };
        let metrics = Self::new(BootTime::default(), all, &[]);
        metrics.load.example();
        metrics.heartbeats.example();
        metrics.reports.example();
        with_one_series(&metrics.states);
        with_one_series(&metrics.values);
        with_one_series(&metrics.thresholds);
        with_one_series(&metrics.would);
        with_one_series(&metrics.disabled);
        with_one_series(&metrics.skipped);
        with_one_series(&metrics.ineffective);
        metrics.throttled_pods.example();
        with_one_series(&metrics.watch_errors);
        with_one_series(&metrics.requests);
        with_one_series(&metrics.events);
        with_one_series(&metrics.writes);
        metrics.text()
    }

    fn text(&self) -> String {
        let mut text = String::new();
        let encoded = encode_registry(&mut text, &self.registry)
            .and_then(|()| encode_registry(&mut text, &self.bare))
            .and_then(|()| encode_eof(&mut text));
        match encoded {
            Ok(()) => text,
            Err(error) => format!("# {error}\n"),
        }
    }

    /// Updates the metrics before they are read.
    fn refresh(&self, state: &State) {
        let Figures {
            rules,
            throttled,
            throttled_pods,
            ineffective,
            idle_unsafe,
            batch_weight_share,
            batch_cpus,
            pods,
            refused,
            would,
            scheduling,
            events,
            dropped,
            writes,
        } = &state.figures;
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.throttled.set(number(*throttled));
        self.idle_unsafe.set(i64::from(*idle_unsafe));
        self.batch_weight_share
            .set(batch_weight_share.unwrap_or(f64::NAN));
        self.batch_cpus.set(batch_cpus.unwrap_or(f64::NAN));
        self.pods.set(number(*pods));
        self.refused.set(number(*refused));
        self.refresh_rules(rules, &state.names);
        self.throttled_pods.refresh(throttled_pods);
        for (reason, pods) in ineffective {
            let gauge = self.ineffective.get_or_create(&ReasonLabels { reason });
            gauge.set(*pods);
        }
        self.would.clear();
        for (rule, count) in would {
            let rule = rule.to_string();
            self.would.get_or_create(&RuleLabel { rule }).set(*count);
        }
        self.refresh_scheduling(scheduling);
        if let Some((metric, _)) = &state.node_metric {
            self.load.refresh(&metric.status);
        }
        let events = [
            ("written", events.done),
            ("failed", events.failed),
            ("dropped", *dropped),
        ];
        raise_to(&self.events, &events);
        raise_to(
            &self.writes,
            &[("done", writes.done), ("failed", writes.failed)],
        );
        let now = clock::boot_time();
        self.heartbeats.refresh(now);
        self.reports.refresh(now);
        let age = state.sampled.map(|at| now.since(at));
        self.sample_age
            .set(age.map_or(f64::NAN, |age| age.as_secs_f64()));
    }

    fn refresh_scheduling(&self, scheduling: &Scheduling) {
        self.disabled.clear();
        for effect in [TaintEffect::NoSchedule, TaintEffect::PreferNoSchedule] {
            let disabled = matches!(scheduling, Scheduling::Disabled { effect: disabled_effect, .. } if *disabled_effect == effect);
            let effect = effect.name();
            let gauge = self.disabled.get_or_create(&EffectLabels { effect });
            gauge.set(i64::from(disabled));
        }
    }

    fn refresh_rules(&self, rules: &[RuleReport], names: &BTreeMap<RuleId, String>) {
        self.states.clear();
        self.values.clear();
        self.thresholds.clear();
        for report in rules {
            let rule = report.id.to_string();
            for (state, name) in [
                (RuleState::Normal, "Normal"),
                (RuleState::Breached, "Breached"),
                (RuleState::Cooling, "Cooling"),
            ] {
                let labels = StateLabels {
                    rule: rule.clone(),
                    strategy: report.strategy.name(),
                    state: name,
                };
                let gauge = self.states.get_or_create(&labels);
                gauge.set(i64::from(report.state == state));
            }
            let metric = names.get(&report.id).cloned().unwrap_or_default();
            let labels = RuleLabels { rule, metric };
            self.thresholds.get_or_create(&labels).set(report.threshold);
            // While the value is unknown there is none, rather than an old one.
            if let (Some(value), None) = (report.value, report.unknown) {
                self.values.get_or_create(&labels).set(value);
            }
        }
    }
}

/// The label of a change.
const fn action(change: &PlanChange) -> Option<&'static str> {
    match change {
        PlanChange::Throttle { from, to, idle, .. } if *to < *from || *idle => Some("throttle"),
        PlanChange::Throttle { .. } => Some("unthrottle"),
        PlanChange::Reclaim { .. } => Some("reclaim"),
        PlanChange::Evict { .. } => Some(EVICT),
        PlanChange::SchedulingDisabled { .. } => Some("disableScheduling"),
        PlanChange::SchedulingEnabled => Some("enableScheduling"),
        PlanChange::State { .. }
        | PlanChange::Burst { .. }
        | PlanChange::Unknown { .. }
        | PlanChange::Known { .. }
        | PlanChange::Ineffective { .. }
        | PlanChange::Effective { .. }
        | PlanChange::OutsideHours
        | PlanChange::WithinHours
        | PlanChange::EvictionsEnded { .. }
        | PlanChange::Skipped { .. } => None,
    }
}

/// Raises counters to counts kept elsewhere.
fn raise_to(family: &Family<ResultLabels, Counter>, counts: &[(&'static str, u64)]) {
    for (result, count) in counts {
        let counter = family.get_or_create(&ResultLabels { result });
        counter.inc_by(count.saturating_sub(counter.get()));
    }
}

impl RequestObserver for AgentMetrics {
    fn requested(&self, verb: &'static str, code: Option<u16>) {
        let labels = RequestLabels::new(verb, code);
        self.requests.get_or_create(&labels).inc();
    }
}

impl ServedState for AgentMetrics {
    fn livez(&self) -> Result<(), String> {
        let idle = clock::boot_time().since(self.state(|state| state.last_run));
        if idle > HANG_TIMEOUT {
            return Err(format!("the loop has not run for {} s", idle.as_secs()));
        }
        Ok(())
    }

    fn readyz(&self) -> Result<(), String> {
        self.state(|state| state.ready.clone())
    }

    fn documents(&self) -> &'static [&'static str] {
        &[NODE_METRIC]
    }

    fn document(&self, path: &str, local: bool) -> Option<JsonDocument> {
        if path != NODE_METRIC {
            return None;
        }
        if !local && !self.pod_data.node_metric {
            return Some(JsonDocument::Forbidden(FORBIDDEN.to_owned()));
        }
        let known = self.state(|state| state.node_metric.as_ref().map(|(_, json)| json.clone()));
        let missing = || JsonDocument::Missing("the node has not been measured yet".to_owned());
        Some(known.map_or_else(missing, JsonDocument::Json))
    }

    fn metrics(&self) -> String {
        self.state(|state| self.refresh(state));
        self.text()
    }
}

#[cfg(test)]
mod tests;
