//! The emergency stop: real agents with a real API server, and the commands `stop` and `resume`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::agent_support::{Agent, HIGH, LOW, NODE, Node, closing, pod, rule, throttling};
use crate::api_support::{LEASES, lease_namespace, now};
use plimsoll::crd::emergency_stop::{ANNOTATION, OBJECT};
use serde_json::{Value, json};

/// The agent restores everything within 10 s of the stop; with a margin for a busy machine.
const RESTORE_WITHIN: Duration = Duration::from_secs(15);

/// A node with the stop object, rules that throttle and taint, and a Preview rule.
fn node() -> Option<(Node, String)> {
    let mut node = Node::new()?;
    node.plane.apply(&[lease_namespace(), object()]);
    let batch = node.burning_pod("batch");
    node.set_rules(&rules());
    node.machine.load.set(HIGH);
    Some((node, batch))
}

fn object() -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": OBJECT, "namespace": LEASES}})
}

/// Throttles in steps of `step` percent down to 20 %, one per evaluation.
fn rules_of(step: u64) -> Value {
    let mut spec = throttling();
    spec["actions"][0]["cpuThrottle"]["stepCPURatio"] = step.into();
    let slow = rule("q/cpu", "slow");
    let mut shown = rule("q/show", "close");
    shown["strategy"] = "Preview".into();
    spec["rules"] = json!([rule("q/close", "close"), slow, shown]);
    let close = closing()["actions"][0].clone();
    spec["actions"].as_array_mut().unwrap().push(close);
    spec
}

fn rules() -> Value {
    rules_of(40)
}

/// Rules whose gradual restore takes 80 seconds.
fn slow_rules() -> Value {
    rules_of(1)
}

/// Sets the annotation as documented.
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

/// Whether our taint is set: API servers taint a new node, too.
fn is_closed(node: &Node) -> bool {
    let taints = node.taints();
    taints
        .iter()
        .any(|taint| taint.starts_with("interference.crane.io:"))
}

/// Waits until the agent enforces the current rules.
fn until_enforced(agent: &Agent, node: &Node) {
    let hash = node.plane.get("nwm", NODE)["spec"]["hash"].clone();
    agent.until("the edit is enforced", || {
        node.status()["observedHash"] == hash
    });
}

fn is_acting(node: &Node, batch: &str) -> bool {
    node.is_throttled(batch) && is_closed(node)
}

/// An agent that has throttled the pod and tainted the node.
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

/// The condition of the stop.
fn stopped(node: &Node) -> Value {
    let conditions = node.status()["conditions"].as_array().cloned();
    let mut conditions = conditions.unwrap_or_default().into_iter();
    conditions
        .find(|it| it["type"] == "Stopped")
        .unwrap_or_default()
}

/// The sum of all series of a metric of the agent.
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

/// Asserts that nothing happens during enough samples for several actions.
fn does_nothing(agent: &Agent, holds: impl Fn() -> bool) {
    let acted = || {
        metric(
            agent,
            "plimsoll_agent_actions_total",
            r#"strategy="Enforce""#,
        )
    };
    let sampled = || metric(agent, "plimsoll_agent_tick_duration_seconds_count", "");
    let (before, started) = (acted(), sampled());
    agent.until("it samples on", || {
        assert!(holds(), "{}", agent.output());
        sampled() > started + 20.0
    });
    assert!((acted() - before).abs() < 0.5, "{}", agent.output());
}

fn events(node: &Node, reason: &str) -> usize {
    let events = node.plane.list("events");
    let matches_event =
        |event: &&Value| event["reason"] == reason && event["involvedObject"]["kind"] == "Node";
    events.iter().filter(matches_event).count()
}

