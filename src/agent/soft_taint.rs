//! Whether the node has the soft taint `plimsoll.dev/busy`. Pure.

use std::time::Duration;

use crate::crd::load_label::{BUSY_FROM, BUSY_UNTIL};
use crate::engine::time::BootTime;

/// A busy node stays so for this long at least.
const HOLD: Duration = Duration::from_mins(5);

/// The state of the soft taint.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoftTaint {
    since: Option<BootTime>,
}

impl SoftTaint {
    /// Whether the node has the taint at this load, in percent of its load line (`None`: unknown, then it stays as it is), if
    /// it is on and the leader permits it.
    pub fn update(&mut self, now: BootTime, load: Option<f64>, permitted: bool) -> bool {
        let begins = load.is_some_and(|load| load >= BUSY_FROM);
        let ends = load.is_some_and(|load| load < BUSY_UNTIL);
        self.since = match self.since {
            _ if !permitted => None,
            None => begins.then_some(now),
            Some(since) if ends && now.since(since) >= HOLD => None,
            since => since,
        };
        self.since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_node_stays_so_for_five_minutes_and_until_its_load_is_below_85() {
        let at = |seconds: u64| BootTime::from_nanos((1000 + seconds) * 1_000_000_000);
        let mut taint = SoftTaint::default();
        let steps = [
            (0, Some(94.0), false),
            (1, Some(95.0), true),
            (2, Some(10.0), true),
            (299, None, true),
            (300, Some(84.0), true),
            (301, Some(84.0), false),
            (302, Some(99.0), true),
            (900, Some(90.0), true),
            (901, None, true),
            (902, Some(84.9), false),
            (903, None, false),
        ];
        for (second, load, busy) in steps {
            assert_eq!(
                taint.update(at(second), load, true),
                busy,
                "after {second} s"
            );
        }
        assert!(taint.update(at(1000), Some(99.0), true));
        assert!(
            !taint.update(at(1001), Some(99.0), false),
            "beyond the limit of its zone"
        );
    }
}
