//! Table output for `kubectl get`.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Text;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};

use crate::crd::NodeMetricStatus;
use crate::crd::node_metric::Pressures;
use crate::crd::node_metric::condition::HEALTHY;
use crate::engine::quantity::Quantity;
use crate::engine::units::{Bytes, MilliCpu};

const UNKNOWN: &str = "<unknown>";

/// A cell of a row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cell {
    /// Text.
    Text(String),
    /// A whole number.
    Number(i64),
    /// The time since then, computed when it is printed.
    Since(Timestamp),
    /// Unknown.
    Unknown,
}

impl Cell {
    /// The value as printed at `now`.
    pub fn value(&self, now: Timestamp) -> Value {
        match self {
            Self::Text(text) => json!(text),
            Self::Number(number) => json!(number),
            Self::Since(then) => json!(age(now.as_second() - then.as_second())),
            Self::Unknown => json!(UNKNOWN),
        }
    }

    fn text(text: Option<String>) -> Self {
        text.map_or(Self::Unknown, Self::Text)
    }
}

/// Name, type and description. Columns after AGE are printed by `-o wide` only.
const COLUMNS: [(&str, &str, &str); 13] = [
    ("Name", "string", "Name of the Node."),
    ("CPU", "string", "CPUs in use, in millicores."),
    ("CPU%", "string", "CPUs in use, of all CPUs of the node."),
    (
        "Memory",
        "string",
        "Memory that is not available to new work, in whole mebibytes.",
    ),
    ("Mem%", "string", "The same, of all memory of the node."),
    (
        "Load",
        "string",
        "How near the node is to where its rules act: 100% and more where they would.",
    ),
    (
        "Pressure",
        "string",
        "The resource with the highest pressure in the last 10 s, and the share of time that tasks waited for it.",
    ),
    (
        "Breached",
        "string",
        "Rules that are over their thresholds, including Preview.",
    ),
    (
        "Agent",
        "string",
        "Healthy, AgentUnresponsive (the figures are the last it sent), NoReport, or Polled (from an exporter).",
    ),
    ("Age", "string", "Age of the Node object."),
    (
        "Reported",
        "string",
        "Time since these figures were received, independent of the node's clock.",
    ),
    ("Window", "string", "Averaging window of CPU."),
    ("Version", "string", "Version of the agent."),
];
const NARROW: usize = 10;

/// `columnDefinitions`.
pub fn columns() -> Value {
    let columns = COLUMNS.iter().enumerate();
    columns
        .map(|(index, (name, kind, description))| {
            json!({
                "name": name,
                "type": kind,
                "format": if index == 0 { "name" } else { "" },
                "description": description,
                "priority": i32::from(index >= NARROW),
            })
        })
        .collect()
}

/// The row of an object. `created` is that of the Node, `received_at` when the figures were received.
pub fn row(
    name: &str,
    created: Option<&Time>,
    received_at: Option<Timestamp>,
    status: &NodeMetricStatus,
) -> Vec<Cell> {
    let used = &status.usage.node;
    let percent = |used: Option<f64>| Cell::text(used.map(|percent| format!("{percent:.0}%")));
    let [cpu, memory] = used_percent(status);
    let agent = status.agent.as_ref();
    vec![
        Cell::Text(name.to_owned()),
        Cell::text(millicores(used.cpu.as_ref()).map(|cpu| cpu.to_string())),
        percent(cpu),
        Cell::text(bytes(used.memory.as_ref()).map(mebibytes)),
        percent(memory),
        percent(status.load.as_ref().map(|load| load.percent)),
        Cell::text(worst(&status.pressure)),
        status
            .rules
            .map_or(Cell::Unknown, |rules| Cell::Number(rules.breached)),
        Cell::Text(health(status)),
        created.map_or(Cell::Unknown, |time| Cell::Since(time.0)),
        received_at.map_or(Cell::Unknown, Cell::Since),
        Cell::text(status.window.clone()),
        Cell::text(agent.map(|agent| agent.version.clone())),
    ]
}

/// CPU and memory usage in percent of the node's capacity.
pub fn used_percent(status: &NodeMetricStatus) -> [Option<f64>; 2] {
    let (used, all) = (&status.usage.node, &status.capacity);
    let part = |used: &Option<Text>, all: &Option<Text>| {
        let [used, all] = [used, all].map(|amount| quantity(amount.as_ref()));
        let percent = 100.0 * used?.as_f64() / all?.as_f64();
        percent.is_finite().then_some(percent)
    };
    [part(&used.cpu, &all.cpu), part(&used.memory, &all.memory)]
}

/// An amount of CPU, rounded up as in `kubectl top`.
pub fn millicores(amount: Option<&Text>) -> Option<MilliCpu> {
    quantity(amount)?.as_milli_cpu()
}

/// An amount of memory.
pub fn bytes(amount: Option<&Text>) -> Option<Bytes> {
    quantity(amount)?.as_bytes()
}

/// Whole mebibytes, rounded down as in `kubectl top`.
pub fn mebibytes(amount: Bytes) -> String {
    format!("{}Mi", amount.0 >> 20)
}

fn quantity(amount: Option<&Text>) -> Option<Quantity> {
    amount?.0.parse().ok()
}

