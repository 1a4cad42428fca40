//! Prometheus metrics about evictions.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::budget::BudgetScope;
use super::ledger::{EvictionLedger, EvictionStage, Settled};
use crate::engine::time::BootTime;
use crate::serve::{ResultLabels, StateLabels, with_one_series};

/// The metrics. Clones share the same values.
#[derive(Clone, Debug)]
pub struct EvictionMetrics {
    answers: Family<ResultLabels, Counter>,
    settled: Family<ResultLabels, Counter>,
    stages: Family<StateLabels, Gauge>,
    fleet: Gauge,
    unrecorded: Counter,
    seconds: Histogram,
}

impl Default for EvictionMetrics {
    fn default() -> Self {
        Self {
            answers: Family::default(),
            settled: Family::default(),
            stages: Family::default(),
            fleet: Gauge::default(),
            unrecorded: Counter::default(),
            seconds: Histogram::new(exponential_buckets(1e-3, 2.0, 14)),
        }
    }
}

impl EvictionMetrics {
    /// Registers the metrics. Counters start at 0: Prometheus misses the first increment of a series that appears with
    /// it.
    pub fn register(&self, registry: &mut Registry) {
        for result in BudgetScope::ALL
            .map(BudgetScope::name)
            .into_iter()
            .chain(["accepted"])
        {
            drop(self.answers.get_or_create(&ResultLabels { result }));
        }
        for result in ["confirmed", "returned"] {
            drop(self.settled.get_or_create(&ResultLabels { result }));
        }
        let help = "Answers to eviction requests of agents: accepted, another answer of the API server, or why it was not asked: the budget that is spent, or what is wrong with the request";
        registry.register("eviction_answers", help, self.answers.clone());
        let help = "Time from an agent's request for an eviction to its answer";
        let seconds = self.seconds.clone();
        registry.register_with_unit("eviction_answer", help, Unit::Seconds, seconds);
        let help = "Allowed evictions by outcome: confirmed, or returned to the budgets";
        registry.register("eviction_settled", help, self.settled.clone());
        let help = "Evictions that count against the budgets, by stage: reserved, ending or ended; leader only";
        registry.register("evictions", help, self.stages.clone());
        let help = "Evictions that count against the fleet's budget; leader only";
        registry.register("eviction_fleet_used", help, self.fleet.clone());
        let help =
            "Failed reads or writes of the eviction record: no eviction is allowed meanwhile";
        registry.register("eviction_record_errors", help, self.unrecorded.clone());
    }

    /// Creates one series of each family, for the documentation.
    pub fn example(&self) {
        with_one_series(&self.stages);
    }

    pub(super) fn answered(&self, result: &'static str, after: Duration) {
        self.answers.get_or_create(&ResultLabels { result }).inc();
        self.seconds.observe(after.as_secs_f64());
    }

    pub(super) fn settled(&self, settled: Settled) {
        let result = match settled {
            Settled::Confirmed => "confirmed",
            Settled::Returned => "returned",
        };
        self.settled.get_or_create(&ResultLabels { result }).inc();
    }

    pub(super) fn unrecorded(&self) {
        self.unrecorded.inc();
    }

    /// Sets the gauges from the ledger. `None`: this replica does not lead.
    pub(super) fn counts(&self, ledger: Option<&EvictionLedger>, now: BootTime) {
        let Some(ledger) = ledger else {
            self.stages.clear();
            self.fleet.set(0);
            return;
        };
        let set = |gauge: &Gauge, count: usize| {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        };
        for (stage, count) in ledger.stages() {
            let state = match stage {
                EvictionStage::Reserved => "reserved",
                EvictionStage::Ending => "ending",
                EvictionStage::Ended => "ended",
            };
            set(&self.stages.get_or_create(&StateLabels { state }), count);
        }
        set(&self.fleet, ledger.fleet(now));
    }
}
