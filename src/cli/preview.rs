//! `plimsoll preview`.

mod findings;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::ValueEnum;
use serde::Serialize;
use serde_json::Value;

use self::findings::{Findings, Found};
use super::check::report::Report;
use super::check::sources::{self, Sources};
use super::{complain, duration, runtime};
use crate::cluster::{client, clock};
use crate::crd::{Compiled, Objects, compile};
use crate::engine::metric::{InterfaceRate, Metric, PressureKind};
use crate::engine::policy::{NodeFacts, Rule};
use crate::engine::quantity::Quantity;
use crate::preview::{
    self, Answer, Cluster, Given, Kept, Node, NodePreview, Options, Preview, ReadError, Scene,
    Selection, Silence, overlay, subjects,
};

const HELP: &str = "\
Lays the policies given by -f over those of the cluster, as kubectl apply would, compiles them for each node as the \
controller does, and lets the engine of the agent decide on live values: what its first round would be, were each \
rule above its mark for long enough. Nothing is written: get and list are all that is sent.

Values come from the node's agent where it keeps the same rule (the status of its NodeWatermark), else from the \
kubelet's /stats/summary, and what pods use always from there. The kubelet tells of a node's memory in bounds only, as \
1Gi .. 4Gi, so that a rule on it may be PERHAPS over its mark. What neither tells (load, disks, probes) is UNKNOWN, and \
such a rule does nothing; --value says what if. Rates of network interfaces take two looks: --sample 20s.

Permissions: list of nodes, pods, nodewatermarks, nodeqoss, podqoss and avoidanceactions, and get of nodes/proxy. Note \
that get of nodes/proxy is more than figures: it opens all that a kubelet serves to GET, logs included. Without \
it the rest works: values of agents and --value are judged, and pods, whose usage is then unknown, are left alone.

Examples:
  What the policies of the cluster would do now:
    plimsoll preview
  What an edit would do, before it is applied:
    plimsoll preview -f policy.yaml --node worker-1
  What if a calm node were busy:
    plimsoll preview -f policy.yaml --value cpu_total_usage=7500

Exit status: 0 shown, 1 the policies have errors, 2 the cluster or a file could not be read.";

/// Arguments of `plimsoll preview`.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub struct Args {
    /// Policies to lay over those of the cluster: files, folders, or - for standard input
    #[arg(short = 'f', long = "filename", value_name = "FILE|DIR|-")]
    files: Vec<PathBuf>,

    /// Only this node; may be repeated [default: all]
    #[arg(long, value_name = "NAME")]
    node: Vec<String>,

    /// Only nodes with these labels, as pool=batch,zone!=a
    #[arg(short = 'l', long, value_name = "LABELS")]
    selector: Option<String>,

    /// Judge rules on this metric as if every node were at this value; may be repeated
    #[arg(long = "value", value_name = "METRIC=QUANTITY", value_parser = value)]
    values: Vec<(String, f64)>,

    /// Ask kubelets twice, so long apart, for rates of network interfaces; kubelets look every 10 to 15 s
    #[arg(long, value_name = "DURATION", value_parser = duration::positive)]
    sample: Option<Duration>,

    /// How to print it
    #[arg(short = 'o', long, value_enum, default_value_t = Output::Text)]
    output: Output,

    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// The forms of output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// A table, and the pods of each rule that is over its mark.
    Text,
    /// One JSON object: {nodes: [{node, rules: [{rule, metric, value, standing, pods, ...}]}], findings, notes, summary}.
    Json,
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
    let mut sources = sources::read_all(&args.files);
    if let Some(error) = sources.unreadable.pop() {
        return Err(error);
    }
    runtime::start()?.block_on(show(args, &sources))
}

async fn show(args: &Args, sources: &Sources) -> anyhow::Result<ExitCode> {
    let client = client::connect(args.kubeconfig.as_deref()).await?;
    let cluster = Cluster::new(client);
    let beside = beside(&cluster, sources).await?;
    let report = Report::new(sources, beside.clone(), &NodeFacts::default(), false);
    if report.is_refused() {
        report.lines().for_each(complain);
        return Ok(ExitCode::from(1));
    }
    let policies = Policies::new(args, beside, sources);
    let nodes = cluster.nodes(&policies.selection).await?;
    let compiled: Vec<Compiled> = nodes
        .iter()
        .map(|node| compile(&policies.objects, &node.facts))
        .collect();
    let findings = Findings::new(&policies.objects, &nodes, &compiled, &report);
    let preview = look(args, &cluster, &nodes, &compiled).await?;
    let failed = report.errors() > 0 || findings.errors(args.files.is_empty());
    print(args, &report, &findings, &preview)?;
    Ok(ExitCode::from(u8::from(failed)))
}

/// The policies of the cluster that the files leave as they are.
async fn beside(cluster: &Cluster, sources: &Sources) -> Result<Vec<Value>, ReadError> {
    let files = || {
        sources
            .files
            .iter()
            .flat_map(|source| &source.manifest.objects)
    };
    match cluster.policies().await {
        Ok(policies) => Ok(overlay(policies, files().map(|object| &object.value))),
        // Policies may be tried before anything is installed.
        Err(ReadError::NoDefinitions) if files().next().is_some() => Ok(Vec::new()),
        Err(error) => Err(error),
    }
}

/// What is to be looked at, and where.
struct Policies {
    objects: Objects,
    selection: Selection,
}

