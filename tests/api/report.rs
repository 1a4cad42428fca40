//! Status and events that an agent writes to a real API server.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::api_support::faults::{Fault, Proxy};
use crate::api_support::{ControlPlane, now};
use plimsoll::agent::report::events::{NewEvent, Regarding};
use plimsoll::agent::report::publish::Publisher;
use plimsoll::agent::report::write::{PendingStatus, Writes, run};
use plimsoll::crd::NodeWatermarkStatus;
use plimsoll::crd::node_watermark::{Counts, RuleStatus, SchedulingStatus};
use plimsoll::engine::pod::PodUid;
use serde_json::{Value, json};
use tokio::sync::watch;

const NODE: &str = "node00";
const TIMEOUT: Duration = Duration::from_secs(30);

fn watermark(plane: &ControlPlane) -> String {
    plane.apply(&[json!({
        "apiVersion": "plimsoll.dev/v1alpha1", "kind": "NodeWatermark",
        "metadata": {"name": NODE}, "spec": {"nodeUID": "x", "hash": "y"},
    })]);
    uid(&plane.get("nwm", NODE))
}

fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap().to_owned()
}

fn new_event(regarding: Regarding, message: &str) -> NewEvent {
    NewEvent {
        regarding,
        warning: true,
        reason: "RuleBreached",
        message: message.to_owned(),
    }
}

async fn until_published(publisher: &Publisher, events: u64) {
    let started = now();
    while publisher.counts().0.done < events {
        assert!(started.elapsed() < TIMEOUT, "{:?}", publisher.counts());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(publisher.counts().0.failed, 0);
}

#[tokio::test]
async fn describe_shows_events_on_node_watermark_and_pod() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&[NODE.to_owned()]);
    let watermark = watermark(&plane);
    plane.create(&[json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "default"},
        "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "i"}]},
    })]);
    let pod = Regarding::Pod {
        namespace: "default".to_owned(),
        name: "a".to_owned(),
        uid: PodUid::from(uid(&plane.get("pod", "a")).as_str()),
    };
    let client = plane.connect().await;
    let mut publisher = Publisher::start(client, NODE);
    for (regarding, message) in [
        (Regarding::Node, "q/cpu: 7200m is above its threshold 4000m"),
        (Regarding::Node, "q/memory: 9Gi is above its threshold 8Gi"),
        (Regarding::Node, "q/cpu: 7200m is above its threshold 4000m"),
        (Regarding::Watermark, "q/cpu is on the watermark"),
        (pod, "q/cpu is on the pod"),
    ] {
        publisher.publish(new_event(regarding, message), Some(&watermark));
    }
    publisher.publish(
        new_event(Regarding::Watermark, "about a missing object"),
        None,
    );
    until_published(&publisher, 5).await;
    let node = plane.kubectl(&["describe", "node", NODE]);
    assert!(
        node.contains("q/cpu: 7200m is above its threshold 4000m"),
        "{node}"
    );
    assert!(
        node.contains("q/memory: 9Gi is above its threshold 8Gi"),
        "{node}"
    );
    // The API server has events of its own.
    let ours = |event: &Value| event["reportingComponent"] == "plimsoll-agent";
    let events: Vec<Value> = plane.list("events").into_iter().filter(ours).collect();
    let of_cpu: Vec<&Value> = events
        .iter()
        .filter(|event| {
            event["message"]
                .as_str()
                .unwrap()
                .starts_with("q/cpu: 7200m")
        })
        .collect();
    assert_eq!(of_cpu.len(), 1, "equal events are counted");
    assert_eq!(of_cpu[0]["count"], 2);
    let described = plane.kubectl(&["describe", "nwm", NODE]);
    assert!(
        described.contains("q/cpu is on the watermark"),
        "{described}"
    );
    let described = plane.kubectl(&["describe", "pod", "a"]);
    assert!(described.contains("q/cpu is on the pod"), "{described}");
    assert_eq!(events.len(), 4, "{events:#?}");
}

#[tokio::test]
async fn events_during_an_outage_are_published_afterwards() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&[NODE.to_owned()]);
    let proxy = Proxy::start(plane.connect().await).await;
    let mut publisher = Publisher::start(proxy.client(), NODE);
    // A refused event is not retried.
    let denied = |_: &str, _: &str| Some(Fault::Answer(403, None, "forbidden".to_owned()));
    proxy.respond_with(denied);
    publisher.publish(new_event(Regarding::Node, "forbidden"), None);
    let started = now();
    while publisher.counts().0.failed == 0 {
        assert!(started.elapsed() < TIMEOUT, "it is dropped");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(proxy.take_seen().len(), 1);
    // The first is processed and its answer lost; then there is no server, and then a busy one.
    let tries = AtomicUsize::new(0);
    proxy.respond_with(move |_, _| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => Some(Fault::CutAfter),
        1 => Some(Fault::CutBefore),
        2 => Some(Fault::Answer(503, None, "busy".to_owned())),
        _ => None,
    });
    for message in ["one", "two", "three"] {
        publisher.publish(new_event(Regarding::Node, message), None);
    }
    let reported = plimsoll::clock::wall_time();
    while publisher.counts().0.done < 3 {
        assert!(started.elapsed() < 2 * TIMEOUT, "{:?}", publisher.counts());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(proxy.take_seen().len(), 6, "one retry each");
    let events = plane.list("events");
    let mut messages: Vec<&str> = Vec::new();
    for event in &events {
        messages.push(event["message"].as_str().unwrap());
        let time: jiff::Timestamp = event["eventTime"].as_str().unwrap().parse().unwrap();
        assert!(
            time <= reported,
            "it has the time when it happened: {event}"
        );
        assert!(
            event["lastTimestamp"].is_string() && event["count"] == 1,
            "kubectl get events sorts by it: {event}"
        );
    }
    messages.sort_unstable();
    assert_eq!(messages, ["one", "three", "two"], "each once");
}

