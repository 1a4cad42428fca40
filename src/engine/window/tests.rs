//! Checks the windows against the complete history.

use proptest::prelude::*;
use proptest::sample::select;

use super::*;
use crate::engine::metric::Resource;
use crate::engine::plan::Unknown;
use crate::engine::sample::{CpuTimes, NodeMemory, Sample};
use crate::engine::statistic::Percentile;
use crate::engine::units::Bytes;

const MINUTE: u64 = 60;
const HOUR: u64 = 3600;
/// Rounding error of a value of at most 100.
const ROUNDING: f64 = 1e-4;

fn at(seconds: f64) -> BootTime {
    BootTime::default() + Duration::from_secs_f64(seconds)
}

/// A history with one value per second; `None` is a gap.
fn series(seconds: u64, value: impl Fn(u64) -> Option<f64>) -> TimeSeries {
    let mut series = TimeSeries::default();
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

    /// Compares every statistic; `scale` is the largest value divided by 100.
    fn check(&self, series: &TimeSeries, scale: f64) {
        let slots = self.slots();
        let error = ROUNDING * scale;
        for span in SUMMED {
            let first = slots.len().saturating_sub(span.slots());
            let known: Vec<f64> = slots[first..].iter().copied().flatten().collect();
            let coverage = known.len() as f64 / span.slots() as f64;
            assert!((series.average(span).coverage - coverage).abs() < 1e-9);
            let mean = mean(&known).filter(|_| coverage >= MIN_COVERAGE);
            compare(series.average(span).value, mean, error);
            check_distribution(series, span, known, coverage, error);
        }
        Self::check_day(series, &slots, error);
        let averages = sliding_averages(&slots);
        for (span, seconds, bucket) in [
            (PeakSpan::Hour, HOUR, MINUTE),
            (PeakSpan::Day, 24 * HOUR, 5 * MINUTE),
        ] {
            let known = |length: u64| {
                let first = usize::try_from(length / SLOT.as_secs()).unwrap();
                let tail = &slots[slots.len().saturating_sub(first)..];
                let known = tail.iter().flatten().count() as f64 * SLOT.as_secs_f64();
                known / seconds as f64
            };
            let coverage = [known(seconds), known(seconds + bucket)];
            check_peak(
                series.peak(span),
                &averages,
                seconds,
                bucket,
                coverage,
                error,
            );
        }
    }

    /// A day is the minute of the last slot, or that of the next one, and the 1440 before.
    fn check_day(series: &TimeSeries, slots: &[Option<f64>], error: f64) {
        let day = |current: usize| {
            let first = current.saturating_sub(MINUTES_PER_DAY) * usize::from(SLOTS_PER_MINUTE);
            &slots[first.min(slots.len())..]
        };
        let per_minute = usize::from(SLOTS_PER_MINUTE);
        let known = |slots: &[Option<f64>]| slots.iter().copied().flatten().collect::<Vec<f64>>();
        let average = series.average(Span::Day);
        let slots_of_day = f64::from(u32::try_from(MINUTES_PER_DAY * per_minute).unwrap());
        let coverage = |slots: &[Option<f64>]| (known(slots).len() as f64 / slots_of_day).min(1.0);
        let candidates =
            [slots.len().saturating_sub(1), slots.len()].map(|slot| day(slot / per_minute));
        let found = candidates
            .into_iter()
            .find(|slots| (coverage(slots) - average.coverage).abs() < 1e-9);
        let day = found.expect("the coverage of a day");
        let expected = mean(&known(day)).filter(|_| average.coverage >= MIN_COVERAGE);
        compare(average.value, expected, error);
        // Whole minutes before the first slot of the day, which starts with a minute.
        let minutes = day.chunks(per_minute).filter_map(|minute| {
            let known = known(minute);
            mean(&known).filter(|_| known.len() * 2 >= per_minute)
        });
        check_distribution(
            series,
            Span::Day,
            minutes.collect(),
            average.coverage,
            error,
        );
    }
}

/// The average of the 5 minutes that end with each slot, where half of them is known.
fn sliding_averages(slots: &[Option<f64>]) -> Vec<Option<f64>> {
    let average = |end: usize| {
        let last = &slots[end.saturating_sub(100)..end];
        let count = last.iter().flatten().count();
        (count >= 50).then(|| last.iter().flatten().sum::<f64>() / count as f64)
    };
    (1..=slots.len()).map(average).collect()
}

