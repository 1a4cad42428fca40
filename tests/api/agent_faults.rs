//! `plimsoll agent` during failures of the API server or the network, while a pod is throttled to its floor and the node is
//! tainted.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::agent_support::{Agent, HIGH, NODE, Node, evicting, pod, ready, rule, throttling};
use crate::api_support::Process;
use crate::api_support::faults::{BROKEN, EXPIRED, Fault, FaultQueues, Proxy, of_calls};
use crate::api_support::leader::Leader;
use nix::sys::signal::Signal;
use plimsoll::crd::eviction::api_path;
use serde_json::{Value, json};

/// Timeout of waits: a call may hang for 15 s, and pauses grow with each failure.
const TIMEOUT: Duration = Duration::from_secs(90);

/// Above this threshold pods labelled `app: batch` are throttled and the node is tainted until the policy ends: on a busy
/// machine the simulated load may lag.
fn rules(threshold: u32, effect: &str) -> Value {
    let mut spec = throttling();
    spec["rules"][0] = rule("q/cpu", "slow");
    spec["rules"][0]["watermark"] = f64::from(threshold).into();
    spec["rules"][0]["restoreThreshold"] = 1000.into();
    spec["actions"][0]["disableScheduling"] = effect.into();
    spec
}

/// A node with everything in force and its agent behind a proxy.
struct Scene {
    node: Node,
    proxy: Proxy,
    batch: String,
    /// The quota of the throttled pod at its floor.
    floor: i64,
    threshold: u32,
    effect: &'static str,
}

impl Scene {
    fn new() -> Option<(Self, Agent)> {
        let mut node = Node::new()?;
        node.plane.apply(&[crate::api_support::lease_namespace()]);
        let batch = node.burning_pod("batch");
        let proxy = Proxy::beside(&node.plane.kubeconfig);
        let mut scene = Self {
            node,
            proxy,
            batch,
            floor: 0,
            threshold: 1000,
            effect: "NoSchedule",
        };
        scene.node.set_rules(&rules(scene.threshold, scene.effect));
        scene.node.machine.load.set(HIGH);
        let agent = scene.agent(&[]);
        // "at its floor" may also be said of a pod that got little CPU for a moment.
        agent.until_within(TIMEOUT, "everything is in force", || {
            agent.output().contains("-> 20 %") && scene.is_tainted()
        });
        scene.floor = scene.node.quota(&scene.batch);
        assert!(scene.floor > 0);
        Some((scene, agent))
    }

    fn agent(&self, more: &[&str]) -> Agent {
        let kubeconfig = self
            .node
            .plane
            .file("proxied", &self.proxy.kubeconfig().to_string());
        let by_proxy = ["--kubeconfig", kubeconfig.to_str().unwrap()];
        self.node.agent(&[&by_proxy, more].concat())
    }

    fn is_tainted(&self) -> bool {
        let ours = format!("interference.crane.io:{}", self.effect);
        self.node.taints().contains(&ours)
    }

    /// The pod is neither restored nor throttled further, and the taint stays.
    fn assert_in_force(&self, agent: &Agent) {
        let quota = self.node.quota(&self.batch);
        assert_eq!(quota, self.floor, "{}", agent.output());
        let taints = self.node.taints();
        let is_ours = |taint: &String| taint.starts_with("interference.crane.io:");
        assert!(taints.iter().any(is_ours), "{taints:?}\n{}", agent.output());
    }

    /// Edits threshold and effect and waits until both are followed, while everything stays in force.
    fn edit(&mut self, agent: &mut Agent, what: &str) {
        self.threshold += 1;
        self.effect = match self.effect {
            "NoSchedule" => "PreferNoSchedule",
            _ => "NoSchedule",
        };
        self.node.set_rules(&rules(self.threshold, self.effect));
        agent.until_within(TIMEOUT, what, || {
            self.assert_in_force(agent);
            metric(agent, "plimsoll_agent_rule_threshold{") == Some(f64::from(self.threshold))
                && self.is_tainted()
        });
        assert!(agent.process.0.try_wait().unwrap().is_none(), "it ended");
    }

