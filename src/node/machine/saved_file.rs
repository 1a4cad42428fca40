//! Files in the state directory with what the last process knew: rules, pods, the emergency stop, windows and load. They are
//! used until newer values are available.
//!
//! An agent saves its `NodeWatermark` and the pods that it found, and uses them while no API server answers:
//!
//! ```text
//! // before Machine::open: the files are replaced atomically, so reading needs no lock
//! let mut rules = SavedFile::<NodeWatermarkSpec>::new(state_dir, POLICIES_FILE, 1, Validity::AnyBoot)?;
//! let spec = rules.read_or_log();
//! let mut pods = SavedFile::<Vec<Workload>>::new(state_dir, PODS_FILE, 1, Validity::ThisBoot)?;
//! let pods = retain_existing(pods.read_or_log().unwrap_or_default(), &hierarchy);
//! // after Machine::open, which locks the directory: whenever they may have changed, and until it returns true
//! rules.save(&spec)?;
//! ```

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::state_dir::{self, StateError};
use super::workload::Workload;
use crate::clock::boot_id;
use crate::node::cgroup::Hierarchy;

/// The source of the rules in force, in the state directory.
pub const POLICIES_FILE: &str = "policies.json";
/// The managed pods.
pub const PODS_FILE: &str = "pods.json";
/// Maximum file size.
pub const MAX_FILE_SIZE: usize = 8 << 20;

/// How long a saved file is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// Until the next reboot: cgroups and their processes.
    ThisBoot,
    /// Until it is replaced (rules). Such a file is synced.
    AnyBoot,
}

/// Syncs a file.
pub type SyncFn = fn(&File) -> io::Result<()>;

/// One file of the state directory that holds a `T`. Only its owner may read it, since rules may contain the headers
/// of a probe.
#[derive(Debug)]
pub struct SavedFile<T> {
    path: PathBuf,
    version: u32,
    validity: Validity,
    boot_id: String,
    /// Hash of the file's content.
    written: Option<u64>,
    /// How it is synced if it is valid after a reboot.
    sync: SyncFn,
    /// The write in progress.
    background: Option<BackgroundWrite>,
    content: PhantomData<fn(T) -> T>,
}

/// A write in the background, since a sync may take long.
#[derive(Debug)]
struct BackgroundWrite {
    hash: u64,
    result: Receiver<Result<(), StateError>>,
}

/// Why a saved file is not used.
#[derive(Debug, thiserror::Error)]
pub enum SavedFileError {
    /// It cannot be read or parsed.
    #[error("failed to read {}, so it is not used: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// Its format is unknown.
    #[error(
        "failed to use {}, which has format {found}, not {wanted}: another version of plimsoll wrote it",
        path.display()
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The supported format.
        wanted: u32,
    },
    /// It is from an earlier boot.
    #[error("{} is from an earlier boot, so it is not used", path.display())]
    OtherBoot {
        /// The file.
        path: PathBuf,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    version: u32,
    boot_id: String,
}

#[derive(Serialize, Deserialize)]
struct Document<T> {
    #[serde(flatten)]
    head: Header,
    content: T,
}

impl<T: Serialize + DeserializeOwned> SavedFile<T> {
    /// The file `name` of `state_dir`, which need not exist yet. `version` is the format version of `T`.
    ///
    /// # Errors
    /// If the kernel's boot ID cannot be read.
    pub fn new(state_dir: &Path, name: &str, version: u32, validity: Validity) -> io::Result<Self> {
        Ok(Self {
            path: state_dir.join(name),
            version,
            validity,
            boot_id: boot_id()?,
            written: None,
            sync: File::sync_all,
            background: None,
            content: PhantomData,
        })
    }

    /// Syncs by `sync`, so that a test can delay it.
    #[must_use]
    pub fn with_sync(self, sync: SyncFn) -> Self {
        Self { sync, ..self }
    }

    /// Reads the saved value; `None` if there is none.
    ///
    /// # Errors
    /// If the file cannot be used.
    pub fn read(&mut self) -> Result<Option<T>, SavedFileError> {
        let path = || self.path.clone();
        let unreadable = |source| SavedFileError::Unreadable {
            path: path(),
            source,
        };
        let bytes = match read_bounded(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(unreadable)?,
        };
        let broken = |error| unreadable(io::Error::new(io::ErrorKind::InvalidData, error));
        let head: Header = serde_json::from_slice(&bytes).map_err(broken)?;
        if head.version != self.version {
            return Err(SavedFileError::OtherVersion {
                path: path(),
                found: head.version,
                wanted: self.version,
            });
        }
        if self.validity == Validity::ThisBoot && head.boot_id != self.boot_id {
            return Err(SavedFileError::OtherBoot { path: path() });
        }
        let document: Document<T> = serde_json::from_slice(&bytes).map_err(broken)?;
        self.written = Some(hash(&bytes));
        Ok(Some(document.content))
    }

