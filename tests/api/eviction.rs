//! Evictions of an agent, against a real API server and a faulty one. The fake leader posts Evictions like the
//! controller.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::api_support::ControlPlane;
use crate::api_support::faults::{Fault, Proxy, of_calls};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use plimsoll::agent::eviction::{
    EvictionChannel, EvictionOutcome, EvictionResult, Evictor, PoliciesInForce, Refusal, Requester,
    WantedEviction,
};
use plimsoll::agent::taint::{self, TaintState, WantedTaint, WatchedNode};
use plimsoll::clock;
use plimsoll::cluster::eviction;
use plimsoll::crd::eviction::{EvictionAnswer, EvictionTarget};
use plimsoll::engine::metric::Metric;
use plimsoll::engine::plan::Scheduling;
use plimsoll::engine::policy::{
    Action, EvictionSpec, PodPolicy, PolicySet, Rule, RuleId, Standing, Strategy, TaintEffect,
};
use plimsoll::engine::selector::Selector;
use serde_json::{Value, json};
use tokio::sync::watch;

const NODE: &str = "node00";
const TIMEOUT: Duration = Duration::from_secs(30);

fn policy() -> PolicySet {
    let action = Action {
        name: "drain".to_owned(),
        cool_down: Duration::from_mins(5),
        scheduling: None,
        throttle: None,
        force_gc: false,
        eviction: Some(EvictionSpec {
            grace: None,
            max_pods_per_round: 1,
            evict_unowned: false,
        }),
    };
    let rule = Rule {
        id: RuleId::from("q/r"),
        metric: Metric::CpuUsage,
        series: None,
        threshold: 4000.0,
        restore_value: 4000.0,
        avoidance_threshold: 1,
        restore_threshold: 1,
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(action),
        strategy: Strategy::Enforce,
        active_during: Vec::new(),
    };
    let pods = PodPolicy {
        name: "all".to_owned(),
        labels: Some(Selector::default()),
        scopes: Vec::new(),
        allowed: vec!["eviction".to_owned()],
        standing: Standing::default(),
    };
    PolicySet {
        rules: vec![rule],
        pods: vec![pods],
    }
}

/// The grace period of the rule's action.
const GRACE: Duration = Duration::from_secs(7);

/// Evicts whatever is requested.
struct Leader(Client);

impl Requester for Leader {
    async fn evict(&self, target: &EvictionTarget, _: &RuleId, _: &str) -> EvictionAnswer {
        eviction::evict(&self.0, target, GRACE).await
    }
}

/// Starts a task that evicts through the proxy.
fn evictions(
    proxy: &Proxy,
    in_force: &watch::Sender<PoliciesInForce>,
    taint_state: &watch::Sender<TaintState>,
) -> EvictionChannel {
    let (in_force, taint_state) = (in_force.subscribe(), taint_state.subscribe());
    let leader = Leader(proxy.client());
    let (evictor, evictions) = Evictor::new(proxy.client(), leader, NODE, in_force, taint_state);
    tokio::spawn(evictor.with_call_timeout(Duration::ZERO).run());
    evictions
}

fn in_force(policy: PolicySet) -> PoliciesInForce {
    PoliciesInForce {
        policy: Arc::new(policy),
        hash: Arc::default(),
    }
}

/// The API server, and the task that evicts through `client`.
struct Scene {
    plane: ControlPlane,
    proxy: Proxy,
    pods: Api<Pod>,
    evictions: EvictionChannel,
    in_force: watch::Sender<PoliciesInForce>,
    /// State of the Node's taint.
    taint_state: watch::Sender<TaintState>,
}

impl Scene {
    async fn start() -> Option<Self> {
        let plane = ControlPlane::start()?;
        plane.nodes(&[NODE.to_owned()]);
        let client = plane.connect().await;
        let proxy = Proxy::start(client.clone()).await;
        let (in_force, _) = watch::channel(in_force(policy()));
        let (taint_state, _) = watch::channel(TaintState::default());
        Some(Self {
            plane,
            evictions: evictions(&proxy, &in_force, &taint_state),
            proxy,
            pods: Api::<Pod>::namespaced(client as Client, "default"),
            in_force,
            taint_state,
        })
    }

