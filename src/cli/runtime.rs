//! The one thread on which everything runs that talks to an API server; the metrics API has its own.

use anyhow::Context;
use tokio::runtime::{Builder, Runtime};

/// Starts it.
pub(super) fn start() -> anyhow::Result<Runtime> {
    Builder::new_current_thread()
        .enable_all()
        .build()
        .context("failed to start the runtime")
}