    /// Like [`Self::read`], with errors logged.
    pub fn read_or_log(&mut self) -> Option<T> {
        self.read().unwrap_or_else(|error| {
            if matches!(error, SavedFileError::OtherBoot { .. }) {
                tracing::info!("{error}");
            } else {
                tracing::warn!("{error}");
            }
            None
        })
    }

    /// Saves `content` if it differs from the file's content. Returns whether the file has it: one that is valid after a reboot
    /// is written in the background. Until it has, call this again with the newest content.
    ///
    /// # Errors
    /// If it cannot be written; try again. If `content` is too large, the old file is removed, since it is obsolete.
    pub fn save(&mut self, content: &T) -> Result<bool, StateError> {
        if !self.collect(Duration::ZERO)? {
            return Ok(false);
        }
        let head = Header {
            version: self.version,
            boot_id: self.boot_id.clone(),
        };
        let bytes = state_dir::line(&Document { head, content });
        let bytes = bytes.map_err(|error| StateError::write(&self.path, error))?;
        let hash = hash(&bytes);
        if self.written == Some(hash) {
            return Ok(true);
        }
        self.written = None;
        if bytes.len() > MAX_FILE_SIZE {
            state_dir::remove(&self.path)?;
            return Err(StateError::write(&self.path, too_large()));
        }
        match self.validity {
            Validity::ThisBoot => state_dir::replace_private(&self.path, &bytes, |_| Ok(()))?,
            Validity::AnyBoot => {
                self.start_write(bytes, hash)?;
                return Ok(false);
            }
        }
        self.written = Some(hash);
        Ok(true)
    }

    /// Whether a write goes on in the background.
    pub const fn is_writing(&self) -> bool {
        self.background.is_some()
    }

    /// Like [`Self::save`], but waits for the disk, for about `timeout`.
    ///
    /// # Errors
    /// See [`Self::save`].
    pub fn save_within(&mut self, content: &T, timeout: Duration) -> Result<bool, StateError> {
        self.collect(timeout)?;
        Ok(self.save(content)? || (self.collect(timeout)? && self.save(content)?))
    }

    fn start_write(&mut self, bytes: Vec<u8>, hash: u64) -> Result<(), StateError> {
        let (path, sync) = (self.path.clone(), self.sync);
        let (sender, result) = mpsc::channel();
        let write = move || {
            // Without a receiver, the process is ending.
            let _ended = sender.send(state_dir::replace_private(&path, &bytes, sync));
        };
        let thread = thread::Builder::new().name("saved-file".to_owned());
        let started = thread.spawn(write);
        started.map_err(|error| StateError::write(&self.path, error))?;
        self.background = Some(BackgroundWrite { hash, result });
        Ok(())
    }

    /// Collects the result of a background write. Returns whether none is in progress, after at most `timeout`.
    fn collect(&mut self, timeout: Duration) -> Result<bool, StateError> {
        let Some(write) = self.background.take() else {
            return Ok(true);
        };
        match write.result.recv_timeout(timeout) {
            Err(RecvTimeoutError::Timeout) => {
                self.background = Some(write);
                return Ok(false);
            }
            Err(RecvTimeoutError::Disconnected) => {
                let error = io::Error::other("the thread that wrote it panicked");
                return Err(StateError::write(&self.path, error));
            }
            Ok(result) => result?,
        }
        self.written = Some(write.hash);
        Ok(true)
    }
}

