//! Feeds the heartbeat and the direct reports with the state of the sampling loop and the node.

use std::sync::Arc;

use kube::Client;
use tokio::sync::watch;

use super::metrics::AgentMetrics;
use super::{Machine, Options};
use crate::agent::direct_report::{Links, ReportTasks};
use crate::agent::heartbeat::digest::{self, DigestInput};
use crate::agent::heartbeat::{self, Heartbeat, HeartbeatInput};
use crate::agent::taint::TaintState;
use crate::crd::NodeMetric;
use crate::crd::summary::ReportedScheduling;
use crate::engine::time::BootTime;

/// The sampling loop is stuck after this many of its intervals without a run.
const STUCK_INTERVALS: u32 = 5;

/// The heartbeat and the direct reports.
pub struct Telemetry {
    input: watch::Sender<HeartbeatInput>,
    heartbeat: Heartbeat,
    reports: Option<ReportTasks>,
}

impl Telemetry {
    /// Starts the heartbeat, which waits for the first run of the loop, and direct reports if configured; `links` track their
    /// connections. The heartbeat has its own client, so that no other request delays it.
    pub fn start(
        client: &Client,
        heartbeat_client: Client,
        options: &Options,
        metrics: &AgentMetrics,
        links: Links,
        now: BootTime,
    ) -> Self {
        let (input, received) = watch::channel(HeartbeatInput::default());
        let (acknowledged_sender, acknowledged) = watch::channel(false);
        let reports = options.reports.clone().map(|how| {
            ReportTasks::start(
                client.clone(),
                how,
                now,
                acknowledged_sender,
                metrics.reports.clone(),
                links,
            )
        });
        let stuck_after = options.sample_interval * STUCK_INTERVALS;
        let how = heartbeat::Options {
            namespace: options.lease_namespace.clone(),
            node: options.node.clone(),
            relaxed: options.lease_renew_interval,
            // ...but at least as long as a slow disk may take.
            stuck_after: stuck_after.max(heartbeat::INTERVAL / 2),
        };
        let figures = metrics.heartbeats.clone();
        Self {
            input,
            heartbeat: Heartbeat::start(heartbeat_client, how, received, acknowledged, figures),
            reports,
        }
    }

    /// The sampling loop ran. Allocates nothing.
    pub fn loop_ran(&self, node_uid: Option<&str>, now: BootTime) {
        self.input.send_modify(|input| {
            input.last_run = Some(now);
            if input.node_uid.as_deref() != node_uid {
                input.node_uid = node_uid.map(Into::into);
            }
        });
    }

    /// A report was built, with this use of CPU and memory in percent; `changed`: it reports a change and is sent at once.
    pub fn measured(
        &self,
        machine: &Machine,
        used: [Option<f64>; 2],
        metric: &Arc<NodeMetric>,
        changed: bool,
    ) {
        if let Some(reports) = &self.reports {
            reports.submit(machine.sample().at, Arc::clone(metric), changed);
        }
        let summary = digest::summary(DigestInput {
            node: &machine.sample().node,
            used,
            load: metric.status.load.as_ref().map(|load| load.percent),
            policy: machine.policy(),
            reports: machine.reports(),
            throttled: machine.throttled_pods(),
            scheduling: scheduling(&machine.backend().taint_state()),
        });
        self.input.send_modify(|input| input.summary = summary);
    }

    /// The agent is removed. No report may follow the release of the Lease: the controller would expect more.
    pub async fn release(self) {
        drop(self.reports);
        self.heartbeat.release().await;
    }
}

fn scheduling(taint_state: &TaintState) -> Option<ReportedScheduling> {
    let state = taint_state
        .effect
        .map_or(ReportedScheduling::Enabled, ReportedScheduling::Disabled);
    taint_state.known.then_some(state)
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::path::PathBuf;
    use std::time::Duration;

    use kube::Config;

    use super::*;
    use crate::agent::direct_report;
    use crate::clock::boot_time;

    #[tokio::test]
    async fn a_removed_agent_ends_its_reports_before_it_releases_its_lease() {
        // An API server that accepts connections and never answers.
        let unresponsive = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = unresponsive.local_addr().expect("its address");
        let url = format!("http://{address}").parse().expect("a URL");
        let client = Client::try_from(Config::new(url)).expect("a client");
        let (input, received) = watch::channel(HeartbeatInput::default());
        let (acknowledged_sender, mut acknowledged) = watch::channel(false);
        let how = direct_report::Options {
            service: "s".to_owned(),
            namespace: "n".to_owned(),
            credentials: PathBuf::new(),
            node: "node-a".to_owned(),
        };
        let figures = direct_report::metrics::DirectReportMetrics::default();
        let reports = ReportTasks::start(
            client.clone(),
            how,
            boot_time(),
            acknowledged_sender,
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
        let telemetry = Telemetry {
            input,
            heartbeat: Heartbeat::start(client, how, received, acknowledged.clone(), figures),
            reports: Some(reports),
        };
        let mut leaving = tokio::spawn(telemetry.release());
        tokio::select! {
            biased;
            _ = &mut leaving => panic!("it released the Lease while it still reported"),
            ended = acknowledged.changed() => assert!(ended.is_err(), "reports have ended"),
        }
        leaving.abort();
    }
}
