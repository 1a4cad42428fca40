use serde_json::{Value, json};

use super::*;

/// One event of each kind, as JSON and as text.
#[expect(clippy::too_many_lines, reason = "a table")]
fn table() -> Vec<(Value, &'static str)> {
    let rule = |more: &Value| {
        let mut line = json!({"at": 1, "rule": "n/cpu", "metric": "cpu_total_usage"});
        merge(&mut line, more);
        line
    };
    let pod = |more: &Value| {
        let mut line = rule(&json!({"pod": "u-1", "podName": "shop/web"}));
        merge(&mut line, more);
        line
    };
    let notice = |more: &Value| {
        let mut line = json!({"at": 1});
        merge(&mut line, more);
        line
    };
    vec![
        (
            rule(
                &json!({"change": "state", "from": "Normal", "to": "Breached", "value": 1893.2, "threshold": 1500.0}),
            ),
            "n/cpu: Normal -> Breached: cpu_total_usage 1893m is above the threshold 1500m",
        ),
        (
            rule(
                &json!({"change": "state", "from": "Breached", "to": "Cooling", "value": 900.0, "threshold": 1500.0}),
            ),
            "n/cpu: Breached -> Cooling: cpu_total_usage 900m, threshold 1500m",
        ),
        (
            rule(
                &json!({"change": "state", "from": "Cooling", "to": "Normal", "value": null, "threshold": 1500.0, "unknownTooLong": true}),
            ),
            "n/cpu: Cooling -> Normal: cpu_total_usage has been unknown for too long",
        ),
        (
            rule(&json!({"change": "unknown", "reason": "stale"})),
            "n/cpu: cpu_total_usage cannot be evaluated: its last sample is too old; actions in force stay unchanged",
        ),
        (
            rule(&json!({"change": "known", "value": 5.0})),
            "n/cpu: cpu_total_usage is known again: 5m",
        ),
        (
            pod(
                &json!({"change": "throttle", "from": 100, "to": 70, "idle": false, "quota": {"limit": 700}, "release": 300}),
            ),
            "n/cpu: throttle shop/web: 100 % -> 70 % (700m), to release 300m",
        ),
        (
            pod(
                &json!({"change": "throttle", "from": 70, "to": 100, "idle": false, "quota": "unlimited", "release": 0}),
            ),
            "n/cpu: throttle shop/web: 70 % -> original",
        ),
        (
            pod(
                &json!({"change": "throttle", "would": true, "from": 100, "to": 100, "idle": true, "quota": "unlimited", "release": 0}),
            ),
            "n/cpu (preview, not done): throttle shop/web: 100 % -> 100 % (max, idle class)",
        ),
        (
            pod(&json!({"change": "reclaim", "amount": 1_048_576})),
            "n/cpu: reclaim up to 1Mi of page cache from shop/web",
        ),
        (
            pod(&json!({"change": "evict", "grace": {"secs": 90, "nanos": 0}, "release": 40})),
            "n/cpu: evict shop/web (grace 1m 30s), to release 40m",
        ),
        (
            pod(&json!({"change": "skipped", "reason": "atFloor"})),
            "n/cpu: shop/web is skipped: its usage is at its floor (its CPU request or minCPURatio) or below",
        ),
        (
            rule(&json!({"change": "schedulingDisabled", "effect": "NoSchedule"})),
            "n/cpu: scheduling is disabled (NoSchedule)",
        ),
        (
            rule(&json!({"change": "schedulingEnabled"})),
            "n/cpu: scheduling is enabled again",
        ),
        (
            notice(&json!({"change": "started", "rules": 1, "pods": 2, "adopted": 1})),
            "enforcing 1 rule over 2 pods, 1 throttle adopted",
        ),
        (
            notice(
                &json!({"change": "fileSet", "podName": "shop/web", "file": "cpu.max", "from": "max 100000", "to": "5 6"}),
            ),
            "shop/web: cpu.max: `max 100000` -> `5 6`",
        ),
        (notice(&json!({"change": "cgroup", "what": "gone"})), "gone"),
        (
            notice(&json!({"change": "throttleFailed", "podName": "shop/web", "reason": "why"})),
            "shop/web: throttle failed, nothing was changed: why",
        ),
        (
            notice(&json!({"change": "eviction", "podName": "shop/web", "what": "it has ended"})),
            "shop/web: eviction: it has ended",
        ),
        (
            notice(&json!({"change": "policiesApplied", "rules": 3})),
            "policies applied: 3 rules",
        ),
        (
            notice(
                &json!({"change": "policiesRejected", "findings": [{"file": "p.yaml", "line": 7, "column": 5, "severity": "error", "message": "wrong"}]}),
            ),
            "the policies are invalid, the last valid ones stay in force: p.yaml:7:5: error: wrong;",
        ),
        (
            notice(
                &json!({"change": "policyProblem", "file": "p.yaml", "line": 0, "severity": "warning", "message": "odd"}),
            ),
            "p.yaml: warning: odd",
        ),
        (
            notice(&json!({"change": "podsChanged", "pods": 0})),
            "managing 0 pods",
        ),
        (
            notice(
                &json!({"change": "podRefused", "location": "p.yaml", "line": 3, "pod": "shop/web", "reason": "no cgroup"}),
            ),
            "p.yaml:3: error: pod shop/web: no cgroup",
        ),
        (
            notice(&json!({"change": "probe", "url": "http://x", "failure": "refused"})),
            "the probe http://x failed: refused",
        ),
        (
            notice(&json!({"change": "probe", "url": "http://x"})),
            "the probe http://x works again",
        ),
        (
            notice(&json!({"change": "scheduling", "what": "the node was not tainted"})),
            "the node was not tainted",
        ),
        (
            notice(&json!({"change": "stateNotWritten", "reason": "failed"})),
            "failed",
        ),
        (
            notice(&json!({"change": "restored", "files": 2, "left": 0})),
            "everything is restored: 2 cgroup files",
        ),
        (
            notice(&json!({"change": "restored", "files": 2, "left": 1})),
            "1 pod could not be restored: try again",
        ),
        (
            notice(&json!({"change": "stopped", "why": "terminated", "leftThrottled": 1})),
            "stopped: terminated; 1 pod left throttled",
        ),
    ]
}

