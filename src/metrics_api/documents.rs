//! Static documents: discovery and `OpenAPI`, encoded once.
//!
//! They need no authentication: they are public in the source code anyway, and a namespace of the cluster can't be
//! deleted while an API group can't be discovered.

use hyper::body::Bytes;
use ring::digest::{SHA512, digest};
use serde_json::{Value, json};

use crate::crd::node_metric::{API_VERSION, GROUP};

use super::status::ErrorResponse;
use super::{discovery, negotiate, openapi};

const JSON: &str = "application/json";

/// A static document.
#[derive(Clone, Debug)]
pub struct StaticDocument {
    /// Content.
    pub body: Bytes,
    /// Media type.
    pub media: &'static str,
    /// `ETag` of the content.
    pub etag: String,
}

impl StaticDocument {
    fn new(value: &Value, media: &'static str) -> Self {
        let body = value.to_string();
        let digest = digest(&SHA512, body.as_bytes());
        Self {
            body: body.into(),
            media,
            etag: format!("\"{}\"", hex(digest.as_ref())),
        }
    }
}

/// Bytes in hexadecimal.
fn hex(bytes: &[u8]) -> String {
    let digit = |nibble: u8| char::from_digit(nibble.into(), 16).unwrap_or('0');
    let digits = bytes
        .iter()
        .flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
    digits.collect()
}

/// All documents by path.
pub struct Documents {
    plain: Vec<(String, StaticDocument)>,
    aggregated: StaticDocument,
}

impl Default for Documents {
    fn default() -> Self {
        let v3 = StaticDocument::new(&openapi::v3(), JSON);
        let index = openapi::v3_index(v3.etag.trim_matches('"'));
        let version = json!({
            "major": env!("CARGO_PKG_VERSION_MAJOR"),
            "minor": env!("CARGO_PKG_VERSION_MINOR"),
            "gitVersion": concat!("v", env!("CARGO_PKG_VERSION")),
        });
        let plain = |path: &str, value: &Value| (path.to_owned(), StaticDocument::new(value, JSON));
        Self {
            plain: vec![
                plain("/apis", &discovery::groups()),
                plain(&format!("/apis/{GROUP}"), &discovery::group()),
                plain(&format!("/apis/{API_VERSION}"), &discovery::resources()),
                plain("/openapi/v2", &openapi::v2()),
                plain("/openapi/v3", &index),
                (format!("/openapi/v3/{}", openapi::V3_PATH), v3),
                plain("/version", &version),
            ],
            aggregated: StaticDocument::new(&discovery::aggregated(), discovery::AGGREGATED),
        }
    }
}

impl Documents {
    /// The document at a path. `None`: there is none.
    ///
    /// # Errors
    /// The client does not accept its media type.
    pub fn at(&self, path: &str, accept: &str) -> Option<Result<&StaticDocument, ErrorResponse>> {
        let path = path.strip_suffix('/').unwrap_or(path);
        let (_, document) = self.plain.iter().find(|(known, _)| known == path)?;
        Some(if path == "/apis" && negotiate::aggregated(accept) {
            Ok(&self.aggregated)
        } else if negotiate::accepts_json(accept) {
            Ok(document)
        } else {
            Err(ErrorResponse::not_acceptable())
        })
    }
}
