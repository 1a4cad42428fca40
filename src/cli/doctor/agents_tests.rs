use super::*;

#[test]
fn a_layout_with_unready_agents_is_reported_with_their_state() {
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
fn layouts_without_nodes_and_nodes_without_layout_are_reported() {
    let sets = vec![set("agent-v2", [2, 2, 2]), set("agent-v1", [0, 0, 0])];
    says(
        |it| it.daemon_sets = of(sets),
        &["DaemonSet plimsoll/agent-v1", "selects no node"],
    );
    let bare = |it: &mut Seen| {
        it.daemon_sets = of(vec![set("agent-v2", [1, 1, 1])]);
        it.agents = vec![pods(&[["agent-v2-x", "1/1", "Running", "a"]])];
    };
    says(bare, &["agents", "none runs on 1 node: b", "agent.layouts"]);
}

#[test]
fn a_node_of_another_architecture_is_noted() {
    let arm = |it: &mut Seen| {
        it.foreign = table(["Name"], &[["b"]]);
        it.daemon_sets = of(vec![set("agent-v2", [1, 1, 1])]);
        it.agents = vec![pods(&[["agent-v2-x", "1/1", "Running", "a"]])];
    };
    let mut seen = well();
    arm(&mut seen);
    assert_eq!(
        findings(&seen),
        [],
        "not a finding in a cluster of several architectures"
    );
    let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
    assert!(
        said.len() == 1
            && said[0].contains("none runs on 1 node of another architecture than amd64: b"),
        "{said:?}"
    );
    let mut seen = well();
    seen.foreign = table(["Name"], &[["b"]]);
    assert_eq!(notes(&seen), [], "an agent runs there");
}

#[test]
fn a_node_with_agents_of_two_layouts_is_reported() {
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
                "agents of more than one layout (agent-v1, agent-v2) on 1 node: a",
                "nodeSelectors of agent.layouts mutually exclusive",
            ],
        );
    }
    // A node that changes its layout has both agents for a moment.
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

/// No pod could be created, and `DaemonSet`s have these events.
fn unmade(it: &mut Seen, said: &[(&str, &str, &str)]) {
    it.daemon_sets = of(vec![set("agent-v2", [0, 0, 2])]);
    it.agents = vec![pods(&[])];
    let event = |(name, time, message): &(&str, &str, &str)| json!({"involvedObject": {"kind": "DaemonSet", "namespace": "plimsoll", "name": name}, "lastTimestamp": time, "message": message});
    it.refusals = vec![of(said.iter().map(event).collect())];
}

#[test]
fn a_namespace_that_does_not_admit_agents_is_reported() {
    says(
        |it| it.namespaces[0].1 = namespace("baseline"),
        &["is baseline", OPEN],
    );
    // Once, even if it has already rejected agents.
    let why = r#"pods "agent-v2-x" is forbidden: violates PodSecurity "baseline:latest""#;
    let rejected = |it: &mut Seen| {
        it.namespaces[0].1 = namespace("restricted");
        unmade(it, &[("agent-v2", "2026-01-01T00:00:00Z", why)]);
    };
    says(rejected, &["is restricted", OPEN]);
    let mut seen = well();
    seen.namespaces[0].1 = namespace("privileged");
    assert_eq!(findings(&seen), []);
}

