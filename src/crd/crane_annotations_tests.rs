use super::*;

const TIME: &str = "2026-11-26T04:05:06Z";

fn shanghai() -> Zone {
    "Asia/Shanghai".parse().expect("a zone")
}

fn now() -> Timestamp {
    "2026-11-25T20:05:06.9Z".parse().expect("a time")
}

fn values(usage: f64, pending: f64) -> CraneValues {
    CraneValues::of([Some(usage); 6], Some(pending))
}

fn texts(values: &CraneValues) -> Vec<Option<String>> {
    values.annotations(TIME).map(|(_, text)| text).collect()
}

/// A Node's annotations.
fn on_node(annotations: &[(&str, &str)]) -> CraneAnnotations {
    let all = annotations.iter();
    let all = all.map(|(key, text)| ((*key).to_owned(), (*text).to_owned()));
    CraneAnnotations::of(Some(&all.collect()))
}

#[test]
fn times_are_the_clock_of_the_zone_with_a_literal_z() {
    assert_eq!(shanghai().time(now()), TIME);
    assert_eq!(
        "UTC".parse::<Zone>().expect("a zone").time(now()),
        "2026-11-25T20:05:06Z"
    );
    let read = shanghai().parse(TIME).expect("a time");
    assert_eq!(read.to_string(), "2026-11-25T20:05:06Z");
    for text in [
        "",
        "abc",
        "2026-11-26",
        "2026-11-26T04:05:06",
        "2026-13-26T04:05:06Z",
    ] {
        assert_eq!(shanghai().parse(text), None, "{text:?}");
    }
}

#[test]
fn an_unknown_zone_says_what_to_write() {
    for name in ["", "Shanghai", "UTC+8", "Asia/Nowhere"] {
        let error = name.parse::<Zone>().expect_err("no zone");
        assert!(error.contains("such as Asia/Shanghai or UTC"), "{error}");
    }
}

#[test]
fn uses_are_shares_with_five_decimals_and_a_hot_value_is_a_tenth_of_the_pending_percent() {
    let known = values(63.012, 7.5);
    let mut all = vec![Some(format!("0.63012,{TIME}")); 6];
    all.push(Some(format!("0.8,{TIME}")));
    assert_eq!(texts(&known), all);
    let keys: Vec<_> = known.annotations(TIME).map(|(key, _)| key).collect();
    assert_eq!(keys, KEYS);
    for (usage, pending, share, hot) in [
        (0.0, 0.0, "0.00000", "0.0"),
        (-1.0, -5.0, "0.00000", "0.0"),
        (100.0, 1.0, "1.00000", "0.1"),
        (130.0, 250.0, "1.00000", "10.0"),
        (0.000_4, 0.4, "0.00000", "0.0"),
        (33.333_333, 99.6, "0.33333", "10.0"),
    ] {
        let all = texts(&values(usage, pending));
        assert_eq!(all[0], Some(format!("{share},{TIME}")), "{usage}");
        assert_eq!(all[6], Some(format!("{hot},{TIME}")), "{pending}");
    }
}

#[test]
fn what_is_unknown_has_no_text() {
    let some = CraneValues::of(
        [
            Some(1.0),
            None,
            Some(f64::NAN),
            None,
            Some(f64::INFINITY),
            None,
        ],
        None,
    );
    let mut none = vec![None; 7];
    assert_eq!(texts(&CraneValues::default()), none);
    none[0] = Some(format!("0.01000,{TIME}"));
    assert_eq!(texts(&some), none);
    assert!(!some.is_empty() && CraneValues::default().is_empty());
}

#[test]
fn what_was_written_is_read_again() {
    for tenths in 0..=100u32 {
        let written = values(f64::from(tenths) * 0.987, f64::from(tenths));
        let node: Vec<_> = written.annotations(TIME).collect();
        let mut node: Vec<_> = node
            .iter()
            .map(|(key, text)| (*key, text.as_deref().expect("known")))
            .collect();
        node.push((WRITTEN, TIME));
        assert_eq!(on_node(&node).values(), written);
        assert_eq!(on_node(&node).ours().count(), 8);
        assert_eq!(on_node(&node).others().count(), 0);
    }
}

#[test]
fn only_values_with_the_time_of_our_last_write_are_ours() {
    let cpu = format!("0.50000,{TIME}");
    let node = on_node(&[
        (KEYS[0], &cpu),
        (KEYS[1], "0.50000,2026-11-26T04:05:07Z"),
        (KEYS[2], "nonsense"),
        (HOT, "0,2026-11-26T04:05:07Z"),
        (WRITTEN, TIME),
        ("example.com/a", TIME),
    ]);
    assert_eq!(node.ours().collect::<Vec<_>>(), [KEYS[0], WRITTEN]);
    assert_eq!(node.others().collect::<Vec<_>>(), [KEYS[1], KEYS[2], HOT]);
    assert_eq!(node.values().usage()[0], Some(50.0));
    assert_eq!(node.values().usage()[1], None);
    let without = on_node(&[(KEYS[0], &cpu)]);
    assert_eq!(without.ours().count(), 0, "crane's own");
    assert!(without.values().is_empty());
    assert_eq!(CraneAnnotations::of(None), CraneAnnotations::default());
}

#[test]
fn a_number_that_we_would_not_write_is_not_read() {
    for number in ["", "0.5", "0.500000", "1.10000", "-0.1", "NaN", "5e-1"] {
        let text = format!("{number},{TIME}");
        let node = on_node(&[(KEYS[0], &text), (HOT, &text), (WRITTEN, TIME)]);
        assert_eq!(node.values().usage()[0], None, "{number}");
    }
}
