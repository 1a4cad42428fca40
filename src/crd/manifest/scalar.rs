//! Resolves plain scalars by the rules of `sigs.k8s.io/yaml`, which `kubectl` and API servers use.

use serde_json::Number;

use super::tree::NodeContent;

/// Resolves a plain scalar without a tag.
pub(super) fn resolve(text: &str) -> NodeContent {
    match text {
        "" | "~" | "null" | "Null" | "NULL" => return NodeContent::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            return NodeContent::Bool(true);
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            return NodeContent::Bool(false);
        }
        ".nan" | ".NaN" | ".NAN" | ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF"
        | "-.inf" | "-.Inf" | "-.INF" => return NodeContent::NotFinite(text.to_owned()),
        _ => {}
    }
    if text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.')) {
        number(text)
    } else {
        NodeContent::Text(text.to_owned())
    }
}

fn number(text: &str) -> NodeContent {
    let plain = text.replace('_', "");
    if !text.starts_with('.')
        && let Some(number) = integer(&plain)
    {
        return NodeContent::Number(number);
    }
    if !is_float(if text.starts_with('.') { text } else { &plain }) {
        return NodeContent::Text(text.to_owned());
    }
    match plain.parse::<f64>() {
        Ok(value) => float(value, text),
        Err(_) => NodeContent::Text(text.to_owned()),
    }
}

/// With the prefixes of Go: `0x`, `0o`, `0b`, and a leading 0 for octal.
fn integer(text: &str) -> Option<Number> {
    let (negative, digits) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (digits, radix) = match digits.get(..2) {
        Some("0x" | "0X") => (&digits[2..], 16),
        Some("0o" | "0O") => (&digits[2..], 8),
        Some("0b" | "0B") => (&digits[2..], 2),
        _ if digits.len() > 1 && digits.starts_with('0') => (&digits[1..], 8),
        _ => (digits, 10),
    };
    if digits.starts_with(['+', '-']) {
        return None;
    }
    let magnitude = u64::from_str_radix(digits, radix).ok()?;
    if !negative {
        return Some(whole(magnitude));
    }
    let value = 0i64.checked_sub_unsigned(magnitude)?;
    Some(Number::from(value))
}

/// Beyond 63 bits an API server reads a number as floating point.
fn whole(magnitude: u64) -> Number {
    match i64::try_from(magnitude) {
        Ok(value) => Number::from(value),
        Err(_) => Number::from_f64(magnitude as f64).unwrap_or_else(|| Number::from(magnitude)),
    }
}

/// `[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?`
fn is_float(text: &str) -> bool {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (mantissa, exponent) = match text.find(['e', 'E']) {
        Some(at) => (&text[..at], Some(&text[at + 1..])),
        None => (text, None),
    };
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    let mantissa_fits = match mantissa.split_once('.') {
        Some(("", fraction)) => !fraction.is_empty() && digits(fraction),
        Some((whole, fraction)) => digits(whole) && digits(fraction),
        None => !mantissa.is_empty() && digits(mantissa),
    };
    let exponent_fits = exponent.is_none_or(|exponent| {
        let exponent = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        !exponent.is_empty() && digits(exponent)
    });
    mantissa_fits && exponent_fits
}

/// An integer written as a float (`2.0`, `1e3`) reaches the API server as an integer.
fn float(value: f64, text: &str) -> NodeContent {
    const WHOLE: f64 = 9_007_199_254_740_992.0;
    if value.fract() == 0.0 && value.abs() < WHOLE {
        #[expect(clippy::cast_possible_truncation, reason = "whole and below 2^53")]
        return NodeContent::Number(Number::from(value as i64));
    }
    Number::from_f64(value).map_or_else(
        || NodeContent::NotFinite(text.to_owned()),
        NodeContent::Number,
    )
}
