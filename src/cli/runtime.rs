//! The single-threaded runtime for everything that talks to an API server; the metrics API has its own.

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

/// Starts the runtime.
pub(super) fn start() -> anyhow::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")
}
