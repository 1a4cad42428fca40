//! The certificate authorities of the release, and their rotation. Pure, except for key generation.
//!
//! All replicas share them in a Secret, so that a client with the newest bundle trusts every replica. A new authority
//! is published for a day before it signs anything.

use std::sync::Arc;

use jiff::{Span, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::PrivatePkcs8KeyDer;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::certificates::Pair;

/// Lifetime of an authority. It is replaced after two thirds of that.
const AUTHORITY_HOURS: i64 = 24 * 365;
/// Lifetime of a certificate. It is replaced after two thirds of that.
const CERTIFICATE_HOURS: i64 = 24 * 30;
const RENEW_AFTER_HOURS: i64 = CERTIFICATE_HOURS * 2 / 3;
/// How long a new authority is published before it signs, and the tolerated clock skew.
const PUBLISH_HOURS: i64 = 24;
const SKEW_HOURS: i64 = 1;

/// Why there is no certificate.
#[derive(Debug, Error)]
pub enum CertificateError {
    /// The key or certificate can't be made or read.
    #[error("failed to make a certificate")]
    Make(#[from] rcgen::Error),
    /// The Secret has unexpected content.
    #[error("failed to read the certificate authorities")]
    Read(#[from] serde_json::Error),
    /// No authority is valid.
    #[error("failed to find a certificate authority that is still valid")]
    None,
}

/// One authority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Authority {
    /// Time of creation.
    made: Timestamp,
    /// In PEM.
    certificate: String,
    /// In PEM.
    key: String,
}

impl Authority {
    fn make(now: Timestamp) -> Result<Self, CertificateError> {
        let key = KeyPair::generate()?;
        let certificate = authority(now).self_signed(&key)?;
        Ok(Self {
            made: now,
            certificate: certificate.pem(),
            key: key.serialize_pem(),
        })
    }

    fn is_valid(&self, now: Timestamp) -> bool {
        now < later(self.made, AUTHORITY_HOURS)
    }

    /// It was created by a machine whose clock is ahead: clients don't accept it yet.
    fn is_from_future(&self, now: Timestamp) -> bool {
        now < later(self.made, -SKEW_HOURS)
    }
}

fn authority(made: Timestamp) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = name(&format!("plimsoll-metrics-{}", made.as_second()));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![
        KeyUsagePurpose::KeyCertSign,
        KeyUsagePurpose::DigitalSignature,
    ];
    valid(&mut params, made, AUTHORITY_HOURS);
    params
}

fn name(common: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common);
    name
}

fn valid(params: &mut CertificateParams, from: Timestamp, hours: i64) {
    let time = |timestamp: Timestamp| {
        let since = time::Duration::seconds(timestamp.as_second());
        time::OffsetDateTime::UNIX_EPOCH + since
    };
    params.not_before = time(later(from, -SKEW_HOURS));
    params.not_after = time(later(from, hours));
}

fn later(timestamp: Timestamp, hours: i64) -> Timestamp {
    timestamp
        .checked_add(Span::new().hours(hours))
        .unwrap_or(timestamp)
}

/// All authorities, oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Authorities(Vec<Authority>);

/// A certificate that we issued.
pub struct Certified {
    /// The certificate with its key.
    pub pair: Arc<Pair>,
    /// The authority that signed it, in PEM.
    pub signer: String,
    /// When it should be replaced.
    pub renew_at: Timestamp,
    /// When it expires.
    pub expires: Timestamp,
}

impl Authorities {
    /// Parses the content of the Secret.
    pub fn read(json: &[u8]) -> Result<Self, CertificateError> {
        Ok(serde_json::from_slice(json)?)
    }

    /// The content of the Secret.
    pub fn write(&self) -> Result<Vec<u8>, CertificateError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// If a new authority is due: all valid ones and a new one.
    pub fn renewed(&self, now: Timestamp) -> Result<Option<Self>, CertificateError> {
        let fresh = |authority: &Authority| {
            !authority.is_from_future(now) && now < later(authority.made, AUTHORITY_HOURS * 2 / 3)
        };
        if self.0.last().is_some_and(fresh) {
            return Ok(None);
        }
        let valid = self.0.iter().filter(|authority| authority.is_valid(now));
        let mut all: Vec<Authority> = valid.cloned().collect();
        all.push(Authority::make(now)?);
        Ok(Some(Self(all)))
    }

    /// The valid certificates in PEM.
    pub fn bundle(&self, now: Timestamp) -> String {
        let valid = self.0.iter().filter(|authority| authority.is_valid(now));
        valid
            .map(|authority| authority.certificate.as_str())
            .collect()
    }

    /// The newest authority that was published for long enough. Otherwise the newest one; one from the future only if
    /// there is no other, because this machine's clock may be the wrong one.
    fn signer(&self, now: Timestamp) -> Option<&Authority> {
        let newest_first = self.0.iter().rev();
        let mut valid = newest_first.filter(|authority| authority.is_valid(now));
        let any = valid.clone().next();
        let newest = valid
            .clone()
            .find(|authority| !authority.is_from_future(now));
        valid
            .find(|authority| now >= later(authority.made, PUBLISH_HOURS))
            .or(newest)
            .or(any)
    }

    /// Whether a certificate needs no replacement.
    pub fn is_current(&self, certified: &Certified, now: Timestamp) -> bool {
        let signer = self.signer(now).map(|signer| &signer.certificate);
        let valid_from = later(certified.renew_at, -RENEW_AFTER_HOURS - SKEW_HOURS);
        signer == Some(&certified.signer) && (valid_from..certified.renew_at).contains(&now)
    }

    /// Issues a certificate for servers of these names and for clients.
    pub fn certify(&self, names: &[String], now: Timestamp) -> Result<Certified, CertificateError> {
        let signer = self.signer(now).ok_or(CertificateError::None)?;
        let issuer = Issuer::new(authority(signer.made), KeyPair::from_pem(&signer.key)?);
        let mut params = CertificateParams::new(names)?;
        params.distinguished_name = name(REPLICA);
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.use_authority_key_identifier_extension = true;
        valid(&mut params, now, CERTIFICATE_HOURS);
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &issuer)?;
        Ok(Certified {
            pair: Arc::new(Pair {
                chain: vec![certificate.der().clone()],
                key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
            }),
            signer: signer.certificate.clone(),
            renew_at: later(now, RENEW_AFTER_HOURS),
            expires: later(now, CERTIFICATE_HOURS),
        })
    }
}

/// Common name of the replicas' certificates.
pub const REPLICA: &str = "plimsoll-controller";

#[cfg(test)]
mod tests;
