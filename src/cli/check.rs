//! `plimsoll check`.

pub(super) mod report;
pub(super) mod sources;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::ValueEnum;
use nix::unistd::{SysconfVar, sysconf};

use self::report::Report;
use super::{complain, one_line, print};
use crate::crd::API_VERSION;
use crate::engine::policy::NodeFacts;
use crate::engine::quantity::Quantity;
use crate::engine::units::Bytes;

/// Arguments of `plimsoll check`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Judges by the same definitions as an API server does (`plimsoll crds`), and then looks at the objects together: \
whether the action that a rule names exists and lowers the rule's metric, whether a PodQOS allows it, whether the rule \
can ever start and end. So give all the files of a policy at once.

An error means that the object or rule is off or can't do what it says. A warning means that it is in force, but perhaps \
not as you think; fields that are accepted and not enforced are warnings.

Exit status: 0 nothing found, 1 findings, or no policy at all (with --allow-warnings: errors), 2 a file could not be read.

Examples:
  plimsoll check examples/ensurance
  plimsoll check policy.yaml --this-machine
  plimsoll check policies/ --node-cpus 16 --node-memory 64Gi --node-labels pool=batch
  kubectl get avoid,nq,pq -o yaml | plimsoll check -
  plimsoll check policy.yaml --output json | jq '.findings[] | .message'"
)]
pub struct Args {
    /// Manifests: files, folders (all .yaml, .yml and .json files in them and below), or - for standard input.
    #[arg(required = true, value_name = "FILE|DIR|-")]
    paths: Vec<PathBuf>,
    /// How to print what is found.
    #[arg(long, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// CPUs of the node that the policies are for: watermarks are then checked against them.
    #[arg(long, value_name = "N")]
    node_cpus: Option<u32>,
    /// Memory of the node that the policies are for, as 64Gi.
    #[arg(long, value_name = "QUANTITY", value_parser = memory)]
    node_memory: Option<Bytes>,
    /// Labels of the node that the policies are for, as pool=batch,zone=a. Absent: every `NodeQOS` is checked, whatever
    /// nodes it selects.
    #[arg(long, value_name = "KEY=VALUE,...", value_parser = label, value_delimiter = ',')]
    node_labels: Option<Vec<(String, String)>>,
    /// Take CPUs and memory of this machine.
    #[arg(long, conflicts_with_all = ["node_cpus", "node_memory"])]
    this_machine: bool,
    /// Exit with 0 where there are warnings but no errors.
    #[arg(long)]
    allow_warnings: bool,
}

/// The forms of output.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Output {
    /// A line a finding, as compilers print them: `file:line: severity: object: field: what is wrong; what to write`.
    Text,
    /// One JSON object: {findings: [{file, line, kind, name, path, severity, reason, message}], files, objects,
    /// skipped, errors, warnings}.
    Json,
}

/// Runs it.
pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let node = facts(args)?;
    let sources = sources::read_all(&args.paths);
    for error in &sources.unreadable {
        complain(format_args!("plimsoll: {}", one_line(error)));
    }
    let report = Report::new(&sources, Vec::new(), &node, args.node_labels.is_some());
    match args.output {
        Output::Text => {
            let lines = report.lines().map(|line| line + "\n");
            print(lines.collect::<String>().as_bytes())?;
            complain(report.summary());
        }
        Output::Json => {
            let json = serde_json::to_string_pretty(&report).context("failed to write JSON")?;
            print((json + "\n").as_bytes())?;
        }
    }
    let nothing = report.is_of_nothing();
    if nothing && sources.unreadable.is_empty() {
        complain(format_args!(
            "plimsoll: there is no policy to check; one begins with apiVersion: {API_VERSION}, and in folders it is in a file named \
             .yaml, .yml or .json"
        ));
    }
    let warned = nothing || report.warnings() > 0;
    let clean = report.errors() == 0 && (args.allow_warnings || !warned);
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
    if args.this_machine {
        return this_machine(labels);
    }
    Ok(NodeFacts {
        labels,
        cpus: args.node_cpus.unwrap_or(0),
        memory: args.node_memory.unwrap_or(Bytes::ZERO),
    })
}

fn this_machine(labels: BTreeMap<String, String>) -> anyhow::Result<NodeFacts> {
    let ask = |what| {
        let answer = sysconf(what).ok().flatten();
        answer.and_then(|value| u64::try_from(value).ok())
    };
    let cpus = ask(SysconfVar::_NPROCESSORS_ONLN).context("failed to count this machine's CPUs")?;
    let pages = ask(SysconfVar::_PHYS_PAGES).context("failed to read this machine's memory")?;
    let page = ask(SysconfVar::PAGE_SIZE).context("failed to read this machine's page size")?;
    Ok(NodeFacts {
        labels,
        cpus: u32::try_from(cpus).unwrap_or(u32::MAX),
        memory: Bytes(pages.saturating_mul(page)),
    })
}

fn memory(text: &str) -> Result<Bytes, String> {
    let quantity: Quantity = text.parse().map_err(|error| format!("{error}"))?;
    quantity
        .as_bytes()
        .filter(|bytes| *bytes > Bytes::ZERO)
        .ok_or_else(|| "must be above 0, for example 64Gi".to_owned())
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| "write KEY=VALUE, for example pool=batch".to_owned())?;
    Ok((key.to_owned(), value.to_owned()))
}