fn merge(line: &mut Value, more: &Value) {
    for (key, value) in more.as_object().expect("an object") {
        line[key] = value.clone();
    }
}

#[test]
fn every_event_has_a_text_and_a_json_form() {
    for (json, text) in table() {
        let event: Event = serde_json::from_value(json.clone()).expect("an event");
        assert_eq!(event.to_string(), text);
        let mut reserialized = serde_json::to_value(&event).expect("JSON");
        if let (Value::Object(written), Value::Object(given)) = (&mut reserialized, &json) {
            written.retain(|key, _| given.contains_key(key));
        }
        assert_eq!(reserialized, json);
    }
}

#[test]
fn every_event_and_field_is_documented() {
    let page = include_str!("../../docs/without-kubernetes.md");
    for (json, _) in table() {
        let change = json["change"].as_str().expect("a change");
        let row = page
            .lines()
            .find(|line| line.starts_with(&format!("| `{change}` |")));
        let row = row.unwrap_or_else(|| panic!("`{change}` is not documented"));
        let common = ["at", "change", "rule", "metric", "pod", "podName", "would"];
        for field in json.as_object().expect("an object").keys() {
            let known = row.contains(field.as_str()) || common.contains(&field.as_str());
            assert!(known, "`{field}` of `{change}` is not documented");
        }
    }
}

#[test]
fn values_are_formatted_with_their_unit() {
    for (metric, value, text) in [
        (Some("cpu_total_usage"), 1499.6, "1500m"),
        (Some("memory_total_usage"), 1_610_612_736.0, "1.5Gi"),
        (Some("cpu_total_utilization"), 93.0, "93 %"),
        (Some("cpu_load_1_min"), 4.256, "4.26"),
        (Some("disk_read_kibps"), 10.25, "10.2 KiB/s"),
        (Some("http_requests"), 7.0, "7"),
        (None, 0.5, "0.5"),
    ] {
        assert_eq!(format_value(metric, value), text);
    }
}
