//! Access to `NodeMetrics` on the controller's own port, without the API server.

use std::collections::VecDeque;
use std::time::Duration;

use crate::api_support::aggregation::FrontProxy;
use crate::api_support::{ControlPlane, Controller, caller, free_port, now};
use http_body_util::BodyExt;
use hyper::{Request, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

const TIMEOUT: Duration = Duration::from_mins(1);
const LIST: &str = "/apis/metrics.plimsoll.dev/v1alpha1/nodemetrics";

/// A client of the controller's port.
#[derive(Clone)]
struct Caller {
    client: Client,
    headers: Vec<(&'static str, &'static str)>,
}

impl Caller {
    fn new(port: u16, certificate: Option<(String, String)>) -> Self {
        Self {
            client: caller::client(port, certificate),
            headers: Vec::new(),
        }
    }

    fn with(mut self, name: &'static str, value: &'static str) -> Self {
        self.headers.push((name, value));
        self
    }

    fn claiming_to_be_admin(self) -> Self {
        self.with("X-Remote-User", "admin")
            .with("X-Remote-Group", "system:masters")
    }

    async fn send(&self, method: &str, path: &str) -> (StatusCode, hyper::HeaderMap, String) {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in &self.headers {
            request = request.header(*name, *value);
        }
        let answer = self
            .client
            .send(request.body(Body::empty()).unwrap())
            .await
            .unwrap();
        let (parts, body) = answer.into_parts();
        let text = body.collect().await.unwrap().to_bytes();
        (
            parts.status,
            parts.headers,
            String::from_utf8(text.to_vec()).unwrap(),
        )
    }

    async fn code(&self, path: &str) -> u16 {
        self.send("GET", path).await.0.as_u16()
    }
}

#[tokio::test]
async fn only_authenticated_and_authorized_clients_can_read() {
    let Some(plane) = ControlPlane::start().filter(ControlPlane::is_own) else {
        return;
    };
    plane.nodes(&["node00".to_owned()]);
    let port = free_port();
    let listen = format!("127.0.0.1:{port}");
    let controller = plane.controller("controller", &["--metrics-api-listen", &listen]);
    plane.until("it leads", TIMEOUT, |_| controller.leads());
    let anonymous = || Caller::new(port, None);
    let started = now();
    while anonymous()
        .with("Authorization", "Bearer admin")
        .try_code()
        .await
        != Some(200)
    {
        assert!(
            started.elapsed() < TIMEOUT,
            "{}",
            plane.log_of("controller")
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    refuses_unauthenticated_clients(port, &plane.front_proxy()).await;
    trusts_the_front_proxy(port, &plane.front_proxy()).await;
    front_proxy_connects_among_idle_connections(&controller, port, &plane.front_proxy()).await;
    front_proxy_connects_during_a_flood(&controller, port, &plane.front_proxy()).await;
    authorizes_token_users(&plane, port).await;
    serves_public_documents_to_anonymous_clients(&anonymous()).await;
    let refused = r#"plimsoll_controller_metrics_api_answers_total{verb="list",code="401"}"#;
    assert!(controller.metric(refused) >= 7.0);
}

impl Caller {
    async fn try_code(&self) -> Option<u16> {
        let mut request = Request::get(LIST);
        for (name, value) in &self.headers {
            request = request.header(*name, *value);
        }
        let answer = self.client.send(request.body(Body::empty()).unwrap()).await;
        answer.ok().map(|answer| answer.status().as_u16())
    }
}

async fn refuses_unauthenticated_clients(port: u16, proxy: &FrontProxy) {
    let anonymous = Caller::new(port, None);
    assert_eq!(anonymous.code(LIST).await, 401);
    let (_, _, text) = Caller::new(port, None)
        .claiming_to_be_admin()
        .send("GET", LIST)
        .await;
    let status: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&status["kind"], &status["code"]),
        (&"Status".into(), &401.into())
    );
    // The right name, but of another CA with the same subject.
    let forged = FrontProxy::forged().issue("front-proxy-client");
    assert_eq!(
        Caller::new(port, Some(forged))
            .claiming_to_be_admin()
            .code(LIST)
            .await,
        401
    );
    // The right CA, but a name that is not allowed.
    let other = proxy.issue("somebody-else");
    assert_eq!(
        Caller::new(port, Some(other))
            .claiming_to_be_admin()
            .code(LIST)
            .await,
        401
    );
    assert_eq!(
        Caller::new(port, None)
            .with("Authorization", "Bearer wrong")
            .code(LIST)
            .await,
        401
    );
    assert_eq!(
        Caller::new(port, None)
            .with("Authorization", "Basic YWRtaW46YWRtaW4=")
            .code(LIST)
            .await,
        401
    );
    // The header alone does not make a replica.
    assert_eq!(
        Caller::new(port, None)
            .with("x-plimsoll-forwarded", "1")
            .code(LIST)
            .await,
        401
    );
    let other = proxy.issue("plimsoll-controller");
    assert_eq!(
        Caller::new(port, Some(other))
            .with("x-plimsoll-forwarded", "1")
            .code(LIST)
            .await,
        401
    );
}

async fn trusts_the_front_proxy(port: u16, proxy: &FrontProxy) {
    let api_server = || Caller::new(port, Some((proxy.certificate.clone(), proxy.key.clone())));
    let masters = api_server().claiming_to_be_admin();
    let (code, _, text) = masters.send("GET", LIST).await;
    assert_eq!(code, 200, "{text}");
    assert!(text.contains(r#""name":"node00""#), "{text}");
    let user = api_server().with("X-Remote-User", "nobody");
    let (code, _, text) = user.send("GET", LIST).await;
    assert_eq!(code, 403);
    assert!(
        text.contains(r#"User \"nobody\" cannot list resource \"nodemetrics\""#),
        "{text}"
    );
    // API servers send a header for each group, and names as they are.
    let groups = (0..300).fold(masters.clone(), |it, _| it.with("X-Remote-Group", "größe"));
    assert_eq!(groups.code(LIST).await, 200);
    let user = api_server().with("X-Remote-User", "jürgen");
    assert_eq!(user.code(LIST).await, 403, "known, and not allowed");
    // Without a user the request is unauthenticated.
    assert_eq!(api_server().code(LIST).await, 401);
    let protobuf = masters.with("Accept", "application/vnd.kubernetes.protobuf");
    let (code, _, text) = protobuf.send("GET", LIST).await;
    assert_eq!(code, 406);
    assert!(text.contains("application/json"), "{text}");
    let (code, _, text) = api_server().claiming_to_be_admin().send("POST", LIST).await;
    assert_eq!(code, 405);
    assert!(text.contains("only get, list and watch"), "{text}");
}

async fn front_proxy_connects_among_idle_connections(
    controller: &Controller,
    port: u16,
    proxy: &FrontProxy,
) {
    let before = controller.resident_kb();
    // Idle connections. Each could stay for the handshake timeout of 5 s: a real API server must not wait that long.
    let connect = |_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let crowd: Vec<std::net::TcpStream> = (0..600).map(connect).collect();
    let certificate = (proxy.certificate.clone(), proxy.key.clone());
    let caller = Caller::new(port, Some(certificate)).claiming_to_be_admin();
    let started = now();
    assert_eq!(caller.code(LIST).await, 200);
    assert!(
        started.elapsed() < Duration::from_secs(4),
        "{:?}",
        started.elapsed()
    );
    let grown = controller.resident_kb().saturating_sub(before);
    assert!(
        grown < 16 << 10,
        "{grown} kB for {} connections",
        crowd.len()
    );
}

/// Connections come and go in larger numbers than the limit.
async fn front_proxy_connects_during_a_flood(
    controller: &Controller,
    port: u16,
    proxy: &FrontProxy,
) {
    let flood = [(); 2].map(|()| {
        tokio::spawn(async move {
            let mut crowd = VecDeque::new();
            loop {
                crowd.push_back(tokio::net::TcpStream::connect(("127.0.0.1", port)).await);
                if crowd.len() > 500 {
                    crowd.pop_front();
                }
                // A thousand per second: each closed one occupies a port for a minute.
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
    });
    for _ in 0..10 {
        let certificate = (proxy.certificate.clone(), proxy.key.clone());
        let caller = Caller::new(port, Some(certificate)).claiming_to_be_admin();
        let asked = tokio::time::timeout(Duration::from_secs(5), caller.try_code()).await;
        assert_eq!(asked, Ok(Some(200)), "an API server got in");
    }
    for flood in flood {
        flood.abort();
    }
    let cut = r#"plimsoll_controller_metrics_api_connections_cut_total{reason="too_many_new"}"#;
    assert!(controller.metric(cut) > 256.0);
}

async fn authorizes_token_users(plane: &ControlPlane, port: u16) {
    let ann = Caller::new(port, None).with("Authorization", "Bearer ann");
    assert_eq!(ann.code(LIST).await, 403);
    plane.apply(&[json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": "nm"},
        "rules": [{
            "apiGroups": ["metrics.plimsoll.dev"], "resources": ["nodemetrics"],
            "resourceNames": ["node00"], "verbs": ["get"],
        }],
    })]);
    plane.kubectl(&[
        "create",
        "clusterrolebinding",
        "nm",
        "--clusterrole=nm",
        "--user=ann",
    ]);
    let one = format!("{LIST}/node00");
    let started = now();
    while ann.code(&one).await != 200 {
        assert!(started.elapsed() < TIMEOUT, "ann still cannot read node00");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(ann.code(&format!("{LIST}/node01")).await, 403);
    assert_eq!(ann.code(LIST).await, 403);
}

/// An API server serves a new CRD a moment after it lists it, so the controller's first watch may fail with 404.
async fn until_ready(anonymous: &Caller) {
    let started = now();
    while anonymous.code("/readyz").await != 200 {
        assert!(started.elapsed() < TIMEOUT, "the controller is not ready");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn serves_public_documents_to_anonymous_clients(anonymous: &Caller) {
    until_ready(anonymous).await;
    for path in [
        "/healthz",
        "/livez",
        "/readyz",
        "/version",
        "/apis",
        "/apis/metrics.plimsoll.dev",
        "/openapi/v2",
        "/openapi/v3",
    ] {
        let (code, _, text) = anonymous.send("GET", path).await;
        assert_eq!(code, 200, "{path}: {text}");
        assert!(!text.contains("node00"), "{path}");
    }
    let (_, headers, text) = anonymous
        .send("GET", "/apis/metrics.plimsoll.dev/v1alpha1")
        .await;
    let resources: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        resources["resources"][0]["verbs"],
        json!(["get", "list", "watch"])
    );
    assert_eq!(headers["vary"], "Accept");
    // Like the aggregation layer: first request, then a conditional one.
    let mut request = Request::get("/apis").header(
        "Accept",
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json",
    );
    let answer = anonymous
        .client
        .send(request.body(Body::empty()).unwrap())
        .await
        .unwrap();
    assert_eq!(
        answer.headers()["content-type"],
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
    );
    let tag = answer.headers()["etag"].clone();
    request = Request::get("/apis").header(
        "Accept",
        "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
    );
    let again = anonymous
        .client
        .send(
            request
                .header("If-None-Match", tag)
                .body(Body::empty())
                .unwrap(),
        )
        .await
        .unwrap();
    assert_eq!(again.status(), 304);
    assert_eq!(anonymous.code("/apis/metrics.plimsoll.dev/v2").await, 404);
    assert_eq!(anonymous.code("/").await, 404);
}
