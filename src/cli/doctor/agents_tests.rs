use k8s_openapi::api::core::v1::Namespace;

use super::*;

#[test]
fn a_layout_with_unready_agents_is_reported_with_their_state() {
    let about = "DaemonSet plimsoll/agent-v2";
    let one = |status: &'static str, node: &'static str| {
        move |it: &mut ClusterSnapshot| {
            it.daemon_sets = of(vec![set("agent-v2", [2, 1, 2])]);
            it.agents[0].pods = pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "0/1", status, node],
            ]);
        }
    };
    for (status, fix) in [
        ("ContainerCreating", "below /sys/fs/cgroup"),
        ("ImagePullBackOff", "image.repository"),
        ("CrashLoopBackOff", "kubectl logs --previous"),
        ("Terminating", "kubectl get nodes"),
        ("Running", "kubectl describe pod"),
    ] {
        let expected = format!("1 of 2 agents are ready; {status} on b");
        assert_finding(one(status, "b"), &[about, &expected, fix]);
    }
    assert_finding(
        one("Pending", "<none>"),
        &[about, "agents are ready; Pending\n", "agent.resources"],
    );
    assert_finding(
        |it| it.daemon_sets = of(vec![set("agent-v2", [2, 1, 2])]),
        &[about, "1 of 2 agents are ready", "kubectl get nodes"],
    );
}

#[test]
fn layouts_without_nodes_and_nodes_without_layout_are_reported() {
    let sets = vec![set("agent-v2", [2, 2, 2]), set("agent-v1", [0, 0, 0])];
    assert_finding(
        |it| it.daemon_sets = of(sets),
        &["DaemonSet plimsoll/agent-v1", "selects no node"],
    );
    let bare = |it: &mut ClusterSnapshot| {
        it.daemon_sets = of(vec![set("agent-v2", [1, 1, 1])]);
        it.agents[0].pods = pods(&[["agent-v2-x", "1/1", "Running", "a"]]);
    };
    assert_finding(bare, &["agents", "none runs on 1 node: b", "agent.layouts"]);
}

#[test]
fn a_node_of_another_architecture_is_noted() {
    let arm = |it: &mut ClusterSnapshot| {
        it.nodes.as_mut().expect("a list")[1].unsupported_architecture = true;
        it.daemon_sets = of(vec![set("agent-v2", [1, 1, 1])]);
        it.agents[0].pods = pods(&[["agent-v2-x", "1/1", "Running", "a"]]);
    };
    let mut snapshot = healthy_snapshot();
    arm(&mut snapshot);
    assert_eq!(
        findings(&snapshot),
        [],
        "not a finding in a cluster of several architectures"
    );
    let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
    assert!(
        texts.len() == 1
            && texts[0]
                .contains("none runs on 1 node of another architecture than amd64 and arm64: b"),
        "{texts:?}"
    );
    let mut snapshot = healthy_snapshot();
    snapshot.nodes.as_mut().expect("a list")[1].unsupported_architecture = true;
    assert_eq!(notes(&snapshot), [], "an agent runs there");
}

#[test]
fn a_node_whose_taint_agents_do_not_tolerate_is_noted() {
    let taint = json!({"key": "dedicated", "value": "gpu", "effect": "NoSchedule"});
    let taint = serde_json::from_value(taint).expect("a taint");
    let mut snapshot = healthy_snapshot();
    snapshot.nodes.as_mut().expect("a list")[1].taints = vec![taint];
    assert_eq!(notes(&snapshot), [], "an agent runs there");
    let mut agents = set("agent-v2", [1, 1, 1]);
    snapshot.daemon_sets = of(vec![agents.clone()]);
    snapshot.agents[0].pods = pods(&[["agent-v2-x", "1/1", "Running", "a"]]);
    assert_eq!(findings(&snapshot), [], "it may be wanted");
    let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
    let noted = "none runs on 1 node with taints that agents do not tolerate: b";
    assert!(texts.len() == 1 && texts[0].contains(noted), "{texts:?}");
    agents["spec"]["template"]["spec"]["tolerations"] = json!([{"operator": "Exists"}]);
    snapshot.daemon_sets = of(vec![agents]);
    let found: Vec<String> = findings(&snapshot)
        .iter()
        .map(ToString::to_string)
        .collect();
    assert!(
        found.len() == 1 && found[0].contains("none runs on 1 node: b"),
        "{found:?}"
    );
}

