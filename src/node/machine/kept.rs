//! What a process starts from where nobody tells it anything better: the rules and the pods that the last one had.
//!
//! An agent keeps the `NodeWatermark` that it follows and the pods that it found, and goes on with these while no
//! API server answers:
//!
//! ```text
//! // before Machine::open: the files are replaced whole, so reading needs no lock
//! let mut rules = Kept::<NodeWatermarkSpec>::new(state_dir, POLICIES_FILE, 1, Worth::AnyBoot)?;
//! let spec = rules.read_or_tell();
//! let mut pods = Kept::<Vec<Workload>>::new(state_dir, PODS_FILE, 1, Worth::ThisBoot)?;
//! let pods = still_there(pods.read_or_tell().unwrap_or_default(), &hierarchy);
//! // after Machine::open, which takes the directory: whenever they may have changed
//! rules.keep(&spec)?;
//! ```

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Read};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::state_dir::{self, StateError, boot_id};
use super::workload::Workload;
use crate::node::cgroup::Hierarchy;

/// What the rules in force are compiled from, in the state directory.
pub const POLICIES_FILE: &str = "policies.json";
/// The pods that are looked after.
pub const PODS_FILE: &str = "pods.json";
/// No file of this kind is larger.
pub const MOST_BYTES: usize = 8 << 20;

/// How long what is kept is worth something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worth {
    /// Until the machine is started anew: cgroups, and what runs in them.
    ThisBoot,
    /// Until it is replaced: rules.
    AnyBoot,
}

/// One file of the state directory that holds a `T`. Only its owner may read it: rules may hold the headers of a
/// probe.
#[derive(Debug)]
pub struct Kept<T> {
    path: PathBuf,
    version: u32,
    worth: Worth,
    boot_id: String,
    /// Of the bytes that stand in the file.
    written: Option<u64>,
    content: PhantomData<fn(T) -> T>,
}

/// Why what was kept is not used.
#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    /// It cannot be read, or holds something else.
    #[error("failed to read {}, so it is not used: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: io::Error,
    },
    /// It is not known what it means.
    #[error(
        "failed to use {}, which has format {found}, not {wanted}: another version of plimsoll wrote it",
        path.display()
    )]
    OtherVersion {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
        /// The one that is understood.
        wanted: u32,
    },
    /// What it is about ended with the last boot.
    #[error("{} is from before the machine was started, so it is not used", path.display())]
    OtherBoot {
        /// The file.
        path: PathBuf,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    version: u32,
    boot_id: String,
}

#[derive(Serialize, Deserialize)]
struct Whole<T> {
    #[serde(flatten)]
    head: Head,
    content: T,
}

impl<T: Serialize + DeserializeOwned> Kept<T> {
    /// The file `name` of `state_dir`, which need not be there yet. `version` is that of the format of `T`.
    ///
    /// # Errors
    /// Where the kernel's boot id cannot be read.
    pub fn new(state_dir: &Path, name: &str, version: u32, worth: Worth) -> io::Result<Self> {
        Ok(Self {
            path: state_dir.join(name),
            version,
            worth,
            boot_id: boot_id()?,
            written: None,
            content: PhantomData,
        })
    }

    /// What was kept; `None` where nothing was.
    ///
    /// # Errors
    /// Where something was kept that cannot be used.
    pub fn read(&mut self) -> Result<Option<T>, KeptError> {
        let path = || self.path.clone();
        let unreadable = |source| KeptError::Unreadable {
            path: path(),
            source,
        };
        let bytes = match read_bounded(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(unreadable)?,
        };
        let broken = |error| unreadable(io::Error::new(io::ErrorKind::InvalidData, error));
        let head: Head = serde_json::from_slice(&bytes).map_err(broken)?;
        if head.version != self.version {
            return Err(KeptError::OtherVersion {
                path: path(),
                found: head.version,
                wanted: self.version,
            });
        }
        if self.worth == Worth::ThisBoot && head.boot_id != self.boot_id {
            return Err(KeptError::OtherBoot { path: path() });
        }
        let whole: Whole<T> = serde_json::from_slice(&bytes).map_err(broken)?;
        self.written = Some(hash(&bytes));
        Ok(Some(whole.content))
    }

    /// The same; why something is not used goes to the log.
    pub fn read_or_tell(&mut self) -> Option<T> {
        self.read().unwrap_or_else(|error| {
            if matches!(error, KeptError::OtherBoot { .. }) {
                tracing::info!("{error}");
            } else {
                tracing::warn!("{error}");
            }
            None
        })
    }

