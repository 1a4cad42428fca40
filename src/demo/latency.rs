//! What the important worker's requests took.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::time::BootTime;

/// One request that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// When it was due, by schedule.
    pub due: BootTime,
    /// From then until its end: time spent in the queue counts.
    pub latency: Duration,
}

/// All requests of a run, in the order in which they fell due.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<Request>);

/// From one moment (included) to another (excluded).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Begin.
    pub from: BootTime,
    /// End.
    pub to: BootTime,
}

/// The distribution of latency over a span, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Distribution {
    /// Requests that fell due in the span.
    pub requests: usize,
    /// Length of the span in seconds.
    pub seconds: f64,
    /// Median.
    pub p50_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// The slowest.
    pub max_ms: f64,
}

impl Latencies {
    /// Takes more requests.
    pub fn extend(&mut self, requests: impl Iterator<Item = Request>) {
        self.0.extend(requests);
    }

    /// The distribution over a span; `None` where no request fell due in it.
    pub fn over(&self, span: Span) -> Option<Distribution> {
        let mut sorted: Vec<Duration> = self
            .within(span)
            .iter()
            .map(|request| request.latency)
            .collect();
        sorted.sort_unstable();
        Some(Distribution {
            requests: sorted.len(),
            seconds: span.to.since(span.from).as_secs_f64(),
            p50_ms: millis(percentile(&sorted, 50)?),
            p90_ms: millis(percentile(&sorted, 90)?),
            p99_ms: millis(percentile(&sorted, 99)?),
            max_ms: millis(*sorted.last()?),
        })
    }

    /// The 99th percentile of each whole second from `from` on, in milliseconds; `None` for one without a request.
    pub fn p99_by_second(&self, from: BootTime, to: BootTime) -> Vec<Option<f64>> {
        let seconds = to.since(from).as_secs();
        (0..seconds)
            .map(|second| {
                let begin = from + Duration::from_secs(second);
                let span = Span {
                    from: begin,
                    to: begin + Duration::from_secs(1),
                };
                self.over(span).map(|d| d.p99_ms)
            })
            .collect()
    }

    fn within(&self, span: Span) -> &[Request] {
        let begin = self.0.partition_point(|request| request.due < span.from);
        let end = self.0.partition_point(|request| request.due < span.to);
        self.0.get(begin..end).unwrap_or_default()
    }
}

/// The nearest-rank percentile of sorted values: the smallest value that at least `percent` percent are not above.
fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.checked_sub(1)?).copied()
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> BootTime {
        BootTime::from_nanos(millis * 1_000_000)
    }

    /// Request number n falls due at 10 n ms and takes n ms.
    fn hundred() -> Latencies {
        Latencies(
            (1..=100)
                .map(|n| Request {
                    due: at(10 * n),
                    latency: Duration::from_millis(n),
                })
                .collect(),
        )
    }

    #[test]
    fn percentiles_are_values_that_occurred() {
        let all = Span {
            from: at(0),
            to: at(2000),
        };
        let seen = hundred().over(all).unwrap();
        assert_eq!(seen.requests, 100);
        assert!((seen.p50_ms - 50.0).abs() < 1e-9);
        assert!((seen.p99_ms - 99.0).abs() < 1e-9);
        assert!((seen.max_ms - 100.0).abs() < 1e-9);
    }

    #[test]
    fn a_request_counts_in_the_span_in_which_it_fell_due_however_late_it_ended() {
        let mut latencies = hundred();
        latencies.extend(std::iter::once(Request {
            due: at(1500),
            latency: Duration::from_mins(1),
        }));
        let early = Span {
            from: at(0),
            to: at(1500),
        };
        assert!((latencies.over(early).unwrap().max_ms - 100.0).abs() < 1e-9);
        let late = Span {
            from: at(1500),
            to: at(1501),
        };
        assert!((latencies.over(late).unwrap().p99_ms - 60_000.0).abs() < 1e-6);
    }

    #[test]
    fn a_span_without_a_request_has_no_latency_rather_than_zero() {
        let empty = Span {
            from: at(5000),
            to: at(6000),
        };
        assert_eq!(hundred().over(empty), None);
        let seconds = hundred().p99_by_second(at(0), at(3000));
        assert_eq!(seconds.len(), 3);
        assert_eq!(seconds[2], None);
    }
}
