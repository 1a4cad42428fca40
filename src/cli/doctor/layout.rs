//! The entry of `agent.layouts` that fits a node on which an agent lacks a directory.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::Event;
use kube::{Client, ResourceExt as _};
use serde_json::Value;

use super::pods::AgentPod;
use super::snapshot::read;

/// The root of cgroups, and the hierarchies of cgroup v1 that agents need.
const CGROUPS: &str = "/sys/fs/cgroup/";
const V1_HIERARCHIES: [&str; 3] = ["cpu", "cpuacct", "memory"];
/// Maximum number of kubelets whose configuration is read: others of the same layout are alike.
const MAX_KUBELETS: usize = 5;

/// `kubepods` by node, of nodes on which an agent lacks a directory; empty without permission to get nodes/proxy.
pub(super) async fn kubepods(
    client: &Client,
    failed_mount: &[Event],
    pods: &[AgentPod],
) -> BTreeMap<String, String> {
    let unfit = pods
        .iter()
        .filter(|pod| missing_directory(failed_mount, pod).is_some());
    let nodes: BTreeSet<&str> = unfit.filter_map(|pod| pod.node.as_deref()).collect();
    let mut found = BTreeMap::new();
    for node in nodes.into_iter().take(MAX_KUBELETS) {
        let path = format!("/api/v1/nodes/{node}/proxy/configz");
        let request = async {
            let request = hyper::Request::get(path).body(Vec::new());
            let request = request.map_err(kube::Error::HttpError)?;
            client.request::<Value>(request).await
        };
        let config = read(request).await;
        if let Some(kubepods) = config.ok().as_ref().and_then(kubepods_of) {
            found.insert(node.to_owned(), kubepods);
        }
    }
    found
}

/// The `kubepods` cgroup of a kubelet with this configuration, below the root of cgroups. With the systemd driver each part of
/// `cgroupRoot` is a slice named after its parents.
fn kubepods_of(config: &Value) -> Option<String> {
    let config = config.get("kubeletconfig")?;
    let root = config["cgroupRoot"].as_str().unwrap_or_default();
    let parts = root.split('/').filter(|part| !part.is_empty());
    let parts: Vec<&str> = parts.chain(["kubepods"]).collect();
    let slice = |depth: usize| format!("{}.slice", parts[..=depth].join("-"));
    let path: Vec<String> = match config["cgroupDriver"].as_str()? {
        "systemd" => (0..parts.len()).map(slice).collect(),
        "cgroupfs" => parts.iter().map(ToString::to_string).collect(),
        _ => return None,
    };
    Some(path.join("/"))
}

/// The cgroup directory of its layout that the pod's node lacks; if several, the outermost.
pub(super) fn missing_directory<'a>(events: &'a [Event], pod: &AgentPod) -> Option<&'a str> {
    let events = events.iter();
    let ours = events.filter(|it| it.involved_object.name.as_ref() == Some(&pod.name));
    let paths = ours.filter_map(|it| {
        let message = it.message.as_deref()?;
        let (_, rest) = message.split_once("hostPath type check failed: ")?;
        let (path, _) = rest.split_once(" is not a directory")?;
        path.starts_with(CGROUPS).then_some(path)
    });
    paths.min_by_key(|path| path.len())
}

/// The values of `agent.layouts` that fit a node without this directory, whose kubelet is configured for `kubepods`, if that is
/// known.
pub(super) fn fitting_values(set: &DaemonSet, directory: &str, kubepods: Option<&str>) -> String {
    let layout = set.labels().get("plimsoll.dev/layout");
    let entry = format!(
        "in the entry {} of agent.layouts",
        layout.map_or("?", String::as_str)
    );
    let inner = directory.strip_prefix(CGROUPS).unwrap_or(directory);
    let hierarchy = inner.split('/').next().unwrap_or_default();
    let page = "docs/install.md, \"Which layout\"";
    let configured =
        |kubepods: &str| format!("kubepods to {kubepods}, as its kubelet is configured");
    match (
        V1_HIERARCHIES.contains(&hierarchy),
        hierarchy == inner,
        kubepods,
    ) {
        (true, true, _) => format!(
            "{entry} set cgroup to v2 and kubepods to {}: the node has no cgroup v1 hierarchy {hierarchy} ({page})",
            kubepods.unwrap_or("kubepods.slice")
        ),
        (true, false, Some(kubepods)) => format!("{entry} set {} ({page})", configured(kubepods)),
        (true, false, None) => format!(
            "{entry} set kubepods to match the node's kubelet: kubepods for the cgroupfs driver, kubepods.slice for systemd \
             ({page})"
        ),
        (false, _, Some(kubepods)) => format!(
            "{entry} set {}, and cgroup to v1 if `stat -fc %T /sys/fs/cgroup` on the node prints tmpfs ({page})",
            configured(kubepods)
        ),
        (false, _, None) => format!(
            "{entry} set cgroup to v1 if `stat -fc %T /sys/fs/cgroup` on the node prints tmpfs, else set kubepods to match its \
             kubelet: kubepods.slice for the systemd driver, kubepods for cgroupfs ({page})"
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_kubelet_s_configuration_says_where_its_pods_are() {
        for (driver, root, expected) in [
            ("systemd", json!("/"), "kubepods.slice"),
            ("systemd", json!(null), "kubepods.slice"),
            (
                "systemd",
                json!("/kubelet"),
                "kubelet.slice/kubelet-kubepods.slice",
            ),
            ("cgroupfs", json!(""), "kubepods"),
            ("cgroupfs", json!("/a/b"), "a/b/kubepods"),
        ] {
            let config = json!({"kubeletconfig": {"cgroupDriver": driver, "cgroupRoot": root}});
            assert_eq!(kubepods_of(&config).as_deref(), Some(expected));
        }
        let other = json!({"kubeletconfig": {"cgroupDriver": "other"}});
        assert_eq!(kubepods_of(&other), None);
        assert_eq!(kubepods_of(&json!({})), None);
    }
}
