//! Sorting in little code: each use of the standard library's sorts with a closure of its own, and each collection into a
//! `BTreeMap`, which sorts first, is 5 kB of the binary. Here one instance serves all.

use std::cmp::Ordering;
use std::collections::BTreeMap;

/// Sorts as `slice::sort_by` does, stably. It allocates an index for each item: not for what is done at each tick.
pub fn sort_by<T>(items: &mut [T], mut compare: impl FnMut(&T, &T) -> Ordering) {
    let order = order(items.len(), &mut |a, b| compare(&items[a], &items[b]));
    arrange(order, &mut |a, b| items.swap(a, b));
}

/// Sorts as `slice::sort` does.
pub fn sort<T: Ord>(items: &mut [T]) {
    sort_by(items, Ord::cmp);
}

/// The entries as a map. Of two with one key the later counts, as in `BTreeMap::from_iter`.
pub fn map<K: Ord, V>(entries: impl IntoIterator<Item = (K, V)>) -> BTreeMap<K, V> {
    let mut map = BTreeMap::new();
    for (key, value) in entries {
        map.insert(key, value);
    }
    map
}

/// Which item, of `count`, comes first, second and so on.
fn order(count: usize, compare: &mut dyn FnMut(usize, usize) -> Ordering) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    order.sort_by(|a, b| compare(*a, *b));
    order
}

/// Brings each item to its place by swaps, one cycle after the other.
fn arrange(mut order: Vec<usize>, swap: &mut dyn FnMut(usize, usize)) {
    for start in 0..order.len() {
        let mut place = start;
        loop {
            let from = std::mem::replace(&mut order[place], place);
            if from == start || from == place {
                break;
            }
            swap(place, from);
            place = from;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_sorts_as_the_standard_library_does(mut items: Vec<(u8, u16)>) {
            let mut expected = items.clone();
            expected.sort_by_key(|item| item.0);
            sort_by(&mut items, |a, b| a.0.cmp(&b.0));
            prop_assert_eq!(items, expected);
        }

        #[test]
        fn a_map_is_what_collecting_makes(entries: Vec<(u8, u16)>) {
            prop_assert_eq!(map(entries.clone()), entries.into_iter().collect());
        }
    }
}
