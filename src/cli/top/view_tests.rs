use serde_json::{Value, json};

use super::*;
use crate::crd::summary::ANNOTATION;
use crate::engine::policy::TaintEffect;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn row(node: &str, age: i64, summary: &str) -> NodeRow {
    row_of(Some(node), node, age, summary)
}

fn row_of(holder: Option<&str>, node: &str, age: i64, summary: &str) -> NodeRow {
    let renewed = now() - jiff::SignedDuration::from_secs(age);
    let lease = json!({
        "metadata": {"name": node, "annotations": {ANNOTATION: summary}},
        "spec": {
            "holderIdentity": holder, "leaseDurationSeconds": 40,
            "renewTime": format!("{renewed:.6}"),
        },
    });
    NodeRow::of(serde_json::from_value(lease).unwrap(), now())
}

fn fleet() -> Vec<NodeRow> {
    let hot = "seq=7 cpu=91.0 mem=40.0 load=100.0 cpumark=75.0 psi=12.5/0.0/- rules=3 throttled=2 scheduling=NoSchedule breached=3:q/cpu,q/io";
    vec![
        row(
            "normal",
            4,
            "cpu=10.0 mem=62.5 load=69.4 psi=0.0/0.0/0.0 rules=1 throttled=0 scheduling=Enabled breached=0",
        ),
        row("dead", 192, hot),
        row("hot", 9, hot),
        row("new", 1, ""),
        NodeRow::without_agent("bare".to_owned()),
    ]
}

#[test]
fn the_screen_shows_thresholds_and_unresponsive_agents_last() {
    let screen = NodesScreen::new(
        LoadSource::Leases,
        fleet(),
        Sort::Cpu,
        vec!["something".to_owned()],
    );
    let expected = "\
NODE    CPU (| THRESHOLD)          CPU%  MEM%  LOAD   PSI CPU/MEM/IO  BREACHED        IN FORCE                 HEARTBEAT
hot     ███████████████|██··  91.0  40.0  100.0  12.5/0.0/?      q/cpu,q/io +1   NoSchedule, 2 throttled  9s
normal  ██··················  10.0  62.5  69.4  0.0/0.0/0.0     -               -                        4s
new                              ?     ?  ?  ?/?/?           ?               ?                        1s
dead                             ?     ?  ?  ?/?/?           ?               NoSchedule, 2 throttled  LAST SEEN 3m12s ago
bare                             ?     ?  ?  ?/?/?           ?               ?                        no agent

1 of 5 agents does not respond: dead
note: something
";
    let squeeze = |text: &str| -> Vec<Vec<String>> {
        let cells = |line: &str| {
            line.split("  ")
                .map(|cell| cell.trim().to_owned())
                .filter(|cell| !cell.is_empty())
                .collect()
        };
        text.lines().map(cells).collect()
    };
    assert_eq!(
        squeeze(&screen.to_string()),
        squeeze(expected),
        "\n{screen}"
    );
}

#[test]
fn a_narrow_terminal_hides_columns_not_nodes() {
    let screen = NodesScreen::new(LoadSource::Leases, fleet(), Sort::Cpu, Vec::new());
    for (width, left_out) in [
        (
            80,
            "note: too narrow for PSI CPU/MEM/IO, HEARTBEAT, MEM%, CPU (| THRESHOLD)",
        ),
        (
            40,
            "note: too narrow for PSI CPU/MEM/IO, HEARTBEAT, MEM%, CPU (| THRESHOLD), LOAD, IN FORCE",
        ),
    ] {
        let text = format!("{screen:width$}");
        for node in ["hot", "normal", "new", "dead", "bare"] {
            let line = text.lines().find(|line| line.starts_with(node));
            assert!(
                line.is_some_and(|line| line.chars().count() <= width),
                "{width}: {text}"
            );
        }
        assert!(
            text.lines().all(|line| line.chars().count() <= width),
            "{width}: {text}"
        );
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(words.contains(left_out), "{width}: {text}");
    }
}

