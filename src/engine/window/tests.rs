//! Checks the windows against the complete history.

use proptest::prelude::*;

use super::*;
use crate::engine::metric::{Resource, Windowed};
use crate::engine::plan::Unknown;
use crate::engine::sample::{CpuTimes, NodeMemory, Sample};
use crate::engine::units::Bytes;

const MINUTE: u64 = 60;
const HOUR: u64 = 3600;
/// Rounding error of a value.
const ROUNDING: f64 = 0.0011;

fn at(seconds: f64) -> BootTime {
    BootTime::default() + Duration::from_secs_f64(seconds)
}

/// A history with one value per second; `None` is a gap.
fn series(seconds: u64, value: impl Fn(u64) -> Option<f64>) -> Series {
    let mut series = Series::default();
    for second in 0..seconds {
        let (from, to) = (at(second as f64), at((second + 1) as f64));
        match value(second) {
            Some(value) => series.add(from, to, value),
            None => series.advance(to),
        }
    }
    series
}

fn near(found: Option<f64>, expected: f64, error: f64) {
    let found = found.expect("a figure");
    assert!((found - expected).abs() <= error, "{found}, not {expected}");
}

/// The complete history, and the expected values computed from it.
#[derive(Default)]
struct Reference {
    /// Nanoseconds and percent.
    intervals: Vec<(u64, u64, f64)>,
    now: u64,
}

impl Reference {
    /// Mean and covered nanoseconds of each closed slot.
    fn slots(&self) -> Vec<Option<f64>> {
        let count = usize::try_from(self.now / SLOT_NANOS).unwrap();
        let mut slots = vec![(0.0, 0_u64); count + 1];
        for (from, to, value) in &self.intervals {
            let mut at = *from;
            while at < *to {
                let slot = at / SLOT_NANOS;
                let end = (*to).min((slot + 1) * SLOT_NANOS);
                let entry = &mut slots[usize::try_from(slot).unwrap()];
                entry.0 += value * (end - at) as f64;
                entry.1 += end - at;
                at = end;
            }
        }
        slots.truncate(count);
        let mean = |(area, covered): (f64, u64)| {
            (covered * 2 >= SLOT_NANOS).then(|| area / covered as f64)
        };
        slots.into_iter().map(mean).collect()
    }

    fn check(&self, series: &Series) {
        let slots = self.slots();
        for span in Span::ALL {
            let first = slots.len().saturating_sub(span.slots());
            let mut known: Vec<f64> = slots[first..].iter().copied().flatten().collect();
            known.sort_by(f64::total_cmp);
            let coverage = known.len() as f64 / span.slots() as f64;
            let spread = series.spread(span);
            assert!((spread.coverage - coverage).abs() < 1e-9, "{span:?}");
            assert_eq!(spread.value.is_some(), coverage >= MIN_COVERAGE);
            let average = series.average(span);
            assert_eq!(spread.value.map(|f| f.average), average.value);
            let Some(found) = spread.value else {
                continue;
            };
            let mean = known.iter().sum::<f64>() / known.len() as f64;
            near(Some(found.average), mean, ROUNDING);
            for (found, share) in [
                (found.p50, 0.5),
                (found.p90, 0.9),
                (found.p95, 0.95),
                (found.p99, 0.99),
                (found.max, 1.0),
            ] {
                // The smallest value that at least this share does not exceed.
                let enough = |value: &&f64| {
                    let below = known.iter().filter(|known| known <= value).count();
                    below as f64 >= share * known.len() as f64 - 1e-9
                };
                near(Some(found), *known.iter().find(enough).unwrap(), ROUNDING);
            }
        }
        Self::check_peak(series, &slots, PeakSpan::Hour, HOUR, MINUTE);
        Self::check_peak(series, &slots, PeakSpan::Day, 24 * HOUR, 5 * MINUTE);
    }