impl Policies {
    fn new(args: &Args, beside: Vec<Value>, sources: &Sources) -> Self {
        let files = sources
            .files
            .iter()
            .flat_map(|source| &source.manifest.objects);
        let files = files.map(|object| object.value.clone());
        Self {
            objects: Objects::from_values(files.chain(beside)),
            selection: Selection {
                names: args.node.clone(),
                labels: args.selector.clone(),
            },
        }
    }
}

async fn look(
    args: &Args,
    cluster: &Cluster,
    nodes: &[Node],
    compiled: &[Compiled],
) -> anyhow::Result<Preview> {
    let given = given(args, compiled)?;
    let with_rules = nodes.iter().zip(compiled);
    let with_rules: Vec<_> = with_rules
        .filter(|(_, compiled)| !compiled.policy.rules.is_empty())
        .collect();
    let names: Vec<&str> = with_rules
        .iter()
        .map(|(node, _)| node.name.as_str())
        .collect();
    let mut preview = Preview {
        untouched: nodes.len() - names.len(),
        ..Preview::default()
    };
    if names.is_empty() {
        return Ok(preview);
    }
    let rules = || {
        with_rules
            .iter()
            .flat_map(|(_, compiled)| &compiled.policy.rules)
    };
    let options = Options {
        all: rules().any(takes_all),
        sample: args.sample,
    };
    let pods = cluster.pods(&names).await?;
    let kept = cluster.kept().await.unwrap_or_else(|error| {
        preview
            .notes
            .push(format!("what agents say is not known: {error}"));
        BTreeMap::new()
    });
    let answers = cluster.answers(&names, options).await;
    preview.notes.extend(notes(&answers));
    for (node, compiled) in with_rules {
        let pods = pods.get(&node.name).map_or(&[][..], Vec::as_slice);
        let (subjects, unreadable) = subjects(pods);
        preview.notes.extend(unreadable);
        preview.nodes.push(foresee(
            node,
            compiled,
            &Live {
                subjects: &subjects,
                answer: answers.get(&node.name),
                kept: kept.get(&node.name),
                given: &given,
            },
        ));
    }
    Ok(preview)
}

/// What is known of a node besides its size.
struct Live<'a> {
    subjects: &'a [preview::Subject],
    answer: Option<&'a Answer>,
    kept: Option<&'a Kept>,
    given: &'a Given,
}

fn foresee(node: &Node, compiled: &Compiled, live: &Live<'_>) -> NodePreview {
    let (summary, earlier) = match live.answer {
        Some(Ok((summary, earlier))) => (Ok(summary), earlier.as_ref()),
        Some(Err(Silence::Forbidden(_))) => (Err("the kubelet's figures may not be read"), None),
        Some(Err(Silence::NoAnswer(_))) | None => (Err("its kubelet does not answer"), None),
    };
    preview::foresee(&Scene {
        node: &node.name,
        facts: &node.facts,
        policy: &compiled.policy,
        subjects: live.subjects,
        summary,
        earlier,
        kept: live.kept,
        given: live.given,
        now: clock::wall(),
    })
}

/// `--value`, where some rule names the metric.
fn given(args: &Args, compiled: &[Compiled]) -> anyhow::Result<Given> {
    let rules = compiled.iter().flat_map(|compiled| &compiled.policy.rules);
    let named: BTreeSet<String> = rules.map(|rule| rule.metric.to_string()).collect();
    for (metric, _) in &args.values {
        anyhow::ensure!(
            named.contains(metric),
            "no rule that selects these nodes is on {metric}; they are on {}",
            named
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        );
    }
    Ok(args.values.iter().cloned().collect())
}

/// Whether the kubelet's short answer lacks the metric.
const fn takes_all(rule: &Rule) -> bool {
    matches!(
        rule.metric,
        Metric::Interface(InterfaceRate::ReceiveKib | InterfaceRate::SendKib)
            | Metric::Pressure {
                kind: PressureKind::Io,
                ..
            }
    )
}

/// What is not known for want of an answer. A lack of permission is the same for all nodes.
fn notes(answers: &BTreeMap<String, Answer>) -> Vec<String> {
    let mut notes = Vec::new();
    let forbidden = answers.values().find_map(|answer| match answer {
        Err(Silence::Forbidden(why)) => Some(why),
        _ => None,
    });
    if let Some(why) = forbidden {
        notes.push(format!("what pods use is not known, so that none would be acted on here: {why}; allow get of nodes/proxy"));
    }
    for (node, answer) in answers {
        if let Err(Silence::NoAnswer(why)) = answer {
            notes.push(format!("node {node} does not tell what it uses: {why}"));
        }
    }
    notes
}

#[derive(Serialize)]
struct Json<'a> {
    #[serde(flatten)]
    preview: &'a Preview,
    summary: String,
    files: &'a Report<'a>,
    findings: &'a [Found],
}

fn print(
    args: &Args,
    report: &Report<'_>,
    findings: &Findings,
    preview: &Preview,
) -> anyhow::Result<()> {
    let text = match args.output {
        Output::Text => {
            report.lines().for_each(complain);
            findings.0.iter().for_each(complain);
            preview.to_string()
        }
        Output::Json => {
            let json = Json {
                preview,
                summary: preview.summary(),
                files: report,
                findings: &findings.0,
            };
            let text = serde_json::to_string_pretty(&json).context("failed to write JSON")?;
            text + "\n"
        }
    };
    super::print(text.as_bytes()).map(drop)
}
