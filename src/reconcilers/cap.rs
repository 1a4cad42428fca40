//! The cap on unschedulable nodes, so that one bad threshold can't close a whole cluster. Pure.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::ordered;

/// A node whose rules want it unschedulable.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its name.
    pub node: String,
    /// It has the `NoSchedule` taint already.
    pub unschedulable: bool,
    /// The largest value/threshold of those rules: 1.2 is 20 % above.
    pub ratio: f64,
}

/// How many nodes may be unschedulable at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cap {
    /// A number of nodes.
    Nodes(usize),
    /// A percentage of the nodes that any rule may make unschedulable, from 1 to 100.
    Percent(usize),
}

impl Cap {
    /// The limit for `matched` nodes. At least one, otherwise a single node would never be protected.
    pub fn limit(self, matched: usize) -> usize {
        match self {
            Self::Nodes(nodes) => nodes,
            Self::Percent(percent) => (matched * percent / 100).max(1),
        }
    }
}

impl FromStr for Cap {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let cap = match text.strip_suffix('%') {
            Some(percent) => percent.parse().ok().map(Self::Percent),
            None => text.parse().ok().map(Self::Nodes),
        };
        cap.filter(|cap| matches!(cap, Self::Nodes(1..) | Self::Percent(1..=100)))
            .ok_or("write a number of nodes, such as 3, or a percentage from 1% to 100%")
    }
}

/// The nodes beyond the limit, which get `PreferNoSchedule` instead. Nodes that are unschedulable already stay so first, then those
/// furthest above their threshold.
pub fn beyond_limit(mut candidates: Vec<Candidate>, limit: usize) -> BTreeSet<String> {
    ordered::sort_by(&mut candidates, |a, b| {
        let by_state = b.unschedulable.cmp(&a.unschedulable);
        let by_ratio = b.ratio.total_cmp(&a.ratio);
        by_state.then(by_ratio).then_with(|| a.node.cmp(&b.node))
    });
    candidates
        .into_iter()
        .skip(limit)
        .map(|it| it.node)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_is_a_number_of_nodes_or_a_percentage() {
        let limit = |text: &str, matched| text.parse::<Cap>().map(|cap| cap.limit(matched));
        assert_eq!(limit("3", 2), Ok(3));
        assert_eq!(limit("3", 1000), Ok(3));
        assert_eq!(limit("20%", 1000), Ok(200));
        assert_eq!(limit("20%", 2), Ok(1), "a single node is protected too");
        for wrong in ["0", "0%", "101%", "-1", "1.5", "%", "", "few", "3 %"] {
            assert!(wrong.parse::<Cap>().is_err(), "{wrong}");
        }
    }
}
