//! The final status of an agent that has ended, so that its last one does not stay: what it could not restore, if anything.

use std::collections::BTreeMap;

use kube::{Api, Client};
use thiserror::Error;

use super::conditions::{AgentHealth, Unready};
use super::status::{StatusBuilder, StatusView, this_agent};
use super::write::{self, PendingStatus};
use crate::agent::taint::TaintState;
use crate::clock;
use crate::cluster::client::{CallError, call, found};
use crate::cluster::taint::{self, NodeSnapshot, TaintError};
use crate::crd::NodeWatermark;
use crate::engine::plan::{Plan, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::policy::PolicySet;
use crate::node::journal::JournalRecord;

/// What could not be restored.
#[derive(Debug, Default)]
pub struct NotRestored {
    /// Cgroup files without their original values.
    pub records: Vec<JournalRecord>,
    /// `namespace/name` of their pods.
    pub names: BTreeMap<PodUid, String>,
}

/// Why the final status was not written.
#[derive(Debug, Error)]
pub enum FinalStatusError {
    /// The Node, which shows whether our taint is gone, cannot be read.
    #[error(transparent)]
    Node(#[from] TaintError),
    /// The API server refused, or did not answer.
    #[error("failed to write the final status of NodeWatermark {node}: {}", source.message())]
    Call {
        /// The node.
        node: String,
        /// The cause.
        source: CallError,
    },
}

/// Writes that this agent has ended, `why`, and what is left; nothing if there is no `NodeWatermark`.
///
/// # Errors
/// If it could not be written; can be retried.
pub async fn write(
    client: &Client,
    node: &str,
    boot_id: &str,
    why: &str,
    not_restored: &NotRestored,
) -> Result<(), FinalStatusError> {
    let failed = |source| FinalStatusError::Call {
        node: node.to_owned(),
        source,
    };
    let api: Api<NodeWatermark> = Api::all(client.clone());
    let Some(watermark) = found(call(api.get(node)).await).map_err(failed)? else {
        return Ok(());
    };
    let node_taint = match taint::read(client, node).await {
        Err(TaintError::NoNode(..)) => return Ok(()),
        read => read?,
    };
    let report = report(&watermark, &node_taint, boot_id, why, not_restored);
    match write::write(client, node, &report).await {
        // Deleted in between, perhaps with its CRD.
        Err(error) if error.is_not_found() => Ok(()),
        written => written.map(drop).map_err(failed),
    }
}

fn report(
    watermark: &NodeWatermark,
    node_taint: &NodeSnapshot,
    boot_id: &str,
    why: &str,
    not_restored: &NotRestored,
) -> PendingStatus {
    let before = watermark.status.as_ref();
    let mut builder = before.map_or_else(StatusBuilder::default, StatusBuilder::continue_from);
    let mut status = builder.build(&StatusView {
        now: clock::boot_time(),
        time: clock::wall_time(),
        generation: watermark.metadata.generation,
        hash: None,
        agent: &this_agent(boot_id),
        reports: Vec::new(),
        policy: &PolicySet::default(),
        plan: &Plan {
            scheduling: Scheduling::Enabled,
            ..Plan::default()
        },
        records: not_restored.records.clone(),
        names: not_restored.names.clone(),
        previews: &[],
        ineffective: &[],
        taint_state: TaintState {
            known: true,
            effect: node_taint.effect(),
            ..TaintState::default()
        },
        evicted: Vec::new(),
        batch_weight_share: None,
        health: AgentHealth {
            unready: Some(Unready::Ended(why.to_owned())),
            ..AgentHealth::default()
        },
        not_enforced: Vec::new(),
    });
    if not_restored.records.is_empty() {
        // Without an agent and with nothing in force no one waits for this node.
        status.agent = None;
    }
    let uid = watermark.metadata.uid.clone().unwrap_or_default();
    PendingStatus {
        uid,
        status,
        replaces: None,
    }
}
