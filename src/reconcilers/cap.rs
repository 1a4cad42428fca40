//! One bad watermark must not close a cluster: at most a part of the nodes is unschedulable at a time. Pure.

use std::collections::BTreeSet;
use std::str::FromStr;

use crate::ordered;

/// One node whose rules want it closed.
#[derive(Clone, Debug, PartialEq)]
pub struct Closing {
    /// Its name.
    pub node: String,
    /// It is closed already.
    pub closed: bool,
    /// The largest value over mark of those rules: 1.2 is 20 % over.
    pub over: f64,
}

/// The most nodes that may be closed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cap {
    /// So many.
    Nodes(usize),
    /// So many percent of those that any rule may close, from 1 to 100.
    Percent(usize),
}

impl Cap {
    /// How many of so many nodes: at least one, or a single node would never be protected.
    pub fn most(self, matched: usize) -> usize {
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
            .ok_or("write a number of nodes, such as 3, or a part of them from 1% to 100%")
    }
}

/// Those that get `PreferNoSchedule` instead: of nodes that are not closed yet the ones least over their mark.
pub fn soften(mut closing: Vec<Closing>, most: usize) -> BTreeSet<String> {
    ordered::sort_by(&mut closing, |a, b| {
        let by_state = b.closed.cmp(&a.closed);
        let by_mark = b.over.total_cmp(&a.over);
        by_state.then(by_mark).then_with(|| a.node.cmp(&b.node))
    });
    closing.into_iter().skip(most).map(|one| one.node).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_is_a_number_of_nodes_or_a_part_of_them() {
        let most = |text: &str, matched| text.parse::<Cap>().map(|cap| cap.most(matched));
        assert_eq!(most("3", 2), Ok(3));
        assert_eq!(most("3", 1000), Ok(3));
        assert_eq!(most("20%", 1000), Ok(200));
        assert_eq!(most("20%", 2), Ok(1), "a single node is protected too");
        for wrong in ["0", "0%", "101%", "-1", "1.5", "%", "", "few", "3 %"] {
            assert!(wrong.parse::<Cap>().is_err(), "{wrong}");
        }
    }
}
