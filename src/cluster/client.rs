//! How API servers are reached.

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

/// No connection takes longer to set up.
const CONNECT: Duration = Duration::from_secs(5);
/// A connection that has received nothing for so long is probed, and then again at this interval.
const IDLE: Duration = Duration::from_secs(5);
const PROBE_INTERVAL: Duration = Duration::from_secs(1);
/// A connection whose peer acknowledges nothing for so long, neither probes nor requests, is lost: a firewall or the peer cut it in
/// silence. Without it the kernel repeats a request for a quarter of an hour.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(8);
/// No call takes longer, watches aside.
pub const CALL: Duration = Duration::from_secs(10);

/// Who it is that asks, as it stands in audit logs.
const ASKS: &str = concat!("plimsoll/", env!("CARGO_PKG_VERSION"));

const NOT_STORED: &str = "the answer is no object of an API server";

/// Why there is no client.
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
        "failed to find an API server: neither in a pod nor is there a kubeconfig; give --kubeconfig FILE"
    )]
    Infer(#[source] kube::config::InferConfigError),
    /// The client can't be set up.
    #[error("failed to set up a client for the API server")]
    Client(#[source] kube::Error),
    /// A way to it that is not ours.
    #[error(
        "failed to reach the API server by way of the proxy {0}: Plimsoll connects to it directly; unset proxy-url in the \
         kubeconfig, or HTTPS_PROXY"
    )]
    Proxy(Uri),
}

/// A client by this kubeconfig; `None`: the pod's service account, else `KUBECONFIG` or `~/.kube/config`.
pub async fn connect(kubeconfig: Option<&Path>) -> Result<Client, ClientError> {
    Server::find(kubeconfig).await?.client(Arc::new(()))
}

/// An API server, and who we are to it.
#[derive(Clone)]
pub struct Server(Config);

impl Server {
    /// By this kubeconfig; `None`: the pod's service account, else `KUBECONFIG` or `~/.kube/config`.
    pub async fn find(kubeconfig: Option<&Path>) -> Result<Self, ClientError> {
        let config = match kubeconfig {
            Some(path) => from_file(path).await?,
            None => Config::infer().await.map_err(ClientError::Infer)?,
        };
        Ok(Self(config))
    }

    /// A client with connections of its own, which belong to the runtime that it is made on; every request is told of.
    /// Kube's own would not notice for minutes that the connection of a watch was cut in silence.
    pub fn client(&self, observer: Arc<dyn Observer>) -> Result<Client, ClientError> {
        let mut config = self.0.clone();
        let asks = (USER_AGENT, HeaderValue::from_static(ASKS));
        config.headers.push(asks);
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

/// No connection to the API server, or it broke.
#[derive(Debug, Error)]
#[error("no answer from {address}: {}", why(source))]
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

/// Without the first words, which name a part of the client.
fn why(error: &legacy::Error) -> String {
    error.source().map_or_else(|| error.to_string(), describe)
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    // TLS is another's.
    connector.enforce_http(false);
    connector.set_connect_timeout(Some(CONNECT));
    // Or a request of two writes waits for an acknowledgement that the API server delays by 40 ms.
    connector.set_nodelay(true);
    connector.set_keepalive(Some(IDLE));
    connector.set_keepalive_interval(Some(PROBE_INTERVAL));
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

/// Why a call came to nothing.
#[derive(Debug, Error)]
pub enum CallError {
    /// The API server, or the way to it, refused.
    #[error(transparent)]
    Kube(#[from] kube::Error),
    /// No answer in time.
    #[error("no answer from the API server within {} s", CALL.as_secs())]
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

    /// The API server itself says that there is no such object: what stands before it may answer 404 as well.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Kube(kube::Error::Api(status)) if status.code == 404 && status.reason == "NotFound")
    }

    /// How long the server asks to be left alone for.
    pub fn retry_after(&self) -> Option<Duration> {
        let Self::Kube(kube::Error::Api(status)) = self else {
            return None;
        };
        let seconds = status.details.as_ref()?.retry_after_seconds;
        (seconds > 0).then(|| Duration::from_secs(seconds.into()))
    }

    /// In words, with every cause. What an API server refuses names verb and resource.
    pub fn words(&self) -> String {
        match self {
            Self::Kube(kube::Error::Api(status)) => format!("{} ({})", status.message, status.code),
            other => describe(other),
        }
    }
}

/// An error with its causes, in a line; a cause that a message already has is left out, and so are the lines after its first, which
/// quote the file that could not be read.
pub fn describe(error: &(dyn StdError + 'static)) -> String {
    let causes = iter::successors(Some(error), |&error| {
        // Its message has its causes.
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
    // kube says first which of its parts reports it.
    text.replace("ServiceError: ", "")
}

/// A call with a deadline.
pub async fn call<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match tokio::time::timeout(CALL, call).await {
        Ok(answer) => answer.map_err(CallError::Kube),
        Err(_) => Err(CallError::TimedOut),
    }
}

/// An object that the API server keeps: whatever it keeps has a version. What stands before it may answer 200 too, with
/// something else, which would decode as an object of no fields. For writes that nobody looks at again.
///
/// # Errors
/// The call failed, or the answer is no such object.
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

/// What was asked for; `None` where the API server itself says that there is none. (kube's `get_opt` takes any 404 for that.)
///
/// # Errors
/// Any other answer, or none.
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
    async fn a_refused_connection_is_described_in_a_line_with_its_address() {
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
        assert_eq!(error.words(), expected);
        assert!(crate::cluster::eviction::was_not_sent(&error));
    }

    #[tokio::test]
    async fn requests_say_who_asks() {
        let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", server.local_addr().unwrap());
        let client = Server(Config::new(address.parse().unwrap()))
            .client(Arc::new(()))
            .unwrap();
        let asked = tokio::spawn(async move { client.apiserver_version().await });
        let (mut connection, _) = server.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let length = connection.read(&mut request).await.unwrap();
        asked.abort();
        let request = String::from_utf8_lossy(&request[..length]).to_lowercase();
        assert!(request.contains("\r\nuser-agent: plimsoll/"), "{request}");
    }

    #[tokio::test]
    async fn an_object_is_stored_only_where_it_has_a_version() {
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
    fn an_object_is_missing_only_where_the_api_server_itself_says_so() {
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
    async fn a_connection_sends_at_once_and_is_given_up_when_it_is_cut() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = format!("http://{}", server.local_addr().unwrap());
        let connection = connector().call(to.parse().unwrap()).await.unwrap();
        let socket = connection.inner();
        assert!(socket.nodelay().unwrap());
        assert!(sockopt::socket_keepalive(socket).unwrap());
        assert_eq!(sockopt::tcp_keepidle(socket).unwrap(), IDLE);
        assert_eq!(sockopt::tcp_keepintvl(socket).unwrap(), PROBE_INTERVAL);
        let timeout = sockopt::tcp_user_timeout(socket).unwrap();
        assert_eq!(u128::from(timeout), UNACKNOWLEDGED_TIMEOUT.as_millis());
    }

    #[test]
    fn a_proxy_is_refused_with_the_cure() {
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
