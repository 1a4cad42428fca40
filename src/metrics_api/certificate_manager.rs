//! Manages certificates: this replica's own, from either source, and the authorities that clients trust, in the
//! `APIService` and in the agents' `ConfigMap`.
//!
//! An authority is published for a while before a certificate of it is served. Any replica adds its missing
//! authorities; only the leader removes old ones.

mod files;
mod rollover;
mod roots;
mod self_issued;

use std::future::pending;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::kube_aggregator::pkg::apis::apiregistration::v1::APIService;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use rustls::pki_types::CertificateDer;
use serde_json::json;
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::clock;
use crate::cluster::backoff::jittered;
use crate::cluster::client::{CallError, call, describe};
use crate::cluster::election::Leadership;

use super::ApiObserver;
use super::authorities::{CertificateError, REPLICA};
use super::certificates::{Pair, Tls, TlsError};
use files::{CertificateFiles, FilesError};
use roots::Roots;
use self_issued::SelfIssued;

/// Name of our `APIService`.
pub const API_SERVICE: &str = "v1alpha1.metrics.plimsoll.dev";
/// Key of the CA bundle, in the Secret and the `ConfigMap`.
const BUNDLE: &str = "ca.crt";
/// Interval of checks, and after an error.
const RESYNC_INTERVAL: Duration = Duration::from_mins(1);
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// Why the certificates are not in the desired state.
#[derive(Debug, Error)]
pub enum ManageError {
    /// The Secret can't be read or written.
    #[error("failed to read or write the Secret {0}: {message}", message = .1.message())]
    Secret(String, CallError),
    /// The `ConfigMap` can't be read or written.
    #[error("failed to publish the certificate authorities to agents in the ConfigMap {0}: {message}", message = .1.message())]
    Bundle(String, CallError),
    /// The `APIService` can't be read or written.
    #[error("failed to publish the certificate authorities in the APIService {API_SERVICE}: {message}", message = .0.message())]
    Service(CallError),
    /// A certificate can't be issued.
    #[error(transparent)]
    Issue(#[from] CertificateError),
    /// The certificate files are unusable.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The TLS library rejects it.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Names and locations of the objects involved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectNames {
    /// Namespace of the Services and the Secret.
    pub namespace: String,
    /// The Service of the `APIService`.
    pub service: String,
    /// Source of the certificate.
    pub certificate: CertificateSource,
    /// Where agents report. `None`: they don't.
    pub reports: Option<ReportEndpoint>,
    /// Whether there is an `APIService`.
    pub api: bool,
}

/// Where a replica gets its certificate from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificateSource {
    /// Issued by itself, from an authority that the replicas share in this Secret.
    Secret(String),
    /// Issued by another program such as cert-manager, and mounted as files.
    Files(TlsFiles),
}

/// Certificate files in PEM, renewed by another program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, followed by its intermediates.
    pub certificate: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// The authority that signed it, and others to be published to clients.
    pub authorities: PathBuf,
}

/// How agents find the replicas that they report to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportEndpoint {
    /// The headless Service of the replicas.
    pub service: String,
    /// The `ConfigMap` with the authorities that agents trust.
    pub bundle: String,
}

impl ObjectNames {
    /// The DNS name that API servers connect to.
    pub fn server_name(&self) -> String {
        self.name_of(&self.service)
    }

    fn name_of(&self, service: &str) -> String {
        format!("{service}.{}.svc", self.namespace)
    }

    /// All DNS names of our certificate.
    fn dns_names(&self) -> Vec<String> {
        let reports = self.reports.as_ref();
        let reports = reports.map(|reports| self.name_of(&reports.service));
        std::iter::once(self.server_name()).chain(reports).collect()
    }
}

/// Certificate to serve with.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The certificate and its key.
    pair: Arc<Pair>,
    /// Authorities of this certificate and of the next one, to be published.
    roots: Vec<CertificateDer<'static>>,
    /// When it expires.
    expires: Timestamp,
}

enum Source {
    SelfIssued(SelfIssued),
    Files(CertificateFiles),
}

impl Source {
    fn of(client: &Client, names: &ObjectNames) -> Self {
        let dns_names = names.dns_names();
        match &names.certificate {
            CertificateSource::Secret(secret) => {
                let namespace = names.namespace.clone();
                Self::SelfIssued(SelfIssued::new(
                    client.clone(),
                    namespace,
                    secret.clone(),
                    dns_names,
                ))
            }
            CertificateSource::Files(files) => {
                Self::Files(CertificateFiles::new(files.clone(), dns_names))
            }
        }
    }

