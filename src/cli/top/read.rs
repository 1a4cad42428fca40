//! Reads the data of `plimsoll top`.

use std::collections::{BTreeMap, BTreeSet};

use hyper::Request;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kube::api::{ListParams, TypeMeta};
use kube::core::{ObjectList, PartialObjectMeta, request};
use kube::{Api, Client, Resource, ResourceExt as _};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::super::server_table::ServerTable;
use super::pods::{HeldPods, Throttled};
use super::view::ActionsInForce;
use crate::cluster::client::CallError;
use crate::cluster::lease::LeaseObject;
use crate::cluster::list::all;
use crate::crd::summary::ReportedScheduling;
use crate::crd::{NodeMetric, NodeMetricStatus, NodeWatermark};

/// A page of objects with only name and status.
#[derive(Deserialize)]
struct Page<Status> {
    #[serde(default)]
    metadata: Meta,
    items: Vec<Item<Status>>,
}

#[derive(Deserialize)]
struct Item<Status> {
    metadata: Meta,
    status: Option<Status>,
}

#[derive(Default, Deserialize)]
struct Meta {
    name: Option<String>,
    #[serde(rename = "continue")]
    next: Option<String>,
}

/// The fields of a `NodeWatermark`'s status about pods.
#[derive(Deserialize)]
struct WatermarkStatus {
    /// The agent that wrote the status.
    agent: Option<Value>,
    #[serde(flatten)]
    pods: HeldPods,
}

impl<Status> Page<Status> {
    /// Converts the items, and keeps the continue token.
    fn read<T: Clone>(self, item: impl FnMut(Item<Status>) -> Option<T>) -> ObjectList<T> {
        page_of(self.items.into_iter().filter_map(item), self.metadata.next)
    }
}

fn page_of<T: Clone>(items: impl Iterator<Item = T>, next: Option<String>) -> ObjectList<T> {
    ObjectList {
        types: TypeMeta::default(),
        metadata: ListMeta {
            continue_: next,
            ..ListMeta::default()
        },
        items: items.collect(),
    }
}

/// Lists all objects of a kind. Decodes from a slice, as for reports.
async fn list<Response: DeserializeOwned, T: Clone>(
    client: &Client,
    build: impl Fn(&ListParams) -> Result<Request<Vec<u8>>, request::Error>,
    read: impl Fn(Response) -> ObjectList<T>,
) -> Result<Vec<T>, CallError> {
    let one = async |page: ListParams| {
        let request = build(&page).map_err(kube::Error::BuildRequest)?;
        let text = client.request_text(request).await?;
        let response = serde_json::from_slice::<Response>(text.as_bytes());
        response.map(&read).map_err(kube::Error::SerdeError)
    };
    all(ListParams::default(), one).await
}

/// The load of the nodes; an error with code 404 if the API is not served.
pub(in crate::cli) async fn metrics(client: &Client) -> Result<Vec<NodeMetric>, CallError> {
    let api = request::Request::new(NodeMetric::url_path(&(), None));
    let metric = |item: Item<NodeMetricStatus>| {
        Some(NodeMetric {
            metadata: ObjectMeta {
                name: item.metadata.name,
                ..ObjectMeta::default()
            },
            status: item.status.unwrap_or_default(),
        })
    };
    let read = |page: Page<NodeMetricStatus>| page.read(metric);
    list(client, |page| api.list(page), read).await
}

/// What agents have in force, by node, without nodes whose agent never reported. A Table leaves out the rules, which are
/// most of a `NodeWatermark`.
pub(super) async fn in_force(
    client: &Client,
) -> Result<BTreeMap<String, ActionsInForce>, CallError> {
    let path = NodeWatermark::url_path(&(), None);
    let build = |page: &ListParams| ServerTable::request(&path, page);
    let known = list(client, build, |table: ServerTable| rows(&table)).await?;
    Ok(known.into_iter().collect::<BTreeMap<_, _>>())
}

/// The rows of nodes whose agent has reported: the others have no agent version.
fn rows(table: &ServerTable) -> ObjectList<(String, ActionsInForce)> {
    let rows = table
        .cells(["Name", "Agent", "Scheduling", "Throttled"])
        .into_iter();
    let reported = rows.filter(|[_, agent, ..]| !agent.is_empty());
    let row = |[name, _, scheduling, throttled]: [&str; 4]| {
        let in_force = ActionsInForce {
            scheduling: ReportedScheduling::parse(scheduling),
            throttled: throttled.parse().ok(),
        };
        (name.to_owned(), in_force)
    };
    page_of(reported.map(row), table.next().map(str::to_owned))
}

/// Throttled pods and those with a burst, by node, without nodes whose agent never reported.
pub(super) async fn throttled(client: &Client) -> Result<Throttled, CallError> {
    let api = request::Request::new(NodeWatermark::url_path(&(), None));
    let pods = |item: Item<WatermarkStatus>| {
        let status = item.status.filter(|status| status.agent.is_some())?;
        Some((item.metadata.name?, status.pods))
    };
    let read = |page: Page<WatermarkStatus>| page.read(pods);
    let known = list(client, |page| api.list(page), read).await?;
    Ok(known.into_iter().collect::<BTreeMap<_, _>>())
}

/// The Leases of the agents.
pub(super) async fn leases(
    client: &Client,
    namespace: &str,
) -> Result<Vec<LeaseObject>, CallError> {
    let api: Api<LeaseObject> = Api::namespaced(client.clone(), namespace);
    all(ListParams::default(), async |page| api.list(&page).await).await
}

/// The names of all nodes.
pub(super) async fn nodes(client: &Client) -> Result<BTreeSet<String>, CallError> {
    let api: Api<Node> = Api::all(client.clone());
    let nodes = all(ListParams::default(), async |page| {
        api.list_metadata(&page).await
    });
    Ok(nodes
        .await?
        .iter()
        .map(PartialObjectMeta::name_any)
        .collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::engine::policy::TaintEffect;

    fn read(table: Value) -> ServerTable {
        serde_json::from_value(table).expect("a table")
    }

    #[test]
    fn table_columns_are_found_by_name() {
        let columns = ["Name", "Rules", "Throttled", "Scheduling", "Agent"];
        let table = json!({
            "metadata": {"continue": "here"},
            "columnDefinitions": columns.map(|name| json!({"name": name, "type": "string"})),
            "rows": [
                {"cells": ["shut", 3, 2, "NoSchedule", "0.1.0"], "object": null},
                {"cells": ["new", null, null, null, null]},
                {"cells": ["odd", 1, null, "Someday", "9.9"]},
            ],
        });
        let page = rows(&read(table));
        assert_eq!(page.metadata.continue_.as_deref(), Some("here"));
        let in_force = |scheduling, throttled| ActionsInForce {
            scheduling,
            throttled,
        };
        let shut = in_force(
            Some(ReportedScheduling::Disabled(TaintEffect::NoSchedule)),
            Some(2),
        );
        let expected = [
            ("shut".to_owned(), shut),
            ("odd".to_owned(), in_force(None, None)),
        ];
        assert_eq!(page.items, expected);
        let nameless = read(json!({"rows": [{"cells": ["n"]}]}));
        assert!(rows(&nameless).items.is_empty());
    }
}
