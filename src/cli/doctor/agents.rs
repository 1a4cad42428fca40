//! Checks that every node has one working agent.

use std::collections::{BTreeMap, BTreeSet};

use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::DaemonSet;
use kube::ResourceExt as _;

use super::finding::{DoctorFinding, INSTALL, finding, full_name, list};
use super::layout;
use super::pods::{AgentPod, expected, pods, running, shared_nodes, up};
use super::snapshot::{AgentNamespace, AgentNode, ClusterSnapshot, InstalledWorkload as _, items};
use crate::messages::count;

/// A node's clock that is further ahead than this is wrong, or ours is.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_secs(5);
/// An agent is unresponsive this long after its Lease has expired.
const GRACE: SignedDuration = SignedDuration::from_secs(10);
/// The label with the Pod Security standard that a namespace enforces.
const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
const PRIVILEGED: &str = "privileged";

fn names(snapshot: &ClusterSnapshot) -> impl Iterator<Item = &str> {
    items(&snapshot.nodes).iter().map(|node| node.name.as_str())
}

fn about(set: &DaemonSet) -> String {
    format!("DaemonSet {}", full_name(set))
}

/// The number of agents of a `DaemonSet`.
struct Tally {
    created: usize,
    ready: usize,
    updated: usize,
    wanted: usize,
}

impl Tally {
    fn of(set: &DaemonSet) -> Self {
        let status = set.status.clone().unwrap_or_default();
        let count = |number: i32| usize::try_from(number).unwrap_or(0);
        Self {
            created: count(status.current_number_scheduled),
            ready: count(status.number_ready),
            updated: count(status.updated_number_scheduled.unwrap_or(0)),
            wanted: count(status.desired_number_scheduled),
        }
    }

    const fn uncreated(&self) -> usize {
        self.wanted.saturating_sub(self.created)
    }
}

fn is_observed(set: &DaemonSet) -> bool {
    let observed = set.status.as_ref().and_then(|it| it.observed_generation);
    observed >= set.metadata.generation
}

/// A finding for each `DaemonSet` of agents.
fn of_sets(
    snapshot: &ClusterSnapshot,
    check: impl Fn(&DaemonSet, &Tally) -> Option<DoctorFinding>,
) -> Vec<DoctorFinding> {
    let sets = items(&snapshot.daemon_sets).iter();
    sets.filter_map(|set| check(set, &Tally::of(set))).collect()
}

fn enforced_level(namespace: &AgentNamespace) -> Option<&str> {
    let labels = namespace.object.as_ref().ok()?.labels();
    labels.get(ENFORCE).map(String::as_str)
}

fn admit_privileged(namespace: &str) -> String {
    format!("kubectl label namespace {namespace} --overwrite {ENFORCE}={PRIVILEGED}")
}

/// Namespaces that do not admit privileged pods.
pub(super) fn pod_security(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let of = |namespace: &AgentNamespace| {
        let level = enforced_level(namespace).filter(|level| *level != PRIVILEGED)?;
        let name = &namespace.name;
        let what = format!("{ENFORCE} is {level}: it admits no pod that mounts cgroups");
        Some(finding(
            format!("namespace {name}"),
            what,
            admit_privileged(name),
        ))
    };
    snapshot.agents.iter().filter_map(of).collect()
}

/// Nodes that more than one layout selects.
pub(super) fn overlapping_layouts(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let shared = shared_nodes(&pods(snapshot));
    if shared.is_empty() {
        return None;
    }
    let sets: BTreeSet<&str> = shared.values().flatten().copied().collect();
    let what = format!(
        "agents of more than one layout ({}) on {}: {}",
        list(sets),
        count(shared.len(), "node"),
        list(shared.into_keys())
    );
    let fix =
        "only one of them can run: make the nodeSelectors of agent.layouts mutually exclusive";
    Some(finding("agents", what, fix))
}

