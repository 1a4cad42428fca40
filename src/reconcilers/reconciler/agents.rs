//! What is done about agents that fell silent.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use super::super::lease::Renewal;
use super::super::silence::{Figures, InForce, Look};
use super::{World, Write};
use crate::engine::time::BootTime;

impl World {
    /// What is in force on a node may have changed.
    pub(super) fn watch_over(&mut self, name: &str) {
        let throttled = self.live.get(name).map_or(0, |live| live.status.throttled);
        let place = self.nodes.get(name).map(|node| {
            let state = InForce {
                marked: node.tainted || node.interferes,
                ready: node.ready,
                throttled,
            };
            (&node.zone, state)
        });
        self.silence.stands(name, place);
    }

    /// Its agent wrote.
    pub(super) fn heard(&mut self, name: &str) {
        self.silent.remove(name);
        self.silence.heard(name);
    }

    /// The Lease of an agent as it is now.
    pub fn apply_lease(&mut self, name: &str, lease: Renewal, now: BootTime) {
        if let Some(age) = self.silence.renewed(name, lease, now) {
            self.ages.push(age);
            self.cap_dirty |= self.silent.remove(name);
        }
        // One that was not known before has a node perhaps.
        self.watch_over(name);
    }

    /// An agent reported to this replica, and will again within this interval.
    pub fn reported(&mut self, name: &str, interval: Duration, at: BootTime) {
        self.silence.reported(name, interval, at);
        self.cap_dirty |= self.silent.remove(name);
        self.watch_over(name);
    }

    /// The Lease of an agent is gone.
    pub fn delete_lease(&mut self, name: &str) {
        self.silence.released(name);
    }

    /// How old heartbeats were when the next was seen, since the last call.
    pub fn take_ages(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.ages)
    }

    /// Nodes whose agents fell silent (true), or are heard again, since the last call.
    pub fn take_silences(&mut self) -> Vec<(String, bool)> {
        std::mem::take(&mut self.silences)
    }

    /// How many agents are how silent.
    pub const fn silence_figures(&self) -> Figures {
        self.silence.figures()
    }

    /// Nodes that a `NodeQOS` selects and that have no agent, as of the last look.
    pub const fn unkept(&self) -> usize {
        self.unkept
    }

    /// Both are in order of name: one walk along them is much less than a search for each node.
    fn count_unkept(&self) -> usize {
        let mut with_agent = self.silence.with_agent().peekable();
        let mut has_agent = |name: &String| {
            while with_agent.next_if(|other| *other < name).is_some() {}
            with_agent.peek() == Some(&name)
        };
        let nodes = self.nodes.iter();
        nodes
            .filter(|(name, node)| !node.class.selected.is_empty() && !has_agent(name))
            .count()
    }

    /// A watch was cut: what was not seen since does not count as silence.
    pub fn missed(&mut self) {
        self.silence.restart();
    }

    /// The watch of the Leases was cut: for agents that hold one the same.
    pub fn missed_leases(&mut self) {
        self.silence.restart_leases();
    }

    /// What is to be done about silent agents.
    pub(super) fn plan_openings(&mut self, now: BootTime) -> Vec<Write> {
        let Some(mut look) = self.silence.look(now) else {
            return Vec::new();
        };
        self.unkept = self.count_unkept();
        let open = std::mem::take(&mut look.open);
        let ask = std::mem::take(&mut look.ask);
        self.tell_silence(look);
        let uid = |node: &String| self.nodes.get(node).map(|node| node.uid.clone());
        let open = open.into_iter();
        let open = open.filter_map(|node| uid(&node).map(|uid| Write::Open { node, uid }));
        let ask = ask.into_iter().map(|node| Write::Ask { node });
        open.chain(ask).collect()
    }

    fn tell_silence(&mut self, look: Look) {
        for (zone, silent, all) in look.held {
            let message = format!(
                "{silent} of {all} agents {} that should have been heard were not: more likely they can't reach the API \
                 server, or it can't be seen from here, than that all of them ended. Nothing of theirs is undone until \
                 most are heard again",
                place(&zone)
            );
            self.note_fleet(true, "AgentsSilent", message);
        }
        for zone in look.resumed {
            let message = format!("most agents {} are heard again", place(&zone));
            self.note_fleet(false, "AgentsHeard", message);
        }
        let silent = look.silent.iter().map(|(node, _)| (node.clone(), true));
        let back = look.back.iter().map(|node| (node.clone(), false));
        self.silences.extend(silent.chain(back));
        for (node, grace) in look.silent {
            let message = format!(
                "nothing was heard of its agent for {}, neither a renewal of its Lease nor a report. What is in force on the node stays; see why the agent's \
                 pod there does not run, or is not ready",
                words(grace)
            );
            self.warn_node(&node, "AgentSilent", message);
        }
        for node in look.back {
            let message = "its agent is heard again".to_owned();
            self.note_node(&node, false, "AgentBack", message);
        }
        let after = words(self.silence.after());
        for (node, pods) in look.throttled {
            let message = format!(
                "its agent has said nothing for {after}, and {pods} pods were throttled when it last did: they stay so \
                 until an agent runs there again. To undo it by hand have plimsoll agent --restore --node-name {node} run \
                 there, as docs/kubernetes.md says of a node without an agent"
            );
            self.warn_node(&node, "ThrottledBySilentAgent", message);
        }
    }

    /// The Lease of an agent that seemed silent was read, as it is now; `None`: there is none. Whether it had been renewed
    /// without the watch telling.
    pub fn answered(
        &mut self,
        node: &str,
        now: BootTime,
        outcome: Result<Option<Renewal>, ()>,
    ) -> bool {
        let heard = self.silence.answered(node, now, outcome);
        self.cap_dirty |= heard && self.silent.remove(node);
        heard
    }

    /// Taking a taint away came to its end; `Ok(true)`: there was one.
    pub fn opened(&mut self, node: &str, now: BootTime, outcome: Result<bool, ()>) {
        self.silence.opened(node, now, outcome.is_ok());
        if outcome.is_ok() {
            self.silent.insert(node.to_owned());
            self.cap_dirty = true;
        }
        if outcome == Ok(true) {
            let after = words(self.silence.after());
            let message = format!(
                "its agent has said nothing for {after} while the node is Ready: its taint is taken away, so that new \
                 pods may be placed here again; see why the agent's pod does not run"
            );
            self.warn_node(node, "TaintOfSilentAgentRemoved", message);
        }
    }
}

/// The zone of a node: its region and its zone, as far as it is labelled with them.
pub(super) fn zone(labels: &BTreeMap<String, String>) -> Arc<str> {
    let label = |name: &str| labels.get(&format!("topology.kubernetes.io/{name}"));
    let parts = ["region", "zone"].into_iter().filter_map(label);
    let parts: Vec<&str> = parts.map(String::as_str).collect();
    parts.join("/").into()
}

fn place(zone: &str) -> String {
    if zone.is_empty() {
        "on nodes without a zone".to_owned()
    } else {
        format!("in zone {zone}")
    }
}

pub(super) fn words(time: Duration) -> String {
    match time.as_secs() {
        seconds if seconds % 60 == 0 => format!("{} min", seconds / 60),
        seconds => format!("{seconds} s"),
    }
}
