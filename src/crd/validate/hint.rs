//! The messages of problems: what is wrong, and how to fix it, from the schema.

use serde_json::{Map, Value};

use super::super::words::{nearest, quoted};
use crate::engine::metric::Metric;

/// The last field name in a path: `stepCPURatio` of `spec.throttle.cpuThrottle.stepCPURatio`.
pub(super) fn name_of(path: &str) -> &str {
    let end = path.trim_end_matches(|c: char| c == ']' || c.is_ascii_digit());
    let name = end.strip_suffix('[').unwrap_or(path);
    let name = name.rsplit('.').next().unwrap_or(name);
    if name.is_empty() { "the object" } else { name }
}

/// Whether the value has the type in the schema.
pub(super) fn has_type(schema: &Value, value: &Value) -> bool {
    if schema["x-kubernetes-int-or-string"] == true {
        return value.is_string() || is_whole(value);
    }
    match schema["type"].as_str() {
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => is_whole(value),
        Some("number") => value.is_number(),
        _ => true,
    }
}

/// An API server accepts a float without a fraction below 2^53 as an integer.
fn is_whole(value: &Value) -> bool {
    const WHOLE: f64 = 9_007_199_254_740_992.0;
    value.is_i64()
        || value
            .as_f64()
            .is_some_and(|number| number.fract() == 0.0 && number.abs() < WHOLE)
}

/// `coolDownSeconds is 0.5, and must be an integer; write for example 10`.
pub(super) fn wrong_type(schema: &Value, value: &Value, path: &str) -> String {
    let name = name_of(path);
    if schema["x-kubernetes-int-or-string"] == true && value.is_number() {
        return format!(
            "{name} is {value}, and an API server accepts a bare number here only if it is an integer; write it as a \
             string: \"{value}\""
        );
    }
    let fix = match value {
        Value::Bool(_) | Value::Number(_) if schema["type"] == "string" => {
            format!("put it in quotes: \"{value}\"")
        }
        Value::String(text) if is_valid_unquoted(schema, text) => {
            format!("remove the quotes: {text}")
        }
        _ => format!("write for example {}", example(schema)),
    };
    format!(
        "{name} is {}, and must be {}; {fix}",
        describe(value),
        describe_type(schema)
    )
}

/// Whether the string would be valid without its quotes.
fn is_valid_unquoted(schema: &Value, text: &str) -> bool {
    match schema["type"].as_str() {
        Some("integer") => text.parse::<i64>().is_ok(),
        Some("boolean") => text == "true" || text == "false",
        _ => false,
    }
}

fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the string {}", quoted(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a map".to_owned(),
    }
}

fn describe_type(schema: &Value) -> &'static str {
    if schema["x-kubernetes-int-or-string"] == true {
        return "an integer or a string";
    }
    match schema["type"].as_str() {
        Some("object") => "a map",
        Some("array") => "a list",
        Some("boolean") => "true or false",
        Some("integer") => "an integer",
        Some("number") => "a number",
        _ => "a string",
    }
}

/// `metricRule is missing; write metricRule: {name: ..., value: ...}`.
pub(super) fn missing(schema: &Value, name: &str) -> String {
    let example = schema["properties"]
        .get(name)
        .map_or_else(|| "...".to_owned(), example);
    format!("{name} is missing; write {name}: {example}")
}

/// An example of a value that the schema accepts.
pub(super) fn example(schema: &Value) -> String {
    if let Some(default) = schema.get("default") {
        return match default {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
    }
    if schema["x-kubernetes-int-or-string"] == true {
        return "4000".to_owned();
    }
    if let Some(first) = schema["enum"].get(0).and_then(Value::as_str) {
        return first.to_owned();
    }
    match schema["type"].as_str() {
        Some("object") => object_example(schema),
        Some("array") => format!("[{}]", example(&schema["items"])),
        Some("boolean") => "true".to_owned(),
        Some("integer" | "number") => schema["minimum"].as_f64().unwrap_or(1.0).to_string(),
        _ => "\"...\"".to_owned(),
    }
}

fn object_example(schema: &Value) -> String {
    let required = schema["required"].as_array().into_iter().flatten();
    let fields: Vec<String> = required
        .filter_map(Value::as_str)
        .map(|name| format!("{name}: {}", example(&schema["properties"][name])))
        .collect();
    format!("{{{}}}", fields.join(", "))
}

/// Whether an object has no field of that name.
pub(super) fn is_unknown(known: Option<&Map<String, Value>>, name: &str) -> bool {
    known.is_none_or(|known| !known.contains_key(name))
}

/// The field that a misspelt one probably means.
pub(super) fn meant<'a>(known: Option<&'a Map<String, Value>>, name: &str) -> Option<&'a str> {
    nearest(
        name,
        known.into_iter().flat_map(Map::keys).map(String::as_str),
    )
}