    /// A peak within the window is included, and one that is a bucket older is not.
    fn check_peak(
        series: &Series,
        slots: &[Option<f64>],
        span: PeakSpan,
        seconds: u64,
        bucket: u64,
    ) {
        let averages: Vec<Option<f64>> = (1..=slots.len())
            .map(|end| {
                let last = &slots[end.saturating_sub(100)..end];
                let known: Vec<f64> = last.iter().copied().flatten().collect();
                let mean = known.iter().sum::<f64>() / known.len() as f64;
                (known.len() >= 50).then_some(mean)
            })
            .collect();
        let highest = |seconds: u64| {
            let first = usize::try_from(seconds / SLOT.as_secs()).unwrap();
            let last = &averages[averages.len().saturating_sub(first)..];
            last.iter().copied().flatten().max_by(f64::total_cmp)
        };
        let peak = series.peak(span);
        let (min, max) = (highest(seconds), highest(seconds + bucket));
        if let Some(found) = peak.value {
            assert!(min.is_none_or(|min| found >= min - ROUNDING * 2.0));
            assert!(found <= max.expect("a peak from somewhere") + ROUNDING * 2.0);
        }
        let known = |seconds: u64| {
            let first = usize::try_from(seconds / SLOT.as_secs()).unwrap();
            let tail = &slots[slots.len().saturating_sub(first)..];
            tail.iter().flatten().count() as f64 * SLOT.as_secs_f64()
        };
        let (min, max) = (
            known(seconds) / seconds as f64,
            known(seconds + bucket) / seconds as f64,
        );
        assert!(
            peak.coverage >= min.min(1.0) - 1e-9,
            "{span:?} {min} {}",
            peak.coverage
        );
        assert!(peak.coverage <= max.min(1.0) + 1e-9, "{span:?}");
        assert!(peak.coverage < MIN_COVERAGE || peak.value.is_some() || max < 0.6);
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Duration in milliseconds, and the value.
    Sample(u64, f64),
    /// Duration without a sample, in milliseconds.
    Gap(u64),
    /// An interval longer than the maximum, in milliseconds.
    Stall(u64, f64),
}

fn step() -> impl Strategy<Value = Step> {
    let max = u64::try_from(MAX_INTERVAL.as_millis()).unwrap();
    prop_oneof![
        60 => (50..=max, 0.0..=100.0_f64).prop_map(|(ms, value)| Step::Sample(ms, value)),
        20 => (max - 1000..=max, 0.0..=100.0_f64).prop_map(|(ms, value)| Step::Sample(ms, value)),
        10 => (1_u64..60_000).prop_map(Step::Gap),
        2 => (60_000_u64..5_000_000).prop_map(Step::Gap),
        2 => (max + 1..600_000, 0.0..=100.0_f64).prop_map(|(ms, value)| Step::Stall(ms, value)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn windows_match_the_whole_history(
        steps in proptest::collection::vec(step(), 1..900),
        start in 0_u64..100_000_000,
    ) {
        let mut series = Series::default();
        let mut reference = Reference { now: start * 1_000_000, ..Reference::default() };
        series.advance(BootTime::from_nanos(reference.now));
        for (index, step) in steps.iter().enumerate() {
            let from = reference.now;
            let (Step::Sample(ms, _) | Step::Gap(ms) | Step::Stall(ms, _)) = step;
            let to = from + ms * 1_000_000;
            reference.now = to;
            let (start, end) = (BootTime::from_nanos(from), BootTime::from_nanos(to));
            match step {
                Step::Sample(_, value) => {
                    reference.intervals.push((from, to, *value));
                    series.add(start, end, *value);
                }
                Step::Stall(_, value) => series.add(start, end, *value),
                Step::Gap(_) => series.advance(end),
            }
            if index % 300 == 299 || index + 1 == steps.len() {
                reference.check(&series);
            }
        }
        // A process that resumes from the saved state has the same values.
        let saved = serde_json::to_string(&series).unwrap();
        let mut resumed: Series = serde_json::from_str(&saved).unwrap();
        prop_assert!(resumed.resume());
        prop_assert_eq!(resumed.sums, series.sums);
        reference.check(&resumed);
    }

    #[test]
    fn clock_jumps_break_nothing(
        steps in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<f64>()), 1..50),
    ) {
        let mut series = Series::default();
        for (from, to, value) in steps {
            series.add(BootTime::from_nanos(from), BootTime::from_nanos(to), value);
            for span in Span::ALL {
                let coverage = series.spread(span).coverage;
                prop_assert!((0.0..=1.0).contains(&coverage));
            }
            prop_assert!(series.peak(PeakSpan::Day).coverage <= 1.0);
        }
    }
}

#[test]
fn a_five_minute_burst_counts_fully_wherever_it_starts() {
    for start in [1201, 1300, 1333, 1499] {
        let burst = |second| (start..start + 300).contains(&second);
        let series = series(HOUR, |s| Some(if burst(s) { 100.0 } else { 10.0 }));
        // Within 2.5 % of the burst's height.
        near(series.peak(PeakSpan::Hour).value, 100.0, 2.25);
    }
}

#[test]
fn a_peak_leaves_the_hour_window_and_stays_in_the_day_window() {
    let burst = |second| (600..1200).contains(&second);
    let hours = |count| {
        series(count, |s| {
            (s < 20 * HOUR).then_some(if burst(s) { 80.0 } else { 20.0 })
        })
    };
    let then = hours(1200 + HOUR - 60);
    near(then.peak(PeakSpan::Hour).value, 80.0, 0.1);
    let later = hours(1200 + HOUR + 6 * MINUTE);
    near(later.peak(PeakSpan::Hour).value, 20.0, 0.1);
    // The day window has no value with little coverage.
    assert_eq!(later.peak(PeakSpan::Day).value, None);
    let day = hours(13 * HOUR);
    near(day.peak(PeakSpan::Day).value, 80.0, 0.1);
    assert!((day.peak(PeakSpan::Day).coverage - 13.0 / 24.0).abs() < 0.01);
}

#[test]
fn a_gap_does_not_count_as_idle_time() {
    let series = series(20 * MINUTE, |s| (s % 300 >= 120).then_some(60.0));
    let window = series.average(Span::FiveMinutes);
    near(window.value, 60.0, ROUNDING);
    assert!((window.coverage - 0.6).abs() < 0.02, "{}", window.coverage);
    assert_eq!(series.average(Span::Hour).value, None);
    assert!((series.average(Span::Hour).coverage - 0.2).abs() < 0.01);
}

#[test]
fn values_older_than_the_window_are_dropped_after_suspend() {
    let mut series = series(HOUR, |_| Some(50.0));
    series.add(at(3600.0), at(3600.0 + 1500.0), 0.0);
    assert_eq!(series.average(Span::FiveMinutes).value, None);
    near(series.average(Span::Hour).value, 50.0, ROUNDING);
    series.advance(at(9000.0));
    assert!(series.average(Span::Hour).coverage.abs() < f64::EPSILON);
}

#[test]
fn an_invalid_series_is_not_resumed() {
    let written = serde_json::to_value(Series::default()).unwrap();
    let mut short = written.clone();
    short["slots"] = serde_json::json!([1, 2, 3]);
    let mut tall = written.clone();
    tall["hour"]["known"][0] = 200.into();
    for (value, valid) in [(written, true), (short, false), (tall, false)] {
        let mut series: Series = serde_json::from_value(value).unwrap();
        assert_eq!(series.resume(), valid);
    }
}

fn sample(second: u64, busy_percent: u64, used_percent: u64) -> Sample {
    let mut sample = Sample {
        at: at(second as f64),
        ..Sample::default()
    };
    sample.node.cpu = Some(CpuTimes {
        busy: second * 4 * busy_percent * 10_000_000,
        idle: 0,
        online: 4,
    });
    sample.node.memory = Some(NodeMemory {
        total: Bytes(1000),
        available: Bytes(1000 - used_percent * 10),
    });
    sample
}

#[test]
fn a_node_has_cpu_and_memory_windows() {
    let mut windows = NodeWindows::default();
    let value = |windows: &NodeWindows, resource| windows.value(resource, Windowed::Average5m);
    for second in 0..140 {
        windows.add(&sample(second, 75, 40));
    }
    assert_eq!(value(&windows, Resource::Cpu), Err(Unknown::Sparse));
    for second in 140..400 {
        // A repeated sample counts once.
        windows.add(&sample(second, 75, 40));
        windows.add(&sample(second, 75, 40));
    }
    near(value(&windows, Resource::Cpu).ok(), 75.0, ROUNDING);
    near(value(&windows, Resource::Memory).ok(), 40.0, ROUNDING);
    let unreadable = |second: u32| Sample {
        at: at(f64::from(second)),
        ..Sample::default()
    };
    for second in 400..600 {
        windows.add(&unreadable(second));
    }
    assert_eq!(value(&windows, Resource::Cpu), Err(Unknown::Sparse));
    // The longer window stays known.
    let half = windows.of(Resource::Cpu).average(Span::HalfHour);
    assert!((half.coverage - 400.0 / 1800.0).abs() < 0.01);
}

#[test]
fn windows_fit_into_8_kib_and_a_sample_allocates_nothing() {
    let mut windows = NodeWindows::default();
    let made = allocation_counter::measure(|| windows = NodeWindows::default());
    let bytes = made.bytes_total + size_of::<NodeWindows>() as u64;
    assert!((6000..8192).contains(&bytes), "{bytes} bytes");
    let steady = allocation_counter::measure(|| {
        for second in 0..4000 {
            windows.add(&sample(second, 30, 50));
        }
        windows.add(&sample(2 * 24 * HOUR, 30, 50));
        for span in Span::ALL {
            std::hint::black_box(windows.of(Resource::Cpu).spread(span));
        }
    });
    assert_eq!(steady.count_total, 0);
}
