//! `plimsoll preview`.

mod findings;
mod history;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use self::findings::{FindingOnNodes, Findings};
use super::check::report::Report;
use super::check::sources::{self, Sources};
use super::cluster_args::ClusterArgs;
use super::output::Output;
use super::period::EvaluationPeriod;
use super::progress::ProgressLine;
use super::windows::AgentWindowsFile;
use super::{duration, print_error, runtime};
use crate::clock;
use crate::crd::{Compiled, Objects, compile};
use crate::engine::metric::{InterfaceRate, Metric, PressureKind};
use crate::engine::policy::{NodeFacts, Rule};
use crate::engine::quantity::Quantity;
use crate::preview::{
    self, Cluster, ClusterNode, ClusterReadError, KubeletError, KubeletResult, NodeInput,
    NodePreview, Options, Preview, ReportedWatermark, Selection, ValueOverrides, overlay, subjects,
};

const HELP: &str = "\
Takes the policies of the cluster and those given by -f; of the same kind and name, the latter replace the former, as kubectl \
apply would. Compiles them for each node as the controller does, and runs the agent's engine on live values. Shown is the \
first round of actions, as if each rule over its threshold had been so for long enough, and what PodQOS do to pods at all times. Nothing is written: only get and list \
requests are sent.

A value comes from the agent's status in the NodeWatermark if it has the same rule, else from the kubelet's /stats/summary. \
Pod usage always comes from the kubelet. For a node's memory the kubelet gives only bounds, such as 1Gi .. 4Gi, so a rule \
may be PERHAPS over its threshold. Values that neither reports (load, disks, probes) are UNKNOWN, and their rules do \
nothing; set them with --value. Rates of network interfaces need two samples: --sample 20s.

With --history it shows how often the rules with strategy Preview would have acted in the last 24 hours, as the agents counted it \
in the status of the NodeWatermarks: how many times they were breached (BREACHES) and on which nodes, for how long (ACTIVE), in how \
many evaluations pods would have been throttled further (THROTTLES), how many pods evicted (EVICTIONS), and when a breach last \
began. An edit of the metric or the thresholds of a rule starts its counts over. It asks no kubelet, and needs no \
permission for pods and nodes/proxy, and for nodes only with --node or --selector.

Permissions: list nodes, pods, nodewatermarks, nodeqoss, podqoss and avoidanceactions, and get nodes/proxy. Beware: get \
nodes/proxy allows everything that a kubelet serves to GET, including logs. Without it, rules are still evaluated on agents' \
values and --value, but pod usage is unknown, so no pod is acted on.

Examples:
  See what the policies of the cluster would do now:
    plimsoll preview
  See what an edit would do before you apply it:
    plimsoll preview -f policy.yaml --node worker-1
  See what would happen if an idle node were busy:
    plimsoll preview -f policy.yaml --value cpu_total_usage=7500
  See how often Preview rules would have acted in the last 24 hours:
    plimsoll preview --history

Exit status: 0 shown, 1 the policies have errors, 2 the cluster or a file could not be read.";

/// Arguments of `plimsoll preview`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Policies to preview together with those of the cluster; one of the same kind and name is replaced: files, directories, or -
    /// for standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE|DIR|-")]
    files: Vec<PathBuf>,

    /// Show how often rules with strategy Preview would have acted in the last 24 hours, as the agents counted
    #[arg(long, conflicts_with_all = ["files", "values", "file", "period", "sample"])]
    history: bool,

    /// Show only this node; may be repeated [default: all]
    #[arg(long, value_name = "NAME")]
    node: Vec<String>,

    /// Show only nodes with these labels, for example pool=batch,zone!=a
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,

    /// Assume this value of a metric on every node; may be repeated
    #[arg(long = "value", value_name = "METRIC=QUANTITY", value_parser = value)]
    values: Vec<(String, f64)>,

    #[command(flatten)]
    windows: AgentWindowsFile,

    #[command(flatten)]
    evaluation: EvaluationPeriod,

    /// Query kubelets twice, this long apart, for rates of network interfaces; kubelets take samples every 10 to 15 s
    #[arg(long, value_name = "DURATION", value_parser = duration::positive)]
    sample: Option<Duration>,

    /// Output format; JSON and YAML have {nodes: [{node, rules: [{rule, metric, value, state, pods, ...}], standing: [{policy, idle, burst, ...}]}], findings, notes,
    /// summary}, with --history {rules: [{rule, total: {breaches, ...}, nodes: [{node, breaches, ...}]}], notes, summary}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,

    #[command(flatten)]
    cluster: ClusterArgs,
}

