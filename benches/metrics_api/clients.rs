//! Clients of `NodeMetrics`, with requests as the API server proxies them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use kube::Client;
use kube::client::Body;
use tokio::time::Instant;

/// The path of `NodeMetrics`.
pub const METRICS: &str = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics";
/// The `Accept` header of programs.
pub const JSON: &str = "application/json";
/// The `Accept` header of kubectl.
pub const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

/// A client.
#[derive(Clone)]
pub struct Reader {
    /// Its connections.
    pub client: Client,
    /// The user, if the request is proxied.
    pub user: Option<&'static str>,
}

/// An answer.
pub struct Answer {
    /// Size of the body.
    pub bytes: usize,
    /// From the request to the last byte.
    pub took: Duration,
}

impl Reader {
    async fn get(&self, path: &str, accept: &str) -> hyper::Response<Body> {
        let mut request = Request::get(path).header("Accept", accept);
        if let Some(user) = self.user {
            request = request
                .header("X-Remote-User", user)
                .header("X-Remote-Group", "system:authenticated");
        }
        let answer = self.client.send(request.body(Body::empty()).unwrap()).await;
        let answer = answer.unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
        answer
    }

    /// Sends one request, and reads the whole answer.
    pub async fn read(&self, path: &str, accept: &str) -> Answer {
        let start = Instant::now();
        let mut body = self.get(path, accept).await.into_body();
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            bytes += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        Answer {
            bytes,
            took: start.elapsed(),
        }
    }

    /// Sends `count` requests; returns how long each took in milliseconds, and the size of the last answer.
    pub async fn read_repeatedly(
        &self,
        paths: &[String],
        accept: &str,
        count: usize,
        pause: Duration,
    ) -> (Vec<f64>, usize) {
        let mut bytes = 0;
        let mut times = Vec::new();
        for path in paths.iter().cycle().take(count) {
            let answer = self.read(path, accept).await;
            times.push(answer.took.as_secs_f64() * 1000.0);
            bytes = answer.bytes;
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        }
        (times, bytes)
    }

    /// The current resource version.
    pub async fn version(&self) -> String {
        let path = format!("{METRICS}?limit=1");
        let body = self.get(&path, JSON).await.into_body();
        let text = body.collect().await.unwrap().to_bytes();
        let list: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let version = list["metadata"]["resourceVersion"].as_str();
        version.unwrap().to_owned()
    }

    /// Watches from a resource version, and counts the events.
    pub async fn watch(self, version: String, events: Arc<AtomicUsize>) {
        let path = format!("{METRICS}?watch=1&resourceVersion={version}");
        let mut body = self.get(&path, JSON).await.into_body();
        while let Some(Ok(frame)) = body.frame().await {
            let lines = frame
                .data_ref()
                .map_or(0, |data| data.split(|byte| *byte == b'\n').count() - 1);
            events.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Starts a watch, and reads nothing of it.
    pub async fn watch_without_reading(self) {
        let path = format!("{METRICS}?watch=1");
        let _answer = self.get(&path, JSON).await;
        std::future::pending::<()>().await;
    }
}
