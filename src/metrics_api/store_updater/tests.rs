use jiff::SignedDuration;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::cluster::election::{Leadership, Term};
use crate::crd::Summary;
use crate::crd::load_values::{self, LoadValues};
use crate::engine::policy::NodeFacts;
use crate::engine::units::Bytes;
use crate::metrics_api::encode::Encoder;
use crate::metrics_api::negotiate::Form;
use crate::metrics_api::options::Include;
use crate::metrics_api::store::Limits;
use crate::metrics_api::table::Cell;

use super::*;

struct Replica {
    updater: StoreUpdater,
    data: Arc<Data>,
    leadership: watch::Sender<Leadership>,
}

impl Replica {
    fn new() -> Self {
        let (leadership, seen) = watch::channel(Leadership::default());
        let data = Arc::new(Data::new(Limits::default(), seen));
        let updater = StoreUpdater::new(Arc::clone(&data), None);
        let mut replica = Self {
            updater,
            data,
            leadership,
        };
        replica.lead(1);
        replica
    }

    /// With Node `n1`, of 8 CPUs.
    fn of_a_node() -> Self {
        let mut replica = Self::new();
        replica.updater.node("n1", Some(node(8)));
        replica
    }

    /// The agent of `n1` renews its Lease with this summary.
    fn renew_lease(&mut self, summary: &str) {
        self.updater.heartbeat("n1", Some(heartbeat(summary)));
    }

    fn lead(&mut self, epoch: u64) {
        let until = clock::boot_time() + std::time::Duration::from_hours(1);
        self.leadership
            .send_replace(Leadership::new(Some(Term { epoch, until }), None));
        self.updater.lead(Some(epoch));
    }

    /// The object, or null.
    fn get(&self, name: &str) -> Value {
        let found = self.data.read(|store| store.get(name)).unwrap().unwrap();
        let (form, include, now) = (Form::Plain, Include::None, clock::wall_time());
        let writer = Encoder { form, include, now };
        found.map_or(Value::Null, |object| {
            serde_json::from_str(&writer.object(&object, false)).unwrap()
        })
    }

    /// When the figures of `n1` were received, as shown by `kubectl get -o wide`.
    fn reported(&self) -> Timestamp {
        let found = self.data.read(|store| store.get("n1"));
        let cell = found.unwrap().unwrap().unwrap().content.cells[10].clone();
        let Cell::Since(then) = cell else {
            panic!("{cell:?}");
        };
        then
    }

    fn healthy(&self, name: &str) -> (Value, Value) {
        let condition = &self.get(name)["status"]["conditions"][0];
        (condition["status"].clone(), condition["reason"].clone())
    }
}

fn node(cpus: u32) -> NodeKnown {
    NodeKnown {
        uid: "u".to_owned(),
        created: Some(Time("2026-01-01T00:00:00Z".parse().unwrap())),
        boot_id: "boot".to_owned(),
        addresses: vec![[10, 0, 0, 1].into()],
        facts: NodeFacts {
            cpus,
            memory: Bytes(16 << 30),
            ..NodeFacts::default()
        },
    }
}

fn heartbeat(text: &str) -> LeaseContent {
    LeaseContent {
        time: None,
        summary: Summary::parse(text),
    }
}

#[test]
fn a_node_has_an_object_from_creation_to_deletion() {
    let mut replica = Replica::new();
    // What arrives before the Node is kept for it.
    replica.renew_lease("seq=1 cpu=50.0 mem=25.0");
    assert!(replica.get("n1").is_null());
    replica.updater.node("n1", Some(node(8)));
    let usage = &replica.get("n1")["status"]["usage"];
    assert_eq!(
        *usage,
        json!({"node": {"cpu": "4000m", "memory": "4096Mi"}})
    );
    replica.updater.node("n1", None);
    assert!(replica.get("n1").is_null());
    replica.updater.node("n2", Some(node(8)));
    assert_eq!(replica.healthy("n2"), (json!("Unknown"), json!("NoReport")));
    assert!(replica.get("n2")["status"]["usage"].is_null());
}

