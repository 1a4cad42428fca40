//! `ServiceAccount` tokens, and the published keys that verify them. Pure.
//!
//! A token is a JWT (RFC 7519, signed as in RFC 7515). The key determines the signature algorithm, never the token
//! itself.

use std::collections::HashMap;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jiff::Timestamp;
use ring::signature::{
    ECDSA_P256_SHA256_FIXED, ECDSA_P384_SHA384_FIXED, RSA_PKCS1_2048_8192_SHA256,
    RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};
use serde::Deserialize;
use thiserror::Error;

/// Tolerated clock skew in seconds, as in the API server.
const LEEWAY: i64 = 60;
/// Maximum lifetime in seconds. An agent's token is valid for an hour, and a stolen one must expire soon.
const MAX_LIFE: i64 = 2 * 60 * 60;
/// Maximum length in bytes.
pub const MAX_TOKEN_BYTES: usize = 8 << 10;

/// Why a token is not accepted.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum BadToken {
    /// It is not a JWT with the claims of a `ServiceAccount`.
    #[error("the token is not a ServiceAccount token")]
    Malformed,
    /// It is for another audience.
    #[error("the token is not for the audience {}", crate::crd::report::AUDIENCE)]
    Audience,
    /// It has expired.
    #[error("the token has expired, or the clock of the controller is ahead of the API server's")]
    Expired,
    /// It is not valid yet.
    #[error(
        "the token is not valid yet, or the clock of the controller is behind the API server's"
    )]
    NotYet,
    /// Its lifetime exceeds that of the tokens that kubelets mount for agents.
    #[error("the token is valid for longer than 2 hours")]
    LongLived,
    /// It was signed by another key, or changed.
    #[error("the token was not signed by the API server")]
    Signature,
}

/// Why a key does not verify a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unverified {
    /// The signature is wrong.
    Forged,
    /// The key is unknown or unsupported.
    UnknownKey,
}

/// Claims of a token.
#[derive(Clone, Debug, Deserialize)]
pub struct Claims {
    iss: String,
    /// The user.
    pub sub: String,
    aud: Audiences,
    iat: i64,
    exp: i64,
    nbf: Option<i64>,
    #[serde(rename = "kubernetes.io")]
    bound: Option<Bound>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Audiences {
    One(String),
    Many(Vec<String>),
}

#[derive(Clone, Debug, Deserialize)]
struct Bound {
    node: Option<Named>,
}

#[derive(Clone, Debug, Deserialize)]
struct Named {
    name: String,
}

#[derive(Deserialize)]
struct Header {
    alg: String,
    kid: Option<String>,
}

/// A parsed token.
pub struct AgentToken<'a> {
    header: Header,
    /// Claims; not verified yet.
    pub claims: Claims,
    signed: &'a str,
    signature: Vec<u8>,
}

impl<'a> AgentToken<'a> {
    /// Parses a token without verifying it.
    pub fn read(text: &'a str) -> Result<Self, BadToken> {
        let parts = text.len() <= MAX_TOKEN_BYTES;
        let (signed, signature) = parts
            .then(|| text.rsplit_once('.'))
            .flatten()
            .ok_or(BadToken::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(BadToken::Malformed)?;
        Ok(Self {
            header: json(header)?,
            claims: json(claims)?,
            signed,
            signature: decode(signature)?,
        })
    }
}

fn decode(text: &str) -> Result<Vec<u8>, BadToken> {
    URL_SAFE_NO_PAD
        .decode(text)
        .map_err(|_| BadToken::Malformed)
}

fn json<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, BadToken> {
    serde_json::from_slice(&decode(text)?).map_err(|_| BadToken::Malformed)
}

impl Claims {
    /// Checks audience, validity and lifetime.
    pub fn check(&self, audience: &str, now: Timestamp) -> Result<(), BadToken> {
        let names = match &self.aud {
            Audiences::One(name) => std::slice::from_ref(name),
            Audiences::Many(names) => names,
        };
        if !names.iter().any(|name| name == audience) {
            return Err(BadToken::Audience);
        }
        if self.exp.saturating_sub(self.iat) > MAX_LIFE {
            return Err(BadToken::LongLived);
        }
        let now = now.as_second();
        if now > self.exp.saturating_add(LEEWAY) {
            return Err(BadToken::Expired);
        }
        if self.nbf.is_some_and(|nbf| now < nbf.saturating_sub(LEEWAY)) {
            return Err(BadToken::NotYet);
        }
        Ok(())
    }