pub(super) fn no_agents(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let none = snapshot.daemon_sets.as_ref().is_ok_and(Vec::is_empty);
    none.then(|| finding("agents", "there is no DaemonSet", INSTALL))
}

/// Layouts that select no node.
pub(super) fn unused_layouts(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    of_sets(snapshot, |set, tally| {
        let fix = "label nodes to match its layout's nodeSelector, or remove the layout from agent.layouts";
        (tally.wanted == 0).then(|| finding(about(set), "it selects no node", fix))
    })
}

/// A release whose layouts together select no node.
pub(super) fn no_layout_used(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let sets = items(&snapshot.daemon_sets);
    let is_used = sets.iter().any(|set| Tally::of(set).wanted > 0);
    if sets.is_empty() || is_used || up(snapshot).is_empty() {
        return None;
    }
    let fix =
        "make the nodeSelectors of agent.layouts match the labels of the nodes, or label the nodes";
    Some(finding("agents", "no layout selects any node", fix))
}

/// `DaemonSet`s whose status is outdated.
pub(super) fn unobserved(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    of_sets(snapshot, |set, _| {
        let fix = "check that kube-controller-manager runs: it creates the pods of DaemonSets";
        let what = "its last edit is not observed yet";
        (!is_observed(set)).then(|| finding(about(set), what, fix))
    })
}

/// Agents that are not upgraded yet.
pub(super) fn outdated(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let expected: BTreeSet<&str> = expected(snapshot).iter().map(|pod| &*pod.name).collect();
    of_sets(snapshot, |set, tally| {
        let skipped = pods(snapshot).into_iter();
        let skipped = skipped.filter(|pod| pod.set == set.name_any());
        let skipped = skipped.filter(|pod| !expected.contains(&*pod.name));
        let old = tally.wanted.saturating_sub(tally.updated);
        let what = format!("{old} of {} agents are still to be replaced", tally.wanted);
        let fix = "wait: at most agent.maxUnavailable agents are replaced at a time; a large cluster needs a larger \
                    waitForAgents.timeoutSeconds";
        // Pods that are not waited for may be old too.
        (old > skipped.count()).then(|| finding(about(set), what, fix))
    })
}

/// Pods that could not be created, unless `pod_security` has the reason.
pub(super) fn uncreated(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    of_sets(snapshot, |set, tally| {
        let is_outdated = snapshot.only_agents && !is_observed(set);
        if tally.uncreated() == 0 || is_outdated {
            return None;
        }
        let namespace = set.namespace().unwrap_or_default();
        let object = snapshot.agents.iter().find(|it| it.name == namespace);
        let level = object.and_then(enforced_level);
        let why = object.and_then(|it| rejection(it, set));
        let is_standard = why.map_or_else(
            || level != Some(PRIVILEGED),
            |it| it.contains("PodSecurity"),
        );
        if is_standard && level.is_some_and(|level| level != PRIVILEGED) {
            return None;
        }
        let number = count(tally.uncreated(), "pod");
        let suffix = why.map(|why| format!(": {why}")).unwrap_or_default();
        let what = format!("{number} of {} could not be created{suffix}", tally.wanted);
        let fix = match why {
            Some(_) if is_standard => admit_privileged(&namespace),
            Some(why) if why.contains("security context constraint") => {
                let account = set.account().unwrap_or_default();
                format!("oc adm policy add-scc-to-user privileged -z {account} -n {namespace}")
            }
            Some(_) => {
                "make whatever rejects them admit them; they are then created within minutes"
                    .to_owned()
            }
            None if is_standard => format!(
                "if the cluster enforces a Pod Security standard by default: {}; otherwise kubectl describe daemonset shows what \
                 rejects them",
                admit_privileged(&namespace)
            ),
            None => "kubectl describe daemonset shows what rejects them".to_owned(),
        };
        Some(finding(about(set), what, fix))
    })
}

