use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};

use super::*;

fn start() -> Timestamp {
    "2026-06-01T00:00:00Z".parse().unwrap()
}

/// Whether a client with this bundle accepts the server's certificate.
fn accepts(bundle: &str, certified: &Certified, now: Timestamp) -> bool {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(certificate.unwrap()).unwrap();
    }
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .unwrap();
    let name = ServerName::try_from("plimsoll-metrics.plimsoll.svc").unwrap();
    let now = UnixTime::since_unix_epoch(Duration::from_secs(now.as_second().try_into().unwrap()));
    verifier
        .verify_server_cert(&certified.pair.chain[0], &[], &name, &[], now)
        .is_ok()
}

fn names() -> [String; 1] {
    ["plimsoll-metrics.plimsoll.svc".to_owned()]
}

#[test]
fn a_client_with_a_day_old_bundle_trusts_every_certificate_for_years() {
    let mut authorities = Authorities::default();
    let mut certified: Option<Certified> = None;
    let mut bundles = Vec::new();
    let mut made = 0;
    for hour in (0..3 * AUTHORITY_HOURS).step_by(6) {
        let now = later(start(), hour);
        if let Some(renewed) = authorities.renewed(now).unwrap() {
            made += 1;
            assert!(renewed.0.len() <= 2, "expired ones are removed");
            // Round trip through the Secret.
            authorities = Authorities::read(&renewed.write().unwrap()).unwrap();
            assert_eq!(authorities, renewed);
        }
        if !certified
            .as_ref()
            .is_some_and(|certified| authorities.is_current(certified, now))
        {
            certified = Some(authorities.certify(&names(), now).unwrap());
        }
        bundles.push(authorities.bundle(now));
        let a_day_ago = &bundles[bundles.len().saturating_sub(4)];
        assert!(
            accepts(a_day_ago, certified.as_ref().unwrap(), now),
            "after {hour} h"
        );
    }
    assert_eq!(made, 5, "a new one every eight months");
}

#[test]
fn a_certificate_is_valid_only_for_its_names_and_authority() {
    let authorities = Authorities::default().renewed(start()).unwrap().unwrap();
    let others = Authorities::default().renewed(start()).unwrap().unwrap();
    let certified = authorities.certify(&names(), start()).unwrap();
    assert!(accepts(&authorities.bundle(start()), &certified, start()));
    assert!(!accepts(&others.bundle(start()), &certified, start()));
    let other = authorities
        .certify(&["other.plimsoll.svc".to_owned()], start())
        .unwrap();
    assert!(!accepts(&authorities.bundle(start()), &other, start()));
    let late = later(start(), CERTIFICATE_HOURS + 1);
    assert!(!accepts(&authorities.bundle(late), &certified, late));
    assert!(matches!(
        Authorities::default().certify(&names(), start()),
        Err(CertificateError::None)
    ));
}

#[test]
fn authorities_and_certificates_from_the_future_are_replaced() {
    let ahead = later(start(), 3);
    let made_ahead = Authorities::default().renewed(ahead).unwrap().unwrap();
    let early = made_ahead.certify(&names(), ahead).unwrap();
    assert!(made_ahead.is_current(&early, ahead));
    assert!(
        made_ahead.certify(&names(), start()).is_ok(),
        "a replica whose clock is behind still serves"
    );
    let repaired = made_ahead.renewed(start()).unwrap().expect("a new one");
    assert!(!repaired.is_current(&early, start()));
    let certified = repaired.certify(&names(), start()).unwrap();
    assert!(accepts(&repaired.bundle(start()), &certified, start()));
    assert!(repaired.is_current(&certified, start()));
    assert!(repaired.renewed(start()).unwrap().is_none());
    assert!(
        repaired.renewed(ahead).unwrap().is_none(),
        "replicas do not replace each other's authorities"
    );

    let good = Authorities::default().renewed(start()).unwrap().unwrap();
    let early = good.certify(&names(), ahead).unwrap();
    assert!(!good.is_current(&early, start()), "the certificate only");
}
