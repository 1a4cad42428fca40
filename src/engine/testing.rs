//! Builders for the unit tests of this module.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::metric::Metric;
use super::pod::{Pod, PodUid, QosClass, Resources};
use super::policy::{Action, Rule, RuleId, Strategy};
use super::units::MilliCpu;

pub(super) fn action(name: &str) -> Action {
    Action {
        name: name.to_owned(),
        cool_down: Duration::from_secs(30),
        scheduling: None,
        throttle: None,
        force_gc: false,
        eviction: None,
    }
}

pub(crate) fn rule(metric: &str, threshold: f64) -> Rule {
    Rule {
        id: RuleId::from("n/rule"),
        metric: Metric::parse(metric).unwrap(),
        series: None,
        threshold,
        restore_value: threshold,
        avoidance_threshold: 1,
        restore_threshold: 1,
        sample_ttl: Duration::from_mins(1),
        probe: None,
        action: Arc::new(action("act")),
        strategy: Strategy::Enforce,
        active_during: Vec::new(),
    }
}

pub(crate) fn pod(uid: &str) -> Pod {
    Pod {
        uid: PodUid::from(uid),
        namespace: "default".to_owned(),
        name: uid.to_owned(),
        labels: BTreeMap::new(),
        priority: 0,
        qos: QosClass::BestEffort,
        started: 0,
        running: true,
        terminating: false,
        resources_reported: false,
        resizing: false,
        elastic: false,
        cpu_request: MilliCpu::ZERO,
        resources: Resources::default(),
        exec_probes: false,
        container_requests: BTreeMap::new(),
        grace: Duration::from_secs(30),
        protected: false,
        reserved: None,
        eviction_exemption: None,
        owned: true,
        owner: None,
    }
}
