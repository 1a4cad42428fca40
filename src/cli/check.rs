//! `plimsoll check`.

pub(super) mod report;
mod sentence;
pub(super) mod sources;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

#[cfg(target_os = "linux")]
use anyhow::Context;
#[cfg(target_os = "linux")]
use nix::unistd::{SysconfVar, sysconf};

use self::report::Report;
use super::output::Output;
use super::period::EvaluationPeriod;
use super::windows::AgentWindowsFile;
use super::{color, print, print_error, print_failure, print_text};
use crate::crd::API_VERSION;
use crate::engine::policy::NodeFacts;
use crate::engine::quantity::Quantity;
use crate::engine::units::Bytes;

/// Arguments of `plimsoll check`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Validates each object as an API server with the definitions of `plimsoll crds` would. Then checks the objects \
together: that the action of each rule exists and lowers the rule's metric, that a PodQOS allows it, and that the rule can \
start and stop. So pass all files of a policy at once.

An error means that an object or rule is disabled, or can't do what it says. A warning means that it is in force, but maybe \
not as intended; this includes fields that are accepted but not enforced. A note says what would protect better.

Exit status: 0 no findings, 1 findings (with --allow-warnings: errors), or no policy, 2 a file could not be read.

Examples:
  plimsoll check examples/ensurance
  plimsoll check policy.yaml --this-machine
  plimsoll check policies/ --node-cpus 16 --node-memory 64Gi
  kubectl get avoid,nq,pq -o yaml | plimsoll check -
  plimsoll check policy.yaml --output json | jq '.findings[] | .message'"
)]
pub struct Args {
    /// Manifests: files, directories (all .yaml, .yml and .json files, recursively), or - for standard input
    #[arg(required_unless_present = "filename", value_name = "FILE|DIR|-")]
    paths: Vec<PathBuf>,
    /// The same as the arguments, as for kubectl
    #[arg(short = 'f', long, value_name = "FILE|DIR|-")]
    filename: Vec<PathBuf>,
    /// Output format. Text has `file:line:column: severity: object: field: what is wrong; how to fix it`; JSON and YAML have {findings:
    /// [{file, line, column, kind, name, path, severity, reason, message}], notes: [the same], files, objects, skipped, errors, warnings, note, evictions: [{rule, strategy, evaluations}]}
    #[arg(short = 'o', long, value_enum, default_value_t)]
    output: Output,
    /// CPUs of the node that the policies are for; thresholds are then checked against them
    #[arg(long, value_name = "N")]
    node_cpus: Option<u32>,
    /// Memory of the node that the policies are for, for example 64Gi
    #[arg(long, value_name = "QUANTITY", value_parser = memory)]
    node_memory: Option<Bytes>,
    /// Labels of the node that the policies are for, for example pool=batch,zone=a [default: check every `NodeQOS`, whatever
    /// its selector]
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = label, value_delimiter = ',')]
    node_labels: Option<Vec<(String, String)>>,
    #[command(flatten)]
    windows: AgentWindowsFile,
    #[command(flatten)]
    evaluation: EvaluationPeriod,
    // Elsewhere, this machine is no node.
    /// Use the CPUs and memory of this machine
    #[cfg(target_os = "linux")]
    #[arg(long, conflicts_with_all = ["node_cpus", "node_memory"])]
    this_machine: bool,
    /// Exit with 0 if there are only warnings
    #[arg(long)]
    allow_warnings: bool,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let node = facts(args)?;
    let paths = [args.paths.as_slice(), &args.filename].concat();
    let sources = sources::read_all(&paths);
    for error in &sources.unreadable {
        print_failure(error);
    }
    let report = Report::new(&sources, Vec::new(), &node, args.node_labels.is_some());
    if let Some(text) = args.output.of(&report)? {
        print(text.as_bytes())?;
    } else {
        let lines = report.lines().map(|line| color::message(&line) + "\n");
        print_text(&lines.collect::<String>())?;
        report.advice().for_each(print_error);
        print_error(report.summary());
        for sentence in report.sentences(args.evaluation.period) {
            print_error(sentence);
        }
        for note in report.notes(args.evaluation.period) {
            print_error(note);
        }
    }
    let nothing = report.has_no_policy();
    if nothing && sources.unreadable.is_empty() {
        print_error(format_args!(
            "plimsoll: error: no policy found; a policy starts with apiVersion: {API_VERSION}, and in directories only files named *.yaml, \
             *.yml and *.json are read"
        ));
    }
    let warned = report.warnings() > 0 && !args.allow_warnings;
    let clean = !nothing && !warned && report.errors() == 0;
    Ok(match (sources.unreadable.is_empty(), clean) {
        (false, _) => ExitCode::from(2),
        (true, true) => ExitCode::SUCCESS,
        (true, false) => ExitCode::from(1),
    })
}

fn facts(args: &Args) -> anyhow::Result<NodeFacts> {
    let labels: BTreeMap<_, _> = args
        .node_labels
        .clone()
        .unwrap_or_default()
        .into_iter()
        .collect();
    let windows = args.windows.read()?;
    #[cfg(target_os = "linux")]
    if args.this_machine {
        return Ok(NodeFacts {
            windows,
            ..this_machine(labels)?
        });
    }
    Ok(NodeFacts {
        labels,
        cpus: args.node_cpus.unwrap_or(0),
        memory: args.node_memory.unwrap_or(Bytes::ZERO),
        windows,
    })
}

#[cfg(target_os = "linux")]
fn this_machine(labels: BTreeMap<String, String>) -> anyhow::Result<NodeFacts> {
    let read = |what| {
        let value = sysconf(what).ok().flatten();
        value.and_then(|value| u64::try_from(value).ok())
    };
    let cpus =
        read(SysconfVar::_NPROCESSORS_ONLN).context("failed to count this machine's CPUs")?;
    let pages = read(SysconfVar::_PHYS_PAGES).context("failed to read this machine's memory")?;
    let page = read(SysconfVar::PAGE_SIZE).context("failed to read this machine's page size")?;
    Ok(NodeFacts {
        labels,
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory: Bytes(pages.saturating_mul(page)),
        windows: None,
    })
}

fn memory(text: &str) -> Result<Bytes, String> {
    let quantity: Quantity = text.parse().map_err(|error| format!("{error}"))?;
    quantity
        .as_bytes()
        .filter(|bytes| *bytes > Bytes::ZERO)
        .ok_or_else(|| "must be above 0, for example 64Gi".to_owned())
}

pub(super) fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE, for example pool=batch".to_owned()),
    }
}
