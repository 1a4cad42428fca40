//! Whether this replica is to be an endpoint of its Services.
//!
//! Every replica answers discovery, whatever else it lacks, and while nobody does no namespace of the cluster can be
//! deleted. Where others do, one that lacks something is not to take their place: a roll-out goes on when it is ready.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::{Api, Client};
use tokio::time::sleep;

use crate::cluster::client::call;

use super::Observer;
use super::keeper::API_SERVICE;

/// A replica that starts has all by then, as a rule.
const USUAL: Duration = Duration::from_secs(10);
/// How often one that does not have it looks whether others answer.
const LOOK: Duration = Duration::from_secs(2);

/// What the kubelet is told.
pub struct Readiness {
    observer: Arc<dyn Observer>,
    /// Once ready it stays so for as long as it answers at all: what all replicas lack must not take discovery away.
    ready: AtomicBool,
}

impl Readiness {
    /// Not ready yet.
    pub fn new(observer: Arc<dyn Observer>) -> Self {
        Self {
            observer,
            ready: AtomicBool::new(false),
        }
    }

    /// # Errors
    /// What it lacks, while it is not to be found.
    pub fn verdict(&self) -> Result<(), String> {
        if !self.ready.load(Ordering::Relaxed) {
            self.observer.lacks()?;
            self.become_ready();
        }
        Ok(())
    }

    fn become_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Makes it ready, whatever it lacks, where nobody else answers.
    pub async fn follow(&self, client: Client) {
        let mut pause = USUAL;
        loop {
            sleep(pause).await;
            pause = LOOK;
            let Err(lacks) = self.verdict() else {
                return pending().await;
            };
            if is_missing(&client).await {
                tracing::warn!(lacks, "ready for discovery alone: nobody else answers it");
                self.become_ready();
            }
        }
    }
}

/// Whether API servers find nobody who answers for the API.
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

    impl Observer for Replica {
        fn answered(&self, _: &'static str, _: u16) {}
        fn certified(&self, _: Result<(), &str>) {}
        fn kept(&self, _: Option<jiff::Timestamp>, _: bool) {}
        fn believes(&self, _: Result<(), &str>) {}
        fn lacks(&self) -> Result<(), String> {
            let lacks = self.0.lock().map_or(None, |lacks| *lacks);
            lacks.map_or(Ok(()), |lacks| Err(lacks.to_owned()))
        }
    }

    #[test]
    fn it_is_ready_when_it_has_all_and_stays_so_whatever_it_lacks_then() {
        let replica = Arc::new(Replica(Mutex::new(Some("Node: not listed yet"))));
        let readiness = Readiness::new(Arc::clone(&replica) as _);
        assert_eq!(readiness.verdict(), Err("Node: not listed yet".to_owned()));
        *replica.0.lock().unwrap() = None;
        assert_eq!(readiness.verdict(), Ok(()));
        *replica.0.lock().unwrap() = Some("NodeQOS: the definition is not installed");
        assert_eq!(readiness.verdict(), Ok(()));
    }

    #[test]
    fn nobody_answers_where_api_servers_say_so_and_not_where_it_is_not_known() {
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
