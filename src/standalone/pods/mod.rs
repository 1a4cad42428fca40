//! Where the pods of a machine without Kubernetes come from: manifests that name a cgroup, or the children of a
//! cgroup, each of which counts as a pod.

pub mod manifests;
pub mod own;
pub mod units;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::engine::pod::PodUid;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::machine::event::Refusal;
use crate::node::machine::workload::Workload;
use crate::ordered;

use self::manifests::Manifests;
use self::own::OwnCgroups;

/// Where to look for pods.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// Manifest files, and folders of them.
    pub manifests: Vec<PathBuf>,
    /// Cgroups whose children are pods.
    pub parents: Vec<CgroupPath>,
}

/// What was found at one look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The pods, each with a cgroup of its own; none lies within another's.
    pub workloads: Vec<Workload>,
    /// The manifest of each that has one.
    pub manifests: BTreeMap<PodUid, PathBuf>,
    /// Those that cannot be looked after, or not as their manifest has it.
    pub refused: Vec<Refusal>,
}

/// A pod that was found, and the manifest that declares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declared {
    /// The file; `None`: it is a unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<PathBuf>,
    /// The pod and its cgroup.
    #[serde(flatten)]
    pub workload: Workload,
}

impl Found {
    /// The pods, each with its manifest.
    pub fn declared(&self) -> Vec<Declared> {
        let declared = |workload: &Workload| Declared {
            manifest: self.manifests.get(&workload.pod.uid).cloned(),
            workload: workload.clone(),
        };
        self.workloads.iter().map(declared).collect()
    }
}

/// Looks for the cgroups of the pods that `manifests` declare, and for units. A unit that a manifest speaks for is
/// the manifest's.
pub fn find(
    manifests: &Manifests,
    parents: &[CgroupPath],
    hierarchy: &Hierarchy,
    own: &OwnCgroups,
) -> Found {
    let mut found = Found::default();
    manifests.resolve(hierarchy, &mut found);
    for parent in parents {
        units::list(parent, hierarchy, &mut found);
    }
    for workload in &mut found.workloads {
        let folder = workload.cgroup.as_str().rsplit('/').next();
        let needed = folder.is_some_and(units::is_needed_by_the_machine);
        if (needed || own.is_within(&workload.cgroup)) && !workload.pod.protected {
            Arc::make_mut(&mut workload.pod).protected = true;
        }
    }
    ordered::sort(&mut found.refused);
    found
}

/// Whether one of them is, or lies within, the other.
fn overlap(a: &CgroupPath, b: &CgroupPath) -> bool {
    is_at_or_below(a.as_str(), b.as_str()) || is_at_or_below(b.as_str(), a.as_str())
}

/// Whether `path` is `parent` or lies within it.
fn is_at_or_below(path: &str, parent: &str) -> bool {
    path.strip_prefix(parent)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
