//! The answer of `plimsoll explain pod`. Pure.

use std::fmt;

use jiff::Timestamp;
use serde::Serialize;

use crate::cli::explain::placement::Explanation;
use crate::cli::top::since;
use crate::crd::NodeMetricStatus;
use crate::crd::duration::format_duration;
use crate::crd::node_watermark::{
    BurstStatus, EvictionStatus, NodeWatermarkStatus, RuleStatus, ThrottledStatus, WouldStatus,
};
use crate::engine::metric::ActionKind;
use crate::engine::pod::Pod;
use crate::engine::policy::{NodeFacts, PodPolicy, PolicySet, Rule, Strategy};

/// What is known of the pod's node.
#[derive(Debug, Default)]
pub(super) struct OnItsNode {
    pub(super) facts: NodeFacts,
    /// As the agent reported it.
    pub(super) watermark: Option<NodeWatermarkStatus>,
    pub(super) metric: Option<NodeMetricStatus>,
    /// What could not be read.
    pub(super) notes: Vec<String>,
}

/// What policies may do to a pod, and what they do to it now.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodExplanation {
    pod: String,
    node: Option<String>,
    /// No action may touch it.
    protected: bool,
    /// The `PodQOS` that match it.
    policies: Vec<Matching>,
    /// The rules of its node that may act on it.
    rules: Vec<Acting>,
    now: Now,
    /// Percent of the time in which it waits for a CPU. Unknown on cgroup v1, and for a pod that is not among the busiest.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu_delay: Option<f64>,
    /// The least loaded nodes for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    placement: Option<Explanation>,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Matching {
    #[serde(rename = "podQOS")]
    pod_qos: String,
    allowed_actions: Vec<String>,
    /// What it does to the pod at all times.
    #[serde(skip_serializing_if = "Option::is_none")]
    standing: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Acting {
    rule: String,
    strategy: Strategy,
    may: Vec<&'static str>,
    /// As last reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<String>,
    #[serde(skip)]
    since: Option<String>,
}

/// As the agent of its node reported it.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
struct Now {
    /// `None` if there is no report.
    reported: bool,
    throttled: Option<ThrottledStatus>,
    burst: Option<BurstStatus>,
    evictions: Vec<EvictionStatus>,
    would: Vec<WouldStatus>,
}

impl PodExplanation {
    pub(super) fn new(
        pod: &Pod,
        node: Option<String>,
        policy: &PolicySet,
        at: OnItsNode,
        now: Timestamp,
    ) -> Self {
        let matching = policy.pods.iter().filter(|it| it.matches(pod));
        let policies: Vec<Matching> = matching.map(|it| Matching::of(it, pod)).collect();
        let reported = at.watermark.as_ref();
        let acting = |rule: &Rule| Acting::of(rule, &policy.pods, pod, reported, now);
        let usage = at.metric.iter().flat_map(|metric| &metric.top_pods);
        let mut usage = usage.filter(|it| it.namespace == pod.namespace && it.name == pod.name);
        let mut notes = at.notes;
        if node.is_none() {
            notes.push("it is on no node yet".to_owned());
        } else if reported.is_none() && notes.is_empty() {
            notes.push("no agent has reported from its node".to_owned());
        }
        Self {
            pod: pod.full_name().to_string(),
            node,
            protected: pod.protected,
            rules: policy.rules.iter().filter_map(acting).collect(),
            policies,
            now: reported.map_or_else(Now::default, |status| Now::of(status, pod)),
            cpu_delay: usage.next().and_then(|it| it.cpu_delay),
            placement: None,
            notes,
        }
    }

    /// Adds where it would be placed, or why that is unknown.
    pub(super) fn placed(&mut self, best: Result<Explanation, String>) {
        match best {
            Ok(best) => self.placement = Some(best),
            Err(why) => self
                .notes
                .push(format!("where it would be placed is unknown: {why}")),
        }
    }
}

impl Matching {
    fn of(policy: &PodPolicy, pod: &Pod) -> Self {
        let standing = policy.standing;
        let mut parts = Vec::new();
        if standing.idle && !pod.protected {
            parts.push("the idle class".to_owned());
        }
        if standing.burst.0 > 0 {
            parts.push(format!("a burst of {} above its CPU limit", standing.burst));
        }
        let preview = if standing.preview {
            " (Preview: only reported)"
        } else {
            ""
        };
        Self {
            pod_qos: policy.name.clone(),
            allowed_actions: policy.allowed.clone(),
            standing: (!parts.is_empty()).then(|| parts.join(" and ") + preview),
        }
    }
}

impl Acting {
    fn of(
        rule: &Rule,
        policies: &[PodPolicy],
        pod: &Pod,
        reported: Option<&NodeWatermarkStatus>,
        now: Timestamp,
    ) -> Option<Self> {
        let kinds = [
            (ActionKind::CpuThrottle, "throttle its CPU"),
            (ActionKind::ForceGc, "reclaim its page cache"),
            (ActionKind::Eviction, "evict it"),
        ];
        let evictable = pod.eviction_exemption.is_none();
        let may: Vec<&'static str> = kinds
            .into_iter()
            .filter(|(kind, _)| rule.may_act(policies, pod, *kind))
            .filter(|(kind, _)| *kind != ActionKind::Eviction || evictable)
            .map(|(_, words)| words)
            .collect();
        let id = rule.id.to_string();
        let status = reported.and_then(|it| it.rules.iter().find(|it| it.id == id));
        let age = |it: &RuleStatus| {
            let time = it.since.as_ref()?;
            Some(format_duration(whole_seconds(since(time.0, now))))
        };
        (!may.is_empty()).then(|| Self {
            strategy: rule.strategy,
            may,
            state: status.map(|it| it.state.clone()),
            since: status.and_then(age),
            rule: id,
        })
    }
}

