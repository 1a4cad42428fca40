//! The cgroups of a scene.
//!
//! Made with plain directory calls: cgroups-rs swallows errors of `cgroup.subtree_control` and assumes the mount
//! point, and the user has to see exactly what failed, and where.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::Serialize;

use super::pod::{ScenePod, quota_micros};
use crate::clock::boot_time;
use crate::engine::pod::QosClass;
use crate::engine::units::MilliCpu;
use crate::engine::weight_share::{CpuWeights, shares, weight};
use crate::node::cgroup::parse::keyed;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::collect::waits::PERIODS;

/// The control files that throttling can change.
const CONTROL_FILES_V1: [&str; 5] = [
    "cpu.cfs_quota_us",
    "cpu.cfs_period_us",
    "cpu.cfs_burst_us",
    "cpu.idle",
    "cpu.shares",
];
const CONTROL_FILES_V2: [&str; 4] = ["cpu.max", "cpu.max.burst", "cpu.idle", "cpu.weight"];
/// A cgroup stays busy until the kernel has reaped its killed processes.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(5);

/// An operation on the cgroups failed.
#[derive(Debug, thiserror::Error)]
#[error("failed to {doing} {}", path.display())]
pub struct CgroupError {
    /// The operation, as a verb.
    pub doing: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

/// A file whose content differs from before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileChange {
    /// Its path.
    pub path: String,
    /// Content before.
    pub before: String,
    /// Content after; empty if it is gone.
    pub after: String,
}

/// The content of a file, to compare with byte for byte later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSnapshot {
    /// The file.
    pub path: PathBuf,
    /// Its content.
    pub text: Vec<u8>,
}

impl CgroupError {
    /// The message with its cause.
    pub fn in_full(&self) -> String {
        format!("{self}: {}", self.source)
    }
}

impl FileSnapshot {
    /// How the file differs now; `None` if it does not.
    pub fn change(&self) -> Option<FileChange> {
        let now = fs::read(&self.path).unwrap_or_default();
        (now != self.text).then(|| FileChange {
            path: self.path.display().to_string(),
            before: String::from_utf8_lossy(&self.text).into_owned(),
            after: String::from_utf8_lossy(&now).into_owned(),
        })
    }
}

/// The cgroups of one scene. They are removed when it is dropped.
#[derive(Debug)]
pub struct SceneCgroups {
    hierarchy: Hierarchy,
    top: CgroupPath,
    /// In order of creation.
    created: Vec<PathBuf>,
    /// `cgroup.subtree_control` files, each with the controller that was enabled in it.
    enabled: Vec<(PathBuf, &'static str)>,
}

impl SceneCgroups {
    /// Creates the cgroups for `pods` below one of this name, which has `top_shares`.
    ///
    /// # Errors
    /// Where one cannot be created or configured; those already created are removed.
    pub fn create(
        hierarchy: Hierarchy,
        pods: &[&ScenePod],
        name: &str,
        top_shares: u64,
    ) -> Result<Self, CgroupError> {
        let mut cgroups = Self {
            hierarchy,
            top: top_of(name),
            created: Vec::new(),
            enabled: Vec::new(),
        };
        cgroups.enable_controllers()?;
        cgroups.create_cgroup(&cgroups.top.clone())?;
        cgroups.enable_controllers_below(&cgroups.top.clone())?;
        cgroups.set_weight(&cgroups.top, top_shares)?;
        if pods.iter().any(|pod| pod.qos == QosClass::BestEffort) {
            let slice = cgroups.best_effort();
            cgroups.create_cgroup(&slice)?;
            cgroups.enable_controllers_below(&slice)?;
            cgroups.set_weight(&slice, shares(MilliCpu::ZERO))?;
        }
        for pod in pods {
            let cgroup = cgroups.cgroup(pod);
            cgroups.create_cgroup(&cgroup)?;
            cgroups.set_weight(&cgroup, shares(pod.request))?;
            cgroups.set_limit(&cgroup, pod.limit)?;
        }
        Ok(cgroups)
    }

    /// The cgroup of a pod. They are siblings, except that `BestEffort` pods share a slice of the lowest weight, as below the
    /// kubelet's.
    pub fn cgroup(&self, pod: &ScenePod) -> CgroupPath {
        match pod.qos {
            QosClass::BestEffort => child(&self.best_effort(), &pod.name),
            QosClass::Burstable | QosClass::Guaranteed => child(&self.top, &pod.name),
        }
    }

    fn best_effort(&self) -> CgroupPath {
        child(&self.top, "besteffort")
    }

