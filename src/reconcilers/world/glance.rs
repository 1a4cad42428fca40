//! A first look at a node's labels that most selectors fail: one word of each node instead of strings all over the memory.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::engine::selector::{Requirement, Selector};

/// The labels that a node has, each as one bit: a Bloom filter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Glance(u128);

/// What a selector asks of it: of each word, one bit at least.
#[derive(Debug)]
pub(super) struct Asked(Vec<u128>);

impl Glance {
    pub(super) fn of(labels: &BTreeMap<String, String>) -> Self {
        let bits = labels.iter().map(|(key, value)| bit(key, value));
        Self(bits.fold(0, |all, bit| all | bit))
    }
}

impl Asked {
    /// Of a selector; of one that is absent: nothing.
    pub(super) fn by(selector: Option<&Selector>) -> Self {
        let requirements = selector.into_iter().flat_map(|it| &it.requirements);
        let words = requirements.filter_map(|requirement| match requirement {
            Requirement::In(key, values) => {
                let bits = values.iter().map(|value| bit(key, value));
                Some(bits.fold(0, |all, bit| all | bit))
            }
            _ => None,
        });
        Self(words.collect())
    }

    /// Whether the selector may take the node: `false` is certain.
    pub(super) fn may_take(&self, node: Glance) -> bool {
        self.0.iter().all(|word| word & node.0 != 0)
    }
}

fn bit(key: &str, value: &str) -> u128 {
    let mut hasher = DefaultHasher::new();
    (key, value).hash(&mut hasher);
    1 << (hasher.finish() % u64::from(u128::BITS))
}

#[cfg(test)]
mod tests {
    use proptest::collection::{btree_map, vec};
    use proptest::prelude::*;

    use super::*;

    fn requirement() -> impl Strategy<Value = Requirement> {
        let (key, values) = ("[a-c]", vec("[x-z]", 0..3));
        prop_oneof![
            (key, values.clone()).prop_map(|(key, values)| Requirement::In(key, values)),
            (key, values).prop_map(|(key, values)| Requirement::NotIn(key, values)),
            key.prop_map(Requirement::Exists),
            key.prop_map(Requirement::DoesNotExist),
        ]
    }

    proptest! {
        #[test]
        fn no_node_is_passed_over_that_the_selector_takes(
            labels in btree_map("[a-c]", "[x-z]", 0..4),
            requirements in vec(requirement(), 0..4),
        ) {
            let selector = Selector { requirements };
            let may = Asked::by(Some(&selector)).may_take(Glance::of(&labels));
            prop_assert!(may || !selector.matches(&labels));
        }
    }

    #[test]
    fn most_other_nodes_are_passed_over() {
        let requirements = vec![Requirement::In("pool".to_owned(), vec!["7".to_owned()])];
        let asked = Asked::by(Some(&Selector { requirements }));
        let pool = |pool: u32| BTreeMap::from([("pool".to_owned(), pool.to_string())]);
        let passed = (100..200).filter(|it| !asked.may_take(Glance::of(&pool(*it))));
        assert!(passed.count() > 90);
        assert!(asked.may_take(Glance::of(&pool(7))));
    }
}
