//! Kubernetes quantities: `4000`, `0.5`, `500m`, `1.5Gi`, `12e6`.
//!
//! Grammar and rounding follow `k8s.io/apimachinery/pkg/api/resource`: values are exact to 1 nano, and finer ones are
//! rounded away from zero. Two differences that do not matter in practice: more than 2^63 - 1 is capped, and a suffix
//! without a digit (`G`), which is 0 there, is rejected here.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::units::{Bytes, MilliCpu};

const NANOS: i128 = 1_000_000_000;
const NANO_DIGITS: i64 = 9;
/// Larger values are capped.
const CAP: u128 = i64::MAX as u128;

/// An exact quantity, in billionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

/// Why a text is not a quantity.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum QuantityError {
    /// The text is empty.
    #[error("is empty; write a number, for example 4000, \"0.5\" or 5Gi")]
    Empty,
    /// Not a number.
    #[error(
        "is not a number; write digits and at most one suffix, for example 4000, \"0.5\", 500m or 5Gi"
    )]
    NotANumber,
    /// A number with an unknown suffix.
    #[error(
        "ends in \"{0}\", which is not a quantity suffix; the suffixes are n u m k M G T P E, Ki Mi Gi Ti Pi Ei and \
         an exponent like e6"
    )]
    Suffix(String),
}

/// The factor that a suffix stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scale {
    /// A power of two.
    Binary(u32),
    /// A power of ten.
    Decimal(i64),
}

impl Quantity {
    /// Zero.
    pub const ZERO: Self = Self { nanos: 0 };

    /// A whole number.
    pub fn from_integer(value: i64) -> Self {
        Self {
            nanos: i128::from(value) * NANOS,
        }
    }

    /// Billionths, exact.
    pub const fn nanos(self) -> i128 {
        self.nanos
    }

    /// The nearest floating-point number. Always finite.
    pub fn as_f64(self) -> f64 {
        if self.nanos % NANOS == 0 {
            (self.nanos / NANOS) as f64
        } else {
            self.nanos as f64 / NANOS as f64
        }
    }

    /// The quantity as CPU, rounded up to a millicore as Kubernetes does; `None` below zero.
    pub fn as_milli_cpu(self) -> Option<MilliCpu> {
        self.ceil(NANOS / 1000).map(MilliCpu)
    }

    /// The quantity as bytes, rounded up; `None` below zero.
    pub fn as_bytes(self) -> Option<Bytes> {
        self.ceil(NANOS).map(Bytes)
    }

    fn ceil(self, unit: i128) -> Option<u64> {
        let units = self.nanos.checked_add(unit - 1)?.div_euclid(unit);
        u64::try_from(units).ok()
    }
}

impl FromStr for Quantity {
    type Err = QuantityError;

    /// # Errors
    /// Fails on anything that an API server rejects as a quantity: an empty string, white space, `NaN`, `inf`, two
    /// decimal points, an unknown suffix.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.is_empty() {
            return Err(QuantityError::Empty);
        }
        let (negative, number) = match text.as_bytes() {
            [b'-', ..] => (true, &text[1..]),
            [b'+', ..] => (false, &text[1..]),
            _ => (false, text),
        };
        let (whole, rest) = split_digits(number);
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(rest) => split_digits(rest),
            None => ("", rest),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(QuantityError::NotANumber);
        }
        let scale = Scale::parse(suffix).ok_or_else(|| QuantityError::Suffix(shorten(suffix)))?;
        let magnitude = magnitude(whole.as_bytes(), fraction.as_bytes(), scale);
        let nanos = i128::try_from(magnitude).unwrap_or(i128::MAX);
        Ok(Self {
            nanos: if negative { -nanos } else { nanos },
        })
    }
}

impl Scale {
    fn parse(suffix: &str) -> Option<Self> {
        let scale = match suffix {
            "" => Self::Decimal(0),
            "n" => Self::Decimal(-9),
            "u" => Self::Decimal(-6),
            "m" => Self::Decimal(-3),
            "k" => Self::Decimal(3),
            "M" => Self::Decimal(6),
            "G" => Self::Decimal(9),
            "T" => Self::Decimal(12),
            "P" => Self::Decimal(15),
            "E" => Self::Decimal(18),
            "Ki" => Self::Binary(10),
            "Mi" => Self::Binary(20),
            "Gi" => Self::Binary(30),
            "Ti" => Self::Binary(40),
            "Pi" => Self::Binary(50),
            "Ei" => Self::Binary(60),
            _ => return Self::parse_exponent(suffix),
        };
        Some(scale)
    }

