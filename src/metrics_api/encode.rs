//! Objects, lists and events as they go over the wire.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::crd::node_metric::{API_VERSION, KIND};

use super::negotiate::Form;
use super::options::Include;
use super::store::{Object, Page, Version};
use super::table;

/// So many objects are written at a time.
const CHUNK: usize = 64;
/// The annotation of the bookmark that ends the initial objects of a watch.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// How answers are written.
#[derive(Clone, Copy, Debug)]
pub struct Writer {
    /// The form.
    pub form: Form,
    /// What rows of a Table carry.
    pub include: Include,
    /// When ages are told by.
    pub now: Timestamp,
}

fn plain(object: &Object) -> String {
    let (version, content) = (object.version, &object.content);
    format!(
        r#"{{"apiVersion":"{API_VERSION}","kind":"{KIND}","metadata":{{"resourceVersion":"{version}",{}}},"status":{}}}"#,
        content.metadata, content.status
    )
}

fn metadata(object: &Object, api_version: &str) -> String {
    format!(
        r#"{{"kind":"PartialObjectMetadata","apiVersion":"{api_version}","metadata":{{"resourceVersion":"{}",{}}}}}"#,
        object.version, object.content.metadata
    )
}

impl Writer {
    fn row(&self, object: &Object, version: &str) -> String {
        let cells = object.content.cells.iter().map(|cell| cell.value(self.now));
        let cells: Value = cells.collect();
        let object = match self.include {
            Include::None => "null".to_owned(),
            Include::Metadata => metadata(object, version),
            Include::Object => plain(object),
        };
        format!(r#"{{"cells":{cells},"object":{object}}}"#)
    }

    fn item(&self, object: &Object) -> String {
        match self.form {
            Form::Plain => plain(object),
            Form::Metadata => metadata(object, "meta.k8s.io/v1"),
            Form::Table(version) => self.row(object, version),
        }
    }

    /// One object by itself. In a Table `columns` says whether they are defined in it.
    pub fn object(&self, object: &Object, columns: bool) -> String {
        let Form::Table(_) = self.form else {
            return self.item(object);
        };
        let head = self.head(
            &json!({"resourceVersion": object.version.to_string()}),
            columns,
        );
        format!("{head}{}]}}", self.item(object))
    }

    fn head(&self, metadata: &Value, columns: bool) -> String {
        let (kind, version, items) = match self.form {
            Form::Plain => ("NodeMetricList", API_VERSION, "items"),
            Form::Metadata => ("PartialObjectMetadataList", "meta.k8s.io/v1", "items"),
            Form::Table(version) => ("Table", version, "rows"),
        };
        let columns = match self.form {
            Form::Table(_) if columns => format!(r#""columnDefinitions":{},"#, table::columns()),
            Form::Table(_) => r#""columnDefinitions":null,"#.to_owned(),
            _ => String::new(),
        };
        format!(
            r#"{{"kind":"{kind}","apiVersion":"{version}","metadata":{metadata},{columns}"{items}":["#
        )
    }

    /// A page of a list, in parts. `counts`: how many objects are left is told.
    pub fn list(self, page: Page, counts: bool) -> impl Iterator<Item = String> + Send {
        let mut metadata = json!({"resourceVersion": page.version.to_string()});
        if let Some((token, more)) = page.next {
            metadata["continue"] = json!(token.text());
            if counts {
                metadata["remainingItemCount"] = json!(more);
            }
        }
        let head = self.head(&metadata, true);
        let mut objects = page.objects.into_iter();
        let mut comma = "";
        let chunks = std::iter::from_fn(move || {
            let mut text = String::new();
            for object in objects.by_ref().take(CHUNK) {
                text.push_str(comma);
                text.push_str(&self.item(&object));
                comma = ",";
            }
            (!text.is_empty()).then_some(text)
        });
        std::iter::once(head)
            .chain(chunks)
            .chain(["]}\n".to_owned()])
    }

    /// What a bookmark carries: the version up to which all is told.
    pub fn bookmark(&self, version: Version, ends_initial: bool) -> String {
        let mut object = match self.form {
            Form::Plain => json!({"kind": KIND, "apiVersion": API_VERSION}),
            Form::Metadata => {
                json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"})
            }
            Form::Table(api) => {
                json!({"kind": "Table", "apiVersion": api, "columnDefinitions": null, "rows": []})
            }
        };
        object["metadata"] = json!({"resourceVersion": version.to_string()});
        if matches!(self.form, Form::Plain | Form::Metadata) {
            object["metadata"]["creationTimestamp"] = Value::Null;
        }
        if ends_initial {
            object["metadata"]["annotations"] = json!({INITIAL_EVENTS_END: "true"});
        }
        if matches!(self.form, Form::Plain) {
            object["status"] = json!({});
        }
        object.to_string()
    }
}

/// One line of a watch.
pub fn event(kind: &str, object: &str) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}
