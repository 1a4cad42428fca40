//! Saves the engine's state for the next process.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::saved_file::{SavedFile, Validity};
use super::state_dir::{self, StateError, WriterProcess};
use crate::engine::EngineState;
use crate::engine::load::LoadState;
use crate::engine::time::BootTime;
use crate::engine::window::NodeWindows;

/// Rule states and counters, in the state directory.
pub(super) const ENGINE_FILE: &str = "engine.json";
/// The node's usage over the last hours, in the state directory.
const WINDOWS_FILE: &str = "windows.json";
/// Files of another format are discarded: the windows then start over.
const WINDOWS_FORMAT: u32 = 2;
/// What the load is computed from, in the state directory.
const LOAD_FILE: &str = "load.json";
const LOAD_FORMAT: u32 = 1;
/// How often these two, and an unchanged state, are saved: the longest gap after a process is killed.
const WINDOWS_INTERVAL: Duration = Duration::from_mins(5);
/// How often the state is saved while only counters change.
const SAVE_INTERVAL: Duration = Duration::from_secs(5);

/// Saved state of the engine and the started evictions.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SavedEngine<P> {
    boot_id: String,
    pub state: EngineState,
    #[serde(default = "Vec::new")]
    pub evictions: Vec<P>,
}

impl<P> Default for SavedEngine<P> {
    fn default() -> Self {
        Self {
            boot_id: String::new(),
            state: EngineState::default(),
            evictions: Vec::new(),
        }
    }
}

/// Saves the engine's state, its windows, and what the load is computed from.
#[derive(Debug)]
pub(super) struct EngineStore {
    path: PathBuf,
    writer: WriterProcess,
    last_save: BootTime,
    /// The last save failed.
    failed: bool,
    windows: Option<SavedFile<NodeWindows>>,
    load: Option<SavedFile<LoadState>>,
    last_windows_save: BootTime,
}

impl EngineStore {
    pub(super) fn new(state_dir: &Path, writer: WriterProcess, now: BootTime) -> Self {
        Self {
            path: state_dir.join(ENGINE_FILE),
            writer,
            last_save: now,
            failed: false,
            // Without a boot ID, windows of an earlier boot could not be detected.
            windows: SavedFile::new(state_dir, WINDOWS_FILE, WINDOWS_FORMAT, Validity::ThisBoot)
                .ok(),
            load: SavedFile::new(state_dir, LOAD_FILE, LOAD_FORMAT, Validity::ThisBoot).ok(),
            last_windows_save: now,
        }
    }

    pub(super) const fn writer(&self) -> &WriterProcess {
        &self.writer
    }

    /// Whether it is time to save changed counters.
    pub(super) fn is_due(&self, now: BootTime) -> bool {
        now.since(self.last_save) >= SAVE_INTERVAL
    }

    /// Whether a failed save must be retried.
    pub(super) fn needs_retry(&self, now: BootTime) -> bool {
        self.failed && self.is_due(now)
    }

    pub(super) fn save<P: Serialize>(
        &mut self,
        now: BootTime,
        state: EngineState,
        evictions: Vec<P>,
    ) -> Result<(), StateError> {
        self.last_save = now;
        let boot_id = self.writer.boot_id.clone();
        let saved = SavedEngine {
            boot_id,
            state,
            evictions,
        };
        let result = state_dir::replace(&self.path, &saved);
        self.failed = result.is_err();
        result
    }

    /// Loads the windows saved by the last process of this boot.
    pub(super) fn load_windows(&mut self) -> NodeWindows {
        let saved = self.windows.as_mut().and_then(SavedFile::read_or_log);
        saved.unwrap_or_default()
    }

    /// Loads what the last process of this boot computed the load from.
    pub(super) fn load_load(&mut self) -> LoadState {
        let saved = self.load.as_mut().and_then(SavedFile::read_or_log);
        saved.unwrap_or_default()
    }

    /// Whether it is time to save the windows and the load.
    pub(super) fn are_windows_due(&self, now: BootTime) -> bool {
        now.since(self.last_windows_save) >= WINDOWS_INTERVAL
    }

    pub(super) fn save_windows(
        &mut self,
        now: BootTime,
        windows: &NodeWindows,
        load: &LoadState,
    ) -> Result<(), StateError> {
        self.last_windows_save = now;
        if let Some(file) = &mut self.windows {
            file.save(windows)?;
        }
        if let Some(file) = &mut self.load {
            file.save(load)?;
        }
        Ok(())
    }

    /// Loads the state saved by the last process; after a reboot, what is left of it.
    pub(super) fn load<P: DeserializeOwned>(&self) -> SavedEngine<P> {
        let saved = state_dir::read::<SavedEngine<P>>(&self.path);
        if let Err(error) = &saved
            && error.kind() != io::ErrorKind::NotFound
        {
            let path = self.path.display();
            tracing::warn!(%path, %error, "failed to read the rule states: every rule starts over, using only the journal");
        }
        // Without saved state of this boot, only the journal says what is in force.
        let saved = saved.unwrap_or_default();
        if saved.boot_id == self.writer.boot_id {
            return saved;
        }
        SavedEngine {
            state: saved.state.after_reboot(),
            ..SavedEngine::default()
        }
    }

    /// Removes the saved state, so that the next process starts over.
    pub(super) fn forget(&self) -> Result<(), StateError> {
        state_dir::remove(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn after_a_reboot_only_what_previews_would_have_done_is_known() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let writer = |boot_id: &str| WriterProcess {
            boot_id: boot_id.to_owned(),
            ..WriterProcess::default()
        };
        let store = |boot_id| EngineStore::new(dir.path(), writer(boot_id), BootTime::default());
        let since = "2026-11-21T16:00:00Z";
        let rule = json!({
            "rule": "q/r", "preview": true, "state": "Breached", "breaches": 3, "would": {"since": since},
        });
        let state = json!({"savedAt": 7, "settled": 7, "rules": [rule]});
        let state = serde_json::from_value(state).expect("a state");
        let saved = store("one").save(BootTime::default(), state, vec![1]);
        saved.expect("written");
        let load = |boot_id| {
            let saved = store(boot_id).load::<u32>();
            let state = serde_json::to_value(&saved.state).expect("JSON");
            let rule = &state["rules"][0];
            assert_eq!(rule["would"]["since"], since);
            let facts = [&state["savedAt"], &state["settled"], &rule["breaches"]];
            (facts.map(Value::clone), saved.evictions)
        };
        assert_eq!(load("one"), ([json!(7), json!(7), json!(3)], vec![1]));
        let left = [Value::Null, Value::Null, json!(0)];
        assert_eq!(load("two"), (left, Vec::new()));
    }
}
