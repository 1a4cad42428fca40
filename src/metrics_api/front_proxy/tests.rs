use hyper::HeaderMap;
use hyper::header::{HeaderName, HeaderValue};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::json;

use super::*;

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::CommonName, "front-proxy-ca");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let pem = params.self_signed(&key).unwrap().pem();
        Self {
            pem,
            issuer: Issuer::new(params, key),
        }
    }

    fn issue(&self, name: &str) -> Vec<CertificateDer<'static>> {
        let mut params = CertificateParams::default();
        params
            .distinguished_name
            .push(DnType::OrganizationName, "o".repeat(60));
        params.distinguished_name.push(DnType::CommonName, name);
        // Valid until 2030; the tests set the time themselves.
        params.not_after = rcgen::date_time_ymd(2030, 1, 1);
        params.not_before = rcgen::date_time_ymd(2020, 1, 1);
        let key = KeyPair::generate().unwrap();
        vec![params.signed_by(&key, &self.issuer).unwrap().der().clone()]
    }
}

fn trust(authorities: &[&Authority], allowed: &[&str]) -> Trust {
    let pem: String = authorities
        .iter()
        .map(|authority| authority.pem.as_str())
        .collect();
    Trust::of(&BTreeMap::from([
        ("requestheader-client-ca-file".to_owned(), pem),
        (
            "requestheader-allowed-names".to_owned(),
            json!(allowed).to_string(),
        ),
        (
            "requestheader-username-headers".to_owned(),
            r#"["X-Remote-User"]"#.to_owned(),
        ),
        (
            "requestheader-uid-headers".to_owned(),
            r#"["X-Remote-Uid"]"#.to_owned(),
        ),
        (
            "requestheader-group-headers".to_owned(),
            r#"["X-Remote-Group"]"#.to_owned(),
        ),
        (
            "requestheader-extra-headers-prefix".to_owned(),
            r#"["X-Remote-Extra-"]"#.to_owned(),
        ),
    ]))
    .unwrap()
}

fn today() -> Timestamp {
    "2026-06-01T00:00:00Z".parse().unwrap()
}

#[test]
fn a_front_proxy_needs_a_certificate_of_the_ca_and_an_allowed_name() {
    let (ours, other) = (Authority::new(), Authority::new());
    let named = trust(&[&ours], &["proxy"]);
    assert!(named.is_proxy(&ours.issue("proxy"), today()));
    assert!(!named.is_proxy(&ours.issue("somebody"), today()));
    assert!(!named.is_proxy(&ours.issue("proxy2"), today()));
    assert!(!named.is_proxy(&other.issue("proxy"), today()));
    assert!(!named.is_proxy(&[], today()));
    let late = "2031-01-01T00:00:00Z".parse().unwrap();
    assert!(!named.is_proxy(&ours.issue("proxy"), late));
}

#[test]
fn a_certificate_is_needed_even_if_every_name_is_allowed() {
    let (ours, other) = (Authority::new(), Authority::new());
    let any = trust(&[&ours], &[]);
    assert!(any.is_proxy(&ours.issue("anybody"), today()));
    assert!(!any.is_proxy(&other.issue("anybody"), today()));
    assert!(!any.is_proxy(&[], today()));
    assert!(!Trust::default().is_proxy(&ours.issue("anybody"), today()));
}

#[test]
fn both_cas_are_trusted_during_a_rotation() {
    let (old, new) = (Authority::new(), Authority::new());
    let both = trust(&[&old, &new], &["proxy"]);
    assert!(both.is_proxy(&old.issue("proxy"), today()));
    assert!(both.is_proxy(&new.issue("proxy"), today()));
    let after = trust(&[&new], &["proxy"]);
    assert!(!after.is_proxy(&old.issue("proxy"), today()));
}

#[test]
fn the_user_is_read_from_the_headers() {
    let trust = trust(&[&Authority::new()], &[]);
    let mut headers = HeaderMap::new();
    assert_eq!(trust.user(&headers), None);
    for (name, value) in [
        ("x-remote-user", "ann"),
        ("x-remote-uid", "u1"),
        ("x-remote-group", "a"),
        ("x-remote-group", "größe"),
        ("x-remote-extra-scopes", "s1"),
        ("x-remote-extra-scopes", "s2"),
        ("x-remote-extra-example.com%2fteam", "t"),
        ("x-other", "o"),
    ] {
        headers.append(
            HeaderName::from_static(name),
            HeaderValue::from_bytes(value.as_bytes()).unwrap(),
        );
    }
    let user = trust.user(&headers).unwrap();
    assert_eq!(
        (user.name.as_str(), user.uid.as_deref()),
        ("ann", Some("u1"))
    );
    assert_eq!(user.groups, ["a", "größe"]);
    let extra = |key: &str, values: &[&str]| {
        (
            key.to_owned(),
            values.iter().map(|v| (*v).to_owned()).collect(),
        )
    };
    let wanted = BTreeMap::from([
        extra("scopes", &["s1", "s2"]),
        extra("example.com/team", &["t"]),
    ]);
    assert_eq!(user.extra, wanted);
}

#[test]
fn an_invalid_configuration_is_an_error_that_says_what_to_do() {
    let error = Trust::of(&BTreeMap::new()).unwrap_err().to_string();
    assert!(error.contains("--requestheader-client-ca-file"), "{error}");
    let garbage = BTreeMap::from([(
        "requestheader-client-ca-file".to_owned(),
        "garbage".to_owned(),
    )]);
    assert!(matches!(Trust::of(&garbage), Err(TrustError::Authority(_))));
    let pem = Authority::new().pem;
    let names = BTreeMap::from([
        ("requestheader-client-ca-file".to_owned(), pem),
        ("requestheader-allowed-names".to_owned(), "proxy".to_owned()),
    ]);
    assert!(matches!(
        Trust::of(&names),
        Err(TrustError::List("requestheader-allowed-names", _))
    ));
}
