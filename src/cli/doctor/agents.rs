//! Whether every node has its one agent that works, and what keeps it from that.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::finding::{Finding, INSTALL, finding, full_name, items, list};
use super::read::{Seen, account};
use super::tables::{Pod, cells, names, pods, running, unique};
use crate::node::machine::wording::count;

/// A node's clock that is ahead of ours by more is wrong, or ours is.
const AHEAD: SignedDuration = SignedDuration::from_secs(5);
/// A Lease that ran out so long ago is a silent agent's.
const GRACE: Duration = Duration::from_secs(10);
/// To which Pod Security standard a namespace holds its pods.
const ENFORCE: &str = "pod-security.kubernetes.io/enforce";
const PRIVILEGED: &str = "privileged";
/// Where the cgroups of a node are, and the trees that it has of version 1.
const CGROUPS: &str = "/sys/fs/cgroup/";
const V1_TREES: [&str; 3] = ["cpu", "cpuacct", "memory"];
/// Where a pod is that no node was found for.
const NOWHERE: &str = "<none>";

/// A namespace that says that it admits no pod that mounts cgroups.
pub(super) fn privileged(seen: &Seen) -> Vec<Finding> {
    let held = seen.namespaces.iter().filter_map(|(name, object)| {
        let level = object.as_ref().ok()?["metadata"]["labels"][ENFORCE].as_str()?;
        let what = format!("{ENFORCE} is {level}: it admits no pod that mounts cgroups");
        (level != PRIVILEGED).then(|| finding(format!("namespace {name}"), what, admit(name)))
    });
    held.collect()
}

/// What has a namespace admit agents.
fn admit(namespace: &str) -> String {
    format!("kubectl label namespace {namespace} --overwrite {ENFORCE}={PRIVILEGED}")
}

/// Nodes that more than one layout selects.
pub(super) fn doubled(seen: &Seen) -> Vec<Finding> {
    let pods = pods(seen);
    let doubled = sets_of_doubled(&pods);
    if doubled.is_empty() {
        return Vec::new();
    }
    let sets = unique(doubled.values().flatten().copied());
    let what = format!(
        "agents of more than one layout ({}) on {}: {}",
        list(sets),
        count(doubled.len(), "node"),
        list(doubled.into_keys())
    );
    let cure =
        "only one of them can run: make the nodeSelectors of agent.layouts mutually exclusive";
    vec![finding("agents", what, cure)]
}

/// The `DaemonSet`s that have pods there, of each node where these are several.
fn sets_of_doubled<'a>(pods: &[Pod<'a>]) -> BTreeMap<&'a str, BTreeSet<&'a str>> {
    let mut sets: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for pod in pods {
        if pod.node != NOWHERE && !pod.is_ending() {
            sets.entry(pod.node).or_default().insert(pod.set());
        }
    }
    sets.retain(|_, sets| sets.len() > 1);
    sets
}

/// A `DaemonSet` that has no pods, or whose pods do not come up.
pub(super) fn layouts(seen: &Seen) -> Vec<Finding> {
    if seen.daemon_sets.is_err() {
        return Vec::new();
    }
    let all = items(&seen.daemon_sets);
    if all.is_empty() {
        return vec![finding("agents", "there is no DaemonSet", INSTALL)];
    }
    let pods = pods(seen);
    let doubled = sets_of_doubled(&pods);
    let mut found = Vec::new();
    for set in all {
        let tally = Tally::of(set);
        if tally.wanted == 0 {
            let cure = "label nodes to match its layout's nodeSelector, or remove the layout from agent.layouts";
            found.push(finding(about(set), "it selects no node", cure));
        }
        if tally.unmade() > 0 {
            found.extend(unmade(seen, set, &tally));
        }
        if tally.ready < tally.made {
            found.extend(unready(seen, set, &tally, &pods, &doubled));
        }
    }
    found
}

