//! The leader evicts pods for agents: controllers with the chart's rights and admission policies on a real API server.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::api_support::reporter::{Answer, Reporter, full_body, token, trust};
use crate::api_support::{ControlPlane, Controller, LEASES, aggregation, free_port, names, policy};
use hyper::Request;
use kube::Client;
use nix::sys::signal::Signal;
use plimsoll::cluster::client::connect;
use plimsoll::cluster::kubeconfig::ClusterSource;
use plimsoll::crd::eviction::{Delay, EvictionAnswer, api_path};
use serde_json::{Value, json};

/// Enough for a very slow machine.
const TIMEOUT: Duration = Duration::from_mins(4);
const AGENT: &str = "plimsoll-agent";
const GRACE: i64 = 7;

/// A pod.
#[derive(Clone, Debug)]
struct Target {
    name: String,
    uid: String,
}

/// Nodes with a rule that evicts, and replicas of a controller.
struct Scene {
    plane: ControlPlane,
    kubeconfig: PathBuf,
}

impl Scene {
    /// API servers reach controllers at these ports.
    fn start(ports: &[u16]) -> Option<Self> {
        let plane = aggregation::plane(ports)?;
        plane.install_chart();
        plane.nodes(&names(3));
        // The admission policy accepts evictions only from controllers whose token is bound to a pod.
        plane.create(&[json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "controller"},
            "spec": {
                "serviceAccountName": "plimsoll-controller", "nodeName": "node02",
                "containers": [{"name": "c", "image": "i"}],
            },
        })]);
        let bound = ["--bound-object-kind=Pod", "--bound-object-name=controller"];
        let kubeconfig = plane.as_account("plimsoll-controller", &bound);
        let scene = Self { plane, kubeconfig };
        scene.policies();
        Some(scene)
    }

    fn policies(&self) {
        let action =
            json!({"coolDownSeconds": 300, "eviction": {"terminationGracePeriodSeconds": GRACE}});
        let rule = |name: &str, strategy: &str| {
            json!({
                "name": name, "avoidanceThreshold": 1, "restoreThreshold": 1, "actionName": "drain",
                "strategy": strategy, "metricRule": {"name": "cpu_total_usage", "value": 4000},
            })
        };
        let rules = [rule("cpu", "Enforce"), rule("preview", "Preview")];
        let mut node_qos = policy(
            "NodeQOS",
            "q",
            &json!({
                "nodeQualityProbe": {"timeoutSeconds": 10, "nodeLocalGet": {"localCacheTTLSeconds": 60}}, "rules": rules,
            }),
        );
        node_qos["metadata"]["annotations"] = json!({"plimsoll.dev/rollout": "immediate"});
        let labels = json!({"matchLabels": {"app": "batch"}});
        let allowed = json!({"allowedActions": ["eviction"], "labelSelector": labels});
        self.plane.apply(&[
            policy("AvoidanceAction", "drain", &action),
            policy("PodQOS", "batch", &allowed),
            node_qos,
        ]);
    }

    /// A controller with budgets per ten minutes, longer than any test; 100 by default.
    fn controller(&self, name: &str, ports: [u16; 2], budgets: &[(&str, u16)]) -> Controller {
        let [metrics, reports] = ports;
        let mut args = vec![
            format!("--metrics-api-listen=0.0.0.0:{metrics}"),
            format!("--report-listen=127.0.0.1:{reports}"),
            "--pod-ip=127.0.0.1".to_owned(),
            format!("--lease-namespace={LEASES}"),
        ];
        for scope in ["fleet", "zone", "node", "namespace", "owner"] {
            let of = budgets.iter().find(|(known, _)| *known == scope);
            let pods = of.map_or(100, |(_, pods)| *pods);
            args.push(format!("--eviction-budget-{scope}={pods}/10m"));
        }
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        self.plane.controller_by(&self.kubeconfig, name, &args)
    }

    /// Waits until the controller leads, and the nodes have their rules.
    fn until_leads(&self, controller: &Controller) {
        self.plane
            .until("it leads", TIMEOUT, |_| controller.leads());
        self.plane.until("the nodes have rules", TIMEOUT, |plane| {
            names(3).iter().all(|node| has_rules(plane, node))
        });
    }

    /// A running pod of a `ReplicaSet` on this node.
    fn pod(&self, name: &str, node: &str, set: &str) -> Target {
        self.pod_with(name, node, set, &json!({}))
    }

    fn pod_with(&self, name: &str, node: &str, set: &str, annotations: &Value) -> Target {
        let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": set, "uid": "x", "controller": true});
        let metadata = json!({
            "name": name, "namespace": "default", "labels": {"app": "batch"}, "annotations": annotations,
            "ownerReferences": [owner],
        });
        self.plane.create(&[json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": metadata,
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i"}]},
        })]);
        let running = json!({"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}});
        let running = running.to_string();
        let patch = [
            "patch",
            "pod",
            name,
            "--subresource=status",
            "--type=merge",
            "-p",
            &running,
        ];
        self.plane.kubectl(&patch);
        let uid = self.plane.get("pod", name)["metadata"]["uid"].clone();
        Target {
            name: name.to_owned(),
            uid: uid.as_str().unwrap().to_owned(),
        }
    }

    fn agent(&self, node: &str, port: u16) -> Agent<'_> {
        Agent {
            plane: &self.plane,
            node: node.to_owned(),
            token: token(&self.plane, node),
            connection: Reporter::new(&trust(&self.plane), port),
        }
    }

    fn is_terminating(&self, target: &Target) -> bool {
        let pod = self.plane.get("pod", &target.name);
        pod["metadata"]["deletionTimestamp"].is_string()
    }
}

