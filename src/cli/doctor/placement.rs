//! Checks of placement by load: the nodes' load labels, and what makes schedulers read them.

use std::collections::BTreeMap;

use jiff::SignedDuration;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use kube::{Api, Client, ResourceExt as _};

use super::finding::{DoctorFinding, finding, list as names};
use super::pods::running;
use super::scheduler_api::{self, ReplicaMetrics};
use super::snapshot::{
    AgentNode, ClusterSnapshot, InstalledWorkload as _, OURS, Read, SnapshotError, arguments,
    items, list, ours, read,
};
use crate::crd::NodeMetric;
use crate::crd::crane_annotations::Zone;
use crate::crd::load_label::LoadLabel;

/// The API group of Karpenter.
const KARPENTER: &str = "karpenter.sh";
/// The label of namespaces whose pods the admission policy changes.
const BY_LOAD: &str = "plimsoll.dev/placement=by-load";
const DOCS: &str = "docs/scheduling.md";
const INTEGRATIONS: &str = "docs/scheduling-integrations.md";
/// The agents' option for crane-scheduler's annotations.
const CRANE: &str = "--crane-annotations=";
/// The controller's option for exporters.
const POLL: &str = "--poll=";
/// Agents write these at least every 6 minutes, and on many thousand nodes every 12.
const MAX_CRANE_AGE: SignedDuration = SignedDuration::from_mins(15);

/// A label that is behind by more steps than these is written at once.
const MAX_LABEL_LAG: u8 = 3;

/// The loads that agents report, and what makes schedulers read their labels.
#[derive(Debug)]
pub(super) struct PlacementState {
    /// The load in percent that the agent of each node reports.
    pub loads: Read<Vec<(String, Option<f64>)>>,
    /// The chart's `MutatingAdmissionPolicies`; none where these are not served.
    pub policies: Read<Vec<String>>,
    /// Namespaces whose pods they change.
    pub namespaces: Read<Vec<String>>,
    /// The second scheduler.
    pub schedulers: Read<Vec<Deployment>>,
    /// All API groups.
    pub groups: Read<Vec<String>>,
    /// The controller's replicas that serve schedulers, as far as they can be asked.
    pub replicas: Vec<ReplicaMetrics>,
}

impl PlacementState {
    /// With `--only agents`.
    pub(super) fn unread() -> Self {
        Self {
            loads: Err(SnapshotError::default()),
            policies: Err(SnapshotError::default()),
            namespaces: Err(SnapshotError::default()),
            schedulers: Err(SnapshotError::default()),
            groups: Err(SnapshotError::default()),
            replicas: Vec::new(),
        }
    }

    pub(super) async fn read(client: &Client, controllers: &Read<Vec<Deployment>>) -> Self {
        let namespaces: Api<Namespace> = Api::all(client.clone());
        let by_load = ListParams::default().labels(BY_LOAD);
        let groups = read(client.list_api_groups()).await;
        let metrics: Api<NodeMetric> = Api::all(client.clone());
        let load = |it: NodeMetric| (it.name_any(), it.status.load.map(|load| load.percent));
        Self {
            loads: list(metrics, ListParams::default(), load).await,
            policies: policies(client).await,
            namespaces: list(namespaces, by_load, |it| it.name_any()).await,
            schedulers: ours(client, "scheduler").await,
            groups: groups.map(|all| all.groups.into_iter().map(|it| it.name).collect()),
            replicas: scheduler_api::replicas(client, controllers).await,
        }
    }
}

async fn policies(client: &Client) -> Read<Vec<String>> {
    let of = async |version| {
        let kind = GroupVersionKind::gvk(
            "admissionregistration.k8s.io",
            version,
            "MutatingAdmissionPolicy",
        );
        let kind = ApiResource::from_gvk_with_plural(&kind, "mutatingadmissionpolicies");
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind);
        let labels = format!("{OURS},app.kubernetes.io/component=placement");
        list(api, ListParams::default().labels(&labels), |it| {
            it.name_any()
        })
        .await
    };
    match of("v1").await {
        Err(error) if error.is_missing() => match of("v1beta1").await {
            Err(error) if error.is_missing() => Ok(Vec::new()),
            read => read,
        },
        read => read,
    }
}

