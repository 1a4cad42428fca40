//! The body of a report. Pure.

use std::borrow::Cow;

use crate::agent::report::node_metric::fit;
use crate::crd::NodeMetricStatus;
use crate::crd::report::Report;

/// The report as JSON of at most [`crate::crd::report::MAX_BYTES`]: if it is larger, the least busy pods are dropped
/// first, then breached rules and windows of the node's settings.
pub fn body(mut report: Report<Cow<'_, NodeMetricStatus>>) -> String {
    fit(&mut report, |report| report.status.to_mut())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
    use proptest::prelude::*;

    use super::*;
    use crate::crd::node_metric::{
        Amounts, Load, MAX_BREACHED, MAX_PODS, PeakStats, PodUsage, Pressure, PressureLoad,
        Pressures, ProtectedStalls, ReportingAgent, ResourceLoad, ResourceWindows, RuleCounts,
        Stalled, Usage, WindowStats, Windows,
    };
    use crate::crd::report::MAX_BYTES;

    fn amounts() -> Amounts {
        Amounts {
            cpu: Some(Quantity("127999m".to_owned())),
            memory: Some(Quantity("2113929216Ki".to_owned())),
        }
    }

    fn windows() -> ResourceWindows {
        let stats = Some(WindowStats {
            avg: Some(99.9),
            stddev: Some(49.9),
            p50: Some(99.9),
            p90: Some(99.9),
            p95: Some(99.9),
            p99: Some(99.9),
            max: Some(99.9),
            coverage: 0.99,
        });
        let peak = Some(PeakStats {
            value: Some(99.9),
            coverage: 0.99,
        });
        ResourceWindows {
            last5m: stats,
            last30m: stats,
            last1h: stats,
            max_avg1h: peak,
            max_avg1d: peak,
        }
    }

    /// Every value is present and as long as possible.
    fn full(pods: Vec<PodUsage>, breached: Vec<String>) -> NodeMetricStatus {
        let stalled = Stalled {
            avg10: 99.99,
            avg60: 99.99,
            avg300: 99.99,
        };
        let pressure = Some(Pressure {
            some: stalled,
            full: Some(stalled),
        });
        let windows = Some(windows());
        NodeMetricStatus {
            timestamp: None,
            window: Some("9.998s".to_owned()),
            agent: Some(ReportingAgent {
                version: "10.20.30".to_owned(),
                boot_id: "b".repeat(36),
                sequence: 9_999_999_999_999,
            }),
            capacity: amounts(),
            usage: Usage {
                node: amounts(),
                pods: amounts(),
                system: amounts(),
            },
            pressure: Pressures {
                cpu: pressure.clone(),
                memory: pressure.clone(),
                io: pressure,
            },
            protected: ProtectedStalls {
                cpu_delay_p95: Some(99.99),
                cpu_delay_max: Some(99.99),
                memory_stall_max: Some(99.99),
                io_stall_max: Some(99.99),
            },
            windows: Windows {
                cpu: windows.clone(),
                memory: windows,
                ..Windows::default()
            },
            load: Some(load()),
            pods: Some(110),
            top_pods: pods,
            rules: Some(RuleCounts {
                total: 256,
                breached: 256,
                cooling: 256,
                unknown: 256,
            }),
            breached,
            conditions: Vec::new(),
        }
    }

    fn load() -> Load {
        let resource = ResourceLoad {
            percent: 199.9,
            expected: 199.9,
            newcomers: 99.9,
            history: Some(99.9),
            line: 99.9,
            rule: Some("batch-nodes/memory-usage".to_owned()),
        };
        Load {
            percent: 199.9,
            worst: "pressure".to_owned(),
            cpu: resource.clone(),
            memory: resource,
            pressure: Some(PressureLoad {
                rule: "batch-nodes/cpu-pressure".to_owned(),
                percent: 199.9,
            }),
        }
    }

    fn report(node: &str, status: &NodeMetricStatus) -> (String, Report) {
        let text = body(Report {
            node: node.to_owned(),
            boot_id: "b".repeat(36),
            agent_started_millis: 9_999_999_999_999,
            sequence: 9_999_999_999_999,
            uptime_millis: Some(9_999_999_999_999),
            interval_seconds: 60,
            status: Cow::Borrowed(status),
        });
        let read = Report::parse(text.as_bytes()).unwrap();
        (text, read)
    }

    fn pod() -> impl Strategy<Value = PodUsage> {
        ("[a-z\"\\\\é]{1,63}", "[a-z]{1,253}").prop_map(|(namespace, name)| PodUsage {
            namespace,
            name,
            cpu: amounts().cpu,
            memory: amounts().memory,
            cpu_delay: Some(99.99),
            memory_pressure: Some(99.99),
            io_pressure: Some(99.99),
        })
    }

    #[test]
    fn a_report_of_ten_pods_with_usual_names_is_complete() {
        let pod = |number| PodUsage {
            namespace: "team-payments".to_owned(),
            name: format!("checkout-7d9c5b8f6d-x2k{number:02}"),
            cpu: amounts().cpu,
            memory: amounts().memory,
            cpu_delay: Some(99.99),
            ..PodUsage::default()
        };
        let status = full((0..10).map(pod).collect(), vec!["q/cpu".to_owned(); 2]);
        let (text, read) = report("ip-10-0-0-1.eu-west-1.compute.internal", &status);
        assert_eq!(read.status, status);
        assert!(text.len() <= MAX_BYTES, "{} bytes", text.len());
        assert_eq!(read.interval(), Duration::from_mins(1));
    }

    #[test]
    fn sixteen_windows_with_long_names_fit_before_any_pod() {
        let pod = PodUsage {
            namespace: "n".repeat(63),
            name: "p".repeat(253),
            ..PodUsage::default()
        };
        let mut status = full(vec![pod; 10], vec!["q".repeat(300); 16]);
        let name = |number| format!("{number:02}{}", "w".repeat(61));
        let windows = (0..16).map(|number| (name(number), -123_456e12));
        status.windows.custom = windows.collect();
        let (text, read) = report(&"n".repeat(253), &status);
        assert!(text.len() <= MAX_BYTES, "{} bytes", text.len());
        assert_eq!(read.status.windows, status.windows);
        assert_eq!(read.status.top_pods, []);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// With any names: it never exceeds the limit, drops pods from the end of the list, and rules only when no pod is left.
        #[test]
        fn a_report_always_fits_and_drops_the_least_busy_pods(
            node in "[a-z]{1,253}",
            pods in prop::collection::vec(pod(), 0..=MAX_PODS),
            breached in prop::collection::vec("[a-z]{1,63}/[a-z\"]{1,63}", 0..=MAX_BREACHED),
            rules in prop::collection::vec("[a-z]{1,253}/[a-z]{1,63}", 3),
        ) {
            let mut status = full(pods, breached);
            let load = status.load.as_mut().unwrap();
            load.cpu.rule = Some(rules[0].clone());
            load.memory.rule = Some(rules[1].clone());
            load.pressure.as_mut().unwrap().rule.clone_from(&rules[2]);
            let (text, read) = report(&node, &status);
            prop_assert!(text.len() <= MAX_BYTES, "{} bytes", text.len());
            prop_assert_eq!(&read.node, &node);
            let count = read.status.top_pods.len();
            prop_assert_eq!(&read.status.top_pods[..], &status.top_pods[..count]);
            let rules = read.status.breached.len();
            prop_assert_eq!(&read.status.breached[..], &status.breached[..rules]);
            prop_assert!(rules == status.breached.len() || count == 0);
            let rest = NodeMetricStatus { top_pods: Vec::new(), breached: Vec::new(), ..read.status };
            let expected = NodeMetricStatus { top_pods: Vec::new(), breached: Vec::new(), ..status.clone() };
            prop_assert_eq!(rest, expected);
            // No more is dropped than necessary.
            if count < status.top_pods.len() {
                let more = NodeMetricStatus { top_pods: status.top_pods[..=count].to_vec(), ..status.clone() };
                let larger = serde_json::to_string(&Report { status: more, ..Report::parse(text.as_bytes()).unwrap() });
                prop_assert!(larger.unwrap().len() > MAX_BYTES);
            }
        }
    }
}
