//! Where the pods of a machine without Kubernetes come from: manifests that name a cgroup, or the children of a
//! cgroup, each of which counts as a pod.

pub mod manifests;
pub mod own;
pub mod units;

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::engine::pod::Pod;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

use self::manifests::Manifests;
use self::own::OwnCgroups;

/// A pod and the cgroup that it runs in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// What is known of it.
    pub pod: Arc<Pod>,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Inode of the cgroup's folder: tells one that was made anew from the one before. 0 where nobody looks.
    pub inode: u64,
}

/// A pod that cannot be looked after, and why. The others are unharmed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Refusal {
    /// The file, or the parent cgroup.
    pub place: String,
    /// The line that its document starts at, from 1; 0 where the file as a whole is meant.
    pub line: usize,
    /// `namespace/name`, where it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// What is wrong and what to do.
    pub reason: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.place)?;
        if self.line > 0 {
            write!(f, ":{}", self.line)?;
        }
        if let Some(pod) = &self.pod {
            write!(f, ": pod {pod}")?;
        }
        write!(f, ": {}", self.reason)
    }
}

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

/// Why a cgroup's folder cannot be used.
#[derive(Debug, thiserror::Error)]
enum FolderError {
    #[error("the cgroup `{0}` does not exist (yet): it is looked for every second")]
    Absent(CgroupPath),
    #[error("`{part}` in the cgroup path `{cgroup}` is a symbolic link: name the cgroup itself")]
    Link { cgroup: CgroupPath, part: String },
    #[error("`{0}` is a file, not a cgroup")]
    File(CgroupPath),
    #[error("failed to look at the cgroup `{cgroup}`: {source}")]
    Io {
        cgroup: CgroupPath,
        source: io::Error,
    },
}

/// The inode of a cgroup's folder, no part of which below the root may be a symbolic link: a link can be turned to
/// another cgroup between the look and the write.
fn inode(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Result<u64, FolderError> {
    let mut inode = 0;
    let mut walked = String::new();
    for part in cgroup.as_str().split('/') {
        if !walked.is_empty() {
            walked.push('/');
        }
        walked.push_str(part);
        inode = folder_inode(hierarchy, cgroup, &walked)?;
    }
    Ok(inode)
}

fn folder_inode(
    hierarchy: &Hierarchy,
    cgroup: &CgroupPath,
    part: &str,
) -> Result<u64, FolderError> {
    let dir = CgroupPath::new(part)
        .ok()
        .and_then(|part| hierarchy.dir(Controller::Cpu, &part))
        .ok_or_else(|| FolderError::Absent(cgroup.clone()))?;
    let meta = fs::symlink_metadata(dir).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            FolderError::Absent(cgroup.clone())
        }
        _ => FolderError::Io {
            cgroup: cgroup.clone(),
            source,
        },
    })?;
    if meta.is_symlink() {
        return Err(FolderError::Link {
            cgroup: cgroup.clone(),
            part: part.to_owned(),
        });
    }
    if meta.is_dir() {
        Ok(meta.ino())
    } else {
        Err(FolderError::File(cgroup.clone()))
    }
}
