//! A first look at a node's labels that most selectors fail: a few words of each node instead of strings all over the
//! memory.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::engine::selector::{Requirement, Selector};

/// The labels that a node has, each as up to three of 256 bits: a Bloom filter. Of 22 labels, which are many, one that
/// the node does not have is taken for one of them in a case of a hundred.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Glance([u128; 2]);

/// What a selector asks of it: of each requirement, one of these labels.
#[derive(Debug)]
pub(super) struct Asked(Vec<Vec<Glance>>);

impl Glance {
    pub(super) fn of(labels: &BTreeMap<String, String>) -> Self {
        let labels = labels.iter().map(|(key, value)| Self::of_label(key, value));
        labels.fold(Self::default(), |Self([a, b]), Self([c, d])| {
            Self([a | c, b | d])
        })
    }

    fn of_label(key: &str, value: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        (key, value).hash(&mut hasher);
        let mut bits = [0; 2];
        for byte in hasher.finish().to_le_bytes().iter().take(3) {
            bits[usize::from(byte >> 7)] |= 1 << (byte & 127);
        }
        Self(bits)
    }

    fn has(self, label: Self) -> bool {
        let (Self([a, b]), Self([c, d])) = (self, label);
        a & c == c && b & d == d
    }
}

impl Asked {
    /// Of a selector; of one that is absent: nothing.
    pub(super) fn by(selector: Option<&Selector>) -> Self {
        let requirements = selector.into_iter().flat_map(|it| &it.requirements);
        let labels = requirements.filter_map(|requirement| match requirement {
            Requirement::In(key, values) => {
                let labels = values.iter().map(|value| Glance::of_label(key, value));
                Some(labels.collect())
            }
            _ => None,
        });
        Self(labels.collect())
    }

    /// Whether the selector may take the node: `false` is certain.
    pub(super) fn may_take(&self, node: Glance) -> bool {
        self.0
            .iter()
            .all(|labels| labels.iter().any(|label| node.has(*label)))
    }
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
        let common = (0..20).map(|it| (format!("label-{it}"), format!("value-{it}")));
        let common: BTreeMap<String, String> = common.collect();
        let pool = |pool: u32| {
            let mut labels = common.clone();
            labels.insert("pool".to_owned(), pool.to_string());
            labels
        };
        let passed = (100..200).filter(|it| !asked.may_take(Glance::of(&pool(*it))));
        assert!(passed.count() > 90);
        assert!(asked.may_take(Glance::of(&pool(7))));
    }
}
