//! Keeps the certificates: this replica's own, whichever way it comes by it, and the authorities by which others know it, in the
//! `APIService` and the agents' `ConfigMap`.
//!
//! What is told to others is known for a while before anything is served by it. Any replica adds its authorities where they
//! are missing; those that are of no more use the leader alone takes away.

mod files;
mod own;
mod roots;
mod succession;

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

use crate::cluster::backoff::jittered;
use crate::cluster::client::{CallError, call, describe};
use crate::cluster::clock;
use crate::cluster::election::Standing;

use super::Observer;
use super::authorities::{CertificateError, REPLICA};
use super::certificates::{Pair, Tls, TlsError};
use files::{Files, FilesError};
use own::Own;
use roots::Roots;

/// The `APIService` by which the API server finds us.
pub const API_SERVICE: &str = "v1alpha1.metrics.plimsoll.dev";
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
    /// A certificate can't be made.
    #[error(transparent)]
    Certificate(#[from] CertificateError),
    /// Others did not keep it as they should.
    #[error(transparent)]
    Files(#[from] FilesError),
    /// The TLS library refuses it.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Where things are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The namespace of Service and Secret.
    pub namespace: String,
    /// The Service that the `APIService` names.
    pub service: String,
    /// The certificate.
    pub certificate: CertificatePlace,
    /// Where agents report; `None`: nowhere.
    pub reports: Option<ReportPlace>,
    /// Whether there is an `APIService` by which API servers find us.
    pub api: bool,
}

/// How a replica comes by its certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CertificatePlace {
    /// It makes it itself, by an authority that the replicas share in this Secret.
    Secret(String),
    /// Somebody else does, cert-manager for one, and keeps it in files.
    Files(TlsFiles),
}

/// A certificate in files, which somebody else replaces in time. All are PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, then those between it and its authority.
    pub certificate: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority that signed it, with others that clients shall know.
    pub authorities: PathBuf,
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

/// What there is to serve with.
#[derive(Clone, Debug)]
pub struct Held {
    /// The certificate.
    pair: Arc<Pair>,
    /// The authorities that others have to know for it, and for the one that follows it.
    roots: Vec<CertificateDer<'static>>,
    /// When it is good no more.
    ends: Timestamp,
}

enum Source {
    Own(Own),
    Files(Files),
}

impl Source {
    fn of(client: &Client, place: &Place) -> Self {
        let names = place.names();
        match &place.certificate {
            CertificatePlace::Secret(secret) => {
                let namespace = place.namespace.clone();
                Self::Own(Own::new(client.clone(), namespace, secret.clone(), names))
            }
            CertificatePlace::Files(files) => Self::Files(Files::new(files.clone(), names)),
        }
    }

    /// What there is, and what is wrong: the one does not exclude the other.
    async fn look(&mut self, leads: bool, now: Timestamp) -> (Option<Held>, Option<KeepError>) {
        match self {
            Self::Own(own) => match own.look(leads, now).await {
                Ok(held) => (Some(held), None),
                Err(error) => (None, Some(error)),
            },
            Self::Files(files) => {
                let wrong = files.look(now).err().map(KeepError::Files);
                (files.held(), wrong)
            }
        }
    }

    /// Comes when it should be looked at before its time.
    async fn changed(&self) {
        match self {
            Self::Own(_) => pending().await,
            Self::Files(files) => {
                sleep(OFTEN).await;
                while !files.has_changed(clock::wall()) {
                    sleep(OFTEN).await;
                }
            }
        }
    }
}

/// What the last [`Tls`] was made of.
#[derive(Default)]
struct Served {
    pair: Option<Arc<Pair>>,
    roots: Vec<CertificateDer<'static>>,
}

