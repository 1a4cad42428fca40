//! What each scheduler sees of a node beside the label. Pure.

use k8s_openapi::api::core::v1 as k8s;
use serde::Serialize;

use crate::cluster::taint::BUSY_KEY;
use crate::crd::crane_annotations::CraneAnnotations;
use crate::scheduler_api::extender::mean_points;

/// Of one node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SchedulerViews {
    /// Points of the extender, 0 to 9, as a mean over pods; `None`: the load is unknown, and it gives the median of the others.
    pub extender: Option<f64>,
    /// It has the soft taint.
    pub soft_taint: bool,
    /// The annotations for crane-scheduler, if its agent writes them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub crane: Option<CraneLine>,
    /// Keys of such annotations that another writer set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub crane_of_others: Vec<&'static str>,
}

/// What crane-scheduler reads.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CraneLine {
    /// Averages of 5 minutes, in percent of the node.
    pub cpu: Option<f64>,
    pub memory: Option<f64>,
    /// The hot value: each 0.1 takes one of 100 points.
    pub hot: Option<f64>,
}

impl SchedulerViews {
    /// Of a node with this load in percent of its load line, with the pod if there is one.
    pub fn of(node: &k8s::Node, load: Option<f64>) -> Self {
        let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
        let mut taints = taints.into_iter().flatten();
        let annotations = CraneAnnotations::of(node.metadata.annotations.as_ref());
        let values = annotations.values();
        let [cpu, _, _, memory, _, _] = values.usage();
        let crane = CraneLine {
            cpu,
            memory,
            hot: values.hot().map(|points| f64::from(points) / 10.0),
        };
        Self {
            extender: load.map(|load| (mean_points(load) * 10.0).round() / 10.0),
            soft_taint: taints.any(|it| it.key == BUSY_KEY),
            crane: (!values.is_empty()).then_some(crane),
            crane_of_others: annotations.others().collect(),
        }
    }
}

impl CraneLine {
    /// For a table: `63/41 hot 0.8`.
    pub fn cell(&self) -> String {
        let percent = |of: Option<f64>| of.map_or_else(|| "?".to_owned(), |it| format!("{it:.0}"));
        let hot = self
            .hot
            .map_or_else(String::new, |hot| format!(" hot {hot:.1}"));
        format!("{}/{}{hot}", percent(self.cpu), percent(self.memory))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn node(annotations: &Value, taint: &str) -> k8s::Node {
        let spec = json!({"taints": [{"key": taint, "effect": "PreferNoSchedule"}]});
        let node = json!({"metadata": {"name": "n", "annotations": annotations}, "spec": spec});
        serde_json::from_value(node).expect("a node")
    }

    #[test]
    fn each_view_is_read_from_the_node() {
        let time = "2026-11-26T04:05:06Z";
        let annotations = json!({
            "plimsoll.dev/crane-annotations": time,
            "cpu_usage_avg_5m": format!("0.63012,{time}"), "mem_usage_avg_5m": format!("0.41000,{time}"),
            "node_hot_value": format!("0.8,{time}"),
        });
        let seen = SchedulerViews::of(&node(&annotations, BUSY_KEY), Some(47.5));
        assert_eq!((seen.extender, seen.soft_taint), (Some(4.5), true));
        assert_eq!(
            seen.crane.map(|it| it.cell()).as_deref(),
            Some("63/41 hot 0.8")
        );
        assert!(seen.crane_of_others.is_empty());
    }

    #[test]
    fn what_another_writer_set_is_not_ours() {
        let annotations = json!({"cpu_usage_avg_5m": "0.63012,2026-11-26T04:05:06Z"});
        let seen = SchedulerViews::of(&node(&annotations, "gpu"), None);
        assert_eq!((seen.extender, seen.soft_taint), (None, false));
        assert_eq!(seen.crane, None);
        assert_eq!(seen.crane_of_others, ["cpu_usage_avg_5m"]);
    }

    #[test]
    fn a_busy_node_has_no_points() {
        for (load, points) in [(0.0, 9.0), (95.0, 0.0), (150.0, 0.0)] {
            let seen = SchedulerViews::of(&node(&json!({}), "gpu"), Some(load));
            assert_eq!(seen.extender, Some(points), "{load}");
        }
    }
}
