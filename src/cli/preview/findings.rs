//! What is wrong with policies besides what the files alone show: with those of the cluster, and on single nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::super::check::report::Report;
use crate::crd::{Compiled, Finding, Objects, Severity, compile};
use crate::engine::policy::NodeFacts;
use crate::preview::Node;

/// So many nodes are named.
const NAMED: usize = 5;

/// A finding, and where it holds.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    #[serde(flatten)]
    finding: Finding,
    /// On these nodes; everywhere where empty.
    nodes: Vec<String>,
    /// It is about an object of the files.
    #[serde(skip)]
    of_files: bool,
}

/// All of them.
pub(super) struct Findings(pub(super) Vec<Found>);

impl Findings {
    /// Without those that the files' own report tells.
    pub(super) fn new(
        objects: &Objects,
        nodes: &[Node],
        compiled: &[Compiled],
        report: &Report<'_>,
    ) -> Self {
        let everywhere = objects.clone().for_every_node();
        let everywhere: BTreeSet<Finding> = compile(&everywhere, &NodeFacts::default())
            .findings
            .into_iter()
            .collect();
        let found = |finding: Finding, nodes: Vec<String>| Found {
            of_files: report.is_about(&finding.object),
            finding,
            nodes,
        };
        let mut here: BTreeMap<&Finding, Vec<String>> = BTreeMap::new();
        for (node, compiled) in nodes.iter().zip(compiled) {
            for finding in compiled
                .findings
                .iter()
                .filter(|finding| !everywhere.contains(finding))
            {
                here.entry(finding).or_default().push(node.name.clone());
            }
        }
        let mut all: Vec<Found> = here
            .into_iter()
            .map(|(finding, nodes)| found(finding.clone(), nodes))
            .collect();
        let of_cluster = everywhere
            .into_iter()
            .map(|finding| found(finding, Vec::new()));
        all.extend(of_cluster.filter(|found| !found.of_files));
        Self(all)
    }

    /// Whether there are errors: where files were given, in these.
    pub(super) fn errors(&self, all: bool) -> bool {
        let mut found = self.0.iter().filter(|found| all || found.of_files);
        found.any(|found| found.finding.severity == Severity::Error)
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Finding {
            object,
            path,
            severity,
            message,
            ..
        } = &self.finding;
        write!(f, "{severity}: {object}: ")?;
        if !path.is_empty() {
            write!(f, "{path}: ")?;
        }
        f.write_str(message)?;
        match self.nodes.len() {
            0 => Ok(()),
            number => {
                let named = self.nodes[..number.min(NAMED)].join(", ");
                let more = if number > NAMED { ", ..." } else { "" };
                write!(f, " (on {named}{more})")
            }
        }
    }
}
