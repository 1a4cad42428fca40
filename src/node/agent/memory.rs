//! What the agent starts from while no API server tells it anything: the rules and pods that the last one had, and
//! whether everything was stopped.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::emergency_stop::KeptStop;
use crate::crd::NodeWatermarkSpec;
use crate::engine::time::BootTime;
use crate::node::cgroup::Hierarchy;
use crate::node::machine::kept::{Kept, PODS_FILE, POLICIES_FILE, Worth, still_there};
use crate::node::machine::workload::Workload;

/// The formats of the files.
const RULES_FORMAT: u32 = 1;
const PODS_FORMAT: u32 = 1;
const STOP_FORMAT: u32 = 1;
/// Why everything is stopped, in the state directory.
const STOP_FILE: &str = "stop.json";
/// What could not be written is tried again this often.
const RETRY: Duration = Duration::from_secs(5);

/// The files.
#[derive(Debug)]
pub struct Memory {
    /// `None` is content, too: there are no rules.
    rules: Remembered<Option<Arc<NodeWatermarkSpec>>>,
    pods: Remembered<Vec<Workload>>,
    stop: Remembered<Option<String>>,
    tried: BootTime,
}

/// One file, and what is still to be written to it.
#[derive(Debug)]
struct Remembered<T> {
    file: Kept<T>,
    owed: Option<T>,
}

impl<T: Clone + Serialize + DeserializeOwned> Remembered<T> {
    fn new(state_dir: &Path, name: &str, version: u32, worth: Worth) -> io::Result<Self> {
        Ok(Self {
            file: Kept::new(state_dir, name, version, worth)?,
            owed: None,
        })
    }

    fn read(&mut self) -> Option<T> {
        self.file.read_or_tell()
    }

    fn keep(&mut self, content: &T) {
        let told = self.owed.take().is_some();
        if let Err(error) = self.file.keep(content) {
            if !told {
                tracing::warn!(%error, "a restart without an API server will not know this; trying again");
            }
            self.owed = Some(content.clone());
        }
    }

    fn retry(&mut self) {
        let Some(content) = &self.owed else { return };
        if self.file.keep(content).is_ok() {
            self.owed = None;
            tracing::info!("what a restart has to know is written again");
        }
    }
}

impl Memory {
    /// The files of a state directory.
    ///
    /// # Errors
    /// Where the kernel's boot id can't be read.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            rules: Remembered::new(state_dir, POLICIES_FILE, RULES_FORMAT, Worth::AnyBoot)?,
            pods: Remembered::new(state_dir, PODS_FILE, PODS_FORMAT, Worth::ThisBoot)?,
            stop: Remembered::new(state_dir, STOP_FILE, STOP_FORMAT, Worth::AnyBoot)?,
            tried: BootTime::default(),
        })
    }

    /// The rules that were kept last.
    pub fn rules(&mut self) -> Option<Arc<NodeWatermarkSpec>> {
        self.rules.read().flatten()
    }

    /// The pods that were looked after last and still have their cgroups.
    pub fn pods(&mut self, hierarchy: &Hierarchy) -> Vec<Workload> {
        still_there(self.pods.read().unwrap_or_default(), hierarchy)
    }

    /// Whether everything was stopped; `None`: nothing was kept of it.
    pub fn stop(&mut self) -> Option<KeptStop> {
        let reason = self.stop.read()?;
        Some(KeptStop { reason })
    }

    /// Keeps the rules.
    pub fn keep_rules(&mut self, rules: Option<&Arc<NodeWatermarkSpec>>) {
        self.rules.keep(&rules.cloned());
    }

    /// Keeps the pods.
    pub fn keep_pods(&mut self, pods: &Vec<Workload>) {
        self.pods.keep(pods);
    }

    /// Keeps why everything is stopped, if it is.
    pub fn keep_stop(&mut self, reason: Option<&str>) {
        self.stop.keep(&reason.map(str::to_owned));
    }

    /// Tries again what could not be written, every few seconds.
    pub fn retry(&mut self, now: BootTime) {
        if now.since(self.tried) >= RETRY {
            self.tried = now;
            self.stop.retry();
            self.rules.retry();
            self.pods.retry();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;

    use tempfile::TempDir;

    use super::*;

    /// Where a file is replaced by way of, so that it cannot be.
    fn obstacle(dir: &TempDir, file: &str) -> PathBuf {
        dir.path().join(file).with_extension("new")
    }

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    fn spec() -> Arc<NodeWatermarkSpec> {
        let spec = serde_json::json!({"nodeUID": "u", "hash": "h"});
        Arc::new(serde_json::from_value(spec).expect("a spec"))
    }

    /// What the next process finds: why everything is stopped, "-" where it is not, "" where nobody knows; and whether there are rules.
    fn next(dir: &TempDir) -> (String, bool) {
        let mut memory = Memory::new(dir.path()).expect("a boot id");
        let told = |reason: Option<String>| reason.unwrap_or_else(|| "-".to_owned());
        let stop = memory.stop().map(|stop| told(stop.reason));
        (stop.unwrap_or_default(), memory.rules().is_some())
    }

    #[test]
    fn that_a_stop_is_over_is_known_to_the_next_process_too() {
        let dir = tempfile::tempdir().expect("a temp dir");
        assert_eq!(next(&dir), (String::new(), false));
        let mut memory = Memory::new(dir.path()).expect("a boot id");
        memory.keep_stop(Some("why"));
        assert_eq!(next(&dir), ("why".to_owned(), false));
        memory.keep_stop(None);
        assert_eq!(next(&dir), ("-".to_owned(), false));
    }

    #[test]
    fn what_could_not_be_written_is_written_later_as_it_is_by_then() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut memory = Memory::new(dir.path()).expect("a boot id");
        memory.keep_stop(None);
        memory.keep_rules(Some(&spec()));
        let ways = [STOP_FILE, POLICIES_FILE].map(|file| obstacle(&dir, file));
        for way in &ways {
            fs::create_dir(way).expect("made");
        }
        memory.keep_rules(None);
        for reason in ["first", "second"] {
            memory.keep_stop(Some(reason));
        }
        memory.retry(at(100));
        assert_eq!(next(&dir), ("-".to_owned(), true), "the old ones stand");
        for way in &ways {
            fs::remove_dir(way).expect("gone");
        }
        memory.retry(at(101));
        assert_eq!(next(&dir), ("-".to_owned(), true), "not at each tick");
        memory.retry(at(105));
        assert_eq!(next(&dir), ("second".to_owned(), false));
    }
}
