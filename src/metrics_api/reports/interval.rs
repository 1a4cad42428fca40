//! The interval at which agents are asked to report, by the load of the listener. Pure.

use std::time::Duration;

use crate::crd::report::{INTERVAL, MAX_INTERVAL};
use crate::engine::time::BootTime;

/// Target CPU usage in cores. Above it, the interval grows.
const TARGET: f64 = 0.5;
/// Usage from which early reports are refused.
const OVERLOAD: f64 = 0.9;
/// Age of the oldest unprocessed report that shows that the rest of the controller lags behind.
const MAX_BACKLOG: Duration = Duration::from_secs(5);
/// Minimum time between two reports of a node. Agents send at most one per second, and the network may bring two
/// closer together.
const MIN_INTERVAL: Duration = Duration::from_millis(200);
/// The shortest interval of writes of a node's load label.
const MIN_LABEL_INTERVAL: Duration = Duration::from_secs(5);
/// All nodes together write at most so many labels a second: with many nodes the interval is longer.
const MAX_LABEL_WRITES: u32 = 20;

/// Shorter samples would show a busy thread that only reads its clock.
const MIN_SAMPLE: Duration = Duration::from_secs(1);

/// Measures the CPU usage of a thread between two samples.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    /// The last sample: time, and CPU time used until then.
    last: Option<(BootTime, Duration)>,
}

impl Meter {
    /// Cores used since the last sample: 0 to 1. `None`: there was none, or it is less than a second old and is kept.
    pub fn busy(&mut self, now: BootTime, used: Duration) -> Option<f64> {
        let Some((then, before)) = self.last else {
            self.last = Some((now, used));
            return None;
        };
        let passed = now.since(then);
        if passed < MIN_SAMPLE {
            return None;
        }
        self.last = Some((now, used));
        let used = used.saturating_sub(before);
        Some((used.as_secs_f64() / passed.as_secs_f64()).min(1.0))
    }
}

/// Load over a period.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ListenerLoad {
    /// Cores used by the listener's thread: 0 to 1.
    pub busy: f64,
    /// Age of the oldest unprocessed report.
    pub backlog: Duration,
}

/// Limits for agents.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReportLimits {
    /// Requested report interval: 10 to 60 s.
    pub interval: Duration,
    /// Minimum time between two accepted reports of a node.
    pub min_interval: Duration,
    /// Minimum average interval between writes of a node's load label.
    pub label_interval: Duration,
}

impl Default for ReportLimits {
    fn default() -> Self {
        Self {
            interval: INTERVAL,
            min_interval: MIN_INTERVAL,
            label_interval: MIN_LABEL_INTERVAL,
        }
    }
}

impl ReportLimits {
    /// The limits for this load, which was measured at the current limits. The interval moves to where the load would meet
    /// its target, in whole seconds and by at most half of itself, between 10 s and 60 s. Under overload, reports are
    /// accepted only after two thirds of it.
    #[must_use]
    pub fn at(self, load: ListenerLoad) -> Self {
        let behind = load.backlog >= MAX_BACKLOG;
        let wanted = load.busy / TARGET;
        let factor = if behind { wanted.max(1.5) } else { wanted };
        let interval = self.interval.mul_f64(factor.clamp(0.5, 1.5));
        let interval = Duration::from_secs_f64(interval.as_secs_f64().ceil());
        let interval = interval.clamp(INTERVAL, MAX_INTERVAL);
        let overload = load.busy >= OVERLOAD || behind;
        Self {
            interval,
            min_interval: if overload {
                interval * 2 / 3
            } else {
                MIN_INTERVAL
            },
            label_interval: self.label_interval,
        }
    }

    /// The limits for this number of reporting nodes.
    #[must_use]
    pub fn for_nodes(self, nodes: usize) -> Self {
        let nodes = u32::try_from(nodes).unwrap_or(u32::MAX);
        let seconds = u64::from(nodes.div_ceil(MAX_LABEL_WRITES));
        Self {
            label_interval: Duration::from_secs(seconds).max(MIN_LABEL_INTERVAL),
            ..self
        }
    }

