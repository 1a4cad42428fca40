//! Prometheus metrics about requests of schedulers.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use crate::serve::with_one_series;

/// Labels of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
pub struct PageLabels {
    /// `load_watcher`, `query`, or `other`.
    pub page: &'static str,
    /// The HTTP code.
    pub code: u16,
}

/// The metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub struct SchedulerApiMetrics {
    answers: Family<PageLabels, Counter>,
    durations: Histogram,
}

impl Default for SchedulerApiMetrics {
    fn default() -> Self {
        Self {
            answers: Family::default(),
            // From 50 µs to 13 s.
            durations: Histogram::new(exponential_buckets(50e-6, 4.0, 10)),
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
    }

    /// Creates one series of each family, for their labels.
    pub fn example(&self) {
        with_one_series(&self.answers);
    }

    /// A request was answered.
    pub(super) fn answered(&self, page: &'static str, code: u16, after: Duration) {
        self.answers.get_or_create(&PageLabels { page, code }).inc();
        self.durations.observe(after.as_secs_f64());
    }
}
