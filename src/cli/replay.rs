//! `plimsoll replay`.

use std::process::ExitCode;

/// Arguments of `plimsoll replay`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs it.
pub(super) fn run(_args: &Args) -> anyhow::Result<ExitCode> {
    anyhow::bail!("not built yet")
}
