//! The keys that the cluster publishes, read when they are needed, and not too often.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use kube::Client;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio::task::JoinHandle;

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
    /// When it was last tried to read them. Locked while that is done.
    tried: Arc<Mutex<Tried>>,
    metrics: ReportMetrics,
}

type Tried = Option<BootTime>;

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
            tried: Arc::default(),
            metrics,
        }
    }

    /// Whether the cluster signed a token. Where its key is not known, keys are read first if they were not just before.
    pub async fn verify(self: &Arc<Self>, token: &Token<'_>) -> Result<(), Unverified> {
        let (keys, read) = self.known();
        let verified = keys.verify(token);
        if verified == Err(Unverified::UnknownKey) {
            // Of several at a time one reads, and the others wait for it.
            let tried = Arc::clone(&self.tried).lock_owned().await;
            self.read(tried).await;
            return self.known().0.verify(token);
        }
        if clock::now().since(read) >= OLD {
            self.read_aside();
        }
        verified
    }

    /// Reads them while nobody waits for that: an API server that is away keeps no agent out whose key is known.
    fn read_aside(self: &Arc<Self>) {
        if let Ok(tried) = Arc::clone(&self.tried).try_lock_owned() {
            drop(self.begin(tried));
        }
    }

    /// Reads them, unless that was tried just before.
    async fn read(self: &Arc<Self>, tried: OwnedMutexGuard<Tried>) {
        if let Some(reading) = self.begin(tried) {
            drop(reading.await);
        }
    }

    /// In a task of its own: an agent that waits for it no longer does not end it.
    fn begin(self: &Arc<Self>, mut tried: OwnedMutexGuard<Tried>) -> Option<JoinHandle<()>> {
        if tried.is_some_and(|tried| clock::now().since(tried) < PAUSE) {
            return None;
        }
        let ring = Arc::clone(self);
        Some(tokio::spawn(async move {
            let read = ring.ask().await;
            *tried = Some(clock::now());
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

    /// Reads from an API server that takes connections, and answers nothing while the listener is there.
    fn ring() -> (Arc<KeyRing>, TcpListener) {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", silent.local_addr().unwrap());
        let client = Client::try_from(Config::new(url.parse().unwrap())).unwrap();
        let ring = KeyRing::new(client, ReportMetrics::default());
        (Arc::new(ring), silent)
    }

    #[tokio::test]
    async fn however_many_tokens_come_while_keys_are_old_they_are_read_once() {
        let (ring, _silent) = ring();
        ring.read_aside();
        yield_now().await;
        let before = Handle::current().metrics().num_alive_tasks();
        for _ in 0..100 {
            ring.read_aside();
        }
        assert_eq!(Handle::current().metrics().num_alive_tasks(), before);
    }

    #[tokio::test]
    async fn who_waits_for_keys_no_longer_does_not_end_their_reading() {
        let (ring, _silent) = ring();
        let text = a_token();
        let token = Token::read(&text).unwrap();
        let verified = timeout(Duration::from_millis(50), ring.verify(&token)).await;
        assert!(verified.is_err(), "the API server does not answer");
        assert!(ring.tried.try_lock().is_err(), "they are still being read");
    }
}
