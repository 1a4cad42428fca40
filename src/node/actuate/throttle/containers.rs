//! Containers that come and go below a pod which is throttled by its containers: each start makes a new cgroup, which the
//! kernel gives no quota of ours.

use crate::engine::plan::Throttle;
use crate::engine::pod::PodUid;
use crate::engine::time::BootTime;
use crate::node::cgroup::knob::{CpuDir, KnobError};
use crate::node::cgroup::{CgroupPath, Hierarchy};

use super::Throttler;
use super::outcome::Outcome;

/// The folder of such a pod.
#[derive(Debug)]
pub(super) struct Folder {
    path: CgroupPath,
    dir: CpuDir,
    /// When its containers were last looked at; 0: they have to be.
    links: u64,
}

impl Folder {
    fn open(hierarchy: &Hierarchy, path: CgroupPath) -> Result<Self, KnobError> {
        let dir = CpuDir::open(hierarchy, &path)?;
        let links = dir.links()?;
        Ok(Self { path, dir, links })
    }

    fn is_changed(&self) -> bool {
        self.dir.links().map_or(true, |links| links != self.links)
    }
}

/// Whether the containers of the pod are limited, not the pod.
pub(super) fn is_by_container(throttle: &Throttle) -> bool {
    let mut levers = throttle.levers.iter();
    levers.any(|lever| !lever.cgroup.is_empty())
}

impl Throttler {
    /// The pods that are throttled by their containers, also those none of whose containers is there now.
    pub fn by_container(&self) -> impl Iterator<Item = &PodUid> {
        self.folders.keys()
    }

    /// Of these the ones whose containers are others than at the last call. Costs one `fstat` a pod and no allocation while
    /// there are none.
    pub fn take_changed(&mut self) -> Vec<PodUid> {
        let changed = |(uid, folder): (&PodUid, &Folder)| folder.is_changed().then(|| uid.clone());
        let changed: Vec<PodUid> = self.folders.iter().filter_map(changed).collect();
        for uid in &changed {
            // By its path: it may have been made anew.
            if let Some(Folder { path, .. }) = self.folders.remove(uid)
                && let Ok(anew) = Folder::open(&self.hierarchy, path)
            {
                self.folders.insert(uid.clone(), anew);
            }
        }
        changed
    }

    /// Brings one pod, which [`Self::apply`] was asked for, to its throttle as its containers are now.
    pub fn follow(
        &mut self,
        now: BootTime,
        throttle: &Throttle,
        path: Option<CgroupPath>,
    ) -> Vec<Outcome> {
        let mut out = Vec::new();
        if !self.contested.contains_key(&throttle.uid) {
            self.stage(now, throttle, path, &mut out);
            self.commit(now, &mut out);
        }
        out
    }

    /// From now on changes of the pod's containers are noticed.
    pub(super) fn watch(&mut self, throttle: &Throttle, path: &CgroupPath) {
        let uid = &throttle.uid;
        let known = self.folders.get(uid);
        if !is_by_container(throttle) || known.is_some_and(|folder| folder.path == *path) {
            return;
        }
        if let Ok(folder) = Folder::open(&self.hierarchy, path.clone()) {
            // One may have come since the plan was made.
            self.folders
                .insert(uid.clone(), Folder { links: 0, ..folder });
        }
    }

    /// A container of the pod is gone; another may have come in its place, which the link count does not tell.
    pub(super) fn look_again(&mut self, uid: &PodUid) {
        if let Some(folder) = self.folders.get_mut(uid) {
            folder.links = 0;
        }
    }
}