#[test]
fn a_long_node_name_is_shortened_on_a_narrow_terminal() {
    let name = "ip-10-0-123-45.eu-central-1.compute.internal-xyz";
    let summary = "cpu=10.0 mem=62.5 load=69.4 psi=0.0/0.0/0.0 rules=1 throttled=0 scheduling=Enabled breached=1:q/cpu";
    let screen = NodesScreen::new(
        LoadSource::Leases,
        vec![row(name, 4, summary)],
        Sort::Cpu,
        Vec::new(),
    );
    let text = format!("{screen:40}");
    assert!(
        text.lines().all(|line| line.chars().count() <= 40),
        "{text}"
    );
    let row = text.lines().nth(1).unwrap();
    assert!(row.starts_with("ip-10-0-"), "{text}");
    assert!(row.contains("-xyz"), "{text}");
    assert!(row.contains("10.0") && row.ends_with("q/cpu"), "{text}");
}

#[test]
fn rows_are_sorted_with_unknown_values_last() {
    let order = |sort| -> Vec<String> {
        let screen = NodesScreen::new(LoadSource::Leases, fleet(), sort, Vec::new());
        screen.nodes.into_iter().map(|row| row.node).collect()
    };
    assert_eq!(order(Sort::Name), ["hot", "new", "normal", "dead", "bare"]);
    assert_eq!(order(Sort::Cpu), ["hot", "normal", "new", "dead", "bare"]);
    assert_eq!(
        order(Sort::Memory),
        ["normal", "hot", "new", "dead", "bare"]
    );
    assert_eq!(order(Sort::Load), ["hot", "normal", "new", "dead", "bare"]);
    assert_eq!(
        order(Sort::Pressure),
        ["hot", "normal", "new", "dead", "bare"]
    );
    assert_eq!(
        order(Sort::Breached),
        ["hot", "normal", "new", "dead", "bare"]
    );
    assert_eq!(order(Sort::Age), ["hot", "normal", "new", "dead", "bare"]);
}

#[test]
fn an_agent_is_unresponsive_ten_seconds_after_its_lease_expired() {
    assert_eq!(row("a", 50, "").agent, AgentState::Alive);
    assert_eq!(row("a", 51, "").agent, AgentState::Unresponsive);
    let left = row_of(None, "a", 600, "cpu=1 throttled=1");
    assert_eq!(left.agent, AgentState::Left);
    assert_eq!(heartbeat(left.agent, left.age), "left 10m ago");
    assert_eq!(left.in_force(), "-");
}

#[test]
fn a_node_whose_clock_is_ahead_has_age_zero() {
    let ahead = row("a", -3600, "");
    assert_eq!(
        (ahead.agent, heartbeat(ahead.agent, ahead.age).as_str()),
        (AgentState::Alive, "0s")
    );
}

#[test]
fn an_invalid_lease_is_shown_as_unresponsive() {
    let lease = json!({
        "metadata": {"name": "odd"}, "spec": {"holderIdentity": "odd", "leaseDurationSeconds": -1},
    });
    let row = NodeRow::of(serde_json::from_value(lease).unwrap(), now());
    assert_eq!(
        (row.agent, heartbeat(row.agent, row.age).as_str()),
        (AgentState::Unresponsive, "LAST SEEN ? ago")
    );
}

#[test]
fn bars_are_rounded_and_always_show_the_threshold() {
    let bar = |percent, threshold| bar(Percent::of(percent), Percent::of(threshold));
    assert_eq!(bar(0.0, 100.0), "···················|");
    assert_eq!(bar(100.0, 0.0), "|███████████████████");
    assert_eq!(bar(52.4, f64::NAN), "██████████··········");
    assert_eq!(bar(52.5, f64::NAN), "███████████·········");
    assert_eq!(super::bar(None, Percent::of(50.0)), "");
}

#[test]
fn json_has_every_value_and_null_for_unknown() {
    let screen = NodesScreen::new(LoadSource::Leases, fleet(), Sort::Name, Vec::new());
    let json: Value = serde_json::to_value(&screen).unwrap();
    let hot = &json["nodes"][0];
    assert_eq!(
        (&hot["node"], &hot["agent"]),
        (&json!("hot"), &json!("alive"))
    );
    assert_eq!((&hot["cpu"], &hot["ageSeconds"]), (&json!(91.0), &json!(9)));
    assert_eq!(hot["breachedRules"], json!(["q/cpu", "q/io"]));
    assert_eq!(hot["scheduling"], "NoSchedule");
    assert_eq!(json["nodes"][3]["agent"], "unresponsive");
    assert_eq!(json["nodes"][4]["cpu"], Value::Null);
    assert_eq!(json["nodes"][4]["agent"], "none");
}