const fn whole_seconds(duration: std::time::Duration) -> std::time::Duration {
    std::time::Duration::from_secs(duration.as_secs())
}

impl Now {
    fn of(status: &NodeWatermarkStatus, pod: &Pod) -> Self {
        let is_it = |namespace: &str, name: &str| namespace == pod.namespace && name == pod.name;
        let evictions = status.evictions.iter();
        let would = status.would.iter();
        Self {
            reported: true,
            throttled: status
                .throttled
                .iter()
                .find(|it| it.uid == *pod.uid.to_string())
                .cloned(),
            burst: status
                .bursts
                .iter()
                .find(|it| is_it(&it.namespace, &it.pod))
                .cloned(),
            evictions: evictions
                .filter(|it| is_it(&it.namespace, &it.pod))
                .cloned()
                .collect(),
            would: would
                .filter(|it| {
                    let namespace = it.namespace.as_deref().unwrap_or_default();
                    it.pod.as_deref().is_some_and(|name| is_it(namespace, name))
                })
                .cloned()
                .collect(),
        }
    }

    fn lines(&self, rules: &[Acting]) -> Vec<String> {
        let since = |rule: &str| {
            let known = rules.iter().find(|it| it.rule == rule);
            let known = known.and_then(|it| Some((it.state.as_ref()?, it.since.as_ref()?)));
            known.map_or_else(String::new, |(state, since)| {
                format!(", {state} for {since}")
            })
        };
        let mut lines = Vec::new();
        if let Some(it) = &self.throttled {
            let before = it.from_millicores.map(|quota| format!("{quota}m"));
            let before = before.unwrap_or_else(|| "no limit".to_owned());
            let now = it.to_millicores.map_or_else(
                || "in the idle class".to_owned(),
                |quota| {
                    format!(
                        "at a CPU quota of {quota}m ({} %), before: {before}",
                        it.ratio
                    )
                },
            );
            lines.push(format!("it is {now}, by {}{}", it.rule, since(&it.rule)));
        }
        if let Some(it) = &self.burst {
            lines.push(format!(
                "it may burst above its CPU limit by {}m",
                it.millicores
            ));
        }
        for it in &self.would {
            let amount = it.how.iter().map(|how| format!(" ({how})"));
            let amount: String = amount.collect();
            lines.push(format!("Preview: {} would {} it{amount}", it.rule, it.what));
        }
        for it in &self.evictions {
            lines.push(format!("{} asked to evict it: {}", it.rule, it.outcome));
        }
        if lines.is_empty() && self.reported {
            lines.push("nothing is done to it".to_owned());
        }
        lines
    }
}

impl PodExplanation {
    fn write_exemption(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.protected && !self.policies.is_empty() {
            let (namespace, name) = self.pod.split_once('/').unwrap_or_default();
            writeln!(
                f,
                "\nTo exempt it\n  kubectl annotate pod -n {namespace} {name} plimsoll.dev/protected=true"
            )?;
            writeln!(
                f,
                "  (better in its workload's template, so that its successors have it)"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for PodExplanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let node = self.node.as_deref().unwrap_or("no node");
        writeln!(f, "Pod {} on {node}", self.pod)?;
        writeln!(f, "\nNow")?;
        for line in self.now.lines(&self.rules) {
            writeln!(f, "  {line}")?;
        }
        if let Some(delay) = self.cpu_delay {
            writeln!(f, "  it waits for a CPU {delay:.1} % of the time")?;
        }
        for note in &self.notes {
            writeln!(f, "  {note}")?;
        }
        writeln!(f, "\nMay be acted on")?;
        if self.protected {
            writeln!(
                f,
                "  no: it is annotated plimsoll.dev/protected, or belongs to plimsoll; only a burst is given to it"
            )?;
        } else if self.policies.is_empty() {
            writeln!(f, "  no: no PodQOS matches it")?;
        } else if self.rules.is_empty() {
            writeln!(f, "  not by any rule of its node")?;
        }
        for rule in &self.rules {
            let preview = if rule.strategy == Strategy::Preview {
                " (Preview: only reports)"
            } else {
                ""
            };
            writeln!(f, "  {} may {}{preview}", rule.rule, rule.may.join(", "))?;
        }
        for policy in &self.policies {
            let standing = policy.standing.as_deref();
            if let Some(standing) = standing {
                writeln!(
                    f,
                    "  PodQOS {} gives it {standing}, at all times",
                    policy.pod_qos
                )?;
            }
        }
        if !self.policies.is_empty() {
            let names: Vec<&str> = self.policies.iter().map(|it| it.pod_qos.as_str()).collect();
            writeln!(f, "  matched by PodQOS {}", names.join(", "))?;
        }
        self.write_exemption(f)?;
        if let Some(placement) = &self.placement {
            writeln!(f, "\nThe least loaded nodes for it")?;
            for line in placement.lines() {
                writeln!(f, "  {line}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "report_tests.rs"]
mod tests;
