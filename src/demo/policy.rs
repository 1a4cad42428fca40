//! Adapts `examples/ensurance/throttle.yaml` to this machine; every change is reported with its reason.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::phase::Schedule;
use super::pods::{DemoPods, THRESHOLD_PERCENT};
use crate::crd::{Objects, compile};
use crate::engine::policy::{NodeFacts, PolicySet};

/// The manifest that the demo applies.
pub const MANIFEST: &str = include_str!("../../examples/ensurance/throttle.yaml");
/// Its path in the repository.
pub const MANIFEST_NAME: &str = "examples/ensurance/throttle.yaml";

/// One field that the demo changes in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Kind and field.
    pub field: String,
    /// The manifest's value; absent if it has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The demo's value.
    pub to: String,
    /// The reason.
    pub why: String,
}

/// The policies as the demo applies them.
#[derive(Clone, Debug)]
pub struct Adapted {
    /// Compiled for this machine.
    pub policy: PolicySet,
    /// The differences from the manifest.
    pub changes: Vec<Change>,
}

/// The manifest is not the one that this program was built for.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It is not YAML.
    #[error("failed to read {MANIFEST_NAME}: {0}")]
    Yaml(String),
    /// A field that the demo sets does not exist.
    #[error("failed to set {pointer} of the {kind} in {MANIFEST_NAME}: no such field")]
    NoField {
        /// The kind of object.
        kind: &'static str,
        /// The field.
        pointer: &'static str,
    },
    /// It compiles to nothing that could phase.
    #[error("failed to compile {MANIFEST_NAME} for this machine: {0}")]
    NoRule(String),
}

/// Adapts the manifest to this machine and the demo's length, and compiles it.
///
/// # Errors
/// Where the manifest is not the one that this program was built for.
pub fn adapt(
    demo_pods: &DemoPods,
    schedule: &Schedule,
    node: &NodeFacts,
) -> Result<Adapted, PolicyError> {
    let mut manifest = Manifest::parse(MANIFEST)?;
    manifest.set(
        "NodeQOS",
        "/spec/rules/0/metricRule/value",
        &json!(demo_pods.threshold().0),
        format!(
            "{THRESHOLD_PERCENT} % of this machine's {} in millicores",
            super::cpus(demo_pods.cpus)
        ),
    )?;
    manifest.set(
        "AvoidanceAction",
        "/spec/coolDownSeconds",
        &json!(schedule.cool_down.as_secs()),
        "so that all phases fit".to_owned(),
    )?;
    manifest.add(
        "AvoidanceAction",
        "/spec/throttle/cpuThrottle",
        "idle",
        &json!(true),
        "a quota is used up in bursts, which delay requests; the idle class yields the CPU at once"
            .to_owned(),
    )?;
    manifest.set(
        "PodQOS",
        "/spec/scopeSelector/matchExpressions/0/values",
        &json!(["Burstable"]),
        "the batch pods have a CPU request; BestEffort pods would hardly disturb, because of their low weight"
            .to_owned(),
    )?;
    let mut policy = compile_for(node, manifest.objects)?;
    let mut changes = manifest.changes;
    for rule in &mut policy.rules {
        changes.push(period_change(rule.period, schedule.period));
        rule.period = schedule.period;
    }
    Ok(Adapted { policy, changes })
}

fn period_change(from: Duration, to: Duration) -> Change {
    Change {
        field: "NodeQOS .spec.evaluationPeriodSeconds".to_owned(),
        from: Some(format!("{} s", from.as_secs_f64())),
        to: format!("{} s", to.as_secs_f64()),
        why: "as `plimsoll run --period` does, so that all phases fit".to_owned(),
    }
}

fn compile_for(node: &NodeFacts, objects: Vec<Value>) -> Result<PolicySet, PolicyError> {
    let compiled = compile(&Objects::from_values(objects), node);
    if compiled.policy.rules.is_empty() || compiled.policy.pods.is_empty() {
        let findings = compiled
            .findings
            .iter()
            .map(|finding| finding.message.clone());
        return Err(PolicyError::NoRule(findings.collect::<Vec<_>>().join("; ")));
    }
    Ok(compiled.policy)
}

