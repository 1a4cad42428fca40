//! Prometheus metrics of polling.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::schedule::PolledNodeCounts;
use crate::serve::{ReasonLabels, StateLabels, with_one_series};

/// Upper bounds of the duration of a round, in seconds.
const ROUNDS: [f64; 9] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 60.0];
/// Upper bounds of the age of a value when the next one arrives, in seconds.
const AGES: [f64; 9] = [1.0, 5.0, 10.0, 16.0, 20.0, 31.0, 46.0, 60.0, 300.0];

/// The metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub struct PollMetrics {
    rounds: Histogram,
    lag: Gauge<f64, AtomicU64>,
    ages: Histogram,
    failures: Family<ReasonLabels, Counter>,
    nodes: Family<StateLabels, Gauge>,
}

impl Default for PollMetrics {
    fn default() -> Self {
        Self {
            rounds: Histogram::new(ROUNDS),
            lag: Gauge::default(),
            ages: Histogram::new(AGES),
            failures: Family::default(),
            nodes: Family::default(),
        }
    }
}

impl PollMetrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Time that a round of --poll took, over all endpoints that were due";
        registry.register_with_unit("poll_round", help, Unit::Seconds, self.rounds.clone());
        let help = "How much later than planned the last round of --poll began, because the one before took longer than the interval";
        registry.register_with_unit("poll_round_lag", help, Unit::Seconds, self.lag.clone());
        let help = "Age of a node's polled value when the next one arrived";
        registry.register_with_unit("poll_age", help, Unit::Seconds, self.ages.clone());
        let help = "Failed requests of --poll: connect (also refused), timeout, status, broken, too_long, text (not in the text format), missing \
                    (no use of CPU or memory), ambiguous (several series), implausible (negative, above 100 % or infinite), old (by its timestamp), \
                    or capacity (that of the Node is unknown)";
        registry.register("poll_failures", help, self.failures.clone());
        let help = "Nodes with an endpoint for --poll: current (with a value in use), failed (without), or reporting (not asked, since the agent \
                    reports); and endpoints of no known Node (unknown)";
        registry.register("poll_nodes", help, self.nodes.clone());
    }

    /// Creates one series of each family, for their labels.
    pub fn example(&self) {
        with_one_series(&self.failures);
        with_one_series(&self.nodes);
    }

    /// A round began this much later than planned.
    pub(super) fn began(&self, lag: Duration) {
        self.lag.set(lag.as_secs_f64());
    }

    /// A round ended.
    pub(super) fn ended(&self, took: Duration, counts: PolledNodeCounts, unknown: usize) {
        self.rounds.observe(took.as_secs_f64());
        for (state, count) in [
            ("current", counts.current),
            ("failed", counts.failed),
            ("reporting", counts.reporting),
            ("unknown", unknown),
        ] {
            let gauge = self.nodes.get_or_create(&StateLabels { state });
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// A value was replaced at this age.
    pub(super) fn replaced(&self, age: Duration) {
        self.ages.observe(age.as_secs_f64());
    }

    /// A request failed.
    pub(super) fn failed(&self, reason: &'static str) {
        self.failures.get_or_create(&ReasonLabels { reason }).inc();
    }
}
