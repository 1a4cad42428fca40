//! What is done about agents that fell silent.

use std::time::Duration;

use super::super::silence::{InForce, Look};
use super::{World, Write};
use crate::engine::time::BootTime;

impl World {
    /// What is in force on a node may have changed.
    pub(super) fn watch_over(&mut self, name: &str) {
        let node = self.nodes.get(name);
        let live = self.live.get(name);
        let state = InForce {
            tainted: node.is_some_and(|node| node.tainted),
            ready: node.is_some_and(|node| node.ready),
            throttled: node.and(live).map_or(0, |live| live.status.throttled),
        };
        self.silence.is_in_force(name, state);
    }

    /// Its agent wrote.
    pub(super) fn heard(&mut self, name: &str) {
        self.silent.remove(name);
        self.silence.heard(name);
    }

    /// How many agents are silent while something is in force on their nodes, and how many of these left throttled pods.
    pub fn silent_counts(&self, now: BootTime) -> [usize; 2] {
        self.silence.counts(now)
    }

    /// Whether nothing of silent agents is undone, because so many are silent.
    pub const fn is_held(&self) -> bool {
        self.silence.is_held()
    }

    /// A watch was cut: what was not seen since does not count as silence.
    pub fn missed(&mut self) {
        self.silence.restart();
    }

    /// Taints of silent agents, to be taken away.
    pub(super) fn plan_openings(&mut self, now: BootTime) -> Vec<Write> {
        let after = minutes(self.silence.after());
        let Look {
            open,
            throttled,
            held,
            resumed,
        } = self.silence.look(now);
        if let Some((silent, all)) = held {
            let message = format!(
                "{silent} of {all} agents that have something in force have said nothing for {after} or soon will: more \
                 likely they can't reach the API server than that all of them ended. Nothing of theirs is undone until \
                 most are heard again"
            );
            self.note_fleet(true, "AgentsSilent", message);
        }
        if resumed {
            let message = "most agents are heard again".to_owned();
            self.note_fleet(false, "AgentsHeard", message);
        }
        for (node, pods) in throttled {
            let message = format!(
                "its agent has said nothing for {after}, and {pods} pods were throttled when it last did: they stay so \
                 until an agent runs there again. To undo it by hand have plimsoll agent --restore --node-name {node} run \
                 there, as docs/kubernetes.md says of a node without an agent"
            );
            self.warn_node(&node, "ThrottledBySilentAgent", message);
        }
        let uid = |node: &String| self.nodes.get(node).map(|node| node.uid.clone());
        let open = open.into_iter();
        open.filter_map(|node| uid(&node).map(|uid| Write::Open { node, uid }))
            .collect()
    }

    /// Taking a taint away came to its end; `Ok(true)`: there was one.
    pub fn opened(&mut self, node: &str, now: BootTime, outcome: Result<bool, ()>) {
        self.silence.opened(node, now, outcome.is_ok());
        if outcome.is_ok() {
            self.silent.insert(node.to_owned());
            self.cap_dirty = true;
        }
        if outcome == Ok(true) {
            let after = minutes(self.silence.after());
            let message = format!(
                "its agent has said nothing for {after} while the node is Ready: its taint is taken away, so that new \
                 pods may be placed here again; see why the agent's pod does not run"
            );
            self.warn_node(node, "TaintOfSilentAgentRemoved", message);
        }
    }
}

fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}
