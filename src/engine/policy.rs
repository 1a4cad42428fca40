//! The compiled policies of one node, with all defaults resolved.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use jiff::Timestamp;

use super::hours::Hours;
use super::metric::{ActionKind, Metric};
use super::pod::Pod;
use super::selector::Selector;
use super::units::MilliCpu;
use super::window::CustomWindow;

/// A grace period of 0 would be a forced deletion.
const MIN_GRACE: Duration = Duration::from_secs(1);

/// `<NodeQOS>/<rule>`. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RuleId(pub Arc<str>);

impl RuleId {
    const STANDING: &str = "PodQOS/";

    /// What stands in place of a rule where a `PodQOS` itself acts: `PodQOS/<name>`. Names of objects are in lower case, so no
    /// rule has this ID.
    pub fn standing(pod_qos: &str) -> Self {
        Self(format!("{}{pod_qos}", Self::STANDING).into())
    }

    /// The `PodQOS` that acts itself; `None` for a rule.
    pub fn pod_qos(&self) -> Option<&str> {
        self.0.strip_prefix(Self::STANDING)
    }
}

/// The `NodeQOS` of a rule by its ID, or by the name of the action or the pods that the rule has itself; `None` for the name of
/// an object, which has no `/`.
pub fn node_qos_of(name: &str) -> Option<&str> {
    name.split_once('/').map(|(node_qos, _)| node_qos)
}

impl From<&str> for RuleId {
    fn from(id: &str) -> Self {
        Self(id.into())
    }
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// All policies that apply to one node. Built and sorted by [`crate::crd::compile`], so equal objects give equal sets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicySet {
    /// Rules, sorted by id.
    pub rules: Vec<Rule>,
    /// Which pods may be acted on and how, sorted by name.
    pub pods: Vec<PodPolicy>,
}

impl PolicySet {
    /// The same set, which only reports what it would do.
    #[must_use]
    pub fn as_preview(mut self) -> Self {
        for rule in &mut self.rules {
            rule.strategy = Strategy::Preview;
        }
        for pods in &mut self.pods {
            pods.standing.preview = pods.standing.acts();
        }
        self
    }

    /// The part of it that only reports: what an emergency stop leaves.
    #[must_use]
    pub fn previews(mut self) -> Self {
        self.rules.retain(|rule| rule.strategy == Strategy::Preview);
        for pods in &mut self.pods {
            if !pods.standing.preview {
                pods.standing = Standing::default();
            }
        }
        self
    }

    /// Whether it may do anything on the node.
    pub fn acts(&self) -> bool {
        !self.rules.is_empty() || self.pods.iter().any(|it| it.standing.acts())
    }
}

/// One rule of one `NodeQOS`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// ID, which stays the same when the rule is edited.
    pub id: RuleId,
    /// The metric.
    pub metric: Metric,
    /// Selects series of the metric by label; `None` selects all.
    pub series: Option<Selector>,
    /// A value above this is a breach. In the metric's unit; finite, above 0.
    pub threshold: f64,
    /// A value at or below this is quiet. Finite, at most `threshold`.
    pub restore_value: f64,
    /// Consecutive breaches before the action starts, at least 1.
    pub avoidance_threshold: u32,
    /// Consecutive quiet evaluations before it may end, at least 1.
    pub restore_threshold: u32,
    /// A sample older than this is Unknown.
    pub sample_ttl: Duration,
    /// The HTTP probe of its `NodeQOS`.
    pub probe: Option<Probe>,
    /// The action on a breach.
    pub action: Arc<Action>,
    /// Enforce or only preview.
    pub strategy: Strategy,
    /// The hours in which it is evaluated and acts; without any, always.
    pub active_during: Vec<Hours>,
}

impl Rule {
    /// Whether `time` is within its hours.
    pub fn is_active(&self, time: Timestamp) -> bool {
        let hours = &self.active_during;
        hours.is_empty() || hours.iter().any(|hours| hours.contains(time))
    }
}

/// Whether a rule acts or only reports what it would do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Strategy {
    /// Act. Crane writes `None`.
    Enforce,
    /// Report only.
    Preview,
}

impl Strategy {
    /// The strategy of this name, or of crane's `None`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "Enforce" | "None" => Some(Self::Enforce),
            "Preview" => Some(Self::Preview),
            _ => None,
        }
    }

    /// The value in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "Enforce",
            Self::Preview => "Preview",
        }
    }
}

/// An `AvoidanceAction` with its defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// The object's name.
    pub name: String,
    /// Minimum time in force after the last breach.
    pub cool_down: Duration,
    /// Taint effect that disables scheduling; `None` leaves scheduling enabled.
    pub scheduling: Option<TaintEffect>,
    /// CPU throttling.
    pub throttle: Option<CpuThrottle>,
    /// Reclaim page cache.
    pub force_gc: bool,
    /// Eviction.
    pub eviction: Option<EvictionSpec>,
}

impl Action {
    /// Whether it acts on pods in that way.
    pub const fn includes(&self, kind: ActionKind) -> bool {
        match kind {
            ActionKind::CpuThrottle => self.throttle.is_some(),
            ActionKind::ForceGc => self.force_gc,
            ActionKind::Eviction => self.eviction.is_some(),
        }
    }
}

