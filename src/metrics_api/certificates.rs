//! Keeps the certificates: the authorities in their Secret, this replica's own, and the bundle in the `APIService`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoClientAuth, NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    ClientConfig, DigitallySignedStruct, DistinguishedName, RootCertStore, ServerConfig,
    SignatureScheme,
};
use serde_json::json;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::cluster::client::{CallError, call, describe};
use crate::cluster::clock;
use crate::cluster::election::Standing;

use super::Observer;
use super::authorities::{Authorities, CertificateError, Certified, REPLICA};
use super::hook::{self, HookError};

/// The `APIService` by which the API server finds us.
pub const API_SERVICE: &str = "v1alpha1.metrics.plimsoll.dev";
const FIELD: &str = "authorities.json";
/// The bundle, for people and for those who mount it.
const BUNDLE: &str = "ca.crt";
/// How often all is looked at while it is well, and while it is not.
const SELDOM: Duration = Duration::from_mins(1);
const OFTEN: Duration = Duration::from_secs(2);

/// Why the certificates are not as they should be.
#[derive(Debug, Error)]
pub enum KeepError {
    /// The Secret can't be read or written.
    #[error("failed to keep the Secret {0}: {words}", words = .1.words())]
    Secret(String, CallError),
    /// The `ConfigMap` can't be read or written.
    #[error("failed to tell agents of the certificate authority in the ConfigMap {0}: {words}", words = .1.words())]
    Bundle(String, CallError),
    /// The `APIService` can't be read or written.
    #[error("failed to tell the APIService {API_SERVICE} of the certificate authority: {words}", words = .0.words())]
    Service(CallError),
    /// The `ValidatingWebhookConfiguration` can't be read or written.
    #[error(
        "failed to tell the ValidatingWebhookConfiguration {0} of the certificate authority: {1}"
    )]
    Webhook(String, HookError),
    /// A certificate can't be made.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// The TLS library refuses it.
    #[error("failed to use the certificate")]
    Tls(#[from] rustls::Error),
    /// The bundle is not in PEM.
    #[error("failed to read the certificate authorities")]
    Pem(#[from] rustls::pki_types::pem::Error),
    /// It can't be used to verify replicas.
    #[error("failed to use the certificate authorities")]
    Verifier(#[from] rustls::server::VerifierBuilderError),
}

/// What this replica serves and calls others with.
#[derive(Clone)]
pub struct Tls {
    /// For those who connect to us. It takes any certificate, or none: who they are is judged for each request.
    pub server: Arc<ServerConfig>,
    /// For agents that report.
    pub reports: Arc<ServerConfig>,
    /// For connecting to the leader.
    pub client: Arc<ClientConfig>,
    /// The paths at which API servers ask us about evictions.
    pub hooks: Arc<[String]>,
    /// Knows replicas by their certificates.
    replicas: Arc<dyn ClientCertVerifier>,
}

impl Tls {
    /// Whether these certificates make a replica of this release: our authority signs nothing else.
    pub fn is_replica(&self, certificates: &[CertificateDer<'static>], now: Timestamp) -> bool {
        is_signed(self.replicas.as_ref(), certificates, now)
    }
}

/// Whether these certificates, the client's first, are good at `now` by the authorities of `verifier`.
pub fn is_signed(
    verifier: &dyn ClientCertVerifier,
    certificates: &[CertificateDer<'static>],
    now: Timestamp,
) -> bool {
    let [client, between @ ..] = certificates else {
        return false;
    };
    let since = u64::try_from(now.as_second()).unwrap_or(0);
    let now = UnixTime::since_unix_epoch(Duration::from_secs(since));
    verifier.verify_client_cert(client, between, now).is_ok()
}

/// Where things are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The namespace of Service and Secret.
    pub namespace: String,
    /// The Service that the `APIService` names.
    pub service: String,
    /// The Secret.
    pub secret: String,
    /// Where agents report; `None`: nowhere.
    pub reports: Option<ReportPlace>,
    /// The `ValidatingWebhookConfiguration` by which API servers ask about evictions; `None`: they don't.
    pub webhook: Option<String>,
}

/// Where agents find those to whom they report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportPlace {
    /// The headless Service whose endpoints they are.
    pub service: String,
    /// The `ConfigMap` with the certificate authorities by which agents know them.
    pub bundle: String,
}

impl Place {
    /// The name by which API servers know us.
    pub fn server_name(&self) -> String {
        self.name_of(&self.service)
    }

    fn name_of(&self, service: &str) -> String {
        format!("{service}.{}.svc", self.namespace)
    }

    /// All names that our certificate bears.
    fn names(&self) -> Vec<String> {
        let reports = self.reports.as_ref();
        let reports = reports.map(|reports| self.name_of(&reports.service));
        std::iter::once(self.server_name()).chain(reports).collect()
    }
}

/// Keeps them.
pub struct Keeper {
    client: Client,
    place: Place,
    standing: watch::Receiver<Standing>,
    tls: watch::Sender<Option<Tls>>,
    observer: Arc<dyn Observer>,
    mine: Option<Certified>,
    bundle: String,
}

impl Keeper {
    /// Begins with nothing.
    pub fn new(
        client: Client,
        place: Place,
        standing: watch::Receiver<Standing>,
        tls: watch::Sender<Option<Tls>>,
        observer: Arc<dyn Observer>,
    ) -> Self {
        Self {
            client,
            place,
            standing,
            tls,
            observer,
            mine: None,
            bundle: String::new(),
        }
    }

    /// For ever. What goes wrong is logged once.
    pub async fn keep(mut self) {
        let mut wrong = String::new();
        loop {
            // By the clock: a process that was stopped may not know yet that it leads no more.
            let term = self.standing.borrow_and_update().term(clock::now());
            let leads = term.is_some();
            let outcome = self.look(leads, clock::wall()).await;
            let why = outcome
                .err()
                .map_or_else(String::new, |error| describe(&error));
            if why != wrong && !why.is_empty() {
                tracing::error!(why, "the metrics API is not as it should be");
            }
            self.observer.certified(if self.mine.is_some() {
                Ok(())
            } else {
                Err(&why)
            });
            let pause = if why.is_empty() { SELDOM } else { OFTEN };
            wrong = why;
            let elected = self.standing.wait_for(|standing| standing.leads() != leads);
            if let Ok(Err(_)) = timeout(pause, elected).await {
                return;
            }
        }
    }

    async fn look(&mut self, leads: bool, now: Timestamp) -> Result<(), KeepError> {
        let authorities = self.authorities(leads, now).await?;
        let bundle = authorities.bundle(now);
        let current = self
            .mine
            .as_ref()
            .is_some_and(|mine| authorities.is_current(mine, now));
        if !current || bundle != self.bundle {
            let certified = authorities.certify(&self.place.names(), now)?;
            let hooks = authorities.hooks(now);
            self.tls
                .send_replace(Some(tls(&certified, &bundle, hooks)?));
            self.mine = Some(certified);
            self.bundle.clone_from(&bundle);
        }
        if !leads {
            return Ok(());
        }
        let (agents, servers) = (self.tell_agents(&bundle).await, self.tell(&bundle).await);
        let hook = authorities.hooks(now).into_iter().next();
        let hook = self.tell_hook(&bundle, hook.unwrap_or_default()).await;
        agents.and(servers).and(hook)
    }

    /// Tells API servers where to ask about evictions, and whom to believe.
    async fn tell_hook(&self, bundle: &str, path: String) -> Result<(), KeepError> {
        let Some(name) = &self.place.webhook else {
            return Ok(());
        };
        let told = hook::tell(&self.client, name, bundle, &path).await;
        told.map_err(|error| KeepError::Webhook(name.clone(), error))
    }

    /// Tells agents whom to believe, in a `ConfigMap` that their pods mount.
    async fn tell_agents(&self, bundle: &str) -> Result<(), KeepError> {
        let Some(ReportPlace { bundle: name, .. }) = &self.place.reports else {
            return Ok(());
        };
        let failed = |error| KeepError::Bundle(name.clone(), error);
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.place.namespace);
        let known = call(api.get_opt(name)).await.map_err(failed)?;
        let data = known.as_ref().and_then(|known| known.data.as_ref());
        if data
            .and_then(|data| data.get(BUNDLE))
            .is_some_and(|told| told == bundle)
        {
            return Ok(());
        }
        let ours = Patch::Apply(json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name},
            "data": {BUNDLE: bundle},
        }));
        let params = PatchParams::apply(REPLICA).force();
        call(api.patch(name, &params, &ours))
            .await
            .map(drop)
            .map_err(failed)
    }

    /// The authorities of the Secret. Where there are none yet, the first replica makes them; later ones the leader.
    async fn authorities(&self, leads: bool, now: Timestamp) -> Result<Authorities, KeepError> {
        let name = &self.place.secret;
        let failed = |error| KeepError::Secret(name.clone(), error);
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.place.namespace);
        let secret = match call(api.get_opt(name)).await.map_err(failed)? {
            Some(secret) => secret,
            None => self.make_secret(&api).await.map_err(failed)?,
        };
        let data = secret.data.as_ref();
        let known = data
            .and_then(|data| data.get(FIELD))
            .map(|field| Authorities::read(&field.0));
        let known = known.transpose()?;
        let (authorities, renewed) = match known {
            Some(known) if !leads => (known, None),
            Some(known) => {
                let renewed = known.renewed(now)?;
                (known, renewed)
            }
            None => (Authorities::default(), Authorities::default().renewed(now)?),
        };
        let Some(renewed) = renewed else {
            return Ok(authorities);
        };
        let data = BTreeMap::from([
            (FIELD.to_owned(), ByteString(renewed.write()?)),
            (
                BUNDLE.to_owned(),
                ByteString(renewed.bundle(now).into_bytes()),
            ),
        ]);
        // By the version that was read: of two that write at a time one fails, and looks again.
        let secret = Secret {
            data: Some(data),
            ..secret
        };
        call(api.replace(name, &PostParams::default(), &secret))
            .await
            .map_err(failed)?;
        tracing::info!(secret = name, "made a certificate authority");
        Ok(renewed)
    }

    /// Makes the Secret, empty, or reads the one that another replica made meanwhile. By server-side apply: a role can allow
    /// that for one name, and a create for all names only.
    async fn make_secret(&self, api: &Api<Secret>) -> Result<Secret, CallError> {
        let name = &self.place.secret;
        let empty = Patch::Apply(json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
        }));
        let params = PatchParams::apply(REPLICA);
        call(api.patch(name, &params, &empty)).await
    }

    /// Tells the `APIService` whom to believe, unless somebody chose to believe anybody.
    async fn tell(&self, bundle: &str) -> Result<(), KeepError> {
        let api: Api<APIService> = Api::all(self.client.clone());
        let service = call(api.get(API_SERVICE))
            .await
            .map_err(KeepError::Service)?;
        let spec = service.spec.unwrap_or_default();
        let told = spec
            .ca_bundle
            .is_some_and(|told| told.0 == bundle.as_bytes());
        if told || spec.insecure_skip_tls_verify == Some(true) {
            return Ok(());
        }
        let patch = Patch::Merge(json!({
            "metadata": {"resourceVersion": service.metadata.resource_version},
            "spec": {"caBundle": ByteString(bundle.as_bytes().to_vec())},
        }));
        let params = PatchParams::default();
        call(api.patch(API_SERVICE, &params, &patch))
            .await
            .map(drop)
            .map_err(KeepError::Service)
    }
}

