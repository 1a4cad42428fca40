//! The policies and pods in force, saved for the next start: a manifest that is broken by then changes nothing.

use std::io;
use std::path::Path;
use std::time::Duration;

use super::pods::Declared;
use super::sources::PolicySource;
use crate::node::machine::saved_file::{PODS_FILE, POLICIES_FILE, SavedFile, Validity};
use crate::node::machine::state_dir::StateError;

/// The format version of both files.
const VERSION: u32 = 1;

/// The saved inputs.
#[derive(Debug)]
pub struct Inputs {
    policies: SavedList<PolicySource>,
    pods: SavedList<Declared>,
    /// A preview saves nothing.
    preview: bool,
    failure_reported: bool,
}

#[derive(Debug)]
struct SavedList<T> {
    file: SavedFile<Vec<T>>,
    content: Vec<T>,
    /// The content is not written yet.
    dirty: bool,
}

impl Inputs {
    /// Reads what the last process saved in `state_dir`; logs why something of it cannot be used.
    ///
    /// # Errors
    /// Where the kernel's boot id cannot be read.
    pub fn open(state_dir: &Path, preview: bool) -> io::Result<Self> {
        let policies = SavedFile::new(state_dir, POLICIES_FILE, VERSION, Validity::AnyBoot)?;
        let pods = SavedFile::new(state_dir, PODS_FILE, VERSION, Validity::ThisBoot)?;
        Ok(Self {
            policies: SavedList::open(policies),
            pods: SavedList::open(pods),
            preview,
            failure_reported: false,
        })
    }

    /// The policy objects in force.
    pub fn policies(&self) -> &[PolicySource] {
        &self.policies.content
    }

    /// The managed pods.
    pub fn pods(&self) -> &[Declared] {
        &self.pods.content
    }

    /// Replaces the policy objects in force.
    pub fn set_policies(&mut self, sources: Vec<PolicySource>) {
        self.policies.set(sources);
    }

    /// Replaces the managed pods.
    pub fn set_pods(&mut self, pods: Vec<Declared>) {
        self.pods.set(pods);
    }

    /// Writes unsaved changes, or continues to. A failure is returned once until writing works again.
    pub fn save(&mut self) -> Option<StateError> {
        self.save_within(Duration::ZERO)
    }

    /// Whether a write goes on in the background, so that [`Self::save`] has to be called again.
    pub const fn is_writing(&self) -> bool {
        self.policies.file.is_writing()
    }

    /// The same, but waits for the disk, for about `timeout`.
    pub fn save_within(&mut self, timeout: Duration) -> Option<StateError> {
        if self.preview {
            return None;
        }
        let policies = self.policies.save(timeout);
        let saved = self.pods.save(timeout).and(policies);
        let reported = std::mem::replace(&mut self.failure_reported, saved.is_err());
        saved.err().filter(|_| !reported)
    }
}

impl<T: serde::Serialize + serde::de::DeserializeOwned> SavedList<T> {
    fn open(mut file: SavedFile<Vec<T>>) -> Self {
        let content = file.read_or_log().unwrap_or_default();
        Self {
            file,
            content,
            dirty: false,
        }
    }

    fn set(&mut self, content: Vec<T>) {
        self.content = content;
        self.dirty = true;
    }

    fn save(&mut self, timeout: Duration) -> Result<(), StateError> {
        if self.dirty {
            self.dirty = !self.file.save_within(&self.content, timeout)?;
        }
        Ok(())
    }
}
