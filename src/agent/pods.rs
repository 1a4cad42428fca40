//! The pods of this node, with their cgroups.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt};

use super::cgroup_locator::CgroupLocator;
use super::objects::{self, Owner, SeenPod};
use crate::engine::pod::{Pod, PodUid};
use crate::node::cgroup::CgroupPath;
use crate::node::machine::workload::Workload;

/// A pod's `namespace/name`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRef {
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// The pods of this node.
#[derive(Debug, Default)]
pub struct NodePods {
    /// By UID.
    known: BTreeMap<String, Known>,
    /// During a new list: the pods listed so far.
    listed: Option<BTreeSet<String>>,
    complete: bool,
    own: Option<PodRef>,
    changed: bool,
    /// Number of pods that were bound to this node since the first list.
    bound: u64,
}

#[derive(Debug)]
struct Known {
    seen: SeenPod,
    cgroup: Option<(CgroupPath, u64)>,
    /// Its cgroup still has to be found.
    unresolved: bool,
}

impl NodePods {
    /// No pods yet. `own` is the agent's own pod, which is never acted on.
    pub fn new(own: Option<PodRef>) -> Self {
        Self {
            own,
            ..Self::default()
        }
    }

    /// Handles a watch event.
    pub fn apply(&mut self, event: Event<SeenPod>) {
        match event {
            Event::Init => self.listed = Some(BTreeSet::new()),
            Event::InitApply(pod) => {
                if let Some(listed) = &mut self.listed {
                    listed.insert(objects::uid(&pod).to_owned());
                }
                self.insert(pod);
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                let before = self.known.len();
                self.known.retain(|uid, _| listed.contains(uid));
                self.changed |= self.known.len() != before || !self.complete;
                self.complete = true;
            }
            Event::Apply(pod) => self.insert(pod),
            Event::Delete(pod) => {
                self.changed |= self.known.remove(objects::uid(&pod)).is_some();
            }
        }
    }

    fn insert(&mut self, mut seen: SeenPod) {
        let own = self.is_own(&seen);
        let uid = objects::uid(&seen).to_owned();
        let name = seen.name_any();
        match &mut seen.facts {
            Ok(facts) if own => Arc::make_mut(facts).protected = true,
            Ok(_) => {}
            Err(why) => tracing::warn!(pod = name, %why, "this pod is ignored"),
        }
        let before = self.known.remove(&uid);
        self.bound += u64::from(self.complete && before.is_none());
        let cgroup = before.as_ref().and_then(|known| known.cgroup.clone());
        let same = before.is_some_and(|known| {
            let known = known.seen;
            known.facts == seen.facts
                && known.containers == seen.containers
                && known.finished == seen.finished
        });
        self.changed |= !same;
        // It may have a new cgroup by now.
        let known = Known {
            unresolved: !seen.finished,
            seen,
            cgroup,
        };
        self.known.insert(uid, known);
    }

    /// Number of pods that were bound to this node since the first list.
    pub const fn bound(&self) -> u64 {
        self.bound
    }

    fn is_own(&self, pod: &SeenPod) -> bool {
        let own = self.own.as_ref();
        own.is_some_and(|own| {
            pod.meta().name.as_ref() == Some(&own.name)
                && pod.meta().namespace.as_ref() == Some(&own.namespace)
        })
    }

    /// Whether the pod exists, whatever its state.
    pub fn has(&self, uid: &PodUid) -> bool {
        self.known.contains_key(&*uid.0)
    }

    /// All pods of the node have been listed.
    pub const fn are_complete(&self) -> bool {
        self.complete
    }

    /// The `DaemonSet` that the agent's own pod belongs to.
    pub fn own_daemon_set(&self) -> Option<&Owner> {
        let own = self.own.as_ref()?;
        let is_own = |known: &&Known| {
            let facts = known.seen.facts.as_ref();
            facts.is_ok_and(|pod| pod.name == own.name && pod.namespace == own.namespace)
        };
        let known = self.known.values().find(is_own)?;
        known.seen.daemon_set.as_ref()
    }

