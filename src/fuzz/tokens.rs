//! Tokens, the keys that verify them, and certificates. The valid ones were signed by keys that no longer exist: no other input may be
//! accepted.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use jiff::Timestamp;
use rustls::pki_types::CertificateDer;
use serde_json::Value;

use crate::crd::report::AUDIENCE;
use crate::metrics_api::front_proxy::{Trust, common_name, last_common_name};
use crate::metrics_api::reports::token::{
    AgentToken, BadToken, Keys, MAX_TOKEN_BYTES, WrittenKeys,
};

const ISSUER: &str = "https://kubernetes.default.svc.cluster.local";
/// Signed with ES256 and RS256.
const VALID: [&str; 2] = [
    include_str!("../../fuzz/corpus/token/es256"),
    include_str!("../../fuzz/corpus/token/rs256"),
];
const WRITTEN: &str = include_str!("../../fuzz/corpus/keys/jwks.json");
/// A front proxy's, signed by the authority in `fuzz/front-proxy-ca.pem`.
const CERTIFICATE: &[u8] = include_bytes!("../../fuzz/corpus/certificate/front-proxy.der");
const AUTHORITY: &str = include_str!("../../fuzz/front-proxy-ca.pem");

static KEYS: LazyLock<Keys> = LazyLock::new(|| {
    let written = serde_json::from_str(WRITTEN).expect("keys");
    Keys::of(ISSUER.to_owned(), &written)
});

/// Trusts front proxies of any name with a certificate of the authority, and the usual headers.
pub static TRUST: LazyLock<Trust> = LazyLock::new(|| {
    let data = [
        ("requestheader-client-ca-file", AUTHORITY),
        ("requestheader-username-headers", r#"["X-Remote-User"]"#),
        ("requestheader-uid-headers", r#"["X-Remote-Uid"]"#),
        ("requestheader-group-headers", r#"["X-Remote-Group"]"#),
        (
            "requestheader-extra-headers-prefix",
            r#"["X-Remote-Extra-"]"#,
        ),
    ];
    let data = data.map(|(key, value)| (key.to_owned(), value.to_owned()));
    Trust::of(&BTreeMap::from(data)).expect("an authority")
});

/// A time at which the valid token and certificate are valid.
fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).expect("a time")
}

/// The token of a report.
pub fn token(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let Ok(token) = AgentToken::read(text) else {
        return;
    };
    assert!(text.len() <= MAX_TOKEN_BYTES);
    let checked = token.claims.check(AUDIENCE, now());
    assert!(token.claims.seconds_left(now()) == 0 || checked != Err(BadToken::Expired));
    // Some signatures have two encodings, so only the signed part is compared.
    let signed = |text: &str| text.rsplit_once('.').map(|(signed, _)| signed.to_owned());
    if KEYS.verify(&token).is_ok() {
        assert!(VALID.map(signed).contains(&signed(text)), "forged: {text}");
        assert_eq!(token.claims.node(), Some("node-a"));
    }
}

/// `/openid/v1/jwks`.
pub fn keys(bytes: &[u8]) {
    let Ok(written) = serde_json::from_slice::<WrittenKeys>(bytes) else {
        return;
    };
    let keys = Keys::of(ISSUER.to_owned(), &written);
    for (text, field) in VALID.iter().zip(["x", "n"]) {
        let token = AgentToken::read(text).expect("a token");
        if keys.verify(&token).is_ok() {
            assert!(has_key(bytes, field), "another key verifies {text}");
        }
    }
}

/// Whether the known key is among these, by its defining field.
fn has_key(bytes: &[u8], field: &str) -> bool {
    let fields = |bytes: &[u8]| -> Vec<Value> {
        let text = String::from_utf8_lossy(bytes);
        let all: Value = serde_json::from_str(&text).unwrap_or_default();
        let keys = all["keys"].as_array().cloned().unwrap_or_default();
        let fields = keys.iter().map(|key| key[field].clone());
        fields.filter(|field| !field.is_null()).collect()
    };
    let known = fields(WRITTEN.as_bytes());
    fields(bytes).iter().any(|field| known.contains(field))
}

/// A client's certificate, and the names in it.
pub fn certificate(bytes: &[u8]) {
    let certificate = CertificateDer::from(bytes);
    for name in [common_name(&certificate), last_common_name(bytes)] {
        let name = name.unwrap_or_default();
        assert!(name.is_empty() || contains(bytes, name.as_bytes()));
    }
    if TRUST.is_proxy(&[certificate.into_owned()], now()) {
        assert_eq!(bytes, CERTIFICATE, "a forged certificate is accepted");
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        assert_eq!(last_common_name(&subject(text)).as_deref(), Some(text));
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// The subject of a certificate for this name, in DER, without its outer header.
fn subject(name: &str) -> Vec<u8> {
    yasna::construct_der(|writer| {
        writer.write_set(|writer| {
            writer.next().write_sequence(|writer| {
                let kind = yasna::models::ObjectIdentifier::from_slice(&[2, 5, 4, 3]);
                writer.next().write_oid(&kind);
                writer.next().write_utf8_string(name);
            });
        });
    })
}