    /// The node that the token is bound to.
    pub fn node(&self) -> Option<&str> {
        let node = self.bound.as_ref()?.node.as_ref()?;
        Some(&node.name)
    }

    /// Remaining validity in seconds.
    pub fn seconds_left(&self, now: Timestamp) -> u64 {
        let left = self
            .exp
            .saturating_add(LEEWAY)
            .saturating_sub(now.as_second());
        u64::try_from(left).unwrap_or(0)
    }
}

/// A public key.
#[derive(Debug)]
enum Key {
    Rsa {
        n: Vec<u8>,
        e: Vec<u8>,
    },
    /// An uncompressed point.
    P256(Vec<u8>),
    P384(Vec<u8>),
}

impl Key {
    fn of(written: &WrittenKey) -> Option<Self> {
        let field = |field: &Option<String>| decode(field.as_deref()?).ok();
        let point = || {
            let (x, y) = (field(&written.x)?, field(&written.y)?);
            Some([vec![4], x, y].concat())
        };
        match (written.kty.as_str(), written.crv.as_deref()) {
            ("RSA", _) => Some(Self::Rsa {
                n: field(&written.n)?,
                e: field(&written.e)?,
            }),
            ("EC", Some("P-256")) => point().map(Self::P256),
            ("EC", Some("P-384")) => point().map(Self::P384),
            _ => None,
        }
    }

    const fn algorithm(&self) -> &'static str {
        match self {
            Self::Rsa { .. } => "RS256",
            Self::P256(_) => "ES256",
            Self::P384(_) => "ES384",
        }
    }

    fn has_signed(&self, text: &[u8], signature: &[u8]) -> bool {
        let by_point = |algorithm: &'static dyn VerificationAlgorithm, point: &Vec<u8>| {
            UnparsedPublicKey::new(algorithm, point).verify(text, signature)
        };
        let verified = match self {
            Self::Rsa { n, e } => {
                let key = RsaPublicKeyComponents { n, e };
                key.verify(&RSA_PKCS1_2048_8192_SHA256, text, signature)
            }
            Self::P256(point) => by_point(&ECDSA_P256_SHA256_FIXED, point),
            Self::P384(point) => by_point(&ECDSA_P384_SHA384_FIXED, point),
        };
        verified.is_ok()
    }
}

/// A key as in RFC 7517.
#[derive(Deserialize)]
struct WrittenKey {
    kty: String,
    kid: Option<String>,
    crv: Option<String>,
    n: Option<String>,
    e: Option<String>,
    x: Option<String>,
    y: Option<String>,
}

/// `/openid/v1/jwks`.
#[derive(Deserialize)]
pub struct WrittenKeys {
    keys: Vec<WrittenKey>,
}

/// The keys of one issuer.
#[derive(Debug, Default)]
pub struct Keys {
    issuer: String,
    by_id: HashMap<String, Key>,
}

impl Keys {
    /// The supported ones of these keys.
    pub fn of(issuer: String, written: &WrittenKeys) -> Self {
        let keys = written.keys.iter();
        let keys = keys.filter_map(|key| Some((key.kid.clone()?, Key::of(key)?)));
        Self {
            issuer,
            by_id: keys.collect(),
        }
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// Verifies a token's issuer and signature.
    pub fn verify(&self, token: &AgentToken<'_>) -> Result<(), Unverified> {
        let Header { alg, kid } = &token.header;
        let key = kid.as_ref().and_then(|kid| self.by_id.get(kid));
        let key = key.filter(|_| token.claims.iss == self.issuer);
        let key = key.ok_or(Unverified::UnknownKey)?;
        let signed =
            *alg == key.algorithm() && key.has_signed(token.signed.as_bytes(), &token.signature);
        signed.then_some(()).ok_or(Unverified::Forged)
    }
}

#[cfg(test)]
pub mod tests;