fn has_rules(plane: &ControlPlane, node: &str) -> bool {
    let spec = plane.get("nwm", node)["spec"].clone();
    spec["rules"]
        .as_array()
        .is_some_and(|rules| rules.len() == 2)
        && spec["podPolicies"].is_array()
}

/// The agent of a node as the controller sees it.
struct Agent<'a> {
    plane: &'a ControlPlane,
    node: String,
    token: String,
    connection: Reporter,
}

/// Makes every request of these tests unique.
static SEQUENCE: AtomicU64 = AtomicU64::new(1);

impl Agent<'_> {
    /// A request of an agent with current rules.
    fn request(&self, target: &Target) -> Value {
        json!({
            "bootID": format!("boot-of-{}", self.node), "sequence": SEQUENCE.fetch_add(1, Ordering::Relaxed),
            "namespace": "default", "name": target.name, "uid": target.uid, "rule": "q/cpu",
            "hash": self.plane.get("nwm", &self.node)["spec"]["hash"],
        })
    }

    fn post(&self, body: &Value) -> Answer {
        let request = Request::post("https://plimsoll-report.default.svc/v1/evict")
            .header("authorization", format!("Bearer {}", self.token))
            .header("content-type", "application/json")
            .body(full_body(body.to_string()));
        self.connection.send(request.unwrap()).unwrap()
    }

    fn send(&self, body: &Value) -> EvictionAnswer {
        let answer = self.post(body);
        assert_eq!(answer.code, 200, "{}", answer.body);
        serde_json::from_value(answer.body).unwrap()
    }

    /// Repeats with new requests until there is an answer about the eviction itself: on a slow machine the leader may
    /// not be ready yet.
    fn settle(&self, target: &Target) -> EvictionAnswer {
        self.settle_as(|| self.request(target))
    }

    fn settle_as(&self, request: impl Fn() -> Value) -> EvictionAnswer {
        let last = RefCell::new(None);
        self.plane.until("the leader knows enough", TIMEOUT, |_| {
            let answer = self.send(&request());
            let is_early = matches!(
                &answer,
                EvictionAnswer::Wait {
                    by: Delay::Leader,
                    ..
                }
            );
            let is_unknown = matches!(&answer, EvictionAnswer::Unknown { .. });
            last.replace(Some(answer));
            !is_early && !is_unknown
        });
        last.into_inner().unwrap()
    }
}

fn waits_for_budget(answer: &EvictionAnswer, expected: &str) {
    let EvictionAnswer::Wait { wait, by, why } = answer else {
        panic!("not to be tried again: {answer:?}");
    };
    assert_eq!((*by, &**why), (Delay::Budget, expected));
    assert!(*wait >= Duration::from_secs(1), "{wait:?}");
}

fn refused(answer: &EvictionAnswer, expected: &str) {
    let EvictionAnswer::Refused { why } = answer else {
        panic!("{answer:?}, and not: {expected}");
    };
    assert!(why.contains(expected), "{why}");
}

