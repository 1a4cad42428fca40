//! cgroup paths and files on v1, v2 and hybrid machines.

pub mod bandwidth;
pub mod cached_file;
pub mod control_file;
pub mod kubepods;
pub mod layout;
pub mod parse;

use std::fmt;
use std::path::{Component, Path, PathBuf};

/// A v1 hierarchy, or the same controller in the single v2 tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Controller {
    /// Quota and weight.
    Cpu,
    /// CPU usage.
    Cpuacct,
    /// Memory.
    Memory,
    /// Freezing.
    Freezer,
}

impl Controller {
    /// All controllers.
    pub const ALL: [Self; 4] = [Self::Cpu, Self::Cpuacct, Self::Memory, Self::Freezer];
}

/// Mount points of a machine's cgroup trees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hierarchy {
    /// One tree with all controllers.
    V2 {
        /// Its mount point.
        root: PathBuf,
    },
    /// One tree per controller (some may share one). `None`: the controller is not mounted.
    V1 {
        /// `cpu`
        cpu: PathBuf,
        /// `cpuacct`
        cpuacct: PathBuf,
        /// `memory`
        memory: Option<PathBuf>,
        /// `freezer`
        freezer: Option<PathBuf>,
        /// The v2 tree of a hybrid machine.
        unified: Option<PathBuf>,
    },
}

impl Hierarchy {
    /// The directory of `cgroup` in the tree of `controller`; `None` if that tree is not mounted.
    pub fn dir(&self, controller: Controller, cgroup: &CgroupPath) -> Option<PathBuf> {
        let root = match (self, controller) {
            (Self::V2 { root }, _) => Some(root),
            (Self::V1 { cpu, .. }, Controller::Cpu) => Some(cpu),
            (Self::V1 { cpuacct, .. }, Controller::Cpuacct) => Some(cpuacct),
            (Self::V1 { memory, .. }, Controller::Memory) => memory.as_ref(),
            (Self::V1 { freezer, .. }, Controller::Freezer) => freezer.as_ref(),
        };
        root.map(|root| root.join(&cgroup.0))
    }

    /// The directories of `cgroup` in all trees, without duplicates.
    pub fn dirs(&self, cgroup: &CgroupPath) -> Vec<PathBuf> {
        let mut dirs = Vec::new();
        for dir in Controller::ALL
            .into_iter()
            .filter_map(|controller| self.dir(controller, cgroup))
        {
            if !dirs.contains(&dir) {
                dirs.push(dir);
            }
        }
        dirs
    }

    /// Whether this is cgroup v2.
    pub const fn is_v2(&self) -> bool {
        matches!(self, Self::V2 { .. })
    }
}

/// A cgroup's path below the root of its tree: relative, with no `.` or `..`, not empty.
#[derive(
    Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
)]
#[serde(try_from = "String", into = "String")]
pub struct CgroupPath(String);

/// Why a text is not a [`CgroupPath`].
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CgroupPathError {
    /// Empty, or only slashes.
    #[error("the cgroup path is empty: name a cgroup below the cgroup root, such as `batch.slice`")]
    Empty,
    /// It escapes the cgroup root.
    #[error(
        "the cgroup path `{0}` must stay below the cgroup root: no leading `/`, no `.` or `..` in it"
    )]
    Escapes(String),
}

impl CgroupPath {
    /// Parses and validates a path.
    ///
    /// # Errors
    /// If it is empty or could escape the cgroup root.
    pub fn new(path: &str) -> Result<Self, CgroupPathError> {
        if path.contains('\0') || Path::new(path).is_absolute() {
            return Err(CgroupPathError::Escapes(path.to_owned()));
        }
        let trimmed = path.trim_matches('/');
        if trimmed.is_empty() {
            return Err(CgroupPathError::Empty);
        }
        let plain = trimmed.split('/').all(|part| !matches!(part, "." | ".."))
            && Path::new(trimmed)
                .components()
                .all(|part| matches!(part, Component::Normal(_)));
        if plain {
            Ok(Self(trimmed.to_owned()))
        } else {
            Err(CgroupPathError::Escapes(path.to_owned()))
        }
    }

    /// The path as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The cgroup `name` below this one; an empty name is this cgroup itself.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn join(&self, name: &str) -> Result<Self, CgroupPathError> {
        if name.is_empty() {
            Ok(self.clone())
        } else {
            Self::new(&format!("{}/{name}", self.0))
        }
    }
}

impl fmt::Display for CgroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl TryFrom<String> for CgroupPath {
    type Error = CgroupPathError;

    fn try_from(path: String) -> Result<Self, Self::Error> {
        Self::new(&path)
    }
}

impl From<CgroupPath> for String {
    fn from(path: CgroupPath) -> Self {
        path.0
    }
}
