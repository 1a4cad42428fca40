//! Selectors in queries: `app=web,tier in (a,b),!old` and `metadata.name=n1`.

use crate::engine::selector::{Requirement, Selector};

/// Parses a label selector.
///
/// # Errors
/// A message that names the invalid part.
pub(crate) fn labels(text: &str) -> Result<Selector, String> {
    let parts = split(text).map(|part| {
        requirement(part).ok_or_else(|| {
            format!(
                "labelSelector has {part:?}; write key=value, key!=value, key in (a,b), key notin (a,b), key or !key"
            )
        })
    });
    let mut requirements = parts.collect::<Result<Vec<_>, _>>()?;
    requirements.sort();
    Ok(Selector { requirements })
}

/// Parses a field selector into names, each to be equal or not.
///
/// # Errors
/// A message that names the unsupported field.
pub(crate) fn names(text: &str) -> Result<Vec<(String, bool)>, String> {
    let parts = text
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty());
    parts
        .map(|part| {
            let (field, value, is) = comparison(part)
                .ok_or_else(|| format!("fieldSelector has {part:?}; write metadata.name=NAME"))?;
            if field == "metadata.name" {
                Ok((value.to_owned(), is))
            } else {
                Err(format!(
                    "field label not supported: {field}; only metadata.name is"
                ))
            }
        })
        .collect()
}

/// Splits at commas outside parentheses.
fn split(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_i32;
    let parts = text.split(move |letter| {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        letter == ',' && depth == 0
    });
    parts.map(str::trim).filter(|part| !part.is_empty())
}

fn requirement(part: &str) -> Option<Requirement> {
    if let Some(rest) = part.strip_suffix(')') {
        let (head, values) = rest.split_once('(')?;
        let mut words = head.split_whitespace();
        let (key, operator) = (key(words.next()?)?, words.next()?);
        let values: Option<Vec<String>> = values
            .split(',')
            .map(|value| self::value(value.trim()))
            .collect();
        return match (operator, words.next()) {
            ("in", None) => Some(Requirement::In(key, values?)),
            ("notin", None) => Some(Requirement::NotIn(key, values?)),
            _ => None,
        };
    }
    if let Some((name, wanted, is)) = comparison(part) {
        let (key, values) = (key(name)?, vec![value(wanted)?]);
        return Some(if is {
            Requirement::In(key, values)
        } else {
            Requirement::NotIn(key, values)
        });
    }
    match part.strip_prefix('!') {
        Some(name) => key(name.trim()).map(Requirement::DoesNotExist),
        None => key(part).map(Requirement::Exists),
    }
}

/// Left side, right side, and whether they must be equal.
fn comparison(part: &str) -> Option<(&str, &str, bool)> {
    let (left, right, is) = if let Some((left, right)) = part.split_once("!=") {
        (left, right, false)
    } else if let Some((left, right)) = part.split_once("==") {
        (left, right, true)
    } else {
        let (left, right) = part.split_once('=')?;
        (left, right, true)
    };
    Some((left.trim(), right.trim(), is))
}

fn key(text: &str) -> Option<String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "-_./".contains(letter);
    (!text.is_empty() && text.len() <= 317 && text.chars().all(fits)).then(|| text.to_owned())
}

fn value(text: &str) -> Option<String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
    (text.len() <= 63 && text.chars().all(fits)).then(|| text.to_owned())
}
