//! Our taint and condition on a real API server, with other writers of the same Node.

use std::time::Duration;

use crate::api_support::faults::{Fault, Proxy};
use crate::api_support::{ControlPlane, now};
use k8s_openapi::api::core::v1::{Node, Taint};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use plimsoll::agent::taint::{TaintState, WantedTaint, WatchedNode, run};
use plimsoll::cluster::taint::{self, CONDITION, DesiredTaint, KEY, NodeSnapshot, NodeTaint};
use plimsoll::engine::plan::Scheduling;
use plimsoll::engine::policy::{RuleId, TaintEffect};
use serde_json::{Value, json};
use tokio::sync::watch;

const NODE: &str = "node00";
const TIMEOUT: Duration = Duration::from_secs(30);

async fn start() -> Option<(ControlPlane, Client, Api<Node>)> {
    let plane = ControlPlane::start()?;
    plane.nodes(&[NODE.to_owned()]);
    let client = plane.connect().await;
    let nodes = Api::all(client.clone());
    Some((plane, client, nodes))
}

fn node_taint(effect: TaintEffect) -> NodeTaint {
    NodeTaint {
        effect,
        reason: "watermark1/cpu".to_owned(),
        message: "cpu_total_usage 7200m is above 4000m".to_owned(),
    }
}

async fn taints(nodes: &Api<Node>) -> Vec<Taint> {
    let node = nodes.get(NODE).await.unwrap();
    let mut taints = node.spec.unwrap().taints.unwrap_or_default();
    // An API server sets it on every new node.
    taints.retain(|taint| taint.key != "node.kubernetes.io/not-ready");
    taints
}

async fn ours(nodes: &Api<Node>) -> Vec<String> {
    let taints = taints(nodes).await;
    let ours = taints.into_iter().filter(|taint| taint.key == KEY);
    ours.map(|taint| taint.effect).collect()
}

async fn condition(nodes: &Api<Node>) -> Value {
    let node = nodes.get(NODE).await.unwrap();
    let conditions = json!(node.status.unwrap().conditions);
    let ours = conditions.as_array().into_iter().flatten();
    let mut ours = ours.filter(|condition| condition["type"] == CONDITION);
    ours.next().cloned().unwrap_or(Value::Null)
}