    /// Restarts the eviction task without its memory of refusals.
    fn restart_task(&mut self) {
        self.evictions = evictions(&self.proxy, &self.in_force, &self.taint_state);
    }

    /// A running and ready pod of a `ReplicaSet`, modified by `change`.
    async fn pod(&self, name: &str, change: impl FnOnce(&mut Value)) -> Pod {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "x", "controller": true});
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}, "ownerReferences": [owner]},
            "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "i"}]},
        });
        change(&mut pod);
        self.plane.create(&[pod]);
        let ready = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let params = PatchParams::default();
        self.pods
            .patch_status(name, &params, &Patch::Strategic(ready))
            .await
            .unwrap()
    }

    /// A disruption budget for pods with this label that allows no disruption.
    fn budget(&self, name: &str, app: &str) {
        let spec = json!({"minAvailable": 1, "selector": {"matchLabels": {"app": app}}});
        self.plane.create(&[json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
            "metadata": {"name": name}, "spec": spec,
        })]);
        let status = json!({"status": {
            "observedGeneration": 1, "disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1,
        }});
        let patch = status.to_string();
        self.plane.kubectl(&[
            "patch",
            "pdb",
            name,
            "--subresource=status",
            "--type=merge",
            "-p",
            &patch,
        ]);
    }

    fn request_eviction(&self, pod: &Pod) {
        self.request_eviction_by(pod, Duration::from_secs(10));
    }

    fn request_eviction_by(&self, pod: &Pod, within: Duration) {
        let now = clock::boot_time();
        let request = WantedEviction {
            target: EvictionTarget {
                namespace: "default".to_owned(),
                name: pod.metadata.name.clone().unwrap(),
                uid: pod.metadata.uid.clone().unwrap(),
            },
            rule: RuleId::from("q/r"),
            grace: GRACE,
            expires: now + within,
        };
        assert_eq!(self.evictions.request(request, now), None);
    }

    async fn next(&mut self) -> EvictionOutcome {
        let started = clock::boot_time();
        loop {
            if let Some(outcome) = self.evictions.poll() {
                return outcome;
            }
            assert!(clock::boot_time().since(started) < TIMEOUT, "no outcome");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The refusal, and the delay until the next attempt.
    async fn refusal(&mut self) -> (Refusal, Duration) {
        let outcome = self.next().await;
        let EvictionResult::Refused { until, why } = outcome.result else {
            panic!("{outcome:?}")
        };
        (why, until.since(outcome.at))
    }

    /// Whether the pod is terminating.
    async fn is_terminating(&self, pod: &Pod) -> bool {
        let name = pod.metadata.name.as_deref().unwrap();
        let pod = self.pods.get(name).await.unwrap();
        pod.metadata.deletion_timestamp.is_some()
    }

    /// The evictions posted since the last call.
    fn posts(&self) -> usize {
        let seen = self.proxy.take_seen();
        seen.iter().filter(|(method, _)| method == "POST").count()
    }
}

/// Whether the delay is this long, or up to a quarter more by jitter; up to a second may have passed.
fn near(pause: Duration, seconds: u64) -> bool {
    let least = Duration::from_secs(seconds);
    pause <= least * 5 / 4 && pause + Duration::from_secs(1) >= least
}

#[tokio::test]
async fn a_pod_is_evicted_with_the_actions_grace_and_a_uid_precondition() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let pod = scene.pod("web", |_| {}).await;
    scene.request_eviction(&pod);
    assert_eq!(scene.next().await.result, EvictionResult::Accepted);
    let after = scene.pods.get("web").await.unwrap();
    assert!(after.metadata.deletion_timestamp.is_some());
    assert_eq!(after.metadata.deletion_grace_period_seconds, Some(7));
    scene.request_eviction(&pod);
    assert_eq!(
        scene.next().await.result,
        EvictionResult::Terminating,
        "never a second time"
    );
    assert_eq!(scene.posts(), 1);
    scene
        .plane
        .kubectl(&["delete", "pod", "web", "--grace-period=0", "--force"]);
    let other = scene.pod("web", |_| {}).await;
    scene.request_eviction(&pod);
    assert_eq!(
        scene.next().await.result,
        EvictionResult::Gone,
        "another pod has its name"
    );
    assert!(!scene.is_terminating(&other).await);
    // If the pod is replaced in between, the UID precondition fails.
    let stale = EvictionTarget {
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        uid: pod.metadata.uid.clone().unwrap(),
    };
    let client = scene.proxy.client();
    let answer = eviction::evict(&client, &stale, Duration::from_secs(7)).await;
    assert!(
        matches!(answer, EvictionAnswer::Unknown { .. }),
        "{answer:?}"
    );
    assert!(!scene.is_terminating(&other).await);
}

