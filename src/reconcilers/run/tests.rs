use std::future::ready;

use serde_json::{Value, json};

use super::*;
use crate::cluster::election::Term;
use crate::crd::Report;
use crate::metrics_api::data::Data;
use crate::metrics_api::store::Limits;

/// A controller that nothing is connected to, and where its agents report.
fn controller() -> (Controller, Reports) {
    let nowhere = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
    let client = Client::try_from(nowhere).unwrap();
    let options = Options {
        settings: Settings::default(),
        namespace: "default".to_owned(),
        lease: "controller".to_owned(),
        agents: "agents".to_owned(),
        identity: "one".to_owned(),
        listen: ([127, 0, 0, 1], 0).into(),
        metrics_api: None,
        address: None,
    };
    let reports = Reports::unconnected(client.clone());
    let (_, standing) = watch::channel(Standing::default());
    let data = Arc::new(Data::new(Limits::default(), standing));
    let mut controller = Controller::new(client, &options, Arc::default());
    controller.feed = Some(Feed::new(data, Some(reports.clone())));
    controller.reports = Some(reports.clone());
    (controller, reports)
}

impl Controller {
    fn sees(&mut self, source: Source, change: Change<Item>) {
        let index = Source::ALL.iter().position(|it| *it == source);
        self.take(index.unwrap(), change);
    }

    fn sees_lease(&mut self, holder: Option<&str>) {
        let lease: Value = json!({
            "metadata": {"name": "n", "uid": "l", "resourceVersion": format!("{holder:?}")},
            "spec": {"holderIdentity": holder, "leaseDurationSeconds": 40},
        });
        let lease = serde_json::from_value(lease).unwrap();
        let change = Change::Apply("n".to_owned(), Item::Lease(Box::new(lease)));
        self.sees(Source::Leases, change);
    }

    /// The words of what it tells when nothing more comes for an hour.
    fn tells_in_the_end(&mut self) -> Vec<&'static str> {
        let now = clock::now();
        self.world.plan(now, 0);
        self.world.plan(now + Duration::from_hours(1), 0);
        let notes = self.world.take_notes().into_iter();
        notes.map(|note| note.reason).collect()
    }
}

/// One that leads, and sees a node whose agent holds its Lease.
fn leading() -> (Controller, Reports) {
    let (mut controller, reports) = controller();
    let info = json!({"bootID": "boot"});
    let node =
        json!({"metadata": {"name": "n", "uid": "u"}, "spec": {}, "status": {"nodeInfo": info}});
    let node = serde_json::from_value(node).unwrap();
    controller.sees(Source::Nodes, Change::Restarted);
    let change = Change::Apply("n".to_owned(), Item::Node(Box::new(node)));
    controller.sees(Source::Nodes, change);
    controller.sees(Source::Nodes, Change::Complete);
    controller.sees_lease(Some("n"));
    controller.world.lead();
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
async fn an_agent_whose_last_report_came_before_it_gave_its_lease_back_is_not_missed() {
    let (mut controller, reports) = leading();
    assert!(reports.put(report()));
    controller.sees_lease(None);
    controller.hear();
    assert_eq!(controller.tells_in_the_end(), [""; 0]);
}

#[tokio::test]
async fn an_agent_that_reports_though_its_lease_was_given_back_is_missed_when_it_stops() {
    let (mut controller, reports) = leading();
    controller.sees_lease(None);
    assert!(reports.put(report()));
    controller.hear();
    assert_eq!(controller.tells_in_the_end(), ["AgentSilent"]);
}

#[tokio::test]
async fn a_report_is_of_the_boot_that_the_nodes_kubelet_wrote() {
    let (_, reports) = leading();
    let of_another = Report {
        boot_id: "another".to_owned(),
        ..report()
    };
    assert!(!reports.put(of_another));
    assert!(reports.put(report()));
}

#[tokio::test]
async fn what_was_begun_goes_on_only_within_the_term() {
    let term = |until| Standing::new(Some(Term { epoch: 7, until }), None);
    let (standing, elected) = watch::channel(term(clock::now() + Duration::from_hours(1)));
    assert_eq!(while_leading(&elected, ready(1)).await, 1);
    // Nobody has told this replica yet that its term is over.
    standing.send_replace(term(clock::now()));
    let first = tokio::select! {
        biased;
        late = while_leading(&elected, ready(2)) => late,
        other = ready(3) => other,
    };
    assert_eq!(first, 3);
}

#[tokio::test]
async fn a_watermark_of_a_backup_is_seen_though_it_is_older_than_what_was_known() {
    let (mut controller, _) = leading();
    let now = clock::now();
    let Some(Write::Apply { spec, .. }) = controller.world.plan(now, 1).pop() else {
        panic!("the node has no NodeWatermark yet");
    };
    let watermark = |generation: i64, spec: Value| {
        let object =
            json!({"metadata": {"name": "n", "uid": "w", "generation": generation}, "spec": spec});
        let object = serde_json::from_value(object).unwrap();
        Change::Apply("n".to_owned(), Item::Watermark(Box::new(object)))
    };
    controller.world.written("n", now, Ok(None));
    controller.sees(Source::Watermarks, watermark(2, json!(spec)));
    assert!(controller.world.plan(now, 1).is_empty());
    let old = || watermark(1, json!({"hash": "old"}));
    controller.sees(Source::Watermarks, old());
    assert!(
        controller.world.plan(now, 1).is_empty(),
        "the watch lags behind"
    );
    controller.sees(Source::Watermarks, Change::Restarted);
    controller.sees(Source::Watermarks, old());
    controller.sees(Source::Watermarks, Change::Complete);
    assert!(matches!(
        controller.world.plan(now, 1)[..],
        [Write::Apply { .. }]
    ));
}