    /// The certificate, and an error. There may be both: an older certificate may still be valid.
    async fn refresh(
        &mut self,
        leads: bool,
        now: Timestamp,
    ) -> (Option<Certificate>, Option<ManageError>) {
        match self {
            Self::SelfIssued(issuer) => match issuer.refresh(leads, now).await {
                Ok(current) => (Some(current), None),
                Err(error) => (None, Some(error)),
            },
            Self::Files(files) => {
                let error = files.refresh(now).err().map(ManageError::Files);
                (files.current(), error)
            }
        }
    }

    /// Completes when the source has changed.
    async fn changed(&self) {
        match self {
            Self::SelfIssued(_) => pending().await,
            Self::Files(files) => {
                sleep(RETRY_INTERVAL).await;
                while !files.has_changed(clock::wall_time()) {
                    sleep(RETRY_INTERVAL).await;
                }
            }
        }
    }
}

/// Inputs of the current [`Tls`].
#[derive(Default)]
struct Served {
    pair: Option<Arc<Pair>>,
    roots: Vec<CertificateDer<'static>>,
}

/// Manages the certificates of this replica.
pub struct CertificateManager {
    client: Client,
    names: ObjectNames,
    leadership: watch::Receiver<Leadership>,
    tls: watch::Sender<Option<Tls>>,
    observer: Arc<dyn ApiObserver>,
    source: Source,
    roots: Roots,
    served: Served,
}

impl CertificateManager {
    /// Starts without a certificate.
    pub fn new(
        client: Client,
        names: ObjectNames,
        leadership: watch::Receiver<Leadership>,
        tls: watch::Sender<Option<Tls>>,
        observer: Arc<dyn ApiObserver>,
    ) -> Self {
        Self {
            source: Source::of(&client, &names),
            client,
            names,
            leadership,
            tls,
            observer,
            roots: Roots::default(),
            served: Served::default(),
        }
    }

    /// Runs forever. Every error is logged once.
    pub async fn run(mut self) {
        let mut error_text = String::new();
        loop {
            // Checked by the clock: after a suspension the process may have lost leadership without noticing yet.
            let term = self.leadership.borrow_and_update().term(clock::boot_time());
            let leads = term.is_some();
            let error = self.refresh(leads, clock::wall_time()).await.err();
            let why = error.as_ref().map_or_else(String::new, |e| describe(e));
            if why != error_text && !why.is_empty() {
                tracing::error!(why, "failed to reconcile the certificates");
            }
            self.observer.certified(match self.served.pair {
                Some(_) => Ok(()),
                None => Err(&why),
            });
            // Files are polled by [`Source::changed`].
            let pause = match error {
                None | Some(ManageError::Files(_)) => RESYNC_INTERVAL,
                Some(_) => RETRY_INTERVAL,
            };
            error_text = why;
            tokio::select! {
                elected = self.leadership.wait_for(|leadership| leadership.leads() != leads) => {
                    if elected.is_err() {
                        return;
                    }
                }
                () = self.source.changed() => {}
                () = sleep(jittered(pause)) => {}
            }
        }
    }

    async fn refresh(&mut self, leads: bool, now: Timestamp) -> Result<(), ManageError> {
        let (current, error) = self.source.refresh(leads, now).await;
        let expires = current.as_ref().map(|current| current.expires);
        let outcome = match current {
            Some(current) => self.serve(current, leads, now).await,
            None => Ok(()),
        };
        let outcome = error.map_or(Ok(()), Err).and(outcome);
        self.observer
            .certificates_reconciled(expires, outcome.is_ok());
        outcome
    }

    /// Serves with this certificate, and publishes its authorities.
    async fn serve(
        &mut self,
        current: Certificate,
        leads: bool,
        now: Timestamp,
    ) -> Result<(), ManageError> {
        let (service, bundle) = tokio::join!(self.service(), self.bundle());
        let published = match (&service, &bundle) {
            (Ok(Some(service)), _) => known_to_servers(service),
            (Ok(None), Ok(bundle)) => known_to_agents(bundle.as_ref()),
            _ => Vec::new(),
        };
        self.roots.update(&current.roots, &published, now);
        let roots = self.roots.known(now);
        self.serve_with(&current.pair, roots.clone())?;
        let is_unknown = |root| !published.contains(root);
        if !leads && (published.is_empty() || !current.roots.iter().any(is_unknown)) {
            return Ok(());
        }
        let pem = roots::pem(&roots);
        let agents = match bundle {
            Ok(bundle) => self.publish_to_agents(bundle.as_ref(), &pem).await,
            Err(error) => Err(error),
        };
        let servers = match service {
            Ok(Some(service)) => self.publish_to_servers(&service, &pem).await,
            Ok(None) => Ok(()),
            Err(error) => Err(error),
        };
        agents.and(servers)
    }

