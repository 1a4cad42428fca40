//! The cgroup files that are written, through descriptors that stay open: a descriptor belongs to one cgroup for
//! good, so a write never reaches another cgroup that took its name.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::Mode;
use serde::{Deserialize, Serialize};

use super::parse::Bandwidth;
use super::{CgroupPath, Controller, Hierarchy};

/// What a file controls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// CPU time per period.
    Quota,
    /// Unused quota that may be accumulated.
    Burst,
    /// Idle class: it runs only when nothing else wants the CPU.
    Idle,
    /// Share of the CPU among siblings.
    Weight,
}

/// A cgroup file that is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ControlFileKind {
    /// v2 quota and period.
    #[serde(rename = "cpu.max")]
    CpuMax,
    /// v2 burst.
    #[serde(rename = "cpu.max.burst")]
    CpuMaxBurst,
    /// v2 weight.
    #[serde(rename = "cpu.weight")]
    CpuWeight,
    /// Idle class, v1 and v2.
    #[serde(rename = "cpu.idle")]
    CpuIdle,
    /// v1 quota.
    #[serde(rename = "cpu.cfs_quota_us")]
    CfsQuota,
    /// v1 burst.
    #[serde(rename = "cpu.cfs_burst_us")]
    CfsBurst,
    /// v1 weight.
    #[serde(rename = "cpu.shares")]
    CpuShares,
}

const CFS_PERIOD: &str = "cpu.cfs_period_us";

impl ControlFileKind {
    /// The file for `role`.
    pub const fn of(role: Role, v2: bool) -> Self {
        match (role, v2) {
            (Role::Quota, true) => Self::CpuMax,
            (Role::Quota, false) => Self::CfsQuota,
            (Role::Burst, true) => Self::CpuMaxBurst,
            (Role::Burst, false) => Self::CfsBurst,
            (Role::Idle, _) => Self::CpuIdle,
            (Role::Weight, true) => Self::CpuWeight,
            (Role::Weight, false) => Self::CpuShares,
        }
    }

    /// What the file controls.
    pub const fn role(self) -> Role {
        match self {
            Self::CpuMax | Self::CfsQuota => Role::Quota,
            Self::CpuMaxBurst | Self::CfsBurst => Role::Burst,
            Self::CpuIdle => Role::Idle,
            Self::CpuWeight | Self::CpuShares => Role::Weight,
        }
    }

    /// The file's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::CpuMax => "cpu.max",
            Self::CpuMaxBurst => "cpu.max.burst",
            Self::CpuWeight => "cpu.weight",
            Self::CpuIdle => "cpu.idle",
            Self::CfsQuota => "cpu.cfs_quota_us",
            Self::CfsBurst => "cpu.cfs_burst_us",
            Self::CpuShares => "cpu.shares",
        }
    }

    /// The smallest weight that the kernel accepts.
    pub const fn min_weight(self) -> &'static str {
        match self {
            Self::CpuShares => "2",
            _ => "1",
        }
    }

    /// The weight that the kernel shows for an idle-class cgroup.
    pub const fn idle_weight(self) -> &'static str {
        match self {
            Self::CpuShares => "3",
            _ => "0",
        }
    }

    /// Whether the kernel itself sets this weight when a cgroup enters or leaves the idle class
    /// (`sched_group_set_idle`: `WEIGHT_IDLEPRIO` and `NICE_0_LOAD`), whatever the weight was before.
    pub fn is_weight_around_idle(self, text: &str) -> bool {
        match self {
            Self::CpuWeight => matches!(text, "0" | "100"),
            Self::CpuShares => matches!(text, "3" | "1024"),
            _ => false,
        }
    }
}

impl fmt::Display for ControlFileKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a cgroup file could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ControlFileError {
    /// The cgroup no longer exists. This is normal.
    #[error("{} is gone", .0.display())]
    Gone(PathBuf),
    /// The cgroup exists, but its file does not.
    #[error(
        "there is no {}: enable the `cpu` controller for this cgroup (cgroup.subtree_control of its parent)",
        .0.display()
    )]
    Missing(PathBuf),
    /// Permission denied.
    #[error("failed to {verb} {}: permission denied: run as root", path.display())]
    Denied {
        /// `open`, `read` or `write`.
        verb: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The cgroup file system is read-only, as it is in most containers.
    #[error(
        "failed to {verb} {}: cgroups are mounted read-only here: mount them writable",
        path.display()
    )]
    ReadOnly {
        /// `open` or `write`.
        verb: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// The kernel rejects the value.
    #[error("failed to write {}: the kernel rejects `{value}`", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The value.
        value: String,
    },
    /// The content is not valid for such a file.
    #[error("failed to parse {}: it holds `{text}`", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Its content.
        text: String,
    },
    /// Anything else.
    #[error("failed to {verb} {}: {source}", path.display())]
    Io {
        /// `open`, `read` or `write`.
        verb: &'static str,
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
}

