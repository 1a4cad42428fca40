//! Journal of the changed cgroup files and their original values; written before any cgroup is.
//!
//! It survives a crash of the process, and is void after a reboot, as the cgroups are. So it is not synced: on an overloaded disk
//! that takes longer than a decision may wait.
//!
//! One text file, replaced as a whole: a header, a JSON line for each changed cgroup file, and a checksum.
//! ```text
//! plimsoll-journal 1 1d5a3fd6-8e5c-4b42-a1cc-6f0b4b5fbf4e 81234000000000
//! {"uid":"web-1","cgroup":"batch/web-1","lever":"","inode":4711,"file":"cpu.max","original":"max 100000",...}
//! crc32 8f3a10c2
//! ```

mod atomic;
mod lock;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::clock::boot_id;
use crate::engine::pod::PodUid;
use crate::engine::policy::RuleId;
use crate::engine::time::BootTime;
use crate::engine::units::MilliCpu;

use super::cgroup::control_file::{ControlFileKind, CpuDir, Role};
use super::cgroup::parse::keyed;
use super::cgroup::{CgroupPath, Hierarchy};

pub use atomic::{Effects, ReplaceError, write_atomic, write_atomic_with};
pub use lock::{LockError, StateLock};

const MAGIC: &str = "plimsoll-journal";
const VERSION: &str = "1";

/// One cgroup file that holds our value, or will.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct JournalRecord {
    /// Which pod.
    pub uid: PodUid,
    /// The pod's cgroup.
    pub cgroup: CgroupPath,
    /// The file's cgroup, relative to the pod's; empty for the pod's own.
    #[serde(rename = "lever")]
    pub target_cgroup: Arc<str>,
    /// Inode of that cgroup's directory, to detect another cgroup of the same name.
    pub inode: u64,
    /// Which file.
    pub file: ControlFileKind,
    /// Its exact content before our first write (without the newline).
    pub original: Box<str>,
    /// Its content before the write that this record announces.
    pub previous: Box<str>,
    /// The value that we write.
    pub ours: Box<str>,
    /// The CPU that 100 % stands for, or the burst that a `PodQOS` gives; 0 for other files.
    pub base: MilliCpu,
    /// Percent of the base that the pod may use.
    pub ratio: u8,
    /// The pod is in the idle class, or has the lowest weight in its place.
    pub idle: bool,
    /// The rule that caused it.
    pub rule: RuleId,
    /// When it is restored at the latest.
    pub deadline: BootTime,
}

impl JournalRecord {
    /// Whether its pod is throttled; if not, it only has a burst.
    pub const fn is_of_throttle(&self) -> bool {
        self.ratio < 100 || self.idle
    }

    /// Whether it is a burst that a `PodQOS` gives; if not, one lowered for a quota.
    pub fn is_given_burst(&self) -> bool {
        let micros = |text: &str| text.parse::<u64>().ok();
        self.file.role() == Role::Burst && micros(&self.ours) > micros(&self.original)
    }

    /// Whether its cgroup may still exist; false only if it is known to be gone.
    pub fn exists(&self, hierarchy: &Hierarchy) -> bool {
        let Ok(cgroup) = self.cgroup.join(&self.target_cgroup) else {
            return false;
        };
        match CpuDir::open(hierarchy, &cgroup) {
            Ok(dir) => dir.inode() == self.inode,
            Err(error) => !error.is_gone(),
        }
    }
}

/// The journal file of one state directory.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    boot_id: String,
}

/// Why a journal cannot be used. Nothing of it was applied.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The kernel's boot ID cannot be read, so it is unknown whether the cgroups still exist.
    #[error("failed to read the boot ID: {0}")]
    BootId(io::Error),
    /// The file cannot be read.
    #[error("failed to read the journal {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system error.
        source: io::Error,
    },
    /// Another program or version wrote it.
    #[error(
        "failed to use the journal {}: it starts with `{found}`, not with `{MAGIC} {VERSION}`: restore with the \
         version of plimsoll that wrote it, or move the file away if it is not plimsoll's",
        path.display()
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Its first line.
        found: String,
    },
    /// It is damaged.
    #[error(
        "failed to use the journal {}: {reason}: nothing was changed. Each complete line names a cgroup file \
        and its `original`: restore these by hand, then move the journal away (docs/runbook.md, PlimsollAgentsMissing)",
        path.display()
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// It cannot be written.
    #[error("failed to write the journal, so nothing new is throttled: {0}")]
    Write(#[from] ReplaceError),
}

impl JournalError {
    /// The damage, if it is our journal and damaged.
    fn damage(&self) -> Option<String> {
        match self {
            Self::Corrupt { reason, .. } => Some(reason.clone()),
            _ => None,
        }
    }
}

impl Journal {
    /// The journal in `state_dir`, which need not exist yet.
    ///
    /// # Errors
    /// If the kernel's boot ID cannot be read.
    pub fn new(state_dir: &Path) -> Result<Self, JournalError> {
        Ok(Self {
            path: state_dir.join("journal"),
            boot_id: boot_id().map_err(JournalError::BootId)?,
        })
    }

    /// The journal file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The records; empty if there is no journal, or it is from an earlier boot, whose cgroups no longer exist.
    ///
    /// # Errors
    /// If it cannot be read completely and is not known to be from an earlier boot.
    pub fn load(&self) -> Result<Vec<JournalRecord>, JournalError> {
        match self.read() {
            Err(error) if error.damage().is_some() && self.is_of_earlier_boot() => Ok(Vec::new()),
            read => read,
        }
    }

