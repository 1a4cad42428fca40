//! The policy file of crane-scheduler, `DynamicSchedulerPolicy` of `scheduler.policy.crane.io/v1alpha1`: thresholds and weights
//! over windows of a node's usage.
//!
//! The fields are those of crane-scheduler (`pkg/plugins/apis/policy/v1alpha1/types.go`), with its misspelt `maxLimitPecent`.

use std::sync::LazyLock;
use std::time::Duration;

use jiff::SignedDuration;
use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use super::NodeMetricStatus;
use super::crane_annotations::USAGE;
use super::manifest::{ManifestError, Position};
use super::node_metric::ResourceWindows;
use super::path::at_index;
use super::schema::{inlined_schema, tidy};
use super::settings_file::{self, Errors};
use super::validate::Definition;
use super::words::{self, quoted};

const API_VERSION: &str = "scheduler.policy.crane.io/v1alpha1";
const KIND: &str = "DynamicSchedulerPolicy";

/// The file.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
struct PolicyFile {
    /// `scheduler.policy.crane.io/v1alpha1`
    api_version: String,
    /// `DynamicSchedulerPolicy`
    kind: String,
    /// Thresholds and weights.
    spec: PolicySpec,
}

/// Thresholds and weights.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
struct PolicySpec {
    /// How often crane's controller renews a metric. Has no meaning here: agents report on their own.
    #[serde(default)]
    sync_policy: Vec<SyncEntry>,
    /// The thresholds of Filter.
    #[serde(default)]
    predicate: Vec<PredicateEntry>,
    /// The weights of Score.
    #[serde(default)]
    priority: Vec<PriorityEntry>,
    /// How crane's controller counts recent pods. Has no meaning here: agents report what new pods are expected to use.
    #[serde(default)]
    hot_value: Vec<HotValueEntry>,
}

/// An entry of `syncPolicy`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
struct SyncEntry {
    /// The metric.
    name: String,
    /// A Go duration.
    period: String,
}

/// An entry of `predicate`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
struct PredicateEntry {
    /// The metric.
    name: String,
    /// From 0 (off) to 1, as crane spells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_limit_pecent: Option<f64>,
    /// The same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_limit_percent: Option<f64>,
}

/// An entry of `priority`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
struct PriorityEntry {
    /// The metric.
    name: String,
    /// 0 or more.
    weight: f64,
}

/// An entry of `hotValue`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
struct HotValueEntry {
    /// A Go duration.
    time_range: String,
    /// 1 or more.
    count: i64,
}

/// A policy in use.
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerPolicy {
    /// Filter rejects a node above any of these.
    pub thresholds: Vec<Threshold>,
    /// Score is the mean of these, by weight. Their sum is above 0.
    pub weights: Vec<Weight>,
}

/// The limit of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Threshold {
    /// What is limited.
    pub metric: PolicyMetric,
    /// Above 0, at most 1.
    pub limit: f64,
}

/// The weight of a metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// What is weighed.
    pub metric: PolicyMetric,
    /// Not negative, finite.
    pub weight: f64,
}

/// A metric of a policy, by its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyMetric {
    /// A window over CPU or memory.
    Usage(&'static str),
    /// A window of the node's settings.
    Custom(Box<str>),
}

type Resource = fn(&NodeMetricStatus) -> Option<&ResourceWindows>;
type Window = fn(&ResourceWindows) -> Option<f64>;

const RESOURCES: [Resource; 2] = [
    |status| status.windows.cpu.as_ref(),
    |status| status.windows.memory.as_ref(),
];
const WINDOWS: [Window; 3] = [
    |windows| windows.last5m?.avg,
    |windows| windows.max_avg1h?.value,
    |windows| windows.max_avg1d?.value,
];
impl PolicyMetric {
    /// Its name in the file.
    pub fn name(&self) -> &str {
        match self {
            Self::Usage(name) => name,
            Self::Custom(name) => name,
        }
    }

    /// Its value on a node, as a fraction; `None` if it is unknown.
    pub fn value(&self, status: &NodeMetricStatus) -> Option<f64> {
        let percent = match self {
            Self::Usage(name) => {
                let index = USAGE.iter().position(|usage| usage == name)?;
                let (resource, window) = (index / WINDOWS.len(), index % WINDOWS.len());
                WINDOWS[window](RESOURCES[resource](status)?)?
            }
            Self::Custom(name) => *status.windows.custom.get(&**name)?,
        };
        percent.is_finite().then_some(percent / 100.0)
    }
}

static DEFINITION: LazyLock<Definition> = LazyLock::new(|| {
    let mut schema = inlined_schema::<PolicyFile>();
    tidy(&mut schema);
    Definition::new(schema)
});

/// Reads the text of a file. `custom` are the names of the windows of the node's settings.
///
/// # Errors
/// All that is wrong, by line.
pub fn read<'a>(
    text: &str,
    custom: impl IntoIterator<Item = &'a str>,
) -> Result<SchedulerPolicy, Vec<ManifestError>> {
    let compile = |file: &PolicyFile, errors: &mut Errors| {
        let custom = custom.into_iter().collect();
        Reading { custom, errors }.compile(file)
    };
    let policy = settings_file::read(text, &DEFINITION, "write one policy", compile)?;
    policy.ok_or_else(|| settings_file::error(Position::line(1), "the file is empty"))
}