#[test]
fn the_annotation_restores_everything_and_stops_the_agent() {
    let Some((mut node, batch)) = node() else {
        return;
    };
    let agent = acting_agent(&node, &batch);
    assert!(!is_stopped(&agent));
    // Without a stop the restore would take longer.
    node.set_rules(&rules_of(1));
    until_enforced(&agent, &node);
    assert!(is_acting(&node, &batch));
    agent.until("the node has the condition", || !node.condition().is_null());
    let started = now();
    stop(&node, "thresholds are wrong");
    agent.until("it is restored", || is_released(&node, &batch));
    let took = started.elapsed();
    assert!(took < RESTORE_WITHIN, "it took {took:?}");
    agent.until("the node has no condition", || node.condition().is_null());
    agent.until("the status says so", || {
        stopped(&node)["reason"] == "Released"
    });
    assert_eq!(
        stopped(&node)["message"],
        "stopped: thresholds are wrong; nothing is in force"
    );
    assert_eq!(crate::agent_support::ready(&node.status()), "False Stopped");
    let table = node.plane.kubectl(&["get", "nodewatermarks"]);
    assert!(
        table.contains("STOPPED") && table.contains("Released"),
        "{table}"
    );
    assert!(is_stopped(&agent));
    agent.until("an event reports it", || {
        events(&node, "EmergencyStop") == 1
    });
    does_nothing(&agent, || is_released(&node, &batch));
    let rules = node.status()["rules"].clone();
    assert_eq!(rules.as_array().map(Vec::len), Some(1), "{rules}");
    assert_eq!(rules[0]["id"], "q/show", "Preview rules continue");
    agent.until("it still reports", || {
        node.status()["rules"][0]["state"] == "Breached"
    });
    let counts = node.status()["counts"]["wouldLastDay"].as_i64();
    assert!(counts.is_some_and(|times| times > 0), "{counts:?}");
    // Other changes during the stop.
    node.set_rules(&self::rules());
    let late = node.burn_in(&pod("late", "batch"));
    does_nothing(&agent, || {
        is_released(&node, &batch) && is_released(&node, &late)
    });
    // As in an uninstall while agents still run: only an object without the annotation resumes them.
    node.plane
        .kubectl(&["delete", "configmap", OBJECT, "-n", LEASES]);
    does_nothing(&agent, || is_released(&node, &batch));
    node.plane.apply(&[object()]);
    agent.until("it acts again", || {
        is_acting(&node, &batch) && is_acting(&node, &late)
    });
    agent.until("the status says so", || stopped(&node).is_null());
    agent.until("an event reports it", || {
        events(&node, "EmergencyStopEnded") == 1
    });
    assert!(!is_stopped(&agent));
}

#[test]
fn an_agent_that_starts_during_a_stop_restores_what_the_last_one_left() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    agent.kill();
    stop(&node, "true");
    assert!(is_acting(&node, &batch), "a dead agent restores nothing");
    let successor = node.agent(&[]);
    successor.until("it restores it", || is_released(&node, &batch));
    successor.until("it says so", || stopped(&node)["reason"] == "Released");
    successor.until("it is ready", || successor.is_ready());
    successor.until("an event reports it", || {
        events(&node, "EmergencyStop") == 1
    });
    successor.kill();
    let third = node.agent(&[]);
    third.until("it is ready", || third.is_ready());
    does_nothing(&third, || is_released(&node, &batch));
    assert_eq!(events(&node, "EmergencyStop"), 1, "it is reported once");
    // It needs neither rules nor a controller.
    third.kill();
    node.plane.kubectl(&["delete", "nodewatermark", NODE]);
    fs::remove_file(node.machine.path("state").join("policies.json")).unwrap();
    let fourth = node.agent(&[]);
    fourth.until("it starts at once", || {
        fourth.output().contains("node is enforced")
    });
    does_nothing(&fourth, || is_released(&node, &batch));
    node.set_rules(&rules());
    fourth.until("it gets the rules", || {
        node.status()["rules"][0]["id"] == "q/show"
    });
    does_nothing(&fourth, || is_released(&node, &batch));
    resume(&node);
    fourth.until("it acts", || is_acting(&node, &batch));
}

