//! Encodes objects, lists and events.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::crd::node_metric::{API_VERSION, KIND};

use super::negotiate::Form;
use super::options::Include;
use super::store::{Page, StoredObject, Version};
use super::table;

/// Objects encoded at a time: about 70 kB, so that buffers can be reused.
const CHUNK: usize = 16;
/// Bytes of an object besides its content, in a watch line or a table row as well.
const OBJECT_OVERHEAD: usize = 384;
/// The annotation of the bookmark that ends the initial objects of a watch.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// Encoding of responses.
#[derive(Clone, Copy, Debug)]
pub struct Encoder {
    /// The form.
    pub form: Form,
    /// What table rows include.
    pub include: Include,
    /// Time from which ages are computed.
    pub now: Timestamp,
}

fn plain(object: &StoredObject, text: &mut String) {
    let (version, content) = (object.version.to_string(), &object.content);
    text.extend([
        r#"{"apiVersion":""#,
        API_VERSION,
        r#"","kind":""#,
        KIND,
        r#"","metadata":{"resourceVersion":""#,
        &version,
        r#"","#,
        &content.metadata,
        r#"},"status":"#,
        &content.status,
        "}",
    ]);
}

fn metadata(object: &StoredObject, api_version: &str, text: &mut String) {
    text.extend([
        r#"{"kind":"PartialObjectMetadata","apiVersion":""#,
        api_version,
        r#"","metadata":{"resourceVersion":""#,
        &object.version.to_string(),
        r#"","#,
        &object.content.metadata,
        "}}",
    ]);
}

impl Encoder {
    /// Estimated size of encoded objects in bytes.
    fn size_hint<'a>(&self, objects: impl Iterator<Item = &'a StoredObject>) -> usize {
        let whole = match self.form {
            Form::Plain => true,
            Form::Metadata => false,
            Form::Table(_) => self.include == Include::Object,
        };
        let contents = objects.map(|object| &object.content);
        let sizes = contents.map(|content| {
            let status = if whole { content.status.len() } else { 0 };
            content.metadata.len() + status + OBJECT_OVERHEAD
        });
        sizes.sum()
    }

    fn row(&self, object: &StoredObject, version: &str, text: &mut String) {
        let cells = object.content.cells.iter().map(|cell| cell.value(self.now));
        let cells: Value = cells.collect();
        text.extend([r#"{"cells":"#, &cells.to_string(), r#","object":"#]);
        match self.include {
            Include::None => text.push_str("null"),
            Include::Metadata => metadata(object, version, text),
            Include::Object => plain(object, text),
        }
        text.push('}');
    }

    fn item(&self, object: &StoredObject, text: &mut String) {
        match self.form {
            Form::Plain => plain(object, text),
            Form::Metadata => metadata(object, "meta.k8s.io/v1", text),
            Form::Table(version) => self.row(object, version, text),
        }
    }

    /// A single object. `columns`: include the column definitions in a Table.
    pub fn object(&self, object: &StoredObject, columns: bool) -> String {
        let mut text = String::with_capacity(self.size_hint(std::iter::once(object)));
        self.write(object, columns, &mut text);
        text
    }

    fn write(&self, object: &StoredObject, columns: bool, text: &mut String) {
        let Form::Table(_) = self.form else {
            return self.item(object, text);
        };
        let version = json!({"resourceVersion": object.version.to_string()});
        text.push_str(&self.head(&version, columns));
        self.item(object, text);
        text.push_str("]}");
    }

    /// Watch events, one per line. `columns`: include the column definitions in the first one of a Table.
    pub fn lines(&self, events: &[(&str, StoredObject)], mut columns: bool) -> String {
        let mut text =
            String::with_capacity(self.size_hint(events.iter().map(|(_, object)| object)));
        for (kind, object) in events {
            text.extend([r#"{"type":""#, kind, r#"","object":"#]);
            self.write(object, std::mem::take(&mut columns), &mut text);
            text.push_str("}\n");
        }
        text
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

    /// A page of a list, in parts. `counts`: include the number of remaining items.
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
            let some = objects.as_slice();
            let some = &some[..some.len().min(CHUNK)];
            let mut text = String::with_capacity(self.size_hint(some.iter()));
            for object in objects.by_ref().take(CHUNK) {
                text.push_str(comma);
                self.item(&object, &mut text);
                comma = ",";
            }
            (!text.is_empty()).then_some(text)
        });
        std::iter::once(head)
            .chain(chunks)
            .chain(["]}\n".to_owned()])
    }

    /// A bookmark object: all events up to this version were sent.
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

/// A watch event.
pub fn event(kind: &str, object: &str) -> String {
    format!("{{\"type\":\"{kind}\",\"object\":{object}}}\n")
}