/// The message of the last event about a pod that could not be created.
fn rejection<'a>(namespace: &'a AgentNamespace, set: &DaemonSet) -> Option<&'a str> {
    let events = items(&namespace.failed_create).iter();
    let name = Some(set.name_any());
    let ours = events.filter(|it| it.involved_object.name == name);
    let last = ours.max_by_key(|it| it.last_timestamp.as_ref().map(|time| time.0))?;
    last.message.as_deref()
}

/// Pods that are not ready, unless all are on nodes that `overlapping_layouts` reports.
pub(super) fn unready(snapshot: &ClusterSnapshot) -> Vec<DoctorFinding> {
    let pods = expected(snapshot);
    let shared = shared_nodes(&pods);
    let is_shared = |pod: &AgentPod| {
        pod.node
            .as_deref()
            .is_some_and(|it| shared.contains_key(it))
    };
    of_sets(snapshot, |set, tally| {
        let name = set.name_any();
        let waiting = pods
            .iter()
            .filter(|pod| pod.set == name && pod.is_waiting());
        let waiting: Vec<&AgentPod> = waiting.copied().collect();
        let is_complete = if snapshot.only_agents {
            waiting.is_empty()
        } else {
            tally.ready >= tally.created
        };
        let is_overlap = !waiting.is_empty() && waiting.iter().all(|pod| is_shared(pod));
        if is_complete || is_overlap {
            return None;
        }
        let ready = format!("{} of {} agents are ready", tally.ready, tally.wanted);
        if waiting.is_empty() {
            let fix = "kubectl get nodes shows nodes that are down; kubectl describe pod shows why an agent is not ready";
            return Some(finding(about(set), ready, fix));
        }
        let (states, fixes) = states(snapshot, set, &waiting);
        Some(finding(about(set), format!("{ready}; {states}"), fixes))
    })
}

/// The states of these pods with their nodes, and what to do about them.
fn states(snapshot: &ClusterSnapshot, set: &DaemonSet, pods: &[&AgentPod]) -> (String, String) {
    let mut states: BTreeMap<(&str, Option<&str>), Vec<&str>> = BTreeMap::new();
    let failed = |pod| {
        let mut namespaces = snapshot.agents.iter();
        namespaces.find_map(|it| layout::missing_directory(items(&it.failed_mount), pod))
    };
    for pod in pods {
        let state = (pod.status.as_str(), failed(pod));
        let nodes = states.entry(state).or_default();
        nodes.extend(pod.node.as_deref());
    }
    let described = states.iter().map(|((state, missing), nodes)| {
        let missing = missing.map(|path| format!(" (no directory {path})"));
        let missing = missing.unwrap_or_default();
        match nodes.as_slice() {
            [] => format!("{state}{missing}"),
            nodes => format!("{state}{missing} on {}", list(nodes)),
        }
    });
    let described: Vec<String> = described.collect();
    let kubepods = |node: &&str| {
        let mut namespaces = snapshot.agents.iter();
        namespaces.find_map(|it| it.kubepods.get(*node).map(String::as_str))
    };
    let fix = |((state, missing), nodes): (&(&str, Option<&str>), &Vec<&str>)| match missing {
        None => fix_of(state).to_owned(),
        Some(path) => layout::fitting_values(set, path, nodes.iter().find_map(kubepods)),
    };
    let fixes: BTreeSet<String> = states.iter().map(fix).collect();
    let fixes: Vec<String> = fixes.into_iter().collect();
    (described.join("; "), fixes.join("; "))
}

/// What to do about a pod in this state.
fn fix_of(state: &str) -> &'static str {
    match state {
        "Pending" => {
            "kubectl describe pod shows what the node of a Pending pod lacks (agent.resources, agent.priorityClassName)"
        }
        "ContainerCreating" => {
            "kubectl describe pod: if it names a directory below /sys/fs/cgroup, the layout does not fit the node \
             (agent.layouts: cgroup v1 or v2, kubepods.slice or kubepods)"
        }
        "ErrImagePull" | "ImagePullBackOff" => {
            "kubectl describe pod shows why the image can't be pulled (image.repository, image.digest, imagePullSecrets)"
        }
        "CrashLoopBackOff" | "Error" => "kubectl logs --previous shows why it exited",
        "Terminating" => {
            "kubectl get nodes: a pod that does not terminate is on a node that is down"
        }
        _ => "kubectl describe pod and kubectl logs show what it waits for",
    }
}

