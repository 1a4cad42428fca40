use super::*;

const fn at(seconds: u64) -> BootTime {
    BootTime::from_nanos((1000 + seconds) * 1_000_000_000)
}

fn known(load: Option<f64>) -> WantedSigns {
    WantedSigns {
        load,
        ..WantedSigns::default()
    }
}

fn schedule() -> SignSchedule {
    SignSchedule::new(Rng::with_seed(7))
}

const LABEL: SignStep = SignStep::Write(WrittenParts {
    label: true,
    crane: false,
});

/// The next step on a Node with this label, and without crane's annotations.
fn step(
    schedule: &mut SignSchedule,
    second: u64,
    wants: &WantedSigns,
    label: Option<&str>,
) -> SignStep {
    let crane = &CraneAnnotations::default();
    schedule.step(at(second), wants, SeenSigns { label, crane })
}

/// A Node whose watch shows a write in the next step.
struct Node {
    schedule: SignSchedule,
    text: Option<String>,
    writes: Vec<(u64, Option<String>)>,
}

impl Node {
    fn new(text: Option<&str>) -> Self {
        Self {
            schedule: schedule(),
            text: text.map(str::to_owned),
            writes: Vec::new(),
        }
    }

    fn step(&mut self, second: u64, load: Option<f64>) {
        let wants = known(load);
        if step(&mut self.schedule, second, &wants, self.text.as_deref()) == LABEL {
            self.text = wants.label().map(|it| it.to_string());
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
fn urgent_changes_are_written_at_once_and_others_after_10_seconds() {
    let mut node = Node::new(Some("70"));
    node.run(0..100, |_| Some(74.0));
    assert_eq!(node.writes, [write(10, "75")]);
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
        Some(if second % 10 < 9 { 74.0 } else { 69.0 })
    });
    assert_eq!(short.writes, [], "it never lasted");
}

#[test]
fn writes_are_bounded_and_the_last_one_is_for_a_full_node() {
    let mut node = Node::new(Some("60"));
    node.run(0..3600, |second| {
        Some(if second % 2 == 0 { 99.0 } else { 10.0 })
    });
    assert!(node.writes.len() <= 3 + 3600 / 5, "{}", node.writes.len());
    let mut node = Node::new(Some("60"));
    node.run(0..30, |second| {
        Some(if second % 2 == 0 { 99.0 } else { 10.0 })
    });
    assert_eq!(node.text.as_deref(), Some("100"), "{:?}", node.writes);
}

#[test]
fn a_node_that_becomes_full_is_labelled_at_once_whatever_was_written_before() {
    let mut schedule = schedule();
    let mut text = Some("60".to_owned());
    let mut writes = 0;
    let mut step = |second: u64, load: f64| {
        let wants = WantedSigns {
            interval: Duration::from_mins(1),
            ..known(Some(load))
        };
        if step(&mut schedule, second, &wants, text.as_deref()) == LABEL {
            text = wants.label().map(|it| it.to_string());
            writes += 1;
        }
        text.clone()
    };
    let mut rng = Rng::with_seed(3);
    for minute in 0..60 {
        let start = minute * 60;
        for second in start..start + 40 {
            step(second, rng.f64() * 90.0);
        }
        let label = step(start + 40, 97.0);
        assert_eq!(label.as_deref(), Some("100"), "minute {minute}");
    }
    assert!(writes <= 3 + 60, "{writes}");
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
    let change = label::change(Some("busy"), &known(None));
    assert_eq!(change, Urgency::Urgent, "what is not ours goes too");
}

#[test]
fn a_label_that_is_not_wanted_goes_at_once() {
    let mut schedule = schedule();
    let off = WantedSigns {
        remove: true,
        ..known(Some(99.0))
    };
    assert_eq!(step(&mut schedule, 0, &off, Some("70")), LABEL);
    assert_eq!(off.label(), None);
}

#[test]
fn the_controller_stretches_the_interval() {
    let mut schedule = schedule();
    let slow = |load| WantedSigns {
        interval: Duration::from_mins(10),
        ..known(Some(load))
    };
    let mut writes = 0;
    for second in 0..3600 {
        let load = if second % 2 == 0 { 99.0 } else { 10.0 };
        let text = if second % 2 == 0 { "10" } else { "100" };
        writes += u32::from(step(&mut schedule, second, &slow(load), Some(text)) == LABEL);
    }
    assert!((6..=9).contains(&writes), "{writes}");
}
