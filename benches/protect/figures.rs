//! What was measured.

use std::time::Duration;

use plimsoll::scene::latency::{Distribution, Latencies, TimeSpan};

use crate::ways::Way;

/// The important pods have recovered at this multiple of the p99 that they have alone.
const RECOVERED: f64 = 1.5;

/// Of one round: its second half, so that every way has acted.
pub struct Figures {
    pub latency: Distribution,
    /// CPU use in millicores.
    pub node: f64,
    pub important: f64,
    pub batch: f64,
    /// Of all processes but those of the scene, over the whole round.
    pub others: f64,
    /// All requests of the round, and from the start of the batch pods to the end; `None` where the client reports no single
    /// requests.
    pub round: Option<(Latencies, TimeSpan)>,
}

/// When the important pods had recovered from the batch pods.
pub enum Recovery {
    /// There are no single requests.
    NotMeasured,
    /// Not in half of the rounds.
    Not,
    /// After so many seconds. Zero: they were never harmed.
    After(f64),
}

impl Figures {
    /// For the log.
    pub fn line(&self) -> String {
        format!(
            "p50 {:.2} p99 {:.2} ms, given up {:.1} %, important {:.0}m, batch {:.0}m, node {:.0}m",
            self.latency.p50_ms,
            self.latency.p99_ms,
            self.latency.unserved_percent(),
            self.important,
            self.batch,
            self.node
        )
    }

    /// From the start of the batch pods until the p99 of a second is at or below `ms` again; `None`: not in this round. Zero:
    /// it never was above.
    fn recovered_after(&self, ms: f64) -> Option<Duration> {
        const SECOND: Duration = Duration::from_secs(1);
        let (requests, round) = self.round.as_ref()?;
        let mut from = round.from;
        let harmed = loop {
            let second = TimeSpan {
                from,
                to: from + SECOND,
            };
            if second.to > round.to {
                return Some(Duration::ZERO);
            }
            if requests.over(second).is_some_and(|it| it.p99_ms > ms) {
                break from;
            }
            from = from + SECOND / 10;
        };
        let rest = TimeSpan {
            from: harmed,
            to: round.to,
        };
        Some(requests.recovered(rest, ms)?.since(round.from))
    }
}

/// All rounds of a scene.
pub struct SceneFigures {
    pub name: &'static str,
    pub about: String,
    /// The bar for the p99 against that alone.
    pub max_ratio: f64,
    /// The ways that must meet the bars; without any, the best of Plimsoll's.
    pub must_hold: Vec<Way>,
    /// Millicores of the machine.
    pub capacity: f64,
    /// Millicores that the batch pods would use.
    pub batch_wants: f64,
    pub ways: Vec<(Way, Vec<Figures>)>,
}

/// One way over all rounds: medians.
pub struct Summary {
    pub way: Way,
    pub p50: f64,
    pub p99: f64,
    /// The lowest and the highest of a round.
    pub p99_range: (f64, f64),
    /// p99 against that alone.
    pub ratio: f64,
    pub p999: f64,
    pub served: f64,
    pub unserved_percent: f64,
    pub batch: f64,
    /// Batch's CPU in percent of what it could have: the CPU that the important pods and others leave, or what it wants.
    pub of_left_percent: f64,
    /// Busy CPU in percent of the machine.
    pub utilisation: f64,
    pub recovery: Recovery,
}

impl SceneFigures {
    pub fn summaries(&self) -> Vec<Summary> {
        let alone = self.ways.iter().find(|(way, _)| *way == Way::Alone);
        let alone_p99 = median(alone.unwrap().1.iter().map(|it| it.latency.p99_ms));
        let ways = self.ways.iter();
        ways.map(|(way, rounds)| self.summary(*way, rounds, alone_p99))
            .collect()
    }

    fn summary(&self, way: Way, rounds: &[Figures], alone_p99: f64) -> Summary {
        let of = |value: &dyn Fn(&Figures) -> f64| median(rounds.iter().map(value));
        let p99 = |it: &Figures| it.latency.p99_ms;
        let left = |it: &Figures| {
            let others = (it.node - it.important - it.batch).max(0.0);
            (self.capacity - it.important - others).min(self.batch_wants)
        };
        let recoveries: Vec<f64> = rounds
            .iter()
            .filter_map(|it| it.recovered_after(alone_p99 * RECOVERED))
            .map(|after| after.as_secs_f64())
            .collect();
        Summary {
            way,
            p50: of(&|it| it.latency.p50_ms),
            p99: of(&p99),
            p99_range: (
                rounds.iter().map(p99).fold(f64::INFINITY, f64::min),
                rounds.iter().map(p99).fold(0.0, f64::max),
            ),
            ratio: of(&p99) / alone_p99,
            p999: of(&|it| it.latency.p999_ms),
            served: of(&|it| it.latency.served_per_second()),
            unserved_percent: of(&|it| it.latency.unserved_percent()),
            batch: of(&|it| it.batch),
            of_left_percent: of(&|it| it.batch * 100.0 / left(it).max(1.0)),
            utilisation: of(&|it| it.node * 100.0 / self.capacity),
            recovery: if rounds.iter().all(|it| it.round.is_none()) {
                Recovery::NotMeasured
            } else if recoveries.len() * 2 < rounds.len() {
                Recovery::Not
            } else {
                Recovery::After(median(recoveries.into_iter()))
            },
        }
    }
}

/// Of at least one value.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.collect();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[middle]
    } else {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    }
}
