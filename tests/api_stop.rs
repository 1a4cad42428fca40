//! The emergency stop: real agents against a real API server, and the commands that order it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_in_result,
    reason = "a test fails by panicking"
)]

mod agent_support;
mod api_support;
mod run_support;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use agent_support::{Agent, HIGH, LOW, NODE, Node, closing, pod, rule, throttling};
use api_support::{LEASES, lease_namespace, now};
use plimsoll::crd::emergency_stop::{ANNOTATION, OBJECT};
use serde_json::{Value, json};

/// What an agent promises, from when it hears of it.
const RELEASE: Duration = Duration::from_secs(15);

/// Not a test: what runs in the pods.
#[test]
#[ignore = "burns CPU until it is killed"]
fn burn() {
    loop {
        std::hint::spin_loop();
    }
}

/// A node with the object that stops agents, rules that throttle and close it, and one that only reports.
fn node() -> Option<(Node, String)> {
    let mut node = Node::new()?;
    node.plane.apply(&[lease_namespace(), object()]);
    let batch = node.burning_pod("batch");
    node.keep(&rules());
    node.machine.load.set(HIGH);
    Some((node, batch))
}

fn object() -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": OBJECT, "namespace": LEASES}})
}

/// Steps down to 20 % of so many percent, one each period.
fn rules_of(period_seconds: u64, step: u64) -> Value {
    let mut spec = throttling();
    spec["actions"][0]["cpuThrottle"]["stepCPURatio"] = step.into();
    let mut slow = rule("q/cpu", "slow");
    slow["periodSeconds"] = period_seconds.into();
    let mut shown = rule("q/show", "close");
    shown["strategy"] = "Preview".into();
    spec["rules"] = json!([rule("q/close", "close"), slow, shown]);
    let close = closing()["actions"][0].clone();
    spec["actions"].as_array_mut().unwrap().push(close);
    spec
}

fn rules() -> Value {
    rules_of(1, 40)
}

/// By which the way back takes half an hour.
fn slow_rules() -> Value {
    rules_of(120, 5)
}

/// As the documentation says.
fn annotate(node: &Node, annotation: &str) {
    let target = ["annotate", "configmap", OBJECT, "-n", LEASES, "--overwrite"];
    node.plane.kubectl(&[&target[..], &[annotation]].concat());
}

fn stop(node: &Node, why: &str) {
    annotate(node, &format!("{ANNOTATION}={why}"));
}

fn resume(node: &Node) {
    annotate(node, &format!("{ANNOTATION}-"));
}

/// By us: API servers taint a new node, too.
fn is_closed(node: &Node) -> bool {
    let taints = node.taints();
    taints
        .iter()
        .any(|taint| taint.starts_with("interference.crane.io:"))
}

/// The agent has taken what the node has to keep.
fn until_kept(agent: &Agent, node: &Node) {
    let hash = node.plane.get("nwm", NODE)["spec"]["hash"].clone();
    agent.until("the edit is kept", || node.status()["observedHash"] == hash);
}

fn is_acting(node: &Node, batch: &str) -> bool {
    node.is_throttled(batch) && is_closed(node)
}

/// An agent that has throttled the pod and closed the node.
fn acting_agent(node: &Node, batch: &str) -> Agent {
    let agent = node.agent(&[]);
    agent.until("the pod is throttled and the node closed", || {
        is_acting(node, batch)
    });
    agent
}

fn is_released(node: &Node, batch: &str) -> bool {
    node.quota(batch) == -1 && !is_closed(node)
}

/// The condition that tells of the stop.
fn stopped(node: &Node) -> Value {
    let conditions = node.status()["conditions"].as_array().cloned();
    let mut conditions = conditions.unwrap_or_default().into_iter();
    conditions
        .find(|it| it["type"] == "Stopped")
        .unwrap_or_default()
}

/// What a metric of the agent says, all series together.
fn metric(agent: &Agent, name: &str, of: &str) -> f64 {
    let text = agent.http("/metrics").map(|(_, text)| text);
    let text = text.unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| line.starts_with(name) && line.contains(of));
    lines
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

fn is_stopped(agent: &Agent) -> bool {
    metric(agent, "plimsoll_agent_stopped ", "") > 0.5
}

