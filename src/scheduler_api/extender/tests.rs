use std::collections::VecDeque;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::super::values::tests::{at, cluster, node};
use super::*;
use crate::crd::scheduler_policy;

/// A pod with these requests.
fn pod(uid: &str, cpu: &str, memory: &str) -> Value {
    let requests = json!({"cpu": cpu, "memory": memory});
    let containers = json!([{"name": "c", "resources": {"requests": requests}}]);
    json!({"metadata": {"name": uid, "namespace": "shop", "uid": uid}, "spec": {"containers": containers}})
}

fn small(uid: &str) -> Value {
    pod(uid, "100m", "64Mi")
}

fn body(pod: &Value, names: &[&str]) -> String {
    json!({"Pod": pod, "Nodes": null, "NodeNames": names}).to_string()
}

/// The points of each node by the order of the names.
fn points(
    extender: &mut Extender,
    nodes: &ByNode,
    pod: &Value,
    names: &[&str],
    now: BootTime,
) -> Vec<u64> {
    let body = body(pod, names);
    let request = ExtenderRequest::read(body.as_bytes()).unwrap();
    let answer = extender.prioritize(&request, nodes, now);
    let answer: Vec<Value> = serde_json::from_slice(&answer.body).unwrap();
    let hosts: Vec<&str> = answer
        .iter()
        .map(|it| it["Host"].as_str().unwrap())
        .collect();
    assert_eq!(hosts, names);
    answer
        .iter()
        .map(|it| it["Score"].as_u64().unwrap())
        .collect()
}

/// The nodes that pass Filter, and the reasons of the others.
fn filtered(extender: &mut Extender, nodes: &ByNode, pod: &Value, names: &[&str]) -> Value {
    let body = body(pod, names);
    let request = ExtenderRequest::read(body.as_bytes()).unwrap();
    serde_json::from_slice(&extender.filter(&request, nodes, at()).body).unwrap()
}

/// A node whose load line is 80 % of its CPUs, with this load.
fn loaded(load: f64) -> KnownLoad {
    node(load, load * 0.8, 10.0)
}

#[test]
fn hot_nodes_are_avoided_and_all_alike() {
    let nodes = cluster([
        Some(loaded(20.0)),
        Some(loaded(96.0)),
        Some(loaded(60.0)),
        Some(loaded(120.0)),
        Some(loaded(94.0)),
    ]);
    let names = ["a", "b", "c", "d", "e"];
    let found = points(&mut Extender::default(), &nodes, &small("u"), &names, at());
    assert!(
        found[0] >= 8 && found[0] > found[2] && found[2] >= 3,
        "{found:?}"
    );
    // With the pod the last one is over 95, too.
    assert_eq!((found[1], found[3], found[4]), (0, 0, 0), "{found:?}");
    let hot = cluster([Some(loaded(96.0)), Some(loaded(100.0)), Some(loaded(300.0))]);
    let found = points(
        &mut Extender::default(),
        &hot,
        &small("u"),
        &names[..3],
        at(),
    );
    assert_eq!(found, [0, 0, 0]);
}

#[test]
fn the_pods_own_use_counts() {
    let mut large = node(40.0, 32.0, 10.0);
    large.cpu.0 *= 8;
    let nodes = cluster([Some(loaded(30.0)), Some(large)]);
    // 2 CPUs are half of the first node, and a sixteenth of the second.
    let found = points(
        &mut Extender::default(),
        &nodes,
        &pod("u", "2", "64Mi"),
        &["a", "b"],
        at(),
    );
    assert!(found[0] + 2 < found[1], "{found:?}");
}

#[test]
fn unknown_nodes_are_neutral() {
    let mut old = node(10.0, 8.0, 10.0);
    old.at = BootTime::default();
    let nodes = cluster([
        Some(loaded(10.0)),
        Some(loaded(50.0)),
        Some(loaded(90.0)),
        None,
        Some(old),
    ]);
    let names = ["a", "b", "c", "d", "e", "unknown"];
    let found = points(&mut Extender::default(), &nodes, &small("u"), &names, at());
    assert_eq!([found[1]; 3], found[3..], "{found:?}");
    let nothing = ByNode::default();
    let found = points(
        &mut Extender::default(),
        &nothing,
        &small("u"),
        &names,
        at(),
    );
    assert!(found.iter().all(|points| *points == found[0]), "{found:?}");
}

