//! The compiled form of the policies: what one node has to keep, with every default resolved.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::metric::{ActionKind, Metric};
use super::pod::Pod;
use super::selector::Selector;

/// Kubernetes takes a grace period of 0 for a forced deletion.
const MIN_GRACE: Duration = Duration::from_secs(1);

/// `<NodeQOS>/<rule>`. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RuleId(pub Arc<str>);

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

/// All that applies to one node. Built by [`crate::crd::compile`], sorted, so that equal objects give equal sets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PolicySet {
    /// Rules, sorted by id.
    pub rules: Vec<Rule>,
    /// Which pods may be acted on, sorted by name.
    pub pods: Vec<PodPolicy>,
}

/// One rule of one `NodeQOS`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Identity; what is in force is kept under it over a reload.
    pub id: RuleId,
    /// The metric.
    pub metric: Metric,
    /// Over the labels of the metric's series; `None`: all of them.
    pub series: Option<Selector>,
    /// High mark, in the metric's unit: above it is a breach. Finite, above 0.
    pub watermark: f64,
    /// Low mark: at or below it is quiet. Finite, at most `watermark`.
    pub restore: f64,
    /// Consecutive breaches before the action starts, at least 1.
    pub avoidance_threshold: u32,
    /// Consecutive quiet evaluations before it may end, at least 1.
    pub restore_threshold: u32,
    /// How often it is evaluated, at least 100 ms.
    pub period: Duration,
    /// A sample older than this is Unknown.
    pub sample_ttl: Duration,
    /// The HTTP probe that its `NodeQOS` names.
    pub probe: Option<Probe>,
    /// What it does.
    pub action: Arc<Action>,
    /// Whether it does it or only reports.
    pub strategy: Strategy,
}

/// Act, or report what acting would do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Strategy {
    /// Act (`strategy: None` in the manifests).
    Enforce,
    /// Report only.
    Preview,
}

impl Strategy {
    /// The word for it in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Enforce => "None",
            Self::Preview => "Preview",
        }
    }
}

/// An `AvoidanceAction` with its defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// The object's name.
    pub name: String,
    /// Least time in force after the last breach.
    pub cool_down: Duration,
    /// Scheduling is disabled with this effect; `None`: the node stays open.
    pub scheduling: Option<TaintEffect>,
    /// CPU throttling.
    pub throttle: Option<CpuThrottle>,
    /// Page cache is reclaimed.
    pub force_gc: bool,
    /// Eviction.
    pub eviction: Option<EvictionSpec>,
}

/// Strength of the scheduling stop; the later is the stronger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TaintEffect {
    /// New pods go elsewhere where they can.
    PreferNoSchedule,
    /// New pods go elsewhere.
    NoSchedule,
}

impl TaintEffect {
    /// The word for it in taints and manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PreferNoSchedule => "PreferNoSchedule",
            Self::NoSchedule => "NoSchedule",
        }
    }
}

/// How a pod's CPU is taken down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuThrottle {
    /// Floor, percent of the base, 0..=100.
    pub min_ratio: u8,
    /// Step, percent of the base, 1..=100.
    pub step: u8,
    /// The pod becomes idle class before the first step.
    pub idle: bool,
}

/// How pods are evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EvictionSpec {
    /// Grace period, at least 1 s; `None`: the pod's own.
    pub grace: Option<Duration>,
    /// At most so many pods a round, at least 1.
    pub max_pods_per_round: u32,
    /// Pods without a controller too.
    pub evict_unowned: bool,
}

impl EvictionSpec {
    /// From the first signal to the kill of `pod`: at least 1 s, since none at all is a forced deletion.
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
    /// The answer must have arrived by then.
    pub timeout: Duration,
}

/// Which pods a `PodQOS` matches and what it allows to be done to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodPolicy {
    /// The object's name.
    pub name: String,
    /// Over pod labels; `None`: not given (matches all, if a scope is given).
    pub labels: Option<Selector>,
    /// All of these must hold. With neither labels nor scopes the policy matches nothing.
    pub scopes: Vec<Scope>,
    /// Entries of `allowedActions`, lower case.
    pub allowed: Vec<String>,
}

/// What one entry of `allowedActions` allows. A word for a kind allows that kind alone, also where an action bears the
/// word as its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed<'a> {
    /// `throttle`: less CPU, and reclaim of page cache.
    Throttle,
    /// `eviction`, or `evict`.
    Eviction,
    /// `disableScheduling`, which is done to the node and not to a pod.
    Scheduling,
    /// All that the action of this name does.
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

    /// Reads an entry, without regard to case.
    pub fn of(entry: &'a str) -> Self {
        let word = Self::WORDS
            .iter()
            .find(|(word, _)| word.eq_ignore_ascii_case(entry));
        word.map_or(Self::Action(entry), |(_, allowed)| *allowed)
    }

    /// Whether the action named `action` may do things of this kind.
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
pub enum Scope {
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
    /// In any of them.
    In(Vec<T>),
    /// In none of them.
    NotIn(Vec<T>),
    /// It has one (always true of a pod's class, priority and namespace).
    Exists,
    /// It has none (never true).
    DoesNotExist,
}

/// What compiling has to know of the node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// Node labels.
    pub labels: BTreeMap<String, String>,
    /// Online CPUs; 0 where not known.
    pub cpus: u32,
    /// `MemTotal`; 0 where not known.
    pub memory: super::units::Bytes,
}