/// What keeps an upgrade from its end: agents that are not ready, or not replaced yet, on nodes that can have one now.
pub(super) fn rollout(seen: &Seen) -> Vec<Finding> {
    if seen.daemon_sets.is_err() {
        return Vec::new();
    }
    let all = items(&seen.daemon_sets);
    if all.is_empty() {
        return vec![finding("agents", "there is no DaemonSet", INSTALL)];
    }
    let up = up(seen);
    let (waited, others): (Vec<_>, Vec<_>) = pods(seen)
        .into_iter()
        .partition(|pod| pod.node == NOWHERE || up.contains(pod.node));
    let doubled = sets_of_doubled(&waited);
    let mut found = Vec::new();
    for set in &all {
        let tally = Tally::of(set);
        if !is_observed(set) {
            let cure = "check that kube-controller-manager runs: it creates the pods of DaemonSets";
            found.push(finding(
                about(set),
                "its last edit is not observed yet",
                cure,
            ));
        } else if tally.unmade() > 0 {
            found.extend(unmade(seen, set, &tally));
        }
        if waited.iter().any(|pod| is_waiting(pod, set)) {
            found.extend(unready(seen, set, &tally, &waited, &doubled));
        }
        let elsewhere = others.iter().filter(|pod| pod.set() == name(set)).count();
        found.extend(outdated(set, &tally, elsewhere));
    }
    if !up.is_empty() && all.iter().all(|set| Tally::of(set).wanted == 0) {
        let what = "no layout selects any node";
        let cure = "make the nodeSelectors of agent.layouts match the labels of the nodes, or label the nodes";
        found.push(finding("agents", what, cure));
    }
    found
}

/// Nodes where an agent can be ready: neither away nor being deleted.
fn up(seen: &Seen) -> BTreeSet<&str> {
    let nodes = cells(&seen.nodes, ["Name", "Status"]).into_iter();
    let is_up = |status: &str| status.split(',').any(|it| it == "Ready");
    let up = nodes.filter(|[node, status]| is_up(status) && !seen.leaving.contains(*node));
    unique(up.map(|[node, _]| node))
}

/// Nodes that are up and whose agent is not ready.
pub(super) fn waited_for(seen: &Seen) -> BTreeSet<String> {
    let up = up(seen);
    let pods = pods(seen).into_iter();
    let waiting = pods.filter(|pod| up.contains(pod.node) && (pod.is_ending() || !pod.is_ready()));
    waiting.map(|pod| pod.node.to_owned()).collect()
}

/// Nodes whose agents are not waited for.
pub(super) fn away(seen: &Seen) -> Option<Finding> {
    let mut away = names(&seen.nodes);
    let up = up(seen);
    away.retain(|node| !up.contains(node));
    let what = format!(
        "not waited for on {} not Ready, or being deleted: {}",
        count(away.len(), "node"),
        list(away.iter().copied())
    );
    let cure = "nothing: an agent starts when its node comes back";
    (!away.is_empty()).then(|| finding("agents", what, cure))
}

/// The `DaemonSet`'s controller knows it as it is now.
fn is_observed(set: &Value) -> bool {
    set["status"]["observedGeneration"].as_u64() >= set["metadata"]["generation"].as_u64()
}

/// Agents of before the last edit, beside as many as there are `elsewhere`, which may be of before too.
fn outdated(set: &Value, tally: &Tally, elsewhere: usize) -> Option<Finding> {
    let old = usize::try_from(tally.wanted.saturating_sub(tally.updated)).unwrap_or(usize::MAX);
    let what = format!("{old} of {} agents are still to be replaced", tally.wanted);
    let cure = "wait: at most agent.maxUnavailable agents are replaced at a time; a large cluster needs a larger \
                waitForAgents.timeoutSeconds";
    (old > elsewhere).then(|| finding(about(set), what, cure))
}

fn name(set: &Value) -> &str {
    set["metadata"]["name"].as_str().unwrap_or_default()
}

/// A pod of the `DaemonSet` that is not ready.
fn is_waiting(pod: &Pod<'_>, set: &Value) -> bool {
    pod.set() == name(set) && (pod.is_ending() || !pod.is_ready())
}

fn about(it: &Value) -> String {
    format!("DaemonSet {}", full_name(it))
}

