//! The policy kinds of `ensurance.crane.io/v1alpha1`: their types, their definitions (schema, CEL rules, defaults,
//! printer columns), and [`compile()`], which compiles a set of objects to the policies of one node; [`NodeWatermark`], which
//! carries these to the node's agent; and [`NodeMetric`], the load of a node.
//!
//! Validation of a single object is written only in the definitions: an API server, [`Objects`] and `plimsoll check` all
//! use them. Checks that need two objects, or the node, are in [`compile()`].

mod advice;
pub mod avoidance_action;
mod common;
pub mod compile;
pub mod crane_annotations;
pub mod duration;
pub mod emergency_stop;
pub mod eviction;
mod finding;
pub mod kstatus;
mod kubernetes;
pub mod load_label;
pub mod load_values;
pub mod manifest;
mod node_facts;
pub mod node_metric;
pub mod node_qos;
pub mod node_selector;
pub mod node_watermark;
mod objects;
mod path;
pub mod pod_facts;
pub mod pod_qos;
pub mod polling;
pub mod report;
mod resource_qos;
pub mod scheduler_policy;
mod schema;
mod served;
mod settings_file;
pub mod summary;
mod unenforced;
pub mod validate;
pub mod windows;
pub mod words;

pub use advice::{advice, strategies_left_out, uses_idle_class};
pub use avoidance_action::{AvoidanceAction, AvoidanceActionSpec};
pub use common::{LabelRequirement, LabelSelector};
pub use compile::{Compiled, compile};
pub use finding::{Finding, ObjectRef, Reason, Severity};
pub use kubernetes::KubernetesVersion;
pub use node_facts::node_facts;
pub use node_metric::{NodeMetric, NodeMetricStatus};
pub use node_qos::{NodeQos, NodeQosSpec};
pub use node_watermark::{NodeWatermark, NodeWatermarkSpec, NodeWatermarkStatus};
pub use objects::{Kind, Objects};
pub use pod_qos::{PodQos, PodQosSpec, PodQosStatus};
pub use report::Report;
pub use schema::{definitions, inlined_schema};
pub use served::missing_fields;
pub use summary::Summary;

/// The API group of the policy kinds.
pub const GROUP: &str = "ensurance.crane.io";
/// The only version.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of the policy kinds.
pub const API_VERSION: &str = "ensurance.crane.io/v1alpha1";
