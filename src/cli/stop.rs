//! `plimsoll stop` and `plimsoll resume`.

mod progress;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use self::progress::{Awaited, Goal, MAX_NAMED, ProgressError, poll};
use super::cluster_args::ClusterArgs;
use super::doctor::snapshot::lease_namespaces;
use super::{LEASE_NAMESPACE, duration, print, runtime};
use crate::clock;
use crate::cluster::client::{CallError, call};
use crate::cluster::list::all;
use crate::crd::emergency_stop::{ANNOTATION, OBJECT, stop_of_all, stopped_nodes};
use crate::crd::words::named;

/// How often progress is polled.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
const STOP_HELP: &str = "\
Annotates the ConfigMap plimsoll-stop in the namespace of the agents' Leases, or adds the names of nodes to its data. Every \
agent watches it directly, so this works without the controller. Within 15 s (25 s if its connections hang) each agent that is \
stopped restores all CPU limits, removes its taint, requests no more evictions, and does nothing more until `plimsoll resume`. \
Agents that start later do the same. Rules with strategy Preview keep reporting. The equivalent with kubectl, if the chart's \
leases.namespace is unchanged:
  kubectl annotate configmap plimsoll-stop -n plimsoll-node-lease \\
    --overwrite plimsoll.dev/stop='why'
  kubectl patch configmap plimsoll-stop -n plimsoll-node-lease \\
    --type merge -p '{\"data\":{\"worker-1\":\"why\"}}'

Examples:
  Stop everything, and wait until it is done:
    plimsoll stop --reason 'batch jobs starve since the new thresholds'
  Stop one node, or those with a label:
    plimsoll stop --node worker-1 --reason 'under investigation'
    plimsoll stop -l pool=gpu
  See the progress:
    kubectl get nodewatermarks

Permissions: patch the ConfigMap (create, if it is missing), list nodewatermarks to see the progress, and list daemonsets to \
find the namespace. For nodes: get and list nodes.

Exit status: 0 every node has restored everything (with --no-wait: the stop was requested), 1 not all nodes did in time, or \
their progress is unknown, 2 the stop could not be requested.";

const RESUME_HELP: &str = "\
Takes back what `plimsoll stop` has set: for all nodes, or with --node or -l for nodes that were stopped by name. Nodes that \
were stopped by name stay stopped until they are named here. Every rule starts over: evaluations are counted from zero. The \
equivalent with kubectl, if the chart's leases.namespace is unchanged:
  kubectl annotate configmap plimsoll-stop -n plimsoll-node-lease \\
    plimsoll.dev/stop-
  kubectl patch configmap plimsoll-stop -n plimsoll-node-lease \\
    --type merge -p '{\"data\":{\"worker-1\":null}}'

Examples:
  plimsoll resume
  plimsoll resume --node worker-1

Exit status: 0 every node has resumed (with --no-wait: it was requested), 1 not all nodes did in time, or their progress is \
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
    /// Only this node; may be repeated [default: all]
    #[arg(long, value_name = "NAME")]
    node: Vec<String>,

    /// Only nodes with these labels, for example pool=batch,zone!=a
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "node")]
    selector: Option<String>,

    /// Return without waiting until every node has followed
    #[arg(long)]
    no_wait: bool,

    /// How long to wait
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "60s")]
    timeout: Duration,

    /// Namespace of the Leases that agents renew, if it cannot be read from their `DaemonSets`
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    lease_namespace: Option<String>,

    #[command(flatten)]
    cluster: ClusterArgs,
}

/// What a stop or resume is about.
#[derive(Debug)]
enum Target {
    Everything,
    Nodes(BTreeSet<String>),
}

/// Runs `plimsoll stop`.
pub(super) fn stop(args: &StopArgs) -> anyhow::Result<ExitCode> {
    runtime::start()?.block_on(async {
        let options = &args.options;
        let client = options.cluster.connect().await?;
        let target = options.target(&client, Goal::Released).await?;
        let user = user_name(&client).await;
        let value = value(args.reason.as_deref(), user.as_deref(), clock::wall_time());
        request_all(&client, options, &target, Some(&value)).await?;
        print_line(&match &target {
            Target::Everything => {
                "stop requested: every agent restores what it changed, and does nothing more"
                    .to_owned()
            }
            Target::Nodes(nodes) => format!(
                "stop requested: the agents of {} restore what they changed, and do nothing more",
                listed(nodes)
            ),
        })?;
        let awaited = match target {
            Target::Everything => Awaited::AllBut(BTreeSet::new()),
            Target::Nodes(nodes) => Awaited::Only(nodes),
        };
        follow(&client, options, Goal::Released, &awaited).await
    })
}

/// Runs `plimsoll resume`.
pub(super) fn resume(args: &ResumeArgs) -> anyhow::Result<ExitCode> {
    runtime::start()?.block_on(async {
        let options = &args.options;
        let client = options.cluster.connect().await?;
        let target = options.target(&client, Goal::Resumed).await?;
        let objects = request_all(&client, options, &target, None).await?;
        let requested = "resume requested: every rule starts over";
        let awaited = match target {
            Target::Everything => {
                print_line(requested)?;
                let stopped = objects.iter().flat_map(stopped_nodes);
                let stopped: BTreeSet<_> = stopped.map(|(node, _)| node.to_owned()).collect();
                if !stopped.is_empty() {
                    let stopped = listed(&stopped);
                    print_line(&format!("stopped by name, and still stopped: {stopped} (plimsoll resume --node NAME)"))?;
                }
                Awaited::AllBut(stopped)
            }
            Target::Nodes(nodes) => {
                if let Some(reason) = objects.iter().find_map(stop_of_all) {
                    print_line(&format!(
                        "all nodes are stopped ({reason}), these as well, until `plimsoll resume` without nodes"
                    ))?;
                    return Ok(ExitCode::FAILURE);
                }
                print_line(&format!("{requested} on {}", listed(&nodes)))?;
                Awaited::Only(nodes)
            }
        };
        follow(&client, options, Goal::Resumed, &awaited).await
    })
}

