//! A certificate in files that another program renews, such as a mounted Secret of cert-manager.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use jiff::Timestamp;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::sign::CertifiedKey;
use rustls::{CertificateError, Error as TlsError};
use thiserror::Error;

use crate::cluster::mounted::{Stamp, stamp};

use super::super::certificates::{Pair, is_signed, provider, store, unix};
use super::rollover::{Candidate, Rollover};
use super::{Certificate, TlsFiles, roots};

/// Size limit of a Secret.
const MAX_BYTES: u64 = 1 << 20;

/// Why the certificate files are unusable. The last valid certificate stays in use.
#[derive(Debug, Error)]
pub enum FilesError {
    /// A file can't be read.
    #[error("failed to read {}", .0.display())]
    Read(PathBuf, #[source] io::Error),
    /// There is no authority to publish.
    #[error(
        "failed to read {path}: {1}; the issuer of the certificate must provide its authority there",
        path = .0.display()
    )]
    Authorities(PathBuf, String),
    /// It has unexpected content.
    #[error("failed to read {path}: it contains no {1} in PEM", path = .0.display())]
    Pem(PathBuf, &'static str),
    /// The key belongs to another certificate.
    #[error(
        "failed to use the key in {key}: it does not match the certificate in {certificate}",
        key = .0.display(), certificate = .1.display()
    )]
    Key(PathBuf, PathBuf),
    /// It has expired.
    #[error("failed to use the certificate in {path}: it expired at {1} and was not renewed", path = .0.display())]
    Ended(PathBuf, Timestamp),
    /// It is not valid yet.
    #[error(
        "failed to use the certificate in {path}: it is not valid before {1}; is the clock of this machine right?",
        path = .0.display()
    )]
    Early(PathBuf, Timestamp),
    /// No published authority has signed it.
    #[error(
        "failed to use the certificate in {path}: no authority in {authorities} has signed it",
        path = .0.display(), authorities = .1.display()
    )]
    Stranger(PathBuf, PathBuf),
    /// It is not valid as a client certificate, which replicas need.
    #[error(
        "failed to use the certificate in {path}: it is not valid for clients, which replicas need among themselves; issue it for the usages \
         \"server auth\" and \"client auth\"",
        path = .0.display()
    )]
    ServerAlone(PathBuf),
    /// It is unusable for another reason, such as a missing DNS name.
    #[error("failed to use the certificate in {}", .0.display())]
    Refused(PathBuf, #[source] TlsError),
}

/// Reads the certificate, and reads it again when a file changes.
pub struct CertificateFiles {
    paths: TlsFiles,
    names: Vec<String>,
    seen: Option<[Option<Stamp>; 3]>,
    is_good: bool,
    rollover: Rollover,
}

impl CertificateFiles {
    /// For a certificate that has all these names.
    pub fn new(paths: TlsFiles, names: Vec<String>) -> Self {
        Self {
            paths,
            names,
            seen: None,
            is_good: false,
            rollover: Rollover::default(),
        }
    }

    /// Whether [`Self::refresh`] would find a change.
    pub fn has_changed(&self, now: Timestamp) -> bool {
        self.seen != Some(self.stamps()) || self.rollover.is_due(now)
    }

    /// The certificate to serve with. `None`: there was no valid one yet.
    pub fn current(&self) -> Option<Certificate> {
        self.rollover.current()
    }

    /// Reads the files at `now`.
    ///
    /// # Errors
    /// The certificate is unusable. An earlier one stays in use until it expires.
    pub fn refresh(&mut self, now: Timestamp) -> Result<(), FilesError> {
        self.rollover.advance(now);
        let stamps = self.stamps();
        // An unusable certificate is read again, because its validity depends on the time.
        if self.seen != Some(stamps) || !self.is_good {
            self.seen = Some(stamps);
            self.is_good = false;
            let found = self.read(now)?;
            self.is_good = true;
            let (path, expires) = (self.paths.certificate.display().to_string(), found.expires);
            let from = self.rollover.offer(found, now).unwrap_or(now);
            tracing::info!(path, %from, %expires, "loaded a new certificate");
        }
        match self.current() {
            Some(current) if current.expires <= now => Err(FilesError::Ended(
                self.paths.certificate.clone(),
                current.expires,
            )),
            _ => Ok(()),
        }
    }

