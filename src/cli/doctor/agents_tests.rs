use super::*;

#[test]
fn a_layout_whose_agents_do_not_come_up_is_told_with_what_they_wait_for() {
    let about = "DaemonSet plimsoll/agent-v2";
    let one = |status: &'static str, node: &'static str| {
        move |it: &mut Seen| {
            it.daemon_sets = of(vec![set("agent-v2", [2, 1, 2])]);
            it.agents = vec![pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "0/1", status, node],
            ])];
        }
    };
    for (status, cure) in [
        ("ContainerCreating", "below /sys/fs/cgroup"),
        ("ImagePullBackOff", "image.repository"),
        ("CrashLoopBackOff", "kubectl logs --previous"),
        ("Terminating", "kubectl get nodes"),
        ("Running", "kubectl describe pod"),
    ] {
        let told = format!("1 of 2 agents are ready; {status} on b");
        says(one(status, "b"), &[about, &told, cure]);
    }
    says(
        one("Pending", "<none>"),
        &[about, "agents are ready; Pending\n", "agent.resources"],
    );
    says(
        |it| it.daemon_sets = of(vec![set("agent-v2", [2, 1, 2])]),
        &[about, "1 of 2 agents are ready", "kubectl get nodes"],
    );
}

#[test]
fn a_layout_without_nodes_and_nodes_without_a_layout_are_told() {
    let sets = vec![set("agent-v2", [2, 2, 2]), set("agent-v1", [0, 0, 0])];
    says(
        |it| it.daemon_sets = of(sets),
        &["DaemonSet plimsoll/agent-v1", "selects no node"],
    );
    let bare = |it: &mut Seen| {
        it.daemon_sets = of(vec![set("agent-v2", [1, 1, 1])]);
        it.agents = vec![pods(&[["agent-v2-x", "1/1", "Running", "a"]])];
    };
    says(bare, &["agents", "on 1 node none runs: b", "agent.layouts"]);
}

#[test]
fn a_node_that_the_image_is_not_for_is_told_as_that() {
    let arm = |it: &mut Seen| {
        it.foreign = table(["Name"], &[["b"]]);
        it.daemon_sets = of(vec![set("agent-v2", [1, 1, 1])]);
        it.agents = vec![pods(&[["agent-v2-x", "1/1", "Running", "a"]])];
    };
    let mut seen = well();
    arm(&mut seen);
    assert_eq!(findings(&seen), [], "it is so in a cluster of several");
    let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
    assert!(
        said.len() == 1 && said[0].contains("another architecture than amd64 none runs: b"),
        "{said:?}"
    );
    let mut seen = well();
    seen.foreign = table(["Name"], &[["b"]]);
    assert_eq!(notes(&seen), [], "somebody has built one for it");
}

#[test]
fn a_node_with_agents_of_two_layouts_is_told_whether_or_not_they_run() {
    for [ready, status] in [["0/1", "CrashLoopBackOff"], ["0/1", "ContainerCreating"]] {
        let twice = |it: &mut Seen| {
            it.daemon_sets = of(vec![set("agent-v2", [2, 2, 2]), set("agent-v1", [1, 0, 1])]);
            it.agents = vec![pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "1/1", "Running", "b"],
                ["agent-v1-z", ready, status, "a"],
            ])];
        };
        says(
            twice,
            &[
                "on 1 node there is one of more than one layout (agent-v1, agent-v2): a",
                "nodeSelectors of agent.layouts exclude each other",
            ],
        );
    }
    // A node that went from one layout to the other has both for a moment.
    let mut seen = well();
    seen.daemon_sets = of(vec![set("agent-v2", [1, 1, 1]), set("agent-v1", [1, 1, 1])]);
    seen.agents = vec![pods(&[
        ["agent-v2-x", "1/1", "Running", "a"],
        ["agent-v2-y", "1/1", "Terminating", "b"],
        ["agent-v1-z", "1/1", "Running", "b"],
    ])];
    assert_eq!(findings(&seen), []);
}

const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
const OPEN: &str =
    "kubectl label namespace plimsoll --overwrite pod-security.kubernetes.io/enforce=privileged";

fn namespace(level: &str) -> Answer {
    Ok(json!({"metadata": {"name": "plimsoll", "labels": {ENFORCE: level}}}))
}

