//! `--pods-under PARENT`: every child cgroup of `PARENT` counts as a pod.
//!
//! | fact | value |
//! |---|---|
//! | namespace | the parent, as it was given |
//! | name, and label `plimsoll.dev/unit` | the child's directory |
//! | UID | `<cgroup>@<inode>`: a restarted unit is another pod |
//! | QoS class | `BestEffort`, since a unit declares no Kubernetes requests or limits |
//! | priority, CPU request, start | 0 |
//! | controller | none: a stopped unit may not be started again, so it is evicted only with `evictUnowned` |
//! | protected | units that the machine needs, that of this process, and ancestors of these |
//! | matched by | only a `PodQOS` that names the namespace or the label `plimsoll.dev/unit` |

use std::collections::BTreeMap;
use std::fs::{self, DirEntry};
use std::os::unix::fs::DirEntryExt;
use std::sync::Arc;
use std::time::Duration;

use super::{PodScan, overlap};
use crate::crd::manifest::Position;
use crate::engine::pod::{Pod, PodUid, QosClass, Reserved, Resources, UNIT_LABEL};
use crate::engine::units::MilliCpu;
use crate::messages::event::PodRefusal;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::machine::workload::{Workload, inode};

/// Default time from SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(30);

/// Adds the children of `parent`, except those that overlap the pod of a manifest.
pub(super) fn list(parent: &CgroupPath, hierarchy: &Hierarchy, found: &mut PodScan) {
    let entries = match children(parent, hierarchy) {
        Ok(entries) => entries,
        Err(reason) => return found.refused.push(refusal(parent, reason)),
    };
    let mut children: Vec<(String, u64)> = entries
        .iter()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.ino())))
        .collect();
    children.sort();
    for (directory, inode) in children {
        let Ok(cgroup) = parent.join(&directory) else {
            continue;
        };
        let overlaps = |known: &Workload| overlap(&known.cgroup, &cgroup);
        if !found.workloads.iter().any(overlaps) {
            let pod = Arc::new(unit(parent, &directory, inode));
            found.workloads.push(Workload {
                pod,
                cgroup,
                inode,
                containers: None,
            });
        }
    }
}

fn children(parent: &CgroupPath, hierarchy: &Hierarchy) -> Result<Vec<DirEntry>, String> {
    inode(hierarchy, parent).map_err(|error| error.to_string())?;
    let dir = hierarchy.dir(Controller::Cpu, parent);
    let dir = dir.ok_or("the cpu controller is not mounted")?;
    fs::read_dir(&dir)
        .and_then(Iterator::collect)
        .map_err(|error| format!("failed to list its children: {error}"))
}

fn refusal(parent: &CgroupPath, reason: String) -> PodRefusal {
    PodRefusal {
        location: parent.to_string(),
        position: Position::default(),
        pod: None,
        reason,
    }
}

fn unit(parent: &CgroupPath, directory: &str, inode: u64) -> Pod {
    let uid = format!("{parent}/{directory}@{inode}");
    Pod {
        uid: PodUid::from(uid.as_str()),
        namespace: parent.to_string(),
        name: directory.to_owned(),
        labels: BTreeMap::from([(UNIT_LABEL.to_owned(), directory.to_owned())]),
        priority: 0,
        qos: QosClass::BestEffort,
        started: 0,
        running: true,
        terminating: false,
        resources_reported: false,
        resizing: false,
        elastic: false,
        cpu_request: MilliCpu::ZERO,
        resources: Resources::default(),
        exec_probes: false,
        container_requests: BTreeMap::new(),
        grace: GRACE,
        protected: false,
        reserved: Some(Reserved::NamespaceOrUnit),
        eviction_exemption: None,
        owned: false,
        owner: None,
    }
}

/// Units without which logins or the machine would not work, and slices with instances of such a unit, such as
/// `system-getty.slice`.
pub(super) fn is_needed_by_the_machine(directory: &str) -> bool {
    const STARTS: [&str; 14] = [
        "system.slice",
        "systemd-",
        "dbus",
        "ssh",
        "init.scope",
        "session-",
        "user@",
        "user-",
        "user.slice",
        "getty",
        "serial-getty",
        "console-getty",
        "polkit",
        "plimsoll",
    ];
    // systemd escapes a dash within a name as `\x2d`.
    let name = directory.replace("\\x2d", "-").to_lowercase();
    let name = name.strip_prefix("system-").unwrap_or(&name);
    name.contains("login") || STARTS.iter().any(|start| name.starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_that_the_machine_needs_are_recognized() {
        for directory in [
            "systemd-journald.service",
            "systemd-logind.service",
            "dbus.service",
            "dbus-broker.service",
            "ssh.service",
            "sshd@1.service",
            "session-4.scope",
            "user@1000.service",
            "user-1000.slice",
            "user.slice",
            "init.scope",
            "getty@tty1.service",
            "system-getty.slice",
            "system-serial\\x2dgetty.slice",
            "system-sshd.slice",
            "system-systemd\\x2dfsck.slice",
            "system.slice",
            "elogind.service",
            "plimsoll.service",
        ] {
            assert!(is_needed_by_the_machine(directory), "{directory}");
        }
        for directory in [
            "batch.service",
            "nginx.service",
            "system-postgresql.slice",
            "backup-systemd.service",
            "db",
        ] {
            assert!(!is_needed_by_the_machine(directory), "{directory}");
        }
    }

    #[test]
    fn a_unit_is_a_pod_of_its_parent() {
        let parent = CgroupPath::new("system.slice").expect("a path");
        let pod = unit(&parent, "batch.service", 7);
        assert_eq!(pod.full_name().to_string(), "system.slice/batch.service");
        assert_eq!(pod.uid.0.as_ref(), "system.slice/batch.service@7");
        assert_eq!(pod.labels[UNIT_LABEL], "batch.service");
        assert_eq!(pod.reserved, Some(Reserved::NamespaceOrUnit));
        assert!(!pod.owned && !pod.protected && pod.running);
    }
}
