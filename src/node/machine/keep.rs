//! What the engine goes on from after a restart.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::kept::{Kept, Worth};
use super::state_dir::{self, StateError, Writer};
use crate::engine::EngineState;
use crate::engine::time::BootTime;
use crate::engine::window::NodeWindows;

/// Rule states and counters, in the state directory.
pub(super) const ENGINE_FILE: &str = "engine.json";
/// The use of the node over the last hours, in the state directory.
const WINDOWS_FILE: &str = "windows.json";
const WINDOWS_FORMAT: u32 = 1;
/// They are kept this often: a process that is killed leaves a gap of at most so long.
const WINDOWS_INTERVAL: Duration = Duration::from_mins(5);
/// While nothing changes but counters, they are kept this often.
const KEEP_INTERVAL: Duration = Duration::from_secs(5);

/// What is kept of the engine, and of the evictions that have begun.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct States<P> {
    boot_id: String,
    pub state: EngineState,
    #[serde(default = "Vec::new")]
    pub evictions: Vec<P>,
}

impl<P> Default for States<P> {
    fn default() -> Self {
        Self {
            boot_id: String::new(),
            state: EngineState::default(),
            evictions: Vec::new(),
        }
    }
}

/// Keeps it.
#[derive(Debug)]
pub(super) struct Keeper {
    path: PathBuf,
    writer: Writer,
    kept: BootTime,
    /// The last that was to be kept could not be.
    owes: bool,
    windows: Option<Kept<NodeWindows>>,
    windows_kept: BootTime,
}

impl Keeper {
    pub(super) fn new(state_dir: &Path, writer: Writer, now: BootTime) -> Self {
        Self {
            path: state_dir.join(ENGINE_FILE),
            writer,
            kept: now,
            owes: false,
            // Without a boot id nobody could tell whose windows they are.
            windows: Kept::new(state_dir, WINDOWS_FILE, WINDOWS_FORMAT, Worth::ThisBoot).ok(),
            windows_kept: now,
        }
    }

    pub(super) const fn writer(&self) -> &Writer {
        &self.writer
    }

    /// Counters that were kept last so long ago are kept anew.
    pub(super) fn is_due(&self, now: BootTime) -> bool {
        now.since(self.kept) >= KEEP_INTERVAL
    }

    /// What could not be written is to be tried again, as it is by now.
    pub(super) fn is_owing(&self, now: BootTime) -> bool {
        self.owes && self.is_due(now)
    }

    pub(super) fn keep<P: Serialize>(
        &mut self,
        now: BootTime,
        state: EngineState,
        evictions: Vec<P>,
    ) -> Result<(), StateError> {
        self.kept = now;
        let boot_id = self.writer.boot_id.clone();
        let states = States {
            boot_id,
            state,
            evictions,
        };
        let kept = state_dir::replace(&self.path, &states);
        self.owes = kept.is_err();
        kept
    }

    /// The windows of the last process of this boot.
    pub(super) fn windows(&mut self) -> NodeWindows {
        let kept = self.windows.as_mut().and_then(Kept::read_or_tell);
        kept.unwrap_or_default()
    }

    /// Windows that were kept last so long ago are kept anew.
    pub(super) fn are_windows_due(&self, now: BootTime) -> bool {
        now.since(self.windows_kept) >= WINDOWS_INTERVAL
    }

    pub(super) fn keep_windows(
        &mut self,
        now: BootTime,
        windows: &NodeWindows,
    ) -> Result<(), StateError> {
        self.windows_kept = now;
        match &mut self.windows {
            Some(kept) => kept.keep(windows).map(|_| ()),
            None => Ok(()),
        }
    }

    /// What the last process of this boot kept.
    pub(super) fn states<P: DeserializeOwned>(&self) -> States<P> {
        let states = state_dir::read::<States<P>>(&self.path);
        if let Err(error) = &states
            && error.kind() != io::ErrorKind::NotFound
        {
            let path = self.path.display();
            tracing::warn!(%path, %error, "failed to read the rule states: every rule begins anew, from the journal alone");
        }
        // Where nothing was kept, or in another boot, the journal alone says what is in force.
        states
            .ok()
            .filter(|states| states.boot_id == self.writer.boot_id)
            .unwrap_or_default()
    }

    /// The next process begins anew.
    pub(super) fn forget(&self) -> Result<(), StateError> {
        state_dir::remove(&self.path)
    }
}
