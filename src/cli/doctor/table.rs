//! A table of an API server, as `kubectl get -o wide` prints it. `NodeWatermark`s are read this way because it leaves out
//! their rules, which may take 40 kB each.

use kube::Client;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

const FORMAT: &str = "application/json;as=Table;v=v1;g=meta.k8s.io";

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct Table {
    #[serde(rename = "columnDefinitions", default)]
    columns: Vec<Column>,
    #[serde(default)]
    rows: Vec<Row>,
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

/// Cells that are not text are empty.
fn texts<'de, D: Deserializer<'de>>(cells: D) -> Result<Vec<String>, D::Error> {
    let cells = Vec::<Value>::deserialize(cells)?.into_iter();
    let text = |cell: Value| cell.as_str().unwrap_or_default().to_owned();
    Ok(cells.map(text).collect())
}

impl Table {
    /// The table of all objects at this path.
    pub(super) async fn read(client: &Client, path: String) -> kube::Result<Self> {
        let request = hyper::Request::get(path + "?includeObject=None");
        let request = request.header("accept", FORMAT).body(Vec::new());
        let request = request.map_err(kube::Error::HttpError)?;
        client.request(request).await
    }

    pub(super) fn has(&self, column: &str) -> bool {
        self.columns.iter().any(|it| it.name == column)
    }

    /// The cells of these columns, row by row.
    pub(super) fn cells<const N: usize>(&self, columns: [&str; N]) -> Vec<[&str; N]> {
        let index = |name: &str| self.columns.iter().position(|it| it.name == name);
        let indexes = columns.map(index);
        let rows = self.rows.iter();
        rows.map(|row| indexes.map(|index| row.cell(index)))
            .collect()
    }
}

impl Row {
    fn cell(&self, index: Option<usize>) -> &str {
        let cell = index.and_then(|index| self.cells.get(index));
        cell.map_or("", String::as_str)
    }
}