#[test]
fn a_node_with_agents_of_two_layouts_is_reported() {
    for [ready, status] in [["0/1", "CrashLoopBackOff"], ["0/1", "ContainerCreating"]] {
        let twice = |it: &mut ClusterSnapshot| {
            it.daemon_sets = of(vec![set("agent-v2", [2, 2, 2]), set("agent-v1", [1, 0, 1])]);
            it.agents[0].pods = pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "1/1", "Running", "b"],
                ["agent-v1-z", ready, status, "a"],
            ]);
        };
        assert_finding(
            twice,
            &[
                "agents of more than one layout (agent-v1, agent-v2) on 1 node: a",
                "nodeSelectors of agent.layouts mutually exclusive",
            ],
        );
    }
    // A node that changes its layout has both agents for a moment.
    let mut snapshot = healthy_snapshot();
    snapshot.daemon_sets = of(vec![set("agent-v2", [1, 1, 1]), set("agent-v1", [1, 1, 1])]);
    snapshot.agents[0].pods = pods(&[
        ["agent-v2-x", "1/1", "Running", "a"],
        ["agent-v2-y", "1/1", "Terminating", "b"],
        ["agent-v1-z", "1/1", "Running", "b"],
    ]);
    assert_eq!(findings(&snapshot), []);
}

const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
const OPEN: &str =
    "kubectl label namespace plimsoll --overwrite pod-security.kubernetes.io/enforce=privileged";

fn namespace(level: &str) -> Read<Namespace> {
    read(json!({"metadata": {"name": "plimsoll", "labels": {ENFORCE: level}}}))
}

/// No pod could be created, and `DaemonSet`s have these events.
fn uncreated(it: &mut ClusterSnapshot, messages: &[(&str, &str, &str)]) {
    it.daemon_sets = of(vec![set("agent-v2", [0, 0, 2])]);
    it.agents[0].pods = pods(&[]);
    let event = |(name, time, message): &(&str, &str, &str)| json!({"involvedObject": {"kind": "DaemonSet", "namespace": "plimsoll", "name": name}, "lastTimestamp": time, "message": message});
    it.agents[0].failed_create = of(messages.iter().map(event).collect());
}

#[test]
fn a_namespace_that_does_not_admit_agents_is_reported() {
    assert_finding(
        |it| it.agents[0].object = namespace("baseline"),
        &["is baseline", OPEN],
    );
    // Once, even if it has already rejected agents.
    let why = r#"pods "agent-v2-x" is forbidden: violates PodSecurity "baseline:latest""#;
    let rejected = |it: &mut ClusterSnapshot| {
        it.agents[0].object = namespace("restricted");
        uncreated(it, &[("agent-v2", "2026-01-01T00:00:00Z", why)]);
    };
    assert_finding(rejected, &["is restricted", OPEN]);
    let mut snapshot = healthy_snapshot();
    snapshot.agents[0].object = namespace("privileged");
    assert_eq!(findings(&snapshot), []);
}

#[test]
fn pods_that_could_not_be_created_are_reported_with_the_reason() {
    let (early, late) = ("2026-01-01T00:00:00Z", "2026-01-01T00:00:30Z");
    let standard = r#"pods "agent-v2-x" is forbidden: violates PodSecurity "baseline:latest""#;
    let by_default = |it: &mut ClusterSnapshot| {
        uncreated(
            it,
            &[
                ("agent-v2", early, "an older one"),
                ("agent-v2", late, standard),
                ("agent-v1", late, "another's"),
            ],
        );
    };
    assert_finding(
        by_default,
        &[
            "DaemonSet",
            "2 pods of 2 could not be created",
            standard,
            OPEN,
        ],
    );
    // The reason is unknown, or can't be read.
    assert_finding(
        |it| uncreated(it, &[]),
        &["2 pods of 2 could not be created", OPEN],
    );
    let unread = |it: &mut ClusterSnapshot| {
        uncreated(it, &[]);
        it.agents[0].failed_create = refused(403);
    };
    assert_finding(unread, &["could not be created", OPEN]);
    let context = "unable to validate against any security context constraint";
    assert_finding(
        |it| uncreated(it, &[("agent-v2", late, context)]),
        &[context, "oc adm policy", "-z agent -n plimsoll"],
    );
    let quota = "insufficient quota to match these scopes";
    let of_quota = |it: &mut ClusterSnapshot| {
        uncreated(it, &[("agent-v2", late, quota)]);
        it.agents[0].object = namespace("privileged");
    };
    assert_finding(of_quota, &[quota, "make whatever rejects them admit them"]);
    let open = |it: &mut ClusterSnapshot| {
        uncreated(it, &[]);
        it.agents[0].object = namespace("privileged");
    };
    assert_finding(open, &["kubectl describe daemonset"]);
}