    fn is_restored_without_the_policy(&self, agent: &mut Agent) {
        self.node.set_rules(&json!({"rules": []}));
        agent.until_within(TIMEOUT, "everything is restored", || {
            self.node.quota(&self.batch) == -1 && self.node.condition()["status"] == "False"
        });
        let taints = self.node.taints();
        let is_ours = |taint: &String| taint.starts_with("interference.crane.io:");
        assert!(!taints.iter().any(is_ours), "{taints:?}");
        assert!(agent.process.0.try_wait().unwrap().is_none(), "it ended");
        assert!(!agent.output().contains("panicked"), "{}", agent.output());
    }
}

/// The value of the first series with this prefix.
fn metric(agent: &Agent, begins: &str) -> Option<f64> {
    let (_, text) = agent.http("/metrics")?;
    let line = text.lines().find(|line| line.starts_with(begins))?;
    line.rsplit(' ').next()?.parse().ok()
}

const WATCHED: [&str; 4] = ["configmaps", "nodes", "nodewatermarks", "pods"];

/// `list nodes`, `watch pods`
fn watch_kind(method: &str, path: &str) -> Option<String> {
    let (path, query) = path.split_once('?')?;
    let kind = WATCHED.into_iter().find(|kind| path.ends_with(kind))?;
    if method != "GET" {
        return None;
    }
    let what = if query.contains("watch=true") {
        "watch"
    } else {
        "list"
    };
    Some(format!("{what} {kind}"))
}

#[test]
fn failing_watches_leave_everything_in_force_and_edits_are_followed() {
    let Some((mut scene, mut agent)) = Scene::new() else {
        return;
    };
    let queues = FaultQueues::before(&scene.proxy, watch_kind);
    // An expired version forces a new list.
    let expired = || Some(Fault::Answer(200, None, EXPIRED.to_owned()));
    let broken = (
        "an error within a watch",
        Fault::Answer(200, None, BROKEN.to_owned()),
    );
    for (what, fault) in of_calls().into_iter().chain([broken]) {
        for (index, kind) in WATCHED.into_iter().enumerate() {
            let (on_watch, on_list) = match fault {
                // It takes 15 s, and all kinds behave alike.
                Fault::NeverAnswer => (index % 2 == 0, index % 2 == 1),
                // A watch has no end that could be cut, and can be cut in the middle only if it delivers something.
                Fault::CutAfter => (false, true),
                Fault::CutWithin => (kind == "nodewatermarks", true),
                _ => (true, true),
            };
            let fault = |is_due: bool| is_due.then(|| Some(fault.clone()));
            queues.add(
                format!("watch {kind}"),
                fault(on_watch).into_iter().chain([expired()]),
            );
            queues.add(format!("list {kind}"), fault(on_list));
        }
        while !queues.left().is_empty() {
            scene.proxy.cut();
            scene.edit(&mut agent, what);
        }
    }
    let log = agent.output();
    assert!(log.contains("failed to watch") && log.contains("watching again"));
    scene.is_restored_without_the_policy(&mut agent);
}

/// The agent's writes, and the reads for them.
fn write_kind(method: &str, path: &str) -> Option<String> {
    let path = path.split('?').next().unwrap();
    let kind = match method {
        "PATCH" if path.ends_with("nodes/worker") => "taint",
        "PATCH" if path.ends_with("nodes/worker/status") => "condition",
        "PATCH" if path.ends_with("nodewatermarks/worker/status") => "status",
        "GET" if path.ends_with("nodes/worker") => "node",
        "POST" if path.ends_with("/events") => "event",
        "GET" | "PUT" | "POST" if path.contains("/leases") => "lease",
        _ => return None,
    };
    Some(kind.to_owned())
}

