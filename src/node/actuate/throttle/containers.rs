//! Restarted containers of a pod that is throttled by its containers: each start creates a new cgroup without our
//! quota.

use crate::engine::plan::PodThrottle;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::control_file::{ControlFileError, CpuDir};
use crate::node::cgroup::{CgroupPath, Hierarchy};

use super::Throttler;
use super::outcome::ThrottleOutcome;

/// The directory of such a pod.
#[derive(Debug)]
pub(super) struct PodDirectory {
    path: CgroupPath,
    dir: CpuDir,
    /// Link count when its containers were last checked; 0 forces a check.
    links: u64,
}

impl PodDirectory {
    fn open(hierarchy: &Hierarchy, path: CgroupPath) -> Result<Self, ControlFileError> {
        let dir = CpuDir::open(hierarchy, &path)?;
        let links = dir.links()?;
        Ok(Self { path, dir, links })
    }

    fn is_changed(&self) -> bool {
        self.dir.links().map_or(true, |links| links != self.links)
    }
}

/// Whether the containers of the pod are limited, not the pod.
pub(super) fn is_by_container(throttle: &PodThrottle) -> bool {
    let mut target_cgroups = throttle.target_cgroups.iter();
    target_cgroups.any(|target_cgroup| !target_cgroup.cgroup.is_empty())
}

impl Throttler {
    /// The pods that are throttled by their containers, including those without a container right now.
    pub fn by_container(&self) -> impl Iterator<Item = &PodUid> {
        self.directories.keys()
    }

    /// The pods from [`Self::by_container`] whose containers changed since the last call. Without changes it costs one
    /// `fstat` per pod and does not allocate.
    pub fn take_changed(&mut self) -> Vec<PodUid> {
        let changed = |(uid, directory): (&PodUid, &PodDirectory)| {
            directory.is_changed().then(|| uid.clone())
        };
        let changed: Vec<PodUid> = self.directories.iter().filter_map(changed).collect();
        for uid in &changed {
            // Reopened by path: the directory may have been recreated.
            if let Some(PodDirectory { path, .. }) = self.directories.remove(uid)
                && let Ok(reopened) = PodDirectory::open(&self.hierarchy, path)
            {
                self.directories.insert(uid.clone(), reopened);
            }
        }
        changed
    }

    /// Applies the throttle of the last [`Self::apply`] to the current containers of one pod.
    pub fn reapply(
        &mut self,
        now: BootTime,
        throttle: &PodThrottle,
        path: Option<CgroupPath>,
    ) -> Vec<ThrottleOutcome> {
        let mut out = Vec::new();
        if !self.contested.contains_key(&throttle.uid) {
            self.stage(now, throttle, path, &mut out);
            self.commit(now, &mut out);
        }
        out
    }

    /// Starts detecting changes of the pod's containers.
    pub(super) fn watch_containers(&mut self, throttle: &PodThrottle, path: &CgroupPath) {
        let uid = &throttle.uid;
        let known = self.directories.get(uid);
        if !is_by_container(throttle) || known.is_some_and(|directory| directory.path == *path) {
            return;
        }
        if let Ok(directory) = PodDirectory::open(&self.hierarchy, path.clone()) {
            // A container may have started since the plan was made.
            self.directories.insert(
                uid.clone(),
                PodDirectory {
                    links: 0,
                    ..directory
                },
            );
        }
    }

    /// Forces a check after a container of the pod is gone: another may have replaced it with the same link count.
    pub(super) fn recheck_containers(&mut self, uid: &PodUid) {
        if let Some(directory) = self.directories.get_mut(uid) {
            directory.links = 0;
        }
    }
}
