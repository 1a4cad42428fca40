//! Which nodes may have the soft taint: the busiest of each zone, at most 40 percent of it, so that the others stay preferred.
//! Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::crd::load_label::{BUSY_FROM, BUSY_UNTIL};

/// In percent of the reporting nodes of a zone.
const MAX_SHARE: usize = 40;

/// The nodes that may have the soft taint.
#[derive(Debug, Default)]
pub(super) struct BusyNodes(BTreeSet<Arc<str>>);

impl BusyNodes {
    pub(super) fn contains(&self, node: &str) -> bool {
        self.0.contains(node)
    }

    /// Decides for these nodes: name, zone, and load in percent of the load line. Nodes that have the taint keep it first.
    pub(super) fn update<'a>(
        &mut self,
        nodes: impl Iterator<Item = (&'a Arc<str>, &'a Arc<str>, f64)>,
    ) {
        let mut zones = BTreeMap::<&str, (usize, Vec<(bool, f64, &Arc<str>)>)>::new();
        for (name, zone, load) in nodes {
            let (count, busy) = zones.entry(zone).or_default();
            *count += 1;
            let is_busy = self.contains(name);
            if load >= BUSY_FROM || is_busy && load >= BUSY_UNTIL {
                busy.push((is_busy, load, name));
            }
        }
        let mut chosen = BTreeSet::new();
        for (count, mut busy) in zones.into_values() {
            busy.sort_by(|a, b| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)).then(a.2.cmp(b.2)));
            let limit = count * MAX_SHARE / 100;
            chosen.extend(busy.into_iter().take(limit).map(|it| Arc::clone(it.2)));
        }
        self.0 = chosen;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(busy: &mut BusyNodes, loads: &[(&str, &str, f64)]) -> Vec<String> {
        let nodes: Vec<(Arc<str>, Arc<str>, f64)> = loads
            .iter()
            .map(|(name, zone, load)| (Arc::from(*name), Arc::from(*zone), *load))
            .collect();
        busy.update(nodes.iter().map(|(name, zone, load)| (name, zone, *load)));
        busy.0.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn at_most_two_of_five_nodes_of_a_zone_are_busy() {
        let mut busy = BusyNodes::default();
        let all = ["a", "b", "c", "d", "e"].map(|name| (name, "z", 99.0));
        assert_eq!(chosen(&mut busy, &all), ["a", "b"]);
        let mut hotter = all;
        hotter[4].2 = 120.0;
        assert_eq!(chosen(&mut busy, &hotter), ["a", "b"], "they stay first");
        hotter[0].2 = 84.0;
        assert_eq!(chosen(&mut busy, &hotter), ["b", "e"], "then the busiest");
        let spread = [("a", "x", 99.0), ("b", "y", 99.0)];
        assert!(
            chosen(&mut busy, &spread).is_empty(),
            "the only node of its zone"
        );
    }

    #[test]
    fn a_busy_node_stays_so_until_its_load_is_below_85() {
        let mut busy = BusyNodes::default();
        let mut zone = ["a", "b", "c"].map(|name| (name, "z", 50.0));
        for (load, is_busy) in [
            (94.0, false),
            (95.0, true),
            (85.0, true),
            (84.9, false),
            (94.0, false),
        ] {
            zone[0].2 = load;
            assert_eq!(!chosen(&mut busy, &zone).is_empty(), is_busy, "{load}");
        }
    }
}