/// Keeps them.
pub struct Keeper {
    client: Client,
    place: Place,
    standing: watch::Receiver<Standing>,
    tls: watch::Sender<Option<Tls>>,
    observer: Arc<dyn Observer>,
    source: Source,
    roots: Roots,
    served: Served,
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
            source: Source::of(&client, &place),
            client,
            place,
            standing,
            tls,
            observer,
            roots: Roots::default(),
            served: Served::default(),
        }
    }

    /// For ever. What goes wrong is logged once.
    pub async fn keep(mut self) {
        let mut wrong = String::new();
        loop {
            // By the clock: a process that was stopped may not know yet that it leads no more.
            let term = self.standing.borrow_and_update().term(clock::now());
            let leads = term.is_some();
            let error = self.look(leads, clock::wall()).await.err();
            let why = error.as_ref().map_or_else(String::new, |e| describe(e));
            if why != wrong && !why.is_empty() {
                tracing::error!(why, "the certificates are not as they should be");
            }
            self.observer.certified(match self.served.pair {
                Some(_) => Ok(()),
                None => Err(&why),
            });
            // Files say themselves that they changed.
            let pause = match error {
                None | Some(KeepError::Files(_)) => SELDOM,
                Some(_) => OFTEN,
            };
            wrong = why;
            tokio::select! {
                elected = self.standing.wait_for(|standing| standing.leads() != leads) => {
                    if elected.is_err() {
                        return;
                    }
                }
                () = self.source.changed() => {}
                () = sleep(jittered(pause)) => {}
            }
        }
    }

    async fn look(&mut self, leads: bool, now: Timestamp) -> Result<(), KeepError> {
        let (held, wrong) = self.source.look(leads, now).await;
        let ends = held.as_ref().map(|held| held.ends);
        let outcome = match held {
            Some(held) => self.serve(held, leads, now).await,
            None => Ok(()),
        };
        let outcome = wrong.map_or(Ok(()), Err).and(outcome);
        self.observer.kept(ends, outcome.is_ok());
        outcome
    }

    /// Serves with it, and has it known.
    async fn serve(&mut self, held: Held, leads: bool, now: Timestamp) -> Result<(), KeepError> {
        let (service, bundle) = tokio::join!(self.service(), self.bundle());
        let published = match (&service, &bundle) {
            (Ok(Some(service)), _) => known_to_servers(service),
            (Ok(None), Ok(bundle)) => known_to_agents(bundle.as_ref()),
            _ => Vec::new(),
        };
        self.roots.see(&held.roots, &published, now);
        let roots = self.roots.known(now);
        self.serve_with(&held.pair, roots.clone())?;
        let is_unknown = |root| !published.contains(root);
        if !leads && (published.is_empty() || !held.roots.iter().any(is_unknown)) {
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
        let tls = Tls::new(pair, &roots, self.place.server_name())?;
        self.tls.send_replace(Some(tls));
        self.served = Served {
            pair: Some(Arc::clone(pair)),
            roots,
        };
        Ok(())
    }

    /// What API servers know of us; `None`: there is no aggregated API.
    async fn service(&self) -> Result<Option<APIService>, KeepError> {
        if !self.place.api {
            return Ok(None);
        }
        let api: Api<APIService> = Api::all(self.client.clone());
        let service = call(api.get(API_SERVICE)).await;
        service.map(Some).map_err(KeepError::Service)
    }

    /// What agents know of us; `None`: nothing yet, or there are none.
    async fn bundle(&self) -> Result<Option<ConfigMap>, KeepError> {
        let Some(ReportPlace { bundle: name, .. }) = &self.place.reports else {
            return Ok(None);
        };
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.place.namespace);
        let bundle = call(api.get_opt(name)).await;
        bundle.map_err(|error| KeepError::Bundle(name.clone(), error))
    }

    /// Publishes to agents whom to believe, in a `ConfigMap` that their pods mount: in the one that was read, so that what another
    /// replica has added since is not lost.
    async fn publish_to_agents(
        &self,
        known: Option<&ConfigMap>,
        pem: &str,
    ) -> Result<(), KeepError> {
        let Some(ReportPlace { bundle: name, .. }) = &self.place.reports else {
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
        let api: Api<ConfigMap> = Api::namespaced(self.client.clone(), &self.place.namespace);
        let params = PatchParams::apply(REPLICA).force();
        let patched = call(api.patch(name, &params, &ours)).await.map(drop);
        patched.map_err(|error| KeepError::Bundle(name.clone(), error))
    }

    /// Publishes to API servers whom to believe, in the `APIService`, unless that is set to believe any server.
    async fn publish_to_servers(
        &self,
        service: &APIService,
        bundle: &str,
    ) -> Result<(), KeepError> {
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
            .map_err(KeepError::Service)
    }
}

/// The authorities by which API servers know us.
fn known_to_servers(service: &APIService) -> Vec<CertificateDer<'static>> {
    let spec = service.spec.as_ref();
    let bundle = spec.and_then(|spec| spec.ca_bundle.as_ref());
    bundle.map_or_else(Vec::new, |bundle| roots::read(&bundle.0))
}

fn in_bundle(bundle: &ConfigMap) -> Option<&str> {
    bundle.data.as_ref()?.get(BUNDLE).map(String::as_str)
}

/// The authorities by which agents know us.
fn known_to_agents(bundle: Option<&ConfigMap>) -> Vec<CertificateDer<'static>> {
    let pem = bundle.and_then(in_bundle).unwrap_or_default();
    roots::read(pem.as_bytes())
}
