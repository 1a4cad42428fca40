//! The cgroups that the kubelet creates: from a pod to its cgroup's name, and back.
//!
//! | driver | Guaranteed | Burstable (`BestEffort` likewise) |
//! |---|---|---|
//! | cgroupfs | `kubepods/pod<uid>` | `kubepods/burstable/pod<uid>` |
//! | systemd | `kubepods.slice/kubepods-pod<uid>.slice` | `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice` |
//!
//! A kubelet's `cgroupRoot` comes before `kubepods`. Under systemd, where `-` separates a slice from its parent,
//! each `-` within a part is written `_`. A pod's containers and its sandbox (`pause`) are below the pod.

use std::fs;
use std::io;
use std::path::Path;

use super::{CgroupPath, CgroupPathError, Controller, Hierarchy};
use crate::engine::pod::{PodUid, QosClass};

/// The cgroup driver, which determines the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Driver {
    /// The kubelet and the container runtime create the cgroups.
    Cgroupfs,
    /// systemd creates them as slices and scopes.
    Systemd,
}

/// A pod as identified by its cgroup's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupPodName {
    /// Quality-of-service class.
    pub qos: QosClass,
    /// UID; for a static pod, the hash that the kubelet gave it.
    pub uid: PodUid,
}

/// The cgroup of a pod. `cgroup_root` is the kubelet's setting, such as `/` or `/custom`.
///
/// # Errors
/// If `cgroup_root` or the UID cannot be part of a path.
pub fn pod_cgroup(
    driver: Driver,
    cgroup_root: &str,
    pod: &CgroupPodName,
) -> Result<CgroupPath, CgroupPathError> {
    let pod_part = format!("pod{}", pod.uid);
    let mut parts: Vec<&str> = cgroup_root
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    parts.push("kubepods");
    parts.extend(class_part(pod.qos));
    parts.push(&pod_part);
    CgroupPath::new(&match driver {
        Driver::Cgroupfs => parts.join("/"),
        Driver::Systemd => slices(&parts),
    })
}

/// The pod whose cgroup this is, for either driver; `None` if it is not a pod's cgroup.
pub fn parse_pod_cgroup(cgroup: &CgroupPath) -> Option<CgroupPodName> {
    let (parent, last) = cgroup.as_str().rsplit_once('/')?;
    match last.strip_suffix(".slice") {
        Some(slice) => parse_slice(slice),
        None => parse_directory(parent, last),
    }
}

fn parse_slice(slice: &str) -> Option<CgroupPodName> {
    let parts: Vec<&str> = slice.split('-').collect();
    let (pod, above) = parts.split_last()?;
    Some(CgroupPodName {
        qos: class_of(above.iter().rev().copied())?,
        uid: uid(&pod.strip_prefix("pod")?.replace('_', "-"))?,
    })
}

fn parse_directory(parent: &str, directory: &str) -> Option<CgroupPodName> {
    Some(CgroupPodName {
        qos: class_of(parent.rsplit('/'))?,
        uid: uid(directory.strip_prefix("pod")?)?,
    })
}

/// The service class from the parts above a pod, nearest first.
fn class_of<'a>(mut above: impl Iterator<Item = &'a str>) -> Option<QosClass> {
    let nearest = above.next()?;
    let class = match nearest {
        "kubepods" => return Some(QosClass::Guaranteed),
        "burstable" => QosClass::Burstable,
        "besteffort" => QosClass::BestEffort,
        _ => return None,
    };
    (above.next()? == "kubepods").then_some(class)
}

const fn class_part(qos: QosClass) -> Option<&'static str> {
    match qos {
        QosClass::Guaranteed => None,
        QosClass::Burstable => Some("burstable"),
        QosClass::BestEffort => Some("besteffort"),
    }
}

/// A UUID, or the 32 hexadecimal digits of a static pod.
fn uid(text: &str) -> Option<PodUid> {
    let dashes: Vec<usize> = text.match_indices('-').map(|(index, _)| index).collect();
    let hex = text
        .bytes()
        .all(|byte| byte == b'-' || byte.is_ascii_hexdigit());
    let shaped = match text.len() {
        36 => dashes == [8, 13, 18, 23],
        32 => dashes.is_empty(),
        _ => false,
    };
    (hex && shaped).then(|| text.into())
}

