//! The figures of a node's load by name: what `plimsoll explain metric` asks for, and what a polled page may have. Pure.

use super::node_metric::{
    Load, NodeMetricStatus, PeakStats, ResourceLoad, ResourceWindows, WindowStats, Windows,
};
use crate::engine::load::{DAY_WEIGHT, DEFAULT_LINE, HOUR_WEIGHT};

/// The names, in the order of [`LoadValues`]. All are in percent: of the node, or for `load` of the load line.
pub const NAMES: [&str; 13] = [
    "cpu_usage_avg_5m",
    "cpu_usage_max_avg_1h",
    "cpu_usage_max_avg_1d",
    "cpu_usage_stddev_5m",
    "cpu_expected",
    "cpu_load_line",
    "mem_usage_avg_5m",
    "mem_usage_max_avg_1h",
    "mem_usage_max_avg_1d",
    "mem_usage_stddev_5m",
    "mem_expected",
    "mem_load_line",
    LOAD,
];
/// The load of the node, 100 where a rule would act.
pub const LOAD: &str = "load";

/// Names for each resource.
const PER_RESOURCE: usize = 6;
/// Highest load, and expected use, that is believed: both may be above 100.
const MAX_OVER: f64 = 10_000.0;
/// What rounding may add to 100 percent.
const ROUNDING: f64 = 0.5;

/// One value for each of [`NAMES`]; `None`: unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadValues(pub [Option<f64>; NAMES.len()]);

/// The index of a name; `None` if it is none of [`NAMES`].
pub fn index(name: &str) -> Option<usize> {
    NAMES.iter().position(|known| *known == name)
}

/// Whether a value of this index can be right, in percent. A larger one has another unit, or is not of one node.
pub fn is_plausible(index: usize, percent: f64) -> bool {
    let may_exceed = NAMES[index] == LOAD || NAMES[index].ends_with("_expected");
    let max = if may_exceed {
        MAX_OVER
    } else {
        100.0 + ROUNDING
    };
    (0.0..=max).contains(&percent)
}

impl LoadValues {
    /// Of what an agent reported, or of what was polled.
    pub fn of(status: &NodeMetricStatus) -> Self {
        let mut values = [None; NAMES.len()];
        let load = status.load.as_ref();
        let resources = [
            (&status.windows.cpu, load.map(|load| &load.cpu)),
            (&status.windows.memory, load.map(|load| &load.memory)),
        ];
        for ((windows, load), values) in resources.into_iter().zip(values.chunks_mut(PER_RESOURCE))
        {
            if let Some(windows) = windows {
                values[0] = windows.last5m.and_then(|window| window.avg);
                values[1] = windows.max_avg1h.and_then(|peak| peak.value);
                values[2] = windows.max_avg1d.and_then(|peak| peak.value);
                values[3] = windows.last5m.and_then(|window| window.stddev);
            }
            values[4] = load.map(|load| load.expected);
            values[5] = load.map(|load| load.line);
        }
        values[NAMES.len() - 1] = load.map(|load| load.percent);
        Self(values.map(|value| value.filter(|value| value.is_finite())))
    }

    /// As a report would have them. `Err`: the resource of which no use is known, `cpu` or `mem`.
    ///
    /// # Errors
    /// Without the use of both resources a node's load is unknown.
    pub fn status(&self) -> Result<NodeMetricStatus, &'static str> {
        let [cpu, memory] = [&self.0[..PER_RESOURCE], &self.0[PER_RESOURCE..]];
        let load = self.0[NAMES.len() - 1];
        // Whoever computes the load counts peaks as well, and knows which pods have ended since.
        let peaks = load.is_none();
        let load_of = |values, missing| resource_load(values, peaks).ok_or(missing);
        let (cpu_load, memory_load) = (load_of(cpu, "cpu")?, load_of(memory, "mem")?);
        let highest = cpu_load.percent.max(memory_load.percent);
        let percent = load.unwrap_or(highest);
        let worst = if percent > highest {
            "pressure"
        } else if cpu_load.percent >= memory_load.percent {
            "cpu"
        } else {
            "memory"
        };
        Ok(NodeMetricStatus {
            windows: Windows {
                cpu: windows(cpu),
                memory: windows(memory),
                ..Windows::default()
            },
            load: Some(Load {
                percent,
                worst: worst.to_owned(),
                cpu: cpu_load,
                memory: memory_load,
                pressure: None,
            }),
            ..NodeMetricStatus::default()
        })
    }
}