#[test]
fn failing_writes_are_all_retried_and_everything_stays_in_force() {
    let Some((mut scene, mut agent)) = Scene::new() else {
        return;
    };
    let queues = FaultQueues::before(&scene.proxy, write_kind);
    // Status and Lease are written at most every ten seconds, but retried sooner.
    let in_a_row = BTreeMap::from([("status", 2), ("lease", 3)]);
    let kinds = ["taint", "condition", "status", "event", "lease"];
    for kind in kinds {
        let faults: Vec<_> = of_calls()
            .into_iter()
            .map(|(_, fault)| Some(fault))
            .collect();
        for some in faults.chunks(*in_a_row.get(kind).unwrap_or(&1)) {
            queues.add(kind, some.iter().cloned().chain([None]));
        }
    }
    // The node is read once after a 409 to the taint.
    queues.add("node", [Some(Fault::Answer(500, None, "boom".to_owned()))]);
    let started = crate::api_support::now();
    while !queues.left().is_empty() {
        scene.edit(&mut agent, &format!("still to come: {:?}", queues.left()));
        // Each edit is an event, and an agent publishes them at a limited rate.
        std::thread::park_timeout(Duration::from_millis(500));
        assert!(
            started.elapsed() < 4 * TIMEOUT,
            "never made: {:?}",
            queues.left()
        );
    }
    let Scene {
        node, threshold, ..
    } = &scene;
    let hash = node.plane.get("nwm", NODE)["spec"]["hash"].clone();
    agent.until_within(TIMEOUT, "the status shows the last edit", || {
        node.status()["observedHash"] == hash
    });
    agent.until_within(TIMEOUT, "the condition shows the last edit", || {
        let condition = node.condition();
        let message = condition["message"].as_str().unwrap_or_default();
        condition["status"] == "True" && message.contains(&format!("above {threshold}m"))
    });
    let renewed = || node.lease()["spec"]["renewTime"].clone();
    let before = renewed();
    agent.until_within(TIMEOUT, "the Lease is renewed", || renewed() != before);
    scene.is_restored_without_the_policy(&mut agent);
    agent.until_within(TIMEOUT, "an event reports it", || {
        let events = scene.node.plane.list("events");
        events
            .iter()
            .any(|event| event["reason"] == "SchedulingEnabled")
    });
}

#[test]
fn sigterm_leaves_everything_in_force_unless_the_daemonset_is_deleted() {
    let Some((scene, agent)) = Scene::new() else {
        return;
    };
    agent.kill();
    let own = scene.node.with_daemon_set();
    let queues = FaultQueues::before(&scene.proxy, |method, path| {
        let read = ["daemonsets/agent", "nodewatermarks/worker"];
        let asked = read.into_iter().find(|it| path.ends_with(it));
        asked.filter(|_| method == "GET").map(str::to_owned)
    });
    // Without rights no agent with this account could continue: another test covers these two.
    let is_inconclusive = |(what, _): &(&str, Fault)| !matches!(*what, "401" | "403");
    for (what, fault) in of_calls().into_iter().filter(is_inconclusive) {
        let agent = scene.agent(&own);
        // It has to see its own pod to know its DaemonSet.
        agent.until_within(
            TIMEOUT,
            "it adopts what is in force and lists everything",
            || agent.output().contains("adopted=1") && agent.is_ready(),
        );
        queues.add("daemonsets/agent", [Some(fault)]);
        let (succeeded, output) = agent.terminate();
        let left = output.contains("what is in force stays in force");
        assert!(succeeded && left, "{what}: {output}");
        assert!(
            queues.left().is_empty(),
            "{what}: it did not read the DaemonSet"
        );
        assert_eq!(
            scene.node.quota(&scene.batch),
            scene.floor,
            "{what}: {output}"
        );
        assert!(scene.is_tainted(), "{what}: {output}");
    }
    let mut agent = scene.agent(&own);
    scene.is_restored_without_the_policy(&mut agent);
    scene.node.set_rules(&rules(scene.threshold, scene.effect));
    agent.until_within(TIMEOUT, "it acts", || {
        scene.node.is_throttled(&scene.batch) && scene.is_tainted()
    });
    scene.node.plane.kubectl(&["delete", "daemonset", "agent"]);
    let no_page = Fault::Answer(404, None, "no such page".to_owned());
    queues.add("nodewatermarks/worker", [Some(no_page)]);
    let (succeeded, output) = agent.terminate();
    assert!(
        succeeded && output.contains("DaemonSet agent is deleted"),
        "{output}"
    );
    assert_eq!(scene.node.quota(&scene.batch), -1);
    assert!(!scene.is_tainted());
    assert!(queues.left().is_empty(), "{:?}", queues.left());
    assert_eq!(ready(&scene.node.status()), "False AgentEnded");
}

