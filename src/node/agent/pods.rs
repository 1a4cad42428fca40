//! The pods of this node: as the API server tells them, with the cgroups that are found for them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::runtime::watcher::Event;
use kube::{Resource, ResourceExt};

use super::objects::{self, Owner, SeenPod};
use super::place::Place;
use crate::engine::pod::PodUid;
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
pub struct Pods {
    /// By UID.
    known: BTreeMap<String, Known>,
    /// While they are listed anew: those that were listed.
    listed: Option<BTreeSet<String>>,
    complete: bool,
    own: Option<PodRef>,
    changed: bool,
}

#[derive(Debug)]
struct Known {
    seen: SeenPod,
    found: Option<(CgroupPath, u64)>,
    /// Its cgroup has to be looked for.
    look: bool,
}

impl Pods {
    /// None yet. `own` is the agent's own pod, which is never acted on.
    pub fn new(own: Option<PodRef>) -> Self {
        Self {
            own,
            ..Self::default()
        }
    }

    /// Takes a change.
    pub fn take(&mut self, event: Event<SeenPod>) {
        match event {
            Event::Init => self.listed = Some(BTreeSet::new()),
            Event::InitApply(pod) => {
                if let Some(listed) = &mut self.listed {
                    listed.insert(objects::uid(&pod).to_owned());
                }
                self.apply(pod);
            }
            Event::InitDone => {
                let listed = self.listed.take().unwrap_or_default();
                let before = self.known.len();
                self.known.retain(|uid, _| listed.contains(uid));
                self.changed |= self.known.len() != before || !self.complete;
                self.complete = true;
            }
            Event::Apply(pod) => self.apply(pod),
            Event::Delete(pod) => {
                self.changed |= self.known.remove(objects::uid(&pod)).is_some();
            }
        }
    }

    fn apply(&mut self, mut seen: SeenPod) {
        let own = self.is_own(&seen);
        let uid = objects::uid(&seen).to_owned();
        let name = seen.name_any();
        match &mut seen.facts {
            Ok(facts) if own => Arc::make_mut(facts).protected = true,
            Ok(_) => {}
            Err(why) => tracing::warn!(pod = name, %why, "this pod is left alone"),
        }
        let before = self.known.remove(&uid);
        let found = before.as_ref().and_then(|known| known.found.clone());
        let same = before.is_some_and(|known| {
            let known = known.seen;
            known.facts == seen.facts
                && known.containers == seen.containers
                && known.finished == seen.finished
        });
        self.changed |= !same;
        // It may have got its cgroup just now, or another one.
        let known = Known {
            look: !seen.finished,
            seen,
            found,
        };
        self.known.insert(uid, known);
    }

    fn is_own(&self, pod: &SeenPod) -> bool {
        let own = self.own.as_ref();
        own.is_some_and(|own| {
            pod.meta().name.as_ref() == Some(&own.name)
                && pod.meta().namespace.as_ref() == Some(&own.namespace)
        })
    }

    /// Whether the pod is there, whatever its state.
    pub fn has(&self, uid: &PodUid) -> bool {
        self.known.contains_key(&*uid.0)
    }

    /// All pods of the node have been seen.
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

    /// Looks for the cgroups of those that are new or were not found yet. The pods with their cgroups, where anything
    /// has changed since the last call.
    pub fn refresh(&mut self, place: &mut Place) -> Option<Vec<Workload>> {
        for known in self.known.values_mut() {
            self.changed |= known.look && known.find(place);
        }
        std::mem::take(&mut self.changed).then(|| self.workloads())
    }

    /// The next [`Self::refresh`] gives all pods anew.
    pub const fn again(&mut self) {
        self.changed = true;
    }

    fn workloads(&self) -> Vec<Workload> {
        self.known.values().filter_map(Known::workload).collect()
    }
}

impl Known {
    /// Looks for the cgroup; true where it is not the one that was known.
    fn find(&mut self, place: &mut Place) -> bool {
        let Ok(facts) = &self.seen.facts else {
            self.look = false;
            return false;
        };
        let found = place.find(&self.seen.cgroup_uid, facts.qos);
        self.look = found.is_none();
        let changed = found != self.found;
        self.found = found;
        changed
    }

    fn workload(&self) -> Option<Workload> {
        let facts = self.seen.facts.as_ref().ok()?;
        let (cgroup, inode) = self.found.clone()?;
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

    struct Bench {
        dir: tempfile::TempDir,
        place: Place,
        pods: Pods,
    }

    impl Bench {
        fn new() -> Self {
            let dir = tempfile::tempdir().expect("a temp dir");
            let root = dir.path().to_owned();
            let place = Place::new(Hierarchy::V2 { root }, None);
            let own = PodRef {
                namespace: "default".to_owned(),
                name: "own".to_owned(),
            };
            let pods = Pods::new(Some(own));
            Self { dir, place, pods }
        }

        fn cgroup(&self, number: u8) {
            let path = format!("kubepods/besteffort/pod{}", uid(number));
            fs::create_dir_all(self.dir.path().join(path)).expect("a cgroup");
        }

        fn seen(&mut self) -> Option<Vec<String>> {
            names(self.pods.refresh(&mut self.place))
        }
    }

    #[test]
    fn a_pod_counts_from_when_its_cgroup_is_there() {
        let mut bench = Bench::new();
        bench.cgroup(1);
        bench.pods.take(Event::Init);
        bench
            .pods
            .take(Event::InitApply(pod("a", &uid(1), "Running")));
        bench
            .pods
            .take(Event::InitApply(pod("b", &uid(2), "Pending")));
        assert!(!bench.pods.are_complete());
        bench.pods.take(Event::InitDone);
        assert!(bench.pods.are_complete());
        assert_eq!(bench.seen().expect("changed"), ["a"]);
        assert_eq!(bench.seen(), None, "nothing has changed");
        bench.cgroup(2);
        assert_eq!(bench.seen().expect("b came"), ["a", "b"]);
        // A status that changes no fact is no change.
        bench.pods.take(Event::Apply(pod("a", &uid(1), "Running")));
        assert_eq!(bench.seen(), None);
        bench
            .pods
            .take(Event::Apply(pod("a", &uid(1), "Succeeded")));
        assert_eq!(bench.seen().expect("a ended"), ["b"]);
        bench.pods.take(Event::Delete(pod("b", &uid(2), "Running")));
        assert_eq!(bench.seen().expect("b went"), [""; 0]);
    }

    #[test]
    fn what_is_not_listed_again_is_gone() {
        let mut bench = Bench::new();
        bench.cgroup(1);
        bench.cgroup(2);
        for names in [&[("a", 1), ("b", 2)][..], &[("b", 2)]] {
            bench.pods.take(Event::Init);
            for (name, number) in names {
                bench
                    .pods
                    .take(Event::InitApply(pod(name, &uid(*number), "Running")));
            }
            // Until all are listed nobody is taken for gone.
            bench.pods.take(Event::InitDone);
            assert_eq!(bench.seen().expect("changed").len(), names.len());
        }
    }

    #[test]
    fn the_agents_own_pod_is_protected() {
        let mut bench = Bench::new();
        bench.cgroup(1);
        bench
            .pods
            .take(Event::Apply(pod("own", &uid(1), "Running")));
        let workloads = bench.pods.refresh(&mut bench.place).expect("changed");
        assert!(workloads[0].pod.protected);
    }
}
