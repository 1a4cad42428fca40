//! Objects, lists and events as they go over the wire.

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::crd::node_metric::{API_VERSION, KIND};

use super::negotiate::Form;
use super::options::Include;
use super::store::{Object, Page, Version};
use super::table;

/// So many objects are written at a time: some 70 kB, which memory that was used before has room for.
const CHUNK: usize = 16;
/// What an object takes beside what it says: also in a line of a watch, and as a row.
const FRAME: usize = 384;
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

fn plain(object: &Object, text: &mut String) {
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

fn metadata(object: &Object, api_version: &str, text: &mut String) {
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

impl Writer {
    /// The bytes that objects take, about.
    fn room<'a>(&self, objects: impl Iterator<Item = &'a Object>) -> usize {
        let whole = match self.form {
            Form::Plain => true,
            Form::Metadata => false,
            Form::Table(_) => self.include == Include::Object,
        };
        let contents = objects.map(|object| &object.content);
        let sizes = contents.map(|content| {
            let status = if whole { content.status.len() } else { 0 };
            content.metadata.len() + status + FRAME
        });
        sizes.sum()
    }

    fn row(&self, object: &Object, version: &str, text: &mut String) {
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

    fn item(&self, object: &Object, text: &mut String) {
        match self.form {
            Form::Plain => plain(object, text),
            Form::Metadata => metadata(object, "meta.k8s.io/v1", text),
            Form::Table(version) => self.row(object, version, text),
        }
    }

    /// One object by itself. In a Table `columns` says whether they are defined in it.
    pub fn object(&self, object: &Object, columns: bool) -> String {
        let mut text = String::with_capacity(self.room(std::iter::once(object)));
        self.write(object, columns, &mut text);
        text
    }

    fn write(&self, object: &Object, columns: bool, text: &mut String) {
        let Form::Table(_) = self.form else {
            return self.item(object, text);
        };
        let version = json!({"resourceVersion": object.version.to_string()});
        text.push_str(&self.head(&version, columns));
        self.item(object, text);
        text.push_str("]}");
    }

    /// Lines of a watch, each of an object and what happened to it. Where `columns` says so they are defined in the first
    /// one of a Table.
    pub fn lines(&self, told: &[(&str, Object)], mut columns: bool) -> String {
        let mut text = String::with_capacity(self.room(told.iter().map(|(_, object)| object)));
        for (kind, object) in told {
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
            let some = objects.as_slice();
            let some = &some[..some.len().min(CHUNK)];
            let mut text = String::with_capacity(self.room(some.iter()));
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
