//! The figures on a page: which series are meant, their units, and whether they can be right. Pure.

use std::time::Duration;

use jiff::Timestamp;
use thiserror::Error;

use crate::crd::NodeMetricStatus;
use crate::crd::load_values::{LoadValues, NAMES, is_plausible};
use crate::crd::polling::{PolledMetric, Unit};
use crate::engine::sample::Series;
use crate::engine::units::{Bytes, MilliCpu};
use crate::node::collect::prometheus::{PageSeries, TextError, parse_page};

/// Most series of a page with the names that count.
const MAX_SERIES: usize = 1000;

/// Why a page has no figures.
#[derive(Debug, PartialEq, Error)]
pub enum PageError {
    /// Not UTF-8.
    #[error("the page is not UTF-8 text")]
    NotText,
    /// Not in the text format, or too many series.
    #[error("the page is not usable: {0}")]
    Text(#[from] TextError),
    /// Which of several series is meant?
    #[error("the page has several series for {0}; add labels that only one of them has")]
    Ambiguous(&'static str),
    /// It can't be right.
    #[error("{0} is {1} percent on the page: check unit and scale")]
    Implausible(&'static str, f64),
    /// It was measured too long ago, by the timestamp that the page has.
    #[error("{0} is {1:.0?} old by its timestamp")]
    Old(&'static str, Duration),
    /// The Node has no such capacity.
    #[error("the capacity of the Node is not known, so that {0} cannot be a part of it")]
    NoCapacity(&'static str),
    /// The use of CPU or memory is not there.
    #[error("the page has no value for {0}_usage_avg_5m or {0}_expected")]
    Missing(&'static str),
}

/// A node's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PolledCapacity {
    /// 0 if unknown.
    pub cpu: MilliCpu,
    /// 0 if unknown.
    pub memory: Bytes,
}

/// How old the figures of a page may be, by its timestamps.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    /// When the page arrived.
    pub wall: Timestamp,
    /// Highest age.
    pub max_age: Duration,
}

/// The figures of a page, and how old the oldest was when the page arrived. A series that is NaN, or not there, is unknown.
///
/// # Errors
/// The page is not usable as a whole: what is wrong with one figure may be wrong with others.
pub fn read(
    page: &[u8],
    metrics: &[PolledMetric],
    capacity: PolledCapacity,
    clock: Clock,
) -> Result<(NodeMetricStatus, Duration), PageError> {
    let text = std::str::from_utf8(page).map_err(|_| PageError::NotText)?;
    let wanted = |name: &str| metrics.iter().any(|metric| &*metric.series == name);
    let series = parse_page(text, wanted, MAX_SERIES)?;
    let mut values = LoadValues::default();
    let mut oldest = Duration::ZERO;
    for metric in metrics {
        let name = NAMES[metric.index];
        let Some(found) = the_one(&series, metric)? else {
            continue;
        };
        let percent = percent(found.series.value, metric, capacity)?;
        if !is_plausible(metric.index, percent) {
            return Err(PageError::Implausible(name, percent));
        }
        let age = age(found.timestamp, clock.wall);
        if age > clock.max_age {
            return Err(PageError::Old(name, age));
        }
        oldest = oldest.max(age);
        values.0[metric.index] = Some(percent);
    }
    let status = values.status().map_err(PageError::Missing)?;
    Ok((status, oldest))
}

/// The series that is meant; `None` if it is not there, or not a number.
fn the_one<'a>(
    series: &'a [PageSeries],
    metric: &PolledMetric,
) -> Result<Option<&'a PageSeries>, PageError> {
    let mut meant = series.iter().filter(|it| is_meant(&it.series, metric));
    let first = meant.next();
    if meant.next().is_some() {
        return Err(PageError::Ambiguous(NAMES[metric.index]));
    }
    Ok(first.filter(|it| !it.series.value.is_nan()))
}

fn is_meant(series: &Series, metric: &PolledMetric) -> bool {
    series.name == metric.series
        && metric.labels.iter().all(|(name, value)| {
            let mut labels = series.labels.iter();
            labels.any(|(known, text)| **known == **name && **text == **value)
        })
}

/// The value in percent.
fn percent(value: f64, metric: &PolledMetric, capacity: PolledCapacity) -> Result<f64, PageError> {
    let value = value * metric.scale;
    let part = |amount: f64, of: f64| {
        let no_capacity = PageError::NoCapacity(NAMES[metric.index]);
        if of > 0.0 {
            Ok(amount / of * 100.0)
        } else {
            Err(no_capacity)
        }
    };
    match metric.unit {
        Unit::Percent => Ok(value),
        Unit::Ratio => Ok(value * 100.0),
        Unit::Cores => part(value * 1000.0, capacity.cpu.0 as f64),
        Unit::Bytes => part(value, capacity.memory.0 as f64),
    }
}

/// Zero without a timestamp, and for one of the future.
fn age(timestamp: Option<i64>, wall: Timestamp) -> Duration {
    let millis = timestamp.map_or(0, |then| wall.as_millisecond().saturating_sub(then));
    Duration::from_millis(u64::try_from(millis).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::polling;

    const CAPACITY: PolledCapacity = PolledCapacity {
        cpu: MilliCpu(8000),
        memory: Bytes(16 << 30),
    };
    const WALL: Timestamp = Timestamp::constant(1_795_430_000, 0);

    fn read_with(metrics: &str, page: &str) -> Result<(NodeMetricStatus, Duration), PageError> {
        read(page.as_bytes(), &parsed(metrics), CAPACITY, clock())
    }

    /// What is used of CPU and memory.
    fn expected(metrics: &str, page: &str) -> (f64, f64) {
        let load = read_with(metrics, page).unwrap().0.load.unwrap();
        (load.cpu.expected, load.memory.expected)
    }

    const PLAIN: &str = "{name: cpu_usage_avg_5m, series: c}, {name: mem_usage_avg_5m, series: m}";

    #[test]
    fn a_page_of_an_agent_needs_no_settings() {
        let page = "\
# TYPE plimsoll_agent_load_percent gauge
plimsoll_agent_load_percent{term=\"worst\"} 80
plimsoll_agent_load_percent{term=\"cpu\"} 80
plimsoll_agent_expected_usage_percent{resource=\"cpu\"} 64
plimsoll_agent_expected_usage_percent{resource=\"memory\"} 20
plimsoll_agent_load_line_percent{resource=\"cpu\"} 80
plimsoll_agent_node_usage_percent{resource=\"cpu\",window=\"5m\",stat=\"stddev\"} 3
plimsoll_agent_node_usage_percent{resource=\"cpu\",window=\"1h\",stat=\"stddev\"} 9
cpu_usage_avg_5m 60
cpu_usage_max_avg_1d NaN
";
        let (status, age) = read_with("", page).unwrap();
        let load = status.load.unwrap();
        assert_eq!((load.percent, load.cpu.line), (80.0, 80.0));
        assert_eq!((load.cpu.expected, load.memory.expected), (64.0, 20.0));
        let windows = status.windows.cpu.unwrap();
        assert_eq!(windows.last5m.unwrap().stddev, Some(3.0));
        assert_eq!((windows.max_avg1d, age), (None, Duration::ZERO));
    }

    #[test]
    fn other_names_labels_and_units_are_converted() {
        let metrics = "{name: cpu_usage_avg_5m, series: busy, labels: {mode: all}, unit: cores, scale: 0.001}, \
                       {name: mem_usage_avg_5m, series: used, unit: bytes}";
        let page = "busy{mode=\"all\",cpu=\"x\"} 2000\nbusy{mode=\"user\"} 1\nused 4294967296\n";
        assert_eq!(expected(metrics, page), (25.0, 25.0));
        let ratios = "{name: cpu_usage_avg_5m, series: c, unit: ratio}, {name: mem_expected, series: m, unit: ratio}";
        assert_eq!(expected(ratios, "c 0.5\nm 1.25\n"), (50.0, 125.0));
        let unknown = read(
            b"c 1\nm 1\n",
            &parsed(metrics),
            PolledCapacity::default(),
            clock(),
        );
        assert!(unknown.is_err());
    }

    fn parsed(metrics: &str) -> Vec<PolledMetric> {
        let file = format!("services: [{{namespace: a, name: b, metrics: [{metrics}]}}]");
        polling::read(&file).unwrap().services.remove(0).metrics
    }

    const fn clock() -> Clock {
        Clock {
            wall: WALL,
            max_age: Duration::from_secs(45),
        }
    }

    #[test]
    fn values_that_cannot_be_right_refuse_the_page() {
        let refused = |page: &str| read_with(PLAIN, page).unwrap_err();
        assert_eq!(
            refused("c -1\nm 1"),
            PageError::Implausible("cpu_usage_avg_5m", -1.0)
        );
        assert_eq!(
            refused("c 1\nm 101"),
            PageError::Implausible("mem_usage_avg_5m", 101.0)
        );
        assert!(matches!(refused("c +Inf\nm 1"), PageError::Implausible(..)));
        assert_eq!(refused("c NaN\nm 1"), PageError::Missing("cpu"));
        assert_eq!(refused("c 1\n"), PageError::Missing("mem"));
        assert_eq!(
            refused("c 1\nm 1\n<html>\n"),
            PageError::Text(TextError::Line(3))
        );
        let unit = parsed(
            "{name: cpu_usage_avg_5m, series: c, unit: cores}, {name: mem_expected, series: m}",
        );
        let no_capacity = read(b"c 1\nm 1\n", &unit, PolledCapacity::default(), clock());
        assert_eq!(
            no_capacity.unwrap_err(),
            PageError::NoCapacity("cpu_usage_avg_5m")
        );
        assert_eq!(
            read(b"c \xff", &unit, CAPACITY, clock()).unwrap_err(),
            PageError::NotText
        );
    }

    #[test]
    fn of_several_series_none_is_taken() {
        for page in ["c 1\nc 1\nm 1\n", "c{cpu=\"0\"} 1\nc{cpu=\"1\"} 2\nm 1\n"] {
            let error = read_with(PLAIN, page).unwrap_err();
            assert_eq!(error, PageError::Ambiguous("cpu_usage_avg_5m"), "{page}");
        }
    }

    #[test]
    fn the_timestamps_of_the_page_count() {
        let at = |seconds: i64| (WALL.as_second() - seconds) * 1000;
        let page = |seconds| format!("c 1 {}\nm 1 {}\n", at(5), at(seconds));
        let age = |seconds| read_with(PLAIN, &page(seconds)).map(|(_, age)| age.as_secs());
        assert_eq!(age(2), Ok(5));
        assert_eq!(age(40), Ok(40));
        assert_eq!(age(-40), Ok(5), "a clock ahead");
        let old = PageError::Old("mem_usage_avg_5m", Duration::from_mins(1));
        assert_eq!(age(60), Err(old));
    }
}
