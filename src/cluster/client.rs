//! The client for the API server.

use std::error::Error as StdError;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use hyper::Uri;
use hyper::header::{HeaderValue, USER_AGENT};
use hyper_util::client::legacy::Builder;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::client::{ClientBuilder, ConfigExt};
use kube::core::Status;
use kube::runtime::watcher;
use kube::{Client, Config, Resource};
use thiserror::Error;
use tower::{BoxError, ServiceBuilder};

pub use super::kubeconfig::ClientError;
use super::kubeconfig::{self, ClusterSource};
use super::requests::{self, RequestObserver, Requests};
use super::unreachable::Unreachable;

/// Limit for setting up a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle time before the first TCP keepalive probe, and the interval of further ones.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// A connection whose peer acknowledges neither probes nor requests for this long is lost. Without it the kernel retransmits for a
/// quarter of an hour. Other systems have no such option.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(8);
/// Limit for each call except watches.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The user agent, as audit logs show it.
const AGENT: &str = concat!("plimsoll/", env!("CARGO_PKG_VERSION"));

const NOT_STORED: &str = "the response is not an object of an API server";

/// A client for this cluster.
pub async fn connect(source: &ClusterSource) -> Result<Client, ClientError> {
    Server::find(source).await?.client(Arc::new(()))
}

/// An API server and the credentials for it.
#[derive(Clone)]
pub struct Server(Config);

impl Server {
    /// Reads the kubeconfig or the service account's files.
    pub async fn find(source: &ClusterSource) -> Result<Self, ClientError> {
        Ok(Self(kubeconfig::find(source).await?))
    }

    /// Another server, without credentials.
    pub fn at(address: Uri) -> Self {
        Self(Config::new(address))
    }

    /// A client with its own connections, which belong to the runtime it is made on; `observer` sees every request. kube's default
    /// client takes minutes to notice a dead watch connection.
    pub fn client(&self, observer: Arc<dyn RequestObserver>) -> Result<Client, ClientError> {
        let mut config = self.0.clone();
        let user_agent = (USER_AGENT, HeaderValue::from_static(AGENT));
        config.headers.push(user_agent);
        if let Some(proxy) = &config.proxy_url {
            return Err(ClientError::Proxy(proxy.clone()));
        }
        let address = config.cluster_url.to_string();
        let address: Arc<str> = address.trim_end_matches('/').into();
        let failed = |error| ClientError::set_up(error, &config);
        let connector = config.rustls_https_connector_with_connector(connector());
        let connector = connector.map_err(failed)?;
        let peer = Arc::clone(&address);
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .option_layer(config.auth_layer().map_err(failed)?)
            .layer(config.extra_headers_layer().map_err(failed)?)
            .map_err(move |error| BoxError::from(Unreachable::new(&peer, error)))
            .service(Builder::new(TokioExecutor::new()).build(connector));
        let client = ClientBuilder::new(service, &*config.default_namespace);
        let requests = Requests { observer, address };
        Ok(client.with_layer(&requests).build())
    }
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    // Another layer does TLS.
    connector.enforce_http(false);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    // Otherwise a request of two writes waits for an ACK that the API server delays by 40 ms.
    connector.set_nodelay(true);
    connector.set_keepalive(Some(KEEPALIVE_IDLE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT));
    connector
}

/// Why a call failed.
#[derive(Debug, Error)]
pub enum CallError {
    /// The API server refused, or could not be reached.
    #[error("{}", describe(.0))]
    Kube(#[from] kube::Error),
    /// No answer in time.
    #[error("no answer from {server} within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut {
        /// Its address.
        server: String,
    },
}

impl CallError {
    /// The HTTP code of the answer, if there was one.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Kube(kube::Error::Api(status)) => Some(status.code),
            _ => None,
        }
    }

    /// The API server itself says that there is no such object. (A proxy before it may answer 404 as well.)
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Kube(kube::Error::Api(status)) if status.code == 404 && status.reason == "NotFound")
    }

    /// The delay before a retry that the server asks for.
    pub fn retry_after(&self) -> Option<Duration> {
        let Self::Kube(kube::Error::Api(status)) = self else {
            return None;
        };
        let seconds = status.details.as_ref()?.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    /// A message with all causes. The API server's refusals name verb and resource.
    pub fn message(&self) -> String {
        describe(self)
    }
}