#[test]
fn deleted_nodes_leave_no_entries() {
    let mut replica = Replica::of_a_node();
    replica.updater.report(report(3, Duration::from_hours(1)));
    let loads = replica.updater.loads();
    assert!(loads.read()["n1"].is_some());
    replica.updater.node("n1", None);
    // Late updates leave no entry behind, in any order.
    replica.renew_lease("seq=1");
    replica.updater.set_agent_unresponsive("n1", true);
    replica.updater.heartbeat("n1", None);
    replica.updater.watermark("n1", None);
    replica.updater.set_agent_unresponsive("n1", false);
    assert!(replica.updater.nodes.is_empty() && loads.read().is_empty());
}

#[test]
fn a_replaced_node_does_not_inherit_the_report() {
    let mut replica = Replica::of_a_node();
    replica.updater.report(report(3, Duration::from_hours(1)));
    replica.updater.node("n1", Some(node(16)));
    assert_eq!(replica.get("n1")["status"]["pods"], 3, "it only grew");
    let another = NodeKnown {
        uid: "another".to_owned(),
        ..node(8)
    };
    replica.updater.node("n1", Some(another));
    assert_eq!(replica.healthy("n1"), (json!("Unknown"), json!("NoReport")));
    assert!(replica.get("n1")["status"]["pods"].is_null());
}

#[test]
fn unknown_values_are_absent_and_not_zero() {
    let mut replica = Replica::new();
    replica.updater.node("n1", Some(node(0)));
    replica.renew_lease("seq=1 cpu=50.0");
    let status = &replica.get("n1")["status"];
    assert!(status["usage"].is_null(), "{status}");
    assert_eq!(status["capacity"], json!({"memory": "16777216Ki"}));
    assert!(status["rules"].is_null());
}

#[test]
fn an_unresponsive_agents_node_keeps_its_last_figures() {
    let mut replica = Replica::of_a_node();
    let condition = |replica: &Replica| replica.get("n1")["status"]["conditions"][0].clone();
    assert_eq!(
        condition(&replica)["lastTransitionTime"],
        "2026-01-01T00:00:00Z"
    );
    replica.renew_lease("seq=1 cpu=50.0");
    assert_eq!(
        replica.healthy("n1"),
        (json!("True"), json!("AgentReporting"))
    );
    let since = condition(&replica)["lastTransitionTime"].clone();
    assert_ne!(since, "2026-01-01T00:00:00Z");
    replica.renew_lease("seq=2 cpu=60.0");
    assert_eq!(condition(&replica)["lastTransitionTime"], since);
    replica.updater.set_agent_unresponsive("n1", true);
    assert_eq!(
        replica.healthy("n1"),
        (json!("False"), json!("AgentUnresponsive"))
    );
    assert_eq!(replica.get("n1")["status"]["usage"]["node"]["cpu"], "4800m");
    // An agent that released its Lease is removed, not unresponsive; the next one is live.
    replica.updater.heartbeat("n1", None);
    assert_eq!(replica.healthy("n1"), (json!("Unknown"), json!("NoReport")));
    replica.renew_lease("seq=1 cpu=50.0");
    assert_eq!(
        replica.healthy("n1"),
        (json!("True"), json!("AgentReporting"))
    );
}

#[test]
fn every_agent_is_considered_live_in_a_new_term() {
    let mut replica = Replica::of_a_node();
    replica.renew_lease("seq=1 cpu=50.0");
    replica.updater.set_agent_unresponsive("n1", true);
    replica.lead(2);
    assert_eq!(
        replica.healthy("n1"),
        (json!("True"), json!("AgentReporting"))
    );
}

/// A report received now, with the next one due within `interval`.
fn report(pods: i64, interval: Duration) -> ReceivedReport {
    let status = json!({
        "timestamp": "2026-01-01T10:00:00Z",
        "usage": {"node": {"cpu": "1500m", "memory": "2Gi"}},
        "pressure": {"cpu": {"some": {"avg10": 7.0, "avg60": 0.0, "avg300": 0.0}}},
        "pods": pods,
    });
    ReceivedReport {
        node: "n1".into(),
        at: clock::boot_time(),
        interval,
        status: Arc::new(serde_json::from_value(status).unwrap()),
    }
}

