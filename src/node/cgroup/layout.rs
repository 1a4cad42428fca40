//! Finds the cgroup trees of a machine.
//!
//! | machine | trees |
//! |---|---|
//! | v2 | one `cgroup2` mount with every controller |
//! | v1 | a `cgroup` mount for each controller, or for several joined (`cpu,cpuacct`), often with symbolic links |
//! | hybrid | v1 mounts with the controllers, and a `cgroup2` mount with none that we need |

use std::cmp::Reverse;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, statfs};

use super::Hierarchy;

/// Why no cgroup trees were found.
#[derive(Debug, thiserror::Error)]
pub enum LayoutError {
    /// The list of mounts could not be read.
    #[error("failed to read the mounts from {path}: {source}")]
    Mounts {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No mount has the CPU controller.
    #[error(
        "failed to find a cgroup tree with the cpu controller among the mounts in {mounts}: looked for `cgroup2`, and for `cgroup` with `cpu` and `cpuacct`; mount one (`mount -t cgroup2 cgroup2 /sys/fs/cgroup`), or name it with --cgroup-root"
    )]
    NotMounted {
        /// The list of mounts that was read.
        mounts: PathBuf,
    },
    /// The given directory is not a cgroup root.
    #[error(
        "`{root}` is not a cgroup root: it has neither `cgroup.controllers` (cgroup v2) nor the directories `cpu` and `cpuacct` (cgroup v1); name the directory that the cgroup trees are mounted at, usually /sys/fs/cgroup"
    )]
    NotARoot {
        /// The directory.
        root: PathBuf,
    },
    /// It looks like a cgroup tree, but is not a cgroup file system.
    #[error(
        "`{path}` looks like a cgroup tree, but no cgroup file system is mounted there; name the directory that the cgroup trees are mounted at, usually /sys/fs/cgroup"
    )]
    NotMountedThere {
        /// The directory.
        path: PathBuf,
    },
    /// A v2 tree without the CPU controller.
    #[error(
        "the cgroup v2 tree at `{root}` has no cpu controller: on a hybrid machine it is in a v1 tree beside it (name their common parent, usually /sys/fs/cgroup); in a container it must be delegated"
    )]
    NoCpuController {
        /// The tree.
        root: PathBuf,
    },
}

/// One mount of a cgroup file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The mount point.
    pub point: PathBuf,
    /// It shows the tree from its root, not from a cgroup below it (as a bind mount into a container does).
    pub whole: bool,
    /// The v1 controllers of this tree; `None`: a v2 tree.
    pub controllers: Option<Vec<String>>,
}

/// The cgroup mounts in the text of a `mountinfo` file (`proc_pid_mountinfo(5)`). Malformed lines are skipped.
pub fn cgroup_mounts(mountinfo: &[u8]) -> Vec<Mount> {
    mountinfo
        .split(|byte| *byte == b'\n')
        .filter_map(cgroup_mount)
        .collect()
}

/// `id parent major:minor root point options [optional...] - type source super-options`
fn cgroup_mount(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let (root, point) = (*fields.get(3)?, *fields.get(4)?);
    let dash = 6 + fields.get(6..)?.iter().position(|field| *field == b"-")?;
    let controllers = match *fields.get(dash + 1)? {
        b"cgroup2" => None,
        b"cgroup" => Some(
            String::from_utf8_lossy(fields.get(dash + 3)?)
                .split(',')
                .map(str::to_owned)
                .collect(),
        ),
        _ => return None,
    };
    Some(Mount {
        point: PathBuf::from(std::ffi::OsString::from_vec(unescape(point))),
        whole: root == b"/",
        controllers,
    })
}

/// Decodes the octal escapes of blanks and backslashes (`\040`).
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        let code = match tail {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', ..] if *first == b'\\' => {
                Some((a - b'0') * 64 + (b - b'0') * 8 + (c - b'0'))
            }
            _ => None,
        };
        plain.push(code.unwrap_or(*first));
        rest = if code.is_some() { &tail[3..] } else { tail };
    }
    plain
}

