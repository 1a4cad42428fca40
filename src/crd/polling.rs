//! The file of `--poll`: which exporters the controller polls for the load of nodes, and what their gauges are called.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use jiff::SignedDuration;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::load_values::{self, NAMES};
use super::manifest::{ManifestError, Position};
use super::path::at_index;
use super::schema::{inlined_schema, tidy};
use super::settings_file::{self, Errors};
use super::validate::Definition;
use super::words::{self, quoted};

/// Time from the start of a round to that of the next one.
const INTERVAL: Duration = Duration::from_secs(15);
/// Limits of the interval.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
const MAX_INTERVAL: Duration = Duration::from_mins(5);
/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Shortest time limit of a request.
const MIN_TIMEOUT: Duration = Duration::from_millis(10);

/// The file.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
struct PollFile {
    /// How often each endpoint is asked, from `1s` to `5m`. A value is used for three times that long. Defaults to `15s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    interval: Option<String>,
    /// The time limit of a request, at most the interval. Defaults to `1s`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    timeout: Option<String>,
    /// The Services whose endpoints are polled. A node that several have is polled through the first of them.
    #[schemars(length(min = 1, max = 16))]
    services: Vec<ServiceEntry>,
}

/// A Service.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
struct ServiceEntry {
    /// Its namespace.
    #[schemars(length(min = 1, max = 63))]
    namespace: String,
    /// Its name.
    #[schemars(length(min = 1, max = 63))]
    name: String,
    /// The name of its port, as in its `EndpointSlices`. Defaults to their first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    port: Option<String>,
    /// The path of the page. Defaults to `/metrics`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 256))]
    path: Option<String>,
    /// The gauges of the page. Defaults to those of plimsoll's agents.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    metrics: Vec<MetricEntry>,
}

/// A gauge of the page.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
struct MetricEntry {
    /// What it is, such as `cpu_usage_avg_5m`.
    name: String,
    /// The name of its series.
    #[schemars(length(min = 1, max = 200))]
    series: String,
    /// Labels that the series has, with their values. It may have others.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    labels: BTreeMap<String, String>,
    /// `percent` (of the node, 0 to 100), `ratio` (0 to 1), `cores` or `bytes`; the latter two are divided by the capacity of
    /// the Node. Defaults to `percent`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unit: Option<String>,
    /// A factor before the unit counts, such as 0.001 for millicores with `cores`. Defaults to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scale: Option<f64>,
}

/// What is polled, and how often.
#[derive(Clone, Debug, PartialEq)]
pub struct PollSettings {
    /// Time from the start of a round to that of the next one.
    pub interval: Duration,
    /// Time limit of a request, at most the interval.
    pub timeout: Duration,
    /// At least one.
    pub services: Vec<PolledService>,
}

/// The endpoints of a Service.
#[derive(Clone, Debug, PartialEq)]
pub struct PolledService {
    /// Namespace of the Service.
    pub namespace: String,
    /// Name of the Service.
    pub name: String,
    /// Name of the port; `None`: the first of a slice.
    pub port: Option<String>,
    /// Path of the page, with a leading slash.
    pub path: String,
    /// What is read from the page: the use of CPU and memory at least.
    pub metrics: Vec<PolledMetric>,
}

/// A series of a page, and what it means.
#[derive(Clone, Debug, PartialEq)]
pub struct PolledMetric {
    /// In [`NAMES`].
    pub index: usize,
    /// Name of the series.
    pub series: Arc<str>,
    /// Labels that it has.
    pub labels: Vec<(String, String)>,
    /// Unit of its value, once multiplied by the scale.
    pub unit: Unit,
    /// Finite and above 0.
    pub scale: f64,
}

/// The unit of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// 0 to 100, of the node.
    Percent,
    /// 0 to 1, of the node.
    Ratio,
    /// Of the node's CPUs.
    Cores,
    /// Of the node's memory.
    Bytes,
}

const UNITS: [(&str, Unit); 4] = [
    ("percent", Unit::Percent),
    ("ratio", Unit::Ratio),
    ("cores", Unit::Cores),
    ("bytes", Unit::Bytes),
];