/// Rules that evict two pods per round.
fn two_evictions() -> Value {
    let mut spec = evicting();
    spec["rules"][0]["watermark"] = 1.0.into();
    spec["actions"][0]["eviction"]["maxPodsPerRound"] = 2.into();
    spec
}

#[test]
fn no_eviction_is_sent_once_everything_is_being_restored() {
    let Some(mut node) = Node::new() else { return };
    node.plane.apply(&[crate::api_support::lease_namespace()]);
    for name in ["one", "two"] {
        let mut pod = pod(name, "batch");
        pod["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "x", "uid": "x", "controller": true}]);
        node.burn_in(&pod);
    }
    let Some(leader) = Leader::start(&node.plane, NODE) else {
        return;
    };
    leader.serve_through_api_server(&node.plane, "default");
    let proxy = Proxy::beside(&node.plane.kubeconfig);
    let started = Arc::new(AtomicBool::new(false));
    let sent = Arc::clone(&started);
    // The first takes long, so that the second waits and the taint set before it stays.
    proxy.respond_with(move |method, path| {
        if path == api_path(NODE) {
            if !sent.swap(true, Ordering::SeqCst) {
                std::thread::park_timeout(Duration::from_secs(4));
            }
            return None;
        }
        let opens = method == "PATCH" && path.contains("/nodes/") && sent.load(Ordering::SeqCst);
        opens.then(|| Fault::Answer(500, None, "no".to_owned()))
    });
    let kubeconfig = node.plane.file("proxied", &proxy.kubeconfig().to_string());
    node.set_rules(&two_evictions());
    node.machine.load.set(HIGH);
    let mut agent = node.agent(&[
        "--kubeconfig",
        kubeconfig.to_str().unwrap(),
        "--evaluation-period",
        "15s",
    ]);
    agent.until_within(TIMEOUT, "the first is sent", || {
        started.load(Ordering::SeqCst)
    });
    agent.signal(Signal::SIGINT);
    agent.process.0.wait().unwrap();
    let seen = proxy.take_seen();
    let evictions = seen.iter().filter(|(_, path)| *path == api_path(NODE));
    assert_eq!(evictions.count(), 1, "{}", agent.output());
    assert_eq!(leader.evicted().len(), 1, "{}", agent.output());
}

/// Removes a field of the rules and one of the status from the CRD, as in an older version.
fn without_two_fields() -> String {
    let schema = "/spec/versions/0/schema/openAPIV3Schema/properties";
    let rules = format!("{schema}/spec/properties/rules/items");
    let paths = [
        format!("{rules}/properties/restoreThreshold"),
        format!("{rules}/required"),
        format!("{schema}/status/properties/counts"),
    ];
    json!(paths.map(|path| json!({"op": "remove", "path": path}))).to_string()
}

#[test]
fn a_missing_or_outdated_crd_is_reported_with_the_fix() {
    let Some(mut node) = Node::new() else { return };
    let batch = node.burning_pod("batch");
    node.machine.load.set(HIGH);
    let crd = "nodewatermarks.plimsoll.dev";
    node.plane.kubectl(&["delete", "crd", crd]);
    let mut agent = node.agent(&[]);
    agent.until_within(TIMEOUT, "the missing CRD is reported with the fix", || {
        let words = "the CRD of NodeWatermark is not installed (`plimsoll crds";
        let ready = agent.http("/readyz");
        ready.is_some_and(|(code, body)| code == 503 && body.contains(words))
    });
    assert_eq!(agent.http("/livez").unwrap().0, 200);
    node.plane.install_definitions();
    node.set_rules(&throttling());
    agent.until_within(TIMEOUT, "it catches up", || node.is_throttled(&batch));

    let patch = without_two_fields();
    node.plane
        .kubectl(&["patch", "crd", crd, "--type=json", "-p", &patch]);
    agent.until_within(TIMEOUT, "the field is not served any more", || {
        let rule = node.plane.get("nwm", NODE)["spec"]["rules"][0].clone();
        rule["id"] == "q/cpu" && rule["restoreThreshold"].is_null()
    });
    node.plane
        .kubectl(&["annotate", "nwm", NODE, "example.com/touched=yes"]);
    agent.until_within(TIMEOUT, "the field that a rule lacks is named", || {
        agent
            .output()
            .contains("rule q/cpu: missing field `restoreThreshold`")
    });
    agent.until_within(TIMEOUT, "the fix is logged", || {
        let output = agent.output();
        output.contains("the CRD of NodeWatermark is of another version (`plimsoll crds")
            && output.contains("status.counts: field not declared in schema")
    });
    assert_eq!(agent.http("/livez").unwrap().0, 200);
    node.plane.install_definitions();
    agent.until_within(TIMEOUT, "the field is served again", || {
        node.try_set_rules(&throttling()).is_ok()
    });
    let writes = Cell::new(0);
    agent.until_within(TIMEOUT, "it catches up", || {
        // A watch that still runs shows the write without the field; the next write is complete.
        writes.set(writes.get() + 1);
        let touched = format!("example.com/touched={}", writes.get());
        node.plane
            .kubectl(&["annotate", "--overwrite", "nwm", NODE, &touched]);
        node.is_throttled(&batch) && node.status()["counts"]["throttled"] == 1
    });
    let ended = agent.process.0.try_wait().unwrap();
    assert!(ended.is_none(), "it exited: {}", agent.output());
}

/// Delays each fsync of a process; writes its trace into the file.
fn slow_disk(agent: &Agent, trace: &Path) -> Process {
    let pid = agent.process.0.id().to_string();
    let calls = "fsync,fdatasync";
    let child = Command::new("strace")
        .args(["-q", "-f", "-p", &pid, "-e", &format!("trace={calls}")])
        .args(["-e", &format!("inject={calls}:delay_enter=20s"), "-o"])
        .arg(trace)
        .spawn();
    Process(child.expect("strace is missing: `make tools` installs it"))
}

#[test]
fn a_disk_whose_fsync_takes_20_s_delays_nothing() {
    let Some(mut node) = Node::new() else { return };
    node.plane.apply(&[crate::api_support::lease_namespace()]);
    let batch = node.burning_pod("batch");
    node.set_rules(&rules(1000, "NoSchedule"));
    let agent = node.agent(&[]);
    agent.until("it reports", || !node.lease().is_null() && agent.is_ready());
    let trace = node.machine.path("fsync.log");
    let _strace = slow_disk(&agent, &trace);
    agent.until("it is traced", || trace.exists());
    // Rules are written durably.
    node.set_rules(&rules(1001, "NoSchedule"));
    agent.until("it has the edited rules", || {
        metric(&agent, "plimsoll_agent_rule_threshold{") == Some(1001.0)
    });
    let renew_time = || node.lease()["spec"]["renewTime"].clone();
    let before = renew_time();
    node.machine.load.set(HIGH);
    let mut slowest = Duration::ZERO;
    agent.until_within(Duration::from_secs(18), "all go on", || {
        let asked = crate::api_support::now();
        assert_eq!(agent.http("/livez").unwrap().0, 200);
        slowest = slowest.max(asked.elapsed());
        let tainted = "interference.crane.io:NoSchedule".to_owned();
        node.is_throttled(&batch) && node.taints().contains(&tainted) && renew_time() != before
    });
    assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    agent.until("an fsync was delayed", || {
        fs::read_to_string(&trace).is_ok_and(|text| text.contains("DELAYED"))
    });
}