#[test]
fn uncreated_and_unready_pods_are_reported_together() {
    let mut both = healthy_snapshot();
    uncreated(&mut both, &[]);
    both.daemon_sets = of(vec![set("agent-v2", [1, 0, 2])]);
    both.agents[0].pods = pods(&[["agent-v2-x", "0/1", "CrashLoopBackOff", "a"]]);
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
    assert_finding(
        |it| it.leases = leases([fresh, "2026-01-01T00:00:09Z"]),
        &["1 agent unresponsive", ": b"],
    );
    assert_finding(
        |it| it.leases = leases(["2026-01-01T00:01:06Z", fresh]),
        &["1 clock ahead", ": a"],
    );
    let mut snapshot = healthy_snapshot();
    snapshot.leases = leases(["2026-01-01T00:01:05Z", "2026-01-01T00:00:10Z"]);
    assert_eq!(findings(&snapshot), [], "5 s ahead, and 50 s after 40 s");
}

#[test]
fn a_running_agent_without_a_lease_is_reported() {
    let only = of(vec![lease("a", "2026-01-01T00:00:59Z")]);
    assert_finding(
        |it| it.leases = only,
        &[
            "1 agent without a Lease in plimsoll-node-lease: b",
            "kubectl logs",
        ],
    );
}

/// A snapshot for `--only agents`, with this `DaemonSet` and these pods.
fn only_agents(set: Value, rows: &[[&str; 4]]) -> ClusterSnapshot {
    let mut snapshot = ClusterSnapshot {
        only_agents: true,
        daemon_sets: of(vec![set]),
        ..healthy_snapshot()
    };
    snapshot.agents[0].pods = pods(rows);
    snapshot
}

fn first(snapshot: &ClusterSnapshot) -> String {
    let found = findings(snapshot);
    found.first().map(ToString::to_string).unwrap_or_default()
}

#[test]
fn only_agents_waits_until_all_are_ready_and_upgraded() {
    let ready = [
        ["agent-v2-x", "1/1", "Running", "a"],
        ["agent-v2-y", "1/1", "Running", "b"],
    ];
    let mut snapshot = only_agents(set("agent-v2", [2, 2, 2]), &ready);
    snapshot.deployments = refused(403);
    assert_eq!(findings(&snapshot), [], "nothing else is checked");
    assert_eq!(notes(&snapshot), []);
    assert_eq!(
        summary(&snapshot),
        "Kubernetes 1.34, 2 nodes, 2 agents running"
    );

    let mut edited = set("agent-v2", [2, 2, 2]);
    (
        edited["metadata"]["generation"],
        edited["status"]["observedGeneration"],
    ) = (2.into(), 1.into());
    let snapshot = only_agents(edited, &ready);
    assert!(first(&snapshot).contains("its last edit is not observed yet"));

    let mut old = set("agent-v2", [2, 2, 2]);
    old["status"]["updatedNumberScheduled"] = 1.into();
    let snapshot = only_agents(old, &ready);
    assert!(
        first(&snapshot).contains("1 of 2 agents are still to be replaced"),
        "{}",
        first(&snapshot)
    );

    let mut snapshot = only_agents(set("agent-v2", [2, 2, 2]), &ready);
    snapshot.nodes = refused(403);
    assert!(first(&snapshot).contains("nodes could not be read"));
}

