//! What `plimsoll status` and `plimsoll version` read of a cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::ListParams;
use kube::{Api, Client, Resource as _, ResourceExt as _};
use serde::Serialize;

use crate::cli::LEASE_NAMESPACE;
use crate::cli::doctor::snapshot::{
    Policy, Read, elections, get, items, lease_namespaces, list, ours, policies, read,
};
use crate::cli::server_table::ServerTable;
use crate::crd::emergency_stop::OBJECT;
use crate::crd::{AvoidanceAction, NodeQos, NodeWatermark, PodQos};

/// The label with the version of an object of the chart.
const VERSION: &str = "app.kubernetes.io/version";

/// The parts of an installation that a summary is made of.
#[derive(Debug)]
pub(super) struct Installation {
    pub(super) deployments: Read<Vec<Deployment>>,
    /// The Leases of the leader election.
    pub(super) elections: Vec<Read<Lease>>,
    pub(super) watermarks: Read<ServerTable>,
    /// The heartbeats of the agents.
    pub(super) leases: Read<Vec<Lease>>,
    /// By kind.
    pub(super) policies: [(&'static str, Read<Vec<Policy>>); 3],
    pub(super) stop: Read<ConfigMap>,
}

impl Installation {
    /// # Errors
    /// There is no installation, or nothing of it could be read.
    pub(super) async fn read(client: &Client) -> anyhow::Result<Self> {
        let namespaces = lease_namespaces(client).await;
        let namespace = namespaces.first().map_or(LEASE_NAMESPACE, String::as_str);
        let leases = Api::namespaced(client.clone(), namespace);
        let (deployments, watermarks, leases, stop) = tokio::join!(
            ours(client, "controller"),
            watermarks(client),
            list(leases, ListParams::default(), |it| it),
            get(client, namespace, OBJECT),
        );
        match (&watermarks, &deployments) {
            (Err(error), Ok(deployments)) if error.is_missing() && deployments.is_empty() => {
                anyhow::bail!(
                    "plimsoll is not installed in this cluster: it has neither a controller nor NodeWatermarks; `plimsoll preview \
                     -f FILE` shows without an installation what a policy would do"
                )
            }
            (Err(error), Err(_)) => {
                anyhow::bail!("failed to list the NodeWatermarks: {}", error.why)
            }
            _ => {}
        }
        let (node_qos, pod_qos, actions) = tokio::join!(
            policies::<NodeQos>(client),
            policies::<PodQos>(client),
            policies::<AvoidanceAction>(client),
        );
        Ok(Self {
            elections: elections(client, &deployments).await,
            deployments,
            watermarks,
            leases,
            policies: [
                ("NodeQOS", node_qos),
                ("PodQOS", pod_qos),
                ("AvoidanceAction", actions),
            ],
            stop,
        })
    }

    /// What could not be read, and why.
    pub(super) fn unread(&self) -> Vec<String> {
        let elections = self.elections.iter().find_map(|it| it.as_ref().err());
        let policies = self
            .policies
            .iter()
            .map(|(kind, it)| (*kind, it.as_ref().err()));
        let stop = self.stop.as_ref().err();
        let parts = [
            (
                "the Deployments of controllers",
                self.deployments.as_ref().err(),
            ),
            ("the Lease of the leader", elections),
            ("NodeWatermarks", self.watermarks.as_ref().err()),
            ("the agents' Leases", self.leases.as_ref().err()),
            ("the ConfigMap of the emergency stop", stop),
        ];
        let parts = parts.into_iter().chain(policies);
        let unread = parts.filter_map(|(what, error)| Some((what, error?)));
        unread
            .map(|(what, error)| format!("{what} could not be read: {}", error.why))
            .collect()
    }

    pub(super) fn versions(&self) -> Versions {
        Versions::of(items(&self.deployments), self.watermarks.as_ref().ok())
    }
}

async fn watermarks(client: &Client) -> Read<ServerTable> {
    read(ServerTable::read(
        client,
        NodeWatermark::url_path(&(), None),
    ))
    .await
}

/// The versions of what runs in a cluster.
#[derive(Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct Versions {
    /// As the labels of the Deployments say.
    controllers: BTreeSet<String>,
    /// How many agents have each version, as they last reported.
    agents: BTreeMap<String, usize>,
}

impl Versions {
    /// # Errors
    /// Neither could be read.
    pub(super) async fn read(client: &Client) -> anyhow::Result<Self> {
        let (deployments, watermarks): (Read<Vec<Deployment>>, _) =
            tokio::join!(ours(client, "controller"), watermarks(client));
        match (&deployments, &watermarks) {
            (Err(error), Err(_)) => {
                anyhow::bail!(
                    "failed to list the Deployments of controllers: {}",
                    error.why
                )
            }
            _ => Ok(Self::of(items(&deployments), watermarks.as_ref().ok())),
        }
    }

    fn of(deployments: &[Deployment], watermarks: Option<&ServerTable>) -> Self {
        let label = |it: &Deployment| it.labels().get(VERSION).cloned();
        let mut agents = BTreeMap::new();
        for [version] in watermarks.into_iter().flat_map(|it| it.cells(["Agent"])) {
            if !version.is_empty() {
                *agents.entry(version.to_owned()).or_default() += 1;
            }
        }
        Self {
            controllers: deployments.iter().filter_map(label).collect(),
            agents,
        }
    }

    /// Of the controller; more than one in an upgrade, or with two installations.
    pub(super) fn controllers(&self) -> String {
        let versions = self.controllers.iter().map(String::as_str);
        versions.collect::<Vec<_>>().join(", ")
    }

    /// Of the agents; with their numbers if there are several.
    pub(super) fn agents(&self) -> String {
        let one = self.agents.len() == 1;
        let text = |(version, number): (&String, &usize)| {
            if one {
                version.clone()
            } else {
                format!("{version} ({number})")
            }
        };
        self.agents.iter().map(text).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let or_none = |text: String| {
            if text.is_empty() {
                "none".to_owned()
            } else {
                text
            }
        };
        writeln!(f, "controller  {}", or_none(self.controllers()))?;
        writeln!(f, "agents      {}", or_none(self.agents()))
    }
}