impl ControlFileError {
    fn new(verb: &'static str, path: &Path, errno: Errno) -> Self {
        let path = path.to_owned();
        match errno {
            Errno::ENOENT | Errno::ENODEV => Self::Gone(path),
            Errno::EACCES | Errno::EPERM => Self::Denied { verb, path },
            Errno::EROFS => Self::ReadOnly { verb, path },
            errno => Self::Io {
                verb,
                path,
                source: errno.into(),
            },
        }
    }

    fn io(verb: &'static str, path: &Path, error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Self::new(verb, path, Errno::from_raw(errno)),
            None => Self::Io {
                verb,
                path: path.to_owned(),
                source: error,
            },
        }
    }

    /// Whether the cgroup no longer exists.
    pub const fn is_gone(&self) -> bool {
        matches!(self, Self::Gone(_))
    }
}

/// The directory of one cgroup in the tree of the `cpu` controller.
#[derive(Debug)]
pub struct CpuDir {
    dir: File,
    path: PathBuf,
    inode: u64,
    v2: bool,
}

impl CpuDir {
    /// Opens the directory.
    ///
    /// # Errors
    /// [`ControlFileError::Gone`] if there is no such cgroup; a symbolic link below the root is refused.
    pub fn open(hierarchy: &Hierarchy, cgroup: &CgroupPath) -> Result<Self, ControlFileError> {
        let root = match hierarchy {
            Hierarchy::V2 { root } => root,
            Hierarchy::V1 { cpu, .. } => cpu,
        };
        let path = hierarchy
            .dir(Controller::Cpu, cgroup)
            .unwrap_or_else(|| root.join(cgroup.as_str()));
        let dir = open_beneath(root, cgroup)
            .map_err(|errno| ControlFileError::new("open", &path, errno))?;
        let inode = dir
            .metadata()
            .map(|metadata: Metadata| metadata.ino())
            .map_err(|error| ControlFileError::io("open", &path, error))?;
        Ok(Self {
            dir,
            path,
            inode,
            v2: hierarchy.is_v2(),
        })
    }

    /// The inode of the directory. It identifies the cgroup, since names are reused.
    pub const fn inode(&self) -> u64 {
        self.inode
    }

    /// The directory's link count: two, plus one for each cgroup below it (on file systems that count them).
    ///
    /// # Errors
    /// If `fstat` fails.
    pub fn links(&self) -> Result<u64, ControlFileError> {
        let metadata = self.dir.metadata();
        metadata
            .map(|metadata| metadata.nlink())
            .map_err(|error| ControlFileError::io("read", &self.path, error))
    }

    /// Opens the file for `role`; `None` if this kernel has no such file.
    ///
    /// # Errors
    /// If it exists but cannot be opened.
    pub fn control_file(&self, role: Role) -> Result<Option<ControlFile>, ControlFileError> {
        let kind = ControlFileKind::of(role, self.v2);
        let path = self.path.join(kind.name());
        let Some(fd) = self.open_file(kind.name(), OFlag::O_RDWR)? else {
            return Ok(None);
        };
        let period = match kind {
            ControlFileKind::CfsQuota => self.open_file(CFS_PERIOD, OFlag::O_RDONLY)?,
            _ => None,
        };
        Ok(Some(ControlFile {
            kind,
            path,
            fd,
            period,
        }))
    }

    /// Opens the file for `role`, which every kernel has.
    ///
    /// # Errors
    /// [`ControlFileError::Gone`] if the cgroup no longer exists.
    pub fn required(&self, role: Role) -> Result<ControlFile, ControlFileError> {
        let missing = || {
            let path = self.path.join(ControlFileKind::of(role, self.v2).name());
            if self.path.exists() {
                ControlFileError::Missing(path)
            } else {
                ControlFileError::Gone(path)
            }
        };
        self.control_file(role)?.ok_or_else(missing)
    }

