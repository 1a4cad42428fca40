//! Pods of a machine without Kubernetes: from manifests that name a cgroup, or one for each child of a cgroup.

pub mod manifests;
pub mod own;
pub mod units;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::engine::pod::PodUid;
use crate::messages::event::PodRefusal;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::machine::workload::Workload;

use self::manifests::Manifests;
use self::own::OwnCgroups;

/// Sources of pods.
#[derive(Clone, Debug, Default)]
pub struct PodSources {
    /// Manifest files, and directories of them.
    pub manifests: Vec<PathBuf>,
    /// Cgroups whose children are pods.
    pub parents: Vec<CgroupPath>,
}

/// The result of one scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodScan {
    /// The pods; their cgroups do not overlap.
    pub workloads: Vec<Workload>,
    /// Their manifests, if they have one.
    pub manifests: BTreeMap<PodUid, PathBuf>,
    /// Pods that cannot be managed, or not as their manifest says.
    pub refused: Vec<PodRefusal>,
}

/// A pod and the manifest that declares it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Declared {
    /// The file; `None` for a unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<PathBuf>,
    /// The pod and its cgroup.
    #[serde(flatten)]
    pub workload: Workload,
}

impl PodScan {
    /// The pods, each with its manifest.
    pub fn declared(&self) -> Vec<Declared> {
        let declared = |workload: &Workload| Declared {
            manifest: self.manifests.get(&workload.pod.uid).cloned(),
            workload: workload.clone(),
        };
        self.workloads.iter().map(declared).collect()
    }
}

/// Finds the cgroups of the pods that `manifests` declare, and the units below `parents`. A unit that a manifest names
/// is the pod of that manifest.
pub fn find(
    manifests: &Manifests,
    parents: &[CgroupPath],
    hierarchy: &Hierarchy,
    own: &OwnCgroups,
) -> PodScan {
    let mut found = PodScan::default();
    manifests.resolve(hierarchy, &mut found);
    for parent in parents {
        units::list(parent, hierarchy, &mut found);
    }
    for workload in &mut found.workloads {
        let directory = workload.cgroup.as_str().rsplit('/').next();
        let needed = directory.is_some_and(units::is_needed_by_the_machine);
        if (needed || own.is_within(&workload.cgroup)) && !workload.pod.protected {
            Arc::make_mut(&mut workload.pod).protected = true;
        }
    }
    found.refused.sort();
    found
}

/// Whether they are the same, or one is below the other.
fn overlap(a: &CgroupPath, b: &CgroupPath) -> bool {
    is_at_or_below(a.as_str(), b.as_str()) || is_at_or_below(b.as_str(), a.as_str())
}

/// Whether `path` is `parent` or below it.
fn is_at_or_below(path: &str, parent: &str) -> bool {
    path.strip_prefix(parent)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}
