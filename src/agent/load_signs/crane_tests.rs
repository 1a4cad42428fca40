use std::collections::BTreeMap;

use super::super::WantedSigns;
use super::super::schedule::{SeenSigns, SignSchedule, SignStep, WrittenParts};
use super::*;
use crate::crd::crane_annotations::{HOT, KEYS, WRITTEN};

const fn at(seconds: u64) -> BootTime {
    BootTime::from_nanos((1000 + seconds) * 1_000_000_000)
}

fn values(usage: f64, pending: f64) -> CraneValues {
    CraneValues::of([Some(usage); 6], Some(pending))
}

/// A Node whose watch shows a write in the next step.
struct Node {
    schedule: SignSchedule,
    annotations: BTreeMap<String, String>,
    interval: Duration,
    writes: Vec<u64>,
}

impl Node {
    fn new(seed: u64) -> Self {
        Self {
            schedule: SignSchedule::new(Rng::with_seed(seed)),
            annotations: BTreeMap::new(),
            interval: Duration::ZERO,
            writes: Vec::new(),
        }
    }

    /// One on which the first write is done, and the bucket is full again.
    fn settled(usage: f64, pending: f64) -> Self {
        let mut node = Self::new(7);
        node.step(0, values(usage, pending));
        assert_eq!(node.writes, [0]);
        node.writes.clear();
        node
    }

    fn seen(&self) -> CraneAnnotations {
        CraneAnnotations::of(Some(&self.annotations))
    }

    fn decide(&mut self, second: u64, crane: WantedCrane) -> SignStep {
        let wants = WantedSigns {
            crane,
            interval: self.interval,
            ..WantedSigns::default()
        };
        let seen = self.seen();
        let signs = SeenSigns {
            label: None,
            crane: &seen,
        };
        self.schedule.step(at(second), &wants, signs)
    }

    fn step(&mut self, second: u64, values: CraneValues) {
        let SignStep::Write(parts) = self.decide(second, WantedCrane::Values(values)) else {
            return;
        };
        assert!(parts.crane && !parts.label);
        self.write(second, &values);
        self.schedule.written(at(second), parts);
        self.writes.push(second);
    }

    fn write(&mut self, second: u64, values: &CraneValues) {
        let time = format!("t{second}");
        let ours: Vec<_> = self.seen().ours().collect();
        for key in ours {
            self.annotations.remove(key);
        }
        for (key, text) in values.annotations(&time) {
            self.annotations
                .extend(text.map(|text| (key.to_owned(), text)));
        }
        self.annotations.insert(WRITTEN.to_owned(), time);
    }

    /// Another writer sets an annotation.
    fn set(&mut self, key: &str, text: &str) {
        self.annotations.insert(key.to_owned(), text.to_owned());
    }

    fn run(&mut self, seconds: std::ops::Range<u64>, values: impl Fn(u64) -> CraneValues) {
        for second in seconds {
            self.step(second, values(second));
        }
    }
}

#[test]
fn a_use_that_moves_by_two_points_for_a_minute_is_written() {
    let mut node = Node::settled(30.0, 0.0);
    node.run(200..290, |_| values(31.9, 0.0));
    assert_eq!(node.writes, [0; 0], "less than two points");
    node.run(290..299, |second| {
        values(if second % 50 < 45 { 33.0 } else { 30.5 }, 0.0)
    });
    assert_eq!(node.writes, [0; 0], "it did not last");
    let mut node = Node::settled(30.0, 0.0);
    node.run(200..280, |_| values(28.0, 0.0));
    assert_eq!(node.writes, [260]);
}

#[test]
fn a_hot_value_is_written_at_once_if_it_rises_and_after_a_minute_if_it_falls() {
    let mut node = Node::settled(30.0, 0.0);
    node.run(200..203, |_| values(30.0, 0.4));
    assert_eq!(node.writes, [0; 0], "less than a point");
    node.run(203..205, |_| values(30.0, 1.0));
    assert_eq!(node.writes, [203]);
    let mut node = Node::settled(30.0, 9.0);
    node.run(100..200, |_| values(30.0, 8.0));
    assert_eq!(node.writes, [160]);
}

#[test]
fn a_burst_of_small_rises_leaves_a_write_for_a_large_one() {
    let mut node = Node::settled(30.0, 0.0);
    node.interval = Duration::from_mins(1);
    node.run(240..250, |second| values(30.0, (second - 239) as f64));
    assert_eq!(node.writes, [240, 241], "the third is kept");
    node.step(250, values(30.0, 20.0));
    assert_eq!(node.writes, [240, 241, 250]);
}

#[test]
fn nothing_expires_in_crane_scheduler() {
    for seed in 0..5 {
        let mut idle = Node::new(seed);
        idle.run(0..3600, |_| values(30.0, 0.0));
        let gaps = gaps(&idle.writes);
        assert!(gaps.iter().all(|gap| (300..=360).contains(gap)), "{gaps:?}");
        let mut hot = Node::new(seed);
        hot.run(0..3600, |_| values(30.0, 3.0));
        let gaps = self::gaps(&hot.writes);
        assert!(gaps.iter().all(|gap| (240..=270).contains(gap)), "{gaps:?}");
    }
}