    /// Looks up missing cgroups. Returns the pods with their cgroups if anything changed since the last call.
    pub fn refresh(&mut self, locator: &mut CgroupLocator) -> Option<Vec<Workload>> {
        for known in self.known.values_mut() {
            self.changed |= known.unresolved && known.find(locator);
        }
        std::mem::take(&mut self.changed).then(|| self.workloads())
    }

    /// The pods that are bound to this node and will start, but have no cgroup yet. A running one without a cgroup is a pod
    /// whose cgroup cannot be found: what it uses counts as the system's.
    pub fn pending(&self) -> Vec<Arc<Pod>> {
        let pending = self.known.values().filter_map(|known| {
            let facts = known.seen.facts.as_ref().ok()?;
            let starts = !facts.running && !facts.terminating && !known.seen.finished;
            (starts && known.cgroup.is_none()).then(|| Arc::clone(facts))
        });
        pending.collect()
    }

    /// Makes the next [`Self::refresh`] return all pods.
    pub const fn mark_changed(&mut self) {
        self.changed = true;
    }

    /// The running pods without a cgroup: UID and `namespace/name`.
    pub fn without_cgroup(&self) -> impl Iterator<Item = (PodUid, String)> {
        let pods = self.known.values();
        let pods = pods.filter(|known| known.unresolved && known.cgroup.is_none());
        pods.filter_map(|known| {
            let facts = known.seen.facts.as_ref().ok()?;
            facts
                .running
                .then(|| (facts.uid.clone(), facts.full_name().to_string()))
        })
    }

    fn workloads(&self) -> Vec<Workload> {
        self.known.values().filter_map(Known::workload).collect()
    }
}

impl Known {
    /// Looks up the cgroup; true if it changed.
    fn find(&mut self, locator: &mut CgroupLocator) -> bool {
        let Ok(facts) = &self.seen.facts else {
            self.unresolved = false;
            return false;
        };
        let cgroup = locator.find(&self.seen.cgroup_uid, facts.qos);
        self.unresolved = cgroup.is_none();
        let changed = cgroup != self.cgroup;
        self.cgroup = cgroup;
        changed
    }

