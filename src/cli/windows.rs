//! `--windows`: the windows of the node's settings.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::settings_file;
use crate::crd::windows;
use crate::engine::window::CustomWindow;

/// The file of windows that this process measures.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct WindowsFile {
    /// Windows over metrics of the node: each is a metric for rules, in reports and on /metrics. A YAML file such as
    /// `metrics: [{name: disk_busy_avg_5m, source: disk_utilization, window: avg_5m, period: 3m}]`; read once
    #[arg(long = "windows", value_name = "FILE")]
    file: Option<PathBuf>,
}

impl WindowsFile {
    /// The windows; none without a file.
    pub(super) fn read(&self) -> anyhow::Result<Arc<[CustomWindow]>> {
        let windows = self.file.as_deref().map(read).transpose()?;
        Ok(windows.unwrap_or_default())
    }
}

/// The file of windows that the agents measure.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AgentWindowsFile {
    /// The file that agents are started with as --windows, so that rules on these windows are known
    #[arg(long = "windows", value_name = "FILE")]
    file: Option<PathBuf>,
}

impl AgentWindowsFile {
    /// The windows; `None` if they are not known.
    pub(super) fn read(&self) -> anyhow::Result<Option<Arc<[CustomWindow]>>> {
        self.file.as_deref().map(read).transpose()
    }
}

fn read(path: &Path) -> anyhow::Result<Arc<[CustomWindow]>> {
    Ok(settings_file::read(path, windows::read)?.into())
}
