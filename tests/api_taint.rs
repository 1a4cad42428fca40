//! Our taint and condition on a real API server, beside others who write the same Node.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod api_support;

use std::time::Duration;

use api_support::faults::{Fault, Proxy};
use api_support::{ControlPlane, now};
use k8s_openapi::api::core::v1::{Node, Taint};
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use plimsoll::cluster::client::connect;
use plimsoll::cluster::taint::{self, Bearing, CONDITION, KEY, Mark};
use plimsoll::engine::plan::Scheduling;
use plimsoll::engine::policy::{RuleId, TaintEffect};
use plimsoll::node::actuate::taint::{Standing, Wanted, Watched, run};
use serde_json::{Value, json};
use tokio::sync::watch;

const NODE: &str = "node00";
const SOON: Duration = Duration::from_secs(30);

async fn start() -> Option<(ControlPlane, Client, Api<Node>)> {
    let plane = ControlPlane::start()?;
    plane.nodes(&[NODE.to_owned()]);
    let client = connect(Some(&plane.kubeconfig)).await.unwrap();
    let nodes = Api::all(client.clone());
    Some((plane, client, nodes))
}

fn mark(effect: TaintEffect) -> Mark {
    Mark {
        effect,
        reason: "watermark1/cpu".to_owned(),
        message: "cpu_total_usage 7200m is above 4000m".to_owned(),
    }
}