/// Name and labels of a series.
type AgentSeries = (&'static str, &'static [(&'static str, &'static str)]);

/// The gauges of our agents, in the order of [`NAMES`].
const AGENT_SERIES: [AgentSeries; NAMES.len()] = [
    ("cpu_usage_avg_5m", &[]),
    ("cpu_usage_max_avg_1h", &[]),
    ("cpu_usage_max_avg_1d", &[]),
    (
        "plimsoll_agent_node_usage_percent",
        &[("resource", "cpu"), ("window", "5m"), ("stat", "stddev")],
    ),
    (
        "plimsoll_agent_expected_usage_percent",
        &[("resource", "cpu")],
    ),
    ("plimsoll_agent_load_line_percent", &[("resource", "cpu")]),
    ("mem_usage_avg_5m", &[]),
    ("mem_usage_max_avg_1h", &[]),
    ("mem_usage_max_avg_1d", &[]),
    (
        "plimsoll_agent_node_usage_percent",
        &[("resource", "memory"), ("window", "5m"), ("stat", "stddev")],
    ),
    (
        "plimsoll_agent_expected_usage_percent",
        &[("resource", "memory")],
    ),
    (
        "plimsoll_agent_load_line_percent",
        &[("resource", "memory")],
    ),
    ("plimsoll_agent_load_percent", &[("term", "worst")]),
];

/// The gauges of our agents.
pub fn agent_metrics() -> Vec<PolledMetric> {
    let metric = |(index, (series, labels)): (usize, AgentSeries)| PolledMetric {
        index,
        series: series.into(),
        labels: labels
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        unit: Unit::Percent,
        scale: 1.0,
    };
    AGENT_SERIES.into_iter().enumerate().map(metric).collect()
}

static DEFINITION: LazyLock<Definition> = LazyLock::new(|| {
    let mut schema = inlined_schema::<PollFile>();
    tidy(&mut schema);
    Definition::new(schema)
});

/// Reads the text of a file.
///
/// # Errors
/// All that is wrong, by line.
pub fn read(text: &str) -> Result<PollSettings, Vec<ManifestError>> {
    let second = "write all services into the list of the first";
    let compile = |file: &PollFile, errors: &mut Errors| Reading { errors }.compile(file);
    let settings = settings_file::read(text, &DEFINITION, second, compile)?;
    let empty = "the file is empty; name at least one Service to poll";
    settings.ok_or_else(|| settings_file::error(Position::line(1), empty))
}

/// A file while it is read.
struct Reading<'a> {
    errors: &'a mut Errors,
}

