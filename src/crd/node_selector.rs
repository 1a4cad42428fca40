//! Which nodes a pod selects: its `nodeSelector` and its required node affinity.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use serde::Deserialize;

/// The placement fields of a pod's spec.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Placement {
    affinity: Option<Affinity>,
    node_selector: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Affinity {
    node_affinity: Option<NodeAffinity>,
}

#[derive(Clone, Debug, Deserialize)]
struct NodeAffinity {
    #[serde(rename = "requiredDuringSchedulingIgnoredDuringExecution")]
    required: Option<NodeSelector>,
}

/// A node as pods select it.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its labels, if known.
    pub labels: Option<&'a BTreeMap<String, String>>,
}

/// Whether such a pod may run on the node; `None` if that cannot be decided.
pub fn selects(pod: &Placement, node: NodeView<'_>) -> Option<bool> {
    let labels = node.labels?;
    let mut wanted = pod.node_selector.iter().flatten();
    if !wanted.all(|(key, value)| labels.get(key) == Some(value)) {
        return Some(false);
    }
    let affinity = pod.affinity.as_ref();
    let affinity = affinity.and_then(|affinity| affinity.node_affinity.as_ref());
    match affinity.and_then(|affinity| affinity.required.as_ref()) {
        Some(selector) => any_term(selector, node.name, labels),
        None => Some(true),
    }
}

/// Terms are alternatives. One that is not understood might match.
fn any_term(
    selector: &NodeSelector,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> Option<bool> {
    let verdicts = selector.node_selector_terms.iter();
    let verdicts: Vec<_> = verdicts
        .map(|term| term_matches(term, name, labels))
        .collect();
    if verdicts.contains(&Some(true)) {
        return Some(true);
    }
    (!verdicts.contains(&None)).then_some(false)
}

/// An empty term matches nothing.
fn term_matches(
    term: &NodeSelectorTerm,
    name: &str,
    labels: &BTreeMap<String, String>,
) -> Option<bool> {
    let by_label = term.match_expressions.iter().flatten();
    let by_label =
        by_label.map(|wanted| matches(wanted, labels.get(&wanted.key).map(String::as_str)));
    let by_field = term.match_fields.iter().flatten();
    let by_field = by_field.map(|wanted| match wanted.key.as_str() {
        "metadata.name" => matches(wanted, Some(name)),
        _ => None,
    });
    let verdicts: Vec<_> = by_label.chain(by_field).collect();
    if verdicts.is_empty() || verdicts.contains(&Some(false)) {
        return Some(false);
    }
    (!verdicts.contains(&None)).then_some(true)
}

fn matches(wanted: &NodeSelectorRequirement, value: Option<&str>) -> Option<bool> {
    let values = wanted.values.as_deref().unwrap_or_default();
    let listed = || value.is_some_and(|value| values.iter().any(|known| known == value));
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<i64>().ok());
    let limit = || number(values.first().map(String::as_str));
    match wanted.operator.as_str() {
        "In" => Some(listed()),
        "NotIn" => Some(!listed()),
        "Exists" => Some(value.is_some()),
        "DoesNotExist" => Some(value.is_none()),
        "Gt" => Some(
            number(value)
                .zip(limit())
                .is_some_and(|(it, limit)| it > limit),
        ),
        "Lt" => Some(
            number(value)
                .zip(limit())
                .is_some_and(|(it, limit)| it < limit),
        ),
        _ => None,
    }
}
