//! Finds the cgroups of the kubelet's pods.
//!
//! The tree is detected: of all `kubepods` below the cgroup root (or one directory further down) it is the one that has the
//! cgroup of a pod of this node.

use crate::engine::pod::{PodUid, QosClass};
use crate::node::cgroup::kubepods::{
    CgroupPodName, Driver, child_directories, kubepods, pod_cgroup,
};
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::machine::workload::inode;

/// One `kubepods` tree.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Tree {
    driver: Driver,
    /// The kubelet's `cgroupRoot`.
    root: String,
    cgroup: CgroupPath,
}

/// Finds the cgroups of pods.
#[derive(Debug)]
pub struct CgroupLocator {
    hierarchy: Hierarchy,
    /// The kubelet's `cgroupRoot` from the command line.
    root: Option<String>,
    /// The tree of this node, once known.
    resolved: Option<Tree>,
}

/// Why pods cannot be located.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LocateError {
    /// There is no `kubepods` at all.
    #[error(
        "failed to find `kubepods` below the cgroup root{}: does a kubelet run here, and is the node's cgroup tree mounted at --cgroup-root?",
        .0.as_deref().map_or_else(String::new, |root| format!(" in --kubelet-cgroup-root {root}"))
    )]
    None(Option<String>),
    /// There are several, and no pod of this node is in any of them.
    #[error(
        "failed to choose between {0}: no pod of this node is in any of them yet; name the kubelet's `cgroupRoot` with --kubelet-cgroup-root"
    )]
    Several(String),
}

impl CgroupLocator {
    /// `root` is the kubelet's `cgroupRoot`, if known.
    pub const fn new(hierarchy: Hierarchy, root: Option<String>) -> Self {
        Self {
            hierarchy,
            root,
            resolved: None,
        }
    }

    /// The cgroup of a pod and the inode of its directory, if it exists.
    pub fn find(&mut self, uid: &PodUid, qos: QosClass) -> Option<(CgroupPath, u64)> {
        let name = CgroupPodName {
            qos,
            uid: uid.clone(),
        };
        if let Some(tree) = &self.resolved {
            return self.find_in(tree, &name);
        }
        for tree in self.trees() {
            if let Some(found) = self.find_in(&tree, &name) {
                self.resolved = Some(tree);
                return Some(found);
            }
        }
        None
    }

    fn find_in(&self, tree: &Tree, name: &CgroupPodName) -> Option<(CgroupPath, u64)> {
        let cgroup = pod_cgroup(tree.driver, &tree.root, name).ok()?;
        let inode = inode(&self.hierarchy, &cgroup).ok()?;
        Some((cgroup, inode))
    }

    /// The `kubepods` of this node's kubelet: the one with a pod of this node or with one of the `known` cgroups, else the
    /// only one.
    ///
    /// # Errors
    /// If there is none, or it is unclear which of several it is.
    pub fn resolve<'a>(
        &mut self,
        mut known: impl Iterator<Item = &'a CgroupPath>,
    ) -> Result<CgroupPath, LocateError> {
        if let Some(tree) = &self.resolved {
            return Ok(tree.cgroup.clone());
        }
        let trees = self.trees();
        let containing = known.find_map(|cgroup| trees.iter().find(|tree| tree.contains(cgroup)));
        let tree = match (containing, trees.as_slice()) {
            (Some(tree), _) | (None, [tree]) => tree.clone(),
            (None, []) => return Err(LocateError::None(self.root.clone())),
            (None, several) => {
                let names = several.iter().map(|tree| tree.cgroup.as_str());
                return Err(LocateError::Several(names.collect::<Vec<_>>().join(", ")));
            }
        };
        let cgroup = tree.cgroup.clone();
        self.resolved = Some(tree);
        Ok(cgroup)
    }

    /// Every existing `kubepods`.
    fn trees(&self) -> Vec<Tree> {
        let roots = match &self.root {
            Some(root) => vec![root.clone()],
            None => std::iter::once("/".to_owned())
                .chain(self.top_directories())
                .collect(),
        };
        let drivers = [Driver::Systemd, Driver::Cgroupfs];
        roots
            .iter()
            .flat_map(|root| drivers.map(|driver| self.tree(driver, root)))
            .flatten()
            .collect()
    }

    /// The directories below the cgroup root, as values of `cgroupRoot`.
    fn top_directories(&self) -> Vec<String> {
        let root = match &self.hierarchy {
            Hierarchy::V2 { root } => root,
            Hierarchy::V1 { cpu, .. } => cpu,
        };
        let directories = child_directories(root).unwrap_or_default();
        directories
            .into_iter()
            .map(|name| match name.strip_suffix(".slice") {
                Some(slice) => slice.to_owned(),
                None => name,
            })
            .collect()
    }

    fn tree(&self, driver: Driver, root: &str) -> Option<Tree> {
        let cgroup = kubepods(driver, root).ok()?;
        let exists = self.hierarchy.dir(Controller::Cpu, &cgroup)?.is_dir();
        exists.then(|| Tree {
            driver,
            root: root.to_owned(),
            cgroup,
        })
    }
}