impl Reading<'_> {
    fn compile(&mut self, file: &PollFile) -> PollSettings {
        let interval = self.duration(
            "interval",
            file.interval.as_deref(),
            INTERVAL,
            MIN_INTERVAL,
            MAX_INTERVAL,
        );
        let default = TIMEOUT.min(interval);
        let timeout = self.duration(
            "timeout",
            file.timeout.as_deref(),
            default,
            MIN_TIMEOUT,
            interval,
        );
        let services = file.services.iter().enumerate();
        PollSettings {
            interval,
            timeout,
            services: services
                .map(|(index, entry)| self.service(&at_index("services", index), entry))
                .collect(),
        }
    }

    fn duration(
        &mut self,
        name: &str,
        text: Option<&str>,
        default: Duration,
        min: Duration,
        max: Duration,
    ) -> Duration {
        let Some(text) = text else { return default };
        let parsed: Option<SignedDuration> = text.parse().ok();
        let parsed = parsed.and_then(|it| Duration::try_from(it).ok());
        parsed
            .filter(|it| (min..=max).contains(it))
            .unwrap_or_else(|| {
                let message = format!(
                    "{name} is {}; write a time from {min:?} to {max:?}, such as {default:?}",
                    quoted(text)
                );
                self.errors.push(name.to_owned(), message);
                default
            })
    }

    fn service(&mut self, path: &str, entry: &ServiceEntry) -> PolledService {
        let page = entry.path.as_deref().unwrap_or("/metrics");
        let is_path = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '<' | '>' | '#');
        if !page.starts_with('/') || !page.chars().all(is_path) {
            let message = format!("{} is not a path; write for example /metrics", quoted(page));
            self.errors.push(format!("{path}.path"), message);
        }
        let metrics = self.metrics(path, &entry.metrics);
        PolledService {
            namespace: entry.namespace.clone(),
            name: entry.name.clone(),
            port: entry.port.clone(),
            path: page.to_owned(),
            metrics,
        }
    }

    fn metrics(&mut self, path: &str, entries: &[MetricEntry]) -> Vec<PolledMetric> {
        if entries.is_empty() {
            return agent_metrics();
        }
        let path = format!("{path}.metrics");
        let mut names = BTreeSet::new();
        let mut metrics = Vec::new();
        for (index, entry) in entries.iter().enumerate() {
            let path = at_index(&path, index);
            if !names.insert(entry.name.as_str()) {
                let message = format!("{} is there already", quoted(&entry.name));
                self.errors.push(format!("{path}.name"), message);
            }
            metrics.extend(self.metric(&path, entry));
        }
        for resource in ["cpu", "mem"] {
            let uses = [
                format!("{resource}_usage_avg_5m"),
                format!("{resource}_expected"),
            ];
            if !uses.iter().any(|name| names.contains(name.as_str())) {
                let message = format!(
                    "has neither {} nor {}; without both CPU and memory the load of a node is unknown",
                    uses[0], uses[1]
                );
                self.errors.push(path.clone(), message);
            }
        }
        metrics
    }

    fn metric(&mut self, path: &str, entry: &MetricEntry) -> Option<PolledMetric> {
        let index = load_values::index(&entry.name);
        if index.is_none() {
            let fix = words::nearest(&entry.name, NAMES).map_or_else(
                || format!("write one of {}", NAMES.join(", ")),
                |near| format!("did you mean {near}?"),
            );
            let message = format!("{} is not a known metric; {fix}", quoted(&entry.name));
            self.errors.push(format!("{path}.name"), message);
        }
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
        let digit = entry.series.starts_with(|c: char| c.is_ascii_digit());
        if digit || !entry.series.chars().all(is_name) {
            let message = format!(
                "{} is not the name of a series; write labels into labels",
                quoted(&entry.series)
            );
            self.errors.push(format!("{path}.series"), message);
        }
        let scale = entry.scale.unwrap_or(1.0);
        if !scale.is_normal() || scale < 0.0 {
            let message = format!("scale is {scale}; write a number above 0, such as 0.001");
            self.errors.push(format!("{path}.scale"), message);
        }
        let unit = self.unit(path, entry)?;
        Some(PolledMetric {
            index: index?,
            series: entry.series.as_str().into(),
            labels: entry.labels.clone().into_iter().collect(),
            unit,
            scale,
        })
    }

    fn unit(&mut self, path: &str, entry: &MetricEntry) -> Option<Unit> {
        let text = entry.unit.as_deref().unwrap_or("percent");
        let Some((_, unit)) = UNITS.iter().find(|(name, _)| *name == text) else {
            let names = UNITS.map(|(name, _)| name).join(", ");
            let message = format!("unit is {}; write one of {names}", quoted(text));
            self.errors.push(format!("{path}.unit"), message);
            return None;
        };
        let wanted = match unit {
            Unit::Percent | Unit::Ratio => "",
            Unit::Cores => "cpu_",
            Unit::Bytes => "mem_",
        };
        if !entry.name.starts_with(wanted) {
            let name = quoted(&entry.name);
            let message = format!("{name} is not measured in {text}; write percent or ratio");
            self.errors.push(format!("{path}.unit"), message);
        }
        Some(*unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPORTER: &str = "\
services:
- namespace: monitoring
  name: node-exporter
  port: metrics
  metrics:
  - {name: cpu_usage_avg_5m, series: 'instance:cpu:avg5m', labels: {mode: busy}, unit: ratio}
  - {name: mem_usage_avg_5m, series: node_memory_used_kibibytes, unit: bytes, scale: 1024}
";

    fn errors(text: &str) -> Vec<String> {
        let errors = read(text).unwrap_err();
        errors
            .iter()
            .map(|error| format!("{}: {}: {}", error.position.line, error.path, error.message))
            .collect()
    }

    #[test]
    fn an_exporter_with_other_names_and_units_is_read() {
        let settings = read(EXPORTER).unwrap();
        assert_eq!((settings.interval, settings.timeout), (INTERVAL, TIMEOUT));
        let [service] = &settings.services[..] else {
            panic!("{settings:?}");
        };
        assert_eq!(
            (service.port.as_deref(), service.path.as_str()),
            (Some("metrics"), "/metrics")
        );
        let [cpu, memory] = &service.metrics[..] else {
            panic!("{service:?}");
        };
        assert_eq!(
            (NAMES[cpu.index], cpu.unit),
            ("cpu_usage_avg_5m", Unit::Ratio)
        );
        assert_eq!(cpu.labels, [("mode".to_owned(), "busy".to_owned())]);
        assert_eq!((memory.unit, memory.scale), (Unit::Bytes, 1024.0));
    }

    #[test]
    fn without_metrics_it_is_an_agent() {
        let text = "{interval: 5s, timeout: 300ms, services: [{namespace: a, name: b}]}";
        let settings = read(text).unwrap();
        assert_eq!(settings.timeout, Duration::from_millis(300));
        assert_eq!(settings.services[0].metrics, agent_metrics());
        assert_eq!(settings.services[0].metrics.len(), NAMES.len());
    }

    /// A text of [`EXPORTER`], what is written there instead, and the error.
    const MISTAKES: [[&str; 3]; 10] = [
        [
            "cpu_usage_avg_5m",
            "cpu_usage_avg5m",
            "6: services[0].metrics[0].name: \"cpu_usage_avg5m\" is not a known metric; did you mean cpu_usage_avg_5m?",
        ],
        [
            "unit: ratio",
            "unit: bytes",
            "6: services[0].metrics[0].unit: \"cpu_usage_avg_5m\" is not measured in bytes; write percent or ratio",
        ],
        [
            "unit: ratio",
            "unit: fraction",
            "6: services[0].metrics[0].unit: unit is \"fraction\"; write one of percent, ratio, cores, bytes",
        ],
        [
            "mem_usage_avg_5m",
            "mem_usage_max_avg_1h",
            "5: services[0].metrics: has neither mem_usage_avg_5m nor mem_expected; without both CPU and memory the load of a node is unknown",
        ],
        [
            "mem_usage_avg_5m",
            "cpu_usage_avg_5m",
            "7: services[0].metrics[1].name: \"cpu_usage_avg_5m\" is there already",
        ],
        [
            "scale: 1024",
            "scale: 0",
            "7: services[0].metrics[1].scale: scale is 0; write a number above 0, such as 0.001",
        ],
        [
            "'instance:cpu:avg5m'",
            "'a{b=\"c\"}'",
            "6: services[0].metrics[0].series: \"a{b=\"c\"}\" is not the name of a series; write labels into labels",
        ],
        [
            "port: metrics",
            "path: metrics",
            "4: services[0].path: \"metrics\" is not a path; write for example /metrics",
        ],
        [
            "services:",
            "interval: 10ms\nservices:",
            "1: interval: interval is \"10ms\"; write a time from 1s to 300s, such as 15s",
        ],
        [
            "services:",
            "timeout: 20s\nservices:",
            "1: timeout: timeout is \"20s\"; write a time from 10ms to 15s, such as 1s",
        ],
    ];

    #[test]
    fn what_is_wrong_is_said_by_line() {
        for [from, to, wanted] in MISTAKES {
            let found = errors(&EXPORTER.replacen(from, to, 1));
            assert!(found.contains(&wanted.to_owned()), "{to}: {found:#?}");
        }
        let empty = "1: : the file is empty; name at least one Service to poll";
        assert_eq!(errors("")[0], empty);
        assert!(errors("{services: []}")[0].starts_with("1: services: "));
        assert!(!errors(&format!("{EXPORTER}---\n{EXPORTER}")).is_empty());
        assert!(errors(&EXPORTER.replace("port:", "ports:"))[0].contains("ports"));
    }
}
