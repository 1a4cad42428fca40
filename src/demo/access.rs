//! Why the demo's cgroups cannot be made, and what to do about it.

use std::fmt;
use std::io;

use nix::errno::Errno;

use super::live::LiveError;
use super::stage::StageError;
use crate::node::cgroup::layout::LayoutError;

/// Why the demo cannot run on this machine, for people.
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
            "The demo cannot run on this machine: {}.\nWhat to do: {}.",
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
    /// The obstacle behind an error; `None` where the cgroups are not to blame.
    pub fn behind(error: &LiveError, is_root: bool) -> Option<Self> {
        let LiveError::Stage(error) = error else {
            return None;
        };
        Some(Self {
            why: error.in_full(),
            what_to_do: advice(error, is_root).to_owned(),
        })
    }
}

fn advice(error: &StageError, is_root: bool) -> &'static str {
    let errno = error.source.raw_os_error().map(Errno::from_raw);
    match errno {
        Some(Errno::EACCES | Errno::EPERM) if !is_root => {
            "run it as root (`sudo plimsoll demo`), or name a cgroup v2 tree that is delegated to you with --cgroup-root"
        }
        Some(Errno::EACCES | Errno::EPERM) => {
            "this root may not write cgroups, as in most containers: run it on the host, or in a container with `--privileged`"
        }
        Some(Errno::EROFS) => {
            "the cgroup file system is mounted read-only, as in most containers: run it on the host, or in a container \
             with `--privileged` (then `mount -o remount,rw` it where it still is)"
        }
        Some(Errno::EBUSY) if error.doing.starts_with("switch on") => {
            "that cgroup holds processes itself, and then the kernel hands no controller down from it: move them into a \
             cgroup below it, or run the demo on the host"
        }
        Some(Errno::ENOENT | Errno::EINVAL) if error.doing.starts_with("switch on") => {
            "the cpu controller is not available in that cgroup: have it delegated (systemd: `Delegate=yes`), or name \
             another tree with --cgroup-root"
        }
        _ if is_missing_bandwidth(error) => {
            "this kernel has no CPU quota: it needs CONFIG_CFS_BANDWIDTH"
        }
        Some(Errno::ENOENT) => {
            "check that --cgroup-root names the place where the cgroup trees are mounted"
        }
        _ => "see the reason above; `plimsoll demo --replay` shows a recording instead",
    }
}

fn is_missing_bandwidth(error: &StageError) -> bool {
    let name = error.path.file_name().and_then(|name| name.to_str());
    error.source.kind() == io::ErrorKind::NotFound
        && matches!(name, Some("cpu.max" | "cpu.cfs_quota_us"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(doing: &'static str, path: &str, errno: Errno) -> LiveError {
        LiveError::Stage(StageError {
            doing,
            path: path.into(),
            source: errno.into(),
        })
    }

    #[test]
    fn each_reason_has_its_own_advice() {
        let make = "make the cgroup";
        let on = "switch on the cpu controller in";
        let cases = [
            (make, "/cg/d", Errno::EACCES, false, "sudo"),
            (make, "/cg/d", Errno::EACCES, true, "--privileged"),
            (make, "/cg/d", Errno::EROFS, true, "read-only"),
            (
                on,
                "/cg/cgroup.subtree_control",
                Errno::EBUSY,
                true,
                "holds processes",
            ),
            (
                on,
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
    fn a_worker_that_was_killed_is_no_obstacle_of_the_machine() {
        assert_eq!(Obstacle::behind(&LiveError::WorkerEnded, true), None);
    }
}
