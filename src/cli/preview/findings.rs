//! Findings about policies of the cluster, and findings on single nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::Serialize;

use super::super::check::report::Report;
use crate::crd::words::named;
use crate::crd::{Compiled, Finding, Objects, Severity, compile};
use crate::engine::policy::NodeFacts;
use crate::preview::ClusterNode;

/// Maximum number of nodes named in a finding.
const MAX_NAMED: usize = 5;

/// A finding, with the nodes that it applies to.
#[derive(Debug, Serialize)]
pub(super) struct FindingOnNodes {
    #[serde(flatten)]
    finding: Finding,
    /// Names; all nodes if empty.
    nodes: Vec<String>,
    /// Whether it is about an object of the files.
    #[serde(skip)]
    of_files: bool,
}

/// All findings.
pub(super) struct Findings(pub(super) Vec<FindingOnNodes>);

impl Findings {
    /// Collects the findings that the report of the files does not have.
    pub(super) fn new(
        objects: &Objects,
        any_node: &NodeFacts,
        nodes: &[ClusterNode],
        compiled: &[Compiled],
        report: &Report<'_>,
    ) -> Self {
        let everywhere = objects.clone().for_every_node();
        let everywhere: BTreeSet<Finding> = compile(&everywhere, any_node)
            .findings
            .into_iter()
            .collect();
        let found = |finding: Finding, nodes: Vec<String>| FindingOnNodes {
            of_files: report.is_about(&finding.object),
            finding,
            nodes,
        };
        let mut by_node: BTreeMap<&Finding, Vec<String>> = BTreeMap::new();
        for (node, compiled) in nodes.iter().zip(compiled) {
            for finding in compiled
                .findings
                .iter()
                .filter(|finding| !everywhere.contains(finding))
            {
                by_node.entry(finding).or_default().push(node.name.clone());
            }
        }
        let mut all: Vec<FindingOnNodes> = by_node
            .into_iter()
            .map(|(finding, nodes)| found(finding.clone(), nodes))
            .collect();
        let of_cluster = everywhere
            .into_iter()
            .map(|finding| found(finding, Vec::new()));
        all.extend(of_cluster.filter(|found| !found.of_files));
        Self(all)
    }

    /// Whether there are errors: in all findings, or only in those of files.
    pub(super) fn errors(&self, all: bool) -> bool {
        let mut found = self.0.iter().filter(|found| all || found.of_files);
        found.any(|found| found.finding.severity == Severity::Error)
    }
}

impl fmt::Display for FindingOnNodes {
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
            _ => write!(f, " (on {})", named(&self.nodes, MAX_NAMED)),
        }
    }
}
