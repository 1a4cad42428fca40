//! `--pods FILE|DIR`: ordinary `v1` Pod manifests, whose annotation `plimsoll.dev/cgroup` names the cgroup.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use super::{Declared, PodScan, overlap};
use crate::crd::manifest::Position;
use crate::crd::pod_facts::{PodObject, annotation, pod_facts};
use crate::engine::pod::{Pod, PodUid};
use crate::messages::event::PodRefusal;
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::machine::workload::{Workload, inode};
use crate::standalone::manifest;
use crate::standalone::sources::absolute;

/// The pod's cgroup, relative to the cgroup root.
pub const CGROUP_ANNOTATION: &str = "plimsoll.dev/cgroup";

/// Pods as declared by manifests, before their cgroups are resolved.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifests {
    drafts: Vec<Draft>,
    refused: Vec<PodRefusal>,
}

/// One usable manifest.
#[derive(Clone, Debug, PartialEq)]
struct Draft {
    location: Location,
    pod: Pod,
    /// The manifest gives a UID.
    has_uid: bool,
    cgroup: CgroupPath,
    /// The required inode of its cgroup, if the pod stays as it was declared before.
    inode: Option<u64>,
}

/// Where an object is.
#[derive(Clone, Debug, PartialEq)]
struct Location {
    file: PathBuf,
    position: Position,
}

impl Location {
    fn new(file: &Path, position: Position) -> Self {
        Self {
            file: file.to_owned(),
            position,
        }
    }
}

impl Manifests {
    /// Reads `paths`: files as they are, and the `*.yaml`, `*.yml`, `*.json` of directories.
    pub fn read(paths: &[PathBuf]) -> Self {
        let mut manifests = Self::default();
        manifest::read(paths, |file, object| match object {
            Ok(object) => {
                let location = Location::new(file, object.positions.of(""));
                manifests.add(&location, object.value);
            }
            Err(parse_error) => manifests.refuse(
                &Location::new(file, parse_error.position),
                None,
                parse_error.to_string(),
            ),
        });
        manifests
    }

    /// Adds the object if it is a pod. Our own policy kinds are skipped.
    fn add(&mut self, location: &Location, object: Value) {
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
            draft(location, object)
        } else {
            Err(format!(
                "a `{kind}` of `{api}`, but a `Pod` of `v1` is expected"
            ))
        };
        match draft {
            Ok(draft) => self.drafts.push(draft),
            Err(reason) => self.refuse(location, name, reason),
        }
    }

    fn refuse(&mut self, location: &Location, pod: Option<String>, reason: String) {
        self.refused.push(refusal(location, pod, reason));
    }

    /// Keeps managed pods whose manifest is broken now as they were declared before.
    pub fn keep_former(&mut self, former: &[Declared]) {
        for Declared { manifest, workload } in former {
            let Some(file) = manifest else { continue };
            let name = workload.pod.full_name().to_string();
            if self.drafts.iter().any(|draft| draft.is_of(&workload.pod)) {
                continue;
            }
            let mut may_be_hidden = false;
            for refusal in self
                .refused
                .iter_mut()
                .filter(|it| may_hide(it, file, &name))
            {
                let reason = &refusal.reason;
                refusal.reason = format!("{reason}; the former {name} stays managed");
                may_be_hidden = true;
            }
            if may_be_hidden {
                self.drafts.push(Draft::of_former(file, workload));
            }
        }
    }

    /// Resolves the cgroup of each pod.
    pub(super) fn resolve(&self, hierarchy: &Hierarchy, found: &mut PodScan) {
        found.refused.extend_from_slice(&self.refused);
        for draft in &self.drafts {
            let workload = draft.resolve(hierarchy);
            match workload.and_then(|workload| check_overlap(workload, &found.workloads)) {
                Ok(workload) => {
                    let file = absolute(&draft.location.file);
                    found.manifests.insert(workload.pod.uid.clone(), file);
                    found.workloads.push(workload);
                }
                Err(reason) => {
                    let name = draft.pod.full_name().to_string();
                    found
                        .refused
                        .push(refusal(&draft.location, Some(name), reason));
                }
            }
        }
    }
}

impl Draft {
    fn of_former(file: &Path, workload: &Workload) -> Self {
        Self {
            location: Location::new(file, Position::default()),
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
            return Err("its cgroup was created again, and its manifest is broken".to_owned());
        }
        let mut pod = self.pod.clone();
        if !self.has_uid {
            // A cgroup that was created again is another pod.
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

fn draft(location: &Location, object: Value) -> Result<Draft, String> {
    let manifest = PodObject::deserialize(object).map_err(|error| format!("not a Pod: {error}"))?;
    let mut pod = pod_facts(&manifest).map_err(|error| error.to_string())?;
    if manifest
        .spec
        .is_none_or(|spec| spec.containers.is_none_or(|all| all.is_empty()))
    {
        return Err("not a Pod: no spec.containers".to_owned());
    }
    // A manifest without a status: the pod runs if its cgroup exists.
    pod.running |= manifest.status.and_then(|status| status.phase).is_none();
    let cgroup = annotation(&manifest.metadata, CGROUP_ANNOTATION).ok_or_else(|| {
        format!(
            "no annotation `{CGROUP_ANNOTATION}`: set it to the pod's cgroup, relative to the cgroup root"
        )
    })?;
    let cgroup = CgroupPath::new(cgroup)
        .map_err(|error| format!("annotation `{CGROUP_ANNOTATION}`: {error}"))?;
    Ok(Draft {
        location: location.clone(),
        pod,
        has_uid: manifest.metadata.uid.is_some(),
        cgroup,
        inode: None,
    })
}

/// Whether the refused object may be the pod `name` of `file`.
fn may_hide(refusal: &PodRefusal, file: &Path, name: &str) -> bool {
    let path = absolute(Path::new(&refusal.location));
    file.starts_with(path) && refusal.pod.as_ref().is_none_or(|pod| pod == name)
}

/// Two pods cannot share processes: their throttles would conflict.
fn check_overlap(workload: Workload, known: &[Workload]) -> Result<Workload, String> {
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

fn refusal(location: &Location, pod: Option<String>, reason: String) -> PodRefusal {
    PodRefusal {
        location: location.file.display().to_string(),
        position: location.position,
        pod,
        reason,
    }
}

#[cfg(test)]
mod tests;
