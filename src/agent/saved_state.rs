//! State saved for a start without an API server: the last rules and pods, and the emergency stop.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::emergency_stop::SavedStop;
use crate::crd::NodeWatermarkSpec;
use crate::engine::time::BootTime;
use crate::node::cgroup::Hierarchy;
use crate::node::machine::saved_file::{
    PODS_FILE, POLICIES_FILE, SavedFile, Validity, retain_existing,
};
use crate::node::machine::workload::Workload;

/// Versions of the file formats.
const RULES_FORMAT: u32 = 1;
const PODS_FORMAT: u32 = 1;
const STOP_FORMAT: u32 = 1;
/// The reason of the emergency stop.
const STOP_FILE: &str = "stop.json";
/// Failed writes are retried this often.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// How long the end waits for one write.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);

/// The saved files.
#[derive(Debug)]
pub struct SavedFiles {
    /// A saved `None` means: there are no rules.
    rules: RetriedFile<Option<Arc<NodeWatermarkSpec>>>,
    pods: RetriedFile<Vec<Workload>>,
    stop: RetriedFile<Option<String>>,
    retried_at: BootTime,
}

/// One file, and the content that it does not have yet.
#[derive(Debug)]
struct RetriedFile<T> {
    file: SavedFile<T>,
    unsaved: Option<T>,
    /// The last write failed, and this was logged.
    failed: bool,
}

impl<T: Clone + Serialize + DeserializeOwned> RetriedFile<T> {
    fn new(state_dir: &Path, name: &str, version: u32, validity: Validity) -> io::Result<Self> {
        Ok(Self {
            file: SavedFile::new(state_dir, name, version, validity)?,
            unsaved: None,
            failed: false,
        })
    }

    fn read(&mut self) -> Option<T> {
        self.file.read_or_log()
    }

    fn save(&mut self, content: &T) {
        self.unsaved = Some(content.clone());
        self.attempt(Duration::ZERO);
    }

    /// Collects a write that was in progress, or with `retries` tries again after a failure.
    fn poll(&mut self, retries: bool) {
        if self.file.is_writing() || retries {
            self.attempt(Duration::ZERO);
        }
    }

    fn attempt(&mut self, timeout: Duration) {
        let Some(content) = &self.unsaved else { return };
        match self.file.save_within(content, timeout) {
            Ok(true) => {
                self.unsaved = None;
                if std::mem::take(&mut self.failed) {
                    tracing::info!("state for a restart is saved again");
                }
            }
            Ok(false) => {}
            Err(error) => {
                if !std::mem::replace(&mut self.failed, true) {
                    tracing::warn!(%error, "failed to save state for a restart without an API server; retrying");
                }
            }
        }
    }
}

impl SavedFiles {
    /// The files of a state directory.
    ///
    /// # Errors
    /// If the kernel's boot id cannot be read.
    pub fn new(state_dir: &Path) -> io::Result<Self> {
        Ok(Self {
            rules: RetriedFile::new(state_dir, POLICIES_FILE, RULES_FORMAT, Validity::AnyBoot)?,
            pods: RetriedFile::new(state_dir, PODS_FILE, PODS_FORMAT, Validity::ThisBoot)?,
            stop: RetriedFile::new(state_dir, STOP_FILE, STOP_FORMAT, Validity::AnyBoot)?,
            retried_at: BootTime::default(),
        })
    }

    /// The last rules.
    pub fn rules(&mut self) -> Option<Arc<NodeWatermarkSpec>> {
        self.rules.read().flatten()
    }

    /// The last pods that still have their cgroups.
    pub fn pods(&mut self, hierarchy: &Hierarchy) -> Vec<Workload> {
        retain_existing(self.pods.read().unwrap_or_default(), hierarchy)
    }

    /// The emergency stop; `None`: it was never saved.
    pub fn stop(&mut self) -> Option<SavedStop> {
        let reason = self.stop.read()?;
        Some(SavedStop { reason })
    }

    /// Saves the rules.
    pub fn save_rules(&mut self, rules: Option<&Arc<NodeWatermarkSpec>>) {
        self.rules.save(&rules.cloned());
    }

    /// Saves the pods.
    pub fn save_pods(&mut self, pods: &Vec<Workload>) {
        self.pods.save(pods);
    }

    /// Saves the reason of the emergency stop, if there is one.
    pub fn save_stop(&mut self, reason: Option<&str>) {
        self.stop.save(&reason.map(str::to_owned));
    }

    /// Continues writes in the background, and retries failed ones every few seconds.
    pub fn poll(&mut self, now: BootTime) {
        let retries = now.since(self.retried_at) >= RETRY_INTERVAL;
        if retries {
            self.retried_at = now;
        }
        self.stop.poll(retries);
        self.rules.poll(retries);
        self.pods.poll(retries);
    }

