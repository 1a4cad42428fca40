use proptest::prelude::*;
use proptest::{option, sample};

use super::*;

fn busy() -> Summary {
    Summary {
        sequence: Some(4242),
        version: Some("0.1.0".to_owned()),
        cpu: Percent::of(73.44),
        memory: Percent::of(61.2),
        cpu_mark: Percent::of(80.0),
        memory_mark: None,
        pressure: [Percent::of(1.2), None, Percent::of(0.0)],
        rules: Some(12),
        breached: Some(2),
        breached_rules: vec![RuleId::from("q/cpu"), RuleId::from("q/io")],
        throttled: Some(3),
        scheduling: Some(Scheduling::Disabled(TaintEffect::NoSchedule)),
    }
}

#[test]
fn a_busy_node_is_told_in_one_line() {
    let text = "seq=4242 cpu=73.4 mem=61.2 cpumark=80.0 psi=1.2/-/0.0 rules=12 throttled=3 scheduling=NoSchedule \
                v=0.1.0 breached=2:q/cpu,q/io";
    assert_eq!(busy().to_string(), text);
    assert_eq!(Summary::parse(text), busy());
}

#[test]
fn what_is_not_known_is_not_there_and_never_nought() {
    assert_eq!(Summary::default().to_string(), "");
    assert_eq!(Summary::parse(""), Summary::default());
    let doubtful =
        "cpu=NaN mem=-1 psi=x/1.0 seq=-5 throttled=many scheduling=Perhaps breached=:q/cpu cpu";
    let read = Summary::parse(doubtful);
    let known = Summary {
        pressure: [None, Percent::of(1.0), None],
        breached_rules: vec![RuleId::from("q/cpu")],
        ..Summary::default()
    };
    assert_eq!(read, known);
}

#[test]
fn words_of_other_versions_are_passed_over() {
    let text = "v2=yes cpu=5 future=a=b \t mem=7.25";
    let read = Summary::parse(text);
    assert_eq!(
        (read.cpu, read.memory),
        (Percent::of(5.0), Percent::of(7.3))
    );
    assert_eq!(read.version, None);
}

#[test]
fn of_an_annotation_that_is_too_long_only_whole_words_within_the_limit_are_read() {
    let filler = "x".repeat(MOST_BYTES - "cpu=1 ".len() - " mem=7".len());
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
fn percents_are_rounded_to_a_tenth_and_end_at_a_hundred() {
    assert_eq!(
        Percent::of(99.96).map(|it| it.to_string()).as_deref(),
        Some("100.0")
    );
    assert_eq!(Percent::of(104.0), Percent::of(100.0));
    for none in [f64::NAN, f64::INFINITY, -0.1] {
        assert_eq!(Percent::of(none), None);
    }
}

fn percents() -> impl Strategy<Value = Option<Percent>> {
    option::of((0_u16..=1000).prop_map(Percent))
}

fn schedulings() -> impl Strategy<Value = Option<Scheduling>> {
    option::of(sample::select(vec![
        Scheduling::Enabled,
        Scheduling::Disabled(TaintEffect::PreferNoSchedule),
        Scheduling::Disabled(TaintEffect::NoSchedule),
    ]))
}

prop_compose! {
    fn summaries(most_names: usize)(
        (sequence, rules, throttled, breached) in any::<(Option<u64>, Option<u32>, Option<u32>, u32)>(),
        version in option::of("[0-9a-z.+-]{1,30}"),
        (cpu, memory, cpu_mark, memory_mark) in (percents(), percents(), percents(), percents()),
        pressure in [percents(), percents(), percents()],
        names in prop::collection::vec("[a-z0-9.-]{1,40}/[a-z_]{1,20}", 0..=most_names),
        scheduling in schedulings(),
    ) -> Summary {
        Summary {
            sequence, version, cpu, memory, cpu_mark, memory_mark, pressure, rules, throttled, scheduling,
            breached: Some(breached),
            breached_rules: names.iter().map(|name| RuleId::from(name.as_str())).collect(),
        }
    }
}

proptest! {
    #[test]
    fn whatever_is_told_is_read_again_and_fits(told in summaries(20)) {
        let text = told.to_string();
        prop_assert!(text.len() <= MOST_BYTES, "{} bytes: {text}", text.len());
        let read = Summary::parse(&text);
        prop_assert_eq!(read.to_string(), text);
        // All but the names has room however large the numbers are, and of these only the ends may be missing.
        let names = read.breached_rules.iter().all(|name| told.breached_rules.contains(name));
        prop_assert!(names);
        let version = told.version.clone().filter(|version| version.len() <= LONGEST_VERSION);
        let whole = Summary { breached_rules: read.breached_rules.clone(), version, ..told };
        prop_assert_eq!(read, whole);
    }

    #[test]
    fn no_text_is_too_strange_to_be_read_and_told_again(text in ".{0,400}") {
        let read = Summary::parse(&text);
        let again = read.to_string();
        prop_assert!(again.len() <= MOST_BYTES);
        prop_assert_eq!(Summary::parse(&again).to_string(), again);
    }

    #[test]
    fn names_that_would_be_taken_for_others_are_left_out(name in "[ ,a-z/\t]{0,12}") {
        let told = Summary { breached: Some(1), breached_rules: vec![RuleId::from(name.as_str())], ..Summary::default() };
        let read = Summary::parse(&told.to_string());
        prop_assert!(read.breached_rules.is_empty() || read == told);
    }
}
