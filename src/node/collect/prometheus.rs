//! Parser for the Prometheus text format (exposition format 0.0.4).
//!
//! ```text
//! # HELP queue_depth Waiting jobs.
//! queue_depth{queue="mail",host="a\"b"} 12 1395066363000
//! ```

use std::borrow::Cow;
use std::sync::Arc;

use crate::engine::sample::Series;

/// Why a response was rejected. One bad line rejects the whole response, since it is unknown what else is wrong.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TextError {
    /// The line is not a sample.
    #[error("line {0} is not in the Prometheus text format")]
    Line(usize),
    /// Too many series.
    #[error(
        "more than {0} series have the names that rules use; use an endpoint with fewer series"
    )]
    TooMany(usize),
}

/// A series as it is on the page.
#[derive(Clone, Debug, PartialEq)]
pub struct PageSeries {
    /// The series.
    pub series: Series,
    /// When the exporter measured it, in milliseconds since 1970; `None`: now.
    pub timestamp: Option<i64>,
}

/// The series whose name is `wanted`, at most `max`, each with its labels sorted by name. Timestamps are
/// validated and dropped: a sample's age counts from its arrival.
///
/// # Errors
/// If any line is malformed, wanted or not, or there are too many series.
pub fn parse(
    text: &str,
    wanted: impl Fn(&str) -> bool,
    max: usize,
) -> Result<Vec<Series>, TextError> {
    let found = parse_page(text, wanted, max)?;
    Ok(found.into_iter().map(|found| found.series).collect())
}

/// As [`parse`], with the timestamps. Series that are there twice are in the result twice.
///
/// # Errors
/// As [`parse`].
pub fn parse_page(
    text: &str,
    wanted: impl Fn(&str) -> bool,
    max: usize,
) -> Result<Vec<PageSeries>, TextError> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_matches([' ', '\t']);
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let sample = Sample::parse(line).ok_or(TextError::Line(index + 1))?;
        if !wanted(sample.name) {
            continue;
        }
        if found.len() == max {
            return Err(TextError::TooMany(max));
        }
        found.push(sample.into_series());
    }
    Ok(found)
}

/// One parsed line, borrowing from the text.
struct Sample<'t> {
    name: &'t str,
    labels: Vec<(&'t str, Cow<'t, str>)>,
    value: f64,
    timestamp: Option<i64>,
}

impl<'t> Sample<'t> {
    fn parse(line: &'t str) -> Option<Self> {
        let (name, rest) = split_name(line, true)?;
        let rest = rest.trim_start_matches(BLANKS);
        let (labels, rest) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest)?,
            None => (Vec::new(), line[name.len()..].strip_prefix(BLANKS)?),
        };
        let mut fields = rest.split(BLANKS).filter(|field| !field.is_empty());
        let value = number(fields.next()?)?;
        let timestamp = match fields.next() {
            Some(timestamp) => Some(timestamp.parse::<i64>().ok()?),
            None => None,
        };
        let complete = fields.next().is_none();
        complete.then_some(Self {
            name,
            labels,
            value,
            timestamp,
        })
    }

    fn into_series(self) -> PageSeries {
        let mut labels: Vec<(Arc<str>, Arc<str>)> = self
            .labels
            .iter()
            .map(|(name, value)| (Arc::from(*name), Arc::from(value.as_ref())))
            .collect();
        labels.sort();
        PageSeries {
            series: Series {
                name: Arc::from(self.name),
                labels,
                value: self.value,
            },
            timestamp: self.timestamp,
        }
    }
}

const BLANKS: [char; 2] = [' ', '\t'];

/// Splits off the name of a metric or label. Only metric names may have colons.
fn split_name(text: &str, colons: bool) -> Option<(&str, &str)> {
    let in_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || (colons && c == ':');
    let end = text.find(|c| !in_name(c)).unwrap_or(text.len());
    let has_valid_start = text.starts_with(|c: char| !c.is_ascii_digit());
    (end > 0 && has_valid_start).then(|| text.split_at(end))
}

