//! The cluster's published token keys, loaded on demand and at a limited rate.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kube::Client;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::JoinHandle;

use super::metrics::ReportMetrics;
use super::token::{AgentToken, Keys, Unverified, WrittenKeys};
use crate::clock;
use crate::cluster::client::{CallError, call};
use crate::engine::time::BootTime;

/// Keys are reloaded after this time, so that withdrawn keys stop being accepted.
const MAX_AGE: Duration = Duration::from_mins(5);
/// Minimum interval between loads, whatever keys the tokens name.
const MIN_RELOAD_INTERVAL: Duration = Duration::from_secs(10);

/// The published keys as last loaded.
pub struct KeyRing {
    client: Client,
    known: RwLock<(Arc<Keys>, BootTime)>,
    /// Time of the last attempt. Locked during an attempt.
    last_attempt: Arc<Mutex<LastAttempt>>,
    metrics: ReportMetrics,
}

type LastAttempt = Option<BootTime>;

#[derive(Deserialize)]
struct Configuration {
    issuer: String,
}

impl KeyRing {
    /// Starts without keys.
    pub fn new(client: Client, metrics: ReportMetrics) -> Self {
        Self {
            client,
            known: RwLock::default(),
            last_attempt: Arc::default(),
            metrics,
        }
    }

    /// Whether the cluster signed a token. If its key is unknown, the keys are reloaded first, unless that was just
    /// tried.
    pub async fn verify(self: &Arc<Self>, token: &AgentToken<'_>) -> Result<(), Unverified> {
        let (keys, read) = self.known();
        let verified = keys.verify(token);
        if verified == Err(Unverified::UnknownKey) {
            // Of concurrent callers one loads the keys, and the others wait.
            let last_attempt = Arc::clone(&self.last_attempt).lock_owned().await;
            self.read(last_attempt).await;
            return self.known().0.verify(token);
        }
        if clock::boot_time().since(read) >= MAX_AGE {
            self.reload_in_background();
        }
        verified
    }

    /// Reloads the keys in the background: agents with a known key don't depend on the API server.
    fn reload_in_background(self: &Arc<Self>) {
        if let Ok(last_attempt) = Arc::clone(&self.last_attempt).try_lock_owned() {
            drop(self.begin(last_attempt));
        }
    }

    /// Loads the keys, unless that was just tried.
    async fn read(self: &Arc<Self>, last_attempt: OwnedMutexGuard<LastAttempt>) {
        if let Some(reading) = self.begin(last_attempt) {
            drop(reading.await);
        }
    }

    /// In a task of its own, so that it continues if the waiting agent disconnects.
    fn begin(
        self: &Arc<Self>,
        mut last_attempt: OwnedMutexGuard<LastAttempt>,
    ) -> Option<JoinHandle<()>> {
        if last_attempt.is_some_and(|last_attempt| {
            clock::boot_time().since(last_attempt) < MIN_RELOAD_INTERVAL
        }) {
            return None;
        }
        let ring = Arc::clone(self);
        Some(tokio::spawn(async move {
            let read = ring.fetch().await;
            *last_attempt = Some(clock::boot_time());
            ring.keep(read);
        }))
    }

    fn known(&self) -> (Arc<Keys>, BootTime) {
        let known = self.known.read().unwrap_or_else(PoisonError::into_inner);
        (Arc::clone(&known.0), known.1)
    }

    fn keep(&self, read: Result<Keys, CallError>) {
        self.metrics.read_keys(read.is_ok());
        match read {
            Ok(keys) => {
                tracing::debug!(keys = keys.len(), "read the keys of ServiceAccount tokens");
                let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
                *known = (Arc::new(keys), clock::boot_time());
            }
            Err(error) => {
                let why = error.message();
                tracing::warn!(
                    why,
                    "failed to read the keys of ServiceAccount tokens: the API server reviews tokens instead"
                );
            }
        }
    }

    async fn fetch(&self) -> Result<Keys, CallError> {
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

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::time::Duration;

    use kube::Config;
    use tokio::runtime::Handle;
    use tokio::task::yield_now;
    use tokio::time::timeout;

    use super::super::token::tests::a_token;
    use super::*;

    /// An API server that accepts connections but never answers.
    fn ring() -> (Arc<KeyRing>, TcpListener) {
        let unresponsive = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", unresponsive.local_addr().unwrap());
        let client = Client::try_from(Config::new(url.parse().unwrap())).unwrap();
        let ring = KeyRing::new(client, ReportMetrics::default());
        (Arc::new(ring), unresponsive)
    }

    #[tokio::test]
    async fn old_keys_are_reloaded_once_for_concurrent_tokens() {
        let (ring, _silent) = ring();
        ring.reload_in_background();
        yield_now().await;
        let before = Handle::current().metrics().num_alive_tasks();
        for _ in 0..100 {
            ring.reload_in_background();
        }
        assert_eq!(Handle::current().metrics().num_alive_tasks(), before);
    }

    #[tokio::test]
    async fn loading_keys_continues_when_the_waiter_is_gone() {
        let (ring, _silent) = ring();
        let text = a_token();
        let token = AgentToken::read(&text).unwrap();
        let verified = timeout(Duration::from_millis(50), ring.verify(&token)).await;
        assert!(verified.is_err(), "the API server does not answer");
        assert!(
            ring.last_attempt.try_lock().is_err(),
            "they are still being read"
        );
    }
}
