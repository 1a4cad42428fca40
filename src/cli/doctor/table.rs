//! Tables, as `kubectl get -o wide` prints them.

use std::collections::BTreeSet;

use serde_json::Value;

use super::read::{Answer, Seen};

/// The cells of a table's columns, row by row; empty where it can't be read.
pub(super) fn cells<'a, const N: usize>(
    table: &'a Answer,
    columns: [&str; N],
) -> Vec<[&'a str; N]> {
    let Ok(table) = table else { return Vec::new() };
    let defined = table["columnDefinitions"].as_array();
    let place = |name: &str| defined?.iter().position(|column| column["name"] == name);
    let places = columns.map(place);
    let rows = table["rows"].as_array().into_iter().flatten();
    let cell =
        |row: &'a Value, place: Option<usize>| place.and_then(|place| row["cells"][place].as_str());
    rows.map(|row| places.map(|place| cell(row, place).unwrap_or_default()))
        .collect()
}

/// The names in a table.
pub(super) fn names(table: &Answer) -> BTreeSet<&str> {
    unique(cells(table, ["Name"]).into_iter().map(|[name]| name))
}

/// Each once, in order. A loop: what collects sorts first, in code of its own for every use.
pub(super) fn unique<'a>(items: impl Iterator<Item = &'a str>) -> BTreeSet<&'a str> {
    let mut unique = BTreeSet::new();
    for item in items {
        unique.insert(item);
    }
    unique
}

/// A pod of an agent.
#[derive(Debug)]
pub(super) struct Pod<'a> {
    pub name: &'a str,
    ready: &'a str,
    /// What its containers wait for, or its phase.
    pub status: &'a str,
    /// `<none>` before it has one.
    pub node: &'a str,
}

/// Those of all agents.
pub(super) fn pods(seen: &Seen) -> Vec<Pod<'_>> {
    let columns = ["Name", "Ready", "Status", "Node"];
    let rows = seen.agents.iter().flat_map(|table| cells(table, columns));
    rows.map(|[name, ready, status, node]| Pod {
        name,
        ready,
        status,
        node,
    })
    .collect()
}

impl<'a> Pod<'a> {
    /// All its containers are ready.
    pub(super) fn is_ready(&self) -> bool {
        let parts = self.ready.split_once('/');
        parts.is_some_and(|(is, of)| is == of && is != "0")
    }

    /// It was deleted, and ends.
    pub(super) fn is_ending(&self) -> bool {
        self.status == "Terminating"
    }

    /// The `DaemonSet` that has made it.
    pub(super) fn set(&self) -> &'a str {
        self.name.rsplit_once('-').map_or(self.name, |(set, _)| set)
    }
}

/// Nodes with an agent whose containers all are ready.
pub(super) fn running<'a>(pods: &[Pod<'a>]) -> BTreeSet<&'a str> {
    let ready = pods.iter().filter(|pod| pod.is_ready());
    unique(ready.map(|pod| pod.node))
}
