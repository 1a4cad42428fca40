//! Label selectors.

use std::collections::BTreeMap;

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::engine::selector::{Requirement, Selector};

/// A label selector. All requirements must be met; `{}` selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct LabelSelector {
    /// Labels that must be present with exactly these values, for example `{app: batch}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::match_labels")]
    pub match_labels: Option<BTreeMap<String, String>>,
    /// Requirements on individual labels.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub match_expressions: Vec<LabelRequirement>,
}

/// One requirement on one label.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(self.operator in ['In', 'NotIn']) || (has(self.values) && self.values.size() > 0)")
        .message("values is missing: operators In and NotIn need at least one value; write values: [\"...\"], or operator: Exists")
        .field_path(".values"),
    validation = Rule::new("!(self.operator in ['Exists', 'DoesNotExist']) || !has(self.values) || self.values.size() == 0")
        .message("values is not used by operators Exists and DoesNotExist; remove it, or write operator: In or NotIn")
        .field_path(".values"),
)]
pub struct LabelRequirement {
    /// The key of the label.
    #[schemars(length(min = 1, max = 317))]
    pub key: String,
    /// The operator: `In` or `NotIn` (with `values`), `Exists` or `DoesNotExist` (without `values`). `NotIn` also matches
    /// when the label is absent.
    #[schemars(extend("enum" = ["In", "NotIn", "Exists", "DoesNotExist"]))]
    pub operator: String,
    /// The values to compare with.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}

impl LabelSelector {
    /// The selector in the form that the engine evaluates, with its requirements sorted.
    pub fn compile(&self) -> Selector {
        let labels = self.match_labels.iter().flatten();
        let mut requirements: Vec<Requirement> = labels
            .map(|(key, value)| Requirement::In(key.clone(), vec![value.clone()]))
            .chain(self.match_expressions.iter().map(LabelRequirement::compile))
            .collect();
        requirements.sort();
        requirements.dedup();
        Selector { requirements }
    }
}

impl LabelRequirement {
    fn compile(&self) -> Requirement {
        let key = self.key.clone();
        let mut values = self.values.clone();
        values.sort();
        values.dedup();
        match self.operator.as_str() {
            "In" => Requirement::In(key, values),
            "NotIn" => Requirement::NotIn(key, values),
            "Exists" => Requirement::Exists(key),
            _ => Requirement::DoesNotExist(key),
        }
    }
}
