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
/// How often these two are saved: the longest gap after a process is killed.
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

    /// Loads the state saved by the last process of this boot.
    pub(super) fn load<P: DeserializeOwned>(&self) -> SavedEngine<P> {
        let saved = state_dir::read::<SavedEngine<P>>(&self.path);
        if let Err(error) = &saved
            && error.kind() != io::ErrorKind::NotFound
        {
            let path = self.path.display();
            tracing::warn!(%path, %error, "failed to read the rule states: every rule starts over, using only the journal");
        }
        // Without saved state of this boot, only the journal says what is in force.
        saved
            .ok()
            .filter(|saved| saved.boot_id == self.writer.boot_id)
            .unwrap_or_default()
    }

    /// Removes the saved state, so that the next process starts over.
    pub(super) fn forget(&self) -> Result<(), StateError> {
        state_dir::remove(&self.path)
    }
}
