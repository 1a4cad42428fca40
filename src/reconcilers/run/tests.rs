use std::future::ready;

use serde_json::{Value, json};

use super::*;
use crate::cluster::election::Term;
use crate::crd::Report;
use crate::metrics_api::data::Data;
use crate::metrics_api::store::Limits;

/// A controller without connections, and the reports of its agents.
fn controller() -> (Controller, Reports) {
    let nowhere = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
    let client = Client::try_from(nowhere).unwrap();
    let options = Options {
        settings: ControllerSettings::default(),
        namespace: "default".to_owned(),
        lease: "controller".to_owned(),
        agents: "agents".to_owned(),
        identity: "one".to_owned(),
        listen: ([127, 0, 0, 1], 0).into(),
        metrics_api: None,
        scheduler_api: None,
        polling: None,
        address: None,
    };
    let reports = Reports::unconnected(client.clone());
    let (_, leadership) = watch::channel(Leadership::default());
    let data = Arc::new(Data::new(Limits::default(), leadership));
    let mut controller = Controller::new(client, &options, Arc::default());
    controller.updater = Some(StoreUpdater::new(data, Some(reports.clone())));
    controller.reports = Some(reports.clone());
    (controller, reports)
}

impl Controller {
    fn watch_event(&mut self, source: WatchedKind, change: Change<Item>) {
        let index = WatchedKind::ALL.iter().position(|it| *it == source);
        self.apply_change(index.unwrap(), change);
    }

    fn watch_lease(&mut self, holder: Option<&str>) {
        let lease: Value = json!({
            "metadata": {"name": "n", "uid": "l", "resourceVersion": format!("{holder:?}")},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 40},
        });
        let lease = serde_json::from_value(lease).unwrap();
        let change = Change::Apply("n".to_owned(), Item::Lease(Box::new(lease)));
        self.watch_event(WatchedKind::Leases, change);
    }

    /// The reasons of its events if nothing more arrives for an hour.
    fn events_after_an_hour(&mut self) -> Vec<&'static str> {
        let now = clock::boot_time();
        self.reconciler.plan(now, 0);
        self.reconciler.plan(now + Duration::from_hours(1), 0);
        let events = self.reconciler.take_events().into_iter();
        events.map(|event| event.reason).collect()
    }
}

/// A leader with one node whose agent holds its Lease.
fn leading() -> (Controller, Reports) {
    let (mut controller, reports) = controller();
    let info = json!({"bootID": "boot"});
    let node =
        json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}, "status": {"nodeInfo": info}});
    let node = serde_json::from_value(node).unwrap();
    controller.watch_event(WatchedKind::Nodes, Change::Restarted);
    let change = Change::Apply("n".to_owned(), Item::Node(Box::new(node)));
    controller.watch_event(WatchedKind::Nodes, change);
    controller.watch_event(WatchedKind::Nodes, Change::Complete);
    controller.watch_lease(Some("n"));
    controller.reconciler.start_leading();
    (controller, reports)
}

fn report() -> Report {
    Report {
        node: "n".to_owned(),
        boot_id: "boot".to_owned(),
        interval_seconds: 10,
        ..Report::default()
    }
}

#[tokio::test]
async fn a_last_report_before_the_lease_is_released_leaves_no_unresponsive_agent() {
    let (mut controller, reports) = leading();
    assert!(reports.put(report()));
    controller.watch_lease(None);
    controller.take_reports();
    assert_eq!(controller.events_after_an_hour(), [""; 0]);
}

#[tokio::test]
async fn an_agent_that_reports_after_its_lease_was_released_is_monitored() {
    let (mut controller, reports) = leading();
    controller.watch_lease(None);
    assert!(reports.put(report()));
    controller.take_reports();
    assert_eq!(controller.events_after_an_hour(), ["AgentUnresponsive"]);
}

#[tokio::test]
async fn a_report_of_another_boot_is_rejected() {
    let (_, reports) = leading();
    let of_another = Report {
        boot_id: "another".to_owned(),
        ..report()
    };
    assert!(!reports.put(of_another));
    assert!(reports.put(report()));
}

#[tokio::test]
async fn work_continues_only_within_the_term() {
    let term = |until| Leadership::new(Some(Term { epoch: 7, until }), None);
    let (leadership, elected) = watch::channel(term(clock::boot_time() + Duration::from_hours(1)));
    assert_eq!(while_leading(&elected, ready(1)).await, 1);
    // The term is over, but the election has not published that yet.
    leadership.send_replace(term(clock::boot_time()));
    let first = tokio::select! {
        biased;
        late = while_leading(&elected, ready(2)) => late,
        other = ready(3) => other,
    };
    assert_eq!(first, 3);
}

#[tokio::test]
async fn a_list_accepts_an_older_watermark_restored_from_a_backup() {
    let (mut controller, _) = leading();
    let now = clock::boot_time();
    let Some(Operation::Apply { spec, .. }) = controller.reconciler.plan(now, 1).pop() else {
        panic!("the node has no NodeWatermark yet");
    };
    let watermark = |generation: i64, spec: Value| {
        let object =
            json!({"metadata": {"name": "n", "uid": "w", "generation": generation}, "spec": spec});
        let object = serde_json::from_value(object).unwrap();
        Change::Apply("n".to_owned(), Item::Watermark(Box::new(object)))
    };
    controller.reconciler.written("n", now, Ok(None));
    controller.watch_event(WatchedKind::Watermarks, watermark(2, json!(spec)));
    assert!(controller.reconciler.plan(now, 1).is_empty());
    let old = || watermark(1, json!({"hash": "old"}));
    controller.watch_event(WatchedKind::Watermarks, old());
    assert!(
        controller.reconciler.plan(now, 1).is_empty(),
        "the watch lags behind"
    );
    controller.watch_event(WatchedKind::Watermarks, Change::Restarted);
    controller.watch_event(WatchedKind::Watermarks, old());
    controller.watch_event(WatchedKind::Watermarks, Change::Complete);
    assert!(matches!(
        controller.reconciler.plan(now, 1)[..],
        [Operation::Apply { .. }]
    ));
}
