//! The emergency stop, of all agents or of this one: as last read from the API server, else as an earlier process saved it.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::watcher::Event;

use super::feed::WatchedObject;
use super::rules::Seen;
use crate::crd::emergency_stop::stop_of;
use crate::engine::policy::PolicySet;

/// Everything in force is restored within this time.
pub const RESTORE_WITHIN: Duration = Duration::from_secs(10);

/// The emergency stop as an earlier process saved it.
#[derive(Debug)]
pub struct SavedStop {
    /// Why the agent was stopped; `None`: it was not.
    pub reason: Option<String>,
}

/// The emergency stop as this agent knows it.
#[derive(Debug)]
pub struct EmergencyStop {
    /// The agent's node.
    node: String,
    object: WatchedObject<ConfigMap>,
    /// The object was updated since the last [`Self::evaluate`].
    updated: bool,
    /// An earlier process saved the state of the stop.
    saved: bool,
    /// Why the agent is stopped; `None`: it is not.
    reason: Option<String>,
}

impl EmergencyStop {
    /// Starts from the saved state, which applies until the API server says otherwise.
    pub fn from_saved(node: &str, saved: Option<SavedStop>) -> Self {
        Self {
            node: node.to_owned(),
            object: WatchedObject::default(),
            updated: false,
            saved: saved.is_some(),
            reason: saved.and_then(|saved| saved.reason),
        }
    }

    /// Handles a watch event of the object.
    pub fn apply(&mut self, event: Event<ConfigMap>) {
        self.object.apply(event);
        self.updated = true;
    }

    /// Evaluates the object; true if the stop changed. A failing watch changes nothing, and neither does a deleted object:
    /// an uninstall deletes it while agents still run.
    pub fn evaluate(&mut self) -> bool {
        if !std::mem::take(&mut self.updated) {
            return false;
        }
        let reason = match &self.object.seen {
            Seen::Unknown | Seen::Absent => return false,
            Seen::Present(object) => stop_of(object, &self.node),
        };
        let changed = self.reason != reason;
        self.reason = reason;
        changed
    }

    /// The state was read from the API server.
    pub const fn is_known(&self) -> bool {
        self.object.seen.is_known()
    }

    /// An earlier process saved the state.
    pub const fn was_saved(&self) -> bool {
        self.saved
    }

    /// Why the agent is stopped; `None`: it is not.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// The part of a policy that stays active: during a stop only Previews. `None` if no policy is known yet.
    pub fn active_part(&self, policy: Option<&Arc<PolicySet>>) -> Option<Arc<PolicySet>> {
        if self.reason.is_none() {
            return policy.cloned();
        }
        let active = policy.map(|it| PolicySet::clone(it)).unwrap_or_default();
        Some(Arc::new(active.previews()))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::crd::emergency_stop::ANNOTATION;

    const NODE: &str = "worker-1";

    fn object(annotations: &Value) -> ConfigMap {
        let object = json!({"metadata": {"name": "plimsoll-stop", "annotations": annotations}});
        serde_json::from_value(object).expect("an object")
    }

    fn listed(stop: &mut EmergencyStop, annotations: Option<&Value>) -> bool {
        stop.apply(Event::Init);
        if let Some(annotations) = annotations {
            stop.apply(Event::InitApply(object(annotations)));
        }
        stop.apply(Event::InitDone);
        stop.evaluate()
    }

    #[test]
    fn the_saved_state_applies_until_the_api_server_answers() {
        let mut stop = EmergencyStop::from_saved(
            NODE,
            Some(SavedStop {
                reason: Some("as saved".to_owned()),
            }),
        );
        assert!(!stop.evaluate() && !stop.is_known() && stop.was_saved());
        stop.apply(Event::Init);
        assert!(!stop.evaluate(), "the list is not complete yet");
        assert_eq!(stop.reason(), Some("as saved"));
        assert!(listed(&mut stop, Some(&json!({ANNOTATION: "as read"}))));
        assert_eq!(stop.reason(), Some("as read"));
        assert!(!listed(&mut stop, Some(&json!({ANNOTATION: "as read"}))));
        stop.apply(Event::Apply(object(&json!({}))));
        assert!(stop.evaluate());
        assert_eq!(stop.reason(), None);
    }

    #[test]
    fn a_deleted_object_neither_stops_nor_resumes() {
        let mut stop = EmergencyStop::from_saved(NODE, None);
        assert!(!stop.was_saved() && !listed(&mut stop, None));
        assert!(stop.is_known());
        assert_eq!(stop.reason(), None);
        listed(&mut stop, Some(&json!({ANNOTATION: "why"})));
        assert!(!listed(&mut stop, None));
        assert_eq!(stop.reason(), Some("why"));
        assert!(listed(&mut stop, Some(&json!({}))), "it was created again");
        assert_eq!(stop.reason(), None);
    }

    #[test]
    fn an_agent_that_is_stopped_alone_follows_its_own_node_only() {
        let mut stop = EmergencyStop::from_saved(NODE, None);
        let with = |data: Value| {
            let object = json!({"metadata": {"name": "plimsoll-stop"}, "data": data});
            Event::Apply(serde_json::from_value(object).expect("an object"))
        };
        listed(&mut stop, Some(&json!({})));
        stop.apply(with(json!({"worker-2": "its own reason"})));
        assert!(!stop.evaluate(), "another node");
        stop.apply(with(json!({"worker-1": "here", "worker-2": ""})));
        assert!(stop.evaluate());
        assert_eq!(stop.reason(), Some("here"));
        stop.apply(with(json!({"worker-2": ""})));
        assert!(stop.evaluate());
        assert_eq!(stop.reason(), None);
    }

    #[test]
    fn a_stop_leaves_only_previews_active() {
        let rule = |id: &str, strategy: &str| {
            json!({
                "id": id, "metric": "cpu_total_usage", "watermark": 1.0, "avoidanceThreshold": 1, "restoreThreshold": 1,
                "sampleTTLSeconds": 60, "action": "close", "strategy": strategy,
            })
        };
        let spec: crate::crd::NodeWatermarkSpec = serde_json::from_value(json!({
            "nodeUID": "u", "hash": "h", "rules": [rule("q/act", "None"), rule("q/show", "Preview")],
            "actions": [{"name": "close", "coolDownSeconds": 1, "disableScheduling": "NoSchedule"}],
            "podPolicies": [
                {"name": "act", "labels": [], "standing": {"idle": true, "burstMillicores": 500}},
                {"name": "show", "labels": [], "standing": {"idle": true, "preview": true}},
            ],
        }))
        .expect("a spec");
        let policy = Arc::new(spec.read().expect("understood").policy);
        let active = |stop: &EmergencyStop, policy| {
            let active = stop.active_part(policy)?;
            let ids = active.rules.iter().map(|rule| rule.id.to_string());
            let pods = active.pods.iter().filter(|it| it.standing.acts());
            Some(
                ids.chain(pods.map(|it| it.name.clone()))
                    .collect::<Vec<_>>(),
            )
        };
        let mut stop = EmergencyStop::from_saved(NODE, None);
        assert_eq!(active(&stop, None), None, "no policy is known yet");
        assert_eq!(
            active(&stop, Some(&policy)).expect("all"),
            ["q/act", "q/show", "act", "show"]
        );
        listed(&mut stop, Some(&json!({ANNOTATION: ""})));
        assert_eq!(
            active(&stop, Some(&policy)).expect("some"),
            ["q/show", "show"]
        );
        assert_eq!(active(&stop, None).expect("none"), [""; 0]);
    }
}
