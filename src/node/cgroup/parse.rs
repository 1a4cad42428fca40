//! Parsers for cgroup files that do not allocate.
//!
//! The kernel ends every line with a newline, so a line without one was truncated and is ignored. Text that is
//! empty, truncated, has extra fields or overflows gives `None`, never a guess and never 0.

use crate::engine::units::{MilliCpu, Quota};

/// The complete lines of `text`, without newlines. Text after the last newline was truncated and is left out.
pub fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let end = text.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    let has_line = end > 0 || text.first() == Some(&b'\n');
    text[..end]
        .split(|byte| *byte == b'\n')
        .filter(move |_| has_line)
}

/// The fields of a line, separated by blanks.
pub fn fields(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(u8::is_ascii_whitespace)
        .filter(|field| !field.is_empty())
}

/// A number of decimal digits only.
pub fn unsigned(field: &[u8]) -> Option<u64> {
    if field.is_empty() {
        return None;
    }
    field.iter().try_fold(0_u64, |number, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        number.checked_mul(10)?.checked_add(digit)
    })
}

/// A decimal fraction: finite and not negative.
pub fn fraction(field: &[u8]) -> Option<f64> {
    let text = std::str::from_utf8(field).ok()?;
    let plain = text
        .bytes()
        .all(|byte| byte.is_ascii_digit() || byte == b'.');
    let number: f64 = plain.then(|| text.parse().ok())??;
    number.is_finite().then_some(number)
}

/// The file's only line.
fn only_line(text: &[u8]) -> Option<&[u8]> {
    let line = text.strip_suffix(b"\n")?;
    (!line.contains(&b'\n')).then_some(line)
}

/// The content of a file with a single number.
pub fn number(text: &[u8]) -> Option<u64> {
    unsigned(only_line(text)?)
}

/// The values of `keys` in a file of `key value` lines, in the order of `keys`.
pub fn keyed<const N: usize>(text: &[u8], keys: [&[u8]; N]) -> [Option<u64>; N] {
    let mut values = [None; N];
    for line in lines(text) {
        let mut fields = fields(line);
        let (Some(key), Some(value), None) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        if let Some(index) = keys.iter().position(|wanted| *wanted == key) {
            values[index] = values[index].or_else(|| unsigned(value));
        }
    }
    values
}

/// A CPU bandwidth limit: microseconds of run time per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bandwidth {
    /// Microseconds of run time per period; `None`: no limit.
    pub quota: Option<u64>,
    /// Length of the period in microseconds, greater than 0.
    pub period: u64,
}

impl Bandwidth {
    /// The equivalent CPU amount, rounded down.
    pub fn limit(self) -> Quota {
        self.quota.map_or(Quota::Unlimited, |quota| {
            let milli = u128::from(quota) * 1000 / u128::from(self.period.max(1));
            Quota::Limit(MilliCpu(u64::try_from(milli).unwrap_or(u64::MAX)))
        })
    }
}

/// `cpu.max` of cgroup v2: `max 100000` or `50000 100000`.
pub fn cpu_max(text: &[u8]) -> Option<Bandwidth> {
    let mut fields = fields(only_line(text)?);
    let (quota, period, end) = (fields.next()?, fields.next()?, fields.next());
    if end.is_some() {
        return None;
    }
    let quota = match quota {
        b"max" => None,
        limit => Some(unsigned(limit)?),
    };
    let period = unsigned(period).filter(|period| *period > 0)?;
    Some(Bandwidth { quota, period })
}

/// `cpu.cfs_quota_us` of cgroup v1: microseconds, or `-1` for no limit (the inner `None`).
pub fn cfs_quota(text: &[u8]) -> Option<Option<u64>> {
    match only_line(text)? {
        b"-1" => Some(None),
        limit => unsigned(limit).map(Some),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_number_is_only_digits_and_a_newline() {
        assert_eq!(number(b"0\n"), Some(0));
        assert_eq!(number(b"18446744073709551615\n"), Some(u64::MAX));
        let bad: [&[u8]; 9] = [
            b"",
            b"\n",
            b"12",
            b"12 13\n",
            b"12\n13\n",
            b"-1\n",
            b"+1\n",
            b"0x1\n",
            b"18446744073709551616\n",
        ];
        for text in bad {
            assert_eq!(number(text), None, "{}", text.escape_ascii());
        }
    }

    #[test]
    fn keys_match_whole_words_on_complete_lines() {
        let text = b"usage_usec 12\nusage 7 8\nnr_periods x\nnr_throttled 4\nlast 5";
        assert_eq!(
            keyed(
                text,
                [
                    b"usage_usec",
                    b"usage",
                    b"nr_periods",
                    b"nr_throttled",
                    b"last"
                ]
            ),
            [Some(12), None, None, Some(4), None]
        );
    }

    #[test]
    fn a_limit_is_quota_over_period_rounded_down() {
        let limit = |text: &[u8]| cpu_max(text).map(Bandwidth::limit);
        assert_eq!(limit(b"max 100000\n"), Some(Quota::Unlimited));
        assert_eq!(limit(b"1999 100000\n"), Some(Quota::Limit(MilliCpu(19))));
        assert_eq!(
            limit(b"400000 100000\n"),
            Some(Quota::Limit(MilliCpu(4000)))
        );
        let bad: [&[u8]; 7] = [
            b"",
            b"max\n",
            b"max 0\n",
            b"max 100000",
            b"-1 100000\n",
            b"1 2 3\n",
            b"99999999999999999999 100000\n",
        ];
        for text in bad {
            assert_eq!(cpu_max(text), None, "{}", text.escape_ascii());
        }
        assert_eq!(cfs_quota(b"-1\n"), Some(None));
        assert_eq!(cfs_quota(b"5000\n"), Some(Some(5000)));
        assert_eq!(cfs_quota(b"-2\n"), None);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_do_not_panic(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (number(&text), cpu_max(&text), cfs_quota(&text), fraction(&text));
            let _ = keyed(&text, [b"usage_usec", b"cache"]);
            prop_assert!(lines(&text).all(|line| !line.contains(&b'\n')));
        }

        #[test]
        fn every_u64_is_parsed(value: u64) {
            prop_assert_eq!(number(format!("{value}\n").as_bytes()), Some(value));
            let cut = format!("{value}");
            prop_assert_eq!(number(cut.as_bytes()), None);
        }
    }
}
