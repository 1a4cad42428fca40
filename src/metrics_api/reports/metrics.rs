//! What Prometheus is told of reports.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::pace::Pace;
use crate::serve::{ResultLabels, with_one_series};

/// Upper bounds of the time between two reports, in seconds: they come every 10, or at once when something changed.
const AGES: [f64; 10] = [1.1, 3.0, 6.0, 9.0, 10.5, 12.0, 15.0, 20.0, 40.0, 60.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// The figures; a clone is the same figures.
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
    /// Makes them known.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Reports by what became of them: stored, replayed (the same report was known), relayed (another replica \
                    passed it on, since its agent does not reach this one), or why they were refused";
        registry.register("reports", help, self.reports.clone());
        let help = "Time from the headers of a report to its answer";
        registry.register_with_unit("report_answer", help, Unit::Seconds, self.answers.clone());
        let help = "How old the report of a node was when its next one came";
        registry.register_with_unit("report_age", help, Unit::Seconds, self.ages.clone());
        let help = "Time from the arrival of a report to its being in the NodeMetric";
        registry.register_with_unit("report_delay", help, Unit::Seconds, self.delays.clone());
        let help = "Nodes whose last report is younger than three of its intervals";
        registry.register("reporting_nodes", help, self.nodes.clone());
        let help = "How often agents are asked to report: more seldom when there is more than can be taken";
        registry.register_with_unit(
            "report_interval",
            help,
            Unit::Seconds,
            self.interval.clone(),
        );
        let help =
            "Cores that taking reports uses: agents are asked to report more seldom from 0.5 on";
        registry.register("report_cores", help, self.busy.clone());
        let help =
            "Connections for reports: new, until a report with a good token came by it, or known";
        registry.register("report_connections", help, self.connections.clone());
        let help = "Connections for reports that were cut: no handshake, too slow, or there were too many new ones, or of a node";
        registry.register("report_connections_cut", help, self.cut.clone());
        let help =
            "Tokens of reports that the API server was asked of, because their keys are not known";
        registry.register("report_token_reviews", help, self.reviews.clone());
        let help = "Readings of the keys by which tokens of reports are verified";
        registry.register("report_key_reads", help, self.keys.clone());
    }

    /// One series of each, for their labels.
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

    /// A report came.
    pub(super) fn count(&self, result: &'static str) {
        self.reports.get_or_create(&ResultLabels { result }).inc();
    }

    /// A report was followed by another.
    pub(super) fn followed(&self, age: Duration) {
        self.ages.observe(age.as_secs_f64());
    }

    /// A report is in its `NodeMetric`.
    pub fn shown(&self, after: Duration) {
        self.delays.observe(after.as_secs_f64());
    }

    /// A connection was cut.
    pub(super) fn cut(&self, reason: &'static str) {
        self.cut.get_or_create(&ReasonLabels { reason }).inc();
    }

    /// How many connections there are.
    pub(super) fn connected(&self, new: usize, known: usize) {
        for (state, count) in [("new", new), ("known", known)] {
            let gauge = self.connections.get_or_create(&StateLabels { state });
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// How it goes.
    pub(super) fn goes(&self, nodes: usize, busy: f64, pace: Pace) {
        self.nodes.set(i64::try_from(nodes).unwrap_or(i64::MAX));
        self.busy.set(busy);
        self.interval.set(pace.interval.as_secs_f64());
    }

    /// The API server was asked of a token.
    pub(super) fn reviewed(&self, ok: bool) {
        self.reviews.get_or_create(&labels(ok)).inc();
    }

    /// Keys were read.
    pub(super) fn read_keys(&self, ok: bool) {
        self.keys.get_or_create(&labels(ok)).inc();
    }
}

const fn labels(ok: bool) -> ResultLabels {
    let result = if ok { "ok" } else { "error" };
    ResultLabels { result }
}