/// An error with its causes in one line. Skips causes that are already in the message, and all but the first line of each: the
/// others quote the file that could not be read.
pub fn describe(error: &(dyn StdError + 'static)) -> String {
    let causes = iter::successors(Some(error), |&error| {
        // Their messages include their causes.
        let is_last = error.is::<Unreachable>() || status_of(error).is_some();
        error.source().filter(|_| !is_last)
    });
    let text = causes.fold(String::new(), |text, cause| {
        let cause = message_of(cause);
        match cause.lines().next().unwrap_or_default() {
            cause if text.is_empty() => cause.to_owned(),
            cause if text.contains(cause) => text,
            cause => format!("{text}: {cause}"),
        }
    });
    // A prefix of kube, which other errors quote.
    text.replace("ServiceError: ", "")
}

/// The message of an error, without the causes that kube quotes in it.
fn message_of(error: &(dyn StdError + 'static)) -> String {
    if let Some(status) = status_of(error) {
        return format!("{} ({})", status.message, status.code);
    }
    match error.downcast_ref() {
        Some(watcher::Error::InitialListFailed(_)) => "failed to list".to_owned(),
        Some(watcher::Error::WatchStartFailed(_)) => "failed to start the watch".to_owned(),
        Some(watcher::Error::WatchFailed(_)) => "the watch ended".to_owned(),
        _ => match error.downcast_ref() {
            Some(kube::Error::Service(error)) => error.to_string(),
            _ => error.to_string(),
        },
    }
}

/// The API server's answer, if the error is one.
fn status_of<'a>(error: &'a (dyn StdError + 'static)) -> Option<&'a Status> {
    if let Some(watcher::Error::WatchError(status)) = error.downcast_ref() {
        return Some(status);
    }
    let error = match error.downcast_ref() {
        Some(CallError::Kube(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    match error {
        Some(kube::Error::Api(status)) => Some(status),
        _ => None,
    }
}

/// A call with a deadline.
pub fn call<T>(
    call: impl Future<Output = kube::Result<T>>,
) -> impl Future<Output = Result<T, CallError>> {
    // Boxed, because every future that waits for it would contain it several times.
    call_within(CALL_TIMEOUT, Box::pin(call))
}

async fn call_within<T>(
    limit: Duration,
    call: impl Future<Output = kube::Result<T>>,
) -> Result<T, CallError> {
    requests::with_peer(async {
        match tokio::time::timeout(limit, call).await {
            Ok(answer) => answer.map_err(CallError::Kube),
            Err(_) => Err(CallError::TimedOut {
                server: requests::peer(),
            }),
        }
    })
    .await
}

/// Accepts only an object with a resourceVersion: a proxy before the API server may answer 200 with something else, which would
/// decode as an object without fields.
///
/// # Errors
/// The call failed, or the response is not a stored object.
pub fn stored<K: Resource>(
    call: impl Future<Output = kube::Result<K>>,
) -> impl Future<Output = kube::Result<K>> {
    call.map(|answer| {
        let object = answer?;
        is_stored(object.meta())?;
        Ok(object)
    })
}

fn is_stored(meta: &ObjectMeta) -> kube::Result<()> {
    match meta.resource_version {
        Some(_) => Ok(()),
        None => Err(kube::Error::Service(NOT_STORED.into())),
    }
}

/// The object, or `None` if the API server itself says that there is none. (kube's `get_opt` accepts any 404.)
///
/// # Errors
/// Any other failure.
pub fn found<T>(answer: Result<T, CallError>) -> Result<Option<T>, CallError> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;
    use std::net::TcpListener;

    use k8s_openapi::api::coordination::v1::Lease;
    use rustix::net::sockopt;
    use serde_json::json;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tower::Service;

    use super::*;

    #[tokio::test]
    async fn a_refused_connection_is_reported_in_one_line_with_the_address() {
        let closed = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", closed.local_addr().unwrap());
        drop(closed);
        let client = Server(Config::new(address.parse().unwrap()))
            .client(Arc::new(()))
            .unwrap();
        let error = call(client.apiserver_version()).await.unwrap_err();
        let expected = format!(
            "no answer from {address}: tcp connect error: Connection refused (os error 111)"
        );
        assert_eq!(error.message(), expected);
        assert!(crate::cluster::eviction::was_not_sent(&error));
    }

    /// The error of a call to a server that gives this answer, without the server's address.
    async fn error_of(answer: &str) -> String {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", server.local_addr().unwrap());
        let client = Server(Config::new(address.parse().unwrap()))
            .client(Arc::new(()))
            .unwrap();
        let serving = async {
            let (mut connection, _) = server.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = connection.read(&mut request).await.unwrap();
            assert!(length > 0);
            connection.write_all(answer.as_bytes()).await.unwrap();
        };
        let (error, ()) = tokio::join!(call(client.apiserver_version()), serving);
        let message = error.unwrap_err().message();
        assert!(message.contains(&address), "{message}");
        message.replace(&address, "ADDRESS")
    }

    fn answer(head: &str, body: &str) -> String {
        let length = body.len();
        format!("HTTP/1.1 {head}\r\ncontent-length: {length}\r\n\r\n{body}")
    }

    #[tokio::test]
    async fn answers_that_are_not_of_an_api_server_are_reported_with_the_address() {
        let page = "<html><body>hello</body></html>";
        let ok = error_of(&answer("200 OK\r\ncontent-type: text/html", page)).await;
        let expected = "ADDRESS is not an API server: it answered with a web page (200)";
        assert_eq!(ok, expected);
        let failed = error_of(&answer("502 Bad Gateway\r\ncontent-type: text/html", page)).await;
        assert_eq!(
            failed,
            "ADDRESS answered with a web page, as a proxy does (502)"
        );
    }

    #[tokio::test]
    async fn refused_credentials_are_reported_with_the_address() {
        let status = |message: &str| {
            let status = json!({"kind": "Status", "status": "Failure", "reason": "Unauthorized", "code": 401, "message": message});
            let head = "401 Unauthorized\r\ncontent-type: application/json";
            answer(head, &status.to_string())
        };
        let refused = error_of(&status("Unauthorized")).await;
        assert_eq!(refused, "ADDRESS does not accept the credentials (401)");
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_is_named() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", server.local_addr().unwrap());
        let client = Server(Config::new(address.parse().unwrap()))
            .client(Arc::new(()))
            .unwrap();
        let limit = Duration::from_millis(200);
        let error = call_within(limit, client.apiserver_version()).await;
        let error = error.unwrap_err();
        let expected = format!("no answer from {address} within 10 s");
        assert_eq!(error.message(), expected);
        assert!(matches!(error, CallError::TimedOut { .. }));
    }

    #[test]
    fn a_failed_watch_is_described_without_internal_text() {
        let status = || {
            let mut status = Status::failure("no permission", "Forbidden");
            status.code = 403;
            status.boxed()
        };
        let listed = watcher::Error::InitialListFailed(kube::Error::Api(status()));
        assert_eq!(describe(&listed), "failed to list: no permission (403)");
        let watched = watcher::Error::WatchError(status());
        assert_eq!(describe(&watched), "no permission (403)");
        let error = kube::Error::Service("no answer from https://127.0.0.1:6443".into());
        let started = watcher::Error::WatchStartFailed(error);
        assert_eq!(
            describe(&started),
            "failed to start the watch: no answer from https://127.0.0.1:6443"
        );
    }

    #[tokio::test]
    async fn requests_have_a_user_agent() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", server.local_addr().unwrap());
        let client = Server(Config::new(address.parse().unwrap()))
            .client(Arc::new(()))
            .unwrap();
        let request_task = tokio::spawn(async move { client.apiserver_version().await });
        let (mut connection, _) = server.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let length = connection.read(&mut request).await.unwrap();
        request_task.abort();
        let request = String::from_utf8_lossy(&request[..length]).to_lowercase();
        assert!(request.contains("\r\nuser-agent: plimsoll/"), "{request}");
    }

    #[tokio::test]
    async fn an_object_without_a_resource_version_is_not_stored() {
        let answered = |text: &str| {
            let object: Result<Lease, _> = serde_json::from_str(text);
            stored(ready(object.map_err(kube::Error::SerdeError)))
        };
        let lease = answered(r#"{"metadata": {"resourceVersion": "7"}}"#).await;
        assert_eq!(lease.unwrap().metadata.resource_version.unwrap(), "7");
        for other in ["{}", r#"{"kind": "Status", "metadata": {}}"#, "no JSON"] {
            assert!(answered(other).await.is_err(), "{other}");
        }
    }

    #[test]
    fn only_a_404_of_the_api_server_itself_means_not_found() {
        let answer = |code: u16, reason: &str| {
            let mut status = Status::failure("no", reason);
            status.code = code;
            found::<()>(Err(CallError::Kube(kube::Error::Api(status.boxed()))))
        };
        assert_eq!(found(Ok(7)).expect("an answer"), Some(7));
        assert_eq!(answer(404, "NotFound").expect("an answer"), None);
        for (code, reason) in [(404, ""), (403, "Forbidden"), (503, "ServiceUnavailable")] {
            assert!(answer(code, reason).is_err(), "{code} {reason}");
        }
    }

    #[tokio::test]
    async fn connections_use_nodelay_keepalive_and_a_user_timeout() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = format!("http://{}", server.local_addr().unwrap());
        let connection = connector().call(to.parse().unwrap()).await.unwrap();
        let socket = connection.inner();
        assert!(socket.nodelay().unwrap());
        assert!(sockopt::socket_keepalive(socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(socket).unwrap(), KEEPALIVE_IDLE);
        assert_eq!(sockopt::tcp_keepintvl(socket).unwrap(), KEEPALIVE_INTERVAL);
        let timeout = sockopt::tcp_user_timeout(socket).unwrap();
        assert_eq!(u128::from(timeout), UNACKNOWLEDGED_TIMEOUT.as_millis());
    }

    #[test]
    fn a_proxy_is_refused_with_a_hint() {
        let mut config = Config::new("http://127.0.0.1:1".parse().unwrap());
        config.proxy_url = Some("http://proxy:3128".parse().unwrap());
        let refused = Server(config)
            .client(Arc::new(()))
            .err()
            .unwrap()
            .to_string();
        assert!(
            refused.contains("http://proxy:3128") && refused.contains("unset"),
            "{refused}"
        );
    }
}