/// Nothing is done while the agent samples so often that it would have acted several times.
fn does_nothing(agent: &Agent, holds: impl Fn() -> bool) {
    let acted = || metric(agent, "plimsoll_agent_actions_total", r#"strategy="None""#);
    let sampled = || metric(agent, "plimsoll_agent_tick_duration_seconds_count", "");
    let (before, begun) = (acted(), sampled());
    agent.until("it samples on", || {
        assert!(holds(), "{}", agent.said());
        sampled() > begun + 20.0
    });
    assert!((acted() - before).abs() < 0.5, "{}", agent.said());
}

fn events(node: &Node, reason: &str) -> usize {
    let events = node.plane.list("events");
    let told =
        |event: &&Value| event["reason"] == reason && event["involvedObject"]["kind"] == "Node";
    events.iter().filter(told).count()
}

#[test]
fn an_annotation_makes_the_agent_give_everything_back_and_do_nothing_until_it_is_gone() {
    let Some((mut node, batch)) = node() else {
        return;
    };
    let agent = acting_agent(&node, &batch);
    assert!(!is_stopped(&agent));
    // By itself the way back would take minutes.
    node.keep(&rules_of(60, 40));
    until_kept(&agent, &node);
    assert!(is_acting(&node, &batch));
    agent.until("the node tells of it", || !node.condition().is_null());
    let begun = now();
    stop(&node, "marks are wrong");
    agent.until("it is given back", || is_released(&node, &batch));
    let took = begun.elapsed();
    assert!(took < RELEASE, "it took {took:?}");
    agent.until("the node tells of nothing", || node.condition().is_null());
    agent.until("the status says so", || {
        stopped(&node)["reason"] == "Released"
    });
    assert_eq!(
        stopped(&node)["message"],
        "stopped: marks are wrong; nothing is in force"
    );
    assert_eq!(agent_support::ready(&node.status()), "False Stopped");
    let table = node.plane.kubectl(&["get", "nodewatermarks"]);
    assert!(
        table.contains("STOPPED") && table.contains("Released"),
        "{table}"
    );
    assert!(is_stopped(&agent));
    agent.until("an event tells it", || events(&node, "EmergencyStop") == 1);
    does_nothing(&agent, || is_released(&node, &batch));
    let rules = node.status()["rules"].clone();
    assert_eq!(rules.as_array().map(Vec::len), Some(1), "{rules}");
    assert_eq!(rules[0]["id"], "q/show", "what only reports goes on");
    agent.until("it reports still", || {
        node.status()["rules"][0]["state"] == "Breached"
    });
    // Whatever else comes meanwhile.
    node.keep(&self::rules());
    let late = node.burn_in(&pod("late", "batch"));
    does_nothing(&agent, || {
        is_released(&node, &batch) && is_released(&node, &late)
    });
    // As an uninstall does while agents still run: only an object that does not stop lets them go on.
    node.plane
        .kubectl(&["delete", "configmap", OBJECT, "-n", LEASES]);
    does_nothing(&agent, || is_released(&node, &batch));
    node.plane.apply(&[object()]);
    agent.until("it acts again", || {
        is_acting(&node, &batch) && is_acting(&node, &late)
    });
    agent.until("the status says so", || stopped(&node).is_null());
    agent.until("an event tells it", || {
        events(&node, "EmergencyStopEnded") == 1
    });
    assert!(!is_stopped(&agent));
}

#[test]
fn an_agent_that_starts_while_everything_is_stopped_gives_back_what_the_last_one_left() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    agent.kill();
    stop(&node, "true");
    assert!(is_acting(&node, &batch), "a dead agent gives nothing back");
    let successor = node.agent(&[]);
    successor.until("it gives it back", || is_released(&node, &batch));
    successor.until("it says so", || stopped(&node)["reason"] == "Released");
    successor.until("it is ready all the same", || successor.is_ready());
    successor.until("an event tells it", || events(&node, "EmergencyStop") == 1);
    successor.kill();
    let third = node.agent(&[]);
    third.until("it is ready", || third.is_ready());
    does_nothing(&third, || is_released(&node, &batch));
    assert_eq!(events(&node, "EmergencyStop"), 1, "it is told once");
    // Neither rules nor a controller are needed for it.
    third.kill();
    node.plane.kubectl(&["delete", "nodewatermark", NODE]);
    fs::remove_file(node.machine.path("state").join("policies.json")).unwrap();
    let fourth = node.agent(&[]);
    fourth.until("it is there at once", || {
        fourth.said().contains("keeping the node")
    });
    does_nothing(&fourth, || is_released(&node, &batch));
    node.keep(&rules());
    fourth.until("it hears of the rules", || {
        node.status()["rules"][0]["id"] == "q/show"
    });
    does_nothing(&fourth, || is_released(&node, &batch));
    resume(&node);
    fourth.until("it acts", || is_acting(&node, &batch));
}