fn resource_load(values: &[Option<f64>], peaks: bool) -> Option<ResourceLoad> {
    let expected = values[4].or(values[0])?;
    let line = values[5].filter(|line| *line > 0.0).unwrap_or(DEFAULT_LINE);
    let peak = |index: usize, part: f64| values[index].filter(|_| peaks).map(|it| it * part);
    let history = [peak(1, HOUR_WEIGHT), peak(2, DAY_WEIGHT)];
    let history = history.into_iter().flatten().reduce(f64::max);
    Some(ResourceLoad {
        percent: expected.max(history.unwrap_or_default()) / line * 100.0,
        expected,
        newcomers: 0.0,
        history,
        line,
        rule: None,
    })
}

fn windows(values: &[Option<f64>]) -> Option<ResourceWindows> {
    let coverage = 1.0;
    let peak = |value: Option<f64>| {
        value.map(|value| PeakStats {
            value: Some(value),
            coverage,
        })
    };
    let windows = ResourceWindows {
        last5m: values[0].or(values[3]).map(|_| WindowStats {
            avg: values[0],
            stddev: values[3],
            coverage,
            ..WindowStats::default()
        }),
        max_avg1h: peak(values[1]),
        max_avg1d: peak(values[2]),
        ..ResourceWindows::default()
    };
    (windows != ResourceWindows::default()).then_some(windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(known: &[(&str, f64)]) -> LoadValues {
        let mut values = LoadValues::default();
        for (name, value) in known {
            values.0[index(name).unwrap()] = Some(*value);
        }
        values
    }

    #[test]
    fn all_values_are_in_the_status_and_are_found_there_again() {
        let mut all = LoadValues::default();
        for (index, value) in all.0.iter_mut().enumerate() {
            *value = Some(index as f64 + 1.0);
        }
        assert_eq!(LoadValues::of(&all.status().unwrap()), all);
    }

    #[test]
    fn without_a_load_it_is_the_use_of_the_load_line() {
        let plain = values(&[("cpu_usage_avg_5m", 63.0), ("mem_usage_avg_5m", 45.0)]);
        let load = plain.status().unwrap().load.unwrap();
        assert!((load.percent - 70.0).abs() < 1e-9, "{load:?}");
        assert_eq!(
            (load.worst.as_str(), load.cpu.expected, load.memory.line),
            ("cpu", 63.0, 90.0)
        );
        let peaks = values(&[
            ("cpu_usage_avg_5m", 20.0),
            ("cpu_usage_max_avg_1h", 50.0),
            ("cpu_usage_max_avg_1d", 90.0),
            ("mem_usage_avg_5m", 45.0),
            ("mem_load_line", 50.0),
        ]);
        let load = peaks.status().unwrap().load.unwrap();
        assert_eq!(load.cpu.history, Some(72.0), "0.8 of the day's peak");
        assert!((load.percent - 90.0).abs() < 1e-9, "{load:?}");
        assert_eq!(load.worst, "memory");
    }

    #[test]
    fn a_given_load_and_expected_use_are_taken_as_they_are() {
        let agent = values(&[
            ("cpu_usage_avg_5m", 20.0),
            ("cpu_usage_max_avg_1d", 99.0),
            ("cpu_expected", 130.0),
            ("mem_expected", 10.0),
            ("load", 160.0),
        ]);
        let load = agent.status().unwrap().load.unwrap();
        assert_eq!((load.percent, load.worst.as_str()), (160.0, "pressure"));
        assert_eq!((load.cpu.expected, load.cpu.history), (130.0, None));
    }

    #[test]
    fn a_resource_of_which_no_use_is_known_is_named() {
        let cpu_only = values(&[("cpu_usage_avg_5m", 63.0), ("mem_usage_max_avg_1d", 1.0)]);
        assert_eq!(cpu_only.status().unwrap_err(), "mem");
        let memory_only = values(&[("load", 50.0), ("mem_expected", 1.0)]);
        assert_eq!(memory_only.status().unwrap_err(), "cpu");
    }

    #[test]
    fn another_unit_is_not_plausible() {
        let is = |name: &str, percent| is_plausible(index(name).unwrap(), percent);
        assert!(is("cpu_usage_avg_5m", 0.0) && is("cpu_usage_avg_5m", 100.4));
        assert!(is("load", 140.0) && is("mem_expected", 140.0));
        for percent in [-0.1, 101.0, 6300.0, f64::NAN, f64::INFINITY] {
            assert!(!is("mem_usage_max_avg_1h", percent), "{percent}");
        }
        assert!(!is("load", f64::NAN) && !is("load", -1.0) && !is("load", 1e9));
    }
}