/// Nodes whose agents are not waited for.
pub(super) fn skipped_nodes(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let up = up(snapshot);
    let nodes = names(snapshot);
    let down: Vec<&str> = nodes.filter(|node| !up.contains(node)).collect();
    if down.is_empty() {
        return None;
    }
    let what = format!(
        "not waited for on {} not Ready, or being deleted: {}",
        count(down.len(), "node"),
        list(down)
    );
    let fix = "nothing: an agent starts when its node comes back";
    Some(finding("agents", what, fix))
}

/// Nodes that the image is not for, and where no agent runs.
fn unsupported_nodes(snapshot: &ClusterSnapshot) -> BTreeSet<&str> {
    let running = running(snapshot);
    let nodes = items(&snapshot.nodes).iter();
    let unsupported = nodes.filter(|node| node.unsupported_architecture);
    let unsupported = unsupported.map(|node| node.name.as_str());
    unsupported.filter(|node| !running.contains(node)).collect()
}

/// Nodes of another architecture, which is normal in a cluster of several.
pub(super) fn without_image(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let nodes = unsupported_nodes(snapshot);
    if nodes.is_empty() {
        return None;
    }
    let what = format!(
        "none runs on {} of another architecture than amd64 and arm64: {}",
        count(nodes.len(), "node"),
        list(nodes)
    );
    let fix = "nothing, if no policy is meant for them; otherwise build an image for their architecture, and set image.repository and agent.affinity";
    Some(finding("agents", what, fix))
}

/// Nodes with taints that agents do not tolerate, and where none runs.
fn tainted_nodes(snapshot: &ClusterSnapshot) -> BTreeSet<&str> {
    let (running, sets) = (running(snapshot), items(&snapshot.daemon_sets));
    let is_kept_away = |node: &&AgentNode| {
        let admits = |set: &DaemonSet| node.taints.iter().all(|taint| set.tolerates(taint));
        !sets.is_empty() && !sets.iter().any(admits)
    };
    let tainted = items(&snapshot.nodes).iter().filter(is_kept_away);
    let tainted = tainted.map(|node| node.name.as_str());
    tainted.filter(|node| !running.contains(node)).collect()
}

/// Nodes that agents stay away from, as agent.tolerations may want it.
pub(super) fn without_toleration(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let nodes = tainted_nodes(snapshot);
    if nodes.is_empty() {
        return None;
    }
    let what = format!(
        "none runs on {} with taints that agents do not tolerate: {}",
        count(nodes.len(), "node"),
        list(nodes)
    );
    let fix =
        "nothing, if no policy is meant for them; otherwise add their taints to agent.tolerations";
    Some(finding("agents", what, fix))
}

/// Nodes that no layout selects.
pub(super) fn unselected_nodes(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let unread = snapshot.agents.iter().any(|it| it.pods.is_err());
    if snapshot.agents.is_empty() || unread {
        return None;
    }
    let pods = pods(snapshot);
    let mut excepted = unsupported_nodes(snapshot);
    excepted.extend(tainted_nodes(snapshot));
    let scheduled: BTreeSet<&str> = pods.iter().filter_map(|pod| pod.node.as_deref()).collect();
    let nodes = names(snapshot);
    let has_no_agent = |node: &&str| !scheduled.contains(node) && !excepted.contains(node);
    let without: Vec<&str> = nodes.filter(has_no_agent).collect();
    // `uncreated` and `unready` report pods that have no node yet.
    let sets = items(&snapshot.daemon_sets).iter();
    let uncreated: usize = sets.map(|set| Tally::of(set).uncreated()).sum();
    let unscheduled = pods.iter().filter(|pod| pod.node.is_none()).count();
    if without.len() <= uncreated + unscheduled {
        return None;
    }
    let what = format!(
        "none runs on {}: {}",
        count(without.len(), "node"),
        list(without)
    );
    let fix = "add an entry to agent.layouts that fits them: nodeSelector, cgroup, kubepods";
    Some(finding("agents", what, fix))
}

