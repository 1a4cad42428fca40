//! Findings about admission policies.

use super::*;

#[test]
fn admission_policies_not_in_force_are_reported() {
    let all_but_one = of(ADMISSION[1..]
        .iter()
        .map(|name| admission_policy(name))
        .collect());
    assert_finding(
        |it| it.admission_policies = all_but_one,
        &["not in force: agent-node;"],
    );
    let weak = ADMISSION.map(|name| {
        binding(
            name,
            if name == "agent-lease" {
                "Warn"
            } else {
                "Deny"
            },
        )
    });
    assert_finding(
        |it| it.admission_bindings = of(weak.to_vec()),
        &["not in force: agent-lease;"],
    );
    for weak in [
        "controller-node",
        "controller-api",
        "controller-eviction",
        "agent-token",
        "controller-token",
    ] {
        let loose = ADMISSION.map(|name| {
            let mut policy = admission_policy(name);
            if name == weak {
                policy["spec"]["failurePolicy"] = "Ignore".into();
            }
            policy
        });
        let not = format!("not in force: {weak};");
        assert_finding(|it| it.admission_policies = of(loose.to_vec()), &[&not]);
    }
    assert_finding(
        |it| (it.admission_policies, it.admission_bindings) = (refused(404), refused(404)),
        &["agent-node, agent-lease", "helm upgrade"],
    );
    assert_finding(
        |it| it.admission_bindings = refused(403),
        &["bindings of admission policies could not be read"],
    );
}

#[test]
fn admission_policies_that_reject_nothing_are_reported() {
    let through = |it: &mut ClusterSnapshot| it.dry_runs[6].result = Ok(());
    assert_finding(
        through,
        &[
            "installed, but reject nothing: controller-eviction;",
            "--disable-admission-plugins",
        ],
    );
    // A missing pod is only noticed after all policies have allowed the request.
    let why = r#"pods "plimsoll-doctor" not found (404)"#.to_owned();
    let code = Some(404);
    assert_finding(
        |it| it.dry_runs[6].result = Err(SnapshotError { code, why }),
        &["installed, but reject nothing: controller-eviction;"],
    );
    // Reported once: a policy that is not bound rejects nothing.
    let unbound = |it: &mut ClusterSnapshot| {
        it.dry_runs[0].result = Ok(());
        it.admission_bindings = of(ADMISSION[1..]
            .iter()
            .map(|name| binding(name, "Deny"))
            .collect());
    };
    assert_finding(unbound, &["not in force: agent-node;"]);
    let denied = r#"serviceaccounts "agent" is forbidden: User "ann" cannot impersonate resource "serviceaccounts""#;
    let mut snapshot = healthy_snapshot();
    snapshot.dry_runs[0].result = forbidden(denied);
    assert_eq!(findings(&snapshot), [], "the user has too few permissions");
    let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
    assert_eq!(texts.len(), 1, "{texts:?}");
    for words in ["agent-node could", "could not be tested", "may impersonate"] {
        assert!(texts[0].contains(words), "{texts:?}");
    }
    let other = |it: &mut ClusterSnapshot| it.dry_runs[1].result = refused(500);
    assert_finding(
        other,
        &[
            "agent-lease could",
            "could not be tested",
            "follow the message",
        ],
    );
    let mut snapshot = healthy_snapshot();
    snapshot.dry_runs[2].result = refused(404);
    assert_eq!(findings(&snapshot), [], "there was no object to test with");
}