/// A peak within the window is included, and one that is a bucket older is not. The coverage is between those of the
/// window with and without one more bucket.
fn check_peak(
    peak: Window<f64>,
    averages: &[Option<f64>],
    seconds: u64,
    bucket: u64,
    [min_coverage, max_coverage]: [f64; 2],
    error: f64,
) {
    let highest = |seconds: u64| {
        let first = usize::try_from(seconds / SLOT.as_secs()).unwrap();
        let last = &averages[averages.len().saturating_sub(first)..];
        last.iter().copied().flatten().max_by(f64::total_cmp)
    };
    let (min, max) = (highest(seconds), highest(seconds + bucket));
    if let Some(found) = peak.value {
        assert!(min.is_none_or(|min| found >= min - error * 2.0));
        assert!(found <= max.expect("a peak from somewhere") + error * 2.0);
    }
    assert!(peak.coverage >= min_coverage.min(1.0) - 1e-9);
    assert!(peak.coverage <= max_coverage.min(1.0) + 1e-9);
    assert!(peak.coverage < MIN_COVERAGE || peak.value.is_some() || max_coverage < 0.6);
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn compare(found: Option<f64>, expected: Option<f64>, error: f64) {
    match expected {
        Some(expected) => near(found, expected, error),
        None => assert_eq!(found, None),
    }
}

/// Compares the deviation and the percentiles with those of `known`, which have no value below half `coverage`.
fn check_distribution(
    series: &TimeSeries,
    span: Span,
    mut known: Vec<f64>,
    coverage: f64,
    error: f64,
) {
    known.sort_by(f64::total_cmp);
    let spread = series.spread(span).value;
    let expected = mean(&known).filter(|_| coverage >= MIN_COVERAGE);
    let deviation = expected.map(|mean| {
        let squares = known.iter().map(|value| (value - mean).powi(2));
        (squares.sum::<f64>() / known.len() as f64).sqrt()
    });
    compare(series.deviation(span).value, deviation, error);
    assert_eq!(spread.is_some(), expected.is_some());
    let Some(found) = spread else { return };
    assert_eq!(Some(found.average), series.average(span).value);
    for (percentile, found) in [
        (Percentile::P50, found.p50),
        (Percentile::P90, found.p90),
        (Percentile::P95, found.p95),
        (Percentile::P99, found.p99),
    ] {
        let statistic = Statistic::Percentile(percentile, span);
        assert_eq!(series.value(statistic).value, Some(found));
        // The smallest value that at least this share does not exceed.
        let share = f64::from(percentile as u8) / 100.0;
        let enough = |value: &&f64| {
            let below = known.iter().filter(|known| known <= value).count();
            below as f64 >= share * known.len() as f64 - 1e-9
        };
        near(Some(found), *known.iter().find(enough).unwrap(), error);
    }
    near(Some(found.max), *known.last().unwrap(), error);
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

/// A steady load with spikes and gaps.
#[derive(Clone, Debug)]
struct Part {
    seconds: u64,
    base: f64,
    /// How often a spike to 100 starts and how long it lasts, in seconds.
    spikes: (u64, u64),
    /// The same for gaps.
    gaps: (u64, u64),
}

impl Part {
    fn value(&self, second: u64) -> Option<f64> {
        let within = |(every, length): (u64, u64)| second % every < length;
        let value = if within(self.spikes) {
            100.0
        } else {
            self.base
        };
        (!within(self.gaps)).then_some(value)
    }
}

fn part() -> impl Strategy<Value = Part> {
    let spikes = (5_u64..4000, 0_u64..60);
    let gaps = prop_oneof![4 => Just((1, 0)), 1 => (10_u64..4000, 0_u64..2000)];
    (60_u64..4000, 0.0..100.0_f64, spikes, gaps).prop_map(|(seconds, base, spikes, gaps)| Part {
        seconds,
        base,
        spikes,
        gaps,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn windows_match_the_whole_history(
        steps in proptest::collection::vec(step(), 1..900),
        start in 0_u64..100_000_000,
        scale in select(vec![1.0, 1.0, 1e-6, 0.01, 1e6, 1e12, -1e9]),
    ) {
        let mut series = TimeSeries::default();
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
                    let value = value * scale;
                    reference.intervals.push((from, to, value));
                    series.add(start, end, value);
                }
                Step::Stall(_, value) => series.add(start, end, value * scale),
                Step::Gap(_) => series.advance(end),
            }
            if index % 300 == 299 || index + 1 == steps.len() {
                reference.check(&series, scale.abs());
            }
        }
        // A process that resumes from the saved state has the same values.
        let saved = serde_json::to_string(&series).unwrap();
        let mut resumed: TimeSeries = serde_json::from_str(&saved).unwrap();
        prop_assert!(resumed.resume());
        prop_assert_eq!(resumed.sums, series.sums);
        reference.check(&resumed, scale.abs());
    }

    #[test]
    fn clock_jumps_break_nothing(
        steps in proptest::collection::vec((any::<u64>(), any::<u64>(), any::<f64>()), 1..50),
    ) {
        let mut series = TimeSeries::default();
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn a_day_of_spikes_and_gaps_matches_the_whole_history(
        parts in proptest::collection::vec(part(), 20..60),
        interval in select(vec![1_u64, 3, 7, 15, 30]),
    ) {
        let mut series = TimeSeries::default();
        let mut reference = Reference::default();
        for part in parts {
            for _ in 0..part.seconds / interval {
                let (from, to) = (reference.now, reference.now + interval * 1_000_000_000);
                reference.now = to;
                let (start, end) = (BootTime::from_nanos(from), BootTime::from_nanos(to));
                match part.value(from / 1_000_000_000) {
                    Some(value) => {
                        reference.intervals.push((from, to, value));
                        series.add(start, end, value);
                    }
                    None => series.advance(end),
                }
            }
        }
        reference.check(&series, 1.0);
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
fn an_average_does_not_drift() {
    let mut series = TimeSeries::default();
    for slot in 0..200_000_u64 {
        // A spike of a quadrillion every 20 minutes: a running sum of floats would lose what comes after it.
        let value = if slot % 400 == 0 { 1e15 } else { 0.001 };
        let seconds = (slot * 3) as f64;
        series.add(at(seconds), at(seconds + 3.0), value);
    }
    near(series.average(Span::FiveMinutes).value, 0.001, 1e-9);
}

#[test]
fn what_is_too_large_or_not_a_number_is_a_gap() {
    for value in [1e19, -1e19, f64::INFINITY, f64::NAN, f64::MAX] {
        let series = series(400, |_| Some(value));
        let window = series.average(Span::FiveMinutes);
        assert_eq!((window.value, window.coverage), (None, 0.0), "{value}");
    }
}

#[test]
fn a_minute_follows_quickly_and_a_day_needs_half_a_day() {
    let rising = series(13 * HOUR, |s| Some(if s < 12 * HOUR { 10.0 } else { 70.0 }));
    near(rising.average(Span::Minute).value, 70.0, ROUNDING);
    near(
        rising.average(Span::Day).value,
        (12.0 * 10.0 + 70.0) / 13.0,
        ROUNDING,
    );
    let morning = series(11 * HOUR, |_| Some(10.0));
    for statistic in [
        Statistic::Average(Span::Day),
        Statistic::Deviation(Span::Day),
        Statistic::Percentile(Percentile::P95, Span::Day),
        Statistic::Peak(PeakSpan::Day),
    ] {
        assert_eq!(morning.value(statistic).value, None, "{statistic}");
    }
}

#[test]
fn an_invalid_series_is_not_resumed() {
    let written = serde_json::to_value(TimeSeries::default()).unwrap();
    let mut short = written.clone();
    short["slots"] = serde_json::json!([1, 2, 3]);
    let mut tall = written.clone();
    tall["hourPeaks"]["known"][0] = 200.into();
    let mut huge = written.clone();
    huge["slots"][3] = 1e30.into();
    for (value, valid) in [
        (written, true),
        (short, false),
        (tall, false),
        (huge, false),
    ] {
        let mut series: TimeSeries = serde_json::from_value(value).unwrap();
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
        ..NodeMemory::default()
    });
    sample
}

#[test]
fn a_node_has_cpu_and_memory_windows() {
    let mut windows = NodeWindows::default();
    let value = |windows: &NodeWindows, resource| {
        windows.value(resource, Statistic::Average(Span::FiveMinutes))
    };
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
fn a_series_takes_under_14_kib_and_a_sample_allocates_nothing() {
    let mut windows = NodeWindows::default();
    let made = allocation_counter::measure(|| windows = NodeWindows::default());
    let bytes = made.bytes_total + size_of::<NodeWindows>() as u64;
    assert!(bytes < 2 * 14 * 1024, "{bytes} bytes");
    let steady = allocation_counter::measure(|| {
        for second in 0..4000 {
            windows.add(&sample(second, 30, 50));
        }
        windows.add(&sample(2 * 24 * HOUR, 30, 50));
        for span in Span::ALL {
            std::hint::black_box(windows.of(Resource::Cpu).spread(span));
        }
        for statistic in Statistic::all() {
            std::hint::black_box(windows.of(Resource::Cpu).value(statistic));
        }
    });
    assert_eq!(steady.count_total, 0);
}
