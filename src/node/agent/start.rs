//! When the agent may start to act, and on what.

use std::time::Duration;

use super::feed::Failure;
use crate::engine::time::BootTime;

/// Another agent may be on its way out, as the one before a rolling upgrade is: it is waited for so long.
pub const PREDECESSOR: Duration = Duration::from_secs(40);
/// The API server has so long to tell everything, before what an earlier process kept is gone by.
pub const OFFLINE_AFTER: Duration = Duration::from_secs(10);

/// What is known at the start.
#[derive(Clone, Debug, Default)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "each comes from elsewhere and is asked by itself"
)]
pub struct Known {
    /// The API server said whether the node is there; `Some(false)`: it is not.
    pub node: Option<bool>,
    /// The API server told the rules, or that there are none for long enough.
    pub rules: bool,
    /// What is wrong with what it told.
    pub trouble: Option<String>,
    /// All pods are listed.
    pub pods: bool,
    /// The API server said whether everything is stopped.
    pub stop: bool,
    /// An earlier process kept whether everything was stopped.
    pub stop_kept: bool,
    /// Everything is stopped, as it said or an earlier process kept: no rules are needed to undo what is in force.
    pub stopped: bool,
    /// An earlier process kept rules.
    pub kept: bool,
    /// Why a watch fails.
    pub failure: Option<(&'static str, Failure)>,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Everything is known.
    Now,
    /// The API server does not tell: go by what was kept.
    Offline,
    /// Not yet; in words what is waited for.
    Wait(String),
}

impl Known {
    /// What is to be done, so long after the process began. Pure.
    pub fn start(&self, node: &str, begun: BootTime, now: BootTime) -> Start {
        if self.node == Some(false) {
            return Start::Wait(format!(
                "node {node} does not exist: it is waited for; is --node-name right?"
            ));
        }
        let late = now.since(begun) >= OFFLINE_AFTER;
        let told = self.node.is_some() && (self.rules || self.stopped) && self.pods;
        if told && (self.stop || self.stop_kept && late) {
            return Start::Now;
        }
        if (self.kept || self.stopped) && (self.stop || self.stop_kept) && late {
            return Start::Offline;
        }
        Start::Wait(match (&self.failure, &self.trouble, self) {
            (Some((kind, failure)), ..) => format!("{kind}: {}", failure.why),
            (None, _, Self { node: None, .. }) => "node not read yet".to_owned(),
            (None, _, Self { pods: false, .. }) => "pods not listed yet".to_owned(),
            (None, _, Self { stop: false, .. }) if told => {
                "not read yet whether everything is stopped".to_owned()
            }
            (None, Some(trouble), _) => trouble.clone(),
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

    fn start(known: &Known, seconds: u64) -> Start {
        known.start("n", at(0), at(seconds))
    }

    fn everything() -> Known {
        Known {
            node: Some(true),
            rules: true,
            pods: true,
            stop: true,
            ..Known::default()
        }
    }

    #[test]
    fn it_starts_when_node_rules_and_pods_are_known() {
        assert_eq!(start(&everything(), 0), Start::Now);
        for missing in [
            Known {
                node: None,
                ..everything()
            },
            Known {
                rules: false,
                ..everything()
            },
            Known {
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
    fn what_was_kept_is_gone_by_when_the_api_server_does_not_tell_in_time() {
        let known = Known {
            kept: true,
            stop_kept: true,
            ..Known::default()
        };
        assert!(matches!(start(&known, 9), Start::Wait(_)));
        assert_eq!(start(&known, 10), Start::Offline);
        let unsure = Known {
            stop_kept: false,
            ..known
        };
        assert!(matches!(start(&unsure, 10), Start::Wait(_)));
    }

    #[test]
    fn whether_everything_is_stopped_is_waited_for_and_then_gone_by_what_was_kept() {
        let unread = Known {
            stop: false,
            ..everything()
        };
        let wait = Start::Wait("not read yet whether everything is stopped".to_owned());
        assert_eq!(start(&unread, 600), wait, "nobody ever knew: hold");
        let kept = Known {
            stop_kept: true,
            ..unread
        };
        assert_eq!(start(&kept, 9), wait);
        assert_eq!(start(&kept, 10), Start::Now);
    }

    #[test]
    fn while_everything_is_stopped_no_rules_are_waited_for() {
        let stopped = Known {
            rules: false,
            stopped: true,
            ..everything()
        };
        assert_eq!(start(&stopped, 0), Start::Now);
        let kept = Known {
            stopped: true,
            stop_kept: true,
            ..Known::default()
        };
        assert!(matches!(start(&kept, 9), Start::Wait(_)));
        assert_eq!(start(&kept, 10), Start::Offline);
    }

    #[test]
    fn on_a_node_that_does_not_exist_nothing_is_done() {
        let known = Known {
            node: Some(false),
            kept: true,
            ..everything()
        };
        let Start::Wait(why) = start(&known, 999) else {
            panic!("it started");
        };
        assert!(why.contains("node n does not exist"), "{why}");
    }

    #[test]
    fn what_is_waited_for_names_the_watch_that_fails() {
        let failure = Failure {
            code: Some(403),
            why: "nodes is forbidden".to_owned(),
        };
        let known = Known {
            failure: Some(("Node", failure)),
            ..Known::default()
        };
        let wait = Start::Wait("Node: nodes is forbidden".to_owned());
        assert_eq!(start(&known, 1), wait);
    }
}
