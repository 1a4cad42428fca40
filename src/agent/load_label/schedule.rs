//! When the label is written. Pure.
//!
//! Only differences that count for schedulers are written: loads up to 60 count alike. A rise of 10, a fall of 20, and a crossing of
//! 95 either way are written at once, other differences once they have lasted a minute. At most three writes at a time, then
//! one per interval; the last of the three is for rises, so that a node that becomes hot is always avoided at once.

use std::time::Duration;

use super::WantedLabel;
use crate::cluster::token_bucket::TokenBucket;
use crate::crd::load_label::{FULL, LoadLabel};
use crate::engine::time::BootTime;

/// One write per this time, for long.
pub(super) const INTERVAL: Duration = Duration::from_mins(1);
/// Writes at a time.
const BURST: u32 = 3;
/// Small differences, and an unknown load, are written after this time.
const SETTLE: Duration = Duration::from_mins(1);
/// In percent.
const URGENT_RISE: u8 = 10;
const URGENT_FALL: u8 = 20;

/// The next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Write this label; `None`: remove it.
    Write(Option<LoadLabel>),
    /// Wait until something changes, or for this long.
    Wait(Option<Duration>),
}

/// Decides the next step.
#[derive(Debug)]
pub(super) struct Schedule {
    bucket: TokenBucket,
    /// The interval of the bucket.
    interval: Duration,
    /// Since when the label differs from the load.
    differs: Option<BootTime>,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            bucket: TokenBucket::new(BURST, INTERVAL),
            interval: INTERVAL,
            differs: None,
        }
    }
}

/// The label on a Node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OnNode {
    Absent,
    Label(LoadLabel),
    /// Text that is no value of the label.
    Invalid,
}

impl OnNode {
    fn of(text: Option<&str>) -> Self {
        let read = |text| LoadLabel::parse(text).map_or(Self::Invalid, Self::Label);
        text.map_or(Self::Absent, read)
    }
}

/// How much a difference matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    None,
    Small,
    Rise,
    Fall,
}

impl Schedule {
    /// The next step; `text` is the label on the Node.
    pub(super) fn step(&mut self, now: BootTime, wants: WantedLabel, text: Option<&str>) -> Step {
        self.set_interval(wants.interval);
        let load = wants.load.filter(|_| !wants.remove);
        let wanted = load.and_then(LoadLabel::of);
        let change = match change(OnNode::of(text), wanted) {
            Change::Small if wants.remove => Change::Fall,
            change => change,
        };
        if change == Change::None {
            self.differs = None;
            return Step::Wait(None);
        }
        let since = *self.differs.get_or_insert(now);
        let lasted = now.since(since);
        if change == Change::Small && lasted < SETTLE {
            return Step::Wait(Some(SETTLE.saturating_sub(lasted)));
        }
        let reserve = u32::from(change != Change::Rise);
        let left = self.bucket.time_until(now, 1 + reserve);
        if !left.is_zero() {
            return Step::Wait(Some(left));
        }
        self.bucket.try_take(now);
        Step::Write(wanted)
    }

    fn set_interval(&mut self, interval: Duration) {
        let interval = interval.max(INTERVAL);
        if interval != self.interval {
            self.interval = interval;
            self.bucket.set_interval(interval);
        }
    }
}

