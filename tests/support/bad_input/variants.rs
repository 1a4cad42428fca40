//! Generates variants of a valid object: at, and just beyond, each limit of its definition.

use serde_json::{Map, Value, json};

/// All variants of `object`, each with one value changed.
pub fn variants(schema: &Value, object: &Value) -> Vec<Value> {
    let mut found = Vec::new();
    walk(schema, object, "", &mut |pointer, value| {
        let mut changed = object.clone();
        *changed.pointer_mut(pointer).unwrap() = value;
        found.push(changed);
    });
    found
}

type Emit<'a> = dyn FnMut(&str, Value) + 'a;

fn walk(schema: &Value, value: &Value, at: &str, emit: &mut Emit<'_>) {
    for changed in lengths(schema, value).into_iter().chain(numbers(schema)) {
        emit(at, changed);
    }
    match value {
        Value::Object(fields) => {
            for changed in without_or_with(fields) {
                emit(at, Value::Object(changed));
            }
            for (name, value) in fields {
                let known = schema["properties"].get(name);
                let schema = known.or_else(|| schema.get("additionalProperties"));
                let at = format!("{at}/{}", name.replace('/', "~1"));
                walk(schema.unwrap_or(&Value::Null), value, &at, emit);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                walk(&schema["items"], item, &format!("{at}/{index}"), emit);
            }
        }
        _ => {}
    }
}

/// Each field removed, `null`, and with another type; and an unknown field.
fn without_or_with(fields: &Map<String, Value>) -> Vec<Map<String, Value>> {
    let mut found = Vec::new();
    for name in fields.keys() {
        let mut without = fields.clone();
        without.remove(name);
        found.push(without);
        for other in [
            json!(null),
            json!({}),
            json!([]),
            json!("a"),
            json!(7),
            json!(true),
            json!(1e19),
        ] {
            let mut changed = fields.clone();
            changed.insert(name.clone(), other);
            found.push(changed);
        }
    }
    let mut more = fields.clone();
    more.insert("noSuchField".to_owned(), json!({"a": [1]}));
    found.push(more);
    found
}

/// The maximum length, one more, and empty.
fn lengths(schema: &Value, value: &Value) -> Vec<Value> {
    let limits = |key: &str| {
        schema[key]
            .as_u64()
            .into_iter()
            .flat_map(|max| [max, max + 1])
    };
    match value {
        Value::String(_) => limits("maxLength")
            .chain([0])
            .flat_map(|length| {
                ["a", "é"].map(|letter| json!(letter.repeat(length.try_into().unwrap())))
            })
            .collect(),
        Value::Array(items) if !items.is_empty() => limits("maxItems")
            .chain([0])
            .map(|length| {
                Value::Array(
                    (0..length)
                        .map(|index| numbered(&items[0], index))
                        .collect(),
                )
            })
            .collect(),
        Value::Object(_) => limits("maxProperties")
            .map(|length| {
                (0..length)
                    .map(|index| (format!("key{index}"), json!("a")))
                    .collect()
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// A copy; a named item gets a unique name.
fn numbered(item: &Value, index: u64) -> Value {
    let mut item = item.clone();
    if let Some(name) = item.get_mut("name") {
        *name = json!(format!("name{index}"));
    }
    item
}

fn numbers(schema: &Value) -> Vec<Value> {
    let limit = |key: &str, beyond: i64| {
        #[allow(
            clippy::cast_possible_truncation,
            reason = "the limits are whole and small"
        )]
        let limit = schema[key].as_f64().map(|limit| limit as i64);
        limit
            .into_iter()
            .flat_map(move |limit| [json!(limit), json!(limit + beyond)])
    };
    limit("minimum", -1).chain(limit("maximum", 1)).collect()
}