fn has_argument(snapshot: &ClusterSnapshot, argument: &str) -> bool {
    let mut sets = items(&snapshot.daemon_sets).iter();
    sets.any(|set| set.argument(argument).contains(&""))
}

/// Karpenter takes a node with the soft taint for closed.
pub(super) fn soft_taint_with_karpenter(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let groups = items(&snapshot.placement.groups);
    if !has_argument(snapshot, "--soft-taint") || !groups.iter().any(|it| it == KARPENTER) {
        return None;
    }
    let what = "Karpenter runs here and takes a node with the soft taint plimsoll.dev/busy for closed: it adds nodes instead";
    let fix = format!(
        "helm upgrade with placement.softTaint.enabled=false, or give every NodePool a PreferNoSchedule taint ({INTEGRATIONS}#karpenter)"
    );
    Some(finding("soft taint", what, fix))
}

/// The nodes with a running agent for which this holds.
fn nodes_where(snapshot: &ClusterSnapshot, holds: impl Fn(&AgentNode) -> bool) -> Vec<&str> {
    let agents = running(snapshot);
    let nodes = items(&snapshot.nodes).iter();
    nodes
        .filter(|node| node.ready && agents.contains(&*node.name) && holds(node))
        .map(|node| node.name.as_str())
        .collect()
}

/// Nodes with a running agent and no valid label.
pub(super) fn unlabelled_nodes(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    if !has_argument(snapshot, "--load-label=true") {
        return None;
    }
    let lacks = |label: &Option<String>| label.as_deref().and_then(LoadLabel::parse).is_none();
    let nodes = nodes_where(snapshot, |node| lacks(&node.load_label));
    if nodes.is_empty() {
        return None;
    }
    let what = format!(
        "nodes without a valid label plimsoll.dev/load, which count as loaded by 80: {}",
        names(nodes)
    );
    let fix = "wait a minute if the agents have just started; else see whether `kubectl get nodemetrics` shows their LOAD, and the agents' logs";
    Some(finding("load label", what, fix))
}

/// Nodes that are far more loaded than their labels say: pods are attracted to them.
pub(super) fn low_labels(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    if !has_argument(snapshot, "--load-label=true") {
        return None;
    }
    let loads = items(&snapshot.placement.loads).iter();
    let loads: BTreeMap<&str, f64> = loads
        .filter_map(|(name, load)| Some((&**name, (*load)?)))
        .collect();
    let low = items(&snapshot.nodes).iter().filter_map(|node| {
        let label = node.load_label.as_deref().and_then(LoadLabel::parse)?;
        let load = *loads.get(&*node.name)?;
        let reported = LoadLabel::of(load)?;
        let is_low = label.headroom() > reported.headroom() + MAX_LABEL_LAG;
        is_low.then(|| format!("{} ({label}, load {load:.0})", node.name))
    });
    let low: Vec<String> = low.collect();
    if low.is_empty() {
        return None;
    }
    let what = format!(
        "nodes whose label plimsoll.dev/load is far below the load that their agents report: {}",
        names(low)
    );
    let fix = "run this again in a minute; if it stays, see the agents' logs: their changes of the Node are refused, or another client changes the label";
    Some(finding("load label", what, fix))
}

/// Nodes on which another writer sets crane's annotations beside the agent.
pub(super) fn other_crane_writers(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    if arguments(&snapshot.daemon_sets, CRANE).is_empty() {
        return None;
    }
    let nodes = nodes_where(snapshot, |node| node.crane.others().next().is_some());
    if nodes.is_empty() {
        return None;
    }
    let what = format!(
        "another writer sets annotations for crane-scheduler that the agents write: {}",
        names(nodes)
    );
    let fix = format!(
        "kubectl delete deployment crane-scheduler-controller -n crane-system, if it is crane's own controller ({INTEGRATIONS}#crane-scheduler)"
    );
    Some(finding("crane annotations", what, fix))
}