impl Args {
    /// The nodes to show.
    fn selection(&self) -> Selection {
        Selection {
            names: self.node.clone(),
            labels: self.selector.clone(),
        }
    }
}

fn value(text: &str) -> Result<(String, f64), String> {
    let (metric, value) = text
        .split_once('=')
        .ok_or_else(|| "write METRIC=QUANTITY, for example cpu_total_usage=7500".to_owned())?;
    let quantity: Quantity = value.parse().map_err(|error| format!("{value} {error}"))?;
    Ok((metric.to_owned(), quantity.as_f64()))
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.history {
        return runtime::start()?.block_on(history::show(args));
    }
    let mut sources = sources::read_all(&args.files);
    if let Some(error) = sources.unreadable.pop() {
        return Err(error);
    }
    let any_node = NodeFacts {
        windows: args.windows.read()?,
        ..NodeFacts::default()
    };
    runtime::start()?.block_on(show(args, &sources, &any_node))
}

async fn show(args: &Args, sources: &Sources, any_node: &NodeFacts) -> anyhow::Result<ExitCode> {
    let client = args.cluster.connect().await?;
    let cluster = Cluster::new(client);
    let others = other_policies(&cluster, sources).await?;
    let report = Report::new(sources, others.clone(), any_node, false);
    if report.is_rejected() {
        report.lines().for_each(print_error);
        return Ok(ExitCode::from(1));
    }
    let policies = Policies::new(args, others, sources);
    let mut nodes = cluster.nodes(&policies.selection).await?;
    for node in &mut nodes {
        node.facts.windows.clone_from(&any_node.windows);
    }
    let compiled: Vec<Compiled> = nodes
        .iter()
        .map(|node| compile(&policies.objects, &node.facts))
        .collect();
    let findings = Findings::new(&policies.objects, any_node, &nodes, &compiled, &report);
    let preview = preview_nodes(args, &cluster, &nodes, &compiled).await?;
    let failed = report.errors() > 0 || findings.errors(args.files.is_empty());
    print(args, &report, &findings, &preview)?;
    Ok(ExitCode::from(u8::from(failed)))
}

