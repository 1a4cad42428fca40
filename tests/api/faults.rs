//! `plimsoll controller` when the API server or the network misbehaves.

use std::process::Command;
use std::time::Duration;

use crate::api_support::faults::{BROKEN, EXPIRED, Fault, FaultQueues, Proxy, of_calls};
use crate::api_support::{ControlPlane, Controller};
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(1);

fn close() -> Value {
    json!({
        "apiVersion": "ensurance.crane.io/v1alpha1", "kind": "AvoidanceAction",
        "metadata": {"name": "close"}, "spec": {},
    })
}

fn node_qos(value: u32) -> Value {
    json!({
        "apiVersion": "ensurance.crane.io/v1alpha1", "kind": "NodeQOS",
        "metadata": {"name": "q", "annotations": {"plimsoll.dev/rollout": "immediate"}},
        "spec": {"rules": [{
            "name": "cpu", "avoidanceThreshold": 2, "actionName": "close",
            "metricRule": {"name": "cpu_total_usage", "value": value},
        }]},
    })
}

fn nodes(plane: &ControlPlane) {
    plane.nodes(&["node00".to_owned(), "node01".to_owned()]);
}

/// Whether both nodes have the rule with this threshold, and the status says so.
fn arrived(plane: &ControlPlane, value: u32) -> bool {
    let watermarks = plane.list("nwm");
    let has_rule = |object: &Value| object["spec"]["rules"][0]["watermark"] == value;
    let policy = plane.get("nodeqos", "q");
    watermarks.len() == 2
        && watermarks.iter().all(has_rule)
        && policy["status"]["observedGeneration"] == policy["metadata"]["generation"]
        && policy["status"]["matchedNodes"] == 2
}

fn is_ready(controller: &Controller) -> bool {
    controller
        .http("/readyz")
        .is_some_and(|(code, _)| code == 200)
}

/// Whether the readiness probe fails with this text.
fn waits_for(controller: &Controller, text: &str) -> bool {
    let answer = controller.http("/readyz");
    answer.is_some_and(|(code, body)| code == 503 && body.contains(text))
}

const WATCHED: [&str; 5] = [
    "avoidanceactions",
    "nodeqoss",
    "nodes",
    "nodewatermarks",
    "podqoss",
];
const WRITTEN: [&str; 4] = ["watermark", "status", "event", "lease"];

/// The kind of a request, such as `list nodes`, `watch nodes` or `status`: each has its own faults.
fn kind_of(method: &str, path: &str) -> Option<String> {
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let written = match method {
        "PATCH" if path.ends_with("/status") => "status",
        "PATCH" if path.contains("nodewatermarks/") => "watermark",
        "POST" | "PATCH" if path.contains("/events") => "event",
        "PUT" | "POST" if path.contains("/leases") => "lease",
        "GET" => {
            let kind = WATCHED.into_iter().find(|kind| path.ends_with(kind))?;
            let is_watch = query.contains("watch=true");
            let what = if is_watch { "watch" } else { "list" };
            return Some(format!("{what} {kind}"));
        }
        _ => return None,
    };
    Some(written.to_owned())
}

/// Queues a fault for each kind of request that it applies to.
fn inject(queues: &FaultQueues, fault: &Fault) {
    for kind in WRITTEN {
        queues.add(kind, [Some(fault.clone()), None]);
    }
    // An expired version forces a new list: otherwise the controller lists only once.
    let expired = || Some(Fault::Answer(200, None, EXPIRED.to_owned()));
    for (index, kind) in WATCHED.into_iter().enumerate() {
        let (on_watch, on_list) = match fault {
            // It takes 15 s, and all kinds are watched and listed in the same way.
            Fault::NeverAnswer => (index % 2 == 0, index % 2 == 1),
            // A watch has no end, and can be cut in the middle only if it has events.
            Fault::CutAfter => (false, true),
            Fault::CutWithin => (matches!(kind, "nodewatermarks" | "nodeqoss"), true),
            _ => (true, true),
        };
        let fault = |is_due: bool| is_due.then(|| Some(fault.clone()));
        let watches = fault(on_watch).into_iter().chain([expired()]);
        queues.add(format!("watch {kind}"), watches);
        queues.add(format!("list {kind}"), fault(on_list));
    }
}

