//! One figure of one node, by its name or address, now or some minutes ago. Pure but for the lock.
//!
//! These are crane-scheduler's three queries of Prometheus, answered from reports and what is polled. A value that is too old is an
//! error, and is never passed off as new.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use jiff::SignedDuration;
use serde::Serialize;
use thiserror::Error;

use crate::crd::load_values::{self, LoadValues, NAMES};
use crate::engine::time::BootTime;
use crate::metrics_api::loads::{HISTORY, NodeLoads};
use crate::metrics_api::reports::is_fresh;

/// A value of the past counts for this long: the history has one each half minute, and reports may come each minute.
const PAST_LIFETIME: Duration = Duration::from_secs(90);

/// A value.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeValue {
    /// The node's name.
    pub node: Arc<str>,
    /// In percent.
    pub value: f64,
    /// How long before now it was measured.
    pub age_seconds: f64,
    /// `report` of the agent, or `poll` of an exporter; `None` for one of the past.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<&'static str>,
}

/// Why there is no value.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum QueryError {
    /// There is no such Node, or none with such an address.
    #[error("there is no node {0:?}, and none with that internal address")]
    UnknownNode(String),
    /// It is none of ours.
    #[error("unknown metric {0:?}; use one of {names}, or a name of --windows", names = NAMES.join(", "))]
    UnknownMetric(String),
    /// The node has no report and no page.
    #[error("no load of {0} is known: no agent reports from it{1}")]
    Never(Arc<str>, String),
    /// Too old to be used.
    #[error("the newest load of {0} is {age} old, which is too old{2}", age = whole(*.1))]
    Stale(Arc<str>, Duration, String),
    /// The node has other values, but not this one.
    #[error("{0} of {1} is not known: it is not in its report or page")]
    NoValue(String, Arc<str>),
    /// Longer ago than the history goes.
    #[error("the controller has values of the last {limit} only, and none of {ago} ago", limit = whole(HISTORY), ago = whole(*.0))]
    TooLongAgo(Duration),
    /// There was none at that time.
    #[error("no load of {0} is known from {ago} ago", ago = whole(*.1))]
    NonePast(Arc<str>, Duration),
    /// Only the figures of each node have a past.
    #[error("the controller has no past values of {0}, only of {names}", names = NAMES.join(", "))]
    NoPast(String),
}

/// In whole seconds, such as `1m 5s`.
fn whole(duration: Duration) -> String {
    let seconds = i64::try_from(duration.as_secs()).unwrap_or(i64::MAX);
    format!("{:#}", SignedDuration::from_secs(seconds))
}

impl QueryError {
    /// As an HTTP code and a reason of a `Status`.
    pub const fn code(&self) -> (u16, &'static str) {
        match self {
            Self::UnknownNode(_) => (404, "NotFound"),
            Self::UnknownMetric(_) | Self::TooLongAgo(_) | Self::NoPast(_) => (400, "BadRequest"),
            _ => (503, "ServiceUnavailable"),
        }
    }
}

/// The current value of a node.
///
/// # Errors
/// It is not known, or too old.
pub fn by_node_name(
    loads: &NodeLoads,
    node: &str,
    metric: &str,
    now: BootTime,
) -> Result<NodeValue, QueryError> {
    let all = loads.read();
    let Some((node, load)) = all.get_key_value(node) else {
        return Err(QueryError::UnknownNode(node.to_owned()));
    };
    let node = Arc::clone(node);
    let load = load.clone();
    drop(all);
    let polled = || {
        let failure = loads.failure(&node);
        failure.map_or_else(String::new, |why| format!("; polling {why}"))
    };
    let Some(load) = load else {
        return Err(QueryError::Never(Arc::clone(&node), polled()));
    };
    let custom = || load.status.windows.custom.get(metric).copied();
    let value = match load_values::index(metric) {
        Some(index) => LoadValues::of(&load.status).0[index],
        None => match custom() {
            Some(value) => Some(value).filter(|value| value.is_finite()),
            None => return Err(QueryError::UnknownMetric(metric.to_owned())),
        },
    };
    let age = now.since(load.at);
    if !is_fresh(load.at, load.interval, now) {
        return Err(QueryError::Stale(Arc::clone(&node), age, polled()));
    }
    let value = value.ok_or_else(|| QueryError::NoValue(metric.to_owned(), Arc::clone(&node)))?;
    Ok(NodeValue {
        node,
        value,
        age_seconds: age.as_secs_f64(),
        source: Some(if load.polled { "poll" } else { "report" }),
    })
}

