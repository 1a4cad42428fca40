//! The scheduling state file: what a job launcher asks before it starts more work on this machine.

use std::path::{Path, PathBuf};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::engine::plan::Scheduling;
use crate::engine::policy::{RuleId, TaintEffect};
use crate::node::machine::state_dir::{self, StateError, WriterProcess};

/// Its name in the state directory.
pub const FILE: &str = "scheduling.json";

/// Whether new work may be started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SchedulingState {
    /// New work may be started.
    pub schedulable: bool,
    /// Its effect, while new work is not allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<TaintEffect>,
    /// The rules that disallow it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<RuleId>,
    /// When this was decided.
    pub since: Timestamp,
    /// The process that decided. The state is void once that process is gone.
    pub writer: WriterProcess,
}

/// Writes the file when the plan changes.
#[derive(Debug)]
pub struct SchedulingFile {
    path: PathBuf,
    writer: WriterProcess,
    current: Option<SchedulingState>,
}

impl SchedulingFile {
    /// The file in `state_dir`. What an earlier process of this boot left there stays valid until the first full
    /// evaluation, now with `writer` as its writer.
    pub fn open(state_dir: &Path, writer: &WriterProcess) -> Self {
        let path = state_dir.join(FILE);
        let former: Option<SchedulingState> = state_dir::read(&path).ok();
        let former = former.filter(|state| state.writer.boot_id == writer.boot_id);
        let mut file = Self {
            path,
            writer: writer.clone(),
            current: None,
        };
        if let Some(state) = former {
            let ours = SchedulingState {
                writer: writer.clone(),
                ..state
            };
            // If this fails, the first evaluation tries again.
            if state_dir::replace(&file.path, &ours).is_ok() {
                file.current = Some(ours);
            }
        }
        file
    }

    /// The current decision; `None` before the first full evaluation.
    pub const fn current(&self) -> Option<&SchedulingState> {
        self.current.as_ref()
    }

    /// Writes the file if `wanted` differs from it; true if it did. Does not allocate otherwise.
    ///
    /// # Errors
    /// Where the file cannot be written; the old one stays, and the next call tries again.
    pub fn update(&mut self, wanted: &Scheduling, time: Timestamp) -> Result<bool, StateError> {
        if self.matches(wanted) {
            return Ok(false);
        }
        let (effect, rules) = match wanted {
            Scheduling::Unchanged => return Ok(false),
            Scheduling::Enabled => (None, Vec::new()),
            Scheduling::Disabled { effect, rules } => (Some(*effect), rules.clone()),
        };
        let state = SchedulingState {
            schedulable: effect.is_none(),
            effect,
            rules,
            since: time,
            writer: self.writer.clone(),
        };
        state_dir::replace(&self.path, &state)?;
        self.current = Some(state);
        Ok(true)
    }

    fn matches(&self, wanted: &Scheduling) -> bool {
        match (wanted, &self.current) {
            (Scheduling::Unchanged, _) => true,
            (_, None) => false,
            (Scheduling::Enabled, Some(state)) => state.schedulable,
            (Scheduling::Disabled { effect, rules }, Some(state)) => {
                state.effect == Some(*effect) && state.rules == *rules
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn boot(id: &str) -> WriterProcess {
        WriterProcess {
            boot_id: id.to_owned(),
            ..WriterProcess::default()
        }
    }

    fn read(path: &Path) -> SchedulingState {
        state_dir::read(path).expect("readable")
    }

    fn disabled(rules: &[&str]) -> Scheduling {
        Scheduling::Disabled {
            effect: TaintEffect::NoSchedule,
            rules: rules.iter().copied().map(RuleId::from).collect(),
        }
    }

    #[test]
    fn the_file_follows_the_plans_and_survives_a_restart_within_a_boot() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let path = dir.path().join(FILE);
        let mut file = SchedulingFile::open(dir.path(), &boot("one"));
        let time = Timestamp::UNIX_EPOCH;
        assert!(
            !file
                .update(&Scheduling::Unchanged, time)
                .expect("nothing to write")
        );
        assert!(!path.exists());
        assert!(file.update(&disabled(&["n/a"]), time).expect("written"));
        assert!(
            !file
                .update(&disabled(&["n/a"]), time)
                .expect("nothing to write")
        );
        let written = read(&path);
        assert!(!written.schedulable);
        assert_eq!(written.rules, [RuleId::from("n/a")]);

        let mut next = SchedulingFile::open(dir.path(), &boot("one"));
        assert_eq!(next.current(), Some(&written));
        assert!(
            !next
                .update(&Scheduling::Unchanged, time)
                .expect("nothing to write")
        );
        assert!(next.update(&Scheduling::Enabled, time).expect("written"));
        assert!(read(&path).schedulable);
        assert_eq!(
            SchedulingFile::open(dir.path(), &boot("two")).current(),
            None
        );
    }

    #[test]
    fn a_failed_write_is_tried_again() {
        let dir = tempfile::tempdir().expect("a temp dir");
        let state_dir = dir.path().join("later");
        let mut file = SchedulingFile::open(&state_dir, &boot("one"));
        let time = Timestamp::UNIX_EPOCH;
        file.update(&Scheduling::Enabled, time)
            .expect_err("no directory");
        fs::create_dir(&state_dir).expect("a directory");
        assert!(file.update(&Scheduling::Enabled, time).expect("written"));
    }
}
