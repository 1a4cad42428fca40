//! The demo's cgroups: made, looked at, and taken away again.
//!
//! They are made with plain directory calls, not with cgroups-rs: that swallows the errors of
//! `cgroup.subtree_control` and takes the mount point for granted, and here a person has to be told exactly what
//! could not be done, and where.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use super::cast::{Cast, Role, quota_micros, shares, weight};
use super::leftovers::PREFIX;
use super::report::FileChange;
use crate::engine::units::MilliCpu;
use crate::node::cgroup::parse::keyed;
use crate::node::cgroup::{CgroupPath, Controller, Hierarchy};
use crate::node::clock::boot_time;

/// The files that throttling could change, in either version.
const KNOBS_V1: [&str; 5] = [
    "cpu.cfs_quota_us",
    "cpu.cfs_period_us",
    "cpu.cfs_burst_us",
    "cpu.idle",
    "cpu.shares",
];
const KNOBS_V2: [&str; 4] = ["cpu.max", "cpu.max.burst", "cpu.idle", "cpu.weight"];
/// A cgroup whose last process was killed is busy until the kernel has buried it.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(5);

/// What could not be done on the way to the demo's cgroups.
#[derive(Debug, thiserror::Error)]
#[error("failed to {doing} {}", path.display())]
pub struct StageError {
    /// What, as a verb.
    pub doing: &'static str,
    /// Where.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// The text of one file, to be compared byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnobText {
    /// The file.
    pub path: PathBuf,
    /// What it holds.
    pub text: Vec<u8>,
}

impl StageError {
    /// With its cause, for people.
    pub fn in_full(&self) -> String {
        format!("{self}: {}", self.source)
    }
}

impl KnobText {
    /// How the file differs from this by now; `None` where it does not.
    pub fn change(&self) -> Option<FileChange> {
        let now = fs::read(&self.path).unwrap_or_default();
        (now != self.text).then(|| FileChange {
            path: self.path.display().to_string(),
            before: String::from_utf8_lossy(&self.text).into_owned(),
            after: String::from_utf8_lossy(&now).into_owned(),
        })
    }
}

/// The cgroups of one demo. They are removed when it is dropped.
#[derive(Debug)]
pub struct Stage {
    hierarchy: Hierarchy,
    top: CgroupPath,
    /// In the order in which they were made.
    made: Vec<PathBuf>,
    /// `cgroup.subtree_control` files that a controller was switched on in, with its name.
    switched_on: Vec<(PathBuf, &'static str)>,
}

impl Stage {
    /// Makes the cgroups for `cast`, for the process `owner`. To the rest of the machine they weigh `top_shares`
    /// together.
    ///
    /// # Errors
    /// What could not be done. What was made until then is removed.
    pub fn set_up(
        hierarchy: Hierarchy,
        cast: &Cast,
        owner: u32,
        top_shares: u64,
    ) -> Result<Self, StageError> {
        let mut stage = Self {
            hierarchy,
            top: top_of(owner),
            made: Vec::new(),
            switched_on: Vec::new(),
        };
        stage.hand_down_controllers()?;
        stage.make(&stage.top.clone())?;
        stage.hand_down_below(&stage.top.clone())?;
        stage.weigh(&stage.top, top_shares)?;
        for role in cast.roles() {
            let cgroup = stage.cgroup(role);
            stage.make(&cgroup)?;
            stage.weigh(&cgroup, shares(role.request))?;
            stage.limit(&cgroup, role.limit)?;
        }
        Ok(stage)
    }

    /// The cgroup trees.
    pub const fn hierarchy(&self) -> &Hierarchy {
        &self.hierarchy
    }

    /// The top cgroup of the demo.
    pub const fn top(&self) -> &CgroupPath {
        &self.top
    }

    /// The cgroup of a pod. They lie side by side, as the services of one machine do.
    pub fn cgroup(&self, role: &Role) -> CgroupPath {
        child(&self.top, &role.name)
    }

    /// Puts a process and all its threads into the cgroup, in every tree.
    ///
    /// # Errors
    /// Where the kernel refuses it.
    pub fn admit(&self, pid: u32, cgroup: &CgroupPath) -> Result<(), StageError> {
        for dir in self.hierarchy.dirs(cgroup) {
            write(&dir.join("cgroup.procs"), &pid.to_string())?;
        }
        Ok(())
    }

    /// The files of a pod that throttling could change, as they are now; those that this kernel lacks left out.
    pub fn knobs(&self, cgroup: &CgroupPath) -> Vec<KnobText> {
        let names: &[&str] = if self.hierarchy.is_v2() {
            &KNOBS_V2
        } else {
            &KNOBS_V1
        };
        let Some(dir) = self.hierarchy.dir(Controller::Cpu, cgroup) else {
            return Vec::new();
        };
        names
            .iter()
            .filter_map(|name| {
                let path = dir.join(name);
                let text = fs::read(&path).ok()?;
                Some(KnobText { path, text })
            })
            .collect()
    }

    /// The inode of a cgroup's folder; 0 where it is gone.
    pub fn inode(&self, cgroup: &CgroupPath) -> u64 {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup);
        let meta = dir.and_then(|dir| fs::metadata(dir).ok());
        meta.map_or(0, |meta| meta.ino())
    }

