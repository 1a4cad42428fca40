//! Prometheus metrics about reports.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::interval::ReportLimits;
use crate::serve::{ReasonLabels, ResultLabels, StateLabels, with_one_series};

/// Buckets of the time between two reports, in seconds: they arrive every 10 s, or at once after a change.
const AGES: [f64; 10] = [1.1, 3.0, 6.0, 9.0, 10.5, 12.0, 15.0, 20.0, 40.0, 60.0];

/// The metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub struct ReportMetrics {
    reports: Family<ResultLabels, Counter>,
    answers: Histogram,
    ages: Histogram,
    delays: Histogram,
    nodes: Gauge,
    interval: Gauge<f64, AtomicU64>,
    busy: Gauge<f64, AtomicU64>,
    connections: Family<StateLabels, Gauge>,
    cut: Family<ReasonLabels, Counter>,
    reviews: Family<ResultLabels, Counter>,
    keys: Family<ResultLabels, Counter>,
}

impl Default for ReportMetrics {
    fn default() -> Self {
        Self {
            reports: Family::default(),
            // From 50 µs to 13 s.
            answers: Histogram::new(exponential_buckets(50e-6, 4.0, 10)),
            ages: Histogram::new(AGES),
            // From 0.1 ms to 26 s.
            delays: Histogram::new(exponential_buckets(1e-4, 4.0, 10)),
            nodes: Gauge::default(),
            interval: Gauge::default(),
            busy: Gauge::default(),
            connections: Family::default(),
            cut: Family::default(),
            reviews: Family::default(),
            keys: Family::default(),
        }
    }
}

impl ReportMetrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Reports by result: stored, replayed (received before), relayed (by another \
                    replica, because its agent does not reach this one), or why they were refused";
        registry.register("reports", help, self.reports.clone());
        let help = "Time from the headers of a report to its answer";
        registry.register_with_unit("report_answer", help, Unit::Seconds, self.answers.clone());
        let help = "Age of a node's report when its next one arrived";
        registry.register_with_unit("report_age", help, Unit::Seconds, self.ages.clone());
        let help = "Time from the arrival of a report to the update of its NodeMetric";
        registry.register_with_unit("report_delay", help, Unit::Seconds, self.delays.clone());
        let help = "Nodes whose last report is younger than three of its intervals";
        registry.register("reporting_nodes", help, self.nodes.clone());
        let help = "Interval at which agents are asked to report: longer under overload";
        registry.register_with_unit(
            "report_interval",
            help,
            Unit::Seconds,
            self.interval.clone(),
        );
        let help = "CPU cores used by the report listener: above 0.5, agents are asked to report less often";
        registry.register("report_cores", help, self.busy.clone());
        let help = "Connections for reports: new, or known (after a report with a valid token)";
        registry.register("report_connections", help, self.connections.clone());
        let help = "Closed connections for reports: no certificate yet, no handshake, too slow, too many new ones, or too many of a node";
        registry.register("report_connections_cut", help, self.cut.clone());
        let help = "Tokens of reports reviewed by the API server, because their keys are unknown";
        registry.register("report_token_reviews", help, self.reviews.clone());
        let help = "Loads of the keys that verify tokens of reports";
        registry.register("report_key_reads", help, self.keys.clone());
    }

    /// Creates one series of each family, for their labels.
    pub fn example(&self) {
        with_one_series(&self.reports);
        with_one_series(&self.connections);
        with_one_series(&self.cut);
        with_one_series(&self.reviews);
        with_one_series(&self.keys);
    }

    /// A report was answered.
    pub(super) fn answered(&self, result: &'static str, after: Duration) {
        self.count(result);
        self.answers.observe(after.as_secs_f64());
    }

    /// Counts a report by result.
    pub(super) fn count(&self, result: &'static str) {
        self.reports.get_or_create(&ResultLabels { result }).inc();
    }

    /// A report was followed by another after this time.
    pub(super) fn followed(&self, age: Duration) {
        self.ages.observe(age.as_secs_f64());
    }

    /// A report is in its `NodeMetric`.
    pub fn published(&self, after: Duration) {
        self.delays.observe(after.as_secs_f64());
    }

    /// A connection was closed.
    pub(super) fn cut(&self, reason: &'static str) {
        self.cut.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// Number of connections.
    pub(super) fn connected(&self, new: usize, known: usize) {
        for (state, count) in [("new", new), ("known", known)] {
            let gauge = self.connections.get_or_create(&StateLabels { state });
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Current load and limits.
    pub(super) fn set_load(&self, nodes: usize, busy: f64, limits: ReportLimits) {
        self.nodes.set(i64::try_from(nodes).unwrap_or(i64::MAX));
        self.busy.set(busy);
        self.interval.set(limits.interval.as_secs_f64());
    }

    /// A token was reviewed by the API server.
    pub(super) fn reviewed(&self, ok: bool) {
        self.reviews.get_or_create(&labels(ok)).inc();
    }

    /// The keys were loaded.
    pub(super) fn read_keys(&self, ok: bool) {
        self.keys.get_or_create(&labels(ok)).inc();
    }
}

const fn labels(ok: bool) -> ResultLabels {
    let result = if ok { "ok" } else { "error" };
    ResultLabels { result }
}
