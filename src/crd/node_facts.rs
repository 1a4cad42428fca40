//! The facts about a node that compilation needs, from the Node object.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::engine::policy::NodeFacts;
use crate::engine::quantity::Quantity;
use crate::engine::units::Bytes;

/// The labels and capacity of a `v1` Node. A missing capacity is 0.
pub fn node_facts(node: &Value) -> NodeFacts {
    let labels = node["metadata"]["labels"].as_object();
    let label = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let capacity = &node["status"]["capacity"];
    let labels = labels.into_iter().flatten().filter_map(label).collect();
    NodeFacts::of_capacity(labels, |name| capacity[name].as_str())
}

impl NodeFacts {
    /// From the quantities of `status.capacity`. A missing one is 0.
    pub fn of_capacity<'a>(
        labels: BTreeMap<String, String>,
        capacity: impl Fn(&str) -> Option<&'a str>,
    ) -> Self {
        let amount = |name: &str| {
            let quantity: Option<Quantity> = capacity(name)?.parse().ok();
            quantity.map(Quantity::as_f64)
        };
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a capacity; `as` saturates"
        )]
        Self {
            labels,
            cpus: amount("cpu").unwrap_or(0.0) as u32,
            memory: Bytes(amount("memory").unwrap_or(0.0) as u64),
            windows: None,
        }
    }
}
