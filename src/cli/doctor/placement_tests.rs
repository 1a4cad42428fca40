use std::collections::BTreeMap;

use super::*;
use crate::cli::doctor::scheduler_api::ReplicaMetrics;
use crate::crd::crane_annotations::{HOT, KEYS, WRITTEN};

/// Adds an argument to the agents.
fn with(snapshot: &mut ClusterSnapshot, argument: &str) {
    let pod = of_agents(snapshot).spec.as_mut().expect("a pod");
    let arguments = pod.containers[0].args.as_mut().expect("arguments");
    arguments.push(argument.to_owned());
}

fn notes_of(change: impl Fn(&mut ClusterSnapshot)) -> String {
    let mut snapshot = healthy_snapshot();
    change(&mut snapshot);
    let notes = notes(&snapshot).into_iter();
    notes.map(|it| it.to_string()).collect()
}

#[test]
fn a_soft_taint_beside_karpenter_is_reported() {
    let karpenter = |it: &mut ClusterSnapshot| {
        with(it, "--soft-taint");
        it.placement.groups = Ok(vec!["karpenter.sh".to_owned()]);
    };
    assert_finding(karpenter, &["Karpenter", "plimsoll.dev/busy", "softTaint"]);
    let mut without_karpenter = healthy_snapshot();
    with(&mut without_karpenter, "--soft-taint");
    assert_eq!(findings(&without_karpenter), []);
}

#[test]
fn nodes_without_a_valid_label_are_reported() {
    for label in [None, Some("idle".to_owned())] {
        let unlabelled = |it: &mut ClusterSnapshot| {
            with(it, "--load-label=true");
            it.nodes.as_mut().expect("a list")[1].load_label = label.clone();
        };
        assert_finding(unlabelled, &["count as loaded by 80: b"]);
    }
    let off = |it: &mut ClusterSnapshot| it.nodes.as_mut().expect("a list")[1].load_label = None;
    let mut snapshot = healthy_snapshot();
    off(&mut snapshot);
    assert_eq!(findings(&snapshot), [], "the label is off");
}

#[test]
fn a_label_that_hides_the_reported_load_is_found() {
    let labelled = |label: &str, load: f64| {
        let label = Some(label.to_owned());
        move |it: &mut ClusterSnapshot| {
            with(it, "--load-label=true");
            for node in it.nodes.as_mut().expect("a list") {
                node.load_label = label.clone();
            }
            it.placement.loads = Ok(vec![("a".to_owned(), None), ("b".to_owned(), Some(load))]);
        }
    };
    assert_finding(labelled("0", 97.2), &["b (0, load 97)", "another client"]);
    // Not raised yet or at all, lowered late, and above what labels can say.
    for (label, load) in [("70", 84.0), ("0", 60.0), ("95", 20.0), ("100", 400.0)] {
        let mut snapshot = healthy_snapshot();
        labelled(label, load)(&mut snapshot);
        assert_eq!(findings(&snapshot), [], "{label}, {load}");
    }
}

#[test]
fn a_second_scheduler_without_replicas_is_found() {
    let waiting = |it: &mut ClusterSnapshot| {
        let mut scheduler = it.deployments.as_ref().expect("a list")[0].clone();
        scheduler.metadata.name = Some("plimsoll-scheduler".to_owned());
        scheduler.status = None;
        it.placement.schedulers = Ok(vec![scheduler]);
    };
    assert_finding(
        waiting,
        &["plimsoll-scheduler", "0 of 2 replicas are ready"],
    );
}

#[test]
fn a_label_that_nothing_reads_is_a_note() {
    let labelled = |it: &mut ClusterSnapshot| with(it, "--load-label=true");
    assert!(notes_of(labelled).contains("nothing of this release makes schedulers read"));
    let with_policy = |it: &mut ClusterSnapshot| {
        labelled(it);
        it.placement.policies = Ok(vec!["plimsoll-placement".to_owned()]);
    };
    let notes = notes_of(with_policy);
    assert!(
        notes.contains("plimsoll-placement: no namespace"),
        "{notes}"
    );
    let mut used = healthy_snapshot();
    with_policy(&mut used);
    used.placement.namespaces = Ok(vec!["web".to_owned()]);
    let shown = summary(&used);
    assert!(
        shown.contains("placement by load: the admission policy (1 namespaces)"),
        "{shown}"
    );
    let notes: String = super::notes(&used)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(!notes.contains("load"), "{notes}");
}

