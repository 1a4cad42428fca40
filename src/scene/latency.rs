//! Latency of a pod's requests.

use std::time::Duration;

use serde::Serialize;

use crate::engine::time::BootTime;

/// One finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedRequest {
    /// Its scheduled arrival.
    pub due: BootTime,
    /// From then until its end, including time in the queue; of a request that was given up, until then.
    pub latency: Duration,
    /// Whether it was served.
    pub served: bool,
}

/// All requests of a run, in order of their scheduled arrival.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<TimedRequest>);

/// From one moment (included) to another (excluded).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeSpan {
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
    /// Those of them that were given up. They count in the percentiles with the time that they waited.
    pub unserved: usize,
    /// Length of the span in seconds.
    pub seconds: f64,
    /// Median.
    pub p50_ms: f64,
    /// 90th percentile.
    pub p90_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// 99.9th percentile.
    pub p999_ms: f64,
    /// The slowest.
    pub max_ms: f64,
}

impl Distribution {
    /// Requests that were served, per second.
    pub fn served_per_second(&self) -> f64 {
        (self.requests - self.unserved) as f64 / self.seconds
    }

    /// Percent of the requests that were given up.
    pub fn unserved_percent(&self) -> f64 {
        self.unserved as f64 * 100.0 / self.requests.max(1) as f64
    }
}

impl Latencies {
    /// Adds requests; several threads finish them, in any order.
    pub fn extend(&mut self, requests: impl Iterator<Item = TimedRequest>) {
        self.0.extend(requests);
        self.0.sort_by_key(|request| request.due);
    }

    /// The distribution over a span; `None` if no request was due in it.
    pub fn over(&self, span: TimeSpan) -> Option<Distribution> {
        let requests = self.within(span);
        let mut sorted: Vec<Duration> = requests.iter().map(|request| request.latency).collect();
        sorted.sort_unstable();
        Some(Distribution {
            requests: sorted.len(),
            unserved: requests.iter().filter(|request| !request.served).count(),
            seconds: span.to.since(span.from).as_secs_f64(),
            p50_ms: millis(percentile(&sorted, 500)?),
            p90_ms: millis(percentile(&sorted, 900)?),
            p99_ms: millis(percentile(&sorted, 990)?),
            p999_ms: millis(percentile(&sorted, 999)?),
            max_ms: millis(*sorted.last()?),
        })
    }

    /// The 99th percentile in each whole second from `from` on, in milliseconds; `None` for a second without a request.
    pub fn p99_by_second(&self, from: BootTime, to: BootTime) -> Vec<Option<f64>> {
        let seconds = to.since(from).as_secs();
        (0..seconds)
            .map(|second| {
                let start = from + Duration::from_secs(second);
                let span = TimeSpan {
                    from: start,
                    to: start + Duration::from_secs(1),
                };
                self.over(span).map(|d| d.p99_ms)
            })
            .collect()
    }

    /// When the p99 of a whole second is first at or below `ms` again, in `span`: the start of that second.
    pub fn recovered(&self, span: TimeSpan, ms: f64) -> Option<BootTime> {
        const STEP: Duration = Duration::from_millis(100);
        let mut second = TimeSpan {
            from: span.from,
            to: span.from + Duration::from_secs(1),
        };
        while second.to <= span.to {
            if self.over(second).is_some_and(|it| it.p99_ms <= ms) {
                return Some(second.from);
            }
            second.from = second.from + STEP;
            second.to = second.to + STEP;
        }
        None
    }

    fn within(&self, span: TimeSpan) -> &[TimedRequest] {
        let start = self.0.partition_point(|request| request.due < span.from);
        let end = self.0.partition_point(|request| request.due < span.to);
        self.0.get(start..end).unwrap_or_default()
    }
}

/// The nearest-rank percentile of sorted values.
fn percentile(sorted: &[Duration], per_mille: usize) -> Option<Duration> {
    let rank = (sorted.len() * per_mille).div_ceil(1000);
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
                .map(|n| TimedRequest {
                    due: at(10 * n),
                    latency: Duration::from_millis(n),
                    served: n <= 90,
                })
                .collect(),
        )
    }

    #[test]
    fn percentiles_are_measured_values() {
        let all = TimeSpan {
            from: at(0),
            to: at(2000),
        };
        let latency = hundred().over(all).unwrap();
        assert_eq!(latency.requests, 100);
        assert_eq!(latency.unserved, 10);
        assert!((latency.served_per_second() - 45.0).abs() < 1e-9);
        assert!((latency.p50_ms - 50.0).abs() < 1e-9);
        assert!((latency.p99_ms - 99.0).abs() < 1e-9);
        assert!((latency.max_ms - 100.0).abs() < 1e-9);
    }

    #[test]
    fn a_request_counts_in_the_span_in_which_it_was_due() {
        let mut latencies = hundred();
        latencies.extend(std::iter::once(TimedRequest {
            due: at(1500),
            latency: Duration::from_mins(1),
            served: true,
        }));
        let early = TimeSpan {
            from: at(0),
            to: at(1500),
        };
        assert!((latencies.over(early).unwrap().max_ms - 100.0).abs() < 1e-9);
        let late = TimeSpan {
            from: at(1500),
            to: at(1501),
        };
        assert!((latencies.over(late).unwrap().p99_ms - 60_000.0).abs() < 1e-6);
    }

    #[test]
    fn a_span_without_requests_has_no_latency() {
        let empty = TimeSpan {
            from: at(5000),
            to: at(6000),
        };
        assert_eq!(hundred().over(empty), None);
        let seconds = hundred().p99_by_second(at(0), at(3000));
        assert_eq!(seconds.len(), 3);
        assert_eq!(seconds[2], None);
    }

    #[test]
    fn requests_are_sorted_by_their_arrival() {
        let mut latencies = Latencies::default();
        let request = |due| TimedRequest {
            due: at(due),
            latency: Duration::from_millis(1),
            served: true,
        };
        latencies.extend([request(20), request(10)].into_iter());
        latencies.extend(std::iter::once(request(5)));
        let early = TimeSpan {
            from: at(0),
            to: at(15),
        };
        assert_eq!(latencies.over(early).unwrap().requests, 2);
    }

    #[test]
    fn recovery_is_the_start_of_the_first_good_second() {
        let mut latencies = Latencies::default();
        latencies.extend((0..400).map(|n| TimedRequest {
            due: at(n * 10),
            latency: Duration::from_millis(if n < 150 { 900 } else { 20 }),
            served: true,
        }));
        let span = TimeSpan {
            from: at(0),
            to: at(4000),
        };
        assert_eq!(latencies.recovered(span, 30.0), Some(at(1500)));
        assert_eq!(latencies.recovered(span, 10.0), None);
    }
}
