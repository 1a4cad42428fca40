//! A table that the API server prints, as for `kubectl get -o wide`. `NodeWatermark`s are read this way because it leaves out
//! their rules, which may take 40 kB each.

use hyper::header::{ACCEPT, HeaderValue};
use hyper::{Request, Uri};
use kube::Client;
use kube::api::ListParams;
use kube::core::request;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

const FORMAT: HeaderValue =
    HeaderValue::from_static("application/json;as=Table;v=v1;g=meta.k8s.io");

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct ServerTable {
    #[serde(default)]
    metadata: Metadata,
    #[serde(rename = "columnDefinitions", default)]
    columns: Vec<Column>,
    #[serde(default)]
    rows: Vec<Row>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Metadata {
    #[serde(rename = "continue")]
    next: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Column {
    name: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    #[serde(deserialize_with = "texts")]
    cells: Vec<String>,
}

/// Cells without a value are empty.
fn texts<'de, D: Deserializer<'de>>(cells: D) -> Result<Vec<String>, D::Error> {
    let cells = Vec::<Value>::deserialize(cells)?.into_iter();
    let text = |cell| match cell {
        Value::Null => String::new(),
        Value::String(text) => text,
        other => other.to_string(),
    };
    Ok(cells.map(text).collect())
}

impl ServerTable {
    /// Requests a page of the objects at this path.
    pub(super) fn request(
        path: &str,
        page: &ListParams,
    ) -> Result<Request<Vec<u8>>, request::Error> {
        let mut request = request::Request::new(path).list(page)?;
        let uri = format!("{}&includeObject=None", request.uri()).parse::<Uri>();
        *request.uri_mut() = uri.map_err(|error| request::Error::BuildRequest(error.into()))?;
        request.headers_mut().insert(ACCEPT, FORMAT);
        Ok(request)
    }

    /// The table of all objects at this path.
    pub(super) async fn read(client: &Client, path: String) -> kube::Result<Self> {
        let request = Self::request(&path, &ListParams::default());
        client
            .request(request.map_err(kube::Error::BuildRequest)?)
            .await
    }

    pub(super) fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|it| it.name == column)
    }

    /// The cells of these columns, row by row; empty for a column that is missing.
    pub(super) fn cells<const N: usize>(&self, columns: [&str; N]) -> Vec<[&str; N]> {
        let index = |name: &str| self.columns.iter().position(|it| it.name == name);
        let indexes = columns.map(index);
        let rows = self.rows.iter();
        rows.map(|row| indexes.map(|index| row.cell(index)))
            .collect()
    }

    /// The token with which the next page is requested.
    pub(super) fn next(&self) -> Option<&str> {
        self.metadata.next.as_deref()
    }
}

impl Row {
    fn cell(&self, index: Option<usize>) -> &str {
        let cell = index.and_then(|index| self.cells.get(index));
        cell.map_or("", String::as_str)
    }
}