/// Agents of another version than this command, whose checks may not apply to them.
pub(super) fn versions(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let ours = env!("CARGO_PKG_VERSION");
    let rows = snapshot
        .watermarks
        .iter()
        .flat_map(|it| it.cells(["Agent"]));
    let others = rows.map(|[version]| version);
    let others: BTreeSet<&str> = others.filter(|it| !it.is_empty() && *it != ours).collect();
    if others.is_empty() {
        return None;
    }
    let what = format!(
        "some have version {}, and this command has {ours}",
        list(others)
    );
    let fix =
        "run plimsoll of their version, or upgrade them; during an upgrade, wait until it is done";
    Some(finding("agents", what, fix))
}

/// The last renewal of an agent's Lease.
struct Heartbeat<'a> {
    node: &'a str,
    age: SignedDuration,
    duration: SignedDuration,
}

fn heartbeats(snapshot: &ClusterSnapshot) -> impl Iterator<Item = Heartbeat<'_>> {
    items(&snapshot.leases).iter().filter_map(|lease| {
        let spec = lease.spec.as_ref()?;
        let duration = spec.lease_duration_seconds.unwrap_or(0);
        Some(Heartbeat {
            node: lease.metadata.name.as_deref()?,
            age: snapshot.now.duration_since(spec.renew_time.as_ref()?.0),
            duration: SignedDuration::from_secs(duration.into()),
        })
    })
}

/// A finding about these nodes, if any.
fn of_nodes(
    about: &str,
    nodes: &BTreeSet<&str>,
    one: &str,
    what: &str,
    fix: &str,
) -> Option<DoctorFinding> {
    let what = format!("{} {what}: {}", count(nodes.len(), one), list(nodes));
    (!nodes.is_empty()).then(|| finding(about, what, fix))
}

/// Running agents without a Lease.
pub(super) fn missing_leases(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    if snapshot.leases.is_err() {
        return None;
    }
    let mut without = running(snapshot);
    for heartbeat in heartbeats(snapshot) {
        without.remove(heartbeat.node);
    }
    let what = format!("without a Lease in {}", snapshot.lease_namespace);
    let fix = "kubectl logs of the agent shows the response of the API server";
    of_nodes("heartbeats", &without, "agent", &what, fix)
}

/// The nodes whose heartbeats are so.
fn nodes_where<'a>(
    snapshot: &'a ClusterSnapshot,
    is: impl Fn(&Heartbeat<'a>) -> bool,
) -> BTreeSet<&'a str> {
    let nodes: BTreeSet<&str> = names(snapshot).collect();
    let found = heartbeats(snapshot).filter(|it| is(it));
    let found = found.map(|it| it.node);
    found.filter(|node| nodes.contains(node)).collect()
}

/// Agents that no longer renew their Lease.
pub(super) fn unresponsive(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let nodes = nodes_where(snapshot, |it| it.age > it.duration + GRACE);
    let fix = "if kubectl get nodes shows NotReady, repair the node; otherwise plimsoll top shows since when, and kubectl logs of \
                the agent why; compare `date` there and here";
    let what = "unresponsive, or with a clock that is behind";
    of_nodes("heartbeats", &nodes, "agent", what, fix)
}

/// Nodes whose clocks are ahead.
pub(super) fn clocks(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let nodes = nodes_where(snapshot, |it| it.age < -MAX_CLOCK_SKEW);
    let fix = "compare `date` there and here, and synchronize the clocks with NTP";
    let what = "ahead of this machine by more than 5 s";
    of_nodes("clocks", &nodes, "clock", what, fix)
}
