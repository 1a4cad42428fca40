//! Authentication. The API server passes requests on with the user in headers, which are trusted only with a client
//! certificate from the cluster's front-proxy CA and an allowed common name. Other clients need a bearer token.

use std::collections::BTreeMap;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use crate::clock;
use crate::cluster::client::call;
use crate::cluster::reviews::{Bounds, Reviews};

use super::front_proxy::Trust;
use super::status::ErrorResponse;

/// Longer tokens are ignored.
const MAX_TOKEN_BYTES: usize = 16 << 10;

/// An authenticated user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// User name.
    pub name: String,
    /// UID, if any.
    pub uid: Option<String>,
    /// Groups.
    pub groups: Vec<String>,
    /// Extra fields.
    pub extra: BTreeMap<String, Vec<String>>,
}

impl From<UserInfo> for User {
    fn from(info: UserInfo) -> Self {
        Self {
            name: info.username.unwrap_or_default(),
            uid: info.uid,
            groups: info.groups.unwrap_or_default(),
            extra: info.extra.unwrap_or_default(),
        }
    }
}

/// Authenticates requests.
pub struct Authenticator {
    client: Client,
    /// `None`: not loaded yet.
    trust: watch::Receiver<Option<Trust>>,
    /// Results of token reviews. `None`: not a valid token.
    tokens: Reviews<Option<User>>,
}

impl Authenticator {
    /// Uses the current front-proxy configuration of the cluster.
    pub fn new(client: Client, trust: watch::Receiver<Option<Trust>>) -> Self {
        Self {
            client,
            trust,
            tokens: Reviews::new(Bounds::default()),
        }
    }

    /// Whether these certificates belong to a front proxy.
    pub fn is_proxy(&self, certificates: &[CertificateDer<'static>]) -> bool {
        let trust = self.trust.borrow();
        let trust = trust.as_ref();
        trust.is_some_and(|trust| trust.is_proxy(certificates, clock::wall_time()))
    }

    /// The user of a request with these headers and client certificates.
    ///
    /// # Errors
    /// The user can't be authenticated.
    pub async fn identify(
        &self,
        headers: &HeaderMap,
        certificates: &[CertificateDer<'static>],
    ) -> Result<User, ErrorResponse> {
        let forwarded_user = {
            let trust = self.trust.borrow();
            if trust.is_none() && !certificates.is_empty() {
                return Err(ErrorResponse::unknown("which front proxies to trust"));
            }
            let is_proxy = |trust: &&Trust| trust.is_proxy(certificates, clock::wall_time());
            let trust = trust.as_ref().filter(is_proxy);
            trust.and_then(|trust| trust.user(headers))
        };
        match (forwarded_user, bearer(headers)) {
            (Some(user), _) => Ok(user),
            (None, Some(token)) => {
                let review = review(&self.client, token, None);
                let user = self.tokens.answer(token.as_bytes(), review).await?;
                user.ok_or_else(ErrorResponse::unauthorized)
            }
            (None, None) => Err(ErrorResponse::unauthorized()),
        }
    }
}

/// Reviews a token. `None`: invalid, or for another audience. `audience` defaults to that of the API server.
///
/// # Errors
/// The API server does not answer.
pub async fn review(
    client: &Client,
    token: &str,
    audience: Option<&str>,
) -> Result<Option<User>, ErrorResponse> {
    let review = TokenReview {
        spec: TokenReviewSpec {
            token: Some(token.to_owned()),
            audiences: audience.map(|audience| vec![audience.to_owned()]),
        },
        ..TokenReview::default()
    };
    let api: Api<TokenReview> = Api::all(client.clone());
    let answer = call(api.create(&PostParams::default(), &review)).await;
    let answer = answer.map_err(|error| {
        tracing::warn!(why = error.message(), "failed to review a token");
        ErrorResponse::unknown("to review the token")
    })?;
    let status = answer.status.unwrap_or_default();
    let audiences = status.audiences.unwrap_or_default();
    let is_for = audience.is_none_or(|audience| audiences.iter().any(|other| other == audience));
    let is_good = status.authenticated == Some(true) && is_for;
    Ok(status.user.filter(|_| is_good).map(User::from))
}

/// The bearer token of a request.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    let fits = scheme.eq_ignore_ascii_case("bearer")
        && !token.is_empty()
        && token.len() <= MAX_TOKEN_BYTES;
    fits.then_some(token)
}

#[cfg(test)]
mod tests {
    use kube::Config;

    use super::*;

    #[tokio::test]
    async fn a_certificate_is_answered_503_until_the_front_proxy_ca_is_loaded() {
        let config = Config::new("http://127.0.0.1:1".parse().unwrap());
        let (trust, trusted) = watch::channel(None);
        let authenticator = Authenticator::new(Client::try_from(config).unwrap(), trusted);
        let (headers, certificate) = (HeaderMap::new(), [CertificateDer::from(vec![0; 8])]);
        let early = authenticator.identify(&headers, &certificate).await;
        assert_eq!(early.unwrap_err().code, 503);
        let anonymous = authenticator.identify(&headers, &[]).await;
        assert_eq!(anonymous.unwrap_err().code, 401);
        trust.send_replace(Some(Trust::default()));
        let late = authenticator.identify(&headers, &certificate).await;
        assert_eq!(late.unwrap_err().code, 401);
    }
}
