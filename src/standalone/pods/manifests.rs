//! `--pods FILE|DIR`: ordinary `v1` Pod manifests, whose annotation `plimsoll.dev/cgroup` names the cgroup.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::{Declared, Found, overlap};
use crate::crd::pod_facts::{PodObject, annotation, pod_facts};
use crate::engine::pod::{Pod, PodUid};
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::machine::event::Refusal;
use crate::node::machine::workload::{Workload, inode};
use crate::standalone::manifest;
use crate::standalone::sources::absolute;

/// Names the pod's cgroup, relative to the cgroup root.
pub const CGROUP_ANNOTATION: &str = "plimsoll.dev/cgroup";

/// Pods as manifests declare them, before anyone has looked for their cgroups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifests {
    drafts: Vec<Draft>,
    refused: Vec<Refusal>,
}

/// One usable manifest.
#[derive(Clone, Debug, PartialEq)]
struct Draft {
    place: Place,
    pod: Pod,
    /// The manifest gives a UID.
    has_uid: bool,
    cgroup: CgroupPath,
    /// The inode that its cgroup has to have: it is held from before.
    inode: Option<u64>,
}

/// Where an object stands: its file and line.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    file: PathBuf,
    line: usize,
}

impl Place {
    fn new(file: &Path, line: usize) -> Self {
        Self {
            file: file.to_owned(),
            line,
        }
    }
}

impl Manifests {
    /// Reads `paths`: files as they are, and the `*.yaml`, `*.yml`, `*.json` of folders.
    pub fn read(paths: &[PathBuf]) -> Self {
        let mut manifests = Self::default();
        manifest::read(paths, |file, object| match object {
            Ok(object) => {
                let place = Place::new(file, object.lines.line(""));
                manifests.take(&place, object.value);
            }
            Err(flaw) => manifests.refuse(&Place::new(file, flaw.line), None, flaw.message),
        });
        manifests
    }

    /// Adds one object where it is a pod. Our own policy kinds may lie in the same file and are passed over.
    fn take(&mut self, place: &Place, object: Value) {
        let text = |pointer: &str| object.pointer(pointer).and_then(Value::as_str);
        let api = text("/apiVersion").unwrap_or_default();
        if api.starts_with("ensurance.crane.io/") {
            return;
        }
        let name = text("/metadata/name").map(|name| {
            let namespace = text("/metadata/namespace").unwrap_or("default");
            format!("{namespace}/{name}")
        });
        let kind = text("/kind").unwrap_or_default();
        let draft = if (api, kind) == ("v1", "Pod") {
            draft(place, object)
        } else {
            Err(format!(
                "a `{kind}` of `{api}`, where a `Pod` of `v1` is wanted"
            ))
        };
        match draft {
            Ok(draft) => self.drafts.push(draft),
            Err(reason) => self.refuse(place, name, reason),
        }
    }

    fn refuse(&mut self, place: &Place, pod: Option<String>, reason: String) {
        self.refused.push(refusal(place, pod, reason));
    }

    /// Pods that were looked after, and whose manifest has turned broken, go on as they were declared before.
    pub fn hold(&mut self, former: &[Declared]) {
        for Declared { manifest, workload } in former {
            let Some(file) = manifest else { continue };
            let name = workload.pod.full_name().to_string();
            if self.drafts.iter().any(|draft| draft.is_of(&workload.pod)) {
                continue;
            }
            let mut held = false;
            for refusal in self
                .refused
                .iter_mut()
                .filter(|it| may_hide(it, file, &name))
            {
                let reason = &refusal.reason;
                refusal.reason = format!("{reason}; {name} as it was stays looked after");
                held = true;
            }
            if held {
                self.drafts.push(Draft::held(file, workload));
            }
        }
    }

