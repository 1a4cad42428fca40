//! Events about agents.

use std::time::Duration;

use super::LivenessCheck;
use crate::crd::duration::format_duration;
use crate::reconcilers::events::PendingEvent;

impl LivenessCheck {
    /// The events about a check; `dead_after` is the time after which an agent is dead.
    pub fn events(&self, dead_after: Duration) -> Vec<PendingEvent> {
        let mut events = Vec::new();
        for (zone, overdue, all) in &self.frozen {
            let message = format!(
                "{overdue} of {all} agents {} are unresponsive: more likely they can't reach the API server, or the \
                 controller can't see their updates, than that all of them died. What is in force there stays until most \
                 agents respond again",
                in_zone(zone)
            );
            events.push(PendingEvent::controller(
                true,
                "AgentsUnresponsive",
                message,
            ));
        }
        for zone in &self.unfrozen {
            let message = format!("most agents {} respond again", in_zone(zone));
            events.push(PendingEvent::controller(false, "AgentsResponding", message));
        }
        for (node, grace) in &self.unresponsive {
            let message = format!(
                "its agent was last seen more than {} ago: neither a renewal of its Lease nor a report has arrived \
                 since. What is in force on the node stays; check why the agent's pod there is not running or not ready",
                format_duration(*grace)
            );
            events.push(PendingEvent::node_warning(
                node,
                "AgentUnresponsive",
                message,
            ));
        }
        for node in &self.recovered {
            let message = "its agent responds again".to_owned();
            events.push(PendingEvent::node(node, "AgentResponding", message));
        }
        let dead_after = format_duration(dead_after);
        for (node, pods) in &self.throttled {
            let message = format!(
                "its agent was last seen more than {dead_after} ago, when {pods} of its pods were throttled; these stay so \
                 until an agent runs there again. To restore them by hand, run `plimsoll agent --restore --node-name {node}` \
                 on that node; see docs/kubernetes.md about nodes without an agent"
            );
            let reason = "ThrottledByDeadAgent";
            events.push(PendingEvent::node_warning(node, reason, message));
        }
        events
    }
}

/// The event about a removed taint.
pub fn taint_removed(node: &str, dead_after: Duration) -> PendingEvent {
    let dead_after = format_duration(dead_after);
    let message = format!(
        "its agent was last seen more than {dead_after} ago, and the node is Ready: its taint is removed, so that new pods may \
         be scheduled here again; check why the agent's pod is not running"
    );
    PendingEvent::node_warning(node, "TaintOfDeadAgentRemoved", message)
}

fn in_zone(zone: &str) -> String {
    if zone.is_empty() {
        "on nodes without a zone".to_owned()
    } else {
        format!("in zone {zone}")
    }
}
