use serde_json::{Value, json};

use super::*;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn metric(node: &str, healthy: &str, status: &Value) -> NodeMetric {
    let mut metric = json!({
        "metadata": {"name": node},
        "status": {
            "timestamp": "2026-01-01T11:59:56Z",
            "conditions": [{
                "type": "Healthy", "status": healthy, "reason": "r", "message": "",
                "lastTransitionTime": "2026-01-01T11:00:00Z",
            }],
        },
    });
    let (into, from) = (metric["status"].as_object_mut(), status.as_object());
    into.unwrap().extend(from.unwrap().clone());
    serde_json::from_value(metric).unwrap()
}

fn fleet() -> Vec<NodeMetric> {
    let pod = |namespace: &str, name: &str, cpu: &str, memory: &str| json!({"namespace": namespace, "name": name, "cpu": cpu, "memory": memory});
    let mut waits = pod("shop", "cart-0", "900m", "3872032Ki");
    waits["cpuDelay"] = json!(12.34);
    waits["ioPressure"] = json!(1.0);
    let busy = pod("batch", "sort-1", "2", "1Gi");
    vec![
        metric("a", "True", &json!({"pods": 30, "topPods": [waits, busy]})),
        metric(
            "b",
            "False",
            &json!({"pods": 5, "topPods": [pod("batch", "gone-1", "7", "9Gi")]}),
        ),
        metric("c", "True", &json!({})),
    ]
}

fn throttled() -> Throttled {
    let throttled = |namespace: &str, pod: &str, to: Option<i64>| ThrottledStatus {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        rule: "q/cpu".to_owned(),
        ratio: 50,
        to_millicores: to,
        ..ThrottledStatus::default()
    };
    let a = vec![
        throttled("shop", "cart-0", Some(450)),
        throttled("batch", "small-7", Some(10)),
    ];
    let b = vec![throttled("batch", "gone-1", None)];
    let burst = |pod: &str| BurstStatus {
        namespace: "batch".to_owned(),
        pod: pod.to_owned(),
        millicores: 500,
    };
    // A throttle comes before the burst.
    let bursts = vec![burst("sort-1"), burst("small-7")];
    let a = HeldPods {
        throttled: a,
        bursts,
    };
    let b = HeldPods {
        throttled: b,
        bursts: Vec::new(),
    };
    BTreeMap::from([("a".to_owned(), a), ("b".to_owned(), b)])
}

fn words(line: &str) -> Vec<&str> {
    line.split("  ")
        .map(str::trim)
        .filter(|word| !word.is_empty())
        .collect()
}

#[test]
fn a_namespace_leaves_its_pods_and_says_how_many() {
    let all = PodsScreen::new(&fleet(), Some(&throttled()), Sort::Cpu, now());
    let namespace = all.pods.last().expect("a pod").namespace.clone();
    let (count, total) = (
        all.pods
            .iter()
            .filter(|pod| pod.namespace == namespace)
            .count(),
        all.pods.len(),
    );
    assert!(count < total);
    let one = all.of_namespace(Some(&namespace));
    assert_eq!(one.pods.len(), count);
    assert!(one.pods.iter().all(|pod| pod.namespace == namespace));
    assert!(
        one.to_string()
            .contains(&format!("of them in namespace {namespace}: {count}"))
    );
}

#[test]
fn the_screen_shows_the_busiest_pods_and_notes_what_is_missing() {
    let screen = PodsScreen::new(&fleet(), Some(&throttled()), Sort::Cpu, now()).to_string();
    let lines: Vec<&str> = screen.lines().collect();
    let expected = [
        "NAMESPACE  POD  NODE  CPU  MEMORY  PSI CPU/MEM/IO  THROTTLED  MEASURED",
        "batch  sort-1  a  2000m  1024Mi  ?/?/?  burst 500m  4s",
        "shop  cart-0  a  900m  3781Mi  12.3/?/1.0  to 450m (50%)  4s",
        "batch  gone-1  b  ?  ?  ?/?/?  idle class  LAST SEEN 4s ago",
        "note: these are the busiest pods of each reporting node, at most 10 of each: 3 of 35",
        "note: the pods of 1 of 3 nodes are unknown, because their agents do not report to the controller: c",
        "note: throttled, but not among the busiest (1): batch/small-7 on a",
    ];
    assert_eq!(lines.len(), expected.len(), "{screen}");
    for (line, expected) in lines.iter().zip(expected) {
        assert_eq!(words(line), words(expected), "{screen}");
    }
}

#[test]
fn pods_are_sorted_and_those_of_unresponsive_agents_come_last() {
    let order = |sort| -> Vec<String> {
        let screen = PodsScreen::new(&fleet(), None, sort, now());
        screen.pods.into_iter().map(|row| row.name).collect()
    };
    assert_eq!(order(Sort::Name), ["sort-1", "cart-0", "gone-1"]);
    assert_eq!(order(Sort::Memory), ["cart-0", "sort-1", "gone-1"]);
    assert_eq!(order(Sort::Pressure), ["cart-0", "sort-1", "gone-1"]);
    assert_eq!(order(Sort::Cpu), ["sort-1", "cart-0", "gone-1"]);
}

#[test]
fn json_distinguishes_unthrottled_from_unknown() {
    let rows = |throttled: Option<&Throttled>| -> Value {
        let screen = PodsScreen::new(&fleet(), throttled, Sort::Name, now());
        serde_json::to_value(&screen).unwrap()["pods"].clone()
    };
    let known = rows(Some(&throttled()));
    let (free, limited) = (&known[0], &known[1]);
    assert_eq!(free["throttled"], json!(false));
    assert_eq!(free["burstMillicores"], json!(500));
    assert_eq!(limited["throttled"], json!(true));
    assert_eq!(limited["throttle"]["toMillicores"], 450);
    assert_eq!(limited["cpuMillicores"], 900);
    assert_eq!(limited["memoryBytes"], 3_872_032_u64 << 10);
    assert_eq!(limited["pressure"], json!([12.3, null, 1.0]));
    assert_eq!(
        (&limited["agent"], &limited["ageSeconds"]),
        (&json!("alive"), &json!(4))
    );
    assert_eq!(rows(None)[1]["throttled"], Value::Null);
}