/// Nodes whose agent does not renew crane's annotations.
pub(super) fn stale_crane_annotations(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let zones = arguments(&snapshot.daemon_sets, CRANE);
    let zone: Zone = zones.first()?.parse().ok()?;
    let is_stale = |node: &AgentNode| {
        let written = node.crane.written().and_then(|time| zone.parse(time));
        written.is_none_or(|written| snapshot.now.duration_since(written) > MAX_CRANE_AGE)
    };
    let nodes = nodes_where(snapshot, is_stale);
    if nodes.is_empty() {
        return None;
    }
    let what = format!(
        "nodes without current annotations for crane-scheduler, which gives them a score of 0: {}",
        names(nodes)
    );
    let fix = "wait some minutes if the agents have just started; else see the agents' logs";
    Some(finding("crane annotations", what, fix))
}

/// The label alone changes nothing.
pub(super) fn unread_label(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let PlacementState {
        policies,
        schedulers,
        ..
    } = &snapshot.placement;
    let (Ok(policies), Ok(schedulers)) = (policies, schedulers) else {
        return None;
    };
    if !has_argument(snapshot, "--load-label=true")
        || has_argument(snapshot, "--soft-taint")
        || !arguments(&snapshot.daemon_sets, CRANE).is_empty()
        || !policies.is_empty()
        || !schedulers.is_empty()
        || scheduler_api::is_on(snapshot)
    {
        return None;
    }
    let what = "nodes are labelled with their load, and nothing of this release makes schedulers read that";
    let fix = format!(
        "nothing, if the cluster's own scheduler is configured to; otherwise turn on what fits: {DOCS}#what-to-turn-on"
    );
    Some(finding("load label", what, fix))
}

/// Polled loads that schedulers cannot ask for.
pub(super) fn unread_polling(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let has = |argument| !arguments(&snapshot.deployments, argument).is_empty();
    if !has(POLL) || scheduler_api::is_on(snapshot) {
        return None;
    }
    let what = "the controller polls the load of nodes, and schedulers cannot ask it: the figures are in NodeMetrics only";
    let fix =
        format!("helm upgrade with placement.schedulerAPI.enabled=true ({INTEGRATIONS}#polling)");
    Some(finding("polling", what, fix))
}

/// An admission policy that concerns no namespace.
pub(super) fn policy_without_namespaces(snapshot: &ClusterSnapshot) -> Option<DoctorFinding> {
    let policy = items(&snapshot.placement.policies).first()?;
    let namespaces = snapshot.placement.namespaces.as_ref().ok()?;
    namespaces.is_empty().then(|| {
        let fix = format!("kubectl label namespace NAMESPACE {BY_LOAD}");
        let what = format!("no namespace has the label {BY_LOAD}: it changes no pod");
        finding(format!("MutatingAdmissionPolicy {policy}"), what, fix)
    })
}

/// What places pods by load, in words; `None` if nothing of this release does.
pub(super) fn in_effect(snapshot: &ClusterSnapshot) -> Option<String> {
    let placement = &snapshot.placement;
    let mut ways = Vec::new();
    let namespaces = items(&placement.namespaces).len();
    if !items(&placement.policies).is_empty() && namespaces > 0 {
        ways.push(format!("the admission policy ({namespaces} namespaces)"));
    }
    if !items(&placement.schedulers).is_empty() {
        ways.push("the second scheduler".to_owned());
    }
    if has_argument(snapshot, "--soft-taint") {
        ways.push("the soft taint".to_owned());
    }
    if let [zone, ..] = arguments(&snapshot.daemon_sets, CRANE).as_slice() {
        ways.push(format!("annotations for a crane-scheduler with TZ={zone}"));
    }
    if scheduler_api::is_on(snapshot) {
        ways.push("requests of schedulers to the controller".to_owned());
    }
    (!ways.is_empty()).then(|| {
        let ways = ways.join(", ");
        format!("placement by load: {ways}; what outweighs it: {DOCS}#what-it-cannot-do")
    })
}
