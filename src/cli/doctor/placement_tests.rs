use super::*;

/// Adds an argument to the agents.
fn with(snapshot: &mut Snapshot, argument: &str) {
    let pod = of_agents(snapshot).spec.as_mut().expect("a pod");
    let arguments = pod.containers[0].args.as_mut().expect("arguments");
    arguments.push(argument.to_owned());
}

fn notes_of(change: impl Fn(&mut Snapshot)) -> String {
    let mut snapshot = healthy_snapshot();
    change(&mut snapshot);
    let notes = notes(&snapshot).into_iter();
    notes.map(|it| it.to_string()).collect()
}

#[test]
fn a_soft_taint_beside_karpenter_is_reported() {
    let karpenter = |it: &mut Snapshot| {
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
        let unlabelled = |it: &mut Snapshot| {
            with(it, "--load-label=true");
            it.nodes.as_mut().expect("a list")[1].load_label = label.clone();
        };
        assert_finding(unlabelled, &["count as loaded by 80: b"]);
    }
    let off = |it: &mut Snapshot| it.nodes.as_mut().expect("a list")[1].load_label = None;
    let mut snapshot = healthy_snapshot();
    off(&mut snapshot);
    assert_eq!(findings(&snapshot), [], "the label is off");
}

#[test]
fn a_label_that_nothing_reads_is_a_note() {
    let labelled = |it: &mut Snapshot| with(it, "--load-label=true");
    assert!(notes_of(labelled).contains("nothing of this release makes schedulers read"));
    let with_policy = |it: &mut Snapshot| {
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