fn worst(pressure: &Pressures) -> Option<String> {
    let all = [
        ("cpu", &pressure.cpu),
        ("memory", &pressure.memory),
        ("io", &pressure.io),
    ];
    let known = all
        .into_iter()
        .filter_map(|(name, pressure)| Some((name, pressure.as_ref()?.some.avg10)));
    let (name, percent) = known.max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(format!("{name} {percent:.0}%"))
}

fn health(status: &NodeMetricStatus) -> String {
    let conditions = status.conditions.iter();
    let healthy = conditions
        .rev()
        .find(|condition| condition.type_ == HEALTHY);
    match healthy {
        Some(healthy) if healthy.status == "True" => HEALTHY.to_owned(),
        Some(healthy) => healthy.reason.clone(),
        None => UNKNOWN.to_owned(),
    }
}

/// An age in seconds as kubectl writes it (`k8s.io/apimachinery/pkg/util/duration.HumanDuration`).
pub fn age(seconds: i64) -> String {
    let two = |large: i64, unit: &str, small: i64, rest: &str| match small {
        0 => format!("{large}{unit}"),
        small => format!("{large}{unit}{small}{rest}"),
    };
    let (minutes, hours) = (seconds / 60, seconds / 3600);
    match seconds {
        ..-1 => "<invalid>".to_owned(),
        -1 => "0s".to_owned(),
        _ if seconds < 120 => format!("{seconds}s"),
        _ if minutes < 10 => two(minutes, "m", seconds % 60, "s"),
        _ if minutes < 180 => format!("{minutes}m"),
        _ if hours < 8 => two(hours, "h", minutes % 60, "m"),
        _ if hours < 48 => format!("{hours}h"),
        _ if hours < 192 => two(hours / 24, "d", hours % 24, "h"),
        _ if hours < 24 * 365 * 2 => format!("{}d", hours / 24),
        _ if hours < 24 * 365 * 8 => two(hours / 24 / 365, "y", hours / 24 % 365, "d"),
        _ => format!("{}y", hours / 24 / 365),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_are_formatted_as_kubectl_does() {
        let day = 86400;
        for (seconds, text) in [
            (-5, "<invalid>"),
            (-1, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (599, "9m59s"),
            (600, "10m"),
            (179 * 60, "179m"),
            (180 * 60, "3h"),
            (7 * 3600 + 60, "7h1m"),
            (8 * 3600 + 60, "8h"),
            (47 * 3600, "47h"),
            (2 * day, "2d"),
            (2 * day + 3600, "2d1h"),
            (8 * day + 3600, "8d"),
            (729 * day, "729d"),
            (731 * day, "2y1d"),
            (3650 * day, "10y"),
        ] {
            assert_eq!(age(seconds), text);
        }
    }

    #[test]
    fn amounts_are_formatted_as_kubectl_top_does() {
        let amount = |text: &str| Text(text.to_owned());
        let cpu = |text| millicores(Some(&amount(text))).map(|cpu| cpu.to_string());
        let memory = |text| bytes(Some(&amount(text))).map(mebibytes);
        for (text, written) in [("2", "2000m"), ("0.5", "500m"), ("1200300u", "1201m")] {
            assert_eq!(cpu(text).as_deref(), Some(written));
        }
        for (text, written) in [
            ("3872032Ki", "3781Mi"),
            ("4Gi", "4096Mi"),
            ("1048575", "0Mi"),
        ] {
            assert_eq!(memory(text).as_deref(), Some(written));
        }
        assert_eq!((cpu("much"), memory("-1Ki")), (None, None));
        assert_eq!((millicores(None), bytes(None)), (None, None));
    }

    #[test]
    fn a_row_shows_unknown_values_as_unknown() {
        let status: NodeMetricStatus = serde_json::from_value(json!({
            "timestamp": "2026-01-01T00:00:00Z", "window": "10s",
            "capacity": {"cpu": "8", "memory": "16Gi"},
            "usage": {"node": {"cpu": "1200m", "memory": "4Gi"}},
            "pressure": {"io": {"some": {"avg10": 3.6, "avg60": 0.0, "avg300": 0.0}},
                         "cpu": {"some": {"avg10": 0.4, "avg60": 9.0, "avg300": 9.0}}},
            "load": {"percent": 91.8, "worst": "cpu", "cpu": {"percent": 91.8, "expected": 73.4, "newcomers": 0.0, "line": 80.0},
                     "memory": {"percent": 27.8, "expected": 25.0, "newcomers": 0.0, "line": 90.0}},
            "rules": {"total": 3, "breached": 1, "cooling": 0, "unknown": 0},
        }))
        .unwrap();
        let now = "2026-01-01T01:00:30Z".parse().unwrap();
        let created = Time("2026-01-01T00:00:00Z".parse().unwrap());
        let received_at = "2026-01-01T01:00:00Z".parse().unwrap();
        let printed = |created, received_at, status| {
            row("n1", created, received_at, status)
                .iter()
                .map(|cell| cell.value(now))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            printed(Some(&created), Some(received_at), &status),
            json!([
                "n1",
                "1200m",
                "15%",
                "4096Mi",
                "25%",
                "92%",
                "io 4%",
                1,
                "<unknown>",
                "60m",
                "30s",
                "10s",
                "<unknown>"
            ])
            .as_array()
            .unwrap()
            .clone(),
        );
        let unknown = printed(None, None, &NodeMetricStatus::default());
        assert_eq!(unknown.len(), columns().as_array().unwrap().len());
        assert!(
            unknown[1..].iter().all(|cell| cell == UNKNOWN),
            "{unknown:?}"
        );
    }
}