async fn taints(nodes: &Api<Node>) -> Vec<Taint> {
    let node = nodes.get(NODE).await.unwrap();
    let mut taints = node.spec.unwrap().taints.unwrap_or_default();
    // An API server gives it to every new node.
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

/// Writes a taint of its own again and again, as any controller does, each time with another value; panics where the
/// last one that it wrote is not there any more.
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
            let there = before.map(|place| taints[place].value.clone().unwrap());
            assert_eq!(there, expected, "{key} was lost");
            if let Some(place) = before {
                taints.remove(place);
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

/// Writes the condition Ready as a kubelet does.
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
async fn nobodys_taints_are_lost_however_many_write_at_once() {
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
            Some(mark(TaintEffect::PreferNoSchedule)),
            Some(mark(TaintEffect::NoSchedule)),
            None,
        ] {
            let seen = taint::read(&client, NODE).await.unwrap();
            match taint::keep(
                &client,
                seen,
                wanted.as_ref().map_or(Bearing::Nothing, Bearing::Mark),
            )
            .await
            {
                Ok(after) => {
                    assert_eq!(after.effect(), wanted.map(|mark| mark.effect));
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
    // How many is a matter of the machine; each that is given up is tried again by the agent.
    assert!(done >= 3, "{done} done, {contended} given up");
    let seen = taint::read(&client, NODE).await.unwrap();
    let strong = mark(TaintEffect::NoSchedule);
    taint::keep(&client, seen, Bearing::Mark(&strong))
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

#[tokio::test]
async fn the_condition_tells_rule_value_and_mark_and_changes_its_time_only_with_its_status() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let strong = mark(TaintEffect::NoSchedule);
    let seen = taint::read(&client, NODE).await.unwrap();
    let seen = taint::keep(&client, seen, Bearing::Nothing).await.unwrap();
    assert_eq!(
        condition(&nodes).await,
        Value::Null,
        "nothing is written to say that all is well"
    );
    let seen = taint::keep(&client, seen, Bearing::Mark(&strong))
        .await
        .unwrap();
    assert_eq!(ours(&nodes).await, ["NoSchedule"]);
    let on = condition(&nodes).await;
    assert_eq!(on["status"], "True");
    assert_eq!(on["reason"], "watermark1/cpu");
    assert_eq!(on["message"], "cpu_total_usage 7200m is above 4000m");
    let version = seen.version.clone();
    let seen = taint::keep(&client, seen, Bearing::Mark(&strong))
        .await
        .unwrap();
    assert_eq!(seen.version, version, "what is so already is not written");
    let other = Mark {
        reason: "watermark1/memory".to_owned(),
        ..strong
    };
    // So that a second has passed: times in conditions have no fractions.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let seen = taint::keep(&client, seen, Bearing::Mark(&other))
        .await
        .unwrap();
    let renamed = condition(&nodes).await;
    assert_eq!(renamed["reason"], "watermark1/memory");
    assert_eq!(renamed["lastTransitionTime"], on["lastTransitionTime"]);
    let seen = taint::keep(&client, seen, Bearing::Nothing).await.unwrap();
    assert!(ours(&nodes).await.is_empty());
    let off = condition(&nodes).await;
    assert_eq!(off["status"], "False");
    assert_ne!(off["lastTransitionTime"], on["lastTransitionTime"]);

    let conditions = async || {
        let status = nodes.get(NODE).await.unwrap().status.unwrap_or_default();
        status.conditions.unwrap_or_default().len()
    };
    let (all, before) = (conditions().await, taints(&nodes).await);
    let seen = taint::keep(&client, seen, Bearing::NoTrace).await.unwrap();
    assert_eq!(
        condition(&nodes).await,
        Value::Null,
        "as if we had never been there"
    );
    assert_eq!(conditions().await, all - 1, "those of others stay");
    assert_eq!(taints(&nodes).await, before);
    taint::keep(&client, seen, Bearing::Mark(&other))
        .await
        .unwrap();
    assert_eq!(condition(&nodes).await["status"], "True");
}

#[tokio::test]
async fn an_old_look_at_the_node_is_no_harm_and_another_node_of_that_name_is_left_alone() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let old = taint::read(&client, NODE).await.unwrap();
    other_writer(nodes.clone(), "example.com/x".to_owned(), 1).await;
    let strong = mark(TaintEffect::NoSchedule);
    taint::keep(&client, old.clone(), Bearing::Mark(&strong))
        .await
        .unwrap();
    assert_eq!(taints(&nodes).await.len(), 2);
    let node = nodes.get(NODE).await.unwrap();
    nodes
        .delete(NODE, &kube::api::DeleteParams::default())
        .await
        .unwrap();
    let gone = taint::keep(&client, old.clone(), Bearing::Mark(&strong)).await;
    assert!(
        matches!(gone, Err(taint::TaintError::NoNode(_))),
        "{gone:?}"
    );
    let mut anew = Node::default();
    anew.metadata.name = node.metadata.name;
    nodes.create(&PostParams::default(), &anew).await.unwrap();
    let replaced = taint::keep(&client, old, Bearing::Mark(&strong)).await;
    assert!(
        matches!(replaced, Err(taint::TaintError::Replaced(_))),
        "{replaced:?}"
    );
    assert!(taints(&nodes).await.is_empty());
}

#[tokio::test]
async fn what_a_policy_of_the_cluster_refuses_is_told_in_its_words_at_once() {
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
    plane.until("the policy is in force", SOON, |plane| {
        plane
            .try_kubectl(&dry, "")
            .is_err_and(|why| why.contains("here nodes stay open"))
    });
    let proxy = Proxy::start(client.clone()).await;
    let seen = taint::read(&client, NODE).await.unwrap();
    let strong = mark(TaintEffect::NoSchedule);
    let refused = taint::keep(&proxy.client(), seen, Bearing::Mark(&strong)).await;
    let why = refused.unwrap_err().to_string();
    assert!(why.contains("here nodes stay open"), "{why}");
    let tries = proxy.take_seen();
    let tries = tries.iter().filter(|(method, _)| method == "PATCH").count();
    assert_eq!(tries, 1);
    assert!(ours(&nodes).await.is_empty());
}

/// The task with what goes in and out.
struct Task {
    wanted: watch::Sender<Wanted>,
    node: watch::Sender<Watched>,
    standing: watch::Receiver<Standing>,
    client: Client,
}

impl Task {
    fn start(client: Client) -> Self {
        let (wanted, wants) = watch::channel(Wanted::default());
        let (node, nodes) = watch::channel(Watched::default());
        let (told, standing) = watch::channel(Standing::default());
        tokio::spawn(run(client.clone(), wants, nodes, told));
        Self {
            wanted,
            node,
            standing,
            client,
        }
    }

    fn want(&self, scheduling: Scheduling) {
        let message = "cpu_total_usage 7200m is above 4000m".to_owned();
        self.wanted.send_replace(Wanted {
            scheduling,
            message,
            no_trace: false,
        });
    }

    /// What the agent's watch would see now.
    async fn look(&self, client: &Client) {
        let seen = taint::read(client, NODE).await.unwrap();
        self.node.send_replace(Watched {
            node: Some(seen),
            lists: 1,
        });
    }

    async fn until(&mut self, what: &str, holds: impl FnMut(&Standing) -> bool) {
        let held = tokio::time::timeout(SOON, self.standing.wait_for(holds))
            .await
            .is_ok();
        assert!(held, "not in time: {what}: {:?}", self.standing.borrow());
    }
}

fn disabled() -> Scheduling {
    Scheduling::Disabled {
        effect: TaintEffect::NoSchedule,
        rules: vec![RuleId::from("watermark1/cpu")],
    }
}

async fn take_off(nodes: &Api<Node>) {
    let patch = Patch::Merge(json!({"spec": {"taints": null}}));
    nodes
        .patch(NODE, &PatchParams::default(), &patch)
        .await
        .unwrap();
}

#[tokio::test]
async fn the_task_holds_what_is_wanted_and_leaves_alone_what_it_was_not_told_about() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let left = mark(TaintEffect::PreferNoSchedule);
    let seen = taint::read(&client, NODE).await.unwrap();
    taint::keep(&client, seen, Bearing::Mark(&left))
        .await
        .unwrap();
    let mut task = Task::start(client.clone());
    task.look(&client).await;
    task.until("what a dead agent left is seen", |it| it.effect.is_some())
        .await;
    task.want(Scheduling::Hold);
    task.want(disabled());
    task.until("the taint is as strong as wanted", |it| {
        it.effect == Some(TaintEffect::NoSchedule)
    })
    .await;
    assert_eq!(ours(&nodes).await, ["NoSchedule"]);
    for _ in 0..3 {
        take_off(&nodes).await;
        task.look(&client).await;
        let begun = now();
        while ours(&nodes).await.is_empty() {
            assert!(begun.elapsed() < SOON, "it was not put back");
        }
        task.look(&client).await;
    }
    take_off(&nodes).await;
    task.look(&client).await;
    task.until("who takes it off again and again is told of", |it| {
        it.contested
    })
    .await;
    assert!(ours(&nodes).await.is_empty(), "and not fought");
    task.want(Scheduling::Enabled);
    task.until("that is over", |it| !it.contested).await;
    let begun = now();
    while condition(&nodes).await["status"] != "False" {
        assert!(begun.elapsed() < SOON, "the condition was left");
    }
}

#[tokio::test]
async fn while_the_api_server_is_away_it_is_asked_seldom_and_afterwards_all_is_caught_up() {
    let Some((_plane, client, nodes)) = start().await else {
        return;
    };
    let proxy = Proxy::start(client.clone()).await;
    proxy.judge(|_, _| Some(Fault::CutBefore));
    let mut task = Task::start(proxy.client());
    task.look(&client).await;
    task.want(disabled());
    task.until("the failure is told", |it| it.failing.is_some())
        .await;
    tokio::time::sleep(Duration::from_secs(4)).await;
    let requests = proxy.take_seen().len();
    assert!((2..=4).contains(&requests), "{requests} requests in 4 s");
    proxy.judge(|_, _| None);
    task.until("it is caught up", |it| it.effect.is_some())
        .await;
    assert_eq!(task.standing.borrow().failing, None);
    assert_eq!(ours(&nodes).await, ["NoSchedule"]);
    assert!(proxy.take_seen().len() <= 4);
    drop(task.client);
}

#[tokio::test]
async fn whatever_fails_between_taint_and_condition_both_are_there_in_the_end() {
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
        // Each first PATCH of taint and of condition fares so.
        let left = std::sync::Mutex::new(vec![false, true]);
        proxy.judge(move |method, path| {
            let mut left = left.lock().unwrap();
            let place = left
                .iter()
                .position(|status| path.contains("/status") == *status)?;
            (method == "PATCH").then(|| left.remove(place))?;
            Some(fault.clone())
        });
        task.look(&client).await;
        let on = index % 2 == 0;
        task.want(if on { disabled() } else { Scheduling::Enabled });
        task.until("all is written", |it| {
            it.effect.is_some() == on && it.failing.is_none()
        })
        .await;
        let begun = now();
        let status = if on { "True" } else { "False" };
        while condition(&nodes).await["status"] != status {
            assert!(begun.elapsed() < SOON, "the condition is not {status}");
        }
        assert_eq!(ours(&nodes).await.len(), usize::from(on));
    }
}