/// Faults of calls, and errors within a watch.
fn every_fault() -> impl Iterator<Item = (&'static str, Fault)> {
    let refused = [400, 422, 503].map(|code| Fault::Answer(code, None, "a fault".to_owned()));
    let within = [EXPIRED, BROKEN].map(|text| Fault::Answer(200, None, text.to_owned()));
    let more = refused.into_iter().chain(within).map(|it| ("another", it));
    of_calls().into_iter().chain(more)
}

// Several tests, so that they run side by side.
#[test]
fn the_controller_survives_a_client_error_of_every_call() {
    survives(|fault| matches!(fault, Fault::Answer(400..429, ..)));
}

#[test]
fn the_controller_survives_a_busy_or_failing_api_server() {
    survives(|fault| matches!(fault, Fault::Answer(429.., ..)));
}

#[test]
fn the_controller_survives_a_malformed_response_to_every_call() {
    survives(|fault| matches!(fault, Fault::Answer(200, ..)));
}

#[test]
fn the_controller_survives_a_cut_of_every_call() {
    survives(|fault| !matches!(fault, Fault::Answer(..)));
}

fn survives(is_of_this_test: fn(&Fault) -> bool) {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    nodes(&plane);
    plane.apply(&[close(), node_qos(4000)]);
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    let mut controller = plane.controller_by(&kubeconfig, "controller", &[]);
    plane.until("it works", TIMEOUT, |p| arrived(p, 4000));
    let queues = FaultQueues::before(&proxy, kind_of);
    let mut injected = 0;
    let mut value = 4000;
    for (what, fault) in every_fault().filter(|(_, fault)| is_of_this_test(fault)) {
        injected += 1;
        inject(&queues, &fault);
        let before = value;
        while !queues.left().is_empty() {
            value += 1;
            let what = format!("{what} ({fault:?}), to come: {:?}", queues.left());
            assert!(value - before < 10, "never hit: {what}");
            proxy.take_seen();
            proxy.cut();
            // The controller publishes an event about this.
            plane.kubectl(&["delete", "nwm", "node01"]);
            plane.apply(&[node_qos(value)]);
            let took = plane.until(&what, TIMEOUT, |p| arrived(p, value));
            let seen = proxy.take_seen();
            let writes = seen
                .iter()
                .filter(|(method, path)| kind_of(method, path).as_deref() == Some("watermark"));
            let writes = writes.count();
            assert!(writes <= 12, "{what}: {writes} writes of 2 objects");
            println!("{what}: {took:?}, {writes} writes");
        }
    }
    assert!(
        controller.process.0.try_wait().unwrap().is_none(),
        "it ended"
    );
    let log = plane.log_of("controller");
    assert!(!log.contains("panicked"), "{log}");
    assert!(injected > 0, "no such fault");
    // No fault counted as a success.
    for object in ["NodeWatermark", "status"] {
        let series =
            format!("plimsoll_controller_writes_total{{object=\"{object}\",result=\"error\"}}");
        let errors = controller.metric(&series);
        assert!(
            errors > f64::from(injected) - 0.5,
            "{object}: {errors} of {injected}"
        );
    }
}

#[test]
fn a_write_waits_for_the_retry_after_of_the_api_server() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    nodes(&plane);
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    // As API priority and fairness answers: a header and plain text.
    let text = "Too many requests, please try again later.".to_owned();
    let busy = Some(Fault::Answer(429, Some(6), text));
    FaultQueues::before(&proxy, kind_of).add("watermark", [busy.clone(), busy]);
    plane.apply(&[close(), node_qos(4000)]);
    let controller = plane.controller_by(&kubeconfig, "controller", &[]);
    plane.until("both writes were refused", TIMEOUT, |_| {
        controller.http("/metrics").is_some()
            && controller
                .metric("plimsoll_controller_api_requests_total{verb=\"patch\",code=\"429\"}")
                > 1.5
    });
    let took = plane.until("they succeed", TIMEOUT, |p| arrived(p, 4000));
    assert!(took > Duration::from_secs(5), "{took:?}");
}