#[test]
fn nodes_that_are_not_ready_or_being_deleted_are_not_waited_for() {
    let mut half = set("agent-v2", [2, 1, 2]);
    half["status"]["updatedNumberScheduled"] = 1.into();
    let rows = [
        ["agent-v2-x", "1/1", "Running", "a"],
        ["agent-v2-y", "0/1", "ContainerCreating", "b"],
    ];
    let snapshot = only_agents(half.clone(), &rows);
    let text = first(&snapshot);
    assert!(
        text.contains("1 of 2 agents are ready; ContainerCreating on b"),
        "{text}"
    );
    for (ready, deleted) in [(false, false), (true, true)] {
        let mut snapshot = only_agents(half.clone(), &rows);
        snapshot.nodes = nodes(&[("a", true), ("b", ready)]);
        snapshot.nodes.as_mut().expect("a list")[1].deleted = deleted;
        assert_eq!(findings(&snapshot), [], "{ready} {deleted}");
        let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
        assert!(
            texts.len() == 1 && texts[0].contains("not waited for on 1 node"),
            "{texts:?}"
        );
    }
}

#[test]
fn a_release_that_selects_no_node_is_reported() {
    let mut snapshot = only_agents(set("agent-v1", [0, 0, 0]), &[]);
    assert!(first(&snapshot).contains("no layout selects any node"));
    snapshot.nodes = nodes(&[]);
    assert_eq!(findings(&snapshot), [], "a cluster without nodes");
    // Nodes that are left out do not fail an upgrade.
    let rows = [["agent-v2-x", "1/1", "Running", "a"]];
    let snapshot = only_agents(set("agent-v2", [1, 1, 1]), &rows);
    assert_eq!(findings(&snapshot), []);
    let texts: Vec<String> = notes(&snapshot).iter().map(ToString::to_string).collect();
    assert!(
        texts.len() == 1 && texts[0].contains("none runs on 1 node: b"),
        "{texts:?}"
    );
}

#[test]
fn an_unfit_layout_is_reported_with_directory_and_value() {
    let failed = |directory: &str| {
        let message = format!(
            "MountVolume.SetUp failed for volume \"pods\" : hostPath type check failed: {directory} is not a directory"
        );
        json!({"involvedObject": {"kind": "Pod", "name": "agent-v2-y"}, "message": message})
    };
    for (directories, kubepods, missing, fix) in [
        (
            &["/sys/fs/cgroup/kubepods.slice"][..],
            None,
            "/sys/fs/cgroup/kubepods.slice",
            "kubepods for cgroupfs",
        ),
        (
            &["/sys/fs/cgroup/kubepods.slice"],
            Some("kubelet.slice/kubelet-kubepods.slice"),
            "/sys/fs/cgroup/kubepods.slice",
            "set kubepods to kubelet.slice/kubelet-kubepods.slice, as its kubelet is configured",
        ),
        (
            &["/sys/fs/cgroup/cpu/kubepods", "/sys/fs/cgroup/cpu"],
            None,
            "/sys/fs/cgroup/cpu",
            "set cgroup to v2 and kubepods to kubepods.slice",
        ),
        (
            &["/sys/fs/cgroup/memory/kubepods"],
            None,
            "/sys/fs/cgroup/memory/kubepods",
            "kubepods.slice for systemd",
        ),
    ] {
        let unfit = |it: &mut ClusterSnapshot| {
            let mut unfit = set("agent-v2", [2, 1, 2]);
            unfit["metadata"]["labels"]["plimsoll.dev/layout"] = "v2".into();
            it.daemon_sets = of(vec![unfit]);
            it.agents[0].pods = pods(&[
                ["agent-v2-x", "1/1", "Running", "a"],
                ["agent-v2-y", "0/1", "ContainerCreating", "b"],
            ]);
            it.agents[0].failed_mount = of(directories.iter().copied().map(failed).collect());
            let kubepods = kubepods.map(|it| ("b".to_owned(), it.to_owned()));
            it.agents[0].kubepods = kubepods.into_iter().collect();
        };
        let what =
            format!("1 of 2 agents are ready; ContainerCreating (no directory {missing}) on b\n");
        assert_finding(unfit, &[&what, "in the entry v2 of agent.layouts", fix]);
    }
}
