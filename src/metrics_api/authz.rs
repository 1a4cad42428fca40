//! Authorization by cached `SubjectAccessReviews`.
//!
//! Requests passed on by the API server were authorized there already; this is for direct clients.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};

use crate::cluster::client::call;
use crate::cluster::reviews::{Bounds, Reviews};
use crate::crd::node_metric::{GROUP, PLURAL, VERSION};

use super::authn::User;
use super::status::ErrorResponse;

/// Its members may do everything, also while the API server can't be asked.
const MASTERS_GROUP: &str = "system:masters";

/// The access to check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access<'a> {
    /// `get`, `list` or `watch`.
    pub verb: &'static str,
    /// One object; `None`: all.
    pub name: Option<&'a str>,
}

/// Allowed, or denied with a reason.
type Answer = Result<(), Option<String>>;

/// Authorizes requests.
pub struct Authorizer {
    client: Client,
    answers: Reviews<Answer>,
}

impl Authorizer {
    /// Asks the API server behind `client`.
    pub fn new(client: Client) -> Self {
        Self {
            client,
            answers: Reviews::new(Bounds::default()),
        }
    }

    /// Checks an access.
    ///
    /// # Errors
    /// It is denied, or the API server does not answer.
    pub async fn allow(&self, user: &User, access: Access<'_>) -> Result<(), ErrorResponse> {
        if user.groups.iter().any(|group| group == MASTERS_GROUP) {
            return Ok(());
        }
        let spec = question(user, access);
        let question = serde_json::to_vec(&spec).unwrap_or_default();
        let review = review(&self.client, spec);
        let answer = self.answers.answer(&question, review).await?;
        answer.map_err(|why| {
            ErrorResponse::forbidden(&user.name, access.verb, access.name, why.as_deref())
        })
    }
}

async fn review(client: &Client, spec: SubjectAccessReviewSpec) -> Result<Answer, ErrorResponse> {
    let review = SubjectAccessReview {
        spec,
        ..SubjectAccessReview::default()
    };
    let api: Api<SubjectAccessReview> = Api::all(client.clone());
    let answer = call(api.create(&PostParams::default(), &review)).await;
    let answer = answer.map_err(|error| {
        tracing::warn!(why = error.message(), "failed to review an access");
        ErrorResponse::unknown("to review the access")
    })?;
    let status = answer.status.unwrap_or_default();
    Ok(if status.allowed {
        Ok(())
    } else {
        Err(status.reason.filter(|why| !why.is_empty()))
    })
}

fn question(user: &User, access: Access<'_>) -> SubjectAccessReviewSpec {
    SubjectAccessReviewSpec {
        user: Some(user.name.clone()),
        uid: user.uid.clone(),
        groups: Some(user.groups.clone()),
        extra: Some(user.extra.clone()).filter(|extra| !extra.is_empty()),
        resource_attributes: Some(ResourceAttributes {
            group: Some(GROUP.to_owned()),
            version: Some(VERSION.to_owned()),
            resource: Some(PLURAL.to_owned()),
            verb: Some(access.verb.to_owned()),
            name: access.name.map(str::to_owned),
            ..ResourceAttributes::default()
        }),
        ..SubjectAccessReviewSpec::default()
    }
}
