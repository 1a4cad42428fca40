use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _};
use serde_json::{Value, json};

use super::*;
use crate::crd::report::AUDIENCE;

const ISSUER: &str = "https://kubernetes.default.svc";

/// Signs like an API server.
struct Signer {
    pair: EcdsaKeyPair,
    random: SystemRandom,
}

impl Signer {
    fn new() -> Self {
        let random = SystemRandom::new();
        let algorithm = &ECDSA_P256_SHA256_FIXED_SIGNING;
        let key = EcdsaKeyPair::generate_pkcs8(algorithm, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(algorithm, key.as_ref(), &random).unwrap();
        Self { pair, random }
    }

    fn keys(&self) -> Keys {
        let point = self.pair.public_key().as_ref();
        let written = json!({"keys": [
            {"use": "sig", "kty": "EC", "kid": "k", "crv": "P-256", "alg": "ES256",
             "x": URL_SAFE_NO_PAD.encode(&point[1..33]), "y": URL_SAFE_NO_PAD.encode(&point[33..])},
            {"kty": "EC", "kid": "other", "crv": "P-521", "x": "AA", "y": "AA"},
            {"kty": "oct", "kid": "secret", "k": "AA"},
        ]});
        Keys::of(ISSUER.to_owned(), &serde_json::from_value(written).unwrap())
    }

    fn sign(&self, header: &Value, claims: &Value) -> String {
        let part = |value: &Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let signed = format!("{}.{}", part(header), part(claims));
        let signature = self.pair.sign(&self.random, signed.as_bytes()).unwrap();
        format!("{signed}.{}", URL_SAFE_NO_PAD.encode(signature))
    }
}

fn header() -> Value {
    json!({"alg": "ES256", "kid": "k"})
}

fn claims() -> Value {
    json!({
        "iss": ISSUER,
        "sub": "system:serviceaccount:plimsoll:plimsoll-agent",
        "aud": [AUDIENCE],
        "iat": 1000, "nbf": 1000, "exp": 4600,
        "kubernetes.io": {"namespace": "plimsoll", "node": {"name": "node-a", "uid": "u"}},
    })
}

/// A token issued just now, signed by an unknown key.
pub fn a_token() -> String {
    let mut claims = claims();
    let now = crate::clock::wall_time().as_second();
    (claims["iat"], claims["nbf"], claims["exp"]) = (json!(now), json!(now), json!(now + 3600));
    Signer::new().sign(&header(), &claims)
}

fn claims_of(claims: &Value) -> Claims {
    serde_json::from_value(claims.clone()).unwrap()
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn checked(claims: &Value, now: i64) -> Result<(), BadToken> {
    claims_of(claims).check(AUDIENCE, at(now))
}

#[test]
fn a_token_of_the_api_server_names_the_node_of_its_pod() {
    let signer = Signer::new();
    let text = signer.sign(&header(), &claims());
    let token = AgentToken::read(&text).unwrap();
    assert_eq!(signer.keys().verify(&token), Ok(()));
    assert_eq!(token.claims.node(), Some("node-a"));
    assert_eq!(
        token.claims.sub,
        "system:serviceaccount:plimsoll:plimsoll-agent"
    );
    let now = at(4000);
    assert_eq!(token.claims.check(AUDIENCE, now), Ok(()));
    assert_eq!(token.claims.seconds_left(now), 660);
}

#[test]
fn a_changed_or_foreign_token_is_forged() {
    let signer = Signer::new();
    let verify = |text: &str| signer.keys().verify(&AgentToken::read(text).unwrap());
    let other = Signer::new().sign(&header(), &claims());
    assert_eq!(verify(&other), Err(Unverified::Forged));
    let mut more = claims();
    more["kubernetes.io"]["node"]["name"] = json!("node-b");
    let text = signer.sign(&header(), &claims());
    let (start, signature) = text.rsplit_once('.').unwrap();
    let (header, _) = start.split_once('.').unwrap();
    let payload = URL_SAFE_NO_PAD.encode(more.to_string());
    assert_eq!(
        verify(&format!("{header}.{payload}.{signature}")),
        Err(Unverified::Forged)
    );
    assert_eq!(verify(&format!("{start}.")), Err(Unverified::Forged));
}

#[test]
fn a_token_cannot_choose_its_algorithm() {
    let signer = Signer::new();
    for algorithm in ["none", "HS256", "RS256", "ES384"] {
        let text = signer.sign(&json!({"alg": algorithm, "kid": "k"}), &claims());
        let verified = signer.keys().verify(&AgentToken::read(&text).unwrap());
        assert_eq!(verified, Err(Unverified::Forged), "{algorithm}");
    }
}

#[test]
fn tokens_with_unknown_keys_need_a_review() {
    let signer = Signer::new();
    let verify = |header: &Value, claims: &Value| {
        let text = signer.sign(header, claims);
        signer.keys().verify(&AgentToken::read(&text).unwrap())
    };
    for kid in ["other", "secret", "new"] {
        let verified = verify(&json!({"alg": "ES256", "kid": kid}), &claims());
        assert_eq!(verified, Err(Unverified::UnknownKey), "{kid}");
    }
    assert_eq!(
        verify(&json!({"alg": "ES256"}), &claims()),
        Err(Unverified::UnknownKey)
    );
    let mut elsewhere = claims();
    elsewhere["iss"] = json!("https://elsewhere");
    assert_eq!(verify(&header(), &elsewhere), Err(Unverified::UnknownKey));
}

/// The example of RFC 7515, A.2: RSA with SHA-256.
#[test]
fn a_signature_by_rsa_is_verified() {
    let written = json!({"kty": "RSA", "kid": "k", "e": "AQAB", "n":
        "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ"});
    let key = Key::of(&serde_json::from_value(written).unwrap()).unwrap();
    let signed = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ";
    let signature = decode("cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw").unwrap();
    assert!(key.has_signed(signed.as_bytes(), &signature));
    assert!(!key.has_signed(&signed.as_bytes()[1..], &signature));
}

#[test]
fn a_token_for_another_audience_or_time_is_refused() {
    assert_eq!(checked(&claims(), 1000), Ok(()));
    assert_eq!(
        checked(&claims(), 4660),
        Ok(()),
        "within the tolerated skew"
    );
    assert_eq!(checked(&claims(), 4661), Err(BadToken::Expired));
    assert_eq!(checked(&claims(), 939), Err(BadToken::NotYet));
    let mut one = claims();
    one["aud"] = json!(AUDIENCE);
    assert_eq!(checked(&one, 2000), Ok(()));
    one["aud"] = json!(["https://kubernetes.default.svc"]);
    assert_eq!(checked(&one, 2000), Err(BadToken::Audience));
    one["aud"] = json!([]);
    assert_eq!(checked(&one, 2000), Err(BadToken::Audience));
}

#[test]
fn a_token_valid_for_more_than_two_hours_is_refused() {
    let lasting = |seconds: i64| {
        let mut claims = claims();
        claims["exp"] = json!(1000_i64.saturating_add(seconds));
        checked(&claims, 2000)
    };
    assert_eq!(lasting(7200), Ok(()));
    for seconds in [7201, 365 * 86_400, i64::MAX] {
        assert_eq!(lasting(seconds), Err(BadToken::LongLived), "{seconds} s");
    }
    let mut unlimited = claims();
    unlimited["iat"] = json!(i64::MIN);
    assert_eq!(checked(&unlimited, 2000), Err(BadToken::LongLived));
    unlimited.as_object_mut().unwrap().remove("iat");
    assert!(serde_json::from_value::<Claims>(unlimited).is_err());
}

#[test]
fn malformed_tokens_are_refused_without_a_panic() {
    let long = format!("{0}.{0}.{0}", "A".repeat(MAX_TOKEN_BYTES));
    let no_claims = format!("{0}.{0}.", URL_SAFE_NO_PAD.encode("{}"));
    for text in [
        "", ".", "..", "a.b.c", "admin", "....", "é.é.é", &long, &no_claims,
    ] {
        assert!(
            matches!(AgentToken::read(text), Err(BadToken::Malformed)),
            "{text:.20}"
        );
    }
}
