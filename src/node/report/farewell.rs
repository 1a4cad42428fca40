//! The last word of an agent that has undone everything: what the status said until then would stand there for good.

use std::collections::BTreeMap;

use kube::{Api, Client};
use thiserror::Error;

use super::conditions::{Health, Unready};
use super::status::{StatusBuilder, View, this_agent};
use super::write::{Report, write};
use crate::cluster::client::{CallError, call, found};
use crate::cluster::taint::{self, Marked, TaintError};
use crate::crd::NodeWatermark;
use crate::engine::plan::{Plan, Scheduling};
use crate::engine::pod::PodUid;
use crate::engine::policy::PolicySet;
use crate::node::actuate::taint::Standing;
use crate::node::clock;
use crate::node::journal::Record;

/// What could not be undone.
#[derive(Debug, Default)]
pub struct Left {
    /// Cgroup files that are not as they were.
    pub records: Vec<Record>,
    /// `namespace/name` of their pods.
    pub names: BTreeMap<PodUid, String>,
}

/// Why it was not said.
#[derive(Debug, Error)]
pub enum FarewellError {
    /// The Node, which says whether our taint is gone, can't be read.
    #[error(transparent)]
    Node(#[from] TaintError),
    /// The API server refused, or did not answer.
    #[error("failed to say in NodeWatermark {node} that nothing is in force any more: {}", source.words())]
    Call {
        /// Which node.
        node: String,
        /// Why.
        source: CallError,
    },
}

/// Writes that this agent has ended, `why`, and what is left. Where there is no `NodeWatermark` there is nothing to say.
///
/// # Errors
/// It could not be written: to be tried again.
pub async fn tell(
    client: &Client,
    node: &str,
    boot_id: &str,
    why: &str,
    left: &Left,
) -> Result<(), FarewellError> {
    let failed = |source| FarewellError::Call {
        node: node.to_owned(),
        source,
    };
    let api: Api<NodeWatermark> = Api::all(client.clone());
    let Some(there) = found(call(api.get(node)).await).map_err(failed)? else {
        return Ok(());
    };
    let marked = match taint::read(client, node).await {
        Err(TaintError::NoNode(_)) => return Ok(()),
        read => read?,
    };
    let report = report(&there, &marked, boot_id, why, left);
    match write(client, node, &report).await {
        // Deleted in between, perhaps with its definition.
        Err(error) if error.is_not_found() => Ok(()),
        written => written.map(drop).map_err(failed),
    }
}

fn report(there: &NodeWatermark, marked: &Marked, boot_id: &str, why: &str, left: &Left) -> Report {
    let before = there.status.as_ref();
    let mut builder = before.map_or_else(StatusBuilder::default, StatusBuilder::after);
    let mut status = builder.build(&View {
        now: clock::boot_time(),
        time: clock::wall_time(),
        generation: there.metadata.generation,
        hash: None,
        agent: &this_agent(boot_id),
        reports: Vec::new(),
        policy: &PolicySet::default(),
        plan: &Plan {
            scheduling: Scheduling::Enabled,
            ..Plan::default()
        },
        records: left.records.clone(),
        names: left.names.clone(),
        previews: &[],
        standing: Standing {
            known: true,
            effect: marked.effect(),
            ..Standing::default()
        },
        evicted: Vec::new(),
        health: Health {
            unready: Some(Unready::Ended(why.to_owned())),
            ..Health::default()
        },
        left_out: Vec::new(),
    });
    if left.records.is_empty() {
        // Nobody waits for a node that has no agent and nothing in force.
        status.agent = None;
    }
    let uid = there.metadata.uid.clone().unwrap_or_default();
    Report {
        uid,
        status,
        over: None,
    }
}