fn gaps(writes: &[u64]) -> Vec<u64> {
    writes.windows(2).map(|two| two[1] - two[0]).collect()
}

#[test]
fn nodes_write_at_different_times() {
    let second_write = |seed| {
        let mut node = Node::new(seed);
        node.run(0..400, |_| values(30.0, 0.0));
        node.writes[1]
    };
    let times: std::collections::BTreeSet<u64> = (0..50).map(second_write).collect();
    assert!(times.len() > 25, "{times:?}");
}

#[test]
fn of_5000_nodes_all_writes_stay_under_20_a_second_and_none_expires() {
    // As the leader asks: one write per 250 s and node. Uses swing, and pods come and go.
    let mut node = Node::new(7);
    node.interval = Duration::from_secs(250);
    node.run(0..36_000, |second| {
        let swing = f64::from(u8::from(second / 90 % 2 == 0)) * 20.0;
        values(30.0 + swing, (second % 13) as f64)
    });
    let writes = node.writes.len() as f64;
    assert!(writes / 36_000.0 * 5000.0 <= 20.5, "{writes}");
    let gaps = gaps(&node.writes);
    assert!(gaps.iter().all(|gap| *gap < 300), "{gaps:?}");
}

#[test]
fn a_pending_change_does_not_hold_up_the_refresh() {
    let mut node = Node::new(7);
    node.interval = Duration::from_secs(250);
    node.run(0..3, |second| values(30.0, 20.0 * second as f64));
    assert_eq!(node.writes, [0, 1, 2], "none is left");
    // Two tokens, which a small change needs, are there after 500 s.
    node.run(3..400, |second| {
        values(if second < 100 { 30.0 } else { 50.0 }, 40.0)
    });
    assert_eq!(node.writes.len(), 4, "{:?}", node.writes);
    assert!((242..=272).contains(&node.writes[3]), "{:?}", node.writes);
}

#[test]
fn what_becomes_unknown_is_removed_after_a_minute_and_nothing_is_written_for_it() {
    let unknown = || CraneValues::of([Some(30.0), None, None, None, None, None], Some(0.0));
    let mut node = Node::settled(30.0, 0.0);
    node.run(100..159, |_| unknown());
    assert_eq!(node.writes, [0; 0], "unknown for a moment");
    node.run(159..200, |_| unknown());
    assert_eq!(node.writes, [160]);
    assert!(!node.annotations.contains_key(KEYS[1]));
    let mut never = Node::new(7);
    never.run(0..7200, |_| CraneValues::default());
    assert_eq!(never.writes, [0; 0]);
}

#[test]
fn what_an_earlier_agent_wrote_is_renewed_at_once() {
    let mut node = Node::new(7);
    node.write(0, &values(30.0, 0.0));
    node.run(10..20, |_| values(30.0, 0.0));
    assert_eq!(node.writes, [10]);
}

#[test]
fn another_writer_is_overwritten_after_a_minute_and_never_takes_the_last_write() {
    let mut node = Node::settled(30.0, 0.0);
    node.set(HOT, "0,t1");
    node.run(100..170, |_| values(30.0, 30.0));
    assert_eq!(node.writes, [160]);
    assert_eq!(node.seen().others().count(), 0);
    let mut fight = Node::settled(30.0, 0.0);
    for second in 100..3700 {
        fight.set(KEYS[0], "0.10000,other");
        fight.step(second, values(30.0, 30.0));
    }
    assert!(fight.writes.len() <= 61, "{}", fight.writes.len());
}

#[test]
fn another_writer_is_noticed_only_after_a_write_of_ours() {
    let mut node = Node::new(7);
    node.set(HOT, "0,t1");
    let seen = node.seen();
    let signs = SeenSigns {
        label: None,
        crane: &seen,
    };
    assert!(!node.schedule.is_contested(signs), "crane's, from before");
    let ours = WrittenParts {
        label: false,
        crane: true,
    };
    node.schedule.written(at(0), ours);
    assert!(node.schedule.is_contested(signs));
}

#[test]
fn ours_are_removed_at_once_and_those_of_others_stay() {
    let mut node = Node::settled(30.0, 0.0);
    let removed = node.decide(100, WantedCrane::Removed);
    let ours = WrittenParts {
        label: false,
        crane: true,
    };
    assert_eq!(removed, SignStep::Write(ours));
    assert_eq!(
        node.decide(100, WantedCrane::Unchanged),
        SignStep::Wait(None),
        "before the first decision"
    );
    let mut others = Node::new(7);
    others.set(KEYS[0], "0.10000,t1");
    others.set(HOT, "0,t1");
    let step = others.decide(100, WantedCrane::Removed);
    assert_eq!(step, SignStep::Wait(None));
}