#[test]
fn pods_that_could_not_be_created_are_reported_with_the_reason() {
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
        &[
            "DaemonSet",
            "2 pods of 2 could not be created",
            standard,
            OPEN,
        ],
    );
    // The reason is unknown, or can't be read.
    says(
        |it| unmade(it, &[]),
        &["2 pods of 2 could not be created", OPEN],
    );
    let unread = |it: &mut Seen| {
        unmade(it, &[]);
        it.refusals = vec![refused(403)];
    };
    says(unread, &["could not be created", OPEN]);
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
    says(of_quota, &[quota, "make whatever rejects them admit them"]);
    // Created pods may not run either.
    let mut both = well();
    unmade(&mut both, &[]);
    both.daemon_sets = of(vec![set("agent-v2", [1, 0, 2])]);
    both.agents = vec![pods(&[["agent-v2-x", "0/1", "CrashLoopBackOff", "a"]])];
    let found = findings(&both);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(
        found[0].what.contains("1 pod of 2 could not be created"),
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
fn unresponsive_agents_and_clocks_that_are_ahead_are_reported() {
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
        &["1 agent unresponsive", ": b"],
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
fn a_running_agent_without_a_lease_is_reported() {
    let only = of(vec![lease("a", "2026-01-01T00:00:59Z")]);
    says(
        |it| it.leases = only,
        &[
            "1 agent without a Lease in plimsoll-node-lease: b",
            "kubectl logs",
        ],
    );
}

/// A snapshot for `--only agents`, with this `DaemonSet` and these pods.
fn agents_alone(set: Value, rows: &[[&str; 4]]) -> Seen {
    Seen {
        agents_alone: true,
        daemon_sets: of(vec![set]),
        agents: vec![pods(rows)],
        ..well()
    }
}

fn first(seen: &Seen) -> String {
    let found = findings(seen);
    found.first().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn only_agents_waits_until_all_are_ready_and_upgraded() {
    let ready = [
        ["agent-v2-x", "1/1", "Running", "a"],
        ["agent-v2-y", "1/1", "Running", "b"],
    ];
    let mut seen = agents_alone(set("agent-v2", [2, 2, 2]), &ready);
    seen.deployments = refused(403);
    assert_eq!(findings(&seen), [], "nothing else is checked");
    assert_eq!(notes(&seen), []);
    assert_eq!(summary(&seen), "Kubernetes 1.34, 2 nodes, 2 agents running");

    let mut edited = set("agent-v2", [2, 2, 2]);
    (
        edited["metadata"]["generation"],
        edited["status"]["observedGeneration"],
    ) = (2.into(), 1.into());
    let seen = agents_alone(edited, &ready);
    assert!(first(&seen).contains("its last edit is not observed yet"));

    let mut old = set("agent-v2", [2, 2, 2]);
    old["status"]["updatedNumberScheduled"] = 1.into();
    let seen = agents_alone(old, &ready);
    assert!(
        first(&seen).contains("1 of 2 agents are still to be replaced"),
        "{}",
        first(&seen)
    );

    let mut seen = agents_alone(set("agent-v2", [2, 2, 2]), &ready);
    seen.nodes = refused(403);
    assert!(first(&seen).contains("nodes could not be read"));
}

#[test]
fn nodes_that_are_not_ready_or_being_deleted_are_not_waited_for() {
    let mut half = set("agent-v2", [2, 1, 2]);
    half["status"]["updatedNumberScheduled"] = 1.into();
    let rows = [
        ["agent-v2-x", "1/1", "Running", "a"],
        ["agent-v2-y", "0/1", "ContainerCreating", "b"],
    ];
    let seen = agents_alone(half.clone(), &rows);
    let said = first(&seen);
    assert!(
        said.contains("1 of 2 agents are ready; ContainerCreating on b"),
        "{said}"
    );
    for (status, leaves) in [
        ("NotReady", false),
        ("Unknown,SchedulingDisabled", false),
        ("Ready", true),
    ] {
        let mut seen = agents_alone(half.clone(), &rows);
        seen.nodes = table(
            ["Name", "Status"],
            &[["a", "Ready,SchedulingDisabled"], ["b", status]],
        );
        seen.leaving.extend(leaves.then(|| "b".to_owned()));
        assert_eq!(findings(&seen), [], "{status}");
        let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
        assert!(
            said.len() == 1 && said[0].contains("not waited for on 1 node"),
            "{said:?}"
        );
    }
}

#[test]
fn a_release_that_selects_no_node_is_reported() {
    let mut seen = agents_alone(set("agent-v1", [0, 0, 0]), &[]);
    assert!(first(&seen).contains("no layout selects any node"));
    seen.nodes = table(["Name", "Status"], &[]);
    assert_eq!(findings(&seen), [], "a cluster without nodes");
    // Nodes that are left out do not fail an upgrade.
    let rows = [["agent-v2-x", "1/1", "Running", "a"]];
    let seen = agents_alone(set("agent-v2", [1, 1, 1]), &rows);
    assert_eq!(findings(&seen), []);
    let said: Vec<String> = notes(&seen).iter().map(ToString::to_string).collect();
    assert!(
        said.len() == 1 && said[0].contains("none runs on 1 node: b"),
        "{said:?}"
    );
}

#[test]
fn an_unfit_layout_is_reported_with_directory_and_value() {
    let failed = |folder: &str| {
        let message = format!(
            "MountVolume.SetUp failed for volume \"pods\" : hostPath type check failed: {folder} is not a directory"
        );
        json!({"involvedObject": {"kind": "Pod", "name": "agent-v2-y"}, "message": message})
    };
    for (folders, missing, cure) in [
        (
            &["/sys/fs/cgroup/kubepods.slice"][..],
            "/sys/fs/cgroup/kubepods.slice",
            "kubepods for cgroupfs",
        ),
        (
            &["/sys/fs/cgroup/cpu/kubepods", "/sys/fs/cgroup/cpu"],
            "/sys/fs/cgroup/cpu",
            "set cgroup to v2 and kubepods to kubepods.slice",
        ),
        (
            &["/sys/fs/cgroup/memory/kubepods"],
            "/sys/fs/cgroup/memory/kubepods",
            "kubepods.slice for systemd",
        ),
    ] {
        let unfit = |it: &mut Seen| {
            let mut unfit = set("agent-v2", [2, 1, 2]);
            unfit["metadata"]["labels"]["plimsoll.dev/layout"] = "v2".into();
            it.daemon_sets = of(vec![unfit]);
            it.agents = vec![pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "0/1", "ContainerCreating", "b"],
            ])];
            it.unmounted = vec![of(folders.iter().copied().map(failed).collect())];
        };
        let what =
            format!("1 of 2 agents are ready; ContainerCreating (no directory {missing}) on b\n");
        says(unfit, &[&what, "in the entry v2 of agent.layouts", cure]);
    }
}
