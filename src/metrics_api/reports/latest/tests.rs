use proptest::prelude::*;

use super::*;

const MIN_AGE: Duration = Duration::ZERO;

fn at(seconds: u64) -> BootTime {
    BootTime::default() + Duration::from_secs(seconds)
}

/// A report identified by its number of pods.
fn report(node: &str, boot: &str, agent_started_millis: u64, sequence: u64, pods: i64) -> Report {
    Report {
        node: node.to_owned(),
        boot_id: boot.to_owned(),
        agent_started_millis,
        sequence,
        uptime_millis: None,
        interval_seconds: 10,
        status: NodeMetricStatus {
            pods: Some(pods),
            ..NodeMetricStatus::default()
        },
    }
}

fn latest(nodes: &[&str]) -> Latest {
    let mut latest = Latest::default();
    for node in nodes {
        latest.node(node, Some(""));
    }
    latest.open(at(0));
    latest
}

fn take_all(latest: &mut Latest) -> Vec<(String, i64)> {
    let reports = latest.take().into_iter();
    reports
        .map(|report| (report.node.to_string(), report.status.pods.unwrap()))
        .collect()
}

#[test]
fn the_last_report_of_each_node_is_returned_once() {
    let mut latest = latest(&["a", "b"]);
    assert_eq!(
        latest.put(report("a", "x", 1, 1, 1), MIN_AGE, at(0)),
        StoreOutcome::Stored(None)
    );
    let age = Some(Duration::from_secs(9));
    assert_eq!(
        latest.put(report("a", "x", 1, 2, 2), MIN_AGE, at(9)),
        StoreOutcome::Stored(age)
    );
    assert_eq!(
        latest.put(report("b", "x", 1, 1, 3), MIN_AGE, at(9)),
        StoreOutcome::Stored(None)
    );
    assert_eq!(latest.waiting_since(), Some(at(9)));
    assert_eq!(
        take_all(&mut latest),
        [("a".to_owned(), 2), ("b".to_owned(), 3)]
    );
    assert_eq!(take_all(&mut latest), []);
    assert_eq!(latest.waiting_since(), None);
}

#[test]
fn a_restarted_agent_or_machine_is_not_mistaken_for_a_replay() {
    let mut latest = latest(&["a"]);
    let mut put = |boot, started, sequence| {
        let outcome = latest.put(report("a", boot, started, sequence, 0), MIN_AGE, at(1));
        matches!(outcome, StoreOutcome::Stored(_))
    };
    assert!(put("x", 5, 7));
    assert!(!put("x", 5, 7), "the same");
    assert!(!put("x", 5, 6), "an older one");
    assert!(put("x", 6, 1), "after a restart of the agent");
    assert!(!put("x", 5, 8), "of the previous agent");
    assert!(put("y", 0, 1), "after a reboot");
    assert!(!put("x", 9, 9), "of the previous boot");
    assert!(put("y", 0, 2));
    assert!(!put("x", 9, 9), "still refused");
}

#[test]
fn only_an_identical_report_is_a_replay() {
    let mut latest = latest(&["a"]);
    let mut put = |boot, started, sequence, pods| {
        latest.put(report("a", boot, started, sequence, pods), MIN_AGE, at(1))
    };
    put("w", 9, 9, 0);
    put("x", 5, 7, 3);
    assert_eq!(put("x", 5, 7, 3), StoreOutcome::Replayed);
    assert_eq!(put("x", 5, 7, 4), StoreOutcome::Stale, "other content");
    assert_eq!(put("x", 5, 6, 3), StoreOutcome::Stale);
    assert_eq!(put("x", 4, 8, 3), StoreOutcome::Stale);
    assert_eq!(put("w", 9, 9, 0), StoreOutcome::Stale);
}

#[test]
fn a_report_of_another_boot_than_the_nodes_is_refused() {
    let mut latest = latest(&["a"]);
    let put = |latest: &mut Latest, boot, seconds| {
        latest.put(report("a", boot, 1, seconds, 0), MIN_AGE, at(seconds))
    };
    latest.node("a", Some("x"));
    assert_eq!(put(&mut latest, "y", 1), StoreOutcome::OtherBoot);
    assert_eq!(put(&mut latest, "x", 1), StoreOutcome::Stored(None));
    assert_eq!(put(&mut latest, "y", 2), StoreOutcome::OtherBoot);
    // The kubelet updates it after a reboot.
    latest.node("a", Some("y"));
    let age = Some(Duration::from_secs(2));
    assert_eq!(put(&mut latest, "y", 3), StoreOutcome::Stored(age));
    assert_eq!(put(&mut latest, "x", 4), StoreOutcome::OtherBoot);
}