/// Writes its own taint repeatedly with new values, as another controller does; panics if its last one was lost.
async fn other_writer(nodes: Api<Node>, key: String, rounds: u32) {
    for round in 0..rounds {
        tokio::time::sleep(Duration::from_millis(100)).await;
        loop {
            let mut node = nodes.get(NODE).await.unwrap();
            let taints = node
                .spec
                .get_or_insert_default()
                .taints
                .get_or_insert_default();
            let before = taints.iter().position(|taint| taint.key == key);
            let expected = round.checked_sub(1).map(|last| last.to_string());
            let there = before.map(|index| taints[index].value.clone().unwrap());
            assert_eq!(there, expected, "{key} was lost");
            if let Some(index) = before {
                taints.remove(index);
            }
            taints.push(Taint {
                key: key.clone(),
                value: Some(round.to_string()),
                effect: "NoSchedule".to_owned(),
                time_added: None,
            });
            match nodes.replace(NODE, &PostParams::default(), &node).await {
                Ok(_) => break,
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// Writes the condition Ready as the kubelet does.
async fn kubelet(nodes: Api<Node>, rounds: u32) {
    for round in 0..rounds {
        tokio::time::sleep(Duration::from_millis(30)).await;
        let ready = json!({"type": "Ready", "status": "True", "reason": "KubeletReady", "message": round.to_string()});
        let patch = Patch::Strategic(json!({"status": {"conditions": [ready]}}));
        nodes
            .patch_status(NODE, &PatchParams::default(), &patch)
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn no_taint_is_lost_with_concurrent_writers() {
    const ROUNDS: u32 = 25;
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let others: Vec<String> = (0..5).map(|index| format!("example.com/{index}")).collect();
    let mut writers = tokio::task::JoinSet::new();
    for key in &others {
        writers.spawn(other_writer(nodes.clone(), key.clone(), ROUNDS));
    }
    writers.spawn(kubelet(nodes.clone(), 3 * ROUNDS));
    let (mut done, mut contended) = (0, 0);
    while !writers.is_empty() {
        for wanted in [
            Some(node_taint(TaintEffect::PreferNoSchedule)),
            Some(node_taint(TaintEffect::NoSchedule)),
            None,
        ] {
            let seen = taint::read(&client, NODE).await.unwrap();
            match taint::reconcile(
                &client,
                seen,
                wanted
                    .as_ref()
                    .map_or(DesiredTaint::Absent, DesiredTaint::Present),
            )
            .await
            {
                Ok(after) => {
                    assert_eq!(after.effect(), wanted.map(|taint| taint.effect));
                    done += 1;
                }
                Err(taint::TaintError::Contended(_)) => contended += 1,
                Err(error) => panic!("{error}"),
            }
        }
        while let Some(ended) = writers.try_join_next() {
            ended.unwrap();
        }
    }
    println!(
        "{done} edits of ours between {} of others, {contended} given up",
        5 * ROUNDS
    );
    // How many depends on the machine; the agent retries those that are given up.
    assert!(done >= 3, "{done} done, {contended} given up");
    let seen = taint::read(&client, NODE).await.unwrap();
    let strong = node_taint(TaintEffect::NoSchedule);
    taint::reconcile(&client, seen, DesiredTaint::Present(&strong))
        .await
        .unwrap();
    let left = taints(&nodes).await;
    assert_eq!(left.len(), others.len() + 1, "{left:?}");
    for key in &others {
        let found = left.iter().find(|taint| taint.key == *key).unwrap();
        assert_eq!(found.value.as_deref(), Some("24"));
    }
    let node = nodes.get(NODE).await.unwrap();
    let conditions = node.status.unwrap().conditions.unwrap();
    let ready = conditions.iter().find(|it| it.type_ == "Ready").unwrap();
    assert_eq!(ready.message.as_deref(), Some("74"));
}

async fn reconcile(client: &Client, seen: NodeSnapshot, wanted: DesiredTaint<'_>) -> NodeSnapshot {
    taint::reconcile(client, seen, wanted).await.unwrap()
}

#[tokio::test]
async fn the_condition_changes_its_time_only_with_its_status() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let strong = node_taint(TaintEffect::NoSchedule);
    let seen = taint::read(&client, NODE).await.unwrap();
    let seen = reconcile(&client, seen, DesiredTaint::Absent).await;
    assert_eq!(
        condition(&nodes).await,
        Value::Null,
        "nothing is written while all is normal"
    );
    let seen = reconcile(&client, seen, DesiredTaint::Present(&strong)).await;
    assert_eq!(ours(&nodes).await, ["NoSchedule"]);
    let on = condition(&nodes).await;
    assert_eq!(on["status"], "True");
    assert_eq!(on["reason"], "watermark1/cpu");
    assert_eq!(on["message"], "cpu_total_usage 7200m is above 4000m");
    let version = seen.version.clone();
    let seen = reconcile(&client, seen, DesiredTaint::Present(&strong)).await;
    assert_eq!(
        seen.version, version,
        "an unchanged condition is not written"
    );
    let other = NodeTaint {
        reason: "watermark1/memory".to_owned(),
        ..strong
    };
    // Wait for a second to pass: times in conditions have no fractions.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let seen = reconcile(&client, seen, DesiredTaint::Present(&other)).await;
    let renamed = condition(&nodes).await;
    assert_eq!(renamed["reason"], "watermark1/memory");
    assert_eq!(renamed["lastTransitionTime"], on["lastTransitionTime"]);
    let seen = reconcile(&client, seen, DesiredTaint::Absent).await;
    assert!(ours(&nodes).await.is_empty());
    let off = condition(&nodes).await;
    assert_eq!(off["status"], "False");
    assert_ne!(off["lastTransitionTime"], on["lastTransitionTime"]);

    let conditions = async || {
        let status = nodes.get(NODE).await.unwrap().status.unwrap_or_default();
        status.conditions.unwrap_or_default().len()
    };
    let (all, before) = (conditions().await, taints(&nodes).await);
    let seen = reconcile(&client, seen, DesiredTaint::Removed).await;
    assert_eq!(condition(&nodes).await, Value::Null, "no trace is left");
    assert_eq!(conditions().await, all - 1, "other conditions stay");
    assert_eq!(taints(&nodes).await, before);
    reconcile(&client, seen, DesiredTaint::Present(&other)).await;
    assert_eq!(condition(&nodes).await["status"], "True");
}

#[tokio::test]
async fn a_stale_node_does_no_harm_and_a_recreated_one_is_not_written() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let old = taint::read(&client, NODE).await.unwrap();
    other_writer(nodes.clone(), "example.com/x".to_owned(), 1).await;
    let strong = node_taint(TaintEffect::NoSchedule);
    taint::reconcile(&client, old.clone(), DesiredTaint::Present(&strong))
        .await
        .unwrap();
    assert_eq!(taints(&nodes).await.len(), 2);
    let node = nodes.get(NODE).await.unwrap();
    nodes
        .delete(NODE, &kube::api::DeleteParams::default())
        .await
        .unwrap();
    let gone = taint::reconcile(&client, old.clone(), DesiredTaint::Present(&strong)).await;
    assert!(
        matches!(gone, Err(taint::TaintError::NoNode(..))),
        "{gone:?}"
    );
    let mut recreated = Node::default();
    recreated.metadata.name = node.metadata.name;
    nodes
        .create(&PostParams::default(), &recreated)
        .await
        .unwrap();
    let replaced = taint::reconcile(&client, old, DesiredTaint::Present(&strong)).await;
    assert!(
        matches!(replaced, Err(taint::TaintError::Replaced(..))),
        "{replaced:?}"
    );
    assert!(taints(&nodes).await.is_empty());
}

#[tokio::test]
async fn a_refusal_by_a_cluster_policy_is_reported_with_its_message() {
    let Some((plane, client, nodes)) = start().await else {
        return;
    };
    let kind = |kind: &str, spec: Value| {
        json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
            "metadata": {"name": "no-closing"}, "spec": spec,
        })
    };
    let open = format!("object.spec.?taints.orValue([]).all(taint, taint.key != '{KEY}')");
    plane.apply(&[
        kind("ValidatingAdmissionPolicy", json!({
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["nodes"],
            }]},
            "validations": [{"expression": open, "message": "here nodes stay open"}],
        })),
        kind("ValidatingAdmissionPolicyBinding", json!({
            "policyName": "no-closing", "validationActions": ["Deny"],
        })),
    ]);
    let taint = format!("{KEY}=:NoSchedule");
    let dry = ["taint", "node", NODE, &taint, "--dry-run=server"];
    plane.until("the policy is in force", TIMEOUT, |plane| {
        plane
            .try_kubectl(&dry, "")
            .is_err_and(|why| why.contains("here nodes stay open"))
    });
    let proxy = Proxy::start(client.clone()).await;
    let seen = taint::read(&client, NODE).await.unwrap();
    let strong = node_taint(TaintEffect::NoSchedule);
    let refused = taint::reconcile(&proxy.client(), seen, DesiredTaint::Present(&strong)).await;
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("here nodes stay open"), "{why}");
    let tries = proxy.take_seen();
    let tries = tries.iter().filter(|(method, _)| method == "PATCH").count();
    assert_eq!(tries, 1);
    assert!(ours(&nodes).await.is_empty());
}