fn listed(nodes: &BTreeSet<String>) -> String {
    named(nodes, MAX_NAMED)
}

impl Options {
    /// The nodes that the arguments name. For a resume they need not exist: a node that was stopped may be gone.
    async fn target(&self, client: &Client, goal: Goal) -> anyhow::Result<Target> {
        let api: Api<Node> = Api::all(client.clone());
        if let Some(labels) = &self.selector {
            if labels.trim().is_empty() {
                bail!(
                    "--selector is empty, which would be every node: leave it out to name all nodes"
                );
            }
            let params = ListParams::default().labels(labels);
            let nodes = all(params, async |page| api.list_metadata(&page).await).await;
            let nodes =
                nodes.map_err(|error| anyhow!("failed to list the nodes: {}", error.message()))?;
            let nodes: BTreeSet<_> = nodes.iter().map(kube::ResourceExt::name_any).collect();
            if nodes.is_empty() {
                bail!("no node has the labels {labels}: nothing was changed");
            }
            return Ok(Target::Nodes(nodes));
        }
        let checked = self.node.iter().filter(|_| goal == Goal::Released);
        for name in checked {
            // Who may not read nodes can stop them all the same.
            let read = call(api.get_metadata(name)).await;
            if read.is_err_and(|error| error.code() == Some(404)) {
                bail!("there is no node {name}: nothing was changed");
            }
        }
        Ok(match self.node.as_slice() {
            [] => Target::Everything,
            names => Target::Nodes(names.iter().cloned().collect()),
        })
    }
}

impl Target {
    /// What sets the value, or removes it.
    fn patch(&self, value: Option<&str>) -> Value {
        match self {
            Self::Everything => json!({"metadata": {"annotations": {ANNOTATION: value}}}),
            Self::Nodes(nodes) => {
                let entries = nodes.iter().map(|node| (node.clone(), json!(value)));
                json!({"data": entries.collect::<serde_json::Map<_, _>>()})
            }
        }
    }
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

/// Prints a line. A closed pipe does not stop the request.
fn print_line(line: &str) -> anyhow::Result<()> {
    print(format!("{line}\n").as_bytes()).map(drop)
}

/// Changes the object in every namespace that agents watch; returns the objects as they are then.
async fn request_all(
    client: &Client,
    options: &Options,
    target: &Target,
    value: Option<&str>,
) -> anyhow::Result<Vec<ConfigMap>> {
    let watched = lease_namespaces(client).await;
    let given = options.lease_namespace.as_deref();
    let mut objects = Vec::new();
    for namespace in namespaces(given, &watched)? {
        objects.push(request(client, namespace, target, value).await?);
    }
    Ok(objects)
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

/// Sets or removes the value. Creates the object if it is missing: a stopped agent resumes only if there is one.
async fn request(
    client: &Client,
    namespace: &str,
    target: &Target,
    value: Option<&str>,
) -> anyhow::Result<ConfigMap> {
    let failed = |error| failed(namespace, &error);
    let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let patch = target.patch(value);
    let (merge, params) = (Patch::Merge(&patch), PatchParams::default());
    match call(api.patch(OBJECT, &params, &merge)).await {
        Err(error) if error.code() == Some(404) => {}
        patched => return patched.map_err(failed),
    }
    let object = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": OBJECT}});
    // A Role can allow this for a single name, but not a POST. What another client has set meanwhile stays.
    let create = PatchParams::apply(OBJECT).force();
    let created = call(api.patch(OBJECT, &create, &Patch::Apply(object))).await;
    created.map_err(failed)?;
    let applied = call(api.patch(OBJECT, &params, &merge)).await;
    let applied = applied.map_err(failed)?;
    print_line(&format!(
        "note: ConfigMap {OBJECT} was missing in namespace {namespace} and has been created; agents watch it if that is \
         their --lease-namespace (the chart's leases.namespace)"
    ))?;
    Ok(applied)
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
    anyhow!("failed to change ConfigMap {OBJECT} in namespace {namespace}: {why}{fix}")
}

/// Waits until every awaited node has reached the goal, and prints the progress.
async fn follow(
    client: &Client,
    options: &Options,
    goal: Goal,
    awaited: &Awaited,
) -> anyhow::Result<ExitCode> {
    if options.no_wait {
        return Ok(ExitCode::SUCCESS);
    }
    let started = clock::boot_time();
    let mut printed = String::new();
    loop {
        let polled = poll(client, goal, awaited).await;
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

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_node_is_an_entry_of_the_data() {
        let nodes = ["worker-1", "worker-2"].map(str::to_owned);
        let some = Target::Nodes(BTreeSet::from(nodes));
        let added = json!({"data": {"worker-1": "why", "worker-2": "why"}});
        assert_eq!(some.patch(Some("why")), added);
        let removed = json!({"data": {"worker-1": null, "worker-2": null}});
        assert_eq!(some.patch(None), removed);
        let all = json!({"metadata": {"annotations": {"plimsoll.dev/stop": "why"}}});
        assert_eq!(Target::Everything.patch(Some("why")), all);
    }
}
