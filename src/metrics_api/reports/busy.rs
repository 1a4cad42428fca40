//! Which nodes may have the soft taint: the busiest of each zone, at most 40 percent of it, so that the others stay preferred.
//! Pure.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::crd::load_label::{BUSY_FOR, BUSY_FROM, BUSY_UNTIL};
use crate::engine::time::BootTime;

/// In percent of the reporting nodes of a zone.
const MAX_SHARE: usize = 40;

/// The nodes that may have the soft taint, and since when.
#[derive(Debug, Default)]
pub(super) struct SoftTaintPermits(BTreeMap<Arc<str>, BootTime>);

impl SoftTaintPermits {
    pub(super) fn contains(&self, node: &str) -> bool {
        self.0.contains_key(node)
    }

    /// Decides for these nodes: name, zone, and load in percent of the load line. Nodes that were permitted before come first.
    pub(super) fn update<'a>(
        &mut self,
        now: BootTime,
        nodes: impl Iterator<Item = (&'a Arc<str>, &'a Arc<str>, f64)>,
    ) {
        let mut zones = BTreeMap::<&str, (usize, Vec<(bool, f64, &Arc<str>)>)>::new();
        for (name, zone, load) in nodes {
            let (count, busy) = zones.entry(zone).or_default();
            *count += 1;
            let before = self.0.get(name);
            let stays = |since: &BootTime| load >= BUSY_UNTIL || now.since(*since) < BUSY_FOR;
            if load >= BUSY_FROM || before.is_some_and(stays) {
                busy.push((before.is_some(), load, name));
            }
        }
        let mut chosen = BTreeMap::new();
        for (count, mut busy) in zones.into_values() {
            busy.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)).then(a.2.cmp(b.2)));
            let limit = count * MAX_SHARE / 100;
            chosen.extend(busy.into_iter().take(limit).map(|(_, _, name)| {
                let since = self.0.get(name).copied().unwrap_or(now);
                (Arc::clone(name), since)
            }));
        }
        self.0 = chosen;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::from_nanos((1000 + seconds) * 1_000_000_000)
    }

    fn chosen(
        permits: &mut SoftTaintPermits,
        now: BootTime,
        loads: &[(&str, &str, f64)],
    ) -> Vec<String> {
        let nodes: Vec<(Arc<str>, Arc<str>, f64)> = loads
            .iter()
            .map(|(name, zone, load)| (Arc::from(*name), Arc::from(*zone), *load))
            .collect();
        let nodes = nodes.iter().map(|(name, zone, load)| (name, zone, *load));
        permits.update(now, nodes);
        permits.0.keys().map(ToString::to_string).collect()
    }

    #[test]
    fn at_most_two_of_five_nodes_of_a_zone_are_busy() {
        let mut permits = SoftTaintPermits::default();
        let all = ["a", "b", "c", "d", "e"].map(|name| (name, "z", 99.0));
        assert_eq!(chosen(&mut permits, at(0), &all), ["a", "b"]);
        let mut hotter = all;
        hotter[4].2 = 120.0;
        assert_eq!(
            chosen(&mut permits, at(10), &hotter),
            ["a", "b"],
            "they stay first"
        );
        hotter[0].2 = 84.0;
        assert_eq!(
            chosen(&mut permits, at(300), &hotter),
            ["b", "e"],
            "then the busiest"
        );
        let spread = [("a", "x", 99.0), ("b", "y", 99.0)];
        assert!(
            chosen(&mut permits, at(310), &spread).is_empty(),
            "the only node of its zone"
        );
    }

    #[test]
    fn a_busy_node_stays_so_for_five_minutes_and_until_its_load_is_below_85() {
        let mut permits = SoftTaintPermits::default();
        let mut zone = ["a", "b", "c"].map(|name| (name, "z", 50.0));
        for (second, load, is_busy) in [
            (0, 94.0, false),
            (10, 95.0, true),
            (20, 10.0, true),
            (309, 84.0, true),
            (320, 85.0, true),
            (330, 84.9, false),
            (340, 94.0, false),
        ] {
            zone[0].2 = load;
            let is_permitted = !chosen(&mut permits, at(second), &zone).is_empty();
            assert_eq!(is_permitted, is_busy, "{load} after {second} s");
        }
    }
}
