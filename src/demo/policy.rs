//! Adapts an example policy to this machine; every change is reported with its reason.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use serde_json::{Value, json};

use super::phase::PhaseSchedule;
use super::pods::{DemoPods, THRESHOLD_PERCENT};
use crate::crd::{Objects, compile};
use crate::engine::DEFAULT_PERIOD;
use crate::engine::policy::{NodeFacts, PolicySet};

/// An example policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Example {
    /// Its path in the repository.
    pub name: &'static str,
    text: &'static str,
}

/// Where the kernel measures how long the important pod waits: cgroup v2.
pub const BY_WAITING: Example = Example {
    name: "examples/ensurance/pressure.yaml",
    text: include_str!("../../examples/ensurance/pressure.yaml"),
};
/// Elsewhere CPU usage has to do.
pub const BY_USAGE: Example = Example {
    name: "examples/ensurance/idle-class.yaml",
    text: include_str!("../../examples/ensurance/idle-class.yaml"),
};
/// Threshold and restore value, in percent of the time that the important pod waits. It has twice as many threads as there are
/// CPUs, which wait for each other about a quarter of the time where it runs alone.
pub const WAITING: (u8, u8) = (60, 45);

/// One field that the demo changes in the manifest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldChange {
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
    /// The example.
    pub example: Example,
    /// When it acts, for the log.
    pub when: String,
    /// Compiled for this machine.
    pub policy: PolicySet,
    /// The differences from the manifest.
    pub changes: Vec<FieldChange>,
}

