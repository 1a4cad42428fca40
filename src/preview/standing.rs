//! What policies do to pods at all times, without any rule.

use serde::Serialize;

use super::report::MAX_NAMED;
use crate::crd::words::named;
use crate::engine::units::MilliCpu;
use crate::messages::count;

/// What a `PodQOS` does to the pods of a node at all times.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StandingPreview {
    /// Its name.
    pub policy: String,
    /// It only reports.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub preview: bool,
    /// `namespace/name` of the pods in the idle class.
    pub idle: Vec<String>,
    /// Its burst; 0 if it gives none.
    #[serde(rename = "burstMillicores")]
    pub millicores: MilliCpu,
    /// `namespace/name` of the pods that get the burst.
    pub burst: Vec<String>,
}

impl StandingPreview {
    /// `PodQOS/batch: idle class at all times: 2 pods (batch/a, batch/b)`
    pub(super) fn line(&self) -> String {
        let mut gives = Vec::new();
        let pods = |names: &[String]| match names.len() {
            0 => "no pod".to_owned(),
            number => format!("{} ({})", count(number, "pod"), named(names, MAX_NAMED)),
        };
        // Without a burst it is there for the idle class.
        if !self.idle.is_empty() || self.millicores == MilliCpu::ZERO {
            gives.push(format!("idle class at all times: {}", pods(&self.idle)));
        }
        if self.millicores > MilliCpu::ZERO {
            gives.push(format!(
                "burst of {} above the CPU limit: {}",
                self.millicores,
                pods(&self.burst)
            ));
        }
        let only = if self.preview { "only report: " } else { "" };
        format!("PodQOS/{}: {only}{}", self.policy, gives.join("; "))
    }

    /// Adds the pods of another node.
    pub(super) fn add(&mut self, other: &Self) {
        self.idle.extend_from_slice(&other.idle);
        self.burst.extend_from_slice(&other.burst);
    }
}
