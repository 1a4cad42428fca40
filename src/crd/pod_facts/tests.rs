use super::*;
use crate::engine::pod::QosClass::{self, BestEffort, Burstable, Guaranteed};
use crate::engine::units::MilliCpu;

fn pod(yaml: &str) -> PodObject {
    serde_saphyr::from_str(yaml).expect("a pod manifest")
}

fn facts(yaml: &str) -> Pod {
    pod_facts(&pod(yaml)).expect("usable facts")
}

/// A pod with this `spec`, in YAML's flow style.
fn spec(spec: &str) -> String {
    format!("apiVersion: v1\nkind: Pod\nmetadata: {{name: p}}\nspec: {spec}\n")
}

fn containers(resources: &[&str]) -> String {
    let list: Vec<String> = resources
        .iter()
        .enumerate()
        .map(|(i, resources)| format!("{{name: c{i}, resources: {resources}}}"))
        .collect();
    spec(&format!("{{containers: [{}]}}", list.join(", ")))
}

#[test]
fn the_qos_class_is_that_of_kubernetes() {
    let full = "{requests: {cpu: 1, memory: 1Gi}, limits: {cpu: 1, memory: 1Gi}}";
    let limits_only = "{limits: {cpu: 500m, memory: 64Mi}}";
    let table: [(&[&str], QosClass); 18] = [
        (&["{}"], BestEffort),
        (&["{requests: {}, limits: {}}"], BestEffort),
        (&["{requests: {cpu: 0}, limits: {memory: '0'}}"], BestEffort),
        (
            &["{requests: {nvidia.com/gpu: 1}, limits: {nvidia.com/gpu: 1}}"],
            BestEffort,
        ),
        (&["{requests: {ephemeral-storage: 1Gi}}"], BestEffort),
        (&[full], Guaranteed),
        (&[limits_only], Guaranteed),
        (&[full, full], Guaranteed),
        (
            &["{requests: {cpu: 1000m, memory: 1Gi}, limits: {cpu: 1, memory: 1024Mi}}"],
            Guaranteed,
        ),
        (
            &[
                "{requests: {cpu: 1, memory: 1Gi, nvidia.com/gpu: 1}, limits: {cpu: 1, memory: 1Gi}}",
            ],
            Guaranteed,
        ),
        (&[full, "{}"], Burstable),
        (&["{requests: {cpu: 100m}}"], Burstable),
        (&["{limits: {cpu: 100m}}"], Burstable),
        (&["{limits: {memory: 1Gi}}"], Burstable),
        (
            &["{requests: {cpu: 500m, memory: 1Gi}, limits: {cpu: 1, memory: 1Gi}}"],
            Burstable,
        ),
        (
            &["{requests: {memory: 1Gi}, limits: {cpu: 1, memory: 1Gi}}"],
            Guaranteed,
        ),
        (
            &["{requests: {cpu: 0}, limits: {cpu: 1, memory: 1Gi}}"],
            Burstable,
        ),
        // Like Kubernetes, compares sums, not containers.
        (
            &[
                "{requests: {cpu: 1, memory: 1Gi}, limits: {cpu: 2, memory: 1Gi}}",
                "{requests: {cpu: 2, memory: 1Gi}, limits: {cpu: 1, memory: 1Gi}}",
            ],
            Guaranteed,
        ),
    ];
    for (resources, class) in table {
        assert_eq!(facts(&containers(resources)).qos, class, "{resources:?}");
    }
}

#[test]
fn init_containers_count_for_the_qos_class() {
    let with_init = |init: &str| {
        facts(&spec(&format!(
            "{{containers: [{{name: c, resources: {{limits: {{cpu: 1, memory: 1Gi}}}}}}], \
             initContainers: [{{name: i, resources: {init}}}]}}"
        )))
        .qos
    };
    assert_eq!(with_init("{limits: {cpu: 1, memory: 1Gi}}"), Guaranteed);
    assert_eq!(with_init("{}"), Burstable);
    assert_eq!(with_init("{requests: {cpu: 1}}"), Burstable);
}

