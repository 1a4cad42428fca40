//! The annotations in which crane-scheduler looks for a node's use, written by our agent instead of crane's own controller.
//!
//! A value is `<number>,<time>`: a share of the node with 5 decimals, or for [`HOT`] points of ten. The time is the wall
//! clock of a time zone that writer and reader must share, and its `Z` is only a letter (crane-scheduler c2c0533,
//! `pkg/plugins/dynamic/stats.go`, `pkg/utils/utils.go`). crane-scheduler ignores a value once it is too old, 8 minutes for
//! `*_avg_5m` with crane's own policy: the node then scores 0 for that metric, and is not filtered by it.

use std::collections::BTreeMap;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// The keys of the annotations: CPU, memory, and what averages do not show yet.
pub const KEYS: [&str; 7] = [
    USAGE[0], USAGE[1], USAGE[2], USAGE[3], USAGE[4], USAGE[5], HOT,
];
/// crane's metrics: CPU and then memory; the average of 5 minutes, and the highest such average of an hour and of a day.
pub const USAGE: [&str; 6] = [
    "cpu_usage_avg_5m",
    "cpu_usage_max_avg_1h",
    "cpu_usage_max_avg_1d",
    "mem_usage_avg_5m",
    "mem_usage_max_avg_1h",
    "mem_usage_max_avg_1d",
];
/// The key of the hot value: each 0.1 takes one point off the node's score.
pub const HOT: &str = "node_hot_value";
/// The key of the annotation with the time of our last write. A value with another time is another writer's.
pub const WRITTEN: &str = "plimsoll.dev/crane-annotations";

const FORMAT: &str = "%Y-%m-%dT%H:%M:%SZ";
/// A share is written in parts of this.
const WHOLE: f64 = 100_000.0;
/// Hot value, in tenths, above which a node's score is 0 in any case.
const MAX_HOT: f64 = 100.0;

/// The time zone that crane-scheduler reads times in: its `TZ`, by default Asia/Shanghai.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone(TimeZone);

impl FromStr for Zone {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let why = |error| {
            format!("{error}; write a name of the tz database, such as Asia/Shanghai or UTC")
        };
        TimeZone::get(name).map(Self).map_err(why)
    }
}

impl Zone {
    /// The time as crane-scheduler reads it.
    pub fn time(&self, now: Timestamp) -> String {
        let local = now.to_zoned(self.0.clone());
        local.strftime(FORMAT).to_string()
    }

    /// The time of such a text; `None` if it is none. In the hour that a zone has twice a year it is the earlier one.
    pub fn parse(&self, text: &str) -> Option<Timestamp> {
        let local = DateTime::strptime(FORMAT, text).ok()?;
        Some(local.to_zoned(self.0.clone()).ok()?.timestamp())
    }
}

/// The numbers of the annotations, in the order of [`KEYS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CraneValues {
    /// In parts of [`WHOLE`], and for [`HOT`] in tenths; `None`: unknown.
    units: [Option<u32>; KEYS.len()],
}

impl CraneValues {
    /// Of use in percent of the node, in the order of [`KEYS`], and of load in percent of the node that averages do not show
    /// yet. `None`, or not finite: unknown.
    pub fn of(usage: [Option<f64>; KEYS.len() - 1], pending: Option<f64>) -> Self {
        let mut units = [None; KEYS.len()];
        for (unit, percent) in units.iter_mut().zip(usage) {
            *unit = percent.and_then(|it| rounded(it / 100.0 * WHOLE, WHOLE));
        }
        // 1 percent of the node is a tenth: one point.
        units[KEYS.len() - 1] = pending.and_then(|it| rounded(it, MAX_HOT));
        Self { units }
    }

    /// Whether nothing is known.
    pub fn is_empty(&self) -> bool {
        self.units.iter().all(Option::is_none)
    }

    /// The known uses, in percent of the node, in the order of [`KEYS`].
    pub fn usage(&self) -> [Option<f64>; KEYS.len() - 1] {
        std::array::from_fn(|index| Some(f64::from(self.units[index]?) / (WHOLE / 100.0)))
    }

    /// The hot value in points off the node's score.
    pub const fn hot(&self) -> Option<u32> {
        self.units[KEYS.len() - 1]
    }

    /// The annotations with this time; `None`: there is none.
    pub fn annotations(&self, time: &str) -> impl Iterator<Item = (&'static str, Option<String>)> {
        let texts = KEYS.iter().zip(self.units);
        texts.map(move |(key, unit)| (*key, unit.map(|unit| format!("{},{time}", text(key, unit)))))
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it is from 0 to 100 000"
)]
fn rounded(value: f64, max: f64) -> Option<u32> {
    value
        .is_finite()
        .then(|| value.clamp(0.0, max).round() as u32)
}

fn text(key: &str, unit: u32) -> String {
    if key == HOT {
        format!("{:.1}", f64::from(unit) / 10.0)
    } else {
        format!("{:.5}", f64::from(unit) / WHOLE)
    }
}

/// The number of an annotation's text, in its units.
fn unit(key: &str, number: &str) -> Option<u32> {
    let value: f64 = number.parse().ok()?;
    let (scale, max) = if key == HOT {
        (10.0, MAX_HOT)
    } else {
        (WHOLE, WHOLE)
    };
    let unit = rounded(value * scale, max)?;
    // Only as we write it.
    (text(key, unit) == number).then_some(unit)
}

/// The annotations on a Node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CraneAnnotations(BTreeMap<&'static str, String>);

impl CraneAnnotations {
    /// From a Node's annotations.
    pub fn of(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let text = |key: &'static str| Some((key, annotations?.get(key)?.clone()));
        let keys = KEYS.into_iter().chain([WRITTEN]);
        Self(keys.filter_map(text).collect())
    }

    /// The time of our last write.
    pub fn written(&self) -> Option<&str> {
        self.0.get(WRITTEN).map(String::as_str)
    }

    /// What we wrote. What cannot be read is not in it.
    pub fn values(&self) -> CraneValues {
        CraneValues {
            units: KEYS.map(|key| unit(key, self.our_number(key)?)),
        }
    }

    /// The keys of what we wrote, in the order of [`KEYS`], and of the time of our last write.
    pub fn ours(&self) -> impl Iterator<Item = &'static str> {
        let ours = |key: &&str| self.our_number(key).is_some();
        let written = self.written().map(|_| WRITTEN);
        KEYS.into_iter().filter(ours).chain(written)
    }

    /// The keys that another writer has set, in the order of [`KEYS`].
    pub fn others(&self) -> impl Iterator<Item = &'static str> {
        let others = |key: &&str| self.0.contains_key(key) && self.our_number(key).is_none();
        KEYS.into_iter().filter(others)
    }

    /// The number of an annotation that we wrote.
    fn our_number(&self, key: &str) -> Option<&str> {
        let (number, time) = self.0.get(key)?.split_once(',')?;
        (self.written()? == time).then_some(number)
    }
}

#[cfg(test)]
#[path = "crane_annotations_tests.rs"]
mod tests;
