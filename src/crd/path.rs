//! Field paths as Kubernetes writes them: `spec.rules[0].metricRule.value`, `metadata.labels[example.com/tier]`.

/// The path of the field `key` of the object at `path`.
pub(super) fn at_key(path: &str, key: &str) -> String {
    let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    match (path.is_empty(), plain) {
        (true, _) => key.to_owned(),
        (false, true) => format!("{path}.{key}"),
        (false, false) => format!("{path}[{key}]"),
    }
}

/// The path of the item `index` of the list at `path`.
pub(super) fn at_index(path: &str, index: usize) -> String {
    format!("{path}[{index}]")
}

/// The index of the rule in a path within `spec.rules`, and the rest of the path.
pub(super) fn rule_index(path: &str) -> Option<(usize, &str)> {
    let rest = path.strip_prefix("spec.rules[")?;
    let (index, rest) = rest.split_once(']')?;
    Some((index.parse().ok()?, rest))
}
