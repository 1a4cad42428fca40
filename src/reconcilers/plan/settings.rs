//! Settings of what is planned.

use std::sync::Arc;
use std::time::Duration;

use super::cap::Cap;
use crate::engine::DEFAULT_PERIOD;
use crate::engine::window::CustomWindow;

/// Settings of the controller.
#[derive(Clone, Debug, PartialEq)]
pub struct ControllerSettings {
    /// Nodes per second that an edit reaches after its canaries succeeded.
    pub rollout_nodes_per_second: f64,
    /// How many nodes may be unschedulable at a time, of those that any rule may make so.
    pub max_unschedulable: Cap,
    /// The taint of an agent that was last seen this long ago is removed.
    pub dead_agent_after: Duration,
    /// The time between two evaluations of every agent.
    pub evaluation_period: Duration,
    /// The windows that every agent has; `None` if they are not known.
    pub windows: Option<Arc<[CustomWindow]>>,
}

impl Default for ControllerSettings {
    fn default() -> Self {
        Self {
            rollout_nodes_per_second: 100.0,
            max_unschedulable: Cap::Percent(30),
            dead_agent_after: Duration::from_mins(10),
            evaluation_period: DEFAULT_PERIOD,
            windows: None,
        }
    }
}
