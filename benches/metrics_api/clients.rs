//! Those who read `NodeMetrics`, as the API server passes their requests on.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Bytes;
use hyper::{Request, StatusCode};
use kube::Client;
use kube::client::Body;
use tokio::time::Instant;

/// Where they are.
pub const METRICS: &str = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics";
/// As programs ask.
pub const JSON: &str = "application/json";
/// As kubectl asks.
pub const TABLE: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";

/// Somebody who asks.
#[derive(Clone)]
pub struct Reader {
    /// The connections.
    pub client: Client,
    /// For whom, where it is passed on.
    pub user: Option<&'static str>,
}

/// What was answered.
pub struct Answer {
    /// The whole body's bytes.
    pub bytes: usize,
    /// From the request to the last byte.
    pub took: Duration,
}

impl Reader {
    async fn ask(&self, path: &str, accept: &str) -> hyper::Response<Body> {
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

    /// Asks once, and reads all of the answer.
    pub async fn read(&self, path: &str, accept: &str) -> Answer {
        let begun = Instant::now();
        let mut body = self.ask(path, accept).await.into_body();
        let mut bytes = 0;
        while let Some(frame) = body.frame().await {
            bytes += frame.unwrap().data_ref().map_or(0, Bytes::len);
        }
        Answer {
            bytes,
            took: begun.elapsed(),
        }
    }

    /// Asks again and again; how long each took, in milliseconds, and the bytes of the last.
    pub async fn ask_often(
        &self,
        paths: &[String],
        accept: &str,
        often: usize,
        pause: Duration,
    ) -> (Vec<f64>, usize) {
        let mut bytes = 0;
        let mut times = Vec::new();
        for path in paths.iter().cycle().take(often) {
            let answer = self.read(path, accept).await;
            times.push(answer.took.as_secs_f64() * 1000.0);
            bytes = answer.bytes;
            if !pause.is_zero() {
                tokio::time::sleep(pause).await;
            }
        }
        (times, bytes)
    }

    /// The version of what is there now.
    pub async fn version(&self) -> String {
        let path = format!("{METRICS}?limit=1");
        let body = self.ask(&path, JSON).await.into_body();
        let text = body.collect().await.unwrap().to_bytes();
        let list: serde_json::Value = serde_json::from_slice(&text).unwrap();
        let version = list["metadata"]["resourceVersion"].as_str();
        version.unwrap().to_owned()
    }

    /// Follows what happens after a version, and counts it, for as long as it is told.
    pub async fn follow(self, version: String, told: Arc<AtomicUsize>) {
        let path = format!("{METRICS}?watch=1&resourceVersion={version}");
        let mut body = self.ask(&path, JSON).await.into_body();
        while let Some(Ok(frame)) = body.frame().await {
            let lines = frame
                .data_ref()
                .map_or(0, |data| data.split(|byte| *byte == b'\n').count() - 1);
            told.fetch_add(lines, Ordering::Relaxed);
        }
    }

    /// Asks for all objects and what happens to them, and takes nothing of it.
    pub async fn ignore(self) {
        let path = format!("{METRICS}?watch=1");
        let _answer = self.ask(&path, JSON).await;
        std::future::pending::<()>().await;
    }
}