#[test]
fn without_an_api_server_an_agent_goes_by_what_was_known_last() {
    let Some((mut node, batch)) = node() else {
        return;
    };
    let agent = acting_agent(&node, &batch);
    let state = node.machine.path("state");
    let kept = || fs::read_to_string(state.join("stop.json")).unwrap();
    assert!(kept().contains(r#""content":null"#), "{}", kept());
    // It cannot be replaced, as on a disk that is full.
    fs::create_dir(state.join("stop.new")).unwrap();
    stop(&node, "false");
    stop(&node, "");
    agent.until("it is given back", || is_released(&node, &batch));
    assert!(kept().contains(r#""content":null"#), "{}", kept());
    fs::remove_dir(state.join("stop.new")).unwrap();
    agent.until("it is kept now", || kept().contains(r#""content":"""#));
    node.plane.stop();
    agent.kill();
    let successor = node.agent(&[]);
    successor.until("it goes by what was kept", || {
        successor.said().contains("going by the rules and pods")
    });
    successor.until("it judges", || successor.is_ready());
    does_nothing(&successor, || node.quota(&batch) == -1);
    assert!(is_stopped(&successor));
    node.plane.start_again();
    resume(&node);
    let within = Duration::from_mins(1);
    node.plane.until("it hears that it may act", within, |_| {
        is_acting(&node, &batch)
    });
    // That it is over is known, too.
    node.plane.stop();
    successor.kill();
    let third = node.agent(&[]);
    third.until("it goes by what was kept", || {
        third.said().contains("going by the rules and pods")
    });
    node.machine.load.set(LOW);
    third.until("the rule is over", || node.quota(&batch) == -1);
    node.machine.load.set(HIGH);
    third.until("it acts", || node.is_throttled(&batch));
    assert!(!is_stopped(&third));
}

#[test]
fn what_a_deleted_rule_leaves_is_given_back_slowly_until_a_stop_comes() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    node.keep(&slow_rules());
    until_kept(&agent, &node);
    let mut fewer = slow_rules();
    let rules = fewer["rules"].as_array_mut().unwrap();
    rules.retain(|rule| rule["id"] != "q/cpu");
    node.keep(&fewer);
    until_kept(&agent, &node);
    // A stop would have given it back by then.
    let begun = now();
    agent.until("fifteen seconds are over", || {
        assert!(node.is_throttled(&batch), "{}", agent.said());
        begun.elapsed() > RELEASE
    });
    stop(&node, "marks are wrong");
    let mut quotas = BTreeSet::new();
    agent.until("it is given back", || {
        quotas.insert(node.quota(&batch));
        quotas.contains(&-1)
    });
    assert!(quotas.len() > 4, "not at once: {quotas:?}");
}

#[test]
fn an_agent_that_has_to_wait_gives_back_what_has_expired() {
    let Some((node, batch)) = node() else { return };
    acting_agent(&node, &batch).kill();
    // Whether everything is stopped is not known, and she may not read it.
    let state = node.machine.path("state");
    fs::remove_file(state.join("stop.json")).unwrap();
    let ann = kubeconfig_of_ann(&node);
    let ann = ["--kubeconfig", ann.to_str().unwrap()];
    let agent = node.agent(&ann);
    agent.waits_for("forbidden");
    assert!(node.is_throttled(&batch), "not yet: {}", agent.said());
    agent.kill();
    expire(&state.join("journal"));
    let agent = node.agent(&ann);
    agent.until("it is given back", || node.quota(&batch) == -1);
    agent.waits_for("forbidden");
}

/// All that the journal has was to be over long ago.
fn expire(journal: &Path) {
    let text = fs::read_to_string(journal).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with("crc32 "));
    let expired = lines.map(|line| {
        let Ok(mut record) = serde_json::from_str::<Value>(line) else {
            return format!("{line}\n");
        };
        record["deadline"] = 1.into();
        format!("{record}\n")
    });
    let body: String = expired.collect();
    let sum = crc32fast::hash(body.as_bytes());
    fs::write(journal, format!("{body}crc32 {sum:08x}\n")).unwrap();
}

#[test]
fn an_agent_that_may_not_read_the_object_says_so_and_holds_where_it_never_knew() {
    let Some((node, batch)) = node() else { return };
    let all = |group: &str, resource: &str| json!({"apiGroups": [group], "resources": [resource], "verbs": ["*"]});
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "agent"},
        "rules": [all("plimsoll.dev", "*"), all("", "nodes"), all("", "nodes/status"), all("", "pods"), all("", "events"), all("coordination.k8s.io", "leases")],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": "agent"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "agent"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}],
    });
    node.plane.apply(&[role, binding]);
    let ann = kubeconfig_of_ann(&node);
    let ann = ["--kubeconfig", ann.to_str().unwrap()];
    let agent = node.agent(&ann);
    agent.waits_for("the emergency stop can't be read");
    // Where rules but no stop were kept it would act after ten.
    let begun = now();
    agent.until("twelve seconds are over", || {
        assert!(is_released(&node, &batch), "{}", agent.said());
        begun.elapsed() > Duration::from_secs(12)
    });
    agent.waits_for("the emergency stop can't be read");
    // The role that the chart gives is enough: one object by its name.
    let name = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "stop", "namespace": LEASES},
        "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [OBJECT], "verbs": ["list", "watch"]}],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": {"name": "stop", "namespace": LEASES},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "stop"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}],
    });
    node.plane.apply(&[name, binding]);
    // Watches that are refused are begun anew the more seldom.
    node.plane
        .until("it can be read", Duration::from_mins(2), |_| {
            agent.is_ready()
        });
    agent.until("nothing is stopped, so that it acts", || {
        is_acting(&node, &batch)
    });
    stop(&node, "why");
    agent.until("it is given back", || is_released(&node, &batch));
}

