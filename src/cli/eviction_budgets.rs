//! Eviction arguments of `plimsoll controller`.

use super::duration;
use crate::evictions::budget::{Budget, Budgets, MAX_EVICTIONS, MAX_WINDOW};

/// Limits on evictions, which the leader carries out for agents.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Evictions, requested by agents at --report-listen")]
#[allow(clippy::struct_field_names, reason = "they are the names of the flags")]
pub struct EvictionArgs {
    /// No limits below: evict whenever rules, PodQOS and disruption budgets allow it
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long)]
    no_eviction_budgets: bool,

    /// ConfigMap in --namespace where the leader records recent evictions; created if missing
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "NAME", default_value = "plimsoll-evictions")]
    pub eviction_record: String,

    /// Maximum evictions per time in the whole cluster
    #[arg(long, value_name = "PODS/TIME", default_value = "10/1m", value_parser = budget)]
    eviction_budget_fleet: Budget,

    /// Maximum per zone (topology.kubernetes.io/zone)
    #[arg(long, value_name = "PODS/TIME", default_value = "5/1m", value_parser = budget)]
    eviction_budget_zone: Budget,

    /// Maximum per node
    #[arg(long, value_name = "PODS/TIME", default_value = "2/1m", value_parser = budget)]
    eviction_budget_node: Budget,

    /// Maximum per namespace
    #[arg(long, value_name = "PODS/TIME", default_value = "5/1m", value_parser = budget)]
    eviction_budget_namespace: Budget,

    /// Maximum per owner of pods; for a Deployment, that is its ReplicaSet
    #[expect(clippy::doc_markdown, reason = "the help has no markdown")]
    #[arg(long, value_name = "PODS/TIME", default_value = "1/1m", value_parser = budget)]
    eviction_budget_owner: Budget,
}

impl EvictionArgs {
    /// All budgets; `None` if there are no limits.
    pub fn budgets(&self) -> Option<Budgets> {
        (!self.no_eviction_budgets).then_some(Budgets {
            fleet: self.eviction_budget_fleet,
            zone: self.eviction_budget_zone,
            node: self.eviction_budget_node,
            namespace: self.eviction_budget_namespace,
            owner: self.eviction_budget_owner,
        })
    }
}

/// Parses `10/1m`.
fn budget(text: &str) -> Result<Budget, String> {
    let wrong =
        || format!("write PODS/TIME, such as 10/1m: up to {MAX_EVICTIONS} pods in 1s to 1h");
    let (evictions, window) = text.split_once('/').ok_or_else(wrong)?;
    let evictions = evictions.parse().ok().filter(|pods| *pods <= MAX_EVICTIONS);
    let window = duration::positive(window).ok();
    let window = window.filter(|window| window.as_secs() >= 1 && *window <= MAX_WINDOW);
    Ok(Budget {
        evictions: evictions.ok_or_else(wrong)?,
        window: window.ok_or_else(wrong)?,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_budget_is_pods_per_time() {
        for (text, evictions, seconds) in
            [("10/1m", 10, 60), ("0/1s", 0, 1), ("1000/1h", 1000, 3600)]
        {
            let window = Duration::from_secs(seconds);
            assert_eq!(budget(text), Ok(Budget { evictions, window }), "{text}");
        }
        for text in [
            "", "10", "10/", "/1m", "1001/1m", "-1/1m", "1/2h", "1/10ms", "1/0s", "1/60",
        ] {
            assert!(budget(text).is_err(), "{text}");
        }
    }
}
