//! Regret of placements: how much more loaded the node is some minutes after pods were bound to it than it promised. Pure.

use std::collections::VecDeque;
use std::time::Duration;

use crate::engine::time::BootTime;

/// When the load is compared: as long as the windows of the expected load.
const AFTER: Duration = Duration::from_mins(5);
/// Limit of placements that wait; more at once are not counted.
const MAX_WAITING: usize = 512;

/// Placements of the last minutes.
#[derive(Debug, Default)]
pub struct Regret {
    /// Number of pods bound before.
    bound: u64,
    /// When pods were bound, with the load that was expected then, with them.
    waiting: VecDeque<(BootTime, f64)>,
}

impl Regret {
    /// At each sample: the node's load in percent of its load line (`None`: unknown), and the number of pods bound to it so
    /// far. Returns the load less what was expected when pods were bound 5 min ago, if there were any. A placement with an
    /// unknown load, then or now, is not counted.
    pub fn update(&mut self, now: BootTime, load: Option<f64>, bound: u64) -> Option<f64> {
        if std::mem::replace(&mut self.bound, bound) != bound && self.waiting.len() < MAX_WAITING {
            self.waiting.extend(load.map(|load| (now, load)));
        }
        let (at, expected) = *self.waiting.front()?;
        if now.since(at) < AFTER {
            return None;
        }
        self.waiting.pop_front();
        load.map(|load| load - expected)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_load_is_compared_five_minutes_after_pods_were_bound() {
        let at = |seconds: u64| BootTime::from_nanos((1000 + seconds) * 1_000_000_000);
        let mut regret = Regret::default();
        let steps = [
            (0, Some(40.0), 0, None),
            (1, Some(50.0), 2, None),
            (2, None, 3, None),
            (3, Some(60.0), 4, None),
            (300, Some(70.0), 4, None),
            (301, Some(72.5), 4, Some(22.5)),
            (302, Some(72.5), 4, None),
            (303, None, 4, None),
            (304, Some(72.5), 4, None),
        ];
        for (second, load, bound, expected) in steps {
            let compared = regret.update(at(second), load, bound);
            assert_eq!(compared, expected, "after {second} s");
        }
    }

    #[test]
    fn placements_that_wait_are_bounded() {
        let mut regret = Regret::default();
        for bound in 1..=2000 {
            regret.update(BootTime::default(), Some(1.0), bound);
        }
        assert_eq!(regret.waiting.len(), MAX_WAITING);
    }
}