/// The task with its inputs and outputs.
struct Task {
    wanted: watch::Sender<WantedTaint>,
    node: watch::Sender<WatchedNode>,
    taint_state: watch::Receiver<TaintState>,
    client: Client,
}

impl Task {
    fn start(client: Client) -> Self {
        let (wanted, wanted_receiver) = watch::channel(WantedTaint::default());
        let (node, nodes) = watch::channel(WatchedNode::default());
        let (states, taint_state) = watch::channel(TaintState::default());
        tokio::spawn(run(client.clone(), wanted_receiver, nodes, states));
        Self {
            wanted,
            node,
            taint_state,
            client,
        }
    }

    fn set_wanted(&self, scheduling: Scheduling) {
        let message = "cpu_total_usage 7200m is above 4000m".to_owned();
        self.wanted.send_replace(WantedTaint {
            scheduling,
            message,
            remove_condition: false,
            busy: false,
        });
    }

    /// Passes the current Node as the agent's watch would.
    async fn observe(&self, client: &Client) {
        let seen = taint::read(client, NODE).await.unwrap();
        self.node.send_replace(WatchedNode {
            node: Some(seen),
            lists: 1,
        });
    }

    async fn until(&mut self, what: &str, holds: impl FnMut(&TaintState) -> bool) {
        let in_time = tokio::time::timeout(TIMEOUT, self.taint_state.wait_for(holds))
            .await
            .is_ok();
        assert!(
            in_time,
            "not in time: {what}: {:?}",
            self.taint_state.borrow()
        );
    }
}