    /// The name of the file that holds a CPU weight.
    pub const fn weight_file(&self) -> &'static str {
        if self.hierarchy.is_v2() {
            "cpu.weight"
        } else {
            "cpu.shares"
        }
    }

    /// A cgroup's CPU weight, as its file has it.
    pub fn weight(&self, cgroup: &CgroupPath) -> Option<String> {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup)?;
        let text = fs::read_to_string(dir.join(self.weight_file())).ok()?;
        Some(text.trim().to_owned())
    }

    /// In how many enforcement periods a cgroup has used up its own quota.
    pub fn throttled_periods(&self, cgroup: &CgroupPath) -> Option<u64> {
        let dir = self.hierarchy.dir(Controller::Cpu, cgroup)?;
        let text = fs::read(dir.join("cpu.stat")).ok()?;
        let [periods] = keyed(&text, [b"nr_throttled"]);
        periods
    }

    /// Removes everything, the deepest first. Returns what could not be removed, with the reason. Nothing is left to
    /// do for a second call.
    pub fn tear_down(&mut self) -> Vec<StageError> {
        let mut left = Vec::new();
        for dir in std::mem::take(&mut self.made).into_iter().rev() {
            if let Err(source) = remove_patiently(&dir) {
                left.push(failed("remove", &dir)(source));
            }
        }
        for (file, controller) in std::mem::take(&mut self.switched_on).into_iter().rev() {
            // Refused where somebody else has come to need it in the meantime, and then it has to stay.
            let _kept = fs::write(&file, format!("-{controller}"));
        }
        left
    }

    fn make(&mut self, cgroup: &CgroupPath) -> Result<(), StageError> {
        for dir in self.hierarchy.dirs(cgroup) {
            match fs::create_dir(&dir) {
                Ok(()) => self.made.push(dir),
                // Two trees on one mount: `cpu` and `cpuacct` are often links to the same folder.
                Err(error)
                    if error.kind() == io::ErrorKind::AlreadyExists && self.is_ours(&dir) => {}
                Err(error) => return Err(failed("make the cgroup", &dir)(error)),
            }
        }
        Ok(())
    }

    fn is_ours(&self, dir: &Path) -> bool {
        let real = |path: &Path| fs::canonicalize(path).ok();
        let wanted = real(dir);
        wanted.is_some() && self.made.iter().any(|made| real(made) == wanted)
    }

    /// On v2 a controller works in a cgroup only where the one above hands it down.
    fn hand_down_controllers(&mut self) -> Result<(), StageError> {
        let Hierarchy::V2 { root } = &self.hierarchy else {
            return Ok(());
        };
        let root = root.clone();
        self.switch_on(&root, "cpu")?;
        // Memory figures are shown where there are any; nothing of the demo rests on them.
        let _without = self.switch_on(&root, "memory");
        Ok(())
    }

    fn hand_down_below(&mut self, cgroup: &CgroupPath) -> Result<(), StageError> {
        if !self.hierarchy.is_v2() {
            return Ok(());
        }
        for dir in self.hierarchy.dirs(cgroup) {
            self.switch_on(&dir, "cpu")?;
            let _without = self.switch_on(&dir, "memory");
        }
        Ok(())
    }

    fn switch_on(&mut self, dir: &Path, controller: &'static str) -> Result<(), StageError> {
        let file = dir.join("cgroup.subtree_control");
        let has = fs::read_to_string(&file).map_err(failed("read", &file))?;
        if has.split_whitespace().any(|name| name == controller) {
            return Ok(());
        }
        let doing = match controller {
            "cpu" => "switch on the cpu controller in",
            _ => "switch on the memory controller in",
        };
        write_as(doing, &file, &format!("+{controller}"))?;
        self.switched_on.push((file, controller));
        Ok(())
    }

    fn weigh(&self, cgroup: &CgroupPath, shares: u64) -> Result<(), StageError> {
        let value = if self.hierarchy.is_v2() {
            weight(shares)
        } else {
            shares
        };
        self.write_cpu(cgroup, self.weight_file(), &value.to_string())
    }

    /// Without a limit nothing is written, but the file has to be there: a kernel without CFS bandwidth control has
    /// nothing to throttle with.
    fn limit(&self, cgroup: &CgroupPath, limit: Option<MilliCpu>) -> Result<(), StageError> {
        let (name, text) = match (self.hierarchy.is_v2(), limit.map(quota_micros)) {
            (true, None) => ("cpu.max", "max".to_owned()),
            (true, Some(quota)) => ("cpu.max", format!("{quota} 100000")),
            (false, None) => ("cpu.cfs_quota_us", "-1".to_owned()),
            (false, Some(quota)) => ("cpu.cfs_quota_us", quota.to_string()),
        };
        self.write_cpu(cgroup, name, &text)
    }

    fn write_cpu(&self, cgroup: &CgroupPath, name: &str, text: &str) -> Result<(), StageError> {
        self.hierarchy
            .dir(Controller::Cpu, cgroup)
            .map_or(Ok(()), |dir| write(&dir.join(name), text))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.tear_down();
    }
}

fn remove_patiently(dir: &Path) -> io::Result<()> {
    let give_up = boot_time() + REMOVAL_PATIENCE;
    loop {
        match fs::remove_dir(dir) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && boot_time() < give_up => {
                thread::park_timeout(Duration::from_millis(10));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            other => return other,
        }
    }
}

fn write(path: &Path, text: &str) -> Result<(), StageError> {
    write_as("write", path, text)
}

/// Without creating it: a kernel file that is not there must not be made up in a plain folder.
fn write_as(doing: &'static str, path: &Path, text: &str) -> Result<(), StageError> {
    OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(failed(doing, path))
}

fn failed(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StageError {
    let path = path.to_owned();
    move |source| StageError {
        doing,
        path,
        source,
    }
}

#[expect(clippy::expect_used, reason = "the names are ours and plain")]
fn top_of(owner: u32) -> CgroupPath {
    CgroupPath::new(&format!("{PREFIX}{owner}")).expect("a plain name")
}

#[expect(clippy::expect_used, reason = "the names are ours and plain")]
fn child(parent: &CgroupPath, name: &str) -> CgroupPath {
    parent.join(name).expect("a plain name")
}