/// A report of node `a` and boot `x`, whose first report is sent 100 s after the boot and received at 1000 s.
fn sent(latest: &mut Latest, started: u64, uptime: Option<u64>, seconds: u64) -> StoreOutcome {
    let report = Report {
        uptime_millis: uptime.map(|seconds| seconds.saturating_mul(1000)),
        ..report("a", "x", started.saturating_mul(1000), seconds, 0)
    };
    latest.put(report, MIN_AGE, at(1000 + seconds))
}

fn is_stored(outcome: StoreOutcome) -> bool {
    matches!(outcome, StoreOutcome::Stored(_))
}

#[test]
fn an_agent_cannot_start_later_than_elapsed_time_allows() {
    let mut latest = latest(&["a"]);
    assert!(is_stored(sent(&mut latest, 5, Some(100), 0)));
    // 10 s later the uptime is 110 s; the first report may have been in transit for a while.
    for impossible in [121, 100_000, u64::MAX] {
        let outcome = sent(&mut latest, impossible, Some(impossible), 10);
        assert_eq!(outcome, StoreOutcome::StartedAhead, "{impossible}");
    }
    assert!(is_stored(sent(&mut latest, 109, Some(110), 10)));
    // An agent of an earlier version is bound by the uptime reported before.
    assert_eq!(sent(&mut latest, 131, None, 20), StoreOutcome::StartedAhead);
    assert!(is_stored(sent(&mut latest, 119, None, 20)));
    assert_eq!(sent(&mut latest, 145, None, 30), StoreOutcome::StartedAhead);
    // An impossibly long uptime changes nothing.
    assert!(is_stored(sent(&mut latest, 120, Some(u64::MAX), 40)));
    assert_eq!(sent(&mut latest, 200, None, 41), StoreOutcome::StartedAhead);
}

#[test]
fn without_uptime_any_agent_start_is_accepted() {
    let mut latest = latest(&["a"]);
    assert!(is_stored(sent(&mut latest, 5, None, 0)));
    assert!(is_stored(sent(&mut latest, 100_000, None, 10)));
}

#[test]
fn forged_reports_block_an_agent_for_three_intervals_at_most() {
    let mut latest = latest(&["a"]);
    let put = |latest: &mut Latest, started, sequence, seconds| {
        latest.put(report("a", "x", started, sequence, 0), MIN_AGE, at(seconds))
    };
    assert!(is_stored(put(&mut latest, u64::MAX, u64::MAX, 0)));
    assert_eq!(put(&mut latest, 5, 1, 29), StoreOutcome::Stale);
    assert!(is_stored(put(&mut latest, 5, 2, 30)));
    assert!(is_stored(put(&mut latest, 5, 3, 31)));
}

#[test]
fn reports_of_unknown_nodes_are_refused() {
    let mut closed = Latest::default();
    closed.node("a", Some(""));
    assert_eq!(
        closed.put(report("a", "x", 1, 1, 1), MIN_AGE, at(0)),
        StoreOutcome::NotOpen
    );
    let mut latest = latest(&["a"]);
    assert_eq!(
        latest.put(report("b", "x", 1, 1, 1), MIN_AGE, at(0)),
        StoreOutcome::UnknownNode
    );
    latest.put(report("a", "x", 1, 1, 1), MIN_AGE, at(0));
    latest.node("a", None);
    assert_eq!(take_all(&mut latest), []);
    assert_eq!(
        latest.put(report("a", "x", 1, 2, 1), MIN_AGE, at(0)),
        StoreOutcome::UnknownNode
    );
    // A new machine of the same name starts over.
    latest.node("a", Some(""));
    assert_eq!(
        latest.put(report("a", "x", 1, 1, 1), MIN_AGE, at(0)),
        StoreOutcome::Stored(None)
    );
}

#[test]
fn an_early_report_is_refused_and_does_not_delay_the_next() {
    let mut latest = latest(&["a"]);
    let min_age = Duration::from_secs(5);
    let mut put =
        |sequence, seconds| latest.put(report("a", "x", 1, sequence, 0), min_age, at(seconds));
    assert_eq!(put(1, 0), StoreOutcome::Stored(None));
    assert_eq!(put(2, 4), StoreOutcome::TooSoon);
    assert_eq!(put(1, 4), StoreOutcome::Replayed);
    assert_eq!(put(2, 5), StoreOutcome::Stored(Some(min_age)));
}

