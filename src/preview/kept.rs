//! What a node's agent said last: the values of the rules that it keeps, and what it has in force.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::DynamicObject;
use serde::Deserialize;

use super::Subject;
use crate::crd::node_watermark::{NodeWatermarkSpec, NodeWatermarkStatus, ThrottledStatus};
use crate::engine::AdoptedThrottle;
use crate::engine::policy::{Rule, RuleId};
use crate::engine::units::{MilliCpu, Quota};

/// A `NodeWatermark` with its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Kept {
    rules: Vec<Rule>,
    status: NodeWatermarkStatus,
    /// When the status was written, by the API server's clock.
    written: Option<Timestamp>,
}

impl Kept {
    /// What the object says; `None` where it has no status, or one for another spec.
    pub fn of(object: &DynamicObject) -> Option<Self> {
        let spec = NodeWatermarkSpec::deserialize(&object.data["spec"]).ok()?;
        let status = NodeWatermarkStatus::deserialize(&object.data["status"]).ok()?;
        if status.observed_hash.as_deref() != Some(spec.hash.as_str()) {
            return None;
        }
        let writes = object.metadata.managed_fields.iter().flatten();
        let of_status = writes.filter(|write| write.subresource.as_deref() == Some("status"));
        Some(Self {
            rules: spec.read().ok()?.policy.rules,
            written: of_status
                .filter_map(|write| Some(write.time.as_ref()?.0))
                .max(),
            status,
        })
    }

    /// The agent's value for a rule that it keeps as it is, with its age: no older than the rule takes samples.
    pub(super) fn value(&self, rule: &Rule, now: Timestamp) -> Option<(f64, Duration)> {
        let same = |kept: &&Rule| {
            kept.id == rule.id
                && kept.metric == rule.metric
                && kept.series == rule.series
                && kept.probe == rule.probe
        };
        self.rules.iter().find(same)?;
        let said = self
            .status
            .rules
            .iter()
            .find(|said| said.id == *rule.id.0)?;
        let age = now.duration_since(self.written?).unsigned_abs();
        said.value
            .filter(|_| age <= rule.sample_ttl)
            .map(|value| (value, age))
    }

    /// The throttles in force on these pods.
    pub(super) fn throttles(&self, subjects: &[Subject]) -> Vec<AdoptedThrottle> {
        let there = |said: &&ThrottledStatus| {
            let mut pods = subjects.iter();
            pods.any(|subject| *subject.pod.uid.0 == *said.uid)
        };
        let throttled = self.status.throttled.iter().filter(there);
        throttled.filter_map(adopt).collect()
    }
}

/// A throttle as its status tells of it, on the pod as a whole.
fn adopt(said: &ThrottledStatus) -> Option<AdoptedThrottle> {
    let ratio = u8::try_from(said.ratio)
        .ok()
        .filter(|ratio| (1..=100).contains(ratio))?;
    let millis = |given: i64| u64::try_from(given).ok().map(MilliCpu);
    let left = said.to_millicores.and_then(millis)?;
    let original = said.from_millicores.and_then(millis);
    Some(AdoptedThrottle {
        uid: said.uid.as_str().into(),
        rule: RuleId::from(said.rule.as_str()),
        ratio,
        idle: false,
        levers: vec![(
            "".into(),
            MilliCpu(left.0.saturating_mul(100) / u64::from(ratio)),
            original.map_or(Quota::Unlimited, Quota::Limit),
        )],
    })
}