/// The current value of the node with this internal address.
///
/// # Errors
/// It is not known, or too old.
pub fn by_node_ip(
    loads: &NodeLoads,
    address: IpAddr,
    metric: &str,
    now: BootTime,
) -> Result<NodeValue, QueryError> {
    let node = loads.node_at(address);
    let node = node.ok_or_else(|| QueryError::UnknownNode(address.to_string()))?;
    by_node_name(loads, &node, metric, now)
}

/// The value of a node, by name or internal address, `offset` ago: the newest that had been measured then.
///
/// # Errors
/// It is longer ago than [`HISTORY`], or was not known then.
pub fn with_offset(
    loads: &NodeLoads,
    node: &str,
    metric: &str,
    offset: Duration,
    now: BootTime,
) -> Result<NodeValue, QueryError> {
    let node = find(loads, node)?;
    let Some(index) = load_values::index(metric) else {
        let load = loads.read().get(&node).cloned().flatten();
        let custom = load.is_some_and(|load| load.status.windows.custom.contains_key(metric));
        let metric = metric.to_owned();
        return Err(if custom {
            QueryError::NoPast(metric)
        } else {
            QueryError::UnknownMetric(metric)
        });
    };
    if offset > HISTORY {
        return Err(QueryError::TooLongAgo(offset));
    }
    let then = now.before(offset);
    let past = loads.past(&node, then);
    let past = past.filter(|past| then.since(past.at) < PAST_LIFETIME);
    let past = past.ok_or_else(|| QueryError::NonePast(Arc::clone(&node), offset))?;
    let value = past.values.0[index];
    let value = value.ok_or_else(|| QueryError::NoValue(metric.to_owned(), Arc::clone(&node)))?;
    Ok(NodeValue {
        node,
        value,
        age_seconds: now.since(past.at).as_secs_f64(),
        source: None,
    })
}

/// By name or internal address, now or `offset` ago.
///
/// # Errors
/// As for each of these.
pub fn any(
    loads: &NodeLoads,
    node: &str,
    metric: &str,
    offset: Option<Duration>,
    now: BootTime,
) -> Result<NodeValue, QueryError> {
    if let Some(offset) = offset {
        return with_offset(loads, node, metric, offset, now);
    }
    match node.parse() {
        Ok(address) if !loads.read().contains_key(node) => by_node_ip(loads, address, metric, now),
        _ => by_node_name(loads, node, metric, now),
    }
}