    /// `e6`, `E-3`, `e+2`. Kubernetes stores an exponent in 32 bits.
    fn parse_exponent(suffix: &str) -> Option<Self> {
        let exponent = suffix.strip_prefix(['e', 'E'])?;
        let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
            return None;
        }
        let power: i32 = exponent.parse().ok()?;
        Some(Self::Decimal(i64::from(power)))
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text
        .bytes()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    text.split_at(end)
}

fn shorten(text: &str) -> String {
    text.chars().take(16).collect()
}

/// The number in billionths, rounded up and capped.
///
/// A decimal scale shifts the decimal point and a binary one multiplies each digit, so digits are processed one by one
/// and text of any length does not overflow.
fn magnitude(whole: &[u8], fraction: &[u8], scale: Scale) -> u128 {
    let (shift, factor) = match scale {
        Scale::Decimal(power) => (power, 1),
        Scale::Binary(power) => (0, 1u128 << power),
    };
    let digits = Digits { whole, fraction };
    let Some(first) = digits.first_nonzero() else {
        return 0;
    };
    let point = i64::try_from(whole.len()).unwrap_or(i64::MAX) + shift;
    let integer = digits.integer(first, point, factor);
    if integer >= CAP {
        return CAP * NANOS.unsigned_abs();
    }
    let fraction = digits.fraction(point, factor * NANOS.unsigned_abs());
    (integer * NANOS.unsigned_abs() + fraction).min(CAP * NANOS.unsigned_abs())
}

/// The digits of a number before and after its decimal point.
struct Digits<'a> {
    whole: &'a [u8],
    fraction: &'a [u8],
}

impl Digits<'_> {
    fn len(&self) -> i64 {
        i64::try_from(self.whole.len() + self.fraction.len()).unwrap_or(i64::MAX)
    }

    /// The digit at `index`, counted from the first; 0 beyond either end.
    fn at(&self, index: i64) -> u128 {
        let Ok(index) = usize::try_from(index) else {
            return 0;
        };
        let digit = match index.checked_sub(self.whole.len()) {
            None => self.whole.get(index),
            Some(index) => self.fraction.get(index),
        };
        digit.map_or(0, |digit| u128::from(digit - b'0'))
    }

    fn first_nonzero(&self) -> Option<i64> {
        let mut digits = self.whole.iter().chain(self.fraction);
        let index = digits.position(|digit| *digit != b'0')?;
        i64::try_from(index).ok()
    }

    /// The digits from `first` up to `point` times `factor`, at most about [`CAP`] more than it.
    fn integer(&self, first: i64, point: i64, factor: u128) -> u128 {
        let mut value = 0;
        for index in first..point {
            value = value * 10 + self.at(index) * factor;
            if value >= CAP {
                return CAP;
            }
        }
        value
    }

    /// The digits from `point` on times `unit`, rounded up.
    fn fraction(&self, point: i64, unit: u128) -> u128 {
        let mut inexact = false;
        let mut value = 0;
        // A number smaller than one billionth is rounded up to one billionth.
        let start = point.max(-NANO_DIGITS - 1);
        for index in (start..self.len()).rev() {
            value += self.at(index) * unit;
            inexact |= !value.is_multiple_of(10);
            value /= 10;
        }
        if start > point {
            return 1;
        }
        value + u128::from(inexact)
    }
}

impl fmt::Display for Quantity {
    /// As a decimal number without a suffix: `0.5`, `6000`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.nanos < 0 { "-" } else { "" };
        let magnitude = self.nanos.unsigned_abs();
        let (whole, nanos) = (
            magnitude / NANOS.unsigned_abs(),
            magnitude % NANOS.unsigned_abs(),
        );
        if nanos == 0 {
            return write!(f, "{sign}{whole}");
        }
        let fraction = format!("{nanos:09}");
        write!(f, "{sign}{whole}.{}", fraction.trim_end_matches('0'))
    }
}

/// An unchecked quantity from a manifest: an integer or a string.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum RawQuantity {
    /// `value: 4000`
    Integer(i64),
    /// `value: "0.5"`, `value: 5Gi`
    Text(String),
}

impl RawQuantity {
    /// Parses the quantity.
    ///
    /// # Errors
    /// The text is not a quantity.
    pub fn parse(&self) -> Result<Quantity, QuantityError> {
        match self {
            Self::Integer(value) => Ok(Quantity::from_integer(*value)),
            Self::Text(text) => text.parse(),
        }
    }
}

#[cfg(test)]
#[path = "quantity_tests.rs"]
mod tests;