/// The manifest is not the one that this program was built for.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It is not YAML.
    #[error("failed to read {0}: {1}")]
    Yaml(&'static str, String),
    /// A field that the demo sets does not exist.
    #[error("failed to set {pointer} of the {kind} in {example}: no such field")]
    NoField {
        /// The example.
        example: &'static str,
        /// The kind of object.
        kind: &'static str,
        /// The field.
        pointer: &'static str,
    },
    /// It compiles to nothing that could act.
    #[error("failed to compile {0} for this machine: {1}")]
    NoRule(&'static str, String),
}

/// Adapts the example to this machine and the demo's length, and compiles it. `waits_measured`: the kernel measures how long
/// pods wait.
///
/// # Errors
/// Where the example is not the one that this program was built for.
pub fn adapt(
    demo_pods: &DemoPods,
    schedule: &PhaseSchedule,
    node: &NodeFacts,
    waits_measured: bool,
) -> Result<Adapted, PolicyError> {
    let example = if waits_measured { BY_WAITING } else { BY_USAGE };
    let mut manifest = Manifest::parse(example)?;
    let (when, cool_down) = if waits_measured {
        let (threshold, restore) = WAITING;
        let why = "its threads, twice as many as CPUs, wait for each other where it runs alone";
        manifest.set(
            "NodeQOS",
            "/spec/rules/0/metricRule/value",
            &json!(threshold),
            why,
        )?;
        manifest.set(
            "NodeQOS",
            "/spec/rules/0/restoreValue",
            &json!(restore),
            why,
        )?;
        let why = "the demo's node has no labels";
        manifest.set("NodeQOS", "/spec/selector", &Value::Null, why)?;
        let when =
            format!("while the important pod waits for a CPU more than {threshold} % of the time");
        (when, schedule.cool_down_after_harm)
    } else {
        let threshold = demo_pods.threshold();
        let why = format!(
            "{THRESHOLD_PERCENT} % of {} in millicores",
            super::cpus(demo_pods.cpus)
        );
        manifest.set(
            "NodeQOS",
            "/spec/rules/0/metricRule/value",
            &json!(threshold.0),
            &why,
        )?;
        let when = format!("while CPU usage is above {threshold}");
        (when, schedule.cool_down_after_load)
    };
    manifest.set(
        "AvoidanceAction",
        "/spec/coolDownSeconds",
        &json!(cool_down.as_secs()),
        "so that all phases fit",
    )?;
    let policy = compile_for(example, node, manifest.objects)?;
    let mut changes = manifest.changes;
    changes.push(period_change(schedule.period));
    Ok(Adapted {
        example,
        when,
        policy,
        changes,
    })
}

fn period_change(period: Duration) -> FieldChange {
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    FieldChange {
        field: "plimsoll run --period".to_owned(),
        from: Some(seconds(DEFAULT_PERIOD)),
        to: seconds(period),
        why: "so that all phases fit".to_owned(),
    }
}

fn compile_for(
    example: Example,
    node: &NodeFacts,
    objects: Vec<Value>,
) -> Result<PolicySet, PolicyError> {
    let compiled = compile(&Objects::from_values(objects), node);
    if compiled.policy.rules.is_empty() || compiled.policy.pods.is_empty() {
        let findings = compiled
            .findings
            .iter()
            .map(|finding| finding.message.clone());
        let findings = findings.collect::<Vec<_>>().join("; ");
        return Err(PolicyError::NoRule(example.name, findings));
    }
    Ok(compiled.policy)
}

/// The objects of an example, and the changes made to them.
struct Manifest {
    example: Example,
    objects: Vec<Value>,
    changes: Vec<FieldChange>,
}

impl Manifest {
    fn parse(example: Example) -> Result<Self, PolicyError> {
        let objects: Vec<BTreeMap<String, Value>> = serde_saphyr::from_multiple(example.text)
            .map_err(|error| PolicyError::Yaml(example.name, error.to_string()))?;
        Ok(Self {
            example,
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
        why: &str,
    ) -> Result<(), PolicyError> {
        let field = self.field(kind, pointer)?;
        let from = std::mem::replace(field, to.clone());
        self.changes.push(FieldChange {
            field: format!("{kind} {}", pointer.replace('/', ".")),
            from: Some(from.to_string()),
            to: if to.is_null() {
                "unset".to_owned()
            } else {
                to.to_string()
            },
            why: why.to_owned(),
        });
        Ok(())
    }

    fn field(
        &mut self,
        kind: &'static str,
        pointer: &'static str,
    ) -> Result<&mut Value, PolicyError> {
        let example = self.example.name;
        let objects = self.objects.iter_mut();
        objects
            .filter(|object| object["kind"] == kind)
            .find_map(|object| object.pointer_mut(pointer))
            .ok_or(PolicyError::NoField {
                example,
                kind,
                pointer,
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::metric::{Metric, Protected};
    use crate::engine::units::Bytes;

    fn adapted(waits_measured: bool) -> Adapted {
        let demo_pods = DemoPods::for_cpus(2);
        let schedule = PhaseSchedule::lasting(Duration::from_mins(1));
        let node = NodeFacts {
            cpus: 2,
            memory: Bytes(8 << 30),
            ..NodeFacts::default()
        };
        adapt(&demo_pods, &schedule, &node, waits_measured).unwrap()
    }

    #[test]
    fn without_measured_waits_the_rule_is_on_usage_and_needs_no_quota() {
        let adapted = adapted(false);
        let [rule] = adapted.policy.rules.as_slice() else {
            panic!("one rule: {adapted:?}");
        };
        assert_eq!(rule.metric, Metric::CpuUsage);
        assert!((rule.threshold - 1400.0).abs() < 1e-9);
        let throttle = rule.action.throttle.unwrap();
        assert!(throttle.idle && throttle.min_ratio == 100, "{throttle:?}");
        assert_eq!(rule.action.cool_down, Duration::from_secs(6));
    }

    #[test]
    fn where_waits_are_measured_the_rule_is_on_those_of_the_protected() {
        let adapted = adapted(true);
        let [rule] = adapted.policy.rules.as_slice() else {
            panic!("one rule: {adapted:?}");
        };
        assert_eq!(rule.metric, Metric::Protected(Protected::CpuDelayMax));
        let throttle = rule.action.throttle.unwrap();
        assert!(throttle.idle && throttle.min_ratio < 100, "{throttle:?}");
    }

    #[test]
    fn only_the_batch_pods_may_be_throttled() {
        for waits_measured in [false, true] {
            let adapted = adapted(waits_measured);
            let [pods] = adapted.policy.pods.as_slice() else {
                panic!("one PodQOS: {adapted:?}");
            };
            let demo_pods = DemoPods::for_cpus(2);
            let selector = pods.labels.as_ref().unwrap();
            assert!(!selector.matches(&demo_pods.important.labels), "{pods:?}");
            let mut batch = demo_pods.batch.iter();
            assert!(batch.all(|pod| selector.matches(&pod.labels)), "{pods:?}");
        }
    }

    #[test]
    fn every_change_names_the_old_value() {
        for waits_measured in [false, true] {
            let changes = adapted(waits_measured).changes;
            let fields: Vec<&str> = changes.iter().map(|it| it.field.as_str()).collect();
            assert!(
                fields.contains(&"NodeQOS .spec.rules.0.metricRule.value"),
                "{fields:?}"
            );
            assert!(changes.iter().all(|it| it.from.as_ref() != Some(&it.to)));
        }
    }
}
