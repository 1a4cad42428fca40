//! Prometheus metrics of the heartbeat.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::engine::time::BootTime;
use crate::serve::{ResultLabels, with_one_series};

/// The metrics; clones share their values.
#[derive(Clone, Debug, Default)]
pub struct Heartbeats {
    results: Family<ResultLabels, Counter>,
    age: Gauge<f64, AtomicU64>,
    interval: Gauge<f64, AtomicU64>,
    stuck: Gauge,
    /// Nanoseconds on the boot clock; 0: never.
    renewed: Arc<AtomicU64>,
}

impl Heartbeats {
    /// Registers the metrics.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Renewals of the agent's Lease: renewed or created; missing, conflict, throttled, timeout or failed, \
                    each of which is retried";
        registry.register("heartbeats", help, self.results.clone());
        let help = "Time since the agent's Lease was last renewed";
        registry.register_with_unit("heartbeat_age", help, Unit::Seconds, self.age.clone());
        let help = "Interval of Lease renewals: longer while direct reports are acknowledged";
        let interval = self.interval.clone();
        registry.register_with_unit("heartbeat_interval", help, Unit::Seconds, interval);
        let help = "1 while the Lease is not renewed because the sampling loop is stuck";
        registry.register("heartbeat_stalled", help, self.stuck.clone());
    }

    /// One series of each, for the documentation.
    pub fn example(&self) {
        with_one_series(&self.results);
    }

    /// Counts the result of a call.
    pub(super) fn count(&self, result: &'static str) {
        self.results.get_or_create(&ResultLabels { result }).inc();
    }

    pub(super) fn renewed(&self, now: BootTime) {
        self.renewed.store(now.as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn set_interval(&self, interval: Duration) {
        self.interval.set(interval.as_secs_f64());
    }

    pub(super) fn stuck(&self, stuck: bool) {
        self.stuck.set(i64::from(stuck));
    }

    /// Updates the age.
    pub fn refresh(&self, now: BootTime) {
        let renewed = BootTime::from_nanos(self.renewed.load(Ordering::Relaxed));
        let known = renewed != BootTime::default();
        let age = known.then(|| now.since(renewed).as_secs_f64());
        self.age.set(age.unwrap_or(f64::NAN));
    }
}
