//! How often the rules with strategy `Preview` would have acted in the last 24 hours, as the agents counted.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::table::Table;
use crate::crd::node_watermark::WouldLastDay;
use crate::crd::{NodeWatermarkStatus, Objects};
use crate::messages::{count, format_seconds};

/// Counted for less than this is worth a note.
const DAY: SignedDuration = SignedDuration::from_hours(24);

/// What the Preview rules of the nodes would have done.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct History {
    /// The rules, sorted by id.
    pub rules: Vec<RuleHistory>,
    /// What is not counted, or not for the whole time.
    pub notes: Vec<String>,
    /// The last line.
    pub summary: String,
    /// The time of the ages in the text.
    #[serde(skip)]
    now: Timestamp,
}

/// One rule.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RuleHistory {
    /// `<NodeQOS>/<rule>`.
    pub rule: String,
    /// The sums over the nodes; `lastBreachTime` and `since` are the latest.
    pub total: WouldLastDay,
    /// The nodes that count it, sorted by name.
    pub nodes: Vec<NodeHistory>,
}

/// One rule on one node.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct NodeHistory {
    /// Name of the node.
    pub node: String,
    /// What its agent counted.
    #[serde(flatten)]
    pub counts: WouldLastDay,
}

impl History {
    /// The history of `policies` by the statuses of these nodes, sorted by name, at `now`.
    pub fn of(
        policies: &Objects,
        statuses: &[(String, NodeWatermarkStatus)],
        now: Timestamp,
    ) -> Self {
        let named = policies.preview_rules().map(|rule| (rule, Vec::new()));
        let mut rules: BTreeMap<String, Vec<NodeHistory>> = named.collect();
        for (node, status) in statuses {
            for rule in &status.rules {
                if let Some(counts) = &rule.would_last_day {
                    let nodes = rules.entry(rule.id.clone()).or_default();
                    nodes.push(NodeHistory {
                        node: node.clone(),
                        counts: counts.clone(),
                    });
                }
            }
        }
        let rules = rules.into_iter().map(RuleHistory::of);
        let rules: Vec<RuleHistory> = rules.collect();
        let pods = policies.preview_pod_qos().map(|name| {
            format!("PodQOS/{name} only reports, at all times: plimsoll preview shows its pods")
        });
        let notes = rules.iter().filter_map(|rule| rule.note(now));
        Self {
            notes: notes.chain(pods).collect(),
            summary: summary(&rules),
            rules,
            now,
        }
    }
}

fn summary(rules: &[RuleHistory]) -> String {
    if rules.is_empty() {
        return "no rule has strategy Preview, so nothing is counted".to_owned();
    }
    let acted = rules.iter().filter(|rule| rule.total.breaches > 0).count();
    format!(
        "{acted} of {} with strategy Preview would have acted in the last 24 hours",
        count(rules.len(), "rule")
    )
}

impl RuleHistory {
    fn of((rule, nodes): (String, Vec<NodeHistory>)) -> Self {
        let mut total = WouldLastDay::default();
        for NodeHistory { counts, .. } in &nodes {
            total.breaches = total.breaches.saturating_add(counts.breaches);
            total.active_minutes = total.active_minutes.saturating_add(counts.active_minutes);
            total.throttle_rounds = total.throttle_rounds.saturating_add(counts.throttle_rounds);
            total.evictions = total.evictions.saturating_add(counts.evictions);
            total.last_breach_time = total.last_breach_time.max(counts.last_breach_time.clone());
            total.since = total.since.max(counts.since.clone());
        }
        Self { rule, total, nodes }
    }

    /// Why its counts are not those of 24 hours.
    fn note(&self, now: Timestamp) -> Option<String> {
        let rule = &self.rule;
        if self.nodes.is_empty() {
            return Some(format!(
                "{rule} is not counted: no agent of these nodes evaluates it (yet)"
            ));
        }
        let is_recent = |it: &&NodeHistory| {
            let since = it.counts.since.as_ref();
            since.is_none_or(|since| now.duration_since(since.0) < DAY)
        };
        let recent = self.nodes.iter().filter(is_recent).count();
        let since = self.total.since.as_ref().filter(|_| recent > 0)?.0;
        Some(format!(
            "{rule} is counted for less than 24 hours on {recent} of {}, for {} at least",
            count(self.nodes.len(), "node"),
            age(since, now)
        ))
    }

    fn row(&self, now: Timestamp) -> Vec<String> {
        let breached = self.nodes.iter().filter(|it| it.counts.breaches > 0);
        let total = &self.total;
        let minutes = u64::try_from(total.active_minutes).unwrap_or(0);
        let last = total.last_breach_time.as_ref();
        vec![
            self.rule.clone(),
            format!("{} of {}", breached.count(), self.nodes.len()),
            total.breaches.to_string(),
            format_seconds(Duration::from_mins(minutes)),
            total.throttle_rounds.to_string(),
            total.evictions.to_string(),
            last.map_or_else(|| "-".to_owned(), |last| age(last.0, now) + " ago"),
        ]
    }
}