/// The policies of the cluster that the files do not replace.
async fn other_policies(
    cluster: &Cluster,
    sources: &Sources,
) -> Result<Vec<Value>, ClusterReadError> {
    let files = || {
        sources
            .files
            .iter()
            .flat_map(|source| &source.manifest.objects)
    };
    match cluster.policies().await {
        Ok(policies) => Ok(overlay(policies, files().map(|object| &object.value))),
        // Policies can be previewed before anything is installed.
        Err(ClusterReadError::NoDefinitions) if files().next().is_some() => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// The policies to preview, and the nodes.
struct Policies {
    objects: Objects,
    selection: Selection,
}

impl Policies {
    fn new(args: &Args, others: Vec<Value>, sources: &Sources) -> Self {
        let files = sources
            .files
            .iter()
            .flat_map(|source| &source.manifest.objects);
        let files = files.map(|object| object.value.clone());
        Self {
            objects: Objects::from_values(files.chain(others)),
            selection: args.selection(),
        }
    }
}

async fn preview_nodes(
    args: &Args,
    cluster: &Cluster,
    nodes: &[ClusterNode],
    compiled: &[Compiled],
) -> anyhow::Result<Preview> {
    let overrides = overrides(args, compiled)?;
    let touched = nodes.iter().zip(compiled);
    let touched: Vec<_> = touched
        .filter(|(_, compiled)| compiled.policy.acts())
        .collect();
    let names: Vec<&str> = touched.iter().map(|(node, _)| node.name.as_str()).collect();
    let mut preview = Preview {
        untouched: nodes.len() - names.len(),
        ..Preview::default()
    };
    if names.is_empty() {
        return Ok(preview);
    }
    let rules = || {
        touched
            .iter()
            .flat_map(|(_, compiled)| &compiled.policy.rules)
    };
    let options = Options {
        all: rules().any(needs_full_summary),
        sample: args.sample,
    };
    let progress = ProgressLine::new("listing pods and agents", None);
    let pods = cluster.pods(&names).await?;
    let agent_statuses = cluster.agent_statuses().await.unwrap_or_else(|error| {
        preview
            .notes
            .push(format!("the status of agents is unknown: {error}"));
        BTreeMap::new()
    });
    // What stands needs no usage.
    let with_rules = touched.iter().filter(|(_, it)| !it.policy.rules.is_empty());
    let names: Vec<&str> = with_rules.map(|(node, _)| node.name.as_str()).collect();
    let requests = names.len() * if args.sample.is_some() { 2 } else { 1 };
    progress.next("asking kubelets", Some(requests));
    let asked = cluster.kubelet_summaries(&names, options, || progress.advance());
    let summaries = asked.await;
    drop(progress);
    preview.notes.extend(notes(&summaries));
    for (node, compiled) in touched {
        let pods = pods.get(&node.name).map_or(&[][..], Vec::as_slice);
        let (subjects, unreadable) = subjects(pods);
        preview.notes.extend(unreadable);
        preview.nodes.push(preview_node(
            node,
            compiled,
            &Live {
                subjects: &subjects,
                summary: summaries.get(&node.name),
                agent_status: agent_statuses.get(&node.name),
                overrides: &overrides,
                evaluation_period: args.evaluation.period,
            },
        ));
    }
    Ok(preview)
}

/// Live data of a node.
struct Live<'a> {
    subjects: &'a [preview::PodSubject],
    summary: Option<&'a KubeletResult>,
    agent_status: Option<&'a ReportedWatermark>,
    overrides: &'a ValueOverrides,
    evaluation_period: Duration,
}

fn preview_node(node: &ClusterNode, compiled: &Compiled, live: &Live<'_>) -> NodePreview {
    let (summary, earlier) = match live.summary {
        Some(Ok((summary, earlier))) => (Ok(summary), earlier.as_ref()),
        Some(Err(KubeletError::Forbidden(_))) => {
            (Err("the kubelet's statistics may not be read"), None)
        }
        Some(Err(KubeletError::NoAnswer(_))) | None => (Err("its kubelet does not answer"), None),
    };
    preview::evaluate(&NodeInput {
        node: &node.name,
        facts: &node.facts,
        policy: &compiled.policy,
        subjects: live.subjects,
        summary,
        earlier,
        agent_status: live.agent_status,
        overrides: live.overrides,
        evaluation_period: live.evaluation_period,
        now: clock::wall_time(),
    })
}

/// The values of `--value`; some rule must be on each metric.
fn overrides(args: &Args, compiled: &[Compiled]) -> anyhow::Result<ValueOverrides> {
    let rules = compiled.iter().flat_map(|compiled| &compiled.policy.rules);
    let known: BTreeSet<String> = rules.map(|rule| rule.metric.to_string()).collect();
    let unused = args.values.iter().find(|(it, _)| !known.contains(it));
    if let Some((metric, _)) = unused {
        let known = known.into_iter().collect::<Vec<_>>().join(", ");
        let instead = if known.is_empty() {
            "these nodes have no rules".to_owned()
        } else {
            format!("their rules use {known}")
        };
        anyhow::bail!("no rule of these nodes uses the metric {metric}; {instead}");
    }
    Ok(args.values.iter().cloned().collect())
}

/// Whether the kubelet's short summary lacks the rule's metric.
const fn needs_full_summary(rule: &Rule) -> bool {
    matches!(
        rule.metric,
        Metric::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib)
            | Metric::Pressure {
                kind: PressureKind::Io,
                ..
            }
    )
}

/// Notes about missing summaries. A missing permission is the same for all nodes.
fn notes(summaries: &BTreeMap<String, KubeletResult>) -> Vec<String> {
    let mut notes = Vec::new();
    let forbidden = summaries.values().find_map(|summary| match summary {
        Err(KubeletError::Forbidden(why)) => Some(why),
        _ => None,
    });
    if let Some(why) = forbidden {
        notes.push(format!(
            "pod usage is unknown, so no pod is acted on: {why}; grant get on nodes/proxy"
        ));
    }
    for (node, summary) in summaries {
        if let Err(KubeletError::NoAnswer(why)) = summary {
            notes.push(format!("usage of node {node} is unknown: {why}"));
        }
    }
    notes
}

#[derive(Serialize)]
struct Structured<'a> {
    #[serde(flatten)]
    preview: &'a Preview,
    summary: String,
    files: &'a Report<'a>,
    findings: &'a [FindingOnNodes],
}

fn print(
    args: &Args,
    report: &Report<'_>,
    findings: &Findings,
    preview: &Preview,
) -> anyhow::Result<()> {
    let structured = args.output.of(&Structured {
        preview,
        summary: preview.summary(),
        files: report,
        findings: &findings.0,
    })?;
    let text = structured.unwrap_or_else(|| {
        report.lines().for_each(print_error);
        report.advice().for_each(print_error);
        findings.0.iter().for_each(print_error);
        preview.to_string()
    });
    super::print(text.as_bytes()).map(drop)
}