#[test]
fn the_probe_reports_refused_lists_and_an_unreachable_api_server() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    nodes(&plane);
    plane.apply(&[close(), node_qos(4000)]);
    let proxy = Proxy::beside(&plane.kubeconfig);
    let kubeconfig = plane.file("proxied", &proxy.kubeconfig().to_string());
    for (code, text, reported) in [
        (401, "Unauthorized", "does not accept the credentials"),
        (403, "forbidden: User \"x\"", "forbidden: User \"x\" (403)"),
    ] {
        let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": text});
        proxy.respond_with(move |_, _| Some(Fault::Answer(code, None, body.to_string())));
        let controller = plane.controller_by(&kubeconfig, "refused", &[]);
        plane.until("the probe says why", TIMEOUT, |_| {
            waits_for(&controller, reported)
        });
        assert_eq!(controller.http("/livez").unwrap().0, 200);
        assert!(!controller.leads());
        proxy.respond_with(|_, _| None);
        plane.until("it works again", TIMEOUT, |p| {
            is_ready(&controller) && arrived(p, 4000)
        });
    }
    let mut unreachable = proxy.kubeconfig();
    unreachable["clusters"][0]["cluster"]["server"] = json!("http://127.0.0.1:1");
    let unreachable = plane.file("nowhere", &unreachable.to_string());
    let mut controller = plane.controller_by(&unreachable, "nowhere", &[]);
    plane.until("the probe reports the refused connection", TIMEOUT, |_| {
        waits_for(&controller, "Connection refused")
    });
    assert!(
        controller.process.0.try_wait().unwrap().is_none(),
        "it keeps retrying"
    );
}

#[test]
fn an_invalid_kubeconfig_is_an_error_with_file_and_reason() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let no_context = r#"{"apiVersion":"v1","kind":"Config","current-context":"gone","contexts":[],"clusters":[],"users":[]}"#;
    let cases = [
        (dir.path().join("missing"), "No such file"),
        (file("garbage", "{{{"), "garbage"),
        (file("no-context", no_context), "gone"),
    ];
    let state = dir.path().join("state");
    let state = state.to_str().unwrap();
    let commands: [&[&str]; 7] = [
        &["controller", "--listen", "127.0.0.1:0"],
        &["agent", "--node-name", "node00", "--state-dir", state],
        &["preview"],
        &["doctor"],
        &["top"],
        &["stop"],
        &["resume"],
    ];
    for (command, (path, reason)) in commands
        .iter()
        .flat_map(|command| cases.iter().map(move |case| (command, case)))
    {
        let output = Command::new(env!("CARGO_BIN_EXE_plimsoll"))
            .args(*command)
            .arg("--kubeconfig")
            .arg(path)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{command:?}: {text}");
        assert!(
            text.contains(path.to_str().unwrap()) && text.contains(reason),
            "{command:?}: {text}"
        );
    }
}

#[test]
fn missing_or_old_definitions_are_reported_with_the_command_to_install_them() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    if !plane.is_own() {
        return;
    }
    nodes(&plane);
    let crd = "nodewatermarks.plimsoll.dev";
    plane.kubectl(&["delete", "crd", crd]);
    let controller = plane.controller("controller", &[]);
    plane.until("the missing definition is named", TIMEOUT, |_| {
        waits_for(
            &controller,
            "NodeWatermark: the definition is not installed; run: plimsoll crds",
        )
    });
    plane.install_definitions();
    plane.until("it is ready again", TIMEOUT, |_| is_ready(&controller));
    plane.apply(&[close(), node_qos(4000)]);
    plane.until("it works", TIMEOUT, |p| arrived(p, 4000));
    drop(controller);
    // A definition from before the field existed.
    let field = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/rules/items/properties/restoreThreshold";
    let patch = json!([{"op": "remove", "path": field}, {"op": "remove", "path": field.replace("properties/restoreThreshold", "required")}]);
    plane.kubectl(&["patch", "crd", crd, "--type=json", "-p", &patch.to_string()]);
    let controller = plane.controller("second", &[]);
    plane.until("the missing field is named", TIMEOUT, |_| {
        waits_for(
            &controller,
            "lacks spec.rules[].restoreThreshold; run: plimsoll crds",
        )
    });
    plane.until("it leads", TIMEOUT, |_| controller.leads());
    plane.apply(&[node_qos(5000)]);
    plane.until("the write is refused", TIMEOUT, |p| {
        p.log_of("second").contains("field not declared in schema")
    });
    let refused = || {
        controller
            .metric("plimsoll_controller_writes_total{object=\"NodeWatermark\",result=\"error\"}")
    };
    assert!(
        refused() < 20.0,
        "{} refused writes: it does not back off",
        refused()
    );
    plane.install_definitions();
    plane.until("the edit arrives", Duration::from_secs(90), |p| {
        arrived(p, 5000)
    });
    plane.until("it is ready again", TIMEOUT, |_| is_ready(&controller));
}
