//! How API servers are reached.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kube::client::ClientBuilder;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use thiserror::Error;

use super::requests::{Observer, Requests};

/// No connection takes longer to set up.
const CONNECT: Duration = Duration::from_secs(5);
/// No call takes longer, watches aside.
pub const CALL: Duration = Duration::from_secs(10);

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
        let mut config = match kubeconfig {
            Some(path) => from_file(path).await?,
            None => Config::infer().await.map_err(ClientError::Infer)?,
        };
        config.connect_timeout = Some(CONNECT);
        // By default a PUT would be repeated for up to 6 minutes: a Lease or a status of long ago.
        config.default_retry = false;
        Ok(Self(config))
    }

    /// A client with connections of its own, which belong to the runtime that it is made on; every request is told of.
    pub fn client(&self, observer: Arc<dyn Observer>) -> Result<Client, ClientError> {
        let builder = ClientBuilder::try_from(self.0.clone()).map_err(ClientError::Client)?;
        Ok(builder.with_layer(&Requests(observer)).build())
    }
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
    #[error("no answer within {} s", CALL.as_secs())]
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

/// An error with its causes.
pub fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

/// A call with a deadline.
pub async fn call<T>(call: impl Future<Output = kube::Result<T>>) -> Result<T, CallError> {
    match tokio::time::timeout(CALL, call).await {
        Ok(answer) => answer.map_err(CallError::Kube),
        Err(_) => Err(CallError::TimedOut),
    }
}