fn disabled() -> Scheduling {
    Scheduling::Disabled {
        effect: TaintEffect::NoSchedule,
        rules: vec![RuleId::from("watermark1/cpu")],
    }
}

async fn remove_taint(nodes: &Api<Node>) {
    let patch = Patch::Merge(json!({"spec": {"taints": null}}));
    nodes
        .patch(NODE, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn the_task_keeps_the_wanted_taint_and_does_not_fight_other_writers() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let left = node_taint(TaintEffect::PreferNoSchedule);
    let seen = taint::read(&client, NODE).await.unwrap();
    taint::reconcile(&client, seen, DesiredTaint::Present(&left))
        .await
        .unwrap();
    let mut task = Task::start(client.clone());
    task.observe(&client).await;
    task.until("the taint of a dead agent is seen", |it| {
        it.effect.is_some()
    })
    .await;
    task.set_wanted(Scheduling::Unchanged);
    task.set_wanted(disabled());
    task.until("the taint is as strong as wanted", |it| {
        it.effect == Some(TaintEffect::NoSchedule)
    })
    .await;
    assert_eq!(ours(&nodes).await, ["NoSchedule"]);
    for _ in 0..3 {
        remove_taint(&nodes).await;
        task.observe(&client).await;
        let started = now();
        while ours(&nodes).await.is_empty() {
            assert!(started.elapsed() < TIMEOUT, "it was not restored");
        }
        task.observe(&client).await;
    }
    remove_taint(&nodes).await;
    task.observe(&client).await;
    task.until("repeated removals are reported", |it| it.contested)
        .await;
    assert!(ours(&nodes).await.is_empty(), "and not written again");
    task.set_wanted(Scheduling::Enabled);
    task.until("it is not contested any more", |it| !it.contested)
        .await;
    let started = now();
    while condition(&nodes).await["status"] != "False" {
        assert!(started.elapsed() < TIMEOUT, "the condition was not updated");
    }
}

#[tokio::test]
async fn during_an_outage_requests_are_rare_and_it_catches_up_afterwards() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let proxy = Proxy::start(client.clone()).await;
    proxy.respond_with(|_, _| Some(Fault::CutBefore));
    let mut task = Task::start(proxy.client());
    task.observe(&client).await;
    task.set_wanted(disabled());
    task.until("the failure is reported", |it| it.failing.is_some())
        .await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let requests = proxy.take_seen().len();
    assert!((2..=4).contains(&requests), "{requests} requests in 4 s");
    proxy.respond_with(|_, _| None);
    task.until("it has caught up", |it| it.effect.is_some())
        .await;
    assert_eq!(task.taint_state.borrow().failing, None);
    assert_eq!(ours(&nodes).await, ["NoSchedule"]);
    assert!(proxy.take_seen().len() <= 4);
    drop(task.client);
}

#[tokio::test]
async fn taint_and_condition_are_both_written_despite_failures() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let proxy = Proxy::start(client.clone()).await;
    let faults = [
        Fault::CutAfter,
        Fault::Answer(500, None, "boom".to_owned()),
        Fault::Answer(429, Some(1), "Too many requests".to_owned()),
        Fault::Answer(409, None, "conflict".to_owned()),
    ];
    let mut task = Task::start(proxy.client());
    for (index, fault) in faults.into_iter().enumerate() {
        // Each first PATCH of taint and of condition gets this fault.
        let left = std::sync::Mutex::new(vec![false, true]);
        proxy.respond_with(move |method, path| {
            let mut left = left.lock().unwrap();
            let position = left
                .iter()
                .position(|status| path.contains("/status") == *status)?;
            (method == "PATCH").then(|| left.remove(position))?;
            Some(fault.clone())
        });
        task.observe(&client).await;
        let on = index % 2 == 0;
        task.set_wanted(if on { disabled() } else { Scheduling::Enabled });
        task.until("both are written", |it| {
            it.effect.is_some() == on && it.failing.is_none()
        })
        .await;
        let started = now();
        let status = if on { "True" } else { "False" };
        while condition(&nodes).await["status"] != status {
            assert!(started.elapsed() < TIMEOUT, "the condition is not {status}");
        }
        assert_eq!(ours(&nodes).await.len(), usize::from(on));
    }
}