#[tokio::test]
async fn evictions_wait_for_the_taint() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let pod = scene.pod("web", |_| {}).await;
    let mut closing = policy();
    Arc::make_mut(&mut closing.rules[0].action).scheduling = Some(TaintEffect::NoSchedule);
    scene.in_force.send_replace(in_force(closing.clone()));
    let client = scene.proxy.client();
    let seen = plimsoll::cluster::taint::read(&client, NODE).await.unwrap();
    let (_node, seen) = watch::channel(WatchedNode {
        node: Some(seen),
        lists: 1,
    });
    let (wanted, updates) = watch::channel(WantedTaint {
        scheduling: Scheduling::Disabled {
            effect: TaintEffect::NoSchedule,
            rules: vec![RuleId::from("q/r")],
        },
        message: "m".to_owned(),
        remove_condition: false,
        busy: false,
    });
    let denied = "node node00 is forbidden";
    scene.proxy.respond_with(move |method, path| {
        let is_taint_patch = method == "PATCH" && path.contains("/nodes/");
        is_taint_patch.then(|| Fault::Answer(403, None, denied.to_owned()))
    });
    tokio::spawn(taint::run(client, updates, seen, scene.taint_state.clone()));
    scene.request_eviction_by(&pod, Duration::from_secs(3));
    let (why, pause) = scene.refusal().await;
    assert!(matches!(why, Refusal::NotTainted(_)), "{why:?}");
    assert!(why.to_string().contains(denied), "{why}");
    assert_eq!(pause, Duration::ZERO, "the next evaluation decides again");
    assert_eq!(scene.posts(), 0);
    assert!(!scene.is_terminating(&pod).await);
    // Once the taint is set, within the same evaluation.
    scene.request_eviction_by(&pod, TIMEOUT);
    scene.proxy.respond_with(|_, _| None);
    assert_eq!(scene.next().await.result, EvictionResult::Accepted);
    let seen = scene.proxy.take_seen();
    let position = |method: &str| seen.iter().position(|(it, _)| it == method);
    assert!(position("PATCH") < position("POST"), "{seen:?}");
    // The same for the PreferNoSchedule fallback, which is waited for no longer than until that taint is set.
    let soft = scene.pod("soft", |_| {}).await;
    Arc::make_mut(&mut closing.rules[0].action).scheduling = Some(TaintEffect::PreferNoSchedule);
    scene.in_force.send_replace(in_force(closing));
    wanted.send_modify(|wanted| wanted.scheduling = Scheduling::Enabled);
    let mut state = scene.taint_state.subscribe();
    state.wait_for(|it| it.effect.is_none()).await.unwrap();
    scene.request_eviction_by(&soft, Duration::from_millis(200));
    let (why, _) = scene.refusal().await;
    assert!(matches!(why, Refusal::NotTainted(_)), "{why:?}");
    wanted.send_modify(|wanted| {
        wanted.scheduling = Scheduling::Disabled {
            effect: TaintEffect::PreferNoSchedule,
            rules: vec![RuleId::from("q/r")],
        };
    });
    scene.request_eviction(&soft);
    assert_eq!(scene.next().await.result, EvictionResult::Accepted);
}

