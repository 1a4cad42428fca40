//! The keys that the cluster publishes, read when they are needed, and not too often.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kube::Client;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;

use super::metrics::ReportMetrics;
use super::token::{Keys, Token, Unverified, WrittenKeys};
use crate::cluster::client::{CallError, call};
use crate::cluster::clock;
use crate::engine::time::BootTime;

/// Keys are read again after so long: one that was withdrawn verifies nothing more.
const OLD: Duration = Duration::from_mins(5);
/// They are not read more often, whatever keys tokens name.
const PAUSE: Duration = Duration::from_secs(10);

/// The keys, as last read.
pub struct KeyRing {
    client: Client,
    known: RwLock<(Arc<Keys>, BootTime)>,
    /// When it was last tried to read them.
    tried: Mutex<Option<BootTime>>,
    metrics: ReportMetrics,
}

#[derive(Deserialize)]
struct Configuration {
    issuer: String,
}

impl KeyRing {
    /// None yet.
    pub fn new(client: Client, metrics: ReportMetrics) -> Self {
        Self {
            client,
            known: RwLock::default(),
            tried: Mutex::default(),
            metrics,
        }
    }

    /// Whether the cluster signed a token. Where its key is not known, keys are read first if they were not just before.
    pub async fn verify(self: &Arc<Self>, token: &Token<'_>) -> Result<(), Unverified> {
        let (keys, read) = self.known();
        let verified = keys.verify(token);
        if verified == Err(Unverified::UnknownKey) {
            self.read().await;
            return self.known().0.verify(token);
        }
        if clock::now().since(read) >= OLD {
            let ring = Arc::clone(self);
            // Nobody waits for that: an API server that is away keeps no agent out whose key is known.
            tokio::spawn(async move { ring.read().await });
        }
        verified
    }

    fn known(&self) -> (Arc<Keys>, BootTime) {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        (Arc::clone(&known.0), known.1)
    }

    /// Reads them. Of several at a time one does, and the others wait for it.
    async fn read(&self) {
        let mut tried = self.tried.lock().await;
        let now = clock::now();
        if tried.is_some_and(|tried| now.since(tried) < PAUSE) {
            return;
        }
        let read = self.ask().await;
        *tried = Some(clock::now());
        self.metrics.read_keys(read.is_ok());
        match read {
            Ok(keys) => {
                tracing::debug!(keys = keys.len(), "read the keys of ServiceAccount tokens");
                let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
                *known = (Arc::new(keys), clock::now());
            }
            Err(error) => {
                let why = error.words();
                tracing::warn!(
                    why,
                    "failed to read the keys of ServiceAccount tokens: the API server is asked of tokens"
                );
            }
        }
    }

    async fn ask(&self) -> Result<Keys, CallError> {
        let configuration = self.get::<Configuration>("/.well-known/openid-configuration");
        let keys = self.get::<WrittenKeys>("/openid/v1/jwks");
        let (configuration, keys) = futures::try_join!(configuration, keys)?;
        Ok(Keys::of(configuration.issuer, &keys))
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, CallError> {
        let request = hyper::Request::get(path).body(Vec::new());
        let request = request.map_err(kube::Error::HttpError);
        call(async { self.client.request(request?).await }).await
    }
}