#[test]
fn pod_level_resources_determine_the_qos_class() {
    let with_pod = |own: &str, container: &str| {
        facts(&spec(&format!(
            "{{resources: {own}, containers: [{{name: c, resources: {container}}}]}}"
        )))
        .qos
    };
    assert_eq!(
        with_pod("{limits: {cpu: 1, memory: 1Gi}}", "{}"),
        Guaranteed
    );
    assert_eq!(
        with_pod("{limits: {cpu: 1, memory: 1Gi}}", "{requests: {cpu: 500m}}"),
        Burstable
    );
    assert_eq!(with_pod("{limits: {cpu: 1}}", "{}"), Burstable);
    assert_eq!(
        with_pod("{requests: {cpu: 1, memory: 1Gi}}", "{}"),
        Burstable
    );
    assert_eq!(with_pod("{}", "{}"), BestEffort);
    assert_eq!(
        with_pod("{requests: {hugepages-2Mi: 4Mi}}", "{}"),
        BestEffort
    );
}

#[test]
fn the_cpu_request_is_that_of_the_scheduler() {
    let cpu = |yaml: &str| facts(&spec(yaml)).cpu_request;
    let table = [
        ("{containers: [{name: c}]}", 0),
        (
            "{containers: [{name: c, resources: {requests: {cpu: 250m}}}, {name: d, resources: {requests: {cpu: 1.5}}}]}",
            1750,
        ),
        (
            "{containers: [{name: c, resources: {limits: {cpu: 2}}}]}",
            2000,
        ),
        // An ordinary init container runs before the others: the larger request counts.
        (
            "{containers: [{name: c, resources: {requests: {cpu: 100m}}}], initContainers: [{name: i, resources: {requests: {cpu: 900m}}}]}",
            900,
        ),
        (
            "{containers: [{name: c, resources: {requests: {cpu: 1}}}], initContainers: [{name: i, resources: {requests: {cpu: 900m}}}]}",
            1000,
        ),
        // A sidecar runs together with them: the sum counts.
        (
            "{containers: [{name: c, resources: {requests: {cpu: 1}}}], initContainers: [{name: s, restartPolicy: Always, resources: {requests: {cpu: 200m}}}]}",
            1200,
        ),
        // An init container after a sidecar runs together with it.
        (
            "{containers: [{name: c, resources: {requests: {cpu: 100m}}}], initContainers: [{name: s, restartPolicy: Always, resources: {requests: {cpu: 200m}}}, {name: i, resources: {requests: {cpu: 800m}}}]}",
            1000,
        ),
        (
            "{containers: [{name: c, resources: {requests: {cpu: 100m}}}], initContainers: [{name: i, resources: {requests: {cpu: 800m}}}, {name: s, restartPolicy: Always, resources: {requests: {cpu: 200m}}}]}",
            800,
        ),
        (
            "{overhead: {cpu: 50m}, containers: [{name: c, resources: {requests: {cpu: 100m}}}]}",
            150,
        ),
        (
            "{resources: {requests: {cpu: 3}}, containers: [{name: c, resources: {requests: {cpu: 100m}}}]}",
            3000,
        ),
        (
            "{resources: {limits: {cpu: 3}}, containers: [{name: c}]}",
            3000,
        ),
        // Rounded up to whole millicores.
        (
            "{containers: [{name: c, resources: {requests: {cpu: 100.5m}}}]}",
            101,
        ),
    ];
    for (yaml, milli) in table {
        assert_eq!(cpu(yaml), MilliCpu(milli), "{yaml}");
    }
}

#[test]
fn each_container_and_sidecar_has_its_request() {
    let pod = facts(&spec(
        "{containers: [{name: c, resources: {requests: {cpu: 100m}}}, {name: none}], initContainers: [\
         {name: s, restartPolicy: Always, resources: {requests: {cpu: 200m}}}, \
         {name: i, resources: {requests: {cpu: 800m}}}]}",
    ));
    let expected = [("c", 100), ("s", 200)].map(|(name, cpu)| (name.to_owned(), MilliCpu(cpu)));
    assert_eq!(pod.container_requests, BTreeMap::from(expected));
}

#[test]
fn an_invalid_quantity_is_reported() {
    for bad in ["much", "1Gig", "NaN", "''", "1.5.1", "-1"] {
        let yaml = containers(&[&format!("{{requests: {{cpu: {bad}}}}}")]);
        let error = pod_facts(&pod(&yaml)).expect_err(bad).to_string();
        assert!(error.starts_with("failed to read cpu `"), "{bad}: {error}");
    }
}

/// A pod with this metadata and additional fields of its spec.
fn with_meta(meta: &str, more: &str) -> Pod {
    facts(&format!(
        "metadata: {{name: p, {meta}}}\nspec: {{containers: [{{name: c}}]{more}}}\n"
    ))
}

