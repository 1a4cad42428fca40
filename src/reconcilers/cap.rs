//! One bad watermark must not close a cluster: at most a part of the nodes is unschedulable at a time. Pure.

use crate::ordered;
use std::collections::BTreeSet;

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

/// The most nodes that may be closed at once: at least one, or a single node would never be protected.
pub const fn most(matched: usize, percent: u8) -> usize {
    let most = matched * percent as usize / 100;
    if most == 0 { 1 } else { most }
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
