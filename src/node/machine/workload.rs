//! A pod and its cgroup on this machine.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::crd::pod_facts::ContainerFacts;
use crate::engine::pod::Pod;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};

/// A pod and the cgroup that it runs in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Workload {
    /// The pod.
    pub pod: Arc<Pod>,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// Inode of the cgroup's directory ([`inode`]), to detect a recreated cgroup. 0: not checked.
    pub inode: u64,
    /// Container facts from the Pod object; `None` if there is no object, as in `run`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub containers: Option<ContainerFacts>,
}

impl Workload {
    /// Whether the cgroup still exists: another one may have taken its name since.
    pub fn exists(&self, hierarchy: &Hierarchy) -> bool {
        let dir = hierarchy.dir(Controller::Cpu, &self.cgroup);
        let meta = dir.and_then(|dir| fs::symlink_metadata(dir).ok());
        meta.is_some_and(|meta| self.inode == 0 || meta.ino() == self.inode)
    }
}

/// Why a cgroup's directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DirectoryError {
    /// It does not exist.
    #[error("the cgroup `{0}` does not exist (yet): checked again every second")]
    Absent(CgroupPath),
    /// A part of its path is a symbolic link.
    #[error("`{part}` in the cgroup path `{cgroup}` is a symbolic link: name the cgroup itself")]
    Link {
        /// The cgroup.
        cgroup: CgroupPath,
        /// The part of its path.
        part: String,
    },
    /// It is not a directory.
    #[error("`{0}` is a file, not a cgroup")]
    File(CgroupPath),
    /// It cannot be read.
    #[error("failed to read the cgroup `{cgroup}`: {source}")]
    Io {
        /// The cgroup.
        cgroup: CgroupPath,
        /// The system error.
        source: io::Error,
    },
}

/// The inode of a cgroup's directory. No part of the path below the root may be a symbolic link, since a link could be
/// redirected to another cgroup between check and write.
///
/// # Errors
/// If there is no such directory, or it cannot be read.
pub fn inode(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Result<u64, DirectoryError> {
    let mut inode = 0;
    let mut walked = String::new();
    for part in cgroup.as_str().split('/') {
        if !walked.is_empty() {
            walked.push('/');
        }
        walked.push_str(part);
        inode = directory_inode(hierarchy, cgroup, &walked)?;
    }
    Ok(inode)
}

fn directory_inode(
    hierarchy: &Hierarchy,
    cgroup: &CgroupPath,
    part: &str,
) -> Result<u64, DirectoryError> {
    let dir = CgroupPath::new(part)
        .ok()
        .and_then(|part| hierarchy.dir(Controller::Cpu, &part))
        .ok_or_else(|| DirectoryError::Absent(cgroup.clone()))?;
    let meta = fs::symlink_metadata(dir).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            DirectoryError::Absent(cgroup.clone())
        }
        _ => DirectoryError::Io {
            cgroup: cgroup.clone(),
            source,
        },
    })?;
    if meta.is_symlink() {
        return Err(DirectoryError::Link {
            cgroup: cgroup.clone(),
            part: part.to_owned(),
        });
    }
    if meta.is_dir() {
        Ok(meta.ino())
    } else {
        Err(DirectoryError::File(cgroup.clone()))
    }
}
