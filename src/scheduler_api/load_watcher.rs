//! The page that Trimaran's plugins read, as [load-watcher](https://github.com/paypal/load-watcher) serves it. Pure.
//!
//! CPU and memory are what is *expected* to be used: a pod counts in full from its start. Trimaran adds each pod that was bound
//! after the end of the window, or less than 60 s before it, once more; so the window ends 58 s after the timestamp, which leaves
//! 2 s for a new pod to appear in the figures.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;

use super::values::{TooFewKnown, check, values};
use crate::crd::NodeMetricStatus;
use crate::crd::node_metric::ResourceWindows;
use crate::engine::time::BootTime;
use crate::metrics_api::loads::ByNode;

/// Length of the window of averages and deviations.
const WINDOW: &str = "5m";
const WINDOW_SECONDS: i64 = 300;
/// How long before the end of the window Trimaran takes pods for new (60 s), less the delay of a report.
const END_AFTER_SECONDS: i64 = 58;

#[derive(Serialize)]
struct Page<'a> {
    timestamp: i64,
    window: Window,
    source: &'static str,
    data: Data<'a>,
}

#[derive(Serialize)]
struct Window {
    duration: &'static str,
    start: i64,
    end: i64,
}

#[derive(Serialize)]
struct Data<'a> {
    #[serde(rename = "NodeMetricsMap")]
    nodes: BTreeMap<&'a str, NodeMetrics>,
}

#[derive(Serialize)]
struct NodeMetrics {
    metrics: [Metric; 4],
    tags: NoTags,
    metadata: Metadata,
}

#[derive(Serialize)]
struct NoTags {}

#[derive(Serialize)]
struct Metadata {
    #[serde(rename = "dataCenter")]
    data_center: &'static str,
}

#[derive(Serialize)]
struct Metric {
    name: &'static str,
    #[serde(rename = "type")]
    kind: &'static str,
    operator: &'static str,
    rollup: &'static str,
    value: f64,
}

impl Metric {
    fn new(kind: &'static str, operator: &'static str, value: f64) -> Self {
        Self {
            name: if kind == "CPU" { "cpu" } else { "mem" },
            kind,
            operator,
            rollup: WINDOW,
            // Its decoder misreads numbers of 18 decimals and more.
            value: (value * 1000.0).round() / 1000.0,
        }
    }
}

/// The page: all nodes, or one by name. All values are in percent of the node.
///
/// # Errors
/// Too few nodes are known. Trimaran then keeps what it has.
pub fn page(
    nodes: &ByNode,
    host: Option<&str>,
    now: BootTime,
    wall: Timestamp,
) -> Result<String, TooFewKnown> {
    check(nodes, now)?;
    let deviation = |of: fn(&NodeMetricStatus) -> Option<&ResourceWindows>| {
        values(nodes, now, |node, _| of(&node.status)?.last5m?.stddev)
    };
    let cpu = values(nodes, now, |_, load| Some(load.cpu.expected));
    let cpu_stddev = deviation(|status| status.windows.cpu.as_ref());
    let memory = values(nodes, now, |_, load| Some(load.memory.expected));
    let memory_stddev = deviation(|status| status.windows.memory.as_ref());
    let figures = cpu
        .iter()
        .zip(&cpu_stddev)
        .zip(memory.iter().zip(&memory_stddev));
    let nodes = nodes.keys().zip(figures);
    let nodes = nodes.map(|(name, ((cpu, cpu_stddev), (memory, memory_stddev)))| {
        let metrics = [
            Metric::new("CPU", "AVG", *cpu),
            Metric::new("CPU", "STD", *cpu_stddev),
            Metric::new("Memory", "AVG", *memory),
            Metric::new("Memory", "STD", *memory_stddev),
        ];
        let node = NodeMetrics {
            metrics,
            tags: NoTags {},
            metadata: Metadata { data_center: "" },
        };
        (&**name, node)
    });
    let timestamp = wall.as_second();
    let end = timestamp + END_AFTER_SECONDS;
    let page = Page {
        timestamp,
        window: Window {
            duration: WINDOW,
            start: end - WINDOW_SECONDS,
            end,
        },
        source: "Plimsoll",
        data: Data {
            nodes: nodes
                .filter(|(name, _)| host.is_none_or(|host| host == *name))
                .collect(),
        },
    };
    // It consists of numbers and strings, which serialize.
    Ok(serde_json::to_string(&page).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::values::tests::{at, cluster, node};
    use super::*;

    fn read(nodes: &ByNode, host: Option<&str>) -> Value {
        let wall = Timestamp::from_second(1_795_430_000).unwrap();
        serde_json::from_str(&page(nodes, host, at(), wall).unwrap()).unwrap()
    }

    #[test]
    fn it_has_the_format_of_load_watcher() {
        let nodes = cluster([Some(node(50.0, 100.0 / 3.0, 10.0))]);
        let metric = |name, kind, operator, value| json!({"name": name, "type": kind, "operator": operator, "rollup": "5m", "value": value});
        let metrics = [
            metric("cpu", "CPU", "AVG", 33.333),
            metric("cpu", "CPU", "STD", 8.333),
            metric("mem", "Memory", "AVG", 10.0),
            metric("mem", "Memory", "STD", 1.25),
        ];
        let wanted = json!({
            "timestamp": 1_795_430_000,
            "window": {"duration": "5m", "start": 1_795_429_758, "end": 1_795_430_058},
            "source": "Plimsoll",
            "data": {"NodeMetricsMap": {"a": {"metrics": metrics, "tags": {}, "metadata": {"dataCenter": ""}}}},
        });
        assert_eq!(read(&nodes, None), wanted);
    }

    #[test]
    fn every_node_has_cpu_figures_and_one_can_be_asked_for() {
        let nodes = cluster([Some(node(50.0, 40.0, 10.0)), None]);
        let all = read(&nodes, None);
        let of = |page: &Value, node: &str| {
            page["data"]["NodeMetricsMap"][node]["metrics"][0]["value"].clone()
        };
        assert_eq!(of(&all, "b"), json!(40.0), "the median");
        let one = read(&nodes, Some("a"));
        assert_eq!(one["data"]["NodeMetricsMap"].as_object().unwrap().len(), 1);
        assert_eq!(read(&nodes, Some("x"))["data"]["NodeMetricsMap"], json!({}));
    }
}
