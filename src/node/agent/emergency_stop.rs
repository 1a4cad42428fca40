//! Whether everything is stopped: what the API server said last, else what an earlier process kept.

use std::sync::Arc;
use std::time::Duration;

use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;

use super::feed::Named;
use super::rules::Seen;
use crate::crd::emergency_stop::order;
use crate::engine::policy::{PolicySet, Strategy};

/// What is in force is given back within so long.
pub const RELEASE: Duration = Duration::from_secs(10);

/// Whether everything was stopped, as an earlier process kept it.
#[derive(Debug)]
pub struct KeptStop {
    /// Why; `None`: it was not.
    pub reason: Option<String>,
}

/// The emergency stop, as it is known here.
#[derive(Debug, Default)]
pub struct EmergencyStop {
    object: Named<DynamicObject>,
    /// Something was heard of it since it was last looked at.
    heard: bool,
    /// An earlier process kept whether everything was stopped.
    kept: bool,
    /// Why everything is stopped; `None`: it is not.
    reason: Option<String>,
}

impl EmergencyStop {
    /// What an earlier process kept holds until the API server says otherwise.
    pub fn kept(kept: Option<KeptStop>) -> Self {
        Self {
            kept: kept.is_some(),
            reason: kept.and_then(|kept| kept.reason),
            ..Self::default()
        }
    }

    /// Takes a change of the object.
    pub fn take(&mut self, event: Event<DynamicObject>) {
        self.object.take(event);
        self.heard = true;
    }

    /// Looks at what was seen of the object; true where that says something else than what held until now. A watch that
    /// fails says nothing, and neither does an object that is gone: an uninstall deletes it while agents still run.
    pub fn judge(&mut self) -> bool {
        if !std::mem::take(&mut self.heard) {
            return false;
        }
        let reason = match &self.object.seen {
            Seen::Unknown | Seen::Absent => return false,
            Seen::Present(object) => order(Some(object.annotations())),
        };
        let changed = self.reason != reason;
        self.reason = reason;
        changed
    }

    /// The API server has said whether everything is stopped.
    pub const fn is_known(&self) -> bool {
        self.object.seen.is_known()
    }

    /// An earlier process kept whether everything was stopped.
    pub const fn was_kept(&self) -> bool {
        self.kept
    }

    /// Why everything is stopped; `None`: it is not.
    pub fn reason(&self) -> Option<&str> {
        self.reason.as_deref()
    }

    /// What is left of a policy: while everything is stopped the rules that only report. `None` where none is known: hold.
    pub fn leaves(&self, policy: Option<&Arc<PolicySet>>) -> Option<Arc<PolicySet>> {
        if self.reason.is_none() {
            return policy.cloned();
        }
        let mut left = policy.map(|it| PolicySet::clone(it)).unwrap_or_default();
        left.rules.retain(|rule| rule.strategy == Strategy::Preview);
        Some(Arc::new(left))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::crd::emergency_stop::ANNOTATION;

    fn object(annotations: &Value) -> DynamicObject {
        let object = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "plimsoll-stop", "annotations": annotations},
        });
        serde_json::from_value(object).expect("an object")
    }

    fn listed(stop: &mut EmergencyStop, annotations: Option<&Value>) -> bool {
        stop.take(Event::Init);
        if let Some(annotations) = annotations {
            stop.take(Event::InitApply(object(annotations)));
        }
        stop.take(Event::InitDone);
        stop.judge()
    }

    #[test]
    fn the_last_that_was_known_holds_until_the_api_server_says_otherwise() {
        let mut stop = EmergencyStop::kept(Some(KeptStop {
            reason: Some("as kept".to_owned()),
        }));
        assert!(!stop.judge() && !stop.is_known() && stop.was_kept());
        stop.take(Event::Init);
        assert!(!stop.judge(), "a list that is being read says nothing yet");
        assert_eq!(stop.reason(), Some("as kept"));
        assert!(listed(&mut stop, Some(&json!({ANNOTATION: "as read"}))));
        assert_eq!(stop.reason(), Some("as read"));
        assert!(!listed(&mut stop, Some(&json!({ANNOTATION: "as read"}))));
        stop.take(Event::Apply(object(&json!({}))));
        assert!(stop.judge());
        assert_eq!(stop.reason(), None);
    }

    #[test]
    fn an_object_that_is_gone_neither_stops_nor_resumes() {
        let mut stop = EmergencyStop::kept(None);
        assert!(!stop.was_kept() && !listed(&mut stop, None));
        assert!(stop.is_known());
        assert_eq!(stop.reason(), None);
        listed(&mut stop, Some(&json!({ANNOTATION: "why"})));
        assert!(!listed(&mut stop, None));
        assert_eq!(stop.reason(), Some("why"));
        assert!(listed(&mut stop, Some(&json!({}))), "it was made anew");
        assert_eq!(stop.reason(), None);
    }

    #[test]
    fn a_stop_leaves_only_the_rules_that_report() {
        let rule = |id: &str, strategy: &str| {
            json!({
                "id": id, "metric": "cpu_total_usage", "watermark": 1.0, "avoidanceThreshold": 1, "restoreThreshold": 1,
                "periodSeconds": 1, "sampleTTLSeconds": 60, "action": "close", "strategy": strategy,
            })
        };
        let spec: crate::crd::NodeWatermarkSpec = serde_json::from_value(json!({
            "nodeUID": "u", "hash": "h", "rules": [rule("q/act", "None"), rule("q/show", "Preview")],
            "actions": [{"name": "close", "coolDownSeconds": 1, "disableScheduling": "NoSchedule"}],
        }))
        .expect("a spec");
        let policy = Arc::new(spec.read().expect("understood").policy);
        let left = |stop: &EmergencyStop, policy| {
            let left = stop.leaves(policy)?;
            let ids = left.rules.iter().map(|rule| rule.id.to_string());
            Some(ids.collect::<Vec<_>>())
        };
        let mut stop = EmergencyStop::default();
        assert_eq!(left(&stop, None), None, "nothing is known: hold");
        assert_eq!(
            left(&stop, Some(&policy)).expect("all"),
            ["q/act", "q/show"]
        );
        listed(&mut stop, Some(&json!({ANNOTATION: ""})));
        assert_eq!(left(&stop, Some(&policy)).expect("some"), ["q/show"]);
        assert_eq!(left(&stop, None).expect("none"), [""; 0]);
    }
}
