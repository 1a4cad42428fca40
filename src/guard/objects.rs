//! What is asked of the API server: the pod that is to be evicted, and its node. As plain JSON, since little of it is used.

use hyper::Request;
use kube::Client;
use serde_json::Value;

use super::ledger::{Seen, Victim};
use crate::cluster::client::{CallError, call, found};

/// A pod, as far as it is used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// `metadata.uid`.
    pub uid: String,
    /// Its node, if it has one.
    pub node: Option<String>,
    /// Kind and name of its controller, if it has one.
    pub owner: Option<String>,
    /// It was asked to end.
    pub is_ending: bool,
}

impl Pod {
    fn of(object: &Value) -> Self {
        let text = |path: &str| object.pointer(path).and_then(Value::as_str);
        let owners = object["metadata"]["ownerReferences"].as_array();
        let owner = owners
            .into_iter()
            .flatten()
            .find(|owner| owner["controller"] == true);
        Self {
            uid: text("/metadata/uid").unwrap_or_default().to_owned(),
            node: text("/spec/nodeName").map(str::to_owned),
            owner: owner.and_then(|owner| {
                let (kind, name) = (owner["kind"].as_str()?, owner["name"].as_str()?);
                Some(format!("{kind}/{name}"))
            }),
            is_ending: text("/metadata/deletionTimestamp").is_some(),
        }
    }
}

/// The pod of this name; `None`: there is none.
///
/// # Errors
/// It can't be read.
pub async fn pod(client: &Client, namespace: &str, name: &str) -> Result<Option<Pod>, CallError> {
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}");
    let object = found(call(client.request(request(path)?)).await)?;
    Ok(object.as_ref().map(Pod::of))
}

/// What is to be seen of a pod now.
///
/// # Errors
/// It can't be read.
pub async fn look(client: &Client, victim: &Victim) -> Result<Seen, CallError> {
    let pod = pod(client, &victim.namespace, &victim.name).await?;
    Ok(match pod.filter(|pod| pod.uid == victim.uid) {
        None => Seen::Gone,
        Some(pod) if pod.is_ending => Seen::Ending,
        Some(_) => Seen::Running,
    })
}

/// The zone of a node; `None`: it is in none.
///
/// # Errors
/// The node can't be read, or there is none.
pub async fn zone(client: &Client, node: &str) -> Result<Option<String>, CallError> {
    let request = request(format!("/api/v1/nodes/{node}"))?;
    let node: Value = call(client.request(request)).await?;
    let zone = node["metadata"]["labels"]["topology.kubernetes.io/zone"].as_str();
    Ok(zone.filter(|zone| !zone.is_empty()).map(str::to_owned))
}

fn request(path: String) -> Result<Request<Vec<u8>>, CallError> {
    let request = Request::get(path).body(Vec::new());
    Ok(request.map_err(kube::Error::HttpError)?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn of_a_pod_its_controller_counts_and_no_other_owner() {
        let pod = Pod::of(&json!({
            "metadata": {"uid": "u", "ownerReferences": [
                {"kind": "Node", "name": "n"}, {"kind": "ReplicaSet", "name": "web-1", "controller": true},
            ]},
            "spec": {"nodeName": "node00"},
        }));
        let expected = Pod {
            uid: "u".to_owned(),
            node: Some("node00".to_owned()),
            owner: Some("ReplicaSet/web-1".to_owned()),
            is_ending: false,
        };
        assert_eq!(pod, expected);
        let bare = Pod::of(&json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}));
        assert_eq!((bare.node, bare.owner, bare.is_ending), (None, None, true));
    }
}