    fn open_file(&self, name: &str, access: OFlag) -> Result<Option<File>, ControlFileError> {
        let flags = access | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
        match openat(self.dir.as_fd(), name, flags, Mode::empty()) {
            Ok(fd) => Ok(Some(File::from(fd))),
            Err(Errno::ENOENT) => Ok(None),
            Err(errno) => Err(ControlFileError::new("open", &self.path.join(name), errno)),
        }
    }
}

/// Opens a directory below `root` without leaving it and without following links. The root itself may be a link
/// (`/sys/fs/cgroup/cpu -> cpu,cpuacct`).
fn open_beneath(root: &Path, cgroup: &CgroupPath) -> Result<File, Errno> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let plain = |path: &Path, flags: OFlag| {
        OpenOptions::new()
            .read(true)
            .custom_flags(flags.bits())
            .open(path)
            .map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    };
    let root_dir = plain(root, flags)?;
    let how = OpenHow::new()
        .flags(flags)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(&root_dir, cgroup.as_str(), how) {
        // Linux before 5.6. cgroup file systems contain no links.
        Err(Errno::ENOSYS) => plain(&root.join(cgroup.as_str()), flags | OFlag::O_NOFOLLOW),
        opened => opened.map(File::from),
    }
}

/// Maximum content length in bytes: two 64-bit numbers.
const MAX_LEN: usize = 64;

/// The content of a file, read without allocating.
#[derive(Clone, Copy)]
pub struct FileText {
    bytes: [u8; MAX_LEN],
    len: usize,
}

impl FileText {
    /// The text without its newline.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).map_or("", str::trim_end)
    }
}

/// One cgroup file that stays open.
#[derive(Debug)]
pub struct ControlFile {
    kind: ControlFileKind,
    path: PathBuf,
    fd: File,
    /// v1 has the period of a quota in a separate file.
    period: Option<File>,
}

impl ControlFile {
    /// Which file.
    pub const fn kind(&self) -> ControlFileKind {
        self.kind
    }

    /// Its path, for display.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the current content.
    ///
    /// # Errors
    /// [`ControlFileError::Gone`] if the cgroup no longer exists.
    pub fn read(&self) -> Result<FileText, ControlFileError> {
        read(&self.fd).map_err(|error| ControlFileError::io("read", &self.path, error))
    }

    /// Writes `value`.
    ///
    /// # Errors
    /// [`ControlFileError::Refused`] if the kernel rejects the value.
    pub fn write(&self, value: &str) -> Result<(), ControlFileError> {
        match self.fd.write_at(value.as_bytes(), 0) {
            Ok(_) => Ok(()),
            Err(error)
                if matches!(
                    error.raw_os_error().map(Errno::from_raw),
                    Some(Errno::EINVAL | Errno::ERANGE)
                ) =>
            {
                Err(ControlFileError::Refused {
                    path: self.path.clone(),
                    value: value.to_owned(),
                })
            }
            Err(error) => Err(ControlFileError::io("write", &self.path, error)),
        }
    }

    /// The bandwidth that `text` means in this quota file.
    ///
    /// # Errors
    /// If the text is malformed or the period cannot be read.
    pub fn bandwidth(&self, text: &str) -> Result<Bandwidth, ControlFileError> {
        let bandwidth = match &self.period {
            None => Bandwidth::parse_v2(text),
            Some(period) => {
                let period = read(period)
                    .map_err(|error| ControlFileError::io("read", &self.path, error))?;
                Bandwidth::parse_v1(text, period.text())
            }
        };
        bandwidth.ok_or_else(|| ControlFileError::Malformed {
            path: self.path.clone(),
            text: text.to_owned(),
        })
    }

    /// The text of a bandwidth in this quota file.
    pub fn text(&self, bandwidth: Bandwidth) -> Box<str> {
        if self.period.is_some() {
            bandwidth.text_v1().into()
        } else {
            bandwidth.text_v2().into()
        }
    }
}

fn read(file: &File) -> io::Result<FileText> {
    let mut bytes = [0; MAX_LEN];
    let len = file.read_at(&mut bytes, 0)?;
    Ok(FileText { bytes, len })
}