/// The node of this name, or with this internal address.
fn find(loads: &NodeLoads, node: &str) -> Result<Arc<str>, QueryError> {
    if let Some((name, _)) = loads.read().get_key_value(node) {
        return Ok(Arc::clone(name));
    }
    let address = node.parse().ok();
    let found = address.and_then(|address| loads.node_at(address));
    found.ok_or_else(|| QueryError::UnknownNode(node.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::super::values::tests::{at, node};
    use super::*;
    use crate::engine::units::{Bytes, MilliCpu};

    /// `a`, at 10.0.0.1, with a report of [`at`]; `b` without one.
    fn loads() -> NodeLoads {
        let loads = NodeLoads::default();
        for (name, last) in [("a", 1), ("b", 2)] {
            let address = IpAddr::from([10, 0, 0, last]);
            loads.set_node(name, &[address], MilliCpu(4000), Bytes(8 << 30));
        }
        loads.set("a", Some(node(50.0, 40.0, 10.0)));
        loads.set("b", None);
        loads
    }

    const fn address(last: u8) -> IpAddr {
        IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, last))
    }

    #[test]
    fn a_node_is_found_by_name_and_by_address() {
        let loads = loads();
        let now = at() + Duration::from_secs(4);
        let wanted = NodeValue {
            node: "a".into(),
            value: 40.0,
            age_seconds: 4.0,
            source: Some("report"),
        };
        assert_eq!(
            by_node_name(&loads, "a", "cpu_expected", now),
            Ok(wanted.clone())
        );
        assert_eq!(
            by_node_ip(&loads, address(1), "cpu_expected", now),
            Ok(wanted.clone())
        );
        for node in ["a", "10.0.0.1"] {
            assert_eq!(
                any(&loads, node, "cpu_expected", None, now),
                Ok(wanted.clone())
            );
        }
        let unknown = by_node_ip(&loads, address(9), "load", now).unwrap_err();
        assert_eq!(unknown, QueryError::UnknownNode("10.0.0.9".to_owned()));
        assert_eq!(
            by_node_name(&loads, "x", "load", now).unwrap_err().code().0,
            404
        );
    }

    #[test]
    fn an_old_value_is_refused_with_its_age_and_why_there_is_no_newer_one() {
        let loads = loads();
        loads.set_failure("a", Some("10.0.0.1:80: no response within 1s".to_owned()));
        let ask = |seconds| {
            let now = at() + Duration::from_secs(seconds);
            by_node_name(&loads, "a", "load", now)
        };
        assert!(ask(29).is_ok());
        let wanted = "the newest load of a is 1m 5s old, which is too old; polling 10.0.0.1:80: no response within 1s";
        assert_eq!(ask(65).unwrap_err().to_string(), wanted);
        let never = by_node_name(&loads, "b", "load", at()).unwrap_err();
        assert_eq!(
            never.to_string(),
            "no load of b is known: no agent reports from it"
        );
        assert_eq!(never.code().0, 503);
        let unknown = by_node_name(&loads, "a", "up", at()).unwrap_err();
        assert!(
            unknown
                .to_string()
                .starts_with("unknown metric \"up\"; use one of cpu_usage_avg_5m, ")
        );
        let missing = by_node_name(&loads, "a", "mem_usage_max_avg_1d", at()).unwrap_err();
        assert_eq!(
            missing,
            QueryError::NoValue("mem_usage_max_avg_1d".to_owned(), "a".into())
        );
    }

    #[test]
    fn an_offset_asks_for_what_was_known_then() {
        let loads = loads();
        let later = Duration::from_mins(5);
        let mut newer = node(80.0, 64.0, 10.0);
        newer.at = at() + later;
        loads.set("a", Some(newer));
        let now = at() + later + Duration::from_secs(10);
        let ask = |node: &str, offset| {
            let found = with_offset(&loads, node, "load", Duration::from_secs(offset), now);
            found.map(|found| (found.value, found.age_seconds))
        };
        assert_eq!(ask("a", 0), Ok((80.0, 10.0)));
        assert_eq!(ask("a", 300), Ok((50.0, 310.0)));
        assert_eq!(ask("10.0.0.1", 300), Ok((50.0, 310.0)));
        let gap = ask("a", 120).unwrap_err().to_string();
        assert_eq!(gap, "no load of a is known from 2m ago");
        let long = ask("a", 601).unwrap_err().to_string();
        assert_eq!(
            long,
            "the controller has values of the last 10m only, and none of 10m 1s ago"
        );
        assert!(ask("b", 60).is_err() && ask("x", 60).is_err());
        let through_any = any(&loads, "a", "load", Some(later), now);
        let direct = with_offset(&loads, "a", "load", later, now);
        assert!(through_any.is_ok() && through_any == direct);
    }
}
