//! The facts about a node that compilation needs, from the Node object.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::engine::policy::NodeFacts;
use crate::engine::quantity::Quantity;
use crate::engine::units::Bytes;

/// The labels and capacity of a `v1` Node. A missing capacity is 0.
pub fn node_facts<'a>(node: &'a Value) -> NodeFacts {
    let labels = node["metadata"]["labels"].as_object();
    let label = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    let capacity = node["status"]["capacity"].as_object();
    let labels = labels.into_iter().flatten().filter_map(label).collect();
    let amount = |(name, amount): (&'a String, &'a Value)| Some((name.as_str(), amount.as_str()?));
    let capacity = capacity.into_iter().flatten().filter_map(amount);
    NodeFacts::of_capacity(labels, capacity)
}

impl NodeFacts {
    /// From the quantities of `status.capacity`, by name. A missing one is 0. As in the kubelet's allocatable, pools of huge
    /// pages are no memory.
    pub fn of_capacity<'a>(
        labels: BTreeMap<String, String>,
        capacity: impl Iterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        let (mut cpus, mut memory, mut huge_pages) = (0.0, 0.0, 0.0);
        for (name, amount) in capacity {
            let amount = amount.parse().map_or(0.0, Quantity::as_f64);
            match name {
                "cpu" => cpus = amount,
                "memory" => memory = amount,
                _ if name.starts_with("hugepages-") => huge_pages += amount,
                _ => {}
            }
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a capacity; `as` saturates"
        )]
        Self {
            labels,
            cpus: cpus as u32,
            memory: Bytes((memory - huge_pages) as u64),
            windows: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pools_of_huge_pages_are_no_memory() {
        let capacity =
            json!({"cpu": "8", "memory": "64Gi", "hugepages-1Gi": "60Gi", "hugepages-2Mi": "0"});
        let facts = node_facts(&json!({"status": {"capacity": capacity}}));
        assert_eq!((facts.cpus, facts.memory), (8, Bytes(4 << 30)));
        let none = node_facts(&json!({}));
        assert_eq!((none.cpus, none.memory), (0, Bytes::ZERO));
    }
}