fn metric(healthy: &str, status: &Value) -> NodeMetric {
    let mut metric = json!({
        "metadata": {"name": "n"},
        "status": {
            "timestamp": "2026-01-01T11:59:57Z",
            "capacity": {"cpu": "8", "memory": "16Gi"},
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

fn lease_of(holder: Option<&str>, age: i64) -> LeaseObject {
    let renewed = now() - jiff::SignedDuration::from_secs(age);
    let summary = "cpu=1.0 mem=2.0 cpumark=75.0 psi=9.0/9.0/9.0 rules=1 throttled=0 scheduling=Enabled breached=0";
    let lease = json!({
        "metadata": {"name": "n", "annotations": {ANNOTATION: summary}},
        "spec": {
            "holderIdentity": holder, "leaseDurationSeconds": 240,
            "renewTime": format!("{renewed:.6}"),
        },
    });
    serde_json::from_value(lease).unwrap()
}

fn reported() -> Value {
    json!({
        "usage": {"node": {"cpu": "6", "memory": "4Gi"}},
        "pressure": {"cpu": {"some": {"avg10": 12.5, "avg60": 0.0, "avg300": 0.0}}},
        "pods": 3,
        "load": {
            "percent": 91.8, "worst": "cpu",
            "cpu": {"percent": 91.8, "expected": 73.4, "newcomers": 0.0, "line": 80.0},
            "memory": {"percent": 27.8, "expected": 25.0, "newcomers": 0.0, "line": 90.0},
        },
        "rules": {"total": 2, "breached": 1, "cooling": 0, "unknown": 0},
        "breached": ["q/cpu"],
    })
}

const CLOSED: ActionsInForce = ActionsInForce {
    scheduling: Some(ReportedScheduling::Disabled(TaintEffect::NoSchedule)),
    throttled: Some(1),
};

#[test]
fn node_metrics_are_preferred_to_the_lease() {
    let lease = lease_of(Some("n"), 55);
    let metric = metric("True", &reported());
    let row = NodeRow::measured(&metric, Some(lease), Some(CLOSED), now());
    let cells = row.cells();
    let bar = "███████████████|····";
    let expected = [
        "n",
        bar,
        "75.0",
        "25.0",
        "91.8",
        "12.5/?/?",
        "q/cpu",
        "NoSchedule, 1 throttled",
        "3s",
    ];
    assert_eq!(cells, expected);
    let screen = NodesScreen::new(LoadSource::NodeMetrics, vec![row], Sort::Name, Vec::new());
    assert!(screen.to_string().contains("MEASURED"), "{screen}");
    assert_eq!(
        serde_json::to_value(&screen).unwrap()["source"],
        "nodeMetrics"
    );
}

#[test]
fn missing_values_come_from_the_lease() {
    let metric = metric("True", &json!({"usage": {"node": {"cpu": "800m"}}}));
    let row = NodeRow::measured(&metric, Some(lease_of(Some("n"), 3)), None, now());
    let cells = row.cells();
    assert_eq!(
        cells[2..],
        ["10.0", "?", "?", "9.0/9.0/9.0", "-", "-", "3s"]
    );
    // Without a Lease they are unknown.
    let row = NodeRow::measured(&metric, None, None, now());
    assert_eq!(
        row.cells()[2..],
        ["10.0", "?", "?", "?/?/?", "?", "?", "3s"]
    );
}

#[test]
fn an_unhealthy_agent_is_unresponsive_even_with_a_valid_lease() {
    let metric = metric("False", &reported());
    let row = NodeRow::measured(&metric, Some(lease_of(Some("n"), 55)), Some(CLOSED), now());
    let expected = [
        "?",
        "?",
        "?",
        "?/?/?",
        "?",
        "NoSchedule, 1 throttled",
        "LAST SEEN 3s ago",
    ];
    assert_eq!(row.cells()[2..], expected);
}

#[test]
fn without_reports_the_lease_gives_the_state_of_the_agent() {
    let metric = metric("Unknown", &json!({}));
    let cell = |lease| NodeRow::measured(&metric, lease, None, now()).cells()[8].clone();
    assert_eq!(cell(None), "no agent");
    assert_eq!(cell(Some(lease_of(None, 600))), "left 10m ago");
    assert_eq!(cell(Some(lease_of(Some("n"), 600))), "LAST SEEN 10m ago");
}