#[tokio::test]
async fn disruption_budgets_are_respected_named_and_retried_with_backoff() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let pod = scene.pod("web", |_| {}).await;
    scene.budget("web-budget", "web");
    for expected in [10, 20, 40] {
        scene.request_eviction(&pod);
        let (why, pause) = scene.refusal().await;
        assert!(matches!(why, Refusal::Budget(_)), "{why:?}");
        assert!(why.to_string().contains("web-budget"), "{why}");
        assert!(near(pause, expected), "{pause:?}");
    }
    assert!(!scene.is_terminating(&pod).await);
    // Other pods are not delayed by it.
    let other = scene.pod("other", |_| {}).await;
    scene.request_eviction(&other);
    assert_eq!(scene.next().await.result, EvictionResult::Accepted);
    // Two budgets for one pod: the API server refuses that.
    scene.budget("second-budget", "web");
    scene.request_eviction(&pod);
    let (why, pause) = scene.refusal().await;
    assert!(matches!(why, Refusal::ManyBudgets(_)), "{why:?}");
    assert!(near(pause, 300), "{pause:?}");
    assert!(!scene.is_terminating(&pod).await);
}

#[tokio::test]
async fn changes_since_the_decision_prevent_the_eviction() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let protected = scene
        .pod("protected", |pod| {
            pod["metadata"]["annotations"] = json!({"plimsoll.dev/protected": "true"});
        })
        .await;
    let elsewhere = scene
        .pod("elsewhere", |pod| pod["spec"]["nodeName"] = json!("other"))
        .await;
    let unowned = scene
        .pod("unowned", |pod| {
            pod["metadata"]["ownerReferences"] = json!([]);
        })
        .await;
    for (pod, reason) in [
        (&protected, "it is protected by its annotation"),
        (&elsewhere, "it is not on this node any more"),
        (
            &unowned,
            "it has no controller, and the action has no evictUnowned",
        ),
    ] {
        scene.request_eviction(pod);
        assert_eq!(scene.refusal().await.0.to_string(), reason);
    }
    let pod = scene.pod("web", |_| {}).await;
    scene.in_force.send_replace(PoliciesInForce::default());
    scene.request_eviction(&pod);
    assert_eq!(
        scene.refusal().await.0.to_string(),
        "no rule asks for it any more"
    );
    assert_eq!(scene.posts(), 0);
}

#[tokio::test]
async fn retry_after_is_respected_and_late_evictions_are_dropped() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let pod = scene.pod("web", |_| {}).await;
    let other = scene.pod("other", |_| {}).await;
    let busy = "Too many requests, please try again later.";
    scene.proxy.respond_with(move |method, _| {
        (method == "POST").then(|| Fault::Answer(429, Some(2), busy.to_owned()))
    });
    scene.request_eviction(&pod);
    let (why, pause) = scene.refusal().await;
    assert!(matches!(why, Refusal::Wait { .. }), "{why:?}");
    assert!(near(pause, 2), "{pause:?}");
    scene.proxy.respond_with(|_, _| None);
    scene.proxy.take_seen();
    scene.request_eviction(&other);
    let (why, pause) = scene.refusal().await;
    assert!(matches!(why, Refusal::Wait { .. }), "{why:?}");
    assert!(
        scene.proxy.take_seen().is_empty(),
        "no request is sent meanwhile"
    );
    tokio::time::sleep(pause).await;
    scene.request_eviction_by(&pod, Duration::ZERO);
    assert_eq!(scene.refusal().await.0, Refusal::Late);
    assert!(scene.proxy.take_seen().is_empty());
    scene.request_eviction(&other);
    assert_eq!(scene.next().await.result, EvictionResult::Accepted);
    assert!(!scene.is_terminating(&pod).await);
}

#[tokio::test]
async fn after_a_lost_answer_the_pod_tells_the_outcome() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    // Carried out, but the answer is lost.
    let pod = scene.pod("web", |_| {}).await;
    scene
        .proxy
        .respond_with(|method, _| (method == "POST").then_some(Fault::CutAfter));
    scene.request_eviction(&pod);
    let unknown_result = scene.next().await.result;
    assert!(
        matches!(unknown_result, EvictionResult::ResultUnknown(_)),
        "{unknown_result:?}"
    );
    assert_eq!(scene.next().await.result, EvictionResult::Accepted);
    assert_eq!(scene.posts(), 1);
    // Never carried out, and the answers are lost for a while.
    let other = scene.pod("other", |_| {}).await;
    let gets = AtomicUsize::new(0);
    scene.proxy.respond_with(move |method, _| match method {
        "POST" => Some(Fault::CutBefore),
        _ => (gets.fetch_add(1, Ordering::Relaxed) == 1).then_some(Fault::CutBefore),
    });
    scene.request_eviction(&other);
    let unknown_result = scene.next().await.result;
    assert!(
        matches!(unknown_result, EvictionResult::ResultUnknown(_)),
        "{unknown_result:?}"
    );
    let (why, pause) = scene.refusal().await;
    assert!(matches!(why, Refusal::Unanswered(_)), "{why:?}");
    assert_eq!(pause, Duration::ZERO, "no further delay");
    assert_eq!(scene.posts(), 1);
    assert!(!scene.is_terminating(&other).await);
}

