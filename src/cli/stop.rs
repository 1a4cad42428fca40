//! `plimsoll stop` and `plimsoll resume`.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::ArgAction;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::{Api, Client, Resource as _};
use serde_json::{Value, json};

use super::cluster_args::ClusterArgs;
use super::doctor::lease_namespaces;
use super::server_table::ServerTable;
use super::{LEASE_NAMESPACE, duration, print, runtime};
use crate::clock;
use crate::cluster::client::{CallError, call};
use crate::cluster::watch::resource;
use crate::crd::NodeWatermark;
use crate::crd::emergency_stop::{ANNOTATION, OBJECT};
use crate::crd::node_watermark::stopped::RELEASED;
use crate::crd::words::named;

/// How often progress is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of unfinished nodes that are named.
const MAX_NAMED: usize = 10;

const STOP_HELP: &str = "\
Annotates the ConfigMap plimsoll-stop in the namespace of the agents' Leases. Every agent watches it directly, so this works \
without the controller. Within 15 s (25 s if its connections hang) each agent restores all CPU limits, removes its taint, \
requests no more evictions, and does nothing more until `plimsoll resume`. Agents that start later do the same. Rules with \
strategy Preview keep reporting. The equivalent with kubectl, if the chart's leases.namespace is unchanged:
  kubectl annotate configmap plimsoll-stop -n plimsoll-node-lease \\
    --overwrite plimsoll.dev/stop='why'

Examples:
  Stop everything, and wait until it is done:
    plimsoll stop --reason 'batch jobs starve since the new thresholds'
  See the progress:
    kubectl get nodewatermarks

Permissions: patch the ConfigMap (create, if it is missing), list nodewatermarks to see the progress, and list daemonsets to \
find the namespace; without the last, pass --lease-namespace if the chart's leases.namespace was changed.

Exit status: 0 every node has restored everything (with --wait=false: the stop was requested), 1 not all nodes did in time, or \
their progress is unknown, 2 the stop could not be requested.";

const RESUME_HELP: &str = "\
Removes the annotation that `plimsoll stop` has set. Every rule starts over: evaluations are counted from zero. The \
equivalent with kubectl, if the chart's leases.namespace is unchanged:
  kubectl annotate configmap plimsoll-stop -n plimsoll-node-lease \\
    plimsoll.dev/stop-

Exit status: 0 every node has resumed (with --wait=false: it was requested), 1 not all nodes did in time, or their progress is \
unknown, 2 the resume could not be requested.";

/// Arguments of `plimsoll stop`.
#[derive(Debug, clap::Args)]
#[command(after_help = STOP_HELP)]
pub struct StopArgs {
    /// Reason, shown on every node; your user name and the time are added
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    #[command(flatten)]
    options: Options,
}

/// Arguments of `plimsoll resume`.
#[derive(Debug, clap::Args)]
#[command(after_help = RESUME_HELP)]
pub struct ResumeArgs {
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, clap::Args)]
struct Options {
    /// Wait until every node has followed
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    wait: bool,

    /// How long to wait
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "60s")]
    timeout: Duration,

    /// Namespace of the Leases that agents renew, the chart's leases.namespace [default: as configured for the agents]
    #[arg(long, value_name = "NAME")]
    lease_namespace: Option<String>,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// The state that nodes should reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Goal {
    Released,
    Resumed,
}

/// Runs `plimsoll stop`.
pub(super) fn stop(args: &StopArgs) -> anyhow::Result<ExitCode> {
    runtime::start()?.block_on(async {
        let client = args.options.cluster.connect().await?;
        let user = user_name(&client).await;
        let value = value(args.reason.as_deref(), user.as_deref(), clock::wall_time());
        request_all(&client, &args.options, Some(&value)).await?;
        print_line("stop requested: every agent restores what it changed, and does nothing more")?;
        follow(&client, &args.options, Goal::Released).await
    })
}