/// Whole minutes from an hour on.
fn age(then: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0).unsigned_abs();
    let shown = if seconds < 3600 {
        seconds
    } else {
        seconds / 60 * 60
    };
    format_seconds(Duration::from_secs(shown))
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.rules.is_empty() {
            let header = [
                "RULE",
                "NODES",
                "BREACHES(24H)",
                "ACTIVE",
                "THROTTLES",
                "EVICTIONS",
                "LAST",
            ];
            let mut table = Table::new(&header, &[2, 3, 4, 5]);
            let rows = self.rules.iter().map(|rule| rule.row(self.now));
            rows.for_each(|row| table.push(row));
            writeln!(f, "{table}")?;
        }
        let mut notes = self.notes.iter();
        notes.try_for_each(|note| writeln!(f, "note: {note}"))?;
        writeln!(f, "{}", self.summary)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn policies(rules: &[(&str, &str)], only_reports: bool) -> Objects {
        let rules = rules.iter().map(|(name, strategy)| {
            let metric = json!({"name": "cpu_total_usage", "value": 1000});
            json!({"name": name, "strategy": strategy, "actionName": "slow", "metricRule": metric})
        });
        let object = |kind: &str, annotations: Value, spec: Value| {
            json!({
                "apiVersion": "ensurance.crane.io/v1alpha1", "kind": kind,
                "metadata": {"name": "q", "annotations": annotations}, "spec": spec,
            })
        };
        let idle = json!({"labelSelector": {}, "resourceQOS": {"cpuQOS": {"cpuPriority": 7}}});
        let annotations = json!({"plimsoll.dev/strategy": "Preview"});
        let rules = object(
            "NodeQOS",
            json!({}),
            json!({"rules": rules.collect::<Vec<_>>()}),
        );
        let pods = only_reports.then(|| object("PodQOS", annotations, idle));
        Objects::from_values([rules].into_iter().chain(pods))
    }

    fn status(rule: &str, breaches: i64, since: &str) -> NodeWatermarkStatus {
        let would = json!({
            "breaches": breaches, "activeMinutes": 35 * breaches, "throttleRounds": 4 * breaches, "since": since,
            "lastBreachTime": (breaches > 0).then_some("2026-11-21T09:59:10Z"),
        });
        let rule = json!({"id": rule, "strategy": "Preview", "state": "Normal", "mark": 1, "wouldLastDay": would});
        serde_json::from_value(json!({"rules": [rule]})).expect("a status")
    }

    fn history(policies: &Objects, statuses: Vec<(&str, NodeWatermarkStatus)>) -> History {
        let statuses = statuses.into_iter();
        let statuses: Vec<_> = statuses
            .map(|(node, status)| (node.to_owned(), status))
            .collect();
        let now = "2026-11-21T12:00:00Z".parse().expect("a time");
        History::of(policies, &statuses, now)
    }

    #[test]
    fn counts_are_summed_over_nodes_and_say_how_long_they_were_counted() {
        let policies = policies(
            &[("cpu", "Preview"), ("new", "Preview"), ("on", "None")],
            true,
        );
        let nodes = vec![
            ("a", status("q/cpu", 0, "2026-11-19T00:00:00Z")),
            ("b", status("q/cpu", 2, "2026-11-21T09:00:00Z")),
            ("c", status("q/cpu", 1, "2026-11-21T08:00:00Z")),
        ];
        let history = history(&policies, nodes);
        let expected = "\
RULE   NODES   BREACHES(24H)  ACTIVE  THROTTLES  EVICTIONS  LAST
q/cpu  2 of 3              3  1h 45m         12          0  2h ago
q/new  0 of 0              0      0s          0          0  -

note: q/cpu is counted for less than 24 hours on 2 of 3 nodes, for 3h at least
note: q/new is not counted: no agent of these nodes evaluates it (yet)
note: PodQOS/q only reports, at all times: plimsoll preview shows its pods
1 of 2 rules with strategy Preview would have acted in the last 24 hours
";
        assert_eq!(history.to_string(), expected);
        let json = serde_json::to_value(&history).expect("JSON");
        assert_eq!(json["rules"][0]["total"]["breaches"], 3);
        assert_eq!(json["rules"][0]["nodes"][1]["node"], "b");
        assert_eq!(json["rules"][0]["nodes"][1]["activeMinutes"], 70);
    }

    #[test]
    fn it_says_that_no_rule_only_reports() {
        let history = history(&policies(&[("on", "None")], false), Vec::new());
        let expected = "no rule has strategy Preview, so nothing is counted\n";
        assert_eq!(history.to_string(), expected);
    }
}
