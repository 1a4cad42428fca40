//! What an agent tells a real API server: the status of its `NodeWatermark`, and events that `kubectl describe` shows.
#![allow(
    clippy::unwrap_used,
    clippy::unwrap_in_result,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod api_support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use api_support::faults::{Fault, Proxy};
use api_support::{ControlPlane, now};
use plimsoll::cluster::client::connect;
use plimsoll::crd::NodeWatermarkStatus;
use plimsoll::crd::node_watermark::{Counts, RuleStatus, SchedulingStatus};
use plimsoll::engine::pod::PodUid;
use plimsoll::node::report::events::{About, Note};
use plimsoll::node::report::publish::Publisher;
use plimsoll::node::report::write::{Report, Writes, run};
use serde_json::{Value, json};
use tokio::sync::watch;

const NODE: &str = "node00";
const SOON: Duration = Duration::from_secs(30);

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

fn note(about: About, message: &str) -> Note {
    Note {
        about,
        warning: true,
        reason: "RuleBreached",
        message: message.to_owned(),
    }
}

async fn until_published(publisher: &Publisher, events: u64) {
    let begun = now();
    while publisher.counts().0.done < events {
        assert!(begun.elapsed() < SOON, "{:?}", publisher.counts());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(publisher.counts().0.failed, 0);
}

#[tokio::test]
async fn describe_tells_the_story_on_node_watermark_and_pod() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&[NODE.to_owned()]);
    let watermark = watermark(&plane);
    plane.create(&[json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "default"},
        "spec": {"nodeName": NODE, "containers": [{"name": "c", "image": "i"}]},
    })]);
    let pod = About::Pod {
        namespace: "default".to_owned(),
        name: "a".to_owned(),
        uid: PodUid::from(uid(&plane.get("pod", "a")).as_str()),
    };
    let client = connect(Some(&plane.kubeconfig)).await.unwrap();
    let mut publisher = Publisher::start(client, NODE);
    for (about, message) in [
        (About::Node, "q/cpu: 7200m is above its mark 4000m"),
        (About::Node, "q/memory: 9Gi is above its mark 8Gi"),
        (About::Node, "q/cpu: 7200m is above its mark 4000m"),
        (About::Watermark, "q/cpu is on the watermark"),
        (pod, "q/cpu is on the pod"),
    ] {
        publisher.publish(note(about, message), Some(&watermark));
    }
    publisher.publish(
        note(About::Watermark, "of an object that is not there"),
        None,
    );
    until_published(&publisher, 5).await;
    let node = plane.kubectl(&["describe", "node", NODE]);
    assert!(
        node.contains("q/cpu: 7200m is above its mark 4000m"),
        "{node}"
    );
    assert!(
        node.contains("q/memory: 9Gi is above its mark 8Gi"),
        "{node}"
    );
    // The API server tells of its own services' addresses.
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
    assert_eq!(of_cpu.len(), 1, "equal ones are counted");
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
async fn what_happens_while_no_api_server_answers_is_told_afterwards() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    plane.nodes(&[NODE.to_owned()]);
    let proxy = Proxy::start(connect(Some(&plane.kubeconfig)).await.unwrap()).await;
    let mut publisher = Publisher::start(proxy.client(), NODE);
    // Whom it does not take from is not asked again.
    let denied = |_: &str, _: &str| Some(Fault::Answer(403, None, "forbidden".to_owned()));
    proxy.judge(denied);
    publisher.publish(note(About::Node, "forbidden"), None);
    let begun = now();
    while publisher.counts().0.failed == 0 {
        assert!(begun.elapsed() < SOON, "it is given up");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(proxy.take_seen().len(), 1);
    // The first is carried out, and its answer lost; then there is no server, and then a busy one.
    let tries = AtomicUsize::new(0);
    proxy.judge(move |_, _| match tries.fetch_add(1, Ordering::Relaxed) {
        0 => Some(Fault::CutAfter),
        1 => Some(Fault::CutBefore),
        2 => Some(Fault::Answer(503, None, "busy".to_owned())),
        _ => None,
    });
    for message in ["one", "two", "three"] {
        publisher.publish(note(About::Node, message), None);
    }
    let told = plimsoll::node::clock::wall_time();
    while publisher.counts().0.done < 3 {
        assert!(begun.elapsed() < 2 * SOON, "{:?}", publisher.counts());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(proxy.take_seen().len(), 6, "each once more, and no storm");
    let events = plane.list("events");
    let mut messages: Vec<&str> = Vec::new();
    for event in &events {
        messages.push(event["message"].as_str().unwrap());
        let time: jiff::Timestamp = event["eventTime"].as_str().unwrap().parse().unwrap();
        assert!(time <= told, "it bears the time when it happened: {event}");
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
            strategy: "None".to_owned(),
            state: state.to_owned(),
            value: Some(value),
            mark: 4000.0,
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
    reports: watch::Sender<Option<Report>>,
    writes: watch::Receiver<Writes>,
}

impl Task {
    fn start(proxy: &Proxy) -> Self {
        let (reports, taken) = watch::channel(None);
        let (counts, writes) = watch::channel(Writes::default());
        tokio::spawn(run(proxy.client(), NODE.to_owned(), taken, counts));
        Self { reports, writes }
    }

    fn tell(&self, uid: &str, status: NodeWatermarkStatus) {
        let uid = uid.to_owned();
        self.reports.send_replace(Some(Report {
            uid,
            status,
            over: None,
        }));
    }

    async fn until(&mut self, what: &str, holds: impl FnMut(&Writes) -> bool) {
        let held = tokio::time::timeout(SOON, self.writes.wait_for(holds))
            .await
            .is_ok();
        assert!(held, "not in time: {what}");
    }
}

fn state(plane: &ControlPlane) -> String {
    let watermark = plane.get("nwm", NODE);
    let state = watermark["status"]["rules"][0]["state"].as_str();
    state.unwrap_or("none").to_owned()
}

#[tokio::test]
async fn a_status_is_written_on_a_change_of_state_and_never_because_a_value_moves() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let uid = watermark(&plane);
    let proxy = Proxy::start(connect(Some(&plane.kubeconfig)).await.unwrap()).await;
    let mut task = Task::start(&proxy);
    task.tell(&uid, status("Normal", 1.0));
    task.until("the first is written at once", |it| it.done == 1)
        .await;
    assert_eq!(state(&plane), "Normal");
    let row = plane.kubectl(&["get", "nwm", NODE, "--no-headers"]);
    assert!(row.contains("Enabled"), "{row}");
    for value in 2..40 {
        task.tell(&uid, status("Normal", f64::from(value)));
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let begun = now();
    task.tell(&uid, status("Breached", 9000.0));
    assert_eq!(task.writes.borrow().done, 1, "values alone are not written");
    task.until("the change of state is written", |it| it.done == 2)
        .await;
    assert!(
        begun.elapsed() > Duration::from_secs(7),
        "two writes are ten seconds apart"
    );
    assert_eq!(state(&plane), "Breached");
    assert_eq!(task.writes.borrow().failed, 0);
}

#[tokio::test]
async fn a_status_survives_refusals_and_follows_the_object_that_it_is_of() {
    let Some(plane) = ControlPlane::start() else {
        return;
    };
    let first = watermark(&plane);
    let proxy = Proxy::start(connect(Some(&plane.kubeconfig)).await.unwrap()).await;
    proxy.judge(|_, _| Some(Fault::Answer(500, None, "boom".to_owned())));
    let mut task = Task::start(&proxy);
    task.tell(&first, status("Normal", 1.0));
    task.until("it is tried again", |it| it.failed == 2).await;
    proxy.judge(|_, _| None);
    task.until("and written", |it| it.done == 1).await;
    // Deleted: nothing is made anew, and nobody is asked again and again.
    plane.kubectl(&["delete", "nwm", NODE]);
    task.tell(&first, status("Breached", 9.0));
    task.until("it is found to be gone", |it| it.failed == 3)
        .await;
    proxy.take_seen();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(proxy.take_seen().len(), 0);
    assert_eq!(plane.get("nwm", NODE), Value::Null);
    // Made anew: the status of the one before is not for it, its own is.
    let second = watermark(&plane);
    task.tell(&first, status("Breached", 9.0));
    assert_eq!(state(&plane), "none");
    task.tell(&second, status("Breached", 9.0));
    task.until("the new one has it", |it| it.done == 2).await;
    assert_eq!(state(&plane), "Breached");
}
