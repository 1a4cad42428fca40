//! `plimsoll stop` and `plimsoll resume`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{anyhow, bail};
use clap::ArgAction;
use kube::api::{DynamicObject, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

use super::doctor::lease_namespaces;
use super::{LEASE_NAMESPACE, duration, print, runtime};
use crate::cluster::client::{CallError, call, connect};
use crate::cluster::clock;
use crate::cluster::watch::resource;
use crate::crd::emergency_stop::{ANNOTATION, OBJECT};
use crate::crd::node_watermark::stopped::RELEASED;

/// How often nodes are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// So many nodes are named that are waited for in vain.
const NAMED: usize = 10;
/// What `kubectl get` asks for.
const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

const STOP_HELP: &str = "\
Annotates the ConfigMap plimsoll-stop beside the agents' Leases, which every agent watches by itself: the controller may be \
away. Within 15 s each gives back all CPU and takes its taint off, begins no eviction, and does nothing more until \
`plimsoll resume`; so do agents that start later. Where the connections of an agent are dropped in silence it is within 25 s. \
Rules with strategy Preview go on reporting. The same by kubectl, where the chart's leases.namespace is as it was:
  kubectl annotate configmap plimsoll-stop -n plimsoll-node-lease --overwrite plimsoll.dev/stop='why'

Examples:
  Stop everything, and see it done:
    plimsoll stop --reason 'batch jobs starve since the new marks'
  How far it is:
    kubectl get nodewatermarks

Permissions: patch of the ConfigMap (create, where it is missing), list of nodewatermarks to see how far it is, and list of \
daemonsets to see where it is: without, say --lease-namespace where the chart's leases.namespace is another.

Exit status: 0 every node has released, 1 not all have said so in time, 2 it could not be ordered.";

const RESUME_HELP: &str = "\
Takes the annotation off again that `plimsoll stop` has set. Every rule begins anew: thresholds count from zero. The same by \
kubectl, where the chart's leases.namespace is as it was:
  kubectl annotate configmap plimsoll-stop -n plimsoll-node-lease plimsoll.dev/stop-

Exit status: 0 every node goes on, 1 not all have said so in time, 2 it could not be ordered.";

/// Arguments of `plimsoll stop`.
#[derive(Debug, clap::Args)]
#[command(after_help = STOP_HELP)]
pub struct StopArgs {
    /// Why, for whoever looks at a node meanwhile; your name and the time are added
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,

    #[command(flatten)]
    how: How,
}

/// Arguments of `plimsoll resume`.
#[derive(Debug, clap::Args)]
#[command(after_help = RESUME_HELP)]
pub struct ResumeArgs {
    #[command(flatten)]
    how: How,
}

#[derive(Debug, clap::Args)]
struct How {
    /// Wait until every node says that it follows
    #[arg(long, value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
    wait: bool,

    /// For how long
    #[arg(long, value_name = "DURATION", value_parser = duration::positive, default_value = "60s")]
    timeout: Duration,

    /// Namespace of the Leases that agents renew, the chart's leases.namespace [default: what the agents are told]
    #[arg(long, value_name = "NAME")]
    lease_namespace: Option<String>,

    /// How to reach the API server [default: the pod's service account, else $KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

/// What the nodes are to come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Aim {
    Released,
    Resumed,
}

/// Runs `plimsoll stop`.
pub(super) fn stop(args: &StopArgs) -> anyhow::Result<ExitCode> {
    runtime::start()?.block_on(async {
        let client = connect(args.how.kubeconfig.as_deref()).await?;
        let user = who(&client).await;
        let value = value(args.reason.as_deref(), user.as_deref(), clock::wall());
        order_all(&client, &args.how, Some(&value)).await?;
        say("stopped: every agent gives back what is in force, and does nothing more")?;
        follow(&client, &args.how, Aim::Released).await
    })
}

/// Runs `plimsoll resume`.
pub(super) fn resume(args: &ResumeArgs) -> anyhow::Result<ExitCode> {
    runtime::start()?.block_on(async {
        let client = connect(args.how.kubeconfig.as_deref()).await?;
        order_all(&client, &args.how, None).await?;
        say("resumed: every rule begins anew")?;
        follow(&client, &args.how, Aim::Resumed).await
    })
}

/// `bad marks (by ann, 2026-01-01T00:00:00Z)`
fn value(reason: Option<&str>, user: Option<&str>, now: jiff::Timestamp) -> String {
    let by = user.map_or_else(String::new, |user| format!("by {user}, "));
    let trace = format!("({by}{now:.0})");
    let reason = reason.map(str::trim).filter(|reason| !reason.is_empty());
    reason.map_or_else(|| trace.clone(), |reason| format!("{reason} {trace}"))
}

/// Who we are to the API server, where it says so.
async fn who(client: &Client) -> Option<String> {
    let review = json!({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"});
    let request = hyper::Request::post("/apis/authentication.k8s.io/v1/selfsubjectreviews")
        .header("content-type", "application/json")
        .body(review.to_string().into_bytes());
    let answer: Value = call(client.request(request.ok()?)).await.ok()?;
    Some(
        answer["status"]["userInfo"]["username"]
            .as_str()?
            .to_owned(),
    )
}

fn config_maps(client: &Client, namespace: &str) -> Api<DynamicObject> {
    let kind = resource("", "v1", "ConfigMap", "configmaps");
    Api::namespaced_with(client.clone(), namespace, &kind)
}

/// Where nobody reads it the order is given all the same.
fn say(line: &str) -> anyhow::Result<()> {
    print(format!("{line}\n").as_bytes()).map(drop)
}

/// Orders it wherever agents watch for it.
async fn order_all(client: &Client, how: &How, value: Option<&str>) -> anyhow::Result<()> {
    let told = lease_namespaces(client).await;
    let given = how.lease_namespace.as_deref();
    for namespace in places(given, &told)? {
        order(client, namespace, value).await?;
    }
    Ok(())
}

/// The namespaces of the objects, by what is given and what agents are told. Nobody may have told us: who stops may have no
/// right to see agents, and these may be stopped before they are installed.
fn places<'a>(given: Option<&'a str>, told: &'a [String]) -> anyhow::Result<Vec<&'a str>> {
    match given {
        None if told.is_empty() => Ok(vec![LEASE_NAMESPACE]),
        None => Ok(told.iter().map(String::as_str).collect()),
        Some(given) if told.is_empty() || told.iter().any(|it| it == given) => Ok(vec![given]),
        Some(given) => {
            let told = told.join(", ");
            bail!("no agent watches namespace {given}: they watch {told} (--lease-namespace)")
        }
    }
}

/// Annotates the object, or takes the annotation off. It is made where it is missing: agents that are stopped go on only
/// where an object says so.
async fn order(client: &Client, namespace: &str, value: Option<&str>) -> anyhow::Result<()> {
    let refused = |error| refused(namespace, &error);
    let annotated = annotate(client, namespace, value).await;
    let Err(error) = annotated else { return Ok(()) };
    if error.code() != Some(404) {
        return Err(refused(error));
    }
    let annotations: BTreeMap<_, _> = value.map(|value| (ANNOTATION, value)).into_iter().collect();
    let object = json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": OBJECT, "annotations": annotations},
    });
    let object: DynamicObject = serde_json::from_value(object)?;
    let api = config_maps(client, namespace);
    match call(api.create(&PostParams::default(), &object)).await {
        Ok(_) => say(&format!(
            "note: ConfigMap {OBJECT} was missing in namespace {namespace}, and was made; agents watch it where their \
             --lease-namespace (the chart's leases.namespace) is that"
        )),
        // Somebody else made it meanwhile.
        Err(error) if error.code() == Some(409) => {
            annotate(client, namespace, value).await.map_err(refused)
        }
        Err(error) => Err(refused(error)),
    }
}

async fn annotate(client: &Client, namespace: &str, value: Option<&str>) -> Result<(), CallError> {
    let patch = Patch::Merge(json!({"metadata": {"annotations": {ANNOTATION: value}}}));
    let api = config_maps(client, namespace);
    call(api.patch(OBJECT, &PatchParams::default(), &patch))
        .await
        .map(drop)
}

fn refused(namespace: &str, error: &CallError) -> anyhow::Error {
    let cure = match error.code() {
        Some(403) => "; ask somebody who may patch that ConfigMap",
        Some(404) => "; is plimsoll installed, with its Leases there (--lease-namespace)?",
        _ => "",
    };
    let why = error.words();
    anyhow!("failed to annotate ConfigMap {OBJECT} in namespace {namespace}: {why}{cure}")
}

/// Waits until every node has come there, and tells how far they are.
async fn follow(client: &Client, how: &How, aim: Aim) -> anyhow::Result<ExitCode> {
    if !how.wait {
        return Ok(ExitCode::SUCCESS);
    }
    let begun = clock::now();
    let mut told = String::new();
    loop {
        let seen = look(client, aim).await;
        let late = clock::now().since(begun) >= how.timeout;
        let line = match &seen {
            Ok(progress) => progress.to_string(),
            Err(error) => format!("it can't be seen how far the nodes are: {error}"),
        };
        let there = seen
            .as_ref()
            .is_ok_and(|progress| progress.waiting.is_empty());
        let ends = late || there || seen.as_ref().is_err_and(Blind::is_final);
        if told != line || ends {
            say(&line)?;
            told = line;
        }
        if there {
            return Ok(ExitCode::SUCCESS);
        }
        if ends {
            if let Ok(progress) = &seen {
                say(&progress.names())?;
            }
            return Ok(ExitCode::FAILURE);
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Why nobody sees how far the nodes are.
#[derive(Debug, thiserror::Error)]
enum Blind {
    #[error("failed to list the NodeWatermarks: {}", .0.words())]
    List(CallError),
    #[error(
        "the definition of NodeWatermark is of an older version: plimsoll crds | kubectl apply --server-side -f -"
    )]
    Older,
}

impl Blind {
    /// No use in trying again.
    fn is_final(&self) -> bool {
        match self {
            Self::List(error) => matches!(error.code(), Some(401 | 403 | 404)),
            Self::Older => true,
        }
    }
}

async fn look(client: &Client, aim: Aim) -> Result<Progress, Blind> {
    let path = "/apis/plimsoll.dev/v1alpha1/nodewatermarks?includeObject=None";
    let request = hyper::Request::get(path).header("accept", TABLE);
    let table = call(async {
        let request = request.body(Vec::new()).map_err(kube::Error::HttpError)?;
        client.request::<Value>(request).await
    });
    Progress::of(&table.await.map_err(Blind::List)?, aim)
}

/// How far the nodes are.
#[derive(Debug, PartialEq, Eq)]
struct Progress {
    aim: Aim,
    /// Nodes that had an agent.
    nodes: usize,
    /// Those of them that are not there yet.
    waiting: Vec<String>,
}

impl Progress {
    /// As the table of all `NodeWatermark`s tells it.
    fn of(table: &Value, aim: Aim) -> Result<Self, Blind> {
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let columns = list(&table["columnDefinitions"]);
        let column = |name: &str| {
            let place = columns.iter().position(|column| column["name"] == name);
            place.ok_or(Blind::Older)
        };
        let [name, stopped, agent] = [column("Name")?, column("Stopped")?, column("Agent")?];
        let mut progress = Self {
            aim,
            nodes: 0,
            waiting: Vec::new(),
        };
        for row in list(&table["rows"]) {
            let cell = |place: usize| row["cells"][place].as_str().unwrap_or_default();
            if cell(agent).is_empty() {
                continue;
            }
            progress.nodes += 1;
            let there = match aim {
                Aim::Released => cell(stopped) == RELEASED,
                Aim::Resumed => cell(stopped).is_empty(),
            };
            if !there {
                progress.waiting.push(cell(name).to_owned());
            }
        }
        Ok(progress)
    }

    /// The nodes that are waited for, with what to do.
    fn names(&self) -> String {
        let named = self.waiting.iter().take(NAMED).map(String::as_str);
        let named = named.collect::<Vec<_>>().join(", ");
        let more = match self.waiting.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!(
            "not yet: {named}{more}; whose agents run, and are not silent, says `plimsoll top`, and what is left on a node \
             `kubectl describe nodewatermark`"
        )
    }
}

impl std::fmt::Display for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let there = self.nodes - self.waiting.len();
        let what = match self.aim {
            Aim::Released => "have released everything",
            Aim::Resumed => "go on",
        };
        write!(f, "{there} of {} nodes {what}", self.nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rows: &[(&str, Option<&str>, Option<&str>)]) -> Value {
        let rows = rows.iter();
        let rows = rows.map(|(name, stopped, agent)| json!({"cells": [name, 1, stopped, agent]}));
        json!({
            "columnDefinitions": [{"name": "Name"}, {"name": "Rules"}, {"name": "Stopped"}, {"name": "Agent"}],
            "rows": rows.collect::<Vec<_>>(),
        })
    }

    #[test]
    fn nodes_are_waited_for_until_their_agents_say_so_but_not_those_that_never_had_one() {
        let table = table(&[
            ("done", Some("Released"), Some("1")),
            ("busy", Some("Releasing"), Some("1")),
            ("deaf", None, Some("1")),
            ("bare", None, None),
        ]);
        let released = Progress::of(&table, Aim::Released).expect("understood");
        assert_eq!(released.waiting, ["busy", "deaf"]);
        assert_eq!(
            released.to_string(),
            "1 of 3 nodes have released everything"
        );
        let resumed = Progress::of(&table, Aim::Resumed).expect("understood");
        assert_eq!(resumed.waiting, ["done", "busy"]);
        assert_eq!(resumed.to_string(), "1 of 3 nodes go on");
    }

    #[test]
    fn ten_of_those_that_are_late_are_named() {
        let names: Vec<String> = (0..12).map(|it| format!("n{it}")).collect();
        let rows: Vec<_> = names
            .iter()
            .map(|it| (it.as_str(), None, Some("1")))
            .collect();
        let progress = Progress::of(&table(&rows), Aim::Released).expect("understood");
        let names = progress.names();
        assert!(names.starts_with("not yet: n0, n1, "), "{names}");
        assert!(names.contains("n9 and 2 more; "), "{names}");
    }

    #[test]
    fn it_is_ordered_where_agents_watch_for_it_and_nowhere_else() {
        let told = ["here".to_owned(), "there".to_owned()];
        let at = |given, told| places(given, told).map_err(|error| error.to_string());
        assert_eq!(at(None, &told), Ok(vec!["here", "there"]));
        assert_eq!(at(Some("there"), &told), Ok(vec!["there"]));
        let refused =
            "no agent watches namespace nowhere: they watch here, there (--lease-namespace)";
        assert_eq!(at(Some("nowhere"), &told), Err(refused.to_owned()));
        // Whoever may not see them is believed.
        assert_eq!(at(None, &[]), Ok(vec![LEASE_NAMESPACE]));
        assert_eq!(at(Some("nowhere"), &[]), Ok(vec!["nowhere"]));
    }

    #[test]
    fn a_definition_without_the_column_is_told_with_the_cure() {
        let older = json!({"columnDefinitions": [{"name": "Name"}], "rows": []});
        let error = Progress::of(&older, Aim::Released).expect_err("not understood");
        assert!(
            error.is_final() && error.to_string().contains("plimsoll crds"),
            "{error}"
        );
    }

    #[test]
    fn the_annotation_says_why_who_and_when() {
        let now = jiff::Timestamp::UNIX_EPOCH;
        let said = |reason, user| value(reason, user, now);
        assert_eq!(
            said(Some(" bad marks "), Some("ann")),
            "bad marks (by ann, 1970-01-01T00:00:00Z)"
        );
        assert_eq!(said(Some("false"), None), "false (1970-01-01T00:00:00Z)");
        assert_eq!(
            said(Some(""), Some("ann")),
            "(by ann, 1970-01-01T00:00:00Z)"
        );
    }
}