    /// Waits for writes in the background, for a few seconds: the process ends.
    pub fn finish(&mut self) {
        self.stop.attempt(FINISH_TIMEOUT);
        self.rules.attempt(FINISH_TIMEOUT);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::path::PathBuf;
    use std::sync::{Condvar, Mutex};

    use tempfile::TempDir;

    use super::*;

    /// The temporary path that a file is replaced through: a directory there makes the write fail.
    fn temporary_path(dir: &TempDir, file: &str) -> PathBuf {
        dir.path().join(file).with_extension("new")
    }

    fn at(seconds: u64) -> BootTime {
        BootTime::default() + Duration::from_secs(seconds)
    }

    /// Polls until all is written, and panics if that takes too long.
    fn finish(saved: &mut SavedFiles) {
        saved.finish();
        let unsaved = (&saved.stop.unsaved, &saved.rules.unsaved);
        assert!(matches!(unsaved, (None, None)), "{unsaved:?}");
    }

    fn spec() -> Arc<NodeWatermarkSpec> {
        let spec = serde_json::json!({"nodeUID": "u", "hash": "h"});
        Arc::new(serde_json::from_value(spec).expect("a spec"))
    }

    /// What the next process finds: the reason of the stop, "-" without a stop, "" if unknown; and whether there are rules.
    fn next(dir: &TempDir) -> (String, bool) {
        let mut saved = SavedFiles::new(dir.path()).expect("a boot id");
        let shown = |reason: Option<String>| reason.unwrap_or_else(|| "-".to_owned());
        let stop = saved.stop().map(|stop| shown(stop.reason));
        (stop.unwrap_or_default(), saved.rules().is_some())
    }

    #[test]
    fn the_next_process_knows_that_a_stop_ended() {
        let dir = tempfile::tempdir().expect("a temp dir");
        assert_eq!(next(&dir), (String::new(), false));
        let mut saved = SavedFiles::new(dir.path()).expect("a boot id");
        saved.save_stop(Some("why"));
        finish(&mut saved);
        assert_eq!(next(&dir), ("why".to_owned(), false));
        saved.save_stop(None);
        finish(&mut saved);
        assert_eq!(next(&dir), ("-".to_owned(), false));
    }

    #[test]
    fn a_failed_write_is_retried_with_the_newest_content() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut saved = SavedFiles::new(dir.path()).expect("a boot id");
        saved.save_stop(None);
        saved.save_rules(Some(&spec()));
        finish(&mut saved);
        let paths = [STOP_FILE, POLICIES_FILE].map(|file| temporary_path(&dir, file));
        for path in &paths {
            fs::create_dir(path).expect("made");
        }
        saved.save_rules(None);
        for reason in ["first", "second"] {
            saved.save_stop(Some(reason));
        }
        saved.finish();
        assert!(saved.stop.failed && saved.rules.failed);
        assert_eq!(next(&dir), ("-".to_owned(), true), "the old content stays");
        saved.poll(at(100));
        saved.finish();
        for path in &paths {
            fs::remove_dir(path).expect("gone");
        }
        saved.poll(at(101));
        assert!(!saved.stop.file.is_writing(), "not at each tick");
        assert_eq!(next(&dir), ("-".to_owned(), true));
        saved.poll(at(105));
        finish(&mut saved);
        assert_eq!(next(&dir), ("second".to_owned(), false));
    }

    /// A disk that syncs only when the test lets it, or after 10 s.
    static DISK: (Mutex<bool>, Condvar) = (Mutex::new(false), Condvar::new());

    #[expect(
        clippy::unwrap_in_result,
        clippy::unnecessary_wraps,
        reason = "it has the signature of a sync, and a test fails by panicking"
    )]
    fn sync_slowly(_: &File) -> io::Result<()> {
        let (works, changed) = &DISK;
        let works = works.lock().expect("a lock");
        let waited = changed.wait_timeout_while(works, Duration::from_secs(10), |works| !*works);
        drop(waited.expect("a lock"));
        Ok(())
    }

    #[test]
    fn a_disk_that_does_not_sync_delays_nothing() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let mut saved = SavedFiles::new(dir.path()).expect("a boot id");
        saved.stop.file = saved.stop.file.with_sync(sync_slowly);
        saved.rules.file = saved.rules.file.with_sync(sync_slowly);
        saved.pods.file = saved.pods.file.with_sync(sync_slowly);
        saved.save_rules(Some(&spec()));
        for second in 0..20 {
            saved.save_stop(Some(&format!("reason {second}")));
            saved.save_pods(&Vec::new());
            saved.poll(at(second));
        }
        assert!(saved.stop.file.is_writing() && saved.rules.file.is_writing());
        assert!(saved.pods.unsaved.is_none(), "pods are not synced");
        assert_eq!(next(&dir), (String::new(), false));
        *DISK.0.lock().expect("a lock") = true;
        DISK.1.notify_all();
        finish(&mut saved);
        assert_eq!(next(&dir), ("reason 19".to_owned(), true), "the newest");
    }
}
