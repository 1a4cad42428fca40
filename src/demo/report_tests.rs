use std::time::Duration;

use super::*;

#[test]
fn the_verdict_follows_the_figures() {
    assert_eq!(verdict(20.0, 1000.0, 25.0), Verdict::Cured);
    assert_eq!(verdict(20.0, 1000.0, 400.0), Verdict::Eased);
    assert_eq!(verdict(20.0, 1000.0, 900.0), Verdict::NoHelp);
    assert_eq!(verdict(20.0, 1000.0, 2000.0), Verdict::NoHelp);
    assert_eq!(verdict(20.0, 30.0, 20.0), Verdict::NoHarm);
}

fn figures(p99_ms: f64) -> PhaseFigures {
    PhaseFigures {
        latency: Distribution {
            requests: 100,
            unserved: if p99_ms < 100.0 { 0 } else { 25 },
            seconds: 1.0,
            p50_ms: 8.0,
            p90_ms: 10.0,
            p99_ms,
            p999_ms: p99_ms,
            max_ms: 900.0,
        },
        mean_use: Some(MeanUse {
            node: 2000,
            important: 1200,
            batch: 700,
        }),
    }
}

fn report(protected_p99_ms: f64) -> DemoReport {
    let second = |p99_ms, phase| Second {
        p99_ms: Some(p99_ms),
        phase,
    };
    DemoReport {
        machine: "2 CPUs".to_owned(),
        outcome: DemoOutcome::Completed,
        shares: 2048,
        pods: Vec::new(),
        service: ServiceFacts::new(&DemoPods::for_cpus(2)),
        policy: "examples/ensurance/idle-class.yaml",
        acts: "while CPU usage is above 1400m".to_owned(),
        policy_changes: Vec::new(),
        alone: Some(figures(20.0)),
        unprotected: Some(figures(1000.0)),
        protected: Some(figures(protected_p99_ms)),
        steps_down: 2,
        steps_up: 2,
        breach_to_first_step_seconds: Some(0.5),
        policy_to_first_step_seconds: Some(1.0),
        first_step_to_recovery_seconds: None,
        others_millicores: Some(1000),
        files_compared: 15,
        files_changed: Vec::new(),
        released_by_policy: true,
        left_behind: Vec::new(),
        seconds: vec![
            second(20.0, Phase::Alone),
            second(1000.0, Phase::Overloaded),
        ],
        marks: vec![Mark {
            after: Duration::from_secs(1),
            what: "batch pods start",
        }],
    }
}

#[test]
fn the_summary_shows_harm_and_cure_in_figures_and_as_a_plot() {
    let text = report(22.0).to_string();
    for part in [
        "p99 was 50.0 times that alone without protection, 1.1 times with it",
        "  unprotected       8.0   1000.0      75.0    25.0 %      1200m     700m",
        "   1 s ",
        "1 batch pods start",
        "it needs 1200m",
        "restored byte for byte, by the policies",
        "left behind: no cgroup",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn the_plot_fits_a_narrow_terminal() {
    let mut report = report(22.0);
    let second = report.seconds[0];
    report.seconds = vec![second; 60];
    for width in [40_usize, 80] {
        let text = format!("{report:width$}");
        let plot = text.split("Measured: ").nth(1).expect("the plot");
        for line in plot.lines().skip(1) {
            assert!(line.chars().count() <= width, "{width}: {text}");
        }
    }
}

#[test]
fn no_line_is_wider_than_a_terminal_of_80_columns() {
    for released_by_policy in [true, false] {
        let report = DemoReport {
            released_by_policy,
            files_compared: 999,
            breach_to_first_step_seconds: Some(10.52),
            ..report(22.0)
        };
        let text = format!("{report:80}");
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }
}

#[test]
fn the_alternate_form_has_the_same_text_in_colours() {
    let report = report(22.0);
    let coloured = format!("{report:#80}");
    let plain = anstream::adapter::strip_str(&coloured).to_string();
    assert_eq!(plain, format!("{report:80}"));
    for (style, part) in [
        (HARM, "unprotected "),
        (CURE, "protected "),
        (MARK, "1 batch pods start"),
        (CURE, "restored byte for byte"),
    ] {
        assert!(
            coloured.contains(&format!("{style}{part}")),
            "{part}: {coloured}"
        );
    }
    assert!(coloured.contains(&format!("{HARM}█")), "{coloured}");
    let no_harm = DemoReport {
        unprotected: Some(figures(21.0)),
        ..report
    };
    assert!(!format!("{no_harm:#80}").contains(&format!("{HARM}unprotected")));
}

#[test]
fn the_summary_says_when_throttling_did_not_help_and_what_may_be_the_reason() {
    let text = report(1000.0).to_string();
    assert!(text.contains("NOT helped"), "{text}");
    assert!(text.contains("Other processes used 1000m"), "{text}");
    let nothing_throttled = DemoReport {
        policy_to_first_step_seconds: None,
        ..report(1000.0)
    };
    let text = nothing_throttled.to_string();
    assert!(text.contains("Nothing was throttled"), "{text}");
}

#[test]
fn the_summary_says_when_the_machine_is_too_busy_for_the_important_pod() {
    let mut busy = report(1000.0);
    busy.alone = busy.unprotected;
    let text = busy.to_string();
    assert!(text.contains("Even alone it gave up 25.0 %"), "{text}");
    assert!(!text.contains("times that alone"), "{text}");
}

#[test]
fn the_summary_says_when_there_was_no_harm() {
    let unharmed = DemoReport {
        unprotected: Some(figures(21.0)),
        ..report(21.0)
    };
    let text = unharmed.to_string();
    assert!(text.contains("hardly harmed it here"), "{text}");
}

#[test]
fn the_summary_names_what_was_not_restored() {
    let mut report = report(22.0);
    report.files_changed.push(FileChange {
        path: "/cg/cpu.max".to_owned(),
        before: "max 100000\n".to_owned(),
        after: "50000 100000\n".to_owned(),
    });
    report.left_behind.push("/cg/demo".to_owned());
    assert!(!report.is_clean());
    let text = report.to_string();
    assert!(text.contains("NOT RESTORED: /cg/cpu.max"), "{text}");
    assert!(text.contains("LEFT BEHIND: /cg/demo"), "{text}");
    assert!(!text.contains("restored byte for byte"), "{text}");
}