/// The labels, and the rest after their closing brace.
#[expect(clippy::type_complexity, reason = "used here alone")]
fn labels(mut rest: &str) -> Option<(Vec<(&str, Cow<'_, str>)>, &str)> {
    let mut found = Vec::new();
    loop {
        rest = rest.trim_start_matches(BLANKS);
        if let Some(rest) = rest.strip_prefix('}') {
            return Some((found, rest));
        }
        let (name, tail) = split_name(rest, false)?;
        let tail = tail.trim_start_matches(BLANKS).strip_prefix('=')?;
        let tail = tail.trim_start_matches(BLANKS).strip_prefix('"')?;
        let (value, tail) = quoted(tail)?;
        found.push((name, value));
        rest = tail.trim_start_matches(BLANKS);
        match rest.strip_prefix(',') {
            Some(tail) => rest = tail,
            None if rest.starts_with('}') => {}
            None => return None,
        }
    }
}

/// A label's value up to its closing quote, with `\\`, `\"` and `\n` unescaped, and the rest.
fn quoted(text: &str) -> Option<(Cow<'_, str>, &str)> {
    let end = text.find(['"', '\\'])?;
    if text.as_bytes()[end] == b'"' {
        return Some((Cow::Borrowed(&text[..end]), &text[end + 1..]));
    }
    let mut value = String::from(&text[..end]);
    let mut chars = text[end..].char_indices();
    while let Some((index, c)) = chars.next() {
        match c {
            '"' => return Some((Cow::Owned(value), &text[end + index + 1..])),
            '\\' => value.push(match chars.next()?.1 {
                'n' => '\n',
                escaped @ ('\\' | '"') => escaped,
                _ => return None,
            }),
            plain => value.push(plain),
        }
    }
    None
}

/// Numbers as Go prints them: `1e+06`, `NaN`, `+Inf`.
fn number(field: &str) -> Option<f64> {
    field.parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn all(text: &str) -> Result<Vec<Series>, TextError> {
        parse(text, |_| true, 100)
    }

    fn one(text: &str) -> (String, Vec<(String, String)>, f64) {
        let series = all(text).unwrap().remove(0);
        let labels = series.labels.iter();
        let labels = labels.map(|(k, v)| (k.to_string(), v.to_string()));
        (series.name.to_string(), labels.collect(), series.value)
    }

    fn pair(name: &str, value: &str) -> (String, String) {
        (name.to_owned(), value.to_owned())
    }

    #[test]
    fn names_labels_values_and_timestamps_are_parsed() {
        assert_eq!(one("up 1\n"), ("up".into(), vec![], 1.0));
        assert_eq!(
            one("a:b_c{} 1.5e+06 1395066363000"),
            ("a:b_c".into(), vec![], 1.5e6)
        );
        assert_eq!(
            one("m { z = \"1\" , a=\"x y\", }\t-3 -1"),
            ("m".into(), vec![pair("a", "x y"), pair("z", "1")], -3.0)
        );
        assert_eq!(
            one(r#"m{path="C:\\dir\\",quote="\"hi\"",line="a\nb",brace="}{,="} 2"#).1,
            [
                pair("brace", "}{,="),
                pair("line", "a\nb"),
                pair("path", "C:\\dir\\"),
                pair("quote", "\"hi\"")
            ]
        );
        assert!(one("m NaN").2.is_nan());
        assert!(one("m +Inf").2 > f64::MAX);
        assert!(one("m -Inf").2 < f64::MIN);
    }

    #[test]
    fn timestamps_and_duplicates_are_in_the_page_and_exemplars_are_no_text_format() {
        let page = parse_page("m 1 1395066363000\nm 2\n", |_| true, 9).unwrap();
        let found: Vec<_> = page
            .iter()
            .map(|it| (it.series.value, it.timestamp))
            .collect();
        assert_eq!(found, [(1.0, Some(1_395_066_363_000)), (2.0, None)]);
        let exemplar = "m_bucket{le=\"1\"} 3 # {trace_id=\"a\"} 0.5\n";
        assert_eq!(all(exemplar), Err(TextError::Line(1)));
    }

    #[test]
    fn comments_and_unwanted_series_are_skipped() {
        let text = "# HELP a b\n# TYPE a gauge\n\n  \r\na 1\r\nb 2\na{x=\"y\"} 3\n# EOF\n";
        let found = parse(text, |name| name == "a", 100).unwrap();
        let values: Vec<f64> = found.iter().map(|series| series.value).collect();
        assert_eq!(values, [1.0, 3.0]);
    }

    #[test]
    fn a_bad_line_rejects_the_response_and_is_named() {
        for line in [
            "m",
            "m{",
            "m{a=\"b\"",
            "m{a=\"b} 1",
            "m{a=b} 1",
            "m{a=\"\\x\"} 1",
            "m{a=\"b\" c=\"d\"} 1",
            "m{1a=\"b\"} 1",
            "1m 1",
            "m one",
            "m 1 x",
            "m 1 2 3",
            "m{a=\"b\"}",
            "<html>",
            "mü 1",
        ] {
            let text = format!("ok 1\n{line}\n");
            assert_eq!(all(&text), Err(TextError::Line(2)), "{line}");
        }
    }

    #[test]
    fn more_series_than_the_limit_is_an_error() {
        let text = "a{i=\"0\"} 1\na{i=\"1\"} 1\nb 1\n";
        let at_most = |max| parse(text, |name| name == "a", max);
        assert_eq!(at_most(2).unwrap().len(), 2);
        assert_eq!(at_most(1), Err(TextError::TooMany(1)));
    }

    proptest! {
        #[test]
        fn arbitrary_text_does_not_panic(text in "[ -~\n\\\\\"{}=,é]{0,80}") {
            let _ = all(&text);
        }

        #[test]
        fn label_values_round_trip(value in "\\PC{0,20}|[\\\\\"\n{},= ]{0,20}") {
            let escaped = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let (_, labels, number) = one(&format!("m{{l=\"{escaped}\"}} 7"));
            prop_assert_eq!(labels, vec![pair("l", &value)]);
            prop_assert!((number - 7.0).abs() < f64::EPSILON);
        }
    }
}