#[test]
fn a_report_takes_precedence_over_heartbeats_until_it_is_stale() {
    let mut replica = Replica::of_a_node();
    let summary = |seq: u32| Some(heartbeat(&format!("seq={seq} cpu=50.0 mem=25.0")));
    let message = |replica: &Replica| {
        let condition = &replica.get("n1")["status"]["conditions"][0];
        condition["message"].as_str().unwrap().to_owned()
    };
    let cpu = |replica: &Replica| replica.get("n1")["status"]["usage"]["node"]["cpu"].clone();
    replica.updater.heartbeat("n1", summary(1));
    assert_eq!(cpu(&replica), "4000m");
    assert!(message(&replica).contains("does not report"));
    let hour = Duration::from_hours(1);
    replica.updater.report(report(3, hour));
    assert_eq!(cpu(&replica), "1500m");
    let status = &replica.get("n1")["status"];
    assert_eq!(
        (&status["pods"], &status["pressure"]["cpu"]["some"]["avg10"]),
        (&json!(3), &json!(7.0))
    );
    assert_eq!(
        replica.healthy("n1"),
        (json!("True"), json!("AgentReporting"))
    );
    assert_eq!(message(&replica), "the agent reports to the controller");
    // A heartbeat does not replace a fresh report.
    replica.updater.heartbeat("n1", summary(2));
    assert_eq!(cpu(&replica), "1500m");
    // A stale report stays until there is something newer.
    replica.updater.report(report(3, Duration::ZERO));
    replica.updater.heartbeat("n1", summary(2));
    assert_eq!(cpu(&replica), "1500m");
    replica.updater.set_agent_unresponsive("n1", true);
    assert_eq!(
        replica.healthy("n1"),
        (json!("False"), json!("AgentUnresponsive"))
    );
    assert_eq!(cpu(&replica), "1500m", "the last figures");
    replica.updater.set_agent_unresponsive("n1", false);
    // Now a heartbeat replaces it.
    replica.updater.heartbeat("n1", summary(3));
    assert_eq!(cpu(&replica), "4000m");
    assert!(replica.get("n1")["status"]["pods"].is_null());
}

#[test]
fn figures_are_dated_by_arrival_and_not_by_the_nodes_clock() {
    let started = clock::wall_time();
    for off in [
        -SignedDuration::from_hours(1),
        SignedDuration::from_hours(1),
    ] {
        let reported_at = started + off;
        let beat = |sequence: u32| {
            let time = Some(Time(reported_at));
            let summary = Summary::parse(&format!("seq={sequence} cpu=50.0"));
            Some(LeaseContent { time, summary })
        };
        let mut replica = Replica::of_a_node();
        replica.updater.heartbeat("n1", beat(1));
        // Its arrival is unknown, so its own timestamp is used, but none in the future.
        assert_eq!(replica.reported().min(started), reported_at.min(started));
        assert!(replica.reported() <= clock::wall_time());
        replica.updater.heartbeat("n1", beat(2));
        assert!((started..=clock::wall_time()).contains(&replica.reported()));
        let mut report = report(3, Duration::from_hours(1));
        Arc::make_mut(&mut report.status).timestamp = Some(Time(reported_at));
        replica.updater.report(report);
        assert!((started..=clock::wall_time()).contains(&replica.reported()));
        // What arrives after all Leases are listed is dated now.
        let mut replica = Replica::of_a_node();
        replica.updater.leases_known();
        replica.updater.heartbeat("n1", beat(1));
        assert!((started..=clock::wall_time()).contains(&replica.reported()));
    }
}

#[test]
fn static_parts_of_an_object_are_shared_between_reports() {
    let mut replica = Replica::of_a_node();
    let hour = Duration::from_hours(1);
    let [before, after] = [3, 4].map(|pods| {
        replica.updater.report(report(pods, hour));
        let found = replica.data.read(|store| store.get("n1"));
        found.unwrap().unwrap().unwrap()
    });
    assert_ne!(before.content.status, after.content.status);
    let (before, after) = (before.content, after.content);
    assert!(Arc::ptr_eq(&before.metadata, &after.metadata));
    assert!(Arc::ptr_eq(&before.labels, &after.labels));
}

#[test]
fn an_agent_without_a_lease_is_live_until_it_releases_one() {
    let mut replica = Replica::of_a_node();
    replica.updater.report(report(3, Duration::from_hours(1)));
    assert_eq!(
        replica.healthy("n1"),
        (json!("True"), json!("AgentReporting"))
    );
    replica.updater.heartbeat("n1", None);
    assert_eq!(replica.healthy("n1"), (json!("Unknown"), json!("NoReport")));
    assert!(replica.get("n1")["status"]["pods"].is_null());
}