/// How many agents a `DaemonSet` has.
struct Tally {
    made: u64,
    ready: u64,
    updated: u64,
    wanted: u64,
}

impl Tally {
    fn of(set: &Value) -> Self {
        let count = |field: &str| set["status"][field].as_u64().unwrap_or(0);
        Self {
            made: count("currentNumberScheduled"),
            ready: count("numberReady"),
            updated: count("updatedNumberScheduled"),
            wanted: count("desiredNumberScheduled"),
        }
    }

    const fn unmade(&self) -> u64 {
        self.wanted.saturating_sub(self.made)
    }
}

/// Nobody lets it make its pods. `None` where its namespace says why.
fn unmade(seen: &Seen, set: &Value, tally: &Tally) -> Option<Finding> {
    let namespace = set["metadata"]["namespace"].as_str().unwrap_or_default();
    let object = seen.namespaces.iter().find(|(name, _)| name == namespace);
    let object = object.and_then(|(_, object)| object.as_ref().ok());
    let level = object.and_then(|it| it["metadata"]["labels"][ENFORCE].as_str());
    let why = refusal(seen, set);
    let is_standard = why.map_or_else(
        || level != Some(PRIVILEGED),
        |why| why.contains("PodSecurity"),
    );
    if is_standard && level.is_some_and(|level| level != PRIVILEGED) {
        return None;
    }
    let lacking = count(usize::try_from(tally.unmade()).unwrap_or(usize::MAX), "pod");
    let what = why.map_or_else(
        || format!("{lacking} of {} could not be created", tally.wanted),
        |why| format!("{lacking} of {} could not be created: {why}", tally.wanted),
    );
    let cure = match why {
        Some(_) if is_standard => admit(namespace),
        Some(why) if why.contains("security context constraint") => {
            let account = account(set).unwrap_or_default();
            format!("oc adm policy add-scc-to-user privileged -z {account} -n {namespace}")
        }
        Some(_) => {
            "make whatever rejects them admit them; they are then created within minutes".to_owned()
        }
        None if is_standard => format!(
            "if the cluster enforces a Pod Security standard by default: {}; otherwise kubectl describe daemonset shows what rejects them",
            admit(namespace)
        ),
        None => "kubectl describe daemonset shows what rejects them".to_owned(),
    };
    Some(finding(about(set), what, cure))
}

/// What the last pod that it could not make was refused for.
fn refusal<'a>(seen: &'a Seen, set: &Value) -> Option<&'a str> {
    let events = seen.refusals.iter().flat_map(items);
    let name = |object: &Value| (object["namespace"].clone(), object["name"].clone());
    let ours = events.filter(|it| name(&it["involvedObject"]) == name(&set["metadata"]));
    let last = ours.max_by_key(|it| it["lastTimestamp"].as_str());
    last?["message"].as_str()
}