impl Hierarchy {
    /// Finds the cgroup trees: below `cgroup_root` if given, else among the mounts in `<proc_root>/self/mountinfo`.
    /// Checks that each is a cgroup file system.
    ///
    /// # Errors
    /// If none has a CPU controller; the message says what was looked for and what to do.
    pub fn detect(proc_root: &Path, cgroup_root: Option<&Path>) -> Result<Self, LayoutError> {
        let found = match cgroup_root {
            Some(root) => Self::below(root)?,
            None => Self::mounted(&proc_root.join("self/mountinfo"))?,
        };
        found.checked()
    }

    /// The trees below `root`, identified by file names alone, so that tests can use any directory.
    ///
    /// # Errors
    /// If the names are not those of a cgroup root with a CPU controller.
    pub fn below(root: &Path) -> Result<Self, LayoutError> {
        let owned = || root.to_owned();
        if let Ok(controllers) = fs::read_to_string(root.join("cgroup.controllers")) {
            return if controllers.split_whitespace().any(|name| name == "cpu") {
                Ok(Self::V2 { root: owned() })
            } else {
                Err(LayoutError::NoCpuController { root: owned() })
            };
        }
        let tree = |controller| tree_named(root, controller);
        match (tree("cpu"), tree("cpuacct")) {
            (Some(cpu), Some(cpuacct)) => Ok(Self::V1 {
                cpu,
                cpuacct,
                memory: tree("memory"),
                freezer: tree("freezer"),
                unified: tree("unified"),
            }),
            _ => Err(LayoutError::NotARoot { root: owned() }),
        }
    }

    fn mounted(mounts: &Path) -> Result<Self, LayoutError> {
        let text = fs::read(mounts).map_err(|source| LayoutError::Mounts {
            path: mounts.to_owned(),
            source,
        })?;
        Self::from_mounts(&cgroup_mounts(&text)).ok_or_else(|| LayoutError::NotMounted {
            mounts: mounts.to_owned(),
        })
    }

    /// The trees among `mounts`. If a v1 tree has the CPU controller, the v2 tree does not have it.
    pub fn from_mounts(mounts: &[Mount]) -> Option<Self> {
        let whole_first = |wanted: &dyn Fn(&Mount) -> bool| {
            let mut found: Vec<_> = mounts.iter().filter(|mount| wanted(mount)).collect();
            found.sort_by_key(|mount| Reverse(mount.whole));
            found.first().map(|mount| mount.point.clone())
        };
        let v1 = |controller: &str| {
            whole_first(&|mount: &Mount| {
                let listed = mount.controllers.iter().flatten();
                listed.into_iter().any(|listed| listed == controller)
            })
        };
        let v2 = whole_first(&|mount: &Mount| mount.controllers.is_none());
        match (v1("cpu"), v1("cpuacct"), v2) {
            (Some(cpu), Some(cpuacct), unified) => Some(Self::V1 {
                cpu,
                cpuacct,
                memory: v1("memory"),
                freezer: v1("freezer"),
                unified,
            }),
            (None, _, Some(root)) => Some(Self::V2 { root }),
            _ => None,
        }
    }

    fn checked(self) -> Result<Self, LayoutError> {
        match &self {
            Self::V2 { root } => {
                is_cgroup_fs(root)?;
                // Mounts do not list the controllers of the v2 tree; `cgroup.controllers` does.
                Self::below(root)?;
            }
            Self::V1 {
                cpu,
                cpuacct,
                memory,
                freezer,
                unified: _,
            } => {
                let optional = [memory, freezer];
                let all = [cpu, cpuacct].into_iter();
                all.chain(optional.into_iter().flatten())
                    .try_for_each(|tree| is_cgroup_fs(tree))?;
            }
        }
        Ok(self)
    }
}

/// The directory of a controller's tree below `root`: `cpu`, or a joint one such as `cpu,cpuacct`.
fn tree_named(root: &Path, controller: &str) -> Option<PathBuf> {
    let plain = root.join(controller);
    if plain.is_dir() {
        return Some(plain);
    }
    let mut joined: Vec<PathBuf> = fs::read_dir(root)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.split(',').any(|part| part == controller))
        })
        .filter(|path| path.is_dir())
        .collect();
    joined.sort();
    joined.into_iter().next()
}

fn is_cgroup_fs(path: &Path) -> Result<(), LayoutError> {
    let served = statfs(path).is_ok_and(|found| {
        [CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC].contains(&found.filesystem_type())
    });
    if served {
        Ok(())
    } else {
        Err(LayoutError::NotMountedThere {
            path: path.to_owned(),
        })
    }
}
