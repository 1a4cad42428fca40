use serde_json::json;

use super::*;
use crate::crd::pod_facts::{PodObject, pod_facts};
use crate::crd::{NodeWatermark, Objects, compile};

fn pod(labels: &serde_json::Value, annotations: &serde_json::Value) -> Pod {
    let object = json!({
        "metadata": {"name": "web", "namespace": "shop", "uid": "u1", "labels": labels, "annotations": annotations},
        "spec": {"nodeName": "a", "containers": [{"name": "c", "resources": {"requests": {"cpu": "1"}}}]},
        "status": {"phase": "Running", "qosClass": "Burstable"},
    });
    let object: PodObject = serde_json::from_value(object).expect("a pod");
    pod_facts(&object).expect("valid")
}

fn policy() -> PolicySet {
    let examples = [
        include_str!("../../../../examples/ensurance/services.yaml"),
        include_str!("../../../../examples/ensurance/standing.yaml"),
    ];
    let objects = examples.into_iter().flat_map(|example| {
        serde_saphyr::from_multiple::<serde_json::Value>(example).expect("YAML")
    });
    compile(&Objects::from_values(objects), &NodeFacts::default()).policy
}

fn at(status: &serde_json::Value) -> OnItsNode {
    let object = json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": "a"},
        "spec": {"nodeUID": "u", "hash": "h"}, "status": status,
    });
    let object: NodeWatermark = serde_json::from_value(object).expect("a NodeWatermark");
    OnItsNode {
        watermark: object.status,
        ..OnItsNode::default()
    }
}

fn explained(pod: &Pod, status: &serde_json::Value) -> String {
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().expect("a time");
    PodExplanation::new(pod, Some("a".to_owned()), &policy(), at(status), now).to_string()
}

#[test]
fn a_throttled_pod_has_its_rule_its_quota_and_a_way_out() {
    let status = json!({
        "throttled": [{"namespace": "shop", "pod": "web", "uid": "u1", "rule": "services/services-wait", "ratio": 60,
            "fromMillicores": 1000, "toMillicores": 600}],
        "rules": [{"id": "services/services-wait", "state": "Breached", "mark": 5.0, "since": "2026-01-01T00:07:30Z"}],
    });
    let text = explained(&pod(&json!({"workload": "batch"}), &json!({})), &status);
    assert!(
        text.contains("it is at a CPU quota of 600m (60 %), before: 1000m, by services/services-wait, Breached for 2m 30s"),
        "{text}"
    );
    assert!(
        text.contains("services/services-wait may throttle its CPU"),
        "{text}"
    );
    assert!(
        text.contains("PodQOS standing gives it the idle class, at all times"),
        "{text}"
    );
    assert!(
        text.contains("kubectl annotate pod -n shop web plimsoll.dev/protected=true"),
        "{text}"
    );
}

#[test]
fn a_pod_without_a_policy_and_a_protected_one_are_not_acted_on() {
    let text = explained(&pod(&json!({}), &json!({})), &json!({}));
    assert!(text.contains("nothing is done to it"), "{text}");
    assert!(text.contains("no: no PodQOS matches it"), "{text}");
    assert!(!text.contains("annotate"), "{text}");
    let annotations = json!({"plimsoll.dev/protected": "true"});
    let text = explained(
        &pod(&json!({"workload": "batch"}), &annotations),
        &json!({}),
    );
    assert!(
        text.contains("no: it is annotated plimsoll.dev/protected"),
        "{text}"
    );
    assert!(!text.contains("the idle class"), "{text}");
}

#[test]
fn without_a_report_what_is_done_is_unknown() {
    let pod = pod(&json!({}), &json!({}));
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().expect("a time");
    let at = OnItsNode::default();
    let text = PodExplanation::new(&pod, Some("a".to_owned()), &policy(), at, now).to_string();
    assert!(
        text.contains("no agent has reported from its node"),
        "{text}"
    );
    assert!(!text.contains("nothing is done"), "{text}");
}

#[test]
fn a_placement_that_cannot_be_read_is_a_note() {
    let now: Timestamp = "2026-01-01T00:10:00Z".parse().expect("a time");
    let pod = pod(&json!({}), &json!({}));
    let mut explained = PodExplanation::new(&pod, None, &policy(), OnItsNode::default(), now);
    explained.placed(Err("failed to list the nodes: forbidden".to_owned()));
    let text = explained.to_string();
    assert!(
        text.contains("where it would be placed is unknown: failed to list the nodes"),
        "{text}"
    );
    assert!(!text.contains("least loaded"), "{text}");
}
