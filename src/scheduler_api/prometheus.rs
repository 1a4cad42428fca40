//! Answers to queries in the format of Prometheus' HTTP API, for the descheduler's `metricsUtilization`. Pure.
//!
//! The descheduler fails if a node is missing or a value is not from 0 to 1, and cuts values to whole percents.

use std::sync::Arc;

use jiff::Timestamp;
use serde::Serialize;
use thiserror::Error;

use super::values::{TooFewKnown, check, values};
use crate::crd::node_metric::Load;
use crate::engine::time::BootTime;
use crate::metrics_api::loads::ByNode;

/// What a query returns for a node, in percent.
type Value = fn(&Load) -> f64;

/// The queries.
const QUERIES: [(&str, Value); 3] = [
    ("instance:plimsoll_load_line:ratio", |load| load.percent),
    ("instance:plimsoll_cpu:ratio", |load| load.cpu.expected),
    ("instance:plimsoll_memory:ratio", |load| {
        load.memory.expected
    }),
];

/// Keeps 0.29 from becoming 28 percent when it is multiplied and cut.
const ROUNDING: f64 = 1e-6;

/// Why a query has no result.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PrometheusError {
    /// It is none of ours.
    #[error("unknown query {0:?}: this is no Prometheus, it answers only {names}", names = names())]
    Unknown(String),
    /// Too few nodes are known.
    #[error(transparent)]
    TooFewKnown(#[from] TooFewKnown),
}

impl PrometheusError {
    /// The error as Prometheus' API writes it.
    pub fn body(&self) -> String {
        let error_type = match self {
            Self::Unknown(_) => "bad_data",
            Self::TooFewKnown(_) => "unavailable",
        };
        let error = self.to_string();
        let body = ErrorBody {
            status: "error",
            error_type,
            error,
        };
        // Strings serialize.
        serde_json::to_string(&body).unwrap_or_default()
    }
}

fn names() -> String {
    QUERIES.map(|(name, _)| name).join(", ")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ErrorBody {
    status: &'static str,
    error_type: &'static str,
    error: String,
}

#[derive(Serialize)]
struct Answer {
    status: &'static str,
    data: Vector,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Vector {
    result_type: &'static str,
    result: Vec<Sample>,
}

#[derive(Serialize)]
struct Sample {
    metric: Labels,
    value: (i64, String),
}

#[derive(Serialize)]
struct Labels {
    instance: Arc<str>,
}

/// The result of an instant query: a vector with the label `instance`, the node's name, and values from 0 to 1.
///
/// # Errors
/// The query is unknown, or too few nodes are known.
pub fn query(
    nodes: &ByNode,
    query: &str,
    now: BootTime,
    wall: Timestamp,
) -> Result<String, PrometheusError> {
    let mut queries = QUERIES.iter();
    let known = queries.find(|(name, _)| *name == query.trim());
    let (_, of) = known.ok_or_else(|| PrometheusError::Unknown(query.to_owned()))?;
    check(nodes, now)?;
    let values = values(nodes, now, |_, load| Some(of(load)));
    let time = wall.as_second();
    let sample = |(name, percent): (&Arc<str>, f64)| {
        let ratio = (percent / 100.0 + ROUNDING).clamp(0.0, 1.0);
        Sample {
            metric: Labels {
                instance: Arc::clone(name),
            },
            value: (time, format!("{ratio:.6}")),
        }
    };
    let mut result: Vec<Sample> = nodes.keys().zip(values).map(sample).collect();
    result.sort_by(|one, other| one.metric.instance.cmp(&other.metric.instance));
    let answer = Answer {
        status: "success",
        data: Vector {
            result_type: "vector",
            result,
        },
    };
    // It consists of numbers and strings, which serialize.
    Ok(serde_json::to_string(&answer).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::super::values::tests::{at, cluster, node};
    use super::*;

    fn ask(nodes: &ByNode, text: &str) -> Result<Value, PrometheusError> {
        let wall = Timestamp::UNIX_EPOCH;
        query(nodes, text, at(), wall).map(|answer| answer.parse().unwrap_or_default())
    }

    #[test]
    fn every_node_has_a_ratio_from_0_to_1() {
        let nodes = cluster([
            Some(node(29.0, 23.2, 10.0)),
            Some(node(130.0, 104.0, 10.0)),
            None,
        ]);
        let sample =
            |name: &str, value: &str| json!({"metric": {"instance": name}, "value": [0, value]});
        let result = [
            sample("a", "0.290001"),
            sample("b", "1.000000"),
            sample("c", "0.290001"),
        ];
        let wanted =
            json!({"status": "success", "data": {"resultType": "vector", "result": result}});
        assert_eq!(ask(&nodes, "instance:plimsoll_load_line:ratio"), Ok(wanted));
        let of = |query| ask(&nodes, query).unwrap()["data"]["result"][0]["value"][1].clone();
        assert_eq!(of("instance:plimsoll_cpu:ratio"), "0.232001");
        assert_eq!(of("instance:plimsoll_memory:ratio"), "0.100001");
    }

    #[test]
    fn another_query_is_refused_with_the_names() {
        let refused = ask(&cluster([]), "up").unwrap_err();
        let body: Value = serde_json::from_str(&refused.body()).unwrap();
        assert_eq!(
            (&body["status"], &body["errorType"]),
            (&json!("error"), &json!("bad_data"))
        );
        let error = body["error"].as_str().unwrap();
        assert!(
            error.contains("instance:plimsoll_load_line:ratio, instance:plimsoll_cpu:ratio"),
            "{error}"
        );
        let refused = ask(&cluster([None]), "instance:plimsoll_cpu:ratio").unwrap_err();
        assert!(
            refused.body().contains("only 0 of 1 nodes"),
            "{}",
            refused.body()
        );
    }
}
