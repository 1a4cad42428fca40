//! Which clients may pass on other users' requests: follows `kube-system/extension-apiserver-authentication`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::watch_object;
use kube::{Api, Client};
use percent_encoding::percent_decode_str;
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use thiserror::Error;
use tokio::sync::watch;
use webpki::EndEntityCert;

use crate::cluster::client::describe;

use super::ApiObserver;
use super::authn::User;
use super::certificates::is_signed;

const NAMESPACE: &str = "kube-system";
const NAME: &str = "extension-apiserver-authentication";
const CANT_WATCH: &str = "failed to watch kube-system/extension-apiserver-authentication; bind the controller to the Role \
                          extension-apiserver-authentication-reader";

/// Why no front proxy is trusted.
#[derive(Debug, Error)]
pub enum TrustError {
    /// The `ConfigMap` has no CA: the API server runs without an aggregation layer.
    #[error(
        "{NAMESPACE}/{NAME} has no requestheader-client-ca-file: start kube-apiserver with --requestheader-client-ca-file"
    )]
    NoAuthority,
    /// The CA is not valid PEM.
    #[error("failed to read requestheader-client-ca-file of {NAMESPACE}/{NAME}")]
    Pem(#[source] rustls::pki_types::pem::Error),
    /// No certificate in it can be used as a CA.
    #[error("failed to use requestheader-client-ca-file of {NAMESPACE}/{NAME}")]
    Authority(#[source] rustls::server::VerifierBuilderError),
    /// A value is not a list of strings.
    #[error("failed to read {0} of {NAMESPACE}/{NAME}: not a list of strings in JSON")]
    List(&'static str, #[source] serde_json::Error),
}

/// Which front proxies are trusted, and their header names. The default trusts none.
#[derive(Clone, Debug, Default)]
pub struct Trust {
    authority: Option<Arc<dyn ClientCertVerifier>>,
    /// Common names. Empty: any certificate of the CA.
    allowed: Vec<String>,
    username: Vec<String>,
    uid: Vec<String>,
    group: Vec<String>,
    extra: Vec<String>,
}

impl Trust {
    /// From the data of the `ConfigMap`.
    pub fn of(data: &BTreeMap<String, String>) -> Result<Self, TrustError> {
        let list = |key: &'static str| {
            let text = data.get(key).map_or("[]", String::as_str);
            serde_json::from_str::<Vec<String>>(text)
                .map_err(|source| TrustError::List(key, source))
        };
        let pem = data
            .get("requestheader-client-ca-file")
            .ok_or(TrustError::NoAuthority)?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(pem.as_bytes()) {
            // Unusable certificates are skipped; the builder fails if none is left.
            let (_, _) = roots.add_parsable_certificates([certificate.map_err(TrustError::Pem)?]);
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Ok(Self {
            authority: Some(verifier.map_err(TrustError::Authority)?),
            allowed: list("requestheader-allowed-names")?,
            username: list("requestheader-username-headers")?,
            uid: list("requestheader-uid-headers")?,
            group: list("requestheader-group-headers")?,
            extra: list("requestheader-extra-headers-prefix")?,
        })
    }

    /// Whether these certificates, the client's first, are from the CA and have an allowed name. A certificate is
    /// required even if every name is allowed.
    pub fn is_proxy(&self, certificates: &[CertificateDer<'static>], now: Timestamp) -> bool {
        let (Some(authority), [client, ..]) = (&self.authority, certificates) else {
            return false;
        };
        is_signed(authority.as_ref(), certificates, now)
            && (self.allowed.is_empty()
                || common_name(client).is_some_and(|name| self.allowed.contains(&name)))
    }

    /// The user that a front proxy passes on. `None`: it names none.
    pub fn user(&self, headers: &HeaderMap) -> Option<User> {
        let first = |names: &[String]| {
            let mut values = names
                .iter()
                .filter_map(|name| headers.get(name).and_then(text));
            values.find(|value| !value.is_empty()).map(str::to_owned)
        };
        let groups = self.group.iter().flat_map(|name| headers.get_all(name));
        let groups = groups.filter_map(text).map(str::to_owned);
        // The same header may be configured twice with different case.
        let groups: BTreeSet<String> = groups.collect();
        Some(User {
            name: first(&self.username)?,
            uid: first(&self.uid),
            groups: groups.into_iter().collect(),
            extra: self.extras(headers),
        })
    }

    fn extras(&self, headers: &HeaderMap) -> BTreeMap<String, Vec<String>> {
        let mut extras: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (name, value) in headers {
            let name = name.as_str();
            let mut prefixes = self.extra.iter().map(|prefix| prefix.to_ascii_lowercase());
            let suffix = prefixes.find_map(|prefix| name.strip_prefix(&prefix).map(str::to_owned));
            if let (Some(suffix), Some(value)) = (suffix, text(value)) {
                let key = percent_decode_str(&suffix)
                    .decode_utf8_lossy()
                    .to_lowercase();
                extras.entry(key).or_default().push(value.to_owned());
            }
        }
        extras
    }
}

/// API servers send names as they are, in UTF-8.
fn text(value: &HeaderValue) -> Option<&str> {
    str::from_utf8(value.as_bytes()).ok()
}

/// The common name of a certificate's subject; the last one, as in Go, if there are several.
pub(crate) fn common_name(certificate: &CertificateDer<'_>) -> Option<String> {
    let certificate = EndEntityCert::try_from(certificate).ok()?;
    last_common_name(certificate.subject())
}

/// The same for a subject without its outer header.
pub(crate) fn last_common_name(subject: &[u8]) -> Option<String> {
    const COMMON_NAME: [u64; 4] = [2, 5, 4, 3];
    let mut found = None;
    let read = yasna::parse_der(&sequence(subject)?, |subject| {
        subject.read_sequence_of(|names| {
            names.read_set_of(|name| {
                name.read_sequence(|pair| {
                    let kind = pair.next().read_oid()?;
                    let value = pair.next().read_tagged_der()?;
                    if kind.components().as_slice() == COMMON_NAME {
                        found = std::str::from_utf8(value.value()).ok().map(str::to_owned);
                    }
                    Ok(())
                })
            })
        })
    });
    read.ok().and(found)
}

/// Adds the outer header that the subject lacks.
fn sequence(content: &[u8]) -> Option<Vec<u8>> {
    const SEQUENCE: u8 = 0x30;
    let [.., high, low] = u32::try_from(content.len()).ok()?.to_be_bytes();
    let mut whole = match content.len() {
        0..=0x7f => vec![SEQUENCE, low],
        0x80..=0xff => vec![SEQUENCE, 0x81, low],
        0x100..=0xffff => vec![SEQUENCE, 0x82, high, low],
        _ => return None,
    };
    whole.extend_from_slice(content);
    Some(whole)
}

/// Follows the `ConfigMap` forever. Invalid content leaves the last valid configuration in place.
pub async fn follow(
    client: Client,
    trust: watch::Sender<Option<Trust>>,
    observer: Arc<dyn ApiObserver>,
) {
    observer.front_proxy_loaded(Err("not loaded yet"));
    let api: Api<ConfigMap> = Api::namespaced(client, NAMESPACE);
    let mut changes = watch_object(api, NAME).default_backoff().boxed();
    while let Some(change) = changes.next().await {
        match change {
            Ok(map) => {
                let before = trust.borrow().clone().unwrap_or_default();
                trust.send_replace(Some(read(map).unwrap_or(before)));
                observer.front_proxy_loaded(Ok(()));
            }
            Err(error) => {
                let why = describe(&error);
                tracing::warn!(why, "{CANT_WATCH}");
                if trust.borrow().is_none() {
                    observer.front_proxy_loaded(Err(&format!("{CANT_WATCH}: {why}")));
                }
            }
        }
    }
}

/// The configuration. `None`: unusable.
fn read(map: Option<ConfigMap>) -> Option<Trust> {
    let Some(map) = map else {
        let why = "there is no kube-system/extension-apiserver-authentication: start kube-apiserver with --requestheader-client-ca-file";
        tracing::error!(why, "no front proxy is trusted");
        return Some(Trust::default());
    };
    let trust = Trust::of(&map.data.unwrap_or_default());
    let log_error =
        |error: &TrustError| tracing::error!(why = describe(error), "no front proxy is trusted");
    trust.inspect_err(log_error).ok()
}

#[cfg(test)]
mod tests;