    /// Keeps `content` where it differs from what stands in the file; true where it was written.
    ///
    /// # Errors
    /// Where it cannot be written: try again. What is too large to be kept takes the older content with it: that is
    /// not in force any more.
    pub fn keep(&mut self, content: &T) -> Result<bool, StateError> {
        let head = Head {
            version: self.version,
            boot_id: self.boot_id.clone(),
        };
        let bytes = state_dir::line(&Whole { head, content });
        let bytes = bytes.map_err(|error| StateError::write(&self.path, error))?;
        let hash = hash(&bytes);
        if self.written == Some(hash) {
            return Ok(false);
        }
        self.written = None;
        if bytes.len() > MOST_BYTES {
            state_dir::remove(&self.path)?;
            return Err(StateError::write(&self.path, too_large()));
        }
        state_dir::replace_private(&self.path, &bytes)?;
        self.written = Some(hash);
        Ok(true)
    }
}

/// Those whose cgroup still is the one that was found: of the others nobody knows what became.
pub fn still_there(mut workloads: Vec<Workload>, hierarchy: &Hierarchy) -> Vec<Workload> {
    workloads.retain(|known| known.inode != 0 && known.is_there(hierarchy));
    workloads
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let file = File::open(path)?;
    let mut bytes = Vec::new();
    let most = u64::try_from(MOST_BYTES).unwrap_or(u64::MAX);
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() > MOST_BYTES {
        return Err(too_large());
    }
    Ok(bytes)
}

fn too_large() -> io::Error {
    let most = MOST_BYTES >> 20;
    io::Error::new(
        io::ErrorKind::FileTooLarge,
        format!("it is larger than {most} MiB"),
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

    fn kept(dir: &TempDir, version: u32, worth: Worth) -> Kept<Vec<String>> {
        Kept::new(dir.path(), "file.json", version, worth).expect("a boot id")
    }

    fn some() -> Vec<String> {
        vec!["a".to_owned()]
    }

    #[test]
    fn what_is_kept_is_there_for_the_next_process_and_written_only_when_it_differs() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut file = kept(&dir, 1, Worth::ThisBoot);
        assert_eq!(file.read().expect("nothing"), None);
        assert!(file.keep(&some()).expect("written"));
        assert!(!file.keep(&some()).expect("the same"));
        let mut next = kept(&dir, 1, Worth::ThisBoot);
        assert_eq!(next.read().expect("readable"), Some(some()));
        assert!(!next.keep(&some()).expect("the same"));
        assert!(next.keep(&Vec::new()).expect("written"));
        let mode = fs::metadata(dir.path().join("file.json")).expect("there");
        assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn what_another_version_wrote_is_not_guessed_at() {
        let dir = tempfile::tempdir().expect("a temp dir");
        kept(&dir, 2, Worth::AnyBoot)
            .keep(&some())
            .expect("written");
        let error = kept(&dir, 1, Worth::AnyBoot).read().expect_err("refused");
        assert!(
            matches!(error, KeptError::OtherVersion { found: 2, .. }),
            "{error}"
        );
    }

    #[test]
    fn pods_end_with_the_boot_and_rules_do_not() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut old = kept(&dir, 1, Worth::AnyBoot);
        old.boot_id = "another".to_owned();
        old.keep(&some()).expect("written");
        let error = kept(&dir, 1, Worth::ThisBoot).read().expect_err("refused");
        assert!(matches!(error, KeptError::OtherBoot { .. }), "{error}");
        let mut rules = kept(&dir, 1, Worth::AnyBoot);
        assert_eq!(rules.read().expect("readable"), Some(some()));
    }

    #[test]
    fn garbage_and_what_is_too_large_are_refused_with_the_path() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let path = dir.path().join("file.json");
        for garbage in ["", "{", "[]", "{\"version\":1}", "\0"] {
            fs::write(&path, garbage).expect("written");
            let error = kept(&dir, 1, Worth::AnyBoot).read().expect_err(garbage);
            assert!(error.to_string().contains("file.json"), "{error}");
        }
        File::create(&path)
            .expect("made")
            .set_len(MOST_BYTES as u64 + 1)
            .expect("grown");
        let error = kept(&dir, 1, Worth::AnyBoot).read().expect_err("too large");
        assert!(error.to_string().contains("larger than 8 MiB"), "{error}");
    }

    #[test]
    fn what_cannot_be_kept_does_not_leave_something_older_in_its_place() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut file = kept(&dir, 1, Worth::AnyBoot);
        file.keep(&some()).expect("written");
        file.keep(&vec!["x".repeat(MOST_BYTES)])
            .expect_err("too large");
        assert_eq!(kept(&dir, 1, Worth::AnyBoot).read().expect("nothing"), None);
    }

    #[test]
    fn a_pod_is_still_there_where_its_cgroup_is_the_same_folder() {
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
        assert_eq!(still_there(all.clone(), &hierarchy), [there]);
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