/// No pod could be made, and this is what the `DaemonSet`s' events say.
fn unmade(it: &mut Seen, said: &[(&str, &str, &str)]) {
    it.daemon_sets = of(vec![set("agent-v2", [0, 0, 2])]);
    it.agents = vec![pods(&[])];
    let event = |(name, time, message): &(&str, &str, &str)| json!({"involvedObject": {"kind": "DaemonSet", "namespace": "plimsoll", "name": name}, "lastTimestamp": time, "message": message});
    it.refusals = vec![of(said.iter().map(event).collect())];
}

#[test]
fn a_namespace_that_says_that_it_admits_no_agent_is_told() {
    says(
        |it| it.namespaces[0].1 = namespace("baseline"),
        &["is baseline", OPEN],
    );
    // Once, also where it has kept agents away already.
    let why = r#"pods "agent-v2-x" is forbidden: violates PodSecurity "baseline:latest""#;
    let kept_away = |it: &mut Seen| {
        it.namespaces[0].1 = namespace("restricted");
        unmade(it, &[("agent-v2", "2026-01-01T00:00:00Z", why)]);
    };
    says(kept_away, &["is restricted", OPEN]);
    let mut seen = well();
    seen.namespaces[0].1 = namespace("privileged");
    assert_eq!(findings(&seen), []);
}

#[test]
fn pods_that_nobody_lets_be_made_are_told_with_what_refuses_them() {
    let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:30Z");
    let standard = r#"pods "agent-v2-x" is forbidden: violates PodSecurity "baseline:latest""#;
    let by_default = |it: &mut Seen| {
        unmade(
            it,
            &[
                ("agent-v2", early, "an older one"),
                ("agent-v2", late, standard),
                ("agent-v1", late, "another's"),
            ],
        );
    };
    says(
        by_default,
        &["DaemonSet", "2 pods of 2 could not be made", standard, OPEN],
    );
    // Where nobody says why, or nobody may read it.
    says(
        |it| unmade(it, &[]),
        &["2 pods of 2 could not be made", OPEN],
    );
    let unread = |it: &mut Seen| {
        unmade(it, &[]);
        it.refusals = vec![refused(403)];
    };
    says(unread, &["could not be made", OPEN]);
    let context = "unable to validate against any security context constraint";
    says(
        |it| unmade(it, &[("agent-v2", late, context)]),
        &[context, "oc adm policy", "-z agent -n plimsoll"],
    );
    let quota = "insufficient quota to match these scopes";
    let of_quota = |it: &mut Seen| {
        unmade(it, &[("agent-v2", late, quota)]);
        it.namespaces[0].1 = namespace("privileged");
    };
    says(of_quota, &[quota, "have what refuses them admit them"]);
    // Of what was made some may not run either.
    let mut both = well();
    unmade(&mut both, &[]);
    both.daemon_sets = of(vec![set("agent-v2", [1, 0, 2])]);
    both.agents = vec![pods(&[["agent-v2-x", "0/1", "CrashLoopBackOff", "a"]])];
    let found = findings(&both);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].what.contains("1 pod of 2 could not be made"),
        "{found:?}"
    );
    assert!(
        found[1]
            .what
            .contains("0 of 2 agents are ready; CrashLoopBackOff on a"),
        "{found:?}"
    );
    let open = |it: &mut Seen| {
        unmade(it, &[]);
        it.namespaces[0].1 = namespace("privileged");
    };
    says(open, &["kubectl describe daemonset"]);
}

#[test]
fn silent_agents_and_clocks_that_are_ahead_are_told_of_nodes_that_are_there() {
    let leases = |times: [&str; 2]| {
        of(vec![
            lease("a", times[0]),
            lease("b", times[1]),
            lease("gone", "2025-01-01T00:00:00Z"),
        ])
    };
    let fresh = "2026-01-01T00:00:59Z";
    says(
        |it| it.leases = leases([fresh, "2026-01-01T00:00:09Z"]),
        &["1 agent silent", ": b"],
    );
    says(
        |it| it.leases = leases(["2026-01-01T00:01:06Z", fresh]),
        &["1 clock ahead", ": a"],
    );
    let mut seen = well();
    seen.leases = leases(["2026-01-01T00:01:05Z", "2026-01-01T00:00:10Z"]);
    assert_eq!(findings(&seen), [], "5 s ahead, and 50 s after 40 s");
}

#[test]
fn an_agent_that_works_and_has_no_lease_is_told() {
    let only = of(vec![lease("a", "2026-01-01T00:00:59Z")]);
    says(
        |it| it.leases = only,
        &[
            "1 agent without a Lease in plimsoll-node-lease: b",
            "kubectl logs",
        ],
    );
}
