//! Whether the API server has our definitions, and of this version: else it drops what we write.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use serde_json::Value;

use super::super::metrics::Metrics;
use crate::cluster::backoff::jittered;
use crate::cluster::client::{CallError, call};
use crate::crd::{KubernetesVersion, definitions, missing_fields};

/// How often is looked while all is well, and while something is missing.
const SELDOM: Duration = Duration::from_mins(1);
const OFTEN: Duration = Duration::from_secs(10);
/// At most so many fields are named.
const MOST_NAMED: usize = 5;

/// Looks for ever, and says in the probes what is missing.
pub(super) async fn check(client: Client, metrics: Arc<Metrics>) -> Infallible {
    loop {
        let mut well = true;
        for definition in definitions() {
            let kind = definition.spec.names.kind.clone();
            let lacks = look(&client, &definition).await.unwrap_or_else(|error| {
                // Nothing is known: the watches say what is wrong with the API server.
                tracing::debug!(kind, %error, "failed to read which fields are served");
                None
            });
            if let Some(lacks) = &lacks {
                tracing::error!(kind, "{lacks}");
                well = false;
            }
            metrics.defined(kind, lacks);
        }
        // An API server goes on describing a definition for a while after it was deleted: a list that fails says more.
        let calm = well && !metrics.is_waiting();
        tokio::time::sleep(jittered(if calm { SELDOM } else { OFTEN })).await;
    }
}

/// What a definition lacks, in words.
async fn look(
    client: &Client,
    definition: &CustomResourceDefinition,
) -> Result<Option<String>, CallError> {
    let spec = &definition.spec;
    let version = spec.versions.first().map_or("", |version| &version.name);
    let path = format!("/openapi/v3/apis/{}/{version}", spec.group);
    let request = Request::get(path)
        .body(Vec::new())
        .map_err(kube::Error::HttpError)?;
    let document: Value = match call(client.request(request)).await {
        Ok(document) => document,
        Err(error) if error.code() == Some(404) => Value::Null,
        Err(error) => return Err(error),
    };
    let what = match missing_fields(definition, &document) {
        None => "the definition is not installed".to_owned(),
        Some(missing) if missing.is_empty() => return Ok(None),
        Some(missing) => format!(
            "the definition is of another version of plimsoll, and lacks {}",
            list(&missing)
        ),
    };
    Ok(Some(format!(
        "{what}; run: {}",
        version_of(client).await.define()
    )))
}

/// Of the cluster; where it does not tell, the newest.
async fn version_of(client: &Client) -> KubernetesVersion {
    let version = call(client.apiserver_version()).await.ok();
    version
        .and_then(|it| KubernetesVersion::of(&it))
        .unwrap_or_default()
}

fn list(fields: &[String]) -> String {
    let named = &fields[..fields.len().min(MOST_NAMED)];
    match fields.len() - named.len() {
        0 => named.join(", "),
        more => format!("{} and {more} more", named.join(", ")),
    }
}
