use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::view::{Mark, Second};
use super::*;
use crate::engine::units::Quota;

fn view() -> DemoView {
    DemoView {
        machine: "2 CPUs, cgroup v1".to_owned(),
        phase: Phase::Enforced,
        elapsed: Duration::from_secs(25),
        left: Duration::from_secs(35),
        node: DemoNode {
            usage: Some(MilliCpu(1500)),
            capacity: MilliCpu(2000),
            threshold: MilliCpu(1400),
        },
        pods: vec![
            pod(
                "important",
                Quota::Limit(MilliCpu(1000)),
                Quota::Limit(MilliCpu(1000)),
            ),
            pod("batch-a", Quota::Unlimited, Quota::Limit(MilliCpu(560))),
            pod(
                "batch-b",
                Quota::Limit(MilliCpu(1800)),
                Quota::Limit(MilliCpu(540)),
            ),
        ],
        latency: vec![
            Second {
                p99_ms: Some(1.0),
                phase: Phase::Alone,
            },
            Second {
                p99_ms: Some(800.0),
                phase: Phase::Overloaded,
            },
            Second {
                p99_ms: None,
                phase: Phase::Overloaded,
            },
            Second {
                p99_ms: Some(2.0),
                phase: Phase::Enforced,
            },
        ],
        marks: vec![
            Mark {
                after: Duration::from_secs(1),
                what: "batch pods start",
            },
            Mark {
                after: Duration::from_secs(3),
                what: "first write",
            },
        ],
        events: (0..20)
            .map(|n| LogEntry {
                after: Duration::from_millis(n * 1500),
                message: format!("event {n}"),
            })
            .collect(),
    }
}

fn pod(name: &str, original: Quota, quota: Quota) -> PodView {
    PodView {
        name: name.to_owned(),
        class: "Burstable".to_owned(),
        weight: Some("307".to_owned()),
        usage: Some(MilliCpu(540)),
        original: Some(original),
        quota: Some(quota),
        idle: name == "batch-a",
    }
}

/// The screen's rows as text.
fn rendered(view: &DemoView, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, view)).unwrap();
    let buffer = terminal.backend().buffer();
    (0..height)
        .map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect())
        .collect()
}

fn row<'a>(rows: &'a [String], start: &str) -> &'a str {
    rows.iter()
        .find(|row| row.trim_start_matches(['│', ' ']).starts_with(start))
        .unwrap_or_else(|| panic!("no row starts with {start}: {rows:#?}"))
}

#[test]
fn everything_fits_80_columns_and_24_rows() {
    let rows = rendered(&view(), 80, 24);
    assert!(rows[0].contains("2 CPUs, cgroup v1"), "{}", rows[0]);
    assert!(rows[0].contains("35 s left"), "{}", rows[0]);
    assert!(
        rows[1].contains("3/5 the policies are in force"),
        "{}",
        rows[1]
    );
    let batch = row(&rows, "batch-a");
    assert!(
        batch.contains("560m, idle") && batch.contains("max"),
        "{batch}"
    );
    row(&rows, "1 batch pods start  2 first write");
    assert!(rows[23].contains("restore everything"), "{}", rows[23]);
    row(&rows, "28.5s event 19");
}

#[test]
fn forty_columns_show_usage_and_quota_of_every_pod_and_the_plot() {
    let rows = rendered(&view(), 40, 24);
    row(&rows, "1 batch pods start  2 first write");
    row(&rows, "1 s");
    for name in ["important", "batch-a", "batch-b"] {
        let pod = row(&rows, name);
        assert_eq!(
            pod.split_whitespace()
                .filter(|cell| cell.trim_end_matches(',').ends_with('m'))
                .count(),
            2,
            "{pod}"
        );
    }
}

#[test]
fn the_bar_shows_the_threshold_and_changes_colour_there() {
    let mut terminal = Terminal::new(TestBackend::new(82, 24)).unwrap();
    terminal.draw(|frame| draw(frame, &view())).unwrap();
    let buffer = terminal.backend().buffer();
    let y = 3;
    // 80 columns for 2000m: 1400m is column 56, 1500m is column 60.
    assert_eq!(buffer[(1 + 56, y)].symbol(), "┃");
    assert_eq!(buffer[(1 + 55, y)].fg, UNDER);
    assert_eq!(buffer[(1 + 57, y)].fg, OVER);
    assert_eq!(buffer[(1 + 59, y)].symbol(), "█");
    assert_eq!(buffer[(1 + 60, y)].symbol(), "░");
}

#[test]
fn bars_have_the_colour_of_their_phase_and_a_second_without_requests_has_none() {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| draw(frame, &view())).unwrap();
    let buffer = terminal.backend().buffer();
    // Four rows of bars from y = 11 on; after the frame and the scale a column for each second.
    let cell = |second: u16, y: u16| &buffer[(8 + second, y)];
    assert_eq!(cell(1, 14).symbol(), "█");
    assert_eq!(cell(1, 14).fg, OVER);
    assert_eq!(cell(2, 14).symbol(), " ");
    assert_eq!(cell(3, 14).fg, UNDER);
    assert_eq!(cell(3, 11).symbol(), "┊", "the first write");
}

#[test]
fn a_tiny_terminal_is_drawn_without_a_panic() {
    for (width, height) in [(1, 1), (5, 3), (20, 10), (80, 5), (300, 100)] {
        rendered(&view(), width, height);
    }
}