/// Of somebody who has only the rights that she is given.
fn kubeconfig_of_ann(node: &Node) -> PathBuf {
    let config = fs::read_to_string(&node.plane.kubeconfig).unwrap();
    let ann = config.replace(r#""token":"admin""#, r#""token":"ann""#);
    node.plane.file("ann", &ann)
}

fn plimsoll(node: &Node, args: &[&str]) -> Output {
    plimsoll_by(&node.plane.kubeconfig, args)
}

fn plimsoll_by(kubeconfig: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plimsoll"));
    command.args(args).arg("--kubeconfig").arg(kubeconfig);
    command.output().unwrap()
}

fn said(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn the_commands_order_it_and_wait_until_every_node_has_followed() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    // A node that never had an agent is not waited for.
    let bare = json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": "bare"},
        "spec": {"nodeUID": "x", "hash": "x"},
    });
    node.plane.apply(&[bare]);
    let output = plimsoll(&node, &["stop", "--reason", "marks are wrong"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.ends_with("1 of 1 nodes have released everything\n"),
        "{text}"
    );
    assert!(is_released(&node, &batch), "{text}");
    let message = stopped(&node)["message"].as_str().unwrap().to_owned();
    assert!(
        message.starts_with("stopped: marks are wrong (by admin, 2"),
        "{message}"
    );
    let output = plimsoll(&node, &["resume"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.ends_with("1 of 1 nodes have resumed\n"), "{text}");
    agent.until("it acts again", || is_acting(&node, &batch));
    // An agent that does not answer is named; the order stands.
    agent.kill();
    let output = plimsoll(&node, &["stop", "--timeout", "2s"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("0 of 1 nodes have released everything\nnot yet: worker; "),
        "{text}"
    );
    let agent = node.agent(&[]);
    agent.until("it follows when it is back", || is_released(&node, &batch));
}

#[test]
fn where_the_object_is_missing_it_is_made_and_what_is_refused_is_told_with_the_cure() {
    let Some(node) = Node::new() else { return };
    let output = plimsoll(&node, &["stop", "--wait=false"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("is plimsoll installed"), "{text}");
    node.plane.apply(&[lease_namespace()]);
    let output = plimsoll(&node, &["resume"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains("was missing") && text.contains("resumed"),
        "{text}"
    );
    node.plane
        .kubectl(&["delete", "configmap", OBJECT, "-n", LEASES]);
    let output = plimsoll(&node, &["stop", "--wait=false"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains("was missing") && text.contains("stopped"),
        "{text}"
    );
    let get = ["get", "configmap", OBJECT, "-n", LEASES, "-o", "json"];
    let there: Value = serde_json::from_str(&node.plane.kubectl(&get)).unwrap();
    let value = there["metadata"]["annotations"][ANNOTATION]
        .as_str()
        .unwrap();
    assert!(value.starts_with("(by admin, 2"), "{value}");
    let ann = kubeconfig_of_ann(&node);
    let output = plimsoll_by(&ann, &["resume"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("cannot patch resource") && text.contains("ask somebody"),
        "{text}"
    );
    it_goes_where_agents_watch(&node);
}

/// As where the chart has another `leases.namespace`.
fn it_goes_where_agents_watch(node: &Node) {
    let labels =
        json!({"app.kubernetes.io/name": "plimsoll", "app.kubernetes.io/component": "agent"});
    let container =
        json!({"name": "agent", "image": "none", "args": ["agent", "--lease-namespace=elsewhere"]});
    node.plane.apply(&[
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "elsewhere"}}),
        json!({
            "apiVersion": "apps/v1", "kind": "DaemonSet",
            "metadata": {"name": "agent", "namespace": "elsewhere", "labels": labels},
            "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}}},
        }),
    ]);
    let output = plimsoll(node, &["stop", "--wait=false", "--reason=why"]);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let made = "was missing in namespace elsewhere and has been created";
    assert!(text.contains(made), "{text}");
    let args = ["stop", "--wait=false", "--lease-namespace", LEASES];
    let output = plimsoll(node, &args);
    let text = said(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let refused = format!("no agent watches namespace {LEASES}: they watch elsewhere");
    assert!(text.contains(&refused), "{text}");
}
