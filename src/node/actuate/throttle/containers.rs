//! Restarted containers of a pod that is throttled by its containers, or has a burst: each start creates a new cgroup without
//! our values.

use crate::engine::plan::PodThrottle;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::engine::units::MilliCpu;
use crate::node::cgroup::control_file::{ControlFileError, CpuDir};
use crate::node::cgroup::{CgroupPath, Hierarchy};

use super::Throttler;
use super::outcome::ThrottleOutcome;

/// A new cgroup gets its limits shortly after it appears: how many more ticks are looked at for a burst.
const RECHECKS: u8 = 3;

/// The directory of such a pod.
#[derive(Debug)]
pub(super) struct PodDirectory {
    path: CgroupPath,
    dir: CpuDir,
    /// Link count when its containers were last checked; 0 forces a check.
    links: u64,
    /// Its containers are throttled, not only given a burst.
    by_container: bool,
    /// Checks that are still due without a change.
    rechecks: u8,
}

impl PodDirectory {
    fn open(hierarchy: &Hierarchy, path: CgroupPath) -> Result<Self, ControlFileError> {
        let dir = CpuDir::open(hierarchy, &path)?;
        let links = dir.links()?;
        Ok(Self {
            path,
            dir,
            links,
            by_container: false,
            rechecks: 0,
        })
    }

    fn is_changed(&self) -> bool {
        self.rechecks > 0 || self.dir.links().map_or(true, |links| links != self.links)
    }

    /// Opens it again: it may have been recreated.
    fn reopen(self, hierarchy: &Hierarchy) -> Result<Self, ControlFileError> {
        let rechecks = self.rechecks.checked_sub(1);
        let first = if self.by_container { 0 } else { RECHECKS };
        let reopened = Self::open(hierarchy, self.path)?;
        let same = reopened.links == self.links;
        Ok(Self {
            by_container: self.by_container,
            rechecks: rechecks.filter(|_| same).unwrap_or(first),
            ..reopened
        })
    }
}

/// Whether the containers of the pod matter: they are limited, or have a burst of their own.
pub(super) fn needs_containers(throttle: &PodThrottle) -> bool {
    throttle.burst > MilliCpu::ZERO || is_by_container(throttle)
}

/// Whether the containers of the pod are limited, not the pod.
fn is_by_container(throttle: &PodThrottle) -> bool {
    let mut target_cgroups = throttle.target_cgroups.iter();
    target_cgroups.any(|target_cgroup| !target_cgroup.cgroup.is_empty())
}

impl Throttler {
    /// The pods that are throttled by their containers, including those without a container right now.
    pub fn by_container(&self) -> impl Iterator<Item = &PodUid> {
        let directories = self.directories.iter();
        directories.filter_map(|(uid, it)| it.by_container.then_some(uid))
    }

    /// The pods whose containers are throttled, or have a burst, and changed since the last call. Without changes it costs one
    /// `fstat` per pod and does not allocate.
    pub fn take_changed(&mut self) -> Vec<PodUid> {
        let changed = |(uid, directory): (&PodUid, &PodDirectory)| {
            directory.is_changed().then(|| uid.clone())
        };
        let changed: Vec<PodUid> = self.directories.iter().filter_map(changed).collect();
        for uid in &changed {
            if let Some(directory) = self.directories.remove(uid)
                && let Ok(reopened) = directory.reopen(&self.hierarchy)
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
            if let Some(pod) = self.pods.get_mut(&throttle.uid) {
                // Its containers are listed again.
                pod.burst = MilliCpu::ZERO;
            }
            self.stage(now, throttle, path, &mut out);
            self.commit(now, &mut out);
        }
        out
    }

    /// Starts detecting changes of the pod's containers.
    pub(super) fn watch_containers(&mut self, throttle: &PodThrottle, path: &CgroupPath) {
        let uid = &throttle.uid;
        if !needs_containers(throttle) {
            return;
        }
        let by_container = is_by_container(throttle);
        if let Some(known) = self.directories.get_mut(uid)
            && known.path == *path
        {
            known.by_container = by_container;
            return;
        }
        if let Ok(directory) = PodDirectory::open(&self.hierarchy, path.clone()) {
            // A container may have started since the plan was made.
            self.directories.insert(
                uid.clone(),
                PodDirectory {
                    links: 0,
                    by_container,
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
