//! `PodQOS`: which pods may be acted on, and how.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::common::LabelSelector;

/// Which pods may be acted on, and how. A pod that no `PodQOS` selects is never touched; of several the union counts.
/// Pods annotated `plimsoll.dev/protected: "true"` are never touched, and pods of `kube-system` only where
/// `scopeSelector` names that namespace.
#[derive(
    Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, CustomResource, KubeSchema,
)]
#[kube(
    group = "ensurance.crane.io",
    version = "v1alpha1",
    kind = "PodQOS",
    root = "PodQos",
    plural = "podqoss",
    shortname = "pq",
    category = "plimsoll",
    status = "PodQosStatus",
    derive = "PartialEq",
    doc = "A PodQOS says which pods may be acted on, and which actions are allowed on them.",
    printcolumn(name = "Allowed", type_ = "string", json_path = ".spec.allowedActions"),
    printcolumn(name = "Labels", type_ = "string", json_path = ".spec.labelSelector"),
    printcolumn(
        name = "Scopes",
        type_ = "string",
        json_path = ".spec.scopeSelector.matchExpressions",
        priority = 1
    ),
    printcolumn(
        name = "Pods",
        type_ = "integer",
        json_path = ".status.matchedPods",
        description = "Running pods that it matches, as far as agents have told"
    ),
    printcolumn(
        name = "Rollout",
        type_ = "string",
        json_path = ".status.rollout",
        description = "How far an edit is that is on its way"
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp"
    )
)]
#[serde(rename_all = "camelCase")]
pub struct PodQosSpec {
    /// Over the labels of pods. `{}` selects every pod. With `scopeSelector` both must hold; with neither, the object
    /// selects nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::label_selector")]
    pub label_selector: Option<LabelSelector>,
    /// Over quality-of-service class, priority and namespace of pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope_selector: Option<ScopeSelector>,
    /// What may be done to these pods: names of `AvoidanceActions`, or the words `throttle`, `eviction` (also
    /// `evict`) and `disableScheduling`, which allow that kind of action whatever the action's name. Empty: nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 253)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub allowed_actions: Vec<String>,
    /// Accepted and not enforced.
    #[serde(
        rename = "resourceQOS",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    #[schemars(schema_with = "super::unenforced::resource_qos")]
    pub resource_qos: Option<Value>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::pod_quality_probe")]
    pub pod_quality_probe: Option<Value>,
}

/// What the controller found about a `PodQOS`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodQosStatus {
    /// The `metadata.generation` that this status is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Running pods that it matches, summed over the nodes whose agents have told. Absent: none has yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_pods: Option<i64>,
    /// How far an edit is that is on its way; absent where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rollout: Option<String>,
    /// What holds for the object. `Ready` is True when all of it is in force; a condition `FieldsNotEnforced` lists
    /// fields that are accepted and have no effect; `RolledOut` says how far the last edit is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// Expressions that must all hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScopeSelector {
    /// The expressions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub match_expressions: Vec<ScopeExpression>,
}

/// One expression.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(self.operator in ['In', 'NotIn']) || (has(self.values) && self.values.size() > 0)")
        .message("values is missing: operators In and NotIn need at least one value; write for example values: [BestEffort], or operator: Exists")
        .field_path(".values"),
    validation = Rule::new("!(self.operator in ['Exists', 'DoesNotExist']) || !has(self.values) || self.values.size() == 0")
        .message("values is not used by operators Exists and DoesNotExist; remove it, or write operator: In or NotIn")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'QOSClass' || !has(self.values) || self.values.all(v, v in ['BestEffort', 'Burstable', 'Guaranteed'])")
        .message("values has something that is no quality-of-service class; the classes are BestEffort, Burstable and Guaranteed")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'Priority' || !has(self.values) || self.values.all(v, v.matches('^-?[0-9]{1,10}(--?[0-9]{1,10})?$'))")
        .message("values has something that is no priority; write a number or a range from low to high, for example \"0\", \"0-100\", \"-100\" or \"-100--1\"")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'Priority' || !has(self.values) || self.values.all(v, !v.matches('^-?[0-9]{1,10}--?[0-9]{1,10}$') || int(v.find('^-?[0-9]+')) <= int(v.substring(v.find('^-?[0-9]+').size() + 1)))")
        .message("values has a range of priorities whose first number is above its second; write the lower one first, for example \"-100--1\"")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'Namespace' || !has(self.values) || self.values.all(v, v.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'))")
        .message("values has something that is no name of a namespace; write lower-case letters, digits and '-'")
        .field_path(".values"),
)]
pub struct ScopeExpression {
    /// What is compared: `QOSClass`, `Priority` or `Namespace`.
    #[schemars(extend("enum" = ["QOSClass", "Priority", "Namespace"]))]
    pub scope_name: String,
    /// `In` or `NotIn` (of `values`), `Exists` or `DoesNotExist` (without `values`). Every pod has a class, a priority
    /// and a namespace, so `Exists` always holds.
    #[schemars(extend("enum" = ["In", "NotIn", "Exists", "DoesNotExist"]))]
    pub operator: String,
    /// Classes (`BestEffort`, `Burstable`, `Guaranteed`), priorities (`"0"`, or a range `"-100--1"`), or names of
    /// namespaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}