/// How much the label on the Node differs from the load.
fn change(current: OnNode, wanted: Option<LoadLabel>) -> Change {
    let (current, wanted) = match (current, wanted) {
        (OnNode::Absent, None) => return Change::None,
        // A load that is unknown for a moment keeps its label.
        (OnNode::Label(_), None) => return Change::Small,
        (OnNode::Invalid, None) => return Change::Fall,
        (OnNode::Absent | OnNode::Invalid, Some(_)) => return Change::Rise,
        (OnNode::Label(current), Some(wanted)) => (current, wanted),
    };
    if current.headroom() == wanted.headroom() {
        return Change::None;
    }
    if current < wanted {
        let by = wanted.percent() - current.percent();
        let urgent = by >= URGENT_RISE || wanted >= FULL && current < FULL;
        return if urgent { Change::Rise } else { Change::Small };
    }
    let by = current.percent() - wanted.percent();
    let urgent = by >= URGENT_FALL || current >= FULL && wanted < FULL;
    if urgent { Change::Fall } else { Change::Small }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(seconds: u64) -> BootTime {
        BootTime::from_nanos((1000 + seconds) * 1_000_000_000)
    }

    fn known(load: Option<f64>) -> WantedLabel {
        WantedLabel {
            load,
            ..WantedLabel::default()
        }
    }

    /// A Node whose watch shows a write in the next step.
    struct Node {
        schedule: Schedule,
        text: Option<String>,
        writes: Vec<(u64, Option<String>)>,
    }

    impl Node {
        fn new(text: Option<&str>) -> Self {
            Self {
                schedule: Schedule::default(),
                text: text.map(str::to_owned),
                writes: Vec::new(),
            }
        }

        fn step(&mut self, second: u64, load: Option<f64>) {
            let text = self.text.clone();
            let step = self.schedule.step(at(second), known(load), text.as_deref());
            if let Step::Write(label) = step {
                self.text = label.map(|it| it.to_string());
                self.writes.push((second, self.text.clone()));
            }
        }

        fn run(&mut self, seconds: std::ops::Range<u64>, load: impl Fn(u64) -> Option<f64>) {
            for second in seconds {
                self.step(second, load(second));
            }
        }
    }

    fn write(second: u64, text: &str) -> (u64, Option<String>) {
        (second, Some(text.to_owned()))
    }

    #[test]
    fn loads_up_to_60_cause_no_writes() {
        let mut node = Node::new(Some("5"));
        node.run(0..600, |second| {
            Some(f64::from(u8::try_from(second % 60).expect("below 60")))
        });
        assert_eq!(node.writes, []);
    }

    #[test]
    fn a_new_node_is_labelled_at_once_and_whatever_else_is_there_is_replaced() {
        for text in [None, Some("busy"), Some("007")] {
            let mut node = Node::new(text);
            node.run(0..5, |_| Some(41.0));
            assert_eq!(node.writes, [write(0, "45")], "{text:?}");
        }
    }

    #[test]
    fn urgent_changes_are_written_at_once_and_others_after_a_minute() {
        let mut node = Node::new(Some("70"));
        node.run(0..100, |_| Some(74.0));
        assert_eq!(node.writes, [write(60, "75")]);
        for (from, load, text) in [
            ("70", 78.0, "80"),
            ("90", 92.0, "95"),
            ("95", 89.0, "90"),
            ("90", 68.0, "70"),
        ] {
            let mut node = Node::new(Some(from));
            node.step(0, Some(load));
            assert_eq!(node.writes, [write(0, text)], "from {from}");
        }
        let mut short = Node::new(Some("70"));
        short.run(0..600, |second| {
            Some(if second % 60 < 50 { 74.0 } else { 69.0 })
        });
        assert_eq!(short.writes, [], "it never lasted a minute");
    }

    #[test]
    fn writes_are_bounded_and_the_last_one_is_for_a_rise() {
        let mut node = Node::new(Some("60"));
        node.run(0..3600, |second| {
            Some(if second % 2 == 0 { 99.0 } else { 10.0 })
        });
        assert!(node.writes.len() <= 63, "{}", node.writes.len());
        let mut node = Node::new(Some("60"));
        node.run(0..30, |second| {
            Some(if second % 2 == 0 { 99.0 } else { 10.0 })
        });
        assert_eq!(node.text.as_deref(), Some("100"), "{:?}", node.writes);
    }

    #[test]
    fn an_unknown_load_keeps_the_label_for_a_minute() {
        let mut node = Node::new(Some("70"));
        node.run(0..59, |_| None);
        assert_eq!(node.writes, []);
        node.run(59..120, |_| None);
        assert_eq!(node.writes, [(60, None)]);
        node.run(120..240, |_| None);
        assert_eq!(node.writes.len(), 1, "it is gone");
        assert_eq!(
            change(OnNode::Invalid, None),
            Change::Fall,
            "what is not ours goes too"
        );
    }

    #[test]
    fn a_label_that_is_not_wanted_goes_at_once() {
        let mut schedule = Schedule::default();
        let off = WantedLabel {
            remove: true,
            ..known(Some(99.0))
        };
        assert_eq!(schedule.step(at(0), off, Some("70")), Step::Write(None));
    }

    #[test]
    fn the_controller_stretches_the_interval() {
        let mut schedule = Schedule::default();
        let slow = |load| WantedLabel {
            interval: Duration::from_mins(10),
            ..known(Some(load))
        };
        let mut writes = 0;
        for second in 0..3600 {
            let load = if second % 2 == 0 { 99.0 } else { 10.0 };
            let text = if second % 2 == 0 { "10" } else { "100" };
            let step = schedule.step(at(second), slow(load), Some(text));
            writes += u32::from(matches!(step, Step::Write(_)));
        }
        assert!((6..=9).contains(&writes), "{writes}");
    }
}
