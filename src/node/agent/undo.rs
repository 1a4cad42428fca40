//! Everything undone: cgroups first, then our marks on the Node.

use std::time::Duration;

use kube::Client;
use tokio::time::timeout;

use super::report::log;
use super::{AgentError, Machine, Options};
use crate::cluster::taint::{self, TaintError};
use crate::engine::time::BootTime;
use crate::node::cgroup::Hierarchy;
use crate::node::machine;

/// The API server has so long to take our marks off the Node: the grace period of the pod runs.
const PATIENCE: Duration = Duration::from_secs(10);

/// Undoes what this process has in force; true where nothing is left.
pub async fn undo(mut machine: Box<Machine>, client: &Client, node: &str, now: BootTime) -> bool {
    machine.restore(now).iter().for_each(log);
    let left = machine.throttled_pods();
    // The task that keeps the taint is to be done with it, before it is looked at once more without it.
    let opened = machine.outside_mut().wait_for_no_taint(PATIENCE).await;
    drop(machine);
    let unmarked = unmark(client, node).await;
    left == 0 && (opened || unmarked)
}

/// Undoes what an earlier process left in force: cgroups from the journal alone, then the marks on the Node where
/// there is a way to an API server. True where nothing is left in cgroups: the controller takes off the taint of an
/// agent that is silent, but nobody else knows what cgroups held.
///
/// # Errors
/// Where another process has the state directory, or the journal cannot be trusted.
pub async fn undo_left(
    options: &Options,
    hierarchy: Hierarchy,
    client: Option<&Client>,
    now: BootTime,
) -> Result<bool, AgentError> {
    let mut left = 0;
    if options.state_dir.is_dir() {
        let restored = machine::restore(&options.state_dir, hierarchy, &[], now)?;
        restored.events.iter().for_each(log);
        left = restored.left;
    } else {
        let dir = options.state_dir.display();
        tracing::info!(%dir, "there is no state directory: no cgroup was changed");
    }
    if let Some(client) = client {
        unmark(client, &options.node).await;
    }
    Ok(left == 0)
}

/// Takes our marks off the Node; whether there are none any more.
async fn unmark(client: &Client, node: &str) -> bool {
    let unmarked = async {
        let seen = taint::read(client, node).await?;
        taint::keep(client, seen, None).await
    };
    let why = match timeout(PATIENCE, unmarked).await {
        Ok(Ok(_) | Err(TaintError::NoNode(_))) => return true,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer from the API server".to_owned(),
    };
    tracing::error!(
        "{why}: where a taint of ours is on the node it stays until the controller takes it off"
    );
    false
}
