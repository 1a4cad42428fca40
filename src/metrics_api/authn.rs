//! Who asks. An API server that passes a request on says for whom, and is believed when its certificate is of the
//! authority that the cluster names for that, and its name one of those allowed. Anybody else brings a token.

use std::collections::BTreeMap;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use kube::api::PostParams;
use kube::{Api, Client};
use rustls::pki_types::CertificateDer;
use tokio::sync::watch;

use crate::cluster::client::call;
use crate::cluster::clock;
use crate::cluster::reviews::{Bounds, Reviews};

use super::front_proxy::Trust;
use super::status::Refusal;

/// A longer token is none.
const LONGEST_TOKEN: usize = 16 << 10;

/// Who asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Their name.
    pub name: String,
    /// Their UID, where there is one.
    pub uid: Option<String>,
    /// Their groups.
    pub groups: Vec<String>,
    /// What else is said of them.
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

/// Finds out who asks.
pub struct Authenticator {
    client: Client,
    /// `None`: not known yet.
    trust: watch::Receiver<Option<Trust>>,
    /// Whose a token is; `None`: nobody's.
    tokens: Reviews<Option<User>>,
}

impl Authenticator {
    /// By what the cluster trusts, as it is at the time.
    pub fn new(client: Client, trust: watch::Receiver<Option<Trust>>) -> Self {
        Self {
            client,
            trust,
            tokens: Reviews::new(Bounds::default()),
        }
    }

    /// Whether these certificates make a front proxy.
    pub fn is_proxy(&self, certificates: &[CertificateDer<'static>]) -> bool {
        let trust = self.trust.borrow();
        let trust = trust.as_ref();
        trust.is_some_and(|trust| trust.is_proxy(certificates, clock::wall()))
    }

    /// Who sent these headers with these certificates.
    ///
    /// # Errors
    /// It is not known.
    pub async fn identify(
        &self,
        headers: &HeaderMap,
        certificates: &[CertificateDer<'static>],
    ) -> Result<User, Refusal> {
        let passed_on = {
            let trust = self.trust.borrow();
            if trust.is_none() && !certificates.is_empty() {
                return Err(Refusal::unknown("which API servers to believe"));
            }
            let is_proxy = |trust: &&Trust| trust.is_proxy(certificates, clock::wall());
            let trust = trust.as_ref().filter(is_proxy);
            trust.and_then(|trust| trust.user(headers))
        };
        match (passed_on, bearer(headers)) {
            (Some(user), _) => Ok(user),
            (None, Some(token)) => {
                let review = review(&self.client, token, None);
                let user = self.tokens.answer(token.as_bytes(), review).await?;
                user.ok_or_else(Refusal::unauthorized)
            }
            (None, None) => Err(Refusal::unauthorized()),
        }
    }
}

/// Whose token this is; `None`: nobody's, or not one for this audience. Without one it is for the API server's own.
///
/// # Errors
/// The API server does not say.
pub async fn review(
    client: &Client,
    token: &str,
    audience: Option<&str>,
) -> Result<Option<User>, Refusal> {
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
        tracing::warn!(why = error.words(), "failed to review a token");
        Refusal::unknown("whose token this is")
    })?;
    let status = answer.status.unwrap_or_default();
    let audiences = status.audiences.unwrap_or_default();
    let is_for = audience.is_none_or(|audience| audiences.iter().any(|other| other == audience));
    let is_good = status.authenticated == Some(true) && is_for;
    Ok(status.user.filter(|_| is_good).map(User::from))
}

/// The token in these headers.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    let fits =
        scheme.eq_ignore_ascii_case("bearer") && !token.is_empty() && token.len() <= LONGEST_TOKEN;
    fits.then_some(token)
}

#[cfg(test)]
mod tests {
    use kube::Config;

    use super::*;

    #[tokio::test]
    async fn nobody_is_refused_for_who_they_are_before_it_is_known_whom_to_believe() {
        let config = Config::new("http://127.0.0.1:1".parse().unwrap());
        let (trust, trusted) = watch::channel(None);
        let authenticator = Authenticator::new(Client::try_from(config).unwrap(), trusted);
        let (headers, certificate) = (HeaderMap::new(), [CertificateDer::from(vec![0; 8])]);
        let early = authenticator.identify(&headers, &certificate).await;
        assert_eq!(early.unwrap_err().code, 503);
        let stranger = authenticator.identify(&headers, &[]).await;
        assert_eq!(stranger.unwrap_err().code, 401);
        trust.send_replace(Some(Trust::default()));
        let late = authenticator.identify(&headers, &certificate).await;
        assert_eq!(late.unwrap_err().code, 401);
    }
}