fn tls(certified: &Certified, bundle: &str, hooks: Vec<String>) -> Result<Tls, KeepError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(certificate?)?;
    }
    let roots = Arc::new(roots);
    let anybody = Arc::new(Anybody(Arc::clone(&provider)));
    let client = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(Arc::clone(&roots))
        .with_client_auth_cert(
            vec![certified.certificate.clone()],
            certified.key.clone_key(),
        )?;
    Ok(Tls {
        server: Arc::new(server(certified, &provider, anybody, b"http/1.1")?),
        reports: Arc::new(server(certified, &provider, Arc::new(NoClientAuth), b"h2")?),
        client: Arc::new(client),
        hooks: hooks.into(),
        replicas: WebPkiClientVerifier::builder_with_provider(roots, provider).build()?,
    })
}

/// What is served with: certificates that clients show are judged by `clients`, and one protocol is spoken.
fn server(
    certified: &Certified,
    provider: &Arc<CryptoProvider>,
    clients: Arc<dyn ClientCertVerifier>,
    protocol: &[u8],
) -> Result<ServerConfig, rustls::Error> {
    let mut server = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_safe_default_protocol_versions()?
        .with_client_cert_verifier(clients)
        .with_single_cert(
            vec![certified.certificate.clone()],
            certified.key.clone_key(),
        )?;
    server.alpn_protocols = vec![protocol.to_vec()];
    // Resumed sessions would carry the identity of a certificate that may have ended; and agents connect once, and when
    // they do so again it is to another replica most often.
    server.send_tls13_tickets = 0;
    server.session_storage = Arc::new(NoServerSessionStorage {});
    Ok(server)
}

/// Asks for a certificate, and takes any whose key the client has. What it is worth is judged by each request: a
/// handshake that failed because an authority rotated would take discovery with it.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ClientCertVerifier for Anybody {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, known)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let known = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, known)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