    fn serve_with(
        &mut self,
        pair: &Arc<Pair>,
        roots: Vec<CertificateDer<'static>>,
    ) -> Result<(), TlsError> {
        let served = &self.served;
        let is_same = served
            .pair
            .as_ref()
            .is_some_and(|other| Arc::ptr_eq(other, pair));
        if is_same && served.roots == roots {
            return Ok(());
        }
        let tls = Tls::new(pair, &roots, self.names.server_name())?;
        self.tls.send_replace(Some(tls));
        self.served = Served {
            pair: Some(Arc::clone(pair)),
            roots,
        };
        Ok(())
    }

    /// Our `APIService`. `None`: the aggregated API is disabled.
    async fn service(&self) -> Result<Option<APIService>, ManageError> {
        if !self.names.api {
            return Ok(None);
        }
        let api: Api<APIService> = Api::all(self.client.clone());
        let service = call(api.get(API_SERVICE)).await;
        service.map(Some).map_err(ManageError::Service)
    }

    /// The agents' CA bundle. `None`: it does not exist, or reports are disabled.
    async fn bundle(&self) -> Result<Option<ConfigMap>, ManageError> {
        let Some(ReportEndpoint { bundle: name, .. }) = &self.names.reports else {
            return Ok(None);
        };
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.names.namespace);
        let bundle = call(api.get_opt(name)).await;
        bundle.map_err(|error| ManageError::Bundle(name.clone(), error))
    }

    /// Publishes the bundle to agents, in a `ConfigMap` that their pods mount. Conditional on the version read, so
    /// that authorities added by another replica are not lost.
    async fn publish_to_agents(
        &self,
        known: Option<&ConfigMap>,
        pem: &str,
    ) -> Result<(), ManageError> {
        let Some(ReportEndpoint { bundle: name, .. }) = &self.names.reports else {
            return Ok(());
        };
        if known.and_then(in_bundle) == Some(pem) {
            return Ok(());
        }
        let version = known.and_then(|known| known.metadata.resource_version.as_ref());
        let ours = Patch::Apply(json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "resourceVersion": version},
            "data": {BUNDLE: pem},
        }));
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.names.namespace);
        let params = PatchParams::apply(REPLICA).force();
        let patched = call(api.patch(name, &params, &ours)).await.map(drop);
        patched.map_err(|error| ManageError::Bundle(name.clone(), error))
    }

    /// Publishes the bundle in the `APIService`, unless that skips TLS verification.
    async fn publish_to_servers(
        &self,
        service: &APIService,
        bundle: &str,
    ) -> Result<(), ManageError> {
        let spec = service.spec.as_ref();
        let is_published = spec
            .and_then(|spec| spec.ca_bundle.as_ref())
            .is_some_and(|known| known.0 == bundle.as_bytes());
        let skips = spec.and_then(|spec| spec.insecure_skip_tls_verify);
        if is_published || skips == Some(true) {
            return Ok(());
        }
        let patch = Patch::Merge(json!({
            "metadata": {"resourceVersion": service.metadata.resource_version},
            "spec": {"caBundle": ByteString(bundle.as_bytes().to_vec())},
        }));
        let api: Api<APIService> = Api::all(self.client.clone());
        call(api.patch(API_SERVICE, &PatchParams::default(), &patch))
            .await
            .map(drop)
            .map_err(ManageError::Service)
    }
}

/// The authorities in the `APIService`.
fn known_to_servers(service: &APIService) -> Vec<CertificateDer<'static>> {
    let spec = service.spec.as_ref();
    let bundle = spec.and_then(|spec| spec.ca_bundle.as_ref());
    bundle.map_or_else(Vec::new, |bundle| roots::read(&bundle.0))
}

fn in_bundle(bundle: &ConfigMap) -> Option<&str> {
    bundle.data.as_ref()?.get(BUNDLE).map(String::as_str)
}

/// The authorities in the agents' bundle.
fn known_to_agents(bundle: Option<&ConfigMap>) -> Vec<CertificateDer<'static>> {
    let pem = bundle.and_then(in_bundle).unwrap_or_default();
    roots::read(pem.as_bytes())
}
