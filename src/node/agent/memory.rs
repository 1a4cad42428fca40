//! What the agent starts from while no API server tells it anything: the rules and pods that the last one had, and
//! whether everything was stopped.

use std::io;
use std::path::Path;
use std::sync::Arc;

use super::emergency_stop::KeptStop;
use crate::crd::NodeWatermarkSpec;
use crate::node::cgroup::Hierarchy;
use crate::node::machine::kept::{Kept, PODS_FILE, POLICIES_FILE, Worth, still_there};
use crate::node::machine::state_dir::StateError;
use crate::node::machine::workload::Workload;

/// The formats of the files.
const RULES_FORMAT: u32 = 1;
const PODS_FORMAT: u32 = 1;
const STOP_FORMAT: u32 = 1;
/// Why everything is stopped, in the state directory.
const STOP_FILE: &str = "stop.json";

/// The files.
#[derive(Debug)]
pub struct Memory {
    /// `None` is content, too: there are no rules.
    rules: Kept<Option<Arc<NodeWatermarkSpec>>>,
    pods: Kept<Vec<Workload>>,
    stop: Kept<Option<String>>,
    failing: bool,
}

impl Memory {
    /// The files of a state directory.
    ///
    /// # Errors
    /// Where the kernel's boot id can't be read.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            rules: Kept::new(state_dir, POLICIES_FILE, RULES_FORMAT, Worth::AnyBoot)?,
            pods: Kept::new(state_dir, PODS_FILE, PODS_FORMAT, Worth::ThisBoot)?,
            stop: Kept::new(state_dir, STOP_FILE, STOP_FORMAT, Worth::AnyBoot)?,
            failing: false,
        })
    }

    /// The rules that were kept last.
    pub fn rules(&mut self) -> Option<Arc<NodeWatermarkSpec>> {
        self.rules.read_or_tell().flatten()
    }

    /// The pods that were looked after last and still have their cgroups.
    pub fn pods(&mut self, hierarchy: &Hierarchy) -> Vec<Workload> {
        still_there(self.pods.read_or_tell().unwrap_or_default(), hierarchy)
    }

    /// Whether everything was stopped; `None`: nothing was kept of it.
    pub fn stop(&mut self) -> Option<KeptStop> {
        let reason = self.stop.read_or_tell()?;
        Some(KeptStop { reason })
    }

    /// Keeps the rules.
    pub fn keep_rules(&mut self, rules: Option<&Arc<NodeWatermarkSpec>>) {
        let kept = self.rules.keep(&rules.cloned());
        self.tell(kept);
    }

    /// Keeps the pods.
    pub fn keep_pods(&mut self, pods: &Vec<Workload>) {
        let kept = self.pods.keep(pods);
        self.tell(kept);
    }

    /// Keeps why everything is stopped, if it is.
    pub fn keep_stop(&mut self, reason: Option<&str>) {
        let kept = self.stop.keep(&reason.map(str::to_owned));
        self.tell(kept);
    }

    fn tell(&mut self, kept: Result<bool, StateError>) {
        match kept {
            Ok(written) => self.failing &= !written,
            Err(error) if !self.failing => {
                tracing::warn!(%error, "a restart without an API server will not know this");
                self.failing = true;
            }
            Err(_) => {}
        }
    }
}
