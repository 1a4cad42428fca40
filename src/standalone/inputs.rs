//! The policies and pods in force, kept for the next start: a file that has turned broken by then loses nothing.

use std::io;
use std::path::Path;

use super::pods::Declared;
use super::sources::Source;
use crate::node::machine::kept::{Kept, PODS_FILE, POLICIES_FILE, Worth};
use crate::node::machine::state_dir::StateError;

/// The version of the format of either file.
const VERSION: u32 = 1;

/// What is kept of the inputs.
#[derive(Debug)]
pub struct Inputs {
    policies: Part<Source>,
    pods: Part<Declared>,
    /// Nothing is kept of a preview: it is no start that another one goes on from.
    preview: bool,
    told: bool,
}

#[derive(Debug)]
struct Part<T> {
    file: Kept<Vec<T>>,
    content: Vec<T>,
    /// The file does not say that yet.
    due: bool,
}

impl Inputs {
    /// What the last process kept in `state_dir`; why something of it is not used goes to the log.
    ///
    /// # Errors
    /// Where the kernel's boot id cannot be read.
    pub fn open(state_dir: &Path, preview: bool) -> io::Result<Self> {
        let policies = Kept::new(state_dir, POLICIES_FILE, VERSION, Worth::AnyBoot)?;
        let pods = Kept::new(state_dir, PODS_FILE, VERSION, Worth::ThisBoot)?;
        Ok(Self {
            policies: Part::open(policies),
            pods: Part::open(pods),
            preview,
            told: false,
        })
    }

    /// The policy objects in force.
    pub fn policies(&self) -> &[Source] {
        &self.policies.content
    }

    /// The pods that are looked after.
    pub fn pods(&self) -> &[Declared] {
        &self.pods.content
    }

    /// Other policy objects are in force.
    pub fn set_policies(&mut self, sources: Vec<Source>) {
        self.policies.set(sources);
    }

    /// Other pods are looked after.
    pub fn set_pods(&mut self, pods: Vec<Declared>) {
        self.pods.set(pods);
    }

    /// Writes what is not written yet. Why that fails is told once until it works again.
    pub fn keep(&mut self) -> Option<StateError> {
        if self.preview {
            return None;
        }
        let kept = self.policies.keep().and_then(|()| self.pods.keep());
        let told = std::mem::replace(&mut self.told, kept.is_err());
        kept.err().filter(|_| !told)
    }
}

impl<T: serde::Serialize + serde::de::DeserializeOwned> Part<T> {
    fn open(mut file: Kept<Vec<T>>) -> Self {
        let content = file.read_or_tell().unwrap_or_default();
        Self {
            file,
            content,
            due: false,
        }
    }

    fn set(&mut self, content: Vec<T>) {
        self.content = content;
        self.due = true;
    }

    fn keep(&mut self) -> Result<(), StateError> {
        if self.due {
            self.file.keep(&self.content)?;
            self.due = false;
        }
        Ok(())
    }
}