#[test]
fn static_daemon_set_and_critical_pods_are_never_evicted() {
    let annotated =
        |text: &str| with_meta(&format!("annotations: {{{text}}}"), "").eviction_exemption;
    let owned = |kind: &str| {
        let owner = format!(
            "ownerReferences: [{{apiVersion: v1, kind: {kind}, name: o, uid: u, controller: true}}]"
        );
        with_meta(&owner, "").eviction_exemption
    };
    assert_eq!(
        annotated("kubernetes.io/config.mirror: abc"),
        Some(EvictionExemption::Static)
    );
    assert_eq!(
        annotated("kubernetes.io/config.source: file"),
        Some(EvictionExemption::Static)
    );
    assert_eq!(annotated("kubernetes.io/config.source: api"), None);
    assert_eq!(owned("Node"), Some(EvictionExemption::Static));
    assert_eq!(owned("DaemonSet"), Some(EvictionExemption::DaemonSet));
    assert_eq!(owned("ReplicaSet"), None);
    assert_eq!(
        with_meta("", ", priority: 2000000000").eviction_exemption,
        Some(EvictionExemption::SystemCritical)
    );
    assert_eq!(
        with_meta("", ", priorityClassName: system-node-critical").eviction_exemption,
        Some(EvictionExemption::SystemCritical)
    );
    assert_eq!(
        with_meta("", ", priority: 1999999999").eviction_exemption,
        None
    );
    let safe = "cluster-autoscaler.kubernetes.io/safe-to-evict";
    assert_eq!(
        annotated(&format!("{safe}: 'false'")),
        Some(EvictionExemption::DoNotDisrupt)
    );
    assert_eq!(annotated(&format!("{safe}: 'true'")), None);
    assert_eq!(
        annotated("karpenter.sh/do-not-disrupt: 'true'"),
        Some(EvictionExemption::DoNotDisrupt)
    );
}

#[test]
fn only_a_controller_is_an_owner() {
    let owner = |more: &str| {
        let owner = format!(
            "ownerReferences: [{{apiVersion: v1, kind: ReplicaSet, name: o, uid: u{more}}}]"
        );
        with_meta(&owner, "").owned
    };
    assert!(owner(", controller: true"));
    assert!(!owner(", controller: false"));
    assert!(!owner(""));
    assert!(!with_meta("namespace: n", "").owned);
}

#[test]
fn a_manifest_gets_the_defaults_of_an_api_server() {
    let pod = with_meta("labels: {a: b}", "");
    assert_eq!(
        (pod.namespace.as_str(), pod.uid.0.as_ref()),
        ("default", "default/p")
    );
    assert_eq!(pod.grace, Duration::from_secs(30));
    assert_eq!((pod.priority, pod.started), (0, 0));
    assert!(!pod.running && !pod.terminating && !pod.protected && !pod.elastic);
    assert_eq!(pod.labels.get("a").map(String::as_str), Some("b"));
}

#[test]
fn a_running_pod_is_read_in_full() {
    let pod = facts(
        "metadata: {name: p, namespace: kube-system, uid: 1-2, annotations: {plimsoll.dev/protected: 'true'}, \
         deletionTimestamp: 2026-01-01T00:00:00Z, deletionGracePeriodSeconds: 4}\n\
         spec: {priority: -5, terminationGracePeriodSeconds: 7, \
                containers: [{name: c, resources: {limits: {gocrane.io/cpu: '2'}}}]}\n\
         status: {phase: Running, startTime: 1970-01-01T00:01:00Z}\n",
    );
    assert_eq!(pod.uid.0.as_ref(), "1-2");
    assert_eq!(
        (pod.started, pod.priority, pod.grace.as_secs()),
        (60, -5, 4),
        "the grace period of its deletion"
    );
    assert!(pod.running && pod.terminating && pod.protected && pod.elastic);
    assert_eq!(pod.reserved, Some(Reserved::Namespace));
}

#[test]
fn an_object_without_name_or_spec_is_rejected() {
    assert_eq!(
        pod_facts(&pod("metadata: {name: p}")),
        Err(PodFactsError::NoSpec)
    );
    assert_eq!(
        pod_facts(&pod("spec: {containers: []}")),
        Err(PodFactsError::Unnamed)
    );
}
