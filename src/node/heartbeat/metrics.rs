//! What the agent tells Prometheus of its heartbeat.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::engine::time::BootTime;
use crate::serve::{ResultLabels, with_one_series};

/// The figures; a clone is the same figures.
#[derive(Clone, Debug, Default)]
pub struct Heartbeats {
    results: Family<ResultLabels, Counter>,
    age: Gauge<f64, AtomicU64>,
    interval: Gauge<f64, AtomicU64>,
    stalled: Gauge,
    /// Nanoseconds on the boot clock; 0: never.
    renewed: Arc<AtomicU64>,
}

impl Heartbeats {
    /// Makes them known.
    pub fn register(&self, registry: &mut Registry) {
        let help = "Renewals of the agent's Lease: renewed or created; missing, conflict, throttled, timeout or failed, \
                    each of which is tried again";
        registry.register("heartbeats", help, self.results.clone());
        let help = "Time since the agent's Lease was last renewed";
        registry.register_with_unit("heartbeat_age", help, Unit::Seconds, self.age.clone());
        let help =
            "How often the Lease is renewed: seldom while reports reach the controller directly";
        let interval = self.interval.clone();
        registry.register_with_unit("heartbeat_interval", help, Unit::Seconds, interval);
        let help = "1 while the Lease is not renewed because the sampling loop stands still";
        registry.register("heartbeat_stalled", help, self.stalled.clone());
    }

    /// One series of each, for their labels.
    pub fn example(&self) {
        with_one_series(&self.results);
    }

    /// A call for a renewal came to its end.
    pub(super) fn count(&self, result: &'static str) {
        self.results.get_or_create(&ResultLabels { result }).inc();
    }

    pub(super) fn renewed(&self, now: BootTime) {
        self.renewed.store(now.as_nanos(), Ordering::Relaxed);
    }

    pub(super) fn every(&self, interval: Duration) {
        self.interval.set(interval.as_secs_f64());
    }

    pub(super) fn stalled(&self, stalled: bool) {
        self.stalled.set(i64::from(stalled));
    }

    /// Brings the age up to date.
    pub fn refresh(&self, now: BootTime) {
        let renewed = BootTime::from_nanos(self.renewed.load(Ordering::Relaxed));
        let known = renewed != BootTime::default();
        let age = known.then(|| now.since(renewed).as_secs_f64());
        self.age.set(age.unwrap_or(f64::NAN));
    }
}
