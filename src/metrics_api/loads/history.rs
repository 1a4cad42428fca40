//! The values of a node in the last minutes, for queries with an offset. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use crate::crd::load_values::{LoadValues, NAMES};
use crate::engine::time::BootTime;

/// How far it goes back.
pub const HISTORY: Duration = Duration::from_mins(10);
/// Time between two points.
const STEP: Duration = Duration::from_secs(30);

/// The values at one time. NaN: unknown.
type Point = (BootTime, [f32; NAMES.len()]);

/// At most 21 points of 60 bytes.
#[derive(Debug, Default)]
pub struct LoadHistory(VecDeque<Point>);

/// The values at some time in the past.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Past {
    /// When they were measured.
    pub at: BootTime,
    /// The values, with the precision of `f32`.
    pub values: LoadValues,
}

impl LoadHistory {
    /// Adds values, unless there are some that are hardly older.
    #[expect(clippy::cast_possible_truncation, reason = "percentages")]
    pub fn push(&mut self, at: BootTime, values: &LoadValues) {
        if self.0.back().is_some_and(|(last, _)| at < *last + STEP) {
            return;
        }
        self.0
            .push_back((at, values.0.map(|it| it.map_or(f32::NAN, |it| it as f32))));
        while self
            .0
            .front()
            .is_some_and(|(first, _)| at.since(*first) > HISTORY)
        {
            self.0.pop_front();
        }
    }

    /// The newest values that were measured at this time or before.
    pub fn at(&self, at: BootTime) -> Option<Past> {
        let mut points = self.0.iter().rev();
        let (at, values) = points.find(|(measured, _)| *measured <= at)?;
        let known = |value: f32| (!value.is_nan()).then_some(f64::from(value));
        Some(Past {
            at: *at,
            values: LoadValues(values.map(known)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    #[test]
    fn it_has_a_point_each_half_minute_for_ten_minutes() {
        let mut history = LoadHistory::default();
        for second in (1000..3000).step_by(10) {
            let mut values = LoadValues::default();
            values.0[0] = Some(second as f64);
            history.push(at(second), &values);
        }
        assert_eq!(history.0.len(), 21);
        let found = |second| {
            history
                .at(at(second))
                .map(|past| (past.at, past.values.0[0]))
        };
        assert_eq!(found(2990), Some((at(2980), Some(2980.0))));
        assert_eq!(found(2800), Some((at(2800), Some(2800.0))));
        assert_eq!(found(2379), None, "forgotten");
        assert_eq!(history.at(at(2800)).unwrap().values.0[1], None);
    }
}
