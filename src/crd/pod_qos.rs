//! `PodQOS`: which actions are allowed on which pods.
#![expect(
    clippy::duplicated_attributes,
    reason = "the printer columns share their types"
)]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::common::LabelSelector;
use super::resource_qos::ResourceQos;

/// Which actions are allowed on which pods. No action is taken on a pod that no `PodQOS` selects; if several select a pod,
/// the union of their allowed actions applies. No action is taken on pods with the annotation
/// `plimsoll.dev/protected: "true"`, nor on pods of `kube-system` unless `scopeSelector` names that namespace.
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
    doc = "A PodQOS defines which actions are allowed on which pods.",
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
        description = "Matching running pods, as reported by the agents"
    ),
    printcolumn(
        name = "Rollout",
        type_ = "string",
        json_path = ".status.rollout",
        description = "Progress of the rollout of the last edit"
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
    /// The selector over the labels of pods. `{}` selects every pod. If `scopeSelector` is also set, both must match; if
    /// neither is set, no pod is selected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::schema::label_selector")]
    pub label_selector: Option<LabelSelector>,
    /// The selector over the quality-of-service class, priority and namespace of pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope_selector: Option<ScopeSelector>,
    /// The allowed actions: names of `AvoidanceActions`, or the keywords `throttle`, `eviction` (or `evict`) and
    /// `disableScheduling`, which allow that type of action of any `AvoidanceAction`. If empty, no action is allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 253)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub allowed_actions: Vec<String>,
    /// What the selected pods get at all times, without a rule of a `NodeQOS`. With the annotation
    /// `plimsoll.dev/strategy: Preview` it is only reported.
    #[serde(
        rename = "resourceQOS",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub resource_qos: Option<ResourceQos>,
    /// Accepted and not enforced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "super::unenforced::pod_quality_probe")]
    pub pod_quality_probe: Option<Value>,
}

/// The status of a `PodQOS`, set by the controller.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodQosStatus {
    /// The `metadata.generation` that this status was computed from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The number of matching running pods on the nodes whose agents have reported. Absent if none has reported yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matched_pods: Option<i64>,
    /// The progress of the rollout of the last edit. Absent when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub rollout: Option<String>,
    /// The conditions of the object. `Ready` is True when all of it is in force; `FieldsNotEnforced` lists fields that are
    /// accepted but have no effect; `RolledOut` is the progress of the last edit; `Reconciling` and `Stalled` are those of
    /// kstatus.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// A selector over properties of pods. All expressions must match.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScopeSelector {
    /// The expressions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub match_expressions: Vec<ScopeExpression>,
}

/// An expression.
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
        .message("values has an entry that is not a QoS class; the classes are BestEffort, Burstable and Guaranteed")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'Priority' || !has(self.values) || self.values.all(v, v.matches('^-?[0-9]{1,10}(--?[0-9]{1,10})?$'))")
        .message("values has an entry that is not a priority; write a number or a range from low to high, for example \"0\", \"0-100\", \"-100\" or \"-100--1\"")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'Priority' || !has(self.values) || self.values.all(v, !v.matches('^-?[0-9]{1,10}--?[0-9]{1,10}$') || int(v.find('^-?[0-9]+')) <= int(v.substring(v.find('^-?[0-9]+').size() + 1)))")
        .message("values has a range of priorities whose first number is larger than its second; write the smaller one first, for example \"-100--1\"")
        .field_path(".values"),
    validation = Rule::new("self.scopeName != 'Namespace' || !has(self.values) || self.values.all(v, v.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'))")
        .message("values has an entry that is not a namespace name; write lower-case letters, digits and '-'")
        .field_path(".values"),
)]
pub struct ScopeExpression {
    /// The property: `QOSClass`, `Priority` or `Namespace`.
    #[schemars(extend("enum" = ["QOSClass", "Priority", "Namespace"]))]
    pub scope_name: String,
    /// The operator: `In` or `NotIn` (with `values`), `Exists` or `DoesNotExist` (without `values`). Every pod has a class, a
    /// priority and a namespace, so `Exists` always matches.
    #[schemars(extend("enum" = ["In", "NotIn", "Exists", "DoesNotExist"]))]
    pub operator: String,
    /// The values: classes (`BestEffort`, `Burstable`, `Guaranteed`), priorities (`"0"`, or a range `"-100--1"`), or
    /// namespaces.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 63)), extend("x-kubernetes-list-type" = "atomic"))]
    pub values: Vec<String>,
}
