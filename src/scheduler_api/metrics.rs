//! Prometheus metrics about requests of schedulers.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::serve::with_one_series;

/// Labels of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct PageLabels {
    /// `prioritize`, `filter`, `load_watcher`, `query`, `value`, or `other`.
    pub page: &'static str,
    /// The HTTP code.
    pub code: u16,
}

/// Labels of the duration of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct DurationLabels {
    /// As in [`PageLabels`].
    pub page: &'static str,
}

/// The metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub struct SchedulerApiMetrics {
    answers: Family<PageLabels, Counter>,
    durations: Family<DurationLabels, Histogram, fn() -> Histogram>,
    unknown_nodes: Gauge,
    filter_suspended: Gauge,
    policy_loaded: Gauge,
    policy_invalid: Gauge,
}

/// From 50 µs to 0.8 s, and above.
fn durations() -> Histogram {
    Histogram::new(exponential_buckets(50e-6, 2.0, 15))
}

impl Default for SchedulerApiMetrics {
    fn default() -> Self {
        Self {
            answers: Family::default(),
            durations: Family::new_with_constructor(durations),
            unknown_nodes: Gauge::default(),
            filter_suspended: Gauge::default(),
            policy_loaded: Gauge::default(),
            policy_invalid: Gauge::default(),
        }
    }
}

impl SchedulerApiMetrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Answers to schedulers and descheduler, by page and HTTP code";
        registry.register("scheduler_answers", help, self.answers.clone());
        let help =
            "Time from the headers of a request of a scheduler or the descheduler to its answer";
        let durations = self.durations.clone();
        registry.register_with_unit("scheduler_answer", help, Unit::Seconds, durations);
        let help = "Nodes in the last request to the extender that had no recent report";
        registry.register("scheduler_unknown_nodes", help, self.unknown_nodes.clone());
        let help = "1 if Filter of the extender has rejected no node of a request, because too many are hot or unknown, until a minute passes \
                    without such a request";
        let suspended = self.filter_suspended.clone();
        registry.register("scheduler_filter_suspended", help, suspended);
        let help = "1 if the extender uses a file of --scheduler-policy";
        registry.register("scheduler_policy_loaded", help, self.policy_loaded.clone());
        let help =
            "1 while the file of --scheduler-policy is invalid; its last valid content is in use";
        registry.register(
            "scheduler_policy_invalid",
            help,
            self.policy_invalid.clone(),
        );
    }

    /// Creates one series of each family, for their labels.
    pub fn example(&self) {
        with_one_series(&self.answers);
        drop(self.durations.get_or_create(&DurationLabels::default()));
    }

    /// A request was answered.
    pub(super) fn answered(&self, page: &'static str, code: u16, after: Duration) {
        self.answers.get_or_create(&PageLabels { page, code }).inc();
        let durations = self.durations.get_or_create(&DurationLabels { page });
        durations.observe(after.as_secs_f64());
    }

    /// The extender answered a request with this many unknown nodes.
    pub(super) fn unknown_nodes(&self, nodes: usize) {
        self.unknown_nodes
            .set(i64::try_from(nodes).unwrap_or(i64::MAX));
    }

    /// Filter rejects no node, or does again.
    pub(super) fn filter_suspended(&self, suspended: bool) {
        self.filter_suspended.set(suspended.into());
    }

    /// A policy file is in use; `valid`: as it is now.
    pub(super) fn policy(&self, valid: bool) {
        self.policy_loaded.set(1);
        self.policy_invalid.set((!valid).into());
    }
}
