//! What an API server asks, and how it is answered: an `AdmissionReview` of admission.k8s.io/v1.

use std::time::Duration;

use serde_json::{Value, json};

use super::budget::Scope;
use super::ledger::Spent;
use crate::cluster::eviction::EVICTION_BUDGET;

/// The claim of a token that says on which node its pod runs.
const NODE: &str = "/request/userInfo/extra/authentication.kubernetes.io~1node-name/0";
/// An API server that can't be asked now can be soon.
const SOON: Duration = Duration::from_secs(5);

/// What is asked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The review's UID.
    pub uid: String,
    /// Who wants it.
    pub user: String,
    /// On which node they are, as their token says.
    pub node: Option<String>,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// Its UID: no other is to be evicted.
    pub pod_uid: Option<String>,
    /// Nothing is to be done.
    pub dry_run: bool,
    /// The pod is to be forgotten while it may still run: no grace period.
    pub is_forced: bool,
}

impl Asked {
    /// `None`: it is no review.
    pub fn read(body: &[u8]) -> Option<Self> {
        let review: Value = serde_json::from_slice(body).ok()?;
        let text = |path: &str| {
            let value = review.pointer(path).and_then(Value::as_str);
            value.filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let dry = |path: &str| review.pointer(path).is_some_and(is_dry);
        Some(Self {
            uid: text("/request/uid")?,
            user: text("/request/userInfo/username").unwrap_or_default(),
            node: text(NODE),
            namespace: text("/request/namespace").unwrap_or_default(),
            pod: text("/request/name")
                .or_else(|| text("/request/object/metadata/name"))
                .unwrap_or_default(),
            pod_uid: text("/request/object/deleteOptions/preconditions/uid"),
            is_forced: review
                .pointer("/request/object/deleteOptions/gracePeriodSeconds")
                .and_then(Value::as_i64)
                .is_some_and(|seconds| seconds < 1),
            dry_run: dry("/request/dryRun") || dry("/request/object/deleteOptions/dryRun"),
        })
    }

    /// Whether these are names, and not ways to something else.
    pub fn is_named(&self) -> bool {
        let is_name = |text: &str| {
            let fits = |it: char| it.is_ascii_alphanumeric() || it == '-' || it == '.';
            (1..=253).contains(&text.len()) && !text.starts_with('.') && text.chars().all(fits)
        };
        let node = self.node.as_deref().is_none_or(is_name);
        node && is_name(&self.namespace) && is_name(&self.pod)
    }
}

/// `true`, or `["All"]`.
fn is_dry(value: &Value) -> bool {
    match value {
        Value::Bool(dry) => *dry,
        Value::Array(stages) => !stages.is_empty(),
        _ => false,
    }
}

/// Why a pod may not be evicted, or not now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The word by which it is counted.
    pub label: &'static str,
    code: u16,
    reason: &'static str,
    /// For people.
    pub message: String,
    retry_after: Option<Duration>,
    /// The budget that is spent.
    pub scope: Option<Scope>,
}

impl Refusal {
    fn new(label: &'static str, code: u16, reason: &'static str, message: String) -> Self {
        Self {
            label,
            code,
            reason,
            message,
            retry_after: None,
            scope: None,
        }
    }

    /// It must not be done.
    pub fn forbidden(label: &'static str, message: impl Into<String>) -> Self {
        Self::new(label, 403, "Forbidden", message.into())
    }

    /// The pod is gone.
    pub fn gone(asked: &Asked) -> Self {
        let message = format!("pods \"{}\" not found", asked.pod);
        Self::new("gone", 404, "NotFound", message)
    }

    /// Another pod has its name.
    pub fn other_pod(asked: &Asked, uid: &str) -> Self {
        let wanted = asked.pod_uid.as_deref().unwrap_or_default();
        let message =
            format!("the UID in the precondition is {wanted}, and that of the pod is {uid}");
        Self::new("other_pod", 409, "Conflict", message)
    }

    /// Not now, for a reason that is not about the pod.
    pub fn later(label: &'static str, message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(SOON),
            ..Self::new(label, 429, "TooManyRequests", message.into())
        }
    }

    /// A budget is spent. The message does not change from one time to the next.
    pub fn spent(spent: &Spent) -> Self {
        let scope = spent.scope.name();
        let whose = match spent.scope {
            Scope::Fleet => "the fleet's budget of evictions",
            Scope::Zone => "the zone's budget of evictions",
            Scope::Node => "the node's budget of evictions",
            Scope::Namespace => "the namespace's budget of evictions",
            Scope::Owner => "the owner's budget of evictions",
        };
        let message = format!("{whose}, {}, is spent", spent.budget);
        Self {
            retry_after: Some(spent.retry_after),
            scope: Some(spent.scope),
            ..Self::new(scope, 429, "TooManyRequests", message)
        }
    }

    fn status(&self) -> Value {
        let mut details = json!({"kind": "pods"});
        if let Some(wait) = self.retry_after {
            // Whole seconds, and not too early.
            let seconds = u32::try_from(wait.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
            details["retryAfterSeconds"] = json!(seconds);
        }
        if let Some(scope) = self.scope {
            let cause =
                json!({"reason": EVICTION_BUDGET, "field": scope.name(), "message": self.message});
            details["causes"] = json!([cause]);
        }
        json!({
            "status": "Failure", "code": self.code, "reason": self.reason, "message": self.message,
            "details": details,
        })
    }
}

