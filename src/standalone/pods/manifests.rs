//! `--pods FILE|DIR`: ordinary `v1` Pod manifests, whose annotation `plimsoll.dev/cgroup` names the cgroup.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use k8s_openapi::api::core::v1 as k8s;
use serde::Deserialize;
use serde_json::Value;

use super::{Found, Refusal, Workload, inode, overlap};
use crate::engine::pod::{Pod, PodUid};
use crate::node::cgroup::{CgroupPath, Hierarchy};
use crate::node::pod_facts::{annotation, pod_facts};

/// Names the pod's cgroup, relative to the cgroup root.
pub const CGROUP_ANNOTATION: &str = "plimsoll.dev/cgroup";

/// A manifest larger than this is not read: it is something else.
const MAX_BYTES: u64 = 16 << 20;

/// Pods as manifests declare them, before anyone has looked for their cgroups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Manifests {
    drafts: Vec<Draft>,
    refused: Vec<Refusal>,
}

/// One usable manifest.
#[derive(Clone, Debug, PartialEq)]
struct Draft {
    file: PathBuf,
    line: usize,
    pod: Pod,
    /// The manifest gives a UID.
    has_uid: bool,
    cgroup: CgroupPath,
}

impl Manifests {
    /// Reads `paths`: files as they are, and the `*.yaml`, `*.yml`, `*.json` of folders.
    pub fn read(paths: &[PathBuf]) -> Self {
        let mut manifests = Self::default();
        for path in paths {
            match expand(path) {
                Ok(files) => files.iter().for_each(|file| manifests.load(file)),
                Err(error) => manifests.refuse(path, 0, None, format!("failed to read: {error}")),
            }
        }
        manifests
    }

    fn load(&mut self, path: &Path) {
        let text = match read(path) {
            Ok(text) => text,
            Err(reason) => return self.refuse(path, 0, None, reason),
        };
        for (line, document) in documents(&text) {
            match objects(document) {
                Ok(objects) => {
                    for object in objects {
                        self.take(path, line, object);
                    }
                }
                Err(reason) => self.refuse(path, line, None, reason),
            }
        }
    }

    /// Adds one object where it is a pod. Our own policy kinds may lie in the same file and are passed over.
    fn take(&mut self, path: &Path, line: usize, object: Value) {
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
            draft(path, line, object)
        } else {
            Err(format!(
                "a `{kind}` of `{api}`, where a `Pod` of `v1` is wanted"
            ))
        };
        match draft {
            Ok(draft) => self.drafts.push(draft),
            Err(reason) => self.refuse(path, line, name, reason),
        }
    }

    fn refuse(&mut self, path: &Path, line: usize, pod: Option<String>, reason: String) {
        self.refused.push(refusal(path, line, pod, reason));
    }

    /// Finds the cgroup of each.
    pub(super) fn resolve(&self, hierarchy: &Hierarchy, found: &mut Found) {
        found.refused.extend_from_slice(&self.refused);
        for draft in &self.drafts {
            let workload = draft.resolve(hierarchy);
            match workload.and_then(|workload| alone(workload, &found.workloads)) {
                Ok(workload) => found.workloads.push(workload),
                Err(reason) => {
                    let name = draft.pod.full_name().to_string();
                    found
                        .refused
                        .push(refusal(&draft.file, draft.line, Some(name), reason));
                }
            }
        }
    }
}

impl Draft {
    fn resolve(&self, hierarchy: &Hierarchy) -> Result<Workload, String> {
        let inode = inode(hierarchy, &self.cgroup).map_err(|error| error.to_string())?;
        let mut pod = self.pod.clone();
        if !self.has_uid {
            // A cgroup that was made anew is another pod.
            pod.uid = PodUid::from(format!("{}@{inode}", pod.uid).as_str());
        }
        Ok(Workload {
            pod: Arc::new(pod),
            cgroup: self.cgroup.clone(),
        })
    }
}

/// The files that `path` stands for.
///
/// # Errors
/// Where a folder cannot be listed, or nothing is there.
pub(crate) fn expand(path: &Path) -> io::Result<Vec<PathBuf>> {
    if !fs::metadata(path)?.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let mut files = Vec::new();
    for entry in fs::read_dir(path)? {
        let file = entry?.path();
        let extension = file.extension().and_then(|extension| extension.to_str());
        if matches!(extension, Some("yaml" | "yml" | "json")) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<String, String> {
    let failed = |error: io::Error| format!("failed to read: {error}");
    let file = fs::File::open(path).map_err(failed)?;
    let mut text = String::new();
    let read = file.take(MAX_BYTES + 1).read_to_string(&mut text);
    let bytes = read.map_err(failed)?;
    if bytes as u64 > MAX_BYTES {
        return Err(format!("larger than {} MiB: split it", MAX_BYTES >> 20));
    }
    Ok(text)
}

/// The documents of a YAML stream with the line that each starts at. Taken apart by hand, so that a syntax error in
/// one document leaves the others readable.
fn documents(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut first_line, mut offset) = (0, 1, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let bare = line.trim_end();
        if bare == "---" || bare.starts_with("--- ") {
            documents.push((first_line, &text[start..offset]));
            (start, first_line) = (offset + 3, number + 1);
        }
        offset += line.len();
    }
    documents.push((first_line, &text[start..]));
    documents
}

/// The objects of a document: itself, or the items of a list. An empty document has none.
fn objects(document: &str) -> Result<Vec<Value>, String> {
    let blank = |line: &str| line.trim().is_empty() || line.trim_start().starts_with('#');
    if document.lines().all(blank) {
        return Ok(Vec::new());
    }
    let value: Value = serde_saphyr::from_str(document)
        .map_err(|error| format!("not a YAML object: {}", first_line(&error.to_string())))?;
    match value {
        Value::Null => Ok(Vec::new()),
        Value::Object(mut object) if is_list(&object) => match object.remove("items") {
            Some(Value::Array(items)) => Ok(items),
            _ => Ok(Vec::new()),
        },
        object @ Value::Object(_) => Ok(vec![object]),
        _ => Err("not a YAML object".to_owned()),
    }
}

fn is_list(object: &serde_json::Map<String, Value>) -> bool {
    let kind = object.get("kind").and_then(Value::as_str);
    matches!(kind, Some("List" | "PodList"))
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

fn draft(file: &Path, line: usize, object: Value) -> Result<Draft, String> {
    let manifest = k8s::Pod::deserialize(object).map_err(|error| format!("not a Pod: {error}"))?;
    let mut pod = pod_facts(&manifest).map_err(|error| error.to_string())?;
    if manifest.spec.is_none_or(|spec| spec.containers.is_empty()) {
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
        file: file.to_owned(),
        line,
        pod,
        has_uid: manifest.metadata.uid.is_some(),
        cgroup,
    })
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

fn refusal(path: &Path, line: usize, pod: Option<String>, reason: String) -> Refusal {
    Refusal {
        place: path.display().to_string(),
        line,
        pod,
        reason,
    }
}

#[cfg(test)]
mod tests;