/// Runs `plimsoll resume`.
pub(super) fn resume(args: &ResumeArgs) -> anyhow::Result<ExitCode> {
    runtime::start()?.block_on(async {
        let client = args.options.cluster.connect().await?;
        request_all(&client, &args.options, None).await?;
        print_line("resume requested: every rule starts over")?;
        follow(&client, &args.options, Goal::Resumed).await
    })
}

/// The annotation's value: `bad thresholds (by ann, 2026-01-01T00:00:00Z)`.
fn value(reason: Option<&str>, user: Option<&str>, now: jiff::Timestamp) -> String {
    let by = user.map_or_else(String::new, |user| format!("by {user}, "));
    let origin = format!("({by}{now:.0})");
    let reason = reason.map(str::trim).filter(|reason| !reason.is_empty());
    reason.map_or_else(|| origin.clone(), |reason| format!("{reason} {origin}"))
}

/// Our user name, if the API server reports it.
async fn user_name(client: &Client) -> Option<String> {
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    let request = hyper::Request::post("/apis/authentication.k8s.io/v1/selfsubjectreviews")
        .header("content-type", "application/json")
        .body(review.to_string().into_bytes());
    let review: Value = call(client.request(request.ok()?)).await.ok()?;
    Some(
        review["status"]["userInfo"]["username"]
            .as_str()?
            .to_owned(),
    )
}

fn config_maps(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let kind = resource("", "v1", "ConfigMap", "configmaps");
    Api::namespaced_with(client.clone(), namespace, &kind)
}

/// Prints a line. A closed pipe does not stop the request.
fn print_line(line: &str) -> anyhow::Result<()> {
    print(format!("{line}\n").as_bytes()).map(drop)
}

/// Annotates the object in every namespace that agents watch.
async fn request_all(
    client: &Client,
    options: &Options,
    value: Option<&str>,
) -> anyhow::Result<()> {
    let watched = lease_namespaces(client).await;
    let given = options.lease_namespace.as_deref();
    for namespace in namespaces(given, &watched)? {
        request(client, namespace, value).await?;
    }
    Ok(())
}

/// The namespaces to annotate. `watched` is empty if the user may not list agents, or if there are none yet.
fn namespaces<'a>(given: Option<&'a str>, watched: &'a [String]) -> anyhow::Result<Vec<&'a str>> {
    match given {
        None if watched.is_empty() => Ok(vec![LEASE_NAMESPACE]),
        None => Ok(watched.iter().map(String::as_str).collect()),
        Some(given) if watched.is_empty() || watched.iter().any(|it| it == given) => {
            Ok(vec![given])
        }
        Some(given) => {
            let watched = watched.join(", ");
            bail!("no agent watches namespace {given}: they watch {watched} (--lease-namespace)")
        }
    }
}

/// Sets or removes the annotation. Creates the object if it is missing: a stopped agent resumes only if there is one.
async fn request(client: &Client, namespace: &str, value: Option<&str>) -> anyhow::Result<()> {
    let failed = |error| failed(namespace, &error);
    let annotated = annotate(client, namespace, value).await;
    let Err(error) = annotated else { return Ok(()) };
    if error.code() != Some(404) {
        return Err(failed(error));
    }
    let annotations: BTreeMap<_, _> = value.map(|value| (ANNOTATION, value)).into_iter().collect();
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": OBJECT, "annotations": annotations},
    });
    let object: DynamicObject = serde_json::from_value(object)?;
    let api = config_maps(client, namespace);
    // A Role can allow this for a single name, but not a POST. If another client has created it meanwhile, it is changed.
    let params = PatchParams::apply(OBJECT).force();
    let applied = call(api.patch(OBJECT, &params, &Patch::Apply(object))).await;
    applied.map_err(failed)?;
    print_line(&format!(
        "note: ConfigMap {OBJECT} was missing in namespace {namespace} and has been created; agents watch it if that is \
         their --lease-namespace (the chart's leases.namespace)"
    ))
}

