//! The certificate authorities of the release, and when there has to be a new one. Pure but for the making of keys.
//!
//! All replicas share them in a Secret, so that any replica's certificate is believed by whoever believes the newest
//! bundle. A new authority is told of for a day before anything is signed with it.

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

/// An authority lasts so long, and is followed by a new one after two thirds of it.
const AUTHORITY_HOURS: i64 = 24 * 365;
/// A certificate lasts so long, and is replaced after two thirds of it.
const CERTIFICATE_HOURS: i64 = 24 * 30;
const LASTING_HOURS: i64 = CERTIFICATE_HOURS * 2 / 3;
/// So long has a new authority to be known before it signs, and so far do clocks of machines differ at most.
const KNOWN_HOURS: i64 = 24;
const SKEW_HOURS: i64 = 1;

/// Why there is no certificate.
#[derive(Debug, Error)]
pub enum CertificateError {
    /// The key or certificate can't be made or read.
    #[error("failed to make a certificate")]
    Make(#[from] rcgen::Error),
    /// What the Secret holds is not ours.
    #[error("failed to read the certificate authorities")]
    Read(#[from] serde_json::Error),
    /// There is none that may sign.
    #[error("failed to find a certificate authority that is still valid")]
    None,
}

/// One authority.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Authority {
    /// When it was made.
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

    /// Nobody takes it yet: who made it had a clock that was ahead.
    fn is_early(&self, now: Timestamp) -> bool {
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

/// A certificate that we made.
pub struct Certified {
    /// It, with its key.
    pub pair: Arc<Pair>,
    /// The authority that signed it, in PEM.
    pub signer: String,
    /// From when on it should be replaced.
    pub replace: Timestamp,
    /// When it is good no more.
    pub ends: Timestamp,
}

impl Authorities {
    /// As the Secret has them.
    pub fn read(json: &[u8]) -> Result<Self, CertificateError> {
        Ok(serde_json::from_slice(json)?)
    }

    /// As the Secret has them.
    pub fn write(&self) -> Result<Vec<u8>, CertificateError> {
        Ok(serde_json::to_vec(self)?)
    }

    /// The same with a new one, and without those that ended, where that is due.
    pub fn renewed(&self, now: Timestamp) -> Result<Option<Self>, CertificateError> {
        let fresh = |authority: &Authority| {
            !authority.is_early(now) && now < later(authority.made, AUTHORITY_HOURS * 2 / 3)
        };
        if self.0.last().is_some_and(fresh) {
            return Ok(None);
        }
        let valid = self.0.iter().filter(|authority| authority.is_valid(now));
        let mut all: Vec<Authority> = valid.cloned().collect();
        all.push(Authority::make(now)?);
        Ok(Some(Self(all)))
    }

    /// The certificates of all, in PEM.
    pub fn bundle(&self, now: Timestamp) -> String {
        let valid = self.0.iter().filter(|authority| authority.is_valid(now));
        valid
            .map(|authority| authority.certificate.as_str())
            .collect()
    }

    /// The newest that everybody knows; the newest of all where none is known for long enough, also an early one where there
    /// is no other: it may be this clock that is wrong.
    fn signer(&self, now: Timestamp) -> Option<&Authority> {
        let newest_first = self.0.iter().rev();
        let mut valid = newest_first.filter(|authority| authority.is_valid(now));
        let any = valid.clone().next();
        let newest = valid.clone().find(|authority| !authority.is_early(now));
        valid
            .find(|authority| now >= later(authority.made, KNOWN_HOURS))
            .or(newest)
            .or(any)
    }

    /// Whether a certificate is signed as a new one would be.
    pub fn is_current(&self, certified: &Certified, now: Timestamp) -> bool {
        let signer = self.signer(now).map(|signer| &signer.certificate);
        let begins = later(certified.replace, -LASTING_HOURS - SKEW_HOURS);
        signer == Some(&certified.signer) && (begins..certified.replace).contains(&now)
    }

    /// A new certificate for a server of these names, and for a client.
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
            replace: later(now, LASTING_HOURS),
            ends: later(now, CERTIFICATE_HOURS),
        })
    }
}

/// The name that replicas know each other by.
pub const REPLICA: &str = "plimsoll-controller";

#[cfg(test)]
mod tests;