/// Taint effect that disables scheduling, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TaintEffect {
    /// New pods avoid the node if possible.
    PreferNoSchedule,
    /// New pods are not scheduled to the node.
    NoSchedule,
}

impl TaintEffect {
    /// The value in taints and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PreferNoSchedule => "PreferNoSchedule",
            Self::NoSchedule => "NoSchedule",
        }
    }
}

/// How a pod's CPU is throttled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuThrottle {
    /// Floor, percent of the base, 0..=100.
    pub min_ratio: u8,
    /// Step, percent of the base, 1..=100.
    pub step: u8,
    /// Move the pod to the idle class before the first step.
    pub idle: bool,
}

/// How pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictionSpec {
    /// Grace period, at least 1 s; `None` uses the pod's own.
    pub grace: Option<Duration>,
    /// Maximum number of pods per round, at least 1.
    pub max_pods_per_round: u32,
    /// Also evict pods without a controller.
    pub evict_unowned: bool,
}

impl EvictionSpec {
    /// Grace period for `pod`, at least 1 s.
    pub fn grace_of(&self, pod: &Pod) -> Duration {
        self.grace.unwrap_or(pod.grace).max(MIN_GRACE)
    }
}

/// The HTTP probe of a `NodeQOS`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Probe {
    /// Where to GET Prometheus text from.
    pub url: Arc<str>,
    /// Extra request headers.
    pub headers: Vec<(String, String)>,
    /// Timeout for the whole response.
    pub timeout: Duration,
}

/// Which pods a `PodQOS` matches and which actions it allows on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPolicy {
    /// The object's name.
    pub name: String,
    /// Selects pods by label; `None` matches all, if a scope is given.
    pub labels: Option<Selector>,
    /// All of these must match. With neither labels nor scopes, the policy matches nothing.
    pub scopes: Vec<ScopeRequirement>,
    /// Entries of `allowedActions`, lower case.
    pub allowed: Vec<String>,
    /// What it does to these pods at all times.
    pub standing: Standing,
}

/// What a `PodQOS` does to its pods at all times, without a rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Standing {
    /// They are in the idle class.
    pub idle: bool,
    /// How much unused quota their cgroups may save up for short peaks, as CPUs over one enforcement period. 0: none.
    pub burst: MilliCpu,
    /// Report only.
    pub preview: bool,
}

impl Standing {
    /// Whether it does anything, or would in Preview.
    pub fn acts(self) -> bool {
        self.idle || self.burst > MilliCpu::ZERO
    }

    /// Whether it lowers pods, and not only in Preview.
    pub const fn lowers(self) -> bool {
        self.idle && !self.preview
    }
}

/// What one entry of `allowedActions` allows. A keyword allows only that kind, even if an action has that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed<'a> {
    /// `throttle`: CPU throttling and reclaim of page cache.
    Throttle,
    /// `eviction`, or `evict`.
    Eviction,
    /// `disableScheduling`, which affects the node and not a pod.
    Scheduling,
    /// Everything that the action with this name does.
    Action(&'a str),
}

impl<'a> Allowed<'a> {
    /// The words for kinds of action.
    pub const WORDS: [(&'static str, Allowed<'static>); 4] = [
        ("throttle", Allowed::Throttle),
        ("eviction", Allowed::Eviction),
        ("evict", Allowed::Eviction),
        ("disableScheduling", Allowed::Scheduling),
    ];

    /// Parses an entry, ignoring case.
    pub fn of(entry: &'a str) -> Self {
        let word = Self::WORDS
            .iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(entry));
        word.map_or(Self::Action(entry), |(_, allowed)| *allowed)
    }

    /// Whether it allows this kind of action to the action named `action`.
    pub fn permits(self, action: &str, kind: ActionKind) -> bool {
        match self {
            Self::Throttle => matches!(kind, ActionKind::CpuThrottle | ActionKind::ForceGc),
            Self::Eviction => kind == ActionKind::Eviction,
            Self::Scheduling => false,
            Self::Action(name) => name.eq_ignore_ascii_case(action),
        }
    }
}

/// One expression of a scope selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ScopeRequirement {
    /// Quality-of-service class.
    Qos(Membership<super::pod::QosClass>),
    /// Inclusive ranges of priority.
    Priority(Membership<(i32, i32)>),
    /// Namespace.
    Namespace(Membership<String>),
}

/// The operators of a scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Membership<T> {
    /// Has any of these values.
    In(Vec<T>),
    /// Has none of these values.
    NotIn(Vec<T>),
    /// Always true: every pod has a class, priority and namespace.
    Exists,
    /// Never true.
    DoesNotExist,
}

/// Facts about the node that compilation needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// Node labels.
    pub labels: BTreeMap<String, String>,
    /// Online CPUs; 0 if unknown.
    pub cpus: u32,
    /// Memory in bytes, without the pools of huge pages; 0 if unknown.
    pub memory: super::units::Bytes,
    /// The windows of the node's settings; `None` if the settings are not known.
    pub windows: Option<Arc<[CustomWindow]>>,
}
