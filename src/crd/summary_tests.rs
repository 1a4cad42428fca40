use proptest::prelude::*;
use proptest::{option, sample};

use super::*;

fn busy() -> Summary {
    Summary {
        sequence: Some(4242),
        version: Some("0.1.0".to_owned()),
        cpu: Percent::of(73.44),
        memory: Percent::of(61.2),
        load: Percent::of(91.8),
        cpu_threshold: Percent::of(80.0),
        memory_threshold: None,
        pressure: [Percent::of(1.2), None, Percent::of(0.0)],
        rules: Some(12),
        breached: Some(2),
        breached_rules: vec![RuleId::from("q/cpu"), RuleId::from("q/io")],
        throttled: Some(3),
        scheduling: Some(ReportedScheduling::Disabled(TaintEffect::NoSchedule)),
    }
}

#[test]
fn a_summary_is_one_line() {
    let text = "seq=4242 cpu=73.4 mem=61.2 load=91.8 cpumark=80.0 psi=1.2/-/0.0 rules=12 throttled=3 scheduling=NoSchedule \
                v=0.1.0 breached=2:q/cpu,q/io";
    assert_eq!(busy().to_string(), text);
    assert_eq!(Summary::parse(text), busy());
}

#[test]
fn unknown_values_are_absent_not_zero() {
    assert_eq!(Summary::default().to_string(), "");
    assert_eq!(Summary::parse(""), Summary::default());
    let invalid =
        "cpu=NaN mem=-1 psi=x/1.0 seq=-5 throttled=many scheduling=Perhaps breached=:q/cpu cpu";
    let read = Summary::parse(invalid);
    let known = Summary {
        pressure: [None, Percent::of(1.0), None],
        breached_rules: vec![RuleId::from("q/cpu")],
        ..Summary::default()
    };
    assert_eq!(read, known);
}

#[test]
fn unknown_keys_are_ignored() {
    let text = "v2=yes cpu=5 future=a=b \t mem=7.25";
    let read = Summary::parse(text);
    assert_eq!(
        (read.cpu, read.memory),
        (Percent::of(5.0), Percent::of(7.3))
    );
    assert_eq!(read.version, None);
}

#[test]
fn only_pairs_within_the_size_limit_are_read() {
    let filler = "x".repeat(MAX_BYTES - "cpu=1 ".len() - " mem=7".len());
    let read = Summary::parse(&format!("cpu=1 {filler} mem=77 rules=3"));
    assert_eq!(read.cpu, Percent::of(1.0));
    assert_eq!(
        (read.memory, read.rules),
        (None, None),
        "7 of 77 is not read"
    );
    let endless = "ü".repeat(100_000);
    assert_eq!(Summary::parse(&endless), Summary::default());
}

#[test]
fn percentages_are_rounded_to_a_tenth_and_capped_at_100() {
    assert_eq!(
        Percent::of(99.96).map(|it| it.to_string()).as_deref(),
        Some("100.0")
    );
    assert_eq!(Percent::of(104.0), Percent::of(100.0));
    for invalid in [f64::NAN, f64::INFINITY, -0.1] {
        assert_eq!(Percent::of(invalid), None);
    }
}

fn percents() -> impl Strategy<Value = Option<Percent>> {
    option::of((0_u16..=1000).prop_map(Percent))
}

fn schedulings() -> impl Strategy<Value = Option<ReportedScheduling>> {
    option::of(sample::select(vec![
        ReportedScheduling::Enabled,
        ReportedScheduling::Disabled(TaintEffect::PreferNoSchedule),
        ReportedScheduling::Disabled(TaintEffect::NoSchedule),
    ]))
}

prop_compose! {
    fn summaries(max_names: usize)(
        (sequence, rules, throttled, breached) in any::<(Option<u64>, Option<u32>, Option<u32>, u32)>(),
        version in option::of("[0-9a-z.+-]{1,30}"),
        (cpu, memory, load, cpu_threshold, memory_threshold) in (percents(), percents(), percents(), percents(), percents()),
        pressure in [percents(), percents(), percents()],
        names in prop::collection::vec("[a-z0-9.-]{1,40}/[a-z_]{1,20}", 0..=max_names),
        scheduling in schedulings(),
    ) -> Summary {
        Summary {
            sequence, version, cpu, memory, load, cpu_threshold, memory_threshold, pressure, rules, throttled, scheduling,
            breached: Some(breached),
            breached_rules: names.iter().map(|name| RuleId::from(name.as_str())).collect(),
        }
    }
}

proptest! {
    #[test]
    fn every_summary_survives_a_round_trip_within_the_limit(summary in summaries(20)) {
        let text = summary.to_string();
        prop_assert!(text.len() <= MAX_BYTES, "{} bytes: {text}", text.len());
        let read = Summary::parse(&text);
        prop_assert_eq!(read.to_string(), text);
        // Everything but the names fits, however large the numbers are.
        let names = read.breached_rules.iter().all(|name| summary.breached_rules.contains(name));
        prop_assert!(names);
        let version = summary.version.clone().filter(|version| version.len() <= MAX_VERSION);
        let whole = Summary { breached_rules: read.breached_rules.clone(), version, ..summary };
        prop_assert_eq!(read, whole);
    }

    #[test]
    fn any_text_can_be_parsed_and_written_again(text in ".{0,400}") {
        let read = Summary::parse(&text);
        let written = read.to_string();
        prop_assert!(written.len() <= MAX_BYTES);
        prop_assert_eq!(Summary::parse(&written).to_string(), written);
    }

    #[test]
    fn names_with_separators_are_left_out(name in "[ ,a-z/\t]{0,12}") {
        let summary = Summary { breached: Some(1), breached_rules: vec![RuleId::from(name.as_str())], ..Summary::default() };
        let read = Summary::parse(&summary.to_string());
        prop_assert!(read.breached_rules.is_empty() || read == summary);
    }
}
