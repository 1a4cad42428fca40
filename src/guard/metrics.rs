//! What Prometheus is told of evictions.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::budget::Scope;
use super::ledger::{Ledger, Settled, Stage};
use crate::engine::time::BootTime;
use crate::serve::with_one_series;

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct ResultLabels {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Default, EncodeLabelSet)]
struct StateLabels {
    state: &'static str,
}

/// The figures; a clone is the same figures.
#[derive(Clone, Debug, Default)]
pub struct GuardMetrics {
    answers: Family<ResultLabels, Counter>,
    settled: Family<ResultLabels, Counter>,
    stages: Family<StateLabels, Gauge>,
    fleet: Gauge,
    unrecorded: Counter,
    guards: Gauge<f64, AtomicU64>,
}

impl GuardMetrics {
    /// Makes them known, and counts from 0: a counter that appears with its first count has not grown, to Prometheus.
    pub fn register(&self, registry: &mut Registry) {
        for result in Scope::ALL.map(Scope::name).into_iter().chain(["allowed"]) {
            drop(self.answers.get_or_create(&ResultLabels { result }));
        }
        for result in ["confirmed", "returned"] {
            drop(self.settled.get_or_create(&ResultLabels { result }));
        }
        self.guards(None);
        let help = "Answers to whether an agent may evict a pod: allowed, again (as before), dry_run, ending (the pod already is), or why not: the budget that is spent, or what is wrong with it";
        registry.register("eviction_answers", help, self.answers.clone());
        let help = "Evictions that were allowed, by what came of them: confirmed, or returned to the budgets";
        registry.register("eviction_settled", help, self.settled.clone());
        let help =
            "Evictions that count, by how far they are: reserved, ending or ended; of the leader";
        registry.register("evictions", help, self.stages.clone());
        let help = "Evictions that count for the fleet's budget; of the leader";
        registry.register("eviction_fleet_used", help, self.fleet.clone());
        let help = "Times the record of evictions could not be written or read: nothing is allowed meanwhile";
        registry.register("eviction_record_errors", help, self.unrecorded.clone());
        let help = "1 while API servers are told to ask about evictions by agents, 0 while they can't be told: agents then evict \
                    unguarded, or not at all; NaN on a standby, and without a guard";
        registry.register("eviction_guarded", help, self.guards.clone());
    }

    /// One series of each family: for the documentation.
    pub fn example(&self) {
        with_one_series(&self.stages);
    }

    /// Whether API servers know whom to ask; `None`: it is not ours to tell them.
    pub fn guards(&self, guards: Option<bool>) {
        let value = guards.map_or(f64::NAN, |guards| f64::from(u8::from(guards)));
        self.guards.set(value);
    }

    pub(super) fn answered(&self, result: &'static str) {
        self.answers.get_or_create(&ResultLabels { result }).inc();
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

    /// What counts; `None`: this replica does not count.
    pub(super) fn counts(&self, ledger: Option<&Ledger>, now: BootTime) {
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
                Stage::Reserved => "reserved",
                Stage::Ending => "ending",
                Stage::Ended => "ended",
            };
            set(&self.stages.get_or_create(&StateLabels { state }), count);
        }
        set(&self.fleet, ledger.fleet(now));
    }
}