/// Its pods are there, and some are not ready. `None` where all these are on nodes that another layout selects too.
fn unready(
    seen: &Seen,
    set: &Value,
    tally: &Tally,
    pods: &[Pod<'_>],
    doubled: &BTreeMap<&str, BTreeSet<&str>>,
) -> Option<Finding> {
    let waiting: Vec<_> = pods.iter().filter(|pod| is_waiting(pod, set)).collect();
    if !waiting.is_empty() && waiting.iter().all(|pod| doubled.contains_key(pod.node)) {
        return None;
    }
    let ready = format!("{} of {} agents are ready", tally.ready, tally.wanted);
    if waiting.is_empty() {
        let cure = "kubectl get nodes shows nodes that are down; kubectl describe pod shows why an agent is not ready";
        return Some(finding(about(set), ready, cure));
    }
    let mut states: BTreeMap<(&str, Option<&str>), Vec<&str>> = BTreeMap::new();
    for pod in waiting {
        let state = (pod.status, missing_folder(seen, pod));
        states.entry(state).or_default().push(pod.node);
    }
    let described = states.iter().map(|((state, missing), nodes)| {
        let missing = missing.map(|folder| format!(" (no directory {folder})"));
        let state = format!("{state}{}", missing.unwrap_or_default());
        let nodes = nodes.iter().copied().filter(|node| *node != NOWHERE);
        match list(nodes).as_str() {
            "" => state,
            nodes => format!("{state} on {nodes}"),
        }
    });
    let described: Vec<String> = described.collect();
    let cure = |(state, missing): (&str, Option<&str>)| {
        missing.map_or_else(|| cure_of(state).to_owned(), |folder| fit(set, folder))
    };
    let cures: BTreeSet<String> = states.into_keys().map(cure).collect();
    let cures: Vec<String> = cures.into_iter().collect();
    let what = format!("{ready}; {}", described.join("; "));
    Some(finding(about(set), what, cures.join("; ")))
}

/// The cgroup of its layout that the node of this pod lacks: of several the outermost.
fn missing_folder<'a>(seen: &'a Seen, pod: &Pod<'_>) -> Option<&'a str> {
    let events = seen.unmounted.iter().flat_map(items);
    let ours = events.filter(|it| it["involvedObject"]["name"] == pod.name);
    let folders = ours.filter_map(|it| {
        let (_, rest) = it["message"]
            .as_str()?
            .split_once("hostPath type check failed: ")?;
        let (folder, _) = rest.split_once(" is not a directory")?;
        folder.starts_with(CGROUPS).then_some(folder)
    });
    folders.min_by_key(|folder| folder.len())
}

/// Which values fit a node that lacks this folder.
fn fit(set: &Value, folder: &str) -> String {
    let layout = &set["metadata"]["labels"]["plimsoll.dev/layout"];
    let entry = format!(
        "in the entry {} of agent.layouts",
        layout.as_str().unwrap_or("?")
    );
    let inner = folder.strip_prefix(CGROUPS).unwrap_or(folder);
    let tree = inner.split('/').next().unwrap_or_default();
    let page = "docs/install.md, \"Which layout\"";
    match (V1_TREES.contains(&tree), tree == inner) {
        (true, true) => format!(
            "{entry} set cgroup to v2 and kubepods to kubepods.slice: the node has no cgroup v1 hierarchy {tree} ({page})"
        ),
        (true, false) => format!(
            "{entry} set kubepods to match the node's kubelet: kubepods for the cgroupfs driver, kubepods.slice for systemd \
             ({page})"
        ),
        (false, _) => format!(
            "{entry} set cgroup to v1 if `stat -fc %T /sys/fs/cgroup` on the node prints tmpfs, else set kubepods to match its \
             kubelet: kubepods.slice for the systemd driver, kubepods for cgroupfs ({page})"
        ),
    }
}

/// What to do about a pod in this state.
fn cure_of(state: &str) -> &'static str {
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

/// Nodes of another architecture, on which no agent runs.
fn foreign<'a>(seen: &'a Seen, pods: &[Pod<'_>]) -> BTreeSet<&'a str> {
    let running = running(pods);
    let mut foreign = names(&seen.foreign);
    foreign.retain(|node| !running.contains(node));
    foreign
}

/// Nodes that no image is for: in a cluster of several architectures that is as it has to be.
pub(super) fn without_image(seen: &Seen) -> Option<Finding> {
    let nodes = foreign(seen, &pods(seen));
    let what = format!(
        "none runs on {} of another architecture than amd64: {}",
        count(nodes.len(), "node"),
        list(nodes.iter().copied())
    );
    let cure = "nothing, if no policy is meant for them; otherwise build an image for their architecture, and set image.repository";
    (!nodes.is_empty()).then(|| finding("agents", what, cure))
}

/// Nodes that no layout selects.
pub(super) fn bare(seen: &Seen) -> Vec<Finding> {
    if seen.agents.is_empty() || seen.agents.iter().any(Result::is_err) || seen.nodes.is_err() {
        return Vec::new();
    }
    let (pods, nodes) = (pods(seen), names(&seen.nodes));
    let foreign = foreign(seen, &pods);
    let placed = unique(pods.iter().map(|pod| pod.node));
    let lacks = |node: &&str| !placed.contains(node) && !foreign.contains(node);
    let without: Vec<&str> = nodes.into_iter().filter(lacks).collect();
    if without.len() <= awaited(seen, &pods) {
        return Vec::new();
    }
    let what = format!(
        "none runs on {}: {}",
        count(without.len(), "node"),
        list(without)
    );
    let cure = "add an entry to agent.layouts that fits them: nodeSelector, cgroup, kubepods";
    vec![finding("agents", what, cure)]
}

/// Pods that would be somewhere if they could; `layouts` tells of them.
fn awaited(seen: &Seen, pods: &[Pod<'_>]) -> usize {
    let sets = items(&seen.daemon_sets).into_iter();
    let unmade: u64 = sets.map(|set| Tally::of(set).unmade()).sum();
    let nowhere = pods.iter().filter(|pod| pod.node == NOWHERE).count();
    usize::try_from(unmade).unwrap_or(usize::MAX) + nowhere
}

/// Agents of another version than this program, of which alone can be said what is right for them.
pub(super) fn versions(seen: &Seen) -> Vec<Finding> {
    let ours = env!("CARGO_PKG_VERSION");
    let agents = cells(&seen.watermarks, ["Agent"]).into_iter();
    let agents = agents.map(|[version]| version);
    let others = unique(agents.filter(|version| !version.is_empty() && *version != ours));
    if others.is_empty() {
        return Vec::new();
    }
    let what = format!(
        "some have version {}, and this command has {ours}",
        list(others)
    );
    let cure =
        "run plimsoll of their version, or upgrade them; during an upgrade, wait until it is done";
    vec![finding("agents", what, cure)]
}

/// Leases that are not there, or are renewed no more, and clocks that are ahead.
pub(super) fn heartbeats(seen: &Seen) -> Vec<Finding> {
    let (known, pods) = (names(&seen.nodes), pods(seen));
    let mut mute = running(&pods);
    let (mut silent, mut ahead) = (Vec::new(), Vec::new());
    for lease in items(&seen.leases) {
        let Some((node, age, lasts)) = heartbeat(seen, lease) else {
            continue;
        };
        mute.remove(node);
        if !known.contains(node) {
            continue;
        }
        if age < -AHEAD {
            ahead.push(node);
        } else if age > SignedDuration::try_from(lasts + GRACE).unwrap_or(SignedDuration::MAX) {
            silent.push(node);
        }
    }
    let mut found = Vec::new();
    let mut tell = |about: &str, nodes: Vec<&str>, one: &str, what: &str, cure: &str| {
        if !nodes.is_empty() {
            let what = format!("{} {what}: {}", count(nodes.len(), one), list(nodes));
            found.push(finding(about, what, cure));
        }
    };
    if seen.leases.is_ok() {
        let cure = "kubectl logs of the agent shows the response of the API server";
        let mute = mute.into_iter().collect();
        let what = format!("without a Lease in {}", seen.lease_namespace);
        tell("heartbeats", mute, "agent", &what, cure);
    }
    let cure = "if kubectl get nodes shows NotReady, repair the node; otherwise plimsoll top shows since when, and kubectl logs of \
                the agent why; compare `date` there and here";
    let what = "unresponsive, or with a clock that is behind";
    tell("heartbeats", silent, "agent", what, cure);
    let cure = "compare `date` there and here, and synchronize the clocks with NTP";
    let what = "ahead of this machine by more than 5 s";
    tell("clocks", ahead, "clock", what, cure);
    found
}

/// Of whom a Lease is, how old it is, and how long it lasts.
fn heartbeat<'a>(seen: &Seen, lease: &'a Value) -> Option<(&'a str, SignedDuration, Duration)> {
    let renewed: Timestamp = lease["spec"]["renewTime"].as_str()?.parse().ok()?;
    let lasts = lease["spec"]["leaseDurationSeconds"].as_u64().unwrap_or(0);
    let node = lease["metadata"]["name"].as_str()?;
    Some((
        node,
        seen.now.duration_since(renewed),
        Duration::from_secs(lasts),
    ))
}
