//! One number for each node. Pure.

use thiserror::Error;

use crate::crd::node_metric::Load;
use crate::engine::time::BootTime;
use crate::metrics_api::loads::{ByNode, KnownLoad};

/// Fewer than half of the nodes have a recent report, so that their median would say nothing about the others; or no Node is known
/// yet: Trimaran would take an empty answer for the new state and forget all loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "only {known} of {all} nodes have a recent report with a load: this replica has just started, or agents do not reach it"
)]
pub struct TooFewKnown {
    known: usize,
    all: usize,
}

/// Checks that there are nodes, and that at least half of them have a known load.
///
/// # Errors
/// Fewer have, or there are none.
pub fn check(nodes: &ByNode, now: BootTime) -> Result<(), TooFewKnown> {
    let all = nodes.len();
    let loads = nodes.values().flatten();
    let known = loads.filter(|node| node.fresh(now).is_some()).count();
    if all == 0 || known * 2 < all {
        return Err(TooFewKnown { known, all });
    }
    Ok(())
}

/// A value of each node, in the order of the map: the median of the others where it is unknown, 0 if none is known.
pub fn values(
    nodes: &ByNode,
    now: BootTime,
    of: impl Fn(&KnownLoad, &Load) -> Option<f64>,
) -> Vec<f64> {
    let value = |node: &Option<KnownLoad>| {
        let node = node.as_ref()?;
        of(node, node.fresh(now)?).filter(|value| value.is_finite())
    };
    let values: Vec<Option<f64>> = nodes.values().map(value).collect();
    let median = median(values.iter().flatten().copied().collect());
    values
        .into_iter()
        .map(|value| value.unwrap_or(median))
        .collect()
}

/// The lower median; 0 without values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let middle = (values.len() - 1) / 2;
    *values.select_nth_unstable_by(middle, f64::total_cmp).1
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use serde_json::json;

    use super::*;
    use crate::engine::units::{Bytes, MilliCpu};

    /// When the reports of these tests were received.
    pub fn at() -> BootTime {
        BootTime::default() + Duration::from_secs(1000)
    }

    /// A node of 4 CPUs and 8 GiB with this load, and this part of its CPUs and memory expected to be used, in percent.
    pub fn node(load: f64, cpu: f64, memory: f64) -> KnownLoad {
        let resource = |expected: f64| json!({"percent": load, "expected": expected, "newcomers": 0.0, "line": 80.0});
        let windows =
            |stddev: f64| json!({"last5m": {"avg": 1.0, "stddev": stddev, "coverage": 1.0}});
        let status = json!({
            "load": {"percent": load, "worst": "cpu", "cpu": resource(cpu), "memory": resource(memory)},
            "windows": {"cpu": windows(cpu / 4.0), "memory": windows(memory / 8.0)},
        });
        KnownLoad {
            at: at(),
            interval: Duration::from_secs(10),
            cpu: MilliCpu(4000),
            memory: Bytes(8 << 30),
            status: Arc::new(serde_json::from_value(status).unwrap()),
            polled: false,
        }
    }

    /// Nodes a, b, c, ...
    pub fn cluster(nodes: impl IntoIterator<Item = Option<KnownLoad>>) -> ByNode {
        let names = ('a'..='z').map(|name| name.to_string().into());
        names.zip(nodes).collect()
    }

    #[test]
    fn an_unknown_value_is_the_median_of_the_others() {
        let mut old = node(90.0, 72.0, 10.0);
        old.at = BootTime::default();
        let nodes = cluster([
            Some(node(50.0, 40.0, 10.0)),
            None,
            Some(node(70.0, 56.0, 10.0)),
            Some(node(10.0, 8.0, 10.0)),
            Some(old),
        ]);
        let loads = values(&nodes, at(), |_, load| Some(load.percent));
        let mut loads: Vec<_> = nodes.keys().map(|name| &**name).zip(loads).collect();
        loads.sort_by_key(|(name, _)| *name);
        let wanted = [
            ("a", 50.0),
            ("b", 50.0),
            ("c", 70.0),
            ("d", 10.0),
            ("e", 50.0),
        ];
        assert_eq!(loads, wanted);
        assert_eq!(values(&nodes, at(), |_, _| None), [0.0; 5]);
    }

    #[test]
    fn half_of_the_nodes_must_be_known() {
        let known = || Some(node(50.0, 40.0, 10.0));
        assert_eq!(check(&cluster([known(), None]), at()), Ok(()));
        assert!(
            check(&cluster([]), at()).is_err(),
            "Nodes are not known yet"
        );
        let refused = check(&cluster([known(), None, None]), at()).unwrap_err();
        assert_eq!((refused.known, refused.all), (1, 3));
        let late = at() + Duration::from_mins(1);
        assert!(check(&cluster([known()]), late).is_err());
    }
}
