//! Tells the heartbeat, and the controller directly, that the sampling loop turns and how the node is.

use std::sync::Arc;

use kube::Client;
use tokio::sync::watch;

use super::metrics::Metrics;
use super::{Machine, Options};
use crate::crd::NodeMetric;
use crate::crd::summary::Scheduling;
use crate::engine::time::BootTime;
use crate::node::actuate::taint::Standing;
use crate::node::direct_report::{DirectReports, Links};
use crate::node::heartbeat::digest::{self, Facts};
use crate::node::heartbeat::{self, Heartbeat, Pulse};

/// The sampling loop stands still when it has not turned for so many of its intervals...
const INTERVALS: u32 = 5;

/// The heartbeat, and what it is told.
pub struct Vitals {
    pulse: watch::Sender<Pulse>,
    heartbeat: Heartbeat,
    reports: Option<DirectReports>,
}

impl Vitals {
    /// Starts the heartbeat, which waits for the first turn of the loop, and direct reports where they are asked for; `links` follow
    /// their connections.
    /// `own` is the heartbeat's client: nothing else that the agent asks for stands before it.
    pub fn start(
        client: &Client,
        own: Client,
        options: &Options,
        metrics: &Metrics,
        links: Links,
        now: BootTime,
    ) -> Self {
        let (pulse, felt) = watch::channel(Pulse::default());
        let (leader_hears, acknowledged) = watch::channel(false);
        let reports = options.reports.clone().map(|how| {
            DirectReports::start(
                client.clone(),
                how,
                now,
                leader_hears,
                metrics.reports.clone(),
                links,
            )
        });
        let stuck_after = options.sample_interval * INTERVALS;
        let how = heartbeat::Options {
            namespace: options.lease_namespace.clone(),
            node: options.node.clone(),
            relaxed: options.lease_renew_interval,
            // ...and never for less than a slow disk may take.
            stuck_after: stuck_after.max(heartbeat::INTERVAL / 2),
        };
        let figures = metrics.heartbeats.clone();
        Self {
            pulse,
            heartbeat: Heartbeat::start(own, how, felt, acknowledged, figures),
            reports,
        }
    }

    /// The sampling loop turned. Allocates nothing.
    pub fn turned(&self, node_uid: Option<&str>, now: BootTime) {
        self.pulse.send_modify(|pulse| {
            pulse.turned = Some(now);
            if pulse.node_uid.as_deref() != node_uid {
                pulse.node_uid = node_uid.map(Into::into);
            }
        });
    }

    /// The node was measured for a report, which tells this use of CPU and memory, in percent; `changed`: and of a
    /// change that is worth telling at once.
    pub fn measured(
        &self,
        machine: &Machine,
        used: [Option<f64>; 2],
        metric: &Arc<NodeMetric>,
        changed: bool,
    ) {
        if let Some(reports) = &self.reports {
            reports.tell(machine.sample().at, Arc::clone(metric), changed);
        }
        let summary = digest::summary(Facts {
            node: &machine.sample().node,
            used,
            policy: machine.policy(),
            reports: machine.reports(),
            throttled: machine.throttled_pods(),
            scheduling: scheduling(&machine.outside().standing()),
        });
        self.pulse.send_modify(|pulse| pulse.summary = summary);
    }

    /// The agent leaves for good. No report may follow the Lease that it gives back: the controller would wait for more.
    pub async fn release(self) {
        drop(self.reports);
        self.heartbeat.release().await;
    }
}

fn scheduling(standing: &Standing) -> Option<Scheduling> {
    let state = standing
        .effect
        .map_or(Scheduling::Enabled, Scheduling::Disabled);
    standing.known.then_some(state)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::path::PathBuf;
    use std::time::Duration;

    use kube::Config;

    use super::*;
    use crate::node::clock::boot_time;
    use crate::node::direct_report;

    #[tokio::test]
    async fn an_agent_that_leaves_ends_its_reports_before_it_gives_its_lease_back() {
        // An API server that takes connections, and answers nothing.
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = silent.local_addr().expect("its address");
        let url = format!("http://{address}").parse().expect("a URL");
        let client = Client::try_from(Config::new(url)).expect("a client");
        let (pulse, felt) = watch::channel(Pulse::default());
        let (leader_hears, mut acknowledged) = watch::channel(false);
        let how = direct_report::Options {
            service: "s".to_owned(),
            namespace: "n".to_owned(),
            credentials: PathBuf::new(),
            node: "node-a".to_owned(),
        };
        let figures = direct_report::metrics::Reports::default();
        let reports = DirectReports::start(
            client.clone(),
            how,
            boot_time(),
            leader_hears,
            figures,
            Links::default(),
        );
        let how = heartbeat::Options {
            namespace: "n".to_owned(),
            node: "node-a".to_owned(),
            relaxed: Duration::from_mins(1),
            stuck_after: Duration::from_secs(5),
        };
        let figures = heartbeat::metrics::Heartbeats::default();
        let vitals = Vitals {
            pulse,
            heartbeat: Heartbeat::start(client, how, felt, acknowledged.clone(), figures),
            reports: Some(reports),
        };
        let mut leaving = tokio::spawn(vitals.release());
        tokio::select! {
            biased;
            _ = &mut leaving => panic!("it has left, and reported up to then"),
            ended = acknowledged.changed() => assert!(ended.is_err(), "nobody reports any more"),
        }
        leaving.abort();
    }
}
