//! `plimsoll preview --history`.

use std::process::ExitCode;

use kube::ResourceExt as _;
use serde::Deserialize as _;

use super::Args;
use crate::cli::progress::ProgressLine;
use crate::clock;
use crate::crd::{NodeWatermarkStatus, Objects};
use crate::preview::{Cluster, History};

/// Shows what agents have counted.
pub(super) async fn show(args: &Args) -> anyhow::Result<ExitCode> {
    let cluster = Cluster::new(args.cluster.connect().await?);
    let progress = ProgressLine::new("listing policies and agents", None);
    let policies = Objects::from_values(cluster.policies().await?);
    let selection = args.selection();
    let nodes = if selection.is_all() {
        None
    } else {
        Some(cluster.nodes(&selection).await?)
    };
    let is_shown = |name: &str| {
        let nodes = nodes.as_ref();
        nodes.is_none_or(|nodes| nodes.iter().any(|node| node.name == name))
    };
    let watermarks = cluster.watermarks().await?;
    let statuses = watermarks.iter().filter_map(|object| {
        let status = NodeWatermarkStatus::deserialize(&object.data["status"]).ok()?;
        Some((object.name_any(), status))
    });
    let mut statuses: Vec<_> = statuses.filter(|(name, _)| is_shown(name)).collect();
    statuses.sort_by(|(a, _), (b, _)| a.cmp(b));
    drop(progress);
    let history = History::of(&policies, &statuses, clock::wall_time());
    let structured = args.output.of(&history)?;
    let text = structured.unwrap_or_else(|| history.to_string());
    crate::cli::print(text.as_bytes())
}