/// The objects of the manifest, and the changes made to them.
struct Manifest {
    objects: Vec<Value>,
    changes: Vec<Change>,
}

impl Manifest {
    fn parse(text: &str) -> Result<Self, PolicyError> {
        let objects: Vec<BTreeMap<String, Value>> = serde_saphyr::from_multiple(text)
            .map_err(|error| PolicyError::Yaml(error.to_string()))?;
        Ok(Self {
            objects: objects.into_iter().map(|object| json!(object)).collect(),
            changes: Vec::new(),
        })
    }

    /// Replaces an existing field.
    fn set(
        &mut self,
        kind: &'static str,
        pointer: &'static str,
        to: &Value,
        why: String,
    ) -> Result<(), PolicyError> {
        let field = self.field(kind, pointer)?;
        let from = std::mem::replace(field, to.clone());
        self.changes.push(Change {
            field: format!("{kind} {}", pointer.replace('/', ".")),
            from: Some(from.to_string()),
            to: to.to_string(),
            why,
        });
        Ok(())
    }

    /// Adds or replaces a field of an existing object.
    fn add(
        &mut self,
        kind: &'static str,
        pointer: &'static str,
        name: &str,
        to: &Value,
        why: String,
    ) -> Result<(), PolicyError> {
        let parent = self.field(kind, pointer)?;
        let from = parent.get(name).map(ToString::to_string);
        parent[name] = to.clone();
        self.changes.push(Change {
            field: format!("{kind} {}.{name}", pointer.replace('/', ".")),
            from,
            to: to.to_string(),
            why,
        });
        Ok(())
    }

    fn field(
        &mut self,
        kind: &'static str,
        pointer: &'static str,
    ) -> Result<&mut Value, PolicyError> {
        let objects = self.objects.iter_mut();
        objects
            .filter(|object| object["kind"] == kind)
            .find_map(|object| object.pointer_mut(pointer))
            .ok_or(PolicyError::NoField { kind, pointer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::pod::QosClass;
    use crate::engine::policy::{Membership, Scope};
    use crate::engine::units::Bytes;

    fn adapted() -> Adapted {
        let demo_pods = DemoPods::for_cpus(2);
        let schedule = Schedule::lasting(Duration::from_mins(1));
        let node = NodeFacts {
            cpus: 2,
            memory: Bytes(8 << 30),
            ..NodeFacts::default()
        };
        adapt(&demo_pods, &schedule, &node).unwrap()
    }

    #[test]
    fn the_example_is_adapted_to_the_machine() {
        let adapted = adapted();
        let [rule] = adapted.policy.rules.as_slice() else {
            panic!("one rule: {adapted:?}");
        };
        assert!((rule.threshold - 1400.0).abs() < 1e-9);
        assert_eq!(rule.period, Duration::from_millis(500));
        assert!(rule.action.throttle.unwrap().idle);
        assert_eq!(
            rule.action.cool_down,
            Schedule::lasting(Duration::from_mins(1)).cool_down
        );
        let [pods] = adapted.policy.pods.as_slice() else {
            panic!("one PodQOS: {adapted:?}");
        };
        assert_eq!(
            pods.scopes,
            [Scope::Qos(Membership::In(vec![QosClass::Burstable]))]
        );
    }

    #[test]
    fn every_change_names_the_old_value() {
        let changes = adapted().changes;
        let fields: Vec<&str> = changes.iter().map(|change| change.field.as_str()).collect();
        assert!(
            fields.contains(&"NodeQOS .spec.rules.0.metricRule.value"),
            "{fields:?}"
        );
        assert!(
            changes
                .iter()
                .all(|change| change.from.as_ref() != Some(&change.to))
        );
        assert_eq!(changes.len(), 5);
    }
}