    fn each(&self) -> [&Path; 3] {
        let TlsFiles {
            certificate,
            key,
            authorities,
        } = &self.paths;
        [certificate, key, authorities]
    }

    fn stamps(&self) -> [Option<Stamp>; 3] {
        self.each().map(|path| stamp(path).ok())
    }

    fn read(&self, now: Timestamp) -> Result<Candidate, FilesError> {
        let [certificate, key, authorities] = self.each();
        let nothing = |path: &Path, what| FilesError::Pem(path.to_owned(), what);
        let chain = certificates(&text(certificate)?);
        let chain = chain.ok_or_else(|| nothing(certificate, "certificate"))?;
        let key =
            PrivateKeyDer::from_pem_slice(&text(key)?).map_err(|_| nothing(key, "private key"))?;
        let no_authority = |why: String| FilesError::Authorities(authorities.to_owned(), why);
        let roots = read(authorities).map_err(|error| no_authority(error.to_string()))?;
        let roots = certificates(&roots)
            .ok_or_else(|| no_authority("it contains no certificate in PEM".to_owned()))?;
        let pair = Pair { chain, key };
        let expires = self.check(&pair, &roots, now)?;
        Ok(Candidate {
            pair: Arc::new(pair),
            roots,
            expires,
        })
    }

    /// Checks the certificate for all our names and for client use at `now`, and returns its expiry.
    fn check(
        &self,
        pair: &Pair,
        roots: &[CertificateDer<'static>],
        now: Timestamp,
    ) -> Result<Timestamp, FilesError> {
        let refused = |error| self.refused(error);
        let provider = provider();
        CertifiedKey::from_der(pair.chain.clone(), pair.key.clone_key(), &provider)
            .map_err(refused)?;
        let store = store(roots);
        let unusable = |error: &dyn std::error::Error| {
            FilesError::Authorities(self.paths.authorities.clone(), error.to_string())
        };
        let servers =
            WebPkiServerVerifier::builder_with_provider(Arc::clone(&store), Arc::clone(&provider));
        let servers = servers.build().map_err(|error| unusable(&error))?;
        let clients = WebPkiClientVerifier::builder_with_provider(store, provider).build();
        let clients = clients.map_err(|error| unusable(&error))?;
        let (certificate, between) = pair.chain.split_at(1);
        let verify = |name: &str, at| {
            let name = ServerName::try_from(name.to_owned())
                .map_err(|error| TlsError::General(error.to_string()))?;
            servers.verify_server_cert(&certificate[0], between, &name, &[], unix(at))
        };
        for name in &self.names {
            verify(name, now).map_err(refused)?;
        }
        if !is_signed(clients.as_ref(), &pair.chain, now) {
            return Err(FilesError::ServerAlone(self.paths.certificate.clone()));
        }
        // Verification at the end of time fails with the expiry.
        let ended = verify(&self.names[0], Timestamp::MAX).err();
        Ok(ended
            .and_then(|error| end(&error))
            .unwrap_or(Timestamp::MAX))
    }

    fn refused(&self, error: TlsError) -> FilesError {
        let TlsFiles {
            certificate,
            key,
            authorities,
        } = self.paths.clone();
        if let Some(ended) = end(&error) {
            return FilesError::Ended(certificate, ended);
        }
        match error {
            TlsError::InconsistentKeys(_) => FilesError::Key(key, certificate),
            // The second case occurs if an authority was recreated under the same name.
            TlsError::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature,
            ) => FilesError::Stranger(certificate, authorities),
            TlsError::InvalidCertificate(CertificateError::NotValidYetContext {
                not_before,
                ..
            }) => FilesError::Early(certificate, timestamp(not_before.as_secs())),
            error => FilesError::Refused(certificate, error),
        }
    }
}

/// The expiry in a verification error.
fn end(error: &TlsError) -> Option<Timestamp> {
    match error {
        TlsError::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. }) => {
            Some(timestamp(not_after.as_secs()))
        }
        _ => None,
    }
}

fn timestamp(seconds: u64) -> Timestamp {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::MAX)
}

/// All certificates of a PEM. `None`: there are none.
fn certificates(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    Some(roots::read(pem)).filter(|found| !found.is_empty())
}

fn text(path: &Path) -> Result<Vec<u8>, FilesError> {
    read(path).map_err(|error| FilesError::Read(path.to_owned(), error))
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests;
