//! Why the demo cannot run on this machine, and what to do about it.

use std::fmt;
use std::io;

use nix::errno::Errno;

use super::live::LiveError;
use crate::node::cgroup::layout::LayoutError;
use crate::scene::cgroups::CgroupError;

/// Where the repository has a picture of the demo.
const PICTURE: &str = "docs/demo.svg";

/// Why the demo cannot run on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// What went wrong.
    pub why: String,
    /// What to do.
    pub what_to_do: String,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "The demo cannot run on this machine: {}.\n\
             What to do: {}.\n\
             What it looks like: {PICTURE} in Plimsoll's repository.",
            self.why, self.what_to_do
        )
    }
}

impl From<&LayoutError> for Obstacle {
    fn from(error: &LayoutError) -> Self {
        Self {
            why: error.to_string(),
            what_to_do: "run it where a cgroup tree with the cpu controller is mounted".to_owned(),
        }
    }
}

impl Obstacle {
    /// The obstacle behind an error; `None` where the error has nothing to do with cgroups.
    pub fn behind(error: &LiveError, is_root: bool) -> Option<Self> {
        let LiveError::Cgroup(error) = error else {
            return None;
        };
        Some(Self {
            why: error.in_full(),
            what_to_do: advice(error, is_root).to_owned(),
        })
    }
}

fn advice(error: &CgroupError, is_root: bool) -> &'static str {
    let errno = error.source.raw_os_error().map(Errno::from_raw);
    match errno {
        Some(Errno::EACCES | Errno::EPERM) if !is_root => {
            "run it as root (`sudo plimsoll demo`), or name a cgroup v2 tree that is delegated to you with --cgroup-root"
        }
        Some(Errno::EACCES | Errno::EPERM) => {
            "root may not write cgroups here, as in most containers: run it on the host, or in a container with `--privileged`"
        }
        Some(Errno::EROFS) => {
            "the cgroup file system is mounted read-only, as in most containers: run it on the host, or in a container \
             with `--privileged` (and `mount -o remount,rw` it if it is still read-only)"
        }
        Some(Errno::EBUSY) if error.doing.starts_with("enable") => {
            "that cgroup holds processes itself, so the kernel enables no controller for its children: move them into a \
             child cgroup, or run the demo on the host"
        }
        Some(Errno::ENOENT | Errno::EINVAL) if error.doing.starts_with("enable") => {
            "the cpu controller is not available in that cgroup: delegate it (systemd: `Delegate=yes`), or name \
             another tree with --cgroup-root"
        }
        _ if is_missing_bandwidth(error) => {
            "this kernel has no CPU quota: it needs CONFIG_CFS_BANDWIDTH"
        }
        Some(Errno::ENOENT) => {
            "check that --cgroup-root names the directory where the cgroup trees are mounted"
        }
        _ => "see the reason above",
    }
}

fn is_missing_bandwidth(error: &CgroupError) -> bool {
    let name = error.path.file_name().and_then(|name| name.to_str());
    error.source.kind() == io::ErrorKind::NotFound
        && matches!(name, Some("cpu.max" | "cpu.cfs_quota_us"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(doing: &'static str, path: &str, errno: Errno) -> LiveError {
        LiveError::Cgroup(CgroupError {
            doing,
            path: path.into(),
            source: errno.into(),
        })
    }

    #[test]
    fn every_errno_has_its_own_advice() {
        let create = "create the cgroup";
        let enable = "enable the cpu controller in";
        let cases = [
            (create, "/cg/d", Errno::EACCES, false, "sudo"),
            (create, "/cg/d", Errno::EACCES, true, "--privileged"),
            (create, "/cg/d", Errno::EROFS, true, "read-only"),
            (
                enable,
                "/cg/cgroup.subtree_control",
                Errno::EBUSY,
                true,
                "holds processes",
            ),
            (
                enable,
                "/cg/cgroup.subtree_control",
                Errno::ENOENT,
                true,
                "Delegate=yes",
            ),
            (
                "write",
                "/cg/d/cpu.max",
                Errno::ENOENT,
                true,
                "CONFIG_CFS_BANDWIDTH",
            ),
        ];
        for (doing, path, errno, is_root, advice) in cases {
            let obstacle = Obstacle::behind(&error(doing, path, errno), is_root).unwrap();
            assert!(obstacle.what_to_do.contains(advice), "{obstacle}");
            assert!(obstacle.why.contains(path), "{obstacle}");
            assert!(obstacle.why.contains(errno.desc()) || obstacle.why.contains("os error"));
        }
    }

    #[test]
    fn a_killed_worker_is_not_an_obstacle() {
        assert_eq!(Obstacle::behind(&LiveError::WorkerExited, true), None);
    }
}
