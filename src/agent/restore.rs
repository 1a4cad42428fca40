//! Restores everything: cgroups first, then our taint and condition on the Node.

use std::sync::Arc;
use std::time::Duration;

use kube::Client;
use tokio::time::timeout;

use super::reporter::{Reporter, log};
use super::{AgentError, Machine, Options};
use crate::agent::report::final_status::{self, NotRestored};
use crate::cluster::backoff::backoff;
use crate::cluster::load_signs::{self, LoadSignsPatch};
use crate::cluster::taint::{self, DesiredTaint, TaintError};
use crate::engine::time::BootTime;
use crate::messages::count;
use crate::node::cgroup::Hierarchy;
use crate::node::machine;
use crate::node::machine::state_dir::WriterProcess;

/// Limit for removing the taint, and for writing the final status, within the pod's grace period.
const TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest delay between tries to write the final status.
const RETRY_DELAYS: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(2));

/// Restores what this process has in force; true if nothing is left.
pub async fn restore_running(
    mut machine: Box<Machine>,
    reporter: Reporter,
    client: &Client,
    node: &str,
    why: &str,
    now: BootTime,
) -> bool {
    // Without rules, requests that are not sent yet are dropped.
    machine
        .backend_mut()
        .set_policy(Arc::default(), Arc::default());
    machine.restore(now).iter().for_each(log);
    let names = machine.records();
    let names = names.filter_map(|it| Some((it.uid.clone(), machine.name(&it.uid)?)));
    let not_restored = NotRestored {
        names: names.collect(),
        records: machine.records().collect(),
    };
    let boot_id = machine.writer().boot_id.clone();
    // The tasks of taint and status have to finish before both are written here.
    let taint = machine.backend_mut().wait_for_no_taint(TIMEOUT);
    let (taint_gone, ()) = tokio::join!(taint, reporter.shut_down(TIMEOUT));
    drop(machine);
    let removed = clean_node(client, node).await;
    write_final_status(client, node, &boot_id, why, &not_restored).await;
    not_restored.records.is_empty() && (taint_gone || removed)
}

/// Restores what an earlier process left in force: cgroups from the journal alone, then taint and condition if an API
/// server can be reached. True if nothing is left in cgroups: the controller removes the taint of an unresponsive agent,
/// but only the journal has the original cgroup values.
///
/// # Errors
/// If another process uses the state directory, or the journal is corrupt.
pub async fn restore_leftovers(
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
        tracing::info!(%dir, "no state directory: no cgroup was changed");
    }
    if let Some(client) = client {
        clean_node(client, &options.node).await;
        // If something is left, the status of the agent that did it still says what.
        if left == 0 {
            let this = WriterProcess::this_process().map_err(AgentError::BootId)?;
            let none = NotRestored::default();
            write_final_status(client, &options.node, &this.boot_id, why, &none).await;
        }
    }
    Ok(left == 0)
}

/// Writes the final status: what was not restored, if anything.
async fn write_final_status(
    client: &Client,
    node: &str,
    boot_id: &str,
    why: &str,
    not_restored: &NotRestored,
) {
    let why = match not_restored.records.len() {
        0 => format!("{why}: the agent has restored everything"),
        left => {
            let files = count(left, "file");
            format!("{why}: the agent has ended, and could not restore {files}")
        }
    };
    let writing = async {
        for pause in backoff(RETRY_DELAYS.0, RETRY_DELAYS.1) {
            match final_status::write(client, node, boot_id, &why, not_restored).await {
                Ok(()) => return,
                Err(error) => tracing::warn!("{error}"),
            }
            tokio::time::sleep(pause).await;
        }
    };
    if timeout(TIMEOUT, writing).await.is_err() {
        tracing::error!("failed to write the final status of NodeWatermark {node}");
    }
}

/// Removes our label, crane's annotations, taints and condition; true if the taints and the condition are gone.
async fn clean_node(client: &Client, node: &str) -> bool {
    let removed = async {
        let seen = taint::read(client, node).await?;
        let mut signs = LoadSignsPatch::default().without_crane(seen.crane());
        if seen.load_label().is_some() {
            signs = signs.label(None);
        }
        if !signs.is_empty()
            && let Err(error) = load_signs::write(client, node, &seen.uid, &signs).await
        {
            tracing::warn!(
                %error,
                "failed to remove the load label and crane's annotations; of these the controller later removes only the label"
            );
        }
        taint::reconcile(client, seen, DesiredTaint::Removed).await
    };
    let why = match timeout(TIMEOUT, removed).await {
        Ok(Ok(_) | Err(TaintError::NoNode(..))) => return true,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "no answer from the API server".to_owned(),
    };
    tracing::error!("{why}: if our taint is on the node, it stays until the controller removes it");
    false
}
