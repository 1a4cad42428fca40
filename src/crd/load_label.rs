//! The label with which schedulers see a node's load: `plimsoll.dev/load`, from "0" to "100" in steps of 5.
//!
//! Its agent writes it. At 100 the node's rules act or are about to. Schedulers read it through the terms that the chart
//! installs: loads up to 60 count alike, higher ones fall in steps, a node without the label counts as one at 80.

use std::fmt;
use std::time::Duration;

/// The key of the label.
pub const KEY: &str = "plimsoll.dev/load";
/// A load above 90: the node's rules are about to act. Reaching or leaving it is written at once.
pub const FULL: LoadLabel = LoadLabel(95);

/// A node gets the soft taint from this load on, in percent of its load line.
pub const BUSY_FROM: f64 = 95.0;
/// It loses the soft taint below this load.
pub const BUSY_UNTIL: f64 = 85.0;
/// A busy node stays so for this long at least.
pub const BUSY_FOR: Duration = Duration::from_mins(5);

const STEP: u8 = 5;
const MAX: u8 = 100;
/// The headroom of idle nodes: more is not advertised, or a burst of pods would all be sent to the one idle node.
pub const MAX_HEADROOM: u8 = 8;
/// The headroom of a node without a valid label: that of one at 80.
pub const DEFAULT_HEADROOM: u8 = 4;

/// A value of the label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LoadLabel(u8);

impl LoadLabel {
    /// For a load in percent of the load line, rounded up to the next step; above 100 it is 100. `None` if it is negative or
    /// not finite.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is from 0 to 20"
    )]
    pub fn of(percent: f64) -> Option<Self> {
        let known = percent.is_finite() && percent >= 0.0;
        known.then(|| {
            let steps = (percent.min(f64::from(MAX)) / f64::from(STEP)).ceil();
            Self(steps as u8 * STEP)
        })
    }

    /// From the text on a Node; `None` if it is not a valid value of the label.
    pub fn parse(text: &str) -> Option<Self> {
        let value: u8 = text.parse().ok()?;
        let label = Self(value);
        // Not "+5", "05" and the like, which no scheduler's term matches.
        let valid = value <= MAX && value.is_multiple_of(STEP) && label.to_string() == text;
        valid.then_some(label)
    }

    /// The load in percent, from 0 to 100 in steps of 5.
    pub const fn percent(self) -> u8 {
        self.0
    }

    /// What schedulers add up for the node: [`MAX_HEADROOM`] up to 60 percent, one less for each step above, 0 at 100.
    pub fn headroom(self) -> u8 {
        ((MAX - self.0) / STEP).min(MAX_HEADROOM)
    }
}

impl fmt::Display for LoadLabel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_rounded_up_to_a_step_of_five() {
        let of = |percent| LoadLabel::of(percent).map(LoadLabel::percent);
        assert_eq!(of(0.0), Some(0));
        assert_eq!(of(0.1), Some(5));
        assert_eq!(of(90.0), Some(90));
        assert_eq!(of(90.1), Some(95));
        assert_eq!(of(1e9), Some(100));
        for unknown in [f64::NAN, f64::INFINITY, -0.1] {
            assert_eq!(of(unknown), None, "{unknown}");
        }
    }

    #[test]
    fn only_its_own_values_are_read() {
        for step in 0..=20u8 {
            let label = LoadLabel(step * STEP);
            assert_eq!(LoadLabel::parse(&label.to_string()), Some(label));
        }
        for text in ["", "7", "05", "+5", "105", "-5", "7.5", "abc", " 5", "300"] {
            assert_eq!(LoadLabel::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn idle_nodes_are_not_told_apart() {
        let headroom = |percent| LoadLabel(percent).headroom();
        assert!((0..=60).step_by(5).all(|it| headroom(it) == MAX_HEADROOM));
        let falls: Vec<u8> = (60..=100).step_by(5).map(headroom).collect();
        assert_eq!(falls, [8, 7, 6, 5, 4, 3, 2, 1, 0]);
        assert_eq!(headroom(80), DEFAULT_HEADROOM);
    }
}