#[test]
fn the_leader_evicts_pods_of_the_agents_node_within_the_budgets() {
    let ports = [free_port(), free_port()];
    let Some(scene) = Scene::start(&ports[..1]) else {
        return;
    };
    let mine = ["a", "b", "c"].map(|name| scene.pod(name, "node00", name));
    let others = ["d", "e"].map(|name| scene.pod(name, "node01", name));
    let sibling = scene.pod("sibling", "node00", "a");
    let budgets = [("fleet", 3), ("node", 2), ("owner", 1)];
    let controller = scene.controller("controller", ports, &budgets);
    scene.until_leads(&controller);
    let (first, second) = (
        scene.agent("node00", ports[1]),
        scene.agent("node01", ports[1]),
    );
    refuses_forbidden_requests(&scene, &first, &mine[0], &others[0]);

    let request = RefCell::new(Value::Null);
    let accepted = first.settle_as(|| {
        request.replace(first.request(&mine[0]));
        request.borrow().clone()
    });
    assert_eq!(accepted, EvictionAnswer::Accepted);
    let pod = scene.plane.get("pod", "a");
    assert_eq!(pod["metadata"]["deletionGracePeriodSeconds"], GRACE);
    // The same request is the same eviction.
    assert_eq!(first.send(&request.borrow()), EvictionAnswer::Accepted);
    let why = "the owner's budget of evictions, 1 in 10m, is spent".to_owned();
    assert_eq!(first.settle(&sibling), EvictionAnswer::Budget { why });
    assert_eq!(first.settle(&mine[1]), EvictionAnswer::Accepted);
    let node = "the node's budget of evictions, 2 in 10m, is spent";
    waits_for_budget(&first.settle(&mine[2]), node);
    assert_eq!(second.settle(&others[0]), EvictionAnswer::Accepted);
    let fleet = "the fleet's budget of evictions, 3 in 10m, is spent";
    waits_for_budget(&second.settle(&others[1]), fleet);
    for skipped in [&mine[2], &others[1], &sibling] {
        assert!(!scene.is_terminating(skipped), "{skipped:?}");
    }
    counts_answers(&scene, &controller);
    // Budgets do not recover before their ten minutes are over.
    let EvictionAnswer::Wait { wait, .. } = second.settle(&others[1]) else {
        panic!("the budget has recovered too early");
    };
    assert!(wait > Duration::from_mins(1), "{wait:?}");
}

fn refuses_forbidden_requests(scene: &Scene, agent: &Agent, own: &Target, other: &Target) {
    let with = |target: &Target, field: &str, value: &str| {
        let mut request = agent.request(target);
        request[field] = value.into();
        request
    };
    refused(&agent.settle(other), "it is not on this node any more");
    let no_rule = || with(own, "rule", "q/other");
    refused(&agent.settle_as(no_rule), "no rule asks for it any more");
    let preview = || with(own, "rule", "q/preview");
    refused(&agent.settle_as(preview), "no rule asks for it any more");
    let replaced = || with(own, "uid", "another");
    assert_eq!(agent.settle_as(replaced), EvictionAnswer::Gone);
    let protected = scene.pod_with(
        "protected",
        "node00",
        "protected",
        &json!({"plimsoll.dev/protected": "true"}),
    );
    refused(&agent.settle(&protected), "protected");
    scene
        .plane
        .kubectl(&["label", "pod", "protected", "app=web", "--overwrite"]);
    let EvictionAnswer::Wait { by, why, .. } = agent.send(&with(own, "hash", "0123456789abcdef"))
    else {
        panic!("evicted for rules that the node does not have");
    };
    assert_eq!(by, Delay::Leader);
    assert!(why.contains("rules have changed"), "{why}");
    let stop = format!("--namespace={LEASES}");
    let annotate = |value: &str| {
        scene.plane.kubectl(&[
            "annotate",
            "--overwrite",
            &stop,
            "configmap/plimsoll-stop",
            value,
        ]);
    };
    // Like the chart's hook.
    scene
        .plane
        .kubectl(&["create", &stop, "configmap", "plimsoll-stop"]);
    annotate("plimsoll.dev/stop=no pod is to be evicted");
    let EvictionAnswer::Wait { why, .. } = agent.send(&agent.request(own)) else {
        panic!("evicted despite the emergency stop");
    };
    assert!(why.contains("emergency stop"), "{why}");
    annotate("plimsoll.dev/stop=false");
    let bad = agent.post(&with(own, "name", "../nodes"));
    assert_eq!(bad.code, 400, "{}", bad.body);
    for target in [own, other, &protected] {
        assert!(!scene.is_terminating(target), "{target:?}");
    }
}