/// Annotations on both nodes that an agent wrote at this time, and another writer at that one.
fn crane(snapshot: &mut ClusterSnapshot, ours: &str, others: Option<&str>) {
    with(snapshot, "--crane-annotations=Asia/Shanghai");
    let mut all: BTreeMap<_, _> = [(WRITTEN.to_owned(), ours.to_owned())].into();
    let mut add = |key: &str, time: &str| all.insert(key.to_owned(), format!("0.1,{time}"));
    add(HOT, ours);
    if let Some(time) = others {
        add(KEYS[0], time);
    }
    for node in snapshot.nodes.as_mut().expect("a list") {
        node.crane = CraneAnnotations::of(Some(&all));
    }
}

#[test]
fn annotations_for_crane_scheduler_are_checked() {
    // It is 08:01:00 in Shanghai.
    let current = "2026-01-01T07:50:00Z";
    let mut healthy = healthy_snapshot();
    crane(&mut healthy, current, None);
    assert_eq!(findings(&healthy), []);
    let shown = summary(&healthy);
    assert!(
        shown.contains("a crane-scheduler with TZ=Asia/Shanghai"),
        "{shown}"
    );
    let other = |it: &mut ClusterSnapshot| crane(it, current, Some("2026-01-01T07:59:00Z"));
    assert_finding(
        other,
        &["another writer", "a, b", "crane-scheduler-controller"],
    );
    let stale = |it: &mut ClusterSnapshot| crane(it, "2026-01-01T07:40:00Z", None);
    assert_finding(stale, &["without current annotations", "a, b"]);
    let never = |it: &mut ClusterSnapshot| with(it, "--crane-annotations=UTC");
    assert_finding(never, &["without current annotations"]);
    let mut off = healthy_snapshot();
    off.nodes = healthy.nodes;
    assert_eq!(findings(&off), [], "the option is off");
}

/// Adds an argument to the controller.
fn with_controller(snapshot: &mut ClusterSnapshot, argument: &str) {
    let all = snapshot.deployments.as_mut().expect("a list");
    let spec = all[0].spec.as_mut().expect("a spec");
    let pod = spec.template.spec.as_mut().expect("a pod");
    let arguments = pod.containers[0].args.as_mut().expect("arguments");
    arguments.push(argument.to_owned());
}

#[test]
fn what_schedulers_ask_of_the_controller_is_checked() {
    let quiet = ReplicaMetrics {
        answers: 0.0,
        filter_suspended: false,
        policy_invalid: false,
    };
    let asked = ReplicaMetrics {
        answers: 7.0,
        ..quiet
    };
    let serving = |replicas: &[ReplicaMetrics]| {
        let mut snapshot = healthy_snapshot();
        with(&mut snapshot, "--load-label=true");
        with_controller(&mut snapshot, "--scheduler-listen=[::]:8094");
        snapshot.placement.replicas = replicas.to_vec();
        snapshot
    };
    let noted = |replicas: &[ReplicaMetrics]| {
        let notes = notes(&serving(replicas)).into_iter();
        notes.map(|it| it.to_string()).collect::<String>()
    };
    assert!(noted(&[quiet, quiet]).contains("none has asked since it started"));
    // A scheduler asks one replica only. Without permission to ask replicas nothing is said.
    assert_eq!(noted(&[quiet, asked]), "");
    assert_eq!(noted(&[]), "");
    let suspended = ReplicaMetrics {
        filter_suspended: true,
        ..asked
    };
    assert!(noted(&[suspended]).contains("rejects no node at the moment"));
    let shown = summary(&serving(&[asked]));
    assert!(shown.contains("requests of schedulers"), "{shown}");
    let invalid = ReplicaMetrics {
        policy_invalid: true,
        ..asked
    };
    let broken = |it: &mut ClusterSnapshot| it.placement.replicas = vec![invalid];
    assert_finding(broken, &["scheduler policy is invalid"]);
}

#[test]
fn polled_loads_that_no_scheduler_can_ask_for_are_noted() {
    let polls = "--poll=/etc/plimsoll/polling/polling.yaml";
    let noted = notes_of(|it| with_controller(it, polls));
    assert!(noted.contains("schedulers cannot ask"), "{noted}");
    let served = notes_of(|it| {
        with_controller(it, polls);
        with_controller(it, "--scheduler-listen=[::]:8085");
    });
    assert!(!served.contains("schedulers cannot ask"), "{served}");
}
