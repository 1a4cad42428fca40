//! The client for the API server.

use std::error::Error as StdError;
use std::iter;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use hyper::Uri;
use hyper::header::{HeaderValue, USER_AGENT};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Builder};
use hyper_util::rt::TokioExecutor;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::client::{ClientBuilder, ConfigExt};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config, Resource};
use thiserror::Error;
use tower::{BoxError, ServiceBuilder};

use super::requests::{Observer, Requests};

/// Limit for setting up a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle time before the first TCP keepalive probe, and the interval of further ones.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// A connection whose peer acknowledges neither probes nor requests for this long is lost. Without it the kernel retransmits for a
/// quarter of an hour.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(8);
/// Limit for each call except watches.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(10);

/// The user agent, as audit logs show it.
const AGENT: &str = concat!("plimsoll/", env!("CARGO_PKG_VERSION"));

const NOT_STORED: &str = "the response is not an object of an API server";

/// Why no client could be made.
#[derive(Debug, Error)]
pub enum ClientError {
    /// The file can't be read or is no kubeconfig.
    #[error("failed to read the kubeconfig {path}")]
    Kubeconfig {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: kube::config::KubeconfigError,
    },
    /// Neither a service account nor a kubeconfig.
    #[error(
        "failed to find an API server: not running in a pod, and no kubeconfig found; pass --kubeconfig FILE"
    )]
    Infer(#[source] kube::config::InferConfigError),
    /// The client can't be set up.
    #[error("failed to set up a client for the API server")]
    Client(#[source] kube::Error),
    /// A proxy is configured, which is not supported.
    #[error(
        "failed to reach the API server through the proxy {0}: Plimsoll connects to it directly; unset proxy-url in the \
         kubeconfig, or HTTPS_PROXY"
    )]
    Proxy(Uri),
}

/// A client for this kubeconfig; `None`: the pod's service account, else `KUBECONFIG` or `~/.kube/config`.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    Server::find(kubeconfig).await?.client(Arc::new(()))
}

/// An API server and the credentials for it.
#[derive(Clone)]
pub struct Server(Config);

impl Server {
    /// From this kubeconfig; `None`: the pod's service account, else `KUBECONFIG` or `~/.kube/config`.
    pub async fn find(kubeconfig: Option<&Path>) -> Result<Self, ClientError> {
        let config = match kubeconfig {
            Some(path) => from_file(path).await?,
            None => Config::infer().await.map_err(ClientError::Infer)?,
        };
        Ok(Self(config))
    }

    /// A client with its own connections, which belong to the runtime it is made on; `observer` sees every request. kube's default
    /// client takes minutes to notice a dead watch connection.
    pub fn client(&self, observer: Arc<dyn Observer>) -> Result<Client, ClientError> {
        let mut config = self.0.clone();
        let user_agent = (USER_AGENT, HeaderValue::from_static(AGENT));
        config.headers.push(user_agent);
        if let Some(proxy) = &config.proxy_url {
            return Err(ClientError::Proxy(proxy.clone()));
        }
        let address = config.cluster_url.to_string();
        let connector = config.rustls_https_connector_with_connector(connector());
        let connector = connector.map_err(ClientError::Client)?;
        let service = ServiceBuilder::new()
            .layer(config.base_uri_layer())
            .option_layer(config.auth_layer().map_err(ClientError::Client)?)
            .layer(config.extra_headers_layer().map_err(ClientError::Client)?)
            .map_err(move |error| BoxError::from(Unreachable::new(&address, error)))
            .service(Builder::new(TokioExecutor::new()).build(connector));
        let client = ClientBuilder::new(service, &*config.default_namespace);
        Ok(client.with_layer(&Requests(observer)).build())
    }
}

/// The API server could not be reached, or the connection broke.
#[derive(Debug, Error)]
#[error("no answer from {address}: {}", reason(source))]
struct Unreachable {
    address: String,
    source: legacy::Error,
}

impl Unreachable {
    fn new(address: &str, source: legacy::Error) -> Self {
        Self {
            address: address.trim_end_matches('/').to_owned(),
            source,
        }
    }
}

/// The cause, without the first words, which name a part of the client.
fn reason(error: &legacy::Error) -> String {
    error.source().map_or_else(|| error.to_string(), describe)
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
    connector.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT));
    connector
}

async fn from_file(path: &Path) -> Result<Config, ClientError> {
    let failed = |source| ClientError::Kubeconfig {
        path: path.to_owned(),
        source,
    };
    let kubeconfig = Kubeconfig::read_from(path).map_err(failed)?;
    Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
        .await
        .map_err(failed)
}

/// Why a call failed.
#[derive(Debug, Error)]
pub enum CallError {
    /// The API server refused, or could not be reached.
    #[error(transparent)]
    Kube(#[from] kube::Error),
    /// No answer in time.
    #[error("no answer from the API server within {} s", CALL_TIMEOUT.as_secs())]
    TimedOut,
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
        match self {
            Self::Kube(kube::Error::Api(status)) => format!("{} ({})", status.message, status.code),
            other => describe(other),
        }
    }
}

/// An error with its causes in one line. Skips causes that are already in the message, and all but the first line of each: the
/// others quote the file that could not be read.
pub fn describe(error: &(dyn StdError + 'static)) -> String {
    let causes = iter::successors(Some(error), |&error| {
        // Its message includes its causes.
        let is_last = error.is::<Unreachable>();
        error.source().filter(|_| !is_last)
    });
    let text = causes.fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match cause.lines().next().unwrap_or_default() {
            cause if text.is_empty() => cause.to_owned(),
            cause if text.contains(cause) => text,
            cause => format!("{text}: {cause}"),
        }
    });
    // kube's own prefix.
    text.replace("ServiceError: ", "")
}

/// A call with a deadline.
pub async fn call<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match tokio::time::timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => answer.map_err(CallError::Kube),
        Err(_) => Err(CallError::TimedOut),
    }
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
    use kube::core::Status;
    use rustix::net::sockopt;
    use tokio::io::AsyncReadExt;
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