/// Each part's slice inside the one before it: `a.slice/a-b.slice`.
fn slices(parts: &[&str]) -> String {
    let mut path = String::new();
    let mut name = String::new();
    for part in parts {
        if !name.is_empty() {
            name.push('-');
            path.push('/');
        }
        name.push_str(&part.replace('-', "_"));
        path.push_str(&name);
        path.push_str(".slice");
    }
    path
}

/// The container (or sandbox) whose cgroup directory has this name: a bare id as the cgroupfs driver names it, or a
/// scope such as `cri-containerd-<id>.scope`, `crio-<id>.scope`, `docker-<id>.scope`.
pub fn container_id(directory: &str) -> Option<&str> {
    let id = match directory.strip_suffix(".scope") {
        Some(scope) => {
            let (runtime, id) = scope.rsplit_once('-').unwrap_or(("", scope));
            // `crio-conmon-<id>.scope` holds the container's monitor.
            (!runtime.ends_with("conmon")).then_some(id)?
        }
        None => directory,
    };
    let long_enough = (12..=64).contains(&id.len());
    (long_enough && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

/// A pod's cgroup that was found on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundPod {
    /// Which pod.
    pub name: CgroupPodName,
    /// Its cgroup.
    pub cgroup: CgroupPath,
    /// The directories of its containers, its sandbox among them, sorted.
    pub containers: Vec<String>,
}

/// The existing pod cgroups below the kubelet's `cgroup_root`, for either driver, sorted by path. Cgroups that
/// vanish during the scan are left out.
///
/// # Errors
/// If an existing directory cannot be listed, or `cgroup_root` cannot be part of a path.
pub fn scan(hierarchy: &Hierarchy, cgroup_root: &str) -> Result<Vec<FoundPod>, ScanError> {
    let mut found = Vec::new();
    for driver in [Driver::Cgroupfs, Driver::Systemd] {
        for qos in [
            QosClass::Guaranteed,
            QosClass::Burstable,
            QosClass::BestEffort,
        ] {
            scan_class(
                hierarchy,
                &class_cgroup(driver, cgroup_root, qos)?,
                &mut found,
            )?;
        }
    }
    found.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
    Ok(found)
}

/// Why a scan failed.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    /// The kubelet's `cgroupRoot` is not a valid path.
    #[error(transparent)]
    Path(#[from] CgroupPathError),
    /// A directory could not be listed.
    #[error("failed to list the cgroups in {path}: {source}")]
    List {
        /// The directory.
        path: std::path::PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The cgroup that contains all pods of a kubelet whose `cgroupRoot` is `cgroup_root`.
///
/// # Errors
/// If `cgroup_root` cannot be part of a path.
pub fn kubepods(driver: Driver, cgroup_root: &str) -> Result<CgroupPath, CgroupPathError> {
    class_cgroup(driver, cgroup_root, QosClass::Guaranteed)
}

/// The cgroup that contains the pods of a service class.
fn class_cgroup(
    driver: Driver,
    cgroup_root: &str,
    qos: QosClass,
) -> Result<CgroupPath, CgroupPathError> {
    let mut parts: Vec<&str> = cgroup_root
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    parts.push("kubepods");
    parts.extend(class_part(qos));
    CgroupPath::new(&match driver {
        Driver::Cgroupfs => parts.join("/"),
        Driver::Systemd => slices(&parts),
    })
}

fn scan_class(
    hierarchy: &Hierarchy,
    class: &CgroupPath,
    found: &mut Vec<FoundPod>,
) -> Result<(), ScanError> {
    let Some(directory) = hierarchy.dir(Controller::Cpu, class) else {
        return Ok(());
    };
    for name in directories(&directory)? {
        let cgroup = class.join(&name)?;
        let Some(pod) = parse_pod_cgroup(&cgroup) else {
            continue;
        };
        let mut containers = directories(&directory.join(&name))?;
        containers.retain(|name| container_id(name).is_some());
        found.push(FoundPod {
            name: pod,
            cgroup,
            containers,
        });
    }
    Ok(())
}

/// The names of the directories in `path`, sorted; empty if it does not exist.
fn directories(path: &Path) -> Result<Vec<String>, ScanError> {
    child_directories(path).map_err(|source| ScanError::List {
        path: path.to_owned(),
        source,
    })
}

/// The names of the cgroups directly below a cgroup's directory, sorted; empty if it does not exist (any more).
///
/// # Errors
/// If the directory exists but cannot be listed.
pub fn child_directories(path: &Path) -> io::Result<Vec<String>> {
    let entries = match fs::read_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut names: Vec<String> = entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    names.sort();
    Ok(names)
}
