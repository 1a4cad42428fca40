//! Where the pods of a machine without Kubernetes come from: manifests that name a cgroup, or the children of a
//! cgroup, each of which counts as a pod.

pub mod manifests;
pub mod own;
pub mod units;

use std::path::PathBuf;
use std::sync::Arc;

use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::machine::event::Refusal;
use crate::node::machine::workload::Workload;

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
    /// Those that cannot be looked after.
    pub refused: Vec<Refusal>,
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
    found.refused.sort();
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