// Several tests, so that they run side by side.
#[tokio::test]
async fn the_reported_outcome_is_that_of_the_pod_after_a_client_error() {
    outcomes_after(|fault| matches!(fault, Fault::Answer(400..429, ..))).await;
}

#[tokio::test]
async fn the_reported_outcome_is_that_of_the_pod_after_a_server_error_or_malformed_response() {
    outcomes_after(|fault| matches!(fault, Fault::Answer(200 | 429.., ..))).await;
}

#[tokio::test]
async fn the_reported_outcome_is_that_of_the_pod_after_a_cut() {
    outcomes_after(|fault| !matches!(fault, Fault::Answer(..))).await;
}

async fn outcomes_after(is_of_this_test: fn(&Fault) -> bool) {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let boom = || Fault::Answer(500, None, "boom".to_owned());
    let gone = || Fault::Answer(404, None, "no such page".to_owned());
    let other = || Fault::Answer(200, None, r#"{"result": "ok"}"#.to_owned());
    let faults = of_calls().into_iter();
    let faults: Vec<_> = faults.filter(|(_, fault)| is_of_this_test(fault)).collect();
    assert!(!faults.is_empty(), "no such fault");
    for (index, (what, fault)) in faults.into_iter().enumerate() {
        let pod = scene.pod(&format!("web-{index}"), |_| {}).await;
        scene.restart_task();
        scene.posts();
        // The following reads of the pod fail once as well.
        let left = std::sync::Mutex::new(vec![other(), gone(), boom(), fault.clone()]);
        scene.proxy.respond_with(move |method, _| {
            let mut left = left.lock().unwrap();
            let is_due = method == "POST" || left.len() < 4;
            is_due.then(|| left.pop()).flatten()
        });
        scene.request_eviction_by(&pod, Duration::from_secs(25));
        let mut result = scene.next().await.result;
        while matches!(result, EvictionResult::ResultUnknown(_)) {
            result = scene.next().await.result;
        }
        let is_reported = result == EvictionResult::Accepted;
        assert_eq!(
            is_reported,
            scene.is_terminating(&pod).await,
            "{what}: {result:?}"
        );
        assert_eq!(scene.posts(), 1, "{what}");
        let was_carried_out = matches!(
            fault,
            Fault::CutAfter | Fault::CutWithin | Fault::NeverAnswer
        );
        assert_eq!(is_reported, was_carried_out, "{what}: {result:?}");
        assert!(
            is_reported || matches!(result, EvictionResult::Refused { .. }),
            "{what}: {result:?}"
        );
    }
}

#[tokio::test]
async fn a_denial_is_reported_and_an_unreachable_api_server_gets_no_requests() {
    let Some(mut scene) = Scene::start().await else {
        return;
    };
    let pod = scene.pod("web", |_| {}).await;
    let denied =
        "admission webhook \"guard.plimsoll.dev\" denied the request: the pod is on another node";
    scene.proxy.respond_with(move |method, _| {
        (method == "POST").then(|| Fault::Answer(403, None, denied.to_owned()))
    });
    scene.request_eviction(&pod);
    let (why, pause) = scene.refusal().await;
    assert!(why.to_string().contains(denied), "{why}");
    assert!(near(pause, 10), "{pause:?}");
    scene.posts();
    scene.proxy.respond_with(|_, _| Some(Fault::CutBefore));
    for _ in 0..3 {
        scene.request_eviction(&pod);
        let (why, pause) = scene.refusal().await;
        assert!(matches!(why, Refusal::ApiServerUnreachable(_)), "{why:?}");
        assert_eq!(pause, Duration::ZERO, "the next evaluation decides again");
    }
    assert_eq!(scene.posts(), 0);
    assert!(!scene.is_terminating(&pod).await);
}
