//! Eviction requests that arrive through the API server, from agents that can't reach the report listener. A standby
//! forwards them to the leader.

use std::sync::Arc;
use std::time::Duration;

use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use rustls::pki_types::CertificateDer;

use crate::crd::eviction::{
    self, Delay, EvictionRequest, LEADERLESS_WAIT, MAX_BYTES, SUBRESOURCE, api_path,
};
use crate::crd::node_metric::{API_VERSION, PLURAL};
use crate::evictions::Reply;

use super::forward;
use super::reports::{NODE_NAME, Reports};
use super::server::{Answer, Api, JSON, body_of, full_response};
use super::status::ErrorResponse;

/// Time limit for reading the body.
const BODY_TIMEOUT: Duration = Duration::from_secs(2);

/// The node in the path of an eviction request.
pub fn node_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("/apis/")?.strip_prefix(API_VERSION)?;
    let rest = rest.strip_prefix('/')?.strip_prefix(PLURAL)?;
    let (node, subresource) = rest.strip_prefix('/')?.split_once('/')?;
    (subresource == SUBRESOURCE && !node.is_empty()).then_some(node)
}

impl Api {
    /// Handles a request of the agent of `node`.
    pub(super) async fn evict(
        &self,
        reports: &Reports,
        node: Arc<str>,
        request: Request<Incoming>,
        certificates: &[CertificateDer<'static>],
        is_forwarded: bool,
    ) -> Result<Answer, ErrorResponse> {
        if *request.method() != Method::POST {
            return Err(ErrorResponse::method());
        }
        // The forwarding replica has authenticated it already.
        if !is_forwarded {
            let agents = reports.agents();
            self.is_agent_of(&node, agents, &request, certificates)
                .await?;
        }
        let body = body_of(request, MAX_BYTES, BODY_TIMEOUT).await;
        let broken = || ErrorResponse::bad_request("the request is too long or incomplete");
        let body = body.ok_or_else(broken)?;
        let request = EvictionRequest::parse(&body);
        let request = request.map_err(|error| ErrorResponse::bad_request(error.to_string()))?;
        match reports.evictions().evict(Arc::clone(&node), request).await {
            Reply::Answer(answer) => Ok(answered(&answer)),
            // Never forward twice.
            Reply::NotLeading(_) if is_forwarded => Ok(answered(&leaderless())),
            Reply::NotLeading(_) => Ok(self.forward_to_leader(&node, body).await),
        }
    }

    /// Requires the agents' `ServiceAccount`, with a token bound to a pod on that node.
    async fn is_agent_of(
        &self,
        node: &str,
        agents: &str,
        request: &Request<Incoming>,
        certificates: &[CertificateDer<'static>],
    ) -> Result<(), ErrorResponse> {
        let user = self
            .authenticator
            .identify(request.headers(), certificates)
            .await?;
        let of = user.extra.get(NODE_NAME).and_then(|names| names.first());
        if user.name == agents && of.is_some_and(|name| *name == *node) {
            return Ok(());
        }
        let message = format!("only the agent of node {node:?} may request evictions of its pods");
        Err(ErrorResponse::new(403, "Forbidden", message))
    }

    /// The leader's answer. If the request may have arrived but was not answered, the state of the pod shows the
    /// outcome.
    async fn forward_to_leader(&self, node: &str, body: Bytes) -> Answer {
        let leader = self.leadership.borrow().leader();
        let tls = self.tls.borrow().clone();
        let (Some(leader), Some(tls)) = (leader, tls) else {
            return answered(&leaderless());
        };
        let (path, name) = (api_path(node), &self.server_name);
        let (body, limit) = (Some(body), eviction::ANSWER_TIMEOUT);
        match forward::pass(leader, tls.client, name, &path, JSON, body, limit).await {
            Ok(answer) if answer.status() == StatusCode::OK => answer,
            Ok(answer) => answered(&not_evicted(answer.status())),
            Err(error) if error.may_have_arrived() => answered(&unknown(error.to_string())),
            Err(_) => answered(&leaderless()),
        }
    }
}

/// Converts an error response of the leader. A leader of another version may not know the path.
fn not_evicted(status: StatusCode) -> eviction::EvictionAnswer {
    let why = format!("the leader answered {status}");
    if status.is_client_error() {
        wait(why)
    } else {
        unknown(why)
    }
}

fn leaderless() -> eviction::EvictionAnswer {
    wait("no replica of the controller leads".to_owned())
}

const fn wait(why: String) -> eviction::EvictionAnswer {
    eviction::EvictionAnswer::Wait {
        wait: LEADERLESS_WAIT,
        by: Delay::Leader,
        why,
    }
}

const fn unknown(why: String) -> eviction::EvictionAnswer {
    eviction::EvictionAnswer::Unknown { why }
}

fn answered(answer: &eviction::EvictionAnswer) -> Answer {
    // Serialization can't fail.
    let answer = serde_json::to_vec(answer).unwrap_or_default();
    full_response(StatusCode::OK, JSON, answer.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_error_of_the_leader_means_no_eviction() {
        let waits = |status| matches!(not_evicted(status), eviction::EvictionAnswer::Wait { .. });
        assert!(waits(StatusCode::NOT_FOUND) && waits(StatusCode::FORBIDDEN));
        assert!(!waits(StatusCode::INTERNAL_SERVER_ERROR) && !waits(StatusCode::BAD_GATEWAY));
    }

    #[test]
    fn the_path_names_the_node() {
        assert_eq!(node_of(&api_path("node-a")), Some("node-a"));
        let nodes = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics";
        for path in [
            "",
            "/node-a",
            "/node-a/",
            "//evictions",
            "/node-a/status",
            "/a/b/evictions",
        ] {
            assert_eq!(node_of(&format!("{nodes}{path}")), None, "{path}");
        }
    }
}
