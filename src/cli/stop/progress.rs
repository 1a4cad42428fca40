//! How many nodes have followed a stop or resume, from the table of all `NodeWatermark`s.

use std::collections::BTreeSet;
use std::fmt;

use kube::{Client, Resource as _};

use crate::cli::server_table::ServerTable;
use crate::cluster::client::{CallError, call};
use crate::crd::NodeWatermark;
use crate::crd::node_watermark::stopped::RELEASED;
use crate::crd::words::named;

/// Maximum number of nodes that are named.
pub(super) const MAX_NAMED: usize = 10;

/// The state that nodes should reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Goal {
    Released,
    Resumed,
}

/// The nodes that should reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Awaited {
    AllBut(BTreeSet<String>),
    Only(BTreeSet<String>),
}

impl Awaited {
    fn contains(&self, node: &str) -> bool {
        match self {
            Self::AllBut(nodes) => !nodes.contains(node),
            Self::Only(nodes) => nodes.contains(node),
        }
    }
}

/// Why the progress is unknown.
#[derive(Debug, thiserror::Error)]
pub(super) enum ProgressError {
    #[error("failed to list the NodeWatermarks: {}", .0.message())]
    List(CallError),
    #[error(
        "the definition of NodeWatermark is outdated: plimsoll crds | kubectl apply --server-side -f -"
    )]
    Outdated,
}

impl ProgressError {
    /// Whether trying again is useless.
    pub(super) fn is_final(&self) -> bool {
        match self {
            Self::List(error) => matches!(error.code(), Some(401 | 403 | 404)),
            Self::Outdated => true,
        }
    }
}

pub(super) async fn poll(
    client: &Client,
    goal: Goal,
    awaited: &Awaited,
) -> Result<Progress, ProgressError> {
    let table = call(ServerTable::read(
        client,
        NodeWatermark::url_path(&(), None),
    ));
    Progress::of(&table.await.map_err(ProgressError::List)?, goal, awaited)
}

/// The progress of the awaited nodes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Progress {
    goal: Goal,
    /// Number of awaited nodes that have had an agent.
    nodes: usize,
    /// Names of those that have not reached the goal.
    pub(super) waiting: Vec<String>,
}

impl Progress {
    /// Reads the table of all `NodeWatermark`s.
    fn of(table: &ServerTable, goal: Goal, awaited: &Awaited) -> Result<Self, ProgressError> {
        let columns = ["Name", "Stopped", "Agent"];
        if !columns.iter().all(|column| table.has(column)) {
            return Err(ProgressError::Outdated);
        }
        let mut progress = Self {
            goal,
            nodes: 0,
            waiting: Vec::new(),
        };
        // A node that is named has to confirm it, also if no agent has ever reported from there.
        let mut unseen = match awaited {
            Awaited::Only(nodes) if goal == Goal::Released => nodes.clone(),
            _ => BTreeSet::new(),
        };
        for [name, stopped, agent] in table.cells(columns) {
            if agent.is_empty() || !awaited.contains(name) {
                continue;
            }
            progress.nodes += 1;
            unseen.remove(name);
            let reached = match goal {
                Goal::Released => stopped == RELEASED,
                Goal::Resumed => stopped.is_empty(),
            };
            if !reached {
                progress.waiting.push(name.to_owned());
            }
        }
        progress.nodes += unseen.len();
        progress.waiting.extend(unseen);
        Ok(progress)
    }

    /// The unfinished nodes, and how to find out more.
    pub(super) fn names(&self) -> String {
        let named = named(&self.waiting, MAX_NAMED);
        format!(
            "not yet: {named}; `plimsoll top` shows unresponsive agents, and `kubectl describe nodewatermark` what is \
             still in force on a node"
        )
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let done = self.nodes - self.waiting.len();
        let what = match self.goal {
            Goal::Released => "have restored everything",
            Goal::Resumed => "have resumed",
        };
        write!(f, "{done} of {} nodes {what}", self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn everything() -> Awaited {
        Awaited::AllBut(BTreeSet::new())
    }

    fn read(table: Value) -> ServerTable {
        serde_json::from_value(table).expect("a table")
    }

    fn table(rows: &[(&str, Option<&str>, Option<&str>)]) -> ServerTable {
        let rows = rows.iter();
        let rows = rows.map(|(name, stopped, agent)| json!({"cells": [name, 1, stopped, agent]}));
        read(json!({
            "columnDefinitions": [{"name": "Name"}, {"name": "Rules"}, {"name": "Stopped"}, {"name": "Agent"}],
            "rows": rows.collect::<Vec<_>>(),
        }))
    }

    #[test]
    fn nodes_that_never_had_an_agent_are_not_waited_for() {
        let table = table(&[
            ("done", Some("Released"), Some("1")),
            ("busy", Some("Releasing"), Some("1")),
            ("deaf", None, Some("1")),
            ("bare", None, None),
        ]);
        let released = Progress::of(&table, Goal::Released, &everything()).expect("understood");
        assert_eq!(released.waiting, ["busy", "deaf"]);
        assert_eq!(
            released.to_string(),
            "1 of 3 nodes have restored everything"
        );
        let resumed = Progress::of(&table, Goal::Resumed, &everything()).expect("understood");
        assert_eq!(resumed.waiting, ["done", "busy"]);
        assert_eq!(resumed.to_string(), "1 of 3 nodes have resumed");
    }

    #[test]
    fn only_awaited_nodes_count() {
        let table = table(&[
            ("alone", Some("Released"), Some("1")),
            ("busy", None, Some("1")),
            ("other", None, Some("1")),
        ]);
        let names = || BTreeSet::from(["alone".to_owned()]);
        let count = |goal, awaited| {
            let progress = Progress::of(&table, goal, &awaited);
            progress.expect("understood").to_string()
        };
        assert_eq!(
            count(Goal::Released, Awaited::Only(names())),
            "1 of 1 nodes have restored everything"
        );
        let absent = Awaited::Only(BTreeSet::from(["no-agent".to_owned()]));
        assert_eq!(
            count(Goal::Released, absent.clone()),
            "0 of 1 nodes have restored everything"
        );
        // A node that is gone has nothing to resume.
        assert_eq!(count(Goal::Resumed, absent), "0 of 0 nodes have resumed");
        assert_eq!(
            count(Goal::Resumed, Awaited::AllBut(names())),
            "2 of 2 nodes have resumed"
        );
    }

    #[test]
    fn at_most_ten_unfinished_nodes_are_named() {
        let names: Vec<String> = (0..12).map(|it| format!("n{it}")).collect();
        let rows: Vec<_> = names
            .iter()
            .map(|it| (it.as_str(), None, Some("1")))
            .collect();
        let progress =
            Progress::of(&table(&rows), Goal::Released, &everything()).expect("understood");
        let names = progress.names();
        assert!(names.starts_with("not yet: n0, n1, "), "{names}");
        assert!(names.contains("n9 and 2 more; "), "{names}");
    }

    #[test]
    fn an_outdated_definition_is_reported_with_the_fix() {
        let older = read(json!({"columnDefinitions": [{"name": "Name"}], "rows": []}));
        let error =
            Progress::of(&older, Goal::Released, &everything()).expect_err("not understood");
        assert!(
            error.is_final() && error.to_string().contains("plimsoll crds"),
            "{error}"
        );
    }
}
