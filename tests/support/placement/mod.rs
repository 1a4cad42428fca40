//! Placement on simulated nodes whose rules evict, by the formulas of several schedulers, at virtual time.
//!
//! Real code: the rule machine and the load of every node ([`plimsoll::engine`]), when an agent writes the label and what it is
//! worth, the extender, and regret. Restated: what kube-scheduler, crane-scheduler, koordinator and Trimaran compute; each says
//! from which source. Where a pod fits is decided by requests, as everywhere.
//!
//! A tick is [`TICK`] seconds. Within it pods are placed one after the other, 50 a second as kube-scheduler does by default, and
//! agents notice them with a delay.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "used by a test and a benchmark, each its own crate; a model may fail"
)]

pub mod cluster;
pub mod crane;
pub mod history;
pub mod in_tree;
pub mod koordinator;
pub mod node;
pub mod ours;
pub mod outcome;
pub mod scenes;
pub mod shapes;
pub mod trimaran;

use std::sync::Arc;

use plimsoll::engine::time::BootTime;

use self::node::Node;

/// Seconds of a tick.
pub const TICK: u64 = 10;

/// Amounts of CPU in millicores and memory in bytes.
pub type Amounts = [u64; 2];

/// A pod that waits for a node.
#[derive(Clone, Debug)]
pub struct Placing {
    /// Its place in the cluster's table of pods.
    pub id: usize,
    pub owner: Arc<str>,
    pub requests: Amounts,
}

impl Placing {
    pub fn uid(&self) -> String {
        format!("uid-{}", self.id)
    }
}

/// A scheduler's score plugins and filters beside the fit of requests.
pub trait Scheduler {
    /// Seconds from a binding until what [`Self::refreshed`] reads shows it.
    fn delay(&self) -> f64 {
        1.0
    }

    /// At the end of each tick, in seconds.
    fn ticked(&mut self, _now: f64, _nodes: &[Node]) {}

    /// The agent of this node has noticed a change of its pods.
    fn refreshed(&mut self, _now: f64, _index: usize, _node: &Node) {}

    /// A pod was bound to this node.
    fn bound(&mut self, _now: f64, _pod: &Placing, _index: usize) {}

    /// A pod of this node is gone.
    fn ended(&mut self, _id: usize, _index: usize) {}

    /// The weighted sum of points of each feasible node; `None`: closed by a filter.
    fn points(
        &mut self,
        now: f64,
        pod: &Placing,
        feasible: &[usize],
        nodes: &[Node],
    ) -> Vec<Option<i64>>;
}

/// The schedulers that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Default,
    Crane,
    Koordinator,
    Trimaran,
    Label,
    Extender,
}

impl Way {
    pub const ALL: [Self; 6] = [
        Self::Default,
        Self::Crane,
        Self::Koordinator,
        Self::Trimaran,
        Self::Label,
        Self::Extender,
    ];

    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "kube-scheduler",
            Self::Crane => "crane-scheduler",
            Self::Koordinator => "koordinator LoadAware",
            Self::Trimaran => "Trimaran TargetLoadPacking",
            Self::Label => "Plimsoll's label",
            Self::Extender => "Plimsoll's extender",
        }
    }

    pub const fn is_ours(self) -> bool {
        matches!(self, Self::Label | Self::Extender)
    }

    pub fn scheduler(self, nodes: usize) -> Box<dyn Scheduler> {
        match self {
            Self::Default => Box::new(in_tree::KubeScheduler),
            Self::Crane => Box::new(crane::Crane::new(nodes)),
            Self::Koordinator => Box::new(koordinator::Koordinator::new(nodes)),
            Self::Trimaran => Box::new(trimaran::Trimaran::new(nodes)),
            Self::Label => Box::new(ours::Label::new(nodes)),
            Self::Extender => Box::new(ours::ByExtender::default()),
        }
    }
}

/// As the engine takes a time, from seconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "days of seconds"
)]
pub fn boot_time(seconds: f64) -> BootTime {
    BootTime::from_nanos((seconds * 1e9).round() as u64)
}

/// Rounded towards zero, as Go converts to `int64`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "points and amounts of a node"
)]
pub const fn truncated(value: f64) -> i64 {
    value as i64
}