/// A file while it is read.
struct Reading<'a> {
    custom: Vec<&'a str>,
    errors: &'a mut Errors,
}

impl Reading<'_> {
    fn compile(&mut self, file: &PolicyFile) -> SchedulerPolicy {
        for (path, found, wanted) in [
            ("apiVersion", &file.api_version, API_VERSION),
            ("kind", &file.kind, KIND),
        ] {
            if found != wanted {
                let message = format!("{path} is {}; write {wanted}", quoted(found));
                self.errors.push(path.to_owned(), message);
            }
        }
        let spec = &file.spec;
        self.check_unused(spec);
        let thresholds = spec.predicate.iter().enumerate();
        let thresholds = thresholds
            .filter_map(|(index, entry)| self.threshold(index, entry))
            .collect();
        let weights: Vec<Weight> = spec
            .priority
            .iter()
            .enumerate()
            .filter_map(|(index, entry)| self.weight(index, entry))
            .collect();
        let sum: f64 = spec.priority.iter().map(|entry| entry.weight).sum();
        if sum == 0.0 {
            let message = "the weights add up to 0; give at least one metric a weight above 0";
            self.errors
                .push("spec.priority".to_owned(), message.to_owned());
        }
        SchedulerPolicy {
            thresholds,
            weights,
        }
    }

    /// Checks what has no meaning here, so that a file that crane-scheduler could not use is not taken for one that it can.
    fn check_unused(&mut self, spec: &PolicySpec) {
        for (index, entry) in spec.sync_policy.iter().enumerate() {
            let path = at_index("spec.syncPolicy", index);
            self.metric(&path, &entry.name);
            self.check_duration(format!("{path}.period"), &entry.period);
        }
        for (index, entry) in spec.hot_value.iter().enumerate() {
            let path = at_index("spec.hotValue", index);
            self.check_duration(format!("{path}.timeRange"), &entry.time_range);
            if entry.count < 1 {
                let message = format!("count is {}; write a number of pods from 1", entry.count);
                self.errors.push(format!("{path}.count"), message);
            }
        }
    }

    fn check_duration(&mut self, path: String, text: &str) {
        let parsed = text.parse::<SignedDuration>().ok();
        let duration = parsed.and_then(|it| Duration::try_from(it).ok());
        if duration.is_none_or(|duration| duration.is_zero()) {
            let message = format!("{} is not a time above 0, such as 3m", quoted(text));
            self.errors.push(path, message);
        }
    }

    fn threshold(&mut self, index: usize, entry: &PredicateEntry) -> Option<Threshold> {
        let path = at_index("spec.predicate", index);
        let metric = self.metric(&path, &entry.name);
        let (name, limit) = match (entry.max_limit_pecent, entry.max_limit_percent) {
            (Some(limit), None) => ("maxLimitPecent", limit),
            (None, Some(limit)) => ("maxLimitPercent", limit),
            (pecent, _) => {
                let problem = pecent.map_or("has no", |_| "has both spellings of");
                self.errors.push(path, format!("{problem} maxLimitPecent"));
                return None;
            }
        };
        if !(0.0..=1.0).contains(&limit) {
            let message = format!("{name} is {limit}; write a fraction from 0 to 1, such as 0.65");
            self.errors.push(format!("{path}.{name}"), message);
            return None;
        }
        // As in crane: 0 turns it off.
        let metric = metric.filter(|_| limit > 0.0)?;
        Some(Threshold { metric, limit })
    }

    fn weight(&mut self, index: usize, entry: &PriorityEntry) -> Option<Weight> {
        let path = at_index("spec.priority", index);
        let metric = self.metric(&path, &entry.name);
        let weight = entry.weight;
        if !(0.0..=1e6).contains(&weight) {
            let message = format!("weight is {weight}; write a number from 0, such as 0.2");
            self.errors.push(format!("{path}.weight"), message);
            return None;
        }
        Some(Weight {
            metric: metric?,
            weight,
        })
    }

    fn metric(&mut self, path: &str, name: &str) -> Option<PolicyMetric> {
        if let Some(usage) = USAGE.iter().find(|usage| **usage == name) {
            return Some(PolicyMetric::Usage(usage));
        }
        if self.custom.contains(&name) {
            return Some(PolicyMetric::Custom(name.into()));
        }
        let known = USAGE.iter().chain(&self.custom).copied();
        let fix = words::nearest(name, known).map_or_else(
            || format!("write one of {}, or a name of --windows", USAGE.join(", ")),
            |near| format!("did you mean {near}?"),
        );
        let message = format!("{} is not a known metric; {fix}", quoted(name));
        self.errors.push(format!("{path}.name"), message);
        None
    }
}

#[cfg(test)]
#[path = "scheduler_policy_tests.rs"]
mod tests;
