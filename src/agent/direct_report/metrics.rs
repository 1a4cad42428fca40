//! Prometheus metrics of direct reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::engine::time::BootTime;
use crate::serve::{ResultLabels, with_one_series};

/// Bucket bounds of the answer time, in seconds.
const BUCKETS: [f64; 8] = [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 5.0];

/// The metrics; clones share their values.
#[derive(Clone, Debug)]
pub struct DirectReportMetrics {
    results: Family<ResultLabels, Counter>,
    replicas: Gauge,
    lag: Gauge<f64, AtomicU64>,
    interval: Gauge<f64, AtomicU64>,
    answered: Histogram,
    /// Sample time of the newest acknowledged report, before the first one the start of the agent; nanoseconds on the boot
    /// clock. 0: reports are off.
    acknowledged: Arc<AtomicU64>,
}

impl Default for DirectReportMetrics {
    fn default() -> Self {
        let interval = Gauge::default();
        interval.set(f64::NAN);
        Self {
            results: Family::default(),
            replicas: Gauge::default(),
            lag: Gauge::default(),
            interval,
            answered: Histogram::new(BUCKETS),
            acknowledged: Arc::default(),
        }
    }
}

impl DirectReportMetrics {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Direct reports to replicas of the controller: acknowledged by the leader, accepted by a standby; \
                    throttled (429), unready (503), refused (any other code), timeout or failed, each of which is \
                    retried; unconfigured without a token or a CA certificate";
        registry.register("reports", help, self.results.clone());
        let help = "Ready replicas of the controller that reports go to";
        registry.register("report_replicas", help, self.replicas.clone());
        let help = "Age of the newest report that the leader acknowledged; before the first, how long the agent has been running; \
             NaN if reports are off";
        registry.register_with_unit("report_lag", help, Unit::Seconds, self.lag.clone());
        let help = "Interval at which the leader wants reports without a change; NaN before its first answer";
        registry.register_with_unit(
            "report_interval",
            help,
            Unit::Seconds,
            self.interval.clone(),
        );
        let help = "Time until a report is answered, including connecting if needed";
        let answered = self.answered.clone();
        registry.register_with_unit("report_duration", help, Unit::Seconds, answered);
    }

    /// One series of each, for the documentation.
    pub fn example(&self) {
        with_one_series(&self.results);
    }

    /// Reports are sent since `started`.
    pub(super) fn start(&self, started: BootTime) {
        self.measured(started);
    }

    fn measured(&self, at: BootTime) {
        self.acknowledged
            .fetch_max(at.as_nanos(), Ordering::Relaxed);
    }

    /// Counts the result of a report.
    pub(super) fn count(&self, result: &'static str) {
        self.results.get_or_create(&ResultLabels { result }).inc();
    }

    pub(super) fn answered(&self, after: Duration) {
        self.answered.observe(after.as_secs_f64());
    }

    pub(super) fn replicas(&self, count: usize) {
        self.replicas.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// The leader acknowledged the sample of `measured` and requested this interval.
    pub(super) fn acknowledged(&self, measured: BootTime, interval: Duration) {
        self.measured(measured);
        self.interval.set(interval.as_secs_f64());
    }

    /// Updates the lag.
    pub fn refresh(&self, now: BootTime) {
        let measured = BootTime::from_nanos(self.acknowledged.load(Ordering::Relaxed));
        let known = measured != BootTime::default();
        let lag = known.then(|| now.since(measured).as_secs_f64());
        self.lag.set(lag.unwrap_or(f64::NAN));
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    fn figures(reports: &DirectReportMetrics, seconds: u64) -> [String; 2] {
        let mut registry = Registry::default();
        reports.register(&mut registry);
        reports.refresh(at(seconds));
        let mut text = String::new();
        encode(&mut text, &registry).expect("text");
        ["report_lag_seconds ", "report_interval_seconds "].map(|name| {
            let mut lines = text.lines();
            let value = lines.find_map(|line| line.strip_prefix(name));
            value.expect("a figure").to_owned()
        })
    }

    #[test]
    fn without_an_acknowledgement_the_lag_counts_from_the_start() {
        let reports = DirectReportMetrics::default();
        assert_eq!(figures(&reports, 1000), ["NaN", "NaN"], "none are sent");
        reports.start(at(1000));
        assert_eq!(figures(&reports, 1130), ["130.0", "NaN"]);
        reports.acknowledged(at(1128), Duration::from_secs(10));
        assert_eq!(figures(&reports, 1130), ["2.0", "10.0"]);
        assert_eq!(figures(&reports, 1500), ["372.0", "10.0"]);
    }
}
