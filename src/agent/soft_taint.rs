//! Whether the node has the soft taint `plimsoll.dev/busy`. Pure.

use crate::crd::load_label::{BUSY_FOR, BUSY_FROM, BUSY_UNTIL};
use crate::engine::time::BootTime;

/// The state of the soft taint.
#[derive(Clone, Copy, Debug, Default)]
pub struct SoftTaint {
    since: Option<BootTime>,
}

impl SoftTaint {
    /// Whether the node has the taint at this load, in percent of its load line (`None`: unknown, then it stays as it is).
    /// `permitted`: it is on and the leader permits it; without a leader (`None`) no taint begins.
    pub fn update(&mut self, now: BootTime, load: Option<f64>, permitted: Option<bool>) -> bool {
        let begins = load.is_some_and(|load| load >= BUSY_FROM);
        let ends = load.is_some_and(|load| load < BUSY_UNTIL);
        self.since = match self.since {
            _ if permitted == Some(false) => None,
            None => (begins && permitted == Some(true)).then_some(now),
            Some(since) if ends && now.since(since) >= BUSY_FOR => None,
            since => since,
        };
        self.since.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::engine::plan::Plan;
    use crate::engine::pod::Pod;
    use crate::engine::sample::{CpuTimes, NodeMemory, Sample};
    use crate::engine::units::{Bytes, MilliCpu};
    use crate::engine::{Engine, testing};

    #[test]
    fn pods_that_never_start_do_not_keep_a_node_busy() {
        let stuck = |number: u32| Pod {
            cpu_request: MilliCpu(1000),
            running: false,
            ..testing::pod(&format!("{number:02}"))
        };
        let mut engine = Engine::new();
        engine.set_pending_pods((0..20).map(|number| Arc::new(stuck(number))).collect());
        let (mut plan, mut taint) = (Plan::default(), SoftTaint::default());
        let mut is_busy_after = |seconds: u64| {
            let at = BootTime::default() + Duration::from_secs(1000 + seconds);
            let mut sample = Sample {
                at,
                ..Sample::default()
            };
            sample.node.cpu = Some(CpuTimes {
                busy: 0,
                idle: 10 * at.as_nanos(),
                online: 10,
            });
            sample.node.memory = Some(NodeMemory {
                total: Bytes(64 << 30),
                available: Bytes(60 << 30),
                ..NodeMemory::default()
            });
            engine.step(at, &sample, &mut plan);
            let load = engine.load().ok().map(|load| load.percent);
            taint.update(at, load, Some(true))
        };
        let busy: Vec<u64> = (0..400).filter(|second| is_busy_after(*second)).collect();
        // They count from the first sample on, and a load is known from the second one on.
        assert_eq!((busy.first(), busy.last()), (Some(&1), Some(&300)));
    }

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
                taint.update(at(second), load, Some(true)),
                busy,
                "after {second} s"
            );
        }
        assert!(taint.update(at(1000), Some(99.0), Some(true)));
        assert!(
            !taint.update(at(1001), Some(99.0), Some(false)),
            "beyond the limit of its zone"
        );
    }

    #[test]
    fn without_a_leader_the_taint_ends_but_does_not_begin() {
        let at = |seconds: u64| BootTime::from_nanos((1000 + seconds) * 1_000_000_000);
        let mut taint = SoftTaint::default();
        assert!(!taint.update(at(0), Some(99.0), None));
        assert!(taint.update(at(1), Some(99.0), Some(true)));
        assert!(taint.update(at(600), Some(99.0), None), "it stays");
        assert!(!taint.update(at(601), Some(84.0), None));
        assert!(!taint.update(at(602), Some(99.0), None));
    }
}
