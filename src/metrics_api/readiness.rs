//! Whether this replica should be an endpoint of its Services.
//!
//! A replica can answer discovery whatever else it lacks, and without discovery no namespace of the cluster can be
//! deleted. But while other replicas answer, an incomplete one should not replace them: a rollout waits until it is
//! ready.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::{Api, Client};
use tokio::time::sleep;

use crate::cluster::client::call;

use super::ApiObserver;
use super::certificate_manager::API_SERVICE;

/// A replica is normally complete within this time after its start.
const STARTUP_GRACE: Duration = Duration::from_secs(10);
/// How often an incomplete replica checks whether others answer.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// State of the readiness probe.
pub struct Readiness {
    observer: Arc<dyn ApiObserver>,
    /// Once ready, it stays ready: a problem common to all replicas must not take discovery down.
    ready: AtomicBool,
}

impl Readiness {
    /// Starts not ready.
    pub fn new(observer: Arc<dyn ApiObserver>) -> Self {
        Self {
            observer,
            ready: AtomicBool::new(false),
        }
    }

    /// Result of the readiness probe.
    ///
    /// # Errors
    /// What the replica lacks.
    pub fn verdict(&self) -> Result<(), String> {
        if !self.ready.load(Ordering::Relaxed) {
            self.observer.ready()?;
            self.become_ready();
        }
        Ok(())
    }

    fn become_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Becomes ready in any case if no other replica answers.
    pub async fn follow(&self, client: Client) {
        let mut pause = STARTUP_GRACE;
        loop {
            sleep(pause).await;
            pause = CHECK_INTERVAL;
            let Err(missing) = self.verdict() else {
                return pending().await;
            };
            if is_missing(&client).await {
                tracing::warn!(
                    lacks = missing,
                    "ready for discovery only: no other replica serves it"
                );
                self.become_ready();
            }
        }
    }
}

/// Whether the API server finds no replica that answers.
async fn is_missing(client: &Client) -> bool {
    let api: Api<APIService> = Api::all(client.clone());
    let service = call(api.get_opt(API_SERVICE)).await.ok().flatten();
    service.is_some_and(|service| is_unavailable(&service))
}

fn is_unavailable(service: &APIService) -> bool {
    let conditions = service
        .status
        .as_ref()
        .and_then(|status| status.conditions.as_ref());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Available" && condition.status == "False")
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;

    /// A replica that lacks this.
    #[derive(Default)]
    struct Replica(Mutex<Option<&'static str>>);

    impl ApiObserver for Replica {
        fn answered(&self, _: &'static str, _: u16) {}
        fn certified(&self, _: Result<(), &str>) {}
        fn certificates_reconciled(&self, _: Option<jiff::Timestamp>, _: bool) {}
        fn front_proxy_loaded(&self, _: Result<(), &str>) {}
        fn ready(&self) -> Result<(), String> {
            let missing = self.0.lock().map_or(None, |missing| *missing);
            missing.map_or(Ok(()), |missing| Err(missing.to_owned()))
        }
    }

    #[test]
    fn a_replica_stays_ready_once_it_was_complete() {
        let replica = Arc::new(Replica(Mutex::new(Some("Node: not listed yet"))));
        let readiness = Readiness::new(Arc::clone(&replica) as _);
        assert_eq!(readiness.verdict(), Err("Node: not listed yet".to_owned()));
        *replica.0.lock().unwrap() = None;
        assert_eq!(readiness.verdict(), Ok(()));
        *replica.0.lock().unwrap() = Some("NodeQOS: the definition is not installed");
        assert_eq!(readiness.verdict(), Ok(()));
    }

    #[test]
    fn only_an_explicitly_unavailable_api_counts_as_missing() {
        let service = |status| {
            let service = json!({"metadata": {"name": API_SERVICE}, "status": status});
            serde_json::from_value::<APIService>(service).unwrap()
        };
        let condition = |status| json!({"conditions": [{"type": "Available", "status": status}]});
        assert!(is_unavailable(&service(condition("False"))));
        assert!(!is_unavailable(&service(condition("True"))));
        assert!(!is_unavailable(&service(condition("Unknown"))));
        assert!(!is_unavailable(&service(json!({}))));
    }
}
