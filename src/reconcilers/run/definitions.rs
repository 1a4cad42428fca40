//! Checks that the API server has our definitions in this version; otherwise it would drop fields that we write.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Client;
use serde_json::Value;

use super::super::metrics::ControllerMetrics;
use crate::cluster::backoff::jittered;
use crate::cluster::client::{CallError, call};
use crate::crd::words::named;
use crate::crd::{KubernetesVersion, definitions, missing_fields};

/// Check interval, and the shorter one while something is missing.
const CHECK_INTERVAL: Duration = Duration::from_mins(1);
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Missing fields to name.
const MAX_NAMED: usize = 5;

/// Checks forever, and reports in the probes what is missing.
pub async fn check(client: Client, metrics: Arc<ControllerMetrics>) -> Infallible {
    loop {
        let mut complete = true;
        for definition in definitions() {
            let kind = definition.spec.names.kind.clone();
            let problem = check_one(&client, &definition)
                .await
                .unwrap_or_else(|error| {
                    // Unknown: the watches report what is wrong with the API server.
                    tracing::debug!(kind, %error, "failed to read which fields are served");
                    None
                });
            if let Some(problem) = &problem {
                tracing::error!(kind, "{problem}");
                complete = false;
            }
            metrics.definition_checked(kind, problem);
        }
        // The API server describes a deleted definition for a while; a failing list shows it sooner.
        let is_normal = complete && !metrics.is_waiting();
        let interval = if is_normal {
            CHECK_INTERVAL
        } else {
            RETRY_INTERVAL
        };
        tokio::time::sleep(jittered(interval)).await;
    }
}

/// What a definition lacks, as a message.
async fn check_one(
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
            "the definition is from another version of plimsoll and lacks {}",
            named(&missing, MAX_NAMED)
        ),
    };
    Ok(Some(format!(
        "{what}; run: {}",
        version_of(client).await.install_command()
    )))
}

/// The cluster's version; the newest if unknown.
async fn version_of(client: &Client) -> KubernetesVersion {
    let version = call(client.apiserver_version()).await.ok();
    version
        .and_then(|it| KubernetesVersion::of(&it))
        .unwrap_or_default()
}