impl Tree {
    fn contains(&self, cgroup: &CgroupPath) -> bool {
        let below = cgroup.as_str().strip_prefix(self.cgroup.as_str());
        below.is_some_and(|below| below.starts_with('/'))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const UID: &str = "11111111-2222-3333-4444-555555555555";

    fn machine(directories: &[&str]) -> (tempfile::TempDir, Hierarchy) {
        let dir = tempfile::tempdir().expect("a temp dir");
        for directory in directories {
            fs::create_dir_all(dir.path().join(directory)).expect("a directory");
        }
        let root = dir.path().to_owned();
        (dir, Hierarchy::V2 { root })
    }

    fn found(locator: &mut CgroupLocator, qos: QosClass) -> Option<String> {
        let found = locator.find(&PodUid::from(UID), qos);
        found.map(|(cgroup, _)| cgroup.to_string())
    }

    #[test]
    fn a_pod_is_found_with_every_driver_class_and_root() {
        let slice = "11111111_2222_3333_4444_555555555555";
        let cases = [
            (
                "kubepods",
                format!("kubepods/besteffort/pod{UID}"),
                QosClass::BestEffort,
            ),
            (
                "kubepods",
                format!("kubepods/pod{UID}"),
                QosClass::Guaranteed,
            ),
            (
                "node-a/kubepods",
                format!("node-a/kubepods/burstable/pod{UID}"),
                QosClass::Burstable,
            ),
            (
                "kubepods.slice",
                format!(
                    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{slice}.slice"
                ),
                QosClass::Burstable,
            ),
            (
                "custom.slice/custom-kubepods.slice",
                format!("custom.slice/custom-kubepods.slice/custom-kubepods-pod{slice}.slice"),
                QosClass::Guaranteed,
            ),
        ];
        for (kubepods, pod, qos) in cases {
            let (_dir, hierarchy) = machine(&[&pod, "other"]);
            let mut locator = CgroupLocator::new(hierarchy, None);
            assert_eq!(found(&mut locator, qos).as_deref(), Some(&*pod), "{pod}");
            let resolved = locator.resolve(std::iter::empty()).expect("resolved");
            assert_eq!(resolved.as_str(), kubepods);
        }
    }

    #[test]
    fn of_several_trees_the_one_with_a_pod_of_this_node_is_chosen() {
        let pod = format!("b/kubepods/besteffort/pod{UID}");
        let (_dir, hierarchy) = machine(&["a/kubepods", &pod]);
        let mut locator = CgroupLocator::new(hierarchy.clone(), None);
        let error = locator.resolve(std::iter::empty()).expect_err("ambiguous");
        assert!(
            error.to_string().contains("a/kubepods, b/kubepods"),
            "{error}"
        );
        assert_eq!(found(&mut locator, QosClass::BestEffort), Some(pod.clone()));
        let resolved = locator.resolve(std::iter::empty()).expect("resolved");
        assert_eq!(resolved.as_str(), "b/kubepods");
        // The cgroups that an earlier process knew decide it too.
        let known = [CgroupPath::new(&pod).expect("a path")];
        let mut locator = CgroupLocator::new(hierarchy, None);
        let resolved = locator.resolve(known.iter()).expect("resolved");
        assert_eq!(resolved.as_str(), "b/kubepods");
    }

    #[test]
    fn without_kubepods_the_error_names_the_searched_root() {
        let (_dir, hierarchy) = machine(&["a"]);
        let mut locator = CgroupLocator::new(hierarchy, Some("/custom".to_owned()));
        let error = locator.resolve(std::iter::empty()).expect_err("none");
        assert!(
            error.to_string().contains("--kubelet-cgroup-root /custom"),
            "{error}"
        );
    }
}