    /// Finds the cgroup of each.
    pub(super) fn resolve(&self, hierarchy: &Hierarchy, found: &mut Found) {
        found.refused.extend_from_slice(&self.refused);
        for draft in &self.drafts {
            let workload = draft.resolve(hierarchy);
            match workload.and_then(|workload| alone(workload, &found.workloads)) {
                Ok(workload) => {
                    let file = absolute(&draft.place.file);
                    found.manifests.insert(workload.pod.uid.clone(), file);
                    found.workloads.push(workload);
                }
                Err(reason) => {
                    let name = draft.pod.full_name().to_string();
                    found
                        .refused
                        .push(refusal(&draft.place, Some(name), reason));
                }
            }
        }
    }
}

impl Draft {
    fn held(file: &Path, workload: &Workload) -> Self {
        Self {
            place: Place::new(file, 0),
            pod: (*workload.pod).clone(),
            has_uid: true,
            cgroup: workload.cgroup.clone(),
            inode: Some(workload.inode),
        }
    }

    fn is_of(&self, pod: &Pod) -> bool {
        self.pod.uid == pod.uid
            || (self.pod.namespace == pod.namespace && self.pod.name == pod.name)
    }

    fn resolve(&self, hierarchy: &Hierarchy) -> Result<Workload, String> {
        let inode = inode(hierarchy, &self.cgroup).map_err(|error| error.to_string())?;
        if self.inode.is_some_and(|known| known != inode) {
            return Err("its cgroup was made anew, and its manifest cannot be used".to_owned());
        }
        let mut pod = self.pod.clone();
        if !self.has_uid {
            // A cgroup that was made anew is another pod.
            pod.uid = PodUid::from(format!("{}@{inode}", pod.uid).as_str());
        }
        Ok(Workload {
            pod: Arc::new(pod),
            cgroup: self.cgroup.clone(),
            inode,
            containers: None,
        })
    }
}

fn draft(place: &Place, object: Value) -> Result<Draft, String> {
    let manifest = PodObject::deserialize(object).map_err(|error| format!("not a Pod: {error}"))?;
    let mut pod = pod_facts(&manifest).map_err(|error| error.to_string())?;
    if manifest
        .spec
        .is_none_or(|spec| spec.containers.is_none_or(|all| all.is_empty()))
    {
        return Err("not a Pod: no spec.containers".to_owned());
    }
    // A manifest says what shall run; that its cgroup is there says that it does.
    pod.running |= manifest.status.and_then(|status| status.phase).is_none();
    let cgroup = annotation(&manifest.metadata, CGROUP_ANNOTATION).ok_or_else(|| {
        format!(
            "no annotation `{CGROUP_ANNOTATION}`: let it name the pod's cgroup, relative to the cgroup root"
        )
    })?;
    let cgroup = CgroupPath::new(cgroup)
        .map_err(|error| format!("annotation `{CGROUP_ANNOTATION}`: {error}"))?;
    Ok(Draft {
        place: place.clone(),
        pod,
        has_uid: manifest.metadata.uid.is_some(),
        cgroup,
        inode: None,
    })
}

/// Whether the pod `name` of `file` may be what was refused.
fn may_hide(refusal: &Refusal, file: &Path, name: &str) -> bool {
    let place = absolute(Path::new(&refusal.place));
    file.starts_with(place) && refusal.pod.as_ref().is_none_or(|pod| pod == name)
}

/// Two pods cannot share processes: their throttles would get into each other's way.
fn alone(workload: Workload, known: &[Workload]) -> Result<Workload, String> {
    for other in known {
        let name = other.pod.full_name();
        if other.pod.uid == workload.pod.uid {
            return Err(format!("its UID or name is already that of pod {name}"));
        }
        if overlap(&other.cgroup, &workload.cgroup) {
            return Err(format!(
                "its cgroup `{}` overlaps `{}` of pod {name}: give each pod a cgroup of its own",
                workload.cgroup, other.cgroup
            ));
        }
    }
    Ok(workload)
}

fn refusal(place: &Place, pod: Option<String>, reason: String) -> Refusal {
    Refusal {
        place: place.file.display().to_string(),
        line: place.line,
        pod,
        reason,
    }
}

#[cfg(test)]
mod tests;
