//! Writes what schedulers see of a node's load: the label `plimsoll.dev/load` of its Node, and crane's annotations.
//!
//! Labels and annotations are maps: a merge patch of some keys conflicts with no other writer, unlike the list of taints. The UID in it
//! makes sure that it is still the same node.

use k8s_openapi::api::core::v1::Node;
use kube::api::{DynamicObject, Patch, PatchParams};
use kube::core::ApiResource;
use kube::{Api, Client};
use serde_json::{Map, Value, json};

use super::client::{CallError, call, stored};
use super::taint::NodeSnapshot;
use crate::crd::crane_annotations::{CraneAnnotations, CraneValues, WRITTEN};
use crate::crd::load_label::{KEY, LoadLabel};

/// Changes of a Node. What is not in them stays.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadSignsPatch {
    labels: Map<String, Value>,
    annotations: Map<String, Value>,
}

impl LoadSignsPatch {
    /// Sets the label, or removes it.
    #[must_use]
    pub fn label(mut self, label: Option<LoadLabel>) -> Self {
        let text = label.map(|label| label.to_string());
        self.labels.insert(KEY.to_owned(), text.into());
        self
    }

    /// Sets crane's annotations, with this time, on a Node that has the annotations `seen`. What is unknown is removed if it
    /// is ours.
    #[must_use]
    pub fn crane(self, values: &CraneValues, time: &str, seen: &CraneAnnotations) -> Self {
        let mut this = self.without_crane(seen);
        let known = values.annotations(time);
        let known = known.filter_map(|(key, text)| Some((key.to_owned(), text?.into())));
        this.annotations.extend(known);
        if !values.is_empty() {
            this.annotations.insert(WRITTEN.to_owned(), time.into());
        }
        this
    }

    /// Removes the annotations of crane that are ours.
    #[must_use]
    pub fn without_crane(mut self, seen: &CraneAnnotations) -> Self {
        let ours = seen.ours().map(|key| (key.to_owned(), Value::Null));
        self.annotations.extend(ours);
        self
    }

    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }

    fn patch(&self, uid: &str) -> Value {
        json!({"metadata": {"uid": uid, "labels": self.labels, "annotations": self.annotations}})
    }
}

/// Changes the node. Returns it as it is then, without its taints and our condition.
///
/// # Errors
/// The API server refused, or did not answer.
pub async fn write(
    client: &Client,
    node: &str,
    uid: &str,
    signs: &LoadSignsPatch,
) -> Result<NodeSnapshot, CallError> {
    let api: Api<DynamicObject> = Api::all_with(client.clone(), &ApiResource::erase::<Node>(&()));
    let params = PatchParams::default();
    let patch = Patch::Merge(signs.patch(uid));
    let written = call(stored(api.patch_metadata(node, &params, &patch))).await?;
    let unread = Value::Null;
    Ok(NodeSnapshot::new(&written.metadata, &unread, &unread))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::crd::crane_annotations::{HOT, KEYS};

    const NOW: &str = "2026-11-26T04:05:06Z";
    const BEFORE: &str = "2026-11-26T04:00:00Z";

    fn seen(annotations: &Value) -> CraneAnnotations {
        let annotations = serde_json::from_value(annotations.clone()).expect("a map");
        CraneAnnotations::of(Some(&annotations))
    }

    #[test]
    fn a_label_alone_leaves_the_annotations() {
        let patch = LoadSignsPatch::default()
            .label(LoadLabel::of(50.0))
            .patch("u");
        assert_eq!(
            patch,
            json!({"metadata": {"uid": "u", "labels": {KEY: "50"}, "annotations": {}}})
        );
        let removed = LoadSignsPatch::default().label(None).patch("u");
        assert_eq!(removed["metadata"]["labels"], json!({KEY: null}));
    }

    #[test]
    fn known_values_are_set_and_our_unknown_ones_removed() {
        let node = seen(&json!({
            KEYS[1]: format!("0.10000,{BEFORE}"), KEYS[2]: "0.10000,2026-11-26T04:00:01Z", WRITTEN: BEFORE,
        }));
        let values = CraneValues::of([Some(25.0), None, None, None, None, None], Some(3.0));
        let signs = LoadSignsPatch::default().crane(&values, NOW, &node);
        assert_eq!(
            signs.patch("u")["metadata"]["annotations"],
            json!({
                KEYS[0]: format!("0.25000,{NOW}"), KEYS[1]: null, HOT: format!("0.3,{NOW}"), WRITTEN: NOW,
            }),
            "another writer's {} stays",
            KEYS[2]
        );
        assert_eq!(signs.patch("u")["metadata"]["labels"], json!({}));
    }

    #[test]
    fn only_ours_are_removed() {
        let node = seen(&json!({KEYS[0]: format!("0.1,{BEFORE}"), HOT: "0,x", WRITTEN: BEFORE}));
        let signs = LoadSignsPatch::default().without_crane(&node);
        let removed = json!({KEYS[0]: null, WRITTEN: null});
        assert_eq!(signs.patch("u")["metadata"]["annotations"], removed);
        let unknown = LoadSignsPatch::default().crane(&CraneValues::default(), NOW, &node);
        assert_eq!(unknown, signs);
        let cranes = seen(&json!({KEYS[0]: format!("0.1,{BEFORE}")}));
        assert!(LoadSignsPatch::default().without_crane(&cranes).is_empty());
    }
}