    /// Gives a pod, and the slice of a `BestEffort` one, what a request weighs on cgroup v2, on v1 too.
    ///
    /// # Errors
    /// Where the kernel refuses it.
    pub fn weigh_as_on_v2(&self, pod: &ScenePod, request: MilliCpu) -> Result<(), CgroupError> {
        let slice = (pod.qos == QosClass::BestEffort).then(|| (self.best_effort(), MilliCpu::ZERO));
        for (cgroup, request) in slice.into_iter().chain([(self.cgroup(pod), request)]) {
            let value = if self.hierarchy.is_v2() {
                weight(shares(request)).to_string()
            } else {
                CpuWeights::V2.of(request).to_string()
            };
            self.write_cpu(&cgroup, self.weight_file(), &value)?;
        }
        Ok(())
    }

    /// Moves a process into the cgroup, in every tree.
    ///
    /// # Errors
    /// Where the kernel refuses it.
    pub fn add_process(&self, pid: u32, cgroup: &CgroupPath) -> Result<(), CgroupError> {
        for dir in self.hierarchy.dirs(cgroup) {
            write(&dir.join("cgroup.procs"), &pid.to_string())?;
        }
        Ok(())
    }

    /// The current content of the control files that throttling can change, without those that this kernel lacks.
    pub fn snapshots(&self, cgroup: &CgroupPath) -> Vec<FileSnapshot> {
        let names: &[&str] = if self.hierarchy.is_v2() {
            &CONTROL_FILES_V2
        } else {
            &CONTROL_FILES_V1
        };
        let Some(dir) = self.hierarchy.dir(Controller::Cpu, cgroup) else {
            return Vec::new();
        };
        names
            .iter()
            .filter_map(|name| {
                let path = dir.join(name);
                let text = fs::read(&path).ok()?;
                Some(FileSnapshot { path, text })
            })
            .collect()
    }

    /// Whether a cgroup is idle class now.
    pub fn is_idle(&self, cgroup: &CgroupPath) -> bool {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup);
        let text = dir.and_then(|dir| fs::read(dir.join("cpu.idle")).ok());
        text.is_some_and(|text| text.trim_ascii() == b"1")
    }

