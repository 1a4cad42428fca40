//! Durations on the command line: `200ms`, `1m30s`, `2h`.

use std::time::Duration;

use jiff::SignedDuration;

/// A duration above zero.
pub(super) fn positive(text: &str) -> Result<Duration, String> {
    let parsed: SignedDuration = text
        .parse()
        .map_err(|_| "write a number with a unit, such as 200ms, 10s or 1m30s".to_owned())?;
    match Duration::try_from(parsed) {
        Ok(duration) if duration > Duration::ZERO => Ok(duration),
        _ => Err("must be more than zero".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_written_as_in_go() {
        for (text, millis) in [
            ("200ms", 200),
            ("1m30s", 90_000),
            ("1.5s", 1500),
            ("2h", 7_200_000),
        ] {
            assert_eq!(positive(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "10", "0s", "-1s", "fast", "1x"] {
            assert!(positive(text).is_err(), "{text}");
        }
    }
}