#[test]
fn a_report_is_fresh_for_three_intervals() {
    let mut latest = latest(&["a", "b"]);
    latest.put(report("a", "x", 1, 1, 0), MIN_AGE, at(0));
    assert_eq!(latest.reporting(at(29)), 1);
    assert_eq!(latest.reporting(at(30)), 0);
}

fn missed(latest: &Latest, seconds: u64) -> Vec<MissingReport> {
    latest.missed(at(seconds))
}

/// The node's last known report is of boot `x`, with this sequence number.
fn misses(node: &str, last: Option<u64>) -> MissingReport {
    MissingReport {
        node: node.to_owned(),
        last: last.map(|sequence| ReportId {
            boot_id: "x".to_owned(),
            agent_started_millis: 7,
            sequence,
        }),
    }
}

#[test]
fn an_overdue_report_is_missing() {
    let mut latest = latest(&["a", "b"]);
    assert_eq!(missed(&latest, 10), []);
    latest.put(report("b", "x", 7, 1, 1), MIN_AGE, at(9));
    assert_eq!(missed(&latest, 11), [misses("a", None)]);
    latest.put(report("a", "x", 7, 1, 1), MIN_AGE, at(12));
    assert_eq!(missed(&latest, 19), []);
    assert_eq!(missed(&latest, 20), [misses("b", Some(1))]);
    assert_eq!(missed(&Latest::default(), 20), []);
}

#[test]
fn newer_reports_are_relayed_with_their_age() {
    let mut standby = latest(&["a", "b"]);
    standby.put(report("a", "x", 7, 3, 5), MIN_AGE, at(100));
    let is_passed_on =
        |missed: MissingReport, seconds| standby.relayed(&missed, at(seconds)).is_some();
    assert!(is_passed_on(misses("a", None), 104));
    assert!(is_passed_on(misses("a", Some(2)), 104));
    assert!(!is_passed_on(misses("a", Some(3)), 104), "already received");
    assert!(!is_passed_on(misses("a", Some(2)), 130), "stale");
    assert!(!is_passed_on(misses("b", None), 104), "never received");
    assert!(!is_passed_on(misses("c", None), 104));
    let mut rebooted = misses("a", Some(9));
    rebooted.last.as_mut().unwrap().boot_id = "w".to_owned();
    assert!(is_passed_on(rebooted, 104));

    let relayed = standby.relayed(&misses("a", Some(2)), at(104)).unwrap();
    let text = serde_json::to_string(&relayed.report).unwrap();
    let arrived_at = at(104).before(Duration::from_millis(relayed.age_millis));
    let mut leader = latest(&["a"]);
    leader.put(report("a", "x", 7, 2, 4), MIN_AGE, at(93));
    let read = Report::parse(text.as_bytes()).unwrap();
    assert_eq!(
        leader.put(read, MIN_AGE, arrived_at),
        StoreOutcome::Stored(Some(Duration::from_secs(7)))
    );
    assert_eq!(take_all(&mut leader), [("a".to_owned(), 5)]);
    assert_eq!(missed(&leader, 110), []);
    assert_eq!(missed(&leader, 111), [misses("a", Some(3))]);
}

proptest! {
    /// Reports of one boot, in any order and any number of times.
    #[test]
    fn the_newest_wins_in_any_order(
        sent in prop::collection::vec((0_u64..3, 0_u64..5, 0_usize..3), 1..40),
        taken in prop::collection::vec(any::<bool>(), 40),
    ) {
        let nodes = ["a", "b", "c"];
        let mut latest = latest(&nodes);
        let (mut seen, mut newest) = ([None; 3], [None; 3]);
        for ((started, sequence, index), taken) in sent.into_iter().zip(taken) {
            let content = i64::try_from(started * 10 + sequence).unwrap();
            let outcome = latest.put(report(nodes[index], "x", started, sequence, content), MIN_AGE, at(1));
            let is_newer = Some(content) > newest[index];
            prop_assert_eq!(matches!(outcome, StoreOutcome::Stored(_)), is_newer);
            newest[index] = newest[index].max(Some(content));
            if taken {
                for (node, content) in take_all(&mut latest) {
                    let index = nodes.iter().position(|name| *name == node).unwrap();
                    prop_assert!(Some(content) > seen[index], "returned twice or out of order");
                    seen[index] = Some(content);
                }
            }
        }
        for (node, content) in take_all(&mut latest) {
            let index = nodes.iter().position(|name| *name == node).unwrap();
            seen[index] = Some(content);
        }
        prop_assert_eq!(seen, newest);
    }
}