    fn workload(&self) -> Option<Workload> {
        let facts = self.seen.facts.as_ref().ok()?;
        let (cgroup, inode) = self.cgroup.clone()?;
        (!self.seen.finished).then(|| Workload {
            pod: Arc::clone(facts),
            cgroup,
            inode,
            containers: Some(self.seen.containers),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;
    use crate::node::cgroup::Hierarchy;

    fn pod(name: &str, uid: &str, phase: &str) -> SeenPod {
        let pod = json!({
            "metadata": {"name": name, "namespace": "default", "uid": uid},
            "spec": {"containers": [{"name": "c"}]},
            "status": {"phase": phase},
        });
        serde_json::from_value(pod).expect("a pod")
    }

    fn names(workloads: Option<Vec<Workload>>) -> Option<Vec<String>> {
        let names = |list: Vec<Workload>| list.iter().map(|w| w.pod.name.clone()).collect();
        workloads.map(names)
    }

    fn uid(number: u8) -> String {
        format!("{number:08x}-0000-0000-0000-000000000000")
    }

    struct Fixture {
        dir: tempfile::TempDir,
        locator: CgroupLocator,
        pods: NodePods,
    }

    impl Fixture {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a temp dir");
            let root = dir.path().to_owned();
            let locator = CgroupLocator::new(Hierarchy::V2 { root }, None);
            let own = PodRef {
                namespace: "default".to_owned(),
                name: "own".to_owned(),
            };
            let pods = NodePods::new(Some(own));
            Self { dir, locator, pods }
        }

        fn cgroup(&self, number: u8) {
            let path = format!("kubepods/besteffort/pod{}", uid(number));
            fs::create_dir_all(self.dir.path().join(path)).expect("a cgroup");
        }

        fn seen(&mut self) -> Option<Vec<String>> {
            names(self.pods.refresh(&mut self.locator))
        }
    }

    #[test]
    fn a_pod_counts_once_its_cgroup_exists() {
        let mut fixture = Fixture::new();
        fixture.cgroup(1);
        fixture.pods.apply(Event::Init);
        fixture
            .pods
            .apply(Event::InitApply(pod("a", &uid(1), "Running")));
        fixture
            .pods
            .apply(Event::InitApply(pod("b", &uid(2), "Pending")));
        assert!(!fixture.pods.are_complete());
        fixture.pods.apply(Event::InitDone);
        assert!(fixture.pods.are_complete());
        assert_eq!(fixture.seen().expect("changed"), ["a"]);
        assert_eq!(fixture.seen(), None, "nothing has changed");
        fixture.cgroup(2);
        assert_eq!(fixture.seen().expect("b is new"), ["a", "b"]);
        // A status that changes no fact counts as unchanged.
        fixture
            .pods
            .apply(Event::Apply(pod("a", &uid(1), "Running")));
        assert_eq!(fixture.seen(), None);
        fixture
            .pods
            .apply(Event::Apply(pod("a", &uid(1), "Succeeded")));
        assert_eq!(fixture.seen().expect("a has finished"), ["b"]);
        fixture
            .pods
            .apply(Event::Delete(pod("b", &uid(2), "Running")));
        assert_eq!(fixture.seen().expect("b is deleted"), [""; 0]);
    }

    #[test]
    fn pods_that_are_bound_after_the_first_list_are_counted() {
        let mut pods = Fixture::new().pods;
        let list = |pods: &mut NodePods, numbers: &[u8]| {
            pods.apply(Event::Init);
            for number in numbers {
                pods.apply(Event::InitApply(pod("a", &uid(*number), "Pending")));
            }
            pods.apply(Event::InitDone);
        };
        list(&mut pods, &[1, 2]);
        assert_eq!(pods.bound(), 0);
        for phase in ["Pending", "Running"] {
            pods.apply(Event::Apply(pod("b", &uid(3), phase)));
            assert_eq!(pods.bound(), 1, "{phase}");
        }
        // After the watch was lost.
        list(&mut pods, &[1, 3, 4]);
        assert_eq!(pods.bound(), 2);
    }

    #[test]
    fn a_bound_pod_is_pending_until_its_cgroup_exists() {
        let mut fixture = Fixture::new();
        let pending = |fixture: &Fixture| -> Vec<String> {
            let pods = fixture.pods.pending();
            pods.iter().map(|pod| pod.name.clone()).collect()
        };
        for (name, number, phase) in [
            ("bound", 1, "Pending"),
            ("lost", 2, "Running"),
            ("failed", 3, "Failed"),
        ] {
            let pod = pod(name, &uid(number), phase);
            fixture.pods.apply(Event::Apply(pod));
        }
        assert_eq!(fixture.seen().expect("changed"), [""; 0]);
        assert_eq!(pending(&fixture), ["bound"]);
        fixture.cgroup(1);
        assert_eq!(fixture.seen().expect("changed"), ["bound"]);
        assert_eq!(pending(&fixture), [""; 0]);
    }

    #[test]
    fn a_pod_missing_from_a_new_list_is_removed() {
        let mut fixture = Fixture::new();
        fixture.cgroup(1);
        fixture.cgroup(2);
        for names in [&[("a", 1), ("b", 2)][..], &[("b", 2)]] {
            fixture.pods.apply(Event::Init);
            for (name, number) in names {
                fixture
                    .pods
                    .apply(Event::InitApply(pod(name, &uid(*number), "Running")));
            }
            // No pod is removed until the list is complete.
            fixture.pods.apply(Event::InitDone);
            assert_eq!(fixture.seen().expect("changed").len(), names.len());
        }
    }

    #[test]
    fn the_agents_own_pod_is_protected() {
        let mut fixture = Fixture::new();
        fixture.cgroup(1);
        fixture
            .pods
            .apply(Event::Apply(pod("own", &uid(1), "Running")));
        let workloads = fixture.pods.refresh(&mut fixture.locator).expect("changed");
        assert!(workloads[0].pod.protected);
    }
}
