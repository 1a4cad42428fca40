//! A certificate that the replica issues itself, from authorities that all replicas share in a Secret.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;

use crate::cluster::client::{CallError, call, stored};

use super::super::authorities::{Authorities, Certified, REPLICA};
use super::{BUNDLE, Certificate, ManageError, roots};

const FIELD: &str = "authorities.json";

/// Issues and renews the certificate.
pub struct SelfIssued {
    client: Client,
    namespace: String,
    secret: String,
    names: Vec<String>,
    mine: Option<Certified>,
}

impl SelfIssued {
    /// For a certificate with these names.
    pub fn new(client: Client, namespace: String, secret: String, names: Vec<String>) -> Self {
        Self {
            client,
            namespace,
            secret,
            names,
            mine: None,
        }
    }

    /// The certificate at `now`.
    ///
    /// # Errors
    /// The Secret can't be read or written, or the certificate can't be issued.
    pub async fn refresh(
        &mut self,
        leads: bool,
        now: Timestamp,
    ) -> Result<Certificate, ManageError> {
        let authorities = self.authorities(leads, now).await?;
        let is_current = |mine: &Certified| authorities.is_current(mine, now);
        let mine = match self.mine.take().filter(is_current) {
            Some(mine) => mine,
            None => authorities.certify(&self.names, now)?,
        };
        let mine = self.mine.insert(mine);
        Ok(Certificate {
            pair: Arc::clone(&mine.pair),
            roots: roots::read(authorities.bundle(now).as_bytes()),
            expires: mine.expires,
        })
    }

    /// The authorities in the Secret. The first replica creates them; later ones are created by the leader.
    async fn authorities(&self, leads: bool, now: Timestamp) -> Result<Authorities, ManageError> {
        let name = &self.secret;
        let failed = |error| ManageError::Secret(name.clone(), error);
        let api: Api<Secret> = Api::namespaced(self.client.clone(), &self.namespace);
        let secret = match call(api.get_opt(name)).await.map_err(failed)? {
            Some(secret) => secret,
            None => self.make_secret(&api).await.map_err(failed)?,
        };
        let data = secret.data.as_ref();
        let known = data
            .and_then(|data| data.get(FIELD))
            .map(|field| Authorities::read(&field.0));
        let known = known.transpose()?;
        let (authorities, renewed) = match known {
            Some(known) if !leads => (known, None),
            Some(known) => {
                let renewed = known.renewed(now)?;
                (known, renewed)
            }
            None => (Authorities::default(), Authorities::default().renewed(now)?),
        };
        let Some(renewed) = renewed else {
            return Ok(authorities);
        };
        let data = BTreeMap::from([
            (FIELD.to_owned(), ByteString(renewed.write()?)),
            (
                BUNDLE.to_owned(),
                ByteString(renewed.bundle(now).into_bytes()),
            ),
        ]);
        // Conditional on the version read: of two concurrent writers one fails, and retries.
        let secret = Secret {
            data: Some(data),
            ..secret
        };
        call(stored(api.replace(name, &PostParams::default(), &secret)))
            .await
            .map_err(failed)?;
        tracing::info!(secret = name, "made a certificate authority");
        Ok(renewed)
    }

    /// Creates an empty Secret, or reads one that another replica created meanwhile. Uses server-side apply, because a
    /// role can grant that for a single name, but create only for all names.
    async fn make_secret(&self, api: &Api<Secret>) -> Result<Secret, CallError> {
        let name = &self.secret;
        let empty = Patch::Apply(json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
        }));
        let params = PatchParams::apply(REPLICA);
        call(api.patch(name, &params, &empty)).await
    }
}