fn counts_answers(scene: &Scene, controller: &Controller) {
    let results = [
        "accepted",
        "fleet",
        "node",
        "owner",
        "other_node",
        "no_rule",
        "gone",
        "protected",
        "stopped",
    ];
    for result in results {
        let series = format!("plimsoll_controller_eviction_answers_total{{result=\"{result}\"}}");
        assert!(controller.metric(&series) > 0.5, "{result}");
    }
    scene
        .plane
        .until("all evictions are counted", TIMEOUT, |_| {
            controller.metric("plimsoll_controller_evictions{state=\"ending\"}") > 2.5
        });
}

#[test]
fn the_agent_gets_the_api_servers_answer() {
    let ports = [free_port(), free_port()];
    let Some(scene) = Scene::start(&ports[..1]) else {
        return;
    };
    let controller = scene.controller("controller", ports, &[("node", 1)]);
    let pod = scene.pod("a", "node00", "a");
    let other = scene.pod("b", "node00", "b");
    let budget = json!({"minAvailable": 1, "selector": {"matchLabels": {"app": "batch"}}});
    scene.plane.create(&[json!({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "all"}, "spec": budget,
    })]);
    let status = json!({"status": {
        "observedGeneration": 1, "disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1,
    }});
    let status = status.to_string();
    let patch = [
        "patch",
        "pdb",
        "all",
        "--subresource=status",
        "--type=merge",
        "-p",
        &status,
    ];
    scene.plane.kubectl(&patch);
    scene.until_leads(&controller);
    let agent = scene.agent("node00", ports[1]);
    let EvictionAnswer::Budget { why } = agent.settle(&pod) else {
        panic!("evicted against its disruption budget");
    };
    assert!(why.contains("all needs 1 healthy pods"), "{why}");
    // A refused eviction costs no budget of ours.
    scene.plane.kubectl(&["delete", "pdb", "all"]);
    assert_eq!(agent.settle(&other), EvictionAnswer::Accepted);
    let spent = "the node's budget of evictions, 1 in 10m, is spent";
    waits_for_budget(&agent.settle(&pod), spent);
}