    /// Renames a damaged journal of an earlier boot, and returns the damage and the new path. The caller must hold the
    /// lock of the state directory.
    ///
    /// # Errors
    /// If it cannot be renamed.
    pub fn set_aside(&self) -> io::Result<Option<(String, PathBuf)>> {
        let damage = self.read().err().and_then(|error| error.damage());
        match damage {
            Some(damage) if self.is_of_earlier_boot() => {
                let aside = self.path.with_extension("damaged");
                fs::rename(&self.path, &aside)?;
                Ok(Some((damage, aside)))
            }
            _ => Ok(None),
        }
    }

    /// Whether it was written before this boot and does not contain its ID. Either check alone may be wrong: the ID may
    /// be damaged, and the clock may have been set.
    fn is_of_earlier_boot(&self) -> bool {
        let has_this_id = || {
            let bytes = fs::read(&self.path).ok()?;
            let id = self.boot_id.as_bytes();
            Some(bytes.windows(id.len().max(1)).any(|part| part == id))
        };
        let written_before = || {
            let written = fs::metadata(&self.path).ok()?.modified().ok()?;
            let stat = fs::read("/proc/stat").ok()?;
            let [booted] = keyed(&stat, [b"btime"]);
            Some(written < UNIX_EPOCH + Duration::from_secs(booted?))
        };
        has_this_id() == Some(false) && written_before() == Some(true)
    }

    fn read(&self) -> Result<Vec<JournalRecord>, JournalError> {
        let bytes = match fs::read(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            read => read.map_err(|source| JournalError::Read {
                path: self.path.clone(),
                source,
            })?,
        };
        let (boot, records) = parse(&bytes).map_err(|error| error.at(&self.path))?;
        Ok(if boot == self.boot_id {
            records
        } else {
            Vec::new()
        })
    }

    /// Replaces the journal with these records.
    ///
    /// # Errors
    /// If it cannot be written; the old one is intact then.
    pub fn save(
        &self,
        now: BootTime,
        records: impl IntoIterator<Item = JournalRecord>,
        effects: &mut Effects,
    ) -> Result<(), JournalError> {
        let text = format(&self.boot_id, now, records);
        Ok(write_atomic_with(effects, &self.path, text.as_bytes())?)
    }
}

pub(crate) fn format(
    boot_id: &str,
    now: BootTime,
    records: impl IntoIterator<Item = JournalRecord>,
) -> String {
    let mut text = format!("{MAGIC} {VERSION} {boot_id} {}\n", now.as_nanos());
    for record in records {
        text.push_str(&to_line(&record));
        text.push('\n');
    }
    let sum = crc32fast::hash(text.as_bytes());
    text + &format!("crc32 {sum:08x}\n")
}

#[expect(
    clippy::expect_used,
    reason = "a struct of strings and integers always has a JSON form"
)]
fn to_line(record: &JournalRecord) -> String {
    serde_json::to_string(record).expect("JSON")
}

#[derive(Debug)]
pub(crate) enum ParseError {
    Foreign(String),
    Corrupt(String),
}

impl ParseError {
    fn at(self, path: &Path) -> JournalError {
        let path = path.to_owned();
        match self {
            Self::Foreign(found) => JournalError::Foreign { path, found },
            Self::Corrupt(reason) => JournalError::Corrupt { path, reason },
        }
    }
}

fn corrupt(reason: impl Into<String>) -> ParseError {
    ParseError::Corrupt(reason.into())
}

/// The boot ID and the records of a journal.
pub(crate) fn parse(bytes: &[u8]) -> Result<(String, Vec<JournalRecord>), ParseError> {
    // After a machine crash, a file system may leave a file of the right size without its content.
    if bytes.iter().all(|byte| *byte == 0) {
        return Err(corrupt("it is empty"));
    }
    let known = format!("{MAGIC} {VERSION} ");
    if !bytes.starts_with(known.as_bytes()) {
        let start = &bytes[..bytes.len().min(40)];
        let first = String::from_utf8_lossy(start);
        return Err(ParseError::Foreign(
            first.lines().next().unwrap_or_default().to_owned(),
        ));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| corrupt("it is not text"))?;
    let body = checked(text)?;
    let mut lines = body.lines();
    let header = lines.next().unwrap_or_default();
    let boot = header.split(' ').nth(2).unwrap_or_default().to_owned();
    let records = lines.enumerate().map(|(index, line)| {
        serde_json::from_str(line)
            .map_err(|error| corrupt(format!("line {} is not a record: {error}", index + 2)))
    });
    Ok((boot, records.collect::<Result<_, _>>()?))
}

/// The text without its checksum, which must be correct.
fn checked(text: &str) -> Result<&str, ParseError> {
    let cut = || corrupt("its last line is not a checksum: it was cut short");
    let (body, sum) = text
        .strip_suffix('\n')
        .and_then(|text| text.rsplit_once('\n'))
        .ok_or_else(cut)?;
    let body = &text[..=body.len()];
    let sum = sum.strip_prefix("crc32 ").ok_or_else(cut)?;
    let sum = u32::from_str_radix(sum, 16).map_err(|_| cut())?;
    if sum == crc32fast::hash(body.as_bytes()) {
        Ok(body)
    } else {
        Err(corrupt("its checksum is wrong"))
    }
}

#[cfg(test)]
mod tests;