/// The workloads whose cgroup still exists.
pub fn retain_existing(mut workloads: Vec<Workload>, hierarchy: &Hierarchy) -> Vec<Workload> {
    workloads.retain(|known| known.inode != 0 && known.exists(hierarchy));
    workloads
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    let max = u64::try_from(MAX_FILE_SIZE).unwrap_or(u64::MAX);
    file.take(max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() > MAX_FILE_SIZE {
        return Err(too_large());
    }
    Ok(bytes)
}

fn too_large() -> io::Error {
    let max = MAX_FILE_SIZE >> 20;
    io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("it is larger than {max} MiB"),
    )
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::sync::Arc;

    use tempfile::TempDir;

    use super::*;
    use crate::crd::pod_facts::ContainerFacts;
    use crate::engine::pod::{Pod, PodUid, QosClass};
    use crate::node::cgroup::CgroupPath;

    fn open(dir: &TempDir, version: u32, validity: Validity) -> SavedFile<Vec<String>> {
        SavedFile::new(dir.path(), "file.json", version, validity).expect("a boot ID")
    }

    fn some() -> Vec<String> {
        vec!["a".to_owned()]
    }

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn save(file: &mut SavedFile<Vec<String>>, content: &Vec<String>) {
        assert!(file.save_within(content, TIMEOUT).expect("written"));
    }

    #[test]
    fn a_saved_value_is_read_back_and_written_only_when_changed() {
        for validity in [Validity::ThisBoot, Validity::AnyBoot] {
            let dir = tempfile::tempdir().expect("a temp dir");
            let metadata = || fs::metadata(dir.path().join("file.json")).expect("there");
            let mut file = open(&dir, 1, validity);
            assert_eq!(file.read().expect("nothing"), None);
            save(&mut file, &some());
            let written = metadata().ino();
            save(&mut file, &some());
            let mut next = open(&dir, 1, validity);
            assert_eq!(next.read().expect("readable"), Some(some()));
            assert!(next.save(&some()).expect("the same"));
            assert_eq!(metadata().ino(), written, "{validity:?}");
            save(&mut next, &Vec::new());
            assert_ne!(metadata().ino(), written, "{validity:?}");
            assert_eq!(metadata().permissions().mode() & 0o777, 0o600);
        }
    }

    /// A file that need not survive a reboot is never synced: it is there at once, whatever the disk does.
    #[test]
    fn only_a_file_valid_after_a_reboot_is_synced() {
        let failing: SyncFn = |_| Err(io::Error::other("no disk"));
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut file = open(&dir, 1, Validity::ThisBoot).with_sync(failing);
        assert!(file.save(&some()).expect("not synced"));
        let mut file = open(&dir, 1, Validity::AnyBoot).with_sync(failing);
        let error = file.save_within(&some(), TIMEOUT).expect_err("no disk");
        assert!(error.to_string().contains("no disk"), "{error}");
        let mut file = file.with_sync(File::sync_all);
        save(&mut file, &some());
    }

    #[test]
    fn another_format_version_is_rejected() {
        let dir = tempfile::tempdir().expect("a temp dir");
        save(&mut open(&dir, 2, Validity::AnyBoot), &some());
        let error = open(&dir, 1, Validity::AnyBoot)
            .read()
            .expect_err("refused");
        assert!(
            matches!(error, SavedFileError::OtherVersion { found: 2, .. }),
            "{error}"
        );
    }

    #[test]
    fn pods_are_valid_for_one_boot_and_rules_for_any() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut old = open(&dir, 1, Validity::AnyBoot);
        old.boot_id = "another".to_owned();
        save(&mut old, &some());
        let error = open(&dir, 1, Validity::ThisBoot)
            .read()
            .expect_err("refused");
        assert!(matches!(error, SavedFileError::OtherBoot { .. }), "{error}");
        let mut rules = open(&dir, 1, Validity::AnyBoot);
        assert_eq!(rules.read().expect("readable"), Some(some()));
    }

    #[test]
    fn garbage_and_oversized_files_are_rejected_with_the_path() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let path = dir.path().join("file.json");
        for garbage in ["", "{", "[]", "{\"version\":1}", "\0"] {
            fs::write(&path, garbage).expect("written");
            let error = open(&dir, 1, Validity::AnyBoot).read().expect_err(garbage);
            assert!(error.to_string().contains("file.json"), "{error}");
        }
        File::create(&path)
            .expect("made")
            .set_len(MAX_FILE_SIZE as u64 + 1)
            .expect("grown");
        let error = open(&dir, 1, Validity::AnyBoot)
            .read()
            .expect_err("too large");
        assert!(error.to_string().contains("larger than 8 MiB"), "{error}");
    }

    #[test]
    fn a_value_that_cannot_be_saved_removes_the_old_file() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut file = open(&dir, 1, Validity::AnyBoot);
        save(&mut file, &some());
        file.save(&vec!["x".repeat(MAX_FILE_SIZE)])
            .expect_err("too large");
        assert_eq!(
            open(&dir, 1, Validity::AnyBoot).read().expect("nothing"),
            None
        );
    }

    #[test]
    fn a_pod_still_exists_if_its_cgroup_has_the_same_inode() {
        let root = tempfile::tempdir().expect("a temp dir");
        let hierarchy = Hierarchy::V2 {
            root: root.path().to_owned(),
        };
        fs::create_dir(root.path().join("pod")).expect("made");
        let inode = fs::metadata(root.path().join("pod")).expect("there").ino();
        let workload = |cgroup: &str, inode| Workload {
            pod: Arc::new(pod()),
            cgroup: CgroupPath::new(cgroup).expect("a path"),
            inode,
            containers: Some(ContainerFacts::default()),
        };
        let there = workload("pod", inode);
        let all = vec![
            there.clone(),
            workload("pod", inode + 1),
            workload("gone", inode),
            workload("pod", 0),
        ];
        assert_eq!(retain_existing(all.clone(), &hierarchy), [there]);
        let text = serde_json::to_string(&all).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Vec<Workload>>(&text).expect("read"),
            all
        );
    }

    fn pod() -> Pod {
        serde_json::from_value(serde_json::json!({
            "uid": PodUid::from("u"), "namespace": "n", "name": "p", "qos": QosClass::Burstable,
            "running": true, "grace": {"secs": 30, "nanos": 0},
        }))
        .expect("a pod")
    }
}