/// An answer; `audit` is for the API server's audit log.
fn answer(uid: &str, mut response: Value, audit: &str) -> Vec<u8> {
    response["uid"] = json!(uid);
    response["auditAnnotations"] = json!({"eviction": audit});
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response,
    });
    review.to_string().into_bytes()
}

/// It may be evicted.
pub fn allowed(uid: &str, label: &str) -> Vec<u8> {
    answer(uid, json!({"allowed": true}), label)
}

/// It may not.
pub fn refused(uid: &str, refusal: &Refusal) -> Vec<u8> {
    let response = json!({"allowed": false, "status": refusal.status()});
    answer(uid, response, refusal.label)
}

#[cfg(test)]
mod tests {
    use super::super::budget::Budget;
    use super::*;

    fn review(change: impl FnOnce(&mut Value)) -> Option<Asked> {
        let mut review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": {
                "uid": "r", "name": "web", "namespace": "shop", "dryRun": false,
                "userInfo": {
                    "username": "system:serviceaccount:plimsoll:plimsoll-agent",
                    "extra": {"authentication.kubernetes.io/node-name": ["node00"]},
                },
                "object": {"deleteOptions": {"preconditions": {"uid": "u"}}},
            },
        });
        change(&mut review["request"]);
        Asked::read(review.to_string().as_bytes())
    }

    #[test]
    fn a_review_says_who_wants_which_pod_evicted_and_from_where() {
        let asked = review(|_| {}).unwrap();
        let expected = Asked {
            uid: "r".to_owned(),
            user: "system:serviceaccount:plimsoll:plimsoll-agent".to_owned(),
            node: Some("node00".to_owned()),
            namespace: "shop".to_owned(),
            pod: "web".to_owned(),
            pod_uid: Some("u".to_owned()),
            dry_run: false,
            is_forced: false,
        };
        assert_eq!(asked, expected);
        assert!(asked.is_named());
        let bare = review(|request| {
            request["userInfo"] = json!({});
            request["object"] = Value::Null;
        });
        let bare = bare.unwrap();
        assert_eq!((bare.node, bare.pod_uid), (None, None));
        assert_eq!(review(|request| *request = Value::Null), None);
        assert_eq!(Asked::read(b"nothing"), None);
    }

    #[test]
    fn both_ways_to_ask_for_a_dry_run_are_known() {
        let dry = |change: fn(&mut Value)| review(change).unwrap().dry_run;
        assert!(dry(|request| request["dryRun"] = json!(true)));
        assert!(dry(
            |request| request["object"]["deleteOptions"]["dryRun"] = json!(["All"])
        ));
        assert!(!dry(|request| {
            request["object"]["deleteOptions"]["dryRun"] = json!([]);
        }));
    }

    #[test]
    fn a_pod_is_forced_where_it_is_left_no_time() {
        for (grace, is_forced) in [(json!(0), true), (json!(-1), true), (json!(1), false)] {
            let asked = review(|request| {
                request["object"]["deleteOptions"]["gracePeriodSeconds"] = grace;
            });
            assert_eq!(asked.unwrap().is_forced, is_forced);
        }
        let unsaid = review(|request| {
            request["object"]["deleteOptions"]["gracePeriodSeconds"] = Value::Null;
        });
        assert!(!unsaid.unwrap().is_forced, "the pod's own grace holds");
    }

    #[test]
    fn no_name_leads_elsewhere() {
        for name in ["../nodes", "a/b", "", ".", "a b", "a%2fb", "x?y"] {
            let asked = |path: &str| {
                let mut asked = review(|_| {}).unwrap();
                match path {
                    "pod" => asked.pod = name.to_owned(),
                    "namespace" => asked.namespace = name.to_owned(),
                    _ => asked.node = Some(name.to_owned()),
                }
                asked.is_named()
            };
            for path in ["pod", "namespace", "node"] {
                assert!(!asked(path), "{path} {name:?}");
            }
        }
    }

    #[test]
    fn a_refusal_names_the_budget_and_when_to_come_back() {
        let spent = Spent {
            scope: Scope::Fleet,
            budget: Budget {
                evictions: 10,
                window: Duration::from_mins(1),
            },
            retry_after: Duration::from_millis(6100),
        };
        let answer: Value = serde_json::from_slice(&refused("r", &Refusal::spent(&spent))).unwrap();
        let response = &answer["response"];
        assert_eq!(
            (&response["uid"], &response["allowed"]),
            (&json!("r"), &json!(false))
        );
        let status = &response["status"];
        assert_eq!(status["code"], 429);
        let message = "the fleet's budget of evictions, 10 in 1m, is spent";
        assert_eq!(status["message"], message);
        assert_eq!(status["details"]["retryAfterSeconds"], 7);
        assert_eq!(status["details"]["causes"][0]["field"], "fleet");
    }
}