async fn annotate(client: &Client, namespace: &str, value: Option<&str>) -> Result<(), CallError> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {ANNOTATION: value}}}));
    let api = config_maps(client, namespace);
    call(api.patch(OBJECT, &PatchParams::default(), &patch))
        .await
        .map(drop)
}

fn failed(namespace: &str, error: &CallError) -> anyhow::Error {
    let fix = match error.code() {
        Some(403) => "; ask an administrator who may patch that ConfigMap",
        Some(404) => {
            "; is plimsoll installed, and are its Leases in that namespace (--lease-namespace)?"
        }
        _ => "",
    };
    let why = error.message();
    anyhow!("failed to annotate ConfigMap {OBJECT} in namespace {namespace}: {why}{fix}")
}

/// Waits until every node has reached the goal, and prints the progress.
async fn follow(client: &Client, options: &Options, goal: Goal) -> anyhow::Result<ExitCode> {
    if !options.wait {
        return Ok(ExitCode::SUCCESS);
    }
    let started = clock::boot_time();
    let mut printed = String::new();
    loop {
        let polled = poll(client, goal).await;
        let late = clock::boot_time().since(started) >= options.timeout;
        let line = match &polled {
            Ok(progress) => progress.to_string(),
            Err(error) => format!("progress is unknown: {error}"),
        };
        let done = polled
            .as_ref()
            .is_ok_and(|progress| progress.waiting.is_empty());
        let finished = late || done || polled.as_ref().is_err_and(ProgressError::is_final);
        if printed != line || finished {
            print_line(&line)?;
            printed = line;
        }
        if done {
            return Ok(ExitCode::SUCCESS);
        }
        if finished {
            if let Ok(progress) = &polled {
                print_line(&progress.names())?;
            }
            return Ok(ExitCode::FAILURE);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Why the progress is unknown.
#[derive(Debug, thiserror::Error)]
enum ProgressError {
    #[error("failed to list the NodeWatermarks: {}", .0.message())]
    List(CallError),
    #[error(
        "the definition of NodeWatermark is outdated: plimsoll crds | kubectl apply --server-side -f -"
    )]
    Outdated,
}

impl ProgressError {
    /// Whether trying again is useless.
    fn is_final(&self) -> bool {
        match self {
            Self::List(error) => matches!(error.code(), Some(401 | 403 | 404)),
            Self::Outdated => true,
        }
    }
}

async fn poll(client: &Client, goal: Goal) -> Result<Progress, ProgressError> {
    let table = call(ServerTable::read(
        client,
        NodeWatermark::url_path(&(), None),
    ));
    Progress::of(&table.await.map_err(ProgressError::List)?, goal)
}

/// The progress of all nodes.
#[derive(Debug, PartialEq, Eq)]
struct Progress {
    goal: Goal,
    /// Number of nodes that have had an agent.
    nodes: usize,
    /// Names of those that have not reached the goal.
    waiting: Vec<String>,
}

impl Progress {
    /// Reads the table of all `NodeWatermark`s.
    fn of(table: &ServerTable, goal: Goal) -> Result<Self, ProgressError> {
        let columns = ["Name", "Stopped", "Agent"];
        if !columns.iter().all(|column| table.has(column)) {
            return Err(ProgressError::Outdated);
        }
        let mut progress = Self {
            goal,
            nodes: 0,
            waiting: Vec::new(),
        };
        for [name, stopped, agent] in table.cells(columns) {
            if agent.is_empty() {
                continue;
            }
            progress.nodes += 1;
            let reached = match goal {
                Goal::Released => stopped == RELEASED,
                Goal::Resumed => stopped.is_empty(),
            };
            if !reached {
                progress.waiting.push(name.to_owned());
            }
        }
        Ok(progress)
    }

    /// The unfinished nodes, and how to find out more.
    fn names(&self) -> String {
        let named = named(&self.waiting, MAX_NAMED);
        format!(
            "not yet: {named}; `plimsoll top` shows unresponsive agents, and `kubectl describe nodewatermark` what is \
             still in force on a node"
        )
    }
}

impl std::fmt::Display for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let done = self.nodes - self.waiting.len();
        let what = match self.goal {
            Goal::Released => "have restored everything",
            Goal::Resumed => "have resumed",
        };
        write!(f, "{done} of {} nodes {what}", self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(table: Value) -> ServerTable {
        serde_json::from_value(table).expect("a table")
    }

    fn table(rows: &[(&str, Option<&str>, Option<&str>)]) -> ServerTable {
        let rows = rows.iter();
        let rows = rows.map(|(name, stopped, agent)| json!({"cells": [name, 1, stopped, agent]}));
        read(json!({
            "columnDefinitions": [{"name": "Name"}, {"name": "Rules"}, {"name": "Stopped"}, {"name": "Agent"}],
            "rows": rows.collect::<Vec<_>>(),
        }))
    }

    #[test]
    fn nodes_that_never_had_an_agent_are_not_waited_for() {
        let table = table(&[
            ("done", Some("Released"), Some("1")),
            ("busy", Some("Releasing"), Some("1")),
            ("deaf", None, Some("1")),
            ("bare", None, None),
        ]);
        let released = Progress::of(&table, Goal::Released).expect("understood");
        assert_eq!(released.waiting, ["busy", "deaf"]);
        assert_eq!(
            released.to_string(),
            "1 of 3 nodes have restored everything"
        );
        let resumed = Progress::of(&table, Goal::Resumed).expect("understood");
        assert_eq!(resumed.waiting, ["done", "busy"]);
        assert_eq!(resumed.to_string(), "1 of 3 nodes have resumed");
    }

    #[test]
    fn at_most_ten_unfinished_nodes_are_named() {
        let names: Vec<String> = (0..12).map(|it| format!("n{it}")).collect();
        let rows: Vec<_> = names
            .iter()
            .map(|it| (it.as_str(), None, Some("1")))
            .collect();
        let progress = Progress::of(&table(&rows), Goal::Released).expect("understood");
        let names = progress.names();
        assert!(names.starts_with("not yet: n0, n1, "), "{names}");
        assert!(names.contains("n9 and 2 more; "), "{names}");
    }

    #[test]
    fn only_namespaces_that_agents_watch_are_annotated() {
        let watched = ["here".to_owned(), "there".to_owned()];
        let at = |given, watched| namespaces(given, watched).map_err(|error| error.to_string());
        assert_eq!(at(None, &watched), Ok(vec!["here", "there"]));
        assert_eq!(at(Some("there"), &watched), Ok(vec!["there"]));
        let error =
            "no agent watches namespace nowhere: they watch here, there (--lease-namespace)";
        assert_eq!(at(Some("nowhere"), &watched), Err(error.to_owned()));
        // Without a list of agents the given namespace is used.
        assert_eq!(at(None, &[]), Ok(vec![LEASE_NAMESPACE]));
        assert_eq!(at(Some("nowhere"), &[]), Ok(vec!["nowhere"]));
    }

    #[test]
    fn an_outdated_definition_is_reported_with_the_fix() {
        let older = read(json!({"columnDefinitions": [{"name": "Name"}], "rows": []}));
        let error = Progress::of(&older, Goal::Released).expect_err("not understood");
        assert!(
            error.is_final() && error.to_string().contains("plimsoll crds"),
            "{error}"
        );
    }

    #[test]
    fn the_annotation_has_reason_user_and_time() {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let describe = |reason, user| value(reason, user, now);
        assert_eq!(
            describe(Some(" bad thresholds "), Some("ann")),
            "bad thresholds (by ann, 1970-01-01T00:00:00Z)"
        );
        assert_eq!(
            describe(Some("false"), None),
            "false (1970-01-01T00:00:00Z)"
        );
        assert_eq!(
            describe(Some(""), Some("ann")),
            "(by ann, 1970-01-01T00:00:00Z)"
        );
    }
}
