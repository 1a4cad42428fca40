//! The file of `--scheduler-policy`: read at the start, and again when it changes.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::crd::scheduler_policy::{self, SchedulerPolicy};

/// How often it is read. A mounted `ConfigMap` changes only once a minute or so.
pub const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// Why the file is not in use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum PolicyFileError {
    /// It can't be read.
    #[error("failed to read {0}: {1}")]
    Read(String, String),
    /// All that is wrong in it, each as `file:line:column: error: message`.
    #[error("{}", .0.join("; "))]
    Invalid(Vec<String>),
}

/// The file.
#[derive(Clone, Debug)]
pub struct PolicyFile {
    path: PathBuf,
    /// The names of the windows of the nodes' settings.
    custom: Vec<Arc<str>>,
    /// What was last found.
    found: Result<String, PolicyFileError>,
}

impl PolicyFile {
    /// Reads the file.
    ///
    /// # Errors
    /// It can't be read, or is invalid.
    pub fn open(
        path: PathBuf,
        custom: Vec<Arc<str>>,
    ) -> Result<(Self, SchedulerPolicy), PolicyFileError> {
        let mut file = Self {
            path,
            custom,
            found: Ok(String::new()),
        };
        file.found = file.read();
        let policy = file.compile(&file.found.clone()?)?;
        Ok((file, policy))
    }

    /// Reads it again. `None`: nothing has changed since the last time.
    pub fn poll(&mut self) -> Option<Result<SchedulerPolicy, PolicyFileError>> {
        let found = self.read();
        if found == self.found {
            return None;
        }
        self.found.clone_from(&found);
        Some(found.and_then(|text| self.compile(&text)))
    }

    fn read(&self) -> Result<String, PolicyFileError> {
        let read = fs::read_to_string(&self.path);
        read.map_err(|error| PolicyFileError::Read(self.name(), error.to_string()))
    }

    fn compile(&self, text: &str) -> Result<SchedulerPolicy, PolicyFileError> {
        let custom = self.custom.iter().map(|name| &**name);
        scheduler_policy::read(text, custom).map_err(|errors| {
            let file = self.name();
            PolicyFileError::Invalid(errors.iter().map(|error| error.in_file(&file)).collect())
        })
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(limit: &str) -> String {
        format!(
            "{{apiVersion: scheduler.policy.crane.io/v1alpha1, kind: DynamicSchedulerPolicy, spec: {{predicate: \
             [{{name: cpu_usage_avg_5m, maxLimitPecent: {limit}}}], priority: [{{name: gpu, weight: 1}}]}}}}"
        )
    }

    #[test]
    fn changes_are_reported_once_each() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("policy.yaml");
        let open = || PolicyFile::open(path.clone(), vec!["gpu".into()]);
        let missing = open().unwrap_err().to_string();
        assert!(missing.starts_with("failed to read "), "{missing}");
        fs::write(&path, policy("0.5")).unwrap();
        let (mut file, first) = open().unwrap();
        assert_eq!(first.thresholds.len(), 1);
        assert_eq!(file.poll(), None);
        fs::write(&path, policy("50")).unwrap();
        let error = file.poll().unwrap().unwrap_err().to_string();
        let wanted =
            "policy.yaml:1:124: error: spec.predicate[0].maxLimitPecent: maxLimitPecent is 50";
        assert!(error.contains(wanted), "{error}");
        assert_eq!(file.poll(), None);
        fs::remove_file(&path).unwrap();
        assert!(file.poll().unwrap().is_err());
        assert_eq!(file.poll(), None);
        fs::write(&path, policy("0.5")).unwrap();
        assert_eq!(file.poll(), Some(Ok(first)));
    }
}