#[test]
fn without_an_api_server_an_agent_uses_the_saved_stop() {
    let Some((mut node, batch)) = node() else {
        return;
    };
    let agent = acting_agent(&node, &batch);
    let state = node.machine.path("state");
    let saved = || fs::read_to_string(state.join("stop.json")).unwrap();
    assert!(saved().contains(r#""content":null"#), "{}", saved());
    // The file cannot be replaced, as on a full disk.
    fs::create_dir(state.join("stop.new")).unwrap();
    stop(&node, "false");
    stop(&node, "");
    agent.until("it is restored", || is_released(&node, &batch));
    assert!(saved().contains(r#""content":null"#), "{}", saved());
    fs::remove_dir(state.join("stop.new")).unwrap();
    agent.until("it is saved now", || saved().contains(r#""content":"""#));
    node.plane.stop();
    agent.kill();
    let successor = node.agent(&[]);
    successor.until("it uses the saved state", || {
        successor
            .output()
            .contains("using the rules and pods saved")
    });
    successor.until("it judges", || successor.is_ready());
    does_nothing(&successor, || node.quota(&batch) == -1);
    assert!(is_stopped(&successor));
    node.plane.start_again();
    resume(&node);
    let within = Duration::from_mins(1);
    node.plane
        .until("it learns that the stop is over", within, |_| {
            is_acting(&node, &batch)
        });
    // The end of the stop is saved, too.
    node.plane.stop();
    successor.kill();
    let third = node.agent(&[]);
    third.until("it uses the saved state", || {
        third.output().contains("using the rules and pods saved")
    });
    node.machine.load.set(LOW);
    third.until("the rule has ended", || node.quota(&batch) == -1);
    node.machine.load.set(HIGH);
    third.until("it acts", || node.is_throttled(&batch));
    assert!(!is_stopped(&third));
}

#[test]
fn a_deleted_rule_is_restored_gradually_until_a_stop() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    node.set_rules(&slow_rules());
    until_enforced(&agent, &node);
    let mut fewer = slow_rules();
    let rules = fewer["rules"].as_array_mut().unwrap();
    rules.retain(|rule| rule["id"] != "q/cpu");
    node.set_rules(&fewer);
    until_enforced(&agent, &node);
    // A stop would have restored it by then.
    let started = now();
    agent.until("fifteen seconds have passed", || {
        assert!(node.is_throttled(&batch), "{}", agent.output());
        started.elapsed() > RESTORE_WITHIN
    });
    stop(&node, "thresholds are wrong");
    let mut quotas = BTreeSet::new();
    agent.until("it is restored", || {
        quotas.insert(node.quota(&batch));
        quotas.contains(&-1)
    });
    assert!(quotas.len() > 4, "not at once: {quotas:?}");
}

#[test]
fn a_waiting_agent_restores_what_has_expired() {
    let Some((node, batch)) = node() else { return };
    acting_agent(&node, &batch).kill();
    // The stop is unknown, and this user may not read it.
    let state = node.machine.path("state");
    fs::remove_file(state.join("stop.json")).unwrap();
    let ann = restricted_kubeconfig(&node);
    let ann = ["--kubeconfig", ann.to_str().unwrap()];
    let agent = node.agent(&ann);
    agent.waits_for("forbidden");
    assert!(node.is_throttled(&batch), "not yet: {}", agent.output());
    agent.kill();
    expire(&state.join("journal"));
    let agent = node.agent(&ann);
    agent.until("it is restored", || node.quota(&batch) == -1);
    agent.waits_for("forbidden");
}

/// Sets all deadlines in the journal to the past.
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
fn an_agent_that_cannot_read_the_stop_says_so_and_waits() {
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
    let ann = restricted_kubeconfig(&node);
    let ann = ["--kubeconfig", ann.to_str().unwrap()];
    let agent = node.agent(&ann);
    agent.waits_for("failed to read the emergency stop");
    // If it ignored the unknown stop, it would act after ten seconds.
    let started = now();
    agent.until("twelve seconds have passed", || {
        assert!(is_released(&node, &batch), "{}", agent.output());
        started.elapsed() > Duration::from_secs(12)
    });
    agent.waits_for("failed to read the emergency stop");
    // The chart's role is enough: one object by name.
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
    // Refused watches are retried with growing pauses.
    node.plane
        .until("it can be read", Duration::from_mins(2), |_| {
            agent.is_ready()
        });
    agent.until("nothing is stopped, so that it acts", || {
        is_acting(&node, &batch)
    });
    stop(&node, "why");
    agent.until("it is restored", || is_released(&node, &batch));
}

/// A user with only the given rights.
fn restricted_kubeconfig(node: &Node) -> PathBuf {
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

fn text_of(output: &Output) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    text(&output.stdout) + &text(&output.stderr)
}

#[test]
fn the_commands_wait_until_every_node_has_followed() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    // Nodes that never had an agent are ignored.
    let bare = json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark", "metadata": {"name": "bare"},
        "spec": {"nodeUID": "x", "hash": "x"},
    });
    node.plane.apply(&[bare]);
    let output = plimsoll(&node, &["stop", "--reason", "thresholds are wrong"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.ends_with("1 of 1 nodes have restored everything\n"),
        "{text}"
    );
    assert!(is_released(&node, &batch), "{text}");
    let message = stopped(&node)["message"].as_str().unwrap().to_owned();
    assert!(
        message.starts_with("stopped: thresholds are wrong (by admin, 2"),
        "{message}"
    );
    let output = plimsoll(&node, &["resume"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(text.ends_with("1 of 1 nodes have resumed\n"), "{text}");
    agent.until("it acts again", || is_acting(&node, &batch));
    // An unresponsive agent is named; the stop stays.
    agent.kill();
    let output = plimsoll(&node, &["stop", "--timeout", "2s"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains("0 of 1 nodes have restored everything\nnot yet: worker; "),
        "{text}"
    );
    let agent = node.agent(&[]);
    agent.until("it follows when it is back", || is_released(&node, &batch));
}

#[test]
fn a_node_is_stopped_alone_and_resumes_alone() {
    let Some((node, batch)) = node() else { return };
    let agent = acting_agent(&node, &batch);
    let run = |args: &[&str]| {
        let output = plimsoll(&node, args);
        (output.status.code(), text_of(&output))
    };
    let (code, text) = run(&["stop", "--node", "nowhere"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("there is no node nowhere"), "{text}");
    let (code, text) = run(&["stop", "-l", "pool=none"]);
    assert_eq!(code, Some(2), "{text}");
    assert!(text.contains("no node has the labels pool=none"), "{text}");
    let (code, text) = run(&["stop", "--node", "worker", "--reason", "under test"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("the agents of worker restore")
            && text.ends_with("1 of 1 nodes have restored everything\n"),
        "{text}"
    );
    assert!(is_released(&node, &batch), "{text}");
    let message = stopped(&node)["message"].as_str().unwrap().to_owned();
    assert!(
        message.starts_with("stopped: under test (by admin, 2"),
        "{message}"
    );
    // What stops a node alone is not ended by what lets all others act.
    let (code, text) = run(&["resume"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains("still stopped: worker (plimsoll resume --node NAME)")
            && text.ends_with("0 of 0 nodes have resumed\n"),
        "{text}"
    );
    assert!(is_released(&node, &batch));
    // While everything is stopped, no node resumes alone.
    let (code, text) = run(&["stop"]);
    assert_eq!(code, Some(0), "{text}");
    let (code, text) = run(&["resume", "--node", "worker"]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("all nodes are stopped"), "{text}");
    let (code, text) = run(&["resume"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(text.ends_with("1 of 1 nodes have resumed\n"), "{text}");
    agent.until("it acts again", || is_acting(&node, &batch));
}

#[test]
fn a_missing_object_is_created_and_a_refusal_has_a_hint() {
    let Some(node) = Node::new() else { return };
    let output = plimsoll(&node, &["stop", "--no-wait"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("is plimsoll installed"), "{text}");
    node.plane.apply(&[lease_namespace()]);
    let output = plimsoll(&node, &["resume"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains("was missing") && text.contains("resumed"),
        "{text}"
    );
    node.plane
        .kubectl(&["delete", "configmap", OBJECT, "-n", LEASES]);
    let output = plimsoll(&node, &["stop", "--no-wait"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    assert!(
        text.contains("was missing") && text.contains("stop requested"),
        "{text}"
    );
    let get = ["get", "configmap", OBJECT, "-n", LEASES, "-o", "json"];
    let there: Value = serde_json::from_str(&node.plane.kubectl(&get)).unwrap();
    let value = there["metadata"]["annotations"][ANNOTATION]
        .as_str()
        .unwrap();
    assert!(value.starts_with("(by admin, 2"), "{value}");
    let ann = restricted_kubeconfig(&node);
    let output = plimsoll_by(&ann, &["resume"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("cannot patch resource") && text.contains("ask an administrator"),
        "{text}"
    );
    a_role_for_the_name_is_enough(&node, &ann);
    it_goes_where_agents_watch(&node);
}

/// As the chart gives to the hook that uninstalls.
fn a_role_for_the_name_is_enough(node: &Node, ann: &Path) {
    let named = |object: Value| {
        let mut object = object;
        object["metadata"] = json!({"name": "stop", "namespace": LEASES});
        object
    };
    node.plane.apply(&[
        named(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "rules": [{"apiGroups": [""], "resources": ["configmaps"], "resourceNames": [OBJECT], "verbs": ["create", "patch"]}],
        })),
        named(json!({
            "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "stop"},
            "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": "ann"}],
        })),
    ]);
    node.plane
        .kubectl(&["delete", "configmap", OBJECT, "-n", LEASES]);
    let stop = ["stop", "--no-wait"];
    node.plane
        .until("the Role is in force", Duration::from_secs(30), |_| {
            plimsoll_by(ann, &stop).status.success()
        });
    let get = ["get", "configmap", OBJECT, "-n", LEASES, "-o", "json"];
    let there: Value = serde_json::from_str(&node.plane.kubectl(&get)).unwrap();
    assert!(there["metadata"]["annotations"][ANNOTATION].is_string());
}

/// With another `leases.namespace` of the chart.
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
    let output = plimsoll(node, &["stop", "--no-wait", "--reason=why"]);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(0), "{text}");
    let made = "was missing in namespace elsewhere and has been created";
    assert!(text.contains(made), "{text}");
    let args = ["stop", "--no-wait", "--lease-namespace", LEASES];
    let output = plimsoll(node, &args);
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(2), "{text}");
    let refused = format!("no agent watches namespace {LEASES}: they watch elsewhere");
    assert!(text.contains(&refused), "{text}");
}