#[test]
fn an_agent_that_fails_during_the_warm_up_is_shown_as_unresponsive() {
    let mut replica = Replica::new();
    replica.updater.node("n", Some(node(4)));
    replica.updater.heartbeat("n", Some(heartbeat("cpu=1.0")));
    (replica.updater.is_open, replica.updater.warm_up) = (true, WarmUp::default());
    replica.lead(2);
    assert_eq!(
        replica.data.change(|store| store.term()),
        None,
        "warming up"
    );
    replica.updater.set_agent_unresponsive("n", true);
    replica.updater.warm_up = WarmUp::none();
    replica.lead(2);
    assert_eq!(
        replica.healthy("n"),
        (json!("False"), json!("AgentUnresponsive"))
    );
    replica.lead(3);
    assert_eq!(replica.healthy("n").0, json!("True"), "live again");
}

/// What was polled of `n1`: this use of CPU, this long ago.
fn polled(cpu: f64, age: Duration) -> Polled {
    let mut values = LoadValues::default();
    values.0[load_values::index("cpu_usage_avg_5m").unwrap()] = Some(cpu);
    values.0[load_values::index("mem_expected").unwrap()] = Some(9.0);
    let load = PolledLoad {
        at: clock::boot_time().before(age),
        interval: Duration::from_secs(15),
        status: Arc::new(values.status().unwrap()),
    };
    Polled {
        node: "n1".into(),
        load: Some(load),
    }
}

#[test]
fn a_polled_node_has_a_load_until_it_is_forgotten() {
    let mut replica = Replica::of_a_node();
    let loads = replica.updater.loads();
    replica.updater.polled(polled(45.0, Duration::from_secs(5)));
    assert_eq!(replica.healthy("n1"), (json!("Unknown"), json!("Polled")));
    let status = &replica.get("n1")["status"];
    assert_eq!(status["load"]["percent"], 50.0, "of a line of 90");
    assert_eq!(status["capacity"]["cpu"], "8");
    let load = loads.read()["n1"].clone().unwrap();
    let now = clock::boot_time();
    assert!(load.polled && load.cpu == MilliCpu(8000) && load.fresh(now).is_some());
    assert!(
        load.fresh(now + Duration::from_secs(41)).is_none(),
        "5 s old already"
    );
    assert_eq!(loads.node_at([10, 0, 0, 1].into()).as_deref(), Some("n1"));
    replica.updater.polled(Polled {
        node: "n1".into(),
        load: None,
    });
    assert_eq!(replica.healthy("n1"), (json!("Unknown"), json!("NoReport")));
    assert!(replica.get("n1")["status"]["load"].is_null());
    assert!(loads.read()["n1"].is_none());
}

#[test]
fn a_fresh_report_wins_over_a_newer_poll_and_a_stale_one_does_not() {
    let mut replica = Replica::of_a_node();
    let loads = replica.updater.loads();
    let is_polled = || loads.read()["n1"].as_ref().unwrap().polled;
    replica.updater.polled(polled(45.0, Duration::ZERO));
    replica.updater.report(report(3, Duration::from_hours(1)));
    assert!(!is_polled());
    replica.updater.polled(polled(45.0, Duration::ZERO));
    assert!(!is_polled());
    assert_eq!(replica.healthy("n1").1, json!("AgentReporting"));
    replica.updater.report(report(4, Duration::ZERO));
    replica.updater.polled(polled(45.0, Duration::ZERO));
    assert!(is_polled());
    assert_eq!(replica.get("n1")["status"]["load"]["percent"], 50.0);
}

#[test]
fn a_deleted_node_leaves_nothing_of_what_was_polled() {
    let mut replica = Replica::of_a_node();
    let loads = replica.updater.loads();
    replica.updater.polled(polled(45.0, Duration::ZERO));
    assert!(loads.past("n1", clock::boot_time()).is_some());
    replica.updater.node("n1", None);
    replica.updater.polled(polled(45.0, Duration::ZERO));
    assert!(replica.get("n1").is_null() && loads.read().is_empty());
    assert_eq!(loads.node_at([10, 0, 0, 1].into()), None);
    replica.updater.node("n1", Some(node(8)));
    assert!(loads.read()["n1"].is_none() && loads.past("n1", clock::boot_time()).is_none());
}
