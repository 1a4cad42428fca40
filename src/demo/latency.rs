//! Latency of the important worker's requests.

use std::time::Duration;

use serde::Serialize;

use crate::engine::time::BootTime;

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its scheduled start.
    pub due: BootTime,
    /// From then until its end, including time in the queue.
    pub latency: Duration,
}

/// All requests of a run, in order of their scheduled start.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<Request>);

/// From one moment (included) to another (excluded).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Start.
    pub from: BootTime,
    /// End.
    pub to: BootTime,
}

/// The distribution of latency over a span, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Distribution {
    /// Requests that were due in the span.
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
    /// Adds requests.
    pub fn extend(&mut self, requests: impl Iterator<Item = Request>) {
        self.0.extend(requests);
    }

    /// The distribution over a span; `None` if no request was due in it.
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

    /// The 99th percentile in each whole second from `from` on, in milliseconds; `None` for a second without a request.
    pub fn p99_by_second(&self, from: BootTime, to: BootTime) -> Vec<Option<f64>> {
        let seconds = to.since(from).as_secs();
        (0..seconds)
            .map(|second| {
                let start = from + Duration::from_secs(second);
                let span = Span {
                    from: start,
                    to: start + Duration::from_secs(1),
                };
                self.over(span).map(|d| d.p99_ms)
            })
            .collect()
    }

    fn within(&self, span: Span) -> &[Request] {
        let start = self.0.partition_point(|request| request.due < span.from);
        let end = self.0.partition_point(|request| request.due < span.to);
        self.0.get(start..end).unwrap_or_default()
    }
}

/// The nearest-rank percentile of sorted values.
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

    /// Request number n is due at 10 n ms and takes n ms.
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
    fn percentiles_are_measured_values() {
        let all = Span {
            from: at(0),
            to: at(2000),
        };
        let latency = hundred().over(all).unwrap();
        assert_eq!(latency.requests, 100);
        assert!((latency.p50_ms - 50.0).abs() < 1e-9);
        assert!((latency.p99_ms - 99.0).abs() < 1e-9);
        assert!((latency.max_ms - 100.0).abs() < 1e-9);
    }

    #[test]
    fn a_request_counts_in_the_span_in_which_it_was_due() {
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
    fn a_span_without_requests_has_no_latency() {
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