#[test]
fn a_pod_in_flight_counts_for_two_seconds() {
    let nodes = cluster([Some(loaded(50.0)), Some(loaded(55.0))]);
    let mut extender = Extender::default();
    let names = ["a", "b"];
    let best = |extender: &mut Extender, uid: &str, millis: u64| {
        let now = at() + Duration::from_millis(millis);
        let found = points(extender, &nodes, &pod(uid, "400m", "64Mi"), &names, now);
        usize::from(found[1] > found[0])
    };
    assert_eq!(best(&mut extender, "p", 0), 0);
    // The same pod is not there yet.
    assert_eq!(best(&mut extender, "p", 100), 0);
    // 10 points of the load line more.
    assert_eq!(best(&mut extender, "q", 200), 1);
    assert_eq!(best(&mut extender, "q", 2099), 1);
    assert_eq!(best(&mut extender, "q", 2100), 0);
}

#[test]
fn filter_rejects_nodes_at_their_load_line() {
    let nodes = cluster([
        Some(loaded(99.0)),
        Some(loaded(50.0)),
        Some(loaded(97.0)),
        Some(loaded(50.0)),
        None,
        Some(loaded(50.0)),
    ]);
    let names = ["a", "b", "c", "d", "e", "f", "x"];
    let found = filtered(&mut Extender::default(), &nodes, &small("u"), &names);
    assert_eq!(found["NodeNames"], json!(["b", "c", "d", "e", "f", "x"]));
    assert_eq!(
        found["FailedAndUnresolvableNodes"],
        json!({"a": line::REASON})
    );
    let mut daemon = small("u");
    daemon["metadata"]["ownerReferences"] = json!([{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": true}]);
    let found = filtered(&mut Extender::default(), &nodes, &daemon, &names);
    assert_eq!(found["NodeNames"], json!(names));
    // Half of them would be rejected.
    let found = filtered(
        &mut Extender::default(),
        &nodes,
        &pod("u", "200m", "64Mi"),
        &["a", "c", "b", "d"],
    );
    assert_eq!(found["NodeNames"], json!(["a", "c", "b", "d"]));
    assert_eq!(found["FailedAndUnresolvableNodes"], json!({}));
}

/// A policy that weighs the 5-minute average of CPU, and limits it to 0.65.
fn policy() -> Extender {
    let text = "{apiVersion: scheduler.policy.crane.io/v1alpha1, kind: DynamicSchedulerPolicy, spec: {predicate: \
                [{name: cpu_usage_avg_5m, maxLimitPecent: 0.65}], priority: [{name: cpu_usage_avg_5m, weight: 0.2}]}}";
    Extender::new(Some(Arc::new(scheduler_policy::read(text, []).unwrap())))
}

/// A node with this 5-minute average, and newcomers, in percent of its CPUs.
fn measured(average: f64, newcomers: f64) -> Option<KnownLoad> {
    let mut known = node(99.0, average, 10.0);
    let mut status = NodeMetricStatus::clone(&known.status);
    status.windows.cpu.as_mut()?.last5m.as_mut()?.avg = Some(average);
    status.load.as_mut()?.cpu.newcomers = newcomers;
    known.status = Arc::new(status);
    Some(known)
}

#[test]
fn a_policy_file_replaces_the_load_line() {
    let nodes = cluster([
        measured(20.0, 0.0),
        measured(20.0, 30.0),
        measured(70.0, 0.0),
        measured(20.0, 0.0),
        None,
    ]);
    let names = ["a", "b", "c", "d", "e"];
    let found = points(&mut policy(), &nodes, &small("u"), &names, at());
    assert!(found[0] >= 7 && found[3] >= 7, "{found:?}");
    assert!(
        (4..=5).contains(&found[1]),
        "30 points of hot value: {found:?}"
    );
    assert!((2..=3).contains(&found[2]), "{found:?}");
    let found = filtered(&mut policy(), &nodes, &small("u"), &names);
    let why = "its cpu_usage_avg_5m is over the limit of the scheduler policy";
    assert_eq!(found["FailedAndUnresolvableNodes"], json!({"c": why}));
    // Newcomers in flight are hot, too.
    let mut extender = policy();
    let chosen: Vec<usize> = (0..20)
        .map(|uid| {
            let pod = pod(&uid.to_string(), "400m", "64Mi");
            let found = points(&mut extender, &nodes, &pod, &["a", "d"], at());
            usize::from(found[1] > found[0])
        })
        .collect();
    assert_eq!(chosen.iter().sum::<usize>(), 10, "{chosen:?}");
}

/// A burst of pods onto 100 nodes, one of them idle; a scheduler that only has the extender's points and asks for one pod after
/// the other. Agents report a pod this many milliseconds after it was placed.
struct Burst {
    pods: u64,
    interval: u64,
    delay: u64,
}

impl Burst {
    /// The highest load of a node afterwards, above that of a perfect plan.
    fn over_plan(&self) -> f64 {
        // 96m of 4 CPUs, of which 80 % are the load line: 3 points.
        let cost = 3.0;
        let mut loads = vec![60.0; 100];
        loads[42] = 0.0;
        let plan = (loads.iter().sum::<f64>() + self.pods as f64 * cost) / 100.0;
        let names: Vec<String> = (0..100).map(|index| format!("node-{index}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut reported = loads.clone();
        let node = |load: f64| Some(node(load, load * 0.8, 10.0));
        let entries = names.iter().zip(&reported);
        let mut nodes: ByNode = entries
            .map(|(name, load)| (Arc::from(*name), node(*load)))
            .collect();
        let mut placed: VecDeque<(u64, usize)> = VecDeque::new();
        let mut extender = Extender::default();
        for index in 0..self.pods {
            let millis = index * self.interval;
            while placed
                .front()
                .is_some_and(|(when, _)| when + self.delay <= millis)
            {
                let (_, seen) = placed.pop_front().unwrap();
                reported[seen] += cost;
                nodes.insert(names[seen].into(), node(reported[seen]));
            }
            let now = at() + Duration::from_millis(millis);
            // 85 % of the request are expected to be used.
            let pod = pod(&format!("uid-{index}"), "113m", "8Mi");
            let found = points(&mut extender, &nodes, &pod, &names, now);
            let best = found.iter().max().unwrap();
            let chosen = found.iter().position(|points| points == best).unwrap();
            loads[chosen] += cost;
            placed.push_back((millis, chosen));
        }
        loads.into_iter().fold(0.0, f64::max) - plan
    }
}

#[test]
fn a_burst_is_spread_as_planned() {
    for (interval, delay) in [(1, 1500), (0, 60_000), (4, 500), (50, 1000), (50, 1900)] {
        let burst = Burst {
            pods: 500,
            interval,
            delay,
        };
        let over = burst.over_plan();
        println!("every {interval} ms, reported after {delay} ms: {over:.1} points over the plan");
        assert!(
            over <= 3.0,
            "every {interval} ms, reported after {delay} ms: {over}"
        );
    }
}

proptest! {
    #[test]
    fn points_are_in_range_for_any_nodes(
        loads in vec(proptest::option::of(-50.0..500.0_f64), 0..24),
        uid in "[a-z0-9-]{0,12}",
        cpu in 0..100_000_u32,
        unknown in vec("[a-z.]{2,20}", 0..4),
        with_policy in any::<bool>(),
    ) {
        let nodes = cluster(loads.iter().map(|load| load.map(loaded)));
        let mut names: Vec<&str> = nodes.keys().map(|name| &**name).collect();
        names.extend(unknown.iter().map(String::as_str));
        let mut extender = if with_policy { policy() } else { Extender::default() };
        let pod = pod(&uid, &format!("{cpu}m"), "1Gi");
        let found = points(&mut extender, &nodes, &pod, &names, at());
        prop_assert!(found.iter().all(|points| *points <= 10));
        let nodes_without = found[nodes.len()..].iter();
        let least = found.iter().min().copied().unwrap_or_default();
        let most = found.iter().max().copied().unwrap_or_default();
        for points in nodes_without {
            prop_assert!(least <= *points && *points <= most);
        }
        let passed = filtered(&mut extender, &nodes, &pod, &names);
        let passed = passed["NodeNames"].as_array().unwrap().len();
        prop_assert!(passed * 10 >= names.len() * 7);
    }

    #[test]
    fn any_body_is_an_answer_or_an_error(body in vec(any::<u8>(), 0..300)) {
        if let Ok(request) = ExtenderRequest::read(&body) {
            let answer = Extender::default().prioritize(&request, &ByNode::default(), at());
            prop_assert!(serde_json::from_slice::<Value>(&answer.body).is_ok());
        }
    }
}
