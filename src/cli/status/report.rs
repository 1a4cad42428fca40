//! The summary of `plimsoll status`. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::coordination::v1::Lease;
use kube::ResourceExt as _;
use serde::Serialize;

use super::installation::Installation;
use crate::cli::color;
use crate::cli::doctor::snapshot::{Policy, items};
use crate::crd::emergency_stop::{stop_message, stop_of_all, stopped_nodes};
use crate::crd::words::named;
use crate::messages::count;

/// A Lease counts as expired this long after its time.
const GRACE: SignedDuration = SignedDuration::from_secs(10);
/// At most this many objects are named in a line.
const MAX_NAMED: usize = 5;
/// The state of a node to which no rule has closed.
const OPEN: &str = "Enabled";

/// One installation at a glance.
#[derive(Debug, Serialize)]
pub(super) struct StatusSummary {
    controller: Controller,
    agents: Agents,
    policies: Policies,
    nodes: Nodes,
    /// Why everything is stopped.
    stopped: Option<String>,
    healthy: bool,
    /// What could not be read.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Controller {
    ready_replicas: i32,
    replicas: i32,
    leader: Option<String>,
    version: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Agents {
    responding: usize,
    /// Nodes that have a `NodeWatermark`.
    nodes: usize,
    not_responding: Vec<String>,
    without_agent: Vec<String>,
    version: String,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Policies {
    by_kind: BTreeMap<&'static str, usize>,
    not_in_force: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Nodes {
    over_threshold: Vec<String>,
    closed: Vec<String>,
    throttled_pods: u64,
    /// Stopped by name, not with all others.
    stopped: Vec<String>,
    /// Whose agents do not act, as they report.
    not_acting: Vec<String>,
}

impl StatusSummary {
    pub(super) fn new(it: &Installation, now: Timestamp) -> Self {
        let controller = Controller::of(it, now);
        let agents = Agents::of(it, now);
        let policies = Policies::of(it);
        let stop = it.stop.as_ref().ok();
        let nodes = Nodes::of(it);
        let stopped = stop.and_then(stop_of_all);
        // Nodes without an agent may be meant: of another architecture, or with a taint that agents do not tolerate.
        let responds = agents.not_responding.is_empty();
        let acts = stopped.is_none() && nodes.stopped.is_empty() && nodes.not_acting.is_empty();
        let unread = it.unread();
        let healthy = unread.is_empty()
            && controller.leader.is_some()
            && controller.ready_replicas >= controller.replicas
            && responds
            && acts
            && policies.not_in_force.is_empty();
        Self {
            controller,
            agents,
            policies,
            nodes,
            stopped,
            healthy,
            notes: unread,
        }
    }

    pub(super) const fn is_healthy(&self) -> bool {
        self.healthy
    }
}

impl Controller {
    fn of(it: &Installation, now: Timestamp) -> Self {
        let deployments = items(&it.deployments).iter();
        let (mut replicas, mut ready_replicas) = (0, 0);
        for deployment in deployments {
            let wanted = deployment.spec.as_ref().and_then(|spec| spec.replicas);
            replicas += wanted.unwrap_or(1);
            let status = deployment.status.as_ref();
            ready_replicas += status.and_then(|status| status.ready_replicas).unwrap_or(0);
        }
        let mut elections = it.elections.iter().flatten();
        Self {
            ready_replicas,
            replicas,
            leader: elections.find_map(|lease| holder(lease, now)),
            version: it.versions().controllers(),
        }
    }
}

/// The pod that holds a Lease now. What follows its name tells its processes apart.
fn holder(lease: &Lease, now: Timestamp) -> Option<String> {
    let holder = lease.spec.as_ref()?.holder_identity.as_ref()?;
    let pod = holder.split('_').next().unwrap_or(holder);
    (!pod.is_empty() && is_renewed(lease, now)).then(|| pod.to_owned())
}

fn is_renewed(lease: &Lease, now: Timestamp) -> bool {
    let Some(spec) = &lease.spec else {
        return false;
    };
    let duration = SignedDuration::from_secs(spec.lease_duration_seconds.unwrap_or(0).into());
    let renewed = spec.renew_time.as_ref();
    renewed.is_some_and(|renewed| now.duration_since(renewed.0) <= duration + GRACE)
}

impl Agents {
    fn of(it: &Installation, now: Timestamp) -> Self {
        let leases = items(&it.leases).iter();
        let alive: BTreeSet<String> = leases
            .filter(|lease| is_renewed(lease, now))
            .map(kube::ResourceExt::name_any)
            .collect();
        let rows = it
            .watermarks
            .iter()
            .flat_map(|it| it.cells(["Name", "Agent"]));
        let (mut not_responding, mut without_agent) = (Vec::new(), Vec::new());
        let mut nodes = 0;
        for [name, version] in rows {
            nodes += 1;
            if version.is_empty() {
                without_agent.push(name.to_owned());
            } else if !alive.contains(name) {
                not_responding.push(name.to_owned());
            }
        }
        Self {
            responding: nodes - not_responding.len() - without_agent.len(),
            nodes,
            not_responding,
            without_agent,
            version: it.versions().agents(),
        }
    }
}

impl Policies {
    fn of(it: &Installation) -> Self {
        let by_kind = it.policies.iter();
        let by_kind = by_kind
            .map(|(kind, list)| (*kind, items(list).len()))
            .collect();
        let all = it.policies.iter();
        let all = all.flat_map(|(kind, list)| items(list).iter().map(move |it| (*kind, it)));
        let not_in_force = all.filter_map(|(kind, policy)| {
            let why = problem(policy)?;
            Some(format!("{kind} {} ({why})", policy.name_any()))
        });
        Self {
            by_kind,
            not_in_force: not_in_force.collect(),
        }
    }
}

/// Why a policy is not in force.
fn problem(policy: &Policy) -> Option<&str> {
    let status = policy.status.as_ref();
    let Some(conditions) = status.and_then(|it| it.conditions.as_ref()) else {
        return Some("not evaluated yet");
    };
    if status.and_then(|it| it.observed_generation) < policy.metadata.generation {
        return Some("its last edit is not evaluated yet");
    }
    let ready = conditions.iter().find(|it| it.kind == "Ready");
    match ready {
        Some(ready) if ready.status == "True" => None,
        Some(ready) => Some(&ready.reason),
        None => Some("not evaluated yet"),
    }
}

impl Nodes {
    fn of(it: &Installation) -> Self {
        let columns = ["Name", "Breached", "Scheduling", "Throttled", "Stopped"];
        let rows = it.watermarks.iter().flat_map(|it| it.cells(columns));
        let (mut over_threshold, mut closed, mut not_acting) = (Vec::new(), Vec::new(), Vec::new());
        let mut throttled_pods = 0;
        for [name, breached, scheduling, throttled, stopped] in rows {
            if !stopped.is_empty() {
                not_acting.push(name.to_owned());
            }
            if breached.parse::<u64>().is_ok_and(|number| number > 0) {
                over_threshold.push(name.to_owned());
            }
            if !scheduling.is_empty() && scheduling != OPEN {
                closed.push(name.to_owned());
            }
            throttled_pods += throttled.parse::<u64>().unwrap_or(0);
        }
        let stopped = it.stop.iter().flat_map(stopped_nodes);
        Self {
            over_threshold,
            closed,
            throttled_pods,
            stopped: stopped.map(|(node, _)| node.to_owned()).collect(),
            not_acting,
        }
    }
}

/// `1 does not respond: worker-3`, if there are any.
fn some(nodes: &[String], what: &str) -> Option<String> {
    let names = named(nodes, MAX_NAMED);
    (!nodes.is_empty()).then(|| format!("{} {what}: {names}", nodes.len()))
}

/// Version in brackets, if it is known.
fn bracketed(version: &str) -> String {
    if version.is_empty() {
        String::new()
    } else {
        format!(" ({version})")
    }
}

/// A line of the summary.
struct Line {
    label: &'static str,
    good: bool,
    parts: Vec<String>,
}

impl Line {
    /// With what is said of each part; if nothing is, `otherwise`.
    fn new(
        label: &'static str,
        good: bool,
        parts: impl IntoIterator<Item = Option<String>>,
        otherwise: &str,
    ) -> Self {
        let mut parts: Vec<String> = parts.into_iter().flatten().collect();
        if parts.is_empty() {
            parts.push(otherwise.to_owned());
        }
        Self { label, good, parts }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let label = format!("{:<12}", format!("{}:", self.label));
        let colour = if self.good { color::GOOD } else { color::ERROR };
        write!(
            f,
            "{}{}",
            color::paint(&label, colour),
            self.parts.join("; ")
        )
    }
}

impl StatusSummary {
    fn lines(&self) -> [Line; 5] {
        let stopped = &self.nodes.stopped;
        let all = self.stopped.as_ref();
        let all = all.map(|reason| format!("everything is {}", stop_message(reason)));
        let acts = all.is_none() && stopped.is_empty() && self.nodes.not_acting.is_empty();
        // The agents of an object that was deleted stay stopped.
        let not_acting = some(&self.nodes.not_acting, "not acting");
        [
            self.controller.line(),
            self.agents.line(),
            self.policies.line(),
            self.nodes.line(),
            Line::new(
                "Stopped",
                acts,
                [all, some(stopped, "by name"), not_acting],
                "no",
            ),
        ]
    }
}

impl Controller {
    fn line(&self) -> Line {
        let leader = self.leader.as_ref();
        let leads = leader.map_or_else(|| "none leads".to_owned(), |it| format!("{it} leads"));
        let (ready, all) = (self.ready_replicas, self.replicas);
        let version = bracketed(&self.version);
        let text = format!("{ready} of {all} replicas ready, {leads}{version}");
        Line::new(
            "Controller",
            leader.is_some() && ready >= all,
            [Some(text)],
            "",
        )
    }
}

impl Agents {
    fn line(&self) -> Line {
        let (responding, nodes) = (self.responding, self.nodes);
        let version = bracketed(&self.version);
        let parts = [
            Some(format!("{responding} of {nodes} nodes respond{version}")),
            some(&self.not_responding, "without a response"),
            some(&self.without_agent, "without an agent"),
        ];
        Line::new("Agents", self.not_responding.is_empty(), parts, "")
    }
}

impl Policies {
    fn line(&self) -> Line {
        let counts = self.by_kind.iter();
        let counts = counts.map(|(kind, number)| format!("{number} {kind}"));
        let counts = counts.collect::<Vec<_>>().join(", ");
        let bad = some(&self.not_in_force, "not in force");
        Line::new("Policies", bad.is_none(), [Some(counts), bad], "")
    }
}

impl Nodes {
    fn line(&self) -> Line {
        let throttled = usize::try_from(self.throttled_pods).unwrap_or(usize::MAX);
        let parts = [
            some(&self.over_threshold, "over a threshold"),
            some(&self.closed, "closed to new pods"),
            (throttled > 0).then(|| count(throttled, "throttled pod")),
        ];
        Line::new("Nodes", true, parts, "none over a threshold")
    }
}

impl fmt::Display for StatusSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.lines() {
            writeln!(f, "{line}")?;
        }
        for note in &self.notes {
            writeln!(f, "{}", color::message(&format!("note: {note}")))?;
        }
        if !self.healthy {
            writeln!(f, "\nplimsoll doctor says what is wrong, and how to fix it")?;
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
