//! The last status of a node's agent: the values of its rules, and the throttles in force.

use std::time::Duration;

use jiff::Timestamp;
use kube::api::DynamicObject;
use serde::Deserialize;

use super::PodSubject;
use crate::crd::node_watermark::{NodeWatermarkSpec, NodeWatermarkStatus, ThrottledStatus};
use crate::engine::AdoptedThrottle;
use crate::engine::policy::{Rule, RuleId};
use crate::engine::units::{MilliCpu, Quota};

/// A `NodeWatermark` with its status.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ReportedWatermark {
    rules: Vec<Rule>,
    status: NodeWatermarkStatus,
    /// When the status was written, by the API server's clock.
    written: Option<Timestamp>,
}

impl ReportedWatermark {
    /// Reads the object; `None` if it has no status for its current spec.
    pub fn of(object: &DynamicObject) -> Option<Self> {
        let spec = NodeWatermarkSpec::deserialize(&object.data["spec"]).ok()?;
        let status = NodeWatermarkStatus::deserialize(&object.data["status"]).ok()?;
        if status.observed_hash.as_deref() != Some(spec.hash.as_str()) {
            return None;
        }
        let entries = object.metadata.managed_fields.iter().flatten();
        let of_status = entries.filter(|entry| entry.subresource.as_deref() == Some("status"));
        Some(Self {
            rules: spec.read().ok()?.policy.rules,
            written: of_status
                .filter_map(|entry| Some(entry.time.as_ref()?.0))
                .max(),
            status,
        })
    }

    /// The agent's value of the same rule and its age, if not older than the rule accepts samples.
    pub(super) fn value(&self, rule: &Rule, now: Timestamp) -> Option<(f64, Duration)> {
        let same = |own: &&Rule| {
            own.id == rule.id
                && own.metric == rule.metric
                && own.series == rule.series
                && own.probe == rule.probe
        };
        self.rules.iter().find(same)?;
        let reported = self
            .status
            .rules
            .iter()
            .find(|reported| reported.id == *rule.id.0)?;
        let age = now.duration_since(self.written?).unsigned_abs();
        reported
            .value
            .filter(|_| age <= rule.sample_ttl)
            .map(|value| (value, age))
    }

    /// The throttles in force on these pods.
    pub(super) fn throttles(&self, subjects: &[PodSubject]) -> Vec<AdoptedThrottle> {
        let exists = |throttled: &&ThrottledStatus| {
            let mut pods = subjects.iter();
            pods.any(|subject| *subject.pod.uid.0 == *throttled.uid)
        };
        let throttled = self.status.throttled.iter().filter(exists);
        throttled.filter_map(adopted).collect()
    }
}

/// The throttle of a status, on the pod as a whole.
fn adopted(throttled: &ThrottledStatus) -> Option<AdoptedThrottle> {
    let ratio = u8::try_from(throttled.ratio)
        .ok()
        .filter(|ratio| (1..=100).contains(ratio))?;
    let millis = |value: i64| u64::try_from(value).ok().map(MilliCpu);
    let limit = throttled.to_millicores.and_then(millis)?;
    let original = throttled.from_millicores.and_then(millis);
    Some(AdoptedThrottle {
        uid: throttled.uid.as_str().into(),
        rule: RuleId::from(throttled.rule.as_str()),
        ratio,
        idle: false,
        burst: MilliCpu::ZERO,
        target_cgroups: vec![(
            "".into(),
            MilliCpu(limit.0.saturating_mul(100) / u64::from(ratio)),
            original.map_or(Quota::Unlimited, Quota::Limit),
        )],
    })
}