/// Sends a request through the API server with a token bound to a node. `None`: the administrator's.
fn through_api_server(
    scene: &Scene,
    node: Option<&str>,
    path: &str,
    body: &Value,
) -> Result<EvictionAnswer, u16> {
    let kubeconfig = match node {
        Some(node) => {
            let bound = format!("--bound-object-name={node}");
            scene
                .plane
                .as_account(AGENT, &["--bound-object-kind=Node", &bound])
        }
        None => scene.plane.kubeconfig.clone(),
    };
    let ask = async {
        let client: Client = connect(&ClusterSource::file(Path::new(&kubeconfig)))
            .await
            .unwrap();
        let request = Request::post(path).body(body.to_string().into_bytes());
        client.request::<EvictionAnswer>(request.unwrap()).await
    };
    match crate::api_support::reporter::runtime().block_on(ask) {
        Ok(answer) => Ok(answer),
        Err(kube::Error::Api(status)) => Err(status.code),
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn agents_without_a_route_to_the_leader_use_the_api_server() {
    let ports = [[free_port(), free_port()], [free_port(), free_port()]];
    // API servers reach only the standby, which forwards to the leader.
    let Some(scene) = Scene::start(&ports[1][..1]) else {
        return;
    };
    let leader = scene.controller("leader", ports[0], &[]);
    scene.until_leads(&leader);
    let standby = scene.controller("standby", ports[1], &[]);
    scene.plane.until("the standby is ready", TIMEOUT, |_| {
        standby.http("/readyz").is_some_and(|(code, _)| code == 200)
    });
    let [first, second] = ["a", "b"].map(|name| scene.pod(name, "node00", name));
    let (to_leader, to_standby) = (
        scene.agent("node00", ports[0][1]),
        scene.agent("node00", ports[1][1]),
    );
    let misdirected = to_standby.post(&to_standby.request(&first));
    assert_eq!(misdirected.code, 421, "{}", misdirected.body);
    assert_eq!(misdirected.body["leader"], "127.0.0.1");

    let own = api_path("node00");
    let request = RefCell::new(Value::Null);
    scene.plane.until("it is evicted", TIMEOUT, |_| {
        request.replace(to_leader.request(&first));
        through_api_server(&scene, Some("node00"), &own, &request.borrow())
            == Ok(EvictionAnswer::Accepted)
    });
    assert!(scene.is_terminating(&first));
    // The same request by another route is the same request. (A connection without reports is closed after a while.)
    let to_leader = scene.agent("node00", ports[0][1]);
    assert_eq!(to_leader.send(&request.borrow()), EvictionAnswer::Accepted);
    let body = to_leader.request(&second);
    let theirs = api_path("node01");
    assert_eq!(
        through_api_server(&scene, Some("node00"), &theirs, &body),
        Err(403)
    );
    assert_eq!(through_api_server(&scene, None, &own, &body), Err(403));
    assert!(!scene.is_terminating(&second));
}

#[test]
fn the_next_leader_counts_earlier_evictions() {
    let ports = [[free_port(), free_port()], [free_port(), free_port()]];
    let Some(scene) = Scene::start(&[]) else {
        return;
    };
    let budgets = [("fleet", 3)];
    let leader = scene.controller("leader", ports[0], &budgets);
    scene.until_leads(&leader);
    let standby = scene.controller("standby", ports[1], &budgets);
    let pods = ["a", "b", "c", "d"].map(|name| scene.pod(name, "node00", name));
    let agent = scene.agent("node00", ports[0][1]);
    for target in &pods[..2] {
        assert_eq!(agent.settle(target), EvictionAnswer::Accepted);
    }
    // One of them is gone when the next leader starts.
    scene
        .plane
        .kubectl(&["delete", "pod", "a", "--grace-period=0", "--force"]);
    leader.signal(Signal::SIGKILL);
    scene
        .plane
        .until("the standby leads", TIMEOUT, |_| standby.leads());
    let agent = scene.agent("node00", ports[1][1]);
    assert_eq!(agent.settle(&pods[2]), EvictionAnswer::Accepted);
    let spent = "the fleet's budget of evictions, 3 in 10m, is spent";
    waits_for_budget(&agent.settle(&pods[3]), spent);
    // Another client overwrites the record: the leader's ledger is authoritative.
    let nonsense = json!({"data": {"evictions.json": "nonsense"}}).to_string();
    let patch = [
        "patch",
        "configmap",
        "plimsoll-evictions",
        "--type=merge",
        "-p",
        &nonsense,
    ];
    scene.plane.kubectl(&patch);
    waits_for_budget(&agent.settle(&pods[3]), spent);
    assert!(!scene.is_terminating(&pods[3]));
}

#[test]
fn zone_and_namespace_budgets_are_shared_between_nodes() {
    let ports = [free_port(), free_port()];
    let Some(scene) = Scene::start(&ports[..1]) else {
        return;
    };
    let nodes = names(3);
    for (node, zone) in nodes.iter().zip(["a", "a", "b"]) {
        let zone = format!("topology.kubernetes.io/zone={zone}");
        scene.plane.kubectl(&["label", "node", node, &zone]);
    }
    let budgets = [("zone", 2), ("namespace", 3)];
    let controller = scene.controller("controller", ports, &budgets);
    scene.until_leads(&controller);
    let agents: Vec<Agent> = nodes
        .iter()
        .map(|node| scene.agent(node, ports[1]))
        .collect();
    let on = |name: &str, index: usize| scene.pod(name, &nodes[index], name);
    assert_eq!(agents[0].settle(&on("a", 0)), EvictionAnswer::Accepted);
    assert_eq!(agents[1].settle(&on("b", 1)), EvictionAnswer::Accepted);
    let spent = "the zone's budget of evictions, 2 in 10m, is spent";
    waits_for_budget(&agents[1].settle(&on("c", 1)), spent);
    assert_eq!(agents[2].settle(&on("d", 2)), EvictionAnswer::Accepted);
    let why = "the namespace's budget of evictions, 3 in 10m, is spent".to_owned();
    assert_eq!(
        agents[2].settle(&on("e", 2)),
        EvictionAnswer::Budget { why }
    );
}

#[test]
fn without_budgets_and_aggregated_api_the_other_checks_apply() {
    let Some(scene) = Scene::start(&[]) else {
        return;
    };
    let port = free_port();
    let listen = format!("--report-listen=127.0.0.1:{port}");
    let leases = format!("--lease-namespace={LEASES}");
    let args = [
        &*listen,
        &leases,
        "--no-eviction-budgets",
        "--pod-ip=127.0.0.1",
    ];
    let controller = scene
        .plane
        .controller_by(&scene.kubeconfig, "controller", &args);
    scene.until_leads(&controller);
    let agent = scene.agent("node00", port);
    for name in ["a", "b", "c", "d", "e", "f"] {
        assert_eq!(
            agent.settle(&scene.pod(name, "node00", "r")),
            EvictionAnswer::Accepted
        );
    }
    let other = scene.pod("other", "node01", "r");
    refused(&agent.settle(&other), "it is not on this node any more");
    assert!(!scene.is_terminating(&other));
}
