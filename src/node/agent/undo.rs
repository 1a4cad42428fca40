//! Everything undone: cgroups first, then our marks on the Node.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::time::timeout;

use super::report::{Reporter, log};
use super::{AgentError, Machine, Options};
use crate::cluster::backoff::backoff;
use crate::cluster::taint::{self, Bearing, TaintError};
use crate::engine::time::BootTime;
use crate::node::cgroup::Hierarchy;
use crate::node::machine;
use crate::node::machine::state_dir::Writer;
use crate::node::report::farewell::{self, Left};

/// The API server has so long to take our marks off the Node, and as long to be told: the grace period of the pod runs.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pauses between tries to tell it.
const PAUSES: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));

/// Undoes what this process has in force; true where nothing is left.
pub async fn undo(
    mut machine: Box<Machine>,
    reporter: Reporter,
    client: &Client,
    node: &str,
    why: &str,
    now: BootTime,
) -> bool {
    // What was asked for and not sent yet is not sent any more: no rule wants it.
    machine
        .outside_mut()
        .set_policy(Arc::default(), Arc::default());
    machine.restore(now).iter().for_each(log);
    let names = machine.records();
    let names = names.filter_map(|it| Some((it.uid.clone(), machine.name(&it.uid)?)));
    let left = Left {
        names: names.collect(),
        records: machine.records().collect(),
    };
    let boot_id = machine.writer().boot_id.clone();
    // The tasks that keep the taint and the status are to be done, before both are looked at once more without them.
    let taint = machine.outside_mut().wait_for_no_taint(PATIENCE);
    let (opened, ()) = tokio::join!(taint, reporter.end(PATIENCE));
    drop(machine);
    let unmarked = unmark(client, node).await;
    tell(client, node, &boot_id, why, &left).await;
    left.records.is_empty() && (opened || unmarked)
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
    why: &str,
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
        // Where something is left, the status of the agent that did it still says what.
        if left == 0 {
            let this = Writer::this_process().map_err(AgentError::BootId)?;
            let none = Left::default();
            tell(client, &options.node, &this.boot_id, why, &none).await;
        }
    }
    Ok(left == 0)
}

/// Says in the status that nothing is in force any more.
async fn tell(client: &Client, node: &str, boot_id: &str, why: &str, left: &Left) {
    let why = format!("{why}: the agent has undone what was in force");
    let told = async {
        for pause in backoff(PAUSES.0, PAUSES.1) {
            match farewell::tell(client, node, boot_id, &why, left).await {
                Ok(()) => return,
                Err(error) => tracing::warn!("{error}"),
            }
            tokio::time::sleep(pause).await;
        }
    };
    if timeout(PATIENCE, told).await.is_err() {
        tracing::error!("the status of NodeWatermark {node} stays as it was");
    }
}

/// Takes our marks off the Node; whether there are none any more.
async fn unmark(client: &Client, node: &str) -> bool {
    let unmarked = async {
        let seen = taint::read(client, node).await?;
        taint::keep(client, seen, Bearing::NoTrace).await
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