/// `"cpuThrotle" is not a field of spec.throttle; did you mean cpuThrottle?`.
pub(super) fn unknown(known: Option<&Map<String, Value>>, name: &str, path: &str) -> String {
    let parent = if path.is_empty() { "the object" } else { path };
    let names: Vec<&str> = known
        .into_iter()
        .flat_map(|known| known.keys().map(String::as_str))
        .collect();
    let fix = match meant(known, name) {
        Some(near) => format!("did you mean {near}?"),
        None if names.is_empty() => "remove it".to_owned(),
        None => format!("remove it; the known fields are {}", names.join(", ")),
    };
    format!("{} is not a field of {parent}; {fix}", quoted(name))
}

/// `stepCPURatio is 0, and must be from 1 to 100; write for example 10`.
pub(super) fn out_of_range(schema: &Value, number: f64, path: &str) -> String {
    let name = name_of(path);
    let min = schema["minimum"].as_f64();
    let max = schema["maximum"].as_f64();
    let range = match (min, max) {
        (Some(min), Some(max)) => format!("from {min} to {max}"),
        (Some(min), None) => format!("{min} or more"),
        (None, Some(max)) => format!("{max} or less"),
        (None, None) => "another".to_owned(),
    };
    format!(
        "{name} is {number}, and must be {range}; write for example {}",
        example(schema)
    )
}

/// `strategy is "Prewiew"; write one of None, Preview; did you mean Preview?`.
pub(super) fn not_among(known: &[&str], value: &Value, path: &str) -> String {
    let text = value.as_str();
    let given = text.map_or_else(|| value.to_string(), quoted);
    let near = text.and_then(|text| nearest(text, known.iter().copied()));
    format!(
        "{} is {given}; write one of {}{}",
        name_of(path),
        known.join(", "),
        did_you_mean(near)
    )
}

/// The message of a CEL rule with the given value: `..., not "80%"`. `metric` is the name of the metric that the value is of.
pub(super) fn violated_rule(message: &str, value: Option<&Value>, metric: Option<&str>) -> String {
    let texts: Vec<&str> = match value {
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(items)) => items.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let given = match (value, &texts[..]) {
        (_, [text]) => quoted(text),
        (_, [_, _, ..]) => format!("{texts:?}"),
        (Some(number @ Value::Number(_)), _) => number.to_string(),
        _ => return message.to_owned(),
    };
    let percentage = texts.iter().find_map(|text| text.strip_suffix('%'));
    let percentage = percentage.map(|number| of_percentage(number.trim(), metric));
    // The message contains the valid values.
    let words = || message.split(|c: char| !c.is_alphanumeric() && c != '_');
    let mut meant = texts
        .iter()
        .filter(|text| !words().any(|word| word == **text));
    let meant = meant.find_map(|text| nearest(text, words()));
    format!(
        "{message}, not {given}{}{}",
        percentage.unwrap_or_default(),
        did_you_mean(meant)
    )
}

fn did_you_mean(word: Option<&str>) -> String {
    word.map_or_else(String::new, |word| format!("; did you mean {word}?"))
}

/// How to write a percentage as the threshold of this metric.
fn of_percentage(number: &str, metric: Option<&str>) -> String {
    let metric = metric.unwrap_or_default();
    let in_percent = Metric::parse(metric).is_some_and(|metric| metric.unit() == "percent");
    match metric.strip_suffix("_usage") {
        _ if in_percent => format!("; {metric} is in percent: write {number}"),
        Some(resource) => {
            format!("; for a percentage write name: {resource}_utilization and value: {number}")
        }
        None => format!(
            "; for a percentage write only the number, {number}, and a metric that is in percent"
        ),
    }
}
