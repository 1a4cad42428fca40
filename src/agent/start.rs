//! When the agent may start to act, and on what.

use std::time::Duration;

use super::feed::Failure;
use crate::engine::time::BootTime;

/// How long to wait for another agent that may be shutting down, as in a rolling upgrade.
pub const PREDECESSOR_TIMEOUT: Duration = Duration::from_secs(40);
/// After this time without everything from the API server the saved state is used.
pub const OFFLINE_AFTER: Duration = Duration::from_secs(10);

/// What is known while the agent starts.
#[derive(Clone, Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each comes from another source and is read separately"
)]
pub struct StartState {
    /// Whether the Node exists, if known.
    pub node: Option<bool>,
    /// The rules are read from the API server, or known to be missing for long enough.
    pub rules: bool,
    /// What is wrong with them.
    pub problem: Option<String>,
    /// All pods are listed.
    pub pods: bool,
    /// The emergency stop is read.
    pub stop: bool,
    /// An earlier process saved the state of the emergency stop.
    pub stop_saved: bool,
    /// Everything is stopped, as read or saved: no rules are needed to restore what is in force.
    pub stopped: bool,
    /// An earlier process saved rules.
    pub rules_saved: bool,
    /// Why a watch fails.
    pub failure: Option<(&'static str, Failure)>,
}

/// How to proceed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Start: everything is known.
    Now,
    /// Start from the saved state: the API server does not answer.
    Offline,
    /// Wait, for this.
    Wait(String),
}

impl StartState {
    /// How to proceed at `now` in a process started at `started`. Pure.
    pub fn start(&self, node: &str, started: BootTime, now: BootTime) -> Start {
        if self.node == Some(false) {
            return Start::Wait(format!(
                "node {node} does not exist; waiting for it; is --node-name right?"
            ));
        }
        let late = now.since(started) >= OFFLINE_AFTER;
        let complete = self.node.is_some() && (self.rules || self.stopped) && self.pods;
        if complete && (self.stop || self.stop_saved && late) {
            return Start::Now;
        }
        if (self.rules_saved || self.stopped) && (self.stop || self.stop_saved) && late {
            return Start::Offline;
        }
        Start::Wait(match (&self.failure, &self.problem, self) {
            (Some((kind, failure)), ..) => format!("{kind}: {}", failure.why),
            (None, _, Self { node: None, .. }) => "node not read yet".to_owned(),
            (None, _, Self { pods: false, .. }) => "pods not listed yet".to_owned(),
            (None, _, Self { stop: false, .. }) if complete => {
                "emergency stop not read yet".to_owned()
            }
            (None, Some(problem), _) => problem.clone(),
            (None, None, _) => "no rules read yet".to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    fn start(known: &StartState, seconds: u64) -> Start {
        known.start("n", at(0), at(seconds))
    }

    fn everything() -> StartState {
        StartState {
            node: Some(true),
            rules: true,
            pods: true,
            stop: true,
            ..StartState::default()
        }
    }

    #[test]
    fn it_starts_when_node_rules_and_pods_are_known() {
        assert_eq!(start(&everything(), 0), Start::Now);
        for missing in [
            StartState {
                node: None,
                ..everything()
            },
            StartState {
                rules: false,
                ..everything()
            },
            StartState {
                pods: false,
                ..everything()
            },
        ] {
            assert!(
                matches!(start(&missing, 999), Start::Wait(_)),
                "{missing:?}"
            );
        }
    }

    #[test]
    fn the_saved_state_is_used_when_the_api_server_is_late() {
        let known = StartState {
            rules_saved: true,
            stop_saved: true,
            ..StartState::default()
        };
        assert!(matches!(start(&known, 9), Start::Wait(_)));
        assert_eq!(start(&known, 10), Start::Offline);
        let unknown_result = StartState {
            stop_saved: false,
            ..known
        };
        assert!(matches!(start(&unknown_result, 10), Start::Wait(_)));
    }

    #[test]
    fn it_waits_for_the_emergency_stop_then_uses_the_saved_one() {
        let unread = StartState {
            stop: false,
            ..everything()
        };
        let wait = Start::Wait("emergency stop not read yet".to_owned());
        assert_eq!(start(&unread, 600), wait, "never known: it waits");
        let saved = StartState {
            stop_saved: true,
            ..unread
        };
        assert_eq!(start(&saved, 9), wait);
        assert_eq!(start(&saved, 10), Start::Now);
    }

    #[test]
    fn during_a_stop_it_does_not_wait_for_rules() {
        let stopped = StartState {
            rules: false,
            stopped: true,
            ..everything()
        };
        assert_eq!(start(&stopped, 0), Start::Now);
        let saved = StartState {
            stopped: true,
            stop_saved: true,
            ..StartState::default()
        };
        assert!(matches!(start(&saved, 9), Start::Wait(_)));
        assert_eq!(start(&saved, 10), Start::Offline);
    }

    #[test]
    fn on_a_node_that_does_not_exist_it_waits() {
        let known = StartState {
            node: Some(false),
            rules_saved: true,
            ..everything()
        };
        let Start::Wait(why) = start(&known, 999) else {
            panic!("it started");
        };
        assert!(why.contains("node n does not exist"), "{why}");
    }

    #[test]
    fn the_wait_reason_names_the_failing_watch() {
        let failure = Failure {
            code: Some(403),
            why: "nodes is forbidden".to_owned(),
        };
        let known = StartState {
            failure: Some(("Node", failure)),
            ..StartState::default()
        };
        let wait = Start::Wait("Node: nodes is forbidden".to_owned());
        assert_eq!(start(&known, 1), wait);
    }
}
