//! A Bloom filter over a node's labels that rules out most selectors without comparing strings.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::engine::selector::{Requirement, Selector};

/// A Bloom filter of a node's labels, with up to three of 256 bits per label. With 22 labels, which are many, about 1 % of lookups
/// are false positives.
#[derive(Clone, Copy, Debug, Default)]
pub struct LabelFilter([u128; 2]);

/// The labels that a selector requires: one of each inner list.
#[derive(Debug)]
pub struct SelectorFilter(Vec<Vec<LabelFilter>>);

impl LabelFilter {
    pub fn of(labels: &BTreeMap<String, String>) -> Self {
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

impl SelectorFilter {
    /// An absent selector requires nothing.
    pub fn of(selector: Option<&Selector>) -> Self {
        let requirements = selector.into_iter().flat_map(|it| &it.requirements);
        let labels = requirements.filter_map(|requirement| match requirement {
            Requirement::In(key, values) => {
                let labels = values.iter().map(|value| LabelFilter::of_label(key, value));
                Some(labels.collect())
            }
            _ => None,
        });
        Self(labels.collect())
    }

    /// Whether the selector may match the node; `false` is certain.
    pub fn may_match(&self, node: LabelFilter) -> bool {
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
        fn no_matching_node_is_filtered_out(
            labels in btree_map("[a-c]", "[x-z]", 0..4),
            requirements in vec(requirement(), 0..4),
        ) {
            let selector = Selector { requirements };
            let may = SelectorFilter::of(Some(&selector)).may_match(LabelFilter::of(&labels));
            prop_assert!(may || !selector.matches(&labels));
        }
    }

    #[test]
    fn most_other_nodes_are_filtered_out() {
        let requirements = vec![Requirement::In("pool".to_owned(), vec!["7".to_owned()])];
        let filter = SelectorFilter::of(Some(&Selector { requirements }));
        let common = (0..20).map(|it| (format!("label-{it}"), format!("value-{it}")));
        let common: BTreeMap<String, String> = common.collect();
        let pool = |pool: u32| {
            let mut labels = common.clone();
            labels.insert("pool".to_owned(), pool.to_string());
            labels
        };
        let filtered = (100..200).filter(|it| !filter.may_match(LabelFilter::of(&pool(*it))));
        assert!(filtered.count() > 90);
        assert!(filter.may_match(LabelFilter::of(&pool(7))));
    }
}