    /// Seconds after which a refused report may be sent again.
    pub fn retry_after(&self) -> u32 {
        u32::try_from(self.min_interval.as_secs())
            .unwrap_or(u32::MAX)
            .max(1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn load(busy: f64) -> ListenerLoad {
        ListenerLoad {
            busy,
            backlog: Duration::ZERO,
        }
    }

    /// The limits for a fleet that uses `cost` cores at the normal interval.
    fn settled(cost: f64) -> ReportLimits {
        (0..40).fold(ReportLimits::default(), |limits, _| {
            let busy = cost * INTERVAL.as_secs_f64() / limits.interval.as_secs_f64();
            limits.at(load(busy.min(1.0)))
        })
    }

    #[test]
    fn a_burst_of_samples_after_a_pause_shows_no_load() {
        let mut meter = Meter::default();
        let mut look = |micros, used| {
            let now = BootTime::default() + Duration::from_micros(micros);
            meter.busy(now, Duration::from_micros(used))
        };
        let second = 1_000_000;
        assert_eq!(look(5 * second, 700), None, "there was none before");
        assert_eq!(look(7 * second, 700 + second), Some(0.5));
        // The process was suspended for half a minute; each sample takes 20 us and nothing else runs.
        let after = 37 * second;
        let idle = look(after, 800 + second).unwrap();
        assert!(idle < 0.001, "{idle}");
        for late in 1..15 {
            assert_eq!(look(after + 20 * late, 800 + second + 20 * late), None);
        }
        let next = look(after + 2 * second, 1000 + second).unwrap();
        assert!(next < 0.001, "{next}");
    }

    #[test]
    fn a_busy_thread_uses_at_most_one_core() {
        let mut meter = Meter::default();
        let at = |seconds| BootTime::default() + Duration::from_secs(seconds);
        meter.busy(at(0), Duration::ZERO);
        let busy = meter.busy(at(2), Duration::from_millis(2001));
        assert_eq!(busy, Some(1.0));
    }

    #[test]
    fn a_fleet_within_the_target_reports_every_10_s() {
        for cost in [0.0, 0.1, 0.5] {
            assert_eq!(settled(cost), ReportLimits::default(), "{cost}");
        }
    }

    #[test]
    fn an_expensive_fleet_reports_less_often() {
        let ReportLimits {
            interval,
            min_interval,
            ..
        } = settled(1.0);
        assert!((20..=22).contains(&interval.as_secs()), "{interval:?}");
        assert_eq!(min_interval, MIN_INTERVAL);
        assert_eq!(settled(100.0).interval, MAX_INTERVAL);
        assert_eq!(settled(100.0).min_interval, MAX_INTERVAL * 2 / 3);
    }

    #[test]
    fn all_nodes_together_write_at_most_20_labels_a_second() {
        let seconds = |nodes| {
            ReportLimits::default()
                .for_nodes(nodes)
                .label_interval
                .as_secs()
        };
        assert_eq!([0, 100, 101, 1000, 5000].map(seconds), [5, 5, 6, 50, 250]);
    }

    #[test]
    fn the_interval_recovers_after_overload() {
        let long = settled(100.0);
        let back = (0..10).fold(long, |limits, _| limits.at(load(0.1)));
        assert_eq!(back, ReportLimits::default());
    }

    #[test]
    fn a_backlog_lengthens_the_interval() {
        let behind = ListenerLoad {
            busy: 0.0,
            backlog: MAX_BACKLOG,
        };
        let limits = ReportLimits::default().at(behind);
        assert_eq!(limits.interval, Duration::from_secs(15));
        assert_eq!(limits.retry_after(), 10);
    }

    proptest! {
        #[test]
        fn more_load_never_shortens_the_interval(
            seconds in 10_u64..=60, busy in 0.0_f64..2.0, more in 0.0_f64..1.0, backlog in 0_u64..60,
        ) {
            let limits = ReportLimits { interval: Duration::from_secs(seconds), ..ReportLimits::default() };
            let backlog = Duration::from_secs(backlog);
            let (less, more) = (ListenerLoad { busy, backlog }, ListenerLoad { busy: busy + more, backlog });
            let (less, more) = (limits.at(less), limits.at(more));
            prop_assert!(less.interval <= more.interval && less.min_interval <= more.min_interval);
            prop_assert!((INTERVAL..=MAX_INTERVAL).contains(&more.interval));
            prop_assert!(more.min_interval < more.interval);
        }
    }
}