fn status(state: &str, value: f64) -> NodeWatermarkStatus {
    NodeWatermarkStatus {
        counts: Some(Counts {
            rules: 1,
            ..Counts::default()
        }),
        rules: vec![RuleStatus {
            id: "q/cpu".to_owned(),
            strategy: "Enforce".to_owned(),
            state: state.to_owned(),
            value: Some(value),
            threshold: 4000.0,
            ..RuleStatus::default()
        }],
        scheduling: Some(SchedulingStatus {
            state: "Enabled".to_owned(),
            ..SchedulingStatus::default()
        }),
        ..NodeWatermarkStatus::default()
    }
}

struct Task {
    reports: watch::Sender<Option<PendingStatus>>,
    writes: watch::Receiver<Writes>,
}

impl Task {
    fn start(proxy: &Proxy) -> Self {
        let (reports, taken) = watch::channel(None);
        let (counts, writes) = watch::channel(Writes::default());
        tokio::spawn(run(proxy.client(), NODE.to_owned(), taken, counts));
        Self { reports, writes }
    }

    fn submit(&self, uid: &str, status: NodeWatermarkStatus) {
        let uid = uid.to_owned();
        self.reports.send_replace(Some(PendingStatus {
            uid,
            status,
            replaces: None,
        }));
    }

    async fn until(&mut self, what: &str, holds: impl FnMut(&Writes) -> bool) {
        let in_time = tokio::time::timeout(TIMEOUT, self.writes.wait_for(holds))
            .await
            .is_ok();
        assert!(in_time, "not in time: {what}");
    }
}

fn state(plane: &ControlPlane) -> String {
    let watermark = plane.get("nwm", NODE);
    let state = watermark["status"]["rules"][0]["state"].as_str();
    state.unwrap_or("none").to_owned()
}

#[tokio::test]
async fn a_status_is_written_on_a_change_of_state_not_of_a_value() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let uid = watermark(&plane);
    let proxy = Proxy::start(plane.connect().await).await;
    let mut task = Task::start(&proxy);
    task.submit(&uid, status("Normal", 1.0));
    task.until("the first is written at once", |it| it.done == 1)
        .await;
    assert_eq!(state(&plane), "Normal");
    let row = plane.kubectl(&["get", "nwm", NODE, "--no-headers"]);
    assert!(row.contains("Enabled"), "{row}");
    for value in 2..40 {
        task.submit(&uid, status("Normal", f64::from(value)));
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let started = now();
    task.submit(&uid, status("Breached", 9000.0));
    assert_eq!(task.writes.borrow().done, 1, "values alone are not written");
    task.until("the change of state is written", |it| it.done == 2)
        .await;
    assert!(
        started.elapsed() > Duration::from_secs(7),
        "two writes are ten seconds apart"
    );
    assert_eq!(state(&plane), "Breached");
    assert_eq!(task.writes.borrow().failed, 0);
}

#[tokio::test]
async fn a_status_is_retried_and_follows_its_object() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let first = watermark(&plane);
    let proxy = Proxy::start(plane.connect().await).await;
    proxy.respond_with(|_, _| Some(Fault::Answer(500, None, "boom".to_owned())));
    let mut task = Task::start(&proxy);
    task.submit(&first, status("Normal", 1.0));
    task.until("it is retried", |it| it.failed == 2).await;
    proxy.respond_with(|_, _| None);
    task.until("and written", |it| it.done == 1).await;
    // Deleted: the object is not recreated, and the API server is not flooded.
    plane.kubectl(&["delete", "nwm", NODE]);
    task.submit(&first, status("Breached", 9.0));
    task.until("it is found to be deleted", |it| it.failed == 3)
        .await;
    proxy.take_seen();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(proxy.take_seen().len(), 0);
    assert_eq!(plane.get("nwm", NODE), Value::Null);
    // Recreated: it gets its own status, not that of the former object.
    let second = watermark(&plane);
    task.submit(&first, status("Breached", 9.0));
    assert_eq!(state(&plane), "none");
    task.submit(&second, status("Breached", 9.0));
    task.until("the new one has it", |it| it.done == 2).await;
    assert_eq!(state(&plane), "Breached");
}