    /// The inode of a cgroup's directory; 0 if it is gone.
    pub fn inode(&self, cgroup: &CgroupPath) -> u64 {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup);
        let meta = dir.and_then(|dir| fs::metadata(dir).ok());
        meta.map_or(0, |meta| meta.ino())
    }

    /// The name of the CPU weight file.
    pub const fn weight_file(&self) -> &'static str {
        if self.hierarchy.is_v2() {
            "cpu.weight"
        } else {
            "cpu.shares"
        }
    }

    /// The content of a cgroup's CPU weight file.
    pub fn weight(&self, cgroup: &CgroupPath) -> Option<String> {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup)?;
        let text = fs::read_to_string(dir.join(self.weight_file())).ok()?;
        Some(text.trim().to_owned())
    }

    /// Removes everything and returns what could not be removed. A second call does nothing.
    pub fn remove(&mut self) -> Vec<CgroupError> {
        let mut left = Vec::new();
        for dir in std::mem::take(&mut self.created).into_iter().rev() {
            if let Err(source) = remove_when_empty(&dir) {
                left.push(failed("remove", &dir)(source));
            }
        }
        for (file, controller) in std::mem::take(&mut self.enabled).into_iter().rev() {
            // Refused where another cgroup needs the controller by now.
            let _still_needed = fs::write(&file, format!("-{controller}"));
        }
        left
    }

    fn create_cgroup(&mut self, cgroup: &CgroupPath) -> Result<(), CgroupError> {
        for dir in self.hierarchy.dirs(cgroup) {
            match fs::create_dir(&dir) {
                Ok(()) => self.created.push(dir),
                // `cpu` and `cpuacct` are often links to the same directory.
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && self.is_ours(&dir) => {}
                Err(error) => return Err(failed("create the cgroup", &dir)(error)),
            }
        }
        Ok(())
    }

    fn is_ours(&self, dir: &Path) -> bool {
        let real = |path: &Path| fs::canonicalize(path).ok();
        let wanted = real(dir);
        wanted.is_some() && self.created.iter().any(|created| real(created) == wanted)
    }

    /// On v2 a controller works in a cgroup only if the parent enables it.
    fn enable_controllers(&mut self) -> Result<(), CgroupError> {
        let Hierarchy::V2 { root } = &self.hierarchy else {
            return Ok(());
        };
        let root = root.clone();
        self.enable(&root, "cpu")?;
        // Optional: a scene works without memory figures.
        let _optional = self.enable(&root, "memory");
        Ok(())
    }

    fn enable_controllers_below(&mut self, cgroup: &CgroupPath) -> Result<(), CgroupError> {
        if !self.hierarchy.is_v2() {
            return Ok(());
        }
        for dir in self.hierarchy.dirs(cgroup) {
            self.enable(&dir, "cpu")?;
            let _optional = self.enable(&dir, "memory");
        }
        Ok(())
    }

    fn enable(&mut self, dir: &Path, controller: &'static str) -> Result<(), CgroupError> {
        let file = dir.join("cgroup.subtree_control");
        let has = fs::read_to_string(&file).map_err(failed("read", &file))?;
        if has.split_whitespace().any(|name| name == controller) {
            return Ok(());
        }
        let doing = match controller {
            "cpu" => "enable the cpu controller in",
            _ => "enable the memory controller in",
        };
        write_as(doing, &file, &format!("+{controller}"))?;
        self.enabled.push((file, controller));
        Ok(())
    }

    fn set_weight(&self, cgroup: &CgroupPath, shares: u64) -> Result<(), CgroupError> {
        let value = if self.hierarchy.is_v2() {
            weight(shares)
        } else {
            shares
        };
        self.write_cpu(cgroup, self.weight_file(), &value.to_string())
    }

    /// Writes a quota per [`QUOTA_PERIOD`] into a pod's cgroup, as other agents do; `None`: no limit.
    ///
    /// # Errors
    /// Where the kernel refuses it.
    pub fn set_quota(
        &self,
        cgroup: &CgroupPath,
        quota: Option<MilliCpu>,
    ) -> Result<(), CgroupError> {
        self.set_limit(cgroup, quota)
    }

    /// CPU time that a cgroup has used, in nanoseconds.
    pub fn cpu_nanos(&self, cgroup: &CgroupPath) -> Option<u64> {
        if self.hierarchy.is_v2() {
            let dir = self.hierarchy.dir(Controller::Cpu, cgroup)?;
            let [micros] = keyed(&fs::read(dir.join("cpu.stat")).ok()?, [b"usage_usec"]);
            return micros?.checked_mul(1000);
        }
        let dir = self.hierarchy.dir(Controller::Cpuacct, cgroup)?;
        let text = fs::read_to_string(dir.join("cpuacct.usage")).ok()?;
        text.trim().parse().ok()
    }

    /// `nr_periods` and `nr_throttled` of a pod's CPU limit: enforcement periods so far, and those in which it was throttled.
    pub fn periods(&self, cgroup: &CgroupPath) -> Option<[u64; 2]> {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup)?;
        let [periods, throttled] = keyed(&fs::read(dir.join("cpu.stat")).ok()?, PERIODS);
        Some([periods?, throttled?])
    }

    /// Written without a limit too, so that a kernel without CFS bandwidth control fails here.
    fn set_limit(&self, cgroup: &CgroupPath, limit: Option<MilliCpu>) -> Result<(), CgroupError> {
        let (name, text) = match (self.hierarchy.is_v2(), limit.map(quota_micros)) {
            (true, None) => ("cpu.max", "max".to_owned()),
            (true, Some(quota)) => ("cpu.max", format!("{quota} 100000")),
            (false, None) => ("cpu.cfs_quota_us", "-1".to_owned()),
            (false, Some(quota)) => ("cpu.cfs_quota_us", quota.to_string()),
        };
        self.write_cpu(cgroup, name, &text)
    }

    fn write_cpu(&self, cgroup: &CgroupPath, name: &str, text: &str) -> Result<(), CgroupError> {
        self.hierarchy
            .dir(Controller::Cpu, cgroup)
            .map_or(Ok(()), |dir| write(&dir.join(name), text))
    }
}

impl Drop for SceneCgroups {
    fn drop(&mut self) {
        self.remove();
    }
}

fn remove_when_empty(dir: &Path) -> io::Result<()> {
    let deadline = boot_time() + REMOVAL_TIMEOUT;
    loop {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && boot_time() < deadline => {
                thread::park_timeout(Duration::from_millis(10));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => return other,
        }
    }
}

fn write(path: &Path, text: &str) -> Result<(), CgroupError> {
    write_as("write", path, text)
}

/// Never creates the file.
fn write_as(doing: &'static str, path: &Path, text: &str) -> Result<(), CgroupError> {
    OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(failed(doing, path))
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError {
        doing,
        path,
        source,
    }
}

#[expect(clippy::expect_used, reason = "the names are ours and plain")]
fn top_of(name: &str) -> CgroupPath {
    CgroupPath::new(name).expect("a plain name")
}

#[expect(clippy::expect_used, reason = "the names are ours and plain")]
fn child(parent: &CgroupPath, name: &str) -> CgroupPath {
    parent.join(name).expect("a plain name")
}
